"""Statistics of a trace: lengths, arrivals over time, sessions, and what a prefix cache could save."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..trace import Trace
from .reuse import Reuse, prefix_reuse
from .times import earliest_ms

__all__ = ["PERCENTILES", "Distribution", "TraceStats", "statistics"]

PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99)
_BINS = 60                      # time bins of the arrival rate, unless a width is given
_MAX_BINS = 1_000_000


@dataclass(frozen=True)
class Distribution:
    """A summary of some values; percentiles interpolate linearly. All NaN for no values."""

    count: int
    mean: float
    sd: float
    minimum: float
    maximum: float
    percentiles: tuple[float, ...]

    @staticmethod
    def of(values: NDArray[Any]) -> Distribution:
        """Summarise the values."""
        if not len(values):
            return Distribution(0, math.nan, math.nan, math.nan, math.nan, (math.nan,) * len(PERCENTILES))
        return Distribution(
            len(values), float(values.mean()), float(values.std()), float(values.min()), float(values.max()),
            tuple(np.percentile(values, PERCENTILES).tolist()))

    def to_dict(self) -> dict[str, float | None]:
        """The summary with one key a number, for JSON: None for NaN."""
        values = {"count": self.count, "mean": self.mean, "sd": self.sd, "min": self.minimum, "max": self.maximum,
                  **{f"p{p}": v for p, v in zip(PERCENTILES, self.percentiles, strict=True)}}
        return {key: None if math.isnan(value) else value for key, value in values.items()}


@dataclass(frozen=True)
class TraceStats:
    """What `statistics` finds.

    Attributes
    ----------
    requests, sessions, block_size : int
    duration_ms : float
        From the first to the last known time; NaN without times.
    timed : int
        Rows whose time is known, or follows from their session.
    input_tokens, output_tokens : int
    input_length, output_length, gap_ms, turns, think_ms : Distribution
        Tokens of prompts and answers, ms between arrivals, turns of a session, think times of later turns.
    bin_ms : float
        Width of a bin of `arrivals`, ms.
    arrivals, arriving_tokens : int64[bins]
        Rows, and tokens of their prompts, that arrive in each bin, from the first arrival on.
    reuse : Reuse, optional
    accumulate : bool
        Lengths of prompts are what each turn adds.
    """

    requests: int
    sessions: int
    block_size: int
    duration_ms: float
    timed: int
    input_tokens: int
    output_tokens: int
    input_length: Distribution
    output_length: Distribution
    gap_ms: Distribution
    turns: Distribution
    think_ms: Distribution
    bin_ms: float
    arrivals: NDArray[np.int64] = field(repr=False)
    arriving_tokens: NDArray[np.int64] = field(repr=False)
    reuse: Reuse | None = field(default=None, repr=False)
    accumulate: bool = False

    @property
    def rate(self) -> float:
        """Arrivals a second, on average; NaN without a duration."""
        return (self.timed - 1) / self.duration_ms * 1e3 if self.duration_ms > 0 else math.nan

    @property
    def gap_cv(self) -> float:
        """Coefficient of variation of the gaps between arrivals: 0 even, 1 as Poisson, above bursty."""
        return self.gap_ms.sd / self.gap_ms.mean if self.gap_ms.mean > 0 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; None for what is not known."""
        def number(value: float) -> float | None:
            return None if math.isnan(value) else value

        result: dict[str, Any] = {
            "requests": self.requests, "sessions": self.sessions, "block_size": self.block_size,
            "timed_requests": self.timed, "duration_ms": number(self.duration_ms),
            "arrival_rate_per_s": number(self.rate), "arrival_gap_cv": number(self.gap_cv),
            "input_tokens": self.input_tokens, "output_tokens": self.output_tokens,
            **{name: getattr(self, name).to_dict()
               for name in ("input_length", "output_length", "gap_ms", "turns", "think_ms")},
            "arrivals": {"bin_ms": number(self.bin_ms), "requests": self.arrivals.tolist(),
                         "input_tokens": self.arriving_tokens.tolist()},
        }
        if self.reuse is not None:
            sizes, ratios = self.reuse.curve()
            result["prefix_reuse"] = {
                "block_size": self.reuse.block_size, "full_blocks": self.reuse.blocks,
                "distinct_blocks": self.reuse.distinct_blocks, "unlimited_hit_ratio": self.reuse.hit_ratio,
                "blocks_for_90_percent_of_hits": self.reuse.capacity_for(0.9),
                "curve": {"cache_blocks": sizes.tolist(), "hit_ratio": ratios.tolist()},
            }
        return result


def statistics(
    trace: Trace, *, reuse: bool = True, block_size: int | None = None, bin_ms: float | None = None
) -> TraceStats:
    """Describe a trace.

    Parameters
    ----------
    trace : Trace
    reuse : bool
        Analyse prefix reuse too, the slowest part; not done where prompts depend on answers (`Trace.accumulate`).
    block_size : int, optional
        Tokens of a block of the cache in that analysis; that of the trace if left out.
    bin_ms : float, optional
        Width of a bin of the arrival rate, ms; a 60th of the duration if left out.

    Raises
    ------
    ValueError
        A bin width or block size that is no positive number, or a width that gives more than a million bins.
    """
    if bin_ms is not None and not (math.isfinite(bin_ms) and bin_ms > 0):
        raise ValueError(f"bin_ms must be a finite positive number, got {bin_ms}")
    time = earliest_ms(trace)
    known = ~np.isnan(time)
    moments = np.sort(time[known])
    duration = float(moments[-1] - moments[0]) if len(moments) else math.nan
    width = bin_ms if bin_ms is not None else duration / _BINS if duration > 0 else math.nan
    arrivals = tokens = np.zeros(0, np.int64)
    if len(moments):
        where = np.zeros(int(known.sum()), np.int64)
        if width > 0:
            last = duration / width
            if last >= _MAX_BINS:
                raise ValueError(f"bins of {width:g} ms would be more than {_MAX_BINS:,}; give a larger width")
            where = np.floor((time[known] - moments[0]) / width).astype(np.int64)
            if bin_ms is None:
                where = np.minimum(where, _BINS - 1)
        arrivals = np.bincount(where)
        tokens = np.bincount(where, trace.input_length[known]).astype(np.int64)
    later = trace.turn > 0
    return TraceStats(
        requests=trace.n, sessions=trace.n_sessions, block_size=trace.block_size, duration_ms=duration,
        timed=int(known.sum()), input_tokens=int(trace.input_length.sum()),
        output_tokens=int(trace.output_length.sum()), input_length=Distribution.of(trace.input_length),
        output_length=Distribution.of(trace.output_length), gap_ms=Distribution.of(np.diff(moments)),
        turns=Distribution.of(np.bincount(trace.session) if trace.n else trace.session),
        think_ms=Distribution.of(trace.delay_ms[later]), bin_ms=float(width), arrivals=arrivals,
        arriving_tokens=tokens,
        reuse=prefix_reuse(trace, block_size) if reuse and not trace.accumulate else None, accumulate=trace.accumulate)
