# cython: language_level=3
"""KV offload of one worker: host tier G2, disk tier G3, remote tier G4 (the last two shared), in virtual time.

Answers to the reference's `kvbm_offload/{engine,coordinator,worker}.rs` and to what it uses of kvbm-engine, without its
threads: everything happens in one order. A tick drains the worker's links (to the host, from it), then the disk's, then
the remote store's, on one link by time; batches start in the order in which they were asked for, and
leases progress in the order of their places (a new one takes the place that was given up last). Blocks move in spans.

Costs: a tick in which nothing ends O(transfers under way), else O(leases + spans that arrived); a copy down, a
promotion O(log runs of a tier) a span; with a remote store, and while batches queue, O(1) a block beside that.
"""
from libc.math cimport INFINITY
from libc.stdlib cimport free

from mocker._common cimport ERR_MEMORY, NIL, grown, int32_t, int64_t
from mocker._kv cimport Path, Piece, Pool, element_at, element_begin, path_free
from mocker._kv_kept cimport pool_unpin
from mocker._offload_blocks cimport (
    Block, Cursor, Span, Spans, catalog_free, catalog_number, set_add, set_discard, set_free, set_has, span_block,
    span_of, span_part, spans_clear, spans_next)
from mocker._offload_leases cimport (
    append, append_all, delist, enlist, lane_add, lane_mark, lane_pump, lease_drop, lease_new, list_ready, pump_shared)
from mocker._offload_links cimport Link, Transfer, link_free, link_next, link_pass, link_start
from mocker._offload_tiers cimport (
    Tier, tier_add, tier_free, tier_has, tier_idle, tier_look, tier_pin, tier_register, tier_return, tier_room,
    tier_take, tier_unpin)


# ---- memory -----------------------------------------------------------------------------------------------------

cdef void world_init(World* w) noexcept nogil:
    cdef int i
    for i in range(1024):
        w.g3.owed[i] = w.g4.owed[i] = INFINITY


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
    o.free_lease = NIL
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
    for i in range(o.min_seen - 1):
        set_free(&o.seen[i])
    free(o.seen)
    free(o.waits)


cdef int offload_error(Offload* o) noexcept nogil:
    """ErrorCode of the worker's tiers and links."""
    cdef World* w = o.world
    return (o.error | o.g2.error | o.down.error | o.up.error | w.error | w.g3.pool.error | w.g3.down.error
            | w.g3.up.error | w.g4.down.error | w.g4.up.error)


# ---- from the GPU to the host -----------------------------------------------------------------------------------

cdef void arrived(Offload* o, Transfer* t) noexcept nogil:
    """A batch of a copy has reached its tier."""
    cdef Lease* e = &o.leases[t.place]
    cdef bint asked = e.kind == LEASE_G2 and (o.world.g3.there or o.world.g4.there)
    cdef int64_t i
    for i in range(t.first, t.first + t.count):
        e.outstanding -= e.blocks.items[i].count
        e.n_arrived += e.blocks.items[i].count
        if asked:
            append(o, &e.arrived, e.blocks.items[i], 0)
    list_ready(o, t.place)


cdef bint offload_tells(Offload* o) noexcept nogil:
    """Whether anybody asks what comes to the host and goes."""
    return o.g2.log


cdef bint seen_enough(Offload* o, Block b) noexcept nogil:
    """Whether a block that is evicted once more has been so often enough."""
    cdef int32_t i
    for i in range(o.min_seen - 1):
        if not set_has(&o.seen[i], b):
            if not set_add(&o.seen[i], b):
                o.error = ERR_MEMORY
            return False
    return True


