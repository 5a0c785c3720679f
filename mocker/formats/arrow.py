"""Parquet and Arrow files with named columns; lists hold hash ids or planned tokens."""
from __future__ import annotations

import importlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrow_arrays import nulls, numbers
from ..trace import MAX_BLOCK_SIZE, Trace, TraceError
from .named import UNITS, make_trace, resolve, time_unit
from .registry import Format, Head
from .source import Source

__all__ = ["ARROW", "PARQUET"]

_MAX = {"input_length": 2**63 - 1, "output_length": 2**63 - 1, "priority": 2**31 - 1, "strict_priority": 2**32 - 1,
        "hash_ids": 2**64 - 1, "output_token_ids": 2**32 - 1}


def _module(source: Source, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{source.path} needs pyarrow, which is not installed: pip install 'mocker-llm[parquet]'") \
            from error


def _load(source: Source, parquet: bool) -> Trace:
    pa = _module(source, "pyarrow")
    # A map of our own, which the table keeps as long as it needs it.
    file = pa.memory_map(source.path) if isinstance(source.data, mmap.mmap) else pa.BufferReader(source.data)
    try:
        with file:
            if parquet:
                reader = _module(source, "pyarrow.parquet").ParquetFile(file)
                schema, header = reader.schema_arrow, reader.schema_arrow.names
                places = resolve(source, None, header)
                table = reader.read(columns=[header[place] for place in places.values()])
            else:
                opened = pa.ipc.open_file(file) if source.data[:6] == b"ARROW1" else pa.ipc.open_stream(file)
                schema, header = opened.schema, opened.schema.names
                places = resolve(source, None, header)
                table = opened.read_all()
            table.validate(full=True)
            return _make(source, schema, header, places, table)
    except (pa.ArrowException, OSError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        source.fail(None, None, f"is not a readable {'Parquet' if parquet else 'Arrow'} file ({text[:200]})")


def _make(source: Source, schema: Any, header: list[str], places: dict[str, int], table: Any) -> Trace:
    unit = time_unit(source, header, places)
    reader = _Reader(source, table.num_rows)
    columns = {field: table[header[place]].combine_chunks() for field, place in places.items()}
    n = table.num_rows
    inputs = reader.integers("input_length", columns["input_length"], -1) if "input_length" in columns \
        else np.full(n, -1, np.int64)
    outputs = reader.integers("output_length", columns["output_length"], None)
    others: dict[str, Any] = {}
    for field, dtype in (("priority", np.int32), ("strict_priority", np.uint32)):
        if field in columns:
            low = -(2**31) if field == "priority" else 0
            others[field] = reader.integers(field, columns[field], 0, low).astype(dtype)
    for field in ("session_id", "request_id", "policy_class"):
        if field in columns:
            others[field if field == "policy_class" else f"{field}s"] = reader.strings(field, columns[field])
    if "hash_ids" in columns:
        others["hash_offsets"], others["hash_ids"] = reader.lists("hash_ids", columns["hash_ids"], np.uint64)
    if "output_token_ids" in columns:
        offsets, others["output_token_ids"] = reader.lists("output_token_ids", columns["output_token_ids"], np.uint32)
        others["planned"] = np.diff(offsets)
        for row in np.flatnonzero((others["planned"] != 0) & (others["planned"] != outputs)).tolist():
            reader.bad(row, "output_token_ids", f"holds {others['planned'][row]} tokens, but output_length is "
                       f"{outputs[row]}; make them equal")
    arrival = reader.times("timestamp", columns["timestamp"], unit) if "timestamp" in columns else None
    delay = reader.times("delay", columns["delay"], unit) if "delay" in columns else None
    said = (schema.metadata or {}).get(b"mocker.block_size", b"")
    size = int(said) if said.isdigit() and len(said) < 11 and 1 <= int(said) <= MAX_BLOCK_SIZE else None
    return make_trace(source, line=np.arange(1, n + 1), input_length=inputs, output_length=outputs, arrival_ms=arrival,
                      delay_ms=delay, drop=reader.drop, block_size=size, **others)


class _Reader:
    """Columns of a table as NumPy arrays; what is wrong in a row is raised or noted."""

    def __init__(self, source: Source, n: int) -> None:
        self.source = source
        self.pa = _module(source, "pyarrow")
        self.drop = np.zeros(n, np.bool_)

    def bad(self, row: int, field: str, problem: str) -> None:
        """Raise for a row, or leave it out."""
        if self.drop[row]:
            return
        try:
            self.source.fail(row + 1, field, problem)
        except TraceError as error:
            if not self.source.skip(error):
                raise
            self.drop[row] = True

    def _kind(self, field: str, column: Any, want: str, *kinds: str) -> None:
        if not any(getattr(self.pa.types, f"is_{kind}")(column.type) for kind in kinds):
            self.source.fail(None, field, f"is a column of {column.type}, not of {want}")

    def integers(self, field: str, column: Any, missing: int | None, low: int = 0) -> NDArray[np.int64]:
        """int64[n]; nulls as `missing`, or as errors."""
        self._kind(field, column, "integers", "integer", "floating")
        empty, values = nulls(column), numbers(column)
        if values.dtype.kind == "f":
            odd = ~(np.isfinite(values) & (values == np.floor(values)) & (np.abs(values) < 2**53))
            for row in np.flatnonzero(odd & ~empty).tolist():
                self.bad(row, field, f"must be an integer, is {values[row]}")
            values = np.where(odd, 0, values)
        high = _MAX[field]
        outside = (values < low) | (values > high) if values.dtype.kind != "u" else values > np.uint64(high)
        for row in np.flatnonzero(outside & ~empty).tolist():
            self.bad(row, field, f"must be from {low} to {high}, is {values[row]}")
        result = np.where(outside, 0, values).astype(np.int64)
        if missing is None:
            for row in np.flatnonzero(empty).tolist():
                self.bad(row, field, "is missing; every row needs it")
        else:
            result[empty] = missing
        return result

    def times(self, field: str, column: Any, unit: float) -> NDArray[np.float64]:
        """float64[n], ms; NaN for null. Time stamps count from the earliest."""
        types = self.pa.types
        self._kind(field, column, "numbers or times", "integer", "floating", "timestamp", "duration")
        empty, values = nulls(column), numbers(column)
        if types.is_timestamp(column.type) or types.is_duration(column.type):
            scale = UNITS[column.type.unit]
            known = values[~empty]
            start = known.min() if types.is_timestamp(column.type) and len(known) else 0
            result = np.asarray((values - start) * scale if scale >= 1 else (values - start) / (1 / scale), np.float64)
        else:
            result = values.astype(np.float64)
            result = result * unit if unit != 1.0 else result
        for row in np.flatnonzero(~np.isfinite(result) & ~empty).tolist():
            self.bad(row, field, f"must be a finite number, is {result[row]}")
        return np.where(empty | ~np.isfinite(result), np.nan, result)

    def strings(self, field: str, column: Any) -> list[str | None]:
        """Text, or integers as text."""
        types = self.pa.types
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if types.is_integer(column.type):
            column = column.cast(self.pa.string())
        self._kind(field, column, "text", "string", "large_string")
        return column.to_pylist()  # type: ignore[no-any-return]

    def lists(self, field: str, column: Any, dtype: type[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Offsets and values of lists; an empty list for null."""
        self._kind(field, column, "lists of integers", "list", "large_list")
        if not self.pa.types.is_integer(column.type.value_type):
            self.source.fail(None, field, f"is a column of {column.type}, not of lists of integers")
        lengths = np.where(nulls(column), 0, np.diff(numbers(column.offsets)))
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        flat = column.flatten()
        if flat.null_count:
            row = int(np.searchsorted(offsets, nulls(flat).argmax(), "right")) - 1
            self.source.fail(row + 1, field, "holds a null")
        values = numbers(flat)
        high = _MAX[field]
        if len(values):
            outside = (values < 0) | ((values > high) if values.dtype.kind != "u" or values.dtype.itemsize < 8 else
                                      (values > np.uint64(high)))
            for at in np.flatnonzero(outside).tolist():
                row = int(np.searchsorted(offsets, at, "right")) - 1
                self.bad(row, field, f"must hold integers from 0 to {high}, holds {values[at]}")
            values = np.where(outside, 0, values) if outside.any() else values
        return offsets, values.astype(dtype)


def _is_parquet(head: Head) -> bool:
    return head.first(4) == b"PAR1"


def _is_arrow(head: Head) -> bool:
    return head.first(6) == b"ARROW1" or head.first(4) == b"\xff\xff\xff\xff"


_OPTIONS = frozenset({"columns", "time_unit"})
PARQUET = Format("parquet", lambda source: _load(source, True), title="Parquet with named columns", sniff=_is_parquet,
                 options=_OPTIONS, skips=True)
ARROW = Format("arrow", lambda source: _load(source, False), title="Arrow IPC, file or stream, with named columns",
               sniff=_is_arrow, aliases=("feather",), options=_OPTIONS, skips=True)
