# The token phase of a pass under the scheduler with switches.
from mocker._common cimport int64_t
from mocker._rules cimport VllmRulesCore


cdef int64_t collect_ready(VllmRulesCore* x, int64_t* total_length) noexcept nogil
cdef double emit(VllmRulesCore* x, int64_t n, int64_t total_length, double start) noexcept nogil
cdef void settle(VllmRulesCore* x) noexcept nogil
