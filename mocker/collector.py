"""From request columns to the report: the reference's keys, its definitions, and what it leaves unsaid.

`assemble_report` serves the replay (columns filled by the compiled collector) and `TraceCollector` (filled call by
call through the object API). Answers to the reference's `replay/collector.rs`; keys and formulas are its own.
Where a value differs on purpose (see docs), ``compat="reference"`` gives the reference's.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np

from ._distribution import statistics, weighted_statistics
from ._report import TERMINAL_NAMES as TERMINAL_NAMES
from ._report import report_of_columns
from .simulation import RECORD_KEYS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]
    IntArray = NDArray[np.int64]

Report = dict[str, Any]
COMPLETED = 1


@dataclass(frozen=True)
class Sla:
    """Goodput bounds in ms; a request is good if every bound that is set holds (inclusive)."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms", "e2e_ms"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"sla_{name} must be a finite, non-negative value, got {value}")

    @property
    def is_set(self) -> bool:
        return self.bounds != (None, None, None)

    @property
    def bounds(self) -> tuple[float | None, float | None, float | None]:
        """All three, None where there is none."""
        return self.ttft_ms, self.itl_ms, self.e2e_ms

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Sla:
        """That of the arguments of `mocker.simulate`, by name."""
        bounds = call["sla_ttft_ms"], call["sla_itl_ms"], call["sla_e2e_ms"]
        return NO_SLA if bounds == (None, None, None) else cls(*bounds)


NO_SLA = Sla()


@dataclass
class Columns:
    """One entry per request; NaN = never happened. Those without an arrival do not count.

    Times in ms of simulated time (float64), lengths and counts in tokens (int64), `terminal` an index into
    `TERMINAL_NAMES` (int8).
    """

    arrival: FloatArray
    first_admit: FloatArray
    first_token: FloatArray
    second_gap: FloatArray
    last_token: FloatArray
    input_length: IntArray
    output_length: IntArray
    output_tokens: IntArray
    reused: IntArray
    first_reused: IntArray
    terminal: NDArray[np.int8]


def assemble_report(c: Columns, gaps: Mapping[str, Any], rates: Mapping[str, Any], *, sla: Sla | None = None,
                    decode_worker_seconds: float | None = None, prefill_worker_seconds: float = 0.0,
                    decode_gpus: int = 0, prefill_gpus: int = 0, wall_time_ms: float = 0.0,
                    compat: str | None = None) -> Report:
    """Compute the report.

    Parameters
    ----------
    c : Columns
        The requests.
    gaps, rates : mapping
        Statistics of the inter-token gaps (ms) and of 1000 / gap, as `weighted_statistics` gives them.
    sla : Sla, optional
        Adds the goodput keys.
    decode_worker_seconds, prefill_worker_seconds : float
        Provisioned worker time, s; decode None: one worker for the whole duration.
    decode_gpus, prefill_gpus : int
        GPUs a worker.
    wall_time_ms : float
        Host time of the replay.
    compat : {"reference"}, optional
        The reference's numbers where ours differ: requests cut off by the time cap count as completed with all
        their tokens, outputs count as requested, and empty distributions are 0.

    Returns
    -------
    dict
        The reference's keys in its order, then `incomplete_requests`, `rejected_requests`, `capacity_requests`,
        `over_budget_requests`, `failed_requests`,
        `canceled_requests` and `samples` (count behind each distribution); `compat` leaves these out.
    """
    return report_of_columns(
        c.arrival, c.first_admit, c.first_token, c.second_gap, c.last_token, c.input_length, c.output_length,
        c.output_tokens, c.reused, c.first_reused, c.terminal, gaps, rates, (sla or NO_SLA).bounds,
        decode_worker_seconds=decode_worker_seconds, prefill_worker_seconds=prefill_worker_seconds,
        decode_gpus=decode_gpus, prefill_gpus=prefill_gpus, wall_time_ms=wall_time_ms, compat=compat)


@dataclass
class _Stats:
    arrival_ms: float
    input_length: int
    output_length: int
    first_admit_ms: float = math.nan
    reused: int = 0
    first_reused: int = 0
    status: str | None = None


