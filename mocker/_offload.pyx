# cython: language_level=3
"""KV offload of one worker: host tier G2, disk tier G3, remote tier G4 (the last two shared), in virtual time.

Answers to the reference's `kvbm_offload/{engine,coordinator,worker}.rs` and to what it uses of kvbm-engine, without its
threads: everything happens in one order. A tick drains the worker's links (to the host, from it), then the disk's, then
the remote store's, on one link by time; batches start in the order in which they were asked for, and
leases progress in the order of their places (a new one takes the place that was given up last). Blocks move in spans.
Here are memory and time; copies down are in `_offload_down`, promotions in `_offload_up`.

Costs: a tick in which nothing ends O(transfers under way), else O(leases + spans that arrived); a copy down, a
promotion O(log runs of a tier) a span; with a remote store, and while batches queue, O(1) a block beside that.
"""
from libc.math cimport INFINITY
from libc.stdlib cimport free

from mocker._common cimport ERR_MEMORY, NIL, grown, int32_t, int64_t, uint64_t
from mocker._kv cimport path_free
from mocker._kv_kept cimport pool_unpin
from mocker._offload_blocks cimport Block, Cursor, catalog_free, set_discard, set_free, set_has, spans_clear
from mocker._offload_down cimport arrived, copy_down, shared_drain, write_through
from mocker._offload_leases cimport append_all, delist, lane_pump, lease_drop, list_ready
from mocker._offload_links cimport Link, Transfer, link_free, link_next, link_pass
from mocker._offload_marks cimport marks_free
from mocker._offload_tiers cimport tier_add, tier_free
from mocker._offload_up cimport offload_finish, pump_staged
from mocker._record cimport timeline_below


# ---- memory -----------------------------------------------------------------------------------------------------

cdef void world_init(World* w) noexcept nogil:
    cdef int i
    for i in range(1024):
        w.g3.owed[i] = w.g4.owed[i] = INFINITY
    w.catalog.direct[1].base = <uint64_t>1 << 63       # where generated blocks' keys begin


cdef void shared_free(Shared* s) noexcept nogil:
    tier_free(&s.pool)
    set_free(&s.objects)
    set_free(&s.pending)
    link_free(&s.down)
    link_free(&s.up)


cdef void world_free(World* w) noexcept nogil:
    catalog_free(&w.catalog)
    shared_free(&w.g3)
    shared_free(&w.g4)


cdef void offload_init(Offload* o) noexcept nogil:
    """Lanes of a worker whose configuration, tiers and links are set; the rest is zeroed memory."""
    o.catalog.direct[1].base = (<uint64_t>1 << 63) + (<uint64_t>o.worker << 40)
    o.free_lease = NIL
    o.fresh_at = INFINITY
    o.lane.limit = o.lane4.limit = o.batch_size
    o.lane3.limit = 1
    o.lane.pending = &o.pending
    o.lane3.pending = &o.world.g3.pending
    o.lane4.pending = &o.world.g4.pending


cdef void offload_free(Offload* o) noexcept nogil:
    cdef int64_t i
    for i in range(o.leases_used):
        free(o.leases[i].blocks.items)
        free(o.leases[i].other.items)
        free(o.leases[i].arrived.items)
        path_free(&o.leases[i].path)
    free(o.leases)
    free(o.lane.queue)
    free(o.lane3.queue)
    free(o.lane4.queue)
    set_free(&o.pending)
    set_free(&o.known)
    tier_free(&o.g2)
    catalog_free(&o.catalog)
    link_free(&o.down)
    link_free(&o.up)
    free(o.changes)
    free(o.chain.items)
    free(o.chain_ends)
    free(o.plan.items)
    free(o.parked)
    free(o.done)
    free(o.ready)
    marks_free(&o.seen)
    free(o.fresh.items)
    marks_free(&o.moving)
    free(o.waits)
    free(o.places)


cdef int offload_error(Offload* o) noexcept nogil:
    """ErrorCode of the worker's tiers and links."""
    cdef World* w = o.world
    return (o.error | o.g2.error | o.down.error | o.up.error | w.error | w.g3.pool.error | w.g3.down.error
            | w.g3.up.error | w.g4.down.error | w.g4.up.error)


cdef void offload_computed(Offload* o, double at) noexcept nogil:
    """What was registered on the GPU so far is there at `at`."""
    if o.fresh.blocks > 0 and o.fresh_at == INFINITY:
        o.fresh_at = at


