# cython: language_level=3
"""Where results go: a row per request, and the gaps between tokens as (value, weight) pairs.

Answers to `replay/collector.rs`. All requests that make a token in two consecutive passes of a worker share one
gap, so the log grows with the passes that differ, not with the tokens; percentiles of it are exact.
"""
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from libc.math cimport NAN, fma
from libc.stdint cimport INT64_MAX
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from fractions import Fraction

import numpy as np

from mocker._common cimport ERR_MEMORY, grown_both, int8_t, int64_t
from mocker._distribution cimport (
    FINE_BINS, Described, fine_value, log_described, mapping, summary_add, summary_free, summary_new, summary_sketch)
from mocker._pages cimport large_pages
from mocker._select cimport bits_of

cdef enum:
    CHUNK = 32768                  # entries of the gap log that are folded into its summary at a time
    ROW = 7 * 8 + 1                # bytes of a request
    COARSE_BINS = 4096             # of a histogram: 64 powers of two, 64 bins each
    LONG = 65536                   # entries of a log that has turned out to be long
    RESERVE = 4500000              # then it has room for so many: memory only once they are used, and never copied


TIMES = ("first_admit_ms", "first_token_ms", "ttst_ms", "last_token_ms")
COUNTS = ("output_tokens", "reused_input_tokens", "first_reused_input_tokens")


cdef inline int64_t coarse_bin(double gap, int64_t first) noexcept nogil:
    """From the exponent and the upper 6 bits of the fraction."""
    return min(max(<int64_t>(bits_of(gap) >> 46) - first, 0), COARSE_BINS - 1)


cdef inline int64_t fold_step(Gaps* g) noexcept nogil:
    return min(CHUNK, g.most) if g.most > 0 else CHUNK


cdef void gaps_fold(Gaps* g) noexcept nogil:
    """Fold all entries but the newest, which may still grow, into the summary; drop them if there are too many."""
    cdef int64_t folded
    if g.summary == NULL:
        g.summary = summary_new()
    if g.summary == NULL:
        g.error = ERR_MEMORY
        return
    folded = 0 if g.summary.fine != NULL else g.summary.folded
    summary_add(g.summary, g.values + folded, g.weights + folded, g.used - 1 - folded)
    if g.most > 0 and (g.used > g.most or g.summary.fine != NULL):
        if g.summary.fine == NULL and not summary_sketch(g.summary, g.values, g.weights):
            g.error = ERR_MEMORY
            return
        g.values[0], g.weights[0] = g.values[g.used - 1], g.weights[g.used - 1]
        g.used = 1
    g.fold_at = g.used + fold_step(g)


