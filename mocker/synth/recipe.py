"""A synthetic workload as one value: what arrives when, how long it is, what it shares; and its text forms.

Every column has a random stream of its own, all from one seed, so that another length distribution leaves the
arrivals as they are.
"""
from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..trace import MAX_BLOCK_SIZE, Trace
from .arrivals import Arrivals, Diurnal, Gaps, OnOff, Ramp, Rate, Steady
from .distributions import (
    Constant,
    Distribution,
    Empirical,
    Exponential,
    LogNormal,
    Normal,
    Uniform,
    Zipf,
    draw_integers,
)
from .prompts import PrefixTree, lay_out

__all__ = ["Recipe", "parse_arrivals", "parse_distribution"]

MAX_ROWS = 2**31 - 1
MAX_TURNS = 10_000
_STREAMS = ("arrivals", "input", "output", "prefix", "turns", "think")

_DISTRIBUTIONS: dict[str, type[Distribution]] = {
    kind.name: kind for kind in (Constant, Uniform, Normal, LogNormal, Exponential, Zipf)
}
_RATES: dict[str, type[Rate]] = {kind.name: kind for kind in (OnOff, Ramp, Diurnal)}


def _values(text: str, what: str) -> tuple[str, list[float], dict[str, str]]:
    """Split `name:1,2,key=3` into its name, the values by position, and those by key."""
    name, _, rest = text.strip().partition(":")
    given: list[float] = []
    named: dict[str, str] = {}
    for part in rest.split(",") if rest.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if equals:
            if key in named:
                raise ValueError(f"{what} {text!r}: {key} is given twice")
            named[key] = value
        elif named:
            raise ValueError(f"{what} {text!r}: {part!r} must come before the values with names")
        else:
            given.append(_number(key, what, text))
    return name.strip().lower(), given, named


def _number(value: str, what: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{what} {text!r}: expected a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} {text!r}: {value} is not a finite number")
    return number


def _build(kind: type[Any], given: list[float], named: Mapping[str, str], what: str, text: str) -> Any:
    """An instance of a dataclass of numbers, from values by position and by name."""
    names = [f.name for f in dataclasses.fields(kind)]
    if len(given) > len(names):
        raise ValueError(f"{what} {text!r}: takes {', '.join(names)}, got {len(given)} values")
    values: dict[str, float] = dict(zip(names, given, strict=False))
    for key, value in named.items():
        if key not in names:
            raise ValueError(f"{what} {text!r}: takes {', '.join(names)}, not {key!r}")
        if key in values:
            raise ValueError(f"{what} {text!r}: {key} is given twice")
        values[key] = _number(value, what, text)
    missing = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise ValueError(f"{what} {text!r}: needs {', '.join(missing)}")
    whole = {f.name for f in dataclasses.fields(kind) if f.type == "int"}
    return kind(**{k: int(v) if k in whole and v == int(v) else v for k, v in values.items()})


def parse_distribution(text: str | float, what: str = "distribution") -> Distribution:
    """Make a distribution of its text form.

    Parameters
    ----------
    text : str or float
        A number (always that), `fixed:N`, `uniform:LOW,HIGH`, `normal:MEAN,SD`, `lognormal:MEDIAN,SIGMA`,
        `exponential:MEAN`, `zipf:EXPONENT` or `empirical:FILE`; further parameters as `,low=…`, `,high=…`.
    what : str
        What the value is for, for a message.

    Raises
    ------
    ValueError
        Another form, or a value out of range.
    """
    if not isinstance(text, str):
        return Constant(float(text))
    kind, _, rest = text.strip().partition(":")
    if kind.lower() == Empirical.name:
        path, comma, option = rest.rpartition(",column=")
        return Empirical.from_file(path if comma else rest, option if comma else None)
    try:
        return Constant(float(text))
    except ValueError:
        pass
    name, given, named = _values(text, what)
    if name not in _DISTRIBUTIONS:
        raise ValueError(f"{what} {text!r}: there are a number, {', '.join([*_DISTRIBUTIONS, Empirical.name])}")
    try:
        return _build(_DISTRIBUTIONS[name], given, named, what, text)  # type: ignore[no-any-return]
    except ValueError as error:
        raise _named(error, what, text) from None


def _named(error: ValueError, what: str, text: str) -> ValueError:
    """The error, with what the value is for in front."""
    return error if str(error).startswith(what) else ValueError(f"{what} {text!r}: {error}")


