"""Differences between two reports: which numbers changed, by how much, and whether that is better or worse."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .definitions import DISTRIBUTIONS, OUTCOMES, STATISTICS, TOTALS, describe

__all__ = ["Difference", "compare_reports", "format_differences"]

_NOISE = frozenset({"wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s"})


class Difference(NamedTuple):
    """One metric in two reports."""

    key: str
    title: str
    unit: str
    before: float | None
    after: float | None
    verdict: str
    """"same", "better", "worse", or "changed" where neither direction is better or a value is missing."""

    @property
    def relative(self) -> float | None:
        """Change as a share of the value before; None without one."""
        if self.before is None or self.after is None or self.before == 0:
            return None
        return (self.after - self.before) / abs(self.before)

    def change(self) -> str:
        """The change as text: arrow, difference, per cent."""
        if self.before is None or self.after is None:
            return "–" if self.before is self.after else "new" if self.before is None else "gone"
        if self.verdict == "same":
            return "="
        delta = self.after - self.before
        size = f"{abs(delta):,.0f}" if float(delta).is_integer() and abs(delta) < 1e15 else f"{abs(delta):,.4g}"
        share = self.relative
        per_cent = "" if share is None else f" ({share:+.2%})"
        return f"{'▲' if delta > 0 else '▼'} {size}{per_cent}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them, with `difference` and `relative`."""
        delta = None if self.before is None or self.after is None else self.after - self.before
        return {**self._asdict(), "difference": delta, "relative": self.relative}


def _keys() -> list[str]:
    keys = list(TOTALS)
    keys += [f"{name}_requests" for name in OUTCOMES if f"{name}_requests" not in TOTALS]
    return keys + [f"{statistic}_{name}" for name in DISTRIBUTIONS for statistic in STATISTICS]


def _value(report: Mapping[str, Any], key: str) -> float | None:
    value = report.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def compare_reports(before: Mapping[str, Any], after: Mapping[str, Any], *, tolerance: float = 1e-9,
                    host: bool = False) -> list[Difference]:
    """Compare two reports metric by metric.

    Parameters
    ----------
    before, after : mapping
        Reports.
    tolerance : float
        Relative difference up to which two values are the same.
    host : bool
        Also compare what depends on the host: wall time and simulation speed.

    Returns
    -------
    list of Difference
        In the order of a report; metrics that neither report has are left out.
    """
    rows = []
    for key in _keys():
        if key in _NOISE and not host:
            continue
        old, new = _value(before, key), _value(after, key)
        metric = describe(key)
        if metric is None or (old is None and new is None):
            continue
        if old is None or new is None:
            verdict = "changed"
        elif abs(new - old) <= tolerance * max(abs(old), abs(new)):
            verdict = "same"
        elif metric.better == 0:
            verdict = "changed"
        else:
            verdict = "better" if (new - old) * metric.better > 0 else "worse"
        rows.append(Difference(key, metric.title, metric.unit, old, new, verdict))
    return rows


def format_differences(rows: list[Difference], before: str, after: str, *, everything: bool = False) -> str:
    """The comparison as a text table; `everything` also lists what is the same."""
    shown = [row for row in rows if everything or row.verdict != "same"]
    same = sum(row.verdict == "same" for row in rows)
    if not shown:
        return f"No difference in {same} metrics."
    table = [["metric", before, after, "change", ""]]
    for row in shown:
        title = f"{row.title} ({row.unit})" if row.unit else row.title
        table.append([title, _text(row.before), _text(row.after), row.change(), row.verdict])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([cells[0].ljust(widths[0]), cells[1].rjust(widths[1]), cells[2].rjust(widths[2]),
                        cells[3].ljust(widths[3]), cells[4]]).rstrip() for cells in table]
    if not everything and same:
        lines.append(f"{same} more metrics are the same.")
    return "\n".join(lines)


def _text(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) >= 1e15:
        return f"{value:.6g}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4f}"
