# cython: language_level=3
"""Where results go: a row per request, and the gaps between tokens as (value, weight) pairs.

Answers to `replay/collector.rs`. All requests that make a token in two consecutive passes of a worker share one
gap, so the log grows with the passes that differ, not with the tokens; percentiles of it are exact.
"""
from libc.math cimport NAN, round, sqrt
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import numpy as np

from mocker._common cimport ERR_MEMORY, grown, int8_t, int32_t, int64_t, uint64_t

PERCENTILES = (("median", 50), ("p75", 75), ("p90", 90), ("p95", 95), ("p99", 99))
STATISTICS = ("mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std")


cdef void gaps_add(Gaps* g, double value, int64_t weight) noexcept nogil:
    """Add `weight` gaps of `value` ms (negative ones count as 0)."""
    cdef int64_t cap
    cdef void* moved
    if not (value > 0.0):
        value = 0.0
    if g.used > 0 and g.values[g.used - 1] == value:
        g.weights[g.used - 1] += weight
        return
    if g.used == g.cap:
        cap = g.cap
        moved = grown(g.values, &cap, g.used + 1, sizeof(double))
        if moved == NULL:
            g.error = ERR_MEMORY
            return
        g.values = <double*>moved
        cap = g.cap
        moved = grown(g.weights, &cap, g.used + 1, sizeof(int64_t))
        if moved == NULL:
            g.error = ERR_MEMORY
            return
        g.weights = <int64_t*>moved
        g.cap = cap
    g.values[g.used] = value
    g.weights[g.used] = weight
    g.used += 1


cdef class Collector:
    """Columns for `n` requests and their gap log; the columns are NumPy arrays in `columns`."""

    def __cinit__(self, int64_t n):
        cdef double[::1] first_admit = np.full(n, np.nan)
        cdef double[::1] first_token = np.full(n, np.nan)
        cdef double[::1] second_gap = np.full(n, np.nan)
        cdef double[::1] last_token = np.full(n, np.nan)
        cdef int64_t[::1] tokens = np.zeros(n, np.int64)
        cdef int64_t[::1] reused = np.zeros(n, np.int64)
        cdef int64_t[::1] first_reused = np.zeros(n, np.int64)
        cdef int8_t[::1] terminal = np.zeros(n, np.int8)
        self.n = n
        self.columns = {
            "first_admit_ms": first_admit.base, "first_token_ms": first_token.base, "ttst_ms": second_gap.base,
            "last_token_ms": last_token.base, "output_tokens": tokens.base, "reused_input_tokens": reused.base,
            "first_reused_input_tokens": first_reused.base, "terminal": terminal.base,
        }
        if n > 0:
            self.rows.first_admit, self.rows.first_token = &first_admit[0], &first_token[0]
            self.rows.second_gap, self.rows.last_token = &second_gap[0], &last_token[0]
            self.rows.tokens, self.rows.reused = &tokens[0], &reused[0]
            self.rows.first_reused, self.rows.terminal = &first_reused[0], &terminal[0]

    def __dealloc__(self):
        free(self.gaps.values)
        free(self.gaps.weights)

    def gap_log(self):
        """Copies of the gap log.

        Returns
        -------
        values : ndarray of float64, shape (k,)
            Gaps, ms.
        weights : ndarray of int64, shape (k,)
            How many requests had each.
        """
        values = np.empty(self.gaps.used, np.float64)
        weights = np.empty(self.gaps.used, np.int64)
        cdef double[::1] v = values
        cdef int64_t[::1] w = weights
        if self.gaps.used:
            memcpy(&v[0], self.gaps.values, self.gaps.used * sizeof(double))
            memcpy(&w[0], self.gaps.weights, self.gaps.used * sizeof(int64_t))
        return values, weights

    def gap_statistics(self):
        """Distributions of the gaps and of their rates, straight from the log.

        Returns
        -------
        tuple of dict
            Statistics of the gaps (ms) and of 1000 / gap over the gaps above 0, as `weighted_statistics` gives them.
        """
        return (_weighted(self.gaps.values, self.gaps.weights, self.gaps.used, False),
                _weighted(self.gaps.values, self.gaps.weights, self.gaps.used, True))


