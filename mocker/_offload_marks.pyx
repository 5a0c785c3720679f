# cython: language_level=3
"""Numbers that KV offload notes of blocks: how often one was evicted, when it left a queue, who holds its slot.

Blocks come and go in stretches, so their numbers are kept by runs of one segment, in the order of the blocks. Costs: a
look-up O(runs of the segment before the block), most often none; setting a stretch O(runs before it or in it).
"""
from libc.stdlib cimport free
from libc.string cimport memset

from mocker._common cimport grown, int32_t, int64_t
from mocker._offload_blocks cimport Span


cdef inline int32_t first_of(Marks* m, int32_t seg) noexcept nogil:
    return m.first[seg] if 0 <= seg < m.first_cap else 0


cdef int32_t marks_look(Marks* m, Span* s, int64_t* value) noexcept nogil:
    """Blocks from the first one of a span on that all have the same number."""
    cdef int32_t i = first_of(m, s.seg), up = 0, n = s.count
    value[0] = 0
    while i != 0 and m.items[i].end <= s.at:
        up = i
        i = m.items[i].down
    if i != 0 and m.items[i].start <= s.at:
        value[0] = m.items[i].value
        n = m.items[i].end - s.at if s.step > 0 else s.at - m.items[i].start + 1
    elif s.step > 0 and i != 0:
        n = m.items[i].start - s.at
    elif s.step < 0 and up != 0:
        n = s.at - m.items[up].end + 1
    return n if n < s.count else s.count


cdef int32_t mark_new(Marks* m, int32_t start, int32_t end, int64_t value, int32_t down) noexcept nogil:
    """A mark in no list; 0 if memory is short."""
    cdef int32_t i = m.unused
    cdef void* moved
    if i != 0:
        m.unused = m.items[i].down
    else:
        moved = grown(m.items, &m.cap, m.used + 2, sizeof(Mark))
        if moved == NULL:
            return 0
        m.items = <Mark*>moved
        if m.used == 0:
            m.used = 1
        i = <int32_t>m.used
        m.used += 1
    m.items[i].start, m.items[i].end, m.items[i].value, m.items[i].down = start, end, value, down
    return i


cdef inline void link(Marks* m, int32_t seg, int32_t up, int32_t down) noexcept nogil:
    """What follows mark `up` of a segment, or is its first one if that is 0."""
    if up != 0:
        m.items[up].down = down
    else:
        m.first[seg] = down


cdef bint marks_set(Marks* m, Span* s, int64_t value) noexcept nogil:
    """Give blocks a number; false if memory is short, or the segment is not known."""
    cdef int32_t low = s.at if s.step > 0 else s.at - s.count + 1, high = low + s.count, i, up = 0, seg = s.seg, other
    cdef int64_t cap = m.first_cap
    cdef void* moved
    cdef Mark* r
    if seg < 0:
        return False
    if seg >= cap:
        if value == 0:
            return True
        moved = grown(m.first, &m.first_cap, seg + 1, sizeof(int32_t))
        if moved == NULL:
            return False
        m.first = <int32_t*>moved
        memset(m.first + cap, 0, <size_t>(m.first_cap - cap) * sizeof(int32_t))
    i = m.first[seg]
    while i != 0 and m.items[i].end < low:     # one that ends where this begins may become part of it
        up = i
        i = m.items[i].down
    if i != 0 and m.items[i].start < low:
        if m.items[i].value == value:
            if m.items[i].end >= high:
                return True
            low = m.items[i].start             # it is made anew, longer
        else:
            if m.items[i].end > high:          # in its middle
                other = mark_new(m, high, m.items[i].end, m.items[i].value, m.items[i].down)
                if other == 0:
                    return False
                m.blocks -= high - low
                m.items[i].end, m.items[i].down = low, other
            elif m.items[i].end > low:
                m.blocks -= m.items[i].end - low
                m.items[i].end = low
            up = i
            i = m.items[i].down
    while i != 0 and m.items[i].start <= high:
        r = &m.items[i]
        if r.start == high and r.value != value:
            break
        if r.end > high:
            if r.value != value:
                m.blocks -= high - r.start
                r.start = high
                break
            high = r.end
        m.blocks -= r.end - r.start
        other = r.down
        r.down = m.unused
        m.unused = i
        i = other
    if value != 0:
        other = mark_new(m, low, high, value, i)
        if other == 0:
            return False
        m.blocks += high - low
        i = other
    link(m, seg, up, i)
    return True


cdef void marks_free(Marks* m) noexcept nogil:
    free(m.items)
    free(m.first)
