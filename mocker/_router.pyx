# cython: language_level=3
"""The router in front of the workers: who has which blocks, who is how busy, who gets the next request.

Answers to dynamo-kv-router 1.3.0 `scheduling/{selector,policy_queue,policy_config}.rs`, `sequences/*` and
`indexer/radix_tree.rs` as `replay/offline/components/router.rs` of dynamo-mocker drives them. Resident blocks and
blocks of requests in flight are both prefix-closed per worker, so a segment needs one depth a worker, and neither
tree of the reference is needed: the overlap of a request is a walk down its path while somebody covers it fully.

Costs: event O(pieces * workers with that segment); arrival O(path elements that somebody covers * their holders +
workers to compare); completion O(path elements); drain O(1) while nobody waits. Workers to compare: those that have a
block of the request, and log(workers) more while the cost of a cold worker is exact (see `tree_exact`), else all.
Memory: resident (segment, worker) pairs, requests queued or in flight, workers; nothing grows with a trace's length.
"""
from libc.math cimport INFINITY, NAN, ceil, exp, floor, fma, isnan
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

from math import frexp

import numpy as np

from mocker._common cimport NIL, grown, int32_t, int64_t, uint32_t, uint64_t
from mocker._kv cimport Event, Path, Piece, Pool
from mocker._spec cimport rng_seed, rng_u64

cdef enum:
    NO_BUDGET = 10000000               # tokens a pass where a worker has no limit
    NANOS = 1000000000
    TREE_FROM = 33                     # workers; with fewer, comparing all is faster than keeping a tree


# ---- key tables -------------------------------------------------------------------------------------------------

cdef inline uint64_t home(KeyTable* t, uint64_t key) noexcept nogil:
    return ((key * <uint64_t>0x9E3779B97F4A7C15) >> 24) & t.mask


cdef inline int32_t table_find(KeyTable* t, uint64_t key) noexcept nogil:
    cdef uint64_t at = home(t, key)
    while t.values[at] != NIL:
        if t.keys[at] == key:
            return t.values[at]
        at = (at + 1) & t.mask
    return NIL


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


# ---- index ------------------------------------------------------------------------------------------------------

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


cdef void router_events(Router* r, int32_t worker, Pool* pool) noexcept nogil:
    """Apply a pool's event log and empty it."""
    cdef int64_t i, k
    cdef Event* e
    cdef Piece* p
    if r.kind == ROUTE_KV or r.kind == ROUTE_CALL:
        for i in range(pool.events_used):
            e = &pool.events[i]
            for k in range(e.first, e.first + e.pieces):
                p = &pool.pieces[k]
                if r.skip_own and p.key >> 63:
                    continue
                if e.stored:
                    router_stored(r, worker, p.key, p.start + p.count)
                else:
                    router_removed(r, worker, p.key, p.start)
    pool.events_used = pool.pieces_used = pool.event_tokens_used = 0


cdef inline void warm_up(Router* r, int32_t worker) noexcept nogil:
    """Note a worker whose `overlap` or `shared` is about to leave 0."""
    if r.overlap[worker] == 0 and r.shared[worker] == 0:
        r.warm[r.n_warm] = worker
        r.n_warm += 1


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


# ---- active prefill tokens --------------------------------------------------------------------------------------

cdef int64_t nanos_of(double ms) noexcept nogil:
    """Whole nanoseconds nearest to a time, ties to even, as the reference's clock has them."""
    cdef double seconds = (ms if ms > 0.0 else 0.0) / 1000.0, whole = floor(seconds)
    cdef double part = seconds - whole, product = part * 1e9, rest
    cdef double error = fma(part, 1e9, -product)       # the exact product is product + error
    cdef int64_t n = <int64_t>product
    rest = product - <double>n
    if rest > 0.5 or (rest == 0.5 and (error > 0.0 or (error == 0.0 and n & 1))):
        n += 1
    return <int64_t>whole * NANOS + n


