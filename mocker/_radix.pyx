# cython: language_level=3
"""The SGLang radix cache: a tree of cached pages over a pool of tokens, locks from a node up, LRU eviction of leaves.

Answers to `cache/radix_cache.rs`. Three things make it small, and none of them can be seen from outside:

- Edges are lists of (segment, end), not of tokens, and a page is found by (segment, depth) in one table.
- A visit stamps every node of a root path there; here it stamps the deepest one, and a node takes over the newer
  stamp of a child that is evicted. Only leaves are compared, and a leaf has no child left to hear from.
- Decoding hangs nodes of one page each below one another. While they have one holder they are one node here (a
  `chain`): it is cut between its pages at no cost to the outcome, and evicted page by page from its end.

Which slot a token has matters only where two are compared, so slots stay untold (a node knows whose they are, the
pool how many are free) until events of real tokens need them or one is freed twice. Then `told` is set, for good: free
slots can be numbered in any order, since nobody has seen them.

Costs: match and extend O(nodes and elements walked); lock and unlock O(depth in nodes); evict O(log leaves) a node;
one page more at the end of a chain O(1); memory O(resident). Told: O(tokens) copies on top.
"""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove, memset

from mocker._common cimport ERR_MEMORY, ERR_OK, NIL, grown, int32_t, int64_t, uint32_t, uint64_t
from mocker._radix_ranked cimport ranked_first, ranked_gone, ranked_put, ranked_release
from mocker._ranks cimport rank_cut, ranks_free, ranks_reserve


# ---- hash map ---------------------------------------------------------------------------------------------------

cdef inline uint64_t home(Map* m, uint64_t key, int32_t sub) noexcept nogil:
    cdef uint64_t x = (key ^ (<uint64_t><uint32_t>sub * <uint64_t>0xD6E8FEB86659FD93)) * <uint64_t>0x9E3779B97F4A7C15
    return (x >> 24) & m.mask


cdef int map_resize(Map* m, int64_t places) noexcept nogil:
    cdef uint64_t* keys = <uint64_t*>malloc(places * sizeof(uint64_t))
    cdef int32_t* subs = <int32_t*>malloc(places * sizeof(int32_t))
    cdef int32_t* values = <int32_t*>malloc(places * sizeof(int32_t))
    cdef Map old = m[0]
    cdef uint64_t i, at
    if keys == NULL or subs == NULL or values == NULL:
        free(keys)
        free(subs)
        free(values)
        return ERR_MEMORY
    for i in range(<uint64_t>places):
        values[i] = NIL
    m.keys, m.subs, m.values, m.mask = keys, subs, values, <uint64_t>places - 1
    if old.values != NULL:
        for i in range(old.mask + 1):
            if old.values[i] != NIL:
                at = home(m, old.keys[i], old.subs[i])
                while values[at] != NIL:
                    at = (at + 1) & m.mask
                keys[at], subs[at], values[at] = old.keys[i], old.subs[i], old.values[i]
        map_free(&old)
    return ERR_OK


cdef int map_init(Map* m) noexcept nogil:
    """An empty map in zeroed memory."""
    return map_resize(m, 64)


cdef void map_free(Map* m) noexcept nogil:
    free(m.keys)
    free(m.subs)
    free(m.values)


cdef int32_t map_find(Map* m, uint64_t key, int32_t sub) noexcept nogil:
    """Value of a pair, NIL if it has none."""
    cdef uint64_t at = home(m, key, sub)
    while m.values[at] != NIL:
        if m.keys[at] == key and m.subs[at] == sub:
            return m.values[at]
        at = (at + 1) & m.mask
    return NIL


cdef int map_set(Map* m, uint64_t key, int32_t sub, int32_t value) noexcept nogil:
    """Give a pair a value that is not NIL."""
    cdef uint64_t at = home(m, key, sub)
    while m.values[at] != NIL:
        if m.keys[at] == key and m.subs[at] == sub:
            m.values[at] = value
            return ERR_OK
        at = (at + 1) & m.mask
    if 2 * m.used >= <int64_t>m.mask:
        if map_resize(m, 2 * (<int64_t>m.mask + 1)) != ERR_OK:
            return ERR_MEMORY
        at = home(m, key, sub)
        while m.values[at] != NIL:
            at = (at + 1) & m.mask
    m.keys[at], m.subs[at], m.values[at] = key, sub, value
    m.used += 1
    return ERR_OK