cdef bint offload_enqueue(Offload* o, int64_t count, int64_t* released) noexcept nogil:
    """Copy the blocks that the pool has just evicted (`evicted`); their slots are held until then.

    True: they are free already, `released` of them. False: the pool's `blocked` says which lease holds them.
    """
    cdef Pool* p = &o.core.pool
    cdef int32_t place = lease_new(o, LEASE_G2), n, fits
    cdef Lease* e = &o.leases[place]
    cdef int64_t i, room = tier_room(&o.g2)
    cdef Span part
    cdef Piece* gone
    cdef bint remember = o.reference and offload_tells(o), there
    e.slots = count
    offload_sync(o, &o.down)
    for i in range(p.evicted_used):
        gone = &p.evicted[i]
        part = span_of(gone.key, <int32_t>gone.tokens, gone.start + gone.count - 1, gone.count, -1)
        if remember:
            enlist(o, &o.known, &part)
        while part.count > 0:
            n = tier_look(&o.g2, &part, &there)
            fits = 0
            if not there:
                if o.pending.used > 0 or o.min_seen > 1:
                    n = 1
                    there = set_has(&o.pending, span_block(&part, 0)) or not seen_enough(o, span_block(&part, 0))
                if not there:
                    fits = n if n < room else <int32_t>room
            if fits > 0:
                append(o, &e.blocks, span_part(&part, 0, fits), o.batch_size)
                room -= fits
                o.g2.reserved += fits
            if remember and fits < n:
                append(o, &e.other, span_part(&part, fits, n - fits), 0)
            part = span_part(&part, n, part.count - n)
    e.outstanding = e.blocks.blocks
    lane_add(o, &o.lane, place)
    lane_pump(o, &o.lane, NULL)
    lane_mark(o, &o.lane)
    if o.leases[place].outstanding > 0:
        o.n_blocked += 1
        p.blocked = place
        return False
    o.n_retried += 1
    list_ready(o, place)
    released[0] = offload_tick(o, o.now)
    return True


# ---- time -------------------------------------------------------------------------------------------------------

cdef void offload_sync(Offload* o, Link* k) noexcept nogil:
    """Before something is started: a lone worker's links move on when something ends or starts only.

    Nothing ends here. (On a link without limit what this pass started would.)
    """
    if o.alone and k.last < o.at:
        link_pass(k, o.at)


cdef int64_t offload_tick(Offload* o, double now) noexcept nogil:
    """Book what finished by `now`; returns the GPU slots released."""
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
        if e.n_arrived > 0 or e.failed > 0:    # of copies further down that failed at once
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
    return released


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
        if e.kind == LEASE_G2:
            o.booked[0] += booked
            released += booked
            e.slots -= booked
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
        e.n_arrived = e.failed = 0
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
    at = shared_deadline(o, &o.world.g3, at)
    return shared_deadline(o, &o.world.g4, at)


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
    lane_add(o, lane, place)
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


# ---- promotion --------------------------------------------------------------------------------------------------

cdef bint offload_plan(Offload* o, Path* path, int32_t skip, int32_t full, bint stage) noexcept nogil:
    """The longest run of the path's blocks from `skip` on that can come from below; false if there is none.

    Without staging its blocks are pinned in the host, else host slots are promised for those from further down.
    """
    cdef World* w = o.world
    cdef int32_t i = element_at(path, skip), low = element_begin(path, i), at = skip, tier = 2, n, end
    cdef int64_t n2 = 0, lower = 0, idle = 0
    cdef Span part
    cdef bint there
    spans_clear(&o.plan)
    o.plan_promised = 0
    while at < full:
        if at >= path.ends[i]:
            i += 1
            low = element_begin(path, i)
        end = path.ends[i] if path.ends[i] < full else full
        part = span_of(path.keys[i], catalog_number(o.g2.catalog, path.keys[i]), at - low, end - at, 1)
        n = 0
        if tier == 2:
            n = tier_look(&o.g2, &part, &there)
            part.count = n
            if there:
                n2 += n
                if not o.reference:
                    idle += tier_idle(&o.g2, &part)
            else:
                tier = 3
                part.count = end - at
        if tier == 3:
            there = False
            if w.g3.there:
                n = tier_look(&w.g3.pool, &part, &there)
            if there:
                part.count = n
                lower += n
            else:
                tier = 4
        if tier == 4:
            n = 0
            while w.g4.there and n < part.count and set_has(&w.g4.objects, span_block(&part, n)):
                n += 1
            if n == 0:
                break
            part.count = n
            lower += n
        append(o, &o.plan, part, 0)
        at += n
    if lower > 0:
        # what it will pin itself is no room
        if stage and lower <= tier_room(&o.g2) - idle:
            o.g2.reserved += lower
            o.plan_promised = lower
            return True
    cut(&o.plan, n2)
    for i in range(<int32_t>o.plan.used):
        tier_pin(&o.g2, &o.plan.items[i])
    return n2 > 0


