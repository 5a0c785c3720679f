# cython: language_level=3
"""Hand-off commands of the vLLM core, for disaggregated prefill and decode.

Answers to `apply_command_effects` and `retry_pending_destinations` of `scheduler/vllm/core.rs` and to
`scheduler/source_holds.rs`. A source keeps its blocks when it is done, until it is released. A destination first
waits for room for its prompt (strictly in order, one try per capacity generation, one reservation per call), holds it,
and joins the queue when it is activated. Costs: the pool's operations; withdrawing a pending one O(pending).
"""
from mocker._common cimport (
    ERR_MEMORY, NIL, ST_HELD, ST_PENDING, ST_PREEMPTED, ST_RESERVED, ST_WAITING, grown, int32_t, int64_t)
from mocker._core cimport Core, Request
from mocker._kv_kept cimport pool_adopt, pool_pin, pool_unpin
from mocker._offload cimport must_wait
from mocker._offload_pass cimport tiers_arrived, tiers_wait
from mocker._requests cimport blocks_release, core_enqueue, slot_free


cdef void handoff_release_source(Core* c, int32_t slot) noexcept nogil:
    """Free a held source; one that is not done yet will free its blocks by itself."""
    cdef Request* r = &c.req[slot]
    if r.status != ST_HELD:
        r.source = 0
        return
    blocks_release(c, r, r.len)
    slot_free(c, slot)
    c.n_held -= 1
    c.generation += 1


cdef bint handoff_reserve(Core* c, int32_t slot) noexcept nogil:
    """Queue a new destination for its reservation; false, and it is forgotten, if its prompt exceeds the pool."""
    cdef void* moved
    if (c.req[slot].prompt + c.mask) >> c.shift > c.pool.capacity:
        slot_free(c, slot)
        return False
    moved = grown(c.pending, &c.pending_cap, c.n_pending + 1, sizeof(int32_t))
    if moved == NULL:
        c.error = ERR_MEMORY
        return True
    c.pending = <int32_t*>moved
    c.pending[c.n_pending] = slot
    c.n_pending += 1
    c.req[slot].status = ST_PENDING
    return True


cdef void pending_remove(Core* c, int64_t at) noexcept nogil:
    c.n_pending -= 1
    while at < c.n_pending:
        c.pending[at] = c.pending[at + 1]
        at += 1


cdef void handoff_hasten(Core* c, int32_t slot, int64_t at) noexcept nogil:
    """Move the last pending destination, `slot`, to position `at`."""
    cdef int64_t i = c.n_pending - 1
    while i > at:
        c.pending[i] = c.pending[i - 1]
        i -= 1
    c.pending[i] = slot


cdef int32_t handoff_retry(Core* c) noexcept nogil:
    """Try to reserve for the first pending destination; its slot, or NIL."""
    cdef int32_t slot
    cdef Request* r
    if c.n_pending == 0:
        return NIL
    slot = c.pending[0]
    r = &c.req[slot]
    if c.n_running >= c.max_seqs:
        r.attempt = c.generation
        return NIL
    if r.attempt == c.generation:
        return NIL
    if c.tiers != NULL and must_wait(c, slot):
        return NIL
    r.attempt = c.generation
    r.pinned = pool_pin(&c.pool, &r.path, r.full, r.partial)
    if r.pinned == NIL:
        if c.pool.blocked != NIL:
            tiers_wait(c, slot)
            c.pool.blocked = NIL
        return NIL
    pending_remove(c, 0)
    r.status = ST_RESERVED
    c.n_reserved += 1
    return slot


cdef bint handoff_due(Core* c) noexcept nogil:
    """Whether `handoff_retry` would try: somebody is pending, and there may be more room than at the last attempt."""
    return (c.n_pending > 0 and c.req[c.pending[0]].attempt != c.generation
            and (c.tiers == NULL or not must_wait(c, c.pending[0])))


cdef void handoff_activate(Core* c, int32_t slot) noexcept nogil:
    """The prompt of a reserved destination has arrived: it joins the queue at the back, ready to make tokens."""
    handoff_activate_at(c, slot, NIL)


cdef void handoff_activate_at(Core* c, int32_t slot, int64_t place) noexcept nogil:
    """`handoff_activate` in the place kept for a dropped request with the same id, as for `core_enqueue`."""
    cdef Request* r = &c.req[slot]
    cdef int64_t active = c.pool.active
    pool_adopt(&c.pool, &r.path, r.pinned, r.full)
    r.computed = r.alloc = r.prompt
    r.destination = 1
    c.n_reserved -= 1
    core_enqueue(c, slot, place)
    if c.tiers != NULL:
        tiers_arrived(c)
    if c.pool.active < active:
        c.generation += 1


cdef bint handoff_withdraw(Core* c, int32_t slot) noexcept nogil:
    """Cancel a destination that is pending or reserved; false if it is neither."""
    cdef Request* r = &c.req[slot]
    cdef int64_t i
    if r.status == ST_PENDING:
        for i in range(c.n_pending):
            if c.pending[i] == slot:
                pending_remove(c, i)
                break
    elif r.status == ST_RESERVED:
        pool_unpin(&c.pool, &r.path, r.pinned, r.full + r.partial - r.pinned)
        c.n_reserved -= 1
    else:
        return False
    slot_free(c, slot)
    c.generation += 1
    return True


cdef bint handoff_yield(Core* c) noexcept nogil:
    """Take the blocks of the last destination that waits with them; false if there is none.

    For a queue whose head waits for these blocks for ever: like a preempted request it computes its prompt again.
    """
    cdef int64_t i = c.waiting_places - 1
    cdef int32_t slot
    cdef Request* r
    while i >= 0:
        slot = c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]
        if slot >= 0 and c.req[slot].destination and c.req[slot].status == ST_WAITING and c.req[slot].alloc > 0:
            r = &c.req[slot]
            blocks_release(c, r, r.alloc)
            r.computed = r.alloc = 0
            r.destination = 0
            r.status = ST_PREEMPTED
            r.preemptions += 1
            c.preemptions += 1
            c.generation += 1
            return True
        i -= 1
    return False
