# Requests of an SGLang core: slots, queues, endings, hand-off; structures in _sglang.pxd.
# Room in arrays and the ring of the waiting are inline, since every pass uses them.
from mocker._common cimport grown, int32_t, int64_t
from mocker._sglang cimport SglangCore, SglRequest


cdef inline bint indices(int32_t** array, int64_t* capacity, int64_t need) noexcept nogil:
    """Room for `need` slot numbers."""
    cdef void* moved = grown(array[0], capacity, need, sizeof(int32_t))
    if moved == NULL:
        return False
    array[0] = <int32_t*>moved
    return True


cdef inline bint numbers(int64_t** array, int64_t* capacity, int64_t need) noexcept nogil:
    """Room for `need` ids."""
    cdef void* moved = grown(array[0], capacity, need, sizeof(int64_t))
    if moved == NULL:
        return False
    array[0] = <int64_t*>moved
    return True


cdef inline int32_t waiting_at(SglangCore* c, int64_t i) noexcept nogil:
    return c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]


cdef inline void waiting_pop(SglangCore* c) noexcept nogil:
    c.waiting_head = (c.waiting_head + 1) & (c.waiting_cap - 1)
    c.n_waiting -= 1


cdef void slot_free(SglangCore* c, int32_t slot) noexcept nogil
cdef void waiting_append(SglangCore* c, int32_t slot) noexcept nogil
cdef void waiting_prepend(SglangCore* c, int32_t slot) noexcept nogil
cdef void signal(SglangCore* c, int64_t id, int64_t token, int terminal, double handoff_ms) noexcept nogil
cdef void note(SglangCore* c, int64_t what) noexcept nogil
cdef inline void count_running(SglangCore* c, SglRequest* r, int64_t sign) noexcept nogil:
    """A request joins (1) or leaves (-1) those that run, to their sums."""
    c.known += sign * r.len
    c.extra += sign * (r.alloc - r.computed)
    c.rest += sign * (r.limit - r.gen)


cdef void complete(SglangCore* c, int32_t slot) noexcept nogil
cdef void give_up(SglangCore* c, int32_t slot, int terminal) noexcept nogil
cdef void request_drop(SglangCore* c, int32_t slot) noexcept nogil
cdef void source_release(SglangCore* c, int32_t slot) noexcept nogil
cdef bint destination_reserve(SglangCore* c, int32_t slot, int64_t handoff) noexcept nogil
cdef int32_t destination_retry(SglangCore* c) noexcept nogil
cdef void destination_activate(SglangCore* c, int32_t slot) noexcept nogil
