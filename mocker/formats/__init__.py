"""Trace files to traces: one module a format, and `FORMATS`, the list of them.

A new format is a module with a `FORMAT` and a line in `_ORDER` below. `source` opens and unpacks files, `rows` reads
and checks JSON rows, `registry` says what a format is.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..trace import MAX_BLOCK_SIZE, Trace, TraceError
from . import agentic, applied_compute, arrow, chat, columns, dynamo, mooncake, qwen, tables
from .cache import ENVIRONMENT, cached
from .registry import Format, Head, look
from .source import BOM, STDIN, Source, read_file, without_line

__all__ = ["DEFAULT_BLOCK_SIZE", "FORMATS", "Format", "Head", "Source", "TraceError", "load"]

DEFAULT_BLOCK_SIZE = 512
_MAX_RETRIES = 1000             # bad rows, for a reader that does not skip by itself
# In the order in which they are asked whether a file is theirs; Mooncake takes what nobody else claims.
_ORDER = (
    columns.FORMAT, arrow.PARQUET, arrow.ARROW, agentic.FORMAT, applied_compute.FORMAT, dynamo.FORMAT, tables.AZURE,
    tables.BURSTGPT, tables.CSV, qwen.FORMAT, chat.SHAREGPT, chat.AIPERF, chat.VLLM, mooncake.FORMAT,
    mooncake.DELTA_FORMAT, chat.VLLM_TIMED,
)

FORMATS: dict[str, Format] = {form.name: form for form in _ORDER}
"""The formats by name."""
_NAMES = {name: form for form in _ORDER for name in (form.name, *form.aliases)}

def load(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str = "auto",
    block_size: int | None = None,
    on_short_hash_ids: str = "error",
    *,
    on_error: str = "raise",
    cache: str | os.PathLike[str] | None = None,
    _slow: bool = False,
    **options: Any,
) -> Trace:
    """Read a trace file, plain or packed with gzip or Zstandard (told by its first bytes).

    Parameters
    ----------
    path : path-like or sequence of path-like
        A file, "-" for standard input; several for formats that allow it.
    format : str
        A name of `FORMATS`, or "auto": look at the first row.
    block_size : int, optional
        Tokens per hash id; 512 for a format that does not say it itself.
    on_short_hash_ids : {"error", "clamp"}
        What to do with an input length above what the hash ids cover.
    on_error : {"raise", "skip"}
        What to do with a row that cannot be read: raise its error, or leave the row out and list the error in
        `Trace.skipped`.
    cache : path-like, optional
        Folder of binary copies: a file that was loaded before, with the same arguments, is mapped instead of read. If
        left out, the environment variable MOCKER_TRACE_CACHE names it, if set.
    _slow : bool
        Read every row with the JSON parser (for tests).
    **options
        Options of the format, see `Format.options`.

    Returns
    -------
    Trace

    Raises
    ------
    TraceError
        The file is not a trace; names file, line and field.
    ValueError
        An unknown format, option or `on_short_hash_ids`; several files of a format that has one.
    OSError
        The file cannot be opened.
    """
    names = [os.fsdecode(p) for p in ([path] if isinstance(path, (str, bytes, os.PathLike)) else path)]
    if format != "auto" and format not in _NAMES:
        raise ValueError(f"format {format!r} does not exist; there are 'auto', {_formats()}")
    if on_short_hash_ids not in ("error", "clamp"):
        raise ValueError(f"on_short_hash_ids must be 'error' or 'clamp', is {on_short_hash_ids!r}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', is {on_error!r}")
    if not names:
        raise ValueError("there is no trace file; name at least one")
    _check_block_size(block_size, names[0])
    if format != "auto":
        _check_count(_NAMES[format], names)
    skipped: list[TraceError] | None = [] if on_error == "skip" else None

    def read() -> Trace:
        with contextlib.ExitStack() as stack:
            sources: list[Source] = []
            for name in names:
                data, opened = read_file(name)
                if opened is not None:
                    stack.callback(opened.close)
                if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise TraceError("is UTF-16, not UTF-8; convert the file to UTF-8", name, 1, "row")
                sources.append(Source(
                    data=data,
                    start=len(BOM) if data[:3] == BOM else 0,
                    path="<stdin>" if name == STDIN else name,
                    block_size=DEFAULT_BLOCK_SIZE if block_size is None else int(block_size),
                    given_block_size=None if block_size is None else int(block_size),
                    clamp=on_short_hash_ids == "clamp",
                    auto=format == "auto",
                    slow=_slow,
                    options=options,
                    skipped=skipped,
                ))
            form = _find(sources[0]) if format == "auto" else _NAMES[format]
            for option in options:
                if option not in form.options:
                    raise ValueError(f"{option} means nothing to format {form.name!r}; leave it out")
            _check_count(form, names)
            trace = _read(form, sources) if form.skips or skipped is None else _read_skipping(form, sources)
        return replace(trace, skipped=tuple(sorted(skipped, key=lambda e: e.line or 0))) if skipped else trace

    folder = os.environ.get(ENVIRONMENT) if cache is None else cache
    if not folder:
        return read()
    settings = {"format": format, "block_size": None if block_size is None else int(block_size),
                "on_short_hash_ids": on_short_hash_ids, "on_error": on_error, "options": options}
    return cached(folder, names, settings, read)


def _check_block_size(block_size: int | None, path: str) -> None:
    if block_size is not None and (isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer))
                                   or not 1 <= block_size <= MAX_BLOCK_SIZE):
        raise TraceError(
            f"must be an integer greater than 0 and at most {MAX_BLOCK_SIZE}, is {block_size!r}; "
            "give the number of tokens that a hash id stands for",
            path, field="block_size",
        )


def _read(form: Format, sources: list[Source]) -> Trace:
    return form.load(sources[0]) if form.load_many is None else form.load_many(sources)


def _read_skipping(form: Format, sources: list[Source]) -> Trace:
    """Read with a reader that ends at the first bad row: blank that row and read again."""
    sources = list(sources)
    for _ in range(_MAX_RETRIES):
        try:
            return _read(form, sources)
        except TraceError as error:
            index = next((i for i, source in enumerate(sources) if source.path == error.path), None)
            if index is None or error.line is None:
                raise
            blank = without_line(sources[index], error.line)
            if blank is None or not sources[index].skip(error):
                raise
            sources[index] = replace(sources[index], data=blank)
    raise TraceError(f"has more than {_MAX_RETRIES:,} rows that format {form.name!r} cannot read; correct the file",
                     sources[0].path)


def _check_count(form: Format, names: list[str]) -> None:
    if len(names) > 1 and form.load_many is None:
        raise ValueError(f"trace_format={form.name!r} requires exactly one trace file, got {len(names)}")


def _formats() -> str:
    """The names of the formats, for a message."""
    return ", ".join(repr(name) for name in FORMATS)


def _find(source: Source) -> Format:
    """The format of a file, by its first row that is not blank.

    Refuses only what it knows to be another format: whatever else is wrong, a reader has the better message.
    """
    head = look(source)
    for form in _ORDER:
        if form.sniff is not None and form.sniff(head):
            return form
    return mooncake.FORMAT
