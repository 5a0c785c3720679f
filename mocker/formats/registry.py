"""What a trace format is, and what its reader is told of the start of a file."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..trace import Trace
from .rows import DECODER, Object
from .source import Source

SNIFF_BYTES = 1 << 20          # a longer first row is not read twice


@dataclass(frozen=True)
class Head:
    """The start of a file, for `Format.sniff`.

    Attributes
    ----------
    source : Source
        The (unpacked) file.
    line : int
        1-based number of the first line that is not blank.
    row : bytes
        That line, empty if it is longer than 1 MiB.
    keys : tuple of str
        Keys of the JSON object in it; empty if it holds none.
    """

    source: Source
    line: int
    row: bytes
    keys: tuple[str, ...]

    def first(self, count: int = SNIFF_BYTES) -> bytes:
        """The first bytes of the file; a copy, of no more than somebody looks at."""
        start = self.source.start
        return self.source.data[start : start + count]


def look(source: Source) -> Head:
    """The head of a file."""
    data, start, line = source.data, source.start, 1
    while True:
        stop = data.find(b"\n", start)
        end = len(data) if stop < 0 else stop
        row = data[start:end] if end - start < SNIFF_BYTES else b""
        if row.strip() or end - start >= SNIFF_BYTES or stop < 0:
            break
        start, line = stop + 1, line + 1
    try:
        value = DECODER.decode(row.decode())
    except (ValueError, RecursionError):
        value = None
    keys = tuple(key for key, _ in value) if isinstance(value, Object) else ()
    return Head(source, line, row, keys)


@dataclass(frozen=True)
class Format:
    """A format that traces can be read from.

    Attributes
    ----------
    name : str
        What the caller says.
    load : callable
        ``load(source) -> Trace``; raises through `Source.fail`.
    title : str
        One line for lists of formats.
    sniff : callable, optional
        ``sniff(head) -> bool``: whether a file that starts so is of this format. It should only say yes to what can be
        nothing else; the formats are asked in order. None: never found by looking.
    aliases : tuple of str
        Other names.
    load_many : callable, optional
        ``load_many(sources) -> Trace`` for a trace in several files; None: the format has one file.
    options : frozenset of str
        Keyword options of `load` that mean something to this format.
    skips : bool
        Whether the reader itself leaves out bad rows (`Source.skip`); else the file is read again without each.
    """

    name: str
    load: Callable[[Source], Trace]
    title: str
    sniff: Callable[[Head], bool] | None = None
    aliases: tuple[str, ...] = ()
    load_many: Callable[[list[Source]], Trace] | None = None
    options: frozenset[str] = frozenset()
    skips: bool = False
