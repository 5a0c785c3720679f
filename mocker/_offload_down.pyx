# cython: language_level=3
"""Copies of KV offload: from the GPU to the host, and from there to the disk and the remote store.

Costs: O(log runs of a tier) a span; with a remote store, and while batches queue, O(1) a block beside that.
"""
from libc.math cimport INFINITY

from mocker._common cimport ERR_MEMORY, NIL, grown, int32_t, int64_t
from mocker._kv cimport Piece, Pool, pool_find
from mocker._offload cimport (
    LEASE_G2, LEASE_THROUGH, Lane, Lease, Offload, Shared, offload_sync, offload_tells, offload_tick)
from mocker._offload_blocks cimport (
    Block, Cursor, Span, Spans, set_has, span_block, span_of, span_part, spans_clear, spans_next)
from mocker._offload_leases cimport (
    append, enlist, lane_add, lane_mark, lane_start, lease_drop, lease_new, list_ready, pump_shared, slots_read)
from mocker._offload_links cimport Transfer, link_pass, link_start
from mocker._offload_marks cimport Marks, marks_look, marks_set
from mocker._offload_tiers cimport (
    tier_has, tier_lacks, tier_look, tier_pin, tier_register, tier_room, tier_take, tier_unpin)
from mocker._offload_up cimport staged_up


# ---- from the GPU to the host -----------------------------------------------------------------------------------

cdef void arrived(Offload* o, Transfer* t) noexcept nogil:
    """A batch of a copy has reached its tier."""
    cdef Lease* e = &o.leases[t.place]
    cdef bint asked = (e.kind == LEASE_G2 or e.kind == LEASE_THROUGH) and (o.world.g3.there or o.world.g4.there)
    cdef int64_t i
    for i in range(t.first, t.first + t.count):
        e.outstanding -= e.blocks.items[i].count
        e.n_arrived += e.blocks.items[i].count
        if asked:
            append(o, &e.arrived, e.blocks.items[i], 0)
    list_ready(o, t.place)
    if o.through and (e.kind == LEASE_G2 or e.kind == LEASE_THROUGH):
        slots_read(o, t.place, t.first, t.count)


cdef void mark(Offload* o, Marks* m, Span* part, int64_t value) noexcept nogil:
    if not marks_set(m, part, value):
        o.error = ERR_MEMORY


cdef int32_t asked(Offload* o, Span* part, int32_t n, int32_t place, int64_t* claims, bint* skip) noexcept nogil:
    """Blocks from the first of `n` evicted ones on of which all are left out, or none.

    Left out are those that are asked for already, and those that were not seen often enough. If the slot of one is
    being read, lease `place` holds it until then.
    """
    cdef Span one = span_part(part, 0, n)
    cdef int64_t value
    skip[0] = False
    if o.pending.used > 0:
        skip[0] = set_has(&o.pending, span_block(part, 0))
        n = 1
        while n < one.count and set_has(&o.pending, span_block(part, n)) == skip[0]:
            n += 1
        one.count = n
        if skip[0]:
            return n
    if o.moving.blocks > 0:
        one.count = marks_look(&o.moving, &one, &value)
        if value == 1:
            claims[0] += one.count
            mark(o, &o.moving, &one, place + 2)
        if value > 0:
            skip[0] = True
            return one.count
    if o.min_seen > 1:
        one.count = marks_look(&o.seen, &one, &value)
        if value < o.min_seen - 1:
            skip[0] = True
            mark(o, &o.seen, &one, value + 1)
    return one.count


cdef int32_t asked_early(Offload* o, Span* part, int32_t n, bint* skip) noexcept nogil:
    """`asked` of blocks that are still on the GPU; the next eviction has to be one too many."""
    cdef Span one = span_part(part, 0, n)
    cdef int64_t value
    skip[0] = False
    if o.moving.blocks > 0:
        one.count = marks_look(&o.moving, &one, &value)
        skip[0] = value > 0
    if o.min_seen > 1 and not skip[0]:
        one.count = marks_look(&o.seen, &one, &value)
        skip[0] = value < o.min_seen - 1
    return one.count


cdef void move(Offload* o, Spans* list, Span part, int64_t value) noexcept nogil:
    """Ask for blocks to be copied to the host, which has promised their slots."""
    append(o, list, part, o.batch_size)
    o.g2.reserved += part.count
    if o.through:
        mark(o, &o.moving, &part, value)