cdef void map_delete(Map* m, uint64_t key, int32_t sub) noexcept nogil:
    """Remove a pair, if it is there; later entries of its cluster move up so that no tombstones are needed."""
    cdef uint64_t at = home(m, key, sub), hole, wants
    while m.values[at] != NIL and (m.keys[at] != key or m.subs[at] != sub):
        at = (at + 1) & m.mask
    if m.values[at] == NIL:
        return
    hole = at
    while True:
        at = (at + 1) & m.mask
        if m.values[at] == NIL:
            break
        wants = home(m, m.keys[at], m.subs[at])
        if ((at - wants) & m.mask) >= ((at - hole) & m.mask):
            m.keys[hole], m.subs[hole], m.values[hole] = m.keys[at], m.subs[at], m.values[at]
            hole = at
    m.values[hole] = NIL
    m.used -= 1


# ---- token pool -------------------------------------------------------------------------------------------------

cdef bint tokens_take(Radix* t, int64_t count, int32_t* out) noexcept nogil:
    """Take `count` free tokens, or none if there are fewer; their slots in stack order go to `out` if told."""
    if t.available < count:
        return False
    t.available -= count
    if t.told and count > 0:
        memcpy(out, t.stack + t.available, count * sizeof(int32_t))
    return True


cdef void tokens_give(Radix* t, int32_t* slots, int64_t count) noexcept nogil:
    """Give tokens back; nobody checks that they were taken."""
    cdef void* moved
    if t.told and count > 0:
        moved = grown(t.stack, &t.stack_cap, t.available + count, sizeof(int32_t))
        if moved == NULL:
            t.error = ERR_MEMORY
            return
        t.stack = <int32_t*>moved
        memcpy(t.stack + t.available, slots, count * sizeof(int32_t))
    t.available += count


# ---- nodes ------------------------------------------------------------------------------------------------------

cdef bint edge_reserve(Node* x, int64_t need) noexcept nogil:
    cdef int64_t cap = x.cap
    cdef void* moved
    if need <= x.cap:
        return True
    moved = grown(x.keys, &cap, need, sizeof(uint64_t))
    if moved == NULL:
        return False
    x.keys = <uint64_t*>moved
    cap = x.cap
    moved = grown(x.ends, &cap, need, sizeof(int32_t))
    if moved == NULL:
        return False
    x.ends = <int32_t*>moved
    x.cap = cap
    return True


cdef bint slots_reserve(Node* x, int64_t need) noexcept nogil:
    cdef void* moved = grown(x.slots, &x.slots_cap, need, sizeof(int32_t))
    if moved == NULL:
        return False
    x.slots = <int32_t*>moved
    return True


cdef int32_t node_new(Radix* t) noexcept nogil:
    """A node with nothing but its buffers; the root if memory is short (the error ends the engine's run)."""
    cdef int32_t node = t.free_node
    cdef void* moved
    if node != NIL:
        t.free_node = t.nodes[node].next_free
    else:
        moved = grown(t.nodes, &t.nodes_cap, t.nodes_used + 1, sizeof(Node))
        if moved == NULL:
            t.error = ERR_MEMORY
            return 0
        t.nodes = <Node*>moved
        node = <int32_t>t.nodes_used
        t.nodes_used += 1
        memset(&t.nodes[node], 0, sizeof(Node))
        if t.ranks.score.ask != NULL and ranks_reserve(&t.ranks, t.nodes_used) != ERR_OK:
            t.error = ERR_MEMORY
            return 0
    t.nodes[node].alive = 1
    t.nodes[node].n = 0
    t.count += 1
    return node


cdef inline void node_drop(Radix* t, int32_t node) noexcept nogil:
    t.nodes[node].alive = 0
    t.nodes[node].next_free = t.free_node
    t.free_node = node
    t.count -= 1


cdef int radix_init(Radix* t, int64_t total, int64_t page, bint told) noexcept nogil:
    """An empty tree over `total` free tokens, in zeroed memory."""
    cdef int64_t i
    t.total = t.available = total
    t.page = page
    t.free_node = NIL
    if map_init(&t.table) != ERR_OK or node_new(t) != 0 or t.error:
        return ERR_MEMORY
    t.count = 0
    t.nodes[0].parent = NIL
    if told:
        t.told = True
        t.stack = <int32_t*>malloc((total + 1) * sizeof(int32_t))
        if t.stack == NULL:
            return ERR_MEMORY
        t.stack_cap = total + 1
        for i in range(total):
            t.stack[i] = <int32_t>(total - 1 - i)
    return ERR_OK


