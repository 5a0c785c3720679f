"""The Qwen-Bailian usage traces: JSONL, one request a line, times in s, 16 tokens per hash id.

A request whose parent is in the file too is a later turn of its session; the others begin one. The pause before a
later turn is the gap between the time stamps, as in a Mooncake trace with sessions.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from ..trace import Trace, TraceError
from .named import MAX_PROMPT, fill_ids, make_trace
from .registry import Format, Head
from .rows import MAX_UINT64, Check, check_integer, check_integers, check_number, kind, lines, read_fields
from .source import Source

__all__ = ["FORMAT"]

BLOCK_SIZE = 16


def _check_id(source: Source, line: int, field: str, value: Any, low: int, high: int) -> str:
    """A chat id as text."""
    if type(value) is not int and not (type(value) is str and value):
        source.fail(line, field, f"must be an integer or a string, is {kind(value)}")
    return str(value)


_KEYS = {name: name for name in ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")}
_CHECKS: dict[str, tuple[Check, int, int]] = {
    "chat_id": (_check_id, 0, 0),
    "parent_chat_id": (_check_id, 0, 0),
    "timestamp": (check_number, 0, 0),
    "input_length": (check_integer, 0, MAX_PROMPT),
    "output_length": (check_integer, 0, MAX_PROMPT),
    "hash_ids": (check_integers, 0, MAX_UINT64),
}


def load(source: Source) -> Trace:
    """Read the rows."""
    root: dict[str, str] = {}           # first request of the session that each chat id belongs to
    number: list[int] = []
    columns: dict[str, list[Any]] = {name: [] for name in (*_KEYS, "session")}
    for line, raw in lines(source):
        try:
            values = read_fields(source, line, raw, _KEYS, _CHECKS)
            for field in ("chat_id", "timestamp", "input_length", "output_length"):
                if field not in values:
                    source.fail(line, field, "is missing; every row needs it")
            name = values["chat_id"]
            if name in root:
                source.fail(line, "chat_id", f"{name} is that of an earlier row too")
        except TraceError as error:
            if not source.skip(error):
                raise
            continue
        root[name] = root.get(values.get("parent_chat_id", "-1"), name)
        number.append(line)
        values["session"] = root[name]
        for field, column in columns.items():
            column.append(values.get(field))
    n = len(number)
    given = [ids is not None for ids in columns["hash_ids"]]
    offsets = ids = None
    if any(given):
        size = BLOCK_SIZE if source.given_block_size is None else source.given_block_size
        offsets, ids = fill_ids(source, columns["hash_ids"], columns["input_length"], size)
    several = len(set(columns["session"])) < n
    return make_trace(
        source, line=np.array(number, np.int64), arrival_ms=np.array(columns["timestamp"], np.float64) * 1e3,
        input_length=np.array(columns["input_length"], np.int64),
        output_length=np.array(columns["output_length"], np.int64), hash_offsets=offsets, hash_ids=ids,
        session_ids=columns["session"] if several else None, request_ids=columns["chat_id"], block_size=BLOCK_SIZE)


def _sniff(head: Head) -> bool:
    return "chat_id" in head.keys and "parent_chat_id" in head.keys and "input_length" in head.keys


FORMAT = Format("qwen", load, title="Qwen-Bailian usage traces: JSONL with chat ids, times in s, 16 tokens per hash id",
                sniff=_sniff, aliases=("bailian",), skips=True)
