"""Which requests of a capture wait for which: agent sessions, the agents that they start, and the tools in between.

Answers to `request_trace/agentic.rs` of the reference's `dynamo-data-gen`. In a session each request waits for the one
before it. The first request of a session that another one started waits for a request of that one, and a later request
of the parent waits for the child's last: those that a tool record names, or those next to the child in time.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from .rows import short
from .source import Source


@dataclass(frozen=True)
class Place:
    """Where a record stands."""

    source: Source
    file: int
    line: int

    def fail(self, field: str, problem: str) -> NoReturn:
        self.source.fail(self.line, field, problem)


@dataclass(frozen=True)
class Record:
    """A request that ended; times in ms since 1970."""

    place: Place
    name: str
    session: str | None
    parent: str | None
    start: int
    end: int
    block: int
    length: int
    output: int
    hashes: list[int]


@dataclass(frozen=True)
class Tool:
    """A tool that ran for a session; `explicit`: its record says for which requests, and which session it started."""

    place: Place
    name: str
    session: str
    start: int
    end: int
    explicit: bool = False
    asked_by: str = ""
    read_by: str | None = None
    child: str | None = None
    mode: str = ""


@dataclass
class Capture:
    """What the files hold."""

    requests: list[Record] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)


def lower(capture: Capture) -> tuple[list[list[int]], list[float]]:
    """For each request (sorted by start, end, name): whom it waits for, and how many ms then, tools included."""
    requests = capture.requests
    index = {request.name: i for i, request in enumerate(requests)}
    sessions: dict[str, list[int]] = {}
    parents: dict[str, str] = {}
    for i, request in enumerate(requests):
        session = request.session or ""
        sessions.setdefault(session, []).append(i)
        if request.parent is not None and parents.setdefault(session, request.parent) != request.parent:
            request.place.fail("agent_context.parent_session_id",
                               f"is {short(request.parent)}, but {short(parents[session])} before in session "
                               f"{short(session)}; a session has one parent")
    starters = _starters(capture.tools, requests, index, sessions)
    waits: list[list[int]] = [[] for _ in requests]
    previous: list[int | None] = [None] * len(requests)
    for rows in sessions.values():
        for before, row in zip(rows[:-1], rows[1:], strict=True):
            _add(waits[row], before)
            previous[row] = requests[before].start
    for session, parent in parents.items():
        if parent in sessions:
            _join(session, parent, requests, index, sessions, starters.get(session), waits)
    tools: dict[str, list[Tool]] = {}
    for tool in capture.tools:
        tools.setdefault(tool.session, []).append(tool)
    delays = []
    for row, request in enumerate(requests):
        if not waits[row]:
            delays.append(0.0)
            continue
        since = max(requests[other].end for other in waits[row])
        gap = float(max(request.start - since, 0))
        began = previous[row]
        window = since if began is None else began
        used = min(_busy(tools.get(request.session or "", []), request, window, since), gap)
        delays.append(max(gap - used, 0.0) + used)
    return waits, delays


def _starters(tools: list[Tool], requests: list[Record], index: dict[str, int],
              sessions: dict[str, list[int]]) -> dict[str, Tool]:
    """The tool that started a session, by session, of those whose records say so."""
    out: dict[str, Tool] = {}
    for tool in tools:
        if not tool.explicit:
            continue
        if tool.mode not in ("blocking", "background"):
            tool.place.fail("tool.claude.execution_mode", f"is {short(tool.mode)}; there are blocking and background")
        for key, name in (("source", tool.asked_by), ("consumer", tool.read_by)):
            if name is None:
                continue
            if name not in index:
                tool.place.fail(f"tool.claude.{key}_request_id", f"names {short(name)}, which no request is called")
            if requests[index[name]].session != tool.session:
                tool.place.fail(f"tool.claude.{key}_request_id",
                                f"names {short(name)}, a request of another session than the tool's")
        if tool.child is None or tool.child not in sessions:
            continue
        if tool.child in out:
            tool.place.fail("tool.claude.child_session_id", f"{short(tool.child)} was started by another tool before")
        out[tool.child] = tool
    return out


def _join(session: str, parent: str, requests: list[Record], index: dict[str, int], sessions: dict[str, list[int]],
          tool: Tool | None, waits: list[list[int]]) -> None:
    """Let a session begin after, and end before, requests of its parent."""
    rows, above = sessions[session], sessions[parent]
    first = rows[0]
    last = max(rows, key=lambda i: (requests[i].end, requests[i].start, requests[i].name.encode()))
    if tool is not None:
        for key, name in (("source", tool.asked_by), ("consumer", tool.read_by)):
            if name is not None and index[name] not in above:
                tool.place.fail(f"tool.claude.{key}_request_id",
                                f"names {short(name)}, which is no request of the parent session {short(parent)}")
        _add(waits[first], index[tool.asked_by])
        if tool.read_by is not None:
            _add(waits[index[tool.read_by]], last)
        return
    before = [i for i in above if requests[i].start <= requests[first].start]
    if before:
        newest = max(requests[i].start for i in before)
        _add(waits[first], [i for i in before if requests[i].start == newest][-1])
    after = [i for i in above if requests[i].start >= requests[last].end]
    if after:
        _add(waits[min(after, key=lambda i: requests[i].start)], last)


def _add(rows: list[int], row: int) -> None:
    if row not in rows:
        rows.append(row)


def _busy(tools: list[Tool], request: Record, window: int, since: int) -> float:
    """Time between `since` and the request's start in which tools ran whose results it read, ms.

    A tool whose record does not say who read it counts if it ended in the window.
    """
    spans = []
    for tool in tools:
        if tool.read_by is not None:
            if tool.read_by != request.name:
                continue
        elif tool.mode == "background" or tool.end <= window or tool.end > request.start:
            continue
        span = max(tool.start, since), min(tool.end, request.start)
        if span[1] > span[0]:
            spans.append(span)
    total, reached = 0, None
    for start, end in sorted(spans):
        if reached is None or start > reached:
            total += end - start
            reached = end
        elif end > reached:
            total += end - reached
            reached = end
    return float(total)
