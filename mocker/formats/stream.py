"""Traces that are read in blocks while they are replayed, so that memory does not grow with the file.

For rows that stand by themselves in the order of their times: Mooncake JSONL, plain or packed, and the binary form.
Every other format can be converted to the latter (`mocker trace convert`).
"""
from __future__ import annotations

import gzip
import importlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

import numpy as np

from ..trace import Trace, TraceError
from . import DEFAULT_BLOCK_SIZE, FORMATS, _check_block_size, _find, columns, mooncake
from .source import BOM, GZIP_MAGIC, MAX_SKIPPED, ZSTD_MAGIC, Source

__all__ = ["TraceStream"]

BLOCK_BYTES = 1 << 20              # of JSONL
BLOCK_ROWS = 8192                  # of the binary form
STREAMED = ("mooncake", "columns")


class TraceStream:
    """A trace file as a workload of `mocker.simulate` that is read while it is replayed.

    Its rows are single requests by rising timestamp, without session, planned answer, priority, policy class or time at
    which the client gives up; a row that is not so ends the replay with an error that names it. Can be replayed any
    number of times.

    Parameters
    ----------
    path : path-like
        Mooncake JSONL, plain or packed with gzip or Zstandard, or the binary form (``.mtrace``).
    format : {"auto", "mooncake", "columns"}
        "auto": look at the first row.
    block_size : int, optional
        Tokens per hash id; 512 if the file does not say it.
    on_short_hash_ids : {"error", "clamp"}
        What to do with an input length above what the hash ids cover.
    on_error : {"raise", "skip"}
        What to do with a row that cannot be read: raise its error, or leave it out and count it.

    Attributes
    ----------
    path : str

    Raises
    ------
    ValueError
        An unknown format or option, or a format that is not streamed.
    """

    def __init__(self, path: str | os.PathLike[str], format: str = "auto", block_size: int | None = None,
                 on_short_hash_ids: str = "error", *, on_error: str = "raise") -> None:
        self.path = os.fsdecode(path)
        if format != "auto" and format not in STREAMED:
            raise ValueError(_not_streamed(format))
        if on_short_hash_ids not in ("error", "clamp"):
            raise ValueError(f"on_short_hash_ids must be 'error' or 'clamp', is {on_short_hash_ids!r}")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', is {on_error!r}")
        _check_block_size(block_size, self.path)
        self._format = format
        self._given = None if block_size is None else int(block_size)
        self._clamp, self._skip = on_short_hash_ids == "clamp", on_error == "skip"

    def __repr__(self) -> str:
        return f"TraceStream({self.path!r})"

    def blocks(self) -> Iterator[Trace]:
        """The rows as traces of some thousand, each with the lines of the file.

        Raises
        ------
        TraceError
            The file is not a trace, or not one that can be streamed; names file, line and field.
        OSError
            The file cannot be read.
        """
        if os.path.isdir(self.path):
            raise TraceError("is a directory; name a file", self.path)
        with open(self.path, "rb") as file:
            head = file.read(len(columns.MAGIC))
            file.seek(0)
            binary = head == columns.MAGIC
            if binary and self._format == "mooncake":
                raise TraceError("is the binary form of a trace, not Mooncake JSONL; name the right format", self.path)
            if not binary and self._format == "columns":
                raise TraceError("is not the binary form of a trace, or packed; name the right format", self.path)
            found = (columns.blocks(self._source(b"", None), file, BLOCK_ROWS) if binary
                     else self._lines(file, head))
            before, some = -np.inf, False
            for block in found:
                self._check(block, before)
                before, some = float(block.arrival_ms[-1]), True
                yield block
            if not some:
                raise TraceError("did not contain any requests; a replay needs at least one", self.path)

    def _source(self, data: bytes, skipped: list[TraceError] | None) -> Source:
        return Source(data=data, start=len(BOM) if data[:3] == BOM else 0, path=self.path,
                      block_size=DEFAULT_BLOCK_SIZE if self._given is None else self._given,
                      given_block_size=self._given, clamp=self._clamp, auto=self._format == "auto", skipped=skipped)

    def _lines(self, file: IO[bytes], head: bytes) -> Iterator[Trace]:
        line = lost = 0                        # lines before the block, and rows of them that were left out
        for data in _whole_lines(_unpacked(file, head, self.path)):
            if data[:2] in (b"\xff\xfe", b"\xfe\xff") and line == 0:
                raise TraceError("is UTF-16, not UTF-8; convert the file to UTF-8", self.path, 1, "row")
            if data.strip():
                skipped: list[TraceError] | None = [] if self._skip else None
                source = self._source(data, skipped)
                if line == 0 and self._format == "auto" and _find(source) is not mooncake.FORMAT:
                    raise ValueError(_not_streamed(_find(source).name))
                try:
                    block = mooncake.load(source)
                except TraceError as error:
                    # Of a block without one good row each row has its own error.
                    if not (skipped and error.line is None):
                        at = None if error.line is None else error.line + line
                        raise TraceError(error.problem, self.path, at, error.field) from None
                    block = None
                lost += len(skipped or ())
                if lost > MAX_SKIPPED:
                    raise TraceError(f"has more than {MAX_SKIPPED:,} rows that cannot be read; is this the right "
                                     "format?", self.path)
                errors = tuple(TraceError(e.problem, self.path, (e.line or 0) + line, e.field) for e in skipped or ())
                if block is not None:
                    yield replace(block, line=block.line + line, skipped=errors)
            line += data.count(b"\n")

    # -- the binary form ----------------------------------------------------------------------------------------------

    def _check(self, block: Trace, before: float) -> None:
        """Refuse what needs other rows, or more of a row than is kept."""
        def refuse(bad: Any, field: str, what: str) -> None:
            if np.any(bad):
                row = int(np.argmax(bad))
                raise TraceError(what, self.path, int(block.line[row]), field)

        loaded = "; replay the loaded trace instead"
        refuse(~np.isfinite(block.arrival_ms), "timestamp",
               f"is missing, or no finite number; a streamed row needs one{loaded}")
        late = np.concatenate(([before], block.arrival_ms[:-1]))
        refuse(block.arrival_ms < late, "timestamp", f"is before that of the row above: a streamed trace is read once, "
                                                     f"in order; sort it (mocker trace convert), or{loaded[1:]}")
        for field, bad in (
                ("session_id", None if block.session_ids is None else block.turn >= 0), ("delay", block.turn > 0),
                ("output_token_ids", None if block.output_token_offsets is None
                 else np.diff(block.output_token_offsets) > 0),
                ("priority", block.priority != 0), ("strict_priority", block.strict_priority != 0),
                ("policy_class", None if block.policy_class is None
                 else np.array([name is not None for name in block.policy_class])),
                ("cancel_after_ms", None if block.cancel_after_ms is None else ~np.isnan(block.cancel_after_ms)),
                ("wait_for", None if block.wait_offsets is None else np.diff(block.wait_offsets) > 0)):
            if bad is not None:
                refuse(bad, field, f"is not known to a streamed replay{loaded}")


