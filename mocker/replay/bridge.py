"""`PlannerReplayBridge`: a replay with a planner in the loop, with the reference's constructors."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..args import MockEngineArgs
from ..router_config import KvRouterConfig
from ..trace import Trace
from ..workload import SyntheticSpec
from .api import simulate

if TYPE_CHECKING:
    from ..simulation import Simulation
    from .planner import Planner

__all__ = ["PlannerReplayBridge"]


def _mooncake(trace_file: Any, block_size: int) -> Trace:
    if not isinstance(trace_file, (str, os.PathLike)):
        raise TypeError(f"trace_file must be a path, got {type(trace_file).__name__}")
    return Trace.load(trace_file, "mooncake", block_size)


class PlannerReplayBridge:
    """A replay that asks a planner how many workers there should be.

    Parameters
    ----------
    trace_file : path
        Mooncake JSONL.
    extra_engine_args : MockEngineArgs
        The workers' engine; its `startup_time` (s) is what a new worker takes to start.
    num_workers : int
        Workers in the beginning.
    router_mode, router_config, model_name, arrival_speedup_ratio, trace_block_size, sla_ttft_ms, sla_itl_ms, \
sla_e2e_ms, replay_concurrency, router_tie_break, router_seed
        As in `mocker.run_trace_replay`.

    Attributes
    ----------
    simulation : Simulation or None
        The result with its per-request columns and `scaling`, after `run`.

    Raises
    ------
    ValueError, OSError
        As `mocker.run_trace_replay`.

    Notes
    -----
    Rule: `replay/planner_handle.rs`. Its aggregated replays are those of the event loop also for one worker, and a KV
    router may begin with one worker. Equal to it in every metric and decision point; where the reference panics or
    ticks for ever (no worker is left and none comes), requests wait for a worker, and those that nobody serves within
    1,000 ticks in which nothing happens are reported as stalled.
    """

    def __init__(self, trace_file: str | os.PathLike[str], extra_engine_args: MockEngineArgs, num_workers: int,
                 router_mode: Any = "round_robin", router_config: KvRouterConfig | None = None,
                 model_name: str | None = None, arrival_speedup_ratio: float = 1.0, trace_block_size: int = 512,
                 sla_ttft_ms: float | None = None, sla_itl_ms: float | None = None, sla_e2e_ms: float | None = None,
                 replay_concurrency: int | None = None, *, router_tie_break: str = "random",
                 router_seed: int = 0) -> None:
        self._prepare(_mooncake(trace_file, trace_block_size), extra_engine_args=extra_engine_args,
                      num_workers=num_workers, router_mode=router_mode, router_config=router_config,
                      model_name=model_name, arrival_speedup_ratio=arrival_speedup_ratio, sla_ttft_ms=sla_ttft_ms,
                      sla_itl_ms=sla_itl_ms, sla_e2e_ms=sla_e2e_ms, replay_concurrency=replay_concurrency,
                      router_tie_break=router_tie_break, router_seed=router_seed)

    def _prepare(self, workload: Trace | SyntheticSpec, **options: Any) -> None:
        for name in ("extra_engine_args", "prefill_engine_args", "decode_engine_args"):
            if name in options and not isinstance(options[name], MockEngineArgs):
                raise TypeError(f"{name} must be MockEngineArgs, got {type(options[name]).__name__}")
        self._workload: Trace | SyntheticSpec | None = workload
        self._options = options
        self.simulation: Simulation | None = None

    @classmethod
    def _of(cls, workload: Trace | SyntheticSpec, **options: Any) -> PlannerReplayBridge:
        self = cls.__new__(cls)
        self._prepare(workload, **options)
        return self

    @staticmethod
    def create_disagg(trace_file: str | os.PathLike[str], prefill_engine_args: MockEngineArgs,
                      decode_engine_args: MockEngineArgs, num_prefill_workers: int, num_decode_workers: int,
                      router_mode: Any = "round_robin", router_config: KvRouterConfig | None = None,
                      model_name: str | None = None, arrival_speedup_ratio: float = 1.0, trace_block_size: int = 512,
                      sla_ttft_ms: float | None = None, sla_itl_ms: float | None = None,
                      sla_e2e_ms: float | None = None, replay_concurrency: int | None = None, *,
                      router_tie_break: str = "random", router_seed: int = 0) -> PlannerReplayBridge:
        """Make a bridge for a prefill and a decode pool."""
        return PlannerReplayBridge._of(
            _mooncake(trace_file, trace_block_size), prefill_engine_args=prefill_engine_args,
            decode_engine_args=decode_engine_args, num_prefill_workers=num_prefill_workers,
            num_decode_workers=num_decode_workers, router_mode=router_mode, router_config=router_config,
            model_name=model_name, arrival_speedup_ratio=arrival_speedup_ratio, sla_ttft_ms=sla_ttft_ms,
            sla_itl_ms=sla_itl_ms, sla_e2e_ms=sla_e2e_ms, replay_concurrency=replay_concurrency,
            router_tie_break=router_tie_break, router_seed=router_seed)

    @staticmethod
    def from_synthetic(input_tokens: int, output_tokens: int, request_count: int, extra_engine_args: MockEngineArgs,
                       num_workers: int, router_mode: Any = "round_robin",
                       router_config: KvRouterConfig | None = None, model_name: str | None = None,
                       replay_concurrency: int | None = None, arrival_speedup_ratio: float = 1.0,
                       arrival_interval_ms: float = 1.0, turns_per_session: int = 1, shared_prefix_ratio: float = 0.0,
                       num_prefix_groups: int = 0, inter_turn_delay_ms: float = 0.0, sla_ttft_ms: float | None = None,
                       sla_itl_ms: float | None = None, sla_e2e_ms: float | None = None, *,
                       router_tie_break: str = "random", router_seed: int = 0) -> PlannerReplayBridge:
        """Make a bridge for a synthetic workload (as of `mocker.run_synthetic_trace_replay`)."""
        spec = SyntheticSpec(input_tokens, output_tokens, request_count, arrival_interval_ms, turns_per_session,
                             shared_prefix_ratio, num_prefix_groups, inter_turn_delay_ms)
        return PlannerReplayBridge._of(
            spec, extra_engine_args=extra_engine_args, num_workers=num_workers, router_mode=router_mode,
            router_config=router_config, model_name=model_name, replay_concurrency=replay_concurrency,
            arrival_speedup_ratio=arrival_speedup_ratio, sla_ttft_ms=sla_ttft_ms, sla_itl_ms=sla_itl_ms,
            sla_e2e_ms=sla_e2e_ms, router_tie_break=router_tie_break, router_seed=router_seed)

    @staticmethod
    def from_synthetic_disagg(input_tokens: int, output_tokens: int, request_count: int,
                              prefill_engine_args: MockEngineArgs, decode_engine_args: MockEngineArgs,
                              num_prefill_workers: int, num_decode_workers: int, router_mode: Any = "round_robin",
                              router_config: KvRouterConfig | None = None, model_name: str | None = None,
                              replay_concurrency: int | None = None, arrival_speedup_ratio: float = 1.0,
                              arrival_interval_ms: float = 1.0, turns_per_session: int = 1,
                              shared_prefix_ratio: float = 0.0, num_prefix_groups: int = 0,
                              inter_turn_delay_ms: float = 0.0, sla_ttft_ms: float | None = None,
                              sla_itl_ms: float | None = None, sla_e2e_ms: float | None = None, *,
                              router_tie_break: str = "random", router_seed: int = 0) -> PlannerReplayBridge:
        """Make a bridge for a synthetic workload and a prefill and a decode pool."""
        spec = SyntheticSpec(input_tokens, output_tokens, request_count, arrival_interval_ms, turns_per_session,
                             shared_prefix_ratio, num_prefix_groups, inter_turn_delay_ms)
        return PlannerReplayBridge._of(
            spec, prefill_engine_args=prefill_engine_args, decode_engine_args=decode_engine_args,
            num_prefill_workers=num_prefill_workers, num_decode_workers=num_decode_workers, router_mode=router_mode,
            router_config=router_config, model_name=model_name, replay_concurrency=replay_concurrency,
            arrival_speedup_ratio=arrival_speedup_ratio, sla_ttft_ms=sla_ttft_ms, sla_itl_ms=sla_itl_ms,
            sla_e2e_ms=sla_e2e_ms, router_tie_break=router_tie_break, router_seed=router_seed)

    def run(self, planner: Planner) -> dict[str, Any]:
        """Run the replay to its end and return the report; once only.

        Parameters
        ----------
        planner : Planner
            See `mocker.replay.Planner`. What it raises comes out unchanged, and the run is lost.

        Raises
        ------
        RuntimeError
            The bridge has run before.
        TypeError, KeyError, ValueError
            The planner, or one of its decisions, is not one.
        """
        workload, self._workload = self._workload, None
        if workload is None:
            raise RuntimeError("this bridge has been finalized: it runs once; make another one")
        self.simulation = simulate(workload, planner=planner, **self._options)
        return self.simulation.report
