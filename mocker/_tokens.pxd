# The token phase of a pass.
from libc.math cimport NAN, isnan

from mocker._common cimport WORKER_PREFILL, int64_t
from mocker._core cimport Core, Request


cdef int64_t collect_ready(Core* c, int64_t* total_length) noexcept nogil
cdef double emit(Core* c, int64_t n, int64_t total_length, double start) noexcept nogil
cdef double emit_bursts(Core* c, int64_t n, double start) noexcept nogil
cdef void promote(Core* c, Request* r) noexcept nogil
cdef void collect_token(Core* c, Request* r, double at, int64_t* together) noexcept nogil


cdef inline double handoff_ms(Core* c, Request* r) noexcept nogil:
    """Time to transfer the prompt's KV when a prefill worker finishes it; NaN if not modelled."""
    if c.worker_type != WORKER_PREFILL or isnan(c.kv_bytes) or not (c.kv_bandwidth > 0.0):
        return NAN
    return <double>r.prompt * c.kv_bytes / (c.kv_bandwidth * 1e9) * 1000.0
