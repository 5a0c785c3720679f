# Requests that wait for a worker; structures in _router.pxd.
from mocker._common cimport int32_t, int64_t, uint32_t
from mocker._kv cimport Path
from mocker._router cimport QueueClass, Router


cdef int32_t heap_take(Router* r, QueueClass* q, int64_t i) noexcept nogil
cdef bint all_busy(Router* r, QueueClass* q, int64_t now) noexcept nogil
cdef int32_t enqueue(Router* r, int64_t row, Path* path, int32_t n, int64_t isl, int64_t cached, int64_t priority,
                     uint32_t strict, int32_t c, double now) noexcept nogil
cdef int32_t next_ticket(Router* r, int64_t now) noexcept nogil
