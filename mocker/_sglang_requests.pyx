# cython: language_level=3
"""The requests of one SGLang core: slots, the queue, endings, and the commands of a hand-off.

Answers to the state half of `scheduler/sglang/core.rs`, to `scheduler/sglang/request.rs` and to the hand-off commands
(reserve, activate, release, cancel). Costs: queue operations O(1), cancellation O(requests queued or running), a
reservation O(segments of the prompt), endings what `_sglang_events` needs to free the slots.
"""
from libc.math cimport NAN
from libc.stdlib cimport free, malloc
from libc.string cimport memmove

from mocker._common cimport (
    END_COMPLETED, END_NONE, END_OVER_BUDGET, END_REJECTED, ERR_MEMORY, ERR_OK, NIL, grown, int32_t, int64_t, uint8_t,
    uint64_t)
from mocker._core cimport Signal
from mocker._radix cimport (
    map_delete, map_find, map_set, radix_extend, radix_lock, radix_match, radix_path_slots, radix_release, radix_stamp,
    radix_unlock, tokens_give, tokens_take)
from mocker._sglang cimport (
    ROLE_DESTINATION, ROLE_PLAIN, ROLE_SOURCE, SGL_FREE, SGL_HELD, SGL_PENDING, SGL_PREBUILT, SGL_RESERVED,
    SGL_RUNNING, SglangCore, SglRequest)
from mocker._sglang_events cimport abandon, clean_up, evict, publish_stored


# ---- slots ------------------------------------------------------------------------------------------------------

cdef void slot_free(SglangCore* c, int32_t slot) noexcept nogil:
    c.req[slot].status = SGL_FREE
    c.req[slot].next_free = c.free_slot
    c.free_slot = slot
    c.alive -= 1


# ---- queues -----------------------------------------------------------------------------------------------------

cdef bint waiting_room(SglangCore* c) noexcept nogil:
    """Make room for one more request in the ring."""
    cdef int32_t* ring
    cdef int64_t i
    if c.n_waiting < c.waiting_cap:
        return True
    ring = <int32_t*>malloc(2 * c.waiting_cap * sizeof(int32_t))
    if ring == NULL:
        c.error = ERR_MEMORY
        return False
    for i in range(c.n_waiting):
        ring[i] = waiting_at(c, i)
    free(c.waiting)
    c.waiting = ring
    c.waiting_cap *= 2
    c.waiting_head = 0
    return True


cdef void waiting_append(SglangCore* c, int32_t slot) noexcept nogil:
    if waiting_room(c):
        c.waiting[(c.waiting_head + c.n_waiting) & (c.waiting_cap - 1)] = slot
        c.n_waiting += 1


cdef void waiting_prepend(SglangCore* c, int32_t slot) noexcept nogil:
    if waiting_room(c):
        c.waiting_head = (c.waiting_head - 1) & (c.waiting_cap - 1)
        c.waiting[c.waiting_head] = slot
        c.n_waiting += 1


cdef void waiting_remove(SglangCore* c, int32_t slot) noexcept nogil:
    cdef int64_t i, n = 0
    cdef int32_t other
    for i in range(c.n_waiting):
        other = waiting_at(c, i)
        if other != slot:
            c.waiting[(c.waiting_head + n) & (c.waiting_cap - 1)] = other
            n += 1
    c.n_waiting = n


cdef int64_t list_remove(int32_t* list, int64_t n, int32_t slot) noexcept nogil:
    """Take a slot out of a list; returns the new length."""
    cdef int64_t i
    for i in range(n):
        if list[i] == slot:
            memmove(list + i, list + i + 1, (n - i - 1) * sizeof(int32_t))
            return n - 1
    return n


# ---- endings ----------------------------------------------------------------------------------------------------

cdef void signal(SglangCore* c, int64_t id, int64_t token, int terminal, double handoff_ms) noexcept nogil:
    """Note a token or an ending for the caller."""
    cdef Signal* s
    cdef void* moved
    if not c.record:
        return
    moved = grown(c.signals, &c.signals_cap, c.signals_used + 1, sizeof(Signal))
    if moved == NULL:
        c.error = ERR_MEMORY
        return
    c.signals = <Signal*>moved
    s = &c.signals[c.signals_used]
    c.signals_used += 1
    s.id, s.token, s.handoff_ms = id, token, handoff_ms
    s.terminal = <uint8_t>terminal
    s.completed = terminal != END_NONE
    s.rejected = terminal == END_REJECTED or terminal == END_OVER_BUDGET


