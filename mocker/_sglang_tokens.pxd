# One token of an SGLang request; structures in _sglang.pxd. Inline, but for what a full page or a hash needs.
from mocker._common cimport NIL, int64_t, uint32_t
from mocker._sglang cimport SglangCore, SglRequest


cdef uint32_t hashed_token(SglRequest* r) noexcept nogil
cdef void page_filled(SglangCore* c, SglRequest* r) noexcept nogil


cdef inline int64_t push_token(SglangCore* c, SglRequest* r) noexcept nogil:
    """One more token, whose slot is there; returns it (NIL without real tokens)."""
    cdef int64_t token = NIL
    if c.real_tokens:
        token = r.plan[r.gen] if r.gen < r.plan_used else hashed_token(r)
        r.tail[r.tail_used] = <uint32_t>token
        r.tail_used += 1
    if r.len + 1 > r.alloc:
        r.alloc += c.page
    r.len += 1
    r.gen += 1
    r.computed += 1
    if r.len == (r.full + <int64_t>1) * c.page:
        page_filled(c, r)
    return token
