# cython: language_level=3
"""KV offload of one worker: host tier G2, disk tier G3, remote tier G4 (the last two shared), in virtual time.

Answers to the reference's `kvbm_offload/{engine,coordinator,worker}.rs` and to what it uses of kvbm-engine, without its
threads: everything happens in one order. A tick drains the worker's links (to the host, from it), then the disk's, then
the remote store's, on one link by time; batches start in the order in which they were asked for, and
leases progress in the order of their places (a new one takes the place that was given up last).

Costs: a tick O(leases + blocks that arrived); a copy down, a promotion O(log blocks of a tier) a block.
"""
from libc.math cimport INFINITY
from libc.stdlib cimport free
from libc.string cimport memset

from mocker._common cimport ERR_MEMORY, NIL, grown, int32_t, int64_t
from mocker._kv cimport Path, Piece, Pool, element_at, element_begin, path_free
from mocker._kv_kept cimport pool_unpin
from mocker._offload_links cimport Transfer, link_advance, link_earliest, link_free, link_start
from mocker._offload_tiers cimport (
    Block, catalog_free, set_add, set_discard, set_free, set_has, tier_add, tier_free, tier_has, tier_idle,
    tier_pin, tier_promise, tier_register, tier_take, tier_unpin)


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
        free(o.leases[i].blocks)
        free(o.leases[i].other)
        free(o.leases[i].arrived)
        path_free(&o.leases[i].path)
    free(o.leases)
    free(o.lane.queue)
    free(o.lane3.queue)
    free(o.lane4.queue)
    set_free(&o.pending)
    set_free(&o.known)
    tier_free(&o.g2)
    link_free(&o.down)
    link_free(&o.up)
    free(o.changes)
    free(o.chain)
    free(o.chain_ends)
    free(o.plan)
    free(o.parked)
    free(o.done)
    free(o.waits)


cdef int offload_error(Offload* o) noexcept nogil:
    """ErrorCode of the worker's tiers and links."""
    cdef World* w = o.world
    return (o.error | o.g2.error | o.down.error | o.up.error | w.error | w.g3.pool.error | w.g3.down.error
            | w.g3.up.error | w.g4.down.error | w.g4.up.error)


cdef bint append(Offload* o, Block** list, int64_t* cap, int64_t* used, Block b) noexcept nogil:
    cdef void* moved = grown(list[0], cap, used[0] + 1, sizeof(Block))
    if moved == NULL:
        o.error = ERR_MEMORY
        return False
    list[0] = <Block*>moved
    list[0][used[0]] = b
    used[0] += 1
    return True


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
    e.n = e.others = e.n_arrived = e.failed = e.outstanding = e.slots = 0
    e.slot, e.skip, e.prefix, e.status, e.stage = NIL, 0, 0, UP_PENDING, STAGE_NONE
    e.cancel = e.started = False
    e.promised = e.count = e.n2 = e.n3 = e.n4 = 0
    return place


cdef void lease_drop(Offload* o, int32_t place) noexcept nogil:
    o.leases[place].kind = LEASE_FREE
    o.leases[place].serial = 0
    o.leases[place].next_free = o.free_lease
    o.free_lease = place


cdef void lane_add(Offload* o, Lane* lane, int32_t place) noexcept nogil:
    """Queue the lease's blocks in batches."""
    cdef int64_t first = 0, n = o.leases[place].n, before = lane.used - lane.head
    cdef Batch* b
    cdef void* moved
    while first < n:
        if lane.head == lane.used:
            lane.head = lane.used = 0
        moved = grown(lane.queue, &lane.cap, lane.used + 1, sizeof(Batch))
        if moved == NULL:
            o.error = ERR_MEMORY
            return
        lane.queue = <Batch*>moved
        b = &lane.queue[lane.used]
        lane.used += 1
        b.place, b.prepared, b.marked, b.first = place, False, False, first
        b.count = n - first if n - first < o.batch_size else o.batch_size
        first += b.count
    if o.reference:
        lane_reorder(lane, before)


cdef void lane_reorder(Lane* lane, int64_t before) noexcept nogil:
    """Batches of one burst in the order in which the reference's tasks start them; `before` waited already.

    Each has a task, and the task that was made last runs first. So they reach the link's queue with the last one in
    front; and of those that may start at once, which have tasks again, the last one starts first. (Queues there hold 8
    batches: larger bursts stay in order.)
    """
    cdef int64_t n = lane.used - lane.head - before, room = lane.limit - lane.active
    if n > 8:
        return
    last_first(lane, n, n)
    if before == 0:
        last_first(lane, n, room if room < n else n)


