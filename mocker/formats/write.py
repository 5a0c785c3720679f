"""Traces to files: the format by the ending of the name."""
from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..arrow_arrays import arrow_array
from ..report import write_atomically
from ..trace import Trace
from . import columns
from .source import STDIN

__all__ = ["SUFFIXES", "to_arrow", "write"]

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", columns.SUFFIX, ".parquet", ".arrow")
"""Endings that `write` knows: JSONL (Mooncake's), the binary form, and tables with named columns."""


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; loading the file gives an equal one.

    Parameters
    ----------
    trace : Trace
    path : path-like
        Its ending, one of `SUFFIXES`, says how; "-" is JSONL on standard output.

    Raises
    ------
    ValueError
        Another ending, or a value that the format cannot hold (an infinite time).
    ImportError
        pyarrow or zstandard is missing; names the extra to install.
    OSError
        The file cannot be written.
    """
    name = os.fspath(path)
    if name == STDIN:
        _write_jsonl(trace, sys.stdout.buffer, packed=False)
        sys.stdout.buffer.flush()
    elif name.endswith((".jsonl", ".jsonl.gz")):
        trace.save(name)
    elif name.endswith(".jsonl.zst"):
        with write_atomically(name) as file:
            _write_jsonl(trace, file, packed=True)
    elif name.endswith(columns.SUFFIX):
        columns.save(trace, name)
    elif name.endswith((".parquet", ".arrow")):
        _write_table(trace, name)
    else:
        raise ValueError(f"{name}: a trace is written as {', '.join(SUFFIXES)}; give the file one of these endings")


def _write_jsonl(trace: Trace, file: BinaryIO, *, packed: bool) -> None:
    """Write JSON rows to an open file."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.jsonl"
        trace.save(plain)
        with open(plain, "rb") as source:
            if packed:
                _module("zstandard", "zstd").ZstdCompressor().copy_stream(source, file, size=plain.stat().st_size)
            else:
                shutil.copyfileobj(source, file)


def to_arrow(trace: Trace) -> Any:
    """The trace as a `pyarrow.Table`: one row a request, the keys of a Mooncake row as columns, nulls for nothing.

    Raises
    ------
    ValueError
        The trace says what no column is for: turns that add to the prompt, rows that wait for others.
    """
    pa = _module("pyarrow", "parquet")
    if getattr(trace, "accumulate", False) or getattr(trace, "wait_offsets", None) is not None:
        raise ValueError("turns that add to the prompt, and rows that wait for others, cannot be written as a table; "
                         f"write {columns.SUFFIX} or .jsonl")
    table: dict[str, Any] = {}
    if not np.isnan(trace.arrival_ms).all():
        table["timestamp"] = arrow_array(trace.arrival_ms, np.isnan(trace.arrival_ms))
    table["input_length"], table["output_length"] = arrow_array(trace.input_length), arrow_array(trace.output_length)
    table["hash_ids"] = pa.LargeListArray.from_arrays(arrow_array(trace.hash_offsets), arrow_array(trace.hash_ids))
    if not trace.is_single_turn or trace.session_ids is not None:
        names = trace.session_ids or [f"session_{k}" for k in range(trace.n_sessions)]
        table["session_id"] = pa.DictionaryArray.from_arrays(arrow_array(trace.session),
                                                             arrow_array(np.array(names, object)))
        table["delay"] = arrow_array(trace.delay_ms, trace.turn == 0)
    if trace.request_ids is not None:
        table["request_id"] = arrow_array(np.array(trace.request_ids, object))
    for name in ("priority", "strict_priority"):
        if getattr(trace, name).any():
            table[name] = arrow_array(getattr(trace, name))
    if trace.policy_class is not None:
        table["policy_class"] = arrow_array(np.array(trace.policy_class, object))
    if trace.output_token_offsets is not None and trace.output_token_ids is not None:
        planned = pa.LargeListArray.from_arrays(arrow_array(trace.output_token_offsets),
                                                    arrow_array(trace.output_token_ids))
        table["output_token_ids"] = planned
    gives_up = getattr(trace, "cancel_after_ms", None)
    if gives_up is not None:
        table["cancel_after_ms"] = arrow_array(gives_up, np.isnan(gives_up))
    return pa.table(table, metadata={"mocker.block_size": str(trace.block_size)})


def _write_table(trace: Trace, name: str) -> None:
    table = to_arrow(trace)
    with write_atomically(name) as file:
        if name.endswith(".parquet"):
            _module("pyarrow.parquet", "parquet").write_table(table, file, compression="zstd")
        else:
            pa = _module("pyarrow", "parquet")
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)


def _module(name: str, extra: str) -> Any:
    """An optional package."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"this file needs {package}, which is not installed: pip install 'mocker-llm[{extra}]'") \
            from error
