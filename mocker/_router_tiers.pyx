# cython: language_level=3
"""Blocks below the GPU in the router's score: sets of blocks by worker and tier, and how far a prompt runs in them.

Answers to `indexer/lower_tier*.rs` and `scheduling/overlap.rs` of dynamo-kv-router 1.3.0, which the reference's live
router uses and its replays do not. A run begins in the host where the worker's cached prefix ends, and goes on on the
disk and then in the remote store. Unlike on the GPU nothing is prefix-closed, so blocks are looked up one by one.

Costs: event O(1) a block; arrival O(workers + blocks found below). A router without `lower` calls nothing of this.
"""
from libc.math cimport round
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

from mocker._common cimport int32_t, int64_t, uint64_t
from mocker._kv cimport Event, Piece, Pool
from mocker._offload_blocks cimport Block, BlockSet, set_add, set_discard, set_free, set_has
from mocker._offload_tiers cimport tier_has
from mocker._router cimport ROUTER_MEMORY, Lower, Router, Ticket


# ---- memory -----------------------------------------------------------------------------------------------------

cdef Lower* lower_new(double host_weight, double disk_weight) noexcept nogil:
    """Nothing known of no worker; NULL if memory is short."""
    cdef Lower* below = <Lower*>calloc(1, sizeof(Lower))
    if below != NULL:
        below.host_weight, below.disk_weight = host_weight, disk_weight
    return below


cdef void lower_free(Lower* below) noexcept nogil:
    cdef int64_t i
    if below == NULL:
        return
    for i in range(LOWER_TIERS * below.cap):
        set_free(&below.sets[i])
    free(below.sets)
    free(below.host)
    free(below.disk)
    free(below)


cdef bint lower_room(Lower* below, int64_t workers) noexcept nogil:
    """Room for so many workers; false if memory is short."""
    cdef int64_t old = below.cap
    cdef void* moved
    if workers <= old:
        return True
    moved = realloc(below.sets, <size_t>(LOWER_TIERS * workers) * sizeof(BlockSet))
    if moved == NULL:
        return False
    below.sets = <BlockSet*>moved
    memset(&below.sets[LOWER_TIERS * old], 0, <size_t>(LOWER_TIERS * (workers - old)) * sizeof(BlockSet))
    moved = realloc(below.host, <size_t>workers * sizeof(int32_t))
    if moved == NULL:
        return False
    below.host = <int32_t*>moved
    moved = realloc(below.disk, <size_t>workers * sizeof(int32_t))
    if moved == NULL:
        return False
    below.disk = <int32_t*>moved
    memset(&below.host[old], 0, <size_t>(workers - old) * sizeof(int32_t))
    memset(&below.disk[old], 0, <size_t>(workers - old) * sizeof(int32_t))
    below.cap = workers
    return True


# ---- events -----------------------------------------------------------------------------------------------------

cdef inline BlockSet* set_of(Lower* below, int32_t worker, int tier) noexcept nogil:
    return &below.sets[LOWER_TIERS * worker + tier - 1]


cdef void lower_block(Router* r, int32_t worker, int tier, uint64_t key, int32_t at, bint stored) noexcept nogil:
    """A worker's tier has got a block, or has lost it."""
    cdef Block b
    b.key, b.at = key, at
    if not stored:
        set_discard(set_of(r.lower, worker, tier), b)
    elif not set_add(set_of(r.lower, worker, tier), b):
        r.error = ROUTER_MEMORY


cdef void lower_event(Router* r, int32_t worker, Event* e, Pool* pool) noexcept nogil:
    """Apply an event of a tier below the GPU."""
    cdef int64_t i
    cdef int32_t k
    cdef Piece* p
    for i in range(e.first, e.first + e.pieces):
        p = &pool.pieces[i]
        if r.skip_own and p.key >> 63:
            continue
        for k in range(p.count):
            lower_block(r, worker, e.tier, p.key, p.start + k, e.stored)


