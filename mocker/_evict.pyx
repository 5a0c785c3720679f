"""Eviction orders of the inactive pool: which cached block makes room for a new one.

Answers to kvbm-logical 1.3.0 `pools/inactive/backends/` (lineage with the tick policy, lru, multi_lru), `tinylfu.rs`
and the defaults of `manager/builder.rs`.

- Lineage: every insertion takes the next tick. A block is evictable while no node of the forest names it as parent;
  the victim is the evictable block with the smallest tick. A block that leaves while it has children stays behind as a
  ghost, and a child whose parent is not there makes one; a ghost goes with its last child. O(log evictable) a step.
- LRU: the oldest insertion. O(1).
- Multi-LRU: four LRU lists by estimated number of accesses at insertion (below 3, 8, 15, or more), the coldest list
  first. The estimate is a count-min sketch with capacity / 4 words of sixteen 4-bit counters, four XXH3 hashes a key,
  halved after 10 * capacity increments. Counters, collisions and halving are equal to the reference's. O(1).

Two contents that agree in position and cut hash but not in the whole identity stop the reference with a panic; here
the second is a root of its own that no child finds.

Memory is bounded by the capacity: a ghost stands for a block in use or for the absent parent of a child, so there are
never more than two nodes a slot.
"""
from libc.stdint cimport int8_t, int32_t, uint32_t, uint64_t

import numpy as np

from mocker._hash cimport hash16_of_secret

BACKENDS = ("lineage", "lru", "multi_lru")

# ---- identity -------------------------------------------------------------------------------------------------------
# [mode 2][position 8/16/24][sequence hash 64][parent's hash 54/46/38], modes 0/1/2 for positions below 2^8, 2^16, 2^24


cdef inline int _parent_bits(int position) noexcept nogil:
    return 54 if position < 1 << 8 else 46 if position < 1 << 16 else 38


cdef inline int _stored_bits(Plh plh) noexcept nogil:
    return 54 - 8 * <int>(plh.high >> 62)


cdef inline uint64_t _low_bits(uint64_t value, int bits) noexcept nogil:
    return value & ((<uint64_t>1 << bits) - 1)


cdef int plh_position(Plh plh) noexcept nogil:
    cdef int bits = _stored_bits(plh)
    return <int>_low_bits(plh.high >> bits, 62 - bits)


cdef uint64_t plh_hash(Plh plh) noexcept nogil:
    cdef int bits = _stored_bits(plh)
    return (plh.low >> bits) | (plh.high << (64 - bits))


cdef Plh plh_from_int(object value):
    """Split a 128-bit identity; OverflowError if it does not fit, ValueError if its mode is none of 0, 1, 2."""
    cdef Plh plh
    if value >> 126 == 3:
        raise ValueError("a positional lineage hash has mode 0, 1 or 2, got 3")
    plh.low = value & 0xFFFFFFFFFFFFFFFF
    plh.high = value >> 64
    return plh


# ---- lineage --------------------------------------------------------------------------------------------------------

cdef inline uint32_t _home(const Lineage* g, int32_t position, uint64_t key) noexcept nogil:
    """First place of the index where (position, key) may be."""
    cdef uint64_t mixed = (key ^ (<uint64_t>position << 40)) * <uint64_t>0x9E3779B97F4A7C15ULL
    return <uint32_t>(mixed >> 32) & g.index_mask


cdef int32_t _find(const Lineage* g, int32_t position, uint64_t key) noexcept nogil:
    cdef uint32_t place = _home(g, position, key)
    cdef int32_t node = g.index[place]
    while node >= 0 and (g.nodes[node].key != key or g.nodes[node].position != position):
        place = (place + 1) & g.index_mask
        node = g.index[place]
    return node


cdef void _index_add(Lineage* g, int32_t node) noexcept nogil:
    cdef uint32_t place = _home(g, g.nodes[node].position, g.nodes[node].key)
    while g.index[place] >= 0:
        place = (place + 1) & g.index_mask
    g.index[place] = node


cdef void _index_remove(Lineage* g, int32_t node) noexcept nogil:
    """Take a node out and close the gap, so that no look-up stops early."""
    cdef uint32_t hole = _home(g, g.nodes[node].position, g.nodes[node].key)
    cdef uint32_t place, home
    cdef int32_t other
    while g.index[hole] != node:
        hole = (hole + 1) & g.index_mask
    place = hole
    while True:
        place = (place + 1) & g.index_mask
        other = g.index[place]
        if other < 0:
            break
        home = _home(g, g.nodes[other].position, g.nodes[other].key)
        if ((place - home) & g.index_mask) >= ((place - hole) & g.index_mask):
            g.index[hole] = other
            hole = place
    g.index[hole] = -1


