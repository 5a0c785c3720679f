"""Replays: a workload through a simulated cluster, to a report.

`run_trace_replay` and `run_synthetic_trace_replay` take the reference's keywords and return its report;
`simulate` returns a `Simulation` with the report and a column per request field. Answers to the reference's
`replay/entrypoints.rs` and `replay/validate.rs`.
"""
from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .._cluster import Cluster
from .._disagg import DisaggCluster
from .._report import report_of, report_of_run
from .._sglang_engine import SglangEngine
from .._version import __version__
from ..args import MockEngineArgs
from ..collector import TERMINAL_NAMES, Columns, Report, Sla, assemble_report
from ..engine import engine_hooks
from ..formats.stream import TraceStream
from ..offload import offload_columns, offload_report
from ..provenance import arguments_of
from ..router_config import KvRouterConfig
from ..simulation import Simulation
from ..timeline import Recording, Timeline
from ..timing import with_blocks
from ..trace import Trace
from ..workload import SyntheticSpec, Workload, from_synthetic, from_trace
from .fast import FastPaths, fast_paths
from .lanes import run_lanes
from .planner import DECODE, PREFILL, Planner, Planning
from .pools import Pools, Routing, make_cluster, with_prefill_loads
from .stream import Drain, RowStream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..synth import Recipe

Progress = Callable[[int, int, float], None]
PathLike = str | os.PathLike[str]
SLICE_PASSES = 1_000_000           # passes between two looks at signals and progress
STREAM_PASSES = 50_000             # the same when requests are written as they end
LANE_ROWS = 8192                   # requests after which the next worker's lane has its turn: what caches hold of rows
ALL = slice(None)
WAITS_FOR = {0: "a worker", 1: "room in the KV pool or a free place to run", 2: "budget to compute its next tokens",
             3: "room in the KV pool to resume", 7: "its blocks from a lower storage tier"}


@dataclass
class Run:
    """A finished replay before it is reported."""

    cluster: Cluster
    workload: Workload
    pools: Pools
    wall_time_ms: float
    planning: Planning | None = None

    @property
    def alone(self) -> bool:
        """One aggregated worker: there is nothing to say of workers."""
        return self.pools.workers == 1 and self.pools.prefill_args is None and self.planning is None

    def admissions(self, rows: Any) -> dict[str, NDArray[Any]]:
        """The collector's columns; in disaggregation the first admission is that of the prefill pool."""
        columns: dict[str, NDArray[Any]] = self.cluster.collector.columns
        if rows is not ALL or isinstance(self.cluster, DisaggCluster):
            columns = {name: column[rows] for name, column in columns.items()}
        if isinstance(self.cluster, DisaggCluster):
            first = self.cluster.prefill_collector.columns
            columns["first_admit_ms"] = first["first_admit_ms"][rows]
            columns["first_reused_input_tokens"] = first["first_reused_input_tokens"][rows]
            columns["reused_input_tokens"] = np.maximum(columns["reused_input_tokens"],
                                                        first["reused_input_tokens"][rows])
        return columns


