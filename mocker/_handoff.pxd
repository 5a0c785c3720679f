# Hand-off commands of a core: prompts computed here for elsewhere (sources), and elsewhere for here (destinations).
from mocker._common cimport int32_t, int64_t
from mocker._core cimport Core


cdef void handoff_release_source(Core* c, int32_t slot) noexcept nogil
cdef bint handoff_reserve(Core* c, int32_t slot) noexcept nogil
cdef int32_t handoff_retry(Core* c) noexcept nogil
cdef bint handoff_due(Core* c) noexcept nogil
cdef void handoff_hasten(Core* c, int32_t slot, int64_t at) noexcept nogil
cdef void handoff_activate(Core* c, int32_t slot) noexcept nogil
cdef void handoff_activate_at(Core* c, int32_t slot, int64_t place) noexcept nogil
cdef bint handoff_withdraw(Core* c, int32_t slot) noexcept nogil
cdef bint handoff_yield(Core* c) noexcept nogil