cdef void _sift_up(Lineage* g, int32_t i) noexcept nogil:
    cdef int32_t node = g.heap[i]
    cdef uint64_t tick = g.nodes[node].tick
    cdef int32_t up
    while i > 0:
        up = (i - 1) >> 1
        if g.nodes[g.heap[up]].tick < tick:
            break
        g.heap[i] = g.heap[up]
        g.nodes[g.heap[i]].heap_index = i
        i = up
    g.heap[i] = node
    g.nodes[node].heap_index = i


cdef void _sift_down(Lineage* g, int32_t i) noexcept nogil:
    cdef int32_t node = g.heap[i]
    cdef uint64_t tick = g.nodes[node].tick
    cdef int32_t down = 2 * i + 1
    while down < g.n_heap:
        if down + 1 < g.n_heap and g.nodes[g.heap[down + 1]].tick < g.nodes[g.heap[down]].tick:
            down += 1
        if g.nodes[g.heap[down]].tick > tick:
            break
        g.heap[i] = g.heap[down]
        g.nodes[g.heap[i]].heap_index = i
        i = down
        down = 2 * i + 1
    g.heap[i] = node
    g.nodes[node].heap_index = i


cdef void _heap_add(Lineage* g, int32_t node) noexcept nogil:
    g.heap[g.n_heap] = node
    g.n_heap += 1
    _sift_up(g, g.n_heap - 1)


cdef void _heap_remove(Lineage* g, int32_t node) noexcept nogil:
    cdef int32_t i = g.nodes[node].heap_index
    if i < 0:
        return
    g.nodes[node].heap_index = -1
    g.n_heap -= 1
    if i < g.n_heap:
        g.heap[i] = g.heap[g.n_heap]
        g.nodes[g.heap[i]].heap_index = i
        _sift_up(g, i)
        _sift_down(g, g.nodes[g.heap[i]].heap_index)


cdef int32_t _new_node(Lineage* g, int32_t slot, int32_t position, uint64_t key) noexcept nogil:
    cdef int32_t node = g.free_node
    cdef LineageNode* x = &g.nodes[node]
    g.free_node = x.parent
    x.slot, x.position, x.key = slot, position, key
    x.parent = x.heap_index = -1
    x.n_children = 0
    x.indexed = 1
    return node


cdef void _lineage_insert(Lineage* g, int32_t slot, Plh plh) noexcept nogil:
    cdef int32_t position = plh_position(plh)
    cdef uint64_t key = _low_bits(plh_hash(plh), _parent_bits(position + 1))
    cdef uint64_t parent_key
    cdef int32_t node = _find(g, position, key)
    cdef int32_t parent
    cdef LineageNode* x
    if node >= 0 and g.nodes[node].slot == NODE_GHOST:  # the parent that earlier insertions waited for
        g.nodes[node].slot = slot
    elif node >= 0:  # another content under the same key
        node = _new_node(g, slot, position, key)
        g.nodes[node].indexed = 0
    else:
        node = _new_node(g, slot, position, key)
        _index_add(g, node)
    x = &g.nodes[node]
    x.tick = g.next_tick
    g.next_tick += 1
    g.node_of[slot] = node
    if position > 0 and x.parent < 0:
        parent_key = _low_bits(plh.low, _stored_bits(plh))
        parent = _find(g, position - 1, parent_key)
        if parent < 0:
            parent = _new_node(g, NODE_GHOST, position - 1, parent_key)
            _index_add(g, parent)
        x.parent = parent
        g.nodes[parent].n_children += 1
        _heap_remove(g, parent)
    if x.n_children == 0:
        _heap_add(g, node)


cdef void _lineage_remove(Lineage* g, int32_t slot) noexcept nogil:
    """Make the slot's node a ghost, then drop childless ghosts upwards; a block bared by that is evictable again."""
    cdef int32_t node = g.node_of[slot]
    cdef int32_t parent
    g.node_of[slot] = -1
    _heap_remove(g, node)
    g.nodes[node].slot = NODE_GHOST
    while node >= 0 and g.nodes[node].n_children == 0:
        if g.nodes[node].slot >= 0:
            _heap_add(g, node)
            return
        parent = g.nodes[node].parent
        if g.nodes[node].indexed:
            _index_remove(g, node)
        g.nodes[node].slot = NODE_FREE
        g.nodes[node].parent = g.free_node
        g.free_node = node
        node = parent
        if node >= 0:
            g.nodes[node].n_children -= 1


# ---- LRU and multi-LRU ----------------------------------------------------------------------------------------------

