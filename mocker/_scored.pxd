# Choices by scores for vLLM-like cores; see _hooks.pxd.
from mocker._common cimport int32_t, int64_t
from mocker._core cimport Core


cdef int64_t lowest_score(Core* c) noexcept nogil
cdef int32_t lowest_waiting(Core* c) noexcept nogil
