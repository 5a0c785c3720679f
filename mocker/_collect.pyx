# cython: language_level=3
"""Where results go: a row per request, and the gaps between tokens as (value, weight) pairs.

Answers to `replay/collector.rs`. All requests that make a token in two consecutive passes of a worker share one
gap, so the log grows with the passes that differ, not with the tokens; percentiles of it are exact.
"""
from libc.math cimport NAN, round, sqrt
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

import numpy as np

from mocker._common cimport ERR_MEMORY, grown, int8_t, int64_t, uint64_t

PERCENTILES = (("median", 50), ("p75", 75), ("p90", 90), ("p95", 95), ("p99", 99))
cdef enum:
    RANKS = 10                     # percentiles of the gaps and of their rates
    BLOCK = 256                    # terms that are summed before a compensated addition

STATISTICS = ("mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std")


cdef void gaps_add(Gaps* g, double value, int64_t weight) noexcept nogil:
    """Add `weight` gaps of `value` ms (negative ones count as 0)."""
    if not (value > 0.0):
        g.zeros += weight
        return
    if g.used > 0 and g.values[g.used - 1] == value:
        g.weights[g.used - 1] += weight
    else:
        gaps_append(g, value, weight)


cdef bint gaps_grow(Gaps* g) noexcept nogil:
    cdef int64_t cap = g.cap
    cdef void* moved = grown(g.values, &cap, g.used + 1, sizeof(double))
    if moved == NULL:
        g.error = ERR_MEMORY
        return False
    g.values = <double*>moved
    cap = g.cap
    moved = grown(g.weights, &cap, g.used + 1, sizeof(int64_t))
    if moved == NULL:
        g.error = ERR_MEMORY
        return False
    g.weights = <int64_t*>moved
    g.cap = cap
    return True


cdef inline void gaps_append(Gaps* g, double value, int64_t weight) noexcept nogil:
    if g.used == g.cap and not gaps_grow(g):
        return
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
        self.settle()
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
        self.settle()
        return _weighted(self.gaps.values, self.gaps.weights, self.gaps.used)

    def gap_histogram(self):
        """The gaps counted in bins of about 1 %.

        Returns
        -------
        upper : ndarray of float64, shape (k,)
            Upper ends of the bins that are not empty, ms, rising; 0 for gaps below 2**-20 ms.
        weights : ndarray of int64, shape (k,)
            Gaps in each.
        """
        cdef int64_t i, k, first = bits_of(2.0 ** -20) >> 46
        self.settle()
        bins = np.zeros(4096, np.int64)        # 64 powers of two, 64 bins each
        cdef int64_t[::1] b = bins
        for i in range(self.gaps.used):        # the exponent and the upper 6 bits of the fraction
            k = <int64_t>(bits_of(self.gaps.values[i]) >> 46) - first
            b[min(max(k, 0), 4095)] += self.gaps.weights[i]
        filled = np.flatnonzero(bins)
        upper = ((filled + (first + 1)).astype(np.uint64) << np.uint64(46)).view(np.float64)
        return np.where(filled == 0, 0.0, upper), bins[filled]

    def gaps_above(self, double bound):
        """Gaps over a bound so far, and the sum of all: ``(count, sum in ms)``."""
        cdef int64_t i, above = 0
        cdef double total = 0.0
        with nogil:
            for i in range(self.gaps.used):
                if self.gaps.values[i] > bound:
                    above += self.gaps.weights[i]
                total += self.gaps.values[i] * <double>self.gaps.weights[i]
        return above, total

    cdef int settle(self) except -1:
        """Move the counted zeros into the log."""
        if self.gaps.zeros > 0:
            gaps_append(&self.gaps, 0.0, self.gaps.zeros)
            if self.gaps.error:
                raise MemoryError
            self.gaps.zeros = 0
        return 0


cdef inline uint64_t bits_of(double value) noexcept nogil:
    """Bits of a non-negative float; they order like the float."""
    return (<uint64_t*>&value)[0]


cdef struct Moments:               # of one weighted multiset
    int64_t total
    double low
    double high
    double sum                     # of blocks, compensated
    double lost


cdef inline void moments_add(Moments* m, double part) noexcept nogil:
    """Add the sum of a block."""
    cdef double y = part - m.lost, t = m.sum + y
    m.lost = (t - m.sum) - y
    m.sum = t


