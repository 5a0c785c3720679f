# cython: language_level=3
"""From hash ids to block identities, once per trace: no tokens, no hashes, one visit per id.

A hash id stands for a run of equal tokens (its low 32 bits, as in the reference's `synthesize_trace_tokens`), so a
block's identity - the tokens up to its end - is its path in a tree of ids. The tree is built with one comparison
per id while a request follows a known path, one hash look-up where it leaves it, and nothing but an append after
that. Stretches that nothing branches off become segments; the engine moves those, not single blocks.
"""
from libc.stdlib cimport free, malloc, realloc

import numpy as np

from mocker._common cimport ERR_MEMORY, ERR_OK, NIL, int32_t, int64_t, uint32_t, uint64_t
from mocker._kv cimport Path, path_reserve


cdef struct Tree:
    int32_t* parent
    int32_t* child                 # first child
    uint32_t* token                # token of the node's run
    int32_t* blocks                # blocks that end in the node's run
    int64_t used
    int64_t cap
    uint64_t* keys                 # children that are not the first: (parent, token) -> node
    int32_t* nodes                 # NIL = empty
    uint64_t mask
    int64_t siblings


cdef inline uint64_t place(uint64_t key, uint64_t mask) noexcept nogil:
    return ((key * <uint64_t>0x9E3779B97F4A7C15) >> 20) & mask


cdef bint siblings_grow(Tree* t) noexcept nogil:
    cdef uint64_t size = 2 * (t.mask + 1) if t.nodes != NULL else 1024
    cdef uint64_t* keys = <uint64_t*>malloc(size * sizeof(uint64_t))
    cdef int32_t* nodes = <int32_t*>malloc(size * sizeof(int32_t))
    cdef uint64_t i, at
    if keys == NULL or nodes == NULL:
        free(keys)
        free(nodes)
        return False
    for i in range(size):
        nodes[i] = NIL
    if t.nodes != NULL:
        for i in range(t.mask + 1):
            if t.nodes[i] != NIL:
                at = place(t.keys[i], size - 1)
                while nodes[at] != NIL:
                    at = (at + 1) & (size - 1)
                keys[at], nodes[at] = t.keys[i], t.nodes[i]
    free(t.keys)
    free(t.nodes)
    t.keys, t.nodes, t.mask = keys, nodes, size - 1
    return True


cdef bint tree_grow(Tree* t) noexcept nogil:
    cdef int64_t cap = 2 * t.cap if t.cap else 4096
    cdef void* moved = realloc(t.parent, cap * sizeof(int32_t))
    if moved == NULL:
        return False
    t.parent = <int32_t*>moved
    moved = realloc(t.child, cap * sizeof(int32_t))
    if moved == NULL:
        return False
    t.child = <int32_t*>moved
    moved = realloc(t.token, cap * sizeof(uint32_t))
    if moved == NULL:
        return False
    t.token = <uint32_t*>moved
    moved = realloc(t.blocks, cap * sizeof(int32_t))
    if moved == NULL:
        return False
    t.blocks = <int32_t*>moved
    t.cap = cap
    return True


cdef inline int32_t node_new(Tree* t, int32_t parent, uint32_t token, int32_t blocks) noexcept nogil:
    cdef int32_t node
    if t.used == t.cap and not tree_grow(t):
        return NIL
    node = <int32_t>t.used
    t.used += 1
    t.parent[node], t.child[node], t.token[node], t.blocks[node] = parent, NIL, token, blocks
    return node


cdef inline int32_t step(Tree* t, int32_t at, uint32_t token, int32_t blocks) noexcept nogil:
    """Child of `at` for a run of `token`, made if new; NIL if memory is short."""
    cdef int32_t node = t.child[at]
    cdef uint64_t key, i
    if node == NIL:
        node = node_new(t, at, token, blocks)
        t.child[at] = node
        return node
    if t.token[node] == token:
        return node
    key = (<uint64_t>at << 32) | token
    i = place(key, t.mask)
    while t.nodes[i] != NIL:
        if t.keys[i] == key:
            return t.nodes[i]
        i = (i + 1) & t.mask
    node = node_new(t, at, token, blocks)
    if node == NIL:
        return NIL
    t.keys[i], t.nodes[i] = key, node
    t.siblings += 1
    if 2 * t.siblings > <int64_t>t.mask and not siblings_grow(t):
        return NIL
    return node


