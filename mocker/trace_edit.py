"""Traces made of other traces: parts of them, several put together, other times, other prefixes.

The timing and prefix transformations answer to those of `Trace` in the reference's `loadgen/trace.rs`. None changes its
argument; columns that stay are shared. Cost: O(rows), and O(hash ids) where those change.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._spec import SeededRng

if TYPE_CHECKING:
    from .trace import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# Times

def normalize_session_starts(trace: Trace) -> Trace:
    """See `Trace.normalize_session_starts`."""
    start = trace.arrival_ms[trace.turn == 0]
    start = start[~np.isnan(start)]
    if not len(start):
        return trace
    low = start.min()
    if low == 0 and np.signbit(start[start == 0]).any():
        low = np.float64(-0.0)      # the reference orders -0.0 before 0.0
    with np.errstate(over="ignore"):
        return dataclasses.replace(trace, arrival_ms=trace.arrival_ms - low)


def speed_up_timing(trace: Trace, ratio: float) -> Trace:
    """See `Trace.speed_up_timing`."""
    if not (math.isfinite(ratio) and ratio > 0):
        raise ValueError(f"ratio must be a finite positive number, got {ratio}")
    with np.errstate(over="ignore", under="ignore"):
        return dataclasses.replace(trace, arrival_ms=trace.arrival_ms / ratio, delay_ms=trace.delay_ms / ratio)


def rescale_session_start_span(trace: Trace, duration_ms: int) -> Trace:
    """See `Trace.rescale_session_start_span`."""
    span = _duration(duration_ms)
    start = trace.arrival_ms[trace.turn == 0]
    start = start[~np.isnan(start)]
    if not len(start):
        return trace
    low, high = start.min(), start.max()
    if high == low:
        times = np.where(np.isnan(trace.arrival_ms), np.nan, 0.0)
    else:
        times = (trace.arrival_ms - low) * span / (high - low)
    return dataclasses.replace(trace, arrival_ms=times)


def rescale_ready_span(trace: Trace, duration_ms: int) -> Trace:
    """See `Trace.rescale_ready_span`."""
    span = _duration(duration_ms)
    if not trace.n:
        return trace
    rows = np.flatnonzero(trace.turn == 0)
    start = np.zeros(trace.n_sessions)
    start[trace.session[rows]] = np.nan_to_num(trace.arrival_ms[rows], nan=0.0)
    later = np.lexsort((trace.turn, trace.session))
    later = later[trace.turn[later] > 0]
    thinking = np.bincount(trace.session[later], trace.delay_ms[later], trace.n_sessions)   # added in order of turns
    ratio = span / max(float((start + thinking).max() - start.min()), 1.0)
    return dataclasses.replace(trace, arrival_ms=(trace.arrival_ms - start.min()) * ratio,
                               delay_ms=trace.delay_ms * ratio)


def _duration(duration_ms: int) -> float:
    if isinstance(duration_ms, bool) or not isinstance(duration_ms, (int, np.integer)) or duration_ms < 0:
        raise ValueError(f"duration_ms must be an integer of at least 0, got {duration_ms!r}")
    return float(duration_ms)


# Prefixes

def expand_hash_prefix_depth(trace: Trace, factor: int) -> Trace:
    """See `Trace.expand_hash_prefix_depth`."""
    factor = _count("factor", factor)
    if factor == 1 or not trace.n:
        return trace
    if int(trace.hash_ids.max()) * factor + factor - 1 >= 2**64 or int(trace.input_length.max()) * factor >= 2**63:
        raise ValueError(f"factor {factor} takes hash ids or prompts beyond 64 bits")
    ids = np.add(trace.hash_ids[:, None] * np.uint64(factor), np.arange(factor, dtype=np.uint64), dtype=np.uint64)
    return dataclasses.replace(trace, input_length=trace.input_length * factor,
                               hash_offsets=trace.hash_offsets * factor, hash_ids=ids.ravel())


def duplicate_hash_space(trace: Trace, copies: int) -> Trace:
    """See `Trace.duplicate_hash_space`."""
    copies = _count("copies", copies)
    if copies == 1 or not trace.n:
        return trace
    step = int(trace.hash_ids.max()) + 1
    if step * copies > 2**64:
        raise ValueError(f"{copies} copies take hash ids beyond 64 bits")
    names = session_names(trace)
    requests = trace.request_ids
    parts = []
    for copy in range(copies):
        parts.append(dataclasses.replace(
            trace, hash_ids=trace.hash_ids + np.uint64(step * copy),
            session_ids=tuple(f"{name}:copy_{copy}" for name in names),
            request_ids=None if requests is None else tuple(
                None if name is None else f"{name}:copy_{copy}" for name in requests)))
    return concat(parts)


def partition_by_session(trace: Trace, parts: int, seed: int | None = None) -> list[Trace]:
    """See `Trace.partition_by_session`."""
    parts = _count("parts", parts)
    if trace.wait_rows is not None:
        raise ValueError("a trace whose requests wait for each other cannot be cut by sessions")
    if seed is None:
        chosen = np.arange(trace.n_sessions) % parts
    else:
        rng = SeededRng(seed)
        chosen = np.array([below(rng, parts) for _ in range(trace.n_sessions)], np.int64)
    named = dataclasses.replace(trace, session_ids=tuple(session_names(trace)))
    return [named.select(chosen[trace.session] == part) for part in range(parts)]


def below(rng: SeededRng, n: int) -> int:
    """A number from 0 to n - 1 (n below 2**32), as rand 0.9 draws a `usize`."""
    wide = rng.next_u32() * n
    low = wide & 0xFFFFFFFF
    if low > (-n) % 2**32:
        carried = low + (rng.next_u32() * n >> 32)
        return (wide >> 32) + (carried >> 32)
    return wide >> 32


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < 2**31:
        raise ValueError(f"{name} must be an integer from 1 to {2**31 - 1}, got {value!r}")
    return int(value)


def session_names(trace: Trace) -> list[str]:
    """Names of the sessions: their own, or those that `save` and the reader would give them."""
    if trace.session_ids is not None:
        return list(trace.session_ids)
    if trace.is_single_turn:
        return [f"request_{line}" for line in trace.line.tolist()]
    return [f"session_{k}" for k in range(trace.n_sessions)]


# Rows

def select(trace: Trace, mask: ArrayLike) -> Trace:
    """See `Trace.select`."""
    keep = np.asarray(mask)
    if keep.shape == (0,):
        keep = keep.astype(np.bool_)        # an empty list has no type of its own
    if keep.dtype != np.bool_ or keep.shape != (trace.n,):
        raise ValueError(f"mask must be bool[{trace.n}], is {keep.dtype}{list(keep.shape)}")
    rows = np.flatnonzero(keep)
    old, first, inverse = np.unique(trace.session[rows], return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    session = rank[inverse.reshape(len(rows))]
    turn = turns_of(session)
    hash_offsets, hash_ids = _take(trace.hash_offsets, trace.hash_ids, keep)
    token_offsets: Ints | None = None
    tokens: NDArray[np.uint32] | None = None
    if trace.output_token_offsets is not None and trace.output_token_ids is not None:
        token_offsets, tokens = _take(trace.output_token_offsets, trace.output_token_ids, keep)
        if not len(tokens):
            token_offsets = tokens = None
    wait_offsets, wait_rows = trace.wait_offsets, trace.wait_rows
    starts = turn == 0
    if wait_offsets is not None and wait_rows is not None:
        wait_offsets, wait_rows = _take(wait_offsets, wait_rows, keep)
        left = keep[wait_rows]
        owner = np.repeat(np.arange(len(rows)), np.diff(wait_offsets))[left]
        wait_offsets = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=len(rows))))).astype(np.int64)
        wait_rows = (np.cumsum(keep) - 1)[wait_rows[left]].astype(np.int64)
        starts &= np.diff(wait_offsets) == 0
    picked = rows.tolist()
    names = trace.session_ids
    return dataclasses.replace(
        trace,
        arrival_ms=trace.arrival_ms[rows],
        input_length=trace.input_length[rows],
        output_length=trace.output_length[rows],
        hash_offsets=hash_offsets,
        hash_ids=hash_ids,
        line=trace.line[rows],
        session=session,
        turn=turn,
        delay_ms=np.where(starts, 0.0, trace.delay_ms[rows]),
        priority=trace.priority[rows],
        strict_priority=trace.strict_priority[rows],
        session_ids=None if names is None else tuple(names[i] for i in old[order].tolist()),
        request_ids=None if trace.request_ids is None else some([trace.request_ids[i] for i in picked]),
        policy_class=None if trace.policy_class is None else some([trace.policy_class[i] for i in picked]),
        output_token_offsets=token_offsets,
        output_token_ids=tokens,
        wait_offsets=wait_offsets,
        wait_rows=wait_rows,
        cancel_after_ms=None if trace.cancel_after_ms is None else trace.cancel_after_ms[rows],
        clamped=np.flatnonzero(np.isin(rows, trace.clamped)),
    )


def concat(traces: Sequence[Trace]) -> Trace:
    """See `Trace.concat`."""
    if not traces:
        raise ValueError("concat needs at least one trace")
    if len({t.block_size for t in traces}) > 1:
        raise ValueError(f"the traces have different block sizes: {sorted({t.block_size for t in traces})}")
    if len({t.accumulate for t in traces}) > 1:
        raise ValueError("turns add to their prompts in some of the traces (accumulate), others have whole prompts")
    rows = np.cumsum([0] + [t.n for t in traces]).tolist()
    sessions = np.cumsum([0] + [t.n_sessions for t in traces]).tolist()
    token_offsets: Ints | None = None
    tokens: NDArray[np.uint32] | None = None
    if any(t.output_token_ids is not None for t in traces):
        none = np.empty(0, np.uint32)
        tokens = np.concatenate([none if t.output_token_ids is None else t.output_token_ids for t in traces])
        token_offsets = _join_offsets(
            [np.zeros(t.n + 1, np.int64) if t.output_token_offsets is None else t.output_token_offsets
             for t in traces]
        )
    wait_offsets: Ints | None = None
    wait_rows: Ints | None = None
    if any(t.wait_rows is not None for t in traces):
        nobody = np.empty(0, np.int64)
        wait_rows = np.concatenate([nobody if t.wait_rows is None else t.wait_rows + k
                                    for t, k in zip(traces, rows, strict=False)])
        wait_offsets = _join_offsets([np.zeros(t.n + 1, np.int64) if t.wait_offsets is None else t.wait_offsets
                                      for t in traces])
    return dataclasses.replace(
        traces[0],
        arrival_ms=np.concatenate([t.arrival_ms for t in traces]),
        input_length=np.concatenate([t.input_length for t in traces]),
        output_length=np.concatenate([t.output_length for t in traces]),
        hash_offsets=_join_offsets([t.hash_offsets for t in traces]),
        hash_ids=np.concatenate([t.hash_ids for t in traces]),
        line=np.concatenate([t.line for t in traces]),
        session=np.concatenate([t.session + np.int32(k) for t, k in zip(traces, sessions, strict=False)]),
        turn=np.concatenate([t.turn for t in traces]),
        delay_ms=np.concatenate([t.delay_ms for t in traces]),
        priority=np.concatenate([t.priority for t in traces]),
        strict_priority=np.concatenate([t.strict_priority for t in traces]),
        session_ids=_join_names(traces),
        request_ids=_join_strings([t.request_ids for t in traces], rows),
        policy_class=_join_strings([t.policy_class for t in traces], rows),
        output_token_offsets=token_offsets,
        output_token_ids=tokens,
        wait_offsets=wait_offsets,
        wait_rows=wait_rows,
        cancel_after_ms=None if all(t.cancel_after_ms is None for t in traces) else np.concatenate(
            [np.full(t.n, np.nan) if t.cancel_after_ms is None else t.cancel_after_ms for t in traces]),
        path=", ".join(dict.fromkeys(t.path for t in traces if t.path)),
        clamped=np.concatenate([t.clamped + k for t, k in zip(traces, rows, strict=False)]),
        skipped=tuple(error for t in traces for error in t.skipped),
    )


def _take(offsets: Ints, values: NDArray[Any], keep: NDArray[np.bool_]) -> tuple[Ints, NDArray[Any]]:
    """Offsets and values of the rows in a mask."""
    counts = np.diff(offsets)
    return np.concatenate(([0], np.cumsum(counts[keep]))).astype(np.int64), values[np.repeat(keep, counts)]


def _join_offsets(parts: Sequence[Ints]) -> Ints:
    """int64: offsets into the concatenated values."""
    return np.concatenate(([0], np.cumsum(np.concatenate([np.diff(p) for p in parts])))).astype(np.int64)


def _join_strings(
    parts: Sequence[tuple[str | None, ...] | None], rows: Sequence[int]
) -> tuple[str | None, ...] | None:
    """Concatenate string columns, any of which may be absent."""
    joined: list[str | None] = []
    for part, low, high in zip(parts, rows[:-1], rows[1:], strict=True):
        joined.extend((None,) * (high - low) if part is None else part)
    return some(joined)


def _join_names(traces: Sequence[Trace]) -> tuple[str, ...] | None:
    """Session names of all traces, made different where two traces use the same."""
    if all(t.session_ids is None for t in traces):
        return None
    joined: list[str] = []
    taken: set[str] = set()
    for part, t in enumerate(traces, 1):
        new: dict[str, str] = {}
        for name in session_names(t):
            free, k = name, part
            while name not in new and free in taken:
                free = f"{name}#{k}"
                k += 1
            joined.append(new.setdefault(name, free))
            taken.add(joined[-1])
    return tuple(joined)


def some(strings: Sequence[str | None] | None) -> tuple[str | None, ...] | None:
    """The strings, or None if there is none among them."""
    return None if strings is None or all(s is None for s in strings) else tuple(strings)


def turns_of(session: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32[n]: how many earlier rows have the same session."""
    n = len(session)
    order = np.argsort(session, kind="stable")
    grouped = session[order]
    start = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]]) if n else np.empty(0, np.int64)
    turn = np.empty(n, np.int32)
    turn[order] = np.arange(n) - np.repeat(start, np.diff(np.r_[start, n]))
    return turn
