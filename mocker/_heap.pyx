# cython: language_level=3
"""A binary heap of times, for the events of a cluster: O(log n) in and out."""
from mocker._common cimport grown, int64_t


cdef inline bint before(Pending* a, Pending* b) noexcept nogil:
    if a.at != b.at:
        return a.at < b.at
    if a.first != b.first:
        return a.first < b.first
    return a.second < b.second


cdef bint heap_push(Heap* h, double at, int64_t first, int64_t second) noexcept nogil:
    cdef void* moved = grown(h.items, &h.cap, h.used + 1, sizeof(Pending))
    if moved == NULL:
        return False
    h.items = <Pending*>moved
    h.used += 1
    heap_earlier(h, h.used - 1, at, first, second)
    return True


cdef Pending heap_pop(Heap* h) noexcept nogil:
    cdef Pending top = h.items[0], item
    cdef int64_t i = 0, child
    h.used -= 1
    item = h.items[h.used]
    while True:
        child = 2 * i + 1
        if child >= h.used:
            break
        if child + 1 < h.used and before(&h.items[child + 1], &h.items[child]):
            child += 1
        if not before(&h.items[child], &item):
            break
        h.items[i] = h.items[child]
        i = child
    h.items[i] = item
    return top


cdef void heap_earlier(Heap* h, int64_t i, double at, int64_t first, int64_t second) noexcept nogil:
    """Entry `i` of the heap comes earlier than it was to, or a new one at the end to its place."""
    cdef Pending item
    cdef int64_t up
    item.at, item.first, item.second = at, first, second
    while i > 0:
        up = (i - 1) >> 1
        if not before(&item, &h.items[up]):
            break
        h.items[i] = h.items[up]
        i = up
    h.items[i] = item