cdef void radix_free(Radix* t) noexcept nogil:
    cdef int64_t i
    for i in range(t.nodes_used):
        free(t.nodes[i].keys)
        free(t.nodes[i].ends)
        free(t.nodes[i].slots)
    free(t.nodes)
    free(t.stack)
    free(t.heap)
    free(t.gone)
    free(t.cuts)
    ranks_free(&t.ranks)
    map_free(&t.table)


cdef void radix_clear(Radix* t) noexcept nogil:
    """Forget all pages of a tree whose pool and locks nobody uses; the buffers stay."""
    cdef int64_t i
    for i in range(1, t.nodes_used):
        if t.nodes[i].alive:
            map_delete(&t.table, t.nodes[i].keys[0], t.nodes[i].start)
            node_drop(t, <int32_t>i)
    t.nodes[0].children = 0
    t.heap_used = 0
    t.evictable = 0


# ---- eviction heap ----------------------------------------------------------------------------------------------

cdef inline bint evictable_leaf(Radix* t, Leaf* e) noexcept nogil:
    cdef Node* x = &t.nodes[e.node]
    return x.alive and x.children == 0 and x.lock == 0 and x.stamp == e.stamp


cdef void heap_sink(Radix* t, int64_t i, Leaf item) noexcept nogil:
    cdef int64_t child
    while True:
        child = 2 * i + 1
        if child >= t.heap_used:
            break
        if child + 1 < t.heap_used and t.heap[child + 1].stamp < t.heap[child].stamp:
            child += 1
        if t.heap[child].stamp >= item.stamp:
            break
        t.heap[i] = t.heap[child]
        i = child
    t.heap[i] = item


