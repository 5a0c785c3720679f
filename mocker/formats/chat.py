"""Texts and conversations: ShareGPT and OpenAI-style messages, the inputs of AIPerf and of vLLM's benchmarks.

A file is JSONL, one JSON array, or AIPerf's inputs.json. Every row gives one request, or a session with one request an
answer. What a row may hold:

* `conversations` or `messages`: one request for each answer in it, its prompt all that was said before; with an output
  length beside them, one request whose prompt they all are;
* `turns`: what the user says in each turn, whose prompt is all that was said before, answers of the given lengths
  included;
* `payloads`: request bodies, each a turn;
* `text`, `prompt`, `text_input`, or only an `input_length`: one request.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from ..trace import Trace, TraceError
from . import mooncake
from .named import MAX_PROMPT, UNITS, fill_ids, make_trace
from .registry import Format, Head
from .rows import (
    DECODER,
    Object,
    check_integer,
    check_integers,
    check_number,
    check_string,
    decode,
    kind,
    lines,
    refuse_constants,
)
from .source import Source
from .texts import OPTIONS, Blocks, integer_option, tokens_of

__all__ = ["AIPERF", "SHAREGPT", "VLLM", "VLLM_TIMED"]

BLOCK_SIZE = 64
_MAX_ANSWER = 1 << 24           # tokens of an answer that a later prompt repeats
_OUTPUTS = ("output_length", "output_tokens", "max_completion_tokens", "max_tokens")
_TEXTS = ("text", "prompt", "text_input", "input_text", "texts")
_ANSWERS = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai"})
_SPACE = " \t\r\n"


@dataclass
class _Turn:
    """A request: how many tokens of its row's stream are its prompt, and the rest of its columns."""

    prompt: int
    output: int
    timestamp: float | None = None
    delay: float | None = None


@dataclass
class _Said:
    """What a row gives: a stream of tokens, and turns that end in it."""

    stream: list[Any] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    hash_ids: Any = None        # given ids instead of a stream
    length: int | None = None   # a prompt without content
    session: str | None = None
    request: str | None = None