cdef void cut(Spans* list, int64_t blocks) noexcept nogil:
    """Keep the first blocks of a list only."""
    while list.blocks > blocks:
        if list.blocks - list.items[list.used - 1].count >= blocks:
            list.used -= 1
            list.blocks -= list.items[list.used].count
        else:
            list.items[list.used - 1].count -= <int32_t>(list.blocks - blocks)
            list.blocks = blocks


cdef void offload_drop_plan(Offload* o) noexcept nogil:
    cdef int64_t i
    if o.plan_promised > 0:
        o.g2.reserved -= o.plan_promised
        return
    for i in range(o.plan.used):
        tier_unpin(&o.g2, &o.plan.items[i])


cdef void start_up(Offload* o, int32_t place, double now) noexcept nogil:
    link_start(&o.up, now, <double>(o.leases[place].count * o.block_bytes), o.worker, place, 0, 0)


cdef int32_t offload_start(Offload* o, double now) noexcept nogil:
    """Carry out the plan, for which GPU slots are reserved; returns its lease."""
    cdef int32_t place
    cdef Lease* e
    cdef int64_t n = o.plan.blocks
    o.now = whole_us(now)
    offload_sync(o, &o.up)
    o.n_swaps += 1
    if o.plan_promised > 0:
        o.n_staged += 1
    place = lease_new(o, LEASE_UP)
    e = &o.leases[place]
    e.slots = e.n = n
    append_all(o, &e.blocks, &o.plan)
    if o.plan_promised == 0:
        e.count = e.n2 = n
        e.started = True
        start_up(o, place, now)
        return place
    e.promised = o.plan_promised
    stage_open(o, place)
    pump_staged(o, now)
    return place


cdef int64_t pin_there(Tier* t, Spans* list, int64_t first) noexcept nogil:
    """Keep the blocks of a list from the `first` one on, up to one that is not there; how many."""
    cdef Cursor c
    cdef Span part, one
    cdef int64_t n = 0
    cdef bint there = True
    list_from(list, first, &c)
    while there and spans_next(list, &c, list.blocks, &part):
        while there and part.count > 0:
            one = part
            one.count = tier_look(t, &part, &there)
            if there:
                tier_pin(t, &one)
                n += one.count
                part = span_part(&part, one.count, part.count - one.count)
    return n


cdef void list_from(Spans* list, int64_t first, Cursor* c) noexcept nogil:
    """Point at a block of a list."""
    cdef Span part
    c.span = c.into = 0
    while spans_next(list, c, first, &part):
        first -= part.count


ctypedef void (*TierAction)(Tier*, Span*) noexcept nogil


cdef void each(Tier* t, Spans* list, int64_t first, int64_t count, TierAction what) noexcept nogil:
    """Do something with blocks [first, first + count) of a list, in order."""
    cdef Cursor c
    cdef Span part
    list_from(list, first, &c)
    while spans_next(list, &c, count, &part):
        count -= part.count
        what(t, &part)


