"""Other traces from traces: rows in another order, hash ids with other numbers, new times."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .doctor.times import earliest_ms
from .synth import Arrivals, Distribution
from .trace import Trace

__all__ = ["apart", "renumber", "reorder", "scale_rate", "sort_by_time", "with_arrivals", "with_start"]

_PER_ROW = ("arrival_ms", "input_length", "output_length", "line", "turn", "delay_ms", "priority", "strict_priority",
            "cancel_after_ms")
_OFFSETS = {"hash_offsets": "hash_ids", "output_token_offsets": "output_token_ids", "wait_offsets": "wait_rows"}


def reorder(trace: Trace, order: NDArray[np.int64]) -> Trace:
    """The same rows in another order, that of the turns of a session excepted.

    Parameters
    ----------
    trace : Trace
    order : int64[n]
        Row of `trace` for each row of the result; each once, and the turns of a session one after the other.

    Raises
    ------
    ValueError
        The order breaks one of these rules.
    """
    rows = np.asarray(order, np.int64)
    if rows.shape != (trace.n,) or not np.array_equal(np.sort(rows), np.arange(trace.n)):
        raise ValueError(f"order must name each of the {trace.n} rows once")
    place = np.empty(trace.n, np.int64)
    place[rows] = np.arange(trace.n)
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(trace):
        name, value = field.name, getattr(trace, field.name)
        if value is None:
            continue
        if name in _PER_ROW:
            changes[name] = value[rows]
        elif name in ("request_ids", "policy_class"):
            changes[name] = tuple(value[row] for row in rows.tolist())
        elif name in _OFFSETS:
            counts = np.diff(value)[rows]
            offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
            at = np.repeat(value[:-1][rows] - offsets[:-1], counts) + np.arange(offsets[-1])
            content = getattr(trace, _OFFSETS[name])[at]
            changes[name] = offsets
            changes[_OFFSETS[name]] = place[content] if name == "wait_offsets" else content
    session = trace.session[rows]
    _, first = np.unique(session, return_index=True)
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    changes["session"] = rank[session]
    if trace.session_ids is not None:
        changes["session_ids"] = tuple(trace.session_ids[i] for i in np.argsort(rank, kind="stable").tolist())
    changes["clamped"] = np.sort(place[trace.clamped])
    seen = np.lexsort((np.arange(trace.n), session))
    turns = changes["turn"][seen]
    if trace.n and not np.array_equal(turns[1:] > 0, session[seen][1:] == session[seen][:-1]) \
            or (np.diff(turns)[turns[1:] > 0] != 1).any():
        raise ValueError("order must keep the turns of each session one after the other")
    return dataclasses.replace(trace, **changes)


def sort_by_time(trace: Trace) -> Trace:
    """Rows by time stamp; a turn without one at the earliest time that it can have, none before the turn above it."""
    time = earliest_ms(trace)
    time = np.where(np.isnan(time), -np.inf, time)
    if not trace.is_single_turn:
        rows = np.lexsort((trace.turn, trace.session))
        group = trace.session[rows].astype(np.int64)
        # A running maximum in each session: ranks of (session, time) rise from session to session.
        rank = np.empty(trace.n, np.int64)
        by_time = np.lexsort((time[rows], group))
        rank[by_time] = np.arange(trace.n)
        time[rows] = time[rows][by_time][np.maximum.accumulate(rank)]
    return reorder(trace, np.lexsort((trace.turn, time)).astype(np.int64))


def renumber(trace: Trace, first: int = 0) -> Trace:
    """The same prompts with hash ids `first`, `first` + 1, … in order of first use."""
    ids, index, inverse = np.unique(trace.hash_ids, return_index=True, return_inverse=True)
    rank = np.empty(len(ids), np.uint64)
    rank[np.argsort(index, kind="stable")] = np.arange(first, first + len(ids), dtype=np.uint64)
    return dataclasses.replace(trace, hash_ids=rank[inverse.reshape(len(trace.hash_ids))])


def apart(traces: Sequence[Trace]) -> list[Trace]:
    """The traces with hash ids that no two of them have in common."""
    result = []
    used = 0
    for trace in traces:
        result.append(renumber(trace, used))
        used += int(len(np.unique(trace.hash_ids)))
    return result


def with_arrivals(trace: Trace, arrivals: Arrivals, think: Distribution | None = None, seed: int = 0) -> Trace:
    """New times: sessions arrive in trace order by a process, later turns a think time (s) after the answer before.

    Parameters
    ----------
    trace : Trace
    arrivals : Arrivals
    think : Distribution, optional
        Think times of later turns, s; those of the trace if left out.
    seed : int
    """
    starts, pauses = (np.random.Generator(np.random.PCG64(s)) for s in np.random.SeedSequence(seed).spawn(2))
    first = trace.turn == 0
    arrival = np.full(trace.n, np.nan)
    arrival[first] = arrivals.draw(starts, int(first.sum()))
    delay = trace.delay_ms if think is None else np.where(first, 0.0, think.draw(pauses, trace.n) * 1e3)
    return dataclasses.replace(trace, arrival_ms=arrival, delay_ms=delay)


def with_start(trace: Trace, start_ms: float) -> Trace:
    """Shift all time stamps so that the earliest first turn arrives at a time.

    Raises
    ------
    ValueError
        The time is not finite.
    """
    if not math.isfinite(start_ms):
        raise ValueError(f"start_ms must be finite, got {start_ms}")
    moved = trace.normalize_session_starts()
    return dataclasses.replace(moved, arrival_ms=moved.arrival_ms + start_ms)


def scale_rate(trace: Trace, rate: float) -> Trace:
    """Stretch or squeeze all times so that sessions start at a mean rate (a second).

    Raises
    ------
    ValueError
        The rate is not a finite positive number, or the trace has no two different starts to scale.
    """
    start = trace.arrival_ms[trace.turn == 0]
    known = start[~np.isnan(start)]
    span = float(known.max() - known.min()) if len(known) else 0.0
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"the rate must be a finite positive number, got {rate}")
    if span <= 0:
        raise ValueError("the trace has no two different arrival times, so its rate cannot be scaled; "
                         "give it arrivals instead")
    return trace.speed_up_timing(rate / ((len(known) - 1) / span * 1e3))