def parse_arrivals(text: str | float) -> Arrivals:
    """Make an arrival process of its text form.

    Parameters
    ----------
    text : str or float
        A number or `constant:RATE` (a request every 1/RATE s), `poisson:RATE`, `gamma:RATE,cv=2`,
        `weibull:RATE,shape=0.5`, or a changing rate: `onoff:RATE,ON,OFF[,OFF_RATE]`, `ramp:START,END,DURATION`,
        `diurnal:RATE[,AMPLITUDE][,period=S][,peak=S]`, each with Poisson gaps unless `gaps=constant|gamma|weibull`
        (with `cv=` or `shape=`) says otherwise. Rates in requests a second, times in s.

    Raises
    ------
    ValueError
        Another form, or a value out of range.
    """
    what = "arrivals"
    if not isinstance(text, str):
        text = f"constant:{text}"
    name, given, named = _values(text, what)
    if ":" not in text:
        name, given = "constant", [_number(text, what, text)]
    try:
        gaps = {key: _number(named.pop(key), what, text) for key in ("cv", "shape") if key in named}
        if name in _RATES:
            kind = named.pop("gaps", "poisson")
            return Arrivals(_build(_RATES[name], given, named, what, text), Gaps(kind, **gaps))
        if name not in ("constant", "poisson", "gamma", "weibull"):
            raise ValueError(f"{what} {text!r}: there are constant, poisson, gamma, weibull, {', '.join(_RATES)}")
        if name in ("gamma", "weibull") and len(given) == 2:
            gaps["cv" if name == "gamma" else "shape"] = given.pop()
        return Arrivals(_build(Steady, given, named, what, text), Gaps(name, **gaps))
    except ValueError as error:
        raise _named(error, what, text) from None


