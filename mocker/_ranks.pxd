# Order of eviction by a score of the user's: ranks of runs of blocks, and a heap of those that nobody holds.
from mocker._common cimport int32_t, int64_t
from mocker._hooks cimport Hook


ctypedef int32_t (*CutFn)(void* owner, int32_t run, int32_t at) noexcept nogil     # the deeper part, from block `at` on


cdef struct Rank:                  # of a run
    double key                     # the lowest is evicted first,
    int64_t sequence               # of equal ones the one released first,
    int32_t start                  # of one that was cut since then its deepest part (first block, in its segment)
    int32_t place                  # in `heap`, NIL: not there; somebody may hold it all the same
    double floor                   # highest key of what was released below its last block,
    double above                   # and below any other
    int64_t releases               # requests that have given it back; all but the first had taken it over


cdef struct Freed:                 # a run that the release under way has left without holder
    int32_t run
    int32_t begin                  # block index of the first in the request
    int32_t blocks


cdef struct Ranks:
    Hook score                     # NULL: none, and nothing below is used
    const double* now              # ms
    CutFn cut                      # cuts a run in two, see `rank_cut`
    void* owner                    # of the runs
    Rank* of                       # [cap] by run; there are never more runs than blocks
    int64_t cap
    int32_t* heap                  # [heap_used] runs, a binary heap
    int64_t heap_used
    int64_t heap_cap
    Freed* freed                   # [freed_used] of equally many hits, deepest first
    int64_t freed_used
    int64_t freed_cap
    double highest                 # key given in the release under way
    int64_t releases               # since the start
    int64_t sequence               # of the newest run released
    int error                      # ErrorCode


cdef void ranks_free(Ranks* r) noexcept nogil
cdef int ranks_reserve(Ranks* r, int64_t runs) noexcept nogil
cdef void rank_gone(Ranks* r, int32_t run) noexcept nogil
cdef void rank_cut(Ranks* r, int32_t run, int32_t low, int32_t at) noexcept nogil
cdef void rank_shorter(Ranks* r, int32_t run) noexcept nogil
cdef void rank_add(Ranks* r, int32_t run, int32_t start) noexcept nogil
cdef void rank_put(Ranks* r, int32_t run, int64_t sequence) noexcept nogil
cdef void rank_remove(Ranks* r, int32_t run) noexcept nogil
cdef void release_begin(Ranks* r) noexcept nogil
cdef void release_held(Ranks* r, int32_t run) noexcept nogil
cdef void release_freed(Ranks* r, int32_t run, int32_t start, int32_t begin, int32_t blocks) noexcept nogil
cdef void release_end(Ranks* r) noexcept nogil


cdef inline bint rank_fresh(Ranks* r, int32_t run) noexcept nogil:
    """Whether blocks that follow a run may join it: nothing happened to it that did not happen to them."""
    return r.of[run].releases == 0 and r.of[run].floor == -1e999
