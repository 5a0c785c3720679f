"""Trace files to traces: one reader a format, and every error that a file can cause.

The compiled scanner takes the usual rows; this module reads the others one by one with a JSON parser, applies the rules
that need more than one row, and says what is wrong, where, and what to do about it.
"""
from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from . import _trace
from .trace import MAX_BLOCK_SIZE, Trace, TraceError

__all__ = ["FORMATS", "TraceError", "load"]

# An alias and its name are one field.
_MOONCAKE_KEYS = {
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
}
# First-row keys that tell the reference's other formats from mooncake.
_OTHER_FORMATS = {
    "wait_for": "agentic_mooncake",
    "tool_wait_ms": "agentic_mooncake",
    "prefix_reset": "agentic_mooncake",
    "branches": "agentic_mooncake",
    "num_turns": "applied_compute_agentic",
    "event": "dynamo",
    "schema": "dynamo",
}
_MAX_INT64 = 2**63 - 1
_MAX_UINT64 = 2**64 - 1
_MAX_UINT32 = 2**32 - 1
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 18           # compressed bytes a step: what follows a gzip member is copied, so not too many
_SNIFF_BYTES = 1 << 20          # a longer first row is not read twice


class _Object(list[tuple[str, Any]]):
    """The members of a JSON object, in order and with repetitions."""


class _NotJson(str):
    """NaN, Infinity or -Infinity, which Python's parser takes for numbers."""


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_Object, parse_constant=_NotJson)
_STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


@dataclass(frozen=True)
class _Source:
    """The bytes of a file and how the caller wants them read."""

    data: bytes | mmap.mmap
    start: int                  # first byte after a byte order mark
    path: str
    block_size: int
    clamp: bool
    auto: bool
    slow: bool

    def fail(self, line: int | None, field: str | None, problem: str) -> NoReturn:
        raise TraceError(problem, self.path, line, field) from None


def load(
    path: str | os.PathLike[str],
    format: str = "auto",
    block_size: int = 512,
    on_short_hash_ids: str = "error",
    *,
    _slow: bool = False,
) -> Trace:
    """Read a trace file, plain or gzip (told by its first bytes).

    Parameters
    ----------
    path : path-like
    format : str
        A key of `FORMATS`, or "auto": look at the first row.
    block_size : int
        Tokens per hash id.
    on_short_hash_ids : {"error", "clamp"}
        What to do with an input length above what the hash ids cover.
    _slow : bool
        Read every row with the JSON parser (for tests).

    Returns
    -------
    Trace

    Raises
    ------
    TraceError
        The file is not a trace; names file, line and field.
    ValueError
        An unknown format or `on_short_hash_ids`.
    OSError
        The file cannot be opened.
    """
    name = os.fsdecode(path)
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"format {format!r} does not exist; there are 'auto', {_formats()}")
    if on_short_hash_ids not in ("error", "clamp"):
        raise ValueError(f"on_short_hash_ids must be 'error' or 'clamp', is {on_short_hash_ids!r}")
    if isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer)) \
            or not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise TraceError(
            f"must be an integer greater than 0 and at most {MAX_BLOCK_SIZE}, is {block_size!r}; "
            "give the number of tokens that a hash id stands for",
            name, field="block_size",
        )
    if os.path.isdir(name):
        raise TraceError("is a directory; name a file", name)
    with open(name, "rb") as file:
        data: bytes | mmap.mmap
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (ValueError, OSError):       # empty, or not a regular file
            data = file.read()
    try:
        content = _decompress(data, name) if data[:2] == _GZIP_MAGIC else data
        source = _Source(
            data=content,
            start=len(_BOM) if content[:3] == _BOM else 0,
            path=name,
            block_size=int(block_size),
            clamp=on_short_hash_ids == "clamp",
            auto=format == "auto",
            slow=_slow,
        )
        return FORMATS[_sniff(source) if format == "auto" else format](source)
    finally:
        if isinstance(data, mmap.mmap):
            data.close()


def _formats() -> str:
    """The names of the formats, for a message."""
    return ", ".join(repr(name) for name in FORMATS)


def _decompress(data: bytes | mmap.mmap, path: str) -> bytes:
    """All members of a gzip file."""
    parts: list[bytes] = []
    member = zlib.decompressobj(wbits=31)
    between = True              # nothing of this member read yet
    at = 0
    try:
        while at < len(data):
            chunk = data[at : at + _READ_BYTES]
            at += len(chunk)
            if between:
                chunk = chunk.lstrip(b"\0")     # padding
                if not chunk:
                    continue
            parts.append(member.decompress(chunk))
            between = member.eof
            if between:
                at -= len(member.unused_data)
                member = zlib.decompressobj(wbits=31)
    except zlib.error as error:
        raise TraceError(f"the gzip data is damaged ({error}); get the file again", path) from None
    if not between:
        parts.append(member.flush())
        line = 1 + sum(part.count(b"\n") for part in parts)
        raise TraceError("the gzip data ends too early; get the file again", path, line, "row")
    return b"".join(parts)


