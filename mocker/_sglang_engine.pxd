# One SGLang engine core as a Python object that owns the memory; the cluster works on its `c` directly.
from mocker._common cimport int32_t, int64_t, uint32_t, uint64_t
from mocker._sglang cimport SglangCore


cdef class SglangEngine:
    cdef SglangCore c
    cdef int64_t next_event        # id of the next KV event
    cdef readonly int64_t worker_id
    cdef readonly tuple hooks      # as of `EngineCore`
    cdef readonly object timing    # CompiledModel that is asked for times, or None
    cdef readonly object collector  # Collector that it writes into, or None

    cdef int raise_error(self) except -1
    cdef int32_t load(self, int64_t handle, const uint32_t[::1] tokens, int64_t limit, const uint32_t[::1] plan,
                      uint64_t high, uint64_t low) except -1
