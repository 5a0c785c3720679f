# cython: language_level=3
"""Slots of one SGLang core and its KV events: what is cached, freed, evicted, and who is told.

Answers to `kv_manager/sglang_backend.rs`. A page is advertised while some slot has its text: as long as slots are
not told apart, stretches of a segment count how many; told, each slot knows its page.

Two faults of the reference under retraction are kept and counted (`leaked`, `freed_twice`), unless `conserve` is
set: a request retracted before its first page was cached frees the slots of its cached prefix although the tree
still serves them, and one retracted later loses its own copies of pages that the tree has from somebody else.

Costs: events O(segments); slots are told apart, and cost O(tokens) copies, with events of real tokens and after a
double free.

Not as in the reference: in a trace with events, a page stored without its predecessor (only after a double free)
keeps its name, where the reference names it by its own tokens alone.
"""
from libc.stdlib cimport malloc
from libc.string cimport memcpy

from mocker._common cimport ERR_MEMORY, ERR_OK, NIL, grown, int32_t, int64_t, uint64_t
from mocker._hash cimport chain_hash
from mocker._kv cimport Event, Path, Piece
from mocker._radix cimport (
    Node, map_delete, map_find, map_init, map_set, radix_evict, radix_extend, radix_foreign, radix_lock,
    radix_path_slots, radix_release, radix_stamp, radix_tell, tokens_give)
from mocker._sglang cimport SGL_FREE, SGL_RESERVED, SglangCore, SglRequest, Stretch
from mocker._sglang_requests cimport indices


# ---- events -----------------------------------------------------------------------------------------------------

cdef Event* event_new(SglangCore* c, bint stored) noexcept nogil:
    cdef void* moved = grown(c.events, &c.events_cap, c.events_used + 1, sizeof(Event))
    cdef Event* e
    if moved == NULL:
        c.error = ERR_MEMORY
        return NULL
    c.events = <Event*>moved
    e = &c.events[c.events_used]
    c.events_used += 1
    e.stored, e.has_parent, e.tier, e.parent_offset, e.parent_key = stored, 0, 0, 0, 0
    e.first, e.pieces = c.pieces_used, 0
    return e


cdef void event_pages(SglangCore* c, uint64_t key, int32_t offset, int32_t count, uint64_t local) noexcept nogil:
    """Append pages to the newest event; they join the piece before them if they continue the segment."""
    cdef Event* e = &c.events[c.events_used - 1]
    cdef Piece* p
    cdef void* moved
    if e.pieces > 0 and not c.real_tokens:
        p = &c.pieces[c.pieces_used - 1]
        if p.key == key and p.start + p.count == offset:
            p.count += count
            return
    moved = grown(c.pieces, &c.pieces_cap, c.pieces_used + 1, sizeof(Piece))
    if moved == NULL:
        c.error = ERR_MEMORY
        return
    c.pieces = <Piece*>moved
    p = &c.pieces[c.pieces_used]
    p.key, p.local, p.start, p.count, p.tokens = key, local, offset, count, NIL
    c.pieces_used += 1
    e.pieces += 1


# ---- stretches --------------------------------------------------------------------------------------------------

cdef int32_t stretch_new(SglangCore* c, uint64_t key, int32_t begin, int32_t start, int32_t end, int32_t count,
                         int32_t prev, int32_t next) noexcept nogil:
    """A stretch between two others of its segment."""
    cdef int32_t at = c.free_stretch
    cdef void* moved
    if at != NIL:
        c.free_stretch = c.stretches[at].next
    else:
        moved = grown(c.stretches, &c.stretches_cap, c.stretches_used + 1, sizeof(Stretch))
        if moved == NULL:
            c.error = ERR_MEMORY
            return 0
        c.stretches = <Stretch*>moved
        at = <int32_t>c.stretches_used
        c.stretches_used += 1
    c.stretches[at] = Stretch(key, begin, start, end, count, next)
    if prev != NIL:
        c.stretches[prev].next = at
    elif map_set(&c.segments, key, 0, at) != ERR_OK:
        c.error = ERR_MEMORY
    return at


