"""Columns as JSON lines and CSV; the compiled part is `_text.pyx`."""
from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._text import Writer, encoded, lines, reserve
from .report import compressed, write_atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Writer", "csv_lines", "csv_text", "encoded", "json_lines", "json_text", "lines", "open_text", "reserve"]


@contextlib.contextmanager
def open_text(path: str | os.PathLike[str], level: int = 6) -> Iterator[Writer]:
    """Open a file for text as `write_atomically`, gzip-compressed at `level` if its name ends in ``.gz``."""
    with write_atomically(path) as raw:
        with compressed(raw, path, level) as file:
            out = Writer(file.write, raw.fileno() if file is raw else -1)
            yield out
            out.flush()
        raw.flush()
        out.close()


def json_text(value: Any) -> bytes:
    """The JSON of a value; NumPy's are Python's, what JSON lacks is its `str`."""
    return json.dumps(value, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def csv_text(value: Any) -> bytes:
    """A cell, quoted where that is needed; empty for None."""
    import csv
    import io

    if value is None or (isinstance(value, float) and value != value):
        return b""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([value])
    return line.getvalue().encode()


def json_lines(keys: Sequence[str], columns: Mapping[str, Any], out: Writer | None = None) -> bytes:
    """An object a row.

    Parameters
    ----------
    keys : sequence of str
        Of the objects, in order.
    columns : mapping of arrays
        The values; NaN, an infinity and the integer -1 are null, and so is a key without a column. Or three things: the
        text before each value, a column of `lines`, and the text after it.
    out : Writer, optional
        Where to add them.

    Returns
    -------
    bytes
    """
    pieces: list[bytes] = []
    values: list[Any] = []
    text = b"{"
    for key in keys:
        text += json_text(key) + b":"
        if key not in columns:
            text += b"null,"
            continue
        column = columns[key]
        if isinstance(column, tuple):
            pieces.append(text + column[0])
            values.append(column[1])
            text = column[2] + b","
            continue
        pieces.append(text)
        text = b","
        if column.dtype.kind == "f":
            values.append(column)
        elif column.dtype.kind in "iu":
            values.append((column, True) if column.dtype.kind == "i" else column)
        else:
            values.append(encoded(column.tolist(), json_text))
    return lines([*pieces, text.rstrip(b",") + b"}\n"], values, b"null", out)


def csv_lines(columns: Mapping[str, NDArray[Any]], optional: Iterable[str], out: Writer | None = None) -> bytes:
    """Rows of a CSV file without its header.

    Parameters
    ----------
    columns : mapping of arrays
        NaN and None are empty cells.
    optional : iterable of str
        Names of columns of integers whose -1 is one, too.
    out : Writer, optional
        Where to add them.

    Returns
    -------
    bytes
    """
    empty = set(optional)
    values: list[Any] = []
    for name, column in columns.items():
        if column.dtype.kind == "f" and not np.isinf(column).any():
            values.append(column)
        elif column.dtype.kind in "iu":
            values.append((column, True) if name in empty else column)
        else:
            values.append(encoded(column.tolist(), csv_text))
    pieces = [b"", *[b","] * (len(values) - 1), b"\n"] if values else [b"\n"]
    return lines(pieces, values, b"", out)
