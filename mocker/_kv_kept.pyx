# cython: language_level=3
"""Room in the block pool that is kept for a transfer: of a hand-off's destination, and of blocks that come up again.

Answers to `reserve_destination`, `activate_destination` and `register_swapped_in_blocks` of the reference's
`kv_manager/kvbm_backend.rs`. Kept blocks have pins beside their holders. Costs: O(runs of the path touched).
"""
from mocker._common cimport ERR_MEMORY, NIL, grown, int32_t, int64_t
from mocker._kv cimport (
    Path, Pool, Spot, catalog_note, element_at, element_begin, evict, hold, make_resident, pool_find, pool_release,
    queue_append, resident_from, retick, run_new, table_insert, unhold)
from mocker._kv_events cimport log_removed, log_stored


cdef int32_t pool_pin(Pool* p, Path* path, int32_t full, int32_t partial) noexcept nogil:
    """Reserve room for a prompt: pin its cached prefix, take unregistered slots for the rest.

    Rule: `reserve_destination`. Returns the blocks pinned, NIL if there is no room (inactive ones picked up then
    count as just released).
    """
    cdef Spot spot
    cdef int64_t idle = 0, fresh, room
    cdef int32_t hits = 0
    if p.caching:
        hits = resident_from(p, path, 0, full, &spot, &idle)
    fresh = full + partial - hits
    if fresh > p.capacity - p.active - idle:
        if idle > 0:
            retick(p, path, &spot, hits)
        return NIL
    if hits > 0:
        hold(p, path, &spot, hits, 1)
        p.active += idle
        p.inactive -= idle
    room = p.capacity - p.active - p.inactive
    if p.caching and fresh > room:
        if p.tiers == NULL:
            evict(p, fresh - room)
            if p.capture:
                log_removed(p)
        elif not p.make_room(p, fresh - room):
            pool_forgo(p, path, hits)
            return NIL
    p.active += fresh
    return hits


cdef void pins_drop(Pool* p, Path* path, int32_t pinned) noexcept nogil:
    """The first `pinned` blocks are no longer held as a reservation's (their holds stay)."""
    cdef int32_t i, run, low
    for i in range(path.n):
        low = element_begin(path, i)
        if low >= pinned:
            break
        run = path.first[i]
        while run != NIL and low + p.runs[run].start < pinned:
            p.runs[run].pins -= 1
            run = p.runs[run].down


cdef void pool_unpin(Pool* p, Path* path, int32_t pinned, int32_t reserved) noexcept nogil:
    """Give up a reservation: its pinned prefix and `reserved` unregistered slots."""
    p.active -= reserved
    pins_drop(p, path, pinned)
    if pinned > 0:
        pool_release(p, path, pinned, 0)


cdef void pool_forgo(Pool* p, Path* path, int32_t pinned) noexcept nogil:
    """The prefix pinned just now is not needed after all: nobody has used it, so no score is asked."""
    if p.ranked == NULL:
        pool_unpin(p, path, pinned, 0)
        return
    pins_drop(p, path, pinned)
    unhold(p, path, 0, pinned)


cdef void pool_adopt(Pool* p, Path* path, int32_t pinned, int32_t full) noexcept nogil:
    """A reservation becomes a request's: pins turn into holds, reserved slots are registered.

    Rule: `activate_destination`; blocks that became resident meanwhile are held and their reserved slots freed.
    """
    cdef Spot spot
    cdef int32_t hits
    cdef int64_t idle
    if not p.caching:
        return
    pins_drop(p, path, pinned)
    hits = resident_from(p, path, pinned, full, &spot, &idle)
    if hits > 0:
        hold(p, path, &spot, hits, 0)
        p.active += idle - hits
        p.inactive -= idle
    if pinned + hits < full:
        make_resident(p, path, pinned + hits, full)
        if p.capture:
            log_stored(p, path, pinned + hits, full)


cdef void pool_pin_prefix(Pool* p, Path* path, int32_t count) noexcept nogil:
    """Keep the first `count` blocks of a path, which are resident, for a transfer; `pool_unpin` gives them back."""
    cdef Spot spot
    cdef int64_t idle
    cdef int32_t hits
    if count == 0:
        return
    hits = resident_from(p, path, 0, count, &spot, &idle)
    hold(p, path, &spot, hits, 1)
    p.active += idle
    p.inactive -= idle


cdef void pool_touch_prefix(Pool* p, Path* path, int32_t count) noexcept nogil:
    """The first `count` blocks, which are resident, were looked at: the inactive ones become the newest."""
    cdef Spot spot
    cdef int64_t idle
    cdef int32_t hits
    if count == 0:
        return
    hits = resident_from(p, path, 0, count, &spot, &idle)
    if idle > 0:
        retick(p, path, &spot, hits)


cdef void pool_promoted(Pool* p, Path* path, int32_t begin, int32_t end, int64_t slots) noexcept nogil:
    """The blocks [begin, end) of a path came up into `slots` reserved slots; those before come out of their pins.

    All become inactive. Those that are resident by now, from the first one on, need no slot. They are older than what
    follows them; the eviction queue wants them after that.
    """
    p.active -= slots
    if begin < end and bring_up(p, path, begin, end) and p.ranked != NULL:
        pins_drop(p, path, begin)
        pool_release(p, path, end, 0)
    else:
        pool_unpin(p, path, begin, 0)


cdef bint bring_up(Pool* p, Path* path, int32_t begin, int32_t end) noexcept nogil:
    """The blocks [begin, end) are resident and inactive, or with a score of what is evicted held; false: they were."""
    cdef Spot spot
    cdef int64_t idle = 0, n = 0, i
    cdef int32_t hits = 0, at, e, low, high, run, tail
    cdef bint ranked = p.ranked != NULL
    cdef void* moved
    hits = resident_from(p, path, begin, end, &spot, &idle)
    at = begin + hits
    if at == end:
        return False
    moved = grown(p.scratch, &p.scratch_cap, p.runs_used + path.n + 1, sizeof(int32_t))
    if moved == NULL:
        p.error = ERR_MEMORY
        return False
    p.scratch = <int32_t*>moved
    if ranked:
        p.active += end - at + idle
        p.inactive -= idle
        if hits > 0:
            hold(p, path, &spot, hits, 0)
    else:
        p.inactive += end - at
    e = element_at(path, at)
    low = element_begin(path, e)
    while at < end:
        high = path.ends[e] if path.ends[e] < end else end
        run = run_new(p, path.keys[e], at - low, high - low, ranked)
        if at == low:
            table_insert(p, path.keys[e], run)
            path.first[e] = run
            p.runs[run].origin = catalog_note(p, path, e)
        else:
            tail = pool_find(p, path.keys[e])
            while p.runs[tail].down != NIL:
                tail = p.runs[tail].down
            p.runs[run].up, p.runs[run].origin = tail, p.runs[tail].origin
            p.runs[tail].down = run
        p.scratch[n] = run
        n += 1
        at = high
        low = path.ends[e]
        e += 1
    for i in range(0 if ranked else n):
        queue_append(p, p.scratch[n - 1 - i])
    if p.capture:
        log_stored(p, path, begin + hits, end)
    if idle > 0 and not ranked:
        retick(p, path, &spot, hits)
    return True
