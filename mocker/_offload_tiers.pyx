# cython: language_level=3
"""The block pools below the GPU: which blocks a tier holds, who keeps them, and which one makes room next.

Answers to the pools of kvbm-logical with their lineage order: of the evictable blocks without an evictable descendant
the one that became evictable first goes first. Unlike on the GPU, a block's predecessor need not be there, so blocks
are kept one by one in a graph in which an absent predecessor is a ghost. A slot is free, in flight (taken, nothing
registered yet), pinned or inactive. Costs: look-up O(1), pin, unpin and eviction O(log blocks).
"""
from libc.stdlib cimport calloc, free, malloc

from mocker._common cimport ERR_MEMORY, NIL, grown, int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef uint64_t EMPTY = <uint64_t>0xFFFFFFFFFFFFFFFF     # in a table of nodes


# ---- sets of blocks ---------------------------------------------------------------------------------------------

cdef bint set_has(BlockSet* s, Block b) noexcept nogil:
    cdef uint64_t at
    if s.used == 0:
        return False
    at = block_mix(b) & s.mask
    while s.full[at]:
        if same_block(s.items[at], b):
            return True
        at = (at + 1) & s.mask
    return False


cdef bint set_grow(BlockSet* s) noexcept nogil:
    cdef uint64_t places = 2 * (s.mask + 1) if s.items != NULL else 64
    cdef uint64_t i, at
    cdef Block* items = <Block*>malloc(places * sizeof(Block))
    cdef uint8_t* full = <uint8_t*>calloc(places, 1)
    if items == NULL or full == NULL:
        free(items)
        free(full)
        return False
    if s.items != NULL:
        for i in range(s.mask + 1):
            if s.full[i]:
                at = block_mix(s.items[i]) & (places - 1)
                while full[at]:
                    at = (at + 1) & (places - 1)
                items[at], full[at] = s.items[i], 1
    free(s.items)
    free(s.full)
    s.items, s.full, s.mask = items, full, places - 1
    return True


cdef bint set_add(BlockSet* s, Block b) noexcept nogil:
    """Add a block that may be there already; false if memory is short."""
    cdef uint64_t at
    if (s.items == NULL or 2 * s.used > <int64_t>s.mask) and not set_grow(s):
        return False
    at = block_mix(b) & s.mask
    while s.full[at]:
        if same_block(s.items[at], b):
            return True
        at = (at + 1) & s.mask
    s.items[at], s.full[at] = b, 1
    s.used += 1
    return True


cdef void set_discard(BlockSet* s, Block b) noexcept nogil:
    cdef uint64_t hole, at, wants
    if not set_has(s, b):
        return
    hole = block_mix(b) & s.mask
    while not same_block(s.items[hole], b):
        hole = (hole + 1) & s.mask
    at = hole
    while True:
        at = (at + 1) & s.mask
        if not s.full[at]:
            break
        wants = block_mix(s.items[at]) & s.mask
        if ((at - wants) & s.mask) >= ((at - hole) & s.mask):
            s.items[hole] = s.items[at]
            hole = at
    s.full[hole] = 0
    s.used -= 1


cdef void set_free(BlockSet* s) noexcept nogil:
    free(s.items)
    free(s.full)


# ---- where segments come from -----------------------------------------------------------------------------------

cdef inline uint64_t catalog_home(Catalog* c, uint64_t key) noexcept nogil:
    return ((key * <uint64_t>0x9E3779B97F4A7C15) >> 24) & c.mask


cdef Origin* catalog_find(Catalog* c, uint64_t key) noexcept nogil:
    cdef uint64_t at
    if c.used == 0:
        return NULL
    at = catalog_home(c, key)
    while c.table[at] != NIL:
        if c.items[c.table[at]].key == key:
            return &c.items[c.table[at]]
        at = (at + 1) & c.mask
    return NULL


