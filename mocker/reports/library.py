"""plotly.js for the page: packed once for each version of it, and kept in the user's cache folder.

Packed it is less than half as long, and copying it is most of what a page costs. The library is taken from the plotly
package without importing that. `MOCKER_PAGE_CACHE` names another folder, or is `off`: then pages carry it as it is.
"""
from __future__ import annotations

import base64
import functools
import gzip
import importlib.util
import os
from pathlib import Path

from ..report import write_atomically

__all__ = ["packed", "plotly"]

_LEVEL = 5                         # 80 ms, once: a seventh less than in half of that time, as little as in twice of it
_START = base64.b64encode(b"\x1f\x8b\x08")


@functools.cache
def plotly() -> Path:
    """Where the library is.

    Raises
    ------
    ImportError
        The plotly package is not installed.
    """
    spec = importlib.util.find_spec("plotly")
    if spec is not None and spec.submodule_search_locations:
        for folder in spec.submodule_search_locations:
            library = Path(folder) / "package_data" / "plotly.min.js"
            if library.is_file():
                return library
    raise ImportError("the HTML report needs plotly, which is not installed: pip install 'mocker-llm[html]'")


@functools.cache
def packed() -> bytes | None:
    """The library as base64 of gzip, which pages unpack; None if there is no place to keep it.

    Raises
    ------
    ImportError
        As `plotly`.
    """
    library = plotly()
    try:
        folder = _folder()
        if folder is None:
            return None
        status = library.stat()
        copy = folder / f"plotly-{status.st_size}-{status.st_mtime_ns}-{_LEVEL}.gz.base64"
        try:
            text = copy.read_bytes()
        except FileNotFoundError:
            text = b""
        if not _whole(text, status.st_size):
            text = base64.b64encode(gzip.compress(library.read_bytes(), _LEVEL, mtime=0))
            with write_atomically(copy) as file:
                file.write(text)
    except (OSError, RuntimeError):            # RuntimeError: nobody's home
        return None
    return text


def _whole(text: bytes, size: int) -> bool:
    """Whether a packed text is of so many bytes, by its two ends."""
    try:
        return text.startswith(_START) and base64.b64decode(text[-12:])[-4:] == size.to_bytes(4, "little")
    except ValueError:
        return False


def _folder() -> Path | None:
    """The cache of the user; `platformdirs` would say the same, but importing it takes longer than writing a page."""
    given = os.environ.get("MOCKER_PAGE_CACHE")
    if given is not None:
        return None if given.strip().lower() in ("", "off", "0", "none") else Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "mocker"
