# cython: language_level=3
"""Order of eviction by a score of the user's.

When a request gives its blocks back, those that nobody else holds are the end of its sequence. They fall into stretches
of blocks with equally many hits, fewer towards the end; each stretch is scored once. The lowest score is evicted first,
from its deepest block on, of equal ones the stretch released first. A block is never evicted before those that
continue it: it counts with the highest score that was given below it since it came, if that is more than its own. So
of a run that gets a lower score than before only the last block counts with it: the run is cut there.

A run that is taken over again stays in the heap until it is given back or comes to its top. How often it was taken over
is known when all who did have given it back.

Costs: a score for each stretch released; O(log runs) for each run in or out of the heap, which takes the place of the
pool's queue.
"""
from libc.math cimport INFINITY, isnan
from libc.stdlib cimport free

from mocker._common cimport ERR_HOOK, ERR_MEMORY, ERR_OK, NIL, grown, int32_t, int64_t


cdef void ranks_free(Ranks* r) noexcept nogil:
    free(r.of)
    free(r.heap)
    free(r.freed)


# ---- heap -------------------------------------------------------------------------------------------------------

cdef inline bint before(Rank* a, Rank* b) noexcept nogil:
    if a.key != b.key:
        return a.key < b.key
    if a.sequence != b.sequence:
        return a.sequence < b.sequence
    return a.start > b.start


cdef void sift_up(Ranks* r, int64_t i) noexcept nogil:
    cdef int32_t run = r.heap[i]
    cdef int64_t up
    while i > 0:
        up = (i - 1) >> 1
        if not before(&r.of[run], &r.of[r.heap[up]]):
            break
        r.heap[i] = r.heap[up]
        r.of[r.heap[i]].place = <int32_t>i
        i = up
    r.heap[i] = run
    r.of[run].place = <int32_t>i


cdef void sift_down(Ranks* r, int64_t i) noexcept nogil:
    cdef int32_t run = r.heap[i]
    cdef int64_t down = 2 * i + 1
    while down < r.heap_used:
        if down + 1 < r.heap_used and before(&r.of[r.heap[down + 1]], &r.of[r.heap[down]]):
            down += 1
        if not before(&r.of[r.heap[down]], &r.of[run]):
            break
        r.heap[i] = r.heap[down]
        r.of[r.heap[i]].place = <int32_t>i
        i = down
        down = 2 * i + 1
    r.heap[i] = run
    r.of[run].place = <int32_t>i


cdef void push(Ranks* r, int32_t run) noexcept nogil:
    cdef void* moved = grown(r.heap, &r.heap_cap, r.heap_used + 1, sizeof(int32_t))
    if moved == NULL:
        r.error = ERR_MEMORY
        return
    r.heap = <int32_t*>moved
    r.heap[r.heap_used] = run
    r.heap_used += 1
    sift_up(r, r.heap_used - 1)


cdef void rank_remove(Ranks* r, int32_t run) noexcept nogil:
    """Take a run out of the heap, if it is there."""
    cdef int64_t i = r.of[run].place
    cdef int32_t last
    if i == NIL:
        return
    r.of[run].place = NIL
    r.heap_used -= 1
    last = r.heap[r.heap_used]
    if last != run:
        r.heap[i] = last
        r.of[last].place = <int32_t>i
        sift_up(r, i)
        sift_down(r, r.of[last].place)


cdef void rank_add(Ranks* r, int32_t run, int32_t start) noexcept nogil:
    """Nobody holds a run (any more), whose key is known: it is the newest of those with this key."""
    rank_remove(r, run)
    r.sequence += 1
    r.of[run].sequence, r.of[run].start = r.sequence, start
    push(r, run)


cdef void rank_put(Ranks* r, int32_t run, int64_t sequence) noexcept nogil:
    """Put a run in its place by its key and a sequence number of the caller's."""
    rank_remove(r, run)
    r.of[run].sequence, r.of[run].start = sequence, 0
    push(r, run)


# ---- runs -------------------------------------------------------------------------------------------------------

