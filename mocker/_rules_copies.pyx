# cython: language_level=3
"""Physical copies of blocks for the scheduler with switches: by segment, by request, in order of eviction.

Answers to vLLM 0.33.0 `v1/core/block_pool.py` (its cached-block map and free queue) and, with no rule set, to the
pool of `_kv`. vLLM gives each request blocks of its own beyond the prefix that it found, so one content may be there
more than once, and a look-up finds the copy that was registered first. Blocks still move in runs, here called copies:
consecutive blocks of one segment that were registered together and have the same holders. A request keeps the first
copy of each stretch that it holds; when somebody takes only the upper part of a copy it is cut, and the holders reach
the rest through `deeper`. Requests give blocks back from the last to the first, so the order of eviction is a queue
of copies, each eaten from its deepest block.

Costs: look-up and hold O(stretches of the path), times the copies of a segment where there are several; a copy in or
out O(1), in a list of several O(copies of the segment).
"""
from libc.stdlib cimport calloc, free, malloc

from mocker._common cimport ERR_MEMORY, ERR_OK, NIL, grown, int32_t, int64_t, uint8_t, uint64_t
from mocker._kv cimport Path, element_at, element_begin
from mocker._ranks cimport rank_cut
from mocker._rules cimport Copy, Piece2, VllmRulesCore, least


# ---- segment table ----------------------------------------------------------------------------------------------

cdef int table_resize(VllmRulesCore* x, int64_t places) noexcept nogil:
    cdef uint64_t* keys = <uint64_t*>malloc(places * sizeof(uint64_t))
    cdef int32_t* heads = <int32_t*>malloc(places * sizeof(int32_t))
    cdef uint8_t* twice = <uint8_t*>calloc(places, 1)
    cdef uint64_t* old_keys = x.table_keys
    cdef int32_t* old_heads = x.table_heads
    cdef uint8_t* old_twice = x.table_twice
    cdef uint64_t i, at, old_places = x.table_mask + 1 if old_heads != NULL else 0
    if keys == NULL or heads == NULL or twice == NULL:
        free(keys)
        free(heads)
        free(twice)
        return ERR_MEMORY
    for i in range(<uint64_t>places):
        heads[i] = NIL
    x.table_keys, x.table_heads, x.table_twice, x.table_mask = keys, heads, twice, <uint64_t>places - 1
    for i in range(old_places):
        if old_heads[i] != NIL:
            at = home(x, old_keys[i])
            while heads[at] != NIL:
                at = (at + 1) & x.table_mask
            keys[at], heads[at], twice[at] = old_keys[i], old_heads[i], old_twice[i]
    free(old_keys)
    free(old_heads)
    free(old_twice)
    return ERR_OK


cdef void table_insert(VllmRulesCore* x, uint64_t key, int32_t head) noexcept nogil:
    cdef uint64_t at
    if 2 * x.table_used > <int64_t>x.table_mask and table_resize(x, 2 * (<int64_t>x.table_mask + 1)) != ERR_OK:
        x.c.error = ERR_MEMORY
        return
    at = home(x, key)
    while x.table_heads[at] != NIL:
        at = (at + 1) & x.table_mask
    x.table_keys[at], x.table_heads[at], x.table_twice[at] = key, head, 0
    x.table_used += 1


cdef void table_delete(VllmRulesCore* x, uint64_t hole) noexcept nogil:
    """Empty a place; later entries of its cluster move up so that no tombstones are needed."""
    cdef uint64_t at = hole, wants
    while True:
        at = (at + 1) & x.table_mask
        if x.table_heads[at] == NIL:
            break
        wants = home(x, x.table_keys[at])
        if ((at - wants) & x.table_mask) >= ((at - hole) & x.table_mask):
            x.table_keys[hole], x.table_heads[hole] = x.table_keys[at], x.table_heads[at]
            x.table_twice[hole] = x.table_twice[at]
            hole = at
    x.table_heads[hole] = NIL
    x.table_used -= 1


# ---- copies: lists by segment -----------------------------------------------------------------------------------

