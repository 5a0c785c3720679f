# Copies of KV offload.
from mocker._common cimport int64_t
from mocker._offload cimport Lane, Offload, Shared
from mocker._offload_blocks cimport Cursor
from mocker._offload_links cimport Transfer


cdef bint offload_enqueue(Offload* o, int64_t count, int64_t* released) noexcept nogil
cdef void arrived(Offload* o, Transfer* t) noexcept nogil
cdef void write_through(Offload* o) noexcept nogil
cdef void copy_down(Offload* o, Shared* s, Lane* lane, int kind, Cursor* from_, int64_t count) noexcept nogil
cdef void shared_drain(Offload* o, Shared* s, double now) noexcept nogil
