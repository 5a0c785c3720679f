# cython: language_level=3
"""The SGLang scheduler: queue policies, chunked prefill, decode with retraction, hand-off of prefills.

Answers to `scheduler/sglang/{config,core,policy,prefill,decode,request}.rs` and `kv_manager/sglang_backend.rs`. A
pass promotes activated destinations, orders the queue, admits prefill chunks within the budgets, decodes once for
everybody who runs, and books what ended. `sgl_forward` runs passes in which everybody only decodes: they change
lengths, the ratio and the clock, so it repeats those additions and nothing else.

Two faults of the reference under retraction are kept and counted (`leaked`, `freed_twice`), unless `conserve` is
set: a request retracted before its first page was cached frees the slots of its cached prefix although the tree
still serves them, and one retracted later loses its own copies of pages that the tree has from somebody else.

Costs: a pass is O(running requests + segments of the admitted prompts), a fast-forwarded one a few additions; an
LPM pass also O(segments of up to 128 waiting requests); events O(segments). Slots are told apart, and admissions
cost O(tokens) copies, with events of real tokens and after a double free.

Not as in the reference: in a trace with events, a page stored without its predecessor (only after a double free)
keeps its name, where the reference names it by its own tokens alone.
"""
from libc.math cimport INFINITY, NAN, fabs, isnan
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove, memset

from mocker._collect cimport gaps_add
from mocker._common cimport (
    END_CAPACITY, END_COMPLETED, END_NONE, END_OVER_BUDGET, END_REJECTED, ERR_MEMORY, ERR_OK, ERR_TIME, NIL,
    WORKER_DECODE, WORKER_PREFILL, grown, int32_t, int64_t, uint8_t, uint32_t, uint64_t)
from mocker._core cimport Admission, Signal, Spread
from mocker._hash cimport block_hash, chain_hash
from mocker._kv cimport Event, Path, Piece, path_free, path_reserve
from mocker._radix cimport (
    Node, map_delete, map_find, map_free, map_init, map_set, radix_clear, radix_evict, radix_extend,
    radix_foreign, radix_free, radix_init, radix_lock, radix_match, radix_match_pages, radix_path_slots, radix_stamp,
    radix_tell, radix_unlock, tokens_give, tokens_take)
from mocker._spec cimport sample_output_tokens
from mocker._timing cimport timing_decode_ms, timing_free, timing_prefill_ms

cdef enum:
    LPM_LIMIT = 128                # waiting requests beyond which LPM leaves the queue as it is
    IN_BATCH_TOKENS = 32           # cached prefix up to which LPM looks for it among the waiting, and least it counts
    LPM_SETTLE = 256               # passes that LPM may shuffle a stuck queue
    DRY_LIMIT = 1024               # passes without a token or an ending, apart from chunks, before somebody must go


# ---- memory -----------------------------------------------------------------------------------------------------

cdef int sgl_init(SglangCore* c) noexcept nogil:
    """Queues, tree and event log of a core whose configuration and timing are set; the rest is zeroed memory."""
    c.free_slot = NIL
    c.waiting_cap = 16
    c.waiting = <int32_t*>malloc(c.waiting_cap * sizeof(int32_t))
    c.last_emit = NAN
    c.next_own_key = <uint64_t>1 << 63
    c.next_owner = 1
    c.ratio = c.init_ratio
    if (c.waiting == NULL or radix_init(&c.tree, c.total, c.page, c.capture and c.real_tokens) != ERR_OK
            or radix_init(&c.fresh, 0, c.page, False) != ERR_OK or map_init(&c.pending_slots) != ERR_OK):
        return ERR_MEMORY
    c.tree.log = c.capture and not c.real_tokens
    c.free_stretch = NIL
    if c.tree.log and map_init(&c.segments) != ERR_OK:
        return ERR_MEMORY
    return told_init(c) if c.tree.told else ERR_OK


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


cdef void sgl_free(SglangCore* c) noexcept nogil:
    cdef int64_t i
    for i in range(c.req_used):
        path_free(&c.req[i].path)
        free(c.req[i].tail)
        free(c.req[i].plan)
        free(c.req[i].slots)
    free(c.req)
    free(c.running)
    free(c.waiting)
    free(c.prebuilt)
    free(c.pending)
    free(c.scratch)
    free(c.bursts)
    free(c.ended)
    free(c.notes)
    free(c.held)
    free(c.chunks)
    free(c.lengths)
    free(c.admissions)
    free(c.signals)
    free(c.slot_keys)
    free(c.slot_offsets)
    free(c.events)
    free(c.pieces)
    map_free(&c.advertised)
    map_free(&c.segments)
    free(c.stretches)
    map_free(&c.pending_slots)
    radix_free(&c.tree)
    radix_free(&c.fresh)
    timing_free(&c.timing)


cdef bint indices(int32_t** array, int64_t* capacity, int64_t need) noexcept nogil:
    """Room for `need` slot numbers."""
    cdef void* moved = grown(array[0], capacity, need, sizeof(int32_t))
    if moved == NULL:
        return False
    array[0] = <int32_t*>moved
    return True


cdef bint numbers(int64_t** array, int64_t* capacity, int64_t need) noexcept nogil:
    """Room for `need` ids."""
    cdef void* moved = grown(array[0], capacity, need, sizeof(int64_t))
    if moved == NULL:
        return False
    array[0] = <int64_t*>moved
    return True


