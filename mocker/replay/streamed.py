"""Replays of a trace that is read on the way: open loop, one pool, in memory that does not grow with the trace.

A request has a row in the columns from when it is read until it has ended and is written or counted; then another one
gets the row. Workers in turn run one by one as in any such replay (`run_lanes`); one that does not know its next
request waits for the next block of the file. With a router the event loop goes as far as just before the last request
that is known.
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _live
from .._intern import Interned
from ..collector import Sla
from ..formats.stream import TraceStream
from ..trace import TraceError
from ..workload import Workload, check_speedup
from .api import (
    LANE_ROWS,
    SLICE_PASSES,
    STREAM_PASSES,
    Run,
    _integer,
    _kept,
    prepare_pools,
    run_columns,
    run_report,
    set_up,
    simulation_of,
)
from .fast import fast_paths
from .pools import Routing, output_limits
from .stream import BATCH_ROWS, RowStream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._cluster import Cluster
    from ..args import MockEngineArgs
    from ..collector import Report
    from ..simulation import Simulation
    from ..trace import Trace
    from .fast import FastPaths
    from .pools import Pools

# Arguments of `mocker.simulate` that only make sense for a trace that is there, and what they may be.
_NEEDS_ALL: dict[str, Any] = {
    "prefill_engine_args": None, "decode_engine_args": None, "replay_concurrency": None, "recording": None,
    "planner": None, "trace_options": None, "trace_block_size": None, "trace_format": "auto",
    "trace_shared_prefix_ratio": 0.0, "trace_num_prefix_groups": 0, "on_short_hash_ids": "error", "_watch": None}
FORGET_FROM = 1 << 16              # stretches of prompts below which none is forgotten
_NAN, _ZERO = (("first_admit_ms", "first_token_ms", "ttst_ms", "last_token_ms"),
               ("output_tokens", "reused_input_tokens", "first_reused_input_tokens", "terminal"))


def _nothing() -> Interned:
    empty = np.empty(0, np.int32)
    return Interned(empty, empty, empty)


@dataclass
class _Rows:
    """Columns of the requests that are known and not done, and which rows are free."""

    arrival: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    prompt: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    wanted: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))     # output length of the trace
    limit: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))      # what the engine may make
    number: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))     # of the request; -1: free
    leaf: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    rank: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))       # who goes first at one time
    due: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))        # 0; -1: its end was told
    names: list[str | None] = field(default_factory=list)
    free: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.number)

    def grow(self, n: int) -> None:
        """Room for `n` more."""
        for name, fill in (("arrival", np.nan), ("prompt", 0), ("wanted", 0), ("limit", 0), ("number", -1),
                           ("leaf", -1), ("rank", 0), ("due", 0)):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.full(n, fill, column.dtype))))
        self.names += [None] * n
        self.free = np.concatenate((self.free, np.arange(len(self) - n, len(self))))


class _Feed:
    """Brings the requests of a file to a cluster, and takes those that have ended to a `RowStream`."""

    def __init__(self, blocks: Iterator[Trace], first: Trace, args: MockEngineArgs, speedup: float, run: Run,
                 rows: _Rows, out: RowStream, routed: bool) -> None:
        self._routed = routed
        self._blocks = blocks
        self._args, self._speedup, self._run, self._rows, self._out = args, speedup, run, rows, out
        self.paths = _nothing()
        self._next: Trace | TraceError | None = first
        self._low = float(first.arrival_ms[0])
        self._named = False
        self._few = FORGET_FROM
        self.read = self.shortened = 0
        self.skipped: list[str] = []
        self.paths.sizes(first.block_size, args.block_size)
        run.cluster.open_feed(self.paths)
        self.feed()

    def feed(self) -> None:
        """Read the next block."""
        block, rows = self._next, self._rows
        if isinstance(block, TraceError):      # everything before it has been replayed, as far as anybody could
            raise block
        assert block is not None
        try:
            self._next = next(self._blocks, None)
        except TraceError as error:
            self._next = error
        n = len(block)
        if len(rows.free) < n:
            self._grow(max(n - len(rows.free), len(rows)))
        places, rows.free = np.sort(rows.free[:n]), rows.free[n:]
        with np.errstate(over="ignore", under="ignore"):
            rows.arrival[places] = (block.arrival_ms - self._low + 0.0) / self._speedup
        self._last = float(rows.arrival[places[-1]])
        if not math.isfinite(self._last):
            raise ValueError(f"arrival_speedup_ratio {self._speedup} makes times infinite; choose a larger one")
        rows.prompt[places], rows.wanted[places] = block.input_length, block.output_length
        rows.limit[places] = output_limits(self._args, block.input_length, block.output_length)
        rows.number[places] = np.arange(self.read, self.read + n)
        rows.rank[places] = rows.number[places]
        rows.due[places] = 0
        if block.request_ids is not None:
            self._named = True
        if self._named:
            for place, name in zip(places.tolist(), block.request_ids or [None] * n, strict=True):
                rows.names[place] = name
        self.paths.add(rows.leaf, places, block.hash_offsets, block.hash_ids, block.input_length)
        self.read += n
        self.shortened += len(block.clamped)
        self.skipped += [str(error) for error in block.skipped]
        if self._routed:
            _live.feed(self._run.cluster, places)
        else:
            self._run.cluster.feed(places, self.more)

    @property
    def more(self) -> bool:
        """Whether there are blocks that are not read."""
        return self._next is not None

    @property
    def horizon(self) -> float:
        """Time up to which everything is known, ms."""
        return math.nextafter(self._last, -math.inf) if self.more else math.inf

    def _grow(self, n: int) -> None:
        cluster, rows = self._run.cluster, self._rows
        rows.grow(n)

        def longer(column: NDArray[Any], fill: Any) -> NDArray[Any]:
            return np.concatenate((column, np.full(n, fill, column.dtype)))

        columns = {name: longer(column, np.nan if name in _NAN else 0)
                   for name, column in cluster.collector.columns.items()}
        cluster.use_rows(rows.arrival, rows.prompt, rows.limit, longer(cluster.worker_of, -1),
                         longer(cluster.arrival_of, np.nan), columns)
        if self._routed:
            size = len(rows)
            _live.use_links(cluster, np.zeros(size + 1, np.int64), rows.rank, np.zeros(size), rows.due)
        workload = self._run.workload
        workload.arrival, workload.prompt, workload.limit = rows.arrival, rows.prompt, rows.wanted

    def drain(self) -> None:
        """Write the requests that have ended, and free their rows; forget prompts that nobody knows any more."""
        cluster, rows = self._run.cluster, self._rows
        ended = cluster.collector.columns["terminal"] != 0
        places = np.flatnonzero(ended & (rows.due < 0) if self._routed else ended)
        self.write(places)
        columns = cluster.collector.columns
        for name in (*_NAN, *_ZERO):
            columns[name][places] = np.nan if name in _NAN else 0
        cluster.arrival_of[places], cluster.worker_of[places] = np.nan, -1
        rows.number[places], rows.leaf[places] = -1, -1
        rows.free = np.concatenate((rows.free, places))
        if self.paths.stretches > 2 * self._few:
            known = cluster.known_segments()
            if known is not None:
                self.paths.forget(known, np.flatnonzero(rows.number >= 0))
            self._few = max(self.paths.stretches, FORGET_FROM)

    def rest(self) -> None:
        """Write the requests that arrived and did not end."""
        self.write(np.flatnonzero(~np.isnan(self._run.cluster.arrival_of)))

    def write(self, places: NDArray[np.int64]) -> None:
        """Write requests in the order of the trace."""
        rows = self._rows
        places = places[np.argsort(rows.number[places])]
        for start in range(0, len(places), BATCH_ROWS):
            batch = places[start:start + BATCH_ROWS]
            if self._out.keeps_rows:
                made = run_columns(self._run, batch)
                columns = {"row": rows.number[batch]}
                if self._named:
                    columns["request_id"] = np.array([rows.names[place] for place in batch.tolist()], object)
                columns |= {name: column for name, column in made.items() if name != "row"}
            else:
                columns = {"row": rows.number[batch]}
            self._out.add(columns, _kept(self._run, batch))

    def described(self, report: Report) -> Report:
        """The report by request numbers instead of rows."""
        for entry in report.get("stalled", ()):
            row = entry["row"]
            entry["row"] = int(self._rows.number[row])
            if self._named:
                entry["request_id"] = self._rows.names[row]
        if self.shortened and "clamped_requests" in report:
            report["shortened_prompts"] = self.shortened
        return report


def simulate_stream(source: TraceStream, call: Mapping[str, Any]) -> Simulation:
    """`mocker.simulate` of a trace that is read on the way.

    Parameters
    ----------
    source : TraceStream
    call : mapping
        The arguments of `mocker.simulate`, by name.

    Raises
    ------
    ValueError
        An argument that needs the whole trace.
    TraceError, OSError
        As `TraceStream.blocks`; requests that have ended before are written.
    """
    for name, neutral in _NEEDS_ALL.items():
        if call[name] != neutral:
            what = "a search" if name == "_watch" else name
            raise ValueError(f"{what} needs the whole trace; load it instead of streaming it, or leave {what} out")
    pools, _, routing = prepare_pools(call, Routing.of(call), False)
    args, speedup = pools.args, float(call["arrival_speedup_ratio"])
    for bad, what in ((not isinstance(routing.mode, str), "a routing policy of your own"),
                      # which goes by the numbers of segments
                      (routing.mode == "prefix_affinity", "router_mode='prefix_affinity'"),
                      (bool(args.num_g2_blocks), "KV tiers (num_g2_blocks)"),
                      (args.vllm_scheduling_policy == "priority", "vllm_scheduling_policy='priority'")):
        if bad:
            raise ValueError(f"{what} needs the whole trace; load it instead of streaming it")
    check_speedup(speedup)
    exact = None if call["exact_gaps"] is None else _integer("exact_gaps", call["exact_gaps"], 1)
    _integer("threads", call["threads"], 1)
    sla = Sla.of(call)
    blocks = source.blocks()
    first = next(blocks)                       # before a file is emptied for results that nobody will get
    _nothing().sizes(first.block_size, args.block_size)
    out = RowStream(call["stream_to"], exact, call["compat"] == "reference", sla)
    began = time.perf_counter()
    try:
        run, feed = _replay(blocks, first, pools, routing, call, fast_paths(call["fast_forward"]), speedup, exact, out)
    finally:
        out.close()
    run.wall_time_ms = (time.perf_counter() - began) * 1000.0
    report = feed.described(run_report(run, sla, call["compat"], out))
    made = simulation_of(run, report, call, sla, None, True)
    if feed.skipped:
        made.meta["skipped_rows"] = feed.skipped
    return made


def _replay(blocks: Iterator[Trace], first: Trace, pools: Pools, routing: Routing, call: Mapping[str, Any],
            fast: FastPaths, speedup: float, exact: int | None, out: RowStream) -> tuple[Run, _Feed]:
    rows, progress = _Rows(), call["progress"]
    workload = Workload(arrival=rows.arrival, prompt=rows.prompt, limit=rows.wanted, make_paths=lambda _: _nothing())
    cluster, routed = set_up(workload, pools, call["max_sim_time_ms"], routing, fast, None, None, False, call["compat"])
    if exact is not None:
        cluster.collector.keep_gaps(exact)
    run = Run(cluster, workload, pools, 0.0)
    if routed:
        none = np.empty(0, np.int64)
        cluster.set_links(none, np.zeros(1, np.int64), none, none, rows.rank, np.empty(0), 0)
        if exact is None and pools.workers > 1:
            cluster.split_gaps()               # workers may run ahead of each other
    feed = _Feed(blocks, first, pools.args, speedup, run, rows, out, routed)

    def look() -> None:
        if progress is not None:
            progress(cluster.ended, feed.read, cluster.last_timestamp())

    try:
        if routed:
            cap = call["max_sim_time_ms"]
            _run_loop(cluster, pools.workers, math.inf if cap is None else cap, feed, look)
        else:
            _run_lanes(cluster, pools.workers, feed, look)
    except TraceError:
        feed.drain()                           # what has ended is not lost
        raise
    cluster.join_gaps()
    cluster.flush()
    feed.rest()
    look()
    return run, feed


def _run_lanes(cluster: Cluster, workers: int, feed: _Feed, look: Callable[[], None]) -> None:
    """Workers one by one, with turns as in `run_lanes`."""
    bound = LANE_ROWS
    while not cluster.over:
        for worker in range(workers):
            while not cluster.run_lane(worker, min(SLICE_PASSES, STREAM_PASSES), bound):
                if cluster.starved:
                    feed.feed()
                look()
        feed.drain()
        bound += LANE_ROWS


def _run_loop(cluster: Cluster, workers: int, cap: float, feed: _Feed, look: Callable[[], None]) -> None:
    """The event loop, as far as requests are known."""
    def go(horizon: float) -> None:
        while not _live.advance(cluster, horizon, -1, STREAM_PASSES, True):
            feed.drain()
            look()
        feed.drain()
        look()

    while feed.more and feed.horizon < 0.0:    # it begins with all that happens at 0
        feed.feed()
    while True:
        if workers == 1 and feed.horizon > cap:
            go(cap)                            # a single worker sees who arrives in its pass over the limit
            state = np.zeros(1, _live.WORKER)
            _live.look(cluster, state)
            while feed.more and feed.horizon < state["pass_end_ms"][0]:
                feed.feed()
        go(feed.horizon)
        if not feed.more:
            return
        feed.feed()
        if cluster.finished:                   # the clock has passed its limit
            return
