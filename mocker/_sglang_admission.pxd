# Admission of an SGLang core; structures in _sglang.pxd. What passes reckon with is inline.
from mocker._common cimport int64_t
from mocker._sglang cimport SglangCore, SglRequest

cdef enum:
    LPM_LIMIT = 128                # waiting requests beyond which LPM leaves the queue as it is


cdef inline int64_t clipped(SglangCore* c, SglRequest* r) noexcept nogil:
    """Output tokens that admission reckons with."""
    cdef int64_t rest = r.limit - r.gen
    return rest if rest < c.clip else c.clip


cdef inline int64_t paged(SglangCore* c, int64_t tokens) noexcept nogil:
    return (tokens + c.page - 1) // c.page * c.page


cdef int64_t lowest_score(SglangCore* c) noexcept nogil
cdef bint first_by_score(SglangCore* c, double now) noexcept nogil
cdef void order_waiting(SglangCore* c) noexcept nogil
cdef double reserved_output(SglangCore* c) noexcept nogil
cdef int hopeless(SglangCore* c, SglRequest* r) noexcept nogil
cdef bint take_chunk(SglangCore* c, SglRequest* r, int64_t chunk, int64_t* reused) noexcept nogil
cdef void note_admission(SglangCore* c, SglRequest* r, int64_t reused, double now) noexcept nogil
cdef void note_chunk(SglangCore* c, SglRequest* r, int64_t reused, int64_t tokens) noexcept nogil
