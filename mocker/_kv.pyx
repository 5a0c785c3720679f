# cython: language_level=3
"""The engine's paged, prefix-cached KV memory: which blocks are resident, who holds them, what is evicted next.

Answers to the reference's `kv_manager/kvbm_backend.rs` and its inactive pool (lineage order). Physical slots are
never visible there, so only counts are kept for them: free = capacity - active - inactive.

What makes it small: blocks move in runs. Requests hold prefix-closed sets of blocks and release them from the last
to the first, so the resident blocks of a segment are always one stretch from its start, its holders get fewer
towards the end, and an inactive block never has an inactive child that was released after it. Eviction order
(smallest release tick among blocks without inactive child) is therefore the order of one queue of runs, each
eaten from its deepest block. A failed allocation re-ticks the cached blocks that it had picked up, parents before
children; under the leaf rule that is the same as releasing them again, so they are queued like a release.

Costs: find O(1); use, release, cost O(runs of the path touched); evict O(runs evicted); memory O(resident).
"""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from mocker._common cimport ERR_MEMORY, ERR_OK, NIL, grown, int32_t, int64_t, uint32_t, uint64_t
from mocker._kv_events cimport log_removed, log_stored
from mocker._offload_blocks cimport catalog_add, catalog_number, span_of, spans_add
from mocker._ranks cimport rank_add, rank_cut, rank_fresh, ranks_free


# ---- segment table ----------------------------------------------------------------------------------------------

cdef inline uint64_t home(Pool* p, uint64_t key) noexcept nogil:
    return ((key * <uint64_t>0x9E3779B97F4A7C15) >> 24) & p.table_mask


cdef int32_t pool_find(Pool* p, uint64_t key) noexcept nogil:
    """First run of a segment, NIL if none of its blocks is resident."""
    cdef uint64_t at = home(p, key)
    while p.table_runs[at] != NIL:
        if p.table_keys[at] == key:
            return p.table_runs[at]
        at = (at + 1) & p.table_mask
    return NIL


cdef int table_resize(Pool* p, int64_t places) noexcept nogil:
    cdef uint64_t* keys = <uint64_t*>malloc(places * sizeof(uint64_t))
    cdef int32_t* runs = <int32_t*>malloc(places * sizeof(int32_t))
    cdef uint64_t* old_keys = p.table_keys
    cdef int32_t* old_runs = p.table_runs
    cdef uint64_t old_places = p.table_mask + 1 if old_runs != NULL else 0
    cdef uint64_t i, at
    if keys == NULL or runs == NULL:
        free(keys)
        free(runs)
        return ERR_MEMORY
    for i in range(<uint64_t>places):
        runs[i] = NIL
    p.table_keys, p.table_runs, p.table_mask = keys, runs, <uint64_t>places - 1
    for i in range(old_places):
        if old_runs[i] != NIL:
            at = home(p, old_keys[i])
            while runs[at] != NIL:
                at = (at + 1) & p.table_mask
            keys[at], runs[at] = old_keys[i], old_runs[i]
    free(old_keys)
    free(old_runs)
    return ERR_OK


cdef void table_insert(Pool* p, uint64_t key, int32_t run) noexcept nogil:
    cdef uint64_t at
    if 2 * p.table_used > <int64_t>p.table_mask and table_resize(p, 2 * (<int64_t>p.table_mask + 1)) != ERR_OK:
        p.error = ERR_MEMORY
        return
    at = home(p, key)
    while p.table_runs[at] != NIL:
        at = (at + 1) & p.table_mask
    p.table_keys[at], p.table_runs[at] = key, run
    p.table_used += 1


