"""The bytes of a trace file, and the error that names a place in it."""
from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..trace import TraceError

GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 18           # compressed bytes a step: what follows a gzip member is copied, so not too many


@dataclass(frozen=True)
class Source:
    """The bytes of a file and how the caller wants them read.

    Attributes
    ----------
    data : bytes or mmap
        The content, unpacked.
    start : int
        First byte after a byte order mark.
    path : str
    block_size : int
        Tokens per hash id: what the caller gave, or 512.
    given_block_size : int, optional
        What the caller gave, for formats that have their own.
    clamp : bool
        Cut prompts that are longer than their hash ids cover instead of refusing them.
    auto : bool
        The format was found by looking, not named.
    slow : bool
        Do without compiled scanners (for tests).
    options : mapping
        Further options of the caller; those of `Format.options` only.
    """

    data: bytes | mmap.mmap
    start: int
    path: str
    block_size: int
    given_block_size: int | None = None
    clamp: bool = False
    auto: bool = False
    slow: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def fail(self, line: int | None, field: str | None, problem: str) -> NoReturn:
        """Raise the error of a place in this file."""
        raise TraceError(problem, self.path, line, field) from None


def read_file(path: str) -> tuple[bytes | mmap.mmap, mmap.mmap | None]:
    """Content of a file, unpacked, and the map to close when nobody uses it any more.

    Raises
    ------
    TraceError
        A directory, or packed data that is damaged.
    OSError
        The file cannot be opened.
    """
    if os.path.isdir(path):
        raise TraceError("is a directory; name a file", path)
    with open(path, "rb") as file:
        try:
            data: bytes | mmap.mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (ValueError, OSError):       # empty, or not a regular file
            data = file.read()
    opened = data if isinstance(data, mmap.mmap) else None
    if data[:2] != GZIP_MAGIC:
        return data, opened
    try:
        return _gunzip(data, path), None
    finally:
        if opened is not None:
            opened.close()


def _gunzip(data: bytes | mmap.mmap, path: str) -> bytes:
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
