# What the scheduler calls of KV offload, if its core has tiers.
from mocker._common cimport int32_t, int64_t
from mocker._core cimport Core
from mocker._kv cimport Pool

cdef enum Promotion:               # of a request that could be admitted
    UP_MISS = 0                    # nothing comes from below
    UP_PARKED = 1                  # it waits for its blocks, outside the queue
    UP_BLOCKED = 2                 # it waits for slots


cdef bint tiers_make_room(Pool* p, int64_t count) noexcept nogil
cdef void tiers_look(Core* c, double now) noexcept nogil
cdef double tiers_rest(Core* c, double until) noexcept nogil
cdef void tiers_begin(Core* c, double now) noexcept nogil
cdef Promotion tiers_promote(Core* c, int32_t slot, int64_t cached, int64_t idle, double now) noexcept nogil
cdef void tiers_wait(Core* c, int32_t slot) noexcept nogil
cdef void tiers_deny(Core* c, int32_t slot) noexcept nogil
cdef bint tiers_admit(Core* c) noexcept nogil
cdef void tiers_cancel(Core* c, int32_t slot) noexcept nogil
cdef double tiers_deadline(Core* c) noexcept nogil
cdef double tiers_end(Core* c, double now, double end) noexcept nogil
cdef void tiers_arrived(Core* c) noexcept nogil
cdef bint tiers_quiet(Core* c) noexcept nogil
