# cython: language_level=3
"""A vLLM-style scheduler with one switch a rule: the reference's decisions, those of vLLM 0.33.0, and all between.

With no rule set it decides as `_vllm` (dynamo-mocker 1.3.0); with all but RULE_LATE as vLLM's synchronous scheduler
(`v1/core/sched/scheduler.py`, `kv_cache_manager.py`, `block_pool.py`), with RULE_LATE too as its asynchronous one.
`tests/model/vllm_rules.py` states the same in plain Python. `_vllm` does not know of this module.

Memory. vLLM gives each request blocks of its own beyond the prefix that it found, so one content may be there more
than once, and a look-up finds the copy that was registered first. Blocks still move in runs, here called copies:
consecutive blocks of one segment that were registered together and have the same holders. A request keeps the first
copy of each stretch that it holds; when somebody takes only the upper part of a copy it is cut, and the holders reach
the rest through `deeper`. Requests give blocks back from the last to the first, so the order of eviction is a queue
of copies, each eaten from its deepest block. Blocks without content are a count.

Costs: look-up, hold and release O(stretches of the path), times the copies of a segment where there are several;
eviction O(copies evicted); a pass O(running requests) plus the block operations of what happens in it; a
fast-forwarded pass a few additions.
"""
from libc.math cimport INFINITY, NAN, isnan
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

from mocker._collect cimport gaps_add
from mocker._common cimport (
    END_CAPACITY, END_COMPLETED, END_NONE, END_OVER_BUDGET, END_REJECTED, ERR_MEMORY, ERR_OK, ERR_TIME, NIL, ST_FREE,
    ST_PREEMPTED, ST_RUNNING, ST_WAITING, WORKER_DECODE, WORKER_PREFILL, grown, int32_t, int64_t, uint8_t, uint32_t,
    uint64_t)
from mocker._core cimport STOP_EMPTY, STOP_OTHER, STOP_SEQS, STOP_WAIT, Admission, Core, Request, Signal, Work
from mocker._hash cimport block_hash, chain_hash
from mocker._kv cimport Event, Path, Piece, path_reserve
from mocker._requests cimport core_enqueue, core_new, note, running_compact, signal, waiting_first, waiting_pop
from mocker._spec cimport rng_u32
from mocker._timing cimport timing_decode_ms, timing_prefill_ms

cdef enum Outcome:                 # of an attempt to schedule one request
    SCHEDULED = 0
    BLOCKED = 1
    LEFT = 2                       # it was preempted for its own sake


cdef inline int64_t least(int64_t a, int64_t b) noexcept nogil:
    return a if a < b else b


cdef inline int64_t most(int64_t a, int64_t b) noexcept nogil:
    return a if a > b else b


cdef inline int64_t blocks_of(Core* c, int64_t tokens) noexcept nogil:
    return (tokens + c.mask) >> c.shift


# ---- memory of the scheduler ------------------------------------------------------------------------------------

cdef int rules_init(VllmRulesCore* x, Core* c, int rules) noexcept nogil:
    """Empty state in zeroed memory, beside a core that is initialised; options are the caller's to set."""
    x.c = c
    x.rules = rules
    x.gate = True
    x.free_copy = x.oldest = x.newest = NIL
    x.flight_end = NAN
    return table_resize(x, 64)


cdef void rules_free(VllmRulesCore* x) noexcept nogil:
    cdef int64_t i
    for i in range(x.extra_cap):
        free(x.extra[i].holds)
    free(x.extra)
    free(x.copies)
    free(x.table_keys)
    free(x.table_heads)
    free(x.table_twice)
    free(x.found)
    free(x.scratch)
    free(x.batch)
    free(x.victims)
    free(x.flight)


cdef bint rules_room(VllmRulesCore* x) noexcept nogil:
    """An `Extra` for every slot of the core; false if memory is short."""
    cdef int64_t before = x.extra_cap
    cdef void* moved
    if x.c.req_used <= before:
        return True
    moved = grown(x.extra, &x.extra_cap, x.c.req_used, sizeof(Extra))
    if moved == NULL:
        x.c.error = ERR_MEMORY
        return False
    x.extra = <Extra*>moved
    memset(&x.extra[before], 0, (x.extra_cap - before) * sizeof(Extra))
    return True


cdef int32_t rules_new(VllmRulesCore* x, int64_t id, int64_t prompt, int64_t limit) noexcept nogil:
    """A slot for a request, not queued yet; the caller gives it its path. NIL if memory is short."""
    cdef int32_t slot = core_new(x.c, id, prompt, limit)
    if slot != NIL and not rules_room(x):
        return NIL
    return slot


# ---- segment table ----------------------------------------------------------------------------------------------

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


# ---- copies: lists by segment, the eviction queue ---------------------------------------------------------------

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
    """Newest in the eviction queue."""
    cdef Copy* k = &x.copies[at]
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
    if k.ref == 0:
        d.prev, d.next = k.prev, at
        if k.prev != NIL:
            x.copies[k.prev].next = low
        else:
            x.oldest = low
        k.prev = low


# ---- event log --------------------------------------------------------------------------------------------------

cdef Event* event_new(VllmRulesCore* x, bint stored) noexcept nogil:
    cdef void* moved = grown(x.c.pool.events, &x.c.pool.events_cap, x.c.pool.events_used + 1, sizeof(Event))
    cdef Event* e
    if moved == NULL:
        x.c.error = ERR_MEMORY
        return NULL
    x.c.pool.events = <Event*>moved
    e = &x.c.pool.events[x.c.pool.events_used]
    x.c.pool.events_used += 1
    memset(e, 0, sizeof(Event))
    e.stored, e.first = stored, x.c.pool.pieces_used
    return e


cdef void event_piece(VllmRulesCore* x, uint64_t key, uint64_t local, int32_t start, int32_t count,
                      uint32_t* tokens) noexcept nogil:
    """Append a piece to the newest event."""
    cdef int64_t size = x.c.block_size
    cdef void* moved = grown(x.c.pool.pieces, &x.c.pool.pieces_cap, x.c.pool.pieces_used + 1, sizeof(Piece))
    cdef Piece* e
    if moved == NULL:
        x.c.error = ERR_MEMORY
        return
    x.c.pool.pieces = <Piece*>moved
    e = &x.c.pool.pieces[x.c.pool.pieces_used]
    e.key, e.local, e.start, e.count, e.tokens = key, local, start, count, NIL
    if tokens != NULL:
        moved = grown(x.c.pool.event_tokens, &x.c.pool.event_tokens_cap, x.c.pool.event_tokens_used + size,
                      sizeof(uint32_t))
        if moved == NULL:
            x.c.error = ERR_MEMORY
            return
        x.c.pool.event_tokens = <uint32_t*>moved
        memcpy(x.c.pool.event_tokens + x.c.pool.event_tokens_used, tokens, size * sizeof(uint32_t))
        e.tokens = x.c.pool.event_tokens_used
        x.c.pool.event_tokens_used += size
    x.c.pool.pieces_used += 1
    x.c.pool.events[x.c.pool.events_used - 1].pieces += 1


