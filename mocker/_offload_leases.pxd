# Leases and batches of KV offload.
from mocker._common cimport ERR_MEMORY, int32_t, int64_t
from mocker._offload cimport Lane, Offload, Shared
from mocker._offload_blocks cimport BlockSet, Span, Spans, spans_add


cdef void list_ready(Offload* o, int32_t place) noexcept nogil
cdef void append_all(Offload* o, Spans* list, Spans* what) noexcept nogil
cdef void enlist(Offload* o, BlockSet* s, Span* part) noexcept nogil
cdef void delist(BlockSet* s, Span* part) noexcept nogil
cdef int32_t lease_new(Offload* o, int kind) noexcept nogil
cdef void lease_drop(Offload* o, int32_t place) noexcept nogil
cdef void lane_add(Offload* o, Lane* lane, int32_t place, int64_t first) noexcept nogil
cdef void lane_start(Offload* o, int32_t place) noexcept nogil
cdef void lane_pump(Offload* o, Lane* lane, Shared* s) noexcept nogil
cdef void lane_mark(Offload* o, Lane* lane) noexcept nogil
cdef void slots_read(Offload* o, int32_t place, int64_t first, int64_t count) noexcept nogil
cdef void pump_shared(Offload* o) noexcept nogil


cdef inline void append(Offload* o, Spans* list, Span part, int64_t cut) noexcept nogil:
    if not spans_add(list, part, cut):
        o.error = ERR_MEMORY