cdef int ranks_reserve(Ranks* r, int64_t runs) noexcept nogil:
    """Ranks for so many runs; of a structure in zeroed memory at first."""
    cdef int64_t i = r.cap
    cdef void* moved = grown(r.of, &r.cap, runs, sizeof(Rank))
    if moved == NULL:
        return ERR_MEMORY
    r.of = <Rank*>moved
    for i in range(i, r.cap):
        r.of[i].place = NIL
        rank_gone(r, <int32_t>i)
    return ERR_OK


cdef void rank_gone(Ranks* r, int32_t run) noexcept nogil:
    """A run is evicted; its number may be that of new blocks."""
    rank_remove(r, run)
    r.of[run].key, r.of[run].releases = 0.0, 0
    r.of[run].floor = r.of[run].above = -INFINITY


cdef void rank_cut(Ranks* r, int32_t run, int32_t low, int32_t at) noexcept nogil:
    """The deeper part of a run, from block `at` of its segment on, is a run of its own now, in the same place."""
    cdef bint queued = r.of[run].place != NIL
    r.of[low] = r.of[run]
    r.of[low].start, r.of[low].place = at, NIL
    r.of[run].floor = r.of[run].above
    if queued:
        push(r, low)


cdef void rank_shorter(Ranks* r, int32_t run) noexcept nogil:
    """The last blocks of a run are evicted."""
    r.of[run].floor = r.of[run].above


# ---- a request gives its blocks back, last to first --------------------------------------------------------------

cdef void release_begin(Ranks* r) noexcept nogil:
    r.releases += 1
    r.highest, r.freed_used = -INFINITY, 0


cdef void flush(Ranks* r) noexcept nogil:
    """Score the runs that the stretch consists of."""
    cdef int64_t[5] facts
    cdef int64_t i, blocks = 0
    cdef double score
    cdef Freed* f
    cdef Rank* x
    cdef int32_t low
    if r.freed_used == 0:
        return
    for i in range(r.freed_used):
        blocks += r.freed[i].blocks
    facts[0], facts[1] = <int64_t>(r.now[0] * 1000.0), r.releases
    facts[2], facts[3] = r.freed[r.freed_used - 1].begin, blocks
    facts[4] = r.of[r.freed[0].run].releases - 1
    score = r.score.ask(r.score.context, facts)
    if isnan(score):
        r.error = ERR_HOOK
        score = 0.0
    for i in range(r.freed_used):
        f = &r.freed[i]
        x = &r.of[f.run]
        if r.highest > x.floor:
            x.floor = r.highest
        x.key = r.highest = score if score > x.floor else x.floor      # of the last block
        if f.blocks > 1:
            if x.above > x.key:
                low = r.cut(r.owner, f.run, x.start + f.blocks - 1)
                push(r, low)
                x.key = r.highest = x.above
            x.above = x.key
        push(r, f.run)
    r.freed_used = 0


cdef void release_held(Ranks* r, int32_t run) noexcept nogil:
    """Others still hold this run."""
    flush(r)
    r.of[run].releases += 1
    if r.highest > r.of[run].floor:
        r.of[run].floor = r.highest
    if r.highest > r.of[run].above:
        r.of[run].above = r.highest


cdef void release_freed(Ranks* r, int32_t run, int32_t start, int32_t begin, int32_t blocks) noexcept nogil:
    """Nobody holds this run any more: its first block in its segment and in the request, and its blocks."""
    cdef void* moved
    rank_remove(r, run)
    r.of[run].releases += 1
    if r.freed_used > 0 and r.of[r.freed[0].run].releases != r.of[run].releases:
        flush(r)
    moved = grown(r.freed, &r.freed_cap, r.freed_used + 1, sizeof(Freed))
    if moved == NULL:
        r.error = ERR_MEMORY
        return
    r.freed = <Freed*>moved
    r.freed[r.freed_used].run, r.freed[r.freed_used].begin, r.freed[r.freed_used].blocks = run, begin, blocks
    r.freed_used += 1
    r.sequence += 1
    r.of[run].sequence, r.of[run].start = r.sequence, start


cdef void release_end(Ranks* r) noexcept nogil:
    flush(r)