cdef int32_t sgl_new(SglangCore* c, int64_t id, int64_t prompt, int64_t limit) noexcept nogil:
    """A slot for a request, not queued yet; the caller gives it its path. NIL if memory is short."""
    cdef int32_t slot = c.free_slot
    cdef SglRequest* r
    cdef void* moved
    if slot != NIL:
        c.free_slot = c.req[slot].next_free
    else:
        moved = grown(c.req, &c.req_cap, c.req_used + 1, sizeof(SglRequest))
        if moved == NULL:
            c.error = ERR_MEMORY
            return NIL
        c.req = <SglRequest*>moved
        slot = <int32_t>c.req_used
        c.req_used += 1
        memset(&c.req[slot], 0, sizeof(SglRequest))
    if (not indices(&c.running, &c.running_cap, c.req_used) or not indices(&c.prebuilt, &c.prebuilt_cap, c.req_used)
            or not numbers(&c.bursts, &c.bursts_cap, c.req_used)):
        c.error = ERR_MEMORY
        return NIL
    r = &c.req[slot]
    r.len = r.prompt = prompt
    r.computed = r.alloc = r.gen = r.prefix = 0
    r.limit = limit
    r.full = <int32_t>(prompt // c.page)
    r.cached = r.advertised = 0
    r.node = NIL
    r.status, r.role, r.done = SGL_WAITING, ROLE_PLAIN, False
    r.id = id
    r.handoff = r.attempt = NIL
    r.retractions = 0
    r.path.n = 0
    r.own_key = 0
    r.tail_used = r.plan_used = 0
    r.last_ms = NAN
    c.alive += 1
    return slot


cdef void slot_free(SglangCore* c, int32_t slot) noexcept nogil:
    c.req[slot].status = SGL_FREE
    c.req[slot].next_free = c.free_slot
    c.free_slot = slot
    c.alive -= 1


# ---- queues -----------------------------------------------------------------------------------------------------

cdef inline int32_t waiting_at(SglangCore* c, int64_t i) noexcept nogil:
    return c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]


cdef bint waiting_room(SglangCore* c) noexcept nogil:
    """Make room for one more request in the ring."""
    cdef int32_t* ring
    cdef int64_t i
    if c.n_waiting < c.waiting_cap:
        return True
    ring = <int32_t*>malloc(2 * c.waiting_cap * sizeof(int32_t))
    if ring == NULL:
        c.error = ERR_MEMORY
        return False
    for i in range(c.n_waiting):
        ring[i] = waiting_at(c, i)
    free(c.waiting)
    c.waiting = ring
    c.waiting_cap *= 2
    c.waiting_head = 0
    return True


cdef void waiting_append(SglangCore* c, int32_t slot) noexcept nogil:
    if waiting_room(c):
        c.waiting[(c.waiting_head + c.n_waiting) & (c.waiting_cap - 1)] = slot
        c.n_waiting += 1


cdef void waiting_prepend(SglangCore* c, int32_t slot) noexcept nogil:
    if waiting_room(c):
        c.waiting_head = (c.waiting_head - 1) & (c.waiting_cap - 1)
        c.waiting[c.waiting_head] = slot
        c.n_waiting += 1


cdef inline void waiting_pop(SglangCore* c) noexcept nogil:
    c.waiting_head = (c.waiting_head + 1) & (c.waiting_cap - 1)
    c.n_waiting -= 1


cdef void waiting_remove(SglangCore* c, int32_t slot) noexcept nogil:
    cdef int64_t i, n = 0
    cdef int32_t other
    for i in range(c.n_waiting):
        other = waiting_at(c, i)
        if other != slot:
            c.waiting[(c.waiting_head + n) & (c.waiting_cap - 1)] = other
            n += 1
    c.n_waiting = n


cdef int64_t list_remove(int32_t* list, int64_t n, int32_t slot) noexcept nogil:
    """Take a slot out of a list; returns the new length."""
    cdef int64_t i
    for i in range(n):
        if list[i] == slot:
            memmove(list + i, list + i + 1, (n - i - 1) * sizeof(int32_t))
            return n - 1
    return n


cdef void sgl_enqueue(SglangCore* c, int32_t slot) noexcept nogil:
    """Queue a new request at the back."""
    c.req[slot].status = SGL_WAITING
    c.count += 1
    waiting_append(c, slot)


cdef void sgl_enqueue_source(SglangCore* c, int32_t slot, int64_t handoff) noexcept nogil:
    """Queue the prefill of a hand-off: its KV is held from its completion to its release."""
    c.req[slot].role = ROLE_SOURCE
    c.req[slot].handoff = handoff
    sgl_enqueue(c, slot)


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
    e.stored, e.has_parent, e.parent_offset, e.parent_key = stored, 0, 0, 0
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


# ---- slots ------------------------------------------------------------------------------------------------------

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
    radix_unlock(&c.tree, r.node)


cdef void clean_up(SglangCore* c, SglRequest* r) noexcept nogil:
    """Cache the whole pages of a completed request and free the rest of what it holds."""
    cdef int64_t pages = r.full, rest = r.computed - pages * c.page, copies
    cdef int32_t node
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
    radix_unlock(&c.tree, r.node)


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


# ---- endings ----------------------------------------------------------------------------------------------------

cdef void signal(SglangCore* c, int64_t id, int64_t token, int terminal, double handoff_ms) noexcept nogil:
    """Note a token or an ending for the caller."""
    cdef Signal* s
    cdef void* moved
    if not c.record:
        return
    moved = grown(c.signals, &c.signals_cap, c.signals_used + 1, sizeof(Signal))
    if moved == NULL:
        c.error = ERR_MEMORY
        return
    c.signals = <Signal*>moved
    s = &c.signals[c.signals_used]
    c.signals_used += 1
    s.id, s.token, s.handoff_ms = id, token, handoff_ms
    s.terminal = <uint8_t>terminal
    s.completed = terminal != END_NONE
    s.rejected = terminal == END_REJECTED or terminal == END_OVER_BUDGET


cdef void note_end(SglangCore* c, SglRequest* r, int terminal) noexcept nogil:
    """A request is gone for its caller."""
    if not numbers(&c.ended, &c.ended_cap, c.ended_used + 1):
        c.error = ERR_MEMORY
        return
    c.ended[c.ended_used] = r.id
    c.ended_used += 1
    if c.rows != NULL:
        c.rows.terminal[r.id] = <signed char>terminal
        c.rows.tokens[r.id] = r.gen
        c.rows.last_token[r.id] = r.last_ms
    c.completed += 1
    c.count -= 1


cdef void note(SglangCore* c, int64_t what) noexcept nogil:
    """Append to `notes`: the id of a request gone, or ~id of one that made its first token."""
    if not numbers(&c.notes, &c.notes_cap, c.notes_used + 1):
        c.error = ERR_MEMORY
        return
    c.notes[c.notes_used] = what
    c.notes_used += 1


