"""CSV files: the Azure LLM inference traces, BurstGPT, and any file whose columns have names.

The compiled scanner takes plain rows of numbers and times; others, and files with columns of text, are read by
Python's csv module.
"""
from __future__ import annotations

import csv
import datetime
import io
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _csv
from ..trace import Trace, TraceError
from .named import FIELD_OF, UNITS, make_trace, plain_name, resolve, time_unit
from .registry import Format, Head
from .rows import short
from .source import Source

__all__ = ["AZURE", "BURSTGPT", "CSV"]

_MAX_ROW = 1 << 20             # bytes, of the header too
_MAX_INTEGER = 2**53            # a double holds every integer up to here
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_INTEGERS = {"input_length": (0, _MAX_INTEGER), "output_length": (0, _MAX_INTEGER),
             "priority": (-(2**31), 2**31 - 1), "strict_priority": (0, 2**32 - 1)}
_TEXTS = ("session_id", "request_id", "policy_class")
_LISTS = ("hash_ids", "output_token_ids")


@dataclass
class _Table:
    """The header of a CSV file and where each field is."""

    header: list[str]
    line: int                   # of the header
    start: int                  # first byte after it
    places: dict[str, int]
    kinds: dict[str, str]       # field -> a name of `_csv.KINDS`, or "text"
    unit: float                 # ms in a unit of numeric times


def _header(source: Source) -> tuple[list[str], int, int]:
    """Names, line, and the first byte after the header row."""
    data, start, line = source.data, source.start, 1
    while True:
        stop = data.find(b"\n", start)
        end = len(data) if stop < 0 else stop
        if end - start > _MAX_ROW:
            source.fail(line, "row", "is longer than 1 MiB; a CSV file begins with the names of its columns")
        row = bytes(data[start:end])
        if row.strip() or stop < 0:
            break
        start, line = stop + 1, line + 1
    try:
        names = next(csv.reader([row.decode().strip("\r")], strict=True), [])
    except UnicodeDecodeError as error:
        source.fail(line, "row", f"byte {error.start + 1} is not UTF-8; convert the file to UTF-8")
    except csv.Error as error:
        source.fail(line, "row", f"is not CSV ({error}); a CSV file begins with the names of its columns")
    return [name.strip() for name in names], line, min(end + 1, len(data))


def _first_cells(source: Source, start: int) -> list[str]:
    """Cells of the first row after the header, to see what they hold."""
    for text in bytes(source.data[start:start + _MAX_ROW]).decode(errors="replace").splitlines():
        if text.strip():
            try:
                return next(csv.reader([text]), [])
            except csv.Error:
                return []
    return []


def _kinds(places: dict[str, int], cells: list[str]) -> dict[str, str]:
    kinds = {}
    for field, place in places.items():
        if field in _TEXTS or field in _LISTS:
            kinds[field] = "text"
        elif field in _INTEGERS:
            kinds[field] = "integer"
        else:
            cell = cells[place] if place < len(cells) else ""
            kinds[field] = "moment" if field == "timestamp" and _MOMENT.fullmatch(cell.strip()) else "decimal"
    return kinds


def _read(source: Source, table: _Table) -> Trace:
    """Read the rows."""
    columns: dict[str, list[Any] | NDArray[Any]] = {}
    if "text" in table.kinds.values() or source.slow or table.start >= len(source.data):
        line, columns, drop = _read_slowly(source, table)
    else:
        kinds = np.zeros(len(table.header), np.int64)
        for field, place in table.places.items():
            kinds[place] = _csv.KINDS[table.kinds[field]]
        whole, real, lines, slow = _csv.scan_csv(source.data, table.start, kinds)
        line = lines + table.line
        for field, place in table.places.items():
            columns[field] = (real if table.kinds[field] == "decimal" else whole)[place].copy()
        drop = np.zeros(len(line), np.bool_)
        for row, start, stop in slow.tolist():
            try:
                values = _cells(source, table, int(line[row]), bytes(source.data[start:stop]))
            except TraceError as error:
                if not source.skip(error):
                    raise
                drop[row] = True
                continue
            for field, value in values.items():
                columns[field][row] = value
    return _finish(source, table, line, columns, drop)


