"""Eviction orders of the inactive pool, for other compiled modules: plain structs, no GIL, nothing allocates or fails.

A slot is a physical block, 0 <= slot < capacity. A slot is in the order at most once; the caller keeps to that.
"""
from libc.stdint cimport int8_t, int32_t, uint32_t, uint64_t

cdef enum:
    BY_LINEAGE = 0    # leaves first, among them the oldest insertion
    BY_LRU = 1        # oldest insertion
    BY_MULTI_LRU = 2  # least frequently used level first, inside a level the oldest insertion

    NODE_GHOST = -1   # LineageNode.slot: a parent that is not inactive but has inactive descendants
    NODE_FREE = -2    # LineageNode.slot: unused

# 128-bit identity of a block content, as two words (dynamo-tokens PositionalLineageHash).
ctypedef struct Plh:
    uint64_t low
    uint64_t high

# ---- lineage: a forest of inactive blocks and ghosts

ctypedef struct LineageNode:
    uint64_t key         # own sequence hash, cut to the width that a child stores of it
    uint64_t tick        # number of the insertion; smaller = evicted earlier
    int32_t position     # block index in its sequence
    int32_t slot         # physical block, or NODE_GHOST, NODE_FREE
    int32_t parent       # node of the parent, -1 = root or not linked; while NODE_FREE: next free node
    int32_t n_children   # nodes that name this one as parent
    int32_t heap_index   # place in heap while evictable, else -1
    int32_t indexed      # 1 if the index leads here; 0 for the second of two contents with equal (position, key)

ctypedef struct Lineage:
    LineageNode* nodes   # [n_nodes]
    int32_t* index       # [index_mask + 1] open addressing over (position, key): node, or -1
    int32_t* heap        # [n_nodes] evictable nodes, a binary heap by tick
    int32_t* node_of     # [capacity] slot -> node, -1 = not in the order
    uint32_t index_mask  # table size - 1, a power of two minus one
    int32_t n_heap       # nodes in heap
    int32_t free_node    # head of the list of unused nodes, -1 = none
    uint64_t next_tick   # tick of the next insertion

# ---- LRU and multi-LRU: linked lists through the slots

ctypedef struct SlotLists:
    int32_t* previous    # [capacity] older neighbour, -1 = head
    int32_t* next        # [capacity] newer neighbour, -1 = tail
    int8_t* level        # [capacity] list of the slot, -1 = not in the order
    int32_t[4] head      # oldest slot of each list, -1 = empty
    int32_t[4] tail      # newest slot of each list, -1 = empty

# Count-min sketch of accesses with 4-bit counters, halved from time to time.
ctypedef struct Sketch:
    uint64_t* table      # [n_words] sixteen counters a word
    uint64_t n_words     # 0 = no sketch
    uint32_t size        # increments since the last halving, corrected by it
    uint32_t sample      # size at which all counters are halved

ctypedef struct Eviction:
    int32_t backend      # BY_LINEAGE, BY_LRU or BY_MULTI_LRU
    int32_t n            # slots in the order
    Lineage lineage
    SlotLists lists
    Sketch sketch

cdef void evict_insert(Eviction* order, int32_t slot, Plh plh) noexcept nogil  # slot became inactive, newest
cdef void evict_remove(Eviction* order, int32_t slot) noexcept nogil           # slot is in use again
cdef int32_t evict_pop(Eviction* order) noexcept nogil                         # take the victim out; -1 = empty
cdef bint evict_has(Eviction* order, int32_t slot) noexcept nogil
cdef void evict_touch(Eviction* order, Plh plh) noexcept nogil  # an access: a new registration, a look-up that hit
cdef uint32_t evict_frequency(Eviction* order, Plh plh) noexcept nogil         # estimated accesses, 0..15

cdef Plh plh_from_int(object value)
cdef int plh_position(Plh plh) noexcept nogil
cdef uint64_t plh_hash(Plh plh) noexcept nogil


cdef class EvictionOrder:
    cdef Eviction c
    cdef readonly Py_ssize_t capacity
    cdef object _slabs
