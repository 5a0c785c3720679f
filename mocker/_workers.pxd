# Data dictionary of the workers of a replay, whatever engine they run.
from mocker._collect cimport Collector
from mocker._common cimport int32_t, int64_t, uint8_t
from mocker._offload_engine cimport OffloadWorld
from mocker._paths cimport PathTable
from mocker._record cimport Recorder, Timeline
from mocker._router cimport Router, RouterCore
from mocker._rules cimport VllmRulesCore
from mocker._sglang cimport SglangCore
from mocker._watch cimport Watch


cdef enum EngineKind:
    KIND_CORE = 0                  # vLLM as the reference has it, TRT-LLM
    KIND_SGLANG = 1
    KIND_RULES = 2                 # vLLM by switchable rules


cdef enum FastBit:                 # see mocker.replay.fast
    FAST_CLOCK = 1
    FAST_AHEAD = 2
    FAST_CALENDAR = 4              # times the requests from which on a calendar is used, 0: never


# What the cluster sees of a worker after a pass. No two numbers copied from the engine are neighbours: compilers read
# and write such pairs at once, and a processor waits for that when their halves have just been written one by one.
cdef struct View:
    double end_ms
    bint preempted                 # the next pass may differ though this one brought nothing
    double last_start
    bint worked                    # tokens were scheduled
    int64_t passed                 # of those foreseen, how many have begun, two pools
    int64_t count                  # requests alive
    bint steady                    # fast-forward may go on
    int64_t n_waiting
    int64_t gone                   # since `fold`: requests that ended in a lane, or that no engine takes
    int64_t made                   # tokens made in the pass
    int64_t clamped                # since `fold`: requests whose output TRT-LLM cut to the pool
    int64_t completed              # requests gone in the pass
    int64_t idle                   # passes in a row that brought nobody further
    int64_t admitted
    bint early                     # the newest pass ran before its time came; its endings are not told yet
    int64_t passes                 # since the start
    bint asleep                    # no pass brings anybody further until somebody comes or goes
    int64_t foreseen               # passes after the one under way that are known and have not happened; 0: none
    int64_t rank                   # of the event of the one under way, two pools
    int64_t* ended                 # [ended_used] rows gone, ~row for a first token
    int error
    int64_t ended_used
    int64_t apart[8]               # threads write into neighbours: no two of them in one line of the cache


cdef enum:                         # roles
    ROLE_PREFILL = 0
    ROLE_DECODE = 1                # or both: aggregated


cdef enum:                         # lives
    LIFE_STARTING = 0              # takes no requests yet
    LIFE_ACTIVE = 1
    LIFE_DRAINING = 2              # takes no more requests
    LIFE_GONE = 3


cdef enum:
    IDLE_LIMIT = 100000            # passes in a row, beyond the tokens of the pool, that bring nobody further: stuck


cdef enum:
    READY = 1 << 23                # event of a worker: it has started; worker numbers are below
    ROUND = 1 << 24                # event of a worker: times the round of passes; or more than any of a worker


cdef struct Team:                  # the workers of a role
    int64_t* members               # [used] worker of each number; numbers are never used again
    int64_t used
    int64_t cap
    int64_t* active                # [n_active] workers that take requests, by number
    int64_t active_cap
    int64_t n_active
    int64_t n_starting
    int64_t n_draining
    int64_t turn                   # round robin: place in `active` of the next one
    double seconds                 # provisioned worker-seconds so far