cdef void first_moments(double* values, int64_t* weights, int64_t n, Moments* gap, Moments* rate,
                        int64_t* bins) noexcept nogil:
    """Counts, extremes and sums of values and of 1000 / value above 0; weights by the upper 16 bits into `bins`."""
    cdef int64_t i = 0, stop, at, here = -1, held = 0
    cdef double x, y, w, sums, rates
    while i < n:
        stop = i + BLOCK if i + BLOCK < n else n
        sums = rates = 0.0
        while i < stop:
            x, w = values[i], <double>weights[i]
            gap.total += weights[i]
            sums += x * w
            if not (x >= gap.low):
                gap.low = x
            if not (x <= gap.high):
                gap.high = x
            if x > 0.0:
                y = 1000.0 / x
                rate.total += weights[i]
                rates += y * w
                if not (y >= rate.low):
                    rate.low = y
                if not (y <= rate.high):
                    rate.high = y
            at = <int64_t>(bits_of(x) >> 48)
            if at == here:
                held += weights[i]
            else:
                if here >= 0:
                    bins[here] += held
                here, held = at, weights[i]
            i += 1
        moments_add(gap, sums)
        moments_add(rate, rates)
    if here >= 0:
        bins[here] += held


cdef void second_moments(double* values, int64_t* weights, int64_t n, double mean, double rate_mean, Moments* gap,
                         Moments* rate) noexcept nogil:
    """Sums of squared distances from the means."""
    cdef int64_t i = 0, stop
    cdef double x, y, w, sums, rates
    while i < n:
        stop = i + BLOCK if i + BLOCK < n else n
        sums = rates = 0.0
        while i < stop:
            w = <double>weights[i]
            x = values[i] - mean
            sums += x * x * w
            if values[i] > 0.0:
                y = 1000.0 / values[i] - rate_mean
                rates += y * y * w
            i += 1
        moments_add(gap, sums)
        moments_add(rate, rates)


cdef double select(double* values, int64_t* weights, int64_t n, uint64_t prefix, int64_t rank,
                   int64_t* bins) noexcept nogil:
    """Value at 0-based `rank` of those whose upper 28 bits are `prefix`; `bins` has 4096 places."""
    cdef uint64_t b
    cdef int64_t i, k
    cdef int shift = 24
    cdef double found
    while True:
        for i in range(4096):
            bins[i] = 0
        for i in range(n):
            b = bits_of(values[i])
            if b >> (shift + 12) == prefix:
                bins[(b >> shift) & 0xFFF] += weights[i]
        k = 0
        while rank >= bins[k]:
            rank -= bins[k]
            k += 1
        prefix = (prefix << 12) | <uint64_t>k
        if shift == 0:
            (<uint64_t*>&found)[0] = prefix
            return found
        shift -= 12


cdef bint select_all(double* values, int64_t* weights, int64_t n, int64_t* bins, const int64_t* ranks, int count,
                     double* found) noexcept nogil:
    """Values at `count` rising ranks of a weighted multiset; False if memory is short.

    `bins` has the weights by the upper 16 bits and room for 4096 more a rank. Three passes over the values, however
    many ranks: the second counts by 12 more bits where a rank falls, the third picks what shares those, few as a rule.
    """
    cdef int64_t i, k = 0, below = 0, m = 0, cap = 0, weights_cap = 0
    cdef int64_t* fine = bins + 65536
    cdef int64_t[RANKS] left               # rank inside its group, then inside its picked prefix
    cdef int64_t[RANKS] group              # upper 16 bits
    cdef uint64_t[RANKS] prefix            # upper 28 bits
    cdef int j, groups = 0
    cdef uint64_t b
    cdef void* moved
    cdef double* picked = NULL
    cdef int64_t* picked_weights = NULL
    cdef int8_t* place = <int8_t*>calloc(65536 + RANKS * 4096, 1)   # upper 16 bits -> group + 1; then: picked or not
    if place == NULL:
        return False
    for j in range(count):
        while ranks[j] - below >= bins[k]:
            below += bins[k]
            k += 1
        left[j], group[j] = ranks[j] - below, k
        if place[k] == 0:
            groups += 1
            place[k] = <int8_t>groups
    memset(fine, 0, groups * 4096 * sizeof(int64_t))
    for i in range(n):
        b = bits_of(values[i])
        if place[b >> 48]:
            fine[(place[b >> 48] - 1) * 4096 + <int64_t>((b >> 36) & 0xFFF)] += weights[i]
    for j in range(count):
        k = (place[group[j]] - 1) * 4096
        while left[j] >= fine[k]:
            left[j] -= fine[k]
            k += 1
        place[65536 + k] = 1
        prefix[j] = (<uint64_t>group[j] << 12) | <uint64_t>(k & 0xFFF)
    for i in range(n):
        b = bits_of(values[i])
        if place[b >> 48] and place[65536 + (place[b >> 48] - 1) * 4096 + <int64_t>((b >> 36) & 0xFFF)]:
            if m == cap:
                moved = grown(picked, &cap, m + 1, sizeof(double))
                if moved != NULL:
                    picked = <double*>moved
                    moved = grown(picked_weights, &weights_cap, m + 1, sizeof(int64_t))
                if moved == NULL:
                    free(picked)
                    free(picked_weights)
                    free(place)
                    return False
                picked_weights = <int64_t*>moved
            picked[m], picked_weights[m] = values[i], weights[i]
            m += 1
    for j in range(count):
        found[j] = select(picked, picked_weights, m, prefix[j], left[j], fine)
    free(picked)
    free(picked_weights)
    free(place)
    return True


