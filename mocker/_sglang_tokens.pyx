# cython: language_level=3
"""The token phase of an SGLang pass: retraction until everybody fits, one token or a burst each, full pages.

Answers to `scheduler/sglang/decode.rs`, and to SipHash-1-3 of Rust's standard library for tokens that no plan gives.
A token costs a few loads and stores; one that fills a page also the tree's operations. A retraction costs O(running
requests).
"""
from libc.math cimport NAN, isnan
from libc.string cimport memmove

from mocker._collect cimport gaps_add
from mocker._common cimport (
    END_COMPLETED, END_NONE, ERR_MEMORY, ERR_OK, NIL, WORKER_PREFILL, int32_t, int64_t, uint32_t, uint64_t)
from mocker._hash cimport block_hash, chain_hash
from mocker._kv cimport Path, path_reserve
from mocker._radix cimport tokens_give, tokens_take
from mocker._sglang cimport SGL_RETRACTED, SglangCore, SglRequest
from mocker._sglang_admission cimport extra_tokens, paged
from mocker._sglang_events cimport abandon, cache_pages, evict
from mocker._sglang_requests cimport complete, indices, note, signal, waiting_prepend
from mocker._spec cimport sample_output_tokens
from mocker._timing cimport timing_decode_ms


# ---- one token --------------------------------------------------------------------------------------------------

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


# ---- room -------------------------------------------------------------------------------------------------------

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


# ---- the phase --------------------------------------------------------------------------------------------------

cdef inline double handoff_ms(SglangCore* c, SglRequest* r) noexcept nogil:
    """Time to transfer the prompt's KV when a prefill worker finishes it; NaN if not modelled."""
    if c.worker_type != WORKER_PREFILL or isnan(c.kv_bytes) or not (c.kv_bandwidth > 0.0):
        return NAN
    return <double>r.prompt * c.kv_bytes / (c.kv_bandwidth * 1e9) * 1000.0


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