cdef void table_delete(Pool* p, uint64_t key) noexcept nogil:
    """Remove a segment; later entries of its cluster move up so that no tombstones are needed."""
    cdef uint64_t at = home(p, key), hole, wants
    while p.table_keys[at] != key or p.table_runs[at] == NIL:
        at = (at + 1) & p.table_mask
    hole = at
    while True:
        at = (at + 1) & p.table_mask
        if p.table_runs[at] == NIL:
            break
        wants = home(p, p.table_keys[at])
        if ((at - wants) & p.table_mask) >= ((at - hole) & p.table_mask):
            p.table_keys[hole], p.table_runs[hole] = p.table_keys[at], p.table_runs[at]
            hole = at
    p.table_runs[hole] = NIL
    p.table_used -= 1


# ---- runs and the eviction queue --------------------------------------------------------------------------------

cdef int32_t run_new(Pool* p, uint64_t key, int32_t start, int32_t end, int32_t ref) noexcept nogil:
    cdef int32_t run = p.free_run
    cdef Run* r
    cdef void* moved
    if run != NIL:
        p.free_run = p.runs[run].next
    else:
        moved = grown(p.runs, &p.runs_cap, p.runs_used + 1, sizeof(Run))
        if moved == NULL:
            p.error = ERR_MEMORY
            return 0               # the caller writes into a run that exists; the error ends the run of the engine
        p.runs = <Run*>moved
        run = <int32_t>p.runs_used
        p.runs_used += 1
    r = &p.runs[run]
    r.key, r.start, r.end, r.ref, r.pins = key, start, end, ref, 0
    r.up = r.down = r.prev = r.next = r.origin = NIL
    return run


cdef inline void run_drop(Pool* p, int32_t run) noexcept nogil:
    p.runs[run].next = p.free_run
    p.free_run = run


cdef inline void queue_remove(Pool* p, int32_t run) noexcept nogil:
    cdef Run* r = &p.runs[run]
    if r.prev != NIL:
        p.runs[r.prev].next = r.next
    else:
        p.oldest = r.next
    if r.next != NIL:
        p.runs[r.next].prev = r.prev
    else:
        p.newest = r.prev


cdef inline void queue_newest(Pool* p, int32_t run) noexcept nogil:
    """Newest in the eviction queue; joined with the run below it if that one was released just before."""
    cdef Run* r = &p.runs[run]
    cdef int32_t below = r.down
    if below != NIL and below == p.newest and p.runs[below].ref == 0:
        queue_remove(p, below)
        r.end = p.runs[below].end
        r.down = p.runs[below].down
        if r.down != NIL:
            p.runs[r.down].up = run
        run_drop(p, below)
    r.prev = p.newest
    r.next = NIL
    if p.newest != NIL:
        p.runs[p.newest].next = run
    else:
        p.oldest = run
    p.newest = run


cdef void queue_append(Pool* p, int32_t run) noexcept nogil:
    """Newest in the eviction queue, or of those with its rank."""
    if p.ranked != NULL:
        rank_add(&p.ranks, run, p.runs[run].start)
    else:
        queue_newest(p, run)


cdef void run_split(Pool* p, int32_t run, int32_t at) noexcept nogil:
    """Cut a run in two; the upper part keeps its number, the deeper part comes just before it in the queue."""
    cdef int32_t low = run_new(p, p.runs[run].key, at, p.runs[run].end, p.runs[run].ref)
    cdef Run* r = &p.runs[run]
    cdef Run* d = &p.runs[low]
    r.end = at
    d.pins, d.origin = r.pins, r.origin
    d.up = run
    d.down = r.down
    if d.down != NIL:
        p.runs[d.down].up = low
    r.down = low
    if p.ranked != NULL:
        rank_cut(&p.ranks, run, low, at)
    elif r.ref == 0:
        d.prev, d.next = r.prev, run
        if r.prev != NIL:
            p.runs[r.prev].next = low
        else:
            p.oldest = low
        r.prev = low