cdef bint offload_tells(Offload* o) noexcept nogil:
    """Whether anybody asks what comes to the host and goes."""
    return o.g2.log


# ---- time -------------------------------------------------------------------------------------------------------

cdef void offload_sync(Offload* o, Link* k) noexcept nogil:
    """Before something is started: a lone worker's links move on when something ends or starts only.

    Nothing ends here. (On a link without limit what this pass started would.)
    """
    if o.alone and k.last < o.at:
        link_pass(k, o.at)


cdef int64_t offload_tick(Offload* o, double now) noexcept nogil:
    """Book what finished by `now`; returns the GPU slots released. Copies of new blocks start when these are there."""
    cdef int64_t released = 0
    if o.fresh.blocks > 0:
        if o.fresh_at < now:
            released = tick_once(o, o.fresh_at)
            write_through(o)
        if o.fresh_at <= now:
            released += tick_once(o, now)
            write_through(o)
            return released
    return released + tick_once(o, now)


cdef int64_t copied(Offload* o) noexcept nogil:
    """The rest of a tick that has no tier below the host, and finds no batch waiting; the slots released."""
    cdef int64_t i, k, n, released = 0
    cdef Transfer* t
    cdef Lease* e
    for i in range(o.up.done_used):
        o.leases[o.up.done[i].place].status = UP_COMPLETED
        o.risen = True
    for i in range(o.down.done_used):
        t = &o.down.done[i]
        e = &o.leases[t.place]
        n = 0
        for k in range(t.first, t.first + t.count):
            n += e.blocks.items[k].count
            tier_add(&o.g2, &e.blocks.items[k])
        released += n
        o.g2.reserved -= n
        e.slots -= n
        e.outstanding -= n
        if e.outstanding == 0:
            list_ready(o, t.place)
    o.lane.active -= o.down.done_used
    for i in range(o.n_ready):
        e = &o.leases[o.ready[i]]
        released += e.slots
        lease_drop(o, o.ready[i])
    o.n_ready = 0
    if o.g2.changes_used > 0:
        collect(o)
    return released


cdef int64_t tick_once(Offload* o, double now) noexcept nogil:
    cdef int64_t i, k, n, released
    cdef int32_t place
    cdef Transfer* t
    cdef Lease* e
    o.now = whole_us(now)
    if now > o.at:
        o.at = now
    link_pass(&o.down, now)
    link_pass(&o.up, now)
    if (o.n_ready == 0 and o.n_dropped == 0 and o.down.done_used + o.up.done_used == 0 and o.g2.changes_used == 0
            and not o.world.g3.there and not o.world.g4.there):
        return 0                               # nothing has ended
    if o.plain and o.n_ready == 0 and o.n_dropped == 0 and o.lane.head == o.lane.used:
        return copied(o)
    for i in range(o.down.done_used):
        t = &o.down.done[i]
        for k in range(t.first, t.first + t.count):
            tier_add(&o.g2, &o.leases[t.place].blocks.items[k])
        arrived(o, t)
        o.lane.active -= 1
        if o.reference:                        # its task ends, and the next starts before another registers anything
            lane_pump(o, &o.lane, NULL)
    for i in range(o.up.done_used):
        o.leases[o.up.done[i].place].status = UP_COMPLETED
        o.risen = True
    lane_pump(o, &o.lane, NULL)
    if o.world.g3.there:
        shared_drain(o, &o.world.g3, now)
    if o.world.g4.there:
        shared_drain(o, &o.world.g4, now)
    released = book(o)
    pump_staged(o, now)
    collect(o)
    o.g2.reserved -= o.booked[0]
    o.world.g3.pool.reserved -= o.booked[1]
    n = o.n_ready
    o.n_ready = 0
    for i in range(n):
        place = o.ready[i]
        e = &o.leases[place]
        if e.n_arrived > 0 or e.failed > 0 or e.freed > 0:     # of copies further down that failed at once
            o.ready[o.n_ready] = place
            o.n_ready += 1
            continue
        e.ready = False
        if e.outstanding > 0:
            continue
        if o.reference and e.kind == LEASE_G2:
            for k in range(e.other.used):
                delist(&o.known, &e.other.items[k])
        lease_drop(o, place)
    for i in range(o.leases_used if o.n_dropped > 0 else 0):
        e = &o.leases[i]                       # cancelled promotions whose running phase is over
        if e.kind == LEASE_UP and e.cancel and e.status != UP_PENDING:
            pool_unpin(&o.core.pool, &e.path, <int32_t>e.prefix, <int32_t>e.slots)
            path_free(&e.path)
            offload_finish(o, <int32_t>i)
            o.n_dropped -= 1
    if o.world.timeline != NULL:
        note_shared(o.world, now)
    return released


