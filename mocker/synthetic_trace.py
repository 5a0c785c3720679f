"""The reference's synthetic traces with all that its library can draw: arrivals, lengths, think times, prefix groups.

Answers to `SyntheticTraceSpec` and `Trace::synthetic` of the reference's `loadgen`. One seeded generator is drawn from
in a fixed order - all arrivals, then session by session its group and turn by turn the prompt's length, the answer's
length and the think time - so that a specification gives the reference's trace to the last bit, as far as the C
library's logarithm and cosine are those that the reference calls. Cost: a few microseconds a turn.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ._spec import SeededRng
from .trace import Trace
from .trace_edit import below
from .workload import SHARED_PREFIX_ID

_ARRIVALS = ("burst", "constant", "poisson", "gamma")
_DELAYS = ("none", "constant", "exponential")
_MAX_TURNS = 2**26
_MAX_TOKENS = 2**40


@dataclass(frozen=True)
class SyntheticTraceSpec:
    """A random trace by its distributions.

    Parameters
    ----------
    block_size : int
        Tokens per hash id.
    num_sessions, turns_per_session : int
    input_tokens, output_tokens : int
        Mean length of prompts and answers, tokens; lengths are at least 1.
    input_stddev, output_stddev : float
        Standard deviation of the normal distribution that lengths come from, tokens; 0: all equal.
    shared_prefix_ratio : float
        Share of a prompt's blocks that the sessions of a group have in common.
    num_prefix_groups : int
        0: nothing is in common. Tokens of different groups are the same all the same, as in the reference.
    arrivals : {"burst", "constant", "poisson", "gamma"}
        Gaps between first turns: none, all equal, exponential, gamma of shape `smoothness`.
    qps : float
        First turns a second.
    smoothness : float
        Above 1: more even than Poisson; below: more bursty.
    delays : {"none", "constant", "exponential"}
        Think times.
    delay_ms : float
        Their mean, ms.
    seed : int
        0 <= seed < 2**64.
    """

    block_size: int
    num_sessions: int
    turns_per_session: int
    input_tokens: int
    output_tokens: int
    input_stddev: float = 0.0
    output_stddev: float = 0.0
    shared_prefix_ratio: float = 0.0
    num_prefix_groups: int = 0
    arrivals: str = "burst"
    qps: float = 1.0
    smoothness: float = 1.0
    delays: str = "none"
    delay_ms: float = 0.0
    seed: int = 42

    def __post_init__(self) -> None:
        for name, low, high in (("block_size", 1, 2**31 - 1), ("num_sessions", 1, _MAX_TURNS),
                                ("turns_per_session", 1, _MAX_TURNS), ("input_tokens", 0, _MAX_TOKENS),
                                ("output_tokens", 0, _MAX_TOKENS), ("num_prefix_groups", 0, 2**31 - 1),
                                ("seed", 0, 2**64 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
                raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
        if self.num_sessions * self.turns_per_session > _MAX_TURNS:
            raise ValueError(f"num_sessions times turns_per_session must be at most {_MAX_TURNS}")
        for name in ("input_stddev", "output_stddev"):
            if not abs(getattr(self, name)) <= _MAX_TOKENS:
                raise ValueError(f"{name} must be a finite number of tokens, got {getattr(self, name)}")
        if not 0.0 <= self.shared_prefix_ratio <= 1.0:
            raise ValueError(f"shared_prefix_ratio must be between 0.0 and 1.0, got {self.shared_prefix_ratio}")
        for name, values in (("arrivals", _ARRIVALS), ("delays", _DELAYS)):
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {', '.join(values)}, got {getattr(self, name)!r}")
        for name in ("qps", "smoothness"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be a finite positive number, got {getattr(self, name)}")
        if not (math.isfinite(self.delay_ms) and self.delay_ms >= 0):
            raise ValueError(f"delay_ms must be a finite non-negative number, got {self.delay_ms}")

    def to_trace(self) -> Trace:
        """Draw the trace; the same for the same specification."""
        rng = SeededRng(int(self.seed))
        starts = [0.0]
        for _ in range(self.num_sessions - 1):
            starts.append(starts[-1] + self._gap(rng))
        grouped = self.num_prefix_groups > 0 and self.shared_prefix_ratio > 0.0
        inputs, outputs, delays, ids, next_id = [], [], [], [], 1
        for _ in range(self.num_sessions):
            group = below(rng, int(self.num_prefix_groups)) if grouped else 0
            for turn in range(self.turns_per_session):
                inputs.append(_length(rng, self.input_tokens, self.input_stddev))
                outputs.append(_length(rng, self.output_tokens, self.output_stddev))
                delays.append(self._delay(rng) if turn else 0.0)
                blocks = -(-inputs[-1] // self.block_size)
                shared = min(_round(blocks * self.shared_prefix_ratio), blocks) if grouped else 0
                ids.append(np.arange(shared, dtype=np.uint64) | np.uint64((SHARED_PREFIX_ID | group << 32) % 2**64))
                ids.append(np.arange(next_id, next_id + blocks - shared, dtype=np.uint64))
                next_id += blocks - shared
        turns = self.turns_per_session
        n = self.num_sessions * turns
        arrival = np.full((self.num_sessions, turns), np.nan)
        arrival[:, 0] = starts
        counts = -(-np.array(inputs, np.int64) // self.block_size)
        return Trace.from_columns(
            block_size=int(self.block_size), arrival_ms=arrival.ravel(), input_length=np.array(inputs, np.int64),
            output_length=np.array(outputs, np.int64), hash_ids=np.concatenate(ids),
            hash_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64), delay_ms=np.array(delays),
            session=np.arange(n, dtype=np.int32) // np.int32(turns),
            session_ids=[f"session_{k}" for k in range(self.num_sessions)])

    def _gap(self, rng: SeededRng) -> float:
        """Time between two first turns, ms."""
        mean = 1000.0 / self.qps
        if self.arrivals == "burst":
            return 0.0
        if self.arrivals == "constant":
            return mean
        if self.arrivals == "poisson":
            return _exponential(rng, mean)
        return _gamma(rng, self.smoothness, mean / self.smoothness)

    def _delay(self, rng: SeededRng) -> float:
        if self.delays == "none":
            return 0.0
        return self.delay_ms if self.delays == "constant" else _exponential(rng, self.delay_ms)


def _uniform(rng: SeededRng) -> float:
    """From 0 on, below 1."""
    return (rng.next_u64() >> 11) * 2.0**-53


def _positive(rng: SeededRng) -> float:
    """Above 0, up to 1."""
    return max(1.0 - _uniform(rng), 2.2250738585072014e-308)


def _normal(rng: SeededRng) -> float:
    """Standard normal by Box and Muller."""
    first, second = _positive(rng), _uniform(rng)
    return math.sqrt(-2.0 * math.log(first)) * math.cos(math.tau * second)


def _length(rng: SeededRng, mean: int, stddev: float) -> int:
    if stddev == 0.0:
        return max(int(mean), 1)
    return max(_round(mean + _normal(rng) * abs(stddev)), 1)


def _round(value: float) -> int:
    """To the nearest integer, halves up."""
    low = math.floor(value)
    return low + (value - low >= 0.5)


def _exponential(rng: SeededRng, mean: float) -> float:
    return 0.0 if mean == 0.0 else -mean * math.log(_positive(rng))


def _gamma(rng: SeededRng, shape: float, scale: float) -> float:
    """By Marsaglia and Tsang; below shape 1 from the next shape."""
    if shape < 1.0:
        power = _positive(rng)
        return _gamma(rng, shape + 1.0, scale) * math.pow(power, 1.0 / shape)
    d = shape - 1.0 / 3.0
    c = math.sqrt(1.0 / (9.0 * d))
    while True:
        z = _normal(rng)
        v = 1.0 + c * z
        v = v * (v * v)
        if v <= 0.0:
            continue
        u = _uniform(rng)
        squared = z * z
        if u < 1.0 - 0.0331 * (squared * squared):
            return d * v * scale
        if u == 0.0 or math.log(u) < 0.5 * z * z + d * (1.0 - v + math.log(v)):
            return d * v * scale
