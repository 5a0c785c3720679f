# Data dictionary of the block pool. A segment is a chain of blocks that are addressed together (a stretch of a
# trace that nothing branches off, one full block of real tokens, or the generated blocks of one request); a run
# is a stretch of one segment's resident blocks that have the same holders.
from mocker._common cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from mocker._offload_blocks cimport Catalog, Spans
from mocker._ranks cimport Ranks


cdef struct Run:
    uint64_t key                   # segment identity
    int32_t start                  # first block, offset in the segment
    int32_t end                    # one past the last block
    int32_t ref                    # number of holders; 0 = inactive (cached, evictable)
    int32_t pins                   # holders among them that are reservations, not requests
    int32_t up                     # run just before this one in the segment, NIL at offset 0
    int32_t down                   # run just after, NIL at the deepest resident block
    int32_t prev                   # inactive only: towards the next to be evicted
    int32_t next                   # inactive only: towards the newest; free runs: free list
    int32_t origin                 # with tiers: the segment's number in the catalog


cdef enum:
    ELEMENT = 16                   # bytes of an element of a path, without hash and tokens


cdef struct Path:                  # the full blocks of one request, root first
    uint64_t* keys                 # [n] segment of each element; the next two are behind it in the same memory
    int32_t* ends                  # [n] request block index one past the element's last block
    int32_t* first                 # [n] first run of the element's segment; valid while the request holds it
    uint64_t* local                # [n] block hash of the tokens alone (real tokens only, else NULL)
    uint32_t* tokens               # [n * block_size] tokens of the blocks (only if events carry them, else NULL)
    int32_t n                      # elements
    int64_t cap                    # allocated elements


cdef struct Piece:                 # consecutive blocks of one segment in an event
    uint64_t key                   # segment
    uint64_t local                 # block hash (real tokens, stored only)
    int32_t start                  # first block, offset in the segment
    int32_t count                  # blocks; a removed piece lists them deepest first
    int64_t tokens                 # stored, if events carry tokens: offset in `event_tokens`, else NIL; evicted: origin


cdef struct Event:
    uint8_t stored                 # 1 stored, 0 removed
    uint8_t has_parent
    uint8_t tier                   # 0 GPU, 1 host
    int32_t parent_offset          # stored: offset of the block before the first one, in its segment
    uint64_t parent_key            # stored: segment of that block
    int64_t first                  # first piece
    int64_t pieces                 # number of pieces


cdef struct Pool
ctypedef bint (*RoomMaker)(Pool*, int64_t) noexcept nogil


cdef struct Ranked:                # what is done another way with a score of what is evicted, see `_kv_ranked`
    void (*release)(Pool* p, Path* path, int32_t full) noexcept nogil
    void (*evict)(Pool* p, int64_t count) noexcept nogil


cdef struct Pool:
    int64_t capacity               # blocks in all
    int64_t active                 # blocks held by requests (partial ones included)
    int64_t inactive               # cached blocks without holder; free = capacity - active - inactive
    bint caching                   # prefix caching; without it only `active` is kept
    Run* runs
    int64_t runs_cap
    int64_t runs_used              # high-water mark of `runs`
    int32_t free_run               # free list through `next`
    int32_t oldest                 # next inactive run to be evicted (from its deepest block)
    int32_t newest                 # most recently released inactive run
    uint64_t* table_keys           # open addressing: segment -> first run
    int32_t* table_runs            # NIL = empty place
    uint64_t table_mask            # places - 1
    int64_t table_used
    int32_t* scratch               # runs of the operation under way
    int64_t scratch_cap
    bint capture                   # append to the event log
    int32_t block_size             # tokens a block (only to copy event tokens)
    Event* events
    int64_t events_cap
    int64_t events_used
    Piece* pieces
    int64_t pieces_cap
    int64_t pieces_used
    uint32_t* event_tokens
    int64_t event_tokens_cap
    int64_t event_tokens_used
    void* tiers                    # Offload* of `_offload`; NULL: evicted blocks are gone
    RoomMaker make_room            # with tiers: evicts; false if the slots are held meanwhile by `blocked`
    Catalog* catalog               # with tiers: where segments come from
    Spans* fresh                   # write-through: what is registered goes here, too; else NULL
    int32_t blocked                # lease of the last refusal, NIL if there just was no room
    bint keep_evicted              # note what is evicted in
    Piece* evicted                 # pieces evicted by the operation under way
    int64_t evicted_cap
    int64_t evicted_used
    int64_t evictions              # blocks evicted since the start
    const Ranked* ranked           # with a score of what is evicted; NULL: by the queue
    Ranks ranks                    # in its place
    int error                      # ErrorCode


cdef struct Spot:                  # a block of a path: element, the run it begins, its offset in the segment
    int32_t element
    int32_t run
    int32_t at


cdef int pool_init(Pool* p, int64_t capacity, bint caching, bint capture, int32_t block_size) noexcept nogil
cdef void pool_free(Pool* p) noexcept nogil
cdef void path_free(Path* path) noexcept nogil
cdef void path_point(Path* path) noexcept nogil
cdef int path_reserve(Path* path, int64_t need, bint local, int32_t tokens_per_block) noexcept nogil
cdef void pool_cost(Pool* p, Path* path, int32_t full, int64_t* cached, int64_t* active) noexcept nogil
cdef bint pool_use(Pool* p, Path* path, int32_t begin, int32_t full_end, int32_t partial) noexcept nogil
cdef bint pool_reserve(Pool* p, int64_t count) noexcept nogil
cdef void pool_release(Pool* p, Path* path, int32_t full, int32_t partial) noexcept nogil
cdef void pool_promote_own(Pool* p, Path* path) noexcept nogil
cdef void pool_promote_shared(Pool* p, Path* path) noexcept nogil
cdef int32_t pool_find(Pool* p, uint64_t key) noexcept nogil
cdef void evict(Pool* p, int64_t count) noexcept nogil
cdef bint evict_from(Pool* p, int32_t run, int64_t n) noexcept nogil
cdef void run_gone(Pool* p, int32_t run) noexcept nogil
cdef void run_split(Pool* p, int32_t run, int32_t at) noexcept nogil
cdef int32_t run_new(Pool* p, uint64_t key, int32_t start, int32_t end, int32_t ref) noexcept nogil
cdef void table_insert(Pool* p, uint64_t key, int32_t run) noexcept nogil
cdef void queue_append(Pool* p, int32_t run) noexcept nogil
cdef int32_t resident_from(Pool* p, Path* path, int32_t begin, int32_t end, Spot* spot, int64_t* idle) noexcept nogil
cdef void retick(Pool* p, Path* path, Spot* spot, int32_t hits) noexcept nogil
cdef void hold(Pool* p, Path* path, Spot* spot, int32_t hits, int32_t pin) noexcept nogil
cdef void unhold(Pool* p, Path* path, int32_t begin, int32_t count) noexcept nogil
cdef void make_resident(Pool* p, Path* path, int32_t begin, int32_t end) noexcept nogil
cdef int32_t catalog_note(Pool* p, Path* path, int32_t i) noexcept nogil


cdef inline int32_t element_at(Path* path, int32_t block) noexcept nogil:
    """Element that holds a request block."""
    cdef int32_t low = 0, high = path.n - 1, mid
    while low < high:
        mid = (low + high) >> 1
        if path.ends[mid] > block:
            high = mid
        else:
            low = mid + 1
    return low


cdef inline int32_t element_begin(Path* path, int32_t i) noexcept nogil:
    return path.ends[i - 1] if i > 0 else 0
