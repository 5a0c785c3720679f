"""The bytes of a trace file, and the error that names a place in it."""
from __future__ import annotations

import mmap
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..trace import TraceError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
STDIN = "-"
MAX_SKIPPED = 100_000           # rows that `on_error="skip"` leaves out before it gives up
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
    skipped : list of TraceError, optional
        Where the errors of rows go that are left out; None: the first one ends the reading.
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
    skipped: list[TraceError] | None = None

    def fail(self, line: int | None, field: str | None, problem: str) -> NoReturn:
        """Raise the error of a place in this file."""
        raise TraceError(problem, self.path, line, field) from None

    @property
    def release(self) -> Callable[[int, int], None] | None:
        """A function that takes a stretch of a mapped file out of this process's memory; None if nothing does."""
        data = self.data
        if not isinstance(data, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return None

        def release(start: int, size: int) -> None:
            first = max(start, 0) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < min(start + size, len(data)):
                data.madvise(mmap.MADV_DONTNEED, first, min(start + size, len(data)) - first)

        return release

    def skip(self, error: TraceError) -> bool:
        """Note the error of a row that is left out; False if it has to be raised.

        Raises
        ------
        TraceError
            So many rows were left out that the file must be something else.
        """
        if self.skipped is None or error.line is None:
            return False
        self.skipped.append(error)
        if len(self.skipped) > MAX_SKIPPED:
            self.fail(error.line, None, f"is one of more than {MAX_SKIPPED:,} rows that cannot be read; is this the "
                      f"right format? The first: {self.first_skipped()}")
        return True

    def first_skipped(self) -> str:
        """What is wrong in the first row that was left out, and where; empty if there is none."""
        if not self.skipped:
            return ""
        first = self.skipped[0]
        return f"line {first.line}: {first.field or 'row'}: {first.problem}"


def read_file(path: str) -> tuple[bytes | mmap.mmap, mmap.mmap | None]:
    """Content of a file ("-": standard input), unpacked, and the map to close when nobody uses it any more.

    Raises
    ------
    TraceError
        A directory, or packed data that is damaged.
    OSError
        The file cannot be opened.
    """
    if path == STDIN:
        return unpack(sys.stdin.buffer.read(), "<stdin>"), None
    if os.path.isdir(path):
        raise TraceError("is a directory; name a file", path)
    with open(path, "rb") as file:
        try:
            data: bytes | mmap.mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (ValueError, OSError):       # empty, or not a regular file
            data = file.read()
    opened = data if isinstance(data, mmap.mmap) else None
    try:
        content = unpack(data, path)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    if opened is not None and content is not data:
        opened.close()
        opened = None
    return content, opened


def without_line(source: Source, line: int) -> bytes | None:
    """The content with one line blanked, or None if it is blank or does not exist."""
    start = source.start
    for _ in range(line - 1):
        start = source.data.find(b"\n", start) + 1
        if not start:
            return None
    stop = source.data.find(b"\n", start)
    stop = len(source.data) if stop < 0 else stop
    if not source.data[start:stop].strip():
        return None
    return source.data[:start] + b" " * (stop - start) + source.data[stop:]


def unpack(data: bytes | mmap.mmap, path: str) -> bytes | mmap.mmap:
    """The content of gzip or Zstandard data, told by their first bytes; other data as it is."""
    if data[:2] == GZIP_MAGIC:
        return _gunzip(data, path)
    return _unzstd(data, path) if data[:4] == ZSTD_MAGIC else data


def _unzstd(data: bytes | mmap.mmap, path: str) -> bytes:
    """All frames of Zstandard data."""
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            f"{path} is packed with Zstandard, which needs zstandard: pip install 'mocker-llm[zstd]'") from error
    parts: list[bytes] = []
    at = 0
    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        while at < len(data):
            chunk = data[at : at + _READ_BYTES]
            at += len(chunk)
            parts.append(frame.decompress(chunk))
            if frame.eof:
                at -= len(frame.unused_data)
                if at == len(data):
                    return b"".join(parts)
                frame = zstandard.ZstdDecompressor().decompressobj()
    except zstandard.ZstdError as error:
        raise TraceError(f"the Zstandard data is damaged ({error}); get the file again", path) from None
    line = 1 + sum(part.count(b"\n") for part in parts)
    raise TraceError("the Zstandard data ends too early; get the file again", path, line, "row")


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