def _read_slowly(
    source: Source, table: _Table
) -> tuple[NDArray[np.int64], dict[str, list[Any] | NDArray[Any]], NDArray[np.bool_]]:
    """Read every row with the csv module."""
    lines: list[int] = []
    found: dict[str, list[Any]] = {field: [] for field in table.places}
    for number, raw in enumerate(io.BytesIO(source.data[table.start:]), table.line + 1):
        if not raw.strip():
            continue
        try:
            values = _cells(source, table, number, raw)
        except TraceError as error:
            if not source.skip(error):
                raise
            continue
        lines.append(number)
        for field, value in values.items():
            found[field].append(value)
    columns: dict[str, list[Any] | NDArray[Any]] = {}
    for field, values_of in found.items():
        kind = table.kinds[field]
        columns[field] = values_of if kind == "text" else \
            np.array(values_of, np.float64 if kind == "decimal" else np.int64)
    return np.array(lines, np.int64), columns, np.zeros(len(lines), np.bool_)


def _cells(source: Source, table: _Table, line: int, raw: bytes) -> dict[str, Any]:
    """The fields of one row, checked."""
    if len(raw) > _MAX_ROW:
        source.fail(line, "row", "is longer than 1 MiB, which no row of numbers is")
    try:
        cells = next(csv.reader([raw.decode().rstrip("\r\n")], strict=True), [])
    except UnicodeDecodeError as error:
        source.fail(line, "row", f"byte {error.start + 1} is not UTF-8; convert the file to UTF-8")
    except csv.Error as error:
        source.fail(line, "row", f"is not a CSV row ({error}); quoted cells must end in their own line")
    if len(cells) != len(table.header):
        cut = "; the row is cut off" if len(cells) < len(table.header) else ""
        source.fail(line, "row", f"has {len(cells)} cells, the header {len(table.header)}{cut}")
    return {field: _cell(source, line, field, table.kinds[field], cells[place].strip())
            for field, place in table.places.items()}


def _cell(source: Source, line: int, field: str, kind: str, text: str) -> Any:
    if kind == "text":
        return _listed(source, line, field, text) if field in _LISTS else text or None
    if kind == "moment":
        return _moment(source, line, field, text)
    if kind == "decimal" and not text:
        return math.nan
    if field in ("priority", "strict_priority") and not text:
        return 0
    try:
        value = float(text)
    except ValueError:
        source.fail(line, field, f"must be a number, is {short(text)}" if text else "is empty")
    if not math.isfinite(value):
        source.fail(line, field, f"must be a finite number, is {short(text)}")
    if kind == "decimal":
        return value
    low, high = _INTEGERS[field]
    if value != int(value):
        source.fail(line, field, f"must be an integer, is {short(text)}")
    if not low <= value <= high:
        source.fail(line, field, f"must be from {low} to {high}, is {short(text)}")
    return int(value)


def _listed(source: Source, line: int, field: str, text: str) -> NDArray[Any]:
    """Integers in a cell, between spaces, semicolons or commas, perhaps in brackets."""
    parts = re.split(r"[\s,;]+", text.strip("[] ")) if text.strip("[] ") else []
    top = 2**64 if field == "hash_ids" else 2**32
    if not all(part.isascii() and part.isdigit() and len(part) <= 20 and int(part) < top for part in parts):
        source.fail(line, field, f"must be integers from 0 to {top - 1}, is {short(text)}")
    return np.array([int(part) for part in parts], np.uint64 if field == "hash_ids" else np.uint32)


def _moment(source: Source, line: int, field: str, text: str) -> int:
    """Nanoseconds since 1970."""
    match = _MOMENT.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        zone = (match[4] or "Z").replace("Z", "+00:00")
        zone = zone if ":" in zone else f"{zone[:3]}:{zone[3:]}"
        moment = datetime.datetime.fromisoformat(f"{match[1]}T{match[2]}{zone}")
    except ValueError:
        source.fail(line, field, f"must be a time like 2023-11-16 18:15:46.680, is {short(text)}")
    if not 1970 <= moment.year <= 2200:
        source.fail(line, field, f"must lie between 1970 and 2200, is {short(text)}")
    return int((moment - _EPOCH).total_seconds()) * 10**9 + int((match[3] or "").ljust(9, "0"))


