"""Lints of a trace: what a replay would take, but its author hardly meant."""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import _reuse
from ..trace import Trace
from .times import earliest_ms

__all__ = ["LINTS", "Finding", "check"]

LINTS = {
    "skipped-row": "a row that could not be read was left out",
    "out-of-order": "a first turn arrives before the row above it",
    "time-back": "a time stamp lies before an earlier one of the same session",
    "no-time": "a first turn has no time stamp, so that only a closed loop can replay the trace",
    "negative-time": "a time stamp is negative",
    "gap": "nothing arrives for a long time",
    "same-time": "many requests arrive at the same instant",
    "duplicate-id": "a request id appears twice",
    "duplicate-row": "rows are equal in every column, time included",
    "zero-output": "an answer has no tokens",
    "unused-hash-ids": "a prompt has more hash ids than its length needs",
    "clamped": "a prompt was cut to what its hash ids cover",
    "block-size": "the lengths fit another block size better",
    "repeated-hash-id": "a hash id appears twice in one prompt",
    "wide-hash-ids": "hash ids differ only above their low 32 bits, which a replay does not tell apart",
    "huge-prompt": "a request does not fit the given pool or model length",
}
"""What each lint means, by its code."""

_ERRORS = frozenset({"skipped-row", "time-back", "negative-time", "huge-prompt"})
_LOW = np.uint64(0xFFFFFFFF)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHOWN = 5                      # rows that a finding names


@dataclass(frozen=True)
class Finding:
    """One kind of problem.

    Attributes
    ----------
    code : str
        A key of `LINTS`.
    severity : {"error", "warning"}
    count : int
        Rows that have it.
    lines : tuple of int
        Line (row) numbers in the file of the first few.
    message : str
        What is wrong, and what to do.
    """

    code: str
    severity: str
    count: int
    lines: tuple[int, ...]
    message: str

    def to_dict(self) -> dict[str, object]:
        """The finding as JSON values."""
        return {"code": self.code, "severity": self.severity, "count": self.count, "lines": list(self.lines),
                "message": self.message}


def check(
    trace: Trace, *, pool_tokens: int | None = None, max_model_len: int | None = None, gap_ms: float | None = None
) -> list[Finding]:
    """Look for what a replay would take without a word.

    Parameters
    ----------
    trace : Trace
    pool_tokens : int, optional
        Tokens that the KV pool of a worker holds (blocks times block size).
    max_model_len : int, optional
        Tokens that a prompt and its answer may have.
    gap_ms : float, optional
        Report longer gaps between arrivals; a hundred times the mean gap, but at least 10 s, if left out.

    Returns
    -------
    list of Finding
        In the order of `LINTS`; empty for a clean trace.
    """
    found: list[Finding] = []
    for code, rows, message in _problems(trace, pool_tokens, max_model_len, gap_ms):
        count = len(rows)
        if count:
            found.append(_finding(code, count, tuple(trace.line[rows[:_SHOWN]].tolist()), message))
    if trace.skipped:
        first = trace.skipped[0]
        found.append(_finding(
            "skipped-row", len(trace.skipped), tuple(e.line for e in trace.skipped[:_SHOWN] if e.line is not None),
            f"could not be read and was left out; the first: {first}"))
    order = list(LINTS)
    return sorted(found, key=lambda finding: order.index(finding.code))


def _finding(code: str, count: int, lines: tuple[int, ...], message: str) -> Finding:
    return Finding(code, "error" if code in _ERRORS else "warning", count, lines, message)


_Problem = tuple[str, NDArray[np.int64], str]


def _problems(
    trace: Trace, pool_tokens: int | None, max_model_len: int | None, gap_ms: float | None
) -> Iterator[_Problem]:
    """Code, rows and message of each kind of problem; no rows where there is none."""
    yield from _time_problems(trace, gap_ms)
    if trace.request_ids is not None:
        seen: dict[str, int] = {}
        again = [row for row, name in enumerate(trace.request_ids)
                 if name is not None and seen.setdefault(name, row) != row]
        yield "duplicate-id", np.array(again, np.int64), "has a request id that an earlier row has; rename one of them"
    yield "zero-output", np.flatnonzero(trace.output_length == 0), \
        "asks for no output tokens and ends with its prefill; failed requests are often logged so: drop them, if so"
    yield "clamped", trace.clamped, "was cut to what its hash ids cover; check the block size"
    yield from _hash_problems(trace)
    total = trace.input_length + trace.output_length
    for limit, what in ((pool_tokens, "the pool of a worker holds"), (max_model_len, "the model takes")):
        if limit is not None:
            rows = np.flatnonzero(total > limit)
            worst = int(total.max()) if trace.n else 0
            yield "huge-prompt", rows, \
                f"needs more tokens (the largest {worst:,}) than {what} ({limit:,}); it cannot be served whole"