cdef void heap_sweep(Radix* t) noexcept nogil:
    """Drop outdated entries."""
    cdef int64_t i, n = 0
    for i in range(t.heap_used):
        if evictable_leaf(t, &t.heap[i]):
            t.heap[n] = t.heap[i]
            n += 1
    t.heap_used = n
    for i in range(n // 2 - 1, -1, -1):
        heap_sink(t, i, t.heap[i])


cdef void leaf_push(Radix* t, int32_t node) noexcept nogil:
    """Queue a node for eviction if nobody locks it and nothing hangs below it."""
    cdef int64_t i, up
    cdef Leaf item
    cdef void* moved
    if node == 0 or t.nodes[node].lock != 0 or t.nodes[node].children != 0:
        return
    if t.ranks.score.ask != NULL:
        ranked_put(t, node)
        return
    if t.heap_used > 2 * t.count + 64:
        heap_sweep(t)
    moved = grown(t.heap, &t.heap_cap, t.heap_used + 1, sizeof(Leaf))
    if moved == NULL:
        t.error = ERR_MEMORY
        return
    t.heap = <Leaf*>moved
    item.stamp, item.node = t.nodes[node].stamp, node
    i = t.heap_used
    t.heap_used += 1
    while i > 0:
        up = (i - 1) >> 1
        if t.heap[up].stamp <= item.stamp:
            break
        t.heap[i] = t.heap[up]
        i = up
    t.heap[i] = item


cdef inline void heap_pop(Radix* t) noexcept nogil:
    t.heap_used -= 1
    if t.heap_used > 0:
        heap_sink(t, 0, t.heap[t.heap_used])


cdef void radix_stamp_at(Radix* t, int32_t node, int64_t tick) noexcept nogil:
    """A visit ended at this node."""
    if node == 0:
        return
    t.nodes[node].stamp = tick
    leaf_push(t, node)


cdef void radix_stamp(Radix* t, int32_t node) noexcept nogil:
    """A visit ended at this node now."""
    t.tick += 1
    radix_stamp_at(t, node, t.tick)


# ---- walking ----------------------------------------------------------------------------------------------------

cdef inline int32_t element_of(Path* path, int32_t page) noexcept nogil:
    """Element that holds a page."""
    cdef int32_t low = 0, high = path.n - 1, mid
    while low < high:
        mid = (low + high) >> 1
        if path.ends[mid] > page:
            high = mid
        else:
            low = mid + 1
    return low


cdef int32_t agree(Node* x, Path* path, int32_t i, int32_t limit) noexcept nogil:
    """Depth up to which an edge and the path agree, at most `limit`; the first page, in element i, does."""
    cdef int32_t k
    for k in range(x.n):
        if i >= path.n or x.keys[k] != path.keys[i]:
            return x.ends[k - 1]
        if x.ends[k] >= limit or path.ends[i] >= limit:
            return min(limit, min(x.ends[k], path.ends[i]))
        if x.ends[k] != path.ends[i]:
            return min(x.ends[k], path.ends[i])
        i += 1
    return x.end


cdef int32_t split(Radix* t, int32_t node, int32_t at) noexcept nogil:
    """Cut a node's edge at a page; returns the new upper part, the node keeps the rest."""
    cdef int32_t upper = node_new(t), k = 0
    cdef Node* x = &t.nodes[node]
    cdef Node* u = &t.nodes[upper]
    cdef int64_t head
    if upper == 0:
        return 0
    while x.ends[k] < at:
        k += 1
    if not edge_reserve(u, k + 1):
        t.error = ERR_MEMORY
        return 0
    memcpy(u.keys, x.keys, (k + 1) * sizeof(uint64_t))
    memcpy(u.ends, x.ends, (k + 1) * sizeof(int32_t))
    u.ends[k] = at
    u.n = k + 1
    if x.ends[k] == at:
        k += 1
    x.n -= k
    memmove(x.keys, x.keys + k, x.n * sizeof(uint64_t))
    memmove(x.ends, x.ends + k, x.n * sizeof(int32_t))
    if t.told:
        head = (at - x.start) * t.page
        if not slots_reserve(u, head):
            t.error = ERR_MEMORY
            return 0
        memcpy(u.slots, x.slots, head * sizeof(int32_t))
        memmove(x.slots, x.slots + head, ((x.end - x.start) * t.page - head) * sizeof(int32_t))
    u.parent, u.start, u.end, u.children = x.parent, x.start, at, 1
    u.lock, u.stamp, u.owner, u.chain = x.lock, x.stamp, x.owner, x.chain
    if t.ranks.score.ask != NULL:
        rank_cut(&t.ranks, node, upper, 0)
    x.parent, x.start = upper, at
    if (map_set(&t.table, u.keys[0], u.start, upper) != ERR_OK
            or map_set(&t.table, x.keys[0], x.start, node) != ERR_OK):
        t.error = ERR_MEMORY
    return upper


cdef int32_t radix_match(Radix* t, Path* path, int32_t pages) noexcept nogil:
    """Deepest node whose path is a prefix of the first `pages` pages, made by a split if needed; a visit.

    A node made by a split is not visited itself, unless it is a part of a chain.
    """
    cdef int32_t at = 0, depth = 0, i = 0, child, common
    while depth < pages:
        while path.ends[i] <= depth:
            i += 1
        child = map_find(&t.table, path.keys[i], depth)
        if child == NIL:
            break
        common = agree(&t.nodes[child], path, i, pages)
        if common < t.nodes[child].end:
            child = split(t, child, common)
            radix_stamp(t, child if t.nodes[child].chain else at)
            return child
        at, depth = child, common
    radix_stamp(t, at)
    return at


cdef int32_t radix_match_pages(Radix* t, Path* path, int32_t pages) noexcept nogil:
    """Pages that `radix_match` would find, without a trace."""
    cdef int32_t depth = 0, i = 0, child, common
    while depth < pages:
        while path.ends[i] <= depth:
            i += 1
        child = map_find(&t.table, path.keys[i], depth)
        if child == NIL:
            break
        common = agree(&t.nodes[child], path, i, pages)
        depth = common
        if common < t.nodes[child].end:
            break
    return depth


cdef bint append(Radix* t, int32_t node, Path* path, int32_t i, int32_t pages, int32_t* slots) noexcept nogil:
    """Lengthen an edge by the path's pages up to `pages`, from element i on."""
    cdef Node* x = &t.nodes[node]
    cdef int32_t end, first = x.end
    cdef int64_t held = (x.end - x.start) * t.page
    while x.end < pages:
        end = path.ends[i] if path.ends[i] < pages else pages
        if x.n > 0 and x.keys[x.n - 1] == path.keys[i]:
            x.ends[x.n - 1] = end
        else:
            if not edge_reserve(x, x.n + 1):
                return False
            x.keys[x.n], x.ends[x.n] = path.keys[i], end
            x.n += 1
        x.end = end
        i += 1
    if t.told:
        if not slots_reserve(x, held + (pages - first) * t.page):
            return False
        memcpy(x.slots + held, slots + first * t.page, (pages - first) * t.page * sizeof(int32_t))
    return True


cdef int32_t radix_extend(Radix* t, int32_t node, Path* path, int32_t pages, uint64_t owner,
                          int32_t* slots) noexcept nogil:
    """Insert the first `pages` pages of a path; those up to the end of `node` are there and locked by the caller.

    Returns the node that ends with them. New pages keep the caller's slots (`slots` by token of the path, if told);
    pages that are there already keep theirs. The caller stamps the node.
    """
    cdef int32_t at = node, depth = t.nodes[node].end, i, child, common
    cdef Node* x
    if depth >= pages:
        return node
    i = element_of(path, depth)
    while depth < pages:
        while path.ends[i] <= depth:
            i += 1
        x = &t.nodes[at]
        if at == node and depth + 1 == pages and chain_open(t, at, owner):
            if not append(t, at, path, i, pages, slots):
                t.error = ERR_MEMORY
            t.protected += t.page
            return at
        child = map_find(&t.table, path.keys[i], depth)
        if child == NIL:
            child = node_new(t)
            x = &t.nodes[child]
            if child == 0:
                return 0
            x.parent, x.start, x.end, x.children = at, depth, depth, 0
            x.lock = x.stamp = 0
            x.owner = owner
            x.chain = depth + 1 == pages
            if not append(t, child, path, i, pages, slots) or map_set(&t.table, x.keys[0], depth, child) != ERR_OK:
                t.error = ERR_MEMORY
            t.nodes[at].children += 1
            t.evictable += (pages - depth) * t.page
            return child
        common = agree(&t.nodes[child], path, i, pages)
        if common < t.nodes[child].end:
            child = split(t, child, common)
            if child == 0:
                return 0
        at, depth = child, common
    return at


# ---- locks and eviction -----------------------------------------------------------------------------------------

cdef void radix_lock(Radix* t, int32_t node, int32_t stop) noexcept nogil:
    """Lock the nodes from this one up, as far as `stop` (not included; the root never is)."""
    cdef Node* x
    cdef int64_t tokens
    while node != stop and node != 0:
        x = &t.nodes[node]
        x.lock += 1
        if x.lock == 1:
            tokens = (x.end - x.start) * t.page
            t.evictable -= tokens
            t.protected += tokens
        node = x.parent


cdef void radix_unlock(Radix* t, int32_t node) noexcept nogil:
    """Unlock the nodes from this one up."""
    cdef Node* x
    cdef int64_t tokens
    while node != 0:
        x = &t.nodes[node]
        x.lock -= 1
        if x.lock == 0:
            tokens = (x.end - x.start) * t.page
            t.evictable += tokens
            t.protected -= tokens
            leaf_push(t, node)
        node = t.nodes[node].parent


cdef void radix_release(Radix* t, int32_t node, int32_t held) noexcept nogil:
    """A request gives back the path to a node, which it locks as far as `held`."""
    radix_unlock(t, held)
    if t.ranks.score.ask != NULL:
        ranked_release(t, node)


cdef int32_t first_leaf(Radix* t) noexcept nogil:
    """The leaf to evict, NIL if there is none."""
    if t.ranks.score.ask != NULL:
        return ranked_first(t)
    while t.heap_used > 0 and not evictable_leaf(t, &t.heap[0]):
        heap_pop(t)
    return t.heap[0].node if t.heap_used > 0 else NIL


cdef void log_cuts(Radix* t, Node* x, int32_t first) noexcept nogil:
    """Note a node's pages from `first` on."""
    cdef int32_t k, low = x.start
    cdef void* moved = grown(t.cuts, &t.cuts_cap, t.cuts_used + x.n, sizeof(Cut))
    if moved == NULL:
        t.error = ERR_MEMORY
        return
    t.cuts = <Cut*>moved
    for k in range(x.n):
        if x.ends[k] > first:
            t.cuts[t.cuts_used] = Cut(x.keys[k], low if low > first else first, x.ends[k])
            t.cuts_used += 1
        low = x.ends[k]


cdef void drop_pages(Radix* t, int32_t node, int32_t count) noexcept nogil:
    """Free the last `count` pages of a leaf; told, a chain gives its pages one by one from the end."""
    cdef Node* x = &t.nodes[node]
    cdef int32_t page
    cdef int64_t tokens = count * t.page
    cdef void* moved
    if t.told:
        moved = grown(t.gone, &t.gone_cap, t.gone_used + tokens, sizeof(int32_t))
        if moved == NULL:
            t.error = ERR_MEMORY
            return
        t.gone = <int32_t*>moved
        if x.chain:
            for page in range(x.end - x.start - 1, x.end - x.start - count - 1, -1):
                memcpy(t.gone + t.gone_used, x.slots + page * t.page, t.page * sizeof(int32_t))
                t.gone_used += t.page
        else:
            memcpy(t.gone + t.gone_used, x.slots, tokens * sizeof(int32_t))
            t.gone_used += tokens
    if t.log:
        log_cuts(t, x, x.end - count)
    tokens_give(t, t.gone + t.gone_used - tokens, tokens)
    t.evictable -= tokens
    x.end -= count
    while x.n > 1 and x.ends[x.n - 2] >= x.end:
        x.n -= 1
    x.ends[x.n - 1] = x.end


cdef int64_t radix_evict(Radix* t, int64_t tokens) noexcept nogil:
    """Evict whole leaves, the longest unvisited or lowest first, until `tokens` are free; returns how many are."""
    cdef int64_t evicted = 0, count
    cdef int32_t node, up
    cdef Node* x
    t.gone_used = t.cuts_used = 0
    while evicted < tokens:
        node = first_leaf(t)
        if node == NIL:
            break
        x = &t.nodes[node]
        count = x.end - x.start
        if x.chain and (tokens - evicted + t.page - 1) // t.page < count:
            count = (tokens - evicted + t.page - 1) // t.page
        evicted += count * t.page
        if count < x.end - x.start:
            drop_pages(t, node, <int32_t>count)
            break
        up = x.parent
        if t.ranks.score.ask == NULL:
            heap_pop(t)
        else:
            ranked_gone(t, node, up)
        map_delete(&t.table, x.keys[0], x.start)
        drop_pages(t, node, <int32_t>count)
        t.nodes[up].children -= 1
        if t.nodes[up].stamp < x.stamp:
            t.nodes[up].stamp = x.stamp
        leaf_push(t, up)
        node_drop(t, node)
    t.evictions += evicted
    return evicted


# ---- slots ------------------------------------------------------------------------------------------------------

cdef int64_t radix_foreign(Radix* t, int32_t node, int64_t first, uint64_t owner) noexcept nogil:
    """Tokens on the path to a node, from token `first` (a page boundary) on, whose slots are not the owner's."""
    cdef int64_t tokens = 0, start
    while node != 0 and t.nodes[node].end * t.page > first:
        if t.nodes[node].owner != owner:
            start = t.nodes[node].start * t.page
            tokens += t.nodes[node].end * t.page - (start if start > first else first)
        node = t.nodes[node].parent
    return tokens


cdef void radix_path_slots(Radix* t, int32_t node, int32_t* out) noexcept nogil:
    """Slots of the path to a node, by token."""
    cdef Node* x
    while node != 0:
        x = &t.nodes[node]
        memcpy(out + x.start * t.page, x.slots, (x.end - x.start) * t.page * sizeof(int32_t))
        node = x.parent


cdef int radix_tell(Radix* t, int32_t first) noexcept nogil:
    """Number the slots of the free stack and of all nodes from `first` on, each its own, and set `told`."""
    cdef int64_t i, k
    cdef Node* x
    t.stack = <int32_t*>malloc((t.available + 1) * sizeof(int32_t))
    if t.stack == NULL:
        t.error = ERR_MEMORY
        return ERR_MEMORY
    t.stack_cap = t.available + 1
    for i in range(t.available):
        t.stack[i] = first
        first += 1
    for i in range(1, t.nodes_used):
        x = &t.nodes[i]
        if not x.alive:
            continue
        if not slots_reserve(x, (x.end - x.start) * t.page):
            t.error = ERR_MEMORY
            return ERR_MEMORY
        for k in range((x.end - x.start) * t.page):
            x.slots[k] = first
            first += 1
    t.told = True
    return first
