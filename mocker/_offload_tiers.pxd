# Data dictionary of the pools below the GPU: block names, sets of them, where segments come from, and the tiers.
from mocker._common cimport NIL, int32_t, int64_t, uint8_t, uint64_t


cdef struct Block:                 # one block of a segment
    uint64_t key
    int32_t at                     # offset in the segment


cdef struct BlockSet:              # open addressing
    Block* items
    uint8_t* full
    uint64_t mask                  # places - 1
    int64_t used


cdef struct Origin:                # what a segment's first block follows
    uint64_t key                   # the segment
    uint64_t parent_key
    uint64_t local                 # hash of its tokens alone (real tokens only)
    int32_t parent_at              # NIL: nothing, it begins a sequence


cdef struct Catalog:               # every segment that was ever resident
    Origin* items
    int64_t cap
    int64_t used
    int32_t* table                 # place -> item
    uint64_t mask


cdef struct Node:                  # a block of a tier, or one that only stands for itself in the lineage graph
    uint64_t key
    int32_t at
    int32_t pins                   # transfers that keep it
    int64_t tick                   # number of its insertion among the evictable ones
    int32_t parent                 # node of the block before it, NIL while not linked; of a free node: next free one
    int32_t children               # nodes linked to it
    int32_t heap_at                # place in `heap` while it may be evicted next
    uint8_t resident
    uint8_t inactive               # resident without pins


cdef struct Tier:
    int64_t capacity               # blocks
    int64_t free                   # slots with nothing in them
    int64_t inactive
    int64_t pinned                 # blocks with pins
    int64_t reserved               # slots promised
    int64_t peak                   # most slots ever in use
    int64_t next_tick
    int64_t evictions
    Node* nodes
    int64_t nodes_cap
    int64_t nodes_used
    int32_t free_node
    uint64_t* table                # open addressing over (key, at): half a hash and the node
    uint64_t mask
    int64_t table_used
    int32_t* heap                  # evictable blocks without children, a binary heap by tick
    int64_t heap_cap
    int64_t heap_used
    bint log                       # note what came and went
    Block* changes                 # [changes_used]; ~at: it was removed
    int64_t changes_cap
    int64_t changes_used
    Catalog* catalog
    int error                      # ErrorCode


cdef bint set_has(BlockSet* s, Block b) noexcept nogil
cdef bint set_add(BlockSet* s, Block b) noexcept nogil
cdef void set_discard(BlockSet* s, Block b) noexcept nogil
cdef void set_free(BlockSet* s) noexcept nogil
cdef bint catalog_add(Catalog* c, uint64_t key, uint64_t parent_key, int32_t parent_at, uint64_t local) noexcept nogil
cdef Origin* catalog_find(Catalog* c, uint64_t key) noexcept nogil
cdef void catalog_free(Catalog* c) noexcept nogil
cdef void tier_init(Tier* t, int64_t capacity, Catalog* catalog, bint log) noexcept nogil
cdef void tier_free(Tier* t) noexcept nogil
cdef bint tier_has(Tier* t, Block b) noexcept nogil
cdef bint tier_idle(Tier* t, Block b) noexcept nogil
cdef bint tier_promise(Tier* t, int64_t count) noexcept nogil
cdef bint tier_take(Tier* t, int64_t count) noexcept nogil
cdef void tier_register(Tier* t, Block b) noexcept nogil
cdef void tier_add(Tier* t, Block b) noexcept nogil
cdef bint tier_pin(Tier* t, Block b) noexcept nogil
cdef void tier_unpin(Tier* t, Block b) noexcept nogil


cdef inline uint64_t block_mix(Block b) noexcept nogil:
    cdef uint64_t x = (b.key + <uint64_t><int64_t>b.at * <uint64_t>0x9E3779B97F4A7C15) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 31)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 32)


cdef inline bint same_block(Block a, Block b) noexcept nogil:
    return a.key == b.key and a.at == b.at