def _time_problems(trace: Trace, gap_ms: float | None) -> Iterator[_Problem]:
    first = np.flatnonzero(trace.turn == 0)
    start = trace.arrival_ms[first]
    missing = np.isnan(start)
    yield "no-time", first[missing], \
        "starts a session and has no time stamp; give it one, or replay with --replay-concurrency"
    yield "negative-time", np.flatnonzero(trace.arrival_ms < 0), \
        "has a negative time stamp; shift the trace with `mocker trace scale --start 0`"
    known = np.where(missing, -np.inf, start)
    latest = np.maximum.accumulate(known)
    yield "out-of-order", first[1:][known[1:] < latest[:-1]] if len(first) else first, \
        "arrives before a row above it; a replay goes by time, other tools may not: `mocker trace convert --sort` sorts"
    if not trace.is_single_turn:
        rows = np.lexsort((trace.turn, trace.session))
        time = np.where(np.isnan(trace.arrival_ms[rows]), -np.inf, trace.arrival_ms[rows])
        # Sessions far apart on a rising scale, so that one running maximum serves all of them.
        base = np.flatnonzero(trace.turn[rows] == 0)
        group = np.cumsum(trace.turn[rows] == 0) - 1
        back = np.zeros(len(rows), np.bool_)
        rank = np.empty(len(rows), np.int64)
        rank[np.lexsort((time, group))] = np.arange(len(rows))
        high = np.maximum.accumulate(rank)
        back[1:] = (rank[1:] < high[:-1]) & np.isfinite(time[1:])
        back[base] = False
        tied = np.zeros(len(rows), np.bool_)
        tied[1:] = time[1:] == time[:-1]
        yield "time-back", np.sort(rows[back & ~tied]), \
            "has a time stamp before an earlier turn of its session; sort the turns"
    moments = np.sort(earliest_ms(trace))
    order = np.argsort(earliest_ms(trace), kind="stable")
    known_count = int(np.count_nonzero(~np.isnan(moments)))
    gaps = np.diff(moments[:known_count])
    if len(gaps):
        mean = float(gaps.mean())
        limit = gap_ms if gap_ms is not None else max(100 * mean, 10_000.0)
        wide = np.flatnonzero(gaps > limit)
        longest = float(gaps.max())
        yield "gap", order[wide + 1], \
            f"arrives after a gap of more than {limit / 1e3:,.1f} s (the longest {longest / 1e3:,.1f} s, the mean " \
            f"{mean / 1e3:,.3f} s); cut the trace there, or leave it if the service was idle"
        crowd = _runs_of_zero(gaps)
        yield "same-time", order[crowd], \
            "arrives at the same instant as at least 99 others; coarse time stamps turn into bursts"
    yield "duplicate-row", _duplicates(trace), \
        "equals an earlier row in session, time, lengths and hash ids; drop it if it was logged twice"


def _runs_of_zero(gaps: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices at the start of runs of at least 99 gaps of 0."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (gaps == 0).astype(np.int8), [0]))))
    start, stop = edges[::2], edges[1::2]
    return np.asarray(start[stop - start >= 99], np.int64)


def _duplicates(trace: Trace) -> NDArray[np.int64]:
    """Rows that equal an earlier one: same time stamp, lengths and hash ids (judged by a 64-bit sum)."""
    if not trace.n:
        return np.empty(0, np.int64)
    mixed = np.add.reduceat(trace.hash_ids * _MIX, trace.hash_offsets[:-1])
    session = np.zeros(trace.n, np.int32) if trace.is_single_turn else trace.session
    columns = (trace.hash_ids[trace.hash_offsets[:-1]], trace.output_length, trace.input_length, session,
               trace.arrival_ms)
    for column in columns:
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX + column.view(np.uint64) if column.itemsize == 8 else \
            (mixed ^ (mixed >> np.uint64(29))) * _MIX + column.astype(np.uint64)
    order = np.argsort(mixed, kind="stable")
    same = mixed[order][1:] == mixed[order][:-1]
    for column in columns:
        same[same] = column[order[1:][same]] == column[order[:-1][same]]
    return np.sort(order[1:][same])


def _hash_problems(trace: Trace) -> Iterator[_Problem]:
    counts = np.diff(trace.hash_offsets)
    needed = -(-trace.input_length // trace.block_size)
    unused = np.flatnonzero(counts > needed)
    yield "unused-hash-ids", unused, \
        f"has more hash ids than a prompt of its length has blocks of {trace.block_size}; the rest is ignored"
    if len(unused) > trace.n / 2:
        size = _fitting_block_size(trace, counts)
        if size is not None:
            yield "block-size", unused, \
                f"has as many hash ids as blocks of {size} tokens; load it with block size {size}"
    if trace.n:
        yield "repeated-hash-id", np.flatnonzero(_reuse.repeated_ids(trace.hash_offsets, trace.hash_ids)), \
            "has a hash id twice; equal blocks at different places are rare: check that ids stand for prefixes"
        if trace.hash_ids.max() > _LOW:
            low = np.sort(np.unique(trace.hash_ids) & _LOW)
            clash = np.flatnonzero(np.diff(low) == 0)
            if len(clash):
                yield "wide-hash-ids", np.zeros(min(len(clash), 1), np.int64), \
                    f"{len(clash)} hash ids equal another one in their low 32 bits; renumber them with " \
                    "`mocker trace convert --renumber`"


def _fitting_block_size(trace: Trace, counts: NDArray[np.int64]) -> int | None:
    """The power of two at which most rows have exactly as many hash ids as blocks, if that is most rows."""
    sizes = [2**k for k in range(16)]
    fits = [float((-(-trace.input_length // size) == counts).mean()) for size in sizes]
    best = int(np.argmax(fits))
    return sizes[best] if fits[best] > 0.5 and sizes[best] != trace.block_size and math.isfinite(fits[best]) else None
