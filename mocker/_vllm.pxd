# What the cluster and the object API call of the scheduler; the structures are in _core.pxd.
from mocker._common cimport int64_t
from mocker._core cimport Core


cdef void core_pass(Core* c, double now) noexcept nogil
cdef double core_forward(Core* c, double now, double until, double last_start) noexcept nogil
cdef void core_metrics(Core* c) noexcept nogil
cdef int64_t cached_prompt(void* core, void* request) noexcept nogil
