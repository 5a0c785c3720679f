# The calendar of a core (its structure is in _core.pxd): whoever sleeps in it takes one plain decode step a pass.
from mocker._common cimport int32_t, int64_t
from mocker._core cimport Core, Request


cdef void calendar_free(Core* c) noexcept nogil
cdef bint calendar_wake(Core* c) noexcept nogil
cdef void calendar_admit(Core* c, int32_t slot) noexcept nogil
cdef bint calendar_room(Core* c) noexcept nogil
cdef int64_t calendar_rest(Core* c) noexcept nogil
cdef void calendar_compact(Core* c) noexcept nogil
cdef void calendar_turn(Core* c) noexcept nogil
cdef void calendar_open(Core* c) noexcept nogil
cdef void calendar_settle(Core* c, bint scheduled, int32_t slot) noexcept nogil

cdef inline bint usual(Core* c, Request* r) noexcept nogil:
    """Whether all that its next pass computes is its newest token, in a block that it has."""
    return r.computed == r.len - 1 and r.gen > 0 and r.computed > 0 and (r.alloc >= r.len or r.alloc & c.mask)


cdef inline int64_t asleep_length(Core* c) noexcept nogil:
    """Sum of the known tokens of those who sleep."""
    return c.calendar.base + c.calendar.asleep * c.calendar.tick
