# cython: language_level=3
"""Leases of KV offload and the batches of copies down: what a worker has asked for, and what starts when.

Batches start in the order in which they were asked for; as many move at a time as the lane allows. Costs: O(spans).
"""
from libc.string cimport memset

from mocker._common cimport ERR_MEMORY, NIL, grown, int32_t, int64_t
from mocker._offload cimport LEASE_FREE, STAGE_NONE, UP_PENDING, Batch, Lane, Lease, Offload, Shared
from mocker._offload_blocks cimport (
    BlockSet, Span, Spans, set_add, set_discard, span_block, span_part, spans_clear)
from mocker._offload_links cimport link_start
from mocker._offload_marks cimport marks_look, marks_set
from mocker._offload_reference cimport lane_reorder
from mocker._offload_tiers cimport tier_take, tier_unpin


# ---- lists ------------------------------------------------------------------------------------------------------

cdef void list_ready(Offload* o, int32_t place) noexcept nogil:
    """A copy has something for the next tick to book."""
    cdef void* moved
    cdef int64_t i
    if o.leases[place].ready:
        return
    moved = grown(o.ready, &o.ready_cap, o.n_ready + 1, sizeof(int32_t))
    if moved == NULL:
        o.error = ERR_MEMORY
        return
    o.ready = <int32_t*>moved
    o.leases[place].ready = True
    i = o.n_ready
    o.n_ready += 1
    while i > 0 and o.ready[i - 1] > place:
        o.ready[i] = o.ready[i - 1]
        i -= 1
    o.ready[i] = place


cdef void append_all(Offload* o, Spans* list, Spans* what) noexcept nogil:
    cdef int64_t i
    for i in range(what.used):
        append(o, list, what.items[i], 0)


cdef void enlist(Offload* o, BlockSet* s, Span* part) noexcept nogil:
    cdef int32_t i
    for i in range(part.count):
        if not set_add(s, span_block(part, i)):
            o.error = ERR_MEMORY


cdef void delist(BlockSet* s, Span* part) noexcept nogil:
    cdef int32_t i
    for i in range(part.count):
        set_discard(s, span_block(part, i))


# ---- leases -----------------------------------------------------------------------------------------------------

cdef int32_t lease_new(Offload* o, int kind) noexcept nogil:
    cdef int32_t place = o.free_lease
    cdef Lease* e
    cdef void* moved
    if place != NIL:
        o.free_lease = o.leases[place].next_free
    else:
        moved = grown(o.leases, &o.leases_cap, o.leases_used + 1, sizeof(Lease))
        if moved == NULL:
            o.error = ERR_MEMORY
            return 0
        o.leases = <Lease*>moved
        place = <int32_t>o.leases_used
        o.leases_used += 1
        memset(&o.leases[place], 0, sizeof(Lease))
    e = &o.leases[place]
    o.serial += 1
    e.kind, e.serial = kind, o.serial
    spans_clear(&e.blocks)
    spans_clear(&e.other)
    spans_clear(&e.arrived)
    e.n = e.n_arrived = e.failed = e.freed = e.outstanding = e.slots = 0
    e.slot, e.skip, e.prefix, e.status, e.stage = NIL, 0, 0, UP_PENDING, STAGE_NONE
    e.cancel = e.started = e.ready = False
    e.promised = e.count = e.n2 = e.n3 = e.n4 = 0
    return place


cdef void lease_drop(Offload* o, int32_t place) noexcept nogil:
    o.leases[place].kind = LEASE_FREE
    o.leases[place].serial = 0
    o.leases[place].next_free = o.free_lease
    o.free_lease = place


cdef void refused(Offload* o, Lane* lane, Batch* b) noexcept nogil:
    """There is no room for a batch in the tier: it is not copied."""
    cdef Lease* e = &o.leases[b.place]
    cdef bint to_host = lane == &o.lane
    cdef int64_t i
    e.outstanding -= b.blocks
    e.failed += b.blocks
    list_ready(o, b.place)
    if to_host and o.through:
        slots_read(o, b.place, b.first, b.spans)
    for i in range(b.first, b.first + b.spans):
        if to_host:
            append(o, &e.other, e.blocks.items[i], 0)
        else:
            tier_unpin(&o.g2, &e.blocks.items[i])


