"""What a configuration must reach: bounds on report keys, and how far a report is from them."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..collector import TERMINAL_NAMES
from ..report import DISTRIBUTIONS, REPORT_KEYS, STATISTICS

MISSED = 1e6                       # violation where a bound has no value to compare with
_KNOWN = frozenset(REPORT_KEYS) | {f"{name}_requests" for name in TERMINAL_NAMES}


@dataclass(frozen=True)
class Bound:
    """One bound: `key` of the report at most (or with `at_least`, at least) `value`."""

    key: str
    value: float
    at_least: bool = False

    @property
    def parts(self) -> tuple[str, str] | None:
        """(statistic, distribution) of the key, or None if it is not of a distribution."""
        statistic, _, name = self.key.partition("_")
        return (statistic, name) if statistic in STATISTICS and name in DISTRIBUTIONS else None

    def violation(self, report: Mapping[str, Any]) -> float:
        """How far a report is from the bound, as a share of it; 0 or less: it holds."""
        value = report.get(self.key)
        if value is None or math.isnan(value):
            return MISSED
        scale = max(abs(self.value), 1e-9)
        difference = self.value - value if self.at_least else value - self.value
        return min(float(difference) / scale, MISSED)


def bounds_of(sla: Mapping[str, Any]) -> tuple[Bound, ...]:
    """The bounds that a mapping says.

    Parameters
    ----------
    sla : mapping
        Report key to a number (at most), or to a text ``"<= 500"`` or ``">= 20"``.

    Raises
    ------
    ValueError
        No bound, an unknown key, or no number.
    """
    if not isinstance(sla, Mapping) or not sla:
        raise ValueError("sla must name at least one bound, such as {'p99_ttft_ms': 500}")
    out = []
    for key, given in sla.items():
        if key not in _KNOWN:
            raise ValueError(f"sla: {key!r} is no report key; one of a distribution is a statistic "
                             f"({', '.join(STATISTICS)}) and a name ({', '.join(DISTRIBUTIONS)}), e.g. p99_ttft_ms")
        text = given.strip() if isinstance(given, str) else given
        at_least = isinstance(text, str) and text.startswith(">=")
        if isinstance(text, str):
            text = text.removeprefix(">=").removeprefix("<=")
        try:
            value = float(text)
        except (TypeError, ValueError):
            value = math.nan
        if isinstance(given, bool) or not math.isfinite(value):
            raise ValueError(f"sla: {key} must be a finite number, '<= number' or '>= number', got {given!r}")
        out.append(Bound(key, value, at_least))
    return tuple(out)


def violation(bounds: tuple[Bound, ...], report: Mapping[str, Any]) -> float:
    """The largest violation of any bound, or of the rule that every request completes; 0 or less: all hold."""
    total = report.get("num_requests") or 0
    left = total - (report.get("completed_requests") or 0)
    if left:
        return 1.0 + left / total
    return max((bound.violation(report) for bound in bounds), default=-1.0)
