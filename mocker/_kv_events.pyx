# cython: language_level=3
"""The log of a block pool's changes, for whoever asked for KV events: what was stored and removed since it was read.

Costs: O(runs of an event), and the tokens of its blocks if they are carried.
"""
from libc.string cimport memcpy

from mocker._common cimport ERR_MEMORY, NIL, grown, int32_t, int64_t, uint32_t, uint64_t
from mocker._kv cimport element_at, element_begin


cdef Event* event_new(Pool* p, bint stored) noexcept nogil:
    cdef void* moved = grown(p.events, &p.events_cap, p.events_used + 1, sizeof(Event))
    cdef Event* e
    if moved == NULL:
        p.error = ERR_MEMORY
        return NULL
    p.events = <Event*>moved
    e = &p.events[p.events_used]
    p.events_used += 1
    e.stored, e.has_parent, e.tier, e.parent_offset, e.parent_key = stored, 0, 0, 0, 0
    e.first, e.pieces = p.pieces_used, 0
    return e


cdef void event_piece(Pool* p, uint64_t key, uint64_t local, int32_t start, int32_t count,
                      uint32_t* tokens) noexcept nogil:
    """Append a piece to the newest event."""
    cdef void* moved = grown(p.pieces, &p.pieces_cap, p.pieces_used + 1, sizeof(Piece))
    cdef Piece* e
    if moved == NULL:
        p.error = ERR_MEMORY
        return
    p.pieces = <Piece*>moved
    e = &p.pieces[p.pieces_used]
    e.key, e.local, e.start, e.count, e.tokens = key, local, start, count, NIL
    if tokens != NULL:
        moved = grown(p.event_tokens, &p.event_tokens_cap, p.event_tokens_used + p.block_size, sizeof(uint32_t))
        if moved == NULL:
            p.error = ERR_MEMORY
            return
        p.event_tokens = <uint32_t*>moved
        memcpy(p.event_tokens + p.event_tokens_used, tokens, p.block_size * sizeof(uint32_t))
        e.tokens = p.event_tokens_used
        p.event_tokens_used += p.block_size
    p.pieces_used += 1
    p.events[p.events_used - 1].pieces += 1


cdef void log_stored(Pool* p, Path* path, int32_t begin, int32_t end) noexcept nogil:
    """One stored event for the request blocks [begin, end); its parent is the block before them."""
    cdef Event* e = event_new(p, 1)
    cdef int32_t i = element_at(path, begin), low = element_begin(path, i), high, parent
    if e == NULL:
        return
    if begin > 0:
        parent = element_at(path, begin - 1)
        e.has_parent = 1
        e.parent_key = path.keys[parent]
        e.parent_offset = begin - 1 - element_begin(path, parent)
    while begin < end:
        high = path.ends[i]
        if high > end:
            high = end
        event_piece(p, path.keys[i], path.local[i] if path.local != NULL else 0, begin - low, high - begin,
                    path.tokens + <int64_t>i * p.block_size if path.tokens != NULL else NULL)
        begin = high
        low = path.ends[i]
        i += 1


cdef void log_removed(Pool* p) noexcept nogil:
    """One removed event for what the operation evicted."""
    cdef int64_t i
    if p.evicted_used == 0:
        return
    if event_new(p, 0) != NULL:
        for i in range(p.evicted_used):
            event_piece(p, p.evicted[i].key, 0, p.evicted[i].start, p.evicted[i].count, NULL)
    p.evicted_used = 0
