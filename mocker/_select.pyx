# cython: language_level=3
"""Values at given ranks of a multiset, in time O(samples) and almost without a branch that depends on them.

Samples are counted in bins over their range, those of the few bins that a rank falls into are picked out, and what is
left is partitioned: a thousand samples that no processor has seen before cost a third of a plain quickselect.
"""
from libc.math cimport round
from libc.stdint cimport INT32_MAX, uint16_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mocker._common cimport int32_t, int64_t, uint8_t, uint64_t

cdef enum:
    FEW = 48                       # samples that are not worth bins
    BINS = 512
    LOG_BINS = 2048                # for logs, which are longer
    MOST_RANKS = 16


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


cdef double select_weighted(double* v, int64_t* w, int64_t n, int64_t rank) noexcept nogil:
    """The same of a multiset of n values with weights."""
    cdef int64_t i, j, k, low = 0, high = n, weight, left, equal
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
                x, weight = v[i], w[i]
                v[i], w[i] = v[j], w[j]
                v[j], w[j] = x, weight
                i += 1
                j -= 1
        left = equal = 0
        for k in range(low, j + 1):
            left += w[k]
        for k in range(j + 1, i):
            equal += w[k]
        if rank < left:
            high = j + 1
        elif rank < left + equal:
            return pivot
        else:
            rank -= left + equal
            low = i
    return v[low]


# ---- by bins ------------------------------------------------------------------------------------------------------

cdef void select_ranks(double* v, int64_t n, double low, double high, const int64_t* ranks, int count, double* at,
                       double* spare) noexcept nogil:
    """Values at `count` rising ranks of n samples from `low` to `high`, into `at`.

    The samples are used up. `spare` has room for n.
    """
    cdef int32_t[BINS] held            # samples in a bin
    cdef int32_t[BINS] start           # of its samples in `v`, once they are picked
    cdef uint8_t[BINS] wanted
    cdef int64_t[MOST_RANKS] inside
    cdef uint64_t[MOST_RANKS] bins
    cdef int64_t i, below = 0, used = 0
    cdef uint64_t b = 0
    cdef int k
    cdef Scale s
    if n < FEW or low < 0.0 or n > INT32_MAX:
        for k in range(count):
            at[k] = select(v, below, n, ranks[k])
            below = ranks[k]
        return
    s = scale_over(low, high, BINS)
    memset(held, 0, sizeof(held))
    memset(wanted, 0, sizeof(wanted))
    for i in range(n):
        held[bin_of(s, v[i])] += 1
    for k in range(count):
        while ranks[k] - below >= held[b]:
            below += held[b]
            b += 1
        if not wanted[b]:
            wanted[b] = 1
            start[b] = <int32_t>used
            used += held[b]
        bins[k], inside[k] = b, ranks[k] - below
    used = 0
    for i in range(n):
        spare[used] = v[i]
        used += wanted[bin_of(s, v[i])]
    for i in range(used):
        b = bin_of(s, spare[i])
        v[start[b]] = spare[i]
        start[b] += 1
    for k in range(count):
        i = start[bins[k]] - held[bins[k]]
        at[k] = select(v, i, start[bins[k]], i + inside[k])


cdef bint select_log(const double* v, const int64_t* w, int64_t n, double low, double high, const int64_t* ranks,
                     int count, double* at) noexcept nogil:
    """Values at `count` ranks, in any order, of n values >= 0 with weights; false if memory is short."""
    cdef int64_t[LOG_BINS] weights     # samples in a bin
    cdef int32_t[LOG_BINS] entries
    cdef int32_t[LOG_BINS] start
    cdef uint8_t[LOG_BINS] wanted
    cdef int64_t[MOST_RANKS] inside
    cdef uint64_t[MOST_RANKS] bins
    cdef int[MOST_RANKS] order         # of the ranks, rising
    cdef int64_t i, used = 0, below = 0
    cdef uint64_t b
    cdef int k, j
    cdef Scale s = scale_over(low, high, LOG_BINS)
    cdef double* room
    cdef double* picked
    cdef int64_t* picked_weights
    cdef uint16_t* bin_at = <uint16_t*>malloc((n + 1) * sizeof(uint16_t))
    if bin_at == NULL:
        return False
    memset(weights, 0, sizeof(weights))
    memset(entries, 0, sizeof(entries))
    memset(wanted, 0, sizeof(wanted))
    for i in range(n):
        b = bin_of(s, v[i])
        bin_at[i] = <uint16_t>b
        weights[b] += w[i]
        entries[b] += 1
    for k in range(count):
        j = k
        while j > 0 and ranks[order[j - 1]] > ranks[k]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = k
    b = 0
    for j in range(count):
        k = order[j]
        while ranks[k] - below >= weights[b]:
            below += weights[b]
            b += 1
        bins[k], inside[k] = b, ranks[k] - below
        if not wanted[b]:
            wanted[b] = 1
            start[b] = <int32_t>used
            used += entries[b]
    room = <double*>malloc(4 * (used + 1) * sizeof(double))
    if room == NULL:
        free(bin_at)
        return False
    picked, picked_weights = room + 2 * (used + 1), <int64_t*>(room + 3 * (used + 1))
    used = pick(v, w, n, bin_at, wanted, room, <int64_t*>(room + used + 1))
    free(bin_at)
    for i in range(used):
        b = bin_of(s, room[i])
        picked[start[b]], picked_weights[start[b]] = room[i], (<int64_t*>(room + used + 1))[i]
        start[b] += 1
    for k in range(count):
        b = bins[k]
        i = start[b] - entries[b]
        at[k] = select_weighted(picked + i, picked_weights + i, entries[b], inside[k])
    free(room)
    return True


cdef int64_t pick(const double* v, const int64_t* w, int64_t n, const uint16_t* bin_at, const uint8_t* wanted,
                  double* to, int64_t* weights) noexcept nogil:
    """Copy the entries of bins that are wanted; `to` and `weights` have room for one more than these."""
    cdef int64_t i, used = 0
    for i in range(n):
        to[used], weights[used] = v[i], w[i]
        used += wanted[bin_at[i]]
    return used