cdef void log_stored(VllmRulesCore* x, Path* path, int32_t begin, int32_t end) noexcept nogil:
    """One stored event for the request blocks [begin, end); its parent is the block before them."""
    cdef Event* e = event_new(x, 1)
    cdef int32_t i = element_at(path, begin), low = element_begin(path, i), high, parent
    if e == NULL:
        return
    if begin > 0:
        parent = element_at(path, begin - 1)
        e.has_parent = 1
        e.parent_key = path.keys[parent]
        e.parent_offset = begin - 1 - element_begin(path, parent)
    while begin < end:
        high = <int32_t>least(path.ends[i], end)
        event_piece(x, path.keys[i], path.local[i] if path.local != NULL else 0, begin - low, high - begin,
                    path.tokens + <int64_t>i * x.c.block_size if path.tokens != NULL else NULL)
        begin, low = high, path.ends[i]
        i += 1


cdef bint elsewhere(VllmRulesCore* x, uint64_t key, int32_t block, int32_t but) noexcept nogil:
    """Whether a copy other than `but` has the block."""
    cdef int64_t place = table_place(x, key)
    cdef int32_t at = x.table_heads[place] if place != NIL else NIL
    while at != NIL:
        if at != but and x.copies[at].start <= block < x.copies[at].end:
            return True
        at = x.copies[at].right
    return False


# ---- operations on blocks ---------------------------------------------------------------------------------------

cdef inline int32_t element_at(Path* path, int32_t block) noexcept nogil:
    """Element that holds a request block."""
    cdef int32_t low = 0, high = path.n - 1, mid
    while low < high:
        mid = (low + high) >> 1
        if path.ends[mid] > block:
            high = mid
        else:
            low = mid + 1
    return low


cdef inline int32_t element_begin(Path* path, int32_t i) noexcept nogil:
    return path.ends[i - 1] if i > 0 else 0


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


cdef bint scratch_room(VllmRulesCore* x, int64_t need) noexcept nogil:
    cdef void* moved = grown(x.scratch, &x.scratch_cap, need, sizeof(int32_t))
    if moved == NULL:
        x.c.error = ERR_MEMORY
        return False
    x.scratch = <int32_t*>moved
    return True


cdef void give_back(VllmRulesCore* x) noexcept nogil:
    """An allocation failed: what it had found and nobody holds counts as released now."""
    cdef int64_t i, n = 0
    cdef int32_t at
    cdef bint alone
    for i in range(x.found_used):
        at = carve(x, &x.found[i])
        if x.copies[at].ref == 0:
            if not scratch_room(x, n + 1):
                return
            x.scratch[n] = at
            n += 1
    if not x.rules & RULE_LRU:
        while n > 0:
            n -= 1
            queue_remove(x, x.scratch[n])
            queue_append(x, x.scratch[n])
        return
    for i in range(n):                         # root first: a block at a time, each evicted before the ones below it
        at = x.scratch[i]
        while True:
            alone = x.copies[at].end - x.copies[at].start == 1
            if not alone:
                cut(x, at, x.copies[at].start + 1)
            queue_remove(x, at)
            queue_push(x, at)
            if alone:
                break
            at = x.copies[at].deeper


cdef void note_removed(VllmRulesCore* x, int32_t at, int32_t low, int32_t high) noexcept nogil:
    """Blocks [low, high) of a copy are evicted, deepest first: keep those that are nowhere else for the event."""
    cdef Copy* k = &x.copies[at]
    cdef bint twice = x.table_twice[table_place(x, k.key)]
    cdef int32_t block = high - 1, n
    cdef Piece* e
    cdef void* moved
    while block >= low:
        n = 0
        while block - n >= low and not (twice and elsewhere(x, k.key, block - n, at)):
            n += 1
        if n > 0:
            moved = grown(x.c.pool.evicted, &x.c.pool.evicted_cap, x.c.pool.evicted_used + 1, sizeof(Piece))
            if moved == NULL:
                x.c.error = ERR_MEMORY
                return
            x.c.pool.evicted = <Piece*>moved
            e = &x.c.pool.evicted[x.c.pool.evicted_used]
            x.c.pool.evicted_used += 1
            e.key, e.local, e.start, e.count, e.tokens = k.key, 0, block - n + 1, n, NIL
        block -= n + 1


cdef void log_removed(VllmRulesCore* x) noexcept nogil:
    """One removed event for what was evicted since the last one."""
    cdef int64_t i
    cdef Piece* e
    if x.c.pool.evicted_used == 0:
        return
    if event_new(x, 0) != NULL:
        for i in range(x.c.pool.evicted_used):
            e = &x.c.pool.evicted[i]
            event_piece(x, e.key, 0, e.start, e.count, NULL)
    x.c.pool.evicted_used = 0


cdef void take(VllmRulesCore* x, int64_t count) noexcept nogil:
    """`count` blocks that are known to be there: unused ones first, then the cached ones that left use first."""
    cdef int64_t room = x.c.pool.capacity - x.c.pool.active - x.c.pool.inactive
    cdef int32_t at, n
    cdef Copy* k
    x.c.pool.active += count
    count -= room
    if count <= 0:
        return
    x.c.pool.evictions += count
    x.c.pool.inactive -= count
    while count > 0:
        at = x.oldest
        k = &x.copies[at]
        n = <int32_t>least(k.end - k.start, count)
        if x.c.pool.capture:
            note_removed(x, at, k.end - n, k.end)
        k.end -= n
        count -= n
        if k.end == k.start:
            queue_remove(x, at)
            copy_drop(x, at)
        elif k.deeper != NIL:
            x.copies[k.deeper].upper = NIL
            k.deeper = NIL


cdef bint hold_add(VllmRulesCore* x, Extra* e, int32_t first, int32_t end) noexcept nogil:
    cdef void* moved = grown(e.holds, &e.cap, e.n + 1, sizeof(Hold))
    if moved == NULL:
        x.c.error = ERR_MEMORY
        return False
    e.holds = <Hold*>moved
    e.holds[e.n].first, e.holds[e.n].end = first, end
    e.n += 1
    e.done = end
    return True


cdef int32_t last_copy(VllmRulesCore* x, Extra* e) noexcept nogil:
    """The copy with the last block that a request holds by content."""
    cdef int32_t at = e.holds[e.n - 1].first, n = e.holds[e.n - 1].end - (e.holds[e.n - 2].end if e.n > 1 else 0)
    n -= x.copies[at].end - x.copies[at].start
    while n > 0:
        at = x.copies[at].deeper
        n -= x.copies[at].end - x.copies[at].start
    return at


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