def _sniff(source: _Source) -> str:
    """Name of the format, from the first row that is not blank.

    Refuses only what it knows to be another format: whatever else is wrong, a reader has the better message.
    """
    data, start, line = source.data, source.start, 1
    while True:
        stop = data.find(b"\n", start)
        row = data[start : len(data) if stop < 0 else stop]
        if row.strip() or stop < 0:
            break
        start, line = stop + 1, line + 1
    found = None
    if row[:64].upper().startswith(b"TIMESTAMP,CONTEXTTOKENS,"):
        found = "azure"
    elif len(row) < _SNIFF_BYTES:
        try:
            value = _DECODER.decode(row.decode())
        except (ValueError, RecursionError):
            value = None
        keys = [key for key, _ in value] if isinstance(value, _Object) else []
        if "wait_for" in keys or not any(_MOONCAKE_KEYS.get(key) == "output_length" for key in keys):
            found = next((_OTHER_FORMATS[key] for key in keys if key in _OTHER_FORMATS), None)
    if found is not None and found not in FORMATS:
        source.fail(line, "row", f"looks like format {found!r}, which cannot be read yet; there are {_formats()}")
    return found or "mooncake"


# Mooncake

def _load_mooncake(source: _Source) -> Trace:
    """Read JSONL with one request a line."""
    rows = _trace.scan_mooncake(source.data, source.start, source.slow)
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


class _Columns:
    """Columns of a Mooncake file, from the scanner's rows and the slow ones."""

    def __init__(self, rows: _trace.MooncakeRows) -> None:
        self.rows = rows
        self.n = len(rows.line)
        self.hash_offsets = rows.hash_offsets
        self.hash_ids = rows.hash_ids
        self.session_ids = rows.session_ids
        self.request_ids = rows.request_ids
        self.policy_class = rows.policy_class
        self.planned = rows.planned
        self.output_token_ids = rows.output_token_ids

    def add_slow(self, source: _Source) -> None:
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
                except TraceError:
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

    def finish(self, source: _Source) -> Trace:
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
        bad = over | (counts == 0) | (length < 1)
        worst = int(bad.argmax()) if bad.any() else n

        session, names = self._sessions()
        turn = np.zeros(n, np.int32)
        delay = rows.delay_ms[:n]
        if len(names or line) == n and np.isnan(delay).all():
            delay = np.zeros(n)
        else:
            row, reason = _trace.link_turns(session, len(names or line), arrival, delay, turn)
            if row < worst:
                self._fail_link(source, row, reason, None if names is None else names[session[row]])
        if worst < n:
            where = int(line[worst])
            if counts[worst] == 0:
                source.fail(where, "hash_ids", "is empty; a prompt needs at least one hash id")
            if length[worst] < 1:
                source.fail(where, "input_length", "is 0; a prompt needs at least one token")
            source.fail(
                where, "input_length",
                f"{given[worst]} is more than the {capacity[worst]} tokens that {counts[worst]} hash ids of block size "
                f"{source.block_size} cover; give the right block_size, or on_short_hash_ids='clamp' to cut the prompt",
            )
        planned = self.planned.any()
        return Trace(
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
        )

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

    def _fail_link(self, source: _Source, row: int, reason: int, session: str | None) -> NoReturn:
        """Raise for a think time that breaks a rule."""
        line = int(self.rows.line[row])
        delay, arrival = float(self.rows.delay_ms[row]), float(self.rows.arrival_ms[row])
        of = "its session (no row has a session_id)" if session is None else f"session {_short(session)}"
        if reason == _trace.FIRST_DELAY:
            source.fail(line, "delay", f"is {delay} in the first turn of {of}; only later turns have a delay")
        if reason == _trace.BAD_DELAY:
            source.fail(line, "delay", f"is {delay}; a think time must be a finite number of at least 0 ms")
        if reason == _trace.NO_EARLIER_TIMESTAMP:
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