def _not_streamed(name: str) -> str:
    if name not in FORMATS:
        return f"format {name!r} does not exist; {' and '.join(map(repr, STREAMED))} can be streamed"
    return (f"format {name!r} cannot be streamed; load the trace, or make its binary form (mocker trace convert) and "
            "stream that")


def _whole_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Chunks cut where lines end."""
    rest: list[bytes] = []
    for chunk in chunks:
        stop = chunk.rfind(b"\n") + 1
        if stop:
            yield b"".join([*rest, chunk[:stop]])
            rest = [chunk[stop:]] if stop < len(chunk) else []
        else:
            rest.append(chunk)
    if rest:
        yield b"".join(rest)


def _unpacked(file: IO[bytes], head: bytes, path: str) -> Iterator[bytes]:
    """Content of a file in chunks, told by its first bytes to be packed or not."""
    if head[:2] == GZIP_MAGIC:
        yield from _chunks(gzip.GzipFile(fileobj=file), (EOFError, OSError, zlib.error), path, "gzip")
    elif head[:4] == ZSTD_MAGIC:
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError as error:
            raise ImportError(f"{path} is packed with Zstandard, which needs zstandard: pip install "
                              "'mocker-llm[zstd]'") from error
        yield from _chunks(_Zstandard(file, zstandard), (EOFError, zstandard.ZstdError), path, "Zstandard")
    else:
        yield from _chunks(file, (), path, "")


class _Zstandard:
    """Frames of Zstandard data one after the other, as `gzip.GzipFile` has members: an early end is an EOFError."""

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        self._file, self._new = file, zstandard.ZstdDecompressor().decompressobj
        self._frame, self._left, self._begun = self._new(), b"", False

    def read(self, size: int) -> bytes:
        """The next bytes, about so many; none at the end."""
        while True:
            data = self._left or self._file.read(size // 8)
            if not data:
                if self._begun:
                    raise EOFError("a frame is not complete")
                return b""
            found: bytes = self._frame.decompress(data)
            self._left, self._begun = self._frame.unused_data, not self._frame.eof
            if self._frame.eof:
                self._frame = self._new()
            if found:
                return found


def _chunks(file: Any, errors: tuple[type[Exception], ...], path: str, packed: str) -> Iterator[bytes]:
    lines = 0
    while True:
        try:
            chunk = file.read(BLOCK_BYTES)
        except errors as error:
            raise TraceError(f"the {packed} data ends too early or is damaged ({error}); get the file again", path,
                             lines + 1, "row") from None
        if not chunk:
            return
        lines += chunk.count(b"\n")
        yield chunk


