# Data dictionary of the SGLang radix cache: its tree of pages, the token pool behind it and a small hash map.
# A page is named by (segment key, depth): a segment lies at one depth and has one history, so this is its whole text.
from mocker._common cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from mocker._kv cimport Path
from mocker._ranks cimport Ranks


cdef struct Map:                   # open addressing: (key, sub) -> value
    uint64_t* keys
    int32_t* subs
    int32_t* values                # NIL = empty place
    uint64_t mask                  # places - 1
    int64_t used


cdef struct Node:                  # one edge of the tree, or a chain of edges of one page each
    int32_t parent                 # NIL: the root
    int32_t start                  # first page, counted from the root
    int32_t end                    # one past the last page
    int32_t children
    int64_t lock                   # requests whose path runs through it
    int64_t stamp                  # tick of the newest visit that ended here, or below at a node evicted since
    uint64_t owner                 # incarnation of the request whose slots it keeps
    uint8_t chain                  # 1: stands for nodes of one page each, which are matched and evicted one by one
    uint8_t alive
    int32_t n                      # elements of the edge
    int64_t cap
    uint64_t* keys                 # [n] segment of each element
    int32_t* ends                  # [n] one past the element's last page, counted from the root
    int32_t* slots                 # [(end - start) * page] pool slots (only if slots are told apart)
    int64_t slots_cap
    int32_t next_free              # free nodes: next one


cdef struct Leaf:                  # entry of the eviction heap; outdated unless it fits the node
    int64_t stamp
    int32_t node


cdef struct Cut:                   # pages that an eviction took, of one segment
    uint64_t key
    int32_t start                  # first page, counted from the root
    int32_t end                    # one past the last page


cdef struct Radix:
    int64_t total                  # tokens in the pool
    int64_t page                   # tokens a page
    int64_t available              # free tokens (more than are really free after a double free)
    int64_t evictable              # cached tokens that nobody locks
    int64_t protected              # cached tokens that somebody locks
    int64_t tick                   # clock of the visits
    bint told                      # slots are told apart: nodes, requests and the free stack hold their numbers
    int32_t* stack                 # [available] free slots, the next one last (only if told)
    int64_t stack_cap
    Node* nodes                    # nodes[0] is the root
    int64_t nodes_cap
    int64_t nodes_used             # high-water mark
    int64_t count                  # nodes alive, the root not counted
    int32_t free_node
    Map table                      # (segment, first page) -> node
    Leaf* heap                     # min-heap of evictable leaves by stamp
    int64_t heap_cap
    int64_t heap_used
    Ranks ranks                    # its counterpart with a score of what is evicted, see `_radix_ranked`
    int32_t* gone                  # [gone_used] slots freed by the last eviction, in order (only if told)
    int64_t gone_cap
    int64_t gone_used
    bint log                       # note what an eviction takes in `cuts`
    Cut* cuts
    int64_t cuts_cap
    int64_t cuts_used
    int64_t evictions              # tokens evicted since the start
    int error                      # ErrorCode


cdef int map_init(Map* m) noexcept nogil
cdef void map_free(Map* m) noexcept nogil
cdef int32_t map_find(Map* m, uint64_t key, int32_t sub) noexcept nogil
cdef int map_set(Map* m, uint64_t key, int32_t sub, int32_t value) noexcept nogil
cdef void map_delete(Map* m, uint64_t key, int32_t sub) noexcept nogil

cdef int radix_init(Radix* t, int64_t total, int64_t page, bint told) noexcept nogil
cdef void radix_free(Radix* t) noexcept nogil
cdef void radix_clear(Radix* t) noexcept nogil
cdef int32_t radix_match(Radix* t, Path* path, int32_t pages) noexcept nogil
cdef int32_t radix_match_pages(Radix* t, Path* path, int32_t pages) noexcept nogil
cdef int32_t radix_extend(Radix* t, int32_t node, Path* path, int32_t pages, uint64_t owner,
                          int32_t* slots) noexcept nogil
cdef void radix_stamp(Radix* t, int32_t node) noexcept nogil
cdef void radix_stamp_at(Radix* t, int32_t node, int64_t tick) noexcept nogil
cdef void radix_lock(Radix* t, int32_t node, int32_t stop) noexcept nogil
cdef void radix_unlock(Radix* t, int32_t node) noexcept nogil
cdef void radix_release(Radix* t, int32_t node, int32_t held) noexcept nogil
cdef int64_t radix_evict(Radix* t, int64_t tokens) noexcept nogil
cdef int64_t radix_foreign(Radix* t, int32_t node, int64_t first, uint64_t owner) noexcept nogil
cdef void radix_path_slots(Radix* t, int32_t node, int32_t* out) noexcept nogil
cdef int radix_tell(Radix* t, int32_t first) noexcept nogil
cdef bint tokens_take(Radix* t, int64_t count, int32_t* out) noexcept nogil
cdef void tokens_give(Radix* t, int32_t* slots, int64_t count) noexcept nogil


cdef inline bint chain_open(Radix* t, int32_t node, uint64_t owner) noexcept nogil:
    """Whether a node is a chain that its only holder may lengthen; with a score, nobody else has ever held it."""
    cdef Node* x = &t.nodes[node]
    return (x.chain and x.lock == 1 and x.children == 0 and x.owner == owner
            and (t.ranks.score.ask == NULL or t.ranks.of[node].releases == 0))
