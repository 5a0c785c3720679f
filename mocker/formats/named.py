"""Named columns to a trace: which column is which field, times of any unit, prompts without hash ids.

Shared by the readers of CSV files and of Arrow tables.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..trace import Trace, TraceError
from .mooncake import RowColumns, finish_rows
from .source import Source

__all__ = ["FIELD_OF", "UNITS", "fill_ids", "make_trace", "plain_name", "resolve", "time_unit"]

UNITS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
"""Milliseconds in a unit of time."""

MAX_PROMPT = 2**31 - 1          # tokens of a prompt without hash ids, which get one for each block
MAX_BLOCKS = 2**32

_SYNONYMS = {
    "timestamp": "timestamp timestamp_ms arrival_time arrival_time_ms arrival_ms arrival arrived_at time created_time",
    "input_length": "input_length input_tokens input_len prompt_tokens prompt_length prompt_len num_prompt_tokens "
                    "num_prefill_tokens context_tokens contexttokens request_tokens isl",
    "output_length": "output_length output_tokens output_len completion_tokens generated_tokens generatedtokens "
                     "response_tokens response_length num_decode_tokens osl",
    "hash_ids": "hash_ids block_hashes",
    "session_id": "session_id session conversation_id",
    "delay": "delay delay_ms",
    "request_id": "request_id id uuid",
    "priority": "priority",
    "strict_priority": "strict_priority",
    "policy_class": "policy_class",
    "output_token_ids": "output_token_ids",
}
FIELDS = tuple(_SYNONYMS)
FIELD_OF = {name: field for field, names in _SYNONYMS.items() for name in names.split()}
"""Field that a plain column name stands for."""
_UNIT_OF = {"arrived_at": "s"}      # columns whose tools count in another unit than ms


def plain_name(name: str) -> str:
    """A column's name without letter case and separators."""
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def resolve(source: Source, line: int | None, header: Sequence[str]) -> dict[str, int]:
    """Which column holds which field.

    The option `columns` ("input_length=prompt,timestamp=t", or a mapping) names columns; others go by their usual
    names. Columns that mean nothing are not read.
    """
    given = source.options.get("columns", {})
    if isinstance(given, str):
        pairs = [part.partition("=") for part in given.split(",") if part.strip()]
        if any(not equals for _, equals, _ in pairs):
            raise ValueError(f"columns must look like input_length=NAME,timestamp=NAME, is {given!r}")
        given = {field.strip(): name.strip() for field, _, name in pairs}
    if not isinstance(given, Mapping):
        raise ValueError(f"columns must be a mapping of fields to names, is {given!r}")
    places: dict[str, int] = {}
    for field, name in given.items():
        if field not in FIELDS:
            raise ValueError(f"columns: there is no field {field!r}; there are {', '.join(FIELDS)}")
        if name not in header:
            source.fail(line, field, f"there is no column {name!r}; the columns are {_some(header)}")
        places[field] = list(header).index(name)
    for place, name in enumerate(header):
        found = FIELD_OF.get(plain_name(name))
        if found is None or found in given:
            continue
        if found in places:
            source.fail(line, found, f"could be column {header[places[found]]!r} or {name!r}; "
                        f"say which with the option columns={found}=NAME")
        places[found] = place
    if "input_length" not in places and "hash_ids" not in places:
        source.fail(line, "input_length", f"no column holds it; the columns are {_some(header)}: "
                    "say which with the option columns=input_length=NAME")
    if "output_length" not in places:
        source.fail(line, "output_length", f"no column holds it; the columns are {_some(header)}: "
                    "say which with the option columns=output_length=NAME")
    return places


def _some(header: Sequence[str]) -> str:
    text = ", ".join(map(repr, header))
    return text if len(text) <= 300 else text[:297] + "..."


def time_unit(source: Source, header: Sequence[str], places: Mapping[str, int]) -> float:
    """Milliseconds in a unit of the time columns: what the option `time_unit` says, else ms."""
    unit = source.options.get("time_unit")
    if unit is None:
        place = places.get("timestamp")
        unit = "ms" if place is None else _UNIT_OF.get(plain_name(header[place]), "ms")
    if unit not in UNITS:
        raise ValueError(f"time_unit must be one of {', '.join(UNITS)}, is {unit!r}")
    return UNITS[unit]


def fill_ids(
    source: Source, prompts: Sequence[NDArray[np.uint64] | None], lengths: Sequence[int], block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Offsets and hash ids of prompts; None stands for a prompt that shares nothing and gets ids above all others."""
    none = np.empty(0, np.uint64)
    free = max((int(ids.max()) for ids in prompts if ids is not None and len(ids)), default=-1) + 1
    counts = [max(-(-length // block_size), 1) if ids is None else len(ids)
              for ids, length in zip(prompts, lengths, strict=True)]
    missing = sum(count for ids, count in zip(prompts, counts, strict=True) if ids is None)
    if missing > MAX_BLOCKS or free + missing > 2**64:
        source.fail(None, "hash_ids", f"are missing for {missing} blocks, for which no ids are free; give the missing "
                    "ids, or a larger block size")
    parts = []
    for ids, count in zip(prompts, counts, strict=True):
        parts.append(np.arange(count, dtype=np.uint64) + np.uint64(free) if ids is None else ids)
        free += count if ids is None else 0
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64), np.concatenate([none, *parts])


def make_trace(
    source: Source, *, line: NDArray[np.int64], input_length: NDArray[np.int64], output_length: NDArray[np.int64],
    arrival_ms: NDArray[np.float64] | None = None, delay_ms: NDArray[np.float64] | None = None,
    hash_offsets: NDArray[np.int64] | None = None, hash_ids: NDArray[np.uint64] | None = None,
    drop: NDArray[np.bool_] | None = None, block_size: int | None = None, **others: Any,
) -> Trace:
    """Make a trace of rows whose values are in range; -1 for an input length that the hash ids give.

    Rows without hash ids get ids that no other row has: their prompts share nothing. `drop` marks rows that are left
    out already; `others` are further columns of `RowColumns`.
    """
    n = len(line)
    gone = np.zeros(n, np.bool_) if drop is None else drop
    if n == 0 or gone.all():
        first = source.first_skipped()
        source.fail(None, None, f"did not contain any requests{f'; the first: {first}' if first else ''}")
    size = source.block_size if block_size is None or source.given_block_size is not None else block_size
    if hash_offsets is None or hash_ids is None:
        for row in np.flatnonzero(((input_length > MAX_PROMPT) | (input_length < 0)) & ~gone).tolist():
            given = input_length[row]
            problem = "is missing; a prompt without hash ids needs it" if given < 0 else \
                f"{given} is more than {MAX_PROMPT} tokens"
            try:
                source.fail(int(line[row]), "input_length", problem)
            except TraceError as error:
                if not source.skip(error):
                    raise
                gone[row] = True
        counts = np.where(gone, 1, np.maximum(-(-input_length // size), 1))
        hash_offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        if hash_offsets[-1] > MAX_BLOCKS:
            source.fail(None, None, f"has prompts of {hash_offsets[-1]} blocks in all; give a larger block size")
        hash_ids = np.arange(hash_offsets[-1], dtype=np.uint64)
    missing = np.full(n, np.nan)
    rows = RowColumns(
        line=line, arrival_ms=missing if arrival_ms is None else arrival_ms,
        delay_ms=missing.copy() if delay_ms is None else delay_ms, input_length=input_length,
        output_length=output_length, hash_offsets=hash_offsets, hash_ids=hash_ids, **others)
    return finish_rows(source, rows, gone, size)
