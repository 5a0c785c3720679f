"""Trace files to traces: one module a format, and `FORMATS`, the list of them.

A new format is a module with a `FORMAT` and a line in `_ORDER` below. `source` opens and unpacks files, `rows` reads
and checks JSON rows, `registry` says what a format is.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..trace import MAX_BLOCK_SIZE, Trace, TraceError
from . import agentic, applied_compute, dynamo, mooncake
from .registry import Format, Head, look
from .source import BOM, Source, read_file

__all__ = ["DEFAULT_BLOCK_SIZE", "FORMATS", "Format", "Head", "Source", "TraceError", "load"]

DEFAULT_BLOCK_SIZE = 512
# In the order in which they are asked whether a file is theirs; Mooncake takes what nobody else claims.
_ORDER = (agentic.FORMAT, applied_compute.FORMAT, dynamo.FORMAT, mooncake.FORMAT, mooncake.DELTA_FORMAT)

FORMATS: dict[str, Format] = {form.name: form for form in _ORDER}
"""The formats by name."""
_NAMES = {name: form for form in _ORDER for name in (form.name, *form.aliases)}

def load(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str = "auto",
    block_size: int | None = None,
    on_short_hash_ids: str = "error",
    *,
    _slow: bool = False,
    **options: Any,
) -> Trace:
    """Read a trace file, plain or gzip (told by its first bytes).

    Parameters
    ----------
    path : path-like or sequence of path-like
        A file; several for formats that allow it.
    format : str
        A name of `FORMATS`, or "auto": look at the first row.
    block_size : int, optional
        Tokens per hash id; 512 for a format that does not say it itself.
    on_short_hash_ids : {"error", "clamp"}
        What to do with an input length above what the hash ids cover.
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
    if not names:
        raise ValueError("there is no trace file; name at least one")
    if block_size is not None and (isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer))
                                   or not 1 <= block_size <= MAX_BLOCK_SIZE):
        raise TraceError(
            f"must be an integer greater than 0 and at most {MAX_BLOCK_SIZE}, is {block_size!r}; "
            "give the number of tokens that a hash id stands for",
            names[0], field="block_size",
        )
    if format != "auto":
        _check_count(_NAMES[format], names)
    with contextlib.ExitStack() as stack:
        sources: list[Source] = []
        for name in names:
            data, opened = read_file(name)
            if opened is not None:
                stack.callback(opened.close)
            sources.append(Source(
                data=data,
                start=len(BOM) if data[:3] == BOM else 0,
                path=name,
                block_size=DEFAULT_BLOCK_SIZE if block_size is None else int(block_size),
                given_block_size=None if block_size is None else int(block_size),
                clamp=on_short_hash_ids == "clamp",
                auto=format == "auto",
                slow=_slow,
                options=options,
            ))
        form = _find(sources[0]) if format == "auto" else _NAMES[format]
        for option in options:
            if option not in form.options:
                raise ValueError(f"{option} means nothing to format {form.name!r}; leave it out")
        _check_count(form, names)
        return form.load(sources[0]) if form.load_many is None else form.load_many(sources)


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