class _Reader:
    """Rows of a file to requests."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tokens, _ = tokens_of(source)
        self.output_tokens = integer_option(source, "output_tokens")
        self.max_turns = integer_option(source, "max_turns")
        unit = source.options.get("time_unit", "ms")
        if unit not in UNITS:
            raise ValueError(f"time_unit must be one of {', '.join(UNITS)}, is {unit!r}")
        self.unit = UNITS[unit]
        self.line = 0
        self.answers = 0
        self.names: set[str] = set()        # of sessions that a row is all of

    def fail(self, name: str, problem: str) -> NoReturn:
        self.source.fail(self.line, name, problem)

    def read(self, line: int, members: Any) -> list[_Said]:
        """What one row gives: one stream, or one for each request body."""
        self.line = line
        if not isinstance(members, Object):
            self.fail("row", f"is {kind(members)}, not a JSON object; each row is one object")
        row = self._fields(members, "row")
        session = self._name(row, "session_id", "conversation_id")
        request = self._name(row, "request_id", "id")
        whole = True            # whether the row is all of its session
        if "payloads" in row:
            said = [self._request(self._fields(body, f"payloads[{i}]"))
                    for i, body in enumerate(self._list(row["payloads"], "payloads"))]
            if not said:
                self.fail("payloads", "is empty; a session needs at least one request")
        elif "turns" in row:
            said = [self._dialogue(self._list(row["turns"], "turns"))]
        elif "conversations" in row or ("messages" in row and not any(row.get(key) is not None for key in _OUTPUTS)):
            name = "conversations" if "conversations" in row else "messages"
            said = [self._conversation(self._list(row[name], name), name)]
            self._times(said[0].turns[0], row)
        else:
            said = [self._request(row)]
            whole = False
        if whole:
            session = self.new_name(session or request or f"conversation_{len(self.names) + 1}")
        for part in said:
            part.session = session
            part.request = None if whole else request
            for turn in part.turns:
                if turn.delay and session is None:
                    self.fail("delay", "means nothing in a row without session_id; give a timestamp")
                if turn.prompt < 1:
                    self.fail("row", "has a prompt without any text; a prompt needs at least one token")
        return said

    def _name(self, row: dict[str, Any], *keys: str) -> str | None:
        """The first of some keys that has a value, as text."""
        for key in keys:
            value = row.get(key)
            if value is not None:
                return str(value if type(value) is int else check_string(self.source, self.line, key, value, 0, 0))
        return None

    def new_name(self, name: str) -> str:
        """A name that no session has yet."""
        free, k = name, 2
        while free in self.names:
            free, k = f"{name}#{k}", k + 1
        self.names.add(free)
        return free

    def _fields(self, members: Any, name: str) -> dict[str, Any]:
        if not isinstance(members, Object):
            self.fail(name, f"must be an object, is {kind(members)}")
        row: dict[str, Any] = {}
        for key, value in members:
            if key in row:
                self.fail(key, "is given twice; keep one of them")
            row[key] = value
        return row

    def _list(self, value: Any, name: str) -> list[Any]:
        if type(value) is not list:
            self.fail(name, f"must be a list, is {kind(value)}")
        return value

    def _text(self, value: Any, name: str) -> str:
        """A text, or the texts of a list of parts."""
        if value is None:
            return ""
        if type(value) is list:
            return "".join(self._part(part, f"{name}[{i}]") for i, part in enumerate(value))
        return str(check_string(self.source, self.line, name, value, 0, 0))

    def _part(self, part: Any, name: str) -> str:
        if type(part) is str:
            return self._text(part, name)
        members = self._fields(part, name)
        if "text" not in members:
            self.fail(name, "is not a text; requests with images or sound cannot be simulated")
        return self._text(members["text"], name)

    def _output(self, row: dict[str, Any]) -> int:
        for key in _OUTPUTS:
            if row.get(key) is not None:
                return int(check_integer(self.source, self.line, key, row[key], 0, MAX_PROMPT))
        if self.output_tokens is None:
            self.fail("output_length", "is missing; give the option output_tokens=N for rows without one")
        return self.output_tokens

    def _times(self, turn: _Turn, row: dict[str, Any]) -> None:
        for key in ("timestamp", "delay"):
            if row.get(key) is not None:
                setattr(turn, key, check_number(self.source, self.line, key, row[key], 0, 0) * self.unit)

    def _request(self, row: dict[str, Any]) -> _Said:
        """One request."""
        said = _Said()
        texts = [key for key in (*_TEXTS, "messages") if row.get(key) is not None]
        length = row.get("input_length", row.get("input_tokens"))
        if len(texts) + (length is not None) != 1:
            what = " and ".join([*texts, *(["input_length"] if length is not None else [])])
            self.fail("row", f"has {what}; a row has one prompt" if what else
                      f"has no prompt; a row has one of {', '.join(_TEXTS)}, messages, conversations, turns, "
                      "input_length")
        if length is not None:
            said.length = int(check_integer(self.source, self.line, "input_length", length, 1, MAX_PROMPT))
            if row.get("hash_ids") is not None:
                said.hash_ids = check_integers(self.source, self.line, "hash_ids", row["hash_ids"], 0, 2**64 - 1)
        elif texts[0] == "messages":
            for i, message in enumerate(self._list(row["messages"], "messages")):
                said.stream.extend(self._message(message, f"messages[{i}]")[1])
        else:
            said.stream.extend(self.tokens(self._text(row[texts[0]], texts[0])))
        turn = _Turn(said.length if said.length is not None else len(said.stream), self._output(row))
        self._times(turn, row)
        said.turns.append(turn)
        return said

    def _message(self, message: Any, name: str) -> tuple[bool, Sequence[Any]]:
        """Whether a message is an answer, and its tokens."""
        members = self._fields(message, name)
        role = members.get("role", members.get("from"))
        if type(role) is not str:
            self.fail(name, "has no role; a message has role and content, or from and value")
        content = members.get("content", members.get("value"))
        return role.lower() in _ANSWERS, self.tokens(self._text(content, name))

    def _conversation(self, messages: list[Any], name: str) -> _Said:
        """A request for each answer that follows something else."""
        said = _Said()
        asked = False
        for i, message in enumerate(messages):
            answers, tokens = self._message(message, f"{name}[{i}]")
            if answers and asked and (self.max_turns is None or len(said.turns) < self.max_turns):
                said.turns.append(_Turn(len(said.stream), len(tokens)))
            said.stream.extend(tokens)
            asked = not answers
        if not said.turns:
            self.fail(name, "holds no answer that follows a question, so no request")
        return said

    def _dialogue(self, turns: list[Any]) -> _Said:
        """A request for each turn of the user; answers of the given length lie between them."""
        said = _Said()
        for i, entry in enumerate(turns):
            if self.max_turns is not None and len(said.turns) == self.max_turns:
                break
            row = self._fields(entry, f"turns[{i}]")
            texts = [key for key in _TEXTS if row.get(key) is not None]
            if len(texts) != 1:
                self.fail(f"turns[{i}]", f"must have one of {', '.join(_TEXTS)}")
            said.stream.extend(self.tokens(self._text(row[texts[0]], f"turns[{i}].{texts[0]}")))
            if i == 0 and row.get("role") == "system":
                continue
            turn = _Turn(len(said.stream), self._output(row))
            self._times(turn, row)
            said.turns.append(turn)
            if i < len(turns) - 1:
                if turn.output > _MAX_ANSWER:
                    self.fail(f"turns[{i}]", f"has an answer of more than {_MAX_ANSWER} tokens, which later "
                              "prompts repeat")
                # What the model says is not known, only that nobody else has it.
                said.stream.extend((self.answers, k) for k in range(turn.output))
                self.answers += 1
        if not said.turns:
            self.fail("turns", "is empty; a session needs at least one turn")
        return said


def _items(source: Source) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Line of each row, and a function that decodes it."""
    first = bytes(source.data[source.start:source.start + 4096]).lstrip()
    if first[:1] == b"[" or _holds_data(first):
        yield from _array_items(source)
        return
    for line, raw in lines(source):
        def row(line: int = line, raw: bytes = raw) -> Object:
            text, members = decode(source, line, raw)
            refuse_constants(source, line, text)
            return members

        yield line, row