cdef bint evict_from(Pool* p, int32_t run, int64_t n) noexcept nogil:
    """Take the last `n` blocks off a run and leave the piece in `evicted`; false if memory is short."""
    cdef Run* r = &p.runs[run]
    cdef Piece* e
    cdef void* moved
    r.end -= <int32_t>n
    if p.keep_evicted:
        moved = grown(p.evicted, &p.evicted_cap, p.evicted_used + 1, sizeof(Piece))
        if moved == NULL:
            p.error = ERR_MEMORY
            return False
        p.evicted = <Piece*>moved
        e = &p.evicted[p.evicted_used]
        p.evicted_used += 1
        e.key, e.local, e.start, e.count, e.tokens = r.key, 0, r.end, <int32_t>n, r.origin
    return True


cdef void run_gone(Pool* p, int32_t run) noexcept nogil:
    """Forget a run that has no blocks left and is in no queue."""
    cdef Run* r = &p.runs[run]
    if r.up != NIL:
        p.runs[r.up].down = NIL
    else:
        table_delete(p, r.key)
    run_drop(p, run)


cdef void evict(Pool* p, int64_t count) noexcept nogil:
    """Evict `count` inactive blocks (there are as many); the pieces are left in `evicted`."""
    cdef int32_t run
    cdef int64_t n
    p.evictions += count
    p.inactive -= count
    if p.ranked != NULL:
        p.ranked.evict(p, count)
        return
    while count > 0:
        run = p.oldest
        n = min(<int64_t>(p.runs[run].end - p.runs[run].start), count)
        count -= n
        if not evict_from(p, run, n):
            return
        if p.runs[run].end == p.runs[run].start:
            queue_remove(p, run)
            run_gone(p, run)


# ---- paths ------------------------------------------------------------------------------------------------------


cdef int path_reserve(Path* path, int64_t need, bint local, int32_t tokens_per_block) noexcept nogil:
    """Room for `need` elements; with their hashes and tokens if wanted."""
    cdef int64_t cap
    cdef void* moved
    if need <= path.cap:
        return ERR_OK
    if local:
        cap = path.cap
        moved = grown(path.local, &cap, need, sizeof(uint64_t))
        if moved == NULL:
            return ERR_MEMORY
        path.local = <uint64_t*>moved
    if tokens_per_block > 0:
        cap = path.cap
        moved = grown(path.tokens, &cap, need, sizeof(uint32_t) * tokens_per_block)
        if moved == NULL:
            return ERR_MEMORY
        path.tokens = <uint32_t*>moved
    cap = path.cap
    moved = grown(NULL, &cap, need, ELEMENT)
    if moved == NULL:
        return ERR_MEMORY
    if path.cap > 0:
        memcpy(moved, path.keys, path.cap * sizeof(uint64_t))
        memcpy(<uint64_t*>moved + cap, path.ends, path.cap * sizeof(int32_t))
        memcpy(<int32_t*>(<uint64_t*>moved + cap) + cap, path.first, path.cap * sizeof(int32_t))
    free(path.keys)
    path.keys, path.cap = <uint64_t*>moved, cap
    path_point(path)
    return ERR_OK


cdef void path_point(Path* path) noexcept nogil:
    """Find the other arrays behind that of the keys."""
    path.ends = <int32_t*>(path.keys + path.cap)
    path.first = path.ends + path.cap


cdef void path_free(Path* path) noexcept nogil:
    free(path.keys)
    if path.local != NULL:
        free(path.local)
    if path.tokens != NULL:
        free(path.tokens)
    path.keys = path.local = NULL
    path.ends = path.first = NULL
    path.tokens = NULL
    path.n = 0
    path.cap = 0


# ---- operations -------------------------------------------------------------------------------------------------

cdef int pool_init(Pool* p, int64_t capacity, bint caching, bint capture, int32_t block_size) noexcept nogil:
    """An empty pool in zeroed memory."""
    p.capacity, p.caching, p.capture, p.block_size = capacity, caching, capture and caching, block_size
    p.keep_evicted = p.capture
    p.free_run = p.oldest = p.newest = p.blocked = NIL
    return table_resize(p, 64)


