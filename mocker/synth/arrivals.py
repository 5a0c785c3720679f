"""Arrival processes: when requests (or sessions) arrive.

Two independent choices: how the rate changes with time (constant, on/off bursts, a ramp, a diurnal curve, any steps),
and how regular the gaps are at a given rate (constant, Poisson, gamma, Weibull). Gaps with mean 1 are drawn in
operational time, which runs as fast as the rate is high, and then mapped back to the clock: a Poisson process with a
changing rate comes out exactly, and burstier or smoother gaps keep their coefficient of variation.
"""
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Arrivals", "Curve", "Diurnal", "Gaps", "OnOff", "Ramp", "Rate", "Steady"]

Floats = NDArray[np.float64]

GAPS = ("constant", "poisson", "gamma", "weibull")
STEPS = 1440                    # constant-rate steps of a diurnal period, or of a ramp
MAX_STEPS = 10_000_000          # steps that an on/off process may need


@dataclass(frozen=True)
class Gaps:
    """Gaps with mean 1.

    Parameters
    ----------
    kind : {"constant", "poisson", "gamma", "weibull"}
    cv : float, optional
        Coefficient of variation of gamma gaps; 1 is Poisson, above is burstier.
    shape : float, optional
        Shape of Weibull gaps; 1 is Poisson, below is burstier.
    """

    kind: str = "poisson"
    cv: float | None = None
    shape: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in GAPS:
            raise ValueError(f"gaps must be one of {', '.join(GAPS)}, got {self.kind!r}")
        for name, owner in (("cv", "gamma"), ("shape", "weibull")):
            value = getattr(self, name)
            if self.kind == owner:
                if value is None or not 1e-3 <= value <= 1e3:
                    raise ValueError(f"{owner} gaps need {name} between 0.001 and 1000, got {value}")
            elif value is not None:
                raise ValueError(f"{name} belongs to {owner} gaps, not to {self.kind} gaps")

    def draw(self, rng: np.random.Generator, n: int) -> Floats:
        """float64[n] gaps."""
        if self.kind == "poisson":
            return rng.standard_exponential(n)
        if self.kind == "gamma" and self.cv is not None:
            k = self.cv**-2
            return rng.standard_gamma(k, n) / k
        if self.kind == "weibull" and self.shape is not None:
            return rng.weibull(self.shape, n) / math.gamma(1 + 1 / self.shape)
        return np.ones(n)


class Rate(ABC):
    """A rate over time, in requests a second."""

    name: ClassVar[str]

    @abstractmethod
    def times(self, operational: Floats, rng: np.random.Generator) -> Floats:
        """float64[n], s: when the expected number of arrivals reaches each of the rising values."""

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{self.name}: {what}")


def _is_rate(value: float) -> bool:
    return math.isfinite(value) and 1e-9 <= value <= 1e9


def _is_time(value: float) -> bool:
    return math.isfinite(value) and 1e-6 <= value <= 1e9


@dataclass(frozen=True)
class Steady(Rate):
    """The same rate all the time."""

    rate: float
    name: ClassVar[str] = "steady"

    def __post_init__(self) -> None:
        self._require(_is_rate(self.rate), f"rate must be between 1e-9 and 1e9 requests a second, got {self.rate}")

    def times(self, operational: Floats, rng: np.random.Generator) -> Floats:
        return operational / self.rate


@dataclass(frozen=True, eq=False)
class Curve(Rate):
    """Steps of constant rate, repeated for ever or followed by the last rate.

    Parameters
    ----------
    rates : array-like of float
        Requests a second in each step; not all 0.
    step_s : float
        Length of a step, s.
    repeat : bool
        Start again after the last step; else the last rate, which must be above 0, goes on.
    """

    rates: ArrayLike
    step_s: float
    repeat: bool = True
    name: ClassVar[str] = "curve"

    def __post_init__(self) -> None:
        rates = np.asarray(self.rates, np.float64)
        self._require(rates.ndim == 1 and len(rates) > 0, "needs at least one rate")
        self._require(bool((np.isfinite(rates) & (rates >= 0) & (rates <= 1e9)).all()), "rates must be in [0, 1e9]")
        self._require(_is_time(self.step_s), f"step_s must be between 1e-6 and 1e9 s, got {self.step_s}")
        self._require(_is_rate(float(rates.max() if self.repeat else rates[-1])),
                      "rates must not all be 0" if self.repeat else "the last rate goes on and must be above 0")

    def times(self, operational: Floats, rng: np.random.Generator) -> Floats:
        rates = np.asarray(self.rates, np.float64)
        edges: Floats = np.arange(len(rates) + 1, dtype=np.float64) * self.step_s
        total = np.concatenate(([0.0], np.cumsum(rates * self.step_s)))
        if self.repeat:
            period, within = np.divmod(operational, total[-1])
            return np.asarray(period * edges[-1] + _invert(within, total, edges), np.float64)
        beyond = np.maximum(operational - total[-1], 0.0)
        return np.asarray(_invert(np.minimum(operational, total[-1]), total, edges) + beyond / rates[-1], np.float64)


def _invert(values: Floats, total: Floats, edges: Floats) -> Floats:
    """Times at which a piecewise linear count that never falls reaches the values; a rest is over when it begins."""
    step = np.clip(np.searchsorted(total, values, side="left"), 1, len(total) - 1)
    low = total[step - 1]
    width = total[step] - low
    share = np.divide(values - low, width, out=np.zeros_like(values), where=width > 0)
    return edges[step - 1] + share * (edges[step] - edges[step - 1])


