# cython: language_level=3
"""Eviction policies of a host tier beyond least recently used: LFU, S3-FIFO and Belady's optimum.

Answers to nothing in the reference. All keep the tier's rule that a block goes before its predecessor; they decide
among the runs whose last block may go. A use is a promotion to the GPU that was not cancelled.
- LFU: the fewest uses since it came (up to 255 count), then the oldest.
- S3-FIFO (Yang and others, SOSP 2023): a small queue of a tenth of the slots and a main one, both in order of coming.
  What is used in the small queue moves to the main one when its turn comes, else it goes, and if it comes back soon it
  enters the main queue. In the main queue each of up to 3 uses is one more round.
- Belady: the segment whose next request in the trace is farthest, or never comes. It knows the order of the worker's
  requests; a request counts as to come until a later one is looked at for admission.

Costs: O(log runs) a run; Belady O(segments of a path * log requests) a request.
"""
from mocker._common cimport ERR_MEMORY, NIL, int32_t, int64_t, uint64_t
from mocker._offload_blocks cimport Span, catalog_number, span_part
from mocker._offload_marks cimport marks_free, marks_look, marks_set
from mocker._offload_tiers cimport (
    EVICT_BELADY, EVICT_LFU, EVICT_S3FIFO, MOST_REQUESTS, Future, Run, heap_put, heap_renew, heap_take, run_split,
    set_ticks)

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
        return 0 if at < 0 else (<int64_t>MOST_REQUESTS - at) << 36     # ticks count blocks and stay below that
    return 0


cdef void policy_use(Tier* t, int32_t run) noexcept nogil:
    """A run's blocks have come up."""
    cdef int most = MOST_USES if t.policy == EVICT_LFU else MOST_ROUNDS if t.policy == EVICT_S3FIFO else 0
    if t.runs[run].uses < most:
        t.runs[run].uses += 1


# ---- S3-FIFO ----------------------------------------------------------------------------------------------------

cdef int32_t ghosts(Tier* t, Span* s, bint* back) noexcept nogil:
    """Blocks from the first one of a span on that all went not long ago, or all did not.

    Remembered are as many as the main queue has slots. A stretch goes from its end, so its blocks' numbers and offsets
    add up to the same: that is what is noted, and up to some offset they are remembered.
    """
    cdef int64_t noted, until
    cdef int32_t n = marks_look(&t.ghosts, s, &noted)
    until = noted + t.capacity - t.gone if noted > 0 else 0
    back[0] = s.at < until
    if back[0] and s.step > 0:
        return <int32_t>min(n, until - s.at)
    if not back[0] and s.step < 0 and until > 0:
        return <int32_t>min(n, s.at - until + 1)
    return n


cdef int32_t policy_alike(Tier* t, Span* s) noexcept nogil:
    """Blocks from the first one of a span on that enter the same queue."""
    cdef bint back, other
    cdef int32_t n = ghosts(t, s, &back)
    cdef Span rest
    while n < s.count:
        rest = span_part(s, n, s.count - n)
        rest.count = ghosts(t, &rest, &other)
        if other != back:
            break
        n += rest.count
    return n


cdef void policy_enter(Tier* t, int32_t run, Span* s) noexcept nogil:
    """New blocks, all alike: those that went not long ago are for the main queue."""
    cdef bint back
    ghosts(t, s, &back)
    t.runs[run].uses, t.runs[run].queue = 0, back
    if back and not marks_set(&t.ghosts, s, 0):
        t.error = ERR_MEMORY


cdef int policy_queue(Tier* t) noexcept nogil:
    """The queue whose turn it is."""
    if t.heaps[0].used == 0 or (t.heaps[1].used > 0 and SMALL_PART * t.small < t.capacity):
        return 1
    return 0


cdef int64_t policy_most(Tier* t, int64_t n) noexcept nogil:
    """Of the next `n` blocks of the queue whose turn it is so many go before it is the other's."""
    if t.heaps[1].used == 0 or SMALL_PART * t.small < t.capacity:
        return n
    return min(n, (SMALL_PART * t.small - t.capacity) // SMALL_PART + 1)


cdef bint policy_spares(Tier* t, int32_t run) noexcept nogil:
    """The first run of a queue has been used: the last block, whose turn it is, gets another one."""
    cdef Run* r = &t.runs[run]
    if r.uses == 0:
        return False
    if r.end - r.start > 1:
        run_split(t, run, r.end - 1)
        r = &t.runs[run]
    heap_take(t, run)
    if r.queue == 0:
        t.small -= 1
        r.queue, r.uses = 1, 0
    else:
        r.uses -= 1
    set_ticks(t, run, -1)
    heap_put(t, run)
    return True


cdef void policy_gone(Tier* t, Span* s) noexcept nogil:
    """Blocks went from the small queue, the deepest first."""
    t.gone += s.count
    if not marks_set(&t.ghosts, s, t.gone - s.count + 1 + s.at):
        t.error = ERR_MEMORY


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
    marks_free(&t.ghosts)
