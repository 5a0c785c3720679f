"""What a replay records over simulated time: the options, and the result as time series and a log of passes.

A series has a value per worker and time bin. Levels (requests running and waiting, KV blocks) are means over the
bin's time, exact also where passes were fast-forwarded; counts of a pass are spread evenly over it.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ._record import CELL_FIELDS, Recorder, count_requests

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

__all__ = ["SERIES", "SHARED", "Recording", "Timeline"]

_MAX_CELLS = 1 << 18               # 80 bytes each, and some hundred in the series made of them
_AUTO_BINS = 512
_ROWS = 1 << 17
_OF_REQUESTS = ("arrivals", "first_admissions", "completed", "admitted_prompt_tokens", "reused_prompt_tokens")

SERIES: dict[str, str] = {
    "running": "requests in the batch, mean over the time",
    "waiting": "requests in the worker's queue, mean over the time",
    "kv_used_blocks": "KV blocks that requests hold, mean over the time",
    "kv_cached_blocks": "KV blocks cached without a holder, mean over the time",
    "kv_host_blocks": "KV blocks in the host tier (KV offload), mean over the time",
    "kv_usage": "kv_used_blocks as a share of the pool",
    "busy": "share of the time inside passes",
    "passes": "passes; counts of a pass are spread evenly over it",
    "batch_tokens": "tokens scheduled",
    "batch_tokens_per_pass": "batch_tokens / passes",
    "prompt_tokens": "prompt tokens computed",
    "output_tokens": "output tokens made",
    "preemptions": "preemptions (retractions in SGLang)",
    "arrivals": "requests that arrived and went to the worker",
    "first_admissions": "requests admitted for the first time",
    "completed": "requests completed",
    "admitted_prompt_tokens": "prompt tokens of the requests first admitted",
    "reused_prompt_tokens": "of these, tokens found in the cache",
    "cache_hit_ratio": "reused_prompt_tokens / admitted_prompt_tokens",
}
"""The series of a timeline and what they mean."""
SHARED: dict[str, str] = {
    "kv_disk_blocks": "KV blocks in the disk tier of all workers (KV offload), mean over the time",
    "kv_remote_blocks": "KV blocks in the remote store of all workers (KV offload), mean over the time",
}
"""Series of all workers together, where there are such tiers."""


@dataclass(frozen=True)
class Recording:
    """What to record.

    Attributes
    ----------
    interval_ms : float, optional
        Width of a time bin. When the run outgrows the memory set aside for it, bins are merged in pairs, so the width
        is then a multiple of this by a power of two. None: as many bins as a plot needs.
    passes : int
        Entries of the pass log at most; 0: none. A log that is full keeps the passes of evenly spaced windows.
    window_ms : (float, float), optional
        Log only passes that overlap this simulated time.
    """

    interval_ms: float | None = None
    passes: int = 0
    window_ms: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.interval_ms is not None and not (math.isfinite(self.interval_ms) and self.interval_ms > 0):
            raise ValueError(f"interval_ms must be positive and finite, got {self.interval_ms}")
        if isinstance(self.passes, bool) or not isinstance(self.passes, int) or not 0 <= self.passes <= 10**8:
            raise ValueError(f"passes must be an integer from 0 to 10**8, got {self.passes!r}")
        if self.window_ms is not None:
            start, end = self.window_ms
            if not 0 <= start < end:
                raise ValueError(f"window_ms must be a start and a later end, got {self.window_ms}")

    def recorder(self, workers: int, span_ms: float) -> Recorder:
        """The compiled recorder for a replay of `workers` workers whose arrivals span `span_ms`."""
        start, end = self.window_ms if self.window_ms is not None else (0.0, math.inf)
        if self.interval_ms is None:
            bins = _AUTO_BINS
            width = 2.0 ** max(math.ceil(math.log2(max(span_ms, 1.0) / bins)), 0)
        else:
            bins = max(_MAX_CELLS // max(workers, 1), _AUTO_BINS) // 2 * 2
            width = self.interval_ms
        return Recorder(width, bins, self.passes, start, end)


class Timeline:
    """What a recorder saw, and the requests' own times in the same bins.

    Parameters
    ----------
    recorder : Recorder
        After the replay.
    pools : list of str
        The pool of each worker: "aggregated", "decode" or "prefill".
    capacity : array of int64, shape (workers,)
        Blocks of each worker's KV pool.
    end_ms : float
        When the replay ended.
    requests : mapping
        Of each request that arrived, as in `Simulation.per_request`: `arrival_time_ms`, `first_admit_ms`,
        `last_token_ms`, `input_length`, `reused_input_tokens`, `decode_worker_idx`, with prefill workers
        `prefill_worker_idx`; and `completed`. They are looked at here and not kept.

    Attributes
    ----------
    interval_ms : float
        Width of a bin.
    start_ms, end_ms : ndarray of float64, shape (bins,)
        The bins; the last one ends with the replay.
    workers : list of str
        Names of the workers.
    series : dict of ndarray of float64, shape (workers, bins)
        See `SERIES`; NaN where a ratio has no denominator.
    router_queue : ndarray of float64, shape (bins,)
        Requests that the router kept back, mean over the time.
    shared : dict of ndarray of float64, shape (bins,)
        See `SHARED`; what there is in tiers of KV offload that all workers share.
    passes : dict of ndarray or None
        The pass log, see `Recorder.passes`.
    sampling : (float, int)
        Width of the windows of the pass log in ms, and every how many-th was kept.
    """

    def __init__(self, recorder: Recorder, pools: list[str], capacity: NDArray[np.int64], end_ms: float,
                 requests: Mapping[str, NDArray[Any]], *, log: bool) -> None:
        recorder.raise_error()
        end_ms = recorder.finish(len(pools), end_ms)
        self.interval_ms = recorder.width_ms
        bins = max(math.ceil(end_ms / self.interval_ms), 1)
        cells, queued = recorder.sums(bins)
        self.start_ms: FloatArray = np.arange(bins, dtype=np.float64) * self.interval_ms
        self.end_ms: FloatArray = np.minimum(self.start_ms + self.interval_ms, end_ms)
        self.pools = pools
        self.capacity = capacity
        counts: dict[str, int] = {}
        self.workers = []
        for pool in pools:
            number = counts[pool] = counts.get(pool, -1) + 1
            self.workers.append(f"worker {number}" if pool == "aggregated" else f"{pool} {number}")
        spans: FloatArray = np.maximum(self.end_ms - self.start_ms, 1e-9)
        sums = dict(zip(CELL_FIELDS, cells, strict=True))
        self.router_queue: FloatArray = np.divide(queued[:bins], spans)
        self.shared: dict[str, FloatArray] = {
            f"kv_{tier}_blocks": sums[:bins] / spans for tier, sums in recorder.below().items()}
        self.series: dict[str, FloatArray] = {
            "running": sums["running"] / spans, "waiting": sums["waiting"] / spans,
            "kv_used_blocks": sums["used"] / spans, "kv_cached_blocks": sums["cached"] / spans,
            "kv_host_blocks": sums["host"] / spans,
            "kv_usage": sums["used"] / spans / np.maximum(capacity, 1)[:, None], "busy": sums["busy"] / spans,
            "passes": sums["passes"], "batch_tokens": sums["batch_tokens"],
            "batch_tokens_per_pass": _ratio(sums["batch_tokens"], sums["passes"]),
            "prompt_tokens": sums["prompt_tokens"], "output_tokens": sums["output_tokens"],
            "preemptions": sums["preemptions"]}
        self.series.update(self._of_requests(requests))
        self.passes = recorder.passes() if log else None
        self.sampling = recorder.sampling

    def _of_requests(self, requests: Mapping[str, NDArray[Any]]) -> dict[str, FloatArray]:
        """Series that follow from the requests' own times; part by part, so that memory does not grow with the run."""
        workers, bins = len(self.pools), len(self.start_ms)
        out = np.zeros((len(_OF_REQUESTS), workers, bins))
        total = len(requests["completed"])
        for start in range(0, total, _ROWS):
            part = {name: column[start:start + _ROWS] for name, column in requests.items()}
            last = worker_numbers(part["decode_worker_idx"], self.pools, "decode")
            first = worker_numbers(part["prefill_worker_idx"], self.pools, "prefill") if (
                "prefill" in self.pools) else last
            count_requests(out, self.interval_ms, first, last, part["arrival_time_ms"], part["first_admit_ms"],
                           part["last_token_ms"], part["completed"], part["input_length"],
                           part["reused_input_tokens"])
        shaped: dict[str, FloatArray] = dict(zip(_OF_REQUESTS, out, strict=True))
        shaped["cache_hit_ratio"] = _ratio(shaped["reused_prompt_tokens"], shaped["admitted_prompt_tokens"])
        return shaped

    def total(self, name: str) -> FloatArray:
        """A series over all workers: ratios of the sums, means of shares, sums of all else; shape (bins,)."""
        if name == "batch_tokens_per_pass":
            return _ratio(self.series["batch_tokens"].sum(0), self.series["passes"].sum(0))
        if name == "cache_hit_ratio":
            return _ratio(self.series["reused_prompt_tokens"].sum(0), self.series["admitted_prompt_tokens"].sum(0))
        values = self.series["kv_used_blocks" if name == "kv_usage" else name]
        if name == "output_tokens":            # a prefill worker's token is made again by the decode worker
            values = values[[pool != "prefill" for pool in self.pools]]
        total: FloatArray = values.sum(0)
        if name == "kv_usage":
            total /= max(int(self.capacity.sum()), 1)
        elif name == "busy":
            total /= len(self.pools)
        return total

    def columns(self) -> dict[str, NDArray[Any]]:
        """The series as a table with a row per bin and worker, in this order.

        Returns
        -------
        dict of ndarray, shape (bins * workers,)
            `start_ms`, `end_ms`, `worker` (its number in its pool), `pool`, the `SERIES`, and `router_queue` and what
            there is of `SHARED`, which are the same in the rows of all workers.
        """
        workers, bins = len(self.pools), len(self.start_ms)
        numbers = np.array([int(name.rpartition(" ")[2]) for name in self.workers], np.int64)
        out: dict[str, NDArray[Any]] = {
            "start_ms": np.repeat(self.start_ms, workers), "end_ms": np.repeat(self.end_ms, workers),
            "worker": np.tile(numbers, bins), "pool": np.tile(np.array(self.pools, object), bins)}
        out.update((name, self.series[name].T.ravel()) for name in SERIES)
        out["router_queue"] = np.repeat(self.router_queue, workers)
        out.update((name, np.repeat(values, workers)) for name, values in self.shared.items())
        return out


def _ratio(above: FloatArray, below: FloatArray) -> FloatArray:
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def worker_numbers(index: NDArray[Any], pools: list[str], pool: str) -> NDArray[np.int64]:
    """Numbers of workers in a timeline from their numbers in a pool, -1 for none; "decode" is also "aggregated".

    In a run of one worker nobody says which it was.
    """
    if len(pools) == 1:
        return np.zeros(len(index), np.int64)
    of_pool = [w for w, name in enumerate(pools) if name == pool or (pool == "decode" and name == "aggregated")]
    numbers: NDArray[np.int64] = np.array([*of_pool, -1], np.int64)[np.maximum(index, -1)]
    return numbers
