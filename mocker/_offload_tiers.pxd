# Data dictionary of the pools below the GPU.
from mocker._common cimport NIL, int8_t, int32_t, int64_t, uint8_t
from mocker._offload_blocks cimport Block, Catalog, Span
from mocker._offload_marks cimport Marks


cdef enum:                         # eviction policies, see `_offload_policy`
    EVICT_LRU = 0
    EVICT_LFU = 1
    EVICT_S3FIFO = 2
    EVICT_BELADY = 3
    MOST_REQUESTS = 134217727      # of one worker that Belady's policy can tell apart


cdef struct Run:                   # consecutive blocks of a segment that are alike
    int32_t seg                    # segment's number
    int32_t start                  # first block, offset in the segment
    int32_t end                    # one past the last block
    int32_t pins                   # transfers that keep them; 0: evictable; NIL: a ghost
    int32_t up                     # run before this one in the segment, NIL at the first
    int32_t down                   # run after it; of a free run: next free one
    int32_t parent                 # linked at offset 0: run whose last block comes before, NIL if nothing does
    int32_t kids                   # other segments linked to the last block
    int8_t step                    # of ticks from a block to the next: 1 or -1
    uint8_t linked                 # counts for the block before
    uint8_t uses                   # promotions, as far as the policy counts them
    uint8_t queue                  # S3-FIFO: 0 small, 1 main
    int64_t tick                   # number of the first block's insertion among the evictable ones
    int64_t pad[2]                 # 64 bytes: most often one cache line has all of the above


cdef struct Leaf:                  # a run whose last block may be evicted
    int64_t key                    # its tick, moved by what the policy says
    int32_t run


cdef struct Heap:                  # binary, by key
    Leaf* items
    int64_t cap
    int64_t used


cdef struct Future:                # requests of one worker in the order in which they come
    int64_t segments
    int64_t* starts                # [segments + 1] into `uses`
    int64_t* uses                  # [] places of the requests that have a segment, rising
    int64_t rows
    int64_t* order                 # [requests] row by place
    int64_t* place                 # [rows] place by row
    int32_t* segment               # [rows] deepest segment, NIL: none
    int32_t* parent                # [segments] segment before, NIL: none
    int64_t clock                  # place of the newest request that was looked at


cdef struct Tier:
    int64_t capacity               # blocks
    int64_t free                   # slots with nothing in them
    int64_t inactive               # blocks without pins
    int64_t pinned                 # blocks with pins
    int64_t reserved               # slots promised
    int64_t peak                   # most slots ever in use
    int64_t next_tick
    int64_t evictions
    Run* runs
    int32_t* heap_at               # [runs_used] place in its heap while the last block may be evicted next, else NIL
    int64_t runs_cap
    int64_t runs_used
    int32_t free_run
    int32_t* first                 # [first_cap] by segment number: its first run, NIL without
    int64_t first_cap
    Heap heaps[2]                  # runs whose last block may be evicted; the second one is S3-FIFO's main queue
    int policy
    int64_t small                  # S3-FIFO: evictable blocks in the small queue
    Marks ghosts                   # S3-FIFO: the how-manieth a block was that went from there, plus its offset
    int64_t gone                   # how many have gone
    Future* future                 # Belady
    bint log                       # note what came and went
    Block* changes                 # [changes_used]; ~at: it was removed
    int64_t changes_cap
    int64_t changes_used
    Catalog* catalog
    int error                      # ErrorCode


cdef void tier_init(Tier* t, int64_t capacity, Catalog* catalog, bint log) noexcept nogil
cdef void tier_free(Tier* t) noexcept nogil
cdef int32_t tier_look(Tier* t, Span* s, bint* there) noexcept nogil
cdef bint tier_has(Tier* t, Block b) noexcept nogil
cdef int64_t tier_idle(Tier* t, Span* s) noexcept nogil
cdef int64_t tier_room(Tier* t) noexcept nogil
cdef bint tier_take(Tier* t, int64_t count) noexcept nogil
cdef void tier_register(Tier* t, Span* s) noexcept nogil
cdef void tier_add(Tier* t, Span* s) noexcept nogil
cdef void tier_pin(Tier* t, Span* s) noexcept nogil
cdef void tier_unpin(Tier* t, Span* s) noexcept nogil
cdef void tier_return(Tier* t, Span* s) noexcept nogil
cdef void heap_put(Tier* t, int32_t run) noexcept nogil
cdef void heap_take(Tier* t, int32_t run) noexcept nogil
cdef void heap_renew(Tier* t, int32_t run) noexcept nogil
cdef int32_t run_split(Tier* t, int32_t run, int32_t at) noexcept nogil
cdef void set_ticks(Tier* t, int32_t run, int32_t step) noexcept nogil


cdef inline bint tier_lacks(Tier* t, Span* s) noexcept nogil:
    """Whether it has none of a span's blocks; they go up, as evicted ones do."""
    cdef int32_t run = t.first[s.seg] if 0 <= s.seg < t.first_cap else NIL
    cdef bint there
    if run == NIL or t.runs[run].start > s.at:
        return True
    return tier_look(t, s, &there) == s.count and not there