cdef int32_t copy_new(VllmRulesCore* x, uint64_t key, int64_t stamp, int32_t start, int32_t end,
                      int32_t ref) noexcept nogil:
    cdef int32_t at = x.free_copy
    cdef Copy* k
    cdef void* moved
    if at != NIL:
        x.free_copy = x.copies[at].next
    else:
        moved = grown(x.copies, &x.copies_cap, x.copies_used + 1, sizeof(Copy))
        if moved == NULL:
            x.c.error = ERR_MEMORY
            return 0               # the caller writes into a copy that exists; the error ends the run of the engine
        x.copies = <Copy*>moved
        at = <int32_t>x.copies_used
        x.copies_used += 1
    k = &x.copies[at]
    k.key, k.stamp, k.start, k.end, k.ref = key, stamp, start, end, ref
    k.prev = k.next = k.left = k.right = k.upper = k.deeper = NIL
    return at


cdef void copy_drop(VllmRulesCore* x, int32_t at) noexcept nogil:
    """Out of its segment's list and chain, and back to the unused ones. Not in the queue any more."""
    cdef Copy* k = &x.copies[at]
    cdef int64_t place
    if k.upper != NIL:
        x.copies[k.upper].deeper = NIL
    if k.deeper != NIL:
        x.copies[k.deeper].upper = NIL
    if k.right != NIL:
        x.copies[k.right].left = k.left
    if k.left != NIL:
        x.copies[k.left].right = k.right
    else:
        place = table_place(x, k.key)
        if k.right != NIL:
            x.table_heads[place] = k.right
        else:
            table_delete(x, <uint64_t>place)
    k.next = x.free_copy
    x.free_copy = at


cdef void insert_copy(VllmRulesCore* x, int64_t place, int32_t new) noexcept nogil:
    """Into the list of a segment that is resident."""
    cdef Copy* n = &x.copies[new]
    cdef int32_t at = x.table_heads[place], after = NIL
    while at != NIL and x.copies[at].start < n.end:
        if x.copies[at].end > n.start:
            x.table_twice[place] = 1
        if x.copies[at].start <= n.start:
            after = at
        at = x.copies[at].right
    n.left = after
    if after != NIL:
        n.right = x.copies[after].right
        x.copies[after].right = new
    else:
        n.right = x.table_heads[place]
        x.table_heads[place] = new
    if n.right != NIL:
        x.copies[n.right].left = new


cdef void cut(VllmRulesCore* x, int32_t at, int32_t where) noexcept nogil:
    """Cut a copy in two; the upper part keeps its number, the deeper part comes just before it in the queue."""
    cdef int32_t low = copy_new(x, x.copies[at].key, x.copies[at].stamp, where, x.copies[at].end, x.copies[at].ref)
    cdef Copy* k = &x.copies[at]
    cdef Copy* d = &x.copies[low]
    cdef int32_t after = at
    k.end = where
    d.upper, d.deeper = at, k.deeper
    if d.deeper != NIL:
        x.copies[d.deeper].upper = low
    k.deeper = low
    while x.copies[after].right != NIL and x.copies[x.copies[after].right].start < where:
        after = x.copies[after].right          # the list stays sorted by start
    d.left, d.right = after, x.copies[after].right
    x.copies[after].right = low
    if d.right != NIL:
        x.copies[d.right].left = low
    if x.c.pool.ranked != NULL:
        rank_cut(&x.c.pool.ranks, at, low, where)
    elif k.ref == 0:
        d.prev, d.next = k.prev, at
        if k.prev != NIL:
            x.copies[k.prev].next = low
        else:
            x.oldest = low
        k.prev = low


cdef int32_t cut_copy(void* rules, int32_t at, int32_t where) noexcept nogil:
    cut(<VllmRulesCore*>rules, at, where)
    return (<VllmRulesCore*>rules).copies[at].deeper


cdef void copies_rank(VllmRulesCore* x) noexcept nogil:
    """The ranks of the core's pool are those of copies."""
    x.c.pool.ranks.cut, x.c.pool.ranks.owner = cut_copy, x


