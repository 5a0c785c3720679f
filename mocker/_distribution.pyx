# cython: language_level=3
"""What a report says of a multiset of numbers: count, mean, extremes, nearest-rank percentiles, deviation.

Answers to `build_distribution_stats` in `replay/collector.rs`. Percentiles are selected, not sorted for. A log of
weighted samples is folded into a summary chunk by chunk, so that at the end it is read only for the entries of the
bins that percentiles fall into; or, where it would grow too large, not kept at all: then 4096 bins for each power of
two give percentiles within 2**-13 of themselves, everything else stays exact. Sums are compensated.
"""
from libc.math cimport INFINITY, NAN, sqrt
from libc.stdlib cimport calloc, free, malloc

import numpy as np

from mocker._common cimport int64_t, uint64_t
from mocker._select cimport bits_of, nearest_rank, select_log, select_ranks, select_weighted

PERCENTILES = (("median", 50), ("p75", 75), ("p90", 90), ("p95", 95), ("p99", 99))
STATISTICS = ("mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std")

cdef enum:
    BLOCK = 256                    # terms that are summed before a compensated addition

cdef int[N_PERCENTILES] PERCENT
PERCENT[0], PERCENT[1], PERCENT[2], PERCENT[3], PERCENT[4] = 50, 75, 90, 95, 99


# ---- moments ------------------------------------------------------------------------------------------------------

cdef void moments_start(Moments* m) noexcept nogil:
    m.total = 0
    m.low = m.high = NAN
    m.sum = m.lost = m.mean = m.squares = 0.0


cdef inline void compensated(double* total, double* lost, double part) noexcept nogil:
    """Add to a sum, and what the sum loses to rounding to `lost` (Kahan)."""
    cdef double y = part - lost[0], t = total[0] + y
    lost[0] = (t - total[0]) - y
    total[0] = t


cdef void moments_merge(Moments* m, Moments* other) noexcept nogil:
    """Add another multiset, whose mean and squares are known."""
    cdef double between, total
    if other.total == 0:
        return
    if m.total == 0:
        m[0] = other[0]
        return
    total = <double>m.total + <double>other.total
    between = other.mean - m.mean
    m.squares += other.squares + between * between * (<double>m.total * (<double>other.total / total))
    m.mean += between * (<double>other.total / total)
    m.sum += other.sum
    m.total += other.total
    m.low = min(m.low, other.low)
    m.high = max(m.high, other.high)


cdef Described described(const Moments* m, const double* at) noexcept nogil:
    """What is said of a multiset; `at` holds its percentiles."""
    cdef Described d
    cdef int i
    d.samples = m.total
    if m.total:
        d.values[0], d.values[1], d.values[2] = m.mean, m.low, m.high
        for i in range(N_PERCENTILES):
            d.values[3 + i] = at[i]
        d.values[3 + N_PERCENTILES] = sqrt(m.squares / <double>m.total)
    return d


cdef dict mapping(const Described* d):
    """The same as a dict."""
    cdef dict out = {"samples": d.samples}
    cdef int i
    for i in range(N_STATISTICS if d.samples else 0):
        out[STATISTICS[i]] = d.values[i]
    return out


# ---- plain samples ------------------------------------------------------------------------------------------------

cdef void plain(double* v, int64_t n, Moments* m, double* at, double* spare) noexcept nogil:
    """Moments and percentiles of n samples, which are used up; `spare` has room for 2 n."""
    cdef int64_t[N_PERCENTILES] ranks
    cdef int64_t i
    cdef double low, high, other_low, other_high, lost = 0.0
    moments_start(m)
    if n == 0:
        return
    low = high = other_low = other_high = v[0]
    for i in range(0, n - 1, 2):               # two chains, which do not wait for each other
        low = v[i] if v[i] < low else low
        high = v[i] if v[i] > high else high
        other_low = v[i + 1] if v[i + 1] < other_low else other_low
        other_high = v[i + 1] if v[i + 1] > other_high else other_high
    low, high = min(low, other_low, v[n - 1]), max(high, other_high, v[n - 1])
    m.total, m.low, m.high = n, low, high
    distances(v, n, 0.0, False, &m.sum, &m.lost)
    m.mean = m.sum / <double>n
    distances(v, n, m.mean, True, &m.squares, &lost)
    for i in range(N_PERCENTILES):
        ranks[i] = nearest_rank(n, PERCENT[i])
    select_ranks(v, n, low, high, ranks, N_PERCENTILES, at, spare)


cdef Described plain_described(double* v, int64_t n, double* spare) noexcept nogil:
    """What is said of n samples, which are used up; `spare` has room for 2 n."""
    cdef Moments m
    cdef double[N_PERCENTILES] at
    plain(v, n, &m, at, spare)
    return described(&m, at)