cdef void lane_start(Offload* o, int32_t place) noexcept nogil:
    """Copy the lease's blocks to the host, whose spans end where a batch does: at once what may start."""
    cdef Lane* lane = &o.lane
    cdef Spans* list = &o.leases[place].blocks
    cdef Batch b
    b.place, b.prepared, b.marked, b.first, b.spans = place, True, False, 0, 0
    while not o.reference and lane.head == lane.used and b.first < list.used and lane.active < lane.limit:
        b.spans = b.blocks = 0
        while b.first + b.spans < list.used and b.blocks < o.batch_size:
            b.blocks += list.items[b.first + b.spans].count
            b.spans += 1
        if tier_take(&o.g2, b.blocks):
            link_start(&o.down, o.now, <double>(b.blocks * o.block_bytes), o.worker, place, <int32_t>b.first,
                       <int32_t>b.spans)
            lane.active += 1
        else:
            refused(o, lane, &b)
        b.first += b.spans
    if b.first < list.used:
        lane_add(o, lane, place, b.first)
        lane_pump(o, lane, NULL)
        lane_mark(o, lane)


cdef void lane_add(Offload* o, Lane* lane, int32_t place, int64_t first) noexcept nogil:
    """Queue the lease's blocks from a span on."""
    cdef Spans* list = &o.leases[place].blocks
    cdef int64_t i = first, before = lane.used - lane.head
    cdef Batch* b
    cdef void* moved
    while i < list.used:
        if lane.head == lane.used:
            lane.head = lane.used = 0
        moved = grown(lane.queue, &lane.cap, lane.used + 1, sizeof(Batch))
        if moved == NULL:
            o.error = ERR_MEMORY
            return
        lane.queue = <Batch*>moved
        b = &lane.queue[lane.used]
        lane.used += 1
        b.place, b.prepared, b.marked, b.first, b.spans, b.blocks = place, False, False, i, 0, 0
        while i < list.used and b.blocks < o.batch_size:
            b.blocks += list.items[i].count
            b.spans += 1
            i += 1
    if o.reference and not lane_reorder(lane, before):
        o.error = ERR_MEMORY


cdef void lane_pump(Offload* o, Lane* lane, Shared* s) noexcept nogil:
    """Start the batches that may start (NULL: to the host); the next one is prepared, whether it may start or not."""
    cdef Batch* b
    cdef Batch batch
    cdef int64_t i
    cdef bint begun
    while lane.head < lane.used:
        b = &lane.queue[lane.head]
        if not b.prepared:
            b.prepared = True
            if b.marked and (s != NULL or not o.through):
                for i in range(b.first, b.first + b.spans):
                    delist(lane.pending, &o.leases[b.place].blocks.items[i])
        if lane.active >= lane.limit:
            return
        batch = b[0]
        lane.head += 1
        if s == NULL:
            begun = tier_take(&o.g2, batch.blocks)
        else:
            begun = s.unbounded or tier_take(&s.pool, batch.blocks)
        if begun:
            link_start(&o.down if s == NULL else &s.down, o.now, <double>(batch.blocks * o.block_bytes), o.worker,
                       batch.place, <int32_t>batch.first, <int32_t>batch.spans)
            lane.active += 1
        else:
            refused(o, lane, &batch)


cdef void lane_mark(Offload* o, Lane* lane) noexcept nogil:
    """Note the blocks of the batches that are not prepared yet: they have been asked for.

    Write-through has a note of those to the host already.
    """
    cdef int64_t i = lane.used - 1, k
    cdef Batch* b
    while i >= lane.head and not lane.queue[i].prepared and not lane.queue[i].marked:
        b = &lane.queue[i]
        b.marked = True
        if lane != &o.lane or not o.through:
            for k in range(b.first, b.first + b.spans):
                enlist(o, lane.pending, &o.leases[b.place].blocks.items[k])
        i -= 1


cdef void slots_read(Offload* o, int32_t place, int64_t first, int64_t count) noexcept nogil:
    """A batch of a lease needs its blocks' GPU slots no more: who was evicted meanwhile can give them up."""
    cdef Lease* other
    cdef Span left, part
    cdef int64_t i, holder
    for i in range(first, first + count):
        left = o.leases[place].blocks.items[i]
        while left.count > 0:
            part = left
            part.count = marks_look(&o.moving, &left, &holder)
            left = span_part(&left, part.count, left.count - part.count)
            if not marks_set(&o.moving, &part, 0):
                o.error = ERR_MEMORY
            holder -= 2
            if holder >= 0 and holder != place:
                other = &o.leases[holder]
                other.outstanding -= part.count
                other.freed += part.count
                list_ready(o, <int32_t>holder)


cdef void pump_shared(Offload* o) noexcept nogil:
    if o.world.g3.there:
        lane_pump(o, &o.lane3, &o.world.g3)
    if o.world.g4.there:
        lane_pump(o, &o.lane4, &o.world.g4)
