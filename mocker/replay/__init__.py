"""Replays of workloads through a simulated cluster; ``python -m mocker.replay`` is the command line."""
from .._watch import NOTE as PASS_METRICS
from ..workload import SyntheticSpec
from .api import run_synthetic_trace_replay, run_trace_replay, simulate
from .bridge import PlannerReplayBridge
from .live import RunningSimulation, Snapshot, open_simulation
from .planner import Planner, ScalingEvent

__all__ = ["PASS_METRICS", "Planner", "PlannerReplayBridge", "RunningSimulation", "ScalingEvent", "Snapshot",
           "SyntheticSpec", "open_simulation", "run_synthetic_trace_replay", "run_trace_replay",
           "simulate"]