cdef void _list_append(SlotLists* lists, int level, int32_t slot) noexcept nogil:
    cdef int32_t last = lists.tail[level]
    lists.level[slot] = level
    lists.previous[slot] = last
    lists.next[slot] = -1
    lists.tail[level] = slot
    if last >= 0:
        lists.next[last] = slot
    else:
        lists.head[level] = slot


cdef void _list_remove(SlotLists* lists, int32_t slot) noexcept nogil:
    cdef int level = lists.level[slot]
    cdef int32_t before = lists.previous[slot]
    cdef int32_t after = lists.next[slot]
    lists.level[slot] = -1
    if before >= 0:
        lists.next[before] = after
    else:
        lists.head[level] = after
    if after >= 0:
        lists.previous[after] = before
    else:
        lists.tail[level] = before


cdef inline int _bit_count(uint64_t v) noexcept nogil:
    v = v - ((v >> 1) & <uint64_t>0x5555555555555555ULL)
    v = (v & <uint64_t>0x3333333333333333ULL) + ((v >> 2) & <uint64_t>0x3333333333333333ULL)
    v = (v + (v >> 4)) & <uint64_t>0x0F0F0F0F0F0F0F0FULL
    return <int>((v * <uint64_t>0x0101010101010101ULL) >> 56)


cdef void _sketch_halve(Sketch* s) noexcept nogil:
    """Halve every counter. size becomes half of it minus a quarter of the counters that lost a half, at least 0."""
    cdef uint64_t i
    cdef uint32_t odd = 0
    for i in range(s.n_words):
        odd += _bit_count(s.table[i] & <uint64_t>0x1111111111111111ULL)
        s.table[i] = (s.table[i] >> 1) & <uint64_t>0x7777777777777777ULL
    s.size = (s.size >> 1) - (odd >> 2) if s.size >> 1 > odd >> 2 else 0


cdef void evict_touch(Eviction* order, Plh plh) noexcept nogil:
    cdef Sketch* s = &order.sketch
    cdef uint64_t h, shift
    cdef uint64_t* word
    cdef bint added = False
    cdef int row
    if s.n_words == 0:
        return
    for row in range(4):
        h = hash16_of_secret(plh.low, plh.high, row)
        word = &s.table[h % s.n_words]
        shift = 4 * (h & 15)
        if (word[0] >> shift) & 15 != 15:  # a full counter stays
            word[0] += <uint64_t>1 << shift
            added = True
    if added:
        s.size += 1
        if s.size >= s.sample:
            _sketch_halve(s)


cdef uint32_t evict_frequency(Eviction* order, Plh plh) noexcept nogil:
    cdef Sketch* s = &order.sketch
    cdef uint32_t count, least = 15
    cdef uint64_t h
    cdef int row
    if s.n_words == 0:
        return 0
    for row in range(4):
        h = hash16_of_secret(plh.low, plh.high, row)
        count = <uint32_t>((s.table[h % s.n_words] >> (4 * (h & 15))) & 15)
        least = min(least, count)
    return least


# ---- the order ------------------------------------------------------------------------------------------------------

cdef void evict_insert(Eviction* order, int32_t slot, Plh plh) noexcept nogil:
    cdef uint32_t count
    order.n += 1
    if order.backend == BY_LINEAGE:
        _lineage_insert(&order.lineage, slot, plh)
        return
    count = evict_frequency(order, plh)  # 0 without a sketch: plain LRU uses the first list only
    _list_append(&order.lists, (count >= 3) + (count >= 8) + (count >= 15), slot)


cdef void evict_remove(Eviction* order, int32_t slot) noexcept nogil:
    order.n -= 1
    if order.backend == BY_LINEAGE:
        _lineage_remove(&order.lineage, slot)
    else:
        _list_remove(&order.lists, slot)


cdef int32_t evict_pop(Eviction* order) noexcept nogil:
    cdef int32_t slot = -1
    cdef int level
    if order.backend == BY_LINEAGE:
        if order.lineage.n_heap > 0:
            slot = order.lineage.nodes[order.lineage.heap[0]].slot
    else:
        for level in range(4):
            slot = order.lists.head[level]
            if slot >= 0:
                break
    if slot >= 0:
        evict_remove(order, slot)
    return slot


cdef bint evict_has(Eviction* order, int32_t slot) noexcept nogil:
    if order.backend == BY_LINEAGE:
        return order.lineage.node_of[slot] >= 0
    return order.lists.level[slot] >= 0