cdef void complete(SglangCore* c, int32_t slot) noexcept nogil:
    """A request has all its tokens: a registered source keeps its KV, others are cached and freed."""
    cdef SglRequest* r = &c.req[slot]
    note_end(c, r, END_COMPLETED)
    if r.role == ROLE_SOURCE:
        r.status = SGL_HELD
        c.n_held += 1
        if not numbers(&c.held, &c.held_cap, c.held_used + 1):
            c.error = ERR_MEMORY
            return
        c.held[c.held_used] = r.id
        c.held_used += 1
        return
    clean_up(c, r)
    c.generation += 1
    slot_free(c, slot)


cdef void give_up(SglangCore* c, int32_t slot, int terminal) noexcept nogil:
    """End a request that can never go on; it keeps the tokens that it got."""
    cdef SglRequest* r = &c.req[slot]
    signal(c, r.id, NIL, terminal, NAN)
    note(c, r.id)
    note_end(c, r, terminal)
    c.count += 1                               # `sgl_drop` counts it out
    sgl_drop(c, slot)


cdef void sgl_drop(SglangCore* c, int32_t slot) noexcept nogil:
    """Cancel a request, wherever it is, and free what it holds."""
    cdef SglRequest* r = &c.req[slot]
    cdef int64_t first
    if r.status == SGL_HELD:
        sgl_release_source(c, slot)
        return
    if r.status == SGL_PENDING:
        map_delete(&c.pending_slots, <uint64_t>r.handoff, 0)
        c.n_pending -= 1
        pending_sweep(c)
        c.generation += 1
    elif r.status == SGL_RESERVED:
        radix_unlock(&c.tree, r.node)
        first = r.prefix
        tokens_give(&c.tree, r.slots + first if c.tree.told else NULL, r.alloc - first)
        c.n_reserved -= 1
        c.generation += 1
    else:
        if r.status == SGL_RUNNING:
            c.n_running = list_remove(c.running, c.n_running, slot)
        elif r.status == SGL_PREBUILT:
            c.n_prebuilt = list_remove(c.prebuilt, c.n_prebuilt, slot)
        else:
            waiting_remove(c, slot)
        if r.node != NIL:
            abandon(c, r)
            c.generation += 1
        c.count -= 1
    slot_free(c, slot)


# ---- hand-off ---------------------------------------------------------------------------------------------------

cdef void sgl_release_source(SglangCore* c, int32_t slot) noexcept nogil:
    """Release a held source, or forget that a source is to be held."""
    cdef SglRequest* r = &c.req[slot]
    if r.status != SGL_HELD:
        r.role = ROLE_PLAIN
        return
    clean_up(c, r)
    c.n_held -= 1
    c.generation += 1
    slot_free(c, slot)


cdef void pending_sweep(SglangCore* c) noexcept nogil:
    """Drop entries of cancelled hand-offs once they are more than half; until then one may come to life again."""
    cdef int64_t i, n = 0
    if c.n_entries <= 2 * c.n_pending:
        return
    for i in range(c.n_entries):
        if map_find(&c.pending_slots, <uint64_t>c.pending[i], 0) != NIL:
            c.pending[n] = c.pending[i]
            n += 1
    c.n_entries = n


cdef bint sgl_reserve(SglangCore* c, int32_t slot, int64_t handoff) noexcept nogil:
    """Queue a destination for its reservation; false, and the slot is free again, if it never fits the pool."""
    cdef SglRequest* r = &c.req[slot]
    if (r.prompt + c.page - 1) // c.page * c.page > c.total:
        slot_free(c, slot)
        return False
    r.status, r.role, r.handoff = SGL_PENDING, ROLE_DESTINATION, handoff
    if (not numbers(&c.pending, &c.pending_cap, c.n_entries + 1)
            or map_set(&c.pending_slots, <uint64_t>handoff, 0, slot) != ERR_OK):
        c.error = ERR_MEMORY
        return True
    c.pending[c.n_entries] = handoff
    c.n_entries += 1
    c.n_pending += 1
    return True


cdef int32_t sgl_retry(SglangCore* c) noexcept nogil:
    """Try to reserve for the first pending destination, once a capacity generation; its slot, or NIL."""
    cdef int64_t skip = 0, footprint, fresh
    cdef int32_t slot, node
    cdef SglRequest* r
    while skip < c.n_entries and map_find(&c.pending_slots, <uint64_t>c.pending[skip], 0) == NIL:
        skip += 1
    c.n_entries -= skip
    memmove(c.pending, c.pending + skip, c.n_entries * sizeof(int64_t))
    if c.n_entries == 0:
        return NIL
    slot = map_find(&c.pending_slots, <uint64_t>c.pending[0], 0)
    r = &c.req[slot]
    if r.attempt == c.generation:
        return NIL
    r.attempt = c.generation
    node = radix_match(&c.tree, &r.path, r.full)
    radix_lock(&c.tree, node, NIL)
    r.prefix = c.tree.nodes[node].end * c.page
    r.advertised = c.tree.nodes[node].end
    footprint = (r.prompt + c.page - 1) // c.page * c.page
    fresh = footprint - r.prefix
    if fresh > c.tree.available + c.tree.evictable:
        radix_unlock(&c.tree, node)
        return NIL
    if fresh > c.tree.available:
        evict(c, fresh - c.tree.available)
    if c.tree.told:
        if not indices(&r.slots, &r.slots_cap, footprint + 1):
            c.error = ERR_MEMORY
            return NIL
        radix_path_slots(&c.tree, node, r.slots)
    if not tokens_take(&c.tree, fresh, r.slots + r.prefix if c.tree.told else NULL):
        radix_unlock(&c.tree, node)
        return NIL
    r.node = node
    r.owner = c.next_owner
    c.next_owner += 1
    r.alloc = footprint
    r.transferable = fresh
    r.status = SGL_RESERVED
    map_delete(&c.pending_slots, <uint64_t>r.handoff, 0)
    c.n_entries -= 1
    memmove(c.pending, c.pending + 1, c.n_entries * sizeof(int64_t))
    c.n_pending -= 1
    c.n_reserved += 1
    pending_sweep(c)
    return slot


