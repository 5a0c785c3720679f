"""The reader of Dynamo's request captures: a record of each request that ended, and of the tools that ran in between.

Answers to `request_trace/{load,mooncake}.rs` of the reference's `dynamo-data-gen`; `dynamo_workflow` has the rest. A
capture is one file or several, JSONL or gzip; a line is the record, or an object with the record as its `event`.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..trace import Trace
from .agentic import workflow
from .dynamo_workflow import Capture, Place, Record, Tool, lower
from .registry import Format, Head
from .rows import MAX_INT64, MAX_UINT64, Object, check_integer, check_number, check_string, decode, kind, lines, short
from .source import Source

_SCHEMA = "dynamo.request.trace.v1"
_EVENTS = ("request_end", "tool_start", "tool_end", "tool_error")


@dataclass(frozen=True)
class _Reader:
    """Fields of one JSON object, named with the path to it."""

    source: Source
    line: int
    prefix: str
    members: dict[str, Any]

    def get(self, name: str, check: Any, required: bool = False, low: int = 0, high: int = MAX_UINT64) -> Any:
        """A checked field, or None."""
        value = self.members.get(name)
        if value is None:
            if required:
                self.source.fail(self.line, self.prefix + name, "is missing; this kind of record needs it")
            return None
        return check(self.source, self.line, self.prefix + name, value, low, high)

    def part(self, name: str) -> _Reader | None:
        """An object in it, or None."""
        value = self.members.get(name)
        if value is None:
            return None
        if not isinstance(value, Object):
            self.source.fail(self.line, self.prefix + name, f"must be an object, is {kind(value)}")
        return _Reader(self.source, self.line, f"{self.prefix}{name}.", dict(value))


def _hashes(source: Source, line: int, field: str, value: Any, low: int, high: int) -> list[int]:
    if type(value) is not list:
        source.fail(line, field, f"must be a list of integers, is {kind(value)}; write it as [1, 2, 3]")
    if not (set(map(type, value)) <= {int} and (not value or low <= min(value) and max(value) <= high)):
        for i, element in enumerate(value):
            check_integer(source, line, f"{field}[{i}]", element, low, high)
    return value


def load(source: Source) -> Trace:
    """Read a capture in one file."""
    return load_many([source])


def load_many(sources: list[Source]) -> Trace:
    """Read a capture in several files."""
    capture = Capture()
    names: dict[str, Place] = {}
    for number, source in enumerate(sources):
        for line, raw in lines(source):
            _, members = decode(source, line, raw)
            content = dict(members)
            event = content.get("event", members)
            if isinstance(event, Object):
                _read(Place(source, number, line), dict(event), capture, names)
    if not capture.requests:
        sources[0].fail(None, None, "has no request_end records with a replay part; capture with replay metrics on")
    return _trace(sources, capture)


def _read(place: Place, members: dict[str, Any], capture: Capture, names: dict[str, Place]) -> None:
    """One record."""
    source, line = place.source, place.line
    record = _Reader(source, line, "", members)
    schema = record.get("schema", check_string, required=True)
    if schema != _SCHEMA:
        source.fail(line, "schema", f"is {short(schema)}; only {_SCHEMA!r} can be read")
    event = record.get("event_type", check_string, required=True)
    if event not in _EVENTS:
        source.fail(line, "event_type", f"is {short(event)}; there are {', '.join(_EVENTS)}")
    event_ms = record.get("event_time_unix_ms", check_integer, required=True)
    context, session, parent = record.part("agent_context"), None, None
    if context is not None:
        session = context.get("session_id", check_string, required=True)
        parent = context.get("parent_session_id", check_string)
    if event == "request_end":
        request = _request(place, record, event_ms, session, parent)
        if request.name in names:
            first = names[request.name]
            source.fail(line, "request.request_id", f"{short(request.name)} is also the request of "
                                                    f"{first.source.path}:{first.line}; keep one of them")
        names[request.name] = place
        capture.requests.append(request)
    elif event != "tool_start" and session is not None:
        tool = record.part("tool")
        if tool is not None:
            _tool(place, tool, event_ms, session, capture)


def _request(place: Place, record: _Reader, event_ms: int, session: str | None, parent: str | None) -> Record:
    source, line = place.source, place.line
    request = record.part("request")
    if request is None:
        source.fail(line, "request", "is missing; a request_end record needs it")
    name = request.get("request_id", check_string, required=True)
    replay = request.part("replay")
    if replay is None:
        source.fail(line, "request.replay", "is missing; capture with replay metrics on")
    block = replay.get("trace_block_size", check_integer, required=True, low=1, high=2**31 - 1)
    length = replay.get("input_length", check_integer, required=True, high=MAX_INT64)
    hashes = replay.get("input_sequence_hashes", _hashes, required=True)
    if len(hashes) != -(-length // block):
        source.fail(line, "request.replay.input_sequence_hashes",
                    f"holds {len(hashes)} hashes, but {length} tokens in blocks of {block} make {-(-length // block)}")
    if length < 1:
        source.fail(line, "request.replay.input_length", "is 0; a prompt needs at least one token")
    received = request.get("request_received_ms", check_integer, required=True)
    output = request.get("output_tokens", check_integer, required=True, high=MAX_INT64)
    total = request.get("total_time_ms", check_number)
    lasted = max(event_ms - received, 0) if total is None else _round(max(total, 0.0))
    return Record(place, name, session, parent, min(received, MAX_INT64),
                  min(received + min(lasted, MAX_UINT64), MAX_INT64), block, length, output, hashes)


def _tool(place: Place, tool: _Reader, event_ms: int, session: str, capture: Capture) -> None:
    name = tool.get("tool_call_id", check_string, required=True)
    tool.get("tool_class", check_string, required=True)
    ended = tool.get("ended_at_unix_ms", check_integer)
    began = tool.get("started_at_unix_ms", check_integer)
    lasted = tool.get("duration_ms", check_number)
    end = min(event_ms if ended is None else ended, MAX_INT64)
    start = end
    if began is not None:
        start = min(began, MAX_INT64)
    elif lasted is not None:
        start = end - min(_round(max(lasted, 0.0)), MAX_INT64)
    entry = Tool(place, name, session, start, end)
    claude = tool.part("claude")
    if claude is not None:
        entry = replace(
            entry, explicit=True, asked_by=claude.get("source_request_id", check_string, required=True),
            read_by=claude.get("consumer_request_id", check_string),
            child=claude.get("child_session_id", check_string),
            mode=claude.get("execution_mode", check_string, required=True))
    if end >= start:
        capture.tools.append(entry)


def _round(value: float) -> int:
    """To the nearest integer, halves up."""
    low = math.floor(value)
    return low + (value - low >= 0.5)


def _trace(sources: list[Source], capture: Capture) -> Trace:
    requests = capture.requests
    first = requests[0]
    for request in requests:
        if request.block != first.block:
            request.place.source.fail(request.place.line, "request.replay.trace_block_size",
                                      f"is {request.block}, but {first.block} before; a trace has one block size")
    given = sources[0].given_block_size
    if given is not None and given != first.block:
        first.place.source.fail(first.place.line, "request.replay.trace_block_size",
                                f"is {first.block}, but trace_block_size {given} was asked for; leave that out")
    with_session = [request for request in requests if request.session is not None]
    if with_session and len(with_session) < len(requests):
        odd = next(request for request in requests if (request.session is None) != (first.session is None))
        odd.place.source.fail(odd.place.line, "agent_context", "is there in some requests and missing in others; "
                                                               "a capture has it in all or in none")
    requests.sort(key=lambda request: (request.start, request.end, request.name.encode()))
    low = requests[0].start
    known: dict[int, int] = {}
    ids = [np.array([known.setdefault(h, len(known)) for h in request.hashes], np.uint64) for request in requests]
    path = ", ".join(dict.fromkeys(source.path for source in sources))
    whole = replace(sources[0], path=path, block_size=first.block)
    if with_session:
        waits, delays = lower(capture)
        rows = [{"request_id": request.name, "session_id": request.session, "timestamp": float(request.start - low),
                 "delay": delay, "input_length": request.length, "output_length": request.output,
                 "hash_ids": own, "line": request.place.line}
                for request, own, delay in zip(requests, ids, delays, strict=True)]
        for request in requests:
            if not request.name.strip():
                request.place.source.fail(request.place.line, "request.request_id", "is blank; give it a name")
        return workflow(whole, rows, waits)
    return Trace.from_columns(
        block_size=first.block, arrival_ms=np.array([float(request.start - low) for request in requests]),
        input_length=np.array([request.length for request in requests], np.int64),
        output_length=np.array([request.output for request in requests], np.int64),
        hash_offsets=np.concatenate(([0], np.cumsum([len(own) for own in ids]))).astype(np.int64),
        hash_ids=np.concatenate(ids), line=np.array([request.place.line for request in requests], np.int64),
        request_ids=[request.name for request in requests], path=path)


def sniff(head: Head) -> bool:
    """A record, or an object around one."""
    return "hash_ids" not in head.keys and (
        ("schema" in head.keys and "event_type" in head.keys) or ("event" in head.keys and b'"schema"' in head.row))


FORMAT = Format("dynamo", load, sniff=sniff, load_many=load_many,
                title="Dynamo request captures, one file or several")