cdef void last_first(Lane* lane, int64_t n, int64_t m) noexcept nogil:
    """Of the last n batches of the queue the m-th comes before the others."""
    cdef int64_t i, base = lane.used - n
    cdef Batch last
    if m < 2:
        return
    last = lane.queue[base + m - 1]
    i = m - 1
    while i > 0:
        lane.queue[base + i] = lane.queue[base + i - 1]
        i -= 1
    lane.queue[base] = last


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
            if b.marked:
                for i in range(b.first, b.first + b.count):
                    set_discard(lane.pending, o.leases[b.place].blocks[i])
        if lane.active >= lane.limit:
            return
        batch = b[0]
        lane.head += 1
        if s == NULL:
            begun = tier_take(&o.g2, batch.count)
            if begun:
                link_start(&o.down, o.now, <double>(batch.count * o.block_bytes), o.worker, batch.place, batch.first,
                           batch.count)
        else:
            begun = s.unbounded or tier_take(&s.pool, batch.count)
            if begun:
                link_start(&s.down, o.now, <double>(batch.count * o.block_bytes), o.worker, batch.place, batch.first,
                           batch.count)
        if begun:
            lane.active += 1
            continue
        o.leases[batch.place].outstanding -= batch.count
        o.leases[batch.place].failed += batch.count
        for i in range(batch.first, batch.first + batch.count):
            if s != NULL:
                tier_unpin(&o.g2, o.leases[batch.place].blocks[i])
            else:
                append(o, &o.leases[batch.place].other, &o.leases[batch.place].other_cap,
                       &o.leases[batch.place].others, o.leases[batch.place].blocks[i])


cdef void lane_mark(Offload* o, Lane* lane) noexcept nogil:
    """Note the blocks of the batches that are not prepared yet: they have been asked for."""
    cdef int64_t i = lane.used - 1, k
    cdef Batch* b
    while i >= lane.head and not lane.queue[i].prepared and not lane.queue[i].marked:
        b = &lane.queue[i]
        b.marked = True
        for k in range(b.first, b.first + b.count):
            if not set_add(lane.pending, o.leases[b.place].blocks[k]):
                o.error = ERR_MEMORY
        i -= 1


cdef void pump_shared(Offload* o) noexcept nogil:
    if o.world.g3.there:
        lane_pump(o, &o.lane3, &o.world.g3)
    if o.world.g4.there:
        lane_pump(o, &o.lane4, &o.world.g4)


cdef void arrived(Offload* o, int32_t place, int64_t first, int64_t count) noexcept nogil:
    cdef Lease* e = &o.leases[place]
    cdef int64_t i
    e.outstanding -= count
    if e.kind == LEASE_G2 and not (o.world.g3.there or o.world.g4.there):
        e.n_arrived += count                   # they go nowhere else: nobody asks which
        return
    for i in range(first, first + count):
        append(o, &e.arrived, &e.arrived_cap, &e.n_arrived, e.blocks[i])


cdef bint offload_tells(Offload* o) noexcept nogil:
    """Whether anybody asks what comes to the host and goes."""
    return o.core.pool.capture


# ---- from the GPU to the host -----------------------------------------------------------------------------------

cdef bint offload_enqueue(Offload* o, int64_t count, int64_t* released) noexcept nogil:
    """Copy the blocks that the pool has just evicted (`evicted`); their slots are held until then.

    True: they are free already, `released` of them. False: the pool's `blocked` says which lease holds them.
    """
    cdef Pool* p = &o.core.pool
    cdef int32_t place = lease_new(o, LEASE_G2)
    cdef Lease* e = &o.leases[place]
    cdef int64_t i, k
    cdef Piece* piece
    cdef Block b
    cdef bint remember = o.reference and offload_tells(o)
    e.slots = count
    for i in range(p.evicted_used):
        piece = &p.evicted[i]
        b.key = piece.key
        k = piece.count
        while k > 0:
            k -= 1
            b.at = piece.start + <int32_t>k
            if remember and not set_add(&o.known, b):
                o.error = ERR_MEMORY
            if tier_has(&o.g2, b) or set_has(&o.pending, b) or not tier_promise(&o.g2, 1):
                if remember:
                    append(o, &e.other, &e.other_cap, &e.others, b)
                continue
            append(o, &e.blocks, &e.cap, &e.n, b)
    e.outstanding = e.n
    lane_add(o, &o.lane, place)
    lane_pump(o, &o.lane, NULL)
    lane_mark(o, &o.lane)
    if o.leases[place].outstanding > 0:
        o.n_blocked += 1
        p.blocked = place
        return False
    o.n_retried += 1
    released[0] = offload_tick(o, o.now)
    return True