cdef class Workers:
    cdef readonly list engines
    cdef readonly Collector collector
    cdef readonly object worker_of       # int32[n], -1 until assigned
    cdef readonly object arrival_of      # float64[n], when it really arrived; NaN: it did not
    cdef readonly double now             # ms, coupled loop
    cdef readonly int64_t clamped        # requests whose output TRT-LLM cut to the pool
    cdef readonly int64_t ended          # requests gone so far
    cdef readonly RouterCore router
    cdef int kind                        # EngineKind
    cdef void** cores                    # [workers] Core or SglangCore
    cdef VllmRulesCore** rules           # [workers] beside the Core, NULL without rules
    cdef View* views                     # [workers]
    cdef uint8_t* busy                   # [workers] in a pass
    cdef int64_t workers
    cdef int64_t workers_cap
    cdef uint8_t* role                   # [workers] ROLE_*
    cdef uint8_t* life                   # [workers] LIFE_*
    cdef int32_t* number                 # [workers] within its team
    cdef Team teams[2]                   # by role
    cdef Watch watch                     # None: nobody asks
    cdef list leavers                    # workers gone whose engines are not given back yet
    cdef readonly dict departed          # SGLang's books of the workers that are gone
    cdef int64_t n
    cdef const double[::1] arrival
    cdef const int64_t[::1] prompt
    cdef const int64_t[::1] limit
    cdef int32_t[::1] worker
    cdef double[::1] arrived
    cdef PathTable paths
    cdef object tokens
    cdef double cap
    cdef bint single
    cdef int fast                        # FastBit set
    cdef Router* routes[2]               # by role; NULL: round robin
    cdef Router* route                   # of aggregated workers; NULL: round robin
    cdef const int64_t[::1] priority     # [n] or NULL
    cdef const int64_t[::1] strict
    cdef const int32_t[::1] policy       # [n] router queue class code
    cdef bint ranked                     # these three are set
    cdef bint wishes                     # some engine has a score of who waits
    cdef bint overtaking                 # it, or a priority: who comes may go before those who wait
    cdef readonly Recorder recorder
    cdef Timeline* timeline              # its; NULL: nobody records
    cdef readonly OffloadWorld offload   # tiers below the workers, or None

    cdef int reserve_workers(self, int64_t need) except -1
    cdef int attach(self, object engine, int64_t worker) except -1
    cdef bint enlist(self, int64_t worker, int role, int life) noexcept nogil
    cdef int64_t hire(self, object engine, int role, int life) except -1
    cdef bint begin(self, int64_t worker) noexcept nogil
    cdef void retire(self, int64_t worker) noexcept nogil
    cdef void go(self, int64_t worker) noexcept with gil
    cdef bint drained(self, int64_t worker) noexcept nogil
    cdef bint leave(self) noexcept nogil
    cdef void measure(self, int64_t worker) noexcept nogil
    cdef void observe(self, int64_t worker) noexcept nogil
    cdef void saw_end(self, int64_t row) noexcept nogil
    cdef void clock_to(self, double at) noexcept nogil
    cdef bint submit(self, int64_t row, int64_t worker) noexcept nogil
    cdef bint submit_tokens(self, int64_t row, int64_t worker) noexcept with gil
    cdef int32_t form(self, int64_t row, int64_t worker, int64_t limit) noexcept nogil
    cdef bint wish(self, int64_t row, int64_t worker, int32_t slot) noexcept nogil
    cdef int32_t form_tokens(self, int64_t row, int64_t worker, int64_t limit) noexcept with gil
    cdef void run_pass(self, int64_t worker, double now) noexcept nogil
    cdef double forward(self, int64_t worker, double now, double until) noexcept nogil
    cdef double repeat(self, int64_t worker, double now, double until) noexcept nogil
    cdef double forward_recorded(self, int64_t worker, double now, double until) noexcept nogil
    cdef void look(self, int64_t worker) noexcept nogil
    cdef void fold(self, int64_t worker) noexcept nogil
    cdef bint brought(self, View* c) noexcept nogil
    cdef bint drop(self, int64_t row, int64_t worker) noexcept nogil
    cdef void uncount(self, View* c) noexcept nogil
    cdef bint turn_ended(self, int64_t row, double now) noexcept nogil
    cdef bint stuck(self, int64_t worker, double start) noexcept nogil
    cdef int64_t pool_tokens(self, int64_t worker) noexcept nogil
    cdef bint below(self, int64_t worker) noexcept nogil
    cdef void allow_strides(self)
    cdef double next_below(self) noexcept nogil


cdef void* resized(void* array, int64_t cap, size_t size) except NULL
cdef void tell_sglang(Router* route, int32_t worker, SglangCore* g) noexcept nogil