cdef void lower_cleared(Router* r, int32_t worker, int tier) noexcept nogil:
    """A worker's tier is empty."""
    set_free(set_of(r.lower, worker, tier))
    memset(set_of(r.lower, worker, tier), 0, sizeof(BlockSet))


# ---- the request under way --------------------------------------------------------------------------------------

cdef inline bint lower_has(Lower* below, int32_t worker, int tier, Block b) noexcept nogil:
    if set_has(set_of(below, worker, tier), b):
        return True
    if below.world == NULL or tier == TIER_HOST:
        return False
    if tier == TIER_DISK:
        return below.world.g3.there and tier_has(&below.world.g3.pool, b)
    return below.world.g4.there and set_has(&below.world.g4.objects, b)


cdef void lower_walk(Router* r, const uint64_t* keys, const int32_t* ends, int32_t n) noexcept nogil:
    """Fill `host` and `disk` of every worker that may be chosen for a path whose `overlap` is known.

    Rule: `query_lower_tiers`.
    """
    cdef Lower* below = r.lower
    cdef int32_t i, w, at, e, low, tier, full = ends[n - 1] if n > 0 else 0
    cdef Block b
    memset(below.host, 0, <size_t>r.workers * sizeof(int32_t))
    memset(below.disk, 0, <size_t>r.workers * sizeof(int32_t))
    for i in range(r.n_eligible):
        w = r.eligible[i]
        at = r.overlap[w]
        e, tier = 0, TIER_HOST
        while at < full:
            while ends[e] <= at:
                e += 1
            low = ends[e - 1] if e > 0 else 0
            b.key, b.at = keys[e], at - low
            if lower_has(below, w, tier, b):
                if tier == TIER_HOST:
                    below.host[w] += 1
                else:
                    below.disk[w] += 1
                at += 1
            elif tier == TIER_EXTERNAL:
                break
            else:
                tier += 1


cdef bint lower_keep(Router* r, Ticket* t) noexcept nogil:
    """Note what was found for a request that waits; false if memory is short."""
    cdef Lower* below = r.lower
    cdef int32_t i, w
    t.lower_used = 0
    t.lower = <int32_t*>malloc((3 * <int64_t>r.n_eligible + 1) * sizeof(int32_t))
    if t.lower == NULL:
        return False
    for i in range(r.n_eligible):
        w = r.eligible[i]
        if below.host[w] > 0 or below.disk[w] > 0:
            t.lower[3 * t.lower_used] = w
            t.lower[3 * t.lower_used + 1], t.lower[3 * t.lower_used + 2] = below.host[w], below.disk[w]
            t.lower_used += 1
    return True


cdef void lower_recall(Router* r, Ticket* t) noexcept nogil:
    """What was found when the request arrived is so again."""
    cdef Lower* below = r.lower
    cdef int32_t i
    memset(below.host, 0, <size_t>r.workers * sizeof(int32_t))
    memset(below.disk, 0, <size_t>r.workers * sizeof(int32_t))
    for i in range(t.lower_used):
        below.host[t.lower[3 * i]], below.disk[t.lower[3 * i]] = t.lower[3 * i + 1], t.lower[3 * i + 2]


cdef int64_t lower_cached(Router* r, int32_t worker) noexcept nogil:
    """Tokens that count as cached: each block at its tier's weight, halves up. Rule: `CacheHitEstimates`."""
    cdef Lower* below = r.lower
    cdef double blocks = <double>r.overlap[worker] + <double>below.host[worker] * below.host_weight
    return <int64_t>round((blocks + <double>below.disk[worker] * below.disk_weight) * <double>r.block_size)


cdef int64_t lower_best(Router* r) noexcept nogil:
    """The most of `lower_cached` among workers that may be chosen."""
    cdef int32_t i
    cdef int64_t best = 0, tokens
    for i in range(r.n_eligible):
        tokens = lower_cached(r, r.eligible[i])
        if tokens > best:
            best = tokens
    return best