cdef void note_end(SglangCore* c, SglRequest* r, int terminal) noexcept nogil:
    """A request is gone for its caller."""
    if not numbers(&c.ended, &c.ended_cap, c.ended_used + 1):
        c.error = ERR_MEMORY
        return
    c.ended[c.ended_used] = r.id
    c.ended_used += 1
    if c.rows != NULL:
        c.rows.terminal[r.id] = <signed char>terminal
        c.rows.tokens[r.id] = r.gen
        c.rows.last_token[r.id] = r.last_ms
    c.completed += 1
    c.count -= 1


cdef void note(SglangCore* c, int64_t what) noexcept nogil:
    """Append to `notes`: the id of a request gone, or ~id of one that made its first token."""
    if not numbers(&c.notes, &c.notes_cap, c.notes_used + 1):
        c.error = ERR_MEMORY
        return
    c.notes[c.notes_used] = what
    c.notes_used += 1


cdef void complete(SglangCore* c, int32_t slot) noexcept nogil:
    """A request has all its tokens: a registered source keeps its KV, others are cached and freed."""
    cdef SglRequest* r = &c.req[slot]
    note_end(c, r, END_COMPLETED)
    if r.role == ROLE_SOURCE:
        r.status = SGL_HELD
        c.n_held += 1
        if not numbers(&c.held, &c.held_cap, c.held_used + 1):
            c.error = ERR_MEMORY
            return
        c.held[c.held_used] = r.id
        c.held_used += 1
        return
    clean_up(c, r)
    c.generation += 1
    slot_free(c, slot)


cdef void give_up(SglangCore* c, int32_t slot, int terminal) noexcept nogil:
    """End a request that can never go on; it keeps the tokens that it got."""
    cdef SglRequest* r = &c.req[slot]
    signal(c, r.id, NIL, terminal, NAN)
    note(c, r.id)
    note_end(c, r, terminal)
    c.count += 1                               # `request_drop` counts it out
    request_drop(c, slot)


cdef void request_drop(SglangCore* c, int32_t slot) noexcept nogil:
    """Cancel a request, wherever it is, and free what it holds."""
    cdef SglRequest* r = &c.req[slot]
    cdef int64_t first
    if r.status == SGL_HELD:
        source_release(c, slot)
        return
    if r.status == SGL_PENDING:
        map_delete(&c.pending_slots, <uint64_t>r.handoff, 0)
        c.n_pending -= 1
        pending_sweep(c)
        c.generation += 1
    elif r.status == SGL_RESERVED:
        radix_release(&c.tree, r.node, r.node)
        first = r.prefix
        tokens_give(&c.tree, r.slots + first if c.tree.told else NULL, r.alloc - first)
        c.n_reserved -= 1
        c.generation += 1
    else:
        if r.status == SGL_RUNNING:
            c.n_running = list_remove(c.running, c.n_running, slot)
            count_running(c, r, -1)
        elif r.status == SGL_PREBUILT:
            c.n_prebuilt = list_remove(c.prebuilt, c.n_prebuilt, slot)
        else:
            waiting_remove(c, slot)
        if r.node != NIL:
            abandon(c, r)
            c.generation += 1
        c.count -= 1
    slot_free(c, slot)


# ---- hand-off ---------------------------------------------------------------------------------------------------

cdef void source_release(SglangCore* c, int32_t slot) noexcept nogil:
    """Release a held source, or forget that a source is to be held."""
    cdef SglRequest* r = &c.req[slot]
    if r.status != SGL_HELD:
        r.role = ROLE_PLAIN
        return
    clean_up(c, r)
    c.n_held -= 1
    c.generation += 1
    slot_free(c, slot)


cdef void pending_sweep(SglangCore* c) noexcept nogil:
    """Drop entries of cancelled hand-offs once they are more than half; until then one may come to life again."""
    cdef int64_t i, n = 0
    if c.n_entries <= 2 * c.n_pending:
        return
    for i in range(c.n_entries):
        if map_find(&c.pending_slots, <uint64_t>c.pending[i], 0) != NIL:
            c.pending[n] = c.pending[i]
            n += 1
    c.n_entries = n