cdef bint gaps_room(Gaps* g) noexcept nogil:
    """Make room for an entry, and fold what has gathered; false if memory is short."""
    cdef int64_t need
    if g.fold_at == 0:
        g.fold_at = fold_step(g) + 1
    if g.used >= g.fold_at:
        gaps_fold(g)
    if g.used >= g.cap:
        need = g.used + 1
        if g.cap >= LONG and (g.fold_at < INT64_MAX or g.share > 0):
            need = max(need, RESERVE // max(g.share, 1))
        if not grown_both(<void**>&g.values, sizeof(double), <void**>&g.weights, sizeof(int64_t), &g.cap, need):
            g.error = ERR_MEMORY
            return False
        if g.cap >= RESERVE // max(g.share, 1):
            large_pages(g.values, g.cap * sizeof(double))
            large_pages(g.weights, g.cap * sizeof(int64_t))
    g.room = min(g.cap, g.fold_at)
    return True


cdef void gaps_between(Gaps* g, const double* times, int64_t count, int64_t weight) noexcept nogil:
    """`gaps_add` of the `count` gaps between times in a row, which all weigh alike."""
    cdef int64_t i = 0, k, most
    cdef double last, gap
    cdef double* to
    cdef int64_t* weights
    while i < count:
        if g.used >= g.room and not gaps_room(g):
            return
        to, weights, most = g.values + g.used, g.weights + g.used, min(count - i, g.room - g.used)
        last = g.values[g.used - 1] if g.used > 0 else 0.0
        k, gap = 0, 0.0
        while k < most:
            gap = times[i + 1] - times[i]
            i += 1
            if not (gap > 0.0) or gap == last:
                break
            last = to[k] = gap
            weights[k] = weight
            k += 1
        g.used += k
        if k < most:
            gaps_add(g, gap, weight)


cdef void gaps_join(Gaps* g, Gaps* other) noexcept nogil:
    """Add a log that was not folded, as entry by entry: only the first may be like the last before it."""
    cdef int64_t i = 1, n
    if other.used > 0:
        gaps_add(g, other.values[0], other.weights[0])
    while i < other.used:
        if g.used >= g.room and not gaps_room(g):
            return
        n = min(other.used - i, g.room - g.used)
        memcpy(g.values + g.used, other.values + i, n * sizeof(double))
        memcpy(g.weights + g.used, other.weights + i, n * sizeof(int64_t))
        g.used += n
        i += n
    g.zeros += other.zeros
    g.error = g.error or other.error


cdef bint settled(Gaps* g) noexcept nogil:
    """Move the counted zeros into the log; false if memory is short."""
    if g.zeros > 0:
        gaps_append(g, 0.0, g.zeros)
        if g.error:
            return False
        g.zeros = 0
    return True


cdef bint log_describe(Gaps* g, Described* gap, Described* rate) noexcept nogil:
    """What is said of a log and of 1000 / value over its values above 0; false if memory is short.

    The same, to the last bit, whether it was folded on the way or kept whole.
    """
    return settled(g) and log_described(g.summary, g.values, g.weights, g.used, fold_step(g), gap, rate)


cdef tuple log_statistics(Gaps* g):
    """The same as two dicts."""
    cdef Described gap, rate
    if not log_describe(g, &gap, &rate):
        raise MemoryError
    return mapping(&gap), mapping(&rate)


cdef class Collector:
    """Columns for `n` requests and their gap log.

    With `blank` False what is in the columns is undefined: they are about to be written.
    """

    def __cinit__(self, int64_t n, bint blank=True):
        cdef int64_t i
        cdef double* times
        self.n = n
        self.memory = PyByteArray_FromStringAndSize(NULL, n * ROW + 8)
        times = <double*>PyByteArray_AS_STRING(self.memory)
        self.rows.first_admit, self.rows.first_token = times, times + n
        self.rows.second_gap, self.rows.last_token = times + 2 * n, times + 3 * n
        self.rows.tokens = <int64_t*>(times + 4 * n)
        self.rows.reused, self.rows.first_reused = self.rows.tokens + n, self.rows.tokens + 2 * n
        self.rows.terminal = <int8_t*>(self.rows.tokens + 3 * n)
        for i in range(4 * n if blank else 0):
            times[i] = NAN
        if blank:
            memset(self.rows.tokens, 0, 3 * n * sizeof(int64_t))
        memset(self.rows.terminal, 0, n)

    @property
    def columns(self):
        """Dict of the columns as NumPy arrays, which show what is written."""
        cdef int64_t n = self.n, at = 0
        if self.known is None:
            self.known = {}
            for names, kind in ((TIMES, np.float64), (COUNTS, np.int64), (("terminal",), np.int8)):
                for name in names:
                    self.known[name] = np.frombuffer(self.memory, kind, n, at)
                    at += self.known[name].nbytes
        return self.known

    cdef int point(self, dict columns, int64_t n) except -1:
        """Write to these columns of `n` rows from now on."""
        cdef double[::1] reals
        cdef int64_t[::1] counts
        cdef int8_t[::1] ends
        if n > 0:
            reals = columns["first_admit_ms"]
            self.rows.first_admit = &reals[0]
            reals = columns["first_token_ms"]
            self.rows.first_token = &reals[0]
            reals = columns["ttst_ms"]
            self.rows.second_gap = &reals[0]
            reals = columns["last_token_ms"]
            self.rows.last_token = &reals[0]
            counts = columns["output_tokens"]
            self.rows.tokens = &counts[0]
            counts = columns["reused_input_tokens"]
            self.rows.reused = &counts[0]
            counts = columns["first_reused_input_tokens"]
            self.rows.first_reused = &counts[0]
            ends = columns["terminal"]
            self.rows.terminal = &ends[0]
        self.known, self.n, self.memory = columns, n, None
        return 0

    def __dealloc__(self):
        free(self.gaps.values)
        free(self.gaps.weights)
        summary_free(self.gaps.summary)

    def keep_gaps(self, int64_t entries):
        """Keep at most about so many entries of the gap log (16 bytes each); beyond them percentiles are sketched.

        Then percentiles are within 2**-13 of themselves; counts, means, extremes and deviations stay exact.
        """
        if entries < 1:
            raise ValueError(f"entries must be at least 1, got {entries}")
        self.gaps.most = entries

    @property
    def sketched(self):
        """Whether entries of the gap log were dropped."""
        return self.gaps.summary != NULL and self.gaps.summary.fine != NULL

    def gap_log(self):
        """Copies of the gap log; of a sketched one the middles of its bins.

        Returns
        -------
        values : ndarray of float64, shape (k,)
            Gaps, ms.
        weights : ndarray of int64, shape (k,)
            How many requests had each.
        """
        cdef int64_t i, n = 0, bins = FINE_BINS if self.sketched else 0
        if not settled(&self.gaps):
            raise MemoryError
        values = np.empty(self.gaps.used + bins, np.float64)
        weights = np.empty(self.gaps.used + bins, np.int64)
        cdef double[::1] v = values
        cdef int64_t[::1] w = weights
        for i in range(bins):
            if self.gaps.summary.fine[i] > 0:
                v[n], w[n] = fine_value(i), self.gaps.summary.fine[i]
                n += 1
        if self.gaps.used:
            memcpy(&v[n], self.gaps.values, self.gaps.used * sizeof(double))
            memcpy(&w[n], self.gaps.weights, self.gaps.used * sizeof(int64_t))
        return values[:n + self.gaps.used], weights[:n + self.gaps.used]

    def gap_statistics(self):
        """Distributions of the gaps and of their rates, straight from the log.

        Returns
        -------
        tuple of dict
            Statistics of the gaps (ms) and of 1000 / gap over the gaps above 0, as `weighted_statistics` gives them.
        """
        return log_statistics(&self.gaps)

    def gap_histogram(self):
        """The gaps counted in bins of about 1 %.

        Returns
        -------
        upper : ndarray of float64, shape (k,)
            Upper ends of the bins that are not empty, ms, rising; 0 for gaps below 2**-20 ms.
        weights : ndarray of int64, shape (k,)
            Gaps in each.
        """
        cdef int64_t i, first = bits_of(2.0 ** -20) >> 46
        if not settled(&self.gaps):
            raise MemoryError
        bins = np.zeros(COARSE_BINS, np.int64)
        cdef int64_t[::1] b = bins
        for i in range(FINE_BINS if self.sketched else 0):
            if self.gaps.summary.fine[i] > 0:
                b[coarse_bin(fine_value(i), first)] += self.gaps.summary.fine[i]
        for i in range(self.gaps.used):
            b[coarse_bin(self.gaps.values[i], first)] += self.gaps.weights[i]
        filled = np.flatnonzero(bins)
        upper = ((filled + (first + 1)).astype(np.uint64) << np.uint64(46)).view(np.float64)
        return np.where(filled == 0, 0.0, upper), bins[filled]

    def gaps_above(self, double bound):
        """Gaps over a bound so far, at least, and the sum of all: ``(count, sum in ms)``.

        Of a sketched log, those that are certain to be over it.
        """
        cdef int64_t i, above = 0
        cdef double total = 0.0
        cdef bint sketched = self.sketched
        with nogil:
            for i in range(self.gaps.used):
                if self.gaps.values[i] > bound:
                    above += self.gaps.weights[i]
                total += self.gaps.values[i] * <double>self.gaps.weights[i]
            if sketched:
                total += self.gaps.summary.gap.sum
                for i in range(FINE_BINS):
                    if fine_value(i) > bound * (1.0 + 2.0 ** -12):
                        above += self.gaps.summary.fine[i]
        return above, total


cdef inline void add_exactly(double* total, double* lost, double value) noexcept nogil:
    """Add to a sum, and what rounding takes from it to `lost` (Knuth)."""
    cdef double before = total[0], now = before + value, part = now - before
    lost[0] += (before - (now - part)) + (value - part)
    total[0] = now


cdef class SampleLog:
    """Samples >= 0 that come bit by bit, and their distribution.

    Parameters
    ----------
    most : int or None
        Samples to keep (16 bytes each); beyond them percentiles are sketched, as of `Collector.keep_gaps`. None: all.

    Sums are kept in two doubles each, so that the order of the samples does not show in the mean and the deviation.
    """

    def __cinit__(self, most=None):
        self.gaps.most = 0 if most is None else most

    def __dealloc__(self):
        free(self.gaps.values)
        free(self.gaps.weights)
        summary_free(self.gaps.summary)

    @property
    def sketched(self):
        """Whether samples were dropped."""
        return self.gaps.summary != NULL and self.gaps.summary.fine != NULL

    def add(self, const double[::1] values):
        """Add samples."""
        cdef int64_t i
        cdef double square
        with nogil:
            for i in range(values.shape[0]):
                gaps_add(&self.gaps, values[i], 1)
                square = values[i] * values[i]
                add_exactly(&self.sums[0], &self.sums[1], values[i])
                add_exactly(&self.squares[0], &self.squares[1], square)
                self.squares[1] += fma(values[i], values[i], -square)
            self.count += values.shape[0]
        if self.gaps.error:
            raise MemoryError

    def statistics(self):
        """Statistics as `mocker._distribution.statistics` gives them."""
        found = log_statistics(&self.gaps)[0]
        if self.count:
            mean = (Fraction(self.sums[0]) + Fraction(self.sums[1])) / self.count
            square = (Fraction(self.squares[0]) + Fraction(self.squares[1])) / self.count
            found["mean"], found["std"] = float(mean), max(float(square - mean * mean), 0.0) ** 0.5
        return found