cdef bint catalog_add(Catalog* c, uint64_t key, uint64_t parent_key, int32_t parent_at, uint64_t local) noexcept nogil:
    """Note a segment, if it is new; false if memory is short."""
    cdef uint64_t places, at
    cdef int64_t i
    cdef int32_t* table
    cdef void* moved
    cdef Origin* o
    if catalog_find(c, key) != NULL:
        return True
    moved = grown(c.items, &c.cap, c.used + 1, sizeof(Origin))
    if moved == NULL:
        return False
    c.items = <Origin*>moved
    if c.table == NULL or 2 * c.used > <int64_t>c.mask:
        places = 2 * (c.mask + 1) if c.table != NULL else 64
        table = <int32_t*>malloc(places * sizeof(int32_t))
        if table == NULL:
            return False
        for i in range(<int64_t>places):
            table[i] = NIL
        free(c.table)
        c.table, c.mask = table, places - 1
        for i in range(c.used):
            at = catalog_home(c, c.items[i].key)
            while table[at] != NIL:
                at = (at + 1) & c.mask
            table[at] = <int32_t>i
    o = &c.items[c.used]
    o.key, o.parent_key, o.parent_at, o.local = key, parent_key, parent_at, local
    at = catalog_home(c, key)
    while c.table[at] != NIL:
        at = (at + 1) & c.mask
    c.table[at] = <int32_t>c.used
    c.used += 1
    return True


cdef void catalog_free(Catalog* c) noexcept nogil:
    free(c.items)
    free(c.table)


# ---- nodes ------------------------------------------------------------------------------------------------------

cdef inline uint64_t entry_of(Block b, int32_t node) noexcept nogil:
    """What the table holds of a node: half its hash, so that most look-ups touch no other node, and its number."""
    return (block_mix(b) << 32) | <uint64_t><uint32_t>node


cdef int32_t node_find(Tier* t, Block b) noexcept nogil:
    cdef uint64_t code, at, entry
    cdef int32_t node
    if t.table_used == 0:
        return NIL
    code = block_mix(b) & <uint64_t>0xFFFFFFFF
    at = code & t.mask
    while True:
        entry = t.table[at]
        if entry == EMPTY:
            return NIL
        if entry >> 32 == code:
            node = <int32_t>(entry & <uint64_t>0xFFFFFFFF)
            if t.nodes[node].key == b.key and t.nodes[node].at == b.at:
                return node
        at = (at + 1) & t.mask


cdef bint table_grow(Tier* t) noexcept nogil:
    cdef uint64_t places = 2 * (t.mask + 1) if t.table != NULL else 64
    cdef uint64_t i, at
    cdef uint64_t* table = <uint64_t*>malloc(places * sizeof(uint64_t))
    if table == NULL:
        return False
    for i in range(places):
        table[i] = EMPTY
    if t.table != NULL:
        for i in range(t.mask + 1):
            if t.table[i] != EMPTY:
                at = (t.table[i] >> 32) & (places - 1)
                while table[at] != EMPTY:
                    at = (at + 1) & (places - 1)
                table[at] = t.table[i]
    free(t.table)
    t.table, t.mask = table, places - 1
    return True


cdef int32_t node_get(Tier* t, Block b) noexcept nogil:
    """The block's node, made if there is none."""
    cdef int32_t node = node_find(t, b)
    cdef uint64_t at
    cdef Node* x
    cdef void* moved
    if node != NIL:
        return node
    if (t.table == NULL or 2 * t.table_used > <int64_t>t.mask) and not table_grow(t):
        t.error = ERR_MEMORY
        return 0
    node = t.free_node
    if node != NIL:
        t.free_node = t.nodes[node].parent
    else:
        moved = grown(t.nodes, &t.nodes_cap, t.nodes_used + 1, sizeof(Node))
        if moved != NULL:
            t.nodes = <Node*>moved
            moved = grown(t.heap, &t.heap_cap, t.nodes_used + 1, sizeof(int32_t))
        if moved == NULL:
            t.error = ERR_MEMORY
            return 0
        t.heap = <int32_t*>moved
        node = <int32_t>t.nodes_used
        t.nodes_used += 1
    x = &t.nodes[node]
    x.key, x.at, x.pins, x.tick, x.parent, x.children, x.heap_at = b.key, b.at, 0, 0, NIL, 0, NIL
    x.resident = x.inactive = 0
    at = block_mix(b) & <uint64_t>0xFFFFFFFF & t.mask
    while t.table[at] != EMPTY:
        at = (at + 1) & t.mask
    t.table[at] = entry_of(b, node)
    t.table_used += 1
    return node


