"""The turns of a trace's sessions, and the think times between them.

Answers to `MooncakeTraceBuilder::push` (`dynamo-mocker`, `loadgen/trace.rs`). O(rows).
"""
from libc.math cimport NAN, isfinite, isnan
from libc.stdint cimport int32_t, uint8_t

import numpy as np

cdef enum:                  # results of link_turns
    LINK_OK = 0
    LINK_FIRST_DELAY = 1
    LINK_BAD_DELAY = 2
    LINK_NO_EARLIER_TIMESTAMP = 3
    LINK_BAD_GAP = 4
    LINK_LEFT_OUT = 5

# Reasons that `link_turns` returns, by name for formats/mooncake.py.
OK = LINK_OK
FIRST_DELAY = LINK_FIRST_DELAY
BAD_DELAY = LINK_BAD_DELAY
NO_EARLIER_TIMESTAMP = LINK_NO_EARLIER_TIMESTAMP
BAD_GAP = LINK_BAD_GAP
LEFT_OUT = LINK_LEFT_OUT


def link_turns(const int32_t[::1] session not None, int32_t sessions, const double[::1] arrival_ms not None,
               double[::1] delay_ms not None, int32_t[::1] turn not None, uint8_t[::1] left_out=None):
    """Number the turns of each session and find the think time before each.

    The think time is the explicit one, else the gap between this row's timestamp and the latest one in the session
    (an arrival gap that is reused as a pause after completion), else 0.

    Parameters
    ----------
    session : int32[n]
        Session of each row, in [0, sessions).
    sessions : int
        Number of sessions.
    arrival_ms : float64[n]
        NaN = missing.
    delay_ms : float64[n]
        In: explicit think time in ms, NaN = none. Out: think time, 0 in a first turn.
    turn : int32[n]
        Out: 0-based turn in the session.
    left_out : uint8[n], optional
        In: `LEFT_OUT` for rows that do not count, `OK` for others. Out: the reason for each row that breaks a rule;
        it then does not count either, and no such row ends the call.

    Returns
    -------
    row : int
        First row that breaks a rule, or n; the rows from there on are not filled in.
    reason : int
        `OK`, `FIRST_DELAY` (a think time in a first turn), `BAD_DELAY` (negative or not finite),
        `NO_EARLIER_TIMESTAMP` (nothing to subtract from the timestamp), `BAD_GAP` (timestamps run backwards).
    """
    cdef Py_ssize_t n = session.shape[0], row
    cdef int32_t k
    cdef int reason = LINK_OK
    cdef bint marking = left_out is not None
    cdef double value
    cdef int32_t[::1] turns = np.zeros(sessions, np.int32)
    cdef double[::1] latest = np.full(sessions, NAN)
    if arrival_ms.shape[0] != n or delay_ms.shape[0] != n or turn.shape[0] != n \
            or (marking and left_out.shape[0] != n):
        raise ValueError("the columns differ in length")
    with nogil:
        for row in range(n):
            k = session[row]
            if not 0 <= k < sessions:
                with gil:
                    raise ValueError(f"session of row {row} is out of range")
            if marking and left_out[row] != LINK_OK:
                continue
            value = delay_ms[row]
            if turns[k] == 0:
                if not isnan(value) and value != 0:
                    reason = LINK_FIRST_DELAY
                value = 0
            elif not isnan(value):
                if not isfinite(value) or value < 0:
                    reason = LINK_BAD_DELAY
            elif isnan(arrival_ms[row]):
                value = 0
            elif isnan(latest[k]):
                reason = LINK_NO_EARLIER_TIMESTAMP
            else:
                value = arrival_ms[row] - latest[k]
                if not isfinite(value) or value < 0:
                    reason = LINK_BAD_GAP
            if reason != LINK_OK:
                if not marking:
                    break
                left_out[row] = reason
                reason = LINK_OK
                continue
            delay_ms[row] = value
            turn[row] = turns[k]
            turns[k] += 1
            if not isnan(arrival_ms[row]):
                latest[k] = arrival_ms[row]
        else:
            row = n
    return row, reason