cdef void log_new(VllmRulesCore* x, Path* path, int32_t begin, int32_t end) noexcept nogil:
    """Stored events for those of the request blocks [begin, end) that are nowhere yet."""
    cdef int32_t block, i, first = NIL
    for block in range(begin, end + 1):
        if block < end:
            i = element_at(path, block)
            if not elsewhere(x, path.keys[i], block - element_begin(path, i), NIL):
                if first == NIL:
                    first = block
                continue
        if first != NIL:
            log_stored(x, path, first, block)
            first = NIL


cdef void register(VllmRulesCore* x, Path* path, Extra* e, int32_t begin, int32_t end) noexcept nogil:
    """The request's blocks [begin, end), which it has and follow those it holds by content, get their content."""
    cdef int32_t i, low, high, at, last
    cdef int64_t place
    if begin >= end:
        return
    if x.c.pool.capture:
        log_new(x, path, begin, end)
    i = element_at(path, begin)
    x.next_stamp += 1
    while begin < end:
        low = element_begin(path, i)
        high = <int32_t>least(path.ends[i], end)
        place = table_place(x, path.keys[i])
        if place != NIL and begin > low and not x.table_twice[place] and e.n > 0:
            last = last_copy(x, e)             # grows if nobody else has it, or the blocks that follow
            if (x.copies[last].ref == 1 and x.copies[last].key == path.keys[i] and x.copies[last].deeper == NIL
                    and x.copies[last].end == begin - low
                    and (x.copies[last].right == NIL or x.copies[x.copies[last].right].start >= high - low)):
                x.copies[last].end = high - low
                e.holds[e.n - 1].end = e.done = high
                begin = high
                i += 1
                continue
        at = copy_new(x, path.keys[i], x.next_stamp, begin - low, high - low, 1)
        if place == NIL:
            table_insert(x, path.keys[i], at)
        else:
            insert_copy(x, place, at)
        if not hold_add(x, e, at, high):
            return
        begin = high
        i += 1


cdef void release(VllmRulesCore* x, Extra* e) noexcept nogil:
    """Give back everything that a request holds, last to first."""
    cdef int32_t i, at, n
    cdef int64_t k
    x.c.pool.active -= e.blank
    e.blank = 0
    i = e.n - 1
    while i >= 0:
        n = e.holds[i].end - (e.holds[i - 1].end if i > 0 else 0)
        at = e.holds[i].first
        k = 0
        while True:
            if not scratch_room(x, k + 1):
                return
            x.scratch[k] = at
            k += 1
            n -= x.copies[at].end - x.copies[at].start
            if n <= 0:
                break
            at = x.copies[at].deeper
        while k > 0:
            k -= 1
            at = x.scratch[k]
            x.copies[at].ref -= 1
            if x.copies[at].ref == 0:
                n = x.copies[at].end - x.copies[at].start
                x.c.pool.active -= n
                x.c.pool.inactive += n
                queue_append(x, at)
        i -= 1
    e.n = e.done = 0


# ---- contents of a request --------------------------------------------------------------------------------------

cdef void cover(VllmRulesCore* x, Request* r, int64_t count) noexcept nogil:
    """The path reaches over the first `count` blocks; generated blocks of a trace get the request's own segment."""
    cdef Path* path = &r.path
    if x.c.real_tokens or not x.c.caching or count <= (path.ends[path.n - 1] if path.n > 0 else 0):
        return
    if path_reserve(path, path.n + 1, False, 0) != ERR_OK:
        x.c.error = ERR_MEMORY
        return
    if path.n == 0 or path.keys[path.n - 1] != r.own_key:
        path.keys[path.n] = r.own_key
        path.n += 1
    path.ends[path.n - 1] = <int32_t>count


cdef void append_token(VllmRulesCore* x, Request* r, uint32_t token) noexcept nogil:
    """A real token; with it the last block may become one of the path."""
    cdef Core* c = x.c
    cdef Path* path = &r.path
    cdef uint64_t local
    r.tail[r.tail_used] = token
    r.tail_used += 1
    if r.tail_used < c.block_size:
        return
    r.tail_used = 0
    if not c.caching:
        return
    if path_reserve(path, path.n + 1, True, c.tokens_per_block) != ERR_OK:
        c.error = ERR_MEMORY
        return
    local = block_hash(r.tail, <size_t>c.block_size)
    path.keys[path.n] = local if path.n == 0 else chain_hash(path.keys[path.n - 1], local)
    path.local[path.n] = local
    path.ends[path.n] = path.n + 1
    if c.tokens_per_block:
        memcpy(path.tokens + path.n * c.block_size, r.tail, c.block_size * sizeof(uint32_t))
    path.n += 1


cdef inline void name(VllmRulesCore* x, Request* r) noexcept nogil:
    """Blocks whose content counts as known: generated ones as soon as their last token is, or when promoted."""
    if x.rules & RULE_FILL_EARLY and r.full < r.len >> x.c.shift:
        r.full = <int32_t>(r.len >> x.c.shift)


cdef void fill(VllmRulesCore* x, Request* r, Extra* e, int64_t count) noexcept nogil:
    """The first `count` blocks, which the request has, are full: others can find them from now on."""
    cdef int64_t idle, i, used
    cdef int32_t begin = e.done, end = <int32_t>count
    if not x.c.caching or begin >= end:
        return
    cover(x, r, count)
    e.blank -= end - begin
    if x.rules & RULE_OWN_COPY:
        register(x, &r.path, e, begin, end)
        return
    x.c.pool.active -= find(x, &r.path, begin, end, True, &idle)   # their content is there: the own blocks go
    pick(x)
    used = x.found_used
    for i in range(used):
        register(x, &r.path, e, begin, x.found[i].begin)
        begin = x.found[i].begin + x.found[i].to - x.found[i].at
        hold_add(x, e, x.found[i].copy, begin)
    register(x, &r.path, e, begin, end)