@dataclass(frozen=True)
class Recipe:
    """A synthetic workload.

    Every parameter takes its text form too, so that `Recipe(1000, arrivals="poisson:10", input="lognormal:512,1")`
    is complete.

    Parameters
    ----------
    count : int
        Arrivals: requests, or sessions where `turns` gives more than one turn.
    arrivals : Arrivals or str
        When they arrive, see `parse_arrivals`.
    input, output : Distribution, float or str
        New tokens of a prompt (a shared prefix and the history of the session come on top), and tokens of an answer.
    prefix : PrefixTree or str, optional
        Prefixes that prompts share, see `PrefixTree.parse`; in whole blocks.
    turns : Distribution, float or str
        Turns of a session.
    think : Distribution, float or str
        Pause of a session between the end of an answer and its next turn, s.
    history : bool
        Whether the prompt of a later turn repeats all that was said before.
    answers : bool
        Plan the tokens of the answers (output_token_ids), so that the next turn finds the answer in the cache too.
    block_size : int
        Tokens per hash id. Prefixes are shared in whole blocks.
    seed : int
        Equal recipes with equal seeds give equal traces, whatever the platform's word size.
    """

    count: int
    arrivals: Arrivals | str | float = "poisson:1"
    input: Distribution | float | str = 512.0
    output: Distribution | float | str = 128.0
    prefix: PrefixTree | str | None = None
    turns: Distribution | float | str = 1.0
    think: Distribution | float | str = 0.0
    history: bool = True
    answers: bool = False
    block_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("count", 1, MAX_ROWS), ("block_size", 1, MAX_BLOCK_SIZE), ("seed", 0, 2**64 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
                raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
        for name in ("history", "answers"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not isinstance(self.arrivals, Arrivals):
            object.__setattr__(self, "arrivals", parse_arrivals(self.arrivals))
        for name in ("input", "output", "turns", "think"):
            value = getattr(self, name)
            if not isinstance(value, Distribution):
                object.__setattr__(self, name, parse_distribution(value, name))
        if isinstance(self.prefix, str):
            object.__setattr__(self, "prefix", PrefixTree.parse(self.prefix))

    @staticmethod
    def parse(text: str) -> Recipe:
        """Read `count=1000; arrivals=poisson:10; input=lognormal:512,1; output=128; seed=7`, or the same as JSON.

        Raises
        ------
        ValueError
            An unknown or repeated key, or a value that a key does not take.
        """
        if text.lstrip().startswith("{"):
            try:
                values = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the recipe is not JSON: {error}") from None
            return Recipe.from_dict(values)
        values = {}
        for part in text.split(";"):
            if part.strip():
                key, equals, value = (piece.strip() for piece in part.partition("="))
                if not equals:
                    raise ValueError(f"recipe: {part.strip()!r} must be KEY=VALUE; pairs are separated by ';'")
                if key in values:
                    raise ValueError(f"recipe: {key} is given twice")
                values[key] = value
        return Recipe.from_dict(values)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        """Make a recipe of its parameters, each a number, a truth value or text.

        Raises
        ------
        ValueError
            An unknown key, no count, or a value that a key does not take.
        """
        known = {f.name for f in dataclasses.fields(Recipe)}
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ValueError(f"recipe: there is no {unknown[0]!r}; there are {', '.join(sorted(known))}")
        if "count" not in values:
            raise ValueError("recipe: count is missing")
        return Recipe(**{key: _typed(key, value) for key, value in values.items()})

    def trace(self) -> Trace:
        """Draw the workload.

        Rows of a session lie together, sessions in order of arrival; later turns have a think time instead of a time
        stamp.
        """
        assert isinstance(self.arrivals, Arrivals)
        streams = dict(zip(_STREAMS, np.random.SeedSequence(int(self.seed)).spawn(len(_STREAMS)), strict=True))
        rng = {name: np.random.Generator(np.random.PCG64(stream)) for name, stream in streams.items()}
        start = self.arrivals.draw(rng["arrivals"], int(self.count))
        turns = self._integers("turns", rng["turns"], int(self.count), 1, MAX_TURNS)
        rows = int(turns.sum())
        if rows > MAX_ROWS:
            raise ValueError(f"the sessions have {rows} turns in all; there may be {MAX_ROWS}")
        new = self._integers("input", rng["input"], rows, 1)
        answer = self._integers("output", rng["output"], rows, 0)
        assert isinstance(self.think, Distribution)
        first = np.concatenate(([0], np.cumsum(turns)))[:-1]
        delay = self.think.draw(rng["think"], rows) * 1e3
        delay[first] = 0.0
        arrival = np.full(rows, np.nan)
        arrival[first] = start
        if isinstance(self.prefix, PrefixTree):
            prefix, ids, used = self.prefix.draw(rng["prefix"], len(turns), int(self.block_size))
        else:
            prefix, ids, used = np.zeros(len(turns), np.int64), np.empty((len(turns), 0), np.uint64), 0
        length, offsets, hash_ids, stream = lay_out(
            turns, new, answer, prefix, ids, used, int(self.block_size), self.history)
        planned = planned_offsets = None
        if self.answers:
            planned_offsets = np.concatenate(([0], np.cumsum(answer)))
            planned = _answers(length, answer, stream, int(self.block_size))
        single = rows == len(turns)
        return Trace.from_columns(
            block_size=int(self.block_size), arrival_ms=arrival, input_length=length, output_length=answer,
            hash_offsets=offsets, hash_ids=hash_ids,
            session=None if single else np.repeat(np.arange(len(turns), dtype=np.int32), turns),
            delay_ms=delay, output_token_offsets=planned_offsets, output_token_ids=planned,
            path="synthetic")

    def _integers(self, name: str, rng: np.random.Generator, n: int, low: int, high: int = 2**31) -> NDArray[np.int64]:
        distribution = getattr(self, name)
        assert isinstance(distribution, Distribution)
        return draw_integers(distribution, rng, n, low, high)


def _answers(
    length: NDArray[np.int64], answer: NDArray[np.int64], stream: NDArray[np.int64], block_size: int
) -> NDArray[np.uint32]:
    """Tokens of the answers: each the id of its block in the stream, as a prompt that contains it has it."""
    total = int(answer.sum())
    if total > 2**31:
        raise ValueError(f"the answers have {total} tokens, too many to plan; set answers to false")
    start = np.concatenate(([0], np.cumsum(answer)))[:-1]
    place = np.arange(total) - np.repeat(start - length, answer)
    return (np.repeat(stream, answer) + place // block_size).astype(np.uint32)


def _typed(key: str, value: Any) -> Any:
    """A value of a recipe's text or JSON form as the type that the parameter takes."""
    if key in ("count", "block_size", "seed"):
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                raise ValueError(f"{key} must be an integer, got {value!r}") from None
        return value
    if key in ("history", "answers"):
        truth = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(value, str):
            if value.lower() not in truth:
                raise ValueError(f"{key} must be true or false, got {value!r}")
            return truth[value.lower()]
        return value
    if key == "prefix" and (value is None or value == ""):
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or (key == "prefix" and not
                                                                              isinstance(value, str)):
        raise ValueError(f"{key} must be {'text' if key == 'prefix' else 'a number or text'}, got {value!r}")
    return value


