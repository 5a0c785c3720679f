# cython: language_level=3
"""The router's books: active prefill tokens of each worker, a ticket for each request, and all its memory.

Answers to the prefill half of `sequences/*` of dynamo-kv-router 1.3.0 (`PrefillLoadTracker`,
`PrefillLoadSnapshot`). With an estimator active prefill tokens melt while time goes by, so each worker keeps its
prefills in order of arrival; without one they are a sum.

Costs: every operation O(1) but a ticket's room, O(path elements) once. Memory: requests queued or in flight.
"""
from libc.math cimport floor, fma
from libc.stdlib cimport free
from libc.string cimport memset

from mocker._common cimport NIL, grown, int32_t, int64_t, uint64_t
from mocker._router cimport Load, Router, Ticket
from mocker._router_index cimport table_delete, table_insert, table_resize
from mocker._router_tiers cimport lower_free


# ---- active prefill tokens --------------------------------------------------------------------------------------

cdef int64_t nanos_of(double ms) noexcept nogil:
    """Whole nanoseconds nearest to a time, ties to even, as the reference's clock has them."""
    cdef double seconds = (ms if ms > 0.0 else 0.0) / 1000.0, whole = floor(seconds)
    cdef double part = seconds - whole, product = part * 1e9, rest
    cdef double error = fma(part, 1e9, -product)       # the exact product is product + error
    cdef int64_t n = <int64_t>product
    rest = product - <double>n
    if rest > 0.5 or (rest == 0.5 and (error > 0.0 or (error == 0.0 and n & 1))):
        n += 1
    return <int64_t>whole * NANOS + n


cdef void prefill_add(Router* r, int32_t ticket, int64_t fresh, int64_t cached, int64_t now) noexcept nogil:
    cdef Ticket* t = &r.tickets[ticket]
    cdef Load* load = &r.loads[t.worker]
    t.prefill = fresh
    load.prefill += fresh
    if r.estimate == NULL:
        return
    t.duration = r.estimate(r.estimate_context, fresh, cached)
    if t.duration == NIL:
        load.unmodeled += 1
    t.prev, t.next = load.last, NIL
    if load.last != NIL:
        r.tickets[load.last].next = ticket
    else:
        load.first = ticket
        load.anchor = now
    load.last = ticket


cdef void prefill_remove(Router* r, int32_t ticket, int64_t now) noexcept nogil:
    """Rule: `PrefillLoadTracker::remove`: a younger prefill that ends first takes its time out of the count-down."""
    cdef Ticket* t = &r.tickets[ticket]
    cdef Load* load = &r.loads[t.worker]
    if t.prefill == 0:
        return
    load.prefill -= t.prefill
    t.prefill = 0
    if r.estimate == NULL:
        return
    if t.duration == NIL:
        load.unmodeled -= 1
    if t.next != NIL:
        r.tickets[t.next].prev = t.prev
    else:
        load.last = t.prev
    if t.prev != NIL:
        r.tickets[t.prev].next = t.next
        if t.duration != NIL:
            load.anchor = load.anchor + t.duration if load.anchor + t.duration < now else now
    else:
        load.first = t.next
        load.anchor = now


# ---- tickets ----------------------------------------------------------------------------------------------------

cdef int32_t ticket_new(Router* r, int64_t row, int64_t isl, int32_t n) noexcept nogil:
    """A ticket with room for `n` path elements, known by its row; NIL if memory is short."""
    cdef int32_t ticket = r.free_ticket
    cdef Ticket* t
    cdef int64_t cap
    cdef void* moved
    if ticket == NIL:
        moved = grown(r.tickets, &r.tickets_cap, r.tickets_used + 1, sizeof(Ticket))
        if moved == NULL:
            return NIL
        r.tickets = <Ticket*>moved
        ticket = <int32_t>r.tickets_used
        r.tickets_used += 1
        memset(&r.tickets[ticket], 0, sizeof(Ticket))
    else:
        r.free_ticket = r.tickets[ticket].next
    t = &r.tickets[ticket]
    t.row, t.isl, t.worker, t.n, t.alone, t.prefill, t.duration = row, isl, NIL, 0, 0, 0, NIL
    t.prev = NIL
    t.next = r.free_ticket                             # on the free list again if anything fails
    if n > t.cap:
        cap = t.cap
        moved = grown(t.segments, &cap, n, sizeof(int32_t))
        if moved != NULL:
            t.segments = <int32_t*>moved
            cap = t.cap
            moved = grown(t.depths, &cap, n, sizeof(int32_t))
        if moved == NULL:
            r.free_ticket = ticket
            return NIL
        t.depths = <int32_t*>moved
        t.cap = cap
    if not table_insert(&r.rows, <uint64_t>row, ticket):
        r.free_ticket = ticket
        return NIL
    t.next = NIL
    return ticket


cdef void ticket_drop(Router* r, int32_t ticket) noexcept nogil:
    cdef Ticket* t = &r.tickets[ticket]
    table_delete(&r.rows, <uint64_t>t.row)
    if t.cap > 256:                                    # long paths are not kept for the next request
        free(t.segments)
        free(t.depths)
        t.segments = t.depths = NULL
        t.cap = 0
    free(t.keys)
    free(t.overlaps)
    free(t.lower)
    t.keys, t.overlaps, t.keys_cap, t.overlaps_cap, t.lower = NULL, NULL, 0, 0, NULL
    t.row = t.worker = NIL
    t.next = r.free_ticket
    r.free_ticket = ticket


# ---- memory -----------------------------------------------------------------------------------------------------

cdef bint router_init(Router* r) noexcept nogil:
    """An empty router in zeroed memory."""
    r.free_segment = r.free_ticket = NIL
    return table_resize(&r.table, 64) and table_resize(&r.rows, 64)


cdef void router_free(Router* r) noexcept nogil:
    cdef int64_t i
    for i in range(r.segments_used):
        free(r.segments[i].resident)
        free(r.segments[i].active)
    for i in range(r.tickets_used):
        free(r.tickets[i].segments)
        free(r.tickets[i].depths)
        free(r.tickets[i].keys)
        free(r.tickets[i].overlaps)
        free(r.tickets[i].lower)
    for i in range(r.n_classes):
        free(r.classes[i].heap)
    free(r.table.keys)
    free(r.table.values)
    free(r.rows.keys)
    free(r.rows.values)
    free(r.segments)
    free(r.tickets)
    free(r.classes)
    free(r.bucket_starts)
    free(r.bucket_classes)
    free(r.loads)
    free(r.eligible)
    free(r.overlap)
    free(r.shared)
    free(r.warm)
    free(r.position)
    free(r.scratch)
    free(r.tree)
    free(r.cost)
    free(r.found)
    free(r.placed)
    lower_free(r.lower)
