# The scheduling phases of a pass under the scheduler with switches.
from mocker._common cimport int64_t
from mocker._rules cimport VllmRulesCore


cdef void schedule_running(VllmRulesCore* x) noexcept nogil
cdef int64_t cached_known(void* x, void* request) noexcept nogil
cdef void admit_waiting(VllmRulesCore* x, double now) noexcept nogil
