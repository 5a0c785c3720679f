"""A folder of binary copies of trace files, so that a second load of a large trace is almost free."""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._version import __version__
from ..trace import Trace, TraceError
from . import columns
from .source import Source, read_file

__all__ = ["ENVIRONMENT", "cached"]

READERS = 1                     # to be raised when a reader begins to read a file otherwise
ENVIRONMENT = "MOCKER_TRACE_CACHE"
"""Environment variable that names the folder where `load` gets none."""


def cached(
    folder: str | os.PathLike[str], names: list[str], settings: Mapping[str, Any], read: Callable[[], Trace]
) -> Trace:
    """Load a trace from its binary copy, or read it and leave a copy.

    A copy belongs to the path, size and time of change of each file, to the settings and to the version of this
    package; a damaged one is replaced.

    Parameters
    ----------
    folder : path-like
        Made if it does not exist.
    names : list of str
        The files; the cache does nothing for standard input.
    settings : mapping
        What else the result depends on.
    read : callable
        Reads the files themselves.

    Raises
    ------
    ValueError
        A setting that has no text form, such as a function.
    OSError
        A file cannot be read, or the copy not be written.
    """
    if any(not os.path.isfile(name) for name in names):
        return read()
    try:
        what = json.dumps([__version__, READERS, settings], sort_keys=True)
    except TypeError:
        raise ValueError("a trace that depends on a function cannot be cached; name the function as MODULE:NAME, or "
                         "leave the cache out") from None
    digest = hashlib.sha256(what.encode())
    for name in names:
        status = os.stat(name)
        digest.update(f"\0{os.path.realpath(name)}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="surrogateescape"))
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(names[0]))[:80]
    copy = Path(folder) / f"{stem}-{digest.hexdigest()[:24]}{columns.SUFFIX}"
    with contextlib.suppress(FileNotFoundError, TraceError):
        data, opened = read_file(str(copy))
        try:
            return columns.load(Source(data=data, start=0, path=str(copy), block_size=1))
        finally:
            if opened is not None:
                opened.close()
    trace = read()
    columns.save(trace, copy)
    return trace
