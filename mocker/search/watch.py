"""Ends a replay as soon as it is certain that a bound cannot hold any more.

Certain, not likely: the 99th percentile of n latencies is over a bound once more than n - 1 - round(0.99 (n - 1)) of
them are, whatever the others will be; a mean is, once their sum is over n times the bound. So an early end never
changes which configurations are good enough.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._distribution import PERCENTILES, nearest_rank_of
from .._live import gaps_above
from .sla import Bound

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._cluster import Cluster

_PERCENT = dict(PERCENTILES)
SLICE_PASSES = 20_000              # passes between two looks


class Hopeless(Exception):
    """A bound cannot hold any more.

    Parameters
    ----------
    bound : Bound
    ended : float
        Share of the requests that had ended by then.
    """

    def __init__(self, bound: Bound, ended: float) -> None:
        super().__init__(f"{bound.key} cannot be {bound.value:g} any more")
        self.bound, self.ended = bound, ended


def allowed_above(total: int, statistic: str) -> int:
    """How many of `total` samples may be over a bound that the statistic keeps."""
    return 0 if statistic == "max" else total - 1 - nearest_rank_of(total, _PERCENT[statistic])


class Watch:
    """Called with the cluster now and then during a replay; raises `Hopeless`.

    Parameters
    ----------
    bounds : sequence of Bound
        Those that are no upper bound of a mean, maximum or percentile of a latency are left to the report.
    """

    passes = SLICE_PASSES

    def __init__(self, bounds: Sequence[Bound]) -> None:
        self._bounds = [(bound, *bound.parts) for bound in bounds if bound.parts is not None and not bound.at_least
                        and (bound.parts[0] in _PERCENT or bound.parts[0] in ("mean", "max"))
                        and bound.parts[1] in _SAMPLES]
        self._gap_tokens: int | None = None
        self._next = 0

    def __bool__(self) -> bool:
        return bool(self._bounds)

    def __call__(self, cluster: Cluster, limit: NDArray[np.int64]) -> None:
        n = len(limit)
        if cluster.ended < self._next:         # a look costs O(requests): take it for every 64th part of them
            return
        self._next = cluster.ended + n // 64
        for bound, statistic, name in self._bounds:
            if name == "itl_ms":
                if self._gap_tokens is None:
                    self._gap_tokens = int(np.maximum(limit - 1, 0).sum())
                total = self._gap_tokens
                above, whole = gaps_above(cluster, bound.value)
            else:
                values = _SAMPLES[name](cluster)
                total = n
                above, whole = int(np.count_nonzero(values > bound.value)), float(np.nansum(np.maximum(values, 0.0)))
            if statistic == "mean":
                lost = whole > bound.value * total * (1 + 1e-9)        # sums differ in their last digits
            else:
                lost = total > 0 and above > allowed_above(total, statistic)
            if lost:
                raise Hopeless(bound, cluster.ended / n)


def _ttft(cluster: Cluster) -> NDArray[np.float64]:
    times: NDArray[np.float64] = cluster.collector.columns["first_token_ms"] - cluster.arrival_of
    return times


def _ttst(cluster: Cluster) -> NDArray[np.float64]:
    times: NDArray[np.float64] = cluster.collector.columns["ttst_ms"]
    return times


def _tpot(cluster: Cluster) -> NDArray[np.float64]:
    columns = cluster.collector.columns
    tokens = columns["output_tokens"]
    ended = (columns["terminal"] != 0) & (tokens > 1)
    whole: NDArray[np.float64] = np.where(ended, columns["last_token_ms"] - columns["first_token_ms"], np.nan)
    whole /= np.maximum(tokens - 1, 1)
    return whole


def _e2e(cluster: Cluster) -> NDArray[np.float64]:
    columns = cluster.collector.columns
    return np.where(columns["terminal"] == 1, columns["last_token_ms"] - cluster.arrival_of, np.nan)


_SAMPLES: dict[str, Callable[[Any], NDArray[np.float64]]] = {
    "ttft_ms": _ttft, "ttst_ms": _ttst, "tpot_ms": _tpot, "e2e_latency_ms": _e2e,
    "itl_ms": _ttft,               # counted in the log of gaps instead
}
