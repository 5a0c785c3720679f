# cython: language_level=3
"""The router's index: which worker has which blocks, resident or of requests in flight.

Answers to `indexer/radix_tree.rs` and the block half of `sequences/*` of dynamo-kv-router 1.3.0. Resident blocks and
blocks of requests in flight are both prefix-closed per worker, so a segment needs one depth a worker, and neither
tree of the reference is needed: the overlap of a request is a walk down its path while somebody covers it fully.

Costs: event O(pieces * workers with that segment); walk O(path elements that somebody covers * their holders); a
request's blocks in and out O(path elements * their holders).
Memory: resident (segment, worker) pairs and blocks of requests in flight.
"""
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from mocker._common cimport NIL, grown, int32_t, int64_t, uint64_t
from mocker._kv cimport Event, Piece, Pool
from mocker._router cimport ROUTER_MEMORY, Hold, KeyTable, Router, Segment, Ticket
from mocker._router_tiers cimport TIER_EXTERNAL, TIER_HOST, lower_cleared, lower_event


# ---- key tables -------------------------------------------------------------------------------------------------

cdef bint table_resize(KeyTable* t, int64_t places) noexcept nogil:
    cdef uint64_t* keys = <uint64_t*>malloc(places * sizeof(uint64_t))
    cdef int32_t* values = <int32_t*>malloc(places * sizeof(int32_t))
    cdef uint64_t* old_keys = t.keys
    cdef int32_t* old_values = t.values
    cdef uint64_t old_places = t.mask + 1 if old_values != NULL else 0
    cdef uint64_t i, at
    if keys == NULL or values == NULL:
        free(keys)
        free(values)
        return False
    memset(values, 0xFF, places * sizeof(int32_t))
    t.keys, t.values, t.mask = keys, values, <uint64_t>places - 1
    for i in range(old_places):
        if old_values[i] != NIL:
            at = home(t, old_keys[i])
            while values[at] != NIL:
                at = (at + 1) & t.mask
            keys[at], values[at] = old_keys[i], old_values[i]
    free(old_keys)
    free(old_values)
    return True


cdef bint table_insert(KeyTable* t, uint64_t key, int32_t value) noexcept nogil:
    cdef uint64_t at
    if 2 * t.used > <int64_t>t.mask and not table_resize(t, 2 * (<int64_t>t.mask + 1)):
        return False
    at = home(t, key)
    while t.values[at] != NIL:
        at = (at + 1) & t.mask
    t.keys[at], t.values[at] = key, value
    t.used += 1
    return True


cdef void table_delete(KeyTable* t, uint64_t key) noexcept nogil:
    """Remove a key that is there; later entries of its cluster move up."""
    cdef uint64_t at = home(t, key), hole
    while t.keys[at] != key or t.values[at] == NIL:
        at = (at + 1) & t.mask
    hole = at
    while True:
        at = (at + 1) & t.mask
        if t.values[at] == NIL:
            break
        if ((at - home(t, t.keys[at])) & t.mask) >= ((at - hole) & t.mask):
            t.keys[hole], t.values[hole] = t.keys[at], t.values[at]
            hole = at
    t.values[hole] = NIL
    t.used -= 1


# ---- segments ---------------------------------------------------------------------------------------------------

cdef int32_t segment_of(Router* r, uint64_t key) noexcept nogil:
    """The segment of a key, made if new; NIL if memory is short."""
    cdef int32_t s = table_find(&r.table, key)
    cdef Segment* g
    cdef void* moved
    if s != NIL:
        return s
    s = r.free_segment
    if s == NIL:
        moved = grown(r.segments, &r.segments_cap, r.segments_used + 1, sizeof(Segment))
        if moved == NULL:
            r.error = ROUTER_MEMORY
            return NIL
        r.segments = <Segment*>moved
        s = <int32_t>r.segments_used
    if not table_insert(&r.table, key, s):
        r.error = ROUTER_MEMORY
        return NIL
    g = &r.segments[s]
    if s == r.segments_used:
        r.segments_used += 1
    else:
        r.free_segment = g.next_free
    memset(g, 0, sizeof(Segment))
    g.key = key
    return s