def _finish(source: Source, table: _Table, line: NDArray[np.int64], columns: dict[str, Any],
            drop: NDArray[np.bool_]) -> Trace:
    """Times in ms, lists as offsets and values, and the trace."""
    others: dict[str, Any] = {f"{name}s": columns[name] for name in ("session_id", "request_id") if name in columns}
    for name in ("priority", "strict_priority", "policy_class"):
        if name in columns:
            others[name] = columns[name]
    if "priority" in others:
        others["priority"] = others["priority"].astype(np.int32)
    if "strict_priority" in others:
        others["strict_priority"] = others["strict_priority"].astype(np.uint32)
    if "hash_ids" in columns:
        counts = [len(ids) for ids in columns["hash_ids"]]
        others["hash_offsets"] = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        others["hash_ids"] = np.concatenate([np.empty(0, np.uint64), *columns["hash_ids"]])
    if "output_token_ids" in columns:
        others["planned"] = np.array([len(ids) for ids in columns["output_token_ids"]], np.int64)
        others["output_token_ids"] = np.concatenate([np.empty(0, np.uint32), *columns["output_token_ids"]])
    arrival = columns.get("timestamp")
    if arrival is not None:
        if table.kinds["timestamp"] == "moment":
            known = arrival[~drop]
            # Differences of integers: the first arrival is 0, and nothing is lost before the division.
            arrival = (arrival - (known.min() if len(known) else 0)) / 1e6
        else:
            arrival = arrival * table.unit if table.unit != 1.0 else arrival
    delay = columns.get("delay")
    n = len(line)
    return make_trace(
        source, line=line, arrival_ms=arrival, delay_ms=None if delay is None else delay * table.unit,
        input_length=columns.get("input_length", np.full(n, -1, np.int64)), output_length=columns["output_length"],
        drop=drop, **others)


def _load_csv(source: Source) -> Trace:
    """Read a CSV file whose columns have usual names, or those of the option `columns`."""
    header, line, start = _header(source)
    places = resolve(source, line, header)
    kinds = _kinds(places, _first_cells(source, start))
    return _read(source, _Table(header, line, start, places, kinds, time_unit(source, header, places)))


def _need(source: Source, header: list[str], line: int, names: dict[str, str], what: str) -> dict[str, int]:
    """Places of columns by their exact names, letter case aside."""
    lower = [name.lower() for name in header]
    for field, name in names.items():
        if name.lower() not in lower:
            source.fail(line, field, f"there is no column {name!r}, which {what} has; the columns are {header}")
    return {field: lower.index(name.lower()) for field, name in names.items()}


def _load_azure(source: Source) -> Trace:
    """Read an Azure trace: time stamps become ms after the earliest, prompts share nothing."""
    header, line, start = _header(source)
    places = _need(source, header, line, {"timestamp": "TIMESTAMP", "input_length": "ContextTokens",
                                          "output_length": "GeneratedTokens"}, "an Azure LLM inference trace")
    kinds = {"timestamp": "moment", "input_length": "integer", "output_length": "integer"}
    return _read(source, _Table(header, line, start, places, kinds, 1.0))


def _load_burstgpt(source: Source) -> Trace:
    """Read a BurstGPT trace: times in s; the session column, where there is one, makes sessions."""
    header, line, start = _header(source)
    names = {"timestamp": "Timestamp", "input_length": "Request tokens", "output_length": "Response tokens"}
    if "session id" in [name.lower() for name in header]:
        names["session_id"] = "Session ID"
    places = _need(source, header, line, names, "a BurstGPT trace")
    kinds = {"timestamp": "decimal", "input_length": "integer", "output_length": "integer", "session_id": "text"}
    return _read(source, _Table(header, line, start, places, {field: kinds[field] for field in places}, UNITS["s"]))


def _columns_of(head: Head) -> set[str]:
    if head.row[:1] in (b"{", b"[", b""):
        return set()
    try:
        cells = next(csv.reader([head.row.decode("utf-8-sig")]), [])
    except (UnicodeDecodeError, csv.Error):
        return set()
    return {cell.strip().lower() for cell in cells}


def _is_csv(head: Head) -> bool:
    fields = {FIELD_OF.get(plain_name(name)) for name in _columns_of(head)}
    return "output_length" in fields and bool({"input_length", "hash_ids"} & fields)


AZURE = Format("azure", _load_azure, title="Azure LLM inference traces (2023, 2024): CSV with time, context and "
               "generated tokens", sniff=lambda head: {"timestamp", "contexttokens", "generatedtokens"} <=
               _columns_of(head), aliases=("azure_llm",), skips=True)
BURSTGPT = Format("burstgpt", _load_burstgpt, title="BurstGPT: CSV with time (s), request and response tokens",
                  sniff=lambda head: {"timestamp", "request tokens", "response tokens"} <= _columns_of(head),
                  skips=True)
CSV = Format("csv", _load_csv, title="CSV with named columns", sniff=_is_csv, skips=True,
             options=frozenset({"columns", "time_unit"}))
