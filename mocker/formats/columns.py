"""The binary form of a trace: its columns as they lie in memory, so that loading is mapping the file.

Layout: the magic bytes, the length of a JSON header (8 bytes, little-endian), the header, then the columns, each at a
multiple of 64 bytes. The header names the fields of `Trace`; strings are UTF-8 bytes with offsets. Numbers are
little-endian. Loading checks every column that the engine indexes with, once, in compiled code; hash ids are only
mapped, and read when something uses them.
"""
from __future__ import annotations

import dataclasses
import json
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .. import _columns
from ..report import write_atomically
from ..trace import MAX_BLOCK_SIZE, Trace, TraceError
from .registry import Format, Head
from .source import Source

__all__ = ["FORMAT", "MAGIC", "SUFFIX", "load", "save"]

MAGIC = b"\x93MOCKTR1"
SUFFIX = ".mtrace"
_ALIGN = 64
_MAX_HEADER = 1 << 26
# The dtypes that the fields of a trace have; what is not here is checked by `Trace.from_columns`.
_ARRAYS = {
    "arrival_ms": "<f8", "input_length": "<i8", "output_length": "<i8", "hash_offsets": "<i8", "hash_ids": "<u8",
    "line": "<i8", "session": "<i4", "turn": "<i4", "delay_ms": "<f8", "priority": "<i4", "strict_priority": "<u4",
    "output_token_offsets": "<i8", "output_token_ids": "<u4", "clamped": "<i8", "wait_offsets": "<i8",
    "wait_rows": "<i8", "cancel_after_ms": "<f8",
}
_DTYPES = {name: np.dtype(name) for name in ("|u1", *sorted(set(_ARRAYS.values())))}
# Columns with which rows need other rows, or more than a streamed replay keeps of them.
_TYING = frozenset({"session_ids", "policy_class", "output_token_offsets", "output_token_ids", "wait_offsets",
                    "wait_rows", "cancel_after_ms"})
_LOAD = "is not known to a streamed replay; replay the loaded trace instead"
_STRINGS = ("session_ids", "request_ids", "policy_class")


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the binary form of a trace; equal traces give equal bytes.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    with write_atomically(path) as file:
        _write(trace, file)