@dataclass(frozen=True)
class Ramp(Rate):
    """The rate rises or falls linearly from `start` to `end` within `duration` s, and stays there."""

    start: float
    end: float
    duration: float
    name: ClassVar[str] = "ramp"

    def __post_init__(self) -> None:
        self._require(0 <= self.start <= 1e9 and math.isfinite(self.start), f"start must be >= 0, got {self.start}")
        self._require(_is_rate(self.end), f"end must be between 1e-9 and 1e9 requests a second, got {self.end}")
        self._require(_is_time(self.duration), f"duration must be between 1e-6 and 1e9 s, got {self.duration}")

    def times(self, operational: Floats, rng: np.random.Generator) -> Floats:
        slope = (self.end - self.start) / self.duration
        inside = 0.5 * (self.start + self.end) * self.duration
        within = np.minimum(operational, inside)
        # start t + slope t²/2 = within, in the form that does not cancel
        root = np.sqrt(np.maximum(self.start**2 + 2 * slope * within, 0.0))
        time = np.divide(2 * within, self.start + root, out=np.zeros_like(within), where=self.start + root > 0)
        return np.asarray(np.minimum(time, self.duration) + (operational - within) / self.end, np.float64)


@dataclass(frozen=True)
class Diurnal(Rate):
    """rate * (1 + amplitude * cos(2π (t - peak) / period)), in 1,440 steps a period.

    `rate` is the mean; `amplitude` 0 … 1; `period` and `peak` in s.
    """

    rate: float
    amplitude: float = 0.8
    period: float = 86400.0
    peak: float = 50400.0
    name: ClassVar[str] = "diurnal"

    def __post_init__(self) -> None:
        self._require(_is_rate(self.rate), f"rate must be between 1e-9 and 1e9 requests a second, got {self.rate}")
        self._require(0 <= self.amplitude <= 1, f"amplitude must be between 0 and 1, got {self.amplitude}")
        self._require(_is_time(self.period), f"period must be between 1e-6 and 1e9 s, got {self.period}")
        self._require(math.isfinite(self.peak), f"peak must be finite, got {self.peak}")

    def times(self, operational: Floats, rng: np.random.Generator) -> Floats:
        middle = (np.arange(STEPS) + 0.5) / STEPS
        rates = self.rate * (1 + self.amplitude * np.cos(2 * np.pi * (middle - self.peak / self.period)))
        return Curve(np.maximum(rates, 0.0), self.period / STEPS).times(operational, rng)


@dataclass(frozen=True)
class OnOff(Rate):
    """Bursts: phases with `rate` and phases with `off_rate` take turns, beginning with a burst.

    Phases last `on` and `off` s, exactly if `random` is 0, else exponentially distributed with these means (then a
    Markov-modulated process).
    """

    rate: float
    on: float
    off: float
    off_rate: float = 0.0
    random: float = 1
    name: ClassVar[str] = "onoff"

    def __post_init__(self) -> None:
        self._require(_is_rate(self.rate), f"rate must be between 1e-9 and 1e9 requests a second, got {self.rate}")
        self._require(_is_time(self.on) and _is_time(self.off), "on and off must be between 1e-6 and 1e9 s")
        self._require(0 <= self.off_rate <= 1e9, f"off_rate must be between 0 and 1e9, got {self.off_rate}")
        self._require(self.random in (0, 1), f"random must be 0 or 1, got {self.random}")

    def times(self, operational: Floats, rng: np.random.Generator) -> Floats:
        if not len(operational):
            return operational
        need = float(operational[-1])
        cycles = need / (self.rate * self.on + self.off_rate * self.off) + 1
        self._require(cycles < MAX_STEPS, "the arrivals would need more than 10,000,000 bursts; make them longer")
        phases: list[Floats] = []
        counted = 0.0
        while counted <= need:
            n = int(cycles * 1.1) + 16
            pair = np.array([self.on, self.off])
            drawn = rng.exponential(1.0, (n, 2)) * pair if self.random else np.tile(pair, (n, 1))
            phases.append(drawn.ravel())
            counted += float((drawn @ np.array([self.rate, self.off_rate])).sum())
        length = np.concatenate(phases)
        rates = np.tile([self.rate, self.off_rate], len(length) // 2)
        edges = np.concatenate(([0.0], np.cumsum(length)))
        total = np.concatenate(([0.0], np.cumsum(length * rates)))
        return _invert(operational, total, edges)


@dataclass(frozen=True)
class Arrivals:
    """A rate over time with gaps of some regularity.

    Parameters
    ----------
    rate : Rate
    gaps : Gaps
    """

    rate: Rate
    gaps: Gaps = Gaps()

    def draw(self, rng: np.random.Generator, n: int) -> Floats:
        """float64[n], ms: arrival times that never fall; the first is 0 with constant gaps, else one gap after 0."""
        operational = np.cumsum(self.gaps.draw(rng, n))
        if self.gaps.kind == "constant":
            operational -= 1.0
        times = self.rate.times(operational, rng) * 1e3
        if not np.isfinite(times).all():
            raise ValueError("the arrival times leave the range of a double; raise the rate")
        return times
