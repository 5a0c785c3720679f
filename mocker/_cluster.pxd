# Data dictionary of the cluster loop: workers on one clock, and the sessions that feed them.
from mocker._common cimport int32_t, int64_t
from mocker._heap cimport Heap
from mocker._kv cimport Path
from mocker._workers cimport View, Workers


cdef struct Lane:                  # one worker of an open-loop replay, simulated on its own
    double now                     # ms
    int64_t next                   # position of its next arrival in the order of arrivals
    double last                    # newest timestamp that it processed
    int64_t idle_passes            # passes in a row that brought nothing
    bint done
    bint stalled


cdef class Cluster(Workers):
    cdef readonly bint finished
    cdef readonly bint stalled
    cdef bint failed                     # the router did; see `RouterCore.raise_error`
    cdef const int64_t[::1] order
    cdef Lane* lanes
    # coupled loop
    cdef Heap events                     # (end of pass, when it began, worker + workers * round of passes then)
    cdef int64_t sequence                # rounds of passes at this timestamp
    cdef int64_t next_worker
    cdef Heap ready                      # (ready at, session, turn)
    cdef const int64_t[::1] turn_offsets       # [sessions + 1] into turn_rows
    cdef const int64_t[::1] turn_rows          # rows of each session in turn order
    cdef const int32_t[::1] session_of         # [n]
    cdef const double[::1] delay               # [n] think time before a row's turn, ms
    cdef int64_t[::1] next_turn          # [sessions]
    cdef int64_t sessions
    cdef int64_t sessions_left
    cdef int64_t limit_active            # closed loop: sessions at a time; 0: open loop
    cdef int64_t active_sessions
    cdef int64_t next_session
    cdef int64_t in_flight
    cdef int64_t idle_passes
    cdef bint started
    cdef Path scratch                    # of the request that the router looks at

    cdef void lane(self, int64_t worker, int64_t passes) noexcept nogil
    cdef bint deliver(self, int64_t worker, double at) noexcept nogil
    cdef bint activate(self, double now) noexcept nogil
    cdef bint arrivals(self, double now) noexcept nogil
    cdef bint dispatch(self, int64_t row, double now) noexcept nogil
    cdef bint routed(self, int64_t row, double now) noexcept nogil
    cdef bint path_of_tokens(self, int64_t row) noexcept with gil
    cdef bint placed(self, double now) noexcept nogil
    cdef void late_events(self, int64_t worker) noexcept nogil
    cdef double next_ready(self) noexcept nogil
    cdef bint ended_rows(self, View* c, double now) noexcept nogil
    cdef bint coupled(self, int64_t passes) noexcept nogil
    cdef int64_t queued(self) noexcept nogil
    cdef bint rescue(self) noexcept nogil
    cdef bint completions(self) noexcept nogil
    cdef bint apart(self) noexcept nogil
    cdef bint ahead(self, int64_t worker, int64_t* done) noexcept nogil
    cdef bint settle(self, int64_t* done) noexcept nogil
