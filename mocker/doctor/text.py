"""Statistics and findings as text for a terminal."""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from .lints import Finding
from .stats import Distribution, TraceStats

__all__ = ["findings_text", "sparkline", "stats_text"]

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float]) -> str:
    """One character for each value, from 0 to the largest; a blank for 0."""
    numbers = [float(v) for v in values]
    top = max(numbers, default=0.0)
    if top <= 0:
        return " " * len(numbers)
    return "".join(" " if v <= 0 else _BARS[min(int(v / top * len(_BARS)), len(_BARS) - 1)] for v in numbers)


def _number(value: float, digits: int = 1) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1e4 else f"{value:,.{digits}f}"


def duration(ms: float) -> str:
    """A time span in the unit that suits it."""
    if math.isnan(ms):
        return "unknown"
    for limit, unit, scale in ((1e3, "ms", 1.0), (120e3, "s", 1e3), (7200e3, "min", 60e3), (172800e3, "h", 3600e3)):
        if ms < limit:
            return f"{ms / scale:,.1f} {unit}"
    return f"{ms / 86400e3:,.1f} days"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in
                      enumerate(zip(row, widths, strict=True))).rstrip() for row in (head, *rows)]


def _row(name: str, values: Distribution) -> list[str]:
    p = dict(zip((1, 5, 25, 50, 75, 90, 95, 99), values.percentiles, strict=True))
    return [name, *(_number(v) for v in (values.mean, values.minimum, p[25], p[50], p[75], p[95], p[99],
                                         values.maximum))]


def stats_text(stats: TraceStats, source: str = "") -> str:
    """The statistics as a page of text."""
    lines = [source] if source else []
    sessions = f" in {stats.sessions:,} sessions" if stats.sessions != stats.requests else ""
    lines += [
        f"{stats.requests:,} requests{sessions}, {stats.input_tokens:,} input and {stats.output_tokens:,} output "
        f"tokens, block size {stats.block_size}",
    ]
    if stats.accumulate:
        lines.append("turns add to the prompts of their sessions: prompt lengths below are those of the additions")
    rows = [_row("prompt, tokens", stats.input_length), _row("answer, tokens", stats.output_length)]
    if stats.gap_ms.count:
        rows.append(_row("gap between arrivals, ms", stats.gap_ms))
    if stats.sessions != stats.requests:
        rows += [_row("turns of a session", stats.turns), _row("think time, ms", stats.think_ms)]
    lines += ["", *_table(["", "mean", "min", "p25", "p50", "p75", "p95", "p99", "max"], rows), ""]
    if stats.timed:
        rate = f", {stats.rate:,.2f} requests/s" if not math.isnan(stats.rate) else ""
        cv = f", gaps with a coefficient of variation of {stats.gap_cv:.2f}" if not math.isnan(stats.gap_cv) else ""
        lines.append(f"arrivals over {duration(stats.duration_ms)}{rate}{cv}")
        if len(stats.arrivals) > 1:
            shown = stats.arrivals
            if len(shown) > 120:        # wider than a terminal: fold bins together
                shown = np.array([part.sum() for part in np.array_split(shown, 120)])
            peak = stats.arrivals.max() / stats.bin_ms * 1e3
            lines += [f"  |{sparkline(shown)}|",
                      f"  bins of {duration(stats.bin_ms)}, the busiest {peak:,.2f} requests/s"]
    else:
        lines.append("no time stamps: replay with a fixed concurrency")
    if stats.timed < stats.requests:
        lines.append(f"  {stats.requests - stats.timed:,} requests have no time")
    reuse = stats.reuse
    if reuse is not None:
        lines += ["", f"prefix reuse in blocks of {reuse.block_size} tokens: an unlimited cache saves "
                      f"{reuse.hit_ratio:.1%} of the prompt tokens; {reuse.distinct_blocks:,} different blocks"]
        if reuse.hits.any():
            sizes, ratios = reuse.curve(60)
            need = reuse.capacity_for(0.9)
            lines += [
                f"  |{sparkline(ratios)}|",
                f"  share saved by a cache of 1 … {int(sizes[-1]):,} blocks (logarithmic); {need:,} blocks "
                f"({need * reuse.block_size:,} tokens) give nine tenths of it",
            ]
    return "\n".join(lines)


def findings_text(findings: Sequence[Finding], path: str, rows: int) -> str:
    """The findings, one a line, and a summary."""
    lines = []
    for finding in findings:
        where = ", ".join(map(str, finding.lines))
        more = ", …" if finding.count > len(finding.lines) else ""
        at = f" (line {where}{more})" if finding.lines else ""
        lines.append(f"{path}: {finding.severity}: {finding.code}: {finding.count:,} of {rows:,} rows{at}: "
                     f"{finding.message}")
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = len(findings) - errors
    lines.append(f"{path}: {rows:,} rows, {errors} kind{'s' * (errors != 1)} of errors, {warnings} "
                 f"kind{'s' * (warnings != 1)} of warnings")
    return "\n".join(lines)
