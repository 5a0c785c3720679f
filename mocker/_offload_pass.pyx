# cython: language_level=3
"""KV offload as the scheduler sees it: room by eviction, waiting for it, parking for a promotion, its end.

Answers to the parts of `scheduler/vllm/core.rs` and `kv_manager/kvbm_backend.rs` that the reference's feature adds. A
core without tiers calls nothing of this. Costs: a pass O(leases + parked requests); an eviction O(log) a block.
"""
from libc.math cimport INFINITY
from libc.string cimport memset

from mocker._common cimport ERR_MEMORY, NIL, ST_PARKED, ST_WAITING, grown, int32_t, int64_t
from mocker._core cimport Core, Request
from mocker._kv cimport Path, Pool, evict, pool_reserve
from mocker._kv_events cimport event_new, event_piece, log_removed
from mocker._kv_kept cimport pool_forgo, pool_pin_prefix, pool_promoted, pool_touch_prefix
from mocker._offload_blocks cimport Block, Origin, catalog_find, set_has
from mocker._offload cimport (
    DENIALS, LEASE_FREE, STAGE_FAILED, UP_COMPLETED, Lease, Offload, Wait, clock_set, offload_computed, offload_due,
    offload_risen, offload_still, offload_stirs, offload_tick, soon)
from mocker._offload_down cimport offload_enqueue
from mocker._offload_policy cimport policy_reach
from mocker._offload_tiers cimport EVICT_BELADY, tier_has
from mocker._offload_up cimport offload_drop_plan, offload_finish, offload_plan, offload_start
from mocker._requests cimport waiting_pop, waiting_prepend


cdef void log_host(Offload* o) noexcept nogil:
    """The host tier's changes as events, one each."""
    cdef Pool* p = &o.core.pool
    cdef int64_t i
    cdef Block b
    cdef Origin* origin
    for i in range(o.changes_used):
        if not p.capture or event_new(p, o.changes[i].created) == NULL:
            break
        b = o.changes[i].block
        p.events[p.events_used - 1].tier = 1
        origin = catalog_find(o.g2.catalog, b.key)
        if o.changes[i].created:
            if b.at > 0:
                p.events[p.events_used - 1].has_parent = 1
                p.events[p.events_used - 1].parent_key = b.key
                p.events[p.events_used - 1].parent_offset = b.at - 1
            elif origin != NULL and origin.parent_at != NIL:
                p.events[p.events_used - 1].has_parent = 1
                p.events[p.events_used - 1].parent_key = origin.parent_key
                p.events[p.events_used - 1].parent_offset = origin.parent_at
        event_piece(p, b.key, origin.local if origin != NULL and o.changes[i].created else 0, b.at, 1, NULL)
    o.changes_used = 0


cdef bint tiers_make_room(Pool* p, int64_t count) noexcept nogil:
    """Evict `count` blocks; true if their slots are free now, else `blocked` says who holds them for a while."""
    cdef Offload* o = <Offload*>p.tiers
    cdef int64_t released = 0
    cdef bint granted
    evict(p, count)
    p.active += count
    granted = offload_enqueue(o, count, &released)
    p.active -= released
    if released > 0:
        o.core.generation += 1                 # who waits for a reservation may try again
    if p.capture:
        log_removed(p)
    p.evicted_used = 0
    if o.changes_used > 0:
        log_host(o)
    return granted


cdef double catch_up(Core* c, double now, double due) noexcept nogil:
    """What ends below a lone worker before `now` happens, each at its time, first at `due`; what is due then."""
    cdef Offload* o = <Offload*>c.tiers
    cdef double last = -1.0
    cdef bint began = False
    while due < now:
        if due == last and o.down.done_used + o.up.done_used == 0 and not began:
            break                              # less than a clock tick is left
        began = o.fresh_at <= due
        tick(c, due)
        last = due
        due = offload_due(o)
    return due


cdef void tiers_look(Core* c, double now) noexcept nogil:
    """Somebody looks at a lone worker at `now`."""
    cdef double due = offload_due(<Offload*>c.tiers)
    if due <= now and catch_up(c, now, due) <= now:
        tiers_step(c, now)


cdef double tiers_rest(Core* c, double until) noexcept nogil:
    """Up to when, and not after `until`, passes need not look below; 0 if the next one has to."""
    cdef Offload* o = <Offload*>c.tiers
    cdef double due = offload_due(o)
    if offload_stirs(o) or (due < INFINITY and not o.alone):
        return 0.0
    if not (due < INFINITY):
        return until
    return min(until, soon(due))


