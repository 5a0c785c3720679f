"""How often prompts reuse blocks, and how much memory it would take to profit: reuse distances of a trace.

Model: a cache that sees one request after another, looks up its full blocks and then holds them all, and that evicts
the least recently used block, of two with the same age the one deeper in its prompt (as vLLM frees them, the tail
first). The reuse distance of a block is the number of different blocks that were used since, so a cache of more blocks
than that still has it: one pass gives the hits for every size (Mattson's stack distances).

Cost: blocks that every request uses together are one segment. The blocks that a request was the last to use are
the tail of its path, so one Fenwick tree over requests answers for whole groups of segments: O(log requests) a group.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc

import numpy as np

cdef enum:
    NIL = -1


cdef inline void add(int64_t[::1] tree, int64_t i, int64_t value) noexcept nogil:
    """Add to entry `i` of a Fenwick tree."""
    i += 1
    while i < tree.shape[0]:
        tree[i] += value
        i += i & -i


cdef inline int64_t sum_to(int64_t[::1] tree, int64_t i) noexcept nogil:
    """Sum of the entries up to `i`, included."""
    cdef int64_t total = 0
    i += 1
    while i > 0:
        total += tree[i]
        i -= i & -i
    return total


def split_segments(const int32_t[::1] segment not None, const int32_t[::1] parent not None,
                   const int32_t[::1] blocks not None, const int64_t[::1] full not None):
    """Cut the segments of a `PathTable` where requests end, so that each request uses whole pieces.

    Parameters
    ----------
    segment : int32[n]
        Deepest segment of each request, -1 without a full block.
    parent, blocks : int32[segments]
        The segment above and the number of blocks of each.
    full : int64[n]
        Full blocks of each request.

    Returns
    -------
    leaf : int32[n]
        Deepest piece of each request, or -1.
    above, size : int32[pieces]
        The piece above (-1: none) and the number of blocks.
    """
    cdef Py_ssize_t n = segment.shape[0], m = parent.shape[0], i
    cdef int32_t s
    depth_of = np.zeros(m, np.int64)
    cdef int64_t[::1] depth = depth_of      # blocks above each segment
    for i in range(m):
        if parent[i] != NIL:
            depth[i] = depth[parent[i]] + blocks[parent[i]]
    keys_of = np.empty(n + m, np.int64)
    cdef int64_t[::1] keys = keys_of        # segment << 32 | blocks of it that the piece ends after
    for i in range(n):
        s = segment[i]
        while s != NIL and full[i] <= depth[s]:
            s = parent[s]
        keys[i] = NIL if s == NIL else <int64_t>s << 32 | (full[i] - depth[s])
    for i in range(m):
        keys[n + i] = <int64_t>i << 32 | blocks[i] if blocks[i] > 0 else NIL
    pieces_of, inverse_of = np.unique(keys_of, return_inverse=True)
    first = int(len(pieces_of) > 0 and pieces_of[0] == NIL)
    pieces_of = pieces_of[first:]
    leaf = (inverse_of.reshape(n + m)[:n] - first).astype(np.int32)
    owner = pieces_of >> 32
    ends = pieces_of & 0xffffffff
    starts_segment = np.ones(len(owner), np.bool_)
    starts_segment[1:] = np.diff(owner) != 0
    size = ends.copy()
    size[1:] = np.where(starts_segment[1:], ends[1:], np.diff(ends))
    above_of = np.arange(-1, len(owner) - 1, dtype=np.int32)
    last_of = np.full(m, NIL, np.int32)     # deepest piece of each segment
    last_of[owner] = np.arange(len(owner), dtype=np.int32)
    cdef int32_t[::1] last = last_of, above = above_of
    cdef int64_t[::1] heads = np.flatnonzero(starts_segment).astype(np.int64)
    cdef const int64_t[::1] owners = owner
    for i in range(heads.shape[0]):
        s = parent[owners[heads[i]]]
        while s != NIL and last[s] == NIL:
            s = parent[s]
        above[heads[i]] = NIL if s == NIL else last[s]
    return leaf, above_of, size.astype(np.int32)


def reuse_distances(const int32_t[::1] leaf not None, const int32_t[::1] above not None,
                    const int32_t[::1] size not None):
    """Hits of every cache size, from the pieces of `split_segments` in the order in which the requests come.

    Returns
    -------
    hits : int64[n]
        Blocks of each request that an earlier one has used.
    distances : int64[blocks + 1]
        How many block uses have each reuse distance; a cache of `c` blocks hits the uses with distances below `c`.
    """
    cdef Py_ssize_t n = leaf.shape[0], row
    cdef int64_t depth, k, room = 1024, alive = 0, moved, size_of_path, more_recent, group, hit, p
    cdef int32_t piece, held
    cdef int64_t total = 0
    cdef int32_t* path = <int32_t*>malloc(room * sizeof(int32_t))
    cdef int32_t* wider
    if path == NULL:
        raise MemoryError
    for row in range(size.shape[0]):
        total += size[row]
    last_of = np.full(max(size.shape[0], 1), NIL, np.int32)
    tree_of = np.zeros(n + 1, np.int64)
    hits_of = np.zeros(n, np.int64)
    delta_of = np.zeros(total + 2, np.int64)
    cdef int32_t[::1] last = last_of        # request that used each piece last
    cdef int64_t[::1] tree = tree_of        # blocks that each request was the last to use
    cdef int64_t[::1] hits = hits_of, delta = delta_of
    cdef bint short_of_memory = False
    with nogil:
        for row in range(n):
            piece, depth = leaf[row], 0
            while piece != NIL:
                if depth == room:
                    wider = <int32_t*>realloc(path, 2 * room * sizeof(int32_t))
                    if wider == NULL:
                        short_of_memory = True
                        break
                    path, room = wider, 2 * room
                path[depth] = piece
                depth += 1
                piece = above[piece]
            if short_of_memory:
                break
            moved = size_of_path = hit = 0
            k = depth - 1
            while k >= 0:
                held = last[path[k]]
                group = 0
                while k >= 0 and last[path[k]] == held:
                    group += size[path[k]]
                    last[path[k]] = <int32_t>row
                    k -= 1
                size_of_path += group
                if held == NIL:
                    continue
                p = held
                more_recent = alive - sum_to(tree, p) + moved
                delta[more_recent] += 1
                delta[more_recent + group] -= 1
                add(tree, p, -group)
                alive -= group
                moved += group
                hit += group
            add(tree, row, size_of_path)
            alive += size_of_path
            hits[row] = hit
    free(path)
    if short_of_memory:
        raise MemoryError
    return hits_of, np.cumsum(delta_of[:total + 1])


cdef inline uint64_t place(uint64_t key, uint64_t mask) noexcept nogil:
    return ((key * <uint64_t>0x9E3779B97F4A7C15) >> 20) & mask


cdef int64_t mark_repeated(int64_t row, const int64_t[::1] offsets, const uint64_t[::1] ids, uint32_t[::1] keys,
                           int32_t[::1] rows, int64_t* used, uint8_t[::1] found) noexcept nogil:
    """Go on from a row until the table of the last prompt of each id is three quarters full; the next row."""
    cdef uint64_t mask = keys.shape[0] - 1, key, at
    cdef int64_t k
    while row < found.shape[0]:
        for k in range(offsets[row], offsets[row + 1]):
            key = <uint32_t>ids[k]
            at = place(key, mask)
            while rows[at] != NIL and keys[at] != key:
                at = (at + 1) & mask
            if rows[at] == row:
                found[row] = 1
            elif rows[at] == NIL:
                used[0] += 1
                if used[0] >= <int64_t>mask:       # no free place may be left: this row again in a larger table
                    return row
            keys[at], rows[at] = <uint32_t>key, <int32_t>row
        row += 1
        if 4 * used[0] > 3 * <int64_t>mask:
            break
    return row


def repeated_ids(const int64_t[::1] offsets not None, const uint64_t[::1] ids not None):
    """uint8[n]: whether the low 32 bits of an id appear twice in a prompt. One look into a hash table per id."""
    cdef int64_t n = offsets.shape[0] - 1, row = 0, used = 0
    cdef uint64_t i, at, mask = 1023
    found = np.zeros(n, np.uint8)
    cdef uint8_t[::1] marks = found
    cdef uint32_t[::1] keys = np.empty(mask + 1, np.uint32), old_keys
    cdef int32_t[::1] rows = np.full(mask + 1, NIL, np.int32), old_rows
    while True:
        with nogil:
            row = mark_repeated(row, offsets, ids, keys, rows, &used, marks)
        if row >= n:
            return found
        old_keys, old_rows = keys, rows
        mask = 4 * (mask + 1) - 1
        keys, rows = np.empty(mask + 1, np.uint32), np.full(mask + 1, NIL, np.int32)
        used = 0
        for i in range(<uint64_t>old_keys.shape[0]):
            # What the row before a retry has left of its own row would look like a repetition.
            if old_rows[i] != NIL and old_rows[i] != row:
                at = place(old_keys[i], mask)
                while rows[at] != NIL:
                    at = (at + 1) & mask
                keys[at], rows[at] = old_keys[i], old_rows[i]
                used += 1
