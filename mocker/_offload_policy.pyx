# cython: language_level=3
"""Eviction policies of a host tier beyond least recently used: LFU, S3-FIFO and Belady's optimum.

Answers to nothing in the reference. All keep the tier's rule that a block goes before its predecessor; they decide
among the runs whose last block may go. A use is a promotion to the GPU.
- LFU: the fewest uses since it came (up to 255 count), then the oldest.
- S3-FIFO (Yang and others, SOSP 2023): a small queue of a tenth of the slots and a main one, both in order of coming.
  What is used in the small queue moves to the main one when its turn comes, else it goes, and if it comes back soon it
  enters the main queue. In the main queue each of up to 3 uses is one more round.
- Belady: the segment whose next request in the trace is farthest, or never comes. It knows the order of the worker's
  requests; a request counts as to come until a later one is looked at for admission.

Costs: O(log runs) a run; S3-FIFO O(1) a block; Belady O(segments of a path * log requests) a request.
"""
from libc.stdlib cimport free

from mocker._common cimport ERR_MEMORY, NIL, grown, int32_t, int64_t, uint64_t
from mocker._offload_blocks cimport Block, catalog_number, set_add, set_discard, set_free, set_has, span_block
from mocker._offload_tiers cimport (
    EVICT_BELADY, EVICT_LFU, EVICT_S3FIFO, Future, Run, heap_put, heap_renew, heap_take, set_ticks)

cdef enum:
    MOST_USES = 255
    MOST_ROUNDS = 3
    SMALL_PART = 10                # of the slots are in the small queue


# ---- order among runs -------------------------------------------------------------------------------------------

cdef int64_t next_use(Future* f, int64_t segment) noexcept nogil:
    """Place of the next request that has a segment; -1: none has."""
    cdef int64_t low, high, mid
    if segment < 0 or segment >= f.segments:
        return -1                              # generated blocks
    low, high = f.starts[segment], f.starts[segment + 1]
    while low < high:
        mid = (low + high) >> 1
        if f.uses[mid] < f.clock:
            low = mid + 1
        else:
            high = mid
    return f.uses[low] if low < f.starts[segment + 1] else -1


cdef int64_t policy_bias(Tier* t, int32_t run) noexcept nogil:
    """What a run's ticks are moved by: runs go in the order of the sums."""
    cdef int64_t at
    if t.policy == EVICT_LFU:
        return <int64_t>t.runs[run].uses << 48
    if t.policy == EVICT_BELADY:
        at = next_use(t.future, <int64_t>t.catalog.items[t.runs[run].seg].key)
        return 0 if at < 0 else (<int64_t>0x3FFFFF - at) << 40
    return 0


cdef void policy_use(Tier* t, int32_t run) noexcept nogil:
    """A run's blocks have come up."""
    cdef int most = MOST_USES if t.policy == EVICT_LFU else MOST_ROUNDS if t.policy == EVICT_S3FIFO else 0
    if t.runs[run].uses < most:
        t.runs[run].uses += 1


# ---- S3-FIFO ----------------------------------------------------------------------------------------------------

cdef int32_t policy_alike(Tier* t, Span* s) noexcept nogil:
    """Blocks from the first one of a span on that enter the same queue."""
    cdef int32_t n = 1
    cdef bint back
    if t.ghosts.used == 0:
        return s.count
    back = set_has(&t.ghosts, span_block(s, 0))
    while n < s.count and set_has(&t.ghosts, span_block(s, n)) == back:
        n += 1
    return n


cdef void policy_enter(Tier* t, int32_t run, Span* s) noexcept nogil:
    """New blocks, all alike: those that went not long ago are for the main queue."""
    cdef int32_t i
    t.runs[run].uses = t.runs[run].queue = 0
    if t.ghosts.used > 0 and set_has(&t.ghosts, span_block(s, 0)):
        t.runs[run].queue = 1
        for i in range(s.count):
            set_discard(&t.ghosts, span_block(s, i))


cdef int policy_queue(Tier* t) noexcept nogil:
    """The queue whose turn it is."""
    if t.heaps[0].used == 0 or (t.heaps[1].used > 0 and SMALL_PART * t.small < t.capacity):
        return 1
    return 0


cdef bint policy_spares(Tier* t, int32_t run) noexcept nogil:
    """The first run of a queue has been used: it gets another turn."""
    cdef Run* r = &t.runs[run]
    if r.uses == 0:
        return False
    heap_take(t, run)
    if r.queue == 0:
        t.small -= r.end - r.start
        r.queue, r.uses = 1, 0
    else:
        r.uses -= 1
    set_ticks(t, run, -1)
    heap_put(t, run)
    return True


cdef void policy_gone(Tier* t, Span* s) noexcept nogil:
    """Blocks went from the small queue: remember as many as the main queue has slots."""
    cdef void* moved
    cdef int32_t i
    cdef int64_t k
    for i in range(s.count):
        if not set_add(&t.ghosts, span_block(s, i)):
            t.error = ERR_MEMORY
            return
        if t.gone_used - t.gone_head >= t.capacity:
            set_discard(&t.ghosts, t.gone[t.gone_head])
            t.gone_head += 1
        if t.gone_head > t.capacity:
            for k in range(t.gone_head, t.gone_used):
                t.gone[k - t.gone_head] = t.gone[k]
            t.gone_used -= t.gone_head
            t.gone_head = 0
        moved = grown(t.gone, &t.gone_cap, t.gone_used + 1, sizeof(Block))
        if moved == NULL:
            t.error = ERR_MEMORY
            return
        t.gone = <Block*>moved
        t.gone[t.gone_used] = span_block(s, i)
        t.gone_used += 1


# ---- Belady -----------------------------------------------------------------------------------------------------

cdef void policy_reach(Tier* t, int64_t row) noexcept nogil:
    """A request is looked at for admission: those before it are no future any more."""
    cdef Future* f = t.future
    cdef int64_t at = f.place[row] if row < f.rows else -1, i
    cdef int32_t s, seg, run
    if at <= f.clock:
        return
    i = f.clock
    f.clock = at
    while i < at:
        s = f.segment[f.order[i]]
        while s != NIL:
            seg = catalog_number(t.catalog, <uint64_t>s)
            run = t.first[seg] if 0 <= seg < t.first_cap else NIL
            while run != NIL:
                heap_renew(t, run)
                run = t.runs[run].down
            s = f.parent[s]
        i += 1


cdef void policy_free(Tier* t) noexcept nogil:
    set_free(&t.ghosts)
    free(t.gone)
