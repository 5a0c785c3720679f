# One engine core as a Python object that owns the memory; the cluster works on its `c` directly.
from mocker._common cimport int32_t, int64_t, uint32_t
from mocker._core cimport Core


cdef int raise_score(tuple hooks) except -1


cdef class EngineCore:
    cdef Core c
    cdef int64_t next_event        # id of the next KV event
    cdef readonly int64_t worker_id
    cdef readonly object timing    # CompiledModel that is asked for times, or None
    cdef readonly object tiers     # OffloadTiers, or None
    cdef readonly tuple hooks      # scores of (who is preempted, who is admitted, what is evicted), or None

    cdef int32_t load(self, int64_t handle, const uint32_t[::1] tokens, int64_t limit,
                      const uint32_t[::1] plan) except -1
    cdef int raise_error(self) except -1
