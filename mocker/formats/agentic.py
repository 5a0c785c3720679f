"""The agentic Mooncake reader: rows of requests that wait for other requests to end, and then for a tool.

Answers to `AgenticTraceBuilder` in the reference's `loadgen/trace.rs`.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..trace import Trace
from ..waits import in_a_circle, links
from .mooncake import CHECKS, KEYS, check_row
from .registry import Format, Head
from .rows import check_number, check_strings, lines, read_fields, short
from .source import Source

_KEYS = {**KEYS, "wait_for": "wait_for", "tool_wait_ms": "tool_wait_ms"}
_CHECKS = {**CHECKS, "wait_for": (check_strings, 0, 0), "tool_wait_ms": (check_number, 0, 0)}
_MARKS = (b'"wait_for"', b'"tool_wait_ms"', b'"prefix_reset"', b'"branches"')


def load(source: Source) -> Trace:
    """Read JSONL with one request a line, each with a name of its own."""
    rows: list[dict[str, Any]] = []
    index: dict[str, int] = {}
    for line, raw in lines(source):
        values = read_fields(source, line, raw, _KEYS, _CHECKS)
        _check(source, line, values)
        name = values["request_id"]
        if name in index:
            source.fail(line, "request_id", f"{short(name)} is also the name of the row in line "
                                            f"{rows[index[name]]['line']}; give each row its own")
        index[name] = len(rows)
        values["line"] = line
        rows.append(values)
    if not rows:
        source.fail(None, None, "did not contain any requests; a trace has one JSON object a line")
    for values in rows:
        for name in values.get("wait_for", ()):
            if name not in index:
                source.fail(values["line"], "wait_for", f"names {short(name)}, which no row is called; correct it")
            if name == values["request_id"]:
                source.fail(values["line"], "wait_for", "names its own row, which could never begin; leave it out")
    waits = [[index[name] for name in values.get("wait_for", ())] for values in rows]
    return workflow(source, rows, waits)


def _check(source: Source, line: int, values: dict[str, Any]) -> None:
    """The rules of one row; fills in what it leaves out."""
    if not values.get("request_id", "").strip():
        source.fail(line, "request_id", "is missing or blank; every row of this format needs a name")
    check_row(source, line, values)
    timestamp, ids = values.get("timestamp"), values["hash_ids"]
    if timestamp is not None and timestamp < 0:
        source.fail(line, "timestamp", f"is {timestamp}; must be at least 0 ms")
    delay = values.get("delay", 0.0) + values.get("tool_wait_ms", 0.0)
    if not (math.isfinite(delay) and delay >= 0):
        source.fail(line, "delay", f"is {delay} ms together with tool_wait_ms; must be a finite number of at least 0")
    values["delay"] = delay
    capacity = len(ids) * source.block_size
    given = values.setdefault("input_length", capacity)
    if not capacity:
        source.fail(line, "hash_ids", "is empty; a prompt needs at least one hash id")
    if given < 1:
        source.fail(line, "input_length", "is 0; a prompt needs at least one token")
    if given > capacity:
        if not source.clamp:
            source.fail(
                line, "input_length",
                f"{given} is more than the {capacity} tokens that {len(ids)} hash ids of block size "
                f"{source.block_size} cover; give the right block_size, or on_short_hash_ids='clamp' to cut the prompt",
            )
        values["input_length"], values["clamped"] = capacity, True


def workflow(source: Source, rows: list[dict[str, Any]], waits: list[list[int]]) -> Trace:
    """A trace of rows (fields as in a file, and `line`) that wait for rows."""
    n = len(rows)
    counts = np.array([len(w) for w in waits], np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    others = np.array([other for w in waits for other in w], np.int64)
    lost = in_a_circle(links(n, None, None, offsets, others))
    if lost is not None:
        source.fail(rows[lost]["line"], "wait_for",
                    f"lets {short(rows[lost]['request_id'])} wait for itself in the end; break the circle")
    planned = [values.get("output_token_ids") for values in rows]
    tokens: NDArray[np.uint32] | None = None
    token_offsets: NDArray[np.int64] | None = None
    if any(plan is not None for plan in planned):
        parts = [np.empty(0, np.uint32) if plan is None else plan for plan in planned]
        tokens = np.concatenate(parts)
        token_offsets = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64)
    ids = [values["hash_ids"] for values in rows]
    return Trace.from_columns(
        block_size=source.block_size,
        arrival_ms=np.array([values.get("timestamp", math.nan) for values in rows]),
        input_length=np.array([values["input_length"] for values in rows], np.int64),
        output_length=np.array([values["output_length"] for values in rows], np.int64),
        hash_offsets=np.concatenate(([0], np.cumsum([len(i) for i in ids]))).astype(np.int64),
        hash_ids=np.concatenate(ids),
        line=np.array([values["line"] for values in rows], np.int64),
        delay_ms=np.where(counts > 0, [values["delay"] for values in rows], 0.0),   # nothing to wait for: no delay
        priority=np.array([values.get("priority", 0) for values in rows], np.int32),
        strict_priority=np.array([values.get("strict_priority", 0) for values in rows], np.uint32),
        session_ids=[values.get("session_id", f"request_{values['line']}") for values in rows],
        request_ids=[values["request_id"] for values in rows],
        policy_class=[values.get("policy_class") for values in rows],
        output_token_offsets=token_offsets,
        output_token_ids=tokens,
        path=source.path,
        cancel_after_ms=np.array([values.get("cancel_after_ms", math.nan) for values in rows]),
        clamped=np.flatnonzero([values.get("clamped", False) for values in rows]),
        wait_offsets=offsets,
        wait_rows=others,
    )


def sniff(head: Head) -> bool:
    """Mooncake rows, some of which have a key of this format."""
    if "hash_ids" not in head.keys or "request_id" not in head.keys:
        return False
    start = head.first()
    return any(mark in start for mark in _MARKS)


FORMAT = Format("agentic_mooncake", load, sniff=sniff, aliases=("agentic-mooncake",),
                title="Mooncake JSONL whose requests wait for others (wait_for) and for tools")
