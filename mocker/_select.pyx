# cython: language_level=3
"""Values at given ranks of a multiset, in time O(samples) and almost without a branch that depends on them.

Samples are counted in bins over their range and chained to those of their bin; then only the few bins that a rank falls
into are walked, and what is in them is narrowed down the same way or, if it is little, ranked by comparison.
"""
from libc.math cimport round
from libc.stdint cimport INT32_MAX
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mocker._common cimport int32_t, int64_t, uint64_t

cdef enum:
    FEW = 48                       # samples that are not worth bins
    HANDFUL = 16                   # of a bin, to compare each with each
    BINS = 512
    LOG_BINS = 2048                # for logs, which are longer
    SUB_BINS = 64                  # of a bin that has more than a handful
    MOST_RANKS = 16
    END = -1                       # of a chain


cdef struct Scale:                 # from a value to its bin: equal steps of the bits, which are equal in proportion
    uint64_t base
    int shift


cdef inline Scale scale_over(double low, double high, uint64_t bins) noexcept nogil:
    """Bins over a range of values >= 0; what is far below the highest shares the first."""
    cdef Scale s
    cdef uint64_t span
    s.base = bits_of(max(low, high * 2.0 ** -16))
    s.shift = 0
    span = bits_of(high) - s.base
    while span >> s.shift >= bins:
        s.shift += 1
    return s


cdef inline uint64_t bin_of(Scale s, double value) noexcept nogil:
    cdef uint64_t bits = bits_of(value)
    return (bits - s.base if bits > s.base else 0) >> s.shift


cdef int64_t nearest_rank(int64_t total, int percent) noexcept nogil:
    """Rank of a percentile (rule: `percentile_rank`, halves away from zero)."""
    return <int64_t>round(<double>(total - 1) * <double>percent / 100.0)


# ---- by partition -------------------------------------------------------------------------------------------------

cdef inline double middle(double a, double b, double c) noexcept nogil:
    if a > b:
        a, b = b, a
    return a if c < a else (b if c > b else c)


cdef double select(double* v, int64_t low, int64_t high, int64_t rank) noexcept nogil:
    """Value at `rank` of v[low:high] (if low <= rank < high), reordered so that smaller ones come before it."""
    cdef int64_t i, j
    cdef double pivot, x
    while high - low > 1:
        pivot = middle(v[low], v[(low + high) >> 1], v[high - 1])
        i, j = low, high - 1
        while i <= j:
            while v[i] < pivot:
                i += 1
            while v[j] > pivot:
                j -= 1
            if i <= j:
                x = v[i]
                v[i] = v[j]
                v[j] = x
                i += 1
                j -= 1
        if rank <= j:
            high = j + 1
        elif rank >= i:
            low = i
        else:
            break
    return v[rank]


# ---- by comparison ------------------------------------------------------------------------------------------------

cdef double handful(const double* v, int64_t n, int64_t rank) noexcept nogil:
    """Value at `rank` of few samples, in any order."""
    cdef int64_t i, j, less, upto
    cdef double x = 0.0
    for i in range(n):
        x = v[i]
        less = upto = 0
        for j in range(n):
            less += v[j] < x
            upto += v[j] <= x
        if less <= rank < upto:
            break
    return x


cdef double handful_weighted(const double* v, const int64_t* w, int64_t n, int64_t rank) noexcept nogil:
    """The same of few values with weights."""
    cdef int64_t i, j, less, upto
    cdef double x = 0.0
    for i in range(n):
        x = v[i]
        less = upto = 0
        for j in range(n):
            less += w[j] if v[j] < x else 0
            upto += w[j] if v[j] <= x else 0
        if less <= rank < upto:
            break
    return x


# ---- by bins ------------------------------------------------------------------------------------------------------

cdef inline bint spread(const double* v, int64_t n, Scale* s) noexcept nogil:
    """Bins over n samples >= 0, of which the least has the first; false if all are the same."""
    cdef double low = v[0], high = v[0]
    cdef int64_t i
    for i in range(1, n):
        low = v[i] if v[i] < low else low
        high = v[i] if v[i] > high else high
    s.base, s.shift = bits_of(low), 0
    while (bits_of(high) - s.base) >> s.shift >= SUB_BINS:
        s.shift += 1
    return low < high


cdef inline uint64_t place(Scale s, double value) noexcept nogil:
    return (bits_of(value) - s.base) >> s.shift


cdef double select_weighted(const double* v, const int64_t* w, int64_t n, int64_t rank, double* spare,
                            int64_t* spare_weights) noexcept nogil:
    """Value at `rank` of a multiset of n values >= 0 with weights; `spare` and `spare_weights` have room for n."""
    cdef int64_t[SUB_BINS] held
    cdef int64_t i, used
    cdef uint64_t b
    cdef Scale s
    while n > HANDFUL:
        if not spread(v, n, &s):
            return v[0]
        memset(held, 0, sizeof(held))
        for i in range(n):
            held[place(s, v[i])] += w[i]
        b = 0
        while rank >= held[b]:
            rank -= held[b]
            b += 1
        used = 0
        for i in range(n):                     # never ahead of what is read, so that it may be the same array
            spare[used], spare_weights[used] = v[i], w[i]
            used += place(s, v[i]) == b
        v, w, n = spare, spare_weights, used
    return handful_weighted(v, w, n, rank)