cdef void sgl_activate(SglangCore* c, int32_t slot) noexcept nogil:
    """The prompt of a reserved destination has arrived: cache it and queue the request to run."""
    cdef SglRequest* r = &c.req[slot]
    cdef int64_t surplus = r.alloc - r.prompt
    if surplus > 0:
        tokens_give(&c.tree, r.slots + r.prompt if c.tree.told else NULL, surplus)
        c.generation += 1
    r.computed = r.prompt
    if c.capture:
        publish_stored(c, r, r.prefix, r.full)
    r.cached = r.full
    if r.full > 0:
        slot_cache(c, r)
    r.status = SGL_PREBUILT
    c.n_reserved -= 1
    c.count += 1
    c.prebuilt[c.n_prebuilt] = slot
    c.n_prebuilt += 1


cdef void slot_cache(SglangCore* c, SglRequest* r) noexcept nogil:
    """Insert all full pages of a request and move its lock; their events are out."""
    cdef int32_t node = radix_extend(&c.tree, r.node, &r.path, r.full, r.owner, r.slots)
    radix_lock(&c.tree, node, r.node)
    radix_stamp(&c.tree, node)
    r.node = node


# ---- admission --------------------------------------------------------------------------------------------------

cdef void order_waiting(SglangCore* c) noexcept nogil:
    """LPM: longest cached prefix first; requests that share a prefix with one before them and little with the cache
    come last, so that the first can compute it for all."""
    cdef int64_t i, k, n = c.n_waiting, cached
    cdef int64_t[LPM_LIMIT] score
    cdef int32_t[LPM_LIMIT] order
    cdef int32_t slot
    cdef int64_t value
    cdef SglRequest* r
    if n > LPM_LIMIT or n < 2:
        return
    radix_clear(&c.fresh)
    for i in range(n):
        slot = waiting_at(c, i)
        r = &c.req[slot]
        cached = radix_match_pages(&c.tree, &r.path, r.full) * c.page
        value = -cached
        if cached <= IN_BATCH_TOKENS and r.full > 0:
            if radix_match_pages(&c.fresh, &r.path, r.full) * c.page >= IN_BATCH_TOKENS:
                value += (<int64_t>1) << 60
            else:
                radix_extend(&c.fresh, 0, &r.path, r.full, 0, NULL)
        k = i
        while k > 0 and score[k - 1] > value:  # stable insertion: the queue is nearly sorted
            score[k], order[k] = score[k - 1], order[k - 1]
            k -= 1
        score[k], order[k] = value, slot
    for i in range(n):
        c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)] = order[i]


cdef inline int64_t clipped(SglangCore* c, SglRequest* r) noexcept nogil:
    """Output tokens that admission reckons with."""
    cdef int64_t rest = r.limit - r.gen
    return rest if rest < c.clip else c.clip


cdef inline int64_t paged(SglangCore* c, int64_t tokens) noexcept nogil:
    return (tokens + c.page - 1) // c.page * c.page


cdef int64_t extra_tokens(SglangCore* c) noexcept nogil:
    """Tokens that running requests reserve beyond their slots; waiting ones hold whole pages."""
    cdef int64_t i, n = 0
    if c.page == 1:
        return 0
    for i in range(c.n_running):
        n += c.req[c.running[i]].alloc - c.req[c.running[i]].computed
    return n


cdef double reserved_output(SglangCore* c) noexcept nogil:
    """Output that the running requests are expected to make yet; summed in their order."""
    cdef int64_t i
    cdef double reserved = 0.0
    for i in range(c.n_running):
        reserved += <double>clipped(c, &c.req[c.running[i]]) * c.ratio
    return reserved


cdef int hopeless(SglangCore* c, SglRequest* r) noexcept nogil:
    """Terminal status of a request at the head of an untouched pass that no later pass can admit, else END_NONE."""
    cdef int64_t chunk = r.len - r.computed
    if chunk == 0:
        return END_REJECTED
    if chunk > c.chunk:
        chunk = c.chunk // c.page * c.page
    if chunk == 0 or paged(c, chunk) > c.max_prefill or paged(c, chunk) > c.chunk:
        return END_OVER_BUDGET
    if c.conserve and paged(c, r.len) + clipped(c, r) >= c.total:
        return END_CAPACITY if r.gen > 0 else END_REJECTED
    return END_NONE