cdef bint allocate(VllmRulesCore* x, Request* r, Extra* e, int64_t target, int64_t hits) noexcept nogil:
    """Blocks for the first `target` tokens, all or nothing; contents that this completes are registered.

    At an admission `hits` blocks were found (they are in `found`) and become the first ones.
    """
    cdef Core* c = x.c
    cdef int64_t held = e.done + e.blank, last = blocks_of(c, target), known, reach, fresh, idle = 0, i, used
    cdef int32_t begin, picked
    if not c.caching:
        fresh = last - held
        if fresh > c.pool.capacity - c.pool.active:
            return False
        if fresh > 0:
            c.pool.active += fresh
            e.blank += <int32_t>fresh
        return True
    name(x, r)
    known = r.full
    if x.rules & RULE_FULL_ONLY:
        known = least(known, target >> c.shift)
    cover(x, r, known)
    if x.rules & RULE_OWN_COPY:
        picked = <int32_t>hits
        if hits > 0:
            for i in range(x.found_used):
                if x.copies[x.found[i].copy].ref == 0:
                    idle += x.found[i].to - x.found[i].at
        else:
            x.found_used = 0
    else:
        reach = most(least(known, last), hits)
        cover(x, r, reach)
        picked = find(x, &r.path, <int32_t>held, <int32_t>reach, True, &idle)
    fresh = most(last - held, 0) - picked
    if fresh + idle > c.pool.capacity - c.pool.active:
        if not x.rules & RULE_OWN_COPY and idle > 0:
            give_back(x)
        return False
    if picked > 0:
        pick(x)
    if fresh > 0:
        take(x, fresh)
    if x.rules & RULE_OWN_COPY:
        log_removed(x)                         # before the new ones: an evicted content may be one of them
        for i in range(x.found_used if picked > 0 else 0):
            hold_add(x, e, x.found[i].copy, x.found[i].begin + x.found[i].to - x.found[i].at)
        e.blank += <int32_t>fresh
        fill(x, r, e, least(known, most(last, held)))
        return True
    if e.blank > 0:
        refill(x, r, e, least(known, held))
    if e.blank > 0 or held >= last:
        e.blank += <int32_t>fresh
        log_removed(x)
        return True
    begin = <int32_t>held
    used = x.found_used
    for i in range(used):
        register(x, &r.path, e, begin, x.found[i].begin)
        begin = x.found[i].begin + x.found[i].to - x.found[i].at
        hold_add(x, e, x.found[i].copy, begin)
    if begin < least(known, last):
        register(x, &r.path, e, begin, <int32_t>least(known, last))
    e.blank = <int32_t>(last - e.done)
    log_removed(x)
    return True


cdef void refill(VllmRulesCore* x, Request* r, Extra* e, int64_t count) noexcept nogil:
    """`fill` that leaves `found` as it is."""
    cdef Piece2* found = x.found
    cdef int64_t used = x.found_used, cap = x.found_cap
    if e.done >= count:
        return
    x.found, x.found_used, x.found_cap = NULL, 0, 0
    fill(x, r, e, count)
    free(x.found)
    x.found, x.found_used, x.found_cap = found, used, cap


cdef inline bint lazy(VllmRulesCore* x) noexcept nogil:
    """Generated blocks may be registered later than they are full: nobody but their request could find them."""
    return (not x.c.real_tokens and not x.c.pool.capture
            and (x.rules & (RULE_FILL_EARLY | RULE_SLOT_AT_USE)) == (RULE_FILL_EARLY | RULE_SLOT_AT_USE)
            and not x.rules & RULE_LATE)


cdef void let_go(VllmRulesCore* x, int32_t slot) noexcept nogil:
    """Release a request's blocks, after registering those that `lazy` left out."""
    cdef Request* r = &x.c.req[slot]
    cdef Extra* e = &x.extra[slot]
    cdef int64_t full
    if lazy(x) and e.blank > 0:
        full = least(r.computed, r.len) >> x.c.shift
        name(x, r)
        fill(x, r, e, least(full, r.full))
    release(x, e)


# ---- queues -----------------------------------------------------------------------------------------------------

cdef inline bint before(VllmRulesCore* x, int32_t a, int32_t b) noexcept nogil:
    """Priority, then arrival."""
    if x.extra[a].priority != x.extra[b].priority:
        return x.extra[a].priority < x.extra[b].priority
    return x.extra[a].order < x.extra[b].order


cdef void rules_enqueue(VllmRulesCore* x, int32_t slot, int64_t place, int64_t priority) noexcept nogil:
    """Queue a new request; `place` as `rules_drop` gave it for the same id, else NIL."""
    cdef Core* c = x.c
    cdef int64_t at, up, m = c.waiting_cap - 1
    x.extra[slot].priority = priority
    x.extra[slot].order = x.next_order
    x.next_order += 1
    core_enqueue(c, slot, NIL if x.by_priority else place)
    if not x.by_priority or c.error:
        return
    m = c.waiting_cap - 1
    at = c.waiting_places - 1
    while at > 0:
        up = c.waiting[(c.waiting_head + at - 1) & m]
        if up >= 0 and not before(x, slot, <int32_t>up):
            break
        c.waiting[(c.waiting_head + at) & m] = <int32_t>up
        c.waiting[(c.waiting_head + at - 1) & m] = slot
        at -= 1


cdef void waiting_prepend(VllmRulesCore* x, int32_t slot) noexcept nogil:
    """Back to the front of the queue, or to its place by priority."""
    cdef Core* c = x.c
    cdef int32_t* ring
    cdef int64_t i, m
    cdef int32_t down
    if c.waiting_places >= c.waiting_cap:
        ring = <int32_t*>malloc(2 * c.waiting_cap * sizeof(int32_t))
        if ring == NULL:
            c.error = ERR_MEMORY
            return
        for i in range(c.waiting_places):
            ring[i] = c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]
        free(c.waiting)
        c.waiting = ring
        c.waiting_cap *= 2
        c.waiting_head = 0
    m = c.waiting_cap - 1
    c.waiting_head = (c.waiting_head - 1) & m
    c.waiting[c.waiting_head] = slot
    c.waiting_places += 1
    c.n_waiting += 1
    if not x.by_priority:
        return
    i = 0
    while i + 1 < c.waiting_places:
        down = c.waiting[(c.waiting_head + i + 1) & m]
        if down >= 0 and not before(x, down, slot):
            break
        c.waiting[(c.waiting_head + i) & m] = down
        c.waiting[(c.waiting_head + i + 1) & m] = slot
        i += 1


cdef void waiting_remove(Core* c, int32_t slot) noexcept nogil:
    cdef int64_t i, k = 0, m = c.waiting_cap - 1
    cdef int32_t other
    for i in range(c.waiting_places):
        other = c.waiting[(c.waiting_head + i) & m]
        if other != slot:
            c.waiting[(c.waiting_head + k) & m] = other
            k += 1
    if k < c.waiting_places:
        c.n_waiting -= 1
        c.waiting_places = k


# ---- endings ----------------------------------------------------------------------------------------------------

cdef void slot_free(VllmRulesCore* x, int32_t slot) noexcept nogil:
    cdef Core* c = x.c
    cdef Extra* e = &x.extra[slot]
    e.pending = e.flight = e.priority = e.order = 0
    c.req[slot].status = ST_FREE
    c.req[slot].next_free = c.free_slot
    c.free_slot = slot
    c.count -= 1