cdef void segment_trim(Router* r, int32_t s) noexcept nogil:
    """Forget a segment that nobody holds any more."""
    cdef Segment* g = &r.segments[s]
    if g.resident_used > 0 or g.active_used > 0:
        return
    table_delete(&r.table, g.key)
    free(g.resident)
    free(g.active)
    g.resident = g.active = NULL
    g.next_free = r.free_segment
    r.free_segment = s


cdef Hold* hold_new(Router* r, Hold** holds, int32_t* used, int32_t* cap) noexcept nogil:
    cdef int32_t target
    cdef void* moved
    if used[0] == cap[0]:
        target = 2 * cap[0] if cap[0] > 0 else 2
        moved = realloc(holds[0], <size_t>target * sizeof(Hold))
        if moved == NULL:
            r.error = ROUTER_MEMORY
            return NULL
        holds[0] = <Hold*>moved
        cap[0] = target
    used[0] += 1
    return &holds[0][used[0] - 1]


cdef inline Hold* resident_hold(Segment* g, int32_t worker) noexcept nogil:
    cdef int32_t i
    for i in range(g.resident_used):
        if g.resident[i].worker == worker:
            return &g.resident[i]
    return NULL


cdef inline int32_t active_depth(Segment* g, int32_t worker) noexcept nogil:
    cdef int32_t i, depth = 0
    for i in range(g.active_used):
        if g.active[i].worker == worker and g.active[i].depth > depth:
            depth = g.active[i].depth
    return depth


# ---- resident blocks --------------------------------------------------------------------------------------------

cdef void router_stored(Router* r, int32_t worker, uint64_t key, int32_t end) noexcept nogil:
    """The worker has the segment's blocks up to `end` (exclusive)."""
    cdef int32_t s = segment_of(r, key)
    cdef Segment* g
    cdef Hold* h
    if s == NIL:
        return
    g = &r.segments[s]
    h = resident_hold(g, worker)
    if h == NULL:
        h = hold_new(r, &g.resident, &g.resident_used, &g.resident_cap)
        if h == NULL:
            return
        h.worker, h.depth, h.refs = worker, 0, 0
    if end > h.depth:
        r.loads[worker].resident += end - h.depth
        h.depth = end


cdef void router_removed(Router* r, int32_t worker, uint64_t key, int32_t start) noexcept nogil:
    """The worker has lost the segment's blocks from `start` on."""
    cdef int32_t s = table_find(&r.table, key)
    cdef Segment* g
    cdef Hold* h
    if s == NIL:
        return
    g = &r.segments[s]
    h = resident_hold(g, worker)
    if h == NULL or h.depth <= start:
        return
    r.loads[worker].resident -= h.depth - start
    h.depth = start
    if start == 0:
        g.resident_used -= 1
        h[0] = g.resident[g.resident_used]
        segment_trim(r, s)


cdef void router_cleared(Router* r, int32_t worker) noexcept nogil:
    """The worker has no block any more. O(segments)."""
    cdef int64_t s
    for s in range(r.segments_used):
        if r.segments[s].resident_used > 0:
            router_removed(r, worker, r.segments[s].key, 0)


cdef void index_forget(Router* r, int32_t worker) noexcept nogil:
    """The worker is gone with all its blocks."""
    cdef int tier
    router_cleared(r, worker)
    if r.lower != NULL:
        for tier in range(TIER_HOST, TIER_EXTERNAL + 1):
            lower_cleared(r, worker, tier)


cdef void index_events(Router* r, int32_t worker, Pool* pool) noexcept nogil:
    """Apply a pool's event log and empty it."""
    cdef int64_t i, k
    cdef Event* e
    cdef Piece* p
    if r.reads:
        for i in range(pool.events_used):
            e = &pool.events[i]
            if e.tier:                         # not on the GPU
                if r.lower != NULL:
                    lower_event(r, worker, e, pool)
                continue
            for k in range(e.first, e.first + e.pieces):
                p = &pool.pieces[k]
                if r.skip_own and p.key >> 63:
                    continue
                if e.stored:
                    router_stored(r, worker, p.key, p.start + p.count)
                else:
                    router_removed(r, worker, p.key, p.start)
    pool.events_used = pool.pieces_used = pool.event_tokens_used = 0


