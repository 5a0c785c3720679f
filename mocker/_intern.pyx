# cython: language_level=3
"""From hash ids to block identities while a replay runs, in memory that does not grow with the trace.

The same tree of stretches as in `_paths`, but it takes requests as they come, keeps the ids of its stretches itself,
and forgets those that nothing knows any more. Where a later request branches off inside a stretch, both parts keep
the segment that they had: pools know segments by name, and a path may use the beginning of one only. A forgotten
stretch whose ids come again gets a new segment, which nobody can tell from the old one, since none of its blocks is
left. Costs: as `_paths`; forgetting O(stretches), when these have doubled.
"""
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

import numpy as np

from mocker._common cimport ERR_MEMORY, ERR_OK, NIL, grown, int32_t, int64_t, uint32_t, uint64_t
from mocker._kv cimport Path, path_reserve


cdef inline uint64_t home(uint64_t key, uint64_t mask) noexcept nogil:
    return ((key * <uint64_t>0x9E3779B97F4A7C15) >> 20) & mask


cdef class Interned(PathTable):
    """Paths of requests that are added bit by bit, each in a place that is used again when it has ended.

    Parameters
    ----------
    segment, parent, blocks
        As of `PathTable`: empty.
    """

    def __cinit__(self, *_arguments):
        self.cap, self.mask = 1024, 4095
        self.nodes = <Stretch*>malloc(self.cap * sizeof(Stretch))
        self.children = <Child*>calloc(self.mask + 1, sizeof(Child))
        if self.nodes == NULL or self.children == NULL:
            raise MemoryError
        self.nodes[0] = Stretch(0, 0, 0, 0, NIL)
        self.used, self.next_key = 1, 1

    def __dealloc__(self):
        free(self.nodes)
        free(self.texts)
        free(self.children)

    def sizes(self, int64_t trace_block, int64_t block):
        """Tokens an id and tokens a block; a block may not be larger than an id, nor lie across two."""
        if trace_block % block:
            raise ValueError(f"a trace of {trace_block} tokens a hash id cannot be streamed through blocks of {block}: "
                             f"these must divide it; choose another block_size, or replay the loaded trace")
        self.per, self.block = <int32_t>(trace_block // block), block

    @property
    def stretches(self):
        """Stretches in the tree, the root included."""
        return self.used

    def add(self, int32_t[::1] leaf, const int64_t[::1] places, const int64_t[::1] offsets, const uint64_t[::1] ids,
            const int64_t[::1] lengths):
        """Add requests.

        Parameters
        ----------
        leaf : array of int32
            An entry a place, which is kept and written to; larger than before where there are more places.
        places : array of int64, shape (n,)
            Where the requests are.
        offsets, ids, lengths
            As of `PathTable.from_hash_ids`.
        """
        cdef int64_t i, full
        self.leaf = leaf
        with nogil:
            for i in range(places.shape[0]):
                full = lengths[i] // self.block
                leaf[places[i]] = NIL
                if full > 0:
                    leaf[places[i]] = self.insert(&ids[offsets[i]], <int32_t>((full + self.per - 1) // self.per))
                    if leaf[places[i]] == NIL:
                        break
            else:
                i = -1
        if i >= 0:
            raise MemoryError

    # -- the tree -----------------------------------------------------------------------------------------------------

    cdef int32_t find(self, int32_t parent, uint32_t token, uint64_t* at) noexcept nogil:
        """The stretch under `parent` that begins with `token`, or NIL; and its place, or the free one for it."""
        cdef uint64_t key = (<uint64_t>parent << 32) | token, i = home(key, self.mask)
        while self.children[i].child and self.children[i].key != key:
            i = (i + 1) & self.mask
        at[0] = i
        return self.children[i].child if self.children[i].child else NIL

    cdef bint reserve(self, int64_t nodes, int64_t texts) noexcept nogil:
        """Room for more stretches and ids; false if memory is short."""
        cdef void* moved = grown(self.nodes, &self.cap, self.used + nodes, sizeof(Stretch))
        cdef Child* wider
        cdef uint64_t i, at, size = 2 * (self.mask + 1)
        if moved == NULL:
            return False
        self.nodes = <Stretch*>moved
        moved = grown(self.texts, &self.texts_cap, self.texts_used + texts, sizeof(uint32_t))
        if moved == NULL:
            return False
        self.texts = <uint32_t*>moved
        if 2 * (self.used + nodes) <= <int64_t>self.mask:
            return True
        wider = <Child*>calloc(size, sizeof(Child))
        if wider == NULL:
            return False
        for i in range(self.mask + 1):
            if self.children[i].child:
                at = home(self.children[i].key, size - 1)
                while wider[at].child:
                    at = (at + 1) & (size - 1)
                wider[at] = self.children[i]
        free(self.children)
        self.children, self.mask = wider, size - 1
        return True

    cdef int32_t grow(self, int32_t parent, const uint64_t* ids, int32_t begin, int32_t end) noexcept nogil:
        """A new stretch under `parent`; NIL if memory is short."""
        cdef int32_t node, step
        cdef uint64_t at
        if not self.reserve(1, end - begin):
            return NIL
        node = <int32_t>self.used
        self.nodes[node] = Stretch(self.next_key, self.texts_used, begin, end, parent)
        for step in range(begin, end):
            self.texts[self.texts_used + step - begin] = <uint32_t>ids[step]
        self.texts_used += end - begin
        self.used += 1
        self.next_key += 1
        self.find(parent, <uint32_t>ids[begin], &at)
        self.children[at] = Child((<uint64_t>parent << 32) | <uint32_t>ids[begin], node)
        return node

    cdef int32_t split(self, int32_t node, int32_t step) noexcept nogil:
        """Make what comes before `step` a stretch of its own, above the rest; returns it, NIL if memory is short."""
        cdef int32_t upper
        cdef uint64_t at
        cdef Stretch* low
        if not self.reserve(1, 0):
            return NIL
        upper = <int32_t>self.used
        self.used += 1
        low = &self.nodes[node]
        self.nodes[upper] = Stretch(low.key, low.text, low.begin, step, low.parent)
        self.find(low.parent, self.texts[low.text], &at)
        self.children[at].child = upper
        low.text += step - low.begin
        low.begin, low.parent = step, upper
        self.find(upper, self.texts[low.text], &at)
        self.children[at] = Child((<uint64_t>upper << 32) | self.texts[low.text], node)
        return upper

    cdef int32_t insert(self, const uint64_t* ids, int32_t steps) noexcept nogil:
        """Follow a request's steps, at least one, and add what is new; where they end, NIL if memory is short."""
        cdef int32_t at = 0, node, d = 0, stop
        cdef uint64_t place
        cdef uint32_t* text
        while d < steps:
            node = self.find(at, <uint32_t>ids[d], &place)
            if node == NIL:
                return self.grow(at, ids, d, steps)
            stop = min(self.nodes[node].end, steps)
            text = self.texts + self.nodes[node].text - self.nodes[node].begin
            d += 1
            while d < stop and text[d] == <uint32_t>ids[d]:
                d += 1
            if d < stop:
                node = self.split(node, d)
                return self.grow(node, ids, d, steps) if node != NIL else NIL
            at = node
        return at

    cdef int32_t upto(self, int32_t node, int32_t steps) noexcept nogil:
        """The stretch that a request of so many steps ends in: `node`, or one above it that was split off since."""
        while self.nodes[node].begin >= steps:
            node = self.nodes[node].parent
        return node

    cdef int fill(self, Path* path, int64_t row, int32_t full) noexcept nogil:
        cdef int32_t n = 0, node = self.leaf[row], at
        cdef uint64_t key = 0
        path.n = 0
        if node != NIL:
            node = self.upto(node, (full + self.per - 1) // self.per)
        at = node
        while at > 0:
            n += self.nodes[at].key != key
            key = self.nodes[at].key
            at = self.nodes[at].parent
        if path_reserve(path, n + 1, False, 0) != ERR_OK:      # one more for the generated blocks
            return ERR_MEMORY
        path.n = n
        key = 0
        while node > 0:
            if self.nodes[node].key != key:    # a segment ends where its deepest part does
                n -= 1
                key = path.keys[n] = self.nodes[node].key
                path.ends[n] = min(self.nodes[node].end * self.per, full)
            node = self.nodes[node].parent
        return ERR_OK

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def forget(self, known, const int64_t[::1] places):
        """Forget every stretch that neither has a known segment nor leads to one, or to a request.

        Parameters
        ----------
        known : array of uint64
            Segments that somebody outside knows.
        places : array of int64
            Requests that may still be asked for.
        """
        keys = np.empty(self.used, np.uint64)
        cdef uint64_t[::1] key = keys
        cdef int64_t i
        for i in range(self.used):
            key[i] = self.nodes[i].key
        cdef int32_t[::1] kept = np.isin(keys, known).astype(np.int32)
        if not self.sweep(kept, places):
            raise MemoryError

    cdef bint sweep(self, int32_t[::1] kept, const int64_t[::1] places) noexcept nogil:
        """Move the stretches together that are kept; `kept` gets the new number of each."""
        cdef int64_t i, used = 1, texts = 0
        cdef int32_t node
        cdef uint64_t at
        cdef Stretch* nodes
        cdef uint32_t* text
        cdef Stretch* s
        for i in range(places.shape[0]):
            if self.leaf[places[i]] != NIL:
                kept[self.leaf[places[i]]] = 1
        kept[0] = 0
        for i in range(1, self.used):
            node = <int32_t>i
            if kept[node] == 1:
                while self.nodes[node].parent > 0 and not kept[self.nodes[node].parent]:
                    node = self.nodes[node].parent
                    kept[node] = 1
        for i in range(1, self.used):
            if kept[i]:
                texts += self.nodes[i].end - self.nodes[i].begin
                kept[i] = <int32_t>used
                used += 1
        nodes = <Stretch*>malloc(used * sizeof(Stretch))
        text = <uint32_t*>malloc((texts + 1) * sizeof(uint32_t))
        if nodes == NULL or text == NULL:
            free(nodes)
            free(text)
            return False
        nodes[0] = self.nodes[0]
        texts = 0
        for i in range(1, self.used):
            if kept[i]:
                s = &nodes[kept[i]]
                s[0] = self.nodes[i]
                s.parent = kept[s.parent] if s.parent > 0 else 0
                for node in range(s.end - s.begin):
                    text[texts + node] = self.texts[s.text + node]
                s.text = texts
                texts += s.end - s.begin
        for i in range(places.shape[0]):
            if self.leaf[places[i]] != NIL:
                self.leaf[places[i]] = kept[self.leaf[places[i]]]
        free(self.nodes)
        free(self.texts)
        self.nodes, self.texts = nodes, text
        self.used = self.cap = used
        self.texts_used, self.texts_cap = texts, texts + 1
        memset(self.children, 0, (self.mask + 1) * sizeof(Child))
        for i in range(1, used):
            self.find(nodes[i].parent, text[nodes[i].text], &at)
            self.children[at] = Child((<uint64_t>nodes[i].parent << 32) | text[nodes[i].text], <int32_t>i)
        return True
