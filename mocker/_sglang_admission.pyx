# cython: language_level=3
"""Admission of one SGLang core: order of the queue, prefill chunks within the budgets.

Answers to `scheduler/sglang/{policy,prefill}.rs`; activated destinations come before, see `_sglang`. Costs: O(running
requests + segments of the admitted prompts); LPM also O(segments of up to 128 waiting requests).
"""
from libc.math cimport isnan

from mocker._common cimport (
    END_CAPACITY, END_NONE, END_OVER_BUDGET, END_REJECTED, ERR_MEMORY, NIL, grown, int32_t, int64_t)
from mocker._core cimport Admission
from mocker._radix cimport (
    radix_clear, radix_extend, radix_lock, radix_match, radix_match_pages, radix_path_slots, tokens_take)
from mocker._sglang cimport SGL_RUNNING, Chunk, SglangCore, SglRequest
from mocker._sglang_events cimport cache_pages, evict, publish_stored
from mocker._sglang_requests cimport give_up, indices, waiting_at, waiting_pop, waiting_prepend

cdef enum:
    IN_BATCH_TOKENS = 32           # cached prefix up to which LPM looks for it among the waiting, and least it counts


# ---- order ------------------------------------------------------------------------------------------------------

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


# ---- budgets ----------------------------------------------------------------------------------------------------

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


# ---- admission --------------------------------------------------------------------------------------------------

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
