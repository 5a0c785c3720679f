# Physical copies of blocks: where they are found, held, queued for eviction; structures in _rules.pxd.
# What is done once a block or a piece is inline.
from mocker._common cimport NIL, int32_t, int64_t, uint64_t
from mocker._kv cimport Path
from mocker._ranks cimport rank_add
from mocker._rules cimport Copy, Piece2, VllmRulesCore


cdef int table_resize(VllmRulesCore* x, int64_t places) noexcept nogil
cdef void table_insert(VllmRulesCore* x, uint64_t key, int32_t head) noexcept nogil
cdef int32_t copy_new(VllmRulesCore* x, uint64_t key, int64_t stamp, int32_t start, int32_t end,
                      int32_t ref) noexcept nogil
cdef void copy_drop(VllmRulesCore* x, int32_t at) noexcept nogil
cdef void insert_copy(VllmRulesCore* x, int64_t place, int32_t new) noexcept nogil
cdef void cut(VllmRulesCore* x, int32_t at, int32_t where) noexcept nogil
cdef void copies_rank(VllmRulesCore* x) noexcept nogil
cdef int32_t find(VllmRulesCore* x, Path* path, int32_t begin, int32_t end, bint gaps, int64_t* idle) noexcept nogil
cdef void shorten(VllmRulesCore* x, int32_t blocks) noexcept nogil
cdef int32_t carve(VllmRulesCore* x, Piece2* p) noexcept nogil
cdef void pick(VllmRulesCore* x) noexcept nogil


cdef inline uint64_t home(VllmRulesCore* x, uint64_t key) noexcept nogil:
    return ((key * <uint64_t>0x9E3779B97F4A7C15) >> 24) & x.table_mask


cdef inline int64_t table_place(VllmRulesCore* x, uint64_t key) noexcept nogil:
    """Where a segment is in the table, NIL if none of its blocks is resident."""
    cdef uint64_t at = home(x, key)
    while x.table_heads[at] != NIL:
        if x.table_keys[at] == key:
            return <int64_t>at
        at = (at + 1) & x.table_mask
    return NIL


cdef inline void queue_remove(VllmRulesCore* x, int32_t at) noexcept nogil:
    cdef Copy* k = &x.copies[at]
    if k.prev != NIL:
        x.copies[k.prev].next = k.next
    else:
        x.oldest = k.next
    if k.next != NIL:
        x.copies[k.next].prev = k.prev
    else:
        x.newest = k.prev


cdef inline void queue_push(VllmRulesCore* x, int32_t at) noexcept nogil:
    """Newest in the eviction queue, or of those with its rank."""
    cdef Copy* k = &x.copies[at]
    if x.c.pool.ranked != NULL:
        rank_add(&x.c.pool.ranks, at, k.start)
        return
    k.prev = x.newest
    k.next = NIL
    if x.newest != NIL:
        x.copies[x.newest].next = at
    else:
        x.oldest = at
    x.newest = at


cdef inline void queue_append(VllmRulesCore* x, int32_t at) noexcept nogil:
    """Newest in the eviction queue; joined again with what was cut off from it if that was released just before."""
    cdef Copy* k = &x.copies[at]
    cdef int32_t below = k.deeper, rest
    if below != NIL and below == x.newest and x.copies[below].ref == 0:
        queue_remove(x, below)
        rest = x.copies[below].deeper
        k.end = x.copies[below].end
        copy_drop(x, below)
        k.deeper = rest
        if rest != NIL:
            x.copies[rest].upper = at
    queue_push(x, at)
