# Slots of an SGLang core and what they advertise; structures in _sglang.pxd.
from mocker._common cimport int32_t, int64_t
from mocker._sglang cimport SglangCore, SglRequest


cdef int told_init(SglangCore* c) noexcept nogil
cdef void publish_stored(SglangCore* c, SglRequest* r, int64_t first_new, int64_t pages) noexcept nogil
cdef void abandon(SglangCore* c, SglRequest* r) noexcept nogil
cdef void clean_up(SglangCore* c, SglRequest* r) noexcept nogil
cdef void evict(SglangCore* c, int64_t tokens) noexcept nogil
cdef void cache_pages(SglangCore* c, SglRequest* r, int32_t pages) noexcept nogil
