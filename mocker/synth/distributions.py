"""Distributions of lengths, numbers of turns and think times, drawn with NumPy generators.

A distribution draws real numbers; `integers` rounds them to the nearest integer and clips them to a range, so that a
prompt has at least one token. Each has a text form, `name:value,value,key=value` (see `parse`).
"""
from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Constant", "Distribution", "Empirical", "Exponential", "LogNormal", "Normal", "Uniform", "Zipf", "draw_integers",
]

MAX_LENGTH = 2**40              # tokens; far above every model, far below an overflow of a sum
MAX_RANKS = 1 << 22             # values of a Zipf distribution: it keeps a table of them


class Distribution(ABC):
    """Real numbers at least 0.

    Attributes
    ----------
    name : str
        Name in the text form.
    """

    name: ClassVar[str]

    @abstractmethod
    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        """Draw `n` values."""

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{self.name}: {what}")


def draw_integers(
    distribution: Distribution, rng: np.random.Generator, n: int, low: int = 1, high: int = MAX_LENGTH
) -> NDArray[np.int64]:
    """Draw `n` integers: rounded to the nearest, then clipped to [low, high]."""
    return np.clip(np.rint(distribution.draw(rng, n)), low, high).astype(np.int64)


@dataclass(frozen=True)
class Constant(Distribution):
    """Always the same value (`fixed:512`, or only `512`)."""

    value: float
    name: ClassVar[str] = "fixed"

    def __post_init__(self) -> None:
        self._require(0 <= self.value <= MAX_LENGTH, f"value must be between 0 and {MAX_LENGTH}, got {self.value}")

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        return np.full(n, float(self.value))


@dataclass(frozen=True)
class Uniform(Distribution):
    """Equally likely between two bounds, both included after rounding (`uniform:100,2000`)."""

    low: float
    high: float
    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        self._require(0 <= self.low <= self.high <= MAX_LENGTH, f"needs 0 <= low <= high, got {self.low}, {self.high}")

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        return rng.uniform(self.low, self.high, n)


@dataclass(frozen=True)
class Normal(Distribution):
    """Gaussian, clipped to [low, high] (`normal:1000,250,high=4000`)."""

    mean: float
    sd: float
    low: float = 0.0
    high: float = MAX_LENGTH
    name: ClassVar[str] = "normal"

    def __post_init__(self) -> None:
        self._require(math.isfinite(self.mean), f"mean must be finite, got {self.mean}")
        self._require(math.isfinite(self.sd) and self.sd >= 0, f"sd must be finite and at least 0, got {self.sd}")
        self._require(0 <= self.low <= self.high <= MAX_LENGTH, f"needs 0 <= low <= high, got {self.low}, {self.high}")

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        return np.clip(rng.normal(self.mean, self.sd, n), self.low, self.high)


@dataclass(frozen=True)
class LogNormal(Distribution):
    """exp of a Gaussian with standard deviation `sigma`, clipped (`lognormal:512,1.2,high=32768`).

    `median` is exp of the Gaussian's mean; the mean of the values is median * exp(sigma² / 2).
    """

    median: float
    sigma: float
    low: float = 0.0
    high: float = MAX_LENGTH
    name: ClassVar[str] = "lognormal"

    def __post_init__(self) -> None:
        self._require(0 < self.median <= MAX_LENGTH, f"median must be above 0, got {self.median}")
        self._require(0 <= self.sigma <= 50, f"sigma must be between 0 and 50, got {self.sigma}")
        self._require(0 <= self.low <= self.high <= MAX_LENGTH, f"needs 0 <= low <= high, got {self.low}, {self.high}")

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        return np.clip(rng.lognormal(math.log(self.median), self.sigma, n), self.low, self.high)


@dataclass(frozen=True)
class Exponential(Distribution):
    """Exponential with a mean, clipped (`exponential:10,high=60`)."""

    mean: float
    low: float = 0.0
    high: float = MAX_LENGTH
    name: ClassVar[str] = "exponential"

    def __post_init__(self) -> None:
        self._require(0 <= self.mean <= MAX_LENGTH, f"mean must be at least 0, got {self.mean}")
        self._require(0 <= self.low <= self.high <= MAX_LENGTH, f"needs 0 <= low <= high, got {self.low}, {self.high}")

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        return np.clip(rng.exponential(self.mean, n), self.low, self.high)