def _holds_data(first: bytes) -> bool:
    """Whether a file is one object with a list `data` of sessions."""
    return first[:1] == b"{" and first[1:].lstrip()[:6] == b'"data"'


def _array_items(source: Source) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Elements of the file's one array, decoded one after the other."""
    raw = bytes(source.data[source.start:])
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        source.fail(1 + raw.count(b"\n", 0, error.start), "row", f"byte {error.start + 1} of the file is not UTF-8; "
                    "convert the file to UTF-8")
    at = text.index("[")
    line, counted = 1, 0

    def line_at(place: int) -> int:
        nonlocal line, counted
        line += text.count("\n", counted, place)
        counted = place
        return line

    def past_space(place: int) -> int:
        while place < len(text) and text[place] in _SPACE:
            place += 1
        return place

    at = past_space(at + 1)
    while not text.startswith("]", at):
        number = line_at(at)
        try:
            value, end = DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            cut = "ends too early" if error.pos >= len(text.rstrip()) or "Unterminated" in error.msg else "is not JSON"
            source.fail(line_at(min(error.pos, len(text))), "row", f"{cut} ({error.msg})")
        except RecursionError:
            source.fail(number, "row", "is nested too deeply")
        except ValueError:
            source.fail(number, "row", "holds a number with too many digits")
        part = text[at:end]

        def row(value: Any = value, number: int = number, part: str = part) -> Any:
            refuse_constants(source, number, part)
            return value

        yield number, row
        at = past_space(end)
        if text.startswith(",", at):
            at = past_space(at + 1)
            if not text.startswith("]", at):
                continue
            source.fail(line_at(at), "row", "is missing after a comma")
        if not text.startswith("]", at):
            source.fail(line_at(at), "row", "ends too early; the file is cut off" if at >= len(text) else
                        "is followed by neither a comma nor the end of the list")


