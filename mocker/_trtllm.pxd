# What TRT-LLM's GUARANTEED_NO_EVICT does otherwise than vLLM: output clamp and admission arithmetic.
from mocker._common cimport int64_t
from mocker._core cimport Core, Request


cdef int64_t trt_limit(Core* c, int64_t prompt, int64_t limit) noexcept nogil
cdef int64_t trt_blocks(Core* c, Request* r) noexcept nogil
cdef bint trt_fits(Core* c, Request* r, int64_t active_cached) noexcept nogil