cdef void pool_free(Pool* p) noexcept nogil:
    free(p.runs)
    free(p.table_keys)
    free(p.table_runs)
    free(p.scratch)
    free(p.events)
    free(p.pieces)
    free(p.event_tokens)
    free(p.evicted)
    ranks_free(&p.ranks)


cdef void pool_cost(Pool* p, Path* path, int32_t full, int64_t* cached, int64_t* active) noexcept nogil:
    """Longest resident prefix of the first `full` blocks, and the part of it that somebody holds.

    Rule: `get_prefill_cost`; no side effect, no recency update.
    """
    cdef int32_t i, run, length, n, begin = 0
    cdef Run* r
    cached[0] = active[0] = 0
    if not p.caching:
        return
    for i in range(path.n):
        length = (path.ends[i] if path.ends[i] < full else full) - begin
        if length <= 0:
            return
        run = pool_find(p, path.keys[i])
        while True:
            if run == NIL:
                return
            r = &p.runs[run]
            n = (r.end if r.end < length else length) - r.start
            cached[0] += n
            if r.ref > r.pins:
                active[0] += n
            if r.end >= length:
                break
            run = r.down
        begin = path.ends[i]


cdef int32_t resident_from(Pool* p, Path* path, int32_t begin, int32_t end, Spot* spot, int64_t* idle) noexcept nogil:
    """Resident blocks of a request from block `begin` on, where a run begins; where, and how many are inactive."""
    cdef int32_t i, low, at, run, limit, hits = 0
    idle[0] = 0
    if begin >= end:
        return 0
    i = element_at(path, begin)
    low = element_begin(path, i)
    at = begin - low
    run = pool_find(p, path.keys[i])
    while run != NIL and p.runs[run].end <= at:
        run = p.runs[run].down
    spot.element, spot.run, spot.at = i, run, at
    while begin + hits < end and run != NIL:
        limit = (path.ends[i] if path.ends[i] < end else end) - low
        if limit > p.runs[run].end:
            limit = p.runs[run].end
        hits += limit - at
        if p.runs[run].ref == 0:
            idle[0] += limit - at
        at = limit
        if low + at < path.ends[i]:
            run = p.runs[run].down
        else:
            low = path.ends[i]
            i += 1
            at = 0
            run = pool_find(p, path.keys[i]) if begin + hits < end else NIL
    return hits


cdef void retick(Pool* p, Path* path, Spot* spot, int32_t hits) noexcept nogil:
    """Give back the inactive blocks among `hits` picked up by a failed allocation: they become the newest."""
    cdef int64_t n = 0
    cdef int32_t i = spot.element, run = spot.run, at = spot.at, limit
    cdef void* moved
    while hits > 0:
        limit = path.ends[i] - element_begin(path, i)
        if limit > at + hits:
            limit = at + hits
        while at < limit:
            if p.runs[run].ref == 0:
                if p.runs[run].end > limit:
                    run_split(p, run, limit)
                moved = grown(p.scratch, &p.scratch_cap, n + 1, sizeof(int32_t))
                if moved == NULL:
                    p.error = ERR_MEMORY
                    return
                p.scratch = <int32_t*>moved
                p.scratch[n] = run
                n += 1
            hits -= (p.runs[run].end if p.runs[run].end < limit else limit) - at
            at = p.runs[run].end
            run = p.runs[run].down
        i += 1
        at = 0
        if hits > 0:
            run = pool_find(p, path.keys[i])
    while n > 0:
        n -= 1
        queue_remove(p, p.scratch[n])
        queue_append(p, p.scratch[n])


