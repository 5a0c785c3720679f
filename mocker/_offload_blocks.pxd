# Data dictionary of block names below the GPU: single blocks, spans of them, sets, and where segments come from.
from mocker._common cimport NIL, int32_t, int64_t, uint8_t, uint64_t


cdef struct Block:                 # one block of a segment
    uint64_t key
    int32_t at                     # offset in the segment


cdef struct Span:                  # `count` blocks of a segment that follow each other
    uint64_t key
    int32_t at                     # offset of the first one
    int32_t count
    int32_t step                   # 1: deeper ones follow; -1: shallower ones
    int32_t seg                    # the segment's number in the catalog, NIL: it has none


cdef struct Spans:                 # a list of blocks
    Span* items                    # [used]
    int64_t cap
    int64_t used
    int64_t blocks                 # of all spans


cdef struct Cursor:                # a place in a list of blocks
    int64_t span
    int32_t into                   # blocks of it that are behind


cdef struct BlockSet:              # open addressing
    Block* items
    uint8_t* full
    uint64_t mask                  # places - 1
    int64_t used


cdef struct Place:
    uint64_t key
    int32_t value                  # NIL: empty


cdef struct KeyMap:                # segment -> number, open addressing
    Place* places
    uint64_t mask                  # places - 1
    int64_t used


cdef struct Origin:                # what a segment's first block follows, by name
    uint64_t key                   # the segment
    uint64_t parent_key
    uint64_t local                 # hash of its tokens alone (real tokens only)
    int32_t parent_at              # NIL: nothing, it begins a sequence


cdef struct Parent:                # the same by number
    int32_t seg                    # segment, NIL: it begins a sequence, or follows what never was resident
    int32_t at                     # block


cdef struct Direct:                # segments whose keys follow each other closely: their numbers without a search
    uint64_t base                  # the first key
    int32_t* numbers               # [cap] by key less `base`; NIL: not known
    uint64_t cap


cdef struct Catalog:               # every segment that was ever resident
    Origin* items                  # [used] by number
    Parent* parents                # [used] apart, since they are needed more often
    int64_t cap
    int64_t used
    Direct direct[2]               # stretches of a trace, generated blocks: keys without and with the highest bit
    KeyMap numbers                 # the others


cdef bint spans_append(Spans* s, Span part, int64_t cut) noexcept nogil
cdef bint spans_next(Spans* s, Cursor* c, int64_t want, Span* part) noexcept nogil
cdef bint set_has(BlockSet* s, Block b) noexcept nogil
cdef bint set_add(BlockSet* s, Block b) noexcept nogil
cdef void set_discard(BlockSet* s, Block b) noexcept nogil
cdef void set_free(BlockSet* s) noexcept nogil
cdef int32_t catalog_add(Catalog* c, uint64_t key, uint64_t parent_key, int32_t parent_at,
                         uint64_t local) noexcept nogil
cdef int32_t catalog_search(Catalog* c, uint64_t key) noexcept nogil
cdef Origin* catalog_find(Catalog* c, uint64_t key) noexcept nogil
cdef void catalog_free(Catalog* c) noexcept nogil


cdef inline int32_t catalog_number(Catalog* c, uint64_t key) noexcept nogil:
    """NIL if the segment is not known."""
    cdef Direct* d = &c.direct[key >> 63]
    cdef uint64_t i = key - d.base
    return d.numbers[i] if i < d.cap else catalog_search(c, key)


cdef inline uint64_t block_mix(Block b) noexcept nogil:
    cdef uint64_t x = (b.key + <uint64_t><int64_t>b.at * <uint64_t>0x9E3779B97F4A7C15) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 31)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 32)


cdef inline bint same_block(Block a, Block b) noexcept nogil:
    return a.key == b.key and a.at == b.at


cdef inline Block span_block(Span* s, int32_t i) noexcept nogil:
    """Its i-th block."""
    cdef Block b
    b.key, b.at = s.key, s.at + s.step * i
    return b


cdef inline Span span_of(uint64_t key, int32_t seg, int32_t at, int32_t count, int32_t step) noexcept nogil:
    cdef Span s
    s.key, s.seg, s.at, s.count, s.step = key, seg, at, count, step
    return s


cdef inline Span span_part(Span* s, int32_t first, int32_t count) noexcept nogil:
    """`count` of its blocks from the `first` one on."""
    return span_of(s.key, s.seg, s.at + s.step * first, count, s.step)


cdef inline bint spans_add(Spans* s, Span part, int64_t cut) noexcept nogil:
    """Append blocks; false if memory is short. With `cut` spans end at multiples of so many blocks of the list."""
    if s.used > 0 or s.cap == 0 or part.count <= 0 or 0 < cut < part.count:
        return spans_append(s, part, cut)
    s.items[0] = part
    s.used, s.blocks = 1, part.count
    return True


cdef inline void spans_clear(Spans* s) noexcept nogil:
    s.used = s.blocks = 0
