# The token phase of an SGLang pass.
from mocker._sglang cimport SglangCore


cdef double decode(SglangCore* c, double start) noexcept nogil