cdef int32_t stretch_cut(SglangCore* c, int32_t at, int32_t page) noexcept nogil:
    """Cut a stretch at a page inside it; returns the later part."""
    cdef Stretch s = c.stretches[at]
    c.stretches[at].end = page
    return stretch_new(c, s.key, s.begin, page, s.end, s.count, at, s.next)


cdef void advertise(SglangCore* c, Path* path, int32_t i, int32_t start, int32_t end) noexcept nogil:
    """One more slot each for pages of element i; the stored event begins with the first that nobody else advertises."""
    cdef uint64_t key = path.keys[i]
    cdef int32_t begin = path.ends[i - 1] if i > 0 else 0
    cdef int32_t at = map_find(&c.segments, key, 0), prev = NIL, stop, count, before
    cdef Event* e
    while start < end:
        while at != NIL and c.stretches[at].end <= start:
            prev = at
            at = c.stretches[at].next
        if at == NIL or c.stretches[at].start > start:
            stop = end if at == NIL or c.stretches[at].start > end else c.stretches[at].start
            count = 1
            if prev != NIL and c.stretches[prev].end == start and c.stretches[prev].count == 1:
                c.stretches[prev].end = stop
            else:
                prev = stretch_new(c, key, begin, start, stop, 1, prev, at)
        else:
            if c.stretches[at].start < start:
                prev = at
                at = stretch_cut(c, at, start)
            if c.stretches[at].end > end:
                stretch_cut(c, at, end)
            c.stretches[at].count += 1
            count, stop = c.stretches[at].count, c.stretches[at].end
        if c.error:
            return
        if not c.open and count == 1:
            c.open = True
            e = event_new(c, True)
            if e == NULL:
                return
            if start > 0:
                before = i if start > begin else i - 1
                e.has_parent, e.parent_key = 1, path.keys[before]
                e.parent_offset = start - 1 - (path.ends[before - 1] if before > 0 else 0)
        if c.open:
            event_pages(c, key, start - begin, stop - start, 0)
        start = stop


cdef void withdraw(SglangCore* c, uint64_t key, int32_t start, int32_t end) noexcept nogil:
    """One slot less each for pages of a segment; those that nobody advertises any more are removed."""
    cdef int32_t at = map_find(&c.segments, key, 0), prev = NIL, next
    cdef Stretch* s
    while at != NIL and c.stretches[at].start < end:
        if c.stretches[at].end <= start:
            prev = at
            at = c.stretches[at].next
            continue
        if c.stretches[at].start < start:
            prev = at
            at = stretch_cut(c, at, start)
        if c.stretches[at].end > end:
            stretch_cut(c, at, end)
        if c.error:
            return
        s = &c.stretches[at]
        s.count -= 1
        next = s.next
        if s.count > 0:
            prev = at
            at = next
            continue
        if not c.open:
            c.open = True
            if event_new(c, False) == NULL:
                return
        event_pages(c, key, s.start - s.begin, s.end - s.start, 0)
        if prev != NIL:
            c.stretches[prev].next = next
        elif next != NIL:
            map_set(&c.segments, key, 0, next)
        else:
            map_delete(&c.segments, key, 0)
        s.next = c.free_stretch
        c.free_stretch = at
        at = next


cdef void withdraw_path(SglangCore* c, Path* path, int32_t start, int32_t end) noexcept nogil:
    """The same for pages of a path, as one event."""
    cdef int32_t i = 0, stop
    c.open = False
    while start < end:
        while path.ends[i] <= start:
            i += 1
        stop = path.ends[i] if path.ends[i] < end else end
        withdraw(c, path.keys[i], start, stop)
        start = stop


