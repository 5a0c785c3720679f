"""The Mooncake reader: JSONL with one request a line.

The compiled scanner takes the usual rows; this module reads the others one by one with a JSON parser, applies the rules
that need more than one row, and says what is wrong, where, and what to do about it.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .. import _trace, _turns
from ..trace import Trace, TraceError
from .registry import Format
from .rows import (
    MAX_INT64,
    MAX_UINT32,
    MAX_UINT64,
    Check,
    check_integer,
    check_integers,
    check_number,
    check_patience,
    check_string,
    read_fields,
    short,
)
from .source import Source

# An alias and its name are one field.
KEYS = {
    "timestamp": "timestamp",
    "created_time": "timestamp",
    "input_length": "input_length",
    "input_tokens": "input_length",
    "output_length": "output_length",
    "output_tokens": "output_length",
    "hash_ids": "hash_ids",
    "delay": "delay",
    "delay_ms": "delay",
    "session_id": "session_id",
    "request_id": "request_id",
    "priority": "priority",
    "strict_priority": "strict_priority",
    "policy_class": "policy_class",
    "output_token_ids": "output_token_ids",
    "cancel_after_ms": "cancel_after_ms",
}

def load(source: Source) -> Trace:
    """Read JSONL with one request a line."""
    rows = _trace.scan_mooncake(source.data, source.start, source.slow, source.release)
    columns = _Columns(rows)
    error: TraceError | None = None
    if len(rows.slow):
        try:
            columns.add_slow(source)
        except TraceError as e:
            error = e           # an earlier row may break a rule that is only checked below
    if columns.n == 0:
        if error is not None:
            raise error
        source.fail(None, None, "did not contain any requests; a trace has one JSON object a line")
    trace = columns.finish(source)
    if error is not None:
        raise error
    return trace


@dataclass
class RowColumns:
    """Rows of another format as columns like those of the scanner; a reader fills in what it has."""

    line: NDArray[np.int64]
    arrival_ms: NDArray[np.float64]
    delay_ms: NDArray[np.float64]
    input_length: NDArray[np.int64]
    output_length: NDArray[np.int64]
    hash_offsets: NDArray[np.int64]
    hash_ids: NDArray[np.uint64]
    session_ids: list[str | None] | None = None
    request_ids: list[str | None] | None = None
    policy_class: list[str | None] | None = None
    priority: NDArray[np.int32] | None = None
    strict_priority: NDArray[np.uint32] | None = None
    planned: NDArray[np.int64] | None = None
    output_token_ids: NDArray[np.uint32] | None = None


def finish_rows(source: Source, rows: RowColumns, drop: NDArray[np.bool_], block_size: int) -> Trace:
    """Apply the rules of sessions and lengths to rows of another format; `drop` marks rows that are left out."""
    n = len(rows.line)
    rows.priority = np.zeros(n, np.int32) if rows.priority is None else rows.priority
    rows.strict_priority = np.zeros(n, np.uint32) if rows.strict_priority is None else rows.strict_priority
    rows.planned = np.zeros(n, np.int64) if rows.planned is None else rows.planned
    rows.output_token_ids = np.empty(0, np.uint32) if rows.output_token_ids is None else rows.output_token_ids
    columns = _Columns(rows)
    columns.drop = drop
    return columns.finish(replace(source, block_size=block_size))


class _Columns:
    """Columns of a Mooncake file, from the scanner's rows and the slow ones."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows        # a `_trace.MooncakeRows`, or `RowColumns`
        self.n = len(rows.line)
        self.hash_offsets = rows.hash_offsets
        self.hash_ids = rows.hash_ids
        self.session_ids = rows.session_ids
        self.request_ids = rows.request_ids
        self.policy_class = rows.policy_class
        self.planned = rows.planned
        self.output_token_ids = rows.output_token_ids
        self.cancel_after_ms: NDArray[np.float64] | None = None
        self.drop = np.zeros(self.n, np.bool_)      # rows that are left out

    def add_slow(self, source: Source) -> None:
        """Read the rows that the scanner left; after an error the columns end before the bad row."""
        rows = self.rows
        slow_ids: list[NDArray[np.uint64]] = []
        slow_tokens: list[NDArray[np.uint32]] = []
        counts = np.diff(rows.hash_offsets)
        taken = np.ones(self.n, np.bool_)
        try:
            for row, start, stop in rows.slow.tolist():
                try:
                    values = _read_row(source, int(rows.line[row]), source.data[start:stop])
                except TraceError as error:
                    if source.skip(error):
                        self.drop[row] = True
                        continue
                    self.n = row
                    raise
                taken[row] = False
                slow_ids.append(values["hash_ids"])
                counts[row] = len(slow_ids[-1])
                rows.output_length[row] = values["output_length"]
                for field, column in (
                    ("timestamp", rows.arrival_ms), ("delay", rows.delay_ms), ("input_length", rows.input_length),
                    ("priority", rows.priority), ("strict_priority", rows.strict_priority),
                ):
                    if field in values:
                        column[row] = values[field]
                if "cancel_after_ms" in values:
                    if self.cancel_after_ms is None:
                        self.cancel_after_ms = np.full(len(rows.line), np.nan)
                    self.cancel_after_ms[row] = values["cancel_after_ms"]
                for field in ("session_id", "request_id", "policy_class"):
                    if field in values:
                        self._set(field, row, values[field])
                if "output_token_ids" in values:
                    slow_tokens.append(values["output_token_ids"])
                    self.planned[row] = len(slow_tokens[-1])
        finally:
            n = self.n
            self.hash_offsets = np.zeros(n + 1, np.int64)
            np.cumsum(counts[:n], out=self.hash_offsets[1:])
            self.hash_ids = _splice(counts[:n], taken[:n], rows.hash_ids, slow_ids)
            if slow_tokens:
                self.output_token_ids = _splice(self.planned[:n], taken[:n], rows.output_token_ids, slow_tokens)

    def _set(self, field: str, row: int, value: str) -> None:
        """Store a string of a slow row."""
        name = field if field == "policy_class" else f"{field}s"
        if getattr(self, name) is None:
            setattr(self, name, [None] * len(self.rows.line))
        getattr(self, name)[row] = value

    def finish(self, source: Source) -> Trace:
        """Apply the rules that go beyond the syntax of a row, and make the trace."""
        n, rows = self.n, self.rows
        line, arrival = rows.line[:n], rows.arrival_ms[:n]
        output = rows.output_length[:n]
        counts = np.diff(self.hash_offsets)
        capacity = counts * source.block_size
        given = rows.input_length[:n]
        length = np.where(given < 0, capacity, given)
        over = length > capacity
        clamped = np.empty(0, np.int64)
        if source.clamp and over.any():
            clamped = np.flatnonzero(over)
            length = np.minimum(length, capacity)
            over = np.zeros(n, np.bool_)
        bad = (over | (counts == 0) | (length < 1)) & ~self.drop[:n]
        if source.skipped is not None:
            for row in np.flatnonzero(bad).tolist():
                self.drop[row] = self._skip(source, row, int(length[row]), int(counts[row]))
            bad &= ~self.drop[:n]
        worst = int(bad.argmax()) if bad.any() else n

        session, names = self._sessions()
        turn = np.zeros(n, np.int32)
        delay = rows.delay_ms[:n]
        if len(names or line) == n and np.isnan(delay).all():
            delay = np.zeros(n)
        else:
            reasons = np.where(self.drop[:n], _turns.LEFT_OUT, _turns.OK).astype(np.uint8)
            row, reason = _turns.link_turns(
                session, len(names or line), arrival, delay, turn, None if source.skipped is None else reasons)
            for other in np.flatnonzero((reasons != _turns.OK) & ~self.drop[:n]).tolist():
                try:
                    self._fail_link(source, other, int(reasons[other]), names[session[other]] if names else None)
                except TraceError as error:
                    self.drop[other] = source.skip(error)
            if row < worst:
                self._fail_link(source, row, reason, None if names is None else names[session[row]])
        if worst < n:
            self._fail_row(source, worst, int(length[worst]), int(counts[worst]))
        if self.drop[:n].all():
            source.fail(None, None, f"has no row that can be read; the first: {source.first_skipped()}")
        planned = self.planned.any()
        trace = Trace(
            block_size=source.block_size,
            arrival_ms=arrival,
            input_length=length,
            output_length=output,
            hash_offsets=self.hash_offsets,
            hash_ids=self.hash_ids,
            line=line,
            session=session,
            turn=turn,
            delay_ms=delay,
            priority=rows.priority,
            strict_priority=rows.strict_priority,
            session_ids=None if names is None else tuple(names),
            request_ids=None if self.request_ids is None else tuple(self.request_ids),
            policy_class=None if self.policy_class is None else tuple(self.policy_class),
            output_token_offsets=np.concatenate(([0], np.cumsum(self.planned))) if planned else None,
            output_token_ids=self.output_token_ids if planned else None,
            path=source.path,
            clamped=clamped,
            cancel_after_ms=self.cancel_after_ms,
        )
        return trace.select(~self.drop[:n]) if self.drop[:n].any() else trace

    def _fail_row(self, source: Source, row: int, length: int, counts: int) -> NoReturn:
        """Raise for a prompt without tokens, or with more than its hash ids cover."""
        where = int(self.rows.line[row])
        if counts == 0:
            source.fail(where, "hash_ids", "is empty; a prompt needs at least one hash id")
        if length < 1:
            source.fail(where, "input_length", "is 0; a prompt needs at least one token")
        source.fail(
            where, "input_length",
            f"{length} is more than the {counts * source.block_size} tokens that {counts} hash ids of block size "
            f"{source.block_size} cover; give the right block_size, or on_short_hash_ids='clamp' to cut the prompt",
        )

    def _skip(self, source: Source, row: int, length: int, counts: int) -> bool:
        """Note why a row is left out."""
        try:
            self._fail_row(source, row, length, counts)
        except TraceError as error:
            return source.skip(error)

    def _sessions(self) -> tuple[NDArray[np.int32], list[str] | None]:
        """Session index of each row, and the names if any row has one."""
        n = self.n
        if self.session_ids is None:
            return np.arange(n, dtype=np.int32), None
        index: dict[str, int] = {}
        # A row without a name is called after its line, and joins a session that bears that name, as in the reference.
        session = np.fromiter(
            (
                index.setdefault(f"request_{line}" if name is None else name, len(index))
                for name, line in zip(self.session_ids[:n], self.rows.line[:n].tolist(), strict=True)
            ),
            np.int32, n,
        )
        return session, list(index)

    def _fail_link(self, source: Source, row: int, reason: int, session: str | None) -> NoReturn:
        """Raise for a think time that breaks a rule."""
        line = int(self.rows.line[row])
        delay, arrival = float(self.rows.delay_ms[row]), float(self.rows.arrival_ms[row])
        of = "its session (no row has a session_id)" if session is None else f"session {short(session)}"
        if reason == _turns.FIRST_DELAY:
            source.fail(line, "delay", f"is {delay} in the first turn of {of}; only later turns have a delay")
        if reason == _turns.BAD_DELAY:
            source.fail(line, "delay", f"is {delay}; a think time must be a finite number of at least 0 ms")
        if reason == _turns.NO_EARLIER_TIMESTAMP:
            source.fail(
                line, "timestamp",
                f"no earlier row of {of} has a timestamp to subtract; give that row one, or this row a delay",
            )
        source.fail(
            line, "timestamp",
            f"{arrival} is before (or too far after) the previous timestamp of {of}, so no think time can be "
            "inferred; sort the turns, or give this row a delay",
        )