cdef int64_t nearest_rank(int64_t total, int percent) noexcept nogil:
    """Rank of a percentile (rule: `percentile_rank`, halves away from zero)."""
    return <int64_t>round(<double>(total - 1) * <double>percent / 100.0)


def nearest_rank_of(int64_t total, int percent):
    """0-based rank of a percentile among `total` samples."""
    return nearest_rank(total, percent)


cdef tuple _weighted(double* values, int64_t* weights, int64_t n):
    """Statistics of a weighted multiset of values >= 0, and of 1000 / value over those above 0.

    Percentiles by radix selection: see `select_all`.
    """
    cdef int64_t i
    cdef int64_t[RANKS] ranks
    cdef double[RANKS] found
    cdef double mean, rate_mean, spread = 0.0, rate_spread = 0.0
    cdef Moments gap = Moments(0, NAN, NAN, 0.0, 0.0), rate = Moments(0, NAN, NAN, 0.0, 0.0)
    cdef Moments second, rate_second
    cdef int64_t* bins
    cdef bint enough
    if n == 0:
        return {"samples": 0}, {"samples": 0}
    bins = <int64_t*>calloc(65536 + RANKS * 4096, sizeof(int64_t))
    try:
        if bins == NULL:
            raise MemoryError
        with nogil:
            first_moments(values, weights, n, &gap, &rate, bins)
            mean = gap.sum / <double>gap.total
            rate_mean = rate.sum / <double>rate.total if rate.total else 0.0
            second = rate_second = Moments(0, 0.0, 0.0, 0.0, 0.0)
            second_moments(values, weights, n, mean, rate_mean, &second, &rate_second)
            spread = sqrt(second.sum / <double>gap.total)
            if rate.total:
                rate_spread = sqrt(rate_second.sum / <double>rate.total)
        gaps = {"samples": gap.total, "mean": mean, "min": gap.low, "max": gap.high, "std": spread}
        rates = {"samples": rate.total}
        if rate.total:
            rates.update(mean=rate_mean, min=rate.low, max=rate.high, std=rate_spread)
        wanted = [(nearest_rank(gap.total, p), gaps, name) for name, p in PERCENTILES]
        if rate.total:                         # 1000 / x turns the order round
            wanted += [(gap.total - 1 - nearest_rank(rate.total, p), rates, name) for name, p in PERCENTILES]
        wanted.sort(key=lambda item: item[0])
        for i, item in enumerate(wanted):
            ranks[i] = item[0]
        i = len(wanted)
        with nogil:
            enough = select_all(values, weights, n, bins, ranks, <int>i, found)
        if not enough:
            raise MemoryError
        for i, (_, out, name) in enumerate(wanted):
            out[name] = found[i] if out is gaps else 1000.0 / found[i]
        return gaps, rates
    finally:
        free(bins)


def weighted_statistics(values, weights, bint rates=False):
    """Mean, extremes, nearest-rank percentiles and population deviation of a weighted multiset.

    Parameters
    ----------
    values : array_like of float64, shape (n,)
        Not negative.
    weights : array_like of int64, shape (n,)
        How often each occurs.
    rates : bool
        Over 1000 / value of the values above 0 instead.

    Returns
    -------
    dict
        `samples` and, if that is not 0, the keys of `STATISTICS`. Percentile p is the element at rank
        round((n - 1) * p / 100), halves up, of the sorted multiset (rule: `build_distribution_stats`).
    """
    cdef double[::1] v = np.ascontiguousarray(values, np.float64)
    cdef int64_t[::1] w = np.ascontiguousarray(weights, np.int64)
    if len(w) != len(v):
        raise ValueError(f"weights has {len(w)} elements, values has {len(v)}")
    if len(v) == 0:
        return {"samples": 0}
    return _weighted(&v[0], &w[0], len(v))[rates]


def statistics(values):
    """The same of values that occur once each (float64, shape (n,)); any sign."""
    cdef int64_t n = len(values)
    if n == 0:
        return {"samples": 0}
    ranks = [nearest_rank(n, p) for _, p in PERCENTILES]
    mean = values.sum() / n
    centred = values - mean
    ordered = np.partition(values, ranks)
    result = {"samples": n, "mean": mean, "min": values.min(), "max": values.max(),
              "std": sqrt(np.dot(centred, centred) / n)}
    for (name, _), rank in zip(PERCENTILES, ranks):
        result[name] = ordered[rank]
    return result