cdef inline double seconds_of(int64_t nanos) noexcept nogil:
    return <double>(nanos // NANOS) + <double>(nanos % NANOS) / 1e9


cdef inline int64_t prefill_tokens(Router* r, Load* load, int64_t now) noexcept nogil:
    """Prompt tokens that a worker still has to compute; with an estimator they melt.

    Rule: `PrefillLoadSnapshot::active_tokens_at`. The time since the oldest prefill became the oldest is taken from
    the sum of all; if any has no estimate, only from the oldest itself.
    """
    cdef Ticket* t
    cdef int64_t elapsed, rounds, gone
    cdef double left
    if r.estimate == NULL or load.first == NIL:
        return load.prefill
    t = &r.tickets[load.first]
    elapsed = now - load.anchor if now > load.anchor else 0
    if load.unmodeled > 0:
        if t.duration == NIL:
            return load.prefill
        if t.duration == 0:
            return load.prefill - t.prefill
        left = 1.0 - seconds_of(elapsed) / seconds_of(t.duration)
        left = 0.0 if left < 0.0 else left
        return load.prefill - t.prefill + <int64_t>ceil(<double>t.prefill * left)
    if t.duration == 0:
        gone = t.prefill
    else:
        rounds = elapsed // t.duration
        if rounds > load.prefill:                      # each is a token at least
            return 0
        gone = t.prefill * rounds + t.prefill * (elapsed % t.duration) // t.duration
    return load.prefill - gone if gone < load.prefill else 0


cdef void prefill_add(Router* r, int32_t ticket, int64_t fresh, int64_t cached, int64_t now) noexcept nogil:
    cdef Ticket* t = &r.tickets[ticket]
    cdef Load* load = &r.loads[t.worker]
    t.prefill = fresh
    load.prefill += fresh
    if r.estimate == NULL:
        return
    t.duration = r.estimate(r.estimate_context, fresh, cached)
    if t.duration == NIL:
        load.unmodeled += 1
    t.prev, t.next = load.last, NIL
    if load.last != NIL:
        r.tickets[load.last].next = ticket
    else:
        load.first = ticket
        load.anchor = now
    load.last = ticket


cdef void prefill_remove(Router* r, int32_t ticket, int64_t now) noexcept nogil:
    """Rule: `PrefillLoadTracker::remove`: a younger prefill that ends first takes its time out of the count-down."""
    cdef Ticket* t = &r.tickets[ticket]
    cdef Load* load = &r.loads[t.worker]
    if t.prefill == 0:
        return
    load.prefill -= t.prefill
    t.prefill = 0
    if r.estimate == NULL:
        return
    if t.duration == NIL:
        load.unmodeled -= 1
    if t.next != NIL:
        r.tickets[t.next].prev = t.prev
    else:
        load.last = t.prev
    if t.prev != NIL:
        r.tickets[t.prev].next = t.next
        if t.duration != NIL:
            load.anchor = load.anchor + t.duration if load.anchor + t.duration < now else now
    else:
        load.first = t.next
        load.anchor = now


# ---- tickets ----------------------------------------------------------------------------------------------------

cdef int32_t ticket_new(Router* r, int64_t row, int64_t isl, int32_t n) noexcept nogil:
    """A ticket with room for `n` path elements, known by its row; NIL if memory is short."""
    cdef int32_t ticket = r.free_ticket
    cdef Ticket* t
    cdef int64_t cap
    cdef void* moved
    if ticket == NIL:
        moved = grown(r.tickets, &r.tickets_cap, r.tickets_used + 1, sizeof(Ticket))
        if moved == NULL:
            return NIL
        r.tickets = <Ticket*>moved
        ticket = <int32_t>r.tickets_used
        r.tickets_used += 1
        memset(&r.tickets[ticket], 0, sizeof(Ticket))
    else:
        r.free_ticket = r.tickets[ticket].next
    t = &r.tickets[ticket]
    t.row, t.isl, t.worker, t.n, t.alone, t.prefill, t.duration = row, isl, NIL, 0, 0, 0, NIL
    t.prev = NIL
    t.next = r.free_ticket                             # on the free list again if anything fails
    if n > t.cap:
        cap = t.cap
        moved = grown(t.segments, &cap, n, sizeof(int32_t))
        if moved != NULL:
            t.segments = <int32_t*>moved
            cap = t.cap
            moved = grown(t.depths, &cap, n, sizeof(int32_t))
        if moved == NULL:
            r.free_ticket = ticket
            return NIL
        t.depths = <int32_t*>moved
        t.cap = cap
    if not table_insert(&r.rows, <uint64_t>row, ticket):
        r.free_ticket = ticket
        return NIL
    t.next = NIL
    return ticket


cdef void ticket_drop(Router* r, int32_t ticket) noexcept nogil:
    cdef Ticket* t = &r.tickets[ticket]
    table_delete(&r.rows, <uint64_t>t.row)
    if t.cap > 256:                                    # long paths are not kept for the next request
        free(t.segments)
        free(t.depths)
        t.segments = t.depths = NULL
        t.cap = 0
    free(t.keys)
    free(t.overlaps)
    t.keys, t.overlaps, t.keys_cap, t.overlaps_cap = NULL, NULL, 0, 0
    t.row = t.worker = NIL
    t.next = r.free_ticket
    r.free_ticket = ticket


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


# ---- choice -----------------------------------------------------------------------------------------------------

cdef inline uint64_t below(Router* r, uint64_t n) noexcept nogil:
    """A uniform number under `n` (n < 2**32)."""
    return ((rng_u64(&r.rng) >> 32) * n) >> 32


cdef inline double cost_of(Router* r, int64_t tokens, int64_t blocks, int64_t overlap, int64_t isl,
                           int64_t floor_tokens) noexcept nogil:
    """Cost of one worker; the order of the operations decides ties.

    Rule: `DefaultWorkerSelector::worker_logit`. `tokens`: active prefill tokens; `blocks`: active blocks with the
    request's own; `floor_tokens`: fewest active prefill tokens of any eligible worker.
    """
    cdef double size = <double>r.block_size, credit = r.credit, left, excess
    cdef int64_t cached = overlap * r.block_size, raw = 0
    if r.track_prefill:
        raw = tokens + (isl - cached if isl > cached else 0) + cached
        if r.credit_decay > 0.0:
            excess = <double>(tokens - floor_tokens) / size
            excess /= <double>((isl + r.block_size - 1) // r.block_size)
            credit = r.credit * (1.0 / (1.0 + r.credit_decay * excess))
    left = <double>raw / size - credit * <double>overlap
    return r.prefill_scale * (left if left > 0.0 else 0.0) + <double>blocks


cdef void fill_costs(Router* r, int64_t isl, int64_t blocks, int64_t now) noexcept nogil:
    """Cost of every eligible worker for a request of `blocks` prompt blocks (0 if they are not tracked)."""
    cdef int32_t i, w
    cdef int64_t tokens, lowest = 0
    if r.track_prefill and r.credit_decay > 0.0:
        for i in range(r.n_eligible):
            tokens = prefill_tokens(r, &r.loads[r.eligible[i]], now)
            if i == 0 or tokens < lowest:
                lowest = tokens
    for i in range(r.n_eligible):
        w = r.eligible[i]
        tokens = prefill_tokens(r, &r.loads[w], now)
        r.cost[i] = cost_of(r, tokens, r.loads[w].blocks + (blocks - r.shared[w]), r.overlap[w], isl, lowest)


cdef int32_t cheapest(Router* r) noexcept nogil:
    """Position of the lowest cost; among equals the first, or a random one."""
    cdef int32_t i, best = 0
    cdef uint64_t ties = 1
    for i in range(1, r.n_eligible):
        if r.cost[i] < r.cost[best]:
            best = i
            ties = 1
        elif r.cost[i] == r.cost[best]:
            ties += 1
    if ties == 1 or not r.random_ties:
        return best
    ties = below(r, ties)
    i = best
    while True:
        if r.cost[i] == r.cost[best]:
            if ties == 0:
                return i
            ties -= 1
        i += 1


cdef inline void tree_join(Router* r, int32_t node) noexcept nogil:
    cdef Node* left = &r.tree[2 * node]
    cdef Node* right = left + 1
    r.tree[node] = left[0] if left.key <= right.key else right[0]
    if left.key == right.key:
        r.tree[node].count += right.count


cdef inline double base_cost(Router* r, int32_t worker) noexcept nogil:
    """What a worker's load adds to the cost of any request that has no block there."""
    return r.prefill_scale * (<double>r.loads[worker].prefill / <double>r.block_size) + <double>r.loads[worker].blocks


cdef void tree_build(Router* r) noexcept nogil:
    """The tree of base costs, for many workers and costs that allow it; else none."""
    cdef int32_t i, leaves = 1
    free(r.tree)
    r.tree = NULL
    if not r.tree_exact or r.n_eligible < r.tree_from or r.n_eligible == 0:
        return
    while leaves < r.n_eligible:
        leaves *= 2
    r.tree = <Node*>malloc(2 * <size_t>leaves * sizeof(Node))
    if r.tree == NULL:                                 # all workers are compared, then
        return
    r.leaves = leaves
    for i in range(leaves):
        r.tree[leaves + i].key = base_cost(r, r.eligible[i]) if i < r.n_eligible else INFINITY
        r.tree[leaves + i].count = i < r.n_eligible
    for i in range(leaves - 1, 0, -1):
        tree_join(r, i)


cdef inline void load_changed(Router* r, int32_t worker) noexcept nogil:
    """Carry a worker's new load into the tree."""
    cdef int32_t node
    if r.tree == NULL or r.position[worker] == NIL:
        return
    node = r.leaves + r.position[worker]
    r.tree[node].key = base_cost(r, worker)
    while node > 1:
        node >>= 1
        tree_join(r, node)


cdef int32_t tree_nth(Router* r, int64_t n) noexcept nogil:
    """Position of the n-th worker of lowest base cost."""
    cdef int32_t node = 1
    while node < r.leaves:
        node *= 2
        if r.tree[node].key == r.tree[1].key:
            if n < r.tree[node].count:
                continue
            n -= r.tree[node].count
        node += 1
    return node - r.leaves


cdef int64_t tree_rank(Router* r, int32_t position) noexcept nogil:
    """Workers of lowest base cost before a position."""
    cdef int32_t node = r.leaves + position
    cdef int64_t n = 0
    while node > 1:
        if node & 1 and r.tree[node - 1].key == r.tree[1].key:
            n += r.tree[node - 1].count
        node >>= 1
    return n


cdef int32_t cheapest_by_tree(Router* r, int64_t isl, int64_t blocks) noexcept nogil:
    """What `fill_costs` and `cheapest` give, from the warm workers and the tree.

    A warm worker costs at most what it would cost cold, so the tree need not leave it out: if it is among the lowest
    there, its own cost is lower still or the same.
    """
    cdef int32_t i, k, w, n = 0, at = tree_nth(r, 0)
    cdef double cold, lowest
    cdef Load* load = &r.loads[r.eligible[at]]
    cdef uint64_t cold_ties, draw
    cold = lowest = cost_of(r, load.prefill, load.blocks + blocks, 0, isl, 0)
    for i in range(r.n_warm):
        w = r.warm[i]
        if r.position[w] != NIL:
            load = &r.loads[w]
            r.cost[i] = cost_of(r, load.prefill, load.blocks + (blocks - r.shared[w]), r.overlap[w], isl, 0)
            if r.cost[i] < lowest:
                lowest = r.cost[i]
    cold_ties = r.tree[1].count if cold == lowest else 0
    for i in range(r.n_warm):                          # warm ones that the tree does not give, in order
        w = r.position[r.warm[i]]
        if w == NIL or r.cost[i] != lowest or (cold_ties > 0 and r.tree[r.leaves + w].key == r.tree[1].key):
            continue
        k = n
        while k > 0 and r.scratch[k - 1] > w:
            r.scratch[k] = r.scratch[k - 1]
            k -= 1
        r.scratch[k] = w
        n += 1
    r.last_cost = lowest
    draw = below(r, cold_ties + n) if r.random_ties and cold_ties + n > 1 else 0
    for i in range(n):
        cold_ties = tree_rank(r, r.scratch[i]) if cold == lowest else 0
        if cold_ties + i == draw:
            return r.scratch[i]
        if cold_ties + i > draw:
            return tree_nth(r, draw - i)
    return tree_nth(r, draw - n)


cdef int32_t sampled(Router* r) noexcept nogil:
    """Position drawn with weights exp(-(cost - lowest) / ((highest - lowest) * temperature)).

    Rule: `softmax_sample_with_sample`, over workers in order.
    """
    cdef int32_t i, n = r.n_eligible
    cdef double low = r.cost[0], high = r.cost[0], scale, shift, total = 0.0, sum = 0.0
    cdef double draw = <double>(rng_u64(&r.rng) >> 11) * (1.0 / 9007199254740992.0)
    for i in range(1, n):
        if r.cost[i] < low:
            low = r.cost[i]
        if r.cost[i] > high:
            high = r.cost[i]
    scale = -1.0 / ((high - low) * r.temperature) if low != high else 0.0
    shift = low * scale
    for i in range(n):
        r.cost[i] = exp(r.cost[i] * scale - shift) if low != high else 1.0 / <double>n
        total += r.cost[i]
    for i in range(n):
        sum += r.cost[i] / total
        if draw <= sum:
            return i
    return n - 1


cdef inline uint64_t mixed(uint64_t x) noexcept nogil:
    """A well-spread 64-bit function of x (the finaliser of splitmix64)."""
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)


cdef int32_t by_prefix(Router* r, const uint64_t* keys, const int32_t* ends, int32_t n, int64_t row) noexcept nogil:
    """Position of the highest hash of (first blocks, worker) among workers under the load bound."""
    cdef int32_t i, best = NIL, begin = 0
    cdef int64_t most = -1
    cdef uint64_t prefix = mixed(<uint64_t>row + <uint64_t>0x9E3779B97F4A7C15), hash, highest = 0
    for i in range(n):                                 # the block that ends the prefix names it
        if ends[i] >= r.prefix_blocks or i == n - 1:
            prefix = mixed(keys[i] + <uint64_t>0x9E3779B97F4A7C15 * <uint64_t>(
                (ends[i] if ends[i] < r.prefix_blocks else r.prefix_blocks) - begin))
            break
        begin = ends[i]
    if r.prefix_bound > 0.0:
        most = <int64_t>ceil(r.prefix_bound * <double>(r.in_flight + 1) / <double>r.n_eligible)
    for i in range(r.n_eligible):
        if most >= 0 and r.loads[r.eligible[i]].requests >= most:
            continue
        hash = mixed(prefix ^ mixed(<uint64_t>r.eligible[i] + 1))
        if best == NIL or hash > highest:
            best, highest = i, hash
    return best if best != NIL else 0


cdef int32_t select(Router* r, int64_t row, int64_t isl, int64_t blocks, const uint64_t* keys, const int32_t* ends,
                    int32_t n, double now) noexcept nogil:
    """The worker for a request; NIL if a user's function names none. There is an eligible worker."""
    cdef int32_t i, at = 0, other, choice
    cdef Ask ask
    if r.kind == ROUTE_KV and r.tree != NULL and 4 * r.n_warm <= r.n_eligible:
        at = cheapest_by_tree(r, isl, blocks)
    elif r.kind == ROUTE_KV:
        fill_costs(r, isl, blocks, nanos_of(now) if r.estimate != NULL else 0)
        if r.temperature == 0.0:
            at = cheapest(r)
            r.last_cost = r.cost[at]
        else:
            at = sampled(r)
            r.last_cost = NAN
    elif r.kind == ROUTE_ROUND_ROBIN:
        at = <int32_t>(r.turn % r.n_eligible)
        r.turn = at + 1
    elif r.kind == ROUTE_LEAST_REQUESTS or r.kind == ROUTE_LEAST_TOKENS:
        for i in range(r.n_eligible):
            r.cost[i] = <double>(r.loads[r.eligible[i]].requests if r.kind == ROUTE_LEAST_REQUESTS
                                 else r.loads[r.eligible[i]].tokens)
        at = cheapest(r)
    elif r.kind == ROUTE_TWO_CHOICES:
        at = <int32_t>below(r, r.n_eligible)
        if r.n_eligible > 1:
            other = <int32_t>below(r, r.n_eligible - 1)
            if other >= at:
                other += 1
            if r.loads[r.eligible[other]].requests < r.loads[r.eligible[at]].requests:
                at = other
    elif r.kind == ROUTE_PREFIX:
        at = by_prefix(r, keys, ends, n, row)
    elif r.kind == ROUTE_RANDOM:
        at = <int32_t>below(r, r.n_eligible)
    else:
        ask.row, ask.isl, ask.now, ask.n = row, isl, now, r.n_eligible
        ask.workers, ask.overlap, ask.loads = r.eligible, r.overlap, r.loads
        choice = r.choose(r.choose_context, &ask)
        if choice < 0 or choice >= r.workers or not r.loads[choice].eligible:
            r.error = ROUTER_CHOICE
            return NIL
        return choice
    return r.eligible[at]


cdef void admit(Router* r, int32_t ticket, const uint64_t* keys, const int32_t* ends, int32_t n,
                double now) noexcept nogil:
    """Choose a worker for a ticket whose walk is done, and book the request there; its worker stays NIL on error."""
    cdef Ticket* t = &r.tickets[ticket]
    cdef int64_t blocks = 0, cached
    cdef int32_t w
    cdef Load* load
    if r.track_blocks:
        blocks = (ends[n - 1] if n > 0 else 0) if r.share_blocks else t.isl // r.block_size
    w = select(r, t.row, t.isl, blocks, keys, ends, n, now)
    if w == NIL:
        return
    t.worker = w
    load = &r.loads[w]
    load.requests += 1
    load.tokens += t.isl
    r.in_flight += 1
    r.last_overlap = r.overlap[w]
    if r.track_blocks:
        if r.share_blocks:
            blocks_add(r, t, keys, ends, n)
        else:
            t.alone = blocks
            load.blocks += blocks
    if r.track_prefill:
        cached = <int64_t>r.overlap[w] * r.block_size
        if cached < t.isl:
            prefill_add(r, ticket, t.isl - cached, cached, nanos_of(now) if r.estimate != NULL else 0)
    load_changed(r, w)


# ---- queue ------------------------------------------------------------------------------------------------------

cdef inline bint ahead(Router* r, int32_t a, int32_t b) noexcept nogil:
    cdef Ticket* x = &r.tickets[a]
    cdef Ticket* y = &r.tickets[b]
    if x.strict != y.strict:
        return x.strict > y.strict
    if x.score != y.score:
        return x.score > y.score
    return x.sequence < y.sequence


cdef void sift(Router* r, QueueClass* q, int64_t i) noexcept nogil:
    """Move the ticket at place i of a heap to where it belongs."""
    cdef int32_t ticket = q.heap[i]
    cdef int64_t other
    while i > 0:
        other = (i - 1) >> 1
        if not ahead(r, ticket, q.heap[other]):
            break
        q.heap[i] = q.heap[other]
        i = other
    while True:
        other = 2 * i + 1
        if other >= q.used:
            break
        if other + 1 < q.used and ahead(r, q.heap[other + 1], q.heap[other]):
            other += 1
        if not ahead(r, q.heap[other], ticket):
            break
        q.heap[i] = q.heap[other]
        i = other
    q.heap[i] = ticket


cdef int32_t heap_take(Router* r, QueueClass* q, int64_t i) noexcept nogil:
    """Take the ticket at place i out of its queue and its sums."""
    cdef int32_t ticket = q.heap[i]
    cdef Ticket* t = &r.tickets[ticket]
    q.used -= 1
    r.queued -= 1
    q.isl -= t.isl
    q.cached -= t.cached
    if i < q.used:
        q.heap[i] = q.heap[q.used]
        sift(r, q, i)
    return ticket


cdef bint all_busy(Router* r, QueueClass* q, int64_t now) noexcept nogil:
    """Whether every eligible worker is busy by the rule of a class; so it is without workers."""
    cdef int32_t i
    cdef int64_t tokens
    for i in range(r.n_eligible):
        tokens = prefill_tokens(r, &r.loads[r.eligible[i]], now)
        if q.busy_tokens != NIL and tokens > q.busy_tokens:
            continue
        if <double>tokens > q.busy_fraction * <double>r.budget:        # False if there is no such threshold
            continue
        return False
    return True


cdef int64_t limit_of(int64_t per_worker, int64_t workers) noexcept nogil:
    if per_worker != 0 and workers > <int64_t>0x7FFFFFFFFFFFFFFF // per_worker:
        return 0x7FFFFFFFFFFFFFFF
    return per_worker * workers


cdef bint refused(Router* r, int32_t c) noexcept nogil:
    """Whether a class is full; what it holds counts, not what comes."""
    cdef QueueClass* q = &r.classes[c]
    cdef int kind
    cdef int64_t[3] current = [q.used, q.isl, q.cached]
    cdef int64_t[3] most = [q.max_requests, q.max_isl, q.max_cached]
    for kind in range(3):
        if most[kind] != NIL and current[kind] >= limit_of(most[kind], r.n_eligible):
            r.full_class, r.full_kind, r.full_current = c, kind, current[kind]
            r.full_limit = limit_of(most[kind], r.n_eligible)
            return True
    return False


cdef int32_t enqueue(Router* r, int64_t row, Path* path, int32_t n, int64_t isl, int64_t cached, int64_t priority,
                     uint32_t strict, int32_t c, double now) noexcept nogil:
    cdef QueueClass* q = &r.classes[c]
    cdef int32_t ticket, i, w
    cdef Ticket* t
    cdef void* moved
    cdef double bump = <double>(priority if priority > 0 else 0), at = (now if now > 0.0 else 0.0) / 1000.0
    if refused(r, c):
        return ROUTED_NEVER
    ticket = ticket_new(r, row, isl, n)
    moved = grown(q.heap, &q.cap, q.used + 1, sizeof(int32_t))
    if ticket == NIL or moved == NULL:
        r.error = ROUTER_MEMORY
        return ROUTED_ERROR
    q.heap = <int32_t*>moved
    t = &r.tickets[ticket]
    t.overlaps_used = 0
    t.overlaps = <int32_t*>malloc((2 * <int64_t>r.n_warm + 1) * sizeof(int32_t))
    t.keys = <uint64_t*>malloc((<int64_t>n + 1) * sizeof(uint64_t))
    if t.overlaps == NULL or t.keys == NULL:
        r.error = ROUTER_MEMORY
        return ROUTED_ERROR
    for i in range(r.n_warm):
        w = r.warm[i]
        if r.overlap[w] > 0:
            t.overlaps[2 * t.overlaps_used], t.overlaps[2 * t.overlaps_used + 1] = w, r.overlap[w]
            t.overlaps_used += 1
    for i in range(n):
        t.keys[i], t.depths[i] = path.keys[i], path.ends[i]
    t.n = n
    t.cached = cached
    t.cost = isl - cached if isl > cached else 1
    t.queue, t.strict, t.sequence = c, strict, r.next_sequence
    r.next_sequence += 1
    if q.policy == QUEUE_FCFS:
        t.score = bump - at
    elif q.policy == QUEUE_LCFS:
        t.score = bump + at
    else:
        t.score = (1.0 + bump) / <double>t.cost
    q.heap[q.used] = ticket
    q.used += 1
    q.isl += isl
    q.cached += cached
    r.queued += 1
    sift(r, q, q.used - 1)
    return ROUTED_LATER


cdef int32_t class_take(Router* r, int32_t c) noexcept nogil:
    cdef QueueClass* q = &r.classes[c]
    cdef int32_t ticket = heap_take(r, q, 0)
    q.credit -= r.tickets[ticket].cost
    if q.credit < 0:
        q.credit = 0
    if q.used == 0:
        q.credit = 0
    r.next_class = c
    if q.used == 0 or r.tickets[q.heap[0]].cost > q.credit:
        r.next_class = (c + 1) % r.n_classes
    return ticket


cdef int32_t next_ticket(Router* r, int64_t now) noexcept nogil:
    """The ticket to dispatch next, taken out of its queue; NIL if none may go.

    Rule: `PolicyQueue::pop_next`, deficit round robin: a class earns its quantum a round while its head may go, pays
    for what it sends, and rounds in which nobody can pay are skipped at once.
    """
    cdef int32_t i, c
    cdef int64_t rounds = -1, need
    cdef QueueClass* q
    for i in range(r.n_classes):
        c = (r.next_class + i) % r.n_classes
        q = &r.classes[c]
        q.ready = False
    for i in range(r.n_classes):
        c = (r.next_class + i) % r.n_classes
        q = &r.classes[c]
        if q.used == 0:
            q.credit = 0
            continue
        if all_busy(r, q, now):
            continue
        q.ready = True
        need = r.tickets[q.heap[0]].cost
        if need <= q.credit:
            return class_take(r, c)
        q.credit += q.quantum
        if need <= q.credit:
            return class_take(r, c)
    for c in range(r.n_classes):
        q = &r.classes[c]
        if q.ready:
            need = (r.tickets[q.heap[0]].cost - q.credit + q.quantum - 1) // q.quantum
            if rounds < 0 or need < rounds:
                rounds = need
    if rounds < 0:
        return NIL
    for c in range(r.n_classes):
        if r.classes[c].ready:
            r.classes[c].credit += r.classes[c].quantum * rounds
    for i in range(r.n_classes):
        c = (r.next_class + i) % r.n_classes
        q = &r.classes[c]
        if q.ready and r.tickets[q.heap[0]].cost <= q.credit:
            return class_take(r, c)
    return NIL


# ---- operations -------------------------------------------------------------------------------------------------

cdef int64_t best_cached(Router* r, int64_t isl) noexcept nogil:
    """Prompt tokens that the eligible worker with the longest cached prefix has."""
    cdef int32_t i
    cdef int64_t best = 0
    for i in range(r.n_warm):
        if r.overlap[r.warm[i]] > best and r.loads[r.warm[i]].eligible:
            best = r.overlap[r.warm[i]]
    best *= r.block_size
    return best if best < isl else isl


cdef int32_t router_arrival(Router* r, int64_t row, Path* path, int64_t isl, int64_t priority, uint32_t strict,
                            int32_t policy, double now) noexcept nogil:
    """A request arrives: the worker that it goes to, or a RouteCode.

    `path`: its full prompt blocks (NULL: none); `policy`: `PolicyProfile.code`; `now`: ms. The row must not be in
    flight or queued. After a worker: `last_overlap` is its cached blocks.
    """
    cdef int32_t n = path.n if path != NULL else 0, c = policy, i, ticket, w
    cdef bint reads = r.kind == ROUTE_KV or r.kind == ROUTE_CALL
    cdef int64_t cached = 0
    cdef QueueClass* q
    if not walk(r, path.keys if n > 0 else NULL, path.ends if n > 0 else NULL, n, reads,
                r.track_blocks and r.share_blocks):
        return ROUTED_ERROR
    if policy < 0:
        cached = best_cached(r, isl)
        i = 0
        while i + 1 < r.n_buckets and r.bucket_starts[i + 1] <= isl - cached:
            i += 1
        c = r.bucket_classes[(-1 - policy) * r.n_buckets + i]
    q = &r.classes[c]
    if r.n_eligible == 0 or ((q.busy_tokens != NIL or not isnan(q.busy_fraction)) and (
            q.used > 0 or all_busy(r, q, nanos_of(now) if r.estimate != NULL else 0))):
        return enqueue(r, row, path, n, isl, best_cached(r, isl), priority, strict, c, now)
    ticket = ticket_new(r, row, isl, n)
    if ticket == NIL:
        r.error = ROUTER_MEMORY
        return ROUTED_ERROR
    admit(r, ticket, path.keys if n > 0 else NULL, path.ends if n > 0 else NULL, n, now)
    w = r.tickets[ticket].worker
    if w == NIL:
        ticket_drop(r, ticket)
        return ROUTED_ERROR
    return w


cdef bint router_prefill_completed(Router* r, int64_t row, double now) noexcept nogil:
    """A request made its first token; False if it is not in flight."""
    cdef int32_t ticket = table_find(&r.rows, <uint64_t>row)
    if ticket == NIL or r.tickets[ticket].worker == NIL:
        return False
    prefill_remove(r, ticket, nanos_of(now) if r.estimate != NULL else 0)
    load_changed(r, r.tickets[ticket].worker)
    return True


cdef bint router_completed(Router* r, int64_t row, double now) noexcept nogil:
    """A request has left its worker, however; False if it was not in flight."""
    cdef int32_t ticket = table_find(&r.rows, <uint64_t>row)
    cdef Ticket* t
    if ticket == NIL or r.tickets[ticket].worker == NIL:
        return False
    t = &r.tickets[ticket]
    prefill_remove(r, ticket, nanos_of(now) if r.estimate != NULL else 0)
    blocks_remove(r, t)
    load_changed(r, t.worker)
    r.loads[t.worker].requests -= 1
    r.loads[t.worker].tokens -= t.isl
    r.in_flight -= 1
    ticket_drop(r, ticket)
    return True


cdef bint router_cancel(Router* r, int64_t row) noexcept nogil:
    """Take a request out of the queue; False if it is not there. O(queued)."""
    cdef int32_t ticket = table_find(&r.rows, <uint64_t>row)
    cdef QueueClass* q
    cdef int64_t i
    if ticket == NIL or r.tickets[ticket].worker != NIL:
        return False
    q = &r.classes[r.tickets[ticket].queue]
    for i in range(q.used):
        if q.heap[i] == ticket:
            heap_take(r, q, i)
            break
    if q.used == 0:
        q.credit = 0
    r.tickets[ticket].n = 0
    ticket_drop(r, ticket)
    return True


cdef int64_t router_drain(Router* r, double now) noexcept nogil:
    """Dispatch queued requests while their class's workers are not all busy; how many went, listed in `placed`."""
    cdef int32_t ticket, i, n
    cdef Ticket* t
    cdef void* moved
    cdef int64_t nanos = nanos_of(now) if r.queued > 0 and r.estimate != NULL else 0
    r.placed_used = 0
    while r.queued > 0:
        moved = grown(r.placed, &r.placed_cap, r.placed_used + 1, sizeof(Placement))
        if moved == NULL:
            r.error = ROUTER_MEMORY
            break
        r.placed = <Placement*>moved
        ticket = next_ticket(r, nanos)
        if ticket == NIL:
            break
        t = &r.tickets[ticket]
        n = t.n
        if not walk(r, t.keys, t.depths, n, False, r.track_blocks and r.share_blocks):
            break
        for i in range(t.overlaps_used):
            warm_up(r, t.overlaps[2 * i])
            r.overlap[t.overlaps[2 * i]] = t.overlaps[2 * i + 1]
        t.n = 0
        admit_queued(r, ticket, n, now)
        t = &r.tickets[ticket]
        if t.worker == NIL:
            ticket_drop(r, ticket)
            break
        free(t.keys)
        free(t.overlaps)
        t.keys, t.overlaps = NULL, NULL
        r.placed[r.placed_used].row, r.placed[r.placed_used].worker = t.row, t.worker
        r.placed[r.placed_used].overlap, r.placed[r.placed_used].isl = r.last_overlap, t.isl
        r.placed_used += 1
    return r.placed_used


cdef void admit_queued(Router* r, int32_t ticket, int32_t n, double now) noexcept nogil:
    """Admit a ticket whose path is its own: `depths` turns from ends into lengths only after each was read."""
    admit(r, ticket, r.tickets[ticket].keys, r.tickets[ticket].depths, n, now)


# ---- workers ----------------------------------------------------------------------------------------------------

cdef void reorder(Router* r) noexcept nogil:
    """The list of eligible workers has changed."""
    cdef int32_t i
    for i in range(r.n_eligible):
        r.position[r.eligible[i]] = i
    tree_build(r)


cdef bint router_add_worker(Router* r, int32_t worker, int64_t order) noexcept nogil:
    """A worker may be chosen from now on; False if it may already, or memory is short.

    What is known of it from before, as long as it was not finalised, still holds.
    """
    cdef int64_t need = worker + 1, cap
    cdef int32_t i
    cdef Load* load
    cdef void* moved
    if need > r.workers_cap:
        cap = r.workers_cap
        moved = grown(r.loads, &cap, need, sizeof(Load))
        if moved != NULL:
            r.loads = <Load*>moved
            moved = realloc(r.eligible, cap * sizeof(int32_t))
        if moved != NULL:
            r.eligible = <int32_t*>moved
            moved = realloc(r.overlap, cap * sizeof(int32_t))
        if moved != NULL:
            r.overlap = <int32_t*>moved
            moved = realloc(r.shared, cap * sizeof(int32_t))
        if moved != NULL:
            r.shared = <int32_t*>moved
            moved = realloc(r.warm, cap * sizeof(int32_t))
        if moved != NULL:
            r.warm = <int32_t*>moved
            moved = realloc(r.position, cap * sizeof(int32_t))
        if moved != NULL:
            r.position = <int32_t*>moved
            moved = realloc(r.scratch, cap * sizeof(int32_t))
        if moved != NULL:
            r.scratch = <int32_t*>moved
            moved = realloc(r.cost, cap * sizeof(double))
        if moved == NULL:
            r.error = ROUTER_MEMORY
            return False
        r.cost = <double*>moved
        r.workers_cap = cap
    while r.workers < need:
        load = &r.loads[r.workers]
        memset(load, 0, sizeof(Load))
        load.first = load.last = NIL
        r.overlap[r.workers] = r.shared[r.workers] = 0
        r.position[r.workers] = NIL
        r.workers += 1
    load = &r.loads[worker]
    if load.eligible:
        return False
    load.eligible, load.order = 1, order
    i = r.n_eligible
    while i > 0 and r.loads[r.eligible[i - 1]].order > order:
        r.eligible[i] = r.eligible[i - 1]
        i -= 1
    r.eligible[i] = worker
    r.n_eligible += 1
    reorder(r)
    return True


cdef bint router_remove_worker(Router* r, int32_t worker) noexcept nogil:
    """A worker may not be chosen any more; its requests and blocks stay known. False if it might not before."""
    cdef int32_t i, at = 0
    if worker < 0 or worker >= r.workers or not r.loads[worker].eligible:
        return False
    r.loads[worker].eligible = 0
    for i in range(r.n_eligible):
        if r.eligible[i] != worker:
            r.eligible[at] = r.eligible[i]
            at += 1
    r.n_eligible = at
    r.position[worker] = NIL
    reorder(r)
    return True


cdef void router_finalize_worker(Router* r, int32_t worker) noexcept nogil:
    """Forget a removed worker: its requests, if any are left, and its blocks. O(segments + tickets)."""
    cdef int64_t i
    if worker < 0 or worker >= r.workers:
        return
    for i in range(r.tickets_used):
        if r.tickets[i].worker == worker:
            router_completed(r, r.tickets[i].row, 0.0)
    router_cleared(r, worker)


cdef bint router_init(Router* r) noexcept nogil:
    """An empty router in zeroed memory."""
    r.free_segment = r.free_ticket = NIL
    return table_resize(&r.table, 64) and table_resize(&r.rows, 64)


cdef void router_free(Router* r) noexcept nogil:
    cdef int64_t i
    for i in range(r.segments_used):
        free(r.segments[i].resident)
        free(r.segments[i].active)
    for i in range(r.tickets_used):
        free(r.tickets[i].segments)
        free(r.tickets[i].depths)
        free(r.tickets[i].keys)
        free(r.tickets[i].overlaps)
    for i in range(r.n_classes):
        free(r.classes[i].heap)
    free(r.table.keys)
    free(r.table.values)
    free(r.rows.keys)
    free(r.rows.values)
    free(r.segments)
    free(r.tickets)
    free(r.classes)
    free(r.bucket_starts)
    free(r.bucket_classes)
    free(r.loads)
    free(r.eligible)
    free(r.overlap)
    free(r.shared)
    free(r.warm)
    free(r.position)
    free(r.scratch)
    free(r.tree)
    free(r.cost)
    free(r.found)
    free(r.placed)


# ---- Python side ------------------------------------------------------------------------------------------------

KINDS = {
    "kv": ROUTE_KV, "round_robin": ROUTE_ROUND_ROBIN, "least_requests": ROUTE_LEAST_REQUESTS,
    "least_tokens": ROUTE_LEAST_TOKENS, "two_choices": ROUTE_TWO_CHOICES, "prefix": ROUTE_PREFIX,
    "random": ROUTE_RANDOM, "function": ROUTE_CALL,
}
QUEUES = {"fcfs": QUEUE_FCFS, "lcfs": QUEUE_LCFS, "wspt": QUEUE_WSPT}
LIMITS = ("requests", "raw_isl_tokens", "cached_tokens")


class QueueRejection(RuntimeError):
    """A request that found its queue full.

    Attributes
    ----------
    policy_class : str
        The queue's name.
    limit_kind : str
        What there is too much of: "requests", "raw_isl_tokens" or "cached_tokens".
    current, limit : int
        What the queue held, and what it may hold.
    """

    def __init__(self, policy_class, limit_kind, current, limit):
        super().__init__(f"router policy class {policy_class!r} queue {limit_kind} limit reached "
                         f"(current={current}, limit={limit})")
        self.policy_class, self.limit_kind, self.current, self.limit = policy_class, limit_kind, current, limit


cdef int32_t call_function(void* context, const Ask* ask) noexcept with gil:
    cdef RouterCore core = <RouterCore>context
    cdef int32_t i
    cdef const Load* load
    try:
        views = []
        for i in range(ask.n):
            load = &ask.loads[ask.workers[i]]
            views.append((ask.workers[i], load.requests, load.tokens, ask.overlap[ask.workers[i]]))
        return core.function(ask.row, ask.isl, ask.now, views)
    except BaseException as error:
        core.failure = error
        return NIL


cdef int64_t call_estimator(void* context, int64_t fresh, int64_t cached) noexcept with gil:
    cdef RouterCore core = <RouterCore>context
    try:
        seconds = core.estimator(fresh, cached)
        return NIL if seconds is None else nanos_of(float(seconds) * 1000.0)
    except BaseException as error:
        core.failure = error
        return NIL


cdef class RouterCore:
    """A router and its memory.

    Parameters
    ----------
    kind : str
        A key of `KINDS`.
    config : KvRouterConfig
        Read by the kind "kv".
    block_size : int
        Tokens a block.
    workers : int
        Workers 0, 1, … that may be chosen at once; their order is their number.
    max_batched_tokens : int or None
        Token budget of a worker's pass, for the busy rule.
    random_ties : bool
        Choose among workers of equal cost at random, not the lowest.
    seed : int
        Of everything random.
    model_name : str or None
        Picks a model's queues in the policy file.
    skip_own : bool
        Ignore blocks whose key has its top bit set: generated ones of a trace replay.
    prefix_blocks, prefix_bound
        Of the kind "prefix": blocks that are hashed; times the mean load that a worker may have (0: no bound).
    function : callable or None
        Of the kind "function": ``function(row, isl, now, workers) -> worker`` with a list of
        ``(worker, requests, tokens, cached blocks)``.
    estimator : callable or None
        ``estimator(fresh tokens, cached tokens) -> seconds or None`` of a prefill; active prefill tokens then melt.
    tree_from : int
        Workers from which on the cheapest is found by a tree, not by comparing all; the choice is the same.
    """

    def __cinit__(self, str kind, config, int64_t block_size, int32_t workers, max_batched_tokens=None,
                  bint random_ties=False, uint64_t seed=0, model_name=None, bint skip_own=False,
                  int32_t prefix_blocks=1, double prefix_bound=0.0, function=None, estimator=None,
                  int32_t tree_from=TREE_FROM):
        cdef Router* r = &self.r
        cdef int32_t i
        cdef QueueClass* q
        if not router_init(r):
            raise MemoryError
        if kind not in KINDS:
            raise ValueError(f"router kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if (kind == "function") != (function is not None):
            raise ValueError("the router kind 'function' and no other takes a function")
        r.kind, r.block_size = KINDS[kind], block_size
        r.budget = NO_BUDGET if max_batched_tokens is None else clipped(max_batched_tokens)
        r.credit, r.credit_decay = config.overlap_score_credit, config.overlap_score_credit_decay
        r.prefill_scale, r.temperature = config.prefill_load_scale, config.router_temperature
        r.track_blocks = r.kind == ROUTE_KV and config.router_track_active_blocks
        r.share_blocks = config.router_assume_kv_reuse
        r.track_prefill = r.kind == ROUTE_KV and config.router_track_prefill_tokens
        r.random_ties, r.skip_own = random_ties, skip_own
        r.prefix_blocks, r.prefix_bound = prefix_blocks, prefix_bound
        self.function, self.estimator = function, estimator
        if function is not None:
            r.choose, r.choose_context = call_function, <void*>self
        if estimator is not None:
            r.estimate, r.estimate_context = call_estimator, <void*>self
        r.tree_from = tree_from
        r.tree_exact = r.kind == ROUTE_KV and r.temperature == 0.0 and r.estimate == NULL and (
            not r.track_prefill or (r.credit_decay == 0.0 and block_size & (block_size - 1) == 0
                                    and (r.prefill_scale == 0.0 or (frexp(r.prefill_scale)[0] == 0.5
                                                                    and 2.0**-10 <= r.prefill_scale <= 2.0**10))))
        rng_seed(&r.rng, seed)
        self.profile = config.policy_profile(model_name)
        classes = self.profile.classes
        r.classes = <QueueClass*>calloc(len(classes), sizeof(QueueClass))
        if r.classes == NULL:
            raise MemoryError
        r.n_classes = <int32_t>len(classes)
        for i in range(r.n_classes):
            q, given = &r.classes[i], classes[i]
            q.policy, q.quantum = QUEUES[given.queue_policy], clipped(given.quantum)
            q.busy_tokens = NIL if r.kind != ROUTE_KV else clipped(given.busy_tokens)
            q.busy_fraction = NAN if r.kind != ROUTE_KV or given.busy_fraction is None else given.busy_fraction
            q.max_requests, q.max_isl = clipped(given.max_requests), clipped(given.max_isl_tokens)
            q.max_cached = clipped(given.max_cached_tokens)
        r.n_buckets = <int32_t>len(self.profile.buckets)
        if r.n_buckets > 0:
            r.bucket_starts = <int64_t*>malloc(r.n_buckets * sizeof(int64_t))
            r.bucket_classes = <int32_t*>malloc(len(self.profile.table) * sizeof(int32_t))
            if r.bucket_starts == NULL or r.bucket_classes == NULL:
                raise MemoryError
            for i in range(r.n_buckets):
                r.bucket_starts[i] = clipped(self.profile.buckets[i])
            for i in range(<int32_t>len(self.profile.table)):
                r.bucket_classes[i] = self.profile.table[i]
        for i in range(workers):
            if not router_add_worker(r, i, i):
                raise MemoryError

    def __dealloc__(self):
        router_free(&self.r)

    def raise_error(self):
        """Turn an error of the router or of a user's function into an exception."""
        failure, self.failure = self.failure, None
        if failure is not None:
            self.r.error = ROUTER_OK
            raise failure
        if self.r.error == ROUTER_MEMORY:
            raise MemoryError
        if self.r.error == ROUTER_CHOICE:
            self.r.error = ROUTER_OK
            raise ValueError("the routing function must return a worker that may be chosen")

    def raise_rejection(self):
        """Raise `QueueRejection` for the request that was refused last."""
        raise QueueRejection(self.profile.classes[self.r.full_class].name, LIMITS[self.r.full_kind],
                             self.r.full_current, self.r.full_limit)

    # -- workers and their blocks -----------------------------------------------------------------------------------

    def add_worker(self, int32_t worker, order=None):
        """Let a worker be chosen; False if it may already. `order` decides ties (its number if None)."""
        cdef bint added
        if worker < 0:
            raise ValueError(f"worker must be at least 0, got {worker}")
        added = router_add_worker(&self.r, worker, worker if order is None else order)
        self.raise_error()
        return added

    def sort_workers(self, list workers):
        """Let ties be decided by the order of this list of all workers."""
        cdef int32_t n = 0, worker, i
        for i, worker in enumerate(workers):
            check_worker(self, worker)
            self.r.loads[worker].order = i
            if self.r.loads[worker].eligible and n < self.r.n_eligible:
                self.r.eligible[n] = worker
                n += 1
        reorder(&self.r)

    def eligible(self, int32_t worker):
        """Whether a worker may be chosen."""
        return 0 <= worker < self.r.workers and self.r.loads[worker].eligible != 0

    def remove_worker(self, int32_t worker):
        """Do not choose a worker any more; False if it might not before."""
        return router_remove_worker(&self.r, worker)

    def finalize_worker(self, int32_t worker):
        """Forget a worker's requests and blocks."""
        router_finalize_worker(&self.r, worker)

    def stored(self, int32_t worker, uint64_t key, int32_t end):
        """Let a worker have a segment's blocks up to `end` (exclusive)."""
        check_worker(self, worker)
        router_stored(&self.r, worker, key, end)
        self.raise_error()

    def removed(self, int32_t worker, uint64_t key, int32_t start):
        """Take a segment's blocks from `start` on away from a worker."""
        check_worker(self, worker)
        router_removed(&self.r, worker, key, start)

    def cleared(self, int32_t worker):
        """Take all blocks away from a worker."""
        check_worker(self, worker)
        router_cleared(&self.r, worker)

    # -- requests ---------------------------------------------------------------------------------------------------

    def arrival(self, int64_t row, const uint64_t[::1] keys, const int32_t[::1] ends, int64_t isl,
                int64_t priority=0, uint32_t strict=0, int32_t policy=0, double now=0.0):
        """Hand in a request.

        Returns
        -------
        tuple of int or None
            Its worker and the cached blocks there; None if it was queued.

        Raises
        ------
        QueueRejection
            If its queue is full.
        """
        cdef Path path = path_of(keys, ends)
        cdef int32_t worker
        if isl < 1:
            raise ValueError(f"a prompt must have at least 1 token, got {isl}")
        if row < 0 or table_find(&self.r.rows, <uint64_t>row) != NIL:
            raise ValueError(f"request {row} is negative, queued or in flight already")
        with nogil:
            worker = router_arrival(&self.r, row, &path, isl, priority, strict, policy, now)
        if worker == ROUTED_LATER:
            return None
        if worker == ROUTED_NEVER:
            self.raise_rejection()
        if self.failure is not None and worker >= 0:   # the estimator raised: the request is not taken
            router_completed(&self.r, row, now)
        self.raise_error()
        return worker, self.r.last_overlap

    def prefill_completed(self, int64_t row, double now=0.0):
        """Tell that a request made its first token; False if it is not in flight."""
        return router_prefill_completed(&self.r, row, now)

    def completed(self, int64_t row, double now=0.0):
        """Tell that a request has left its worker; False if it was not in flight."""
        return router_completed(&self.r, row, now)

    def cancel(self, int64_t row):
        """Take a request out of the queue; False if it is not there."""
        return router_cancel(&self.r, row)

    def knows(self, int64_t row):
        """Whether a request is queued or in flight."""
        return table_find(&self.r.rows, <uint64_t>row) != NIL

    def drain(self, double now=0.0):
        """Dispatch what may go; a list of (row, worker, cached blocks)."""
        cdef int64_t i, n
        with nogil:
            n = router_drain(&self.r, now)
        self.raise_error()
        return [(self.r.placed[i].row, self.r.placed[i].worker, self.r.placed[i].overlap) for i in range(n)]

    # -- what it knows ----------------------------------------------------------------------------------------------

    def parts(self, const uint64_t[::1] keys, const int32_t[::1] ends, int64_t isl, double now=0.0):
        """Parts of the cost of every eligible worker for a request; changes nothing.

        Returns
        -------
        dict of int to tuple
            ``worker: (cached blocks, active prefill tokens, active blocks, new blocks, cost)``.
        """
        cdef Path path = path_of(keys, ends)
        cdef int32_t i, w
        cdef int64_t blocks = 0, nanos = nanos_of(now)
        if isl < 1:
            raise ValueError(f"a prompt must have at least 1 token, got {isl}")
        if not walk(&self.r, path.keys, path.ends, path.n, True, self.r.track_blocks and self.r.share_blocks):
            raise MemoryError
        if self.r.track_blocks:
            blocks = ((path.ends[path.n - 1] if path.n > 0 else 0) if self.r.share_blocks
                      else isl // self.r.block_size)
        fill_costs(&self.r, isl, blocks, nanos)
        out = {}
        for i in range(self.r.n_eligible):
            w = self.r.eligible[i]
            out[w] = (self.r.overlap[w], prefill_tokens(&self.r, &self.r.loads[w], nanos), self.r.loads[w].blocks,
                      blocks - self.r.shared[w], self.r.cost[i])
        return out

    def overlaps(self, const uint64_t[::1] keys, const int32_t[::1] ends):
        """Cached blocks of a path on every worker, eligible or not, as an int32 array."""
        cdef Path path = path_of(keys, ends)
        cdef int64_t i
        if not walk(&self.r, path.keys, path.ends, path.n, True, False):
            raise MemoryError
        out = np.zeros(self.r.workers, np.int32)
        for i in range(self.r.workers):
            out[i] = self.r.overlap[i]
        return out

    def loads(self, double now=0.0):
        """Load of every worker, eligible or not.

        Returns
        -------
        list of tuple
            ``(eligible, requests, prompt tokens, active prefill tokens, active blocks, cached blocks)``.
        """
        cdef int64_t i
        cdef Load* load
        out = []
        for i in range(self.r.workers):
            load = &self.r.loads[i]
            out.append((load.eligible != 0, load.requests, load.tokens, prefill_tokens(&self.r, load, nanos_of(now)),
                        load.blocks, load.resident))
        return out

    @property
    def queued(self):
        """Number of requests that wait."""
        return self.r.queued

    @property
    def in_flight(self):
        """Number of requests that have a worker."""
        return self.r.in_flight

    @property
    def last_cost(self):
        """Cost of the last choice; NaN if it was drawn, or the kind has no cost."""
        return self.r.last_cost if self.r.kind == ROUTE_KV else NAN

    @property
    def sizes(self):
        """Segments known, places for segments, places of the key table, places for requests."""
        return self.r.table.used, self.r.segments_used, <int64_t>self.r.table.mask + 1, self.r.tickets_used


cdef int64_t clipped(value) except? -2:
    """A count of a policy file as a C integer; NIL for None."""
    return NIL if value is None else min(value, 1 << 62)


cdef int check_worker(RouterCore core, int32_t worker) except -1:
    if not 0 <= worker < core.r.workers:
        raise ValueError(f"worker {worker} does not exist")
    return 0


cdef Path path_of(const uint64_t[::1] keys, const int32_t[::1] ends) except *:
    """A path that borrows its arrays."""
    cdef Path path
    if keys.shape[0] != ends.shape[0]:
        raise ValueError("keys and ends must have the same length")
    memset(&path, 0, sizeof(Path))
    path.n = <int32_t>keys.shape[0]
    if path.n > 0:
        path.keys, path.ends = <uint64_t*>&keys[0], <int32_t*>&ends[0]
    return path
