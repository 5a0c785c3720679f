"""A few lines below the table of a replay: the load over time as sparklines, and the time per token by each name."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .definitions import TIME_PER_TOKEN
from .parts import parts
from .run import time_per_token

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..simulation import Simulation

__all__ = ["sparkline", "summary_lines"]

WIDTH = 60
_NEEDED = {"row", "arrival_time_ms", "first_token_ms", "last_token_ms", "e2e_latency_ms", "output_tokens"}
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: NDArray[np.float64]) -> str:
    """Values from 0 to their maximum as bars; a space for 0."""
    top = float(values.max(initial=0.0))
    if top <= 0:
        return " " * len(values)
    steps = np.ceil(values / top * len(_BARS)).astype(int)
    return "".join(" " if step <= 0 else _BARS[min(step, len(_BARS)) - 1] for step in steps)


def summary_lines(simulation: Simulation, width: int = WIDTH) -> list[str]:
    """Lines about the load and the time per token; empty for a run without one that was served."""
    columns = simulation.per_request
    if not columns.keys() >= _NEEDED:
        return []
    ended = columns["last_token_ms"]
    if not len(ended) or np.isnan(ended).all():
        return []
    duration = float(np.nanmax(ended))
    lines = ["", f"Load over {_duration(duration)} of simulated time"]
    for label, values, unit in _loads(columns, duration, width):
        lines.append(f"  {label:<18}▕{sparkline(values)}▏ max {values.max():,.1f} {unit}")
    lines += ["", "Time per output token, mean ms (tools disagree about the names)"]
    means = time_per_token(columns, simulation.report)
    for (name, definition, _), value in zip(TIME_PER_TOKEN, means, strict=True):
        text = "N/A" if value is None else f"{value:,.3f}"
        lines.append(f"  {name:<22}{text:>12}  {definition}")
    return lines


def _loads(columns: dict[str, NDArray[Any]], duration: float,
           width: int) -> list[tuple[str, NDArray[np.float64], str]]:
    """Arrivals, requests in the system, and output tokens, in `width` bins of the duration."""
    edges = np.linspace(0.0, max(duration, 1e-9), width + 1)
    seconds = max(duration / width / 1000.0, 1e-12)
    count, time, tokens = (np.zeros((2, width + 2)) for _ in range(3))     # of arrivals and of endings
    arrivals = np.zeros(width + 2)
    for part in parts(len(columns["row"])):
        arrival, last = columns["arrival_time_ms"][part], columns["last_token_ms"][part]
        arrivals += np.bincount(np.searchsorted(edges, arrival), minlength=width + 2)
        ended = ~np.isnan(last)
        for i, at in enumerate((arrival[ended], last[ended])):
            place = np.searchsorted(edges, at)
            count[i] += np.bincount(place, minlength=width + 2)
            time[i] += np.bincount(place, at, minlength=width + 2)
            tokens[i] += np.bincount(place, columns["output_tokens"][part][ended], minlength=width + 2)
    # In the system: the mean over each bin of arrivals less endings, from the integral of both.
    passed = np.cumsum(count, axis=1)[:, :-1] * edges - np.cumsum(time, axis=1)[:, :-1]
    inside = np.diff(passed[0] - passed[1]) / (seconds * 1000.0)
    return [("Arrivals", _bins(arrivals) / seconds, "requests/s"),
            ("In the system", np.maximum(inside, 0.0), "requests"),
            ("Output, by ending", _bins(tokens[1]) / seconds, "tokens/s")]


def _bins(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Counts by the edge that follows a value, as counts by bin: what is at 0 belongs to the first."""
    inner: NDArray[np.float64] = counts[1:-1].copy()
    inner[0] += counts[0]
    return inner


def _duration(ms: float) -> str:
    seconds = ms / 1000.0
    if not math.isfinite(seconds) or seconds < 120:
        return f"{seconds:,.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min {rest:02d} s" if hours else f"{minutes} min {rest:02d} s"
