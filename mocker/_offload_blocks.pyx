# cython: language_level=3
"""Names of blocks below the GPU: lists and sets of them, maps from segments, and what each segment follows.

Lists are kept as spans, since blocks move together. Segments' keys are small numbers, of a trace's stretches or of
generated blocks, and are looked up directly as far as they lie close enough; hashes of real tokens are searched for.
Costs: a look-up O(1); a list O(spans).
"""
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

from mocker._common cimport NIL, grown, grown_both, int32_t, int64_t, uint8_t, uint64_t

cdef enum:
    FEW = 1024                     # places for direct keys, however few segments there are
    SPARSE = 8                     # places a segment


# ---- lists of blocks --------------------------------------------------------------------------------------------

cdef bint spans_append(Spans* s, Span part, int64_t cut) noexcept nogil:
    cdef Span* last
    cdef void* moved
    cdef int32_t step, n
    cdef int64_t whole
    while part.count > 0:
        n = part.count
        whole = 0                              # blocks of the list that are behind a cut, or past it
        if cut > 0:
            whole = s.blocks if s.blocks < cut else s.blocks % cut
            if n > cut - whole:
                n = <int32_t>(cut - whole)
        step = 0
        if s.used > 0 and (cut == 0 or whole > 0):
            last = &s.items[s.used - 1]
            step = part.at - last.at if last.count == 1 else last.step
            if (last.key != part.key or (step != 1 and step != -1) or part.at != last.at + step * last.count
                    or (n > 1 and part.step != step)):
                step = 0
        if step != 0:
            last.step = step
            last.count += n
        else:
            moved = grown(s.items, &s.cap, s.used + 1, sizeof(Span))
            if moved == NULL:
                return False
            s.items = <Span*>moved
            s.items[s.used] = part
            s.items[s.used].count = n
            s.used += 1
        s.blocks += n
        part.at += part.step * n
        part.count -= n
    return True


cdef bint spans_next(Spans* s, Cursor* c, int64_t want, Span* part) noexcept nogil:
    """The next blocks of a list, at most `want`, of one span; false if none is wanted or there."""
    cdef int32_t n
    if want <= 0 or c.span >= s.used:
        return False
    n = s.items[c.span].count - c.into
    if n > want:
        n = <int32_t>want
    part[0] = span_part(&s.items[c.span], c.into, n)
    c.into += n
    if c.into == s.items[c.span].count:
        c.span += 1
        c.into = 0
    return True


# ---- sets of blocks ---------------------------------------------------------------------------------------------

cdef inline uint64_t set_place(BlockSet* s, Block b) noexcept nogil:
    """Where a block is in a set that has places, or the free place where it would go."""
    cdef uint64_t at = block_mix(b) & s.mask
    while s.full[at] and not same_block(s.items[at], b):
        at = (at + 1) & s.mask
    return at


cdef bint set_has(BlockSet* s, Block b) noexcept nogil:
    return s.used > 0 and s.full[set_place(s, b)]


cdef bint set_grow(BlockSet* s) noexcept nogil:
    cdef uint64_t places = 2 * (s.mask + 1) if s.items != NULL else 64
    cdef uint64_t i, at
    cdef Block* items = <Block*>malloc(places * sizeof(Block))
    cdef uint8_t* full = <uint8_t*>calloc(places, 1)
    if items == NULL or full == NULL:
        free(items)
        free(full)
        return False
    if s.items != NULL:
        for i in range(s.mask + 1):
            if s.full[i]:
                at = block_mix(s.items[i]) & (places - 1)
                while full[at]:
                    at = (at + 1) & (places - 1)
                items[at], full[at] = s.items[i], 1
    free(s.items)
    free(s.full)
    s.items, s.full, s.mask = items, full, places - 1
    return True


cdef bint set_add(BlockSet* s, Block b) noexcept nogil:
    """Add a block that may be there already; false if memory is short."""
    cdef uint64_t at
    if (s.items == NULL or 2 * s.used > <int64_t>s.mask) and not set_grow(s):
        return False
    at = set_place(s, b)
    if s.full[at]:
        return True
    s.items[at], s.full[at] = b, 1
    s.used += 1
    return True


cdef void set_discard(BlockSet* s, Block b) noexcept nogil:
    cdef uint64_t hole, at, wants
    if not set_has(s, b):
        return
    hole = set_place(s, b)
    at = hole
    while True:
        at = (at + 1) & s.mask
        if not s.full[at]:
            break
        wants = block_mix(s.items[at]) & s.mask
        if ((at - wants) & s.mask) >= ((at - hole) & s.mask):
            s.items[hole] = s.items[at]
            hole = at
    s.full[hole] = 0
    s.used -= 1


