# cython: language_level=3
"""The blocks of a request for the scheduler with switches: taken, filled, registered, given back, and who is told.

Answers to vLLM 0.33.0 `v1/core/kv_cache_manager.py` (`allocate_slots`, `free`) and `v1/core/block_pool.py`
(`get_new_blocks`, `cache_full_blocks`), and with no rule set to the block half of `scheduler/vllm/core.rs`. Copies of
blocks with content are in `_rules_copies`; blocks without content are a count.

Costs: allocation, registration and release O(stretches of the path); eviction O(copies evicted); events O(pieces),
times the copies of a segment where there are several.
"""
from libc.stdlib cimport free
from libc.string cimport memcpy

from mocker._common cimport ERR_MEMORY, ERR_OK, NIL, grown, int32_t, int64_t, uint32_t, uint64_t
from mocker._core cimport Core, Request
from mocker._hash cimport block_hash, chain_hash
from mocker._kv cimport Path, Piece, element_at, element_begin, path_reserve
from mocker._kv_events cimport log_removed, log_stored
from mocker._ranks cimport (
    rank_fresh, rank_gone, rank_remove, rank_shorter, release_begin, release_end, release_freed, release_held)
from mocker._rules cimport (
    RULE_FULL_ONLY, RULE_LRU, RULE_OWN_COPY, Copy, Extra, Hold, Piece2, VllmRulesCore, blocks_of, least, most)
from mocker._rules_copies cimport (
    carve, copy_drop, copy_new, cut, find, insert_copy, pick, queue_append, queue_push,
    queue_remove, table_insert, table_place)


# ---- event log --------------------------------------------------------------------------------------------------

cdef bint elsewhere(VllmRulesCore* x, uint64_t key, int32_t begin, int32_t end, int32_t but) noexcept nogil:
    """Whether a copy other than `but` has one of the segment's blocks [begin, end)."""
    cdef int64_t place = table_place(x, key)
    cdef int32_t at = x.table_heads[place] if place != NIL else NIL
    while at != NIL and x.copies[at].start < end:
        if at != but and x.copies[at].end > begin:
            return True
        at = x.copies[at].right
    return False


cdef void log_new(VllmRulesCore* x, Path* path, int32_t begin, int32_t end) noexcept nogil:
    """Stored events for those of the request blocks [begin, end) that are nowhere yet."""
    cdef int32_t i = element_at(path, begin), low, high, first = NIL
    while begin < end:
        if x.skip_own and path.keys[i] >> 63:
            break                              # generated blocks come last
        low, high = element_begin(path, i), <int32_t>least(path.ends[i], end)
        if not elsewhere(x, path.keys[i], begin - low, high - low, NIL):
            first = begin if first == NIL else first
            begin = high
        while begin < high:
            if not elsewhere(x, path.keys[i], begin - low, begin - low + 1, NIL):
                first = begin if first == NIL else first
            elif first != NIL:
                log_stored(&x.c.pool, path, first, begin)
                first = NIL
            begin += 1
        i += 1
    if first != NIL:
        log_stored(&x.c.pool, path, first, begin)


cdef void note_removed(VllmRulesCore* x, int32_t at, int32_t low, int32_t high) noexcept nogil:
    """Blocks [low, high) of a copy are evicted, deepest first: keep those that are nowhere else for the event."""
    cdef Copy* k = &x.copies[at]
    cdef bint twice
    cdef int32_t block = high - 1, n
    cdef Piece* e
    cdef void* moved
    if x.skip_own and k.key >> 63:
        return
    twice = x.table_twice[table_place(x, k.key)]
    while block >= low:
        n = 0 if twice else block - low + 1
        while block - n >= low and not elsewhere(x, k.key, block - n, block - n + 1, at):
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


