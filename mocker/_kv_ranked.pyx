# cython: language_level=3
"""Eviction from the block pool by a score of the user's: the other way to give back and evict blocks.

The pool's queue stays empty; a heap takes its place (`_ranks`). Costs: as in `_kv`, times log(runs) for those that come
into the heap or leave it.
"""
from mocker._common cimport NIL, int32_t, int64_t
from mocker._hooks cimport Hook
from mocker._kv cimport Path, Pool, Ranked, Run, element_at, element_begin, evict_from, run_gone, run_split
from mocker._ranks cimport rank_gone, rank_remove, rank_shorter, release_begin, release_end, release_freed, release_held


cdef void release_ranked(Pool* p, Path* path, int32_t full) noexcept nogil:
    """Drop a request's hold on its first `full` blocks, and score those that nobody else holds."""
    cdef int32_t i = element_at(path, full - 1), run, up, low, cover
    cdef Run* r
    release_begin(&p.ranks)
    while i >= 0:
        low = element_begin(path, i)
        cover = (path.ends[i] if path.ends[i] < full else full) - low
        run = path.first[i]
        while p.runs[run].end < cover:
            run = p.runs[run].down
        while run != NIL:
            r = &p.runs[run]
            r.ref -= 1
            up = r.up                          # what was freed before may be cut now, and the runs move
            if r.ref == 0:
                p.active -= r.end - r.start
                p.inactive += r.end - r.start
                release_freed(&p.ranks, run, r.start, low + r.start, r.end - r.start)
            else:
                release_held(&p.ranks, run)
            run = up
        i -= 1
    release_end(&p.ranks)
    p.error = p.error or p.ranks.error


cdef void evict_ranked(Pool* p, int64_t count) noexcept nogil:
    """`evict` in the order of the heap."""
    cdef int32_t run
    cdef int64_t n
    while count > 0:
        run = p.ranks.heap[0]
        if p.runs[run].ref > 0:                # taken over again
            rank_remove(&p.ranks, run)
            continue
        n = min(<int64_t>(p.runs[run].end - p.runs[run].start), count)
        count -= n
        if not evict_from(p, run, n):
            return
        if p.runs[run].end == p.runs[run].start:
            rank_gone(&p.ranks, run)
            run_gone(p, run)
        else:
            rank_shorter(&p.ranks, run)


cdef int32_t cut_run(void* pool, int32_t run, int32_t at) noexcept nogil:
    run_split(<Pool*>pool, run, at)
    return (<Pool*>pool).runs[run].down


cdef Ranked RANKED
RANKED.release, RANKED.evict = release_ranked, evict_ranked


cdef void pool_rank(Pool* p, Hook score, const double* now) noexcept nogil:
    """Let a score, if there is one, say what a pool evicts; `now` is where the engine keeps the time."""
    p.ranks.score, p.ranks.now = score, now
    p.ranks.cut, p.ranks.owner = cut_run, p
    p.ranked = &RANKED if score.ask != NULL else NULL