cdef void stage_open(Offload* o, int32_t place) noexcept nogil:
    """Keep the blocks of the host and the disk, and begin to fetch what is not in the host."""
    cdef Lease* e = &o.leases[place]
    cdef World* w = o.world
    cdef Cursor c
    cdef Span part
    cdef int32_t n
    e.n2 = pin_there(&o.g2, &e.blocks, 0)
    if w.g3.there:
        e.n3 = pin_there(&w.g3.pool, &e.blocks, e.n2)
    if e.n3 == 0 and not w.g4.there:
        e.n = e.n2
        e.stage = STAGE_DONE
        return
    if o.reference:                            # these pins are never given up
        each(&o.g2, &e.blocks, 0, e.n2, tier_pin)
        each(&w.g3.pool, &e.blocks, e.n2, e.n3, tier_pin)
    if w.g4.there:
        list_from(&e.blocks, e.n2 + e.n3, &c)
        while spans_next(&e.blocks, &c, e.blocks.blocks, &part):
            n = 0
            while n < part.count and set_has(&w.g4.objects, span_block(&part, n)):
                n += 1
            e.n4 += n
            if n < part.count:
                break
    e.n = e.n2 + e.n3 + e.n4
    if e.n4 > 0:
        stage_fetch(o, place, &w.g4, STAGE_G4, e.n4)
    else:
        stage_disk(o, place)


cdef void stage_disk(Offload* o, int32_t place) noexcept nogil:
    if o.leases[place].n3 > 0:
        stage_fetch(o, place, &o.world.g3, STAGE_G3, o.leases[place].n3)
    else:
        o.leases[place].stage = STAGE_DONE


cdef void stage_fetch(Offload* o, int32_t place, Shared* s, int stage, int64_t count) noexcept nogil:
    cdef Lease* e = &o.leases[place]
    if tier_take(&o.g2, count):
        link_start(&s.up, o.now, <double>(count * o.block_bytes), o.worker, place, 0, count)
        e.stage = stage
        return
    each(&o.g2, &e.blocks, 0, e.n2, tier_unpin)
    if e.stage == STAGE_G4:                    # the remote store's blocks have come
        each(&o.g2, &e.blocks, e.n2 + e.n3, e.n4, tier_unpin)
    each(&o.world.g3.pool, &e.blocks, e.n2, e.n3, tier_unpin)
    e.n = e.n2 = e.n3 = e.n4 = 0
    e.stage = STAGE_FAILED


cdef void staged_up(Offload* o, int32_t place) noexcept nogil:
    """One of the transfers to the host has arrived."""
    cdef Lease* e = &o.leases[place]
    if e.stage == STAGE_G4:
        each(&o.g2, &e.blocks, e.n2 + e.n3, e.n4, tier_register)
        stage_disk(o, place)
        return
    each(&o.g2, &e.blocks, e.n2, e.n3, tier_register)
    each(&o.world.g3.pool, &e.blocks, e.n2, e.n3, tier_unpin)
    e.stage = STAGE_DONE


cdef void pump_staged(Offload* o, double now) noexcept nogil:
    """Promotions whose blocks are all in the host go on to the GPU.

    The reference notices that there was no room in the host only while nothing moves in the foreground.
    """
    cdef int64_t i
    cdef Lease* e
    cdef bint busy = o.reference and o.down.used + o.up.used + o.world.g3.up.used + o.world.g4.up.used > 0
    if not o.world.g3.there and not o.world.g4.there:
        return
    for i in range(o.leases_used):
        e = &o.leases[i]
        if e.kind != LEASE_UP or e.started or (e.stage != STAGE_DONE and e.stage != STAGE_FAILED):
            continue
        if busy and e.stage == STAGE_FAILED:
            continue
        e.started = True
        o.g2.reserved -= e.promised
        e.promised = 0
        e.count = e.n
        if e.cancel:
            e.status = UP_CANCELLED
            e.count = 0
        elif e.count == 0:
            e.status = UP_COMPLETED
        else:
            start_up(o, <int32_t>i, now)


cdef void offload_finish(Offload* o, int32_t place) noexcept nogil:
    """A promotion gives up its place and its host blocks."""
    lease_drop(o, place)
    each(&o.g2, &o.leases[place].blocks, 0, o.leases[place].n, tier_return)