cdef bint take_chunk(SglangCore* c, SglRequest* r, int64_t chunk, int64_t* reused) noexcept nogil:
    """Slots for the next `chunk` tokens of a request; false if the pool has too few."""
    cdef int64_t end = r.computed + chunk, prefix
    cdef int32_t node, pages = <int32_t>(end // c.page)
    if c.tree.available < chunk:
        evict(c, chunk - c.tree.available)
    if c.tree.told and not indices(&r.slots, &r.slots_cap, end + 1):
        c.error = ERR_MEMORY
        return False
    if r.computed > 0:
        prefix = r.computed
        if not tokens_take(&c.tree, chunk, r.slots + prefix if c.tree.told else NULL):
            return False
    else:
        node = radix_match(&c.tree, &r.path, pages)
        prefix = c.tree.nodes[node].end * c.page
        if c.tree.told:
            radix_path_slots(&c.tree, node, r.slots)
        if not tokens_take(&c.tree, end - prefix, r.slots + prefix if c.tree.told else NULL):
            return False
        radix_lock(&c.tree, node, NIL)
        r.node = node
        r.prefix = prefix
        r.advertised = c.tree.nodes[node].end
        r.owner = c.next_owner
        c.next_owner += 1
    r.computed = end
    r.alloc = paged(c, end)
    if c.capture:
        publish_stored(c, r, prefix, pages)
    reused[0] = prefix
    return True


cdef void note_admission(SglangCore* c, SglRequest* r, int64_t reused, double now) noexcept nogil:
    cdef Admission* a
    cdef void* moved
    c.admitted += 1
    if c.rows != NULL:
        if isnan(c.rows.first_admit[r.id]):
            c.rows.first_admit[r.id] = now
            c.rows.first_reused[r.id] = reused
        if reused > c.rows.reused[r.id]:
            c.rows.reused[r.id] = reused
    if c.record:
        moved = grown(c.admissions, &c.admissions_cap, c.admissions_used + 1, sizeof(Admission))
        if moved == NULL:
            c.error = ERR_MEMORY
            return
        c.admissions = <Admission*>moved
        a = &c.admissions[c.admissions_used]
        c.admissions_used += 1
        a.id, a.reused = r.id, reused


cdef void note_chunk(SglangCore* c, SglRequest* r, int64_t reused, int64_t tokens) noexcept nogil:
    cdef Chunk* k
    cdef void* moved
    c.hit_tokens += reused
    c.hit_total += reused + tokens
    c.batch += 1
    c.batch_isl += r.computed
    c.batch_prefix += reused
    if c.metrics:
        moved = grown(c.chunks, &c.chunks_cap, c.chunks_used + 1, sizeof(Chunk))
        if moved == NULL:
            c.error = ERR_MEMORY
            return
        c.chunks = <Chunk*>moved
        k = &c.chunks[c.chunks_used]
        c.chunks_used += 1
        k.prompt, k.prefix, k.tokens = r.prompt, reused, tokens


cdef void promote_prebuilt(SglangCore* c, double now) noexcept nogil:
    """Activated destinations join the batch while there is a place."""
    cdef int64_t i = 0
    cdef int32_t slot
    while i < c.n_prebuilt and c.n_running < c.max_seqs:
        slot = c.prebuilt[i]
        i += 1
        c.req[slot].status = SGL_RUNNING
        c.running[c.n_running] = slot
        c.n_running += 1
        note_admission(c, &c.req[slot], 0, now)
    if i > 0:
        c.n_prebuilt -= i
        memmove(c.prebuilt, c.prebuilt + i, c.n_prebuilt * sizeof(int32_t))


cdef int64_t admit_waiting(SglangCore* c, double now) noexcept nogil:
    """Prefill chunks for the head of the queue, as far as pool and budgets go; the admitted are left in `scratch`.

    The whole chunk is charged, whatever of it is cached.
    """
    cdef int64_t places = c.max_seqs - c.n_running, n = 0, extend, chunk, charged, output, old, reused = 0
    cdef int64_t input = c.max_prefill, budget = c.chunk, room
    cdef double total
    cdef int32_t slot
    cdef int terminal
    cdef SglRequest* r
    if places <= 0 or c.n_waiting == 0 or c.n_prebuilt > 0 or c.n_pending > 0:
        return 0
    room = c.tree.available + c.tree.evictable - extra_tokens(c)
    total = <double>(room if room > 0 else 0) - reserved_output(c)
    while n < places and c.n_waiting > 0:
        slot = waiting_at(c, 0)
        r = &c.req[slot]
        if n == 0:
            terminal = hopeless(c, r)
            if terminal != END_NONE:
                give_up(c, slot, terminal)     # the reference leaves it at the head for ever
                continue
        extend = r.len - r.computed
        if extend == 0:
            break
        chunk = extend
        if extend > c.chunk:
            chunk = budget // c.page * c.page
            if chunk == 0:
                break
            if chunk > extend:
                chunk = extend
        charged = paged(c, chunk)
        output = 0 if chunk < extend else clipped(c, r)
        if <double>charged + <double>output >= total or charged > input or charged > budget:
            break
        old = r.alloc
        if not take_chunk(c, r, chunk, &reused):
            c.ratio = c.init_ratio
            break
        waiting_pop(c)
        note_admission(c, r, reused, now)
        note_chunk(c, r, reused, chunk)
        total -= <double>(r.alloc - old + output)
        input -= charged
        budget -= charged
        c.bursts[n] = slot                     # slots of the batch, until they are spread below
        n += 1
        if budget <= 0:
            break
    for room in range(n):
        slot = <int32_t>c.bursts[room]
        r = &c.req[slot]
        if r.computed < r.len:
            if r.computed // c.page > r.cached:
                cache_pages(c, r, <int32_t>(r.computed // c.page))
            waiting_prepend(c, slot)
        else:
            r.status = SGL_RUNNING
            c.running[c.n_running] = slot
            c.n_running += 1
    return n


# ---- decode -----------------------------------------------------------------------------------------------------

cdef uint64_t rotated(uint64_t x, int by) noexcept nogil:
    return (x << by) | (x >> (64 - by))


cdef void sip_round(uint64_t* v) noexcept nogil:
    v[0] += v[1]
    v[1] = rotated(v[1], 13) ^ v[0]
    v[0] = rotated(v[0], 32)
    v[2] += v[3]
    v[3] = rotated(v[3], 16) ^ v[2]
    v[0] += v[3]
    v[3] = rotated(v[3], 21) ^ v[0]
    v[2] += v[1]
    v[1] = rotated(v[1], 17) ^ v[2]
    v[2] = rotated(v[2], 32)


cdef uint64_t swapped(uint64_t x) noexcept nogil:
    """Bytes in the other order."""
    cdef uint64_t out = 0
    cdef int i
    for i in range(8):
        out = (out << 8) | ((x >> (8 * i)) & 0xFF)
    return out


cdef uint32_t hashed_token(SglRequest* r) noexcept nogil:
    """Token that no plan gives: SipHash-1-3 with zero keys of the UUID's bytes and the number of tokens so far."""
    cdef uint64_t[4] v
    cdef uint64_t[4] words
    cdef int i, _i
    v[0], v[1] = <uint64_t>0x736f6d6570736575, <uint64_t>0x646f72616e646f6d
    v[2], v[3] = <uint64_t>0x6c7967656e657261, <uint64_t>0x7465646279746573
    words[0], words[1], words[2] = swapped(r.uuid[0]), swapped(r.uuid[1]), <uint64_t>r.gen
    words[3] = <uint64_t>24 << 56              # length of the message
    for i in range(4):
        v[3] ^= words[i]
        sip_round(v)
        v[0] ^= words[i]
    v[2] ^= 0xFF
    for _i in range(3):
        sip_round(v)
    return <uint32_t>(v[0] ^ v[1] ^ v[2] ^ v[3])


cdef void page_filled(SglangCore* c, SglRequest* r) noexcept nogil:
    """The last page is full: it gets its identity."""
    cdef Path* path = &r.path
    cdef uint64_t local
    r.full += 1
    if not c.real_tokens:
        if path.n > 0 and path.keys[path.n - 1] == r.own_key:
            path.ends[path.n - 1] = r.full
            return
        if path_reserve(path, path.n + 1, False, 0) != ERR_OK:
            c.error = ERR_MEMORY
            return
        path.keys[path.n] = r.own_key
        path.ends[path.n] = r.full
        path.n += 1
        return
    if path_reserve(path, path.n + 1, True, 0) != ERR_OK:
        c.error = ERR_MEMORY
        return
    local = block_hash(r.tail, <size_t>c.page)
    path.keys[path.n] = local if path.n == 0 else chain_hash(path.keys[path.n - 1], local)
    path.local[path.n] = local
    path.ends[path.n] = path.n + 1
    path.n += 1
    r.tail_used = 0


cdef int64_t push_token(SglangCore* c, SglRequest* r) noexcept nogil:
    """One more token, whose slot is there; returns it (NIL without real tokens)."""
    cdef int64_t token = NIL
    if c.real_tokens:
        token = r.plan[r.gen] if r.gen < r.plan_used else hashed_token(r)
        r.tail[r.tail_used] = <uint32_t>token
        r.tail_used += 1
    if r.len + 1 > r.alloc:
        r.alloc += c.page
    r.len += 1
    r.gen += 1
    r.computed += 1
    if r.len == (r.full + <int64_t>1) * c.page:
        page_filled(c, r)
    return token


cdef inline double handoff_ms(SglangCore* c, SglRequest* r) noexcept nogil:
    """Time to transfer the prompt's KV when a prefill worker finishes it; NaN if not modelled."""
    if c.worker_type != WORKER_PREFILL or isnan(c.kv_bytes) or not (c.kv_bandwidth > 0.0):
        return NAN
    return <double>r.prompt * c.kv_bytes / (c.kv_bandwidth * 1e9) * 1000.0


cdef inline int64_t burst_limit(SglangCore* c, SglRequest* r, int64_t longest) noexcept nogil:
    cdef int64_t rest = r.limit - r.gen
    return rest if rest < longest else longest


cdef inline int64_t growth(SglangCore* c, SglRequest* r, int64_t burst) noexcept nogil:
    """Tokens by which the pages of a request grow with a burst."""
    cdef int64_t more = paged(c, r.len + burst) - r.alloc
    return more if more > 0 else 0


cdef int64_t make_room(SglangCore* c, int64_t longest) noexcept nogil:
    """Retract requests, those with the fewest tokens first, until everybody left can decode; one always is left.

    The retracted go to the front of the queue in this order. Returns the tokens to reserve.
    """
    cdef int64_t i, best, needed = 0, grow = 0, extra = extra_tokens(c), actual, logical, burst, retracted = 0
    cdef int32_t slot
    cdef SglRequest* r
    for i in range(c.n_running):
        r = &c.req[c.running[i]]
        burst = burst_limit(c, r, longest)
        needed += burst
        grow += growth(c, r, burst)
    while True:
        actual = c.tree.available + c.tree.evictable
        logical = actual - extra if actual > extra else 0
        if (actual >= needed and logical >= grow) or c.n_running <= 1:
            break
        best = 0
        for i in range(1, c.n_running):
            if c.req[c.running[i]].gen < c.req[c.running[best]].gen:
                best = i
        slot = c.running[best]
        r = &c.req[slot]
        burst = burst_limit(c, r, longest)
        needed -= burst
        grow -= growth(c, r, burst)
        extra -= r.alloc - r.computed
        c.n_running -= 1
        memmove(c.running + best, c.running + best + 1, (c.n_running - best) * sizeof(int32_t))
        abandon(c, r)
        r.node = NIL
        r.computed = r.alloc = r.prefix = 0
        r.cached = r.advertised = 0
        r.status = SGL_RETRACTED
        r.retractions += 1
        c.bursts[retracted] = slot
        retracted += 1
    for i in range(retracted - 1, -1, -1):
        waiting_prepend(c, <int32_t>c.bursts[i])
    if retracted > 0:
        c.preemptions += retracted
        c.preempted = True
    if c.tree.available < needed:
        evict(c, needed - c.tree.available)
    return needed


cdef void collect_token(SglangCore* c, SglRequest* r, double at, int64_t* together) noexcept nogil:
    """Note a token made at `at`, before it is counted; `together` counts those that follow the last pass's."""
    cdef double gap
    if r.gen == 0:
        c.rows.first_token[r.id] = at
    else:
        if r.last_ms == c.last_emit:
            together[0] += 1
        else:
            gaps_add(c.gaps, at - r.last_ms, 1)
        if r.gen == 1:
            gap = at - r.last_ms
            c.rows.second_gap[r.id] = gap if gap > 0.0 else 0.0
    r.last_ms = at


cdef double decode(SglangCore* c, double start) noexcept nogil:
    """Tokens for everybody who runs; returns when they are there."""
    cdef int64_t i, k, needed, burst, longest = 1, context = 0, token, used = 0, together = 0, n
    cdef int32_t slot
    cdef SglRequest* r
    cdef double at
    cdef bint gone = False, done
    if c.nextn and c.worker_type != WORKER_PREFILL:
        longest = c.nextn + 1
    needed = make_room(c, longest)
    n = c.n_running
    for i in range(n):
        context += c.req[c.running[i]].len
    if c.tree.told and not indices(&c.scratch, &c.scratch_cap, needed + 1):
        c.error = ERR_MEMORY
        return start
    if not tokens_take(&c.tree, needed, c.scratch):
        return start                           # one request, and the pool is exhausted
    at = start + timing_decode_ms(&c.timing, n, context if context < c.total else c.total, context // n)
    for i in range(n):
        r = &c.req[c.running[i]]
        burst = burst_limit(c, r, longest)
        c.bursts[i] = sample_output_tokens(&c.rng, c.rates, c.nextn, r.limit - r.gen) if longest > 1 else burst
    for i in range(n):
        slot = c.running[i]
        r = &c.req[slot]
        done = r.gen >= r.limit                # wants no token: the reference keeps it running for ever
        if done:
            signal(c, r.id, NIL, END_COMPLETED, NAN)
            note(c, r.id)
        elif c.bursts[i] > 0:
            c.made_by += 1
        for k in range(c.bursts[i]):
            if c.tree.told:
                if not indices(&r.slots, &r.slots_cap, r.computed + 1):
                    c.error = ERR_MEMORY
                    return start
                r.slots[r.computed] = c.scratch[used]
            used += 1
            if c.rows != NULL:
                if k == 0:
                    collect_token(c, r, at, &together)
                else:
                    gaps_add(c.gaps, 0.0, 1)
                    if r.gen == 1:
                        c.rows.second_gap[r.id] = 0.0
            token = push_token(c, r)
            c.made += 1
            done = r.gen >= r.limit
            if done:
                note(c, r.id)
            elif c.note_first and r.gen == 1:
                note(c, ~r.id)
            if c.record:
                signal(c, r.id, token, END_COMPLETED if done else END_NONE, handoff_ms(c, r) if done else NAN)
            if done:
                break
            if r.full > r.cached:
                cache_pages(c, r, r.full)
        if done:
            r.done = True
            gone = True
    tokens_give(&c.tree, c.scratch + used if c.tree.told else NULL, needed - used)
    if c.made > 0:
        if c.rows != NULL and together > 0:
            gaps_add(c.gaps, at - c.last_emit, together)
        c.last_emit = at
    if gone:
        n = c.n_running
        c.n_running = 0
        for i in range(n):
            slot = c.running[i]
            if c.req[slot].done:
                complete(c, slot)
            else:
                c.running[c.n_running] = slot
                c.n_running += 1
    return at


# ---- the pass ---------------------------------------------------------------------------------------------------

cdef void end_stuck(SglangCore* c, bint same_ratio) noexcept nogil:
    """End somebody if no later pass can differ from this one: the reference repeats it for ever.

    Not while a hand-off is under way, since its commands may free memory.
    """
    cdef SglRequest* r
    cdef int64_t patience
    if c.made > 0 or c.completed > 0:
        c.dry = 0
        return
    c.dry += 1
    if c.count == 0 or c.n_held > 0 or c.n_pending > 0 or c.n_reserved > 0:
        return
    if c.admitted > 0 or c.preempted:
        patience = DRY_LIMIT + (2 * c.total // c.chunk if c.chunk > 0 else 0)
        if c.dry < patience:
            return
    elif c.n_running > 0 and c.n_waiting > 0 and not same_ratio and c.tree.available + c.tree.evictable > c.page:
        c.preempted = True                     # the ratio still falls: the head may fit in a later pass
        return
    elif c.lpm and c.n_waiting > 1 and c.dry < LPM_SETTLE:
        c.preempted = True
        return
    c.dry = 0
    if c.n_running > 0:
        give_up(c, c.running[0], END_CAPACITY)
        return
    if c.n_waiting > 0:
        r = &c.req[waiting_at(c, 0)]
        give_up(c, waiting_at(c, 0), END_CAPACITY if r.gen > 0 or r.computed > 0 else END_REJECTED)


cdef void sgl_pass(SglangCore* c, double now) noexcept nogil:
    """One engine iteration that starts at `now`; its results are in the core until the next one."""
    cdef int64_t i, retractions = c.preemptions
    cdef double start = now, ratio = c.ratio
    c.passes += 1
    c.last_start = now
    c.completed = c.admitted = c.made = c.made_by = c.ended_used = c.held_used = c.notes_used = 0
    c.admissions_used = c.signals_used = c.chunks_used = c.lengths_used = 0
    c.batch = c.batch_isl = c.batch_prefix = c.hit_tokens = c.hit_total = 0
    c.preempted = c.steady = False
    promote_prebuilt(c, now)
    if c.lpm:
        order_waiting(c)
    admit_waiting(c, now)
    if c.batch > 0 and c.worker_type != WORKER_DECODE:
        start = now + timing_prefill_ms(&c.timing, c.batch, c.batch_isl // c.batch, c.batch_prefix // c.batch)
    if c.metrics and c.n_running > 0:
        if not numbers(&c.lengths, &c.lengths_cap, c.n_running):
            c.error = ERR_MEMORY
            return
        for i in range(c.n_running):
            c.lengths[i] = c.req[c.running[i]].len
        c.lengths_used = c.n_running
    c.end_ms = start
    if c.n_running > 0:
        c.end_ms = decode(c, start)
        c.steady = c.made > 0 and c.n_running > 0 and c.n_prebuilt == 0
    if not (c.end_ms < INFINITY):
        c.error = ERR_TIME
    if c.preemptions > retractions:
        c.ratio = c.init_ratio
        c.generation += 1
    c.ratio -= c.ratio_step
    if not (c.ratio > c.min_ratio):
        c.ratio = c.min_ratio
    end_stuck(c, ratio == c.ratio)
    if c.tree.error or c.fresh.error:
        c.error = ERR_MEMORY


# ---- fast-forward -----------------------------------------------------------------------------------------------

cdef int64_t head_need(SglangCore* c) noexcept nogil:
    """Tokens that the head of the queue must find free in an untouched pass."""
    cdef SglRequest* r = &c.req[waiting_at(c, 0)]
    cdef int64_t chunk = r.len - r.computed
    if chunk > c.chunk:
        return c.chunk // c.page * c.page
    return paged(c, chunk) + clipped(c, r)


cdef int64_t plain_steps(SglangCore* c) noexcept nogil:
    """Passes in which everybody decodes inside its page or lengthens its chain, and nobody ends or is retracted."""
    cdef int64_t i, steps, k, n = c.n_running, room
    cdef SglRequest* r
    cdef Node* x
    k = c.tree.available // n                  # without eviction
    room = c.tree.available + c.tree.evictable - extra_tokens(c)
    if c.page > 1 and room // n - c.page < k:
        k = room // n - c.page
    for i in range(n):
        r = &c.req[c.running[i]]
        steps = r.limit - r.gen - 1
        if r.cached != r.full or r.last_ms != c.last_emit:
            return 0
        x = &c.tree.nodes[r.node]
        if (c.capture or not x.chain or x.lock != 1 or x.children != 0 or x.owner != r.owner
                or x.keys[x.n - 1] != r.own_key):
            room = (r.full + <int64_t>1) * c.page - r.len - 1      # tokens before the page is full
            if room < steps:
                steps = room
        if steps < k:
            k = steps
        if k <= 0:
            return 0
    return k


cdef double sgl_forward(SglangCore* c, double now, double until, double last_start) noexcept nogil:
    """Fast-forward: passes that only decode, starting before `until` and not after `last_start`; the new now.

    Allowed after a pass in which everybody running made a token. The clock's and the ratio's steps are the same and
    in the same order as pass by pass. A queue that waits for memory is watched with a bound that is never too low
    on what it finds free, so a pass that could admit its head is left to `sgl_pass`.
    """
    cdef int64_t i, k, m = 0, n = c.n_running, context = 0, need = 0, room = 0, output = 0, pages, tick
    cdef SglRequest* r
    cdef Node* x
    cdef double next_now, first = now, left, expected
    cdef bint watch = False
    if not c.steady or c.nextn or c.tree.told or c.real_tokens or c.metrics or n == 0 or c.n_prebuilt > 0:
        return now
    if c.lpm and 0 < c.n_waiting <= LPM_LIMIT:
        return now                             # whoever arrives may come first
    if c.n_waiting > 0 and c.n_pending == 0:
        if n < c.max_seqs:
            if not (c.min_ratio >= 0.0) or hopeless(c, &c.req[waiting_at(c, 0)]) != END_NONE:
                return now
            watch = True
            need = head_need(c)
            room = c.tree.available + c.tree.evictable - extra_tokens(c)
            for i in range(n):
                output += clipped(c, &c.req[c.running[i]])
    k = plain_steps(c)
    if k <= 0:
        return now
    for i in range(n):
        context += c.req[c.running[i]].len
    while m < k and now < until and now <= last_start:
        if watch:
            left = <double>(room - n * (m // c.page) * c.page)
            if left < 0.0:
                left = 0.0
            expected = <double>(output - n * m) * c.ratio
            if expected > 0.0:
                left -= expected
            if not (<double>need >= left + 1e-6 * (1.0 + fabs(expected))):
                break
        next_now = now + timing_decode_ms(&c.timing, n, context if context < c.total else c.total, context // n)
        if not (next_now < INFINITY):
            break
        if c.gaps != NULL:
            gaps_add(c.gaps, next_now - now, n)
        if m == 0:
            first = next_now - now
        context += n
        c.ratio -= c.ratio_step
        if not (c.ratio > c.min_ratio):
            c.ratio = c.min_ratio
        c.last_start = now
        now = next_now
        m += 1
    if m == 0:
        return now
    tick = c.tree.tick
    for i in range(n):
        r = &c.req[c.running[i]]
        if r.gen == 1 and c.rows != NULL:
            c.rows.second_gap[r.id] = first
        r.len += m
        r.gen += m
        r.computed += m
        r.alloc = paged(c, r.len)
        r.last_ms = now
        pages = r.len // c.page
        if pages > r.full:                     # its newest page came in pass `pages * page - (len - m)`
            x = &c.tree.nodes[r.node]
            x.ends[x.n - 1] = x.end = <int32_t>pages
            x.stamp = tick + (pages * c.page - (r.len - m)) * n + i
            c.tree.protected += (pages - r.full) * c.page
            r.path.ends[r.path.n - 1] = <int32_t>pages
            r.full = r.cached = <int32_t>pages
    c.tree.tick += (m + 1) * n
    c.tree.available -= m * n
    c.last_emit = now
    c.passes += m
    return now


# ---- metrics ----------------------------------------------------------------------------------------------------

cdef void spread_add(Spread* s, double* mean, int64_t value) noexcept nogil:
    cdef double delta
    s.count += 1
    s.total += value
    delta = <double>value - mean[0]
    mean[0] += delta / <double>s.count
    s.variance += delta * (<double>value - mean[0])


cdef void sgl_metrics(SglangCore* c) noexcept nogil:
    """Forward-pass metrics of the pass just run, from `chunks`, `lengths` and the queues."""
    cdef int64_t i
    cdef SglRequest* r
    cdef double[4] mean
    memset(&c.fpm[0], 0, sizeof(c.fpm))
    memset(&mean[0], 0, sizeof(mean))
    c.fpm_prefill_tokens = c.fpm_prefix_tokens = 0
    for i in range(c.chunks_used):
        spread_add(&c.fpm[0], &mean[0], c.chunks[i].prompt)
        c.fpm_prefill_tokens += c.chunks[i].tokens
        c.fpm_prefix_tokens += c.chunks[i].prefix
    for i in range(c.lengths_used):
        spread_add(&c.fpm[1], &mean[1], c.lengths[i])
    for i in range(c.n_waiting):
        r = &c.req[waiting_at(c, i)]
        if r.gen == 0 and r.role != ROLE_DESTINATION:
            spread_add(&c.fpm[2], &mean[2], r.prompt)
        else:
            spread_add(&c.fpm[3], &mean[3], r.len)
    for i in range(c.n_prebuilt):
        spread_add(&c.fpm[3], &mean[3], c.req[c.prebuilt[i]].len)
    if c.n_pending + c.n_reserved > 0:
        for i in range(c.req_used):
            r = &c.req[i]
            if r.status == SGL_PENDING or r.status == SGL_RESERVED:
                spread_add(&c.fpm[3], &mean[3], r.prompt)
    for i in range(4):
        if c.fpm[i].count > 0:
            c.fpm[i].variance /= <double>c.fpm[i].count


cdef uint64_t sgl_active_blocks(SglangCore* c) noexcept nogil:
    """Pages in use, cached ones included; wraps round like the reference's when slots were freed twice."""
    cdef uint64_t tokens = <uint64_t>c.total - <uint64_t>c.tree.available + <uint64_t>extra_tokens(c)
    cdef int64_t i
    for i in range(c.n_prebuilt):
        tokens += <uint64_t>(c.req[c.prebuilt[i]].alloc - c.req[c.prebuilt[i]].computed)
    return tokens // <uint64_t>c.page + (tokens % <uint64_t>c.page != 0)
