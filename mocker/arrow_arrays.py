"""NumPy columns as Arrow arrays and back, by their buffers, and as Parquet.

`pyarrow.array` and `to_numpy` do the same, but import pandas if that is installed, only to ask whether they were given
a Series of it: that takes several times as long as a replay.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ._text import encoded, lines
from .extras import import_extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["arrow_array", "nulls", "numbers", "write_parquet"]


def arrow_array(column: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> Any:
    """A `pyarrow.Array` of numbers or of text.

    Parameters
    ----------
    column : ndarray, shape (n,)
        Integers, floating-point numbers, booleans or objects.
    missing : ndarray of bool, shape (n,), optional
        Entries that become null. Of objects, None does so in any case.

    Raises
    ------
    ImportError
        pyarrow is not installed.
    """
    pa = import_extra("pyarrow", "parquet", "an Arrow table")
    if column.dtype.kind in "OU":
        values = column.tolist()
        if missing is not None and missing.any():
            values = [None if gone else value for value, gone in zip(values, missing.tolist(), strict=True)]
        return _text(pa, values)
    if column.dtype.kind == "b":
        kind, data = pa.bool_(), _bits(column)
    else:
        kind, data = pa.from_numpy_dtype(column.dtype), np.ascontiguousarray(column)
    valid = pa.py_buffer(_bits(~missing)) if missing is not None and missing.any() else None
    return pa.Array.from_buffers(kind, len(column), [valid, pa.py_buffer(data)])


def _bits(valid: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.packbits(valid, bitorder="little")


class _NotText(Exception):
    """A value is neither a string nor None."""


def _text(pa: Any, values: list[Any]) -> Any:
    """An array of strings, or of what `pyarrow` thinks fit if there is anything else."""
    absent: list[bool] = []

    def text(value: Any) -> bytes:
        if not (value is None or isinstance(value, str)):
            raise _NotText
        absent.append(value is None)
        return b"" if value is None else value.encode()

    try:
        codes, texts = encoded(values, text)
    except _NotText:
        return pa.array(values)
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.array([len(one) for one in texts], np.int64)[codes], out=offsets[1:])
    large = int(offsets[-1]) > np.iinfo(np.int32).max
    valid = pa.py_buffer(_bits(~np.array(absent)[codes])) if any(absent) else None
    return pa.Array.from_buffers(pa.large_string() if large else pa.string(), len(values), [
        valid, pa.py_buffer(offsets if large else offsets.astype(np.int32)),
        pa.py_buffer(lines([b"", b""], [(codes, texts)], b""))])


def write_parquet(table: Any, file: BinaryIO) -> None:
    """Write a `pyarrow.Table` of many different numbers as Parquet.

    Floating-point numbers are split into streams of bytes and compressed, integers packed by their differences: that is
    a quarter of the time of the dictionaries which pyarrow tries first, and smaller. Floating-point columns have no
    statistics, which would take a tenth of the time.
    """
    pq = import_extra("pyarrow.parquet", "parquet", "a Parquet file")
    types = import_extra("pyarrow.types", "parquet", "a Parquet file")
    real = [field.name for field in table.schema if types.is_floating(field.type)]
    whole = [field.name for field in table.schema if types.is_integer(field.type)]
    rest = [field.name for field in table.schema if field.name not in {*real, *whole}]
    pq.write_table(
        table, file, use_dictionary=rest, write_statistics=[*whole, *rest],
        column_encoding=dict.fromkeys(real, "BYTE_STREAM_SPLIT") | dict.fromkeys(whole, "DELTA_BINARY_PACKED"),
        compression=dict.fromkeys([*real, *rest], "lz4") | dict.fromkeys(whole, "none"))


def nulls(array: Any) -> NDArray[np.bool_]:
    """Which entries of a `pyarrow.Array` are null, shape (n,)."""
    if array.null_count == 0:
        return np.zeros(len(array), np.bool_)
    valid = array.buffers()[0]
    if valid is None:              # all of them, or a type that has no such bits
        return np.array([value is None for value in array.to_pylist()], np.bool_)
    bits = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[array.offset:array.offset + len(array)]
    return np.equal(bits, 0)


def numbers(array: Any) -> NDArray[Any]:
    """Values of a `pyarrow.Array` of integers, floating-point numbers or times, shape (n,); 0 where it is null.

    Without nulls they are a view of the array's memory.
    """
    types = import_extra("pyarrow.types", "parquet", "an Arrow table")
    kind = "float" if types.is_floating(array.type) else "uint" if types.is_unsigned_integer(array.type) else "int"
    dtype = np.dtype(f"{kind}{array.type.bit_width}")      # `to_pandas_dtype` imports pandas in some versions
    data = array.buffers()[1]
    if data is None:
        return np.zeros(len(array), dtype)
    values: NDArray[Any] = np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
    return np.where(nulls(array), 0, values) if array.null_count else values