cdef _make_lineage(EvictionOrder order):
    n_nodes = 2 * order.capacity + 1  # one more: an insertion makes a ghost before the last one goes
    size = 1 << (2 * n_nodes - 1).bit_length()
    nodes = np.zeros(n_nodes, dtype=np.dtype([
        ("key", np.uint64), ("tick", np.uint64), ("position", np.int32), ("slot", np.int32), ("parent", np.int32),
        ("n_children", np.int32), ("heap_index", np.int32), ("indexed", np.int32)]))
    nodes["slot"] = NODE_FREE
    nodes["parent"] = np.arange(1, n_nodes + 1)
    nodes["parent"][n_nodes - 1] = -1
    index, node_of = np.full(size, -1, dtype=np.int32), np.full(order.capacity, -1, dtype=np.int32)
    heap = np.zeros(n_nodes, dtype=np.int32)
    cdef LineageNode[::1] node_view = nodes
    cdef int32_t[::1] index_view = index, heap_view = heap, node_of_view = node_of
    order.c.lineage.nodes, order.c.lineage.index = &node_view[0], &index_view[0]
    order.c.lineage.heap, order.c.lineage.node_of = &heap_view[0], &node_of_view[0]
    order.c.lineage.index_mask = size - 1
    order.c.lineage.n_heap = order.c.lineage.free_node = 0
    order.c.lineage.next_tick = 0
    order._slabs = {"nodes": nodes, "index": index, "heap": heap, "node_of": node_of}


cdef _make_lists(EvictionOrder order):
    cdef int32_t[::1] previous_view, next_view
    cdef int8_t[::1] level_view
    cdef uint64_t[::1] table_view
    previous, following = np.full((2, order.capacity), -1, dtype=np.int32)
    level = np.full(order.capacity, -1, dtype=np.int8)
    previous_view, next_view, level_view = previous, following, level
    order.c.lists.previous, order.c.lists.next = &previous_view[0], &next_view[0]
    order.c.lists.level = &level_view[0]
    for i in range(4):
        order.c.lists.head[<int>i] = order.c.lists.tail[<int>i] = -1
    order._slabs = {"previous": previous, "next": following, "level": level}
    if order.c.backend == BY_MULTI_LRU:
        table = np.zeros(max(1, order.capacity // 4), dtype=np.uint64)
        table_view = table
        order.c.sketch.table = &table_view[0]
        order.c.sketch.n_words = table.size
        order.c.sketch.size = 0
        order.c.sketch.sample = min(10 * order.capacity, 0xFFFFFFFF)
        order._slabs["table"] = table


cdef class EvictionOrder:
    """Owner of an eviction order, and its Python face.

    Parameters
    ----------
    capacity : int
        Slots of the pool, 1..=2**29.
    backend : {"lineage", "lru", "multi_lru"}
        Which order.

    Raises
    ------
    ValueError
        If an argument is out of range.

    Notes
    -----
    Compiled callers take the address of `c` and call the functions of `_evict.pxd`; those check nothing.
    """

    def __cinit__(self, capacity, backend="lineage"):
        if not 1 <= capacity <= 1 << 29:
            raise ValueError(f"capacity must be in 1..={1 << 29}, got {capacity}")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.capacity = capacity
        self.c.backend = BACKENDS.index(backend)
        self.c.n = 0
        self.c.sketch.n_words = 0
        if self.c.backend == BY_LINEAGE:
            _make_lineage(self)
        else:
            _make_lists(self)

    def _check(self, slot, present):
        if not 0 <= slot < self.capacity:
            raise ValueError(f"slot must be in 0..{self.capacity}, got {slot}")
        if evict_has(&self.c, slot) != present:
            raise ValueError(f"slot {slot} is {'not' if present else 'already'} in the order")

    @property
    def backend(self):
        """Name of the order."""
        return BACKENDS[self.c.backend]

    @property
    def slabs(self):
        """The arrays that hold the state, by field name of the .pxd; look, do not write."""
        return dict(self._slabs)

    def insert(self, slot, plh):
        """Put a slot in as the newest; `plh` is its 128-bit identity as an int. ValueError if it is in already."""
        cdef Plh identity = plh_from_int(plh)
        self._check(slot, False)
        evict_insert(&self.c, slot, identity)

    def remove(self, slot):
        """Take a slot out because it is in use again. ValueError if it is not in the order."""
        self._check(slot, True)
        evict_remove(&self.c, slot)

    def pop(self):
        """Take out and return the next victim, or None if the order is empty."""
        cdef int32_t slot = evict_pop(&self.c)
        return None if slot < 0 else slot

    def touch(self, plh):
        """Count an access to a content; only multi-LRU looks at it."""
        evict_touch(&self.c, plh_from_int(plh))

    def frequency(self, plh):
        """Return the estimated number of accesses, 0..15; 0 for the other orders."""
        return evict_frequency(&self.c, plh_from_int(plh))

    def __len__(self):
        return self.c.n

    def __contains__(self, slot):
        return 0 <= slot < self.capacity and evict_has(&self.c, slot)