cdef double select_narrowed(double* v, int64_t n, int64_t rank) noexcept nogil:
    """The same of n samples >= 0 without weights, which are used up."""
    cdef int32_t[SUB_BINS] held
    cdef int64_t i, used
    cdef uint64_t b
    cdef Scale s
    while n > HANDFUL:
        if not spread(v, n, &s):
            return v[0]
        memset(held, 0, sizeof(held))
        for i in range(n):
            held[place(s, v[i])] += 1
        b = 0
        while rank >= held[b]:
            rank -= held[b]
            b += 1
        used = 0
        for i in range(n):
            v[used] = v[i]
            used += place(s, v[i]) == b
        n = used
    return handful(v, n, rank)


cdef void select_ranks(double* v, int64_t n, double low, double high, const int64_t* ranks, int count, double* at,
                       double* spare) noexcept nogil:
    """Values at `count` rising ranks of n samples from `low` to `high`, into `at`.

    The samples are used up. `spare` has room for 2 n.
    """
    cdef int32_t[BINS] held            # samples in a bin
    cdef int32_t[BINS] last            # of its samples
    cdef int32_t* before = <int32_t*>(spare + n)       # of each sample in its bin
    cdef int64_t i, used, below = 0
    cdef uint64_t b = 0
    cdef int32_t sample
    cdef int k
    cdef Scale s
    if n < FEW or low < 0.0 or n > INT32_MAX:
        for k in range(count):
            at[k] = select(v, below, n, ranks[k])
            below = ranks[k]
        return
    s = scale_over(low, high, BINS)
    memset(held, 0, sizeof(held))
    memset(last, END, sizeof(last))
    for i in range(n):
        b = bin_of(s, v[i])
        held[b] += 1
        before[i], last[b] = last[b], <int32_t>i
    b = 0
    for k in range(count):
        while ranks[k] - below >= held[b]:
            below += held[b]
            b += 1
        used, sample = 0, last[b]
        while sample != END:
            spare[used] = v[sample]
            sample = before[sample]
            used += 1
        at[k] = select_narrowed(spare, used, ranks[k] - below)


cdef bint select_log(const double* v, const int64_t* w, int64_t n, double low, double high, const int64_t* ranks,
                     int count, double* at) noexcept nogil:
    """Values at `count` ranks, in any order, of n values >= 0 with weights; false if memory is short."""
    cdef int64_t[LOG_BINS] even        # samples in a bin: of the even entries and of the odd ones, so that neighbours,
    cdef int64_t[LOG_BINS] odd         # which mostly share a bin, do not wait for each other
    cdef int32_t[LOG_BINS] last        # of its entries
    cdef int[MOST_RANKS] order         # of the ranks, rising
    cdef int64_t i, used, below = 0
    cdef uint64_t b, other
    cdef int32_t entry
    cdef int k, j
    cdef Scale s = scale_over(low, high, LOG_BINS)
    cdef double* picked = NULL         # values of a bin, their weights, and room for as many again
    cdef int32_t* before = NULL        # of each entry in its bin
    if n > INT32_MAX:
        return False
    picked, before = <double*>malloc(4 * n * sizeof(double)), <int32_t*>malloc(n * sizeof(int32_t))
    if picked == NULL or before == NULL:
        free(picked)
        free(before)
        return False
    memset(even, 0, sizeof(even))
    memset(odd, 0, sizeof(odd))
    memset(last, END, sizeof(last))
    for i in range(0, n - 1, 2):
        b, other = bin_of(s, v[i]), bin_of(s, v[i + 1])
        even[b] += w[i]
        odd[other] += w[i + 1]
        before[i], last[b] = last[b], <int32_t>i
        before[i + 1], last[other] = last[other], <int32_t>i + 1
    if n & 1:
        b = bin_of(s, v[n - 1])
        even[b] += w[n - 1]
        before[n - 1], last[b] = last[b], <int32_t>n - 1
    for k in range(count):
        j = k
        while j > 0 and ranks[order[j - 1]] > ranks[k]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = k
    b = 0
    for j in range(count):
        k = order[j]
        while ranks[k] - below >= even[b] + odd[b]:
            below += even[b] + odd[b]
            b += 1
        used, entry = 0, last[b]
        while entry != END:
            picked[used], (<int64_t*>(picked + n))[used] = v[entry], w[entry]
            entry = before[entry]
            used += 1
        at[k] = select_weighted(picked, <int64_t*>(picked + n), used, ranks[k] - below, picked + 2 * n,
                                <int64_t*>(picked + 3 * n))
    free(picked)
    free(before)
    return True
