"""Engine arguments and requests: names, defaults, validation and JSON.

Every class here is a :class:`Record`: its constructor's signature holds the defaults, its class body is the table of
fields (what a value may be, what it means), and one loop checks a set of values against that table. Rules between
fields are in ``_finish``. A bad value raises ``ValueError`` with one line for each bad field; the object that a
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
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, overload

import numpy as np
import numpy.typing as npt

__all__ = [
    "FIELDS",
    "DirectRequest",
    "Field",
    "MockEngineArgs",
    "ReasoningConfig",
    "Record",
    "SglangArgs",
    "TrtllmArgs",
]

log = logging.getLogger("mocker")

U16_MAX = 2**16 - 1
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
DEFAULT_NUM_GPU_BLOCKS = 16384
DEFAULT_BLOCK_SIZE: Mapping[str, int] = MappingProxyType({"vllm": 64, "sglang": 1, "trtllm": 32})
MAX_POOL_TOKENS = 2**63 - 1
DEFAULT_ACCEPT_RATES = (0.85, 0.3, 0.0, 0.0, 0.0)
DEFAULT_SCHEDULER_RULES = "dynamo-mocker-1.3.0"
SCHEDULER_RULES = (DEFAULT_SCHEDULER_RULES, "vllm-0.33", "vllm-0.33-async")  # what each switches: `mocker.rules`

_T = TypeVar("_T")
_R = TypeVar("_R", bound="Record")
_BOOLS = (bool, np.bool_)  # refused where a number is meant
_LIMIT_NAMES = {U16_MAX: "2**16-1", U32_MAX: "2**32-1", U64_MAX: "2**64-1", 2**31 - 1: "2**31-1", -(2**31): "-2**31"}
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan)", re.ASCII | re.IGNORECASE)


class _BadValue(Exception):
    """What is wrong, as (path below the field, text) pairs; never leaves this module."""

    def __init__(self, *problems: tuple[str, str]) -> None:
        super().__init__(problems)
        self.problems = problems


def _show(value: object) -> str:
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


def _one_of(names: Sequence[str]) -> str:
    """Join names as ``'a' or 'b'``, ``'a', 'b', or 'c'``."""
    quoted = [f"'{name}'" for name in names]
    return " or ".join(quoted) if len(quoted) < 3 else ", ".join(quoted[:-1]) + ", or " + quoted[-1]


# --- what a value may be ---------------------------------------------------------------------------------------------


class _Check:
    """Turns a given value into the stored one, or raises ``_BadValue``; ``expects`` says what is allowed."""

    expects = "anything"

    def __call__(self, value: Any) -> Any:
        raise NotImplementedError

    def refuse(self, value: object) -> _BadValue:
        return _BadValue(("", f"must be {self.expects}, got {_show(value)}"))


class _Int(_Check):
    def __init__(self, low: int, high: int, hint: str = "") -> None:
        self.low, self.high = low, high
        self.expects = f"an integer in {_LIMIT_NAMES.get(low, low)}..={_LIMIT_NAMES.get(high, high)}{hint}"

    def __call__(self, value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, _BOOLS):
                raise self.refuse(value)
            try:
                value = operator.index(value)
            except TypeError:
                raise self.refuse(value) from None
        if not self.low <= value <= self.high:
            raise self.refuse(value)
        return int(value)


class _DefaultCount(int):
    """A count that nobody gave."""

    __slots__ = ()


class _Blocks(_Int):
    def __call__(self, value: Any) -> int:
        return value if type(value) is _DefaultCount else super().__call__(value)


class _Float(_Check):
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
            if not is_number or isinstance(value, (*_BOOLS, np.ndarray)):
                raise self.refuse(value)
            try:
                number = float(value)
            except (OverflowError, TypeError, ValueError):
                raise self.refuse(value) from None
        if not (math.isfinite(number) and self.low <= number <= self.high) or (self.below and number == self.high):
            raise self.refuse(value)
        return number  # type: ignore[no-any-return]


class _Bool(_Check):
    expects = "True or False"

    def __call__(self, value: Any) -> bool:
        if not isinstance(value, _BOOLS):
            raise self.refuse(value)
        return bool(value)


class _Text(_Check):
    expects = "a string"

    def __call__(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refuse(value)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _BadValue(("", f"must be {self.expects} without lone surrogates, got {_show(value)}")) from None
        return str(value)


class _Path(_Check):
    expects = "a path (str or os.PathLike)"

    def __call__(self, value: Any) -> str:
        path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        if not isinstance(path, str):
            raise self.refuse(value)
        return path


class _Choice(_Check):
    def __init__(self, *names: str, wrong: str) -> None:
        self.names = names
        self.expects = f"one of {_one_of(names)}"
        self.wrong = wrong

    def __call__(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refuse(value)
        name = value.lower()
        if name not in self.names:
            raise _BadValue(("", self.wrong.format(value=value if len(value) <= 80 else value[:77] + "...")))
        return name


class _Nested(_Check):
    def __init__(self, kind: type[Record]) -> None:
        self.kind = kind
        self.expects = f"a {kind.__name__} or a mapping of its fields"

    def __call__(self, value: Any) -> Record:
        if isinstance(value, self.kind):
            return value
        if not isinstance(value, Mapping):
            raise self.refuse(value)
        return self.kind._build(self.kind._gather(value))


class _Timing(_Check):
    expects = "a timing model of mocker.timing, or the path of a saved one"

    def __call__(self, value: Any) -> Any:
        from .timing import TimingModel, load_timing

        if isinstance(value, TimingModel):
            return value
        if isinstance(value, str | os.PathLike):
            try:
                return load_timing(value)
            except (ValueError, OSError) as error:
                raise _BadValue(("", str(error))) from None
        raise self.refuse(value)


class _Uuid(_Check):
    expects = "a uuid.UUID, its text, or an integer in 0..=2**128-1"

    def __call__(self, value: Any) -> uuid_module.UUID:
        if isinstance(value, uuid_module.UUID):
            return value
        try:
            if isinstance(value, str):
                return uuid_module.UUID(value)
            if not isinstance(value, _BOOLS):
                return uuid_module.UUID(int=operator.index(value))
        except (TypeError, ValueError):
            pass
        raise self.refuse(value)


class _Tokens(_Check):
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
        if not isinstance(item, _BOOLS):
            try:
                token = operator.index(item)
            except TypeError:
                token = None
        if token is None or not 0 <= token <= U32_MAX:
            raise _BadValue((f"[{position}]", f"must be a token id in 0..=2**32-1, got {_show(item)}"))
        return token

    def _from_array(self, value: Any) -> npt.NDArray[np.uint32]:
        try:
            items = np.asarray(value)
        except (TypeError, ValueError):
            raise self.refuse(value) from None
        if items.ndim != 1:
            raise _BadValue(("", f"must be {self.expects} (one dimension), got an array of shape {items.shape}"))
        if items.size == 0:
            return np.empty(0, np.uint32)
        if items.dtype == object:
            return np.array([self._token(position, item) for position, item in enumerate(items)], np.uint32)
        if items.dtype.kind not in "iu":
            raise _BadValue(("", f"must be {self.expects}, got an array of {items.dtype}"))
        if items.dtype.itemsize > 4 or items.dtype.kind == "i":
            outside = (items < 0) | (items > U32_MAX)
            if outside.any():
                position = int(outside.argmax())
                raise _BadValue((f"[{position}]", f"must be a token id in 0..=2**32-1, got {items[position]}"))
        return items.astype(np.uint32, copy=False)


# --- fields and records ----------------------------------------------------------------------------------------------


class Field(Generic[_T]):
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

    def __init__(self, check: _Check, doc: str, *, nullable: bool = False) -> None:
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

    @overload
    def __get__(self: _F, record: None, owner: type) -> _F: ...
    @overload
    def __get__(self, record: Record, owner: type) -> _T: ...
    def __get__(self, record: Record | None, owner: type) -> Any:
        return self if record is None else record._values[self.name]

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

    _values: dict[str, Any]
    _fields: ClassVar[Mapping[str, Field[Any]]] = {}
    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        fields: dict[str, Field[Any]] = {}
        for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
            field = cls.__dict__[name]
            field.default = parameter.default
            fields[name] = field
        cls._fields = MappingProxyType(fields)
        cls._defaults = {n: f.default for n, f in fields.items() if f.default is not inspect.Parameter.empty}

    def _init(self, values: dict[str, Any]) -> None:
        """Fill a new object from its constructor's ``locals()``."""
        values = dict(values)
        del values["self"]
        self._values = self._checked(values)

    @classmethod
    def _build(cls: type[_R], values: dict[str, Any], checked: bool = False) -> _R:
        """Make an object from a value for every field; raises ``_BadValue``."""
        record = cls.__new__(cls)
        record._values = values if checked else cls._validate(values)
        return record

    @classmethod
    def _gather(cls, given: Mapping[str, Any], ignore_unknown: bool = True) -> dict[str, Any]:
        """Complete a mapping with the defaults; raises ``_BadValue`` for a missing or unknown field."""
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
            raise _BadValue(*problems)
        return {name: values[name] for name in cls._fields}

    @classmethod
    def _unknown(cls, name: str) -> str:
        close = difflib.get_close_matches(name, cls._fields, 1)
        guess = f", did you mean `{close[0]}`?" if close else ","
        return f"unknown field `{name}`{guess} expected one of {', '.join(f'`{known}`' for known in cls._fields)}"

    @classmethod
    def _validate(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Check and normalise values in place; raises ``_BadValue`` with every problem."""
        problems: list[tuple[str, str]] = []
        fields = cls._fields
        for name, value in values.items():
            field = fields[name]
            if value is field.default:
                continue
            if value is None:
                if not field.nullable:
                    problems.append((name, f"{name} must not be null; expected {field.expects}"))
                continue
            try:
                values[name] = field.check(value)
            except _BadValue as bad:
                for path, text in bad.problems:
                    joint = "" if path == "" or path.startswith("[") else "."
                    problems.append((name + joint + path, text))
        if not problems:
            problems = cls._finish(values)
        if problems:
            raise _BadValue(*problems)
        return values

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Check values as ``_validate`` does; raises ``ValueError``."""
        try:
            return cls._validate(values)
        except _BadValue as bad:
            raise cls._error(bad) from None

    @classmethod
    def _error(cls, bad: _BadValue) -> ValueError:
        lines = "\n".join(f"{path}: {text}" if path else text for path, text in bad.problems)
        return ValueError(f"Failed to validate {cls.__name__}: {lines}")

    @classmethod
    def _finish(cls, values: dict[str, Any]) -> list[tuple[str, str]]:
        """Fill what depends on other fields and check the rules between fields; returns the problems."""
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
        return self._build(dict(self._values), checked=True)

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


_COUNT = _Int(1, U64_MAX)
_SIZE = _Int(0, U64_MAX)
_SIZE_OR_OFF = _Int(0, U64_MAX, " (0 turns it off)")
_U32 = _Int(0, U32_MAX)
_PORT = _Int(0, U16_MAX)
_FRACTION = _Float(0.0, 1.0)
_NOT_NEGATIVE = _Float(0.0)
_BOOL = _Bool()
_TEXT = _Text()
_PATH = _Path()


class ReasoningConfig(Record):
    """Thinking tokens at the front of each answer.

    Parameters
    ----------
    start_thinking_token_id, end_thinking_token_id : int
        The tokens that open and close the thinking part.
    thinking_ratio : float
        The thinking part's share of the answer, in [0, 1].
    """

    __slots__ = ()

    start_thinking_token_id = Field[int](_U32, "Token that opens the thinking part.")
    end_thinking_token_id = Field[int](_U32, "Token that closes the thinking part.")
    thinking_ratio = Field[float](_FRACTION, "Share of the answer that is thinking.")

    def __init__(self, start_thinking_token_id: int, end_thinking_token_id: int, thinking_ratio: float) -> None:
        self._init(locals())

    def num_thinking_tokens(self, max_output_tokens: int) -> int:
        """Count the thinking tokens, both marks included, of an answer of the given length."""
        if max_output_tokens < 2:
            return 0
        tokens = math.floor(float(max_output_tokens) * self.thinking_ratio)
        return 0 if tokens == 0 else min(max(tokens, 2), max_output_tokens)

    def num_response_tokens(self, max_output_tokens: int) -> int:
        """Count the tokens after the thinking part of an answer of the given length."""
        return max(max_output_tokens - self.num_thinking_tokens(max_output_tokens), 0)


class SglangArgs(Record):
    """Settings that only the SGLang engine reads; None means the engine's default.

    Parameters
    ----------
    schedule_policy : str, optional
        "fifo" (also "fcfs") or "lpm", in lower case; the engine takes any other text as "fifo" and a warning is logged.
    page_size : int, optional
        Tokens in one page of the radix cache (default 1); fills ``block_size``.
    max_prefill_tokens : int, optional
        Prompt tokens in one batch (default 16384).
    chunked_prefill_size : int, optional
        Prompt tokens in one chunk (default 8192), a multiple of the block size.
    clip_max_new_tokens : int, optional
        Output tokens that admission reserves at most (default 4096).
    schedule_conservativeness : float, optional
        Share of the expected output that admission reserves, finite and not negative (default 1.0).
    conserve_slots : bool
        Keep exact books under retraction, where the reference loses slots and frees some twice (default False).
    """

    __slots__ = ()

    schedule_policy = Field[str | None](_TEXT, "Order of the waiting queue: fifo, fcfs or lpm.", nullable=True)
    page_size = Field[int | None](_COUNT, "Tokens in one page of the radix cache.", nullable=True)
    max_prefill_tokens = Field[int | None](_COUNT, "Prompt tokens in one batch.", nullable=True)
    chunked_prefill_size = Field[int | None](_COUNT, "Prompt tokens in one chunk.", nullable=True)
    clip_max_new_tokens = Field[int | None](_COUNT, "Output tokens that admission reserves at most.", nullable=True)
    schedule_conservativeness = Field[float | None](
        _NOT_NEGATIVE, "Share of the expected output that admission reserves.", nullable=True
    )
    conserve_slots = Field[bool](_BOOL, "Exact books under retraction, unlike the reference.")

    def __init__(
        self,
        schedule_policy: str | None = None,
        page_size: int | None = None,
        max_prefill_tokens: int | None = None,
        chunked_prefill_size: int | None = None,
        clip_max_new_tokens: int | None = None,
        schedule_conservativeness: float | None = None,
        conserve_slots: bool = False,
    ) -> None:
        self._init(locals())

    @classmethod
    def _finish(cls, values: dict[str, Any]) -> list[tuple[str, str]]:
        policy = values["schedule_policy"]
        if policy not in (None, "fifo", "fcfs", "lpm"):
            log.warning("sglang.schedule_policy %s is none of 'fifo', 'fcfs', 'lpm': 'fifo' is used", _show(policy))
        return []


class TrtllmArgs(Record):
    """Settings that only the TensorRT-LLM engine reads.

    Parameters
    ----------
    capacity_scheduler_policy : str, optional
        Only "guaranteed_no_evict" (the default) is simulated.
    """

    __slots__ = ()

    capacity_scheduler_policy = Field[str | None](
        _Choice(
            "guaranteed_no_evict",
            wrong="engine_type=trtllm supports only capacity_scheduler_policy='guaranteed_no_evict', got '{value}'",
        ),
        "Admission policy of the capacity scheduler.",
        nullable=True,
    )

    def __init__(self, capacity_scheduler_policy: str | None = None) -> None:
        self._init(locals())


def _parse_accept_rates(nextn: int, text: str | None) -> list[float]:
    """Read comma-separated rates, padded with 0 or cut to ``nextn``; raises ``_BadValue``."""
    text = "" if text is None else text.strip()
    rates: list[float] = []
    for index, item in enumerate(text.split(",") if text else ()):
        word = item.strip()
        if not (_DECIMAL.fullmatch(word) or _NOT_FINITE.fullmatch(word)):
            shown = json.dumps(item if len(item) <= 80 else item[:77] + "...", ensure_ascii=False)
            raise _BadValue(
                (
                    "aic_nextn_accept_rates",
                    f"invalid aic_nextn_accept_rates value {shown}: not a decimal number; "
                    "give numbers in [0, 1] with commas between them, such as '0.85,0.3'",
                )
            )
        rate = float(word)
        if not 0.0 <= rate <= 1.0:
            raise _BadValue(
                (
                    "aic_nextn_accept_rates",
                    f"aic_nextn_accept_rates[{index}] must be finite and in [0, 1], got {rate}",
                )
            )
        rates.append(rate)
    if not text:
        rates = list(DEFAULT_ACCEPT_RATES)
    return rates[:nextn] + [0.0] * (nextn - len(rates))


def _format_accept_rates(rates: Sequence[float]) -> str:
    """Write rates in canonical form: shortest digits, no exponent, no ``.0``."""
    words = (format(Decimal(repr(rate)), "f") for rate in rates)
    return ",".join(word[:-2] if word.endswith(".0") else word for word in words)


_SCHEDULER_FIELDS = (
    "scheduler_rules",
    "vllm_scheduling_policy",
    "long_prefill_token_threshold",
    "max_model_len",
    "watermark",
    "reserve_full_isl",
)


def scheduler_conflicts(
    values: Mapping[str, Any], *, vllm: bool = True, preset: bool = True
) -> list[tuple[str, str]]:
    """Find what scheduler rules do not model, and with what vLLM would not start.

    Parameters
    ----------
    values : mapping
        A value for every field of :class:`MockEngineArgs`.
    vllm : bool
        The rules are not those of the reference.
    preset : bool
        The rules are vLLM's own.

    Returns
    -------
    list of (str, str)
        Fields, and what is wrong with them.
    """
    problems = []
    engine, budget, longest = values["engine_type"], values["max_num_batched_tokens"], values["max_model_len"]
    if engine != "vllm":
        problems.append(("scheduler_rules", f"scheduler rules are for engine_type='vllm', got engine_type='{engine}'"))
    if values["aic_nextn"] is not None:
        rule = "scheduler rules do not model speculative decoding"
        problems.append(("aic_nextn", f"{rule}, got aic_nextn={values['aic_nextn']}; leave it out"))
    if vllm and values["worker_type"] != "aggregated":
        rule = "scheduler rules do not model hand-off between prefill and decode workers"
        problems.append(("worker_type", f"{rule}, got worker_type='{values['worker_type']}'; use 'aggregated'"))
    if vllm and values["num_g2_blocks"] is not None:
        rule = "scheduler rules do not model storage tiers"
        problems.append(("num_g2_blocks", f"{rule}, got num_g2_blocks={values['num_g2_blocks']}; leave it out"))
    if values["preemption_mode"] == "fifo" and (preset or values["vllm_scheduling_policy"] == "priority"):
        problems.append(("preemption_mode", "preemption_mode 'fifo' has no counterpart in vLLM; use 'lifo'"))
    threshold = values["long_prefill_token_threshold"]
    if longest is not None and threshold > longest:
        text = f"long_prefill_token_threshold {threshold} exceeds max_model_len {longest}; vLLM does not start so"
        problems.append(("long_prefill_token_threshold", text))
    if vllm and budget is not None:
        seqs = values["max_num_seqs"]
        if seqs is not None and seqs > budget:
            text = f"max_num_seqs {seqs} exceeds max_num_batched_tokens {budget}; vLLM does not start so"
            problems.append(("max_num_seqs", text))
        if not values["enable_chunked_prefill"] and longest is not None and longest > budget:
            text = f"max_num_batched_tokens {budget} is smaller than max_model_len {longest}"
            problems.append(
                ("max_num_batched_tokens", f"{text} with enable_chunked_prefill off; vLLM does not start so")
            )
    return problems


class MockEngineArgs(Record):
    """The settings of one simulated engine.

    Every parameter is also an attribute; those with a setter say so. Values are checked and completed on the way in:
    ``block_size`` and ``num_gpu_blocks`` are never 0 or None afterwards, names are in lower case, a 0 that turns a
    storage tier off is None, and ``aic_nextn_accept_rates`` has exactly ``aic_nextn`` numbers.

    Parameters
    ----------
    engine_type : {"vllm", "sglang", "trtllm"}
        The engine that is simulated.
    num_gpu_blocks : int, optional
        Blocks in the KV pool. Default 16384; with ``aic_backend`` an engine gets as many as fit its GPUs' memory.
    block_size : int
        Tokens in one block; 0 picks 64 (vllm), 32 (trtllm), or the page size or 1 (sglang). A power of two in
        2..=1024 for vllm and trtllm.
    max_num_seqs, max_num_batched_tokens : int, optional
        Limits of one pass: running requests and tokens. None: unlimited.
    enable_prefix_caching, enable_chunked_prefill : bool
        Reuse of cached prompt blocks; splitting of long prompts over passes.
    speedup_ratio, decode_speedup_ratio : float
        Predicted times are divided by the first, decode times by both. 0: not scaled.
    dp_size : int
        Data-parallel ranks of a worker.
    startup_time : float, optional
        Seconds until a new worker is ready.
    worker_type : {"aggregated", "prefill", "decode"}
        What the worker does. Settable.
    planner_profile_data : str or os.PathLike, optional
        Profile (NPZ or JSON) that the timing model is made from, when an engine is; see :mod:`mocker.timing`.
    aic_backend, aic_system, aic_backend_version, aic_tp_size, aic_model_path, aic_moe_tp_size, aic_moe_ep_size, \
    aic_attention_dp_size, aic_gemm_dtype, aic_moe_dtype, aic_fmha_dtype, aic_kv_cache_dtype, aic_comm_dtype : optional
        What a performance database is asked for, when an engine is made; see :mod:`mocker.aic`. Settable.
    aic_nextn : int, optional
        Draft tokens of a speculative decode step, 1..=5. Settable.
    aic_nextn_accept_rates : str, optional
        Acceptance rate of each draft token, given that those before it were accepted: "0.85,0.3". Settable.
    aic_mtp_seed : int
        Seed of the draft sampler. Settable.
    gpu_memory_utilization, mem_fraction_static, free_gpu_memory_fraction : float, optional
        Memory fractions in [0, 1]. Settable.
    enable_local_indexer : bool
        A worker-local index of cached blocks.
    bootstrap_port, zmq_kv_events_port, zmq_replay_port : int, optional
        Ports of a live worker.
    handoff_session_timeout_ms : int
        Limit of a live prefill/decode handoff.
    kv_bytes_per_token : int, optional
        Bytes of one token's KV state.
    kv_transfer_bandwidth : float, optional
        GB/s between a prefill and a decode worker. 0 or None: no delay.
    kv_transfer_timing_mode : {"full_prompt", "destination_missing"}
        Which part of the prompt a transfer is charged for.
    reasoning : ReasoningConfig, optional
        Thinking tokens.
    response_replay_trace_path : str or os.PathLike, optional
        Trace with the output tokens to replay.
    preemption_mode : {"lifo", "fifo"}
        Whether the newest or the oldest running request is preempted.
    router_queue_policy : {"fcfs", "lcfs", "wspt"}, optional
        Takes the place of the router's own queue policy.
    sglang : SglangArgs, optional
        Settings of the SGLang engine.
    trtllm : TrtllmArgs, optional
        Settings of the TensorRT-LLM engine.
    num_g2_blocks, num_g3_blocks : int, optional
        Blocks in host memory and on disk; 0 or None turns the tier off.
    offload_batch_size : int, optional
        Blocks offloaded together; 0 or None: the default.
    bandwidth_g1_to_g2_gbps, bandwidth_g2_to_g1_gbps, bandwidth_g2_to_g3_gbps, bandwidth_g3_to_g2_gbps, \
    bandwidth_g2_to_g4_gbps, bandwidth_g4_to_g2_gbps : float, optional
        GB/s between the storage tiers.
    enable_g4_storage : bool
        An object store behind host memory.
    scheduler_rules : {"dynamo-mocker-1.3.0", "vllm-0.33", "vllm-0.33-async"}
        Whose scheduler decides: the reference's, that of vLLM 0.33, or vLLM's asynchronous one; see
        :mod:`mocker.rules`. The last two are for aggregated "vllm" workers without drafts and storage tiers, and
        only with them the following may differ from their defaults, which are vLLM's.
    vllm_scheduling_policy : {"fcfs", "priority"}
        vLLM's ``scheduling_policy`` (here the name of a method): order of the waiting requests, and who is preempted.
    long_prefill_token_threshold : int
        Most tokens of one request in a pass while there is another; 0: no cap.
    max_model_len : int, optional
        Tokens of prompt and output together.
    watermark : float
        Part of the pool, in [0, 1), that an admission leaves free while somebody runs.
    reserve_full_isl : bool
        Admit a request only if its whole known sequence fits, not only its first chunk.
    timing_model : mocker.timing.TimingModel or path, optional
        How long passes take, in place of the polynomial; see :mod:`mocker.timing`.

    Raises
    ------
    ValueError
        For a value that is not allowed: the message names each bad field, its value and what is allowed.
    """

    __slots__ = ()

    engine_type = Field[str](
        _Choice(
            "vllm", "sglang", "trtllm", wrong="Invalid engine_type '{value}'. Must be 'vllm', 'sglang', or 'trtllm'."
        ),
        "Engine that is simulated.",
    )
    num_gpu_blocks = SettableField[int](_Blocks(1, U64_MAX), "Blocks in the KV pool.", nullable=True)
    block_size = Field[int](_Int(0, U64_MAX, " (0 picks the engine's default)"), "Tokens in one block.")
    max_num_seqs = Field[int | None](_COUNT, "Running requests in one pass; None is unlimited.", nullable=True)
    max_num_batched_tokens = Field[int | None](_COUNT, "Tokens in one pass; None is unlimited.", nullable=True)
    enable_prefix_caching = SettableField[bool](_BOOL, "Cached prompt blocks are used again.")
    enable_chunked_prefill = Field[bool](_BOOL, "A long prompt may be split over several passes.")
    speedup_ratio = Field[float](_NOT_NEGATIVE, "Divides all predicted times; 0 leaves them.")
    decode_speedup_ratio = Field[float](_NOT_NEGATIVE, "Divides decode times further.")
    dp_size = Field[int](_Int(1, U32_MAX), "Data-parallel ranks of a worker.")
    startup_time = Field[float | None](_NOT_NEGATIVE, "Seconds until a new worker is ready.", nullable=True)
    worker_type = SettableField[str](
        _Choice(
            "aggregated",
            "prefill",
            "decode",
            wrong="Invalid worker_type '{value}'. Must be 'aggregated', 'prefill', or 'decode'.",
        ),
        "What the worker does.",
    )
    planner_profile_data = Field[str | None](_PATH, "Profile that the timing model is made from.", nullable=True)
    aic_backend = SettableField[str | None](_TEXT, "Engine name in the performance database.", nullable=True)
    aic_system = SettableField[str | None](_TEXT, "GPU system name.", nullable=True)
    aic_backend_version = SettableField[str | None](_TEXT, "Engine version.", nullable=True)
    aic_tp_size = SettableField[int | None](_SIZE, "Tensor-parallel size.", nullable=True)
    aic_model_path = SettableField[str | None](_TEXT, "Model name.", nullable=True)
    aic_moe_tp_size = SettableField[int | None](_SIZE, "Tensor-parallel size of the experts.", nullable=True)
    aic_moe_ep_size = SettableField[int | None](_SIZE, "Expert-parallel size.", nullable=True)
    aic_attention_dp_size = SettableField[int | None](_SIZE, "Data-parallel size of attention.", nullable=True)
    aic_nextn = SettableField[int | None](_Int(1, 5), "Draft tokens of a speculative decode step.", nullable=True)
    aic_nextn_accept_rates = SettableField[str | None](_TEXT, "Acceptance rate of each draft token.", nullable=True)
    aic_mtp_seed = SettableField[int](_SIZE, "Seed of the draft sampler.")
    aic_gemm_dtype = SettableField[str | None](_TEXT, "Data type of matrix products.", nullable=True)
    aic_moe_dtype = SettableField[str | None](_TEXT, "Data type of the experts.", nullable=True)
    aic_fmha_dtype = SettableField[str | None](_TEXT, "Data type of attention.", nullable=True)
    aic_kv_cache_dtype = SettableField[str | None](_TEXT, "Data type of the KV cache.", nullable=True)
    aic_comm_dtype = SettableField[str | None](_TEXT, "Data type of communication.", nullable=True)
    gpu_memory_utilization = SettableField[float | None](_FRACTION, "Share of GPU memory (vllm).", nullable=True)
    mem_fraction_static = SettableField[float | None](_FRACTION, "Static share of memory (sglang).", nullable=True)
    free_gpu_memory_fraction = SettableField[float | None](_FRACTION, "Share of free memory (trtllm).", nullable=True)
    enable_local_indexer = Field[bool](_BOOL, "The worker keeps an index of its cached blocks.")
    bootstrap_port = Field[int | None](_PORT, "Port where prefill and decode workers meet.", nullable=True)
    handoff_session_timeout_ms = Field[int](_COUNT, "Limit of a live handoff.")
    kv_bytes_per_token = Field[int | None](_SIZE, "Bytes of one token's KV state.", nullable=True)
    kv_transfer_bandwidth = Field[float | None](_NOT_NEGATIVE, "GB/s of a KV transfer; 0 is no delay.", nullable=True)
    kv_transfer_timing_mode = Field[str](
        _Choice(
            "full_prompt",
            "destination_missing",
            wrong="Invalid kv_transfer_timing_mode '{value}'. Must be 'full_prompt' or 'destination_missing'.",
        ),
        "Part of the prompt that a transfer is charged for.",
    )
    reasoning = Field[ReasoningConfig | None](_Nested(ReasoningConfig), "Thinking tokens.", nullable=True)
    response_replay_trace_path = Field[str | None](_PATH, "Trace with the output tokens to replay.", nullable=True)
    zmq_kv_events_port = Field[int | None](_PORT, "Port that KV events are published on.", nullable=True)
    zmq_replay_port = Field[int | None](_PORT, "Port that replays published KV events.", nullable=True)
    preemption_mode = Field[str](
        _Choice("lifo", "fifo", wrong="Invalid preemption_mode: '{value}'. Must be 'lifo' or 'fifo'."),
        "Whether the newest or the oldest running request is preempted.",
    )
    router_queue_policy = Field[str | None](
        _Choice(
            "fcfs",
            "lcfs",
            "wspt",
            wrong="Invalid router_queue_policy: unknown queue policy: '{value}', expected 'fcfs', 'lcfs', or 'wspt'",
        ),
        "Takes the place of the router's own queue policy.",
        nullable=True,
    )
    sglang = Field[SglangArgs | None](_Nested(SglangArgs), "Settings of the SGLang engine.", nullable=True)
    trtllm = Field[TrtllmArgs | None](_Nested(TrtllmArgs), "Settings of the TensorRT-LLM engine.", nullable=True)
    num_g2_blocks = Field[int | None](_SIZE_OR_OFF, "Blocks in host memory.", nullable=True)
    num_g3_blocks = Field[int | None](_SIZE_OR_OFF, "Blocks on disk.", nullable=True)
    offload_batch_size = Field[int | None](_SIZE_OR_OFF, "Blocks offloaded together.", nullable=True)
    bandwidth_g1_to_g2_gbps = Field[float | None](_NOT_NEGATIVE, "GB/s from GPU to host.", nullable=True)
    bandwidth_g2_to_g1_gbps = Field[float | None](_NOT_NEGATIVE, "GB/s from host to GPU.", nullable=True)
    bandwidth_g2_to_g3_gbps = Field[float | None](_NOT_NEGATIVE, "GB/s from host to disk.", nullable=True)
    bandwidth_g3_to_g2_gbps = Field[float | None](_NOT_NEGATIVE, "GB/s from disk to host.", nullable=True)
    enable_g4_storage = Field[bool](_BOOL, "An object store behind host memory.")
    bandwidth_g2_to_g4_gbps = Field[float | None](_NOT_NEGATIVE, "GB/s from host to the object store.", nullable=True)
    bandwidth_g4_to_g2_gbps = Field[float | None](_NOT_NEGATIVE, "GB/s from the object store to host.", nullable=True)
    scheduler_rules = Field[str](
        _Choice(*SCHEDULER_RULES, wrong=f"Invalid scheduler_rules '{{value}}'. Must be {_one_of(SCHEDULER_RULES)}."),
        "Whose scheduler decides.",
    )
    vllm_scheduling_policy = Field[str](
        _Choice("fcfs", "priority", wrong="Invalid vllm_scheduling_policy '{value}'. Must be 'fcfs' or 'priority'."),
        "Order of vLLM's waiting requests, and who is preempted.",
    )
    long_prefill_token_threshold = Field[int](_SIZE, "Most tokens of one request in a pass with others; 0: no cap.")
    max_model_len = Field[int | None](_Int(2, U64_MAX), "Tokens of prompt and output together.", nullable=True)
    watermark = Field[float](_Float(0.0, 1.0, below=True), "Part of the pool that an admission leaves free.")
    reserve_full_isl = Field[bool](_BOOL, "A request is admitted only if its whole known sequence fits.")
    timing_model = Field[Any](_Timing(), "How long passes take, in place of the polynomial.", nullable=True)

    def __init__(
        self,
        engine_type: str = "vllm",
        num_gpu_blocks: int | None = None,
        block_size: int = 0,
        max_num_seqs: int | None = 256,
        max_num_batched_tokens: int | None = 8192,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        speedup_ratio: float = 1.0,
        decode_speedup_ratio: float = 1.0,
        dp_size: int = 1,
        startup_time: float | None = None,
        worker_type: str = "aggregated",
        planner_profile_data: str | os.PathLike[str] | None = None,
        aic_backend: str | None = None,
        aic_system: str | None = None,
        aic_backend_version: str | None = None,
        aic_tp_size: int | None = None,
        aic_model_path: str | None = None,
        aic_moe_tp_size: int | None = None,
        aic_moe_ep_size: int | None = None,
        aic_attention_dp_size: int | None = None,
        aic_nextn: int | None = None,
        aic_nextn_accept_rates: str | None = None,
        aic_mtp_seed: int = 42,
        aic_gemm_dtype: str | None = None,
        aic_moe_dtype: str | None = None,
        aic_fmha_dtype: str | None = None,
        aic_kv_cache_dtype: str | None = None,
        aic_comm_dtype: str | None = None,
        gpu_memory_utilization: float | None = None,
        mem_fraction_static: float | None = None,
        free_gpu_memory_fraction: float | None = None,
        enable_local_indexer: bool = False,
        bootstrap_port: int | None = None,
        handoff_session_timeout_ms: int = 300000,
        kv_bytes_per_token: int | None = None,
        kv_transfer_bandwidth: float | None = None,
        kv_transfer_timing_mode: str = "full_prompt",
        reasoning: ReasoningConfig | Mapping[str, Any] | None = None,
        response_replay_trace_path: str | os.PathLike[str] | None = None,
        zmq_kv_events_port: int | None = None,
        zmq_replay_port: int | None = None,
        preemption_mode: str = "lifo",
        router_queue_policy: str | None = None,
        sglang: SglangArgs | Mapping[str, Any] | None = None,
        trtllm: TrtllmArgs | Mapping[str, Any] | None = None,
        num_g2_blocks: int | None = None,
        num_g3_blocks: int | None = None,
        offload_batch_size: int | None = None,
        bandwidth_g1_to_g2_gbps: float | None = None,
        bandwidth_g2_to_g1_gbps: float | None = None,
        bandwidth_g2_to_g3_gbps: float | None = None,
        bandwidth_g3_to_g2_gbps: float | None = None,
        enable_g4_storage: bool = False,
        bandwidth_g2_to_g4_gbps: float | None = None,
        bandwidth_g4_to_g2_gbps: float | None = None,
        scheduler_rules: str = DEFAULT_SCHEDULER_RULES,
        vllm_scheduling_policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        max_model_len: int | None = None,
        watermark: float = 0.0,
        reserve_full_isl: bool = True,
        timing_model: Any = None,
    ) -> None:
        self._init(locals())

    # --- checks across fields

    @classmethod
    def _finish(cls, values: dict[str, Any]) -> list[tuple[str, str]]:
        if values["num_gpu_blocks"] is None:
            values["num_gpu_blocks"] = _DefaultCount(DEFAULT_NUM_GPU_BLOCKS)
        for name in ("num_g2_blocks", "num_g3_blocks", "offload_batch_size"):
            if values[name] == 0:
                values[name] = None
        problems = cls._finish_block_size(values)
        if values["num_g2_blocks"] is None:
            for name in ("num_g3_blocks", "enable_g4_storage"):
                if values[name]:
                    rule = f"{name} requires num_g2_blocks >= 1 (the tier is reached through host memory)"
                    problems.append((name, f"{rule}, got {name}={values[name]} without it"))
        return problems + cls._finish_accept_rates(values) + cls._finish_scheduler(values)

    @classmethod
    def _finish_scheduler(cls, values: dict[str, Any]) -> list[tuple[str, str]]:
        if values["scheduler_rules"] != DEFAULT_SCHEDULER_RULES:
            return scheduler_conflicts(values)
        others = _one_of(SCHEDULER_RULES[1:])
        return [
            (name, f"{name} requires scheduler_rules to be {others}, got {name}={_show(values[name])} without it")
            for name in _SCHEDULER_FIELDS[1:]
            if values[name] != cls._defaults[name]
        ]

    @classmethod
    def _finish_block_size(cls, values: dict[str, Any]) -> list[tuple[str, str]]:
        engine, size = values["engine_type"], values["block_size"]
        is_sglang = engine == "sglang"
        page = chunk = None
        if is_sglang and values["sglang"] is not None:
            page, chunk = values["sglang"].page_size, values["sglang"].chunked_prefill_size
        if size == 0:
            size = values["block_size"] = page or DEFAULT_BLOCK_SIZE[engine]
        problems = []
        if not is_sglang and not (2 <= size <= 1024 and size & (size - 1) == 0):
            allowed = "must be 0 (the engine's default) or a power of two in 2..=1024"
            problems.append(("block_size", f"{allowed} for engine_type={engine}, got {size}"))
        if page is not None and page != size:
            rule = "engine_type=sglang requires block_size and sglang.page_size to match when both are set"
            problems.append(
                ("block_size", f"{rule}, got block_size={size} and sglang.page_size={page}; give one of them")
            )
        if chunk is not None and chunk % size:
            rule = "engine_type=sglang requires sglang.chunked_prefill_size to be divisible by block_size"
            problems.append(
                ("sglang.chunked_prefill_size", f"{rule}, got chunked_prefill_size={chunk} and block_size={size}")
            )
        if not problems and values["num_gpu_blocks"] * size > MAX_POOL_TOKENS:
            rule = "num_gpu_blocks * block_size must be at most 2**63-1 tokens"
            problems.append(
                ("num_gpu_blocks", f"{rule}, got num_gpu_blocks={values['num_gpu_blocks']} and block_size={size}")
            )
        return problems

    @classmethod
    def _finish_accept_rates(cls, values: dict[str, Any]) -> list[tuple[str, str]]:
        nextn, rates = values["aic_nextn"], values["aic_nextn_accept_rates"]
        if nextn is None:
            if rates is None:
                return []
            text = f"aic_nextn_accept_rates requires aic_nextn, got {_show(rates)}; set aic_nextn (1..=5) first"
            return [("aic_nextn_accept_rates", text)]
        decode_speedup = values["decode_speedup_ratio"]
        if decode_speedup != 1.0:
            rule = "aic_nextn requires decode_speedup_ratio=1.0 (accepted drafts are the speed-up already)"
            return [("aic_nextn", f"{rule}, got decode_speedup_ratio={decode_speedup} with aic_nextn={nextn}")]
        try:
            values["aic_nextn_accept_rates"] = _format_accept_rates(_parse_accept_rates(nextn, rates))
        except _BadValue as bad:
            return list(bad.problems)
        return []

    def _changed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        if changes.get("aic_nextn", self) is None:  # without drafts their rates mean nothing
            changes = {"aic_nextn_accept_rates": None, **changes}
        return super()._changed(changes)

    # --- JSON

    @staticmethod
    def from_json(config_json: str) -> MockEngineArgs:
        """Read the arguments from a JSON object.

        A field that is left out takes its default. Null sets an optional field to None, keeps the default of
        ``num_gpu_blocks``, and is refused elsewhere. ``is_prefill`` and ``is_decode`` stand for ``worker_type`` where
        that is not given; ``has_perf_model`` is ignored.

        Parameters
        ----------
        config_json : str
            The text of one JSON object.

        Returns
        -------
        MockEngineArgs
            The checked arguments.

        Raises
        ------
        ValueError
            If the text is not JSON, or for an unknown field, a wrong type or a bad value.
        TypeError
            If ``config_json`` is not a string.
        """
        try:
            return MockEngineArgs._from_object(_read_json(config_json))
        except _BadValue as bad:
            error = MockEngineArgs._error(bad)
        except ValueError as other:
            error = other
        raise ValueError(f"Failed to parse MockEngineArgs JSON: {error}") from None

    @staticmethod
    def from_json_file(path: str | os.PathLike[str]) -> MockEngineArgs:
        """Read the arguments from a file with one JSON object; see :meth:`from_json`."""
        with open(path, encoding="utf-8") as file:
            return MockEngineArgs.from_json(file.read())

    @classmethod
    def _from_object(cls, given: Any) -> MockEngineArgs:
        if not isinstance(given, dict):
            raise ValueError(f"invalid type: expected a JSON object of engine arguments, got {_show(given)}")
        given = dict(given)
        given.pop("has_perf_model", None)
        legacy = {name: given.pop(name) for name in ("is_prefill", "is_decode") if name in given}
        for name, value in legacy.items():
            if value is None and "worker_type" not in given:
                raise _BadValue((name, f"{name} must not be null; expected true or false"))
            if not isinstance(value, bool | None):
                raise _BadValue((name, f"must be true or false, got {_show(value)}"))
        if "worker_type" not in given:
            if legacy.get("is_prefill") and legacy.get("is_decode"):
                rule = "Invalid worker configuration: is_prefill and is_decode cannot both be true"
                raise _BadValue(("", f"{rule}; give worker_type instead"))
            if legacy.get("is_prefill"):
                given["worker_type"] = "prefill"
            elif legacy.get("is_decode"):
                given["worker_type"] = "decode"
        return cls._build(cls._gather(given, ignore_unknown=False))

    def to_dict(self) -> dict[str, Any]:
        """Give the fields as plain values that ``json`` can write.

        ``scheduler_rules`` with what belongs to it and ``timing_model`` are left out where they have their defaults, so
        that the form is the reference's. A timing model is given by what it shows: it is not read back.
        """
        values = super().to_dict()
        for name in (*_SCHEDULER_FIELDS, "timing_model"):
            if values[name] == self._defaults[name]:
                del values[name]
        if self.aic_backend is not None and self.blocks_by_default():
            values["num_gpu_blocks"] = None
        if "timing_model" in values:
            values["timing_model"] = repr(self.timing_model)
        return values

    def to_json(self) -> str:
        """Write :meth:`to_dict` as a JSON object that :meth:`from_json` reads back to equal arguments."""
        return json.dumps(self.to_dict(), allow_nan=False)

    # --- copies and derived values

    def with_overrides(
        self,
        bootstrap_port: int | None = None,
        zmq_kv_events_port: int | None = None,
        zmq_replay_port: int | None = None,
        kv_bytes_per_token: int | None = None,
        num_gpu_blocks: int | None = None,
        aic_backend: str | None = None,
        aic_system: str | None = None,
        aic_backend_version: str | None = None,
        aic_tp_size: int | None = None,
        aic_model_path: str | None = None,
        aic_moe_tp_size: int | None = None,
        aic_moe_ep_size: int | None = None,
        aic_attention_dp_size: int | None = None,
        aic_nextn: int | None = None,
        aic_nextn_accept_rates: str | None = None,
        aic_mtp_seed: int | None = None,
        aic_gemm_dtype: str | None = None,
        aic_moe_dtype: str | None = None,
        aic_fmha_dtype: str | None = None,
        aic_kv_cache_dtype: str | None = None,
        aic_comm_dtype: str | None = None,
        gpu_memory_utilization: float | None = None,
        mem_fraction_static: float | None = None,
        free_gpu_memory_fraction: float | None = None,
        enable_prefix_caching: bool | None = None,
        worker_type: str | None = None,
    ) -> MockEngineArgs:
        """Make a checked copy in which the fields that are not None here have these values.

        See :meth:`replace` for a change of any field, or to None.
        """
        changes = dict(locals())
        del changes["self"]
        return self.replace(**{name: value for name, value in changes.items() if value is not None})

    def blocks_by_default(self) -> bool:
        """Whether nobody said how many blocks there are."""
        return type(self.num_gpu_blocks) is _DefaultCount

    @property
    def perf_model_path(self) -> str | None:
        """Path of the profile that the timing model is made from: ``planner_profile_data``."""
        return self.planner_profile_data

    def is_prefill(self) -> bool:
        """Whether the worker only prefills."""
        return self.worker_type == "prefill"

    def is_decode(self) -> bool:
        """Whether the worker only decodes."""
        return self.worker_type == "decode"

    def aic_gpus_per_worker(self) -> int:
        """Count the GPUs of one worker: tensor-parallel times attention data-parallel size."""
        tensor, data = self.aic_tp_size, self.aic_attention_dp_size
        return (1 if tensor is None else tensor) * (1 if data is None else data)

    def effective_handoff_capacity(self) -> int:
        """Count the handoffs that one worker may hold: the request limit, or the blocks if there is none."""
        return max(self.num_gpu_blocks if self.max_num_seqs is None else self.max_num_seqs, 1)

    def needs_kv_publisher(self) -> bool:
        """Whether KV events of this worker are of use to a router."""
        return self.enable_prefix_caching and not self.is_decode()

    def scheduling_policy(self) -> str:
        """Name the admission policy: "trtllm_guaranteed_no_evict" for trtllm, else "vllm"."""
        return "trtllm_guaranteed_no_evict" if self.engine_type == "trtllm" else "vllm"

    def accept_rates(self) -> list[float] | None:
        """Give the acceptance rate of each of the ``aic_nextn`` draft tokens, or None without drafts."""
        rates = self.aic_nextn_accept_rates
        return None if rates is None else [float(rate) for rate in rates.split(",")]

    def undiscounted_aic_accept_rates(self) -> str | None:
        """Give as many zero rates as there are draft tokens, as text, or None without drafts."""
        return None if self.aic_nextn is None else ",".join(["0"] * self.aic_nextn)


FIELDS: Mapping[str, Field[Any]] = MockEngineArgs._fields
"""The fields of :class:`MockEngineArgs` in order, for whoever builds flags or documentation from them."""


def _read_json(text: str) -> Any:
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


class DirectRequest(Record):
    """One request to an engine.

    Parameters
    ----------
    tokens : sequence of int or numpy.ndarray
        The prompt. A one-dimensional ``uint32`` array is kept without a copy, and must not be changed afterwards;
        anything else becomes such an array.
    max_output_tokens : int
        Tokens to generate.
    output_token_ids : sequence of int or numpy.ndarray, optional
        The very tokens that are generated. Their count has precedence over ``max_output_tokens``.
    uuid : uuid.UUID, int or str, optional
        The request's id; an engine makes one for a request that has none.
    dp_rank : int
        Data-parallel rank that the request is for.
    arrival_timestamp_ms : float, optional
        When the request arrives.
    priority, strict_priority : int
        Order in a router's queue. An engine reads ``priority`` with ``vllm_scheduling_policy="priority"``, where the
        smallest comes first; else engines do not read them.
    policy_class : str, optional
        The router's policy class.

    Raises
    ------
    ValueError
        For a value that is not allowed; a bad token's position is named.
    """

    __slots__ = ()

    tokens = Field[npt.NDArray[np.uint32]](_Tokens(), "The prompt.")
    max_output_tokens = Field[int](_SIZE, "Tokens to generate.")
    output_token_ids = Field[npt.NDArray[np.uint32] | None](_Tokens(), "Tokens that are generated.", nullable=True)
    uuid = Field[uuid_module.UUID | None](_Uuid(), "The request's id.", nullable=True)
    dp_rank = Field[int](_U32, "Data-parallel rank that the request is for.")
    arrival_timestamp_ms = Field[float | None](_Float(), "When the request arrives.", nullable=True)
    priority = Field[int](_Int(-(2**31), 2**31 - 1), "Order in a router's queue.")
    strict_priority = Field[int](_U32, "Order in a router's queue, before all else.")
    policy_class = Field[str | None](_TEXT, "The router's policy class.", nullable=True)

    def __init__(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        max_output_tokens: int,
        output_token_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        uuid: uuid_module.UUID | int | str | None = None,
        dp_rank: int = 0,
        arrival_timestamp_ms: float | None = None,
        priority: int = 0,
        strict_priority: int = 0,
        policy_class: str | None = None,
    ) -> None:
        self._init(locals())

    def router_priorities(self) -> tuple[float, int]:
        """Give ``(priority, strict_priority)`` as a router reads them: a negative priority counts as 0."""
        return float(max(self.priority, 0)), self.strict_priority

    def to_dict(self) -> dict[str, Any]:
        """Give the request in its JSON form: priorities of 0 and absent optional parts are left out."""
        values = dict(self._values)
        values["tokens"] = self.tokens.tolist()
        planned, uuid = self.output_token_ids, self.uuid
        values["output_token_ids"] = None if planned is None else planned.tolist()
        values["uuid"] = None if uuid is None else str(uuid)
        for name in ("output_token_ids", "policy_class"):
            if values[name] is None:
                del values[name]
        for name in ("priority", "strict_priority"):
            if values[name] == 0:
                del values[name]
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DirectRequest:
        """Read a request from the form of :meth:`to_dict`; unknown keys are ignored, with a warning in the log."""
        if not isinstance(data, Mapping):
            raise TypeError(f"from_dict() takes a mapping, got {type(data).__name__}")
        try:
            return cls._build(cls._gather(data))
        except _BadValue as bad:
            raise cls._error(bad) from None

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, its = self._values, other._values
        for name, value in mine.items():
            if isinstance(value, np.ndarray):
                if not np.array_equal(value, its[name]):
                    return False
            elif value != its[name]:
                return False
        return True

    def __repr__(self) -> str:
        words = [f"tokens=<{len(self.tokens)} tokens>", f"max_output_tokens={self.max_output_tokens}"]
        if self.output_token_ids is not None:
            words.append(f"output_token_ids=<{len(self.output_token_ids)} tokens>")
        for name in list(self._fields)[3:]:
            if self._values[name] != self._defaults[name]:
                words.append(f"{name}={self._values[name]!r}")
        return f"DirectRequest({', '.join(words)})"