cdef void tiers_begin(Core* c, double now) noexcept nogil:
    """Time passes below, up to the start of a pass.

    A lone worker's tiers do as if they had been looked at whenever something ended. That no other moment counts, since
    sums of floating-point numbers would show it, makes it independent of other workers and of passes that are skipped.
    """
    cdef Offload* o = <Offload*>c.tiers
    cdef double due
    if o.looked:                               # the fast-forward has come here
        o.looked = False
        return
    if o.alone:
        due = offload_due(o)
        if o.at < now and due <= now:          # the clock came here before the pass did
            due = catch_up(c, now, due)
        if not (due < INFINITY) or (o.n_ready == 0 and now < soon(due)):
            clock_set(o, now)
            rise(c, now, c.pool.active)        # an allocation in the last pass may have found it
            return
    tiers_step(c, now)


cdef void tiers_step(Core* c, double now) noexcept nogil:
    """Time passes below."""
    if not offload_still(<Offload*>c.tiers, now):
        tick(c, now)


cdef void tick(Core* c, double now) noexcept nogil:
    """Something may end below."""
    cdef Offload* o = <Offload*>c.tiers
    cdef int64_t active = c.pool.active, released = offload_tick(o, now)        # it may change `active` itself
    c.pool.active -= released
    if o.changes_used > 0:
        log_host(o)
    rise(c, now, active)


cdef void rise(Core* c, double now, int64_t active) noexcept nogil:
    """Parked requests whose blocks have come go to the front of the queue, in order of parking.

    `active`: blocks that were held before; if fewer are now, who waits for a reservation may try again.
    """
    cdef Offload* o = <Offload*>c.tiers
    cdef int64_t i, k = 0, n = 0
    cdef int32_t place
    cdef void* moved
    if offload_risen(o):
        o.risen = False
        moved = grown(o.done, &o.done_cap, o.n_parked, sizeof(int32_t))
        if moved == NULL:
            o.error = ERR_MEMORY
            return
        o.done = <int32_t*>moved
        for i in range(o.n_parked):
            place = o.parked[i]
            if o.leases[place].status == UP_COMPLETED:
                o.done[n] = place
                n += 1
            else:
                o.parked[k] = place
                k += 1
        o.n_parked = k
        while n > 0:
            n -= 1
            promoted(c, o.done[n], now)
    if c.pool.active < active:
        c.generation += 1


cdef void promoted(Core* c, int32_t place, double now) noexcept nogil:
    """The blocks of a parked request are on the GPU: it is queued again, first of all."""
    cdef Offload* o = <Offload*>c.tiers
    cdef Lease* e = &o.leases[place]
    cdef int32_t slot = e.slot, skip = e.skip
    cdef int64_t count = e.count, slots = e.slots
    cdef Request* r = &c.req[slot]
    if e.stage == STAGE_FAILED and not o.reference and waits_room(o, slot):
        o.waits[slot].unstaged = True
    o.parked_ms += now - e.since
    o.up_blocks[0] += e.n2
    o.up_blocks[1] += e.n3
    o.up_blocks[2] += e.n4
    if o.row_parked != NULL:
        o.row_parked[r.id] += now - e.since
        o.row_blocks[3 * r.id] += e.n2
        o.row_blocks[3 * r.id + 1] += e.n3
        o.row_blocks[3 * r.id + 2] += e.n4
    offload_finish(o, place)
    pool_promoted(&c.pool, &r.path, skip, skip + <int32_t>count, slots)
    r.status = ST_WAITING
    waiting_prepend(c, slot)


cdef bint waits_room(Offload* o, int32_t slot) noexcept nogil:
    """Room for what the request in `slot` waits for."""
    cdef int64_t cap = o.waits_cap
    cdef void* moved = grown(o.waits, &o.waits_cap, slot + 1, sizeof(Wait))
    if moved == NULL:
        o.error = ERR_MEMORY
        return False
    o.waits = <Wait*>moved
    if o.waits_cap > cap:
        memset(o.waits + cap, 0, (o.waits_cap - cap) * sizeof(Wait))
    return True


cdef void tiers_wait(Core* c, int32_t slot) noexcept nogil:
    """A request waits for the lease that the pool's last refusal named."""
    cdef Offload* o = <Offload*>c.tiers
    if waits_room(o, slot):
        o.waits[slot].place = c.pool.blocked
        o.waits[slot].serial = o.leases[c.pool.blocked].serial


cdef void tiers_deny(Core* c, int32_t slot) noexcept nogil:
    """`tiers_wait` for the block of a running request's next token."""
    cdef Offload* o = <Offload*>c.tiers
    tiers_wait(c, slot)
    if slot < o.waits_cap:
        o.waits[slot].denied += 1
        o.n_starved += o.waits[slot].denied == DENIALS