cdef void set_free(BlockSet* s) noexcept nogil:
    free(s.items)
    free(s.full)


# ---- numbers of segments, and where they come from --------------------------------------------------------------

cdef inline uint64_t map_home(KeyMap* m, uint64_t key) noexcept nogil:
    return ((key * <uint64_t>0x9E3779B97F4A7C15) >> 24) & m.mask


cdef bint map_grow(KeyMap* m) noexcept nogil:
    cdef KeyMap larger
    cdef uint64_t i, at
    larger.mask = 2 * m.mask + 1 if m.places != NULL else 63
    larger.places = <Place*>malloc((larger.mask + 1) * sizeof(Place))
    if larger.places == NULL:
        return False
    for i in range(larger.mask + 1):
        larger.places[i].value = NIL
    if m.places != NULL:
        for i in range(m.mask + 1):
            if m.places[i].value != NIL:
                at = map_home(&larger, m.places[i].key)
                while larger.places[at].value != NIL:
                    at = (at + 1) & larger.mask
                larger.places[at] = m.places[i]
    free(m.places)
    m.places, m.mask = larger.places, larger.mask
    return True


cdef int32_t catalog_search(Catalog* c, uint64_t key) noexcept nogil:
    """Number of a segment whose key is not a direct one; NIL if it is not known."""
    cdef KeyMap* m = &c.numbers
    cdef uint64_t at
    if m.used == 0:
        return NIL
    at = map_home(m, key)
    while m.places[at].value != NIL and m.places[at].key != key:
        at = (at + 1) & m.mask
    return m.places[at].value


cdef int32_t* direct_place(Catalog* c, uint64_t key) noexcept nogil:
    """Where a new segment's number goes if its key is a direct one, or becomes one; else NULL.

    There are at most `SPARSE` times as many places as segments, and a few more.
    """
    cdef Direct* d = &c.direct[key >> 63]
    cdef uint64_t i = key - d.base, k, cap
    cdef int64_t number
    cdef int32_t* moved
    if i >= d.cap:
        if i >= FEW + SPARSE * <uint64_t>c.used:
            return NULL
        cap = max(i + 1, min(2 * d.cap, FEW + SPARSE * <uint64_t>c.used))
        moved = <int32_t*>realloc(d.numbers, cap * sizeof(int32_t))
        if moved == NULL:
            return NULL
        memset(moved + d.cap, 0xFF, (cap - d.cap) * sizeof(int32_t))     # NIL
        d.numbers, d.cap = moved, cap
        for number in range(c.used):           # those that were searched for until now
            k = c.items[number].key
            if k >> 63 == key >> 63 and k - d.base < cap:
                moved[k - d.base] = <int32_t>number
    return d.numbers + i


cdef Origin* catalog_find(Catalog* c, uint64_t key) noexcept nogil:
    cdef int32_t i = catalog_number(c, key)
    return &c.items[i] if i != NIL else NULL


cdef int32_t catalog_add(Catalog* c, uint64_t key, uint64_t parent_key, int32_t parent_at,
                         uint64_t local) noexcept nogil:
    """Note a segment, if it is new; its number, NIL if memory is short."""
    cdef KeyMap* m = &c.numbers
    cdef uint64_t at
    cdef int32_t number = catalog_number(c, key), parent = NIL
    cdef int32_t* place
    cdef Origin* o
    if number != NIL:
        return number
    if parent_at != NIL:
        parent = catalog_number(c, parent_key)     # it has been resident before
    if not grown_both(<void**>&c.parents, sizeof(Parent), <void**>&c.items, sizeof(Origin), &c.cap, c.used + 1):
        return NIL
    number = <int32_t>c.used
    place = direct_place(c, key)
    if place == NULL:
        if (m.places == NULL or 2 * m.used > <int64_t>m.mask) and not map_grow(m):
            return NIL
        at = map_home(m, key)
        while m.places[at].value != NIL:
            at = (at + 1) & m.mask
        m.places[at].key, m.places[at].value = key, number
        m.used += 1
    else:
        place[0] = number
    o = &c.items[number]
    o.key, o.parent_key, o.parent_at, o.local = key, parent_key, parent_at, local
    c.parents[number].seg, c.parents[number].at = parent, parent_at
    c.used += 1
    return number


cdef void catalog_free(Catalog* c) noexcept nogil:
    cdef int i
    for i in range(2):
        free(c.direct[i].numbers)
    free(c.items)
    free(c.parents)
    free(c.numbers.places)