cdef void request_end(VllmRulesCore* x, int32_t slot, int terminal, bint late) noexcept nogil:
    """Free what a request holds and forget it; the queue that it is in is the caller's to mend.

    `late` if its signal follows the tokens of the pass.
    """
    cdef Core* c = x.c
    cdef Request* r = &c.req[slot]
    cdef void* moved
    let_go(x, slot)
    if late:
        moved = grown(c.gone_late, &c.gone_late_cap, c.gone_late_used + 1, sizeof(int64_t))
        if moved == NULL:
            c.error = ERR_MEMORY
            return
        c.gone_late = <int64_t*>moved
        c.gone_late[c.gone_late_used] = r.id
        c.gone_late_used += 1
    else:
        note(c, r.id)
    if c.rows != NULL:
        c.rows.terminal[r.id] = <signed char>terminal
        c.rows.tokens[r.id] = r.gen
        c.rows.last_token[r.id] = r.last_ms
    slot_free(x, slot)
    c.completed += 1


cdef void end_head(VllmRulesCore* x, int32_t slot, int terminal) noexcept nogil:
    """The first waiting request leaves without a token."""
    waiting_pop(x.c)
    signal(x.c, True, x.c.req[slot].id, NIL, terminal, NAN)
    request_end(x, slot, terminal, True)


cdef int64_t rules_drop(VllmRulesCore* x, int32_t slot) noexcept nogil:
    """Cancel a request. Returns the place to give to `rules_enqueue` if the same id comes again, else NIL."""
    cdef Core* c = x.c
    cdef Request* r = &c.req[slot]
    cdef int64_t i, at, place = NIL
    let_go(x, slot)
    if r.status == ST_RUNNING:
        r.status = ST_FREE
        running_compact(c)
    elif x.by_priority:
        waiting_remove(c, slot)
    else:
        for i in range(c.waiting_places):
            at = (c.waiting_head + i) & (c.waiting_cap - 1)
            if c.waiting[at] == slot:
                c.next_place -= 1
                place = c.next_place
                c.waiting[at] = c.next_place
                c.n_waiting -= 1
                break
    slot_free(x, slot)
    return place


# ---- preemption -------------------------------------------------------------------------------------------------

cdef void undo(VllmRulesCore* x, int32_t slot) noexcept nogil:
    """Give back what a request preempted in this pass was scheduled for."""
    cdef Core* c = x.c
    cdef Request* r = &c.req[slot]
    cdef int64_t i, tokens
    if r.pass_no != c.pass_no and r.pass_no != -c.pass_no:
        return
    if c.metrics:
        c.works[r.work].undone = True
    tokens = 1 if r.pass_no < 0 else r.used
    c.budget += tokens
    x.extra[slot].flight -= tokens
    if r.pass_no > 0 and r.used_prompt > 0 and c.worker_type != WORKER_DECODE:
        c.batch -= 1
        c.batch_isl -= r.used_prefix + r.used_prompt
        c.batch_prefix -= r.used_prefix
    r.pass_no = 0
    for i in range(x.batch_used):
        if x.batch[i].slot == slot:
            x.batch[i].tokens = NIL
            if x.batch[i].makes:
                x.making -= 1
                x.making_length -= r.len


cdef int32_t preempt(VllmRulesCore* x) noexcept nogil:
    """Take the blocks of one running request and queue it again."""
    cdef Core* c = x.c
    cdef int64_t i, best = NIL
    cdef int32_t slot
    cdef Request* r
    cdef void* moved
    for i in range(c.n_running):
        if c.req[c.running[i]].status != ST_RUNNING:
            continue
        if best != NIL and x.by_priority and before(x, c.running[i], c.running[best]):
            continue
        best = i
        if c.fifo and not x.by_priority:
            break
    if best == NIL:
        return NIL
    if x.by_priority and best < x.place:
        x.place -= 1
    slot = c.running[best]
    c.n_running -= 1
    memmove(c.running + best, c.running + best + 1, (c.n_running - best) * sizeof(int32_t))
    if x.planning:
        undo(x, slot)
    let_go(x, slot)
    r = &c.req[slot]
    r.status = ST_PREEMPTED
    r.computed = r.alloc = 0
    r.preemptions += 1
    x.extra[slot].pending = 0
    c.preemptions += 1
    c.preempted = True
    if c.record:
        moved = grown(x.victims, &x.victims_cap, x.victims_used + 1, sizeof(int64_t))
        if moved == NULL:
            c.error = ERR_MEMORY
            return slot
        x.victims = <int64_t*>moved
        x.victims[x.victims_used] = r.id
        x.victims_used += 1
    waiting_prepend(x, slot)
    return slot


cdef void outgrown(VllmRulesCore* x, int32_t slot, bint late) noexcept nogil:
    """End a request that was preempted for its own sake while nobody else holds a block: it can never fit."""
    if x.rules & RULE_LATE or x.c.pool.active > 0:
        return
    waiting_remove(x.c, slot)
    signal(x.c, late, x.c.req[slot].id, NIL, END_CAPACITY, NAN)
    request_end(x, slot, END_CAPACITY, late)


# ---- scheduling -------------------------------------------------------------------------------------------------

cdef void join(VllmRulesCore* x, int32_t slot, int64_t tokens) noexcept nogil:
    """The request is in the batch: for the caller, the metrics and the next pass."""
    cdef Core* c = x.c
    cdef Request* r = &c.req[slot]
    cdef Batched* b
    cdef Work* w
    cdef void* moved
    if c.record or x.rules & RULE_LATE:
        b = &x.batch[x.batch_used]
        b.id, b.tokens, b.slot, b.makes = r.id, tokens, slot, 0
        x.batch_used += 1
        if x.rules & RULE_LATE and r.computed >= r.len + x.extra[slot].pending:
            b.makes = 1
            x.making += 1
            x.making_length += r.len
            if r.limit > 0:
                x.extra[slot].pending += 1
    if c.metrics:
        moved = grown(c.works, &c.works_cap, c.works_used + 1, sizeof(Work))
        if moved == NULL:
            c.error = ERR_MEMORY
            return
        c.works = <Work*>moved
        w = &c.works[c.works_used]
        r.work = c.works_used
        c.works_used += 1
        w.total, w.prompt_tokens, w.prefix, w.prompt, w.length = r.used, r.used_prompt, r.used_prefix, r.prompt, r.len
        w.undone = False


cdef inline int64_t unchunked(VllmRulesCore* x, Request* r, int64_t cached) noexcept nogil:
    """Tokens that must go into one pass with chunking off."""
    return least((r.len if x.rules & RULE_WHOLE_TAIL else r.prompt) - r.computed - cached, x.cap)