def _load(source: Source) -> Trace:
    """Read the rows, and cut each stream into blocks."""
    reader = _Reader(source)
    size = BLOCK_SIZE if source.given_block_size is None else source.given_block_size
    blocks = Blocks(size)
    numbers: list[int] = []
    turns: list[_Turn] = []
    sessions: list[str | None] = []
    requests: list[str | None] = []
    prompts: list[Any] = []         # ids; None for a prompt that nobody shares
    for line, row in _items(source):
        try:
            found = reader.read(line, row())
        except TraceError as error:
            if not source.skip(error):
                raise
            continue
        for said in found:
            stream = blocks.ids(said.stream)
            for turn in said.turns:
                numbers.append(line)
                turns.append(turn)
                sessions.append(said.session)
                requests.append(said.request)
                needed = -(-turn.prompt // size)
                prompts.append(said.hash_ids if said.length is not None else np.array(stream[:needed], np.uint64))
    if any(name is not None for name in sessions):
        # Names of their own for the others: rows of one line would share the one that a reader gives to a line.
        reader.names.update(name for name in sessions if name is not None)
        sessions = [reader.new_name(f"request_{i}") if name is None else name for i, name in enumerate(sessions, 1)]
    offsets, ids = fill_ids(source, prompts, [turn.prompt for turn in turns], size)
    missing = np.nan
    return make_trace(
        source, line=np.array(numbers, np.int64), input_length=np.array([turn.prompt for turn in turns], np.int64),
        output_length=np.array([turn.output for turn in turns], np.int64),
        arrival_ms=np.array([missing if t.timestamp is None else t.timestamp for t in turns], np.float64),
        delay_ms=np.array([missing if t.delay is None else t.delay for t in turns], np.float64), hash_offsets=offsets,
        hash_ids=ids, session_ids=sessions if any(s is not None for s in sessions) else None,
        request_ids=requests if any(r is not None for r in requests) else None, block_size=BLOCK_SIZE)


def _load_timed(source: Source) -> Trace:
    """Read vLLM's timed traces: Mooncake rows with times in s."""
    unit = source.options.get("time_unit", "s")
    if unit not in UNITS:
        raise ValueError(f"time_unit must be one of {', '.join(UNITS)}, is {unit!r}")
    trace = mooncake.load(replace(source, options={}))
    return replace(trace, arrival_ms=trace.arrival_ms * UNITS[unit], delay_ms=trace.delay_ms * UNITS[unit])


def _is_sharegpt(head: Head) -> bool:
    start = head.first(65536).lstrip()
    if start[:1] == b"[":
        return b'"conversations"' in start or b'"messages"' in start
    other = {"timestamp", "event", "schema", *_OUTPUTS} & set(head.keys)
    return "conversations" in head.keys or ("messages" in head.keys and not other)


def _is_aiperf(head: Head) -> bool:
    keys = set(head.keys)
    if keys & {"hash_ids", "wait_for", "event", "schema", "chat_id", "num_turns"}:
        return False
    if keys & {"turns", "payloads", "text", "texts", "text_input", "input_text"} or {"messages", "timestamp"} <= keys:
        return True
    return _holds_data(head.first(4096).lstrip())


def _is_vllm(head: Head) -> bool:
    return "prompt" in head.keys and "hash_ids" not in head.keys


_OPTIONS = OPTIONS | {"time_unit"}
SHAREGPT = Format("sharegpt", _load, title="ShareGPT and OpenAI-style conversations: a session each, its answers' "
                  "lengths from the text", sniff=_is_sharegpt, aliases=("messages",), options=_OPTIONS, skips=True)
AIPERF = Format("aiperf", _load, title="AIPerf's single-turn, multi-turn and trace inputs, and its inputs.json",
                sniff=_is_aiperf, options=_OPTIONS, skips=True)
VLLM = Format("vllm", _load, title="vLLM's custom benchmark inputs: JSONL with prompt and output_tokens",
              sniff=_is_vllm, options=_OPTIONS, skips=True)
VLLM_TIMED = Format("vllm-timed", _load_timed, title="vLLM's timed traces: Mooncake rows with times in s",
                    aliases=("timed_trace", "vllm_timed"), options=frozenset({"time_unit"}), skips=True)