# ---- taken and given back ---------------------------------------------------------------------------------------

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
        at = x.oldest if x.c.pool.ranked == NULL else x.c.pool.ranks.heap[0]
        k = &x.copies[at]
        if k.ref > 0:                          # ranked, and taken over again
            rank_remove(&x.c.pool.ranks, at)
            continue
        n = <int32_t>least(k.end - k.start, count)
        if x.c.pool.capture:
            note_removed(x, at, k.end - n, k.end)
        k.end -= n
        count -= n
        if k.end == k.start:
            queue_remove(x, at)
            if x.c.pool.ranked != NULL:
                rank_gone(&x.c.pool.ranks, at)
            copy_drop(x, at)
            continue
        if k.deeper != NIL:
            x.copies[k.deeper].upper = NIL
            k.deeper = NIL
        if x.c.pool.ranked != NULL:
            rank_shorter(&x.c.pool.ranks, at)


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
                    and (x.c.pool.ranked == NULL or rank_fresh(&x.c.pool.ranks, last))
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
    cdef int32_t i, at, n, end
    cdef int64_t k
    cdef bint ranked = x.c.pool.ranked != NULL and e.n > 0
    if ranked:
        release_begin(&x.c.pool.ranks)
    x.c.pool.active -= e.blank
    e.blank = 0
    i = e.n - 1
    while i >= 0:
        end = e.holds[i].end
        n = end - (e.holds[i - 1].end if i > 0 else 0)
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
            n = x.copies[at].end - x.copies[at].start
            end -= n
            if x.copies[at].ref == 0:
                x.c.pool.active -= n
                x.c.pool.inactive += n
                if ranked:
                    release_freed(&x.c.pool.ranks, at, x.copies[at].start, end, n)
                else:
                    queue_append(x, at)
            elif ranked:
                release_held(&x.c.pool.ranks, at)
        i -= 1
    e.n = e.done = 0
    if ranked:
        release_end(&x.c.pool.ranks)
        x.c.error = x.c.error or x.c.pool.ranks.error


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


cdef void fill(VllmRulesCore* x, Request* r, Extra* e, int64_t count) noexcept nogil:
    """The first `count` blocks, which the request has, are full: others can find them from now on."""
    cdef int64_t idle, i, used
    cdef int32_t begin = e.done, end = <int32_t>count
    if not x.c.caching or begin >= end:
        return
    e.blank -= end - begin
    if x.rules & RULE_OWN_COPY and begin >= r.prompt >> x.c.shift and unseen(x):
        e.done = end                           # `let_go` registers them
        return
    cover(x, r, count)
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
    if x.rules & RULE_OWN_COPY and lazy(x):
        known = least(known, r.prompt >> c.shift)      # the others when they are let go
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
        log_removed(&x.c.pool)                         # before the new ones: an evicted content may be one of them
        for i in range(x.found_used if picked > 0 else 0):
            hold_add(x, e, x.found[i].copy, x.found[i].begin + x.found[i].to - x.found[i].at)
        e.blank += <int32_t>fresh
        fill(x, r, e, least(known, most(last, held)))
        return True
    if e.blank > 0:
        refill(x, r, e, least(known, held))
    if e.blank > 0 or held >= last:
        e.blank += <int32_t>fresh
        log_removed(&x.c.pool)
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
    log_removed(&x.c.pool)
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


cdef void let_go(VllmRulesCore* x, int32_t slot) noexcept nogil:
    """Release a request's blocks, after registering those that were put off."""
    cdef Request* r = &x.c.req[slot]
    cdef Extra* e = &x.extra[slot]
    cdef int32_t held
    cdef int64_t full
    if lazy(x) and e.blank > 0:
        full = least(r.computed, r.len) >> x.c.shift
        name(x, r)
        fill(x, r, e, least(full, r.full))
    held = e.holds[e.n - 1].end if e.n > 0 else 0
    if held < e.done:
        full = e.done
        cover(x, r, full)
        register(x, &r.path, e, held, <int32_t>full)
    release(x, e)