cdef Outcome schedule(VllmRulesCore* x, int32_t slot, int64_t cached, int64_t hits, bint admit) noexcept nogil:
    """Give one request its share of the budget and the blocks for it."""
    cdef Core* c = x.c
    cdef Request* r = &c.req[slot]
    cdef Extra* e = &x.extra[slot]
    cdef int64_t start = r.computed + cached, rest = r.len + e.pending - start, want, target, prompt_before
    cdef int32_t victim
    if not c.chunked and (admit or not x.rules & RULE_WHOLE_TAIL) and unchunked(x, r, cached) > c.budget:
        return BLOCKED
    if c.budget == 0 and rest > 0:
        return BLOCKED
    want = least(least(rest, x.cap), c.budget)
    target = start + want
    while not allocate(x, r, e, target, hits):
        victim = preempt(x)
        if victim == NIL or c.error:
            return BLOCKED
        if victim == slot:
            outgrown(x, slot, True)
            return LEFT
    r.computed = r.alloc = target
    r.partial = e.blank > 0
    e.flight += want
    r.pass_no = c.pass_no
    r.used = want
    prompt_before = least(start, r.prompt)
    if x.rules & RULE_CHARGE_GENERATED:
        r.used_prefix = start
        r.used_prompt = want if start < r.prompt or rest > 1 else 0
    else:
        r.used_prefix = prompt_before
        r.used_prompt = least(target, r.prompt) - prompt_before
    if r.used_prompt > 0 and c.worker_type != WORKER_DECODE:
        c.batch += 1
        c.batch_isl += r.used_prefix + r.used_prompt
        c.batch_prefix += r.used_prefix
    join(x, slot, want)
    if admit:
        waiting_pop(c)
        r.status = ST_RUNNING
        c.running[c.n_running] = slot
        c.n_running += 1
    c.budget -= want
    return SCHEDULED


cdef void schedule_running(VllmRulesCore* x) noexcept nogil:
    """Running requests in admission order, as far as the budget goes."""
    cdef Core* c = x.c
    cdef int32_t slot
    cdef Request* r
    cdef Extra* e
    cdef int64_t target
    cdef Outcome outcome
    cdef bint late = (x.rules & RULE_LATE) != 0, put_off = lazy(x), early = (x.rules & RULE_FILL_EARLY) != 0
    cdef bint noted = c.record or c.metrics
    cdef Batched* b
    x.place = 0
    while x.place < c.n_running and c.budget > 0:
        slot = c.running[x.place]
        r = &c.req[slot]
        e = &x.extra[slot]
        if late and r.computed >= r.len and r.gen + e.pending >= r.limit:
            x.place += 1                       # its last token is on its way
            continue
        target = r.len + e.pending
        if (r.computed == target - 1 and r.computed >= r.prompt and target <= ((e.done + e.blank) << c.shift)
                and (put_off or not early or not c.caching or e.blank == 0
                     or least(r.len, target) >> c.shift <= e.done)):
            r.computed = r.alloc = target      # one token of a block that it has: the usual decode step
            e.flight += 1
            r.pass_no = -c.pass_no
            if noted:
                r.used, r.used_prompt, r.used_prefix = 1, 0, r.prompt
                join(x, slot, 1)
            elif late:
                b = &x.batch[x.batch_used]
                b.id, b.tokens, b.slot, b.makes = r.id, 1, slot, 1
                x.batch_used += 1
                x.making += 1
                x.making_length += r.len
                e.pending += 1
            c.budget -= 1
            x.place += 1
            continue
        outcome = schedule(x, slot, 0, 0, False)
        if outcome == BLOCKED:
            break
        if outcome == SCHEDULED:
            x.place += 1


cdef int64_t look_up(VllmRulesCore* x, Request* r, int64_t* cached, int64_t* active) noexcept nogil:
    """Blocks that an admission may take over (left in `found`), the tokens they save, and how many are held anyway."""
    cdef Core* c = x.c
    cdef int64_t count, idle, limit = r.len if x.rules & RULE_GEN_HIT else r.prompt
    cdef int32_t hits
    cached[0] = active[0] = 0
    x.found_used = 0
    if not c.caching:
        return 0
    name(x, r)
    count = r.full
    if x.rules & RULE_LAST_TOKEN:
        count = least(count, (r.len - 1) >> c.shift)
    cover(x, r, count)
    hits = find(x, &r.path, 0, <int32_t>count, False, &idle)
    cached[0] = least(<int64_t>hits << c.shift, limit)
    active[0] = least((hits - idle) << c.shift, limit) >> c.shift
    count = blocks_of(c, cached[0])
    if count < hits:
        shorten(x, <int32_t>count)
    return count


cdef void admit_waiting(VllmRulesCore* x, double now) noexcept nogil:
    """Waiting requests strictly in order, as long as they fit and there is budget to start them."""
    cdef Core* c = x.c
    cdef int32_t slot
    cdef int64_t cached, active, hits, need
    cdef Request* r
    cdef Admission* a
    cdef void* moved
    cdef Outcome outcome
    c.reason = STOP_OTHER
    while not c.preempted and not c.error:
        if c.n_running >= c.max_seqs:
            c.reason = STOP_SEQS
            return
        slot = waiting_first(c)
        if slot == NIL:
            c.reason = STOP_EMPTY
            return
        r = &c.req[slot]
        if r.status == ST_WAITING and (blocks_of(c, r.len) > c.pool.capacity or r.prompt == 0):
            end_head(x, slot, END_REJECTED)
            continue
        hits = look_up(x, r, &cached, &active)
        need = blocks_of(c, r.len if x.gate else cached + least(least(r.len - cached, x.cap), c.budget)) - active
        if c.n_running > 0:
            need += x.watermark
        if need > c.pool.capacity - c.pool.active:
            if c.n_running == 0 and c.pool.active == 0:    # nothing can make room for it any more
                end_head(x, slot, END_CAPACITY if r.status == ST_PREEMPTED else END_REJECTED)
                continue
            c.reason = STOP_WAIT
            return
        outcome = schedule(x, slot, cached, hits, True)
        if outcome == BLOCKED:
            if (not c.chunked and c.n_running == 0 and c.budget == c.max_tokens
                    and unchunked(x, r, cached) > c.max_tokens):
                end_head(x, slot, END_OVER_BUDGET)
                continue
            return
        if outcome != SCHEDULED:
            return
        c.admitted += 1
        if c.rows != NULL:
            if isnan(c.rows.first_admit[r.id]):
                c.rows.first_admit[r.id] = now
                c.rows.first_reused[r.id] = least(cached, r.prompt)
            if least(cached, r.prompt) > c.rows.reused[r.id]:
                c.rows.reused[r.id] = least(cached, r.prompt)
        if c.record:
            moved = grown(c.admissions, &c.admissions_cap, c.admissions_used + 1, sizeof(Admission))
            if moved == NULL:
                c.error = ERR_MEMORY
                return
            c.admissions = <Admission*>moved
            a = &c.admissions[c.admissions_used]
            c.admissions_used += 1
            a.id, a.reused = r.id, cached
        if r.used == 0 and c.budget == 0:
            return


