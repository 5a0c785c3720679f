"""Search spaces: for each name of a configuration the values that it may take."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..extras import import_extra
from ..sweeps.configs import Config, axis_values, grid


@dataclass(frozen=True)
class Between:
    """All values from `low` to `high`, both included; integers if both are.

    Parameters
    ----------
    low, high : int or float
    log : bool
        Search on a logarithmic scale.
    step : int
        Distance of integers.
    """

    low: float
    high: float
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if not self.low <= self.high:
            raise ValueError(f"low must not be above high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic scale needs low above 0, got {self.low}")
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 1 or (
                self.step > 1 and (self.log or not self.whole)):
            raise ValueError(f"step must be 1, or a positive integer for integers on a linear scale, got {self.step!r}")

    @property
    def whole(self) -> bool:
        """Whether its values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


class Space:
    """What to search.

    Parameters
    ----------
    axes : mapping
        Name to a list of choices, a `Between`, or one value.
    base : mapping
        What all configurations have in common.
    """

    def __init__(self, axes: Mapping[str, Any], base: Mapping[str, Any] | None) -> None:
        if not isinstance(axes, Mapping) or not axes:
            raise ValueError("space must be a mapping of names to lists of choices or Between(low, high)")
        self._base = dict(base or {})
        self._axes = {name: _between(value) for name, value in axes.items()}

    @property
    def size(self) -> float:
        """How many configurations there are; infinity if one may be any number of an interval."""
        size = 1.0
        for axis in self._axes.values():
            if isinstance(axis, Between):
                size *= (int(axis.high) - int(axis.low)) // axis.step + 1 if axis.whole else math.inf
            else:
                size *= len(axis_values(axis))
        return size

    def all(self) -> Iterator[Config]:
        """Every configuration of a finite space, the last name changing fastest."""
        for config in grid({name: range(int(axis.low), int(axis.high) + 1, axis.step) if isinstance(axis, Between)
                            else axis for name, axis in self._axes.items()}):
            yield self._base | config

    def distributions(self) -> dict[str, Any]:
        """What Optuna draws from (choices by their number, since they may be objects)."""
        optuna = import_optuna()
        out = {}
        for name, axis in self._axes.items():
            if not isinstance(axis, Between):
                out[name] = optuna.distributions.CategoricalDistribution(range(len(axis_values(axis))))
            elif axis.whole:
                out[name] = optuna.distributions.IntDistribution(int(axis.low), int(axis.high), axis.log, axis.step)
            else:
                out[name] = optuna.distributions.FloatDistribution(axis.low, axis.high, axis.log)
        return out

    def config(self, drawn: Mapping[str, Any]) -> Config:
        """The configuration of a draw."""
        return self._base | {name: drawn[name] if isinstance(axis, Between) else axis_values(axis)[drawn[name]]
                             for name, axis in self._axes.items()}


def _between(value: Any) -> Any:
    """A `Between` given as ``{"between": [low, high], "log": true}``, as files have it; anything else as it is."""
    if isinstance(value, Mapping) and "between" in value:
        rest = {name: item for name, item in value.items() if name != "between"}
        if not isinstance(value["between"], (list, tuple)) or len(value["between"]) != 2 or not rest.keys() <= {
                "log", "step"}:
            raise ValueError(f"expected {{'between': [low, high], 'log': true}}, got {dict(value)!r}")
        return Between(*value["between"], **rest)
    return value


def import_optuna() -> Any:
    """Optuna, or an error that says how to get it."""
    return import_extra("optuna", "optimize", "searching a space that is too large to try out")
