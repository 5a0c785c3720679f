# Data dictionary of the hand-offs of disaggregated replays, and of the steps that they wait for.
from mocker._cluster cimport Cluster
from mocker._collect cimport Collector
from mocker._common cimport int32_t, int64_t, uint32_t
from mocker._heap cimport Pending
from mocker._router cimport RouterCore
from mocker._steps cimport Steps


cdef enum Step:                    # what a hand-off does next
    SUBMIT_PREFILL = 0
    RESERVE_DESTINATION = 1
    START_TRANSFER = 2
    ACTIVATE_DESTINATION = 3
    RELEASE_SOURCE = 4
    CANCEL_SOURCE = 5
    CANCEL_DESTINATION = 6
    COMPLETE = 7
    STEPS = 8


cdef enum Mark:                    # what has happened to a request
    SUBMIT_ISSUED = 1
    SOURCE_HELD = 2
    RESERVE_ISSUED = 4
    RESERVED = 8
    TRANSFER_ISSUED = 16
    CANCELING = 32
    SOURCE_CLEAN = 64
    DESTINATION_CLEAN = 128
    PREFILL_ROUTED = 256           # its prefill router counts it
    DECODE_ROUTED = 512
    SOURCE_ALIVE = 1024            # its slot on the prefill worker is its own
    OVER = 2048                    # the hand-off is


cdef enum:
    RANK_SHIFT = 32                # of `Pending.second`, an event's rank among those noted at its time; below: what


cdef inline int64_t event_of(Pending entry) noexcept nogil:
    """Worker, READY + worker, or ROUND + row whose transfer ends."""
    return <int64_t><uint32_t>entry.second


cdef class Handoffs(Cluster):
    cdef readonly Collector prefill_collector   # what the prefill workers did
    cdef readonly object details         # dict of arrays by row, see `split`
    cdef RouterCore prefill_router
    cdef RouterCore decode_router
    cdef double kv_bytes                 # of a token; NaN: transfers take no time
    cdef double bandwidth                # GB/s; NaN: the same
    cdef bint full_prompt                # all of the prompt is sent, not only what the decode worker misses
    cdef bint source_first
    cdef int32_t[::1] marks              # [n] set of Mark
    cdef int32_t[::1] source_slot        # [n] slot on the prefill worker
    cdef int32_t[::1] slot               # [n] slot on the decode worker
    cdef int32_t[::1] source             # [n] number of the prefill worker, NIL until assigned
    cdef int64_t[::1] missing            # [n] tokens that the decode worker misses
    cdef double[::1] held_ms
    cdef double[::1] reserved_ms
    cdef double[::1] activated_ms
    cdef double[::1] released_ms
    cdef int64_t[::1] prefill_overlap
    cdef int64_t[::1] decode_overlap
    cdef int64_t* tries                  # [workers] passes in a row that brought nobody further
    cdef int64_t* begun                  # [workers] rank of the pass that began now and is no event yet, 0: none
    cdef double ranked_at                # `sequence` counts ranks from this time on
    cdef Steps pending
    cdef Steps* deferred                 # [workers] steps that wait for the worker's pass to end
    cdef int64_t places                  # of these three
    cdef Steps waits[2]                  # steps that wait for a worker of a role
    cdef int64_t open                    # hand-offs begun and not complete

    cdef int equip(self, int64_t worker) except -1
    cdef bint issue(self, int64_t row, int step) noexcept nogil
    cdef bint defer(self, int64_t row, int step, int64_t worker) noexcept nogil
    cdef bint advance(self, int64_t row) noexcept nogil
    cdef bint fail(self, int64_t row, int terminal) noexcept nogil
    cdef bint cleaned(self, int64_t row, int mark) noexcept nogil
    cdef bint drive(self, bint* changed) noexcept nogil
    cdef bint take_step(self, int64_t row, int step, bint* changed) noexcept nogil
    cdef void rest(self, int64_t worker) noexcept nogil
    cdef bint capacity(self, int64_t worker) noexcept nogil
    cdef int64_t retry(self, int64_t worker) noexcept nogil
    cdef bint reserved(self, int64_t worker, int64_t row) noexcept nogil
    cdef bint complete(self, int64_t row) noexcept nogil
    cdef bint route_to(self, int64_t row, int pool) noexcept nogil
    cdef bint drain(self, int pool) noexcept nogil
    cdef bint leave_router(self, int64_t row, int pool) noexcept nogil
    cdef bint assign(self, int64_t row, int pool, int32_t worker, int64_t overlap) noexcept nogil
    cdef bint submit_source(self, int64_t row, int32_t worker) noexcept nogil
    cdef bint reserve(self, int64_t row, int64_t worker) noexcept nogil
    cdef void tell(self, int64_t worker) noexcept nogil
    cdef bint expect_at(self, double at, double since, int64_t rank, int64_t what) noexcept nogil