cdef void node_drop(Tier* t, int32_t node) noexcept nogil:
    """Forget a node; later entries of its cluster move up."""
    cdef Block b
    cdef uint64_t hole, at, wants, entry
    b.key, b.at = t.nodes[node].key, t.nodes[node].at
    entry = entry_of(b, node)
    hole = (entry >> 32) & t.mask
    while t.table[hole] != entry:
        hole = (hole + 1) & t.mask
    at = hole
    while True:
        at = (at + 1) & t.mask
        if t.table[at] == EMPTY:
            break
        wants = (t.table[at] >> 32) & t.mask
        if ((at - wants) & t.mask) >= ((at - hole) & t.mask):
            t.table[hole] = t.table[at]
            hole = at
    t.table[hole] = EMPTY
    t.table_used -= 1
    t.nodes[node].parent = t.free_node
    t.free_node = node


# ---- who is evicted next ----------------------------------------------------------------------------------------

cdef void sift_up(Tier* t, int64_t i) noexcept nogil:
    cdef int32_t node = t.heap[i]
    cdef int64_t tick = t.nodes[node].tick, up
    while i > 0:
        up = (i - 1) >> 1
        if t.nodes[t.heap[up]].tick < tick:
            break
        t.heap[i] = t.heap[up]
        t.nodes[t.heap[i]].heap_at = <int32_t>i
        i = up
    t.heap[i] = node
    t.nodes[node].heap_at = <int32_t>i


cdef void sift_down(Tier* t, int64_t i) noexcept nogil:
    cdef int32_t node = t.heap[i]
    cdef int64_t tick = t.nodes[node].tick, down = 2 * i + 1
    while down < t.heap_used:
        if down + 1 < t.heap_used and t.nodes[t.heap[down + 1]].tick < t.nodes[t.heap[down]].tick:
            down += 1
        if t.nodes[t.heap[down]].tick > tick:
            break
        t.heap[i] = t.heap[down]
        t.nodes[t.heap[i]].heap_at = <int32_t>i
        i = down
        down = 2 * i + 1
    t.heap[i] = node
    t.nodes[node].heap_at = <int32_t>i


cdef inline void heap_add(Tier* t, int32_t node) noexcept nogil:
    t.heap[t.heap_used] = node
    t.heap_used += 1
    sift_up(t, t.heap_used - 1)


cdef void heap_remove(Tier* t, int32_t node) noexcept nogil:
    cdef int32_t i = t.nodes[node].heap_at
    if i < 0:
        return
    t.nodes[node].heap_at = NIL
    t.heap_used -= 1
    if i < t.heap_used:
        t.heap[i] = t.heap[t.heap_used]
        t.nodes[t.heap[i]].heap_at = i
        sift_up(t, i)
        sift_down(t, t.nodes[t.heap[i]].heap_at)


cdef void node_insert(Tier* t, int32_t node) noexcept nogil:
    """A resident block without pins: it may be evicted, as the newest, unless something below it may."""
    cdef Origin* origin
    cdef Block above
    cdef int32_t parent
    t.nodes[node].inactive = 1
    t.nodes[node].tick = t.next_tick
    t.next_tick += 1
    t.inactive += 1
    if t.nodes[node].parent == NIL:
        above.at = NIL
        if t.nodes[node].at > 0:
            above.key, above.at = t.nodes[node].key, t.nodes[node].at - 1
        else:
            origin = catalog_find(t.catalog, t.nodes[node].key)
            if origin != NULL and origin.parent_at != NIL:
                above.key, above.at = origin.parent_key, origin.parent_at
        if above.at != NIL:
            parent = node_get(t, above)
            t.nodes[node].parent = parent
            t.nodes[parent].children += 1
            heap_remove(t, parent)
    if t.nodes[node].children == 0:
        heap_add(t, node)


cdef void node_remove(Tier* t, int32_t node) noexcept nogil:
    """An evictable block is so no more. Ghosts without children go, upwards; a block bared by that may be evicted."""
    cdef int32_t parent
    t.nodes[node].inactive = 0
    t.inactive -= 1
    heap_remove(t, node)
    while not t.nodes[node].inactive and t.nodes[node].children == 0:
        parent = t.nodes[node].parent
        t.nodes[node].parent = NIL
        if not t.nodes[node].resident:
            node_drop(t, node)
        if parent == NIL:
            return
        node = parent
        t.nodes[node].children -= 1
    if t.nodes[node].inactive and t.nodes[node].children == 0:
        heap_add(t, node)


