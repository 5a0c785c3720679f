"""What a setting may be: checks of single values, fields, and records that are made of them.

Every class of settings is a :class:`Record`: its constructor's signature holds the defaults, its class body is the
table of fields (what a value may be, what it means), and one loop checks a set of values against that table. Rules
between fields are in ``_finish``. A bad value raises ``ValueError`` with one line for each bad field; the object that a
setter was called on stays as it was.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import math
import operator
import os
import re
import uuid as uuid_module
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ._fields import Reader, given

log = logging.getLogger("mocker")

U16_MAX = 2**16 - 1
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
_T = TypeVar("_T")
_R = TypeVar("_R", bound="Record")
BOOL_TYPES = (bool, np.bool_)  # refused where a number is meant
_LIMIT_NAMES = {U16_MAX: "2**16-1", U32_MAX: "2**32-1", U64_MAX: "2**64-1", 2**31 - 1: "2**31-1", -(2**31): "-2**31"}
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan)", re.ASCII | re.IGNORECASE)


class BadValue(Exception):
    """What is wrong, as (path below the field, text) pairs; never leaves this module."""

    def __init__(self, *problems: tuple[str, str]) -> None:
        super().__init__(problems)
        self.problems = problems


def show(value: object) -> str:
    """Show a value in an error: short, typed where the type is the point, and never raising."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 200 else f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # a foreign object's repr may do anything
        text = "an object"
    if len(text) > 80:
        text = text[:77] + "..."
    return text if isinstance(value, str) else f"{text} of type {type(value).__name__}"


def one_of(names: Sequence[str]) -> str:
    """Join names as ``'a' or 'b'``, ``'a', 'b', or 'c'``."""
    quoted = [f"'{name}'" for name in names]
    return " or ".join(quoted) if len(quoted) < 3 else ", ".join(quoted[:-1]) + ", or " + quoted[-1]


# --- what a value may be ---------------------------------------------------------------------------------------------


class Check:
    """Turns a given value into the stored one, or raises ``BadValue``; ``expects`` says what is allowed."""

    expects = "anything"

    def __call__(self, value: Any) -> Any:
        raise NotImplementedError

    def refuse(self, value: object) -> BadValue:
        return BadValue(("", f"must be {self.expects}, got {show(value)}"))


class Int(Check):
    def __init__(self, low: int, high: int, hint: str = "") -> None:
        self.low, self.high = low, high
        self.expects = f"an integer in {_LIMIT_NAMES.get(low, low)}..={_LIMIT_NAMES.get(high, high)}{hint}"

    def __call__(self, value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, BOOL_TYPES):
                raise self.refuse(value)
            try:
                value = operator.index(value)
            except TypeError:
                raise self.refuse(value) from None
        if not self.low <= value <= self.high:
            raise self.refuse(value)
        return int(value)


class DefaultCount(int):
    """A count that nobody gave."""

    __slots__ = ()


class Blocks(Int):
    def __call__(self, value: Any) -> int:
        return value if type(value) is DefaultCount else super().__call__(value)


class Float(Check):
    def __init__(self, low: float = -math.inf, high: float = math.inf, *, below: bool = False) -> None:
        self.low, self.high, self.below = low, high, below
        if math.isinf(low):
            self.expects = "a finite number"
        else:
            end = "inf)" if math.isinf(high) else f"{high:g})" if below else f"{high:g}]"
            self.expects = f"a finite number in [{low:g}, {end}"

    def __call__(self, value: Any) -> float:
        number = value
        if type(value) is not float:
            kind = type(value)
            is_number = hasattr(kind, "__float__") or hasattr(kind, "__index__")
            if not is_number or isinstance(value, (*BOOL_TYPES, np.ndarray)):
                raise self.refuse(value)
            try:
                number = float(value)
            except (OverflowError, TypeError, ValueError):
                raise self.refuse(value) from None
        if not (math.isfinite(number) and self.low <= number <= self.high) or (self.below and number == self.high):
            raise self.refuse(value)
        return number  # type: ignore[no-any-return]


class Bool(Check):
    expects = "True or False"

    def __call__(self, value: Any) -> bool:
        if not isinstance(value, BOOL_TYPES):
            raise self.refuse(value)
        return bool(value)


