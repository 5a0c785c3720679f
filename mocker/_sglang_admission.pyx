# cython: language_level=3
"""What the admission of one SGLang core consists of: order of the queue, budgets, the slots of a chunk.

Answers to `scheduler/sglang/{policy,prefill}.rs`; the pass puts it together (`_sglang_pass`).

Costs: budgets O(running requests), a chunk O(segments of its prompt), LPM O(segments of up to 128 waiting requests).
"""
from libc.math cimport INFINITY, isnan

from mocker._common cimport (
    END_CAPACITY, END_NONE, END_OVER_BUDGET, END_REJECTED, ERR_HOOK, ERR_MEMORY, NIL, grown, int32_t, int64_t)
from mocker._core cimport Admission
from mocker._hooks cimport ring_to_front
from mocker._radix cimport (
    radix_clear, radix_extend, radix_lock, radix_match, radix_match_pages, radix_path_slots, tokens_take)
from mocker._sglang cimport Chunk, SglangCore, SglRequest
from mocker._sglang_events cimport evict, publish_stored
from mocker._sglang_requests cimport indices, waiting_at

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


cdef bint first_by_score(SglangCore* c, double now) noexcept nogil:
    """Bring the waiting request with the lowest score to the front; false if none may go now, or the score failed.

    A prompt that is being computed in chunks stays there, since it holds memory.
    """
    cdef int64_t i, best = NIL
    cdef int64_t[9] facts
    cdef double score, least = INFINITY
    cdef int32_t slot
    cdef SglRequest* r
    if c.req[waiting_at(c, 0)].computed > 0:
        return True
    facts[7], facts[8] = c.n_running, (c.tree.available + c.tree.evictable) // c.page
    for i in range(c.n_waiting):
        slot = waiting_at(c, i)
        r = &c.req[slot]
        facts[0], facts[1], facts[2], facts[3] = r.id, 0, r.prompt, 0
        if c.admission.timed:
            facts[1] = <int64_t>((now - c.admission.wishes[slot].arrived) * 1000.0)
        if c.admission.looks:
            facts[3] = radix_match_pages(&c.tree, &r.path, r.full) * c.page
        facts[4], facts[5], facts[6] = r.gen, r.limit, c.admission.wishes[slot].priority
        score = c.admission.score.ask(c.admission.score.context, facts)
        if isnan(score):
            c.error = ERR_HOOK
            return False
        if score < least:
            best, least = i, score
    if best > 0:
        ring_to_front(c.waiting, c.waiting_head, c.waiting_cap, best)
    c.put_off = best == NIL
    return best != NIL


cdef int64_t lowest_score(SglangCore* c) noexcept nogil:
    """Place of the running request that the user's score retracts, or any if it failed."""
    cdef int64_t i, best = 0
    cdef int64_t[5] facts
    cdef double score, least = 0.0
    cdef SglRequest* r
    for i in range(c.n_running):
        r = &c.req[c.running[i]]
        facts[0], facts[1], facts[2], facts[3], facts[4] = r.prompt, r.gen, r.limit, r.retractions, r.alloc // c.page
        score = c.victim.ask(c.victim.context, facts)
        if isnan(score):
            c.error = ERR_HOOK
            return best
        if i == 0 or score < least or (score == least and r.gen < c.req[c.running[best]].gen):
            best, least = i, score
    return best


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