def _write(trace: Trace, file: BinaryIO) -> None:
    arrays: list[tuple[str, NDArray[Any]]] = []
    header: dict[str, Any] = {"rows": trace.n, "fields": {}}
    for field in dataclasses.fields(trace):
        name, value = field.name, getattr(trace, field.name)
        if name == "skipped":
            value = [[e.problem, e.path, e.line, e.field] for e in value]
        if isinstance(value, np.ndarray):
            arrays.append((name, value.astype(_ARRAYS[name], copy=False)))
        elif name in _STRINGS and value is not None:
            texts = [None if text is None else text.encode() for text in value]
            sizes = np.fromiter((0 if text is None else len(text) for text in texts), np.int64, len(texts))
            arrays.append((f"{name}.offsets", np.concatenate(([0], np.cumsum(sizes))).astype("<i8")))
            arrays.append((f"{name}.bytes", np.frombuffer(b"".join(text or b"" for text in texts), np.uint8)))
            arrays.append((f"{name}.none", np.fromiter((text is None for text in texts), np.uint8, len(texts))))
        else:
            header["fields"][name] = value
    # Places count from the end of the header, whose own length they then do not change.
    place = 0
    header["columns"] = {}
    for name, array in arrays:
        header["columns"][name] = [array.dtype.str, len(array), place]
        place += -(-array.nbytes // _ALIGN) * _ALIGN
    header["bytes"] = place
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    text += b" " * (-(len(MAGIC) + 8 + len(text)) % _ALIGN)
    file.write(MAGIC + len(text).to_bytes(8, "little") + text)
    for _, array in arrays:
        file.write(np.ascontiguousarray(array).view(np.uint8).data if len(array) else b"")
        file.write(b"\0" * (-array.nbytes % _ALIGN))


def load(source: Source) -> Trace:
    """Map the columns of a file, or view those of bytes that were unpacked."""
    if sys.byteorder != "little":
        source.fail(None, None, "is the binary form of a little-endian machine, which this one is not")
    if isinstance(source.data, mmap.mmap):
        with open(source.path, "rb") as file:       # a map of our own: the arrays keep it as long as they need it
            data: bytes | mmap.mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    else:
        data = source.data
    header, columns = _mapped(source, data)
    values: dict[str, Any] = dict(header["fields"])
    for name, dtype in _ARRAYS.items():
        if name in columns:
            values[name] = columns.pop(name)
            if values[name].dtype != np.dtype(dtype):
                source.fail(None, name, f"has type {values[name].dtype.str}, not {dtype}; make the file again")
    for name in _STRINGS:
        parts = [columns.pop(f"{name}.{part}", None) for part in ("offsets", "bytes", "none")]
        if any(part is not None for part in parts):
            values[name] = _strings(source, name, *parts)
    known = {field.name for field in dataclasses.fields(Trace)}
    unknown = [*columns, *(name for name in values if name not in known)]
    if unknown:
        source.fail(None, unknown[0], "is a column that this version does not know; make the file again")
    return _checked(source, header["rows"], values)


def blocks(source: Source, file: BinaryIO, rows: int) -> Iterator[Trace]:
    """The rows of a file in traces of at most `rows`; only these are in memory.

    Raises
    ------
    TraceError
        As `load`; or a column that ties rows to others.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header, columns = _mapped(source, data)
        places = {name: (array.dtype, len(array), place) for (name, (_, _, place)), array in zip(
            header["columns"].items(), columns.values(), strict=True)}
        start = len(data) - header["bytes"]
        columns.clear()

    def read(name: str, first: int, stop: int) -> NDArray[Any]:
        dtype, length, place = places[name]
        if not 0 <= first <= stop <= length:
            source.fail(None, name, "does not fit the other columns; make the file again")
        file.seek(start + place + first * dtype.itemsize)
        return np.fromfile(file, dtype, stop - first)

    for name in places:
        if name.partition(".")[0] in _TYING:
            source.fail(None, name.partition(".")[0], _LOAD)
    if header["fields"].get("accumulate"):
        source.fail(None, "accumulate", _LOAD)
    for name in ("arrival_ms", "session", "hash_offsets", "hash_ids"):
        if name not in places:
            source.fail(None, name, "is missing; make the file again")
    named = "request_ids.offsets" in places
    cut = read("clamped", 0, places["clamped"][1]) if "clamped" in places else np.empty(0, np.int64)
    by_row = [name for name in places if "." not in name and name not in ("hash_offsets", "hash_ids", "clamped")]
    for first in range(0, header["rows"], rows):
        stop = min(first + rows, header["rows"])
        values = {**header["fields"], "skipped": [], **{name: read(name, first, stop) for name in by_row}}
        offsets = read("hash_offsets", first, stop + 1)
        if (values["session"] != np.arange(first, stop)).any():
            source.fail(None, "session", _LOAD)
        values["session"] -= np.int32(first)
        values["hash_ids"] = read("hash_ids", int(offsets[0]), int(offsets[-1]))
        values["hash_offsets"] = offsets - offsets[0]
        values["clamped"] = cut[(cut >= first) & (cut < stop)] - first
        if named:
            at = read("request_ids.offsets", first, stop + 1)
            values["request_ids"] = _strings(source, "request_ids", at - at[0],
                                             read("request_ids.bytes", int(at[0]), int(at[-1])),
                                             read("request_ids.none", first, stop))
        yield _checked(source, stop - first, values)


def _mapped(source: Source, data: bytes | mmap.mmap) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The header and the columns of a file."""
    if data[:len(MAGIC)] != MAGIC:
        source.fail(None, None, "is not the binary form of a trace; name the right format")
    header, start = _header(source, data)
    return header, {name: _column(source, data, start, name, place) for name, place in header["columns"].items()}


def _header(source: Source, data: bytes | mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header and the place of the first column."""
    size = int.from_bytes(data[len(MAGIC):len(MAGIC) + 8], "little")
    start = len(MAGIC) + 8 + size
    if size > _MAX_HEADER or start > len(data):
        source.fail(None, "header", "is cut off or damaged; make the file again")
    try:
        header = json.loads(data[len(MAGIC) + 8:start])
        if not (isinstance(header, dict) and isinstance(header["columns"], dict) and isinstance(header["fields"], dict)
                and type(header["rows"]) is int and type(header["bytes"]) is int):
            raise ValueError
    except (ValueError, KeyError, RecursionError):
        source.fail(None, "header", "is damaged; make the file again")
    if len(data) - start != header["bytes"]:
        source.fail(None, None, f"has {len(data) - start} bytes of columns instead of {header['bytes']}; "
                    "it is cut off or damaged: make it again")
    return header, start


def _column(source: Source, data: bytes | mmap.mmap, start: int, name: str, place: Any) -> NDArray[Any]:
    """One column; no copy."""
    try:
        dtype, length, at = place
        kind = _DTYPES[dtype]
        if not (type(length) is int and type(at) is int and length >= 0 and at >= 0 and at % _ALIGN == 0
                and at + length * kind.itemsize <= len(data) - start):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        source.fail(None, name, f"has an impossible place in the file ({str(place)[:60]}); make it again")
    if not length:
        return np.empty(0, kind)
    return np.frombuffer(data, kind, length, start + at)


def _strings(source: Source, name: str, offsets: Any, content: Any, none: Any) -> tuple[str | None, ...]:
    """A column of strings."""
    if offsets is None or content is None or none is None or offsets.dtype != np.int64 or content.dtype != np.uint8 \
            or len(offsets) != len(none) + 1 or offsets[0] != 0 or offsets[-1] != len(content) \
            or (np.diff(offsets) < 0).any():
        source.fail(None, name, "is damaged; make the file again")
    raw, ends = content.tobytes(), offsets.tolist()
    try:
        return tuple(None if missing else raw[a:b].decode()
                     for a, b, missing in zip(ends[:-1], ends[1:], none.tolist(), strict=True))
    except UnicodeDecodeError:
        source.fail(None, name, "is not UTF-8; make the file again")


def _checked(source: Source, rows: int, values: dict[str, Any]) -> Trace:
    """The trace, if its columns fit together."""
    plain = {field.name: field.default for field in dataclasses.fields(Trace)
             if field.default is not dataclasses.MISSING}
    values = {**plain, **values}
    missing = [field.name for field in dataclasses.fields(Trace) if field.name not in values]
    if missing:
        source.fail(None, missing[0], "is missing; make the file again")
    skipped = values.pop("skipped")
    try:
        values["skipped"] = tuple(TraceError(*map_error) for map_error in skipped)
    except TypeError:
        source.fail(None, "skipped", "is damaged; make the file again")
    size = values["block_size"]
    if type(size) is not int or not 1 <= size <= MAX_BLOCK_SIZE:
        source.fail(None, "block_size", f"must be from 1 to {MAX_BLOCK_SIZE}, is {size!r}")
    if source.given_block_size not in (None, size):
        source.fail(None, "block_size", f"is {size} in this file, not {source.given_block_size}; leave it out")
    if not isinstance(values["path"], str) or type(values.get("accumulate", False)) is not bool:
        source.fail(None, "path", "is damaged; make the file again")
    for name in _ARRAYS:
        optional = values.get(name) is None and name not in _columns.REQUIRED
        if not optional and not isinstance(values[name], np.ndarray):
            source.fail(None, name, "is missing; make the file again")
    row, problem = _columns.check_columns(
        rows, size, values["arrival_ms"], values["input_length"], values["output_length"], values["hash_offsets"],
        len(values["hash_ids"]), values["line"], values["session"], values["turn"], values["delay_ms"],
        values["priority"], values["strict_priority"])
    if problem:
        source.fail(row + 1 if row >= 0 else None, problem,
                    "breaks a rule of traces; the file is damaged: make it again")
    _check_rare(source, rows, values)
    return Trace(**values)


def _check_rare(source: Source, rows: int, values: dict[str, Any]) -> None:
    """Check what few traces have."""
    def require(holds: bool, name: str) -> None:
        if not holds:
            source.fail(None, name, "does not fit the other columns; the file is damaged: make it again")

    for name, count in (("session_ids", int(values["session"].max()) + 1 if rows else 0), ("request_ids", rows),
                        ("policy_class", rows)):
        strings = values[name]
        require(strings is None or (isinstance(strings, tuple) and len(strings) == count), name)
    require(values["session_ids"] is None or None not in values["session_ids"], "session_ids")
    for offsets, content in (("output_token_offsets", "output_token_ids"), ("wait_offsets", "wait_rows")):
        if offsets not in values:
            continue
        ends, held = values[offsets], values[content]
        require((ends is None) == (held is None), offsets)
        if ends is not None:
            require(len(ends) == rows + 1 and ends[0] == 0 and ends[-1] == len(held), offsets)
            require(bool((np.diff(ends) >= 0).all()), offsets)
    if values["output_token_offsets"] is not None:
        planned = np.diff(values["output_token_offsets"])
        require(bool(((planned == 0) | (planned == values["output_length"])).all()), "output_token_offsets")
    waits = values.get("wait_rows")
    require(waits is None or not len(waits) or (waits.min() >= 0 and waits.max() < rows), "wait_rows")
    gives_up = values.get("cancel_after_ms")
    require(gives_up is None or (len(gives_up) == rows and not bool((gives_up < 0).any())), "cancel_after_ms")
    cut = values["clamped"]
    require(not len(cut) or (cut[0] >= 0 and cut[-1] < rows and bool((np.diff(cut) > 0).all())), "clamped")


def _sniff(head: Head) -> bool:
    return head.first(len(MAGIC)) == MAGIC


FORMAT = Format("columns", load, title="Columns of mocker: the binary form, memory-mapped", sniff=_sniff,
                aliases=("mtrace",))