# ---- time -------------------------------------------------------------------------------------------------------

cdef inline double whole_us(double ms) noexcept nogil:
    return <double>(<int64_t>(ms * 1000.0)) / 1000.0 if ms > 0.0 else 0.0


cdef int64_t offload_tick(Offload* o, double now) noexcept nogil:
    """Book what finished by `now`; returns the GPU slots released."""
    cdef int64_t i, k, released
    cdef Transfer t
    cdef Lease* e
    o.now = whole_us(now)
    link_advance(&o.down, now)
    for i in range(o.down.done_used):
        t = o.down.done[i]
        for k in range(t.first, t.first + t.count):
            tier_add(&o.g2, o.leases[t.place].blocks[k])
        arrived(o, t.place, t.first, t.count)
        o.lane.active -= 1
        if o.reference:                        # its task ends, and the next starts before another registers anything
            lane_pump(o, &o.lane, NULL)
    link_advance(&o.up, now)
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
    for i in range(o.leases_used):
        e = &o.leases[i]
        if e.kind == LEASE_FREE or e.kind == LEASE_UP or e.outstanding > 0 or e.n_arrived > 0 or e.failed > 0:
            continue
        if o.reference and e.kind == LEASE_G2:
            for k in range(e.others):
                set_discard(&o.known, e.other[k])
        lease_drop(o, <int32_t>i)
    for i in range(o.leases_used):             # cancelled promotions whose running phase is over
        e = &o.leases[i]
        if e.kind == LEASE_UP and e.cancel and e.status != UP_PENDING:
            pool_unpin(&o.core.pool, &e.path, <int32_t>e.prefix, <int32_t>e.slots)
            path_free(&e.path)
            offload_finish(o, <int32_t>i)
    return released


cdef int64_t book(Offload* o) noexcept nogil:
    """Leases progress: slots are given back, and what reached the host is copied further down.

    Promises of slots below are counted in `booked`; they last until the tick is over.
    """
    cdef int64_t i, k, n = 0, chains = 0, first = 0, booked, released = 0
    cdef Lease* e
    cdef void* moved
    o.booked[0] = o.booked[1] = 0
    for i in range(o.leases_used):
        e = &o.leases[i]
        if e.kind == LEASE_FREE or e.kind == LEASE_UP or not (e.n_arrived > 0 or e.failed > 0 or e.outstanding == 0):
            continue
        booked = e.n_arrived + e.failed
        if e.kind == LEASE_G2:
            o.booked[0] += booked
            released += booked
            e.slots -= booked
            if e.n_arrived > 0 and (o.world.g3.there or o.world.g4.there):
                for k in range(e.n_arrived):
                    append(o, &o.chain, &o.chain_cap, &n, e.arrived[k])
                moved = grown(o.chain_ends, &o.chain_ends_cap, chains + 1, sizeof(int64_t))
                if moved == NULL:
                    o.error = ERR_MEMORY
                    return released
                o.chain_ends = <int64_t*>moved
                o.chain_ends[chains] = n
                chains += 1
            if e.outstanding == 0:
                released += e.slots
                e.slots = 0
        elif e.kind == LEASE_G3:
            o.booked[1] += booked
        e.n_arrived = e.failed = 0
    for i in range(chains):
        if o.world.g3.there:
            copy_down(o, &o.world.g3, &o.lane3, LEASE_G3, first, o.chain_ends[i])
        if o.world.g4.there:
            copy_down(o, &o.world.g4, &o.lane4, LEASE_G4, first, o.chain_ends[i])
        first = o.chain_ends[i]
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
    other = link_earliest(&s.down)
    if other < at:
        at = other
    other = link_earliest(&s.up)
    if other < at:
        at = other
    return s.owed[o.worker] if s.owed[o.worker] < at else at