# ---- tokens -----------------------------------------------------------------------------------------------------

cdef inline double handoff_ms(Core* c, Request* r) noexcept nogil:
    """Time to transfer the prompt's KV when a prefill worker finishes it; NaN if not modelled."""
    if c.worker_type != WORKER_PREFILL or isnan(c.kv_bytes) or not (c.kv_bandwidth > 0.0):
        return NAN
    return <double>r.prompt * c.kv_bytes / (c.kv_bandwidth * 1e9) * 1000.0


cdef void collect_token(Core* c, Request* r, double at, int64_t* together) noexcept nogil:
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


cdef bint give_token(VllmRulesCore* x, int32_t slot, double at, int64_t* together) noexcept nogil:
    """One more token; true if it was the last."""
    cdef Core* c = x.c
    cdef Request* r = &c.req[slot]
    cdef int64_t token = NIL
    cdef bint done
    if c.real_tokens:
        token = r.plan[r.gen] if r.gen < r.plan_used else rng_u32(&c.token_rng)
    if c.rows != NULL:
        collect_token(c, r, at, together)
    if c.real_tokens:
        append_token(x, r, <uint32_t>token)
    r.len += 1
    r.gen += 1
    c.made += 1
    done = r.gen >= r.limit
    if c.record:
        signal(c, False, r.id, token, END_COMPLETED if done else END_NONE, handoff_ms(c, r) if done else NAN)
    if c.note_first and r.gen == 1 and not done:
        note(c, ~r.id)
    return done


cdef bint next_slot(VllmRulesCore* x, int32_t slot) noexcept nogil:
    """The last block is full: it gets its content, and the token to come a block unless that is left for later.

    False if the request had to be preempted for it.
    """
    cdef Core* c = x.c
    cdef Request* r = &c.req[slot]
    cdef Extra* e = &x.extra[slot]
    cdef int64_t count = r.len >> c.shift
    cdef int32_t victim
    if not lazy(x):
        if count > r.full:
            r.full = <int32_t>count
        fill(x, r, e, least(count, e.done + e.blank))
    if x.rules & RULE_SLOT_AT_USE or (x.rules & RULE_LAST_SLOT and r.gen + 1 == r.limit):
        return True
    while c.pool.active == c.pool.capacity:
        victim = preempt(x)
        if victim == NIL or c.error:
            return False
        c.steady = False
        if victim == slot:
            outgrown(x, slot, False)
            return False
    take(x, 1)
    log_removed(x)
    e.blank += 1
    r.partial = 1
    r.alloc = r.len + 1
    return True


cdef int64_t collect_ready(VllmRulesCore* x, int64_t* total_length) noexcept nogil:
    """Running requests whose known tokens are all computed, into `ready`; those that want no token end here."""
    cdef Core* c = x.c
    cdef int64_t i, n = 0
    cdef int32_t slot
    cdef Request* r
    cdef bint gone = False
    total_length[0] = 0
    for i in range(c.n_running):
        slot = c.running[i]
        r = &c.req[slot]
        if r.computed < r.len:
            continue
        if r.gen < r.limit:
            c.ready[n] = slot
            n += 1
            total_length[0] += r.len
        else:
            signal(c, False, r.id, NIL, END_COMPLETED, NAN)
            request_end(x, slot, END_COMPLETED, False)
            gone = True
    if gone:
        running_compact(c)
        c.preempted = True
    return n