# ---- look-up and hold -------------------------------------------------------------------------------------------

cdef int32_t covering(VllmRulesCore* x, int32_t head, bint twice, int32_t at, int32_t* to) noexcept nogil:
    """Of the copies from `head` on that have block `at` the one registered first, NIL if there is none.

    `to`, given the last block of interest + 1, becomes the end of the stretch for which that answer holds.
    """
    cdef int32_t best = NIL
    cdef Copy* k
    while head != NIL:
        k = &x.copies[head]
        if k.start > at:
            if best == NIL or k.stamp < x.copies[best].stamp:
                if k.start < to[0]:
                    to[0] = k.start
                break
            if not twice or k.start >= to[0]:
                break
        elif k.end > at and (best == NIL or k.stamp < x.copies[best].stamp):
            best = head
            if not twice:
                break
        head = k.right
    if best != NIL and x.copies[best].end < to[0]:
        to[0] = x.copies[best].end
    return best


cdef int32_t find(VllmRulesCore* x, Path* path, int32_t begin, int32_t end, bint gaps, int64_t* idle) noexcept nogil:
    """Resident blocks of a request in [begin, end), up to the first that is missing unless `gaps`, into `found`.

    Returns how many there are; `idle` gets the number of those that nobody holds.
    """
    cdef int32_t i, low, at, to, end_at, copy, hint, count = 0
    cdef int64_t place
    cdef bint twice
    cdef Piece2* p
    cdef void* moved
    x.found_used = 0
    idle[0] = 0
    if begin >= end:
        return 0
    i = element_at(path, begin)
    while begin < end:
        low = element_begin(path, i)
        end_at = <int32_t>least(path.ends[i], end) - low
        at = begin - low
        place = table_place(x, path.keys[i])
        hint = x.table_heads[place] if place != NIL else NIL
        twice = place != NIL and x.table_twice[place]
        while at < end_at:
            to = end_at
            copy = covering(x, hint, twice, at, &to)
            if copy == NIL:
                if not gaps:
                    return count
            else:
                moved = grown(x.found, &x.found_cap, x.found_used + 1, sizeof(Piece2))
                if moved == NULL:
                    x.c.error = ERR_MEMORY
                    return count
                x.found = <Piece2*>moved
                p = &x.found[x.found_used]
                x.found_used += 1
                p.copy, p.at, p.to, p.begin = copy, at, to, low + at
                count += to - at
                if x.copies[copy].ref == 0:
                    idle[0] += to - at
                if not twice:
                    hint = copy
            at = to
        begin = low + end_at
        i += 1
    return count


cdef void shorten(VllmRulesCore* x, int32_t blocks) noexcept nogil:
    """Forget what was found from block index `blocks` on."""
    cdef Piece2* p
    while x.found_used > 0:
        p = &x.found[x.found_used - 1]
        if p.begin + p.to - p.at <= blocks:
            return
        if p.begin < blocks:
            p.to = p.at + blocks - p.begin
            return
        x.found_used -= 1


cdef int32_t carve(VllmRulesCore* x, Piece2* p) noexcept nogil:
    """Cut so that one copy is just the found stretch; its number."""
    cdef int32_t at = p.copy
    while x.copies[at].end <= p.at:
        at = x.copies[at].deeper
    if x.copies[at].start < p.at:
        cut(x, at, p.at)
        at = x.copies[at].deeper
    if x.copies[at].end > p.to:
        cut(x, at, p.to)
    p.copy = at
    return at


cdef void pick(VllmRulesCore* x) noexcept nogil:
    """Add a holder to everything found."""
    cdef int64_t i
    cdef int32_t at, n
    for i in range(x.found_used):
        at = carve(x, &x.found[i])
        if x.copies[at].ref == 0:
            n = x.copies[at].end - x.copies[at].start
            queue_remove(x, at)
            x.c.pool.active += n
            x.c.pool.inactive -= n
        x.copies[at].ref += 1