cdef double offload_deadline(Offload* o) noexcept nogil:
    """When something finishes next; infinity if nothing is under way."""
    cdef double at = link_earliest(&o.down), other = link_earliest(&o.up)
    if other < at:
        at = other
    at = shared_deadline(o, &o.world.g3, at)
    return shared_deadline(o, &o.world.g4, at)


# ---- from the host down -----------------------------------------------------------------------------------------

cdef void copy_down(Offload* o, Shared* s, Lane* lane, int kind, int64_t first, int64_t end) noexcept nogil:
    """Copy chained blocks [first, end) from the host to a lower tier; they stay pinned in the host until then."""
    cdef int32_t place = lease_new(o, kind)
    cdef Lease* e = &o.leases[place]
    cdef int64_t i, k = first
    cdef Block b
    for i in range(first, end):                # all are kept before any of them is filtered
        if tier_pin(&o.g2, o.chain[i]):
            append(o, &e.other, &e.other_cap, &e.others, o.chain[i])
    for k in range(e.others):
        b = e.other[k]
        if (not (set_has(&s.objects, b) if s.unbounded else tier_has(&s.pool, b)) and not set_has(&s.pending, b)
                and (s.unbounded or tier_promise(&s.pool, 1))):
            append(o, &e.blocks, &e.cap, &e.n, b)
        else:
            tier_unpin(&o.g2, b)
    e.others = 0
    e.outstanding = e.n
    lane_add(o, lane, place)
    pump_shared(o)
    lane_mark(o, lane)


cdef void shared_drain(Offload* o, Shared* s, double now) noexcept nogil:
    """Move a shared tier's links on. Effects are at once, whoever owns the transfer; another owner books them later."""
    cdef int64_t i, k
    cdef int32_t w
    cdef Transfer t
    cdef Offload* owner
    cdef bint any_down = False
    s.owed[o.worker] = INFINITY
    link_advance(&s.down, now)
    link_advance(&s.up, now)
    for i in range(s.down.done_used):
        t = s.down.done[i]
        owner = <Offload*>o.world.workers[t.worker]
        any_down = True
        if t.worker != o.worker and now < s.owed[t.worker]:
            s.owed[t.worker] = now
        if s.unbounded:
            for k in range(t.first, t.first + t.count):
                if not set_add(&s.objects, owner.leases[t.place].blocks[k]):
                    o.error = ERR_MEMORY
            owner.lane4.active -= 1
        else:
            for k in range(t.first, t.first + t.count):
                tier_register(&s.pool, owner.leases[t.place].blocks[k])
            for k in range(t.first, t.first + t.count):
                tier_unpin(&s.pool, owner.leases[t.place].blocks[k])
            owner.lane3.active -= 1
        for k in range(t.first, t.first + t.count):
            tier_unpin(&owner.g2, owner.leases[t.place].blocks[k])
        arrived(owner, t.place, t.first, t.count)
    for i in range(s.up.done_used):
        t = s.up.done[i]
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
    cdef int32_t i = element_at(path, skip), low = element_begin(path, i), at = skip, tier = 2
    cdef int64_t n2 = 0, n3 = 0, n4 = 0, idle = 0, room
    cdef Block b
    o.plan_n = o.plan_promised = 0
    while at < full:
        if at >= path.ends[i]:
            i += 1
            low = element_begin(path, i)
        b.key, b.at = path.keys[i], at - low
        if tier == 2:
            if tier_has(&o.g2, b):
                n2 += 1
                if not o.reference and tier_idle(&o.g2, b):
                    idle += 1
            else:
                tier = 3
        if tier == 3:
            if w.g3.there and tier_has(&w.g3.pool, b):
                n3 += 1
            else:
                tier = 4
        if tier == 4:
            if not (w.g4.there and set_has(&w.g4.objects, b)):
                break
            n4 += 1
        append(o, &o.plan, &o.plan_cap, &o.plan_n, b)
        at += 1
    if n3 + n4 > 0:
        room = o.g2.free + o.g2.inactive - idle          # what it will pin itself is no room
        if stage and o.g2.reserved + n3 + n4 <= room:
            o.g2.reserved += n3 + n4
            o.plan_promised = n3 + n4
            return True
    o.plan_n = n2
    for at in range(<int32_t>n2):
        tier_pin(&o.g2, o.plan[at])
    return n2 > 0