cdef void withdraw_copies(SglangCore* c, SglRequest* r, int32_t node) noexcept nogil:
    """The same for a request's own copies of pages on the path to a node that the tree has from somebody else."""
    cdef int32_t n = 0, k, low, first = <int32_t>(r.prefix // c.page)
    cdef Node* x
    while node != 0 and c.tree.nodes[node].end > first:
        if c.tree.nodes[node].owner != r.owner:
            if not indices(&c.scratch, &c.scratch_cap, n + 1):
                c.error = ERR_MEMORY
                return
            c.scratch[n] = node
            n += 1
        node = c.tree.nodes[node].parent
    c.open = False
    while n > 0:
        n -= 1
        x = &c.tree.nodes[c.scratch[n]]
        low = x.start
        for k in range(x.n):
            if x.ends[k] > first:
                withdraw(c, x.keys[k], low if low > first else first, x.ends[k])
            low = x.ends[k]


cdef void publish_stretches(SglangCore* c, SglRequest* r, int32_t pages) noexcept nogil:
    """Advertise the request's pages up to `pages` that its slots do not advertise yet, as one event."""
    cdef int32_t i = 0, start = r.advertised, stop
    if start >= pages:
        return
    c.open = False
    r.advertised = pages
    while start < pages:
        while r.path.ends[i] <= start:
            i += 1
        stop = r.path.ends[i] if r.path.ends[i] < pages else pages
        advertise(c, &r.path, i, start, stop)
        start = stop


# ---- what slots advertise ---------------------------------------------------------------------------------------

cdef int told_init(SglangCore* c) noexcept nogil:
    """Room for what each slot advertises."""
    cdef int64_t i
    c.slot_keys = <uint64_t*>malloc((c.total + 1) * sizeof(uint64_t))
    c.slot_offsets = <int32_t*>malloc((c.total + 1) * sizeof(int32_t))
    if c.slot_keys == NULL or c.slot_offsets == NULL or map_init(&c.advertised) != ERR_OK:
        return ERR_MEMORY
    for i in range(c.total):
        c.slot_offsets[i] = NIL
    return ERR_OK


cdef void publish_stored(SglangCore* c, SglRequest* r, int64_t first_new, int64_t pages) noexcept nogil:
    """Advertise the request's pages from the one with token `first_new` up to page `pages`.

    A page whose slot advertises already is passed over. The event begins with the first page that nobody else
    advertises and has all later ones; a page without an advertised predecessor is named like a first page.
    """
    cdef int64_t page = first_new // c.page
    cdef int32_t slot, before, offset = 0, i = 0, count
    cdef uint64_t key, local = 0
    cdef bint open = False
    cdef Event* e
    if not c.capture or first_new >= pages * c.page:
        return
    if not c.tree.told:
        publish_stretches(c, r, <int32_t>pages)
        return
    while not c.real_tokens and r.path.ends[i] <= page:
        i += 1
    while page < pages:
        slot = r.slots[(page + 1) * c.page - 1]
        before = NIL
        if page > 0:
            before = r.slots[page * c.page - 1]
            if c.slot_offsets[before] == NIL:
                before = NIL
        if c.real_tokens:
            local = r.path.local[page]
            key = local if before == NIL else chain_hash(c.slot_keys[before], local)
        else:
            if r.path.ends[i] <= page:
                i += 1
            key = r.path.keys[i]
            offset = <int32_t>page - (r.path.ends[i - 1] if i > 0 else 0)
        page += 1
        if c.slot_offsets[slot] != NIL:
            continue
        c.slot_keys[slot], c.slot_offsets[slot] = key, offset
        count = map_find(&c.advertised, key, offset)
        count = 1 if count == NIL else count + 1
        if map_set(&c.advertised, key, offset, count) != ERR_OK:
            c.error = ERR_MEMORY
        if not open and count == 1:
            open = True
            e = event_new(c, True)
            if e == NULL:
                return
            if before != NIL:
                e.has_parent, e.parent_key, e.parent_offset = 1, c.slot_keys[before], c.slot_offsets[before]
        if open:
            event_pages(c, key, offset, 1, local)


cdef void publish_removed(SglangCore* c, int32_t* slots, int64_t n) noexcept nogil:
    """Slots were freed: what they advertised is gone, unless other slots advertise it too."""
    cdef int64_t i
    cdef int32_t count, offset
    cdef uint64_t key
    cdef bint open = False
    if not c.capture:
        return
    for i in range(n):
        offset = c.slot_offsets[slots[i]]
        if offset == NIL:
            continue
        key = c.slot_keys[slots[i]]
        c.slot_offsets[slots[i]] = NIL
        count = map_find(&c.advertised, key, offset)
        if count == NIL:
            continue
        if count > 1:
            map_set(&c.advertised, key, offset, count - 1)
            continue
        map_delete(&c.advertised, key, offset)
        if not open:
            open = True
            if event_new(c, False) == NULL:
                return
        event_pages(c, key, offset, 1, 0)


cdef void tell(SglangCore* c) noexcept nogil:
    """Tell slots apart from now on: number what the tree, the free stack and the requests hold."""
    cdef int64_t i, k, tokens, start, depth
    cdef int32_t node
    cdef int32_t label
    cdef SglRequest* r
    cdef Node* x
    if c.tree.told:
        return
    label = <int32_t>radix_tell(&c.tree, 0)
    for i in range(c.req_used):
        r = &c.req[i]
        if r.status == SGL_FREE or r.node == NIL:
            continue
        tokens = r.alloc if r.status == SGL_RESERVED else r.computed
        if not indices(&r.slots, &r.slots_cap, tokens + 1):
            c.error = ERR_MEMORY
            return
        radix_path_slots(&c.tree, r.node, r.slots)
        depth = c.tree.nodes[r.node].end * c.page
        node = r.node
        while node != 0 and c.tree.nodes[node].end * c.page > r.prefix:
            x = &c.tree.nodes[node]
            if x.owner != r.owner:             # its own copies of pages that the tree has from somebody else
                start = x.start * c.page
                for k in range(start if start > r.prefix else r.prefix, x.end * c.page):
                    r.slots[k] = label
                    label += 1
            node = x.parent
        for k in range(depth, tokens):
            r.slots[k] = label
            label += 1
    if c.capture:
        tell_pages(c)


cdef void tell_pages(SglangCore* c) noexcept nogil:
    """From stretches to what each slot advertises."""
    cdef int64_t i, page
    cdef int32_t k, slot
    cdef SglRequest* r
    cdef Node* x
    cdef Stretch* s
    if told_init(c) != ERR_OK:
        c.error = ERR_MEMORY
        return
    for i in range(1, c.tree.nodes_used):
        x = &c.tree.nodes[i]
        if not x.alive:
            continue
        k = 0
        for page in range(x.start, x.end):
            while x.ends[k] <= page:
                k += 1
            slot = x.slots[(page - x.start + 1) * c.page - 1]
            c.slot_keys[slot] = x.keys[k]
            c.slot_offsets[slot] = <int32_t>page - c.stretches[map_find(&c.segments, x.keys[k], 0)].begin
    for i in range(c.req_used):
        r = &c.req[i]
        if r.status == SGL_FREE or r.node == NIL:
            continue
        k = 0
        for page in range(r.advertised):
            while r.path.ends[k] <= page:
                k += 1
            slot = r.slots[(page + 1) * c.page - 1]
            c.slot_keys[slot] = r.path.keys[k]
            c.slot_offsets[slot] = <int32_t>page - (r.path.ends[k - 1] if k > 0 else 0)
    for i in range(<int64_t>(c.segments.mask + 1)):
        k = c.segments.values[i]
        while k != NIL:
            s = &c.stretches[k]
            for page in range(s.start, s.end):
                if map_set(&c.advertised, s.key, <int32_t>page - s.begin, s.count) != ERR_OK:
                    c.error = ERR_MEMORY
            k = s.next


# ---- slots ------------------------------------------------------------------------------------------------------

cdef void free_slots(SglangCore* c, int32_t* slots, int64_t n) noexcept nogil:
    """Give tokens back and withdraw what their slots advertise."""
    if n <= 0:
        return
    tokens_give(&c.tree, slots, n)
    if c.tree.told:
        publish_removed(c, slots, n)


cdef int64_t own_copies(SglangCore* c, SglRequest* r, int32_t node, int64_t pages) noexcept nogil:
    """Tokens of the first `pages` pages whose slots the request has and the tree does not keep.

    Told, the slots are left at the start of `scratch`.
    """
    cdef int64_t page, n = 0, tokens = pages * c.page
    if not c.tree.told:
        return radix_foreign(&c.tree, node, r.prefix, r.owner)
    if not indices(&c.scratch, &c.scratch_cap, 2 * tokens + 1):
        c.error = ERR_MEMORY
        return 0
    radix_path_slots(&c.tree, node, c.scratch + tokens)
    for page in range(pages):
        if c.scratch[tokens + (page + 1) * c.page - 1] != r.slots[(page + 1) * c.page - 1]:
            memcpy(c.scratch + n, r.slots + page * c.page, c.page * sizeof(int32_t))
            n += c.page
    return n


cdef void abandon(SglangCore* c, SglRequest* r) noexcept nogil:
    """Free what a request holds without caching it: it is retracted or cancelled.

    The reference frees everything behind the pages known to be cached, whoever owns it, and forgets the rest.
    """
    cdef int64_t first = r.cached * c.page, copies
    if r.node == NIL:
        return
    if c.conserve:
        copies = own_copies(c, r, r.node, r.cached)
        if copies > 0 and c.capture and not c.tree.told:
            withdraw_copies(c, r, r.node)
        free_slots(c, c.scratch, copies)
        if first < r.prefix:
            first = r.prefix
    else:
        c.leaked += radix_foreign(&c.tree, r.node, r.prefix, r.owner)
        if first < r.prefix:
            tell(c)
            c.freed_twice += r.prefix - first
    free_slots(c, r.slots + first if c.tree.told else NULL, r.computed - first)
    if c.capture and not c.tree.told:
        withdraw_path(c, &r.path, <int32_t>(first // c.page), r.advertised)
    radix_release(&c.tree, r.node, r.node)


cdef void clean_up(SglangCore* c, SglRequest* r) noexcept nogil:
    """Cache the whole pages of a completed request and free the rest of what it holds."""
    cdef int64_t pages = r.full, rest = r.computed - pages * c.page, copies
    cdef int32_t node = r.node
    if rest > 0:
        free_slots(c, r.slots + pages * c.page if c.tree.told else NULL, rest)
    if r.node == NIL:
        return
    if pages > 0:
        publish_stored(c, r, r.cached * c.page, pages)
        node = radix_extend(&c.tree, r.node, &r.path, <int32_t>pages, r.owner, r.slots)
        radix_stamp(&c.tree, node)
        copies = own_copies(c, r, node, pages)
        if copies > 0 and c.capture and not c.tree.told:
            withdraw_copies(c, r, node)
        free_slots(c, c.scratch, copies)
    radix_release(&c.tree, node, r.node)


cdef void evict(SglangCore* c, int64_t tokens) noexcept nogil:
    cdef int64_t i
    radix_evict(&c.tree, tokens)
    if c.capture and not c.tree.told:
        c.open = False
        for i in range(c.tree.cuts_used):
            withdraw(c, c.tree.cuts[i].key, c.tree.cuts[i].start, c.tree.cuts[i].end)
    if c.tree.told:
        publish_removed(c, c.tree.gone, c.tree.gone_used)


cdef void cache_pages(SglangCore* c, SglRequest* r, int32_t pages) noexcept nogil:
    """Put a request's first pages into the tree and move its lock to their end."""
    cdef int32_t node
    if c.capture:
        publish_stored(c, r, r.cached * c.page, pages)
    node = radix_extend(&c.tree, r.node, &r.path, pages, r.owner, r.slots)
    radix_lock(&c.tree, node, r.node)
    radix_stamp(&c.tree, node)
    r.node = node
    r.cached = pages
