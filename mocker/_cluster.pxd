# Data dictionary of the cluster loop: workers on one clock, and the links between requests that feed them.
from mocker._common cimport int32_t, int64_t
from mocker._foresight cimport Foresight
from mocker._heap cimport Heap
from mocker._kv cimport Path
from mocker._workers cimport View


cdef class Cluster(Foresight):
    cdef readonly bint finished
    # coupled loop; its events: (end of pass, when it began, worker + ROUND * round of passes then), or
    # (start of a worker, when it was decided, READY + worker + ROUND * round)
    cdef int64_t starts                  # of them starts of workers
    cdef int64_t sequence                # rounds of passes so far
    cdef Heap ready                      # (ready at, rank, row)
    cdef const int64_t[::1] roots        # [sessions] row that begins each
    cdef const int64_t[::1] next_offsets       # [n + 1] into next_rows
    cdef const int64_t[::1] next_rows          # whom a row's end brings nearer
    cdef int64_t[::1] ends_due           # [n] ends that a row still waits for
    cdef const int32_t[::1] rank         # [n] who goes first at the same time
    cdef const double[::1] delay         # [n] from the last of these ends until a row is ready, ms
    cdef readonly double lag             # least of these times, ms; infinity: nobody waits
    cdef int64_t rows_left               # not ended
    cdef Heap cancels                    # (when its client gives up, rank, row)
    cdef const double[::1] patience      # [n] ms from the arrival, NaN: never
    cdef bint impatient                  # it is set
    cdef object grow                     # None, or called with a row whose prompt becomes known when it is ready
    cdef bint linked                     # `set_links` was called
    cdef int64_t limit_active            # closed loop: sessions at a time; 0: open loop
    cdef int64_t active_sessions
    cdef int64_t next_session
    cdef int64_t in_flight
    cdef bint started
    cdef Path scratch                    # of the request that the router looks at
    cdef int64_t[::1] held               # [n] rows that arrived while no worker took requests, a ring
    cdef int64_t held_first
    cdef int64_t n_held
    # planner
    cdef object planner                  # ``planner(now) -> (targets by role or None, time of the next tick or None)``
    cdef object recruit                  # ``recruit(role, number, offload) -> engine``
    cdef object failure                  # exception of one of them
    cdef bint failed                     # by that, or by the router, see `RouterCore.raise_error`
    cdef double tick_at                  # ms; infinity: no more ticks
    cdef double first_tick
    cdef double startup_ms[2]            # by role
    cdef int64_t idle_ticks              # in a row, while nothing else was going to happen
    cdef readonly int64_t ticks
    # runs that stop on the way; workers never get further ahead of the clock than to the horizon
    cdef double horizon                  # ms, nothing later happens; infinity for none
    cdef int64_t enough                  # requests gone at which it stops

    cdef bint took_over(self, int role) noexcept nogil
    cdef bint vacated(self, int role) noexcept nogil
    cdef void saw_admission(self, int64_t overlap, int64_t prompt) noexcept nogil
    cdef bint starting(self) noexcept nogil
    cdef bint expect(self, int64_t worker, double at) noexcept nogil
    cdef bint planned(self, bint* changed) noexcept nogil
    cdef bint quiet(self) noexcept nogil
    cdef bint tick(self) noexcept with gil
    cdef int scale(self, int role, int64_t target) except -1
    cdef bint activate(self, double now) noexcept nogil
    cdef double next_cancel(self) noexcept nogil
    cdef bint cancellations(self, bint* changed) noexcept nogil
    cdef bint cancel(self, int64_t row, bint* changed) noexcept nogil
    cdef bint grown(self, int64_t row) noexcept with gil
    cdef bint arrivals(self, double now) noexcept nogil
    cdef bint dispatch(self, int64_t row, double now) noexcept nogil
    cdef bint routed(self, int64_t row, double now) noexcept nogil
    cdef bint route_path(self, int64_t row, int64_t block_size) noexcept nogil
    cdef bint path_of_tokens(self, int64_t row, int64_t block_size) noexcept with gil
    cdef bint placed(self, double now) noexcept nogil
    cdef void late_events(self, int64_t worker) noexcept nogil
    cdef double next_ready(self) noexcept nogil
    cdef bint ended_rows(self, View* c, double now) noexcept nogil
    cdef bint coupled(self, int64_t passes) noexcept nogil
    cdef double upcoming(self) noexcept nogil
    cdef int64_t queued(self) noexcept nogil
    cdef bint rescue(self) noexcept nogil
    cdef bint completions(self) noexcept nogil
    cdef bint apart(self) noexcept nogil
    cdef bint ahead(self, int64_t worker, int64_t* done) noexcept nogil
    cdef bint unforeseeable(self) noexcept nogil
    cdef bint events_until(self, int64_t passes) noexcept nogil
    cdef bint tick_below(self) noexcept nogil
    cdef bint settle(self, int64_t* done) noexcept nogil