cdef void offload_drop_plan(Offload* o) noexcept nogil:
    cdef int64_t i
    if o.plan_promised > 0:
        o.g2.reserved -= o.plan_promised
        return
    for i in range(o.plan_n):
        tier_unpin(&o.g2, o.plan[i])


cdef void start_up(Offload* o, int32_t place, double now) noexcept nogil:
    link_start(&o.up, now, <double>(o.leases[place].count * o.block_bytes), o.worker, place, 0, 0)


cdef int32_t offload_start(Offload* o, double now) noexcept nogil:
    """Carry out the plan, for which GPU slots are reserved; returns its lease."""
    cdef int32_t place
    cdef Lease* e
    cdef int64_t i, n = o.plan_n
    o.now = whole_us(now)
    o.n_swaps += 1
    if o.plan_promised > 0:
        o.n_staged += 1
    place = lease_new(o, LEASE_UP)
    e = &o.leases[place]
    e.slots = n
    for i in range(n):
        append(o, &e.blocks, &e.cap, &e.n, o.plan[i])
    if o.plan_promised == 0:
        e.count = e.n2 = n
        e.started = True
        start_up(o, place, now)
        return place
    e.promised = o.plan_promised
    stage_open(o, place)
    pump_staged(o, now)
    return place


cdef void stage_open(Offload* o, int32_t place) noexcept nogil:
    """Keep the blocks of the host and the disk, and begin to fetch what is not in the host."""
    cdef Lease* e = &o.leases[place]
    cdef World* w = o.world
    cdef int64_t i
    while e.n2 < e.n and tier_pin(&o.g2, e.blocks[e.n2]):
        e.n2 += 1
    if w.g3.there:
        while e.n2 + e.n3 < e.n and tier_pin(&w.g3.pool, e.blocks[e.n2 + e.n3]):
            e.n3 += 1
    if e.n3 == 0 and not w.g4.there:
        e.n = e.n2
        e.stage = STAGE_DONE
        return
    if o.reference:                            # these pins are never given up
        for i in range(e.n2):
            tier_pin(&o.g2, e.blocks[i])
        for i in range(e.n2, e.n2 + e.n3):
            tier_pin(&w.g3.pool, e.blocks[i])
    if w.g4.there:
        while e.n2 + e.n3 + e.n4 < e.n and set_has(&w.g4.objects, e.blocks[e.n2 + e.n3 + e.n4]):
            e.n4 += 1
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
    cdef int64_t i
    if tier_take(&o.g2, count):
        link_start(&s.up, o.now, <double>(count * o.block_bytes), o.worker, place, 0, count)
        e.stage = stage
        return
    for i in range(e.n2):
        tier_unpin(&o.g2, e.blocks[i])
    if e.stage == STAGE_G4:                    # the remote store's blocks have come
        for i in range(e.n2 + e.n3, e.n):
            tier_unpin(&o.g2, e.blocks[i])
    for i in range(e.n2, e.n2 + e.n3):
        tier_unpin(&o.world.g3.pool, e.blocks[i])
    e.n = e.n2 = e.n3 = e.n4 = 0
    e.stage = STAGE_FAILED


cdef void staged_up(Offload* o, int32_t place) noexcept nogil:
    """One of the transfers to the host has arrived."""
    cdef Lease* e = &o.leases[place]
    cdef int64_t i
    if e.stage == STAGE_G4:
        for i in range(e.n2 + e.n3, e.n):
            tier_register(&o.g2, e.blocks[i])
        stage_disk(o, place)
        return
    for i in range(e.n2, e.n2 + e.n3):
        tier_register(&o.g2, e.blocks[i])
    for i in range(e.n2, e.n2 + e.n3):
        tier_unpin(&o.world.g3.pool, e.blocks[i])
    e.stage = STAGE_DONE


cdef void pump_staged(Offload* o, double now) noexcept nogil:
    """Promotions whose blocks are all in the host go on to the GPU.

    The reference notices that there was no room in the host only while nothing moves in the foreground.
    """
    cdef int64_t i
    cdef Lease* e
    cdef bint busy = o.reference and o.down.used + o.up.used + o.world.g3.up.used + o.world.g4.up.used > 0
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
    cdef int64_t i
    lease_drop(o, place)
    for i in range(o.leases[place].n):
        tier_unpin(&o.g2, o.leases[place].blocks[i])