cdef void hold(Pool* p, Path* path, Spot* spot, int32_t hits, int32_t pin) noexcept nogil:
    """Add a holder to `hits` resident blocks from a spot on; `pin` 1: a reservation."""
    cdef int32_t i = spot.element, run = spot.run, at = spot.at, limit
    while hits > 0:
        limit = path.ends[i] - element_begin(path, i)
        if limit > at + hits:
            limit = at + hits
        hits -= limit - at
        if at == 0:
            path.first[i] = run
        while at < limit:
            if p.runs[run].end > limit:
                run_split(p, run, limit)
            if p.runs[run].ref == 0:
                queue_remove(p, run)
            p.runs[run].ref += 1
            p.runs[run].pins += pin
            at = p.runs[run].end
            run = p.runs[run].down
        i += 1
        at = 0
        if hits > 0:
            run = pool_find(p, path.keys[i])


cdef int32_t catalog_note(Pool* p, Path* path, int32_t i) noexcept nogil:
    """Note where the segment of an element comes from; its number in the catalog."""
    cdef int32_t number = catalog_number(p.catalog, path.keys[i])
    if number != NIL:
        return number
    number = catalog_add(
        p.catalog, path.keys[i], path.keys[i - 1] if i > 0 else 0,
        path.ends[i - 1] - element_begin(path, i - 1) - 1 if i > 0 else NIL, path.local[i] if path.local != NULL else 0)
    if number == NIL:
        p.error = ERR_MEMORY
    return number


cdef void unhold(Pool* p, Path* path, int32_t begin, int32_t count) noexcept nogil:
    """Drop the hold on `count` resident blocks from `begin` on, where a run begins, last to first."""
    cdef int32_t i, run, up, low, cover, end = begin + count
    cdef Run* r
    if count <= 0:
        return
    i = element_at(path, end - 1)
    while i >= 0 and path.ends[i] > begin:
        low = element_begin(path, i)
        cover = (path.ends[i] if path.ends[i] < end else end) - low
        run = path.first[i]
        while p.runs[run].end < cover:
            run = p.runs[run].down
        while run != NIL and low + p.runs[run].start >= begin:
            r = &p.runs[run]
            up = r.up
            r.ref -= 1
            if r.ref == 0:
                p.active -= r.end - r.start
                p.inactive += r.end - r.start
                queue_append(p, run)
            run = up
        i -= 1


cdef void make_resident(Pool* p, Path* path, int32_t begin, int32_t end) noexcept nogil:
    """Give fresh slots to the request blocks [begin, end); the slots are already counted."""
    cdef int32_t i = element_at(path, begin), low = element_begin(path, i), high, run, tail, first = begin
    while begin < end:
        high = path.ends[i]
        if high > end:
            high = end
        if begin == low:
            run = run_new(p, path.keys[i], 0, high - low, 1)
            table_insert(p, path.keys[i], run)
            path.first[i] = run
            if p.catalog != NULL:
                p.runs[run].origin = catalog_note(p, path, i)
        else:
            tail = path.first[i]
            while p.runs[tail].down != NIL:
                tail = p.runs[tail].down
            if p.runs[tail].ref == 1 and (     # its only holder is this request
                    p.ranked == NULL or rank_fresh(&p.ranks, tail)):
                p.runs[tail].end = high - low
            else:
                run = run_new(p, path.keys[i], begin - low, high - low, 1)
                p.runs[run].up, p.runs[run].origin = tail, p.runs[tail].origin
                p.runs[tail].down = run
        begin = high
        low = path.ends[i]
        i += 1
    if p.fresh != NULL:
        fresh_note(p, path, first, end)


cdef void fresh_note(Pool* p, Path* path, int32_t begin, int32_t end) noexcept nogil:
    """Note the request blocks [begin, end) for the tiers below."""
    cdef int32_t i = element_at(path, begin), low, high
    while begin < end:
        low = element_begin(path, i)
        high = min(path.ends[i], end)
        if not spans_add(p.fresh, span_of(path.keys[i], catalog_number(p.catalog, path.keys[i]), begin - low,
                                          high - begin, 1), 0):
            p.error = ERR_MEMORY
        begin = high
        i += 1


