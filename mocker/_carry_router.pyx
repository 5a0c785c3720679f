# cython: language_level=3
"""State of routers: every array that `router_free` frees. O(segments, requests and workers that the router knows)."""
from mocker._carry cimport COPY, LIST, LOAD, Carrier, carry, carry_array
from mocker._carry_offload cimport lower_carry
from mocker._common cimport int32_t, int64_t, uint64_t
from mocker._router cimport (
    ChooseFn, EstimateFn, Hold, KeyTable, Load, Lower, Node, Placement, QueueClass, Router, Segment, Ticket)


cdef void table_carry(Carrier* io, KeyTable* t) noexcept nogil:
    cdef int64_t places = <int64_t>t.mask + 1
    carry_array(io, <void**>&t.keys, places, places, sizeof(uint64_t))
    carry_array(io, <void**>&t.values, places, places, sizeof(int32_t))


cdef void holds_carry(Carrier* io, void** holds, int32_t used, int32_t* cap) noexcept nogil:
    """Thousands of short arrays: copies have no room to spare, which they get when they need it."""
    if io.mode == LOAD or io.mode == COPY:
        cap[0] = used
        if used == 0:
            holds[0] = NULL
    carry_array(io, holds, used, cap[0], sizeof(Hold))


cdef void router_carry(Carrier* io, Router* r, int64_t bucket_places) noexcept nogil:
    """A router; a loaded one keeps its functions, and its old arrays have to be freed before.

    `bucket_places` is the size of `bucket_classes`.
    """
    cdef int64_t i, w
    cdef Segment* s
    cdef Ticket* t
    cdef ChooseFn choose = r.choose
    cdef EstimateFn estimate = r.estimate
    cdef Lower* lower = r.lower
    cdef void* choose_context = r.choose_context
    cdef void* estimate_context = r.estimate_context
    carry(io, r, sizeof(Router))
    r.choose, r.choose_context, r.estimate, r.estimate_context = choose, choose_context, estimate, estimate_context
    r.lower = lower
    if lower != NULL:
        lower_carry(io, lower)
    w = r.workers_cap
    table_carry(io, &r.table)
    table_carry(io, &r.rows)
    carry_array(io, <void**>&r.segments, r.segments_used, r.segments_cap, sizeof(Segment))
    if r.segments == NULL:
        r.segments_used = 0
    for i in range(0 if io.mode == LIST else r.segments_used):     # arrays are not listed
        s = &r.segments[i]
        holds_carry(io, <void**>&s.resident, s.resident_used, &s.resident_cap)
        holds_carry(io, <void**>&s.active, s.active_used, &s.active_cap)
    carry_array(io, <void**>&r.tickets, r.tickets_used, r.tickets_cap, sizeof(Ticket))
    if r.tickets == NULL:
        r.tickets_used = 0
    for i in range(0 if io.mode == LIST else r.tickets_used):
        t = &r.tickets[i]
        carry_array(io, <void**>&t.segments, t.cap, t.cap, sizeof(int32_t))
        carry_array(io, <void**>&t.depths, t.cap, t.cap, sizeof(int32_t))
        carry_array(io, <void**>&t.keys, t.n, <int64_t>t.n + 1, sizeof(uint64_t))
        carry_array(io, <void**>&t.overlaps, 2 * <int64_t>t.overlaps_used, 2 * <int64_t>t.overlaps_used + 1,
                    sizeof(int32_t))
        carry_array(io, <void**>&t.lower, 3 * <int64_t>t.lower_used, 3 * <int64_t>t.lower_used + 1, sizeof(int32_t))
    carry_array(io, <void**>&r.classes, r.n_classes, r.n_classes, sizeof(QueueClass))
    if r.classes == NULL:
        r.n_classes = 0
    for i in range(r.n_classes):
        carry_array(io, <void**>&r.classes[i].heap, r.classes[i].used, r.classes[i].cap, sizeof(int32_t))
    carry_array(io, <void**>&r.bucket_starts, r.n_buckets, r.n_buckets, sizeof(int64_t))
    carry_array(io, <void**>&r.bucket_classes, bucket_places, bucket_places, sizeof(int32_t))
    carry_array(io, <void**>&r.placed, r.placed_used, r.placed_cap, sizeof(Placement))
    carry_array(io, <void**>&r.loads, r.workers, w, sizeof(Load))
    carry_array(io, <void**>&r.eligible, r.n_eligible, w, sizeof(int32_t))
    carry_array(io, <void**>&r.position, r.workers, w, sizeof(int32_t))
    carry_array(io, <void**>&r.overlap, r.workers, w, sizeof(int32_t))
    carry_array(io, <void**>&r.shared, r.workers, w, sizeof(int32_t))
    carry_array(io, <void**>&r.warm, r.n_warm, w, sizeof(int32_t))
    carry_array(io, <void**>&r.scratch, 0, w, sizeof(int32_t))
    carry_array(io, <void**>&r.cost, 0, w, sizeof(double))
    carry_array(io, <void**>&r.found, r.found_used, r.found_cap, sizeof(int32_t))
    carry_array(io, <void**>&r.tree, 2 * <int64_t>r.leaves, 2 * <int64_t>r.leaves, sizeof(Node))