def _read_row(source: _Source, line: int, raw: bytes) -> dict[str, Any]:
    """Read one row with a JSON parser; the fields that it has, by their main name, checked."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        source.fail(line, "row", f"byte {error.start + 1} is not UTF-8; convert the file to UTF-8")
    try:
        members = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg}, column {error.pos + 1}"
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            source.fail(line, "row", f"ends too early ({where}); the row is cut off, or spread over several lines")
        source.fail(line, "row", f"is not JSON ({where}); write one JSON object a line")
    except RecursionError:
        source.fail(line, "row", "is nested too deeply; a row is one flat object")
    except ValueError:          # an integer of thousands of digits
        source.fail(line, "row", "holds a number with too many digits; the largest integer is 18446744073709551615")
    if not isinstance(members, _Object):
        source.fail(line, "row", f"is {_kind(members)}, not a JSON object; write one object a line")
    values: dict[str, Any] = {}
    for key, value in members:
        field = _MOONCAKE_KEYS.get(key)
        if field is None:
            if source.auto and key == "wait_for":
                source.fail(
                    line, key,
                    f"belongs to format 'agentic_mooncake', which cannot be read yet; there are {_formats()} "
                    "(name one to ignore the key)",
                )
        elif field in values:
            source.fail(line, field, f"is given twice (the second time as {key!r}); keep one of them")
        else:
            values[field] = value
    values = {field: value for field, value in values.items() if value is not None}
    for field, (check, low, high) in _CHECKS.items():
        if field in values:
            values[field] = check(source, line, field, values[field], low, high)
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
    if length > _MAX_INT64:     # above every capacity
        if not source.clamp:
            source.fail(line, "input_length", f"{length} is more than any hash ids cover; see on_short_hash_ids")
        values["input_length"] = _MAX_INT64
    if "NaN" in text or "Infinity" in text:     # perhaps in a key that is not read
        try:
            _STRICT_DECODER.decode(text)
        except ValueError as error:
            source.fail(line, "row", f"holds {error}, which is not JSON; leave the key out")
    return values


def _integer_problem(value: Any, low: int, high: int) -> str | None:
    if type(value) is not int:
        return f"must be an integer, is {_kind(value)}; correct it, or leave the row out"
    if not low <= value <= high:
        return f"must be from {low} to {high}, is {_short(value)}; correct it, or leave the row out"
    return None


def _check_integer(source: _Source, line: int, field: str, value: Any, low: int, high: int) -> Any:
    problem = _integer_problem(value, low, high)
    if problem is not None:
        source.fail(line, field, problem)
    return value


def _check_integers(source: _Source, line: int, field: str, value: Any, low: int, high: int) -> Any:
    if type(value) is not list:
        source.fail(line, field, f"must be a list of integers, is {_kind(value)}; write it as [1, 2, 3]")
    if not (set(map(type, value)) <= {int} and (not value or low <= min(value) and max(value) <= high)):
        for i, element in enumerate(value):
            problem = _integer_problem(element, low, high)
            if problem is not None:
                source.fail(line, field, f"element {i} {problem}")
    return np.array(value, np.uint64 if field == "hash_ids" else np.uint32)


def _check_number(source: _Source, line: int, field: str, value: Any, low: int, high: int) -> float:
    if type(value) is not int and type(value) is not float:
        source.fail(line, field, f"must be a number of ms, is {_kind(value)}; write a number, or leave the key out")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        source.fail(line, field, "must be a finite number of ms, is too large for one; correct it")
    return number


def _check_string(source: _Source, line: int, field: str, value: Any, low: int, high: int) -> str:
    if type(value) is not str:
        source.fail(line, field, f"must be a string, is {_kind(value)}; put it in quotes, or leave the key out")
    try:
        value.encode()
    except UnicodeEncodeError:
        source.fail(line, field, f"is not valid Unicode: {_short(value)}; a surrogate stands alone")
    return value


_CHECKS: dict[str, tuple[Callable[[_Source, int, str, Any, int, int], Any], int, int]] = {
    "timestamp": (_check_number, 0, 0),
    "input_length": (_check_integer, 0, _MAX_UINT64),
    "output_length": (_check_integer, 0, _MAX_INT64),
    "hash_ids": (_check_integers, 0, _MAX_UINT64),
    "delay": (_check_number, 0, 0),
    "session_id": (_check_string, 0, 0),
    "request_id": (_check_string, 0, 0),
    "priority": (_check_integer, -(2**31), 2**31 - 1),
    "strict_priority": (_check_integer, 0, _MAX_UINT32),
    "policy_class": (_check_string, 0, 0),
    "output_token_ids": (_check_integers, 0, _MAX_UINT32),
}


def _kind(value: Any) -> str:
    """What a JSON value is, for a message."""
    if isinstance(value, _NotJson):
        return str.__str__(value)
    if isinstance(value, _Object):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    return f"the string {_short(value)}" if isinstance(value, str) else f"the number {_short(value)}"


def _short(value: Any) -> str:
    """A value in a message, not too long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


FORMATS: dict[str, Callable[[_Source], Trace]] = {"mooncake": _load_mooncake}
"""Readers by the name of the format."""