class TraceCollector:
    """Collects what an engine core does, call by call; `VllmCore.execute_pass` feeds it.

    Every setter ignores requests that did not arrive. Costs O(tokens) memory; replays use the compiled collector.
    """

    def __init__(self) -> None:
        self._stats: dict[UUID, _Stats] = {}
        self._times: dict[UUID, list[float]] = {}

    def on_arrival(self, uuid: UUID, arrival_time_ms: float, input_length: int, output_length: int) -> None:
        """A request arrived at `arrival_time_ms`; lengths in tokens, `output_length` as requested."""
        self._stats[uuid] = _Stats(arrival_time_ms, input_length, output_length)
        self._times[uuid] = []

    def on_admit(self, uuid: UUID, admit_time_ms: float, reused_input_tokens: int) -> None:
        """It was admitted (again); the first admission and the largest reuse count."""
        stats = self._stats.get(uuid)
        if stats is not None:
            if math.isnan(stats.first_admit_ms):
                stats.first_admit_ms = admit_time_ms
                stats.first_reused = reused_input_tokens
            stats.reused = max(stats.reused, reused_input_tokens)

    def on_token(self, uuid: UUID, token_time_ms: float) -> None:
        """It made a token."""
        times = self._times.get(uuid)
        if times is not None:
            times.append(token_time_ms)

    def on_terminal(self, uuid: UUID, status: str) -> None:
        """It ended; the first status counts (one of `TERMINAL_NAMES`)."""
        if status not in TERMINAL_NAMES:
            raise ValueError(f"status must be one of {', '.join(TERMINAL_NAMES)}, got {status!r}")
        stats = self._stats.get(uuid)
        if stats is not None and stats.status is None:
            stats.status = status

    def _columns(self) -> Columns:
        n = len(self._stats)
        times_ms, counts = np.full((5, n), np.nan), np.zeros((5, n), np.int64)
        c = Columns(times_ms[0], times_ms[1], times_ms[2], times_ms[3], times_ms[4], counts[0], counts[1], counts[2],
                    counts[3], counts[4], np.zeros(n, np.int8))
        for i, (uuid, stats) in enumerate(self._stats.items()):
            times = self._times[uuid]
            c.arrival[i], c.first_admit[i] = stats.arrival_ms, stats.first_admit_ms
            c.input_length[i], c.output_length[i] = stats.input_length, stats.output_length
            c.output_tokens[i], c.reused[i], c.first_reused[i] = len(times), stats.reused, stats.first_reused
            c.terminal[i] = TERMINAL_NAMES.index(stats.status) if stats.status else 0
            if times:
                c.first_token[i], c.last_token[i] = times[0], times[-1]
            if len(times) > 1:
                c.second_gap[i] = max(times[1] - times[0], 0.0)
        return c

    def finish(self, *, sla: Sla | None = None, compat: str | None = None) -> Report:
        """Report over everything collected so far, without worker time (see `assemble_report`)."""
        gaps = [np.maximum(np.diff(np.asarray(t)), 0.0) for t in self._times.values() if len(t) > 1]
        flat = np.concatenate(gaps) if gaps else np.empty(0)
        rates = weighted_statistics(flat, np.ones(len(flat), np.int64), rates=True)
        return assemble_report(self._columns(), statistics(flat), rates, sla=sla, decode_worker_seconds=0.0,
                               compat=compat)

    def per_request_records(self) -> list[dict[str, Any]]:
        """Requests that ended, as the reference's records, by arrival time and UUID text."""
        records = []
        for uuid, stats in self._stats.items():
            if stats.status is None:
                continue
            times = self._times[uuid]
            first = times[0] if times else None
            last = times[-1] if times else None
            record: dict[str, Any] = dict.fromkeys(RECORD_KEYS)
            record.update(
                uuid=str(uuid), arrival_time_ms=stats.arrival_ms,
                first_admit_ms=None if math.isnan(stats.first_admit_ms) else stats.first_admit_ms,
                first_token_ms=first, last_token_ms=last,
                ttft_ms=None if first is None else max(first - stats.arrival_ms, 0.0),
                ttst_ms=max(times[1] - times[0], 0.0) if len(times) > 1 else None,
                e2e_latency_ms=None if last is None else max(last - stats.arrival_ms, 0.0),
                itl_ms=max(times[-1] - times[0], 0.0) / (len(times) - 1) if len(times) > 1 else None,
                input_length=stats.input_length, output_length=stats.output_length,
                reused_input_tokens=stats.reused, terminal_status=stats.status)
            records.append(record)
        records.sort(key=lambda r: (r["arrival_time_ms"], r["uuid"]))
        return records
