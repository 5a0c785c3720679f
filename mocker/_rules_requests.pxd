# Requests of the scheduler with switches: queue, endings, preemption; structures in _rules.pxd.
from mocker._common cimport int32_t
from mocker._core cimport Core
from mocker._rules cimport VllmRulesCore


cdef inline bint before(VllmRulesCore* x, int32_t a, int32_t b) noexcept nogil:
    """Priority, then arrival."""
    if x.extra[a].priority != x.extra[b].priority:
        return x.extra[a].priority < x.extra[b].priority
    return x.extra[a].order < x.extra[b].order


cdef void waiting_restore(VllmRulesCore* x) noexcept nogil
cdef void waiting_remove(Core* c, int32_t slot) noexcept nogil
cdef void slot_free(VllmRulesCore* x, int32_t slot) noexcept nogil
cdef void request_end(VllmRulesCore* x, int32_t slot, int terminal, bint late) noexcept nogil
cdef void end_head(VllmRulesCore* x, int32_t slot, int terminal) noexcept nogil
cdef int32_t preempt(VllmRulesCore* x) noexcept nogil
cdef void outgrown(VllmRulesCore* x, int32_t slot, bint late) noexcept nogil
