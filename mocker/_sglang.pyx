# cython: language_level=3
"""The SGLang scheduler: queue policies, chunked prefill, decode with retraction, hand-off of prefills.

Answers to `scheduler/sglang/{config,core,policy,prefill,decode,request}.rs` and `kv_manager/sglang_backend.rs`. A
pass promotes activated destinations, orders the queue, admits prefill chunks within the budgets, decodes once for
everybody who runs, and books what ended (`_sglang_pass`, with `_sglang_admission`, `_sglang_tokens` and
`_sglang_requests`); what all of them cache, free and tell is in `_sglang_events`. `sgl_forward` runs passes in which
everybody only decodes: they change lengths, the ratio and the clock, so it repeats those additions and nothing else.
`sgl_foresee` works out when such passes end, `sgl_follow` has them happen, all or the first of them.

Costs: a pass is O(running requests + segments of the admitted prompts), a fast-forwarded one a few additions; an
LPM pass also O(segments of up to 128 waiting requests); events O(segments).
"""
from libc.math cimport INFINITY, NAN, fabs
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mocker._collect cimport gaps_between
from mocker._common cimport END_NONE, ERR_MEMORY, ERR_OK, NIL, grown, int32_t, int64_t, uint64_t
from mocker._core cimport spread_add
from mocker._kv cimport path_free
from mocker._radix cimport Node, chain_open, map_free, map_init, radix_free, radix_init
from mocker._sglang_admission cimport LPM_LIMIT, clipped, hopeless, paged
from mocker._sglang_events cimport told_init
from mocker._sglang_pass cimport run_pass
from mocker._sglang_requests cimport (
    destination_activate, destination_reserve, destination_retry, indices, numbers, request_drop, source_release,
    waiting_append, waiting_at)
from mocker._timing cimport DECODE_RUN, timing_decode_ms, timing_decode_run, timing_free

# ---- memory -----------------------------------------------------------------------------------------------------

cdef int sgl_init(SglangCore* c) noexcept nogil:
    """Queues, tree and event log of a core whose configuration and timing are set; the rest is zeroed memory."""
    c.free_slot = NIL
    c.waiting_cap = 16
    c.waiting = <int32_t*>malloc(c.waiting_cap * sizeof(int32_t))
    c.ends = <double*>malloc((STRETCH + 1) * sizeof(double))
    c.last_emit = NAN
    c.next_own_key = <uint64_t>1 << 63
    c.next_owner = 1
    c.ratio = c.init_ratio
    if (c.waiting == NULL or c.ends == NULL
            or radix_init(&c.tree, c.total, c.page, c.capture and c.real_tokens) != ERR_OK
            or radix_init(&c.fresh, 0, c.page, False) != ERR_OK or map_init(&c.pending_slots) != ERR_OK):
        return ERR_MEMORY
    c.tree.log = c.capture and not c.real_tokens
    c.free_stretch = NIL
    if c.tree.log and map_init(&c.segments) != ERR_OK:
        return ERR_MEMORY
    return told_init(c) if c.tree.told else ERR_OK


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
    free(c.ends)
    free(c.ended)
    free(c.notes)
    free(c.held)
    free(c.chunks)
    free(c.lengths)
    free(c.admissions)
    free(c.signals)
    free(c.admission.wishes)
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
    r.computed = r.alloc = r.gen = r.prefix = r.calm = 0
    r.limit = limit
    c.longest = max(c.longest, limit)
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


# ---- commands ---------------------------------------------------------------------------------------------------

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


cdef void sgl_drop(SglangCore* c, int32_t slot) noexcept nogil:
    """Cancel a request, wherever it is, and free what it holds."""
    request_drop(c, slot)


cdef void sgl_release_source(SglangCore* c, int32_t slot) noexcept nogil:
    """Release a held source, or forget that a source is to be held."""
    source_release(c, slot)


cdef bint sgl_reserve(SglangCore* c, int32_t slot, int64_t handoff) noexcept nogil:
    """Queue a destination for its reservation; false, and the slot is free again, if it never fits the pool."""
    return destination_reserve(c, slot, handoff)


cdef int32_t sgl_retry(SglangCore* c) noexcept nogil:
    """Try to reserve for the first pending destination, once a capacity generation; its slot, or NIL."""
    return destination_retry(c)


