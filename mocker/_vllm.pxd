# What the cluster and the object API call of the scheduler; the structures are in _core.pxd.
from mocker._common cimport int32_t, int64_t
from mocker._core cimport Core, Request


cdef int core_init(Core* c) noexcept nogil
cdef void core_free(Core* c) noexcept nogil
cdef int32_t core_new(Core* c, int64_t id, int64_t prompt, int64_t limit) noexcept nogil
cdef void core_enqueue(Core* c, int32_t slot, int64_t place) noexcept nogil
cdef int64_t core_drop(Core* c, int32_t slot) noexcept nogil
cdef void core_pass(Core* c, double now) noexcept nogil
cdef double core_forward(Core* c, double now, double until, double last_start) noexcept nogil
cdef void core_metrics(Core* c) noexcept nogil
