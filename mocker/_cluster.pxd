# Data dictionary of the cluster loop: workers on one clock, and the sessions that feed them.
from mocker._collect cimport Collector
from mocker._common cimport int32_t, int64_t, uint8_t
from mocker._heap cimport Heap
from mocker._kv cimport Path
from mocker._paths cimport PathTable
from mocker._router cimport Router, RouterCore
from mocker._rules cimport VllmRulesCore
from mocker._sglang cimport SglangCore


cdef struct Lane:                  # one worker of an open-loop replay, simulated on its own
    double now                     # ms
    int64_t next                   # position of its next arrival in the order of arrivals
    double last                    # newest timestamp that it processed
    int64_t idle_passes            # passes in a row that brought nothing
    bint done
    bint stalled


cdef enum EngineKind:
    KIND_CORE = 0                  # vLLM as the reference has it, TRT-LLM
    KIND_SGLANG = 1
    KIND_RULES = 2                 # vLLM by switchable rules


cdef struct View:                  # what the cluster sees of a worker after a pass
    double end_ms
    double last_start
    int64_t count                  # requests alive
    int64_t n_waiting
    int64_t made                   # tokens made in the pass
    int64_t completed              # requests gone in the pass
    int64_t admitted
    int64_t passes                 # since the start
    bint preempted                 # the next pass may differ though this one brought nothing
    bint worked                    # tokens were scheduled
    bint steady                    # fast-forward may go on
    int64_t* ended                 # [ended_used] rows gone, ~row for a first token
    int64_t ended_used
    int error


cdef class Cluster:
    cdef readonly list engines
    cdef readonly Collector collector
    cdef readonly object worker_of       # int32[n], -1 until assigned
    cdef readonly object arrival_of      # float64[n], when it really arrived; NaN: it did not
    cdef readonly double now             # ms, coupled loop
    cdef readonly int64_t clamped        # requests whose output TRT-LLM cut to the pool
    cdef readonly bint finished
    cdef readonly bint stalled
    cdef bint failed                     # the router did; see `RouterCore.raise_error`
    cdef readonly int64_t ended          # requests gone so far
    cdef readonly RouterCore router
    cdef int kind                        # EngineKind
    cdef void** cores                    # [workers] Core or SglangCore
    cdef VllmRulesCore** rules           # [workers] beside the Core, NULL without rules
    cdef View* views                     # [workers]
    cdef int64_t workers
    cdef int64_t counted                 # of them, from the first on: those whose tokens are the requests' output
    cdef int64_t n
    cdef const double[::1] arrival
    cdef const int64_t[::1] prompt
    cdef const int64_t[::1] limit
    cdef const int64_t[::1] order
    cdef int32_t[::1] worker
    cdef double[::1] arrived
    cdef PathTable paths
    cdef object tokens
    cdef double cap
    cdef bint single
    cdef bint fast
    cdef Lane* lanes
    # coupled loop
    cdef Heap events                     # (end of pass, when it began, worker + workers * round of passes then)
    cdef int64_t sequence                # rounds of passes at this timestamp
    cdef uint8_t* busy
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
    cdef Router* route                   # NULL: round robin
    cdef Path scratch                    # of the request that the router looks at
    cdef const int64_t[::1] priority     # [n] or NULL
    cdef const int64_t[::1] strict
    cdef const int32_t[::1] policy       # [n] router queue class code
    cdef bint ranked                     # these three are set

    cdef int attach(self, object engine, int64_t worker) except -1
    cdef bint submit(self, int64_t row, int64_t worker) noexcept nogil
    cdef void run_pass(self, int64_t worker, double now) noexcept nogil
    cdef double forward(self, int64_t worker, double now, double until) noexcept nogil
    cdef void look(self, int64_t worker) noexcept nogil
    cdef bint submit_tokens(self, int64_t row, int64_t worker) noexcept with gil
    cdef bint brought(self, View* c) noexcept nogil
    cdef void uncount(self, View* c) noexcept nogil
    cdef void lane(self, int64_t worker, int64_t passes) noexcept nogil
    cdef bint deliver(self, int64_t worker, double at) noexcept nogil
    cdef bint stuck(self, int64_t worker, double start, int64_t* idle) noexcept nogil
    cdef int64_t pool_tokens(self, int64_t worker) noexcept nogil
    cdef bint activate(self, double now) noexcept nogil
    cdef bint turn_ended(self, int64_t row, double now) noexcept nogil
    cdef bint arrivals(self, double now) noexcept nogil
    cdef bint dispatch(self, int64_t row, double now) noexcept nogil
    cdef bint routed(self, int64_t row, double now) noexcept nogil
    cdef bint path_of_tokens(self, int64_t row) noexcept with gil
    cdef bint placed(self, double now) noexcept nogil
    cdef void late_events(self, int64_t worker) noexcept nogil
    cdef int32_t form(self, int64_t row, int64_t worker, int64_t limit) noexcept nogil
    cdef double next_ready(self) noexcept nogil
    cdef bint ended_rows(self, View* c, double now) noexcept nogil
    cdef bint coupled(self, int64_t passes) noexcept nogil
    cdef bint rescue(self) noexcept nogil
    cdef bint completions(self) noexcept nogil
    cdef bint apart(self) noexcept nogil
    cdef bint ahead(self, int64_t worker, int64_t* done) noexcept nogil
    cdef bint settle(self, int64_t* done) noexcept nogil


cdef void tell_sglang(Router* route, int32_t worker, SglangCore* g) noexcept nogil