cdef double emit(VllmRulesCore* x, int64_t n, int64_t total_length, double start) noexcept nogil:
    """One token for each of the `n` ready requests in order; returns the decode time, ms (0 if none was made)."""
    cdef Core* c = x.c
    cdef int64_t i, together = 0, steps = 0
    cdef double decode = 0.0, at
    cdef int32_t slot
    cdef Request* r
    cdef bint changed = False, whole = lazy(x)
    cdef bint plain = c.rows != NULL and not c.real_tokens and not c.record
    c.steady = n == c.n_running                # so far: whoever runs on will have made a token
    if c.worker_type != WORKER_PREFILL:
        decode = timing_decode_ms(&c.timing, n, c.pool.active, total_length // n)
    at = start + decode
    for i in range(n):
        slot = c.ready[i]
        r = &c.req[slot]
        if (plain and (whole or r.len & c.mask) and r.gen > 1 and r.gen + 1 < r.limit and r.last_ms == c.last_emit
                and r.status == ST_RUNNING):
            r.len += 1                         # the usual decode step, after its own last token
            r.gen += 1
            r.last_ms = at
            steps += 1
            continue
        if r.status != ST_RUNNING or (not r.len & c.mask and not next_slot(x, slot)):
            changed = True
            continue
        if give_token(x, slot, at, &together):
            request_end(x, slot, END_COMPLETED, False)
            changed = True
    c.made += steps
    c.made_by = c.made
    if changed:
        c.preempted = True                     # whoever waits has to be looked at again
        running_compact(c)
    if c.made == 0:
        return 0.0
    if c.rows != NULL and together + steps > 0:
        gaps_add(c.gaps, at - c.last_emit, together + steps)
    c.last_emit = at
    return decode


# ---- asynchronous: what the pass before made --------------------------------------------------------------------

cdef void settle(VllmRulesCore* x) noexcept nogil:
    """This pass is planned; now the tokens of the one before are seen, made when that ended."""
    cdef Core* c = x.c
    cdef int64_t i, settled, together = 0, steps = 0
    cdef int32_t slot
    cdef Batched* f
    cdef Request* r
    cdef Extra* e
    cdef bint stale, gone = False, plain = c.rows != NULL and not c.real_tokens and not c.record
    cdef double at = x.flight_end
    for i in range(x.flight_used):
        f = &x.flight[i]
        slot = f.slot
        r = &c.req[slot]
        if f.tokens == NIL or r.status == ST_FREE or r.id != f.id:
            continue
        e = &x.extra[slot]
        e.flight -= f.tokens
        if not f.makes:
            continue
        settled = r.computed - e.flight
        if (plain and r.status == ST_RUNNING and r.gen > 1 and r.gen + 1 < r.limit and r.last_ms == c.last_emit
                and settled >> c.shift <= e.done):
            r.len += 1                         # the usual decode step, after its own last token
            r.gen += 1
            r.last_ms = at
            e.pending -= 1
            steps += 1
            continue
        stale = r.status == ST_PREEMPTED
        if r.limit == 0:
            signal(c, False, r.id, NIL, END_COMPLETED, NAN)
        else:
            give_token(x, slot, at, &together)
            if not stale:
                e.pending -= 1
                if settled >> c.shift > e.done:
                    r.full = <int32_t>most(r.full, least(settled, r.len) >> c.shift)
                    fill(x, r, e, least(least(r.full, settled >> c.shift), e.done + e.blank))
        if r.gen >= r.limit:
            if stale:
                waiting_remove(c, slot)
            request_end(x, slot, END_COMPLETED, False)
            gone = True
    c.made += steps
    c.made_by = c.made
    if gone:
        running_compact(c)
        c.preempted = True
    if c.made > 0:
        if c.rows != NULL and together + steps > 0:
            gaps_add(c.gaps, at - c.last_emit, together + steps)
        c.last_emit = at


cdef int64_t rules_under_way(VllmRulesCore* x) noexcept nogil:
    """Requests in the batch whose outcome is not seen yet."""
    return x.flight_used if x.rules & RULE_LATE else 0


# ---- the pass ---------------------------------------------------------------------------------------------------

cdef void rules_pass(VllmRulesCore* x, double now) noexcept nogil:
    """One engine iteration that starts at `now`; its results are in the core until the next one.

    With RULE_LATE the tokens it reports are those of the pass before, made when that ended.
    """
    cdef Core* c = x.c
    cdef int64_t i, n, total, others = c.n_running + c.n_waiting
    cdef double start, decode = 0.0
    cdef void* moved
    if not rules_room(x):
        return
    if c.record or x.rules & RULE_LATE:        # nobody is scheduled twice in a pass
        moved = grown(x.batch, &x.batch_cap, c.req_used + 1, sizeof(Batched))
        if moved == NULL:
            c.error = ERR_MEMORY
            return
        x.batch = <Batched*>moved
    c.pass_no += 1
    c.passes += 1
    c.last_start = now
    c.completed = c.admitted = c.made = c.made_by = c.ended_used = c.gone_late_used = 0
    c.admissions_used = c.signals_used = c.late_used = c.works_used = 0
    x.batch_used = x.victims_used = x.making = x.making_length = 0
    c.budget = c.max_tokens
    c.batch = c.batch_isl = c.batch_prefix = 0
    c.preempted = c.steady = False
    x.cap = x.threshold if x.threshold > 0 and others > 1 else <int64_t>1 << 62
    x.planning = True
    schedule_running(x)
    admit_waiting(x, now)
    x.planning = False
    start = now
    if c.batch > 0 and c.worker_type != WORKER_DECODE:
        start = now + timing_prefill_ms(&c.timing, c.batch, c.batch_isl // c.batch, c.batch_prefix // c.batch)
    if x.rules & RULE_LATE:
        if x.making > 0 and c.worker_type != WORKER_PREFILL:
            decode = timing_decode_ms(&c.timing, x.making, c.pool.active, x.making_length // x.making)
        n = c.n_running
        settle(x)
        c.steady = c.made == n and x.batch_used == n and not c.preempted and c.admitted == 0
        x.batch, x.flight = x.flight, x.batch
        x.batch_cap, x.flight_cap = x.flight_cap, x.batch_cap
        x.flight_used, x.batch_used = x.batch_used, 0
        x.flight_end = start + decode
    else:
        n = collect_ready(x, &total)
        if n > 0:
            decode = emit(x, n, total, start)
    c.end_ms = start + decode
    if not (c.end_ms < INFINITY):
        c.error = ERR_TIME
    for i in range(c.late_used):
        moved = grown(c.signals, &c.signals_cap, c.signals_used + 1, sizeof(Signal))
        if moved == NULL:
            c.error = ERR_MEMORY
            return
        c.signals = <Signal*>moved
        c.signals[c.signals_used] = c.late[i]
        c.signals_used += 1
    for i in range(c.gone_late_used):
        note(c, c.gone_late[i])


cdef double rules_forward(VllmRulesCore* x, double now, double until, double last_start) noexcept nogil:
    """Fast-forward: passes that only decode, starting before `until` and not after `last_start`; returns the new now.

    Allowed after a pass in which everybody running made a token and nothing else can happen: then the next pass
    differs only when a request needs a block or ends, when somebody new arrives, or when the head of the queue
    could be admitted after all. The clock's additions are the same and in the same order as pass by pass.
    """
    cdef Core* c = x.c
    cdef int64_t i, k, m = 0, steps
    cdef int32_t slot
    cdef Request* r
    cdef Extra* e
    cdef double step, next_now, at, first = 0.0
    cdef bint late = (x.rules & RULE_LATE) != 0, whole = lazy(x)
    if not c.steady or c.real_tokens or c.n_running == 0 or c.n_running > c.max_tokens:
        return now
    if c.n_waiting > 0 and (c.preempted or not (c.reason == STOP_WAIT or c.reason == STOP_SEQS)):
        return now
    k = (<int64_t>1) << 62
    for i in range(c.n_running):
        slot = c.running[i]
        r = &c.req[slot]
        e = &x.extra[slot]
        if whole:                              # passes before the one that needs a block
            steps = ((e.done + e.blank) << c.shift) - r.len + 1
        elif late:
            if e.pending != 1 or r.computed != r.len or r.last_ms != c.last_emit:
                return now
            steps = ((e.done + e.blank) << c.shift) - r.len
        else:
            steps = (-r.len) & c.mask
            if x.rules & RULE_SLOT_AT_USE and r.len > (e.done + e.blank) << c.shift:
                steps = 0
        if steps > r.limit - r.gen - 1:        # tokens before the last one
            steps = r.limit - r.gen - 1
        if steps < k:
            k = steps
            if k <= 0:
                return now
    step = timing_decode_ms(&c.timing, c.n_running, c.pool.active, 0) if c.worker_type != WORKER_PREFILL else 0.0
    while m < k and now < until and now <= last_start:
        next_now = now + step
        at = x.flight_end if late else next_now
        if m == 0:
            first = at - c.last_emit
        if c.gaps != NULL:
            gaps_add(c.gaps, at - c.last_emit, c.n_running)
        c.last_emit = at
        x.flight_end = next_now
        c.last_start = now
        now = next_now
        m += 1
    if m == 0:
        return now
    for i in range(c.n_running):
        r = &c.req[c.running[i]]
        if r.gen == 1 and c.rows != NULL:
            c.rows.second_gap[r.id] = first
        r.len += m
        r.gen += m
        r.computed = r.alloc = r.len if late else r.len - 1
        r.last_ms = c.last_emit
    c.pass_no += m
    c.passes += m
    return now