@dataclass(frozen=True)
class Zipf(Distribution):
    """The k-th of the integers low … high with a probability proportional to 1 / k**exponent (`zipf:1.1,high=8192`).

    Bounded, so that every exponent from 0 (uniform) on is possible.
    """

    exponent: float
    low: int = 1
    high: int = 65536
    name: ClassVar[str] = "zipf"

    def __post_init__(self) -> None:
        self._require(0 <= self.exponent <= 100, f"exponent must be between 0 and 100, got {self.exponent}")
        self._require(self.low == int(self.low) and self.high == int(self.high), "low and high must be integers")
        self._require(0 <= self.low <= self.high, f"needs 0 <= low <= high, got {self.low}, {self.high}")
        self._require(self.high - self.low < MAX_RANKS, f"needs fewer than {MAX_RANKS} values between low and high")

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        return int(self.low) + zipf_ranks(rng, n, int(self.high - self.low) + 1, self.exponent).astype(np.float64)


def zipf_ranks(rng: np.random.Generator, n: int, ranks: int, exponent: float) -> NDArray[np.int64]:
    """int64[n] in [0, ranks): rank k with a probability proportional to 1 / (k + 1)**exponent."""
    if exponent == 0:
        return rng.integers(0, ranks, n)
    return _weighted(rng, n, np.arange(1, ranks + 1, dtype=np.float64) ** -exponent)


def _weighted(rng: np.random.Generator, n: int, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64[n]: indices, each with a probability proportional to its weight."""
    total = np.cumsum(weights)
    found = np.searchsorted(total, rng.random(n) * total[-1], side="right")
    return np.asarray(np.minimum(found, len(total) - 1), np.int64)


@dataclass(frozen=True, eq=False)
class Empirical(Distribution):
    """Values drawn with replacement from a sample, each with its weight.

    In text, `empirical:FILE` is a file with one number a line, and `empirical:FILE,column=input` (or output) takes the
    lengths of a trace.

    Parameters
    ----------
    values : array-like of float
        Finite and at least 0.
    weights : array-like of float, optional
        At least 0, not all 0.
    """

    values: ArrayLike
    weights: ArrayLike | None = None
    source: str = field(default="", repr=False)
    name: ClassVar[str] = "empirical"

    def __post_init__(self) -> None:
        values = np.asarray(self.values, np.float64)
        self._require(values.ndim == 1 and len(values) > 0, "needs at least one value")
        self._require(bool((np.isfinite(values) & (values >= 0) & (values <= MAX_LENGTH)).all()),
                      f"values must be finite and between 0 and {MAX_LENGTH}")
        if self.weights is not None:
            weights = np.asarray(self.weights, np.float64)
            self._require(weights.shape == values.shape, "needs one weight for each value")
            self._require(bool((np.isfinite(weights) & (weights >= 0)).all()) and bool(weights.any()),
                          "weights must be finite, at least 0, and not all 0")

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        values = np.asarray(self.values, np.float64)
        if self.weights is None:
            return values[rng.integers(0, len(values), n)]
        return values[_weighted(rng, n, np.asarray(self.weights, np.float64))]

    @staticmethod
    def from_file(path: str | os.PathLike[str], column: str | None = None) -> Empirical:
        """Read a sample: a text file with one number a line, or the lengths of a trace.

        Parameters
        ----------
        path : path-like
        column : {"input", "output"}, optional
            Take these lengths of the trace in the file.

        Raises
        ------
        ValueError
            Names file and line.
        OSError
            The file cannot be opened.
        """
        name = os.fsdecode(path)
        if column is not None:
            from ..trace import Trace

            if column not in ("input", "output"):
                raise ValueError(f"empirical: column must be 'input' or 'output', got {column!r}")
            trace = Trace.load(path)
            return Empirical(trace.input_length if column == "input" else trace.output_length, source=name)
        values = []
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    try:
                        values.append(float(text))
                    except ValueError:
                        raise ValueError(
                            f"{name}:{number}: expected one number a line, got {text.strip()[:40]!r}; for a trace, "
                            "add column=input or column=output"
                        ) from None
        return Empirical(values, source=name)