cdef inline void node_evict(Tier* t, int32_t node) noexcept nogil:
    """Take out the first of the eviction order. Most often its predecessor is the next one."""
    cdef int32_t parent = t.nodes[node].parent
    t.nodes[node].resident = 0
    if parent == NIL or not t.nodes[parent].inactive or t.nodes[parent].children != 1:
        node_remove(t, node)
        return
    t.nodes[node].inactive = 0
    t.inactive -= 1
    t.nodes[parent].children = 0
    node_drop(t, node)
    t.heap[0] = parent
    t.nodes[parent].heap_at = 0
    sift_down(t, 0)


# ---- the tier ---------------------------------------------------------------------------------------------------

cdef void tier_init(Tier* t, int64_t capacity, Catalog* catalog, bint log) noexcept nogil:
    """An empty tier in zeroed memory."""
    t.capacity = t.free = capacity
    t.catalog = catalog
    t.log = log
    t.free_node = NIL


cdef void tier_free(Tier* t) noexcept nogil:
    free(t.nodes)
    free(t.table)
    free(t.heap)
    free(t.changes)


cdef void note(Tier* t, Block b) noexcept nogil:
    cdef void* moved
    if not t.log:
        return
    moved = grown(t.changes, &t.changes_cap, t.changes_used + 1, sizeof(Block))
    if moved == NULL:
        t.error = ERR_MEMORY
        return
    t.changes = <Block*>moved
    t.changes[t.changes_used] = b
    t.changes_used += 1


cdef bint tier_has(Tier* t, Block b) noexcept nogil:
    cdef int32_t node = node_find(t, b)
    return node != NIL and t.nodes[node].resident


cdef bint tier_idle(Tier* t, Block b) noexcept nogil:
    """Whether the block is there and nothing keeps it."""
    cdef int32_t node = node_find(t, b)
    return node != NIL and t.nodes[node].inactive


cdef bint tier_promise(Tier* t, int64_t count) noexcept nogil:
    """Promise slots to a transfer to come, as long as there are as many that could be had."""
    if t.reserved + count > t.free + t.inactive:
        return False
    t.reserved += count
    return True


cdef bint tier_take(Tier* t, int64_t count) noexcept nogil:
    """Take slots, by eviction if need be; all or nothing."""
    cdef int64_t rest
    cdef int32_t node
    cdef Block b
    if count > t.free + t.inactive:
        return False
    rest = count - (count if count < t.free else t.free)
    t.free -= count - rest
    while rest > 0:
        node = t.heap[0]
        b.key, b.at = t.nodes[node].key, ~t.nodes[node].at
        node_evict(t, node)
        note(t, b)
        t.evictions += 1
        rest -= 1
    if t.capacity - t.free > t.peak:
        t.peak = t.capacity - t.free
    return True


cdef void tier_register(Tier* t, Block b) noexcept nogil:
    """A block arrived in a taken slot; it comes with a pin. Is it there already, the slot is free again."""
    cdef int32_t node
    if tier_pin(t, b):
        t.free += 1
        return
    node = node_get(t, b)
    t.nodes[node].resident = 1
    t.nodes[node].pins = 1
    t.pinned += 1
    note(t, b)


cdef void tier_add(Tier* t, Block b) noexcept nogil:
    """`tier_register` and `tier_unpin` in one."""
    cdef int32_t node = node_get(t, b)
    if t.nodes[node].resident:
        t.free += 1
        if t.nodes[node].pins > 0:
            return
        node_remove(t, node)                   # it is the newest again
        node = node_get(t, b)
    else:
        t.nodes[node].resident = 1
        note(t, b)
    node_insert(t, node)


cdef bint tier_pin(Tier* t, Block b) noexcept nogil:
    """Keep a block; false if it is not there."""
    cdef int32_t node = node_find(t, b)
    if node == NIL or not t.nodes[node].resident:
        return False
    t.nodes[node].pins += 1
    if t.nodes[node].pins == 1:
        t.pinned += 1
        node_remove(t, node)
    return True


cdef void tier_unpin(Tier* t, Block b) noexcept nogil:
    cdef int32_t node = node_find(t, b)
    t.nodes[node].pins -= 1
    if t.nodes[node].pins == 0:
        t.pinned -= 1
        node_insert(t, node)
