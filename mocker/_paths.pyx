# cython: language_level=3
"""From hash ids to block identities, once per trace: no tokens, no hashes, one visit per id.

A hash id stands for a run of equal tokens (its low 32 bits, as in the reference's `synthesize_trace_tokens`), so a
block's identity - the tokens up to its end - is its path in a tree of ids. A node of the tree is a stretch of ids that
nothing branches off: a range of the ids of the request that brought it. A request costs one comparison per id while
it follows known stretches, one look-up where a stretch ends, and a node of 32 bytes (and one for the stretch that
it splits) where it leaves them; its new ids are not even looked at. The engine moves these segments, not single blocks.
"""
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

import numpy as np

from mocker._common cimport ERR_MEMORY, ERR_OK, NIL, grown, int32_t, int64_t, uint32_t, uint64_t
from mocker._kv cimport Path, path_free, path_reserve

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define prefetch(address) __builtin_prefetch(address)
    #else
    #define prefetch(address) ((void)(address))
    #endif
    """
    void prefetch(const void* address) noexcept nogil


cdef enum:
    SESSION_BIT = 62               # of keys that are segments of sessions; the top bit is that of generated blocks

cdef uint64_t SESSION = <uint64_t>1 << SESSION_BIT


cdef struct Node:
    int32_t row                    # whose ids the stretch is
    int32_t begin                  # steps from the root to its first step
    int32_t end                    # and to behind its last
    int32_t parent
    int32_t child                  # first child
    int32_t next                   # next child of its parent, NIL for the last one and those found by hash
    uint32_t token                 # of its first step
    int32_t children


cdef enum:
    LISTED = 6                     # children of a node that are in its list, where the cache has them; others by hash
    AHEAD = 16                     # requests that memory is asked for before they are inserted


cdef struct Place:                 # of a child that is not listed, found by (parent, token)
    uint64_t key
    int32_t child                  # 0 = empty


cdef struct Tree:
    Node* nodes                    # 0: the root
    int64_t used
    int64_t cap
    Place* places
    int32_t wide                   # first node of a request whose children were looked up by hash: likely of the next
    bint looked                    # the request at hand had one
    uint64_t mask
    int64_t siblings
    const int64_t* offsets
    const uint64_t* ids
    int64_t* ids_of                # [steps] number of the id of a step; NULL: that of the step
    int32_t* ends_of               # [steps + 1] blocks that end before a step; NULL: `per` with each
    int32_t per                    # blocks an id
    int32_t* names                 # [used] segment of each node
    int64_t segments


cdef inline uint64_t place(uint64_t key, uint64_t mask) noexcept nogil:
    return ((key * <uint64_t>0x9E3779B97F4A7C15) >> 20) & mask


cdef bint siblings_grow(Tree* t) noexcept nogil:
    """Twice as many places."""
    cdef uint64_t size = 2 * (t.mask + 1), i, at
    cdef Place* places = <Place*>calloc(size, sizeof(Place))
    if places == NULL:
        return False
    for i in range(t.mask + 1):
        if t.places[i].child:
            at = place(t.places[i].key, size - 1)
            while places[at].child:
                at = (at + 1) & (size - 1)
            places[at] = t.places[i]
    free(t.places)
    t.places, t.mask = places, size - 1
    return True


cdef inline uint32_t token_at(Tree* t, int32_t row, int32_t step) noexcept nogil:
    return <uint32_t>t.ids[t.offsets[row] + (step if t.ids_of == NULL else t.ids_of[step])]


cdef inline uint64_t look_up(Tree* t, int32_t parent, uint32_t token) noexcept nogil:
    """Place of a child that is not listed, or the free place for it."""
    cdef uint64_t key = (<uint64_t>parent << 32) | token, i = place(key, t.mask)
    while t.places[i].child and t.places[i].key != key:
        i = (i + 1) & t.mask
    return i


cdef inline int32_t find(Tree* t, int32_t parent, uint32_t token) noexcept nogil:
    """Child whose stretch begins with `token`; NIL if there is none."""
    cdef int32_t node = t.nodes[parent].child
    while node != NIL:
        if t.nodes[node].token == token:
            return node
        node = t.nodes[node].next
    if t.nodes[parent].children <= LISTED:
        return NIL
    if not t.looked:
        t.wide, t.looked = parent, True
    node = t.places[look_up(t, parent, token)].child
    return node if node else NIL


cdef inline void ask_ahead(Tree* t, int64_t row, int64_t n) noexcept nogil:
    """Ask for the memory that requests after this one will likely need."""
    cdef int64_t step = t.nodes[t.wide].end, at
    t.looked = False
    if row + 2 * AHEAD < n and t.ids_of == NULL:
        prefetch(&t.ids[t.offsets[row + 2 * AHEAD]])
        at = t.offsets[row + AHEAD] + step
        if at < t.offsets[n]:
            prefetch(&t.places[place((<uint64_t>t.wide << 32) | <uint32_t>t.ids[at], t.mask)])


cdef int32_t grow(Tree* t, int32_t parent, int32_t row, int32_t begin, int32_t end) noexcept nogil:
    """A new stretch under `parent`; NIL if memory is short."""
    cdef void* moved = grown(t.nodes, &t.cap, t.used + 1, sizeof(Node))
    cdef int32_t node = <int32_t>t.used
    cdef uint32_t token = token_at(t, row, begin)
    if moved == NULL:
        return NIL
    t.nodes = <Node*>moved
    t.used += 1
    t.nodes[node] = Node(row, begin, end, parent, NIL, NIL, token, 0)
    t.nodes[parent].children += 1
    if t.nodes[parent].children <= LISTED:
        t.nodes[node].next = t.nodes[parent].child
        t.nodes[parent].child = node
        return node
    t.places[look_up(t, parent, token)] = Place((<uint64_t>parent << 32) | token, node)
    t.siblings += 1
    return node if 2 * t.siblings <= <int64_t>t.mask or siblings_grow(t) else NIL


cdef int32_t split(Tree* t, int32_t node, int32_t step) noexcept nogil:
    """Make what comes before `step` a node of its own, above the rest; returns it, NIL if memory is short."""
    cdef void* moved = grown(t.nodes, &t.cap, t.used + 1, sizeof(Node))
    cdef int32_t upper = <int32_t>t.used, parent, other
    cdef Node* low
    if moved == NULL:
        return NIL
    t.nodes = <Node*>moved
    t.used += 1
    low = &t.nodes[node]
    parent = low.parent
    t.nodes[upper] = Node(low.row, low.begin, step, parent, node, low.next, low.token, 1)
    other = t.nodes[parent].child
    if other == node:
        t.nodes[parent].child = upper
    else:
        while other != NIL and t.nodes[other].next != node:
            other = t.nodes[other].next
        if other != NIL:
            t.nodes[other].next = upper
        else:
            t.places[look_up(t, parent, low.token)].child = upper
    low.begin, low.parent, low.next, low.token = step, upper, NIL, token_at(t, low.row, step)
    return upper


cdef int32_t insert(Tree* t, int32_t row, int32_t steps) noexcept nogil:
    """Follow a request's steps, at least one, and add what is new; the node where they end, NIL if memory is short."""
    cdef int32_t at = 0, node, d = 0, stop
    cdef uint32_t token
    while d < steps:
        token = token_at(t, row, d)
        node = find(t, at, token)
        if node == NIL:
            return grow(t, at, row, d, steps)
        stop = min(t.nodes[node].end, steps)
        d += 1
        while d < stop and token_at(t, t.nodes[node].row, d) == token_at(t, row, d):
            d += 1
        if d < stop:
            node = split(t, node, d)
            return grow(t, node, row, d, steps) if node != NIL else NIL
        at = node
    return at


