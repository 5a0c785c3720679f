"""The reader of agent sessions by lengths: JSONL with one session a line, its turns as lists of lengths and latencies.

Answers to `Trace::from_applied_compute_agentic` in the reference's `loadgen/trace.rs`. A turn's prompt is all that was
said before it; the rows have no time stamps, so that such a trace is for closed-loop replays.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..trace import Trace
from .registry import Format, Head
from .rows import NotJson, check_integer, kind, lines, read_fields
from .source import Source

_SHARED_ID = 0xA63E << 48       # ids of shared prefix blocks; only their low 32 bits reach the tokens
_MAX_IDS = 2**28                # hash ids in all: 2 GB
_MAX_LENGTH = 2**40
_LISTS = ("assistant_response_length", "tool_call_output_length", "tool_call_latency")
_FIELDS = ("num_turns", "input_prompt_length", *_LISTS, "final_assistant_response_length")
_KEYS = {name: name for name in _FIELDS}


def _check_lengths(source: Source, line: int, field: str, value: Any, low: int, high: int) -> list[int]:
    if type(value) is not list:
        source.fail(line, field, f"must be a list of integers, is {kind(value)}; write it as [1, 2, 3]")
    return [check_integer(source, line, f"{field}[{i}]", element, low, high) for i, element in enumerate(value)]


def _check_seconds(source: Source, line: int, field: str, value: Any, low: int, high: int) -> list[float]:
    if type(value) is not list:
        source.fail(line, field, f"must be a list of seconds, is {kind(value)}; write it as [0.5, 2]")
    out = []
    for i, element in enumerate(value):
        try:
            number = math.nan if type(element) not in (int, float) else float(element)
        except OverflowError:
            number = math.inf
        if isinstance(element, NotJson) or not (math.isfinite(number) and number >= 0):
            source.fail(line, f"{field}[{i}]", f"must be a finite number of seconds of at least 0, is {kind(element)}")
        out.append(number)
    return out


_CHECKS = {
    "num_turns": (check_integer, 0, 2**31 - 1),
    "input_prompt_length": (check_integer, 1, _MAX_LENGTH),
    "assistant_response_length": (_check_lengths, 0, _MAX_LENGTH),
    "tool_call_output_length": (_check_lengths, 0, _MAX_LENGTH),
    "tool_call_latency": (_check_seconds, 0, 0),
    "final_assistant_response_length": (check_integer, 0, _MAX_LENGTH),
}


def load(source: Source) -> Trace:
    """Read the sessions; options `shared_prefix_ratio` and `num_prefix_groups`."""
    ratio, groups = _sharing(source)
    block = source.block_size
    inputs: list[int] = []
    outputs: list[int] = []
    delays: list[float] = []
    sessions: list[int] = []
    rows: list[int] = []
    names: list[str] = []
    ids: list[NDArray[np.uint64]] = []
    next_id, total = 1, 0
    for line, raw in lines(source):
        values = read_fields(source, line, raw, _KEYS, _CHECKS)
        for field in _FIELDS:
            if field not in values:
                source.fail(line, field, "is missing; every row needs it")
        for field in _LISTS:
            if len(values[field]) != values["num_turns"]:
                source.fail(line, field, f"has {len(values[field])} entries, but num_turns is {values['num_turns']}; "
                                         "make them equal")
        added = [a + b for a, b in zip(values["assistant_response_length"], values["tool_call_output_length"],
                                       strict=True)]
        lengths = np.cumsum([values["input_prompt_length"], *added])
        counts = -(-lengths // block)
        total += int(counts.sum())
        if total > _MAX_IDS or lengths[-1] > _MAX_LENGTH:
            source.fail(line, "input_prompt_length", f"takes the file to {total} hash ids, more than the {_MAX_IDS} "
                                                     "that a trace may have; give a larger block_size, or cut the file")
        shared = min(_round(float(counts[0]) * ratio), int(counts[0])) if groups and ratio > 0 else 0
        own = np.arange(next_id, next_id + int(counts[-1]) - shared, dtype=np.uint64)
        next_id += len(own)
        group = (line - 1) % groups if groups else 0
        front = np.arange(shared, dtype=np.uint64) | np.uint64(_SHARED_ID | (group << 32) % 2**64)
        said = np.concatenate((front, own))
        ids.extend(said[:count] for count in counts.tolist())
        inputs.extend(lengths.tolist())
        outputs.extend((*values["assistant_response_length"], values["final_assistant_response_length"]))
        delays.extend((0.0, *(seconds * 1000.0 for seconds in values["tool_call_latency"])))
        if not math.isfinite(max(delays[-len(counts):])):
            source.fail(line, "tool_call_latency", "is too long to be counted in ms; correct it")
        sessions.extend([len(names)] * len(counts))
        rows.extend([line] * len(counts))
        names.append(f"applied_compute_agentic_session_{line}")
    if not inputs:
        source.fail(None, None, "did not contain any requests; a trace has one JSON object a line")
    return Trace.from_columns(
        block_size=block, input_length=np.array(inputs, np.int64), output_length=np.array(outputs, np.int64),
        hash_offsets=np.concatenate(([0], np.cumsum([len(part) for part in ids]))).astype(np.int64),
        hash_ids=np.concatenate(ids), line=np.array(rows, np.int64), session=np.array(sessions, np.int32),
        delay_ms=np.array(delays), session_ids=names, path=source.path)


def _sharing(source: Source) -> tuple[float, int]:
    """The two options, checked."""
    ratio = source.options.get("shared_prefix_ratio", 0.0)
    groups = source.options.get("num_prefix_groups", 0)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float, np.number)) or not 0.0 <= ratio <= 1.0:
        raise ValueError(f"trace_shared_prefix_ratio must be between 0.0 and 1.0, got {ratio!r}")
    if isinstance(groups, bool) or not isinstance(groups, (int, np.integer)) or not 0 <= groups < 2**31:
        raise ValueError(f"trace_num_prefix_groups must be an integer from 0 to {2**31 - 1}, got {groups!r}")
    return float(ratio), int(groups)


def _round(value: float) -> int:
    """To the nearest integer, halves up."""
    low = math.floor(value)
    return low + (value - low >= 0.5)


def sniff(head: Head) -> bool:
    """One of the two keys that begin such a session."""
    return "num_turns" in head.keys and "input_prompt_length" in head.keys


FORMAT = Format("applied_compute_agentic", load, sniff=sniff,
                title="agent sessions by lengths: prompts, answers, tool outputs and latencies (closed loop only)",
                options=frozenset({"shared_prefix_ratio", "num_prefix_groups"}))
