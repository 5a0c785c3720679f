# Promotions of KV offload.
from mocker._common cimport int32_t
from mocker._kv cimport Path
from mocker._offload cimport Offload


cdef bint offload_plan(Offload* o, Path* path, int32_t skip, int32_t full, bint stage) noexcept nogil
cdef void offload_drop_plan(Offload* o) noexcept nogil
cdef int32_t offload_start(Offload* o, double now) noexcept nogil
cdef void offload_finish(Offload* o, int32_t place) noexcept nogil
cdef void pump_staged(Offload* o, double now) noexcept nogil
cdef void staged_up(Offload* o, int32_t place) noexcept nogil
