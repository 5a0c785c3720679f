"""Whether the columns of a trace fit together, in one pass over the rows: what the engine relies on when it indexes.

Cost: O(rows); hash ids are not looked at, any value of them is a valid one.
"""
from libc.math cimport isinf, isnan
from libc.stdint cimport int32_t, int64_t, uint32_t

import numpy as np

REQUIRED = frozenset({
    "arrival_ms", "input_length", "output_length", "hash_offsets", "hash_ids", "line", "session", "turn", "delay_ms",
    "priority", "strict_priority", "clamped",
})
"""Columns that every trace has."""


def check_columns(
    int64_t rows, int64_t block_size, const double[::1] arrival not None, const int64_t[::1] inputs not None,
    const int64_t[::1] outputs not None, const int64_t[::1] offsets not None, int64_t ids,
    const int64_t[::1] line not None, const int32_t[::1] session not None, const int32_t[::1] turn not None,
    const double[::1] delay not None, const int32_t[::1] priority not None, const uint32_t[::1] strict not None,
):
    """Check the columns that every trace has.

    Returns
    -------
    row : int
        First row that breaks a rule, -1 if it is a matter of lengths.
    problem : str
        Column that breaks it, empty if all is well.
    """
    cdef int64_t row, n = rows
    cdef int32_t sessions = 0, s
    cdef int problem = 0
    for name, length in (("arrival_ms", arrival.shape[0]), ("input_length", inputs.shape[0]),
                         ("output_length", outputs.shape[0]), ("hash_offsets", offsets.shape[0] - 1),
                         ("line", line.shape[0]), ("session", session.shape[0]), ("turn", turn.shape[0]),
                         ("delay_ms", delay.shape[0]), ("priority", priority.shape[0]),
                         ("strict_priority", strict.shape[0])):
        if length != n:
            return -1, name
    if offsets[0] != 0 or offsets[n] != ids:
        return -1, "hash_offsets"
    turns_of = np.zeros(max(n, 1), np.int32)
    cdef int32_t[::1] turns = turns_of      # rows seen of each session
    with nogil:
        for row in range(n):
            if offsets[row + 1] <= offsets[row] or offsets[row + 1] > ids:
                problem = 1
            elif inputs[row] < 1 or (inputs[row] - 1) // block_size >= offsets[row + 1] - offsets[row]:
                problem = 2
            elif outputs[row] < 0:
                problem = 3
            elif isinf(arrival[row]):
                problem = 4
            elif isnan(delay[row]) or isinf(delay[row]) or delay[row] < 0:
                problem = 5
            else:
                s = session[row]
                if s < 0 or s > sessions:
                    problem = 6
                else:
                    sessions += s == sessions
                    if turn[row] != turns[s]:
                        problem = 7
                    turns[s] += 1
            if problem:
                break
        else:
            row = -1
    return row, ("", "hash_offsets", "input_length", "output_length", "arrival_ms", "delay_ms", "session",
                 "turn")[problem]