def _splice(
    counts: NDArray[np.int64], taken: NDArray[np.bool_], scanned: NDArray[Any], slow: list[NDArray[Any]]
) -> NDArray[Any]:
    """Values of all rows in order, from those of the scanned rows and one array for each of the others."""
    values = np.empty(counts.sum(), scanned.dtype)
    from_scan = np.repeat(taken, counts)
    values[from_scan] = scanned[: np.count_nonzero(from_scan)]
    if slow:
        values[~from_scan] = np.concatenate(slow)
    return values


def _read_row(source: Source, line: int, raw: bytes) -> dict[str, Any]:
    """Read one row with a JSON parser; the fields that it has, by their main name, checked."""
    def strange(key: str) -> None:
        if source.auto and key == "wait_for":
            source.fail(line, key, "belongs to format 'agentic_mooncake'; name that format, or 'mooncake' to ignore "
                                   "the key")

    values = read_fields(source, line, raw, KEYS, CHECKS, strange)
    check_row(source, line, values)
    return values


def check_row(source: Source, line: int, values: dict[str, Any]) -> None:
    """What must hold between the fields of a row of this format and those derived from it."""
    for field in ("hash_ids", "output_length"):
        if field not in values:
            source.fail(line, field, "is missing; every row needs it")
    planned = values.get("output_token_ids")
    if planned is not None and len(planned) != values["output_length"]:
        source.fail(
            line, "output_token_ids",
            f"holds {len(planned)} tokens, but output_length is {values['output_length']}; make them equal",
        )
    length = values.get("input_length", 0)
    if length > MAX_INT64:      # above every capacity
        if not source.clamp:
            source.fail(line, "input_length", f"{length} is more than any hash ids cover; see on_short_hash_ids")
        values["input_length"] = MAX_INT64


CHECKS: dict[str, tuple[Check, int, int]] = {
    "timestamp": (check_number, 0, 0),
    "input_length": (check_integer, 0, MAX_UINT64),
    "output_length": (check_integer, 0, MAX_INT64),
    "hash_ids": (check_integers, 0, MAX_UINT64),
    "delay": (check_number, 0, 0),
    "session_id": (check_string, 0, 0),
    "request_id": (check_string, 0, 0),
    "priority": (check_integer, -(2**31), 2**31 - 1),
    "strict_priority": (check_integer, 0, MAX_UINT32),
    "policy_class": (check_string, 0, 0),
    "output_token_ids": (check_integers, 0, MAX_UINT32),
    "cancel_after_ms": (check_patience, 0, 0),
}


def load_deltas(source: Source) -> Trace:
    """Read the same rows, each turn of which adds to the prompt."""
    return replace(load(source), accumulate=True)


FORMAT = Format("mooncake", load, title="Mooncake JSONL: one request a line, prompts as hash ids", skips=True)
DELTA_FORMAT = Format("mooncake-delta", load_deltas, aliases=("mooncake_delta",),
                      title="Mooncake JSONL whose turns add to the session's prompt, answers included", skips=True)