cdef bint pool_use(Pool* p, Path* path, int32_t begin, int32_t full_end, int32_t partial) noexcept nogil:
    """Take the request's full blocks [begin, full_end) and `partial` unregistered ones, all or nothing.

    Rule: `Use` as a transaction. Resident blocks are picked up first, then room is made for the rest by eviction;
    false if free and inactive blocks do not suffice, and then picked-up inactive blocks count as just released.
    """
    cdef Spot spot
    cdef int32_t hits
    cdef int64_t fresh, idle, room
    cdef bint granted
    if not p.caching:
        fresh = full_end - begin + partial
        if fresh > p.capacity - p.active:
            return False
        p.active += fresh
        return True
    while True:
        hits = resident_from(p, path, begin, full_end, &spot, &idle)
        fresh = full_end - begin - hits + partial
        if fresh > p.capacity - p.active - idle:
            if idle > 0:
                retick(p, path, &spot, hits)
            return False
        if idle > 0:
            hold(p, path, &spot, hits, 0)
            p.active += idle
            p.inactive -= idle
        room = p.capacity - p.active - p.inactive
        if fresh <= room:
            break
        if p.tiers == NULL:
            evict(p, fresh - room)
            break
        granted = p.make_room(p, fresh - room)
        if idle > 0:
            unhold(p, path, begin, hits)
        if not granted:
            return False
    if hits > 0 and idle == 0:                 # others hold them all: they were in no danger
        hold(p, path, &spot, hits, 0)
    p.active += fresh
    if begin + hits < full_end:
        make_resident(p, path, begin + hits, full_end)
        if p.capture:
            log_stored(p, path, begin + hits, full_end)
    if p.capture:
        log_removed(p)
    return True


cdef bint pool_reserve(Pool* p, int64_t count) noexcept nogil:
    """Take `count` unregistered blocks (partial blocks, a speculative burst's), all or nothing."""
    cdef int64_t room = p.capacity - p.active - p.inactive
    if count > room + p.inactive:
        return False
    if count > room:
        if p.tiers == NULL:
            evict(p, count - room)
            if p.capture:
                log_removed(p)
        elif not p.make_room(p, count - room):
            return False
    p.active += count
    return True


cdef void pool_release(Pool* p, Path* path, int32_t full, int32_t partial) noexcept nogil:
    """Drop the request's hold on `partial` unregistered blocks and its first `full` blocks, last to first."""
    cdef int32_t i, run, up, cover
    cdef Run* r
    p.active -= partial
    if not p.caching:
        p.active -= full
        return
    if full == 0:
        return
    if p.ranked != NULL:
        p.ranked.release(p, path, full)
        return
    i = element_at(path, full - 1)
    while i >= 0:
        cover = (path.ends[i] if path.ends[i] < full else full) - element_begin(path, i)
        run = path.first[i]
        while p.runs[run].end < cover:
            run = p.runs[run].down
        while run != NIL:
            r = &p.runs[run]
            up = r.up
            r.ref -= 1
            if r.ref == 0:
                p.active -= r.end - r.start
                p.inactive += r.end - r.start
                queue_newest(p, run)
            run = up
        i -= 1


cdef void pool_promote_own(Pool* p, Path* path) noexcept nogil:
    """The partial block became the path's last full block, whose content nobody else can have."""
    cdef int32_t last
    if not p.caching:
        return
    last = path.ends[path.n - 1]
    make_resident(p, path, last - 1, last)
    if p.capture:
        log_stored(p, path, last - 1, last)


cdef void pool_promote_shared(Pool* p, Path* path) noexcept nogil:
    """The partial block became the path's last full block (one element of real tokens).

    If its content is resident already, that block is held instead and the partial one is freed, without an event.
    """
    cdef int32_t i = path.n - 1, run = pool_find(p, path.keys[i])
    if run == NIL:
        pool_promote_own(p, path)
        return
    path.first[i] = run
    if p.runs[run].ref == 0:
        queue_remove(p, run)
        p.inactive -= 1
    else:
        p.active -= 1
    p.runs[run].ref += 1