cdef bint walk(Router* r, const uint64_t* keys, const int32_t* ends, int32_t n, bint cached,
               bint active) noexcept nogil:
    """Fill `overlap` (if `cached`) and `shared` (if `active`) of every worker for a path; the rest is 0."""
    cdef int32_t i, k, s, depth, length, begin = 0
    cdef Segment* g
    cdef Hold* h
    cdef void* moved = grown(r.found, &r.found_cap, n, sizeof(int32_t))
    if moved == NULL and n > 0:
        r.error = ROUTER_MEMORY
        return False
    r.found = <int32_t*>moved
    r.found_used = 0
    for i in range(r.n_warm):
        r.overlap[r.warm[i]] = r.shared[r.warm[i]] = 0
    r.n_warm = 0
    for i in range(n):
        if not (cached or active):
            break
        s = table_find(&r.table, keys[i])
        r.found[i] = s
        r.found_used = i + 1
        if s == NIL:
            break
        g = &r.segments[s]
        length = ends[i] - begin
        if cached:
            cached = False
            for k in range(g.resident_used):
                h = &g.resident[k]
                if r.overlap[h.worker] == begin:       # it covers everything before
                    depth = h.depth if h.depth < length else length
                    warm_up(r, h.worker)
                    r.overlap[h.worker] = begin + depth
                    cached |= depth == length
        if active:
            active = False
            for k in range(g.active_used):
                h = &g.active[k]
                if r.shared[h.worker] >= begin:
                    depth = h.depth if h.depth < length else length
                    if begin + depth > r.shared[h.worker]:
                        warm_up(r, h.worker)
                        r.shared[h.worker] = begin + depth
                    active |= depth == length
        begin = ends[i]
    r.walks += r.found_used
    return True


# ---- blocks of requests in flight -------------------------------------------------------------------------------

cdef void blocks_add(Router* r, Ticket* t, const uint64_t* keys, const int32_t* ends, int32_t n) noexcept nogil:
    """Count a request's blocks as active on its worker; `found` is of the walk just done."""
    cdef int32_t i, k, s, length, depth, begin = 0
    cdef Segment* g
    cdef Hold* h
    for i in range(n):
        length = ends[i] - begin
        begin = ends[i]
        s = r.found[i] if i < r.found_used else NIL
        if s == NIL:
            s = segment_of(r, keys[i])
            if s == NIL:
                return
        g = &r.segments[s]
        depth = active_depth(g, t.worker)
        if length > depth:
            r.loads[t.worker].blocks += length - depth
        h = NULL
        for k in range(g.active_used):
            if g.active[k].worker == t.worker and g.active[k].depth == length:
                h = &g.active[k]
                break
        if h == NULL:
            h = hold_new(r, &g.active, &g.active_used, &g.active_cap)
            if h == NULL:
                return
            h.worker, h.depth, h.refs = t.worker, length, 0
        h.refs += 1
        t.segments[i], t.depths[i] = s, length
        t.n = i + 1


cdef void blocks_remove(Router* r, Ticket* t) noexcept nogil:
    cdef int32_t i, k, depth
    cdef Segment* g
    cdef Hold* h
    for i in range(t.n):
        g = &r.segments[t.segments[i]]
        for k in range(g.active_used):
            h = &g.active[k]
            if h.worker == t.worker and h.depth == t.depths[i]:
                h.refs -= 1
                if h.refs == 0:
                    g.active_used -= 1
                    h[0] = g.active[g.active_used]
                    depth = active_depth(g, t.worker)
                    if depth < t.depths[i]:
                        r.loads[t.worker].blocks -= t.depths[i] - depth
                    segment_trim(r, t.segments[i])
                break
    r.loads[t.worker].blocks -= t.alone
    t.n = 0
    t.alone = 0