cdef inline uint64_t bits_of(double value) noexcept nogil:
    """Bits of a non-negative float; they order like the float."""
    return (<uint64_t*>&value)[0]


cdef double select(double* values, int64_t* weights, int64_t n, int64_t rank, double above) noexcept nogil:
    """Value at 0-based `rank` of the weighted multiset of values > `above` (all >= 0), by radix selection."""
    cdef int64_t* bins = <int64_t*>calloc(65536, sizeof(int64_t))
    cdef uint64_t prefix = 0, b
    cdef int64_t i, k
    cdef int shift = 48
    cdef double found = NAN
    if bins == NULL:
        return NAN
    while True:
        for i in range(n):
            b = bits_of(values[i])
            if values[i] > above and (shift == 48 or (b >> (shift + 16)) == prefix):
                bins[(b >> shift) & 0xFFFF] += weights[i]
        k = 0
        while k < 65536 and rank >= bins[k]:
            rank -= bins[k]
            k += 1
        prefix = (prefix << 16) | <uint64_t>k
        if shift == 0:
            break
        shift -= 16
        for i in range(65536):
            bins[i] = 0
    free(bins)
    (<uint64_t*>&found)[0] = prefix
    return found


cdef dict _weighted(double* values, int64_t* weights, int64_t n, bint rates):
    cdef int64_t i, total = 0, rank
    cdef double x, s = 0.0, c = 0.0, y, t, low = NAN, high = NAN, mean, above = 0.0 if rates else -1.0
    with nogil:
        for i in range(n):
            if values[i] > above:
                x = 1000.0 / values[i] if rates else values[i]
                total += weights[i]
                y = x * <double>weights[i] - c          # compensated: the log may be long
                t = s + y
                c = (t - s) - y
                s = t
                if not (x >= low):
                    low = x
                if not (x <= high):
                    high = x
    if total == 0:
        return {"samples": 0}
    mean = s / <double>total
    s = c = 0.0
    with nogil:
        for i in range(n):
            if values[i] > above:
                x = (1000.0 / values[i] if rates else values[i]) - mean
                y = x * x * <double>weights[i] - c
                t = s + y
                c = (t - s) - y
                s = t
    result = {"samples": total, "mean": mean, "min": low, "max": high}
    for name, percent in PERCENTILES:
        rank = <int64_t>round(<double>(total - 1) * <double>percent / 100.0)
        if rates:                                       # 1000 / x turns the order round
            rank = total - 1 - rank
        with nogil:
            x = select(values, weights, n, rank, above)
        result[name] = 1000.0 / x if rates else x
    result["std"] = sqrt(s / <double>total)
    return result


def weighted_statistics(values, weights=None, bint rates=False):
    """Mean, extremes, nearest-rank percentiles and population deviation of a weighted multiset.

    Parameters
    ----------
    values : array_like of float64, shape (n,)
        Not negative.
    weights : array_like of int64, shape (n,), optional
        How often each occurs; once by default.
    rates : bool
        Over 1000 / value of the values above 0 instead.

    Returns
    -------
    dict
        `samples` and, if that is not 0, the keys of `STATISTICS`. Percentile p is the element at rank
        round((n - 1) * p / 100), halves up, of the sorted multiset (rule: `build_distribution_stats`).
    """
    cdef double[::1] v = np.ascontiguousarray(values, np.float64)
    cdef int64_t[::1] w = np.ones(len(v), np.int64) if weights is None else np.ascontiguousarray(weights, np.int64)
    if len(w) != len(v):
        raise ValueError(f"weights has {len(w)} elements, values has {len(v)}")
    if len(v) == 0:
        return {"samples": 0}
    return _weighted(&v[0], &w[0], len(v), rates)