class Text(Check):
    expects = "a string"

    def __call__(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refuse(value)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadValue(("", f"must be {self.expects} without lone surrogates, got {show(value)}")) from None
        return str(value)


class FilePath(Check):
    expects = "a path (str or os.PathLike)"

    def __call__(self, value: Any) -> str:
        path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        if not isinstance(path, str):
            raise self.refuse(value)
        return path


class Choice(Check):
    def __init__(self, *names: str, wrong: str) -> None:
        self.names = names
        self.expects = f"one of {one_of(names)}"
        self.wrong = wrong

    def __call__(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refuse(value)
        name = value.lower()
        if name not in self.names:
            raise BadValue(("", self.wrong.format(value=value if len(value) <= 80 else value[:77] + "...")))
        return name


class Nested(Check):
    def __init__(self, kind: type[Record]) -> None:
        self.kind = kind
        self.expects = f"a {kind.__name__} or a mapping of its fields"

    def __call__(self, value: Any) -> Record:
        if isinstance(value, self.kind):
            return value
        if not isinstance(value, Mapping):
            raise self.refuse(value)
        return self.kind._build(self.kind._gather(value))


class TimingValue(Check):
    expects = "a timing model of mocker.timing, or the path of a saved one"

    def __call__(self, value: Any) -> Any:
        from .timing import TimingModel, load_timing

        if isinstance(value, TimingModel):
            return value
        if isinstance(value, str | os.PathLike):
            try:
                return load_timing(value)
            except (ValueError, OSError) as error:
                raise BadValue(("", str(error))) from None
        raise self.refuse(value)


class ScoreValue(Check):
    def __init__(self, kind: str, integers: str) -> None:
        self.kind, self.expects = kind, f"a function of {integers} integers, or a mocker.hooks.{kind}"

    def __call__(self, value: Any) -> Any:
        from . import hooks

        kind = getattr(hooks, self.kind)
        if isinstance(value, kind):
            return value
        try:
            return kind(value)
        except TypeError as error:
            raise BadValue(("", str(error))) from None


class UuidValue(Check):
    expects = "a uuid.UUID, its text, or an integer in 0..=2**128-1"

    def __call__(self, value: Any) -> uuid_module.UUID:
        if isinstance(value, uuid_module.UUID):
            return value
        try:
            if isinstance(value, str):
                return uuid_module.UUID(value)
            if not isinstance(value, BOOL_TYPES):
                return uuid_module.UUID(int=operator.index(value))
        except (TypeError, ValueError):
            pass
        raise self.refuse(value)


class TokenIds(Check):
    """Any sequence of ints, or a NumPy integer array, as a one-dimensional ``uint32`` array.

    An array that has that type already is kept as it is, so that a long prompt is not copied.
    """

    expects = "a sequence of token ids in 0..=2**32-1"

    def __call__(self, value: Any) -> npt.NDArray[np.uint32]:
        if isinstance(value, np.ndarray) and value.dtype == np.uint32 and value.ndim == 1:
            return value
        if isinstance(value, array | memoryview | np.ndarray) or hasattr(value, "__array__"):
            return self._from_array(value)
        if isinstance(value, str | Mapping) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
            raise self.refuse(value)
        if len(value) == 0:
            return np.empty(0, np.uint32)
        if set(map(type, value)) == {int}:
            try:
                return np.frombuffer(array("I", list(value)), np.uintc).astype(np.uint32, copy=False)
            except OverflowError:
                pass  # the loop below finds which
        return np.array([self._token(position, item) for position, item in enumerate(value)], np.uint32)

    def _token(self, position: int, item: Any) -> int:
        token = None
        if not isinstance(item, BOOL_TYPES):
            try:
                token = operator.index(item)
            except TypeError:
                token = None
        if token is None or not 0 <= token <= U32_MAX:
            raise BadValue((f"[{position}]", f"must be a token id in 0..=2**32-1, got {show(item)}"))
        return token

    def _from_array(self, value: Any) -> npt.NDArray[np.uint32]:
        try:
            items = np.asarray(value)
        except (TypeError, ValueError):
            raise self.refuse(value) from None
        if items.ndim != 1:
            raise BadValue(("", f"must be {self.expects} (one dimension), got an array of shape {items.shape}"))
        if items.size == 0:
            return np.empty(0, np.uint32)
        if items.dtype == object:
            return np.array([self._token(position, item) for position, item in enumerate(items)], np.uint32)
        if items.dtype.kind not in "iu":
            raise BadValue(("", f"must be {self.expects}, got an array of {items.dtype}"))
        if items.dtype.itemsize > 4 or items.dtype.kind == "i":
            outside = (items < 0) | (items > U32_MAX)
            if outside.any():
                position = int(outside.argmax())
                raise BadValue((f"[{position}]", f"must be a token id in 0..=2**32-1, got {items[position]}"))
        return items.astype(np.uint32, copy=False)


# --- fields and records ----------------------------------------------------------------------------------------------


class Field(Reader, Generic[_T]):
    """One validated field of a :class:`Record`, and the read-only attribute that shows it.

    Attributes
    ----------
    name : str
        The field's name, the same in the constructor, in JSON and as an attribute.
    expects : str
        What a value may be, in words.
    default : Any
        The constructor's default (``inspect.Parameter.empty`` if there is none).
    nullable : bool
        Whether None is allowed.
    settable : bool
        Whether the attribute may be assigned to.
    doc : str
        What the field means.
    """

    settable: ClassVar[bool] = False

    def __init__(self, check: Check, doc: str, *, nullable: bool = False) -> None:
        self.name = ""
        self.check = check
        self.nullable = nullable
        self.default: Any = inspect.Parameter.empty
        self.doc = self.__doc__ = doc

    @property
    def expects(self) -> str:
        return self.check.expects + (" or None" if self.nullable else "")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    if TYPE_CHECKING:
        @overload
        def __get__(self: _F, record: None, owner: type) -> _F: ...
        @overload
        def __get__(self, record: Record, owner: type) -> _T: ...
        def __get__(self, record: Record | None, owner: type) -> Any: ...

    def __set__(self, record: Record, value: NoReturn) -> None:
        kind = type(record).__name__
        raise AttributeError(f"{self.name} of {kind} is read-only; make a changed copy with replace({self.name}=...)")


_F = TypeVar("_F", bound=Field[Any])


class SettableField(Field[_T]):
    """A field whose attribute may be assigned to; a refused value changes nothing."""

    settable = True

    def __set__(self, record: Record, value: _T) -> None:
        record._values = record._changed({self.name: value})


class Record:
    """A set of named values that has been checked against its class's table of fields."""

    __slots__ = ("_values",)

    _values: dict[str, Any]            # never changed, only replaced by another one, so that copies may share it
    _fields: ClassVar[Mapping[str, Field[Any]]] = {}
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, quick: bool = False) -> None:
        """`quick`: the constructor does nothing but `_init`, and may be gone round."""
        super().__init_subclass__()
        fields: dict[str, Field[Any]] = {}
        for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
            field = cls.__dict__[name]
            field.default = parameter.default
            fields[name] = field
        cls._fields = MappingProxyType(fields)
        cls._defaults = {n: f.default for n, f in fields.items() if f.default is not inspect.Parameter.empty}
        if quick:
            cls.__init__ = _by_name(cls.__init__, cls._defaults)  # type: ignore[method-assign]

    def _init(self, values: dict[str, Any]) -> None:
        """Fill a new object from its constructor's ``locals()``."""
        values = dict(values)                  # a debugger may write to that of the frame
        del values["self"]
        self._values = self._checked(values)

    @classmethod
    def _build(cls: type[_R], values: dict[str, Any], checked: bool = False) -> _R:
        """Make an object from a value for every field; raises ``BadValue``."""
        record = cls.__new__(cls)
        record._values = values if checked else cls._validate(values)
        return record

    @classmethod
    def _gather(cls, given: Mapping[str, Any], ignore_unknown: bool = True) -> dict[str, Any]:
        """Complete a mapping with the defaults; raises ``BadValue`` for a missing or unknown field."""
        values = dict(cls._defaults)
        problems = []
        for name, value in given.items():
            if name in cls._fields:
                values[name] = value
            elif ignore_unknown:
                log.warning("%s: field %r is unknown and ignored", cls.__name__, name)
            else:
                problems.append((str(name), cls._unknown(str(name))))
        problems += [(name, f"missing field `{name}`") for name in cls._fields if name not in values]
        if problems:
            raise BadValue(*problems)
        return {name: values[name] for name in cls._fields}

    @classmethod
    def _unknown(cls, name: str) -> str:
        close = difflib.get_close_matches(name, cls._fields, 1)
        guess = f", did you mean `{close[0]}`?" if close else ","
        return f"unknown field `{name}`{guess} expected one of {', '.join(f'`{known}`' for known in cls._fields)}"

    @classmethod
    def _validate(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Check and normalise values in place; raises ``BadValue`` with every problem."""
        return cls._complete(values, given(values, cls._defaults))

    @classmethod
    def _complete(cls, values: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """The same where only the values of `names` may differ from the defaults."""
        problems: list[tuple[str, str]] = []
        for name in names:
            field, value = cls._fields[name], values[name]
            if value is None:
                if not field.nullable:
                    problems.append((name, f"{name} must not be null; expected {field.expects}"))
                continue
            try:
                values[name] = field.check(value)
            except BadValue as bad:
                for path, text in bad.problems:
                    joint = "" if path == "" or path.startswith("[") else "."
                    problems.append((name + joint + path, text))
        if not problems:
            problems = cls._finish(values, names)
        if problems:
            raise BadValue(*problems)
        return values

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Check values as ``_validate`` does; raises ``ValueError``."""
        try:
            return cls._validate(values)
        except BadValue as bad:
            raise cls._error(bad) from None

    @classmethod
    def _error(cls, bad: BadValue) -> ValueError:
        lines = "\n".join(f"{path}: {text}" if path else text for path, text in bad.problems)
        return ValueError(f"Failed to validate {cls.__name__}: {lines}")

    @classmethod
    def _finish(cls, values: dict[str, Any], names: list[str]) -> list[tuple[str, str]]:
        """Fill what depends on other fields and check the rules between fields; returns the problems.

        Only the values of `names` may differ from the defaults.
        """
        return []

    def _changed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Give this record's values with some replaced, checked; raises ``ValueError``."""
        values = dict(self._values)
        values.update(changes)
        return self._checked(values)

    def replace(self: _R, **changes: Any) -> _R:
        """Make a checked copy in which some fields have other values.

        Parameters
        ----------
        **changes
            Any fields of the constructor, by name. None means None.

        Returns
        -------
        Record
            A new object of the same class; this one stays as it is.

        Raises
        ------
        ValueError
            If a value is bad or does not fit the others.
        TypeError
            If a name is no field.
        """
        for name in changes:
            if name not in self._fields:
                raise TypeError(f"{type(self).__name__}.replace(): {self._unknown(name)}")
        return self._build(self._changed(changes), checked=True)

    def copy(self: _R) -> _R:
        """Make an independent copy."""
        return self._build(self._values, checked=True)

    def to_dict(self) -> dict[str, Any]:
        """Give the fields as plain values that ``json`` can write."""
        return {n: v.to_dict() if isinstance(v, Record) else v for n, v in self._values.items()}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values == other._values

    def __repr__(self) -> str:
        shown = [f"{n}={v!r}" for n, v in self._values.items() if v != self._defaults.get(n, inspect.Parameter.empty)]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self._values[name] for name in self._fields)


def _by_name(init: Callable[..., None], defaults: dict[str, Any]) -> Callable[..., None]:
    """A constructor that looks only at what is given, by name; `init` has the rest. Every field has a default."""

    @wraps(init)
    def quick(self: Record, *positional: Any, **values: Any) -> None:
        if not positional and values.keys() <= defaults.keys():
            try:
                self._values = self._complete(defaults | values, list(values))
                return
            except BadValue:
                pass                           # said again below, in the order of the fields
        init(self, *positional, **values)

    return quick


COUNT = Int(1, U64_MAX)
SIZE = Int(0, U64_MAX)
SIZE_OR_OFF = Int(0, U64_MAX, " (0 turns it off)")
U32 = Int(0, U32_MAX)
PORT = Int(0, U16_MAX)
FRACTION = Float(0.0, 1.0)
NOT_NEGATIVE = Float(0.0)
BOOL = Bool()
TEXT = Text()
FILE_PATH = FilePath()


def read_json(text: str) -> Any:
    """Parse one JSON value; raises ``ValueError`` for anything else in the text."""
    if not isinstance(text, str):
        raise TypeError(f"from_json() takes a JSON text (str), got {type(text).__name__}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"duplicate field `{next(name for name in names if names.count(name) > 1)}`")
        return found

    def integer(digits: str) -> int | float:
        return int(digits) if len(digits) <= 400 else float(digits)

    decoder = json.JSONDecoder(object_pairs_hook=unique, parse_int=integer)
    start = len(text) - len(text.lstrip(" \t\r\n"))
    try:
        value, end = decoder.raw_decode(text, start)
        rest = text[end:].lstrip(" \t\r\n")
        if rest:
            raise json.JSONDecodeError("trailing characters", text, len(text) - len(rest))
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise ValueError("values are nested too deeply") from None
    return value
