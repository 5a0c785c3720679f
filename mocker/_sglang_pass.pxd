# One pass of an SGLang core.
from mocker._sglang cimport SglangCore


cdef void run_pass(SglangCore* c, double now) noexcept nogil