def _integer(name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if value >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {value}")
    return int(value)


def _refuse(**options: Any) -> None:
    """Options of the reference that are not here yet: say so instead of ignoring them."""
    for name, (value, neutral) in options.items():
        if value not in neutral:
            raise ValueError(f"{name}={value!r} is not supported yet; leave it at its default")


def _run(workload: Workload, pools: Pools, concurrency: int | None, cap_ms: float | None, routing: Routing,
         progress: Progress | None, fast: FastPaths, recording: Recording | None, watch: Any,
         planning: Planning | None, compat: str | None, exact_gaps: int | None, stream: RowStream | None,
         threads: int) -> Run:
    began = time.perf_counter()
    n = len(workload)
    # Not where somebody who keeps a state of his own would be asked for the same things twice.
    anew = (workload.growing is not None and planning is None and watch is None and stream is None
            and isinstance(routing.mode, str) and engine_hooks(pools.args) == (None,) * 3)
    cluster, coupled = set_up(workload, pools, cap_ms, routing, fast, recording, planning, concurrency is not None,
                              compat, anew, True)
    if exact_gaps is not None:
        cluster.collector.keep_gaps(exact_gaps)
    run = Run(cluster, workload, pools, 0.0, planning)
    drain = None if stream is None else Drain(stream, n, cluster, partial(run_columns, run), partial(_kept, run))
    passes = SLICE_PASSES if watch is None else watch.passes
    if drain is not None:
        passes = min(passes, STREAM_PASSES)

    def look() -> None:
        if watch is not None:
            watch(cluster, workload.limit)
        if drain is not None:
            drain.ended()
        if progress is not None:
            progress(cluster.ended, n, cluster.last_timestamp())

    if concurrency is None and workload.is_single and not coupled and fast.lanes:
        cluster.set_order()
        alone = watch is not None or recording is not None or drain is not None
        run_lanes(cluster, pools.workers, passes, range(LANE_ROWS, n + LANE_ROWS, LANE_ROWS), 1 if alone else threads,
                  look, None if drain is None else look)
    else:
        set_links(cluster, workload, concurrency)
        if exact_gaps is None and free_rows(cluster, pools, concurrency, planning):
            cluster.split_gaps()             # workers may run ahead of each other
        while not cluster.run_coupled(passes):
            look()
    cluster.finish_below(cluster.last_timestamp())
    cluster.join_gaps()
    cluster.flush()
    if drain is not None:
        drain.rest(cluster.arrival_of)
    if progress is not None:
        progress(cluster.ended, n, cluster.last_timestamp())
    run.wall_time_ms = (time.perf_counter() - began) * 1000.0
    return run


def _kept(run: Run, rows: Any) -> dict[str, NDArray[Any]]:
    """Columns of `mocker.collector.Columns` of some requests."""
    c, w = run.admissions(rows), run.workload
    return {"arrival": run.cluster.arrival_of[rows], "first_admit": c["first_admit_ms"],
            "first_token": c["first_token_ms"], "second_gap": c["ttst_ms"], "last_token": c["last_token_ms"],
            "input_length": w.prompt[rows], "output_length": w.limit[rows], "output_tokens": c["output_tokens"],
            "reused": c["reused_input_tokens"], "first_reused": c["first_reused_input_tokens"],
            "terminal": c["terminal"]}


def set_up(workload: Workload, pools: Pools, cap_ms: float | None, routing: Routing, fast: FastPaths,
           recording: Recording | None, planning: Planning | None, closed: bool,
           compat: str | None, anew: bool = False, complete: bool = False) -> tuple[Cluster, bool]:
    """The cluster of a replay that has not begun, as `make_cluster`.

    `anew`: it may begin again with tokens. `complete`: the workload's requests are all that will come.
    """
    cached = pools.args.enable_prefix_caching or pools.args.engine_type == "sglang"    # whose tree is always on
    split = pools.prefill_args is not None      # its prefill workers make planned answers to their ends
    growing = workload.growing is not None and (
        not anew or split or workload.cancel_after is not None or not workload.growing.unique)
    apart = complete and not split and workload.apart is not None and workload.apart(pools.args.block_size)
    real = growing or (cached and not fast.extents) or (workload.planned and (cached or split) and not apart)
    if real and workload.tokens is None:
        raise ValueError("this workload has no tokens to replay with")
    cluster, coupled = make_cluster(pools, workload, routing, cap_ms=cap_ms, real_tokens=real, fast=fast,
                                    planning=planning, compat=compat)
    if recording is not None:
        span = 0.0 if closed or len(workload) == 0 else float(np.nanmax(workload.arrival, initial=0.0))
        cluster.record(recording.recorder(len(cluster.engines), span))
    return cluster, coupled


def set_links(cluster: Cluster, workload: Workload, concurrency: int | None) -> None:
    """Feed a cluster with a workload, each request when those that it waits for have ended."""
    cluster.set_links(*workload.links(), workload.delays(), concurrency or 0)


def free_rows(cluster: Cluster, pools: Pools, concurrency: int | None, planning: Planning | None) -> bool:
    """Whether workers may run ahead of each other, so that each needs a gap log of its own."""
    alone = pools.args.engine_type == "sglang" or (concurrency is None and cluster.lag > 0.0)
    return alone and planning is None and pools.workers > 1


def run_report(run: Run, sla: Sla, compat: str | None, stream: RowStream | None = None) -> Report:
    cluster, pools, w = run.cluster, run.pools, run.workload
    seconds = cluster.last_timestamp() / 1000.0
    worked = pools.prefill_workers * seconds, pools.workers * seconds
    if run.planning is not None:
        worked = cluster.team(PREFILL)[2], cluster.team(DECODE)[2]
    prefill = pools.prefill_args
    provision: dict[str, Any] = {
        "decode_worker_seconds": None if run.alone else worked[DECODE], "prefill_worker_seconds": worked[PREFILL],
        "decode_gpus": pools.args.aic_gpus_per_worker(),
        "prefill_gpus": 0 if prefill is None else prefill.aic_gpus_per_worker(), "wall_time_ms": run.wall_time_ms,
        "compat": compat}
    if stream is not None:
        report = report_of(stream.rows, stream.totals, stream.distributions(), *cluster.collector.gap_statistics(),
                           goodput=sla.is_set, **provision)
    elif isinstance(cluster, DisaggCluster):
        report = assemble_report(Columns(**_kept(run, ALL)), *cluster.collector.gap_statistics(), sla=sla, **provision)
    else:
        report = report_of_run(cluster, w.prompt, w.limit, sla.bounds, **provision)
    if cluster.collector.sketched:
        report["sketched"] = ["itl_ms", "output_token_throughput_per_user"]
    if stream is not None and stream.sketched():
        report["sketched"] = [*stream.sketched(), *report.get("sketched", [])]
    if compat is None:
        report["clamped_requests"] = cluster.clamped
        if pools.args.engine_type == "sglang":
            books = [engine.counts for engine in cluster.engines if isinstance(engine, SglangEngine)]
            for name in ("leaked_tokens", "double_freed_tokens"):
                report[name] = sum(counts[name] for counts in books) + cluster.departed.get(name, 0)
        if cluster.offload is not None:
            report["offload"] = offload_report(cluster.offload, pools.args.block_size, cluster.last_timestamp())
        if cluster.stalled:
            report["stalled"] = [_stuck(run, *entry) for entry in cluster.unfinished()]
            at_work = {entry["row"] for entry in report["stalled"]}
            left = np.flatnonzero(~np.isnan(cluster.arrival_of) & (cluster.collector.columns["terminal"] == 0))
            report["stalled"] += [_stuck(run, int(row), -1, 0, int(w.prompt[row]), 0, 0) for row in left
                                  if row not in at_work]
        if run.planning is not None:
            report["scaling"] = [asdict(event) for event in run.planning.events]
        if w.trace is not None and len(w.trace.clamped):
            report["shortened_prompts"] = len(w.trace.clamped)
    return report


def _stuck(run: Run, row: int, worker: int, status: int, known: int, computed: int, preemptions: int) -> Report:
    """What the report says of a request that no pass can bring on any more."""
    entry: Report = {"row": row, "worker": worker, "known_tokens": known, "computed_tokens": computed,
                     "preemptions": preemptions, "waits_for": WAITS_FOR.get(status, "its hand-off")}
    trace = run.workload.trace
    if trace is not None and trace.request_ids is not None:
        entry["request_id"] = trace.request_ids[row]
    return entry


def run_columns(run: Run, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Per-request columns of some requests, in arrays of their own."""
    n = len(run.cluster.arrival_of)
    some: Any = slice(None) if len(rows) == n and np.array_equal(rows, np.arange(n)) else rows     # views, copied below
    c, w = run.admissions(some), run.workload
    arrival, first, last = run.cluster.arrival_of[some], c["first_token_ms"], c["last_token_ms"]
    tokens = c["output_tokens"]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_gap = np.where(tokens > 1, np.maximum(last - first, 0.0) / (tokens - 1), np.nan)
    none = np.full(len(rows), -1, np.int32)
    out: dict[str, NDArray[Any]] = {"row": rows}
    trace = w.trace
    if trace is not None and trace.request_ids is not None:
        out["request_id"] = _objects([trace.request_ids[row] for row in rows.tolist()])
    if trace is not None and (w.session is not None or trace.session_ids is not None) and not run.alone:
        names, sessions = trace.session_ids, trace.session[rows].tolist()
        out["session_id"] = _objects([f"session_{s}" if names is None else names[s] for s in sessions])
        out["turn_index"] = trace.turn[rows]
    out.update(
        arrival_time_ms=arrival, first_admit_ms=c["first_admit_ms"], first_token_ms=first, last_token_ms=last,
        ttft_ms=np.maximum(first - arrival, 0.0), ttst_ms=c["ttst_ms"],
        e2e_latency_ms=np.maximum(last - arrival, 0.0), itl_ms=mean_gap, input_length=w.prompt[some],
        output_length=w.limit[some], output_tokens=tokens, reused_input_tokens=c["reused_input_tokens"],
        prefill_worker_idx=none, decode_worker_idx=none if run.alone else _served_by(run, some))
    if isinstance(run.cluster, DisaggCluster):
        out.update(_handoff_columns(run.cluster, rows))
    if run.cluster.offload is not None:
        out.update(offload_columns(run.cluster.offload, run.pools.args.block_size, rows))
    out["terminal_status"] = np.array(TERMINAL_NAMES, object)[c["terminal"]]
    return {name: column if column.base is None else column.copy() for name, column in out.items()}


def _served_by(run: Run, rows: Any) -> NDArray[np.int32]:
    """Numbers of the workers, in a pool of their own those of it, that requests went to; -1 for none."""
    served_by: NDArray[np.int32] = run.cluster.worker_of[rows]
    if run.planning is not None:               # whose workers of the two roles come in any order
        served_by = np.append(run.cluster.numbers, np.int32(-1))[served_by]
    return served_by


def arrived_rows(run: Run) -> NDArray[np.int64]:
    """Rows of the requests that arrived."""
    return np.flatnonzero(~np.isnan(run.cluster.arrival_of))


def _objects(values: list[Any]) -> NDArray[Any]:
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _handoff_columns(cluster: DisaggCluster, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """What disaggregation adds; NaN and -1 where a request did not get so far."""
    prefill, decode = cluster.prefill_collector.columns, cluster.collector.columns
    details = {name: column[rows] for name, column in cluster.details.items()}
    admitted = ~np.isnan(prefill["first_admit_ms"][rows])
    reserved = ~np.isnan(decode["first_admit_ms"][rows])
    return {
        "prefill_worker_idx": details["prefill_worker_idx"],
        "reused_input_tokens": np.where(admitted, prefill["reused_input_tokens"][rows],
                                        decode["reused_input_tokens"][rows]),
        "prefill_admit_ms": prefill["first_admit_ms"][rows], "source_held_ms": details["source_held_ms"],
        "destination_reserved_ms": details["destination_reserved_ms"],
        "destination_activated_ms": details["destination_activated_ms"],
        "decode_admit_ms": decode["first_admit_ms"][rows], "source_released_ms": details["source_released_ms"],
        "decode_reused_input_tokens": np.where(reserved, decode["reused_input_tokens"][rows], -1),
        "prefill_route_overlap_tokens": details["prefill_route_overlap_tokens"],
        "decode_route_overlap_tokens": details["decode_route_overlap_tokens"]}


def _load(workload: Any, call: Mapping[str, Any]) -> Trace:
    if isinstance(workload, TraceStream):
        raise TypeError("a TraceStream is replayed by mocker.simulate; load the trace for anything else")
    if not isinstance(workload, (Trace, str, os.PathLike)):
        from ..synth import Recipe  # most replays have none, and need not load what makes traces

        if isinstance(workload, Recipe):
            workload = workload.trace()
    block_size = call["trace_block_size"]
    if isinstance(workload, Trace):
        if block_size is not None and block_size != workload.block_size:
            raise ValueError(f"trace_block_size {block_size} does not match the trace's own {workload.block_size}")
        return workload
    files = [workload] if isinstance(workload, (str, os.PathLike)) else list(workload)
    if not files:
        raise ValueError("trace replay requires at least one trace file")
    sharing = call["trace_shared_prefix_ratio"], call["trace_num_prefix_groups"]
    shared: dict[str, Any] = {} if sharing == (0.0, 0) else {
        "shared_prefix_ratio": sharing[0], "num_prefix_groups": sharing[1]}
    return Trace.load(files, call["trace_format"], block_size, call["on_short_hash_ids"], **shared,
                      **(call["trace_options"] or {}))


def _pools(extra: MockEngineArgs | None, prefill: MockEngineArgs | None, decode: MockEngineArgs | None, workers: int,
           prefill_workers: int, decode_workers: int) -> Pools:
    """One pool, or two; refuses arguments of both."""
    for name, args in (("extra_engine_args", extra), ("prefill_engine_args", prefill), ("decode_engine_args", decode)):
        if args is not None and not isinstance(args, MockEngineArgs):
            raise TypeError(f"{name} must be MockEngineArgs, got {type(args).__name__}")
    if extra is not None and (prefill is not None or decode is not None):
        raise ValueError("extra_engine_args cannot be combined with prefill_engine_args/decode_engine_args")
    if (prefill is None) != (decode is None):
        raise ValueError("prefill_engine_args and decode_engine_args must be provided together")
    if prefill is None or decode is None:
        if prefill_workers != 1 or decode_workers != 1:
            raise ValueError("num_prefill_workers and num_decode_workers are only used for disagg replay; use "
                             "num_workers for aggregated replay")
        return Pools(with_blocks(MockEngineArgs() if extra is None else extra), _integer("num_workers", workers, 1))
    if workers != 1:
        raise ValueError("num_workers is only used for aggregated replay; use num_prefill_workers and "
                         "num_decode_workers for disagg replay")
    return Pools(with_blocks(decode), _integer("num_decode_workers", decode_workers, 1), with_blocks(prefill),
                 _integer("num_prefill_workers", prefill_workers, 1))


def prepare_pools(call: Mapping[str, Any], routing: Routing, planned: bool) -> tuple[Pools, int | None, Routing]:
    """Check the arguments of a replay other than its workload.

    Parameters
    ----------
    call : mapping
        The arguments of `simulate`, by name.
    routing : Routing
        Theirs.
    planned : bool
        The number of workers may change.

    Returns
    -------
    pools : Pools
    concurrency : int or None
    routing : Routing
        With an estimator of prefill times where one is wanted.

    Raises
    ------
    ValueError, TypeError
        A bad argument.
    """
    compat, mode, cap_ms = call["compat"], call["replay_mode"], call["max_sim_time_ms"]
    if compat not in (None, "reference"):
        raise ValueError(f"compat must be None or 'reference', got {compat!r}")
    if mode not in ("offline", "online"):
        raise ValueError(f"replay_mode must be either 'offline' or 'online', got {mode!r}")
    _refuse(replay_mode=(mode, ("offline",)))
    routing = with_prefill_loads(routing, call["aic_perf_config"])
    pools = _pools(call["extra_engine_args"], call["prefill_engine_args"], call["decode_engine_args"],
                   call["num_workers"], call["num_prefill_workers"], call["num_decode_workers"])
    concurrency = call["replay_concurrency"]
    if concurrency is not None:
        concurrency = _integer("replay_concurrency", concurrency, 1)
    if cap_ms is not None and not (math.isfinite(cap_ms) and cap_ms >= 0):
        raise ValueError(f"max_sim_time_ms must be a finite, non-negative value, got {cap_ms}")
    pools.check(concurrency is not None, "" if planned else routing.mode)
    return pools, concurrency, routing


def prepare(call: Mapping[str, Any], routing: Routing, planned: bool) -> tuple[Workload, Pools, int | None, Routing]:
    """Check the arguments of a replay; the workload, pools, concurrency and routing that they come to.

    Parameters and errors as of `prepare_pools`, and what `run_trace_replay` raises.
    """
    pools, concurrency, routing = prepare_pools(call, routing, planned)
    closed, speedup, workload = concurrency is not None, float(call["arrival_speedup_ratio"]), call["workload"]
    if isinstance(workload, SyntheticSpec):
        return (from_synthetic(workload, block_size=pools.args.block_size, closed_loop=closed, speedup=speedup), pools,
                concurrency, routing)
    return from_trace(_load(workload, call), closed_loop=closed, speedup=speedup), pools, concurrency, routing


def _simulate(call: Mapping[str, Any], routing: Routing, sla: Sla) -> tuple[Run, Report]:
    """Replay; `call` has the arguments of `simulate`, by name, `routing` and `sla` are theirs."""
    planner, compat, stream = call["planner"], call["compat"], None
    ready, pools, concurrency, routing = prepare(call, routing, planner is not None)
    exact = None if call["exact_gaps"] is None else _integer("exact_gaps", call["exact_gaps"], 1)
    threads, shortcuts = _integer("threads", call["threads"], 1), fast_paths(call["fast_forward"])
    if call["stream_to"] is not None:
        stream = RowStream(call["stream_to"], exact, compat == "reference", sla)
    begin = partial(_run, ready, pools, concurrency, call["max_sim_time_ms"], routing, call["progress"], shortcuts,
                    call["recording"], call["_watch"], None if planner is None else Planning(planner), compat, exact,
                    stream, threads)
    try:
        run = begin()
    except MemoryError:
        if ready.growing is None or not ready.growing.mute:
            raise
        ready.growing.forget()
        run = begin()
    finally:
        if stream is not None:
            stream.close()
    return run, run_report(run, sla, compat, stream)


def run_trace_replay(trace_files: PathLike | Iterable[PathLike], *, extra_engine_args: MockEngineArgs | None = None,
                     prefill_engine_args: MockEngineArgs | None = None,
                     decode_engine_args: MockEngineArgs | None = None, router_config: KvRouterConfig | None = None,
                     aic_perf_config: Any = None, num_workers: int = 1, num_prefill_workers: int = 1,
                     num_decode_workers: int = 1, replay_concurrency: int | None = None, replay_mode: str = "offline",
                     router_mode: Any = "round_robin", arrival_speedup_ratio: float = 1.0,
                     trace_block_size: int | None = None, trace_format: str = "mooncake",
                     trace_shared_prefix_ratio: float = 0.0, trace_num_prefix_groups: int = 0,
                     report_jsonl_path: PathLike | None = None, max_sim_time_ms: float | None = None,
                     model_name: str | None = None, sla_ttft_ms: float | None = None, sla_itl_ms: float | None = None,
                     sla_e2e_ms: float | None = None, planner_config: Any = None, benchmark_granularity: int = 8,
                     router_tie_break: str = "random", router_seed: int = 0, on_short_hash_ids: str = "error",
                     compat: str | None = None, progress: Progress | None = None) -> Report:
    """Replay a trace file through a cluster and return the report.

    Parameters
    ----------
    trace_files : path or iterable of paths
        A trace file, plain or .gz; several of a `trace_format` that allows it ("dynamo").
    trace_format : str
        A name of `mocker.formats.FORMATS`, or "auto": look at the first row.
    trace_shared_prefix_ratio, trace_num_prefix_groups : float, int
        Share of the first prompts that is common, of format "applied_compute_agentic" only.
    extra_engine_args : MockEngineArgs, optional
        The workers' engine; defaults if None.
    num_workers : int
        Workers.
    prefill_engine_args, decode_engine_args : MockEngineArgs, optional
        In place of `extra_engine_args`, both: two pools, with `worker_type` "prefill" and "decode".
    num_prefill_workers, num_decode_workers : int
        Workers of the two pools.
    router_mode : str, RoutingPolicy or callable
        "round_robin": in turn; "kv_router": by cached blocks and load (needs two workers); or another policy of
        `mocker.router`: "least_requests", "least_tokens", "power_of_two", "prefix_affinity", "random", a function.
    router_config : KvRouterConfig, optional
        Settings of the KV router.
    router_tie_break : {"random", "lowest"}
        Equal scores: one at random, or the lowest worker.
    router_seed : int
        Seed of the router's draws.
    model_name : str, optional
        Selects a profile of the router's policy file.
    replay_concurrency : int, optional
        Closed loop: at most so many requests (sessions) at a time; timestamps are ignored.
    arrival_speedup_ratio : float
        Divides arrival times and think times (open loop).
    trace_block_size : int, optional
        Tokens a hash id stands for; 512 if None.
    report_jsonl_path : path, optional
        Also write a record per ended request, one JSON object a line.
    max_sim_time_ms : float, optional
        No pass starts after this simulated time.
    sla_ttft_ms, sla_itl_ms, sla_e2e_ms : float, optional
        Goodput bounds, ms.
    on_short_hash_ids : {"error", "clamp"}
        What to do with a prompt longer than its hash ids cover: refuse the row, or shorten it as the reference does.
    compat : {"reference"}, optional
        The reference's numbers where ours differ on purpose (see `collector.assemble_report`).
    progress : callable, optional
        ``progress(ended, total, sim_ms)`` now and then.
    aic_perf_config : AicPerfConfig or TimingModel, optional
        How long the KV router expects prefills to take; with `router_prefill_load_model="aic"` in `router_config`.
    replay_mode, planner_config, \
benchmark_granularity
        The reference's; values other than the defaults raise `ValueError` where the feature is not here yet.

    Returns
    -------
    dict
        The report.

    Raises
    ------
    ValueError
        A bad argument, or a bad row: `TraceError`, which names file, line and field.
    OSError
        The file cannot be read.
    """
    given = locals()
    files = [trace_files] if isinstance(trace_files, (str, os.PathLike)) else list(trace_files)
    _refuse(planner_config=(planner_config, (None,)))
    call = _defaults() | given | {"workload": files}
    run, report = _simulate(call, Routing.of(call), Sla.of(call))
    if report_jsonl_path is not None:
        Simulation(report, run_columns(run, arrived_rows(run)), {}).write_report_jsonl(report_jsonl_path)
    return report


def run_synthetic_trace_replay(input_tokens: int, output_tokens: int, request_count: int, *,
                               extra_engine_args: MockEngineArgs | None = None,
                               prefill_engine_args: MockEngineArgs | None = None,
                               decode_engine_args: MockEngineArgs | None = None,
                               router_config: KvRouterConfig | None = None,
                               aic_perf_config: Any = None, num_workers: int = 1, num_prefill_workers: int = 1,
                               num_decode_workers: int = 1, replay_concurrency: int | None = None,
                               replay_mode: str = "offline", router_mode: Any = "round_robin",
                               arrival_speedup_ratio: float = 1.0, arrival_interval_ms: float = 1.0,
                               turns_per_session: int = 1, shared_prefix_ratio: float = 0.0,
                               num_prefix_groups: int = 0, inter_turn_delay_ms: float = 0.0,
                               model_name: str | None = None, sla_ttft_ms: float | None = None,
                               sla_itl_ms: float | None = None, sla_e2e_ms: float | None = None,
                               planner_config: Any = None, benchmark_granularity: int = 8,
                               router_tie_break: str = "random", router_seed: int = 0,
                               compat: str | None = None, progress: Progress | None = None) -> Report:
    """Replay a synthetic workload through a cluster and return the report.

    Parameters
    ----------
    input_tokens, output_tokens, request_count, arrival_interval_ms, turns_per_session, shared_prefix_ratio, \
num_prefix_groups, inter_turn_delay_ms
        The workload; see `SyntheticSpec`.
    extra_engine_args, num_workers, replay_concurrency, arrival_speedup_ratio, sla_ttft_ms, sla_itl_ms, sla_e2e_ms, \
compat, progress
        As in `run_trace_replay`, and so are the remaining ones.

    Returns
    -------
    dict
        The report.

    Raises
    ------
    ValueError
        A bad argument.
    """
    given = locals()
    _refuse(planner_config=(planner_config, (None,)))
    call = _defaults() | given
    routing = Routing.of(call)
    call["workload"] = SyntheticSpec(input_tokens, output_tokens, request_count, arrival_interval_ms,
                                     turns_per_session, shared_prefix_ratio, num_prefix_groups, inter_turn_delay_ms)
    return _simulate(call, routing, Sla.of(call))[1]


@cache
def _defaults() -> dict[str, Any]:
    """Default values of the arguments of `simulate`, by name."""
    return {name: parameter.default for name, parameter in inspect.signature(simulate).parameters.items()}


def simulate(workload: PathLike | Sequence[PathLike] | Trace | TraceStream | SyntheticSpec | Recipe, *,
             extra_engine_args: MockEngineArgs | None = None, prefill_engine_args: MockEngineArgs | None = None,
             decode_engine_args: MockEngineArgs | None = None, router_config: KvRouterConfig | None = None,
             aic_perf_config: Any = None,
             num_workers: int = 1, num_prefill_workers: int = 1, num_decode_workers: int = 1,
             replay_concurrency: int | None = None, replay_mode: str = "offline", router_mode: Any = "round_robin",
             arrival_speedup_ratio: float = 1.0, trace_block_size: int | None = None, trace_format: str = "auto",
             trace_shared_prefix_ratio: float = 0.0, trace_num_prefix_groups: int = 0,
             max_sim_time_ms: float | None = None, model_name: str | None = None, sla_ttft_ms: float | None = None,
             sla_itl_ms: float | None = None, sla_e2e_ms: float | None = None, router_tie_break: str = "random",
             router_seed: int = 0, router_lower_tiers: bool = False, on_short_hash_ids: str = "error",
             compat: str | None = None, progress: Progress | None = None, fast_forward: bool | FastPaths = True,
             recording: Recording | None = None, planner: Planner | None = None,
             trace_options: Mapping[str, Any] | None = None, exact_gaps: int | None = None,
             stream_to: PathLike | None = None, threads: int = 1, _watch: Any = None) -> Simulation:
    """Replay a workload and return the report with a column per request field.

    Parameters
    ----------
    workload : path, sequence of one path, Trace, TraceStream, SyntheticSpec or mocker.synth.Recipe
        What to replay. A `mocker.TraceStream` is read while it is replayed: open loop, one pool, see docs/scale.md.
    fast_forward : bool or FastPaths
        Repeat the clock's additions through passes in which nothing else happens (the default), or run each of
        them, in order; or name the shortcuts. The results are the same to the last bit.
    trace_options : mapping, optional
        Further keywords of `Trace.load` for a trace file: ``on_error``, ``cache`` and the options of its format. Rows
        that were left out are listed in ``Simulation.meta["skipped_rows"]``.
    exact_gaps : int, optional
        Most entries of the log of token gaps to keep, 16 bytes each; None: all, so that every percentile is exact. A
        longer log is sketched: percentiles of ``itl_ms`` and ``output_token_throughput_per_user`` are then within
        2**-13 of themselves, and the report's ``sketched`` says so. With `stream_to` the same goes for the other
        latencies.
    stream_to : path, optional
        Write requests as they end, whole rows at any moment: lines of a file ``*.jsonl`` (one that a killed replay cut
        off has no newline) or parts of a Parquet folder ``*.parquet``. Then `Simulation.per_request` is empty.
    threads : int
        Workers to simulate at the same time where they do not depend on each other: open loop, round robin, single
        requests, without a recording, a stream or a tier that they share. The result is the same, byte for byte.
    router_lower_tiers : bool
        Blocks that a worker's host tier, the disk and the remote store have count in the KV router's score, at
        `host_cache_hit_weight` and `disk_cache_hit_weight` of `router_config`. The reference's replays leave them out.
    recording : Recording, optional
        Record what happens over simulated time, for time series, the HTML report and the pass trace; results do not
        change.
    planner : Planner, optional
        Changes the number of workers while the replay runs, see `mocker.replay.Planner`; `Simulation.scaling` lists
        what it did. Passes are then taken one by one.
    extra_engine_args, num_workers, …
        As in `run_trace_replay`.

    Returns
    -------
    Simulation
        `.report`, `.per_request` and writers.

    Raises
    ------
    ValueError, OSError
        As `run_trace_replay`.
    """
    call = locals()
    if isinstance(workload, TraceStream):
        from .streamed import simulate_stream
        return simulate_stream(workload, call)
    if stream_to is not None and recording is not None:
        raise ValueError("stream_to and recording exclude each other: a recording needs the columns of all requests")
    sla = Sla.of(call)
    run, report = _simulate(call, Routing.of(call), sla)
    return simulation_of(run, report, call, sla, recording, stream_to is not None)


def simulation_of(run: Run, report: Report, call: Mapping[str, Any], sla: Sla, recording: Recording | None,
                  streamed: bool = False) -> Simulation:
    """The finished replay as users get it; `call` has the arguments of `simulate`, by name."""
    args = run.pools.args.copy()               # as they are now

    def meta() -> dict[str, Any]:
        made = {"mocker_version": __version__, "engine_args": args.to_json(), "num_workers": run.pools.workers,
                "replay_concurrency": call["replay_concurrency"],
                "arrival_speedup_ratio": call["arrival_speedup_ratio"], "arguments": arguments_of(simulate, call),
                "sla": {"ttft_ms": sla.ttft_ms, "itl_ms": sla.itl_ms, "e2e_ms": sla.e2e_ms}}
        if run.workload.trace is not None and run.workload.trace.skipped:
            made["skipped_rows"] = [str(error) for error in run.workload.trace.skipped]
        return made

    scaling = [] if run.planning is None else run.planning.events
    columns: Any = {} if streamed else lambda: run_columns(run, arrived_rows(run))
    if recording is None:
        return Simulation(report, columns, meta, scaling=scaling)
    return Simulation(report, columns, meta, timeline_of(run, recording), run.cluster.collector.gap_histogram(),
                      scaling)


def timeline_of(run: Run, recording: Recording) -> Timeline:
    cluster, rows = run.cluster, arrived_rows(run)
    assert cluster.recorder is not None
    decode = "aggregated" if run.pools.prefill_args is None else "decode"
    pools = ["prefill" if role == PREFILL else decode for role in cluster.roles]
    some: Any = ALL if len(rows) == len(run.workload) else rows        # views will do, it looks at once
    c = run.admissions(some)
    requests = {"arrival_time_ms": cluster.arrival_of[some], "first_admit_ms": c["first_admit_ms"],
                "last_token_ms": c["last_token_ms"], "completed": c["terminal"] == 1,
                "input_length": run.workload.prompt[some], "reused_input_tokens": c["reused_input_tokens"],
                "decode_worker_idx": _served_by(run, some)}
    if isinstance(cluster, DisaggCluster):
        handoffs = _handoff_columns(cluster, some)
        requests |= {name: handoffs[name] for name in ("prefill_worker_idx", "reused_input_tokens")}
    return Timeline(cluster.recorder, pools, cluster.capacities(), cluster.last_timestamp(), requests,
                    log=recording.passes > 0)