cdef void write_through(Offload* o) noexcept nogil:
    """Copy the blocks that have been computed and are still on the GPU, as far as the host has room."""
    cdef Pool* p = &o.core.pool
    cdef int32_t place = lease_new(o, LEASE_THROUGH), n, run, end
    cdef Lease* e = &o.leases[place]
    cdef int64_t i, room = tier_room(&o.g2)
    cdef Span part
    cdef bint there
    for i in range(o.fresh.used):
        part = o.fresh.items[i]
        end = 0
        run = pool_find(p, part.key)
        while run != NIL:                      # it is resident up to here
            end = p.runs[run].end
            run = p.runs[run].down
        if part.step > 0:
            part.count = min(part.count, end - part.at)
        else:                                  # it was evicted and registered again
            n = max(part.at - end + 1, 0)
            part = span_part(&part, n, part.count - n)
        while part.count > 0 and room > 0:
            n = tier_look(&o.g2, &part, &there)
            if not there:
                n = asked_early(o, &part, n, &there)
                if not there:
                    n = <int32_t>min(n, room)
                    room -= n
                    move(o, &e.blocks, span_part(&part, 0, n), 1)
            part = span_part(&part, n, part.count - n)
    spans_clear(&o.fresh)
    o.fresh_at = INFINITY
    e.outstanding = e.blocks.blocks
    o.n_through += e.outstanding
    if e.outstanding == 0:
        lease_drop(o, place)
        return
    lane_start(o, place)


cdef inline Span evicted_span(Piece* gone) noexcept nogil:
    return span_of(gone.key, <int32_t>gone.tokens, gone.start + gone.count - 1, gone.count, -1)


cdef bint copy_at_once(Offload* o, int64_t count) noexcept nogil:
    """Copy evicted blocks that are all new to the host, and all can start; false: there is more to it."""
    cdef Pool* p = &o.core.pool
    cdef int64_t batches = (count + o.batch_size - 1) // o.batch_size if count > o.batch_size else 1, i, n
    cdef int64_t left = 0, size = 0            # of the batch: blocks still to come, and in all
    cdef int32_t place, k = 0, first = 0, many, at
    cdef Lease* e
    cdef Span* items
    cdef Span* item
    cdef Span part
    if o.lane.head < o.lane.used or o.lane.active + batches > o.lane.limit or count > tier_room(&o.g2):
        return False
    for i in range(p.evicted_used):
        part = evicted_span(&p.evicted[i])
        if not tier_lacks(&o.g2, &part):
            return False
    place = lease_new(o, LEASE_G2)
    e = &o.leases[place]
    items = <Span*>grown(e.blocks.items, &e.blocks.cap, p.evicted_used + batches, sizeof(Span))
    if items == NULL:
        o.error = ERR_MEMORY
        return False
    offload_sync(o, &o.down)
    e.blocks.items = items
    e.slots = e.outstanding = e.blocks.blocks = count
    o.g2.reserved += count
    o.lane.active += batches
    tier_take(&o.g2, count)                    # it has the room, and all batches start now
    if p.evicted_used == 1 and batches == 1:
        items[0] = part                        # as it was looked for
        e.blocks.used = 1
        link_start(&o.down, o.now, <double>(count * o.block_bytes), o.worker, place, 0, 1)
        count = 0
    for i in range(p.evicted_used if count > 0 else 0):
        n, at = p.evicted[i].count, p.evicted[i].start + p.evicted[i].count - 1
        while n > 0:
            if left == 0:                      # a batch begins
                left = size = min(count, o.batch_size)
                count -= size
                first = k
            many = <int32_t>min(n, left)
            item = &items[k]                   # field by field: a copy would wait for its own parts
            item.key, item.seg = p.evicted[i].key, <int32_t>p.evicted[i].tokens
            item.at, item.count, item.step = at, many, -1
            k += 1
            left -= many
            n -= many
            at -= many
            if left == 0:
                link_start(&o.down, o.now, <double>(size * o.block_bytes), o.worker, place, first, k - first)
        e.blocks.used = k
    o.n_blocked += 1
    p.blocked = place
    return True


cdef bint offload_enqueue(Offload* o, int64_t count, int64_t* released) noexcept nogil:
    """Copy the blocks that the pool has just evicted (`evicted`); their slots are held until then.

    True: they are free already, `released` of them. False: the pool's `blocked` says which lease holds them.
    """
    if o.plain and o.pending.used == 0 and o.min_seen <= 1 and copy_at_once(o, count):
        return False
    return copy_some(o, count, released)


cdef bint copy_some(Offload* o, int64_t count, int64_t* released) noexcept nogil:
    cdef Pool* p = &o.core.pool
    cdef int32_t place = lease_new(o, LEASE_G2), n, fits
    cdef Lease* e = &o.leases[place]
    cdef int64_t i, claims = 0, room = tier_room(&o.g2)
    cdef Span part
    cdef bint remember = o.reference and offload_tells(o), there
    e.slots = count
    offload_sync(o, &o.down)
    for i in range(p.evicted_used):
        part = evicted_span(&p.evicted[i])
        if remember:
            enlist(o, &o.known, &part)
        while part.count > 0:
            n = tier_look(&o.g2, &part, &there)
            fits = 0
            if not there:
                if o.pending.used > 0 or o.moving.blocks > 0 or o.min_seen > 1:
                    n = asked(o, &part, n, place, &claims, &there)
                if not there:
                    fits = n if n < room else <int32_t>room
            if fits > 0:
                move(o, &e.blocks, span_part(&part, 0, fits), place + 2)
                room -= fits
            if remember and fits < n:
                append(o, &e.other, span_part(&part, fits, n - fits), 0)
            part = span_part(&part, n, part.count - n)
    e.outstanding = e.blocks.blocks + claims
    lane_start(o, place)
    if o.leases[place].outstanding > 0:
        o.n_blocked += 1
        p.blocked = place
        return False
    o.n_retried += 1
    list_ready(o, place)
    released[0] = offload_tick(o, o.now)
    return True


