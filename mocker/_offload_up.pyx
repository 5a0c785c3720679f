# cython: language_level=3
"""Promotions of KV offload: what comes up from below, how far, and over the host if it was on the disk or beyond.

Costs: O(log runs of a tier) a span; with a remote store O(1) a block beside that.
"""
from mocker._common cimport int32_t, int64_t
from mocker._kv cimport Path, element_at, element_begin
from mocker._offload cimport (
    LEASE_UP, STAGE_DONE, STAGE_FAILED, STAGE_G3, STAGE_G4, UP_CANCELLED, UP_COMPLETED, Lease, Offload, Shared, World,
    offload_sync, whole_us)
from mocker._offload_blocks cimport (
    Cursor, Span, Spans, catalog_number, set_has, span_block, span_of, span_part, spans_clear, spans_next)
from mocker._offload_leases cimport append, append_all, lease_drop, lease_new
from mocker._offload_links cimport link_start
from mocker._offload_tiers cimport (
    Tier, tier_idle, tier_look, tier_pin, tier_register, tier_return, tier_room, tier_take, tier_unpin)


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
        link_start(&s.up, o.now, <double>(count * o.block_bytes), o.worker, place, 0, 0)
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
            o.risen = True
        else:
            start_up(o, <int32_t>i, now)


cdef void offload_finish(Offload* o, int32_t place) noexcept nogil:
    """A promotion gives up its place and its host blocks."""
    cdef Lease* e = &o.leases[place]
    lease_drop(o, place)
    each(&o.g2, &e.blocks, 0, e.n, tier_unpin if e.cancel else tier_return)