cdef inline double term(double x, double start, bint square) noexcept nogil:
    return (x - start) * (x - start) if square else x


cdef void distances(const double* v, int64_t n, double start, bint square, double* total, double* lost) noexcept nogil:
    """Sum of the samples, or of their squared distances from `start`: of each block in order, then of the blocks.

    Four blocks at a time, whose additions do not wait for each other.
    """
    cdef double a, b, c, d
    cdef int64_t i = 0, j, rest
    while i < n:
        a = b = c = d = 0.0
        if n - i > 3 * BLOCK:
            rest = min(n - i - 3 * BLOCK, BLOCK)
            for j in range(i, i + rest):
                a += term(v[j], start, square)
                b += term(v[j + BLOCK], start, square)
                c += term(v[j + 2 * BLOCK], start, square)
                d += term(v[j + 3 * BLOCK], start, square)
            for j in range(i + rest, i + BLOCK):
                a += term(v[j], start, square)
                b += term(v[j + BLOCK], start, square)
                c += term(v[j + 2 * BLOCK], start, square)
            compensated(total, lost, a)
            compensated(total, lost, b)
            compensated(total, lost, c)
            compensated(total, lost, d)
            i += 4 * BLOCK
        else:
            for j in range(i, min(i + BLOCK, n)):
                a += term(v[j], start, square)
            compensated(total, lost, a)
            i += BLOCK


def nearest_rank_of(int64_t total, int percent):
    """0-based rank of a percentile among `total` samples."""
    return nearest_rank(total, percent)


def statistics(values):
    """The same as `weighted_statistics`, of values that occur once each (float64, shape (n,)); any sign."""
    cdef double[::1] v = np.add(values, 0.0, dtype=np.float64)         # a copy, without -0.0
    cdef double[::1] spare = np.empty(2 * len(v))
    cdef Described d
    if len(v) == 0:
        return {"samples": 0}
    d = plain_described(&v[0], len(v), &spare[0])
    return mapping(&d)


# ---- logs: weighted samples >= 0, and 1000 / value of those above 0 -----------------------------------------------

cdef struct Wanted:                # one percentile of a log
    int64_t rank                   # in the whole, then in the bin
    int64_t bin
    double value


cdef LogSummary* summary_new() noexcept nogil:
    """A summary of nothing; NULL if memory is short. Memory is touched only where there are values."""
    cdef LogSummary* s = <LogSummary*>calloc(1, sizeof(LogSummary))
    if s == NULL:
        return NULL
    moments_start(&s.gap)
    moments_start(&s.rate)
    s.weights = <int64_t*>calloc(COARSE_BINS, sizeof(int64_t))
    s.entries = <int64_t*>calloc(COARSE_BINS, sizeof(int64_t))
    if s.weights == NULL or s.entries == NULL:
        summary_free(s)
        return NULL
    return s


cdef void summary_free(LogSummary* s) noexcept nogil:
    if s != NULL:
        free(s.weights)
        free(s.entries)
        free(s.fine)
        free(s)


cdef inline int64_t coarse_bin(double value) noexcept nogil:
    cdef int64_t bin = <int64_t>(bits_of(value) >> 46) - (<int64_t>(1023 - 20) << 6)
    return min(max(bin, 0), COARSE_BINS - 1)


cdef inline int64_t fine_bin(double value) noexcept nogil:
    cdef int64_t bin = <int64_t>(bits_of(value) >> 40) - (<int64_t>(1023 - 20) << 12)
    return min(max(bin, 0), FINE_BINS - 1)


cdef double fine_value(int64_t bin) noexcept nogil:
    """Middle of a fine bin; 0 for the first, which has everything below."""
    cdef uint64_t bits = (<uint64_t>(bin + (<int64_t>(1023 - 20) << 12)) << 40) | (<uint64_t>1 << 39)
    return (<double*>&bits)[0] if bin > 0 else 0.0


cdef bint summary_sketch(LogSummary* s, const double* values, const int64_t* weights) noexcept nogil:
    """Go over to fine bins, which take the place of the log's entries so far; false if memory is short."""
    cdef int64_t i
    s.fine = <int64_t*>calloc(FINE_BINS, sizeof(int64_t))
    if s.fine == NULL:
        return False
    for i in range(s.folded):
        s.fine[fine_bin(values[i])] += weights[i]
    return True