cdef bint tiers_admit(Core* c) noexcept nogil:
    """Whether waiting requests may be admitted.

    Not while a running one was refused its next token's block too often: whoever was admitted took it every time. In
    the reference that can go on for ever.
    """
    cdef Offload* o = <Offload*>c.tiers
    cdef int64_t i
    if o.reference or o.n_starved == 0:
        return True
    for i in range(c.n_running):
        if c.running[i] < o.waits_cap and o.waits[c.running[i]].denied >= DENIALS:
            return False
    return True


cdef Promotion tiers_promote(Core* c, int32_t slot, int64_t cached, int64_t idle, double now) noexcept nogil:
    """Bring up what the lower tiers have of the head of the queue after its cached prefix, and park it meanwhile.

    Of the `cached` tokens `idle` are in blocks that nobody holds.
    """
    cdef Offload* o = <Offload*>c.tiers
    cdef Request* r = &c.req[slot]
    cdef int32_t skip = <int32_t>(cached >> c.shift), place
    cdef bint stage = slot >= o.waits_cap or not o.waits[slot].unstaged
    cdef Lease* e
    cdef void* moved
    if o.g2.policy == EVICT_BELADY:
        policy_reach(&o.g2, r.id)
    if skip >= r.full:
        return UP_MISS
    if not below_has(o, &r.path, skip):
        if idle > 0:
            pool_touch_prefix(&c.pool, &r.path, skip)
        return UP_MISS
    pool_pin_prefix(&c.pool, &r.path, skip)
    if not offload_plan(o, &r.path, skip, r.full, stage):
        pool_forgo(&c.pool, &r.path, skip)
        return UP_MISS
    if not pool_reserve(&c.pool, o.plan.blocks):
        offload_drop_plan(o)
        pool_forgo(&c.pool, &r.path, skip)
        if c.pool.blocked == NIL:
            return UP_MISS
        tiers_wait(c, slot)
        c.pool.blocked = NIL
        return UP_BLOCKED
    place = offload_start(o, now)
    e = &o.leases[place]
    e.slot, e.skip, e.prefix, e.since = slot, skip, skip, now
    moved = grown(o.parked, &o.parked_cap, o.n_parked + 1, sizeof(int32_t))
    if moved == NULL:
        o.error = ERR_MEMORY
        return UP_MISS
    o.parked = <int32_t*>moved
    o.parked[o.n_parked] = place
    o.n_parked += 1
    waiting_pop(c)
    r.status = ST_PARKED
    return UP_PARKED


cdef bint below_has(Offload* o, Path* path, int32_t skip) noexcept nogil:
    """Whether any tier has the block at `skip`."""
    cdef Block b
    cdef int32_t i = 0
    while path.ends[i] <= skip:
        i += 1
    b.key, b.at = path.keys[i], skip - (path.ends[i - 1] if i > 0 else 0)
    return (tier_has(&o.g2, b) or (o.world.g3.there and tier_has(&o.world.g3.pool, b))
            or (o.world.g4.there and set_has(&o.world.g4.objects, b)))


cdef void tiers_cancel(Core* c, int32_t slot) noexcept nogil:
    """A parked request is dropped: what it keeps comes back when the copy under way is done."""
    cdef Offload* o = <Offload*>c.tiers
    cdef int64_t i, k = 0
    cdef Lease* e
    for i in range(o.n_parked):
        e = &o.leases[o.parked[i]]
        if e.slot != slot:
            o.parked[k] = o.parked[i]
            k += 1
            continue
        e.cancel = True
        o.n_cancelled += 1
        o.n_dropped += 1
        e.path = c.req[slot].path
        memset(&c.req[slot].path, 0, sizeof(Path))
    o.n_parked = k


cdef double tiers_deadline(Core* c) noexcept nogil:
    """When something below finishes next; infinity if nothing is under way."""
    return offload_due(<Offload*>c.tiers)


cdef double tiers_end(Core* c, double now, double end) noexcept nogil:
    """When a pass ends that would take until `end`: one that computed nothing goes on to what comes next from below."""
    cdef Offload* o = <Offload*>c.tiers
    cdef double due
    if end <= now:
        due = offload_due(o)
        if due < INFINITY:
            end = due if due > now else now
    offload_computed(o, end)
    return end


cdef void tiers_arrived(Core* c) noexcept nogil:
    """Blocks have come to the GPU from another worker, outside a pass."""
    cdef Offload* o = <Offload*>c.tiers
    offload_computed(o, o.at)


cdef bint tiers_quiet(Core* c) noexcept nogil:
    """Whether nothing is copied down or comes up, or waits to be. O(leases)."""
    cdef Offload* o = <Offload*>c.tiers
    cdef int64_t i
    if o.fresh.blocks > 0:
        return False
    for i in range(o.leases_used):
        if o.leases[i].kind != LEASE_FREE:
            return False
    return True
