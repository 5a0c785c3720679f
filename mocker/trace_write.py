"""Traces to JSONL: Mooncake rows, or agentic Mooncake rows where requests wait for each other."""
from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from .trace import Trace

_ROWS = 4096                    # rows that are held as text at a time


def write_rows(trace: Trace, file: BinaryIO | gzip.GzipFile) -> None:
    """Write the rows, a batch at a time."""
    names = _request_names(trace)
    for start in range(0, trace.n, _ROWS):
        file.write("".join(_text(trace, names, start, min(start + _ROWS, trace.n))).encode())


def _request_names(trace: Trace) -> list[str | None] | None:
    """Name of each row; each its own where rows wait for rows, by "request_<row>" and by "#2", "#3", … at the end."""
    names: list[str | None] | None = None if trace.request_ids is None else list(trace.request_ids)
    if trace.wait_rows is None:
        return names
    given = [None] * trace.n if names is None else names
    reserved = {name for name in given if name is not None}
    taken: set[str] = set()
    unique: list[str | None] = []
    for row, name in enumerate(given):
        base = f"request_{row}" if name is None else name
        free, k = base, 2
        while free in taken or (free in reserved and free != name):
            free = f"{base}#{k}"
            k += 1
        taken.add(free)
        unique.append(free)
    return unique


def _text(trace: Trace, names: list[str | None] | None, start: int, stop: int) -> Iterator[str]:
    """JSON rows, each with its newline."""
    part = slice(start, stop)
    first = int(trace.hash_offsets[start])
    offsets = (trace.hash_offsets[start : stop + 1] - first).tolist()
    ids = trace.hash_ids[first : first + offsets[-1]].tolist()
    arrivals, delays = trace.arrival_ms[part].tolist(), trace.delay_ms[part].tolist()
    inputs, outputs = trace.input_length[part].tolist(), trace.output_length[part].tolist()
    sessions, turns = trace.session[part].tolist(), trace.turn[part].tolist()
    priorities, stricts = trace.priority[part].tolist(), trace.strict_priority[part].tolist()
    named = trace.session_ids is not None or not trace.is_single_turn
    for i, row in enumerate(range(start, stop)):
        text = "{"
        if names is not None and (request := names[row]) is not None:
            text += f'"request_id": {_quote(request)}, '
        if named:
            k = sessions[i]
            text += f'"session_id": {_quote(trace.session_ids[k] if trace.session_ids else f"session_{k}")}, '
        if arrivals[i] == arrivals[i]:
            text += f'"timestamp": {_decimal(arrivals[i])}, '
        waits: list[int] = []
        if trace.wait_offsets is not None and trace.wait_rows is not None and names is not None:
            waits = trace.wait_rows[trace.wait_offsets[row] : trace.wait_offsets[row + 1]].tolist()
            if waits:
                text += f'"wait_for": [{", ".join(_quote(names[other] or "") for other in waits)}], '
        if turns[i] or waits:   # always: the gap between the time stamps need not be the think time
            text += f'"delay": {_decimal(delays[i])}, '
        text += f'"input_length": {inputs[i]}, "output_length": {outputs[i]}, '
        if priorities[i]:
            text += f'"priority": {priorities[i]}, '
        if stricts[i]:
            text += f'"strict_priority": {stricts[i]}, '
        if trace.cancel_after_ms is not None and (patience := float(trace.cancel_after_ms[row])) == patience:
            text += f'"cancel_after_ms": {_decimal(patience)}, '
        if trace.policy_class is not None and (policy := trace.policy_class[row]) is not None:
            text += f'"policy_class": {_quote(policy)}, '
        if trace.output_token_offsets is not None and trace.output_token_ids is not None:
            low, high = trace.output_token_offsets[row : row + 2].tolist()
            if high > low:
                text += f'"output_token_ids": {trace.output_token_ids[low:high].tolist()}, '
        yield f'{text}"hash_ids": {ids[offsets[i] : offsets[i + 1]]}}}\n'


def _quote(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _decimal(value: float) -> str:
    """The shortest JSON number that is read back as this value, sign of zero included."""
    if value == 0 and math.copysign(1, value) < 0:
        return "-0.0"
    return str(int(value)) if abs(value) < 2**53 and value == int(value) else repr(value)