cdef void sgl_activate(SglangCore* c, int32_t slot) noexcept nogil:
    """The prompt of a reserved destination has arrived: cache it and queue the request to run."""
    destination_activate(c, slot)


cdef void sgl_pass(SglangCore* c, double now) noexcept nogil:
    """One engine iteration that starts at `now`; its results are in the core until the next one."""
    run_pass(c, now)


# ---- fast-forward -----------------------------------------------------------------------------------------------

cdef int64_t head_need(SglangCore* c) noexcept nogil:
    """Tokens that the head of the queue must find free in an untouched pass."""
    cdef SglRequest* r = &c.req[waiting_at(c, 0)]
    cdef int64_t chunk = r.len - r.computed
    if chunk > c.chunk:
        return c.chunk // c.page * c.page
    return paged(c, chunk) + clipped(c, r)


cdef inline double ratio_after(SglangCore* c, double ratio) noexcept nogil:
    """The new-token ratio a pass later."""
    ratio -= c.ratio_step
    return ratio if ratio > c.min_ratio else c.min_ratio


cdef inline int64_t own_steps(SglangCore* c, SglRequest* r) noexcept nogil:
    """Passes in which a request decodes inside its page or lengthens its chain, and does not end."""
    cdef int64_t steps = r.limit - r.gen - 1, room
    cdef Node* x
    if r.cached != r.full or r.last_ms != c.last_emit:
        return 0
    x = &c.tree.nodes[r.node]
    if c.capture or not chain_open(&c.tree, r.node, r.owner) or x.keys[x.n - 1] != r.own_key:
        room = (r.full + <int64_t>1) * c.page - r.len - 1      # tokens before the page is full
        return min(room, steps)
    return steps


