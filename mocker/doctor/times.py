"""When the rows of a trace arrive, as far as the trace alone tells."""
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..trace import Trace

__all__ = ["arrival_order", "earliest_ms"]


def earliest_ms(trace: Trace) -> NDArray[np.float64]:
    """float64[n]: time stamp of each row, ms; for a turn without one, the previous turn's plus the think time.

    That is the earliest that it can arrive: answers would take no time. NaN where nothing in the session has a time.
    """
    time = trace.arrival_ms.copy()
    if trace.is_single_turn or not np.isnan(time).any():
        return time
    rows = np.lexsort((trace.turn, trace.session))
    known = ~np.isnan(time[rows])
    first = trace.turn[rows] == 0
    waited = np.cumsum(np.where(known | first, 0.0, trace.delay_ms[rows]))
    # Index (in `rows`) of the latest row with a time, or of the session's start.
    anchor = np.maximum.accumulate(np.where(known | first, np.arange(len(rows)), 0))
    time[rows] = time[rows][anchor] + (waited - waited[anchor])
    return time


def arrival_order(trace: Trace) -> NDArray[np.int64]:
    """int64[n]: rows by time, then by place in the trace; rows without any time stay behind the row before them."""
    time = earliest_ms(trace)
    missing = np.isnan(time)
    if missing.any():
        latest = np.maximum.accumulate(np.where(missing, 0, np.arange(trace.n)))
        time = np.where(missing, time[latest], time)
    return np.argsort(np.where(np.isnan(time), -np.inf, time), kind="stable").astype(np.int64)
