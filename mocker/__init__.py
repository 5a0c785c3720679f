"""Simulate LLM serving engines without a GPU.

Three ways of use, one engine: replay a trace through a cluster (`simulate`, `run_trace_replay`), drive an engine
core pass by pass (`VllmCore`), or benchmark schedulers, caches and routers on fixed workloads.
"""
from importlib import import_module
from typing import TYPE_CHECKING

from ._hash import compute_block_hash_for_seq
from ._manager import KvManager
from ._spec import SpeculativeDecodeSampler
from ._version import __version__
from .args import DirectRequest, MockEngineArgs, ReasoningConfig, SglangArgs, TrtllmArgs
from .collector import TraceCollector
from .commands import SchedulerCommand, SchedulerCommandEffects
from .engine import (
    AdmissionEvent,
    EnginePassResult,
    ForwardPassSnapshot,
    MockerMetrics,
    OutputSignal,
    RequestState,
    RequestStatus,
    SchedulerState,
    VllmCore,
    create_engine_core,
)
from .formats import TraceError
from .formats.stream import TraceStream
from .replay import (
    PlannerReplayBridge,
    RunningSimulation,
    Snapshot,
    SyntheticSpec,
    open_simulation,
    run_synthetic_trace_replay,
    run_trace_replay,
    simulate,
)
from .router_config import KvRouterConfig
from .sequence import ActiveSequence, MoveBlock, PositionalLineageHash, PrefillCost, UniqueBlock
from .sglang import SglangCore
from .simulation import Simulation
from .synthetic_trace import SyntheticTraceSpec
from .timeline import Recording
from .trace import Trace, sample_trace_path

if TYPE_CHECKING:
    from .search.optimize import optimize, pareto_front
    from .search.rate import highest_rate
    from .search.space import Between
    from .sweeps import SweepTable, sweep

__all__ = [
    "ActiveSequence", "AdmissionEvent", "Between", "DirectRequest", "EnginePassResult", "ForwardPassSnapshot",
    "KvManager", "KvRouterConfig", "MockEngineArgs", "MockerMetrics", "MoveBlock", "OutputSignal",
    "PlannerReplayBridge", "PositionalLineageHash", "PrefillCost", "ReasoningConfig", "Recording", "RequestState",
    "RequestStatus", "SchedulerCommand", "SchedulerCommandEffects", "SchedulerState", "SglangArgs", "SglangCore",
    "RunningSimulation", "Simulation", "Snapshot", "SpeculativeDecodeSampler", "SweepTable", "SyntheticSpec",
    "SyntheticTraceSpec", "Trace", "TraceCollector", "TraceError", "TraceStream", "TrtllmArgs", "UniqueBlock",
    "VllmCore", "__version__", "compute_block_hash_for_seq", "create_engine_core", "highest_rate", "open_simulation",
    "optimize", "pareto_front", "run_synthetic_trace_replay", "run_trace_replay", "sample_trace_path", "simulate",
    "sweep",
]

_ON_USE = {"Between": "search", "highest_rate": "search", "optimize": "search", "pareto_front": "search",
           "SweepTable": "sweeps", "sweep": "sweeps"}
"""Names of packages that a replay does not need, which are imported when they are first asked for."""


def __getattr__(name: str) -> object:
    if name not in _ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_ON_USE[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