cdef bint build(Tree* t, int64_t n, const int64_t* offsets, const uint64_t* ids, const int64_t* lengths,
                int64_t trace_block, int64_t block, int32_t* leaf) noexcept nogil:
    """Insert every request's full blocks; `leaf` gets its deepest node."""
    cdef int64_t row, full, i, k, first, last
    cdef int32_t at, per = <int32_t>(trace_block // block)
    cdef bint aligned = trace_block % block == 0
    if not siblings_grow(t) or not tree_grow(t) or node_new(t, NIL, 0, 0) == NIL:
        return False
    for row in range(n):
        full = lengths[row] // block
        at = 0
        if aligned:
            for k in range(offsets[row], offsets[row] + (full + per - 1) // per):
                at = step(t, at, <uint32_t>ids[k], per)
                if at == NIL:
                    return False
        else:
            for i in range(full):              # a block is the runs that it overlaps; their lengths follow from i
                first = offsets[row] + i * block // trace_block
                last = offsets[row] + ((i + 1) * block - 1) // trace_block
                for k in range(first, last + 1):
                    at = step(t, at, <uint32_t>ids[k], 1 if k == last else 0)
                    if at == NIL:
                        return False
        leaf[row] = at if full > 0 else NIL
    return True


cdef class PathTable:
    """Paths of all requests of a workload.

    `arrays` holds `segment` (int32, shape (n,)): the deepest segment of each request, -1 without a full block;
    `parent` and `blocks` (int32, one per segment): the segment before it and its number of blocks.
    """

    @staticmethod
    def from_hash_ids(const int64_t[::1] offsets, const uint64_t[::1] ids, const int64_t[::1] lengths,
                      int64_t trace_block_size, int64_t block_size):
        """Intern a trace.

        Parameters
        ----------
        offsets : array of int64, shape (n + 1,)
            Where each request's ids begin in `ids`.
        ids : array of uint64
            Hash ids, each `trace_block_size` tokens.
        lengths : array of int64, shape (n,)
            Prompt tokens; the ids of a request must cover them.
        trace_block_size, block_size : int
            Tokens an id, tokens an engine block.
        """
        cdef int64_t n = lengths.shape[0], segments = 0, row
        cdef Tree t
        cdef bint ok
        cdef int32_t* seg
        segment = np.empty(n, np.int32)
        cdef int32_t[::1] leaf = segment
        if n == 0:
            return PathTable(segment, np.empty(0, np.int32), np.empty(0, np.int32))
        if ids.shape[0] == 0:
            segment[:] = NIL
            return PathTable(segment, np.empty(0, np.int32), np.empty(0, np.int32))
        t.parent = t.child = t.nodes = t.blocks = NULL
        t.token = NULL
        t.keys = NULL
        t.used = t.cap = t.siblings = 0
        t.mask = 0
        with nogil:
            ok = build(&t, n, &offsets[0], &ids[0], &lengths[0], trace_block_size, block_size, &leaf[0])
            seg = <int32_t*>malloc(t.used * sizeof(int32_t)) if ok else NULL
        try:
            if seg == NULL:
                raise MemoryError
            # a node continues its parent's segment if it is the only child: the parent's child list is just it
            only = np.ones(t.used, np.uint8)
            segment_parent = np.empty(t.used, np.int32)
            segment_blocks = np.zeros(t.used, np.int32)
            mark_branches(&t, only)
            segments = cut(&t, only, seg, segment_parent, segment_blocks)
            with nogil:
                for row in range(n):
                    if leaf[row] != NIL:
                        leaf[row] = seg[leaf[row]]
            return PathTable(segment, segment_parent[:segments].copy(), segment_blocks[:segments].copy())
        finally:
            free(seg)
            free(t.parent)
            free(t.child)
            free(t.token)
            free(t.blocks)
            free(t.keys)
            free(t.nodes)

    @staticmethod
    def unique(const int64_t[::1] lengths, int64_t block_size):
        """A segment of its own for each request: prompts that share nothing."""
        cdef int64_t n = lengths.shape[0]
        full = (np.asarray(lengths) // block_size).astype(np.int32)
        segment = np.where(full > 0, np.arange(n, dtype=np.int32), np.int32(NIL)).astype(np.int32)
        return PathTable(segment, np.full(n, NIL, np.int32), full)

    def __cinit__(self, segment, parent, blocks):
        self.segment, self.parent, self.blocks = segment, parent, blocks
        self.arrays = {"segment": segment, "parent": parent, "blocks": blocks}

    cdef int fill(self, Path* path, int64_t row, int32_t full) noexcept nogil:
        """Write the path of a request with `full` full blocks."""
        cdef int32_t s = self.segment[row], n = 0, i, end = 0
        while s != NIL:
            n += self.blocks[s] > 0
            s = self.parent[s]
        if path_reserve(path, n + 1, False, 0) != ERR_OK:      # one more for the generated blocks
            return ERR_MEMORY
        path.n = n
        s = self.segment[row]
        while s != NIL:
            if self.blocks[s] > 0:
                n -= 1
                path.keys[n] = <uint64_t>s
                path.ends[n] = self.blocks[s]
            s = self.parent[s]
        for i in range(path.n):
            end += path.ends[i]
            if end > full:                     # the prompt ends inside its last segment
                end = full
            path.ends[i] = end
        return ERR_OK


cdef void mark_branches(Tree* t, unsigned char[::1] only):
    """Clear `only` of every node that has a sibling."""
    cdef int64_t i
    cdef int32_t up
    with nogil:
        for i in range(1, t.used):             # a child that is not its parent's first proves a branch
            up = t.parent[i]
            if t.child[up] != i:
                only[i] = 0
                only[t.child[up]] = 0


cdef int64_t cut(Tree* t, unsigned char[::1] only, int32_t* seg, int32_t[::1] parent, int32_t[::1] blocks):
    """Number the segments (parents before children, since nodes are); returns how many there are."""
    cdef int64_t i, n = 1
    seg[0] = 0
    parent[0] = NIL
    with nogil:
        for i in range(1, t.used):
            if only[i]:
                seg[i] = seg[t.parent[i]]
            else:
                seg[i] = <int32_t>n
                parent[n] = seg[t.parent[i]]
                n += 1
            blocks[seg[i]] += t.blocks[i]
    return n
