"""JSON rows: one object a line, its fields checked, and what is wrong with them in words."""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from .source import Source

MAX_INT64 = 2**63 - 1
MAX_UINT64 = 2**64 - 1
MAX_UINT32 = 2**32 - 1
MAX_ROW = 1 << 28              # bytes


class Object(list[tuple[str, Any]]):
    """The members of a JSON object, in order and with repetitions."""


class NotJson(str):
    """NaN, Infinity or -Infinity, which Python's parser takes for numbers."""


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)


DECODER = json.JSONDecoder(object_pairs_hook=Object, parse_constant=NotJson)
_STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


Check = Callable[[Source, int, str, Any, int, int], Any]


def lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank."""
    data, start, line = source.data, source.start, 1
    size = len(data)
    while start < size:
        stop = data.find(b"\n", start)
        row = data[start : size if stop < 0 else stop]
        if row.strip():
            yield line, row
        if stop < 0:
            return
        start, line = stop + 1, line + 1


def decode(source: Source, line: int, raw: bytes) -> tuple[str, Object]:
    """Text and members of a line that holds one JSON object; NaN and infinities are `NotJson` in it."""
    if len(raw) > MAX_ROW:
        source.fail(line, "row", f"is longer than {MAX_ROW >> 20} MiB; write one JSON object a line")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        source.fail(line, "row", f"byte {error.start + 1} is not UTF-8; convert the file to UTF-8")
    try:
        members = DECODER.decode(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg}, column {error.pos + 1}"
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            source.fail(line, "row", f"ends too early ({where}); the row is cut off, or spread over several lines")
        source.fail(line, "row", f"is not JSON ({where}); write one JSON object a line")
    except RecursionError:
        source.fail(line, "row", "is nested too deeply; a row is one flat object")
    except ValueError:          # an integer of thousands of digits
        source.fail(line, "row", "holds a number with too many digits; the largest integer is 18446744073709551615")
    if not isinstance(members, Object):
        source.fail(line, "row", f"is {kind(members)}, not a JSON object; write one object a line")
    return text, members


def read_fields(
    source: Source, line: int, raw: bytes, keys: Mapping[str, str], checks: Mapping[str, tuple[Check, int, int]],
    strange: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The fields of a row, checked; null counts as left out.

    Parameters
    ----------
    keys : mapping
        Field that each key stands for; an alias and its name are one field.
    checks : mapping
        ``(check, low, high)`` of a field; what ``check(source, line, field, value, low, high)`` returns is its value.
    strange : callable, optional
        Told of keys that stand for nothing.
    """
    text, members = decode(source, line, raw)
    values: dict[str, Any] = {}
    for key, value in members:
        field = keys.get(key)
        if field is None:
            if strange is not None:
                strange(key)
        elif field in values:
            source.fail(line, field, f"is given twice (the second time as {key!r}); keep one of them")
        else:
            values[field] = value
    values = {field: value for field, value in values.items() if value is not None}
    for field, (check, low, high) in checks.items():
        if field in values:
            values[field] = check(source, line, field, values[field], low, high)
    refuse_constants(source, line, text)
    return values


def refuse_constants(source: Source, line: int, text: str) -> None:
    """Refuse NaN and infinities anywhere in a row, perhaps in a key that is not read."""
    if "NaN" in text or "Infinity" in text:
        try:
            _STRICT_DECODER.decode(text)
        except ValueError as error:
            source.fail(line, "row", f"holds {error}, which is not JSON; leave the key out")


def _integer_problem(value: Any, low: int, high: int) -> str | None:
    if type(value) is not int:
        return f"must be an integer, is {kind(value)}; correct it, or leave the row out"
    if not low <= value <= high:
        return f"must be from {low} to {high}, is {short(value)}; correct it, or leave the row out"
    return None


def check_integer(source: Source, line: int, field: str, value: Any, low: int, high: int) -> Any:
    problem = _integer_problem(value, low, high)
    if problem is not None:
        source.fail(line, field, problem)
    return value


def check_integers(source: Source, line: int, field: str, value: Any, low: int, high: int) -> Any:
    if type(value) is not list:
        source.fail(line, field, f"must be a list of integers, is {kind(value)}; write it as [1, 2, 3]")
    if not (set(map(type, value)) <= {int} and (not value or low <= min(value) and max(value) <= high)):
        for i, element in enumerate(value):
            problem = _integer_problem(element, low, high)
            if problem is not None:
                source.fail(line, field, f"element {i} {problem}")
    return np.array(value, np.uint64 if field == "hash_ids" else np.uint32)


def check_number(source: Source, line: int, field: str, value: Any, low: int, high: int) -> float:
    if type(value) is not int and type(value) is not float:
        source.fail(line, field, f"must be a number of ms, is {kind(value)}; write a number, or leave the key out")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        source.fail(line, field, "must be a finite number of ms, is too large for one; correct it")
    return number


def check_patience(source: Source, line: int, field: str, value: Any, low: int, high: int) -> float:
    number = check_number(source, line, field, value, low, high)
    if number < 0:
        source.fail(line, field, f"is {number} ms; must be at least 0, or leave the key out")
    return number


def check_string(source: Source, line: int, field: str, value: Any, low: int, high: int) -> str:
    if type(value) is not str:
        source.fail(line, field, f"must be a string, is {kind(value)}; put it in quotes, or leave the key out")
    try:
        value.encode()
    except UnicodeEncodeError:
        source.fail(line, field, f"is not valid Unicode: {short(value)}; a surrogate stands alone")
    return value


def check_strings(source: Source, line: int, field: str, value: Any, low: int, high: int) -> list[str]:
    if type(value) is not list:
        source.fail(line, field, f"must be a list of strings, is {kind(value)}; write it as [\"a\", \"b\"]")
    return [check_string(source, line, f"{field}[{i}]", element, low, high) for i, element in enumerate(value)]


def kind(value: Any) -> str:
    """What a JSON value is, for a message."""
    if isinstance(value, NotJson):
        return str.__str__(value)
    if isinstance(value, Object):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    return f"the string {short(value)}" if isinstance(value, str) else f"the number {short(value)}"


def short(value: Any) -> str:
    """A value in a message, not too long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
