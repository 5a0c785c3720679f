"""What a replay is fed with: a trace or a synthetic specification, as columns and block identities.

Answers to the reference's `loadgen/trace.rs` (`Trace::synthetic`, timing transformations) and to the choice of
runtime in `replay/entrypoints.rs`.
"""
from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ._answers import answers_apart
from ._paths import PathTable
from .conversations import Conversations
from .trace import Trace
from .waits import Links, links

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHARED_PREFIX_ID = 0xD00D << 48    # ids of shared prefix blocks; only their low 32 bits reach the tokens


@dataclass(frozen=True)
class SyntheticSpec:
    """The reference's synthetic workload: constant lengths, constant arrival interval.

    Parameters
    ----------
    input_tokens, output_tokens : int
        Prompt and output length of every request, tokens.
    request_count : int
        Requests; sessions if `turns_per_session` > 1.
    arrival_interval_ms : float
        Between first turns, ms.
    turns_per_session : int
        Turns of a session; each draws fresh tokens apart from the shared prefix.
    shared_prefix_ratio : float
        Share of a prompt's blocks that all requests have in common (needs `num_prefix_groups` > 0).
    num_prefix_groups : int
        Accepted as in the reference, where the groups share the same tokens.
    inter_turn_delay_ms : float
        Think time between the turns of a session, ms.
    """

    input_tokens: int
    output_tokens: int
    request_count: int
    arrival_interval_ms: float = 1.0
    turns_per_session: int = 1
    shared_prefix_ratio: float = 0.0
    num_prefix_groups: int = 0
    inter_turn_delay_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "request_count", "turns_per_session"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise ValueError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            if value >= 2**62:
                raise ValueError(f"{name} must be below 2**62, got {value}")
        groups = self.num_prefix_groups
        if isinstance(groups, bool) or not isinstance(groups, (int, np.integer)) or groups < 0:
            raise ValueError(f"num_prefix_groups must be an integer >= 0, got {groups!r}")
        for name in ("arrival_interval_ms", "inter_turn_delay_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite non-negative value, got {value}")
        if not 0.0 <= self.shared_prefix_ratio <= 1.0:
            raise ValueError(f"shared_prefix_ratio must be between 0.0 and 1.0, got {self.shared_prefix_ratio}")

    @property
    def is_simple(self) -> bool:
        """Single requests that share nothing: the reference's request path, with arrivals at i * interval."""
        return (self.turns_per_session == 1 and self.shared_prefix_ratio == 0.0 and self.num_prefix_groups == 0
                and self.inter_turn_delay_ms == 0.0)

    def to_trace(self, block_size: int) -> Trace:
        """The workload as a trace whose hash ids stand for `block_size` tokens each."""
        sessions, turns = self.request_count, self.turns_per_session
        blocks = -(-self.input_tokens // block_size)
        shared = 0
        if self.num_prefix_groups > 0 and self.shared_prefix_ratio > 0.0:
            shared = min(math.floor(blocks * self.shared_prefix_ratio + 0.5), blocks)
        n = sessions * turns
        ids = np.empty((n, blocks), np.uint64)
        ids[:, :shared] = np.uint64(SHARED_PREFIX_ID) | np.arange(shared, dtype=np.uint64)
        ids[:, shared:] = np.arange(1, n * (blocks - shared) + 1, dtype=np.uint64).reshape(n, blocks - shared)
        starts = np.zeros(sessions)
        if self.arrival_interval_ms > 0.0:
            gap = 1000.0 / (1000.0 / self.arrival_interval_ms)
            starts[1:] = np.cumsum(np.full(sessions - 1, gap))
        arrival = np.full((sessions, turns), np.nan)
        arrival[:, 0] = starts
        delay = np.full((sessions, turns), float(self.inter_turn_delay_ms))
        delay[:, 0] = 0.0
        return Trace.from_columns(
            block_size=block_size, arrival_ms=arrival.ravel(), input_length=np.full(n, self.input_tokens, np.int64),
            output_length=np.full(n, self.output_tokens, np.int64),
            hash_offsets=np.arange(0, n * blocks + 1, blocks, dtype=np.int64), hash_ids=ids.ravel(),
            session=np.repeat(np.arange(sessions, dtype=np.int32), turns),
            turn=np.tile(np.arange(turns, dtype=np.int32), sessions), delay_ms=delay.ravel())


TokenSource = Callable[[int], "tuple[NDArray[np.uint32], NDArray[np.uint32]]"]


@dataclass
class Workload:
    """Rows to replay. `arrival` in ms (NaN: none), lengths in tokens; `session` None for single requests.

    `wait_rows[wait_offsets[i]:wait_offsets[i + 1]]`: the requests that request i waits for, as the turns of a session
    wait for each other anyway; it is ready `delay` ms after the last of them has ended.
    `cancel_after`: when clients give up, ms from the arrival; NaN: never.
    `growing`: the prompts become known one by one while the replay runs.
    `planned`: some outputs are given, so that generated blocks have contents that others may share; `apart` says
    whether none does, for an engine's block size.
    """

    arrival: NDArray[np.float64]
    prompt: NDArray[np.int64]
    limit: NDArray[np.int64]
    make_paths: Callable[[int], PathTable]
    tokens: TokenSource | None = None
    planned: bool = False
    apart: Callable[[int], bool] | None = None
    session: NDArray[np.int32] | None = None
    turn: NDArray[np.int32] | None = None
    delay: NDArray[np.float64] | None = None
    wait_offsets: NDArray[np.int64] | None = None
    wait_rows: NDArray[np.int64] | None = None
    trace: Trace | None = None
    growing: Conversations | None = None
    cancel_after: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def is_single(self) -> bool:
        """Whether nothing that happens to a request depends on another, or on its client."""
        return self.session is None and self.wait_rows is None and self.cancel_after is None

    def links(self) -> Links:
        """Who waits for whom."""
        return links(len(self), self.session, self.turn, self.wait_offsets, self.wait_rows)

    def delays(self) -> NDArray[np.float64]:
        """Time from the last end that a row waits for until it is ready, ms."""
        return np.zeros(len(self)) if self.delay is None else self.delay


def trace_tokens(trace: Trace) -> TokenSource:
    """Tokens of a trace's rows: each id repeated, cut to the prompt; and the planned outputs."""
    offsets, planned = trace.output_token_offsets, trace.output_token_ids

    def tokens(row: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        ids = trace.hash_ids[trace.hash_offsets[row]:trace.hash_offsets[row + 1]]
        length = int(trace.input_length[row])
        needed = -(-length // trace.block_size)
        prompt = np.repeat(ids[:needed].astype(np.uint32), trace.block_size)[:length]
        plan = (np.empty(0, np.uint32) if offsets is None or planned is None
                else np.ascontiguousarray(planned[offsets[row]:offsets[row + 1]], np.uint32))
        return np.ascontiguousarray(prompt), plan

    return tokens


@dataclass
class _Known:
    """What is worked out once for a trace that lives; nothing here may hold the trace itself."""

    single: bool                                                       # single requests, no sessions
    paths: dict[int, PathTable] = field(default_factory=dict)          # by block size
    apart: dict[int, bool] = field(default_factory=dict)               # by block size
    # shifted, sped up and checked, by speed-up; None: that changes nothing
    ready: dict[float, Trace | None] = field(default_factory=dict)


_known: dict[int, _Known] = {}         # by id of the trace
_known_lock = threading.Lock()
_READY = 4                             # speed-ups that are kept


def _known_of(trace: Trace) -> _Known:
    known = _known.get(id(trace))
    if known is not None:
        return known
    single = trace.is_single_turn
    with _known_lock:
        known = _known.get(id(trace))
        if known is None:
            known = _known[id(trace)] = _Known(single)
            weakref.finalize(trace, _known.pop, id(trace), None).atexit = False
    return known


def trace_paths(trace: Trace, block_size: int, growing: Conversations | None = None) -> PathTable:
    """Block identities of a trace's prompts, kept as long as the trace is."""
    paths = _known_of(trace).paths
    table = paths.get(block_size)
    if table is None:
        table = growing.paths(trace, block_size) if growing is not None else PathTable.from_hash_ids(
            trace.hash_offsets, trace.hash_ids, trace.input_length, trace.block_size, block_size)
        with _known_lock:
            table = paths.setdefault(block_size, table)
    return table


def trace_answers_apart(trace: Trace, block_size: int) -> bool:
    """Whether no prompt or answer of a trace repeats what another request generates; kept as long as the trace is."""
    known = _known_of(trace).apart
    if block_size not in known:
        offsets, tokens = trace.output_token_offsets, trace.output_token_ids
        known[block_size] = offsets is None or tokens is None or answers_apart(
            trace.input_length, trace.hash_offsets, trace.hash_ids, trace.block_size, offsets, tokens, block_size)
    return known[block_size]


def _ready_trace(trace: Trace, known: _Known, speedup: float) -> Trace:
    """A trace for an open loop: from time 0 on, sped up, checked."""
    ready = known.ready
    try:
        found = ready[speedup]
    except KeyError:
        pass
    else:
        return trace if found is None else found
    made = trace.normalize_session_starts()
    if speedup != 1.0:
        made = made.speed_up_timing(speedup)
    made.validate(allow_missing_timestamps=False)
    with _known_lock:
        while len(ready) >= _READY:
            ready.pop(next(iter(ready)), None)
        ready[speedup] = None if made is trace else made
    return made


def check_speedup(speedup: float) -> None:
    """Refuse an `arrival_speedup_ratio` that is no finite positive number."""
    if not (math.isfinite(speedup) and speedup > 0):
        raise ValueError(f"arrival_speedup_ratio must be a finite positive number, got {speedup}")


def from_trace(trace: Trace, *, closed_loop: bool, speedup: float) -> Workload:
    """A trace ready to replay: open loop starts at 0 and is sped up; closed loop keeps think times as they are.

    Raises
    ------
    ValueError
        An open-loop row has no usable arrival time, closed-loop rows wait for others, or `speedup` is not a finite
        positive number.
    """
    check_speedup(speedup)
    given, known = trace, _known_of(trace)
    if closed_loop:
        trace.validate(allow_missing_timestamps=True)
    else:
        trace = _ready_trace(trace, known, speedup)
    if closed_loop and trace.wait_rows is not None:
        raise ValueError("requests that wait for others are replayed at their times; leave replay_concurrency out")
    single = known.single
    tokens = trace_tokens(trace)
    growing = Conversations(trace, tokens) if trace.accumulate and not single else None
    return Workload(
        arrival=trace.arrival_ms, prompt=trace.input_length if growing is None else growing.prompt,
        limit=trace.output_length, make_paths=lambda block_size: trace_paths(given, block_size, growing),
        tokens=tokens if growing is None else growing, planned=trace.output_token_ids is not None,
        apart=lambda block_size: trace_answers_apart(given, block_size), growing=growing,
        session=None if single else trace.session, turn=None if single else trace.turn,
        delay=None if single and trace.wait_rows is None else trace.delay_ms, wait_offsets=trace.wait_offsets,
        wait_rows=trace.wait_rows, trace=trace, cancel_after=trace.cancel_after_ms)


def from_synthetic(spec: SyntheticSpec, *, block_size: int, closed_loop: bool, speedup: float) -> Workload:
    """A synthetic workload ready to replay; `block_size` is the engine's."""
    if not spec.is_simple:
        trace = spec.to_trace(block_size)
        if closed_loop:
            return from_trace(trace, closed_loop=True, speedup=1.0)
        return from_trace(trace, closed_loop=False, speedup=speedup)
    check_speedup(speedup)
    n = spec.request_count
    prompt = np.full(n, spec.input_tokens, np.int64)
    arrival = np.arange(n, dtype=np.float64) * spec.arrival_interval_ms
    return Workload(arrival=arrival / speedup, prompt=prompt, limit=np.full(n, spec.output_tokens, np.int64),
                    make_paths=lambda size: PathTable.unique(prompt, size))