cdef bint destination_reserve(SglangCore* c, int32_t slot, int64_t handoff) noexcept nogil:
    """Queue a destination for its reservation; false, and the slot is free again, if it never fits the pool."""
    cdef SglRequest* r = &c.req[slot]
    if (r.prompt + c.page - 1) // c.page * c.page > c.total:
        slot_free(c, slot)
        return False
    r.status, r.role, r.handoff = SGL_PENDING, ROLE_DESTINATION, handoff
    if (not numbers(&c.pending, &c.pending_cap, c.n_entries + 1)
            or map_set(&c.pending_slots, <uint64_t>handoff, 0, slot) != ERR_OK):
        c.error = ERR_MEMORY
        return True
    c.pending[c.n_entries] = handoff
    c.n_entries += 1
    c.n_pending += 1
    return True


cdef int32_t destination_retry(SglangCore* c) noexcept nogil:
    """Try to reserve for the first pending destination, once a capacity generation; its slot, or NIL."""
    cdef int64_t skip = 0, footprint, fresh
    cdef int32_t slot, node
    cdef SglRequest* r
    while skip < c.n_entries and map_find(&c.pending_slots, <uint64_t>c.pending[skip], 0) == NIL:
        skip += 1
    c.n_entries -= skip
    memmove(c.pending, c.pending + skip, c.n_entries * sizeof(int64_t))
    if c.n_entries == 0:
        return NIL
    slot = map_find(&c.pending_slots, <uint64_t>c.pending[0], 0)
    r = &c.req[slot]
    if r.attempt == c.generation:
        return NIL
    r.attempt = c.generation
    node = radix_match(&c.tree, &r.path, r.full)
    radix_lock(&c.tree, node, NIL)
    r.prefix = c.tree.nodes[node].end * c.page
    r.advertised = c.tree.nodes[node].end
    footprint = (r.prompt + c.page - 1) // c.page * c.page
    fresh = footprint - r.prefix
    if fresh > c.tree.available + c.tree.evictable:
        radix_unlock(&c.tree, node)
        return NIL
    if fresh > c.tree.available:
        evict(c, fresh - c.tree.available)
    if c.tree.told:
        if not indices(&r.slots, &r.slots_cap, footprint + 1):
            c.error = ERR_MEMORY
            return NIL
        radix_path_slots(&c.tree, node, r.slots)
    if not tokens_take(&c.tree, fresh, r.slots + r.prefix if c.tree.told else NULL):
        radix_unlock(&c.tree, node)
        return NIL
    r.node = node
    r.owner = c.next_owner
    c.next_owner += 1
    r.alloc = footprint
    r.transferable = fresh
    r.status = SGL_RESERVED
    map_delete(&c.pending_slots, <uint64_t>r.handoff, 0)
    c.n_entries -= 1
    memmove(c.pending, c.pending + 1, c.n_entries * sizeof(int64_t))
    c.n_pending -= 1
    c.n_reserved += 1
    pending_sweep(c)
    return slot


cdef void destination_activate(SglangCore* c, int32_t slot) noexcept nogil:
    """The prompt of a reserved destination has arrived: cache it and queue the request to run."""
    cdef SglRequest* r = &c.req[slot]
    cdef int64_t surplus = r.alloc - r.prompt
    if surplus > 0:
        tokens_give(&c.tree, r.slots + r.prompt if c.tree.told else NULL, surplus)
        c.generation += 1
    r.computed = r.prompt
    if c.capture:
        publish_stored(c, r, r.prefix, r.full)
    r.cached = r.full
    if r.full > 0:
        slot_cache(c, r)
    r.status = SGL_PREBUILT
    c.n_reserved -= 1
    c.count += 1
    c.prebuilt[c.n_prebuilt] = slot
    c.n_prebuilt += 1


cdef void slot_cache(SglangCore* c, SglRequest* r) noexcept nogil:
    """Insert all full pages of a request and move its lock; their events are out."""
    cdef int32_t node = radix_extend(&c.tree, r.node, &r.path, r.full, r.owner, r.slots)
    radix_lock(&c.tree, node, r.node)
    radix_stamp(&c.tree, node)
    r.node = node
