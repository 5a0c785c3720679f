# The token phase of a pass.
from mocker._common cimport int64_t
from mocker._core cimport Core


cdef int64_t collect_ready(Core* c, int64_t* total_length) noexcept nogil
cdef double emit(Core* c, int64_t n, int64_t total_length, double start) noexcept nogil
cdef double emit_bursts(Core* c, int64_t n, double start) noexcept nogil