# Sums over a block of positive values in two lanes, even and odd entries: compilers do not find that by themselves, and
# the divisions one by one take as long as all of it.
cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #if defined(__GNUC__) || defined(__clang__)
    typedef double mocker_pair __attribute__((vector_size(16)));
    #define MOCKER_PAIR(a, b) ((mocker_pair){(a), (b)})
    #endif
    typedef struct { double sum, squares, rates, rate_squares, low, high; int64_t total; } mocker_block;

    static void mocker_lanes(const double *v, const int64_t *w, int64_t n, double start, double rate_start,
                             mocker_block *out) {
        double sum[2] = {0, 0}, squares[2] = {0, 0}, rates[2] = {0, 0}, rate_squares[2] = {0, 0};
        double low[2] = {v[0], v[0]}, high[2] = {v[0], v[0]};
        int64_t i = 0, total = 0;
    #ifdef MOCKER_PAIR
        mocker_pair a = MOCKER_PAIR(0, 0), b = a, c = a, e = a, lo = MOCKER_PAIR(v[0], v[0]), hi = lo;
        const mocker_pair from = MOCKER_PAIR(start, start), rate_from = MOCKER_PAIR(rate_start, rate_start);
        const mocker_pair thousand = MOCKER_PAIR(1000.0, 1000.0);
        for (; i + 2 <= n; i += 2) {
            mocker_pair x, d, y, part, weight = MOCKER_PAIR((double)w[i], (double)w[i + 1]);
            memcpy(&x, v + i, sizeof x);
            total += w[i] + w[i + 1];
            d = x - from;
            y = thousand / x - rate_from;
            part = d * weight;
            a += part;
            b += part * d;
            part = y * weight;
            c += part;
            e += part * y;
            for (int k = 0; k < 2; k++) {
                lo[k] = x[k] < lo[k] ? x[k] : lo[k];
                hi[k] = x[k] > hi[k] ? x[k] : hi[k];
            }
        }
        memcpy(sum, &a, sizeof a), memcpy(squares, &b, sizeof b), memcpy(rates, &c, sizeof c);
        memcpy(rate_squares, &e, sizeof e), memcpy(low, &lo, sizeof lo), memcpy(high, &hi, sizeof hi);
    #endif
        for (; i < n; i++) {
            const int k = (int)(i & 1);
            const double d = v[i] - start, y = 1000.0 / v[i] - rate_start;
            total += w[i];
            sum[k] += d * (double)w[i];
            squares[k] += d * (double)w[i] * d;
            rates[k] += y * (double)w[i];
            rate_squares[k] += y * (double)w[i] * y;
            low[k] = v[i] < low[k] ? v[i] : low[k];
            high[k] = v[i] > high[k] ? v[i] : high[k];
        }
        out->sum = sum[0] + sum[1], out->squares = squares[0] + squares[1];
        out->rates = rates[0] + rates[1], out->rate_squares = rate_squares[0] + rate_squares[1];
        out->low = low[0] < low[1] ? low[0] : low[1], out->high = high[0] > high[1] ? high[0] : high[1];
        out->total = total;
    }
    """
    ctypedef struct Block "mocker_block":
        double sum
        double squares
        double rates
        double rate_squares
        double low
        double high
        int64_t total

    void lanes "mocker_lanes"(const double* v, const int64_t* w, int64_t n, double start, double rate_start,
                              Block* out) noexcept nogil


cdef int64_t block_with_zeros(const double* v, const int64_t* w, int64_t n, double start, double rate_start,
                              Block* out, double* least) noexcept nogil:
    """The sums of a block in which some values are 0 and have no rate: samples that have one, and the least of them."""
    cdef int64_t i, above = 0
    cdef double d
    out.total = 0
    out.sum = out.squares = out.rates = out.rate_squares = 0.0
    least[0] = INFINITY
    for i in range(n):
        out.total += w[i]
        d = (v[i] - start) * <double>w[i]
        out.sum += d
        out.squares += d * (v[i] - start)
        if v[i] > 0.0:
            above += w[i]
            d = (1000.0 / v[i] - rate_start) * <double>w[i]
            out.rates += d
            out.rate_squares += d * (1000.0 / v[i] - rate_start)
            least[0] = min(least[0], v[i])
    return above


cdef void chunk_moments(const double* values, const int64_t* weights, int64_t n, Moments* gap, Moments* rate
                        ) noexcept nogil:
    """Moments of n entries in one pass: distances from the first one, summed in blocks, their sums with compensation.

    A mean lies among the values, so that taking its square off the squares costs few digits.
    """
    cdef int64_t i, count
    cdef double lost = 0.0, rate_lost = 0.0, least = INFINITY, low
    cdef double start = values[0] if n else 0.0, rate_start = 0.0
    cdef Block block
    moments_start(gap)
    moments_start(rate)
    for i in range(n):                         # rates are distances from that of the first value above 0
        if values[i] > 0.0:
            rate_start = 1000.0 / values[i]
            break
    i = 0
    while i < n:
        count = min(n - i, BLOCK)
        lanes(values + i, weights + i, count, start, rate_start, &block)
        gap.low = block.low if i == 0 or block.low < gap.low else gap.low
        gap.high = block.high if i == 0 or block.high > gap.high else gap.high
        low = block.low
        if low > 0.0:
            rate.total += block.total
        else:
            rate.total += block_with_zeros(values + i, weights + i, count, start, rate_start, &block, &low)
        least = min(least, low)
        gap.total += block.total
        compensated(&gap.sum, &gap.lost, block.sum)
        compensated(&gap.squares, &lost, block.squares)
        compensated(&rate.sum, &rate.lost, block.rates)
        compensated(&rate.squares, &rate_lost, block.rate_squares)
        i += count
    if rate.total:
        rate.low, rate.high = 1000.0 / gap.high, 1000.0 / least
    centred(gap, start)
    centred(rate, rate_start)


cdef inline void centred(Moments* m, double start) noexcept nogil:
    """From sums about `start` to the sum, the mean and the squares about it."""
    cdef double shift
    if m.total == 0:
        return
    shift = m.sum / <double>m.total
    m.mean = start + shift
    m.squares = max(m.squares - shift * m.sum, 0.0)
    m.sum = m.mean * <double>m.total
    m.lost = 0.0


cdef void bins_add(LogSummary* s, const double* values, const int64_t* weights, int64_t n, int64_t sign
                   ) noexcept nogil:
    cdef int64_t i, held = 0, entries = 0
    cdef int64_t bin, here = 0
    if s.fine != NULL:
        for i in range(n):
            s.fine[fine_bin(values[i])] += sign * weights[i]
        return
    for i in range(n):                         # neighbours mostly share a bin
        bin = coarse_bin(values[i])
        if bin != here:
            s.weights[here] += sign * held
            s.entries[here] += sign * entries
            here, held, entries = bin, 0, 0
        held += weights[i]
        entries += 1
    s.weights[here] += sign * held
    s.entries[here] += sign * entries


cdef void summary_add(LogSummary* s, const double* values, const int64_t* weights, int64_t n) noexcept nogil:
    """Fold the next n entries of the log in, best while they are in the cache."""
    cdef Moments gap, rate
    chunk_moments(values, weights, n, &gap, &rate)
    moments_merge(&s.gap, &gap)
    moments_merge(&s.rate, &rate)
    bins_add(s, values, weights, n, 1)
    s.folded += n


cdef void fine_percentiles(LogSummary* s, Moments* gap, Wanted* wanted, int64_t count) noexcept nogil:
    cdef int64_t i, bin, below
    for i in range(count):
        bin = below = 0
        while wanted[i].rank - below >= s.fine[bin]:
            below += s.fine[bin]
            bin += 1
        wanted[i].value = min(max(fine_value(bin), gap.low), gap.high)


cdef bint log_percentiles(LogSummary* s, const double* values, const int64_t* weights, int64_t n, Moments* gap,
                          Wanted* wanted, int64_t count) noexcept nogil:
    """Find the values of given ranks among the entries of the bins that they fall into; false if memory is short."""
    cdef int64_t i, k, b, used = 0, rank, first = coarse_bin(gap.low)
    cdef int64_t* start = <int64_t*>malloc(COARSE_BINS * sizeof(int64_t))      # of a bin asked for in `picked`; -1
    cdef double* picked = NULL
    cdef int64_t* picked_weights = NULL
    cdef bint ok = False
    if start == NULL:
        return False
    for b in range(COARSE_BINS):
        start[b] = -1
    for k in range(count):
        b = first
        rank = wanted[k].rank
        while rank >= s.weights[b]:
            rank -= s.weights[b]
            b += 1
        wanted[k].bin, wanted[k].rank = b, rank
        if start[b] < 0:
            start[b] = used
            used += s.entries[b]
    picked = <double*>malloc(2 * used * sizeof(double))
    picked_weights = <int64_t*>malloc(2 * used * sizeof(int64_t))
    if picked != NULL and picked_weights != NULL:
        ok = True
        for i in range(n):
            b = coarse_bin(values[i])
            if start[b] >= 0:
                picked[start[b]], picked_weights[start[b]] = values[i], weights[i]
                start[b] += 1
        for k in range(count):
            b = wanted[k].bin
            i = start[b] - s.entries[b]
            wanted[k].value = select_weighted(picked + i, picked_weights + i, s.entries[b], wanted[k].rank,
                                              picked + used, picked_weights + used)
    free(picked)
    free(picked_weights)
    free(start)
    return ok


cdef bint describe_log(LogSummary* s, const double* values, const int64_t* weights, int64_t n, Moments* gap,
                       Moments* rate, double* at, double* rates_at) noexcept nogil:
    cdef int64_t i, count = N_PERCENTILES, tail = n - s.folded if s.fine == NULL else n
    cdef const double* late = values + (n - tail)
    cdef const int64_t* late_weights = weights + (n - tail)
    cdef Wanted[2 * N_PERCENTILES] wanted
    cdef bint ok = True
    chunk_moments(late, late_weights, tail, gap, rate)
    moments_merge(gap, &s.gap)
    moments_merge(rate, &s.rate)
    if gap.total == 0:
        return True
    for i in range(N_PERCENTILES):
        wanted[i].rank = nearest_rank(gap.total, PERCENT[i])
        if rate.total:                         # 1000 / x turns the order round
            wanted[N_PERCENTILES + i].rank = gap.total - 1 - nearest_rank(rate.total, PERCENT[i])
            count = 2 * N_PERCENTILES
    bins_add(s, late, late_weights, tail, 1)   # for now: the newest entry may still grow
    if s.fine != NULL:
        fine_percentiles(s, gap, wanted, count)
    else:
        ok = log_percentiles(s, values, weights, n, gap, wanted, count)
    bins_add(s, late, late_weights, tail, -1)
    for i in range(N_PERCENTILES):
        at[i] = wanted[i].value
        if rate.total:
            rates_at[i] = 1000.0 / wanted[N_PERCENTILES + i].value
    return ok


cdef bint describe_short(const double* values, const int64_t* weights, int64_t n, int64_t step, Moments* gap,
                         Moments* rate, double* at, double* rates_at) noexcept nogil:
    """The same of a log of which nothing is folded in; false if memory is short.

    With a `step` sums are rounded as if so many entries had been folded in at a time.
    """
    cdef int64_t[2 * N_PERCENTILES] ranks
    cdef double[2 * N_PERCENTILES] found
    cdef Moments folded, folded_rate, part, part_rate
    cdef int64_t first = 0
    cdef int i, count = N_PERCENTILES
    moments_start(&folded)
    moments_start(&folded_rate)
    while step > 0 and n - first - 2 >= step:  # at the next entry but one
        chunk_moments(values + first, weights + first, step, &part, &part_rate)
        moments_merge(&folded, &part)
        moments_merge(&folded_rate, &part_rate)
        first += step
    chunk_moments(values + first, weights + first, n - first, gap, rate)
    moments_merge(gap, &folded)
    moments_merge(rate, &folded_rate)
    if gap.total == 0:
        return True
    for i in range(N_PERCENTILES):
        ranks[i] = nearest_rank(gap.total, PERCENT[i])
        if rate.total:                         # 1000 / x turns the order round
            ranks[N_PERCENTILES + i] = gap.total - 1 - nearest_rank(rate.total, PERCENT[i])
            count = 2 * N_PERCENTILES
    if not select_log(values, weights, n, gap.low, gap.high, ranks, count, found):
        return False
    for i in range(N_PERCENTILES):
        at[i] = found[i]
        if rate.total:
            rates_at[i] = 1000.0 / found[N_PERCENTILES + i]
    return True


cdef bint log_described(LogSummary* s, const double* values, const int64_t* weights, int64_t n, int64_t step,
                        Described* gap, Described* rate) noexcept nogil:
    """What is said of a log and of the rates, the entries that are not folded in included; false if memory is short.

    `n` entries are there: all of them, or with fine bins only those that are not folded in. Without a summary none is;
    `step` is then as of `describe_short`.
    """
    cdef Moments of_gaps, of_rates
    cdef double[N_PERCENTILES] at
    cdef double[N_PERCENTILES] rates_at
    cdef bint ok
    if s == NULL:
        ok = describe_short(values, weights, n, step, &of_gaps, &of_rates, at, rates_at)
    else:
        ok = describe_log(s, values, weights, n, &of_gaps, &of_rates, at, rates_at)
    gap[0], rate[0] = described(&of_gaps, at), described(&of_rates, rates_at)
    return ok


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
    cdef Described[2] d
    if len(w) != len(v):
        raise ValueError(f"weights has {len(w)} elements, values has {len(v)}")
    if len(v) == 0:
        return {"samples": 0}
    if not log_described(NULL, &v[0], &w[0], len(v), 0, &d[0], &d[1]):
        raise MemoryError
    return mapping(&d[rates])
