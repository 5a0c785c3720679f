# The requests of a core: slots, queues, endings and preemption, as the scheduler and the token phase call them.
from mocker._common cimport int32_t, int64_t
from mocker._core cimport Core, Request


cdef int core_init(Core* c) noexcept nogil
cdef void core_free(Core* c) noexcept nogil
cdef int32_t core_new(Core* c, int64_t id, int64_t prompt, int64_t limit) noexcept nogil
cdef void core_enqueue(Core* c, int32_t slot, int64_t place) noexcept nogil
cdef int64_t core_drop(Core* c, int32_t slot) noexcept nogil
cdef int32_t waiting_first(Core* c) noexcept nogil
cdef int32_t waiting_next(Core* c) noexcept nogil
cdef void waiting_pop(Core* c) noexcept nogil
cdef void waiting_prepend(Core* c, int32_t slot) noexcept nogil
cdef void waiting_remove(Core* c, int32_t slot) noexcept nogil
cdef void slot_free(Core* c, int32_t slot) noexcept nogil
cdef void blocks_release(Core* c, Request* r, int64_t tokens) noexcept nogil
cdef void running_compact(Core* c) noexcept nogil
cdef void signal(Core* c, bint late, int64_t id, int64_t token, int terminal, double handoff_ms) noexcept nogil
cdef void note(Core* c, int64_t what) noexcept nogil
cdef void request_end(Core* c, int32_t slot, int terminal, bint late) noexcept nogil
cdef void finish(Core* c, int32_t slot, int terminal) noexcept nogil
cdef int32_t preempt(Core* c) noexcept nogil
cdef bint outgrown(Core* c, int32_t slot, bint late) noexcept nogil