cdef bint build(Tree* t, int64_t n, const int64_t* lengths, int64_t block, int64_t* steps_of, int32_t* leaf
                ) noexcept nogil:
    """Insert every request's full blocks; `leaf` gets the segment that it ends in, numbered by `number`."""
    cdef int64_t row, full
    cdef int32_t steps, node
    t.nodes = <Node*>grown(NULL, &t.cap, 1024, sizeof(Node))
    t.mask = 1023
    while <int64_t>t.mask < n:                 # most requests branch off once, many of them in one place
        t.mask = 2 * t.mask + 1
    t.places = <Place*>calloc(t.mask + 1, sizeof(Place))
    if t.nodes == NULL or t.places == NULL:
        return False
    t.nodes[0] = Node(0, 0, 0, NIL, NIL, NIL, 0, 0)
    t.used = 1
    for row in range(n):
        ask_ahead(t, row, n)
        full = lengths[row] // block
        leaf[row] = NIL
        if full > 0:
            leaf[row] = insert(t, <int32_t>row, <int32_t>(
                (full + t.per - 1) // t.per if steps_of == NULL else steps_of[full]))
            if leaf[row] == NIL:
                return False
    if not number(t, n):
        return False
    for row in range(n):
        node = leaf[row]
        if node != NIL:
            full = lengths[row] // block
            steps = <int32_t>((full + t.per - 1) // t.per if steps_of == NULL else steps_of[full])
            while t.nodes[node].begin >= steps:        # split since, behind where this request ends
                node = t.nodes[node].parent
            leaf[row] = t.names[node]
    return True


cdef bint number(Tree* t, int64_t n) noexcept nogil:
    """Number the segments by the request that brought them, then from the root down; false if memory is short.

    So parents come before children. Number 0 is the root. Where a request only goes on behind the end of another one,
    its node is an only child.
    """
    cdef int64_t i, j, k
    cdef int32_t* names = <int32_t*>malloc(t.used * sizeof(int32_t))
    cdef int32_t* order = <int32_t*>calloc(t.used, sizeof(int32_t))       # 0, the root, where nothing is yet
    cdef int64_t* first = <int64_t*>calloc(n + 1, sizeof(int64_t))     # place of each row's nodes in `order`
    cdef int32_t node
    t.names = names
    if names == NULL or order == NULL or first == NULL:
        free(order)
        free(first)
        return False
    for i in range(1, t.used):
        first[t.nodes[i].row] += 1
    k = 0
    for i in range(n):
        k += first[i]
        first[i] = k - first[i]
    for i in range(1, t.used):             # few nodes a row: by insertion
        node = <int32_t>i
        j = first[t.nodes[node].row]
        first[t.nodes[node].row] += 1
        while j > 0 and t.nodes[order[j - 1]].row == t.nodes[node].row and (
                t.nodes[order[j - 1]].begin > t.nodes[node].begin):
            order[j] = order[j - 1]
            j -= 1
        order[j] = node
    names[0] = 0
    k = 1
    for i in range(t.used - 1):
        node = order[i]
        if t.nodes[t.nodes[node].parent].children > 1:
            names[node] = <int32_t>k
            k += 1
        else:                                  # the only child goes on with its parent's segment
            names[node] = names[t.nodes[node].parent]
    t.segments = k
    free(first)
    free(order)
    return True


cdef tuple segments(Tree* t):
    """Parent and number of blocks of each segment."""
    parents, sizes = np.empty(t.segments, np.int32), np.zeros(t.segments, np.int32)
    cdef int32_t[::1] parent = parents
    cdef int32_t[::1] blocks = sizes
    cdef int64_t i
    cdef Node* node
    cdef int32_t name
    with nogil:
        for i in range(t.used):
            node, name = &t.nodes[i], t.names[i]
            if i > 0:
                blocks[name] += ((node.end - node.begin) * t.per if t.ends_of == NULL
                                 else t.ends_of[node.end] - t.ends_of[node.begin])
            if name > 0 and t.names[node.parent] != name:
                parent[name] = t.names[node.parent]
    parent[0] = NIL
    return parents, sizes


cdef int64_t* straddling(Tree* t, int64_t blocks, int64_t trace_block, int64_t block) except NULL:
    """Steps where ids and blocks do not line up: a block is the ids that it overlaps.

    Fills `ids_of` and `ends_of` for `blocks` blocks and returns how many steps the first 0, 1, ... blocks take.
    """
    cdef int64_t most = blocks * (block // trace_block + 2), i, k, step = 0
    cdef int64_t* steps_of = <int64_t*>malloc((blocks + 1) * sizeof(int64_t))
    t.ids_of = <int64_t*>malloc((most + 1) * sizeof(int64_t))
    t.ends_of = <int32_t*>malloc((most + 1) * sizeof(int32_t))
    if steps_of == NULL or t.ids_of == NULL or t.ends_of == NULL:
        free(steps_of)
        raise MemoryError
    t.ends_of[0] = 0
    for i in range(blocks):
        steps_of[i] = step
        for k in range(i * block // trace_block, ((i + 1) * block - 1) // trace_block + 1):
            t.ids_of[step] = k
            step += 1
            t.ends_of[step] = <int32_t>i
        t.ends_of[step] = <int32_t>(i + 1)
    steps_of[blocks] = step
    return steps_of


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
        cdef int64_t n = lengths.shape[0]
        cdef Tree t
        cdef bint ok
        cdef int64_t* steps_of = NULL
        segment = np.empty(n, np.int32)
        cdef int32_t[::1] leaf = segment
        if n == 0:
            return PathTable(segment, np.empty(0, np.int32), np.empty(0, np.int32))
        if ids.shape[0] == 0:
            segment[:] = NIL
            return PathTable(segment, np.empty(0, np.int32), np.empty(0, np.int32))
        t.nodes = NULL
        t.places = NULL
        t.ids_of = NULL
        t.ends_of = NULL
        t.names = NULL
        t.used = t.cap = t.siblings = t.wide = 0
        t.mask = 0
        t.offsets, t.ids, t.per = &offsets[0], &ids[0], <int32_t>(trace_block_size // block_size)
        if trace_block_size % block_size:
            steps_of = straddling(&t, np.max(lengths) // block_size, trace_block_size, block_size)
        try:
            with nogil:
                ok = build(&t, n, &lengths[0], block_size, steps_of, &leaf[0])
            if not ok:
                raise MemoryError
            return PathTable(segment, *segments(&t))
        finally:
            free(t.nodes)
            free(t.places)
            free(t.ids_of)
            free(t.ends_of)
            free(t.names)
            free(steps_of)

    @staticmethod
    def unique(const int64_t[::1] lengths, int64_t block_size):
        """A segment of its own for each request: prompts that share nothing."""
        cdef int64_t n = lengths.shape[0]
        full = (np.asarray(lengths) // block_size).astype(np.int32)
        segment = np.where(full > 0, np.arange(n, dtype=np.int32), np.int32(NIL)).astype(np.int32)
        return PathTable(segment, np.full(n, NIL, np.int32), full)

    def __cinit__(self, segment, parent, blocks):
        self.segment, self.parent, self.blocks = segment, parent, blocks
        self.n = self.segment.shape[0]
        self.arrays = {"segment": segment, "parent": parent, "blocks": blocks}

    def talking(self, first, bound):
        """The same requests as turns of sessions whose prompts are all that was said before, answers included.

        What follows the first prompt is then nobody else's: one segment a session, whoever made its blocks.

        Parameters
        ----------
        first : array of int32, shape (n,)
            The first turn of each request's session.
        bound : array of int32, shape (n,)
            Full blocks of that turn's prompt.
        """
        cdef PathTable made = PathTable(self.arrays["segment"], self.arrays["parent"], self.arrays["blocks"])
        made.talks, made.first, made.bound = True, first, bound
        made.arrays = {**self.arrays, "first": first, "bound": bound}
        return made

    cdef uint64_t own(self, int64_t row) noexcept nogil:
        """Segment of what a request generates, if others can know it; 0: nobody but itself can."""
        return SESSION | <uint64_t>self.first[row] if self.talks and row < self.n else 0

    cdef int fill(self, Path* path, int64_t row, int32_t full) noexcept nogil:
        """Write the path of a request with `full` full blocks."""
        cdef int32_t s, n = 0, i, end = 0, said = 0
        cdef uint64_t own = self.own(row)
        if row >= self.n:
            return self.fill_later(path, row - self.n, full)
        if own:
            row = self.first[row]
            full, said = min(full, self.bound[row]), full
        s = self.segment[row]
        while s != NIL:
            n += self.blocks[s] > 0
            s = self.parent[s]
        if path_reserve(path, n + 2, False, 0) != ERR_OK:      # for what was said, and for the generated blocks
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
        if said > full:
            path.keys[path.n], path.ends[path.n] = own, said
            path.n += 1
        return ERR_OK

    # -- rows that came later ------------------------------------------------------------------------------------------

    cdef int fill_later(self, Path* path, int64_t row, int32_t full) noexcept nogil:
        cdef int64_t i, first = self.starts[row]
        if path_reserve(path, self.starts[row + 1] - first + 1, False, 0) != ERR_OK:
            return ERR_MEMORY
        path.n = <int32_t>(self.starts[row + 1] - first)
        for i in range(path.n):
            path.keys[i], path.ends[i] = self.keys[first + i], min(self.ends[first + i], full)
        return ERR_OK

    def copy(self, int64_t rows):
        """A table with the first `rows` rows that grows on its own."""
        later = max(rows - self.n, 0)
        used = 0 if later == 0 else self.starts[later]
        return _later(self.arrays, *((np.zeros(1, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int32))
                                     if later == 0 else (np.array(self.starts[:later + 1]), np.array(self.keys[:used]),
                                                         np.array(self.ends[:used]))))

    def __reduce__(self):
        made = self.copy(self.n + self.later)
        return _later, (self.arrays, np.asarray((<PathTable>made).starts), np.asarray((<PathTable>made).keys),
                        np.asarray((<PathTable>made).ends))

    def append(self, list keys, list ends):
        """One more row, by the segment of each of its stretches and the block index one past its end."""
        cdef int64_t i, used = self.starts[self.later], need = used + len(keys)
        if self.starts.shape[0] < self.later + 2:
            self.starts = np.concatenate((self.starts, np.zeros(self.later + 64, np.int64)))
        if self.keys.shape[0] < need:
            self.keys = np.concatenate((self.keys, np.zeros(need + 64, np.uint64)))
            self.ends = np.concatenate((self.ends, np.zeros(need + 64, np.int32)))
        for i in range(<int64_t>len(keys)):
            self.keys[used + i], self.ends[used + i] = keys[i], ends[i]
        self.later += 1
        self.starts[self.later] = need

    def path(self, int64_t row, int64_t full):
        """Segments and ends of a row's first `full` blocks, as two lists."""
        cdef Path path
        memset(&path, 0, sizeof(Path))
        try:
            if self.fill(&path, row, <int32_t>full) != ERR_OK:
                raise MemoryError
            return [path.keys[i] for i in range(path.n)], [path.ends[i] for i in range(path.n)]
        finally:
            path_free(&path)

    @property
    def segments(self):
        """How many segments the rows that were there from the start have."""
        return self.parent.shape[0]


def _later(arrays, starts, keys, ends):
    """A table with rows that came later."""
    cdef PathTable made = PathTable(arrays["segment"], arrays["parent"], arrays["blocks"])
    if "first" in arrays:
        made = made.talking(arrays["first"], arrays["bound"])
    made.later, made.starts, made.keys, made.ends = len(starts) - 1, starts, keys, ends
    return made
