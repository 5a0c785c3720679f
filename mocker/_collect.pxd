# Data dictionary of the collector: one row per request of the workload, and the inter-token gaps of all of them.
from mocker._common cimport int8_t, int32_t, int64_t
from mocker._distribution cimport Described, LogSummary


cdef struct Rows:                  # columns by request row; NaN / -1 until known
    double* first_admit            # ms, start of the pass that first admitted it
    double* first_token            # ms, end of the pass that made its first token
    double* second_gap             # ms from the first to the second token
    double* last_token             # ms
    int64_t* tokens                # tokens really produced
    int64_t* reused                # cached prompt tokens, maximum over its admissions
    int64_t* first_reused          # cached prompt tokens at the first admission
    int8_t* terminal               # Terminal


cdef struct Gaps:                  # inter-token gaps as (value, weight), in the order they were made
    double* values                 # ms
    int64_t* weights               # requests with that gap
    int64_t used
    int64_t cap
    int64_t zeros                  # gaps of 0, counted apart
    int error                      # ErrorCode
    int64_t room                   # entries until the next look at capacity and summary
    int64_t fold_at                # `used` at which entries go into the summary
    int64_t share                  # logs that share the memory of a long one; 0: unless folded, it gets what it needs
    int64_t most                   # entries to keep, beyond which fine bins stand for them; 0: all
    LogSummary* summary            # NULL: nothing folded in yet


cdef bint gaps_room(Gaps* g) noexcept nogil
cdef void gaps_between(Gaps* g, const double* times, int64_t count, int64_t weight) noexcept nogil
cdef void gaps_join(Gaps* g, Gaps* other) noexcept nogil
cdef bint log_describe(Gaps* g, Described* gap, Described* rate) noexcept nogil


cdef inline void gaps_append(Gaps* g, double value, int64_t weight) noexcept nogil:
    if g.used >= g.room and not gaps_room(g):
        return
    g.values[g.used] = value
    g.weights[g.used] = weight
    g.used += 1


cdef inline void gaps_add(Gaps* g, double value, int64_t weight) noexcept nogil:
    """Add `weight` gaps of `value` ms (negative ones count as 0)."""
    if not (value > 0.0):
        g.zeros += weight
    elif g.used > 0 and g.values[g.used - 1] == value:
        g.weights[g.used - 1] += weight
    else:
        gaps_append(g, value, weight)


cdef class Collector:
    cdef Rows rows
    cdef Gaps gaps
    cdef bytearray memory          # behind `rows`, unless these are other columns
    cdef dict known                # `columns`; None: nobody has asked for them
    cdef readonly int64_t n        # rows

    cdef int point(self, dict columns, int64_t n) except -1


cdef class SampleLog:
    cdef Gaps gaps
    cdef double sums[2]            # of the samples, and what it has lost to rounding
    cdef double squares[2]         # of their squares
    cdef int64_t count
