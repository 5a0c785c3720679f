# Data dictionary of workers that are run one at a time.
from mocker._collect cimport Gaps
from mocker._common cimport int64_t
from mocker._workers cimport Workers


cdef struct Lane:                  # one worker of an open-loop replay, simulated on its own
    double now                     # ms
    int64_t next                   # position of its next arrival in the order of arrivals
    double last                    # newest timestamp that it processed
    bint done
    bint stalled
    bint waits                     # between the arrivals of a pass and the pass, for requests that nobody knows yet
    int64_t apart[8]               # see `View.apart`


cdef class Lanes(Workers):
    cdef readonly bint stalled           # requests are left that nothing can bring on
    cdef const int64_t[::1] order        # rows by arrival time: [n], or those of late, each in place k & ring
    cdef int64_t ring                    # all bits set: none is ever left out
    cdef bint more                       # further requests will be fed
    cdef Lane* lanes                     # [n_lanes]
    cdef int64_t n_lanes
    cdef Gaps* apart_gaps                # [n_lanes] each worker's own gap log; NULL: the collector's

    cdef void free_gaps(self) noexcept nogil
    cdef void log_gaps(self, int64_t worker, Gaps* gaps) noexcept nogil
    cdef void lane(self, int64_t worker, int64_t passes, int64_t arrivals) noexcept nogil
    cdef bint deliver(self, int64_t worker, double at) noexcept nogil