# ---- from the host down -----------------------------------------------------------------------------------------

cdef bint below_misses(Shared* s, Block b) noexcept nogil:
    """Whether a lower tier neither has a block nor has been asked to take it."""
    return not set_has(&s.pending, b) and not (set_has(&s.objects, b) if s.unbounded else tier_has(&s.pool, b))


cdef int32_t wanted(Shared* s, Span* part, bint* take) noexcept nogil:
    """Blocks from the first one of a span on that a lower tier takes all, or none of; it has promised their slots."""
    cdef int64_t room
    cdef int32_t n = 1
    if s.unbounded or s.pending.used > 0:
        take[0] = below_misses(s, span_block(part, 0))
        while n < part.count and below_misses(s, span_block(part, n)) == take[0]:
            n += 1
    else:
        n = tier_look(&s.pool, part, take)
        take[0] = not take[0]
    if s.unbounded or not take[0]:
        return n
    room = tier_room(&s.pool)
    if room <= 0:
        take[0] = False
        return n
    n = n if n < room else <int32_t>room
    s.pool.reserved += n
    return n


cdef void copy_down(Offload* o, Shared* s, Lane* lane, int kind, Cursor* from_, int64_t count) noexcept nogil:
    """Copy chained blocks from the host to a lower tier; they stay pinned in the host until then."""
    cdef int32_t place = lease_new(o, kind), n
    cdef Lease* e = &o.leases[place]
    cdef int64_t k
    cdef Span part, one
    cdef bint there
    while spans_next(&o.chain, from_, count, &part):     # all are kept before any of them is filtered
        count -= part.count
        while part.count > 0:
            n = tier_look(&o.g2, &part, &there)
            if there:
                one = span_part(&part, 0, n)
                tier_pin(&o.g2, &one)
                append(o, &e.other, one, 0)
            part = span_part(&part, n, part.count - n)
    for k in range(e.other.used):
        part = e.other.items[k]
        while part.count > 0:
            n = wanted(s, &part, &there)
            one = span_part(&part, 0, n)
            if there:
                append(o, &e.blocks, one, o.batch_size)
            else:
                tier_unpin(&o.g2, &one)
            part = span_part(&part, n, part.count - n)
    spans_clear(&e.other)
    e.outstanding = e.blocks.blocks
    if e.outstanding == 0:
        list_ready(o, place)
    lane_add(o, lane, place, 0)
    pump_shared(o)
    lane_mark(o, lane)


cdef void shared_drain(Offload* o, Shared* s, double now) noexcept nogil:
    """Move a shared tier's links on. Effects are at once, whoever owns the transfer; another owner books them later."""
    cdef int64_t i, k
    cdef int32_t w
    cdef Transfer* t
    cdef Spans* list
    cdef Offload* owner
    cdef bint any_down = False
    s.owed[o.worker] = INFINITY
    link_pass(&s.down, now)
    link_pass(&s.up, now)
    for i in range(s.down.done_used):
        t = &s.down.done[i]
        owner = <Offload*>o.world.workers[t.worker]
        list = &owner.leases[t.place].blocks
        any_down = True
        if t.worker != o.worker and now < s.owed[t.worker]:
            s.owed[t.worker] = now
        if s.unbounded:
            for k in range(t.first, t.first + t.count):
                enlist(o, &s.objects, &list.items[k])
            owner.lane4.active -= 1
        else:
            for k in range(t.first, t.first + t.count):
                tier_register(&s.pool, &list.items[k])
            for k in range(t.first, t.first + t.count):
                tier_unpin(&s.pool, &list.items[k])
            owner.lane3.active -= 1
        for k in range(t.first, t.first + t.count):
            tier_unpin(&owner.g2, &list.items[k])
        arrived(owner, t)
    for i in range(s.up.done_used):
        t = &s.up.done[i]
        if t.worker != o.worker and now < s.owed[t.worker]:
            s.owed[t.worker] = now
        staged_up(<Offload*>o.world.workers[t.worker], t.place)
    if not any_down:
        return
    for w in range(o.world.n_workers):         # whose copies are done may start their next ones
        for i in range(s.down.done_used):
            if s.down.done[i].worker == w:
                pump_shared(<Offload*>o.world.workers[w])
                break
