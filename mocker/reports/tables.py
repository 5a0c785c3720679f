"""Time series as a CSV or Parquet file."""
from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrow_arrays import arrow_array, write_parquet
from ..report import write_atomically
from ..text import csv_lines, csv_text, encoded, open_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..timeline import Timeline

__all__ = ["TABLE_SUFFIXES", "write_csv", "write_timeseries"]

TABLE_SUFFIXES = (".csv", ".csv.gz", ".parquet")
_CHUNK_ROWS = 1 << 14


def write_timeseries(path: str | os.PathLike[str], timeline: Timeline) -> Path:
    """Write the series of a run, a row per time bin and worker (see `Timeline.columns`).

    Parameters
    ----------
    path
        The file; its name ends in one of `TABLE_SUFFIXES`.
    timeline : Timeline
        `Simulation.timeline` of a run that was recorded.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        Another ending.
    ImportError
        Parquet without pyarrow.
    """
    name = os.fspath(path)
    if not name.endswith(TABLE_SUFFIXES):
        raise ValueError(f"{name}: the name must end in {', '.join(TABLE_SUFFIXES)}")
    columns = timeline.columns()
    if not name.endswith(".parquet"):
        return write_csv(path, columns)
    try:
        pa = importlib.import_module("pyarrow")
    except ImportError as error:
        raise ImportError("a .parquet file needs pyarrow, which is not installed: pip install 'mocker-llm[parquet]'; "
                          "or use .csv") from error
    arrays = {key: arrow_array(values, np.isnan(values) if values.dtype.kind == "f" else None)
              for key, values in columns.items() if key != "pool"}
    numbers, pools = encoded(columns["pool"].tolist(), str.encode)
    arrays["pool"] = pa.DictionaryArray.from_arrays(
        arrow_array(numbers), arrow_array(np.array([pool.decode() for pool in pools], object)))
    table = pa.table({key: arrays[key] for key in columns})
    with write_atomically(path) as file:
        write_parquet(table, file)
    return Path(path)


def write_csv(path: str | os.PathLike[str], columns: Mapping[str, NDArray[Any]],
              optional: Collection[str] = ()) -> Path:
    """Write columns of one length as CSV, compressed if the name ends in ``.gz``; what is missing is an empty cell.

    Parameters
    ----------
    path
        The file.
    columns : mapping of arrays
        NaN and None are missing.
    optional : collection of str
        Columns of integers in which -1 is, too.
    """
    total = len(next(iter(columns.values()), ()))
    with open_text(path, 1) as out:
        out.write(b",".join(csv_text(name) for name in columns) + b"\n")
        for start in range(0, total, _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            csv_lines({name: column[part] for name, column in columns.items()}, optional, out)
    return Path(path)