cdef int64_t plain_steps(SglangCore* c, int64_t* output) noexcept nogil:
    """Passes in which everybody takes `own_steps`, and nobody is retracted.

    `output` gets the tokens that admission reckons with.
    """
    cdef int64_t i, part, steps, k, n = c.n_running, room, reckoned = 0, hitch = c.hitch if c.hitch < n else 0
    cdef SglRequest* r
    k = min(c.tree.available // n, STRETCH)    # without eviction
    if c.page > 1:
        room = c.tree.available + c.tree.evictable - c.extra
        if room < (k + c.page) * n:
            k = room // n - c.page
    if k <= 0:
        return 0
    for part in range(2):                      # first those from the one that was in the way the last time
        for i in range(0 if part else hitch, hitch if part else n):
            r = &c.req[c.running[i]]
            steps = own_steps(c, r)
            if steps < k:
                k = steps
            if k <= 0:
                c.hitch = i
                return 0
            reckoned += clipped(c, r)
    output[0] = reckoned
    return k


cdef int64_t sgl_foresee(SglangCore* c, double now, double until, double last_start) noexcept nogil:
    """Passes that only decode, starting before `until` and not after `last_start`: how many, up to STRETCH.

    `ends` gets `now` and when each of them ends; nothing else changes. Allowed after a pass in which everybody running
    made a token. A queue that waits for memory is watched with a bound that is never too low on what it finds free, so
    a pass that could admit its head is left to `sgl_pass`.
    """
    cdef int64_t k, m = 0, n = c.n_running, context = c.known, need = 0, room = 0, output = 0, look
    cdef int64_t _, most, taken, known = 0, used = 0
    cdef double next_now, left, expected, step, ratio = c.ratio
    cdef double* ends = c.ends
    cdef double[DECODE_RUN] ms                 # durations of the passes from here on, of which `used` have passed
    cdef bint watch = False
    if not c.steady or c.nextn or c.tree.told or c.real_tokens or c.metrics or n == 0 or c.n_prebuilt > 0:
        return 0
    if c.lpm and 0 < c.n_waiting <= LPM_LIMIT:
        return 0                               # whoever arrives may come first
    if not (now < until and now <= last_start):
        return 0
    if c.batch > 0 and c.n_waiting > 0 and n < c.max_seqs:
        return 0                               # the budget of the pass before has let somebody in, the next one's may
    k = plain_steps(c, &output)
    if k <= 0:
        return 0
    if c.n_waiting > 0 and c.n_pending == 0:
        if n < c.max_seqs:
            if (c.admission.score.ask != NULL or not (c.min_ratio >= 0.0)
                    or hopeless(c, &c.req[waiting_at(c, 0)]) != END_NONE):
                return 0
            watch = True
            need = head_need(c)
            room = c.tree.available + c.tree.evictable - c.extra
    ends[0] = now
    look = 0 if watch else k
    while m < k:
        if m >= look:
            left = <double>(room - n * (m // c.page) * c.page)
            if left < 0.0:
                left = 0.0
            expected = <double>(output - n * m) * ratio
            if expected > 0.0:
                left -= expected
            left += 1e-6 * (1.0 + fabs(expected))
            if not (<double>need >= left):
                break
            # A pass gives back at most `step` of what is expected: look again when that could be enough.
            step = 1.00001 * (<double>n * ratio + fabs(<double>(output - n * m)) * c.ratio_step)
            look = m + 1
            if not (step > 0.0):
                look = k
            elif <double>need - left > 2.0 * step:
                look = m + <int64_t>min((<double>need - left) / step, 1e15)
        if c.timing.model != NULL:
            ms[0], known, used = timing_decode_ms(&c.timing, n, min(context, c.total), context // n), 1, 0
        elif used == known:
            known, used = min(k - m, min(2 * known, DECODE_RUN) if known > 0 else 8), 0
            timing_decode_run(&c.timing, context, n, c.total, known, ms)
        most, taken = min(known - used, (k if look > k else look) - m), 0
        while taken < most and now < until and now <= last_start:
            next_now = now + ms[used + taken]
            if not (next_now < INFINITY):      # the engine's own pass says what is wrong
                until = now
                break
            taken += 1
            now = next_now
            ends[m + taken] = now
        context += n * taken
        used += taken
        m += taken
        if taken < most:
            break
        for _ in range(taken if watch else 0):
            ratio = ratio_after(c, ratio)
    return m


cdef double sgl_follow(SglangCore* c, int64_t m) noexcept nogil:
    """The first `m` > 0 of the passes that were foreseen happen; the new now.

    The clock's and the ratio's steps are the same and in the same order as pass by pass.
    """
    cdef int64_t i, n = c.n_running, pages, tick = c.tree.tick
    cdef int64_t _
    cdef SglRequest* r
    cdef Node* x
    cdef double now = c.ends[m]
    if c.gaps != NULL:
        gaps_between(c.gaps, c.ends, m, n)
    for _ in range(m if c.ratio != c.min_ratio or c.ratio_step < 0.0 else 0):
        c.ratio = ratio_after(c, c.ratio)
    for i in range(n):
        r = &c.req[c.running[i]]
        if r.gen == 1 and c.rows != NULL:
            c.rows.second_gap[r.id] = c.ends[1] - c.ends[0]
        r.len += m
        r.gen += m
        r.computed += m
        r.last_ms = now
        if r.len > r.alloc:
            c.extra -= r.alloc
            r.alloc = paged(c, r.len)
            c.extra += r.alloc
        if r.len >= (r.full + <int64_t>1) * c.page:
            pages = r.len // c.page            # its newest page came in pass `pages * page - (len - m)`
            x = &c.tree.nodes[r.node]
            x.ends[x.n - 1] = x.end = <int32_t>pages
            x.stamp = tick + (pages * c.page - (r.len - m)) * n + i
            c.tree.protected += (pages - r.full) * c.page
            r.path.ends[r.path.n - 1] = <int32_t>pages
            r.full = r.cached = <int32_t>pages
    c.known += m * n
    c.extra -= m * n
    c.rest -= m * n
    c.tree.tick += (m + 1) * n
    c.tree.available -= m * n
    c.last_start = c.ends[m - 1]
    c.last_emit = now
    c.passes += m
    return now


cdef double sgl_forward(SglangCore* c, double now, double until, double last_start) noexcept nogil:
    """Fast-forward: passes that are foreseen happen; the new now."""
    cdef int64_t m = STRETCH
    while m == STRETCH:
        m = sgl_foresee(c, now, until, last_start)
        if m > 0:
            now = sgl_follow(c, m)
    return now


# ---- metrics ----------------------------------------------------------------------------------------------------

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
    cdef uint64_t tokens = <uint64_t>c.total - <uint64_t>c.tree.available + <uint64_t>c.extra
    cdef int64_t i
    for i in range(c.n_prebuilt):
        tokens += <uint64_t>(c.req[c.prebuilt[i]].alloc - c.req[c.prebuilt[i]].computed)
    return tokens // <uint64_t>c.page + (tokens % <uint64_t>c.page != 0)
