# What the router knows of blocks below the GPU, if it credits them (`Router.lower`); structures in _router.pxd.
from mocker._common cimport int32_t, int64_t, uint64_t
from mocker._kv cimport Event, Pool
from mocker._router cimport Lower, Router, Ticket

cdef enum LowerTier:               # numbers of the tiers, as in the events
    TIER_HOST = 1
    TIER_DISK = 2
    TIER_EXTERNAL = 3
    LOWER_TIERS = 3


cdef Lower* lower_new(double host_weight, double disk_weight) noexcept nogil
cdef void lower_free(Lower* below) noexcept nogil
cdef bint lower_room(Lower* below, int64_t workers) noexcept nogil
cdef void lower_event(Router* r, int32_t worker, Event* e, Pool* pool) noexcept nogil
cdef void lower_block(Router* r, int32_t worker, int tier, uint64_t key, int32_t at, bint stored) noexcept nogil
cdef void lower_cleared(Router* r, int32_t worker, int tier) noexcept nogil
cdef void lower_walk(Router* r, const uint64_t* keys, const int32_t* ends, int32_t n) noexcept nogil
cdef bint lower_keep(Router* r, Ticket* t) noexcept nogil
cdef void lower_recall(Router* r, Ticket* t) noexcept nogil
cdef int64_t lower_cached(Router* r, int32_t worker) noexcept nogil
cdef int64_t lower_best(Router* r) noexcept nogil


cdef inline int64_t cached_tokens(Router* r, int32_t worker) noexcept nogil:
    """Prompt tokens of the request under way that a worker need not compute."""
    if r.lower == NULL:
        return <int64_t>r.overlap[worker] * r.block_size
    return lower_cached(r, worker)