cdef void note_shared(World* w, double now) noexcept nogil:
    """Tell the recorder what the shared tiers hold now."""
    cdef double disk = <double>(w.g3.pool.capacity - w.g3.pool.free)
    if disk != w.timeline.below[0]:
        timeline_below(w.timeline, 0, now, disk)
    if <double>w.g4.objects.used != w.timeline.below[1]:
        timeline_below(w.timeline, 1, now, <double>w.g4.objects.used)


cdef int64_t book(Offload* o) noexcept nogil:
    """Leases progress: slots are given back, and what reached the host is copied further down.

    Promises of slots below are counted in `booked`; they last until the tick is over.
    """
    cdef int64_t i, chains = 0, booked, released = 0
    cdef Lease* e
    cdef Cursor third, fourth
    cdef void* moved
    spans_clear(&o.chain)
    third.span = third.into = fourth.span = fourth.into = 0
    o.booked[0] = o.booked[1] = 0
    for i in range(o.n_ready):
        e = &o.leases[o.ready[i]]
        booked = e.n_arrived + e.failed
        if e.kind == LEASE_G2 or e.kind == LEASE_THROUGH:
            o.booked[0] += booked
            if e.kind == LEASE_G2:
                released += booked + e.freed
                e.slots -= booked + e.freed
            if e.n_arrived > 0 and (o.world.g3.there or o.world.g4.there):
                append_all(o, &o.chain, &e.arrived)
                moved = grown(o.chain_ends, &o.chain_ends_cap, chains + 1, sizeof(int64_t))
                if moved == NULL:
                    o.error = ERR_MEMORY
                    return released
                o.chain_ends = <int64_t*>moved
                o.chain_ends[chains] = e.n_arrived
                chains += 1
            if e.outstanding == 0:
                released += e.slots
                e.slots = 0
        elif e.kind == LEASE_G3:
            o.booked[1] += booked
        e.n_arrived = e.failed = e.freed = 0
        spans_clear(&e.arrived)
    for i in range(chains):
        if o.world.g3.there:
            copy_down(o, &o.world.g3, &o.lane3, LEASE_G3, &third, o.chain_ends[i])
        if o.world.g4.there:
            copy_down(o, &o.world.g4, &o.lane4, LEASE_G4, &fourth, o.chain_ends[i])
    return released


cdef void collect(Offload* o) noexcept nogil:
    """What came to the host and went, for the router; the reference tells only what it has metadata of."""
    cdef int64_t i
    cdef Block b
    cdef bint created
    cdef Change* change
    cdef void* moved
    for i in range(o.g2.changes_used):
        b = o.g2.changes[i]
        created = b.at >= 0
        if not created:
            b.at = ~b.at
        if o.reference:
            if not set_has(&o.known, b):
                continue
            if not created:
                set_discard(&o.known, b)
        moved = grown(o.changes, &o.changes_cap, o.changes_used + 1, sizeof(Change))
        if moved == NULL:
            o.error = ERR_MEMORY
            return
        o.changes = <Change*>moved
        change = &o.changes[o.changes_used]
        change.block, change.created = b, created
        o.changes_used += 1
    o.g2.changes_used = 0


cdef double shared_deadline(Offload* o, Shared* s, double at) noexcept nogil:
    cdef double other
    if not s.there:
        return at
    other = link_next(&s.down)
    if other < at:
        at = other
    other = link_next(&s.up)
    if other < at:
        at = other
    return s.owed[o.worker] if s.owed[o.worker] < at else at


cdef double offload_deadline(Offload* o) noexcept nogil:
    """When something finishes next; infinity if nothing is under way."""
    cdef double at = link_next(&o.down), other = link_next(&o.up)
    if other < at:
        at = other
    if o.fresh_at < at:
        at = o.fresh_at
    at = shared_deadline(o, &o.world.g3, at)
    return shared_deadline(o, &o.world.g4, at)
