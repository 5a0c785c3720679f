# Shared C vocabulary of the compiled modules: integer types, enums, error codes, one way to grow an array.
# No state and no behaviour of the engine lives here.
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport realloc

cdef enum:
    NIL = -1                       # no slot, run or row

cdef enum ErrorCode:
    ERR_OK = 0
    ERR_MEMORY = 1                 # an allocation failed
    ERR_TIME = 2                   # a duration is not finite or exceeds the clock's range
    ERR_HOOK = 3                   # a score of the user's failed

cdef enum RequestStatus:
    ST_FREE = 0                    # slot not in use
    ST_WAITING = 1                 # queued, never preempted since it arrived
    ST_RUNNING = 2
    ST_PREEMPTED = 3               # queued again, keeps its generated tokens
    ST_HELD = 4                    # hand-off source: done, its blocks are kept until it is released
    ST_PENDING = 5                 # hand-off destination that waits for a reservation
    ST_RESERVED = 6                # hand-off destination with room for its prompt
    ST_PARKED = 7                  # waits for its blocks to come up from a lower tier, in no queue

cdef enum WorkerType:
    WORKER_AGGREGATED = 0
    WORKER_PREFILL = 1
    WORKER_DECODE = 2

cdef enum Policy:
    POLICY_VLLM = 0
    POLICY_TRTLLM = 1              # GUARANTEED_NO_EVICT

cdef enum Terminal:                # how a request ended; the order is that of mocker.simulation's names
    END_NONE = 0                   # not ended (yet)
    END_COMPLETED = 1
    END_REJECTED = 2               # its admission footprint exceeds the whole pool
    END_CAPACITY = 3               # outgrew the pool while nothing else held a block
    END_OVER_BUDGET = 4            # chunked prefill off and more prompt than a pass may hold
    END_FAILED = 5                 # its hand-off did: no decode worker can hold its prompt
    END_CANCELED = 6


cdef inline void* grown(void* array, int64_t* capacity, int64_t need, size_t item) noexcept nogil:
    """`array` with room for `need` items (doubling), or NULL with `array` and `capacity` as they were."""
    cdef int64_t target = capacity[0] * 2
    if need <= capacity[0]:
        return array
    if target < need:
        target = need
    if target < 16:
        target = 16
    cdef void* moved = realloc(array, <size_t>target * item)
    if moved != NULL:
        capacity[0] = target
    return moved


cdef inline bint grown_both(void** first, size_t one, void** second, size_t other, int64_t* capacity,
                            int64_t need) noexcept nogil:
    """`grown` of two arrays of one length, in place; false if memory is short: the capacity is then as it was."""
    cdef int64_t cap = capacity[0]
    cdef void* moved = grown(first[0], &cap, need, one)
    if moved == NULL:
        return False
    first[0] = moved
    moved = grown(second[0], capacity, need, other)
    if moved == NULL:
        return False
    second[0] = moved
    return True
