# cython: language_level=3
"""One pass of an SGLang core: admission, decode with retraction, what can never go on.

Answers to `scheduler/sglang/{core,prefill,decode}.rs`. A pass promotes activated destinations, orders the queue,
admits prefill chunks within the budgets, decodes once for everybody who runs, and books what ended. The phases are in
one file, since most passes do so little that calls between modules would show.

Costs: O(running requests + segments of the admitted prompts), of which most take a few loads and stores each
(`calm_steps`); a retraction O(running requests); a token that fills a page also the tree's operations.
"""
from libc.math cimport INFINITY, NAN, isnan
from libc.string cimport memmove

from mocker._collect cimport gaps_add
from mocker._common cimport (
    END_CAPACITY, END_COMPLETED, END_NONE, END_REJECTED, ERR_MEMORY, ERR_TIME, NIL, WORKER_DECODE, WORKER_PREFILL,
    int32_t, int64_t)
from mocker._radix cimport tokens_give, tokens_take
from mocker._sglang cimport SGL_RETRACTED, SGL_RUNNING, SglangCore, SglRequest
from mocker._sglang_admission cimport (
    clipped, first_by_score, hopeless, lowest_score, note_admission, note_chunk, order_waiting, paged,
    reserved_output, take_chunk)
from mocker._sglang_events cimport abandon, cache_pages, evict
from mocker._sglang_requests cimport (
    complete, count_running, give_up, indices, note, numbers, signal, waiting_at, waiting_pop, waiting_prepend)
from mocker._sglang_tokens cimport push_token
from mocker._spec cimport sample_output_tokens
from mocker._timing cimport timing_decode_ms, timing_prefill_ms

cdef enum:
    LOOKED = 64                    # admissions of a pass for which bounds may do
    LPM_SETTLE = 256               # passes that LPM may shuffle a stuck queue
    DRY_LIMIT = 1024               # passes without a token or an ending, apart from chunks, before somebody must go


# ---- admission --------------------------------------------------------------------------------------------------

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
        count_running(c, &c.req[slot], 1)
        note_admission(c, &c.req[slot], 0, now)
    if i > 0:
        c.n_prebuilt -= i
        memmove(c.prebuilt, c.prebuilt + i, c.n_prebuilt * sizeof(int32_t))


cdef int64_t admit_waiting(SglangCore* c, double now) noexcept nogil:
    """Prefill chunks for the head of the queue, as far as pool and budgets go; the admitted are left in `scratch`.

    The whole chunk is charged, whatever of it is cached. The output that is reserved for those who run is a sum of
    products; it is added up only where bounds of it do not tell whether the head fits.
    """
    cdef int64_t places = c.max_seqs - c.n_running, n = 0, extend, chunk, charged, output, old, reused = 0
    cdef int64_t input = c.max_prefill, budget = c.chunk, room
    cdef double low, high, most, wanted
    cdef double[LOOKED] taken
    cdef int64_t i
    cdef int32_t slot
    cdef int terminal
    cdef SglRequest* r
    if places <= 0 or c.n_waiting == 0 or c.n_prebuilt > 0 or c.n_pending > 0:
        return 0
    room = c.tree.available + c.tree.evictable - c.extra
    most = <double>c.rest * c.ratio            # reserved at most; all of it if nobody's rest is clipped
    high = <double>(room if room > 0 else 0)   # of what is free for others, as `low`
    low = high - most - 1e-9 * (high + most) - 1e-6
    high = high + 1e-9 * (high + most) + 1e-6 - (most if c.longest <= c.clip else 0.0)
    if not (most >= 0.0):
        low = high = <double>(room if room > 0 else 0) - reserved_output(c)
    while n < places and c.n_waiting > 0:
        if c.admission.score.ask != NULL and not first_by_score(c, now):
            break
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
        if charged > input or charged > budget:
            break
        wanted = <double>charged + <double>output
        if low < high and ((low <= wanted and wanted < high) or n == LOOKED):
            low = <double>(room if room > 0 else 0) - reserved_output(c)
            for i in range(n):
                low -= taken[i]
            high = low
        if wanted >= high:
            break
        old = r.alloc
        if not take_chunk(c, r, chunk, &reused):
            c.ratio = c.init_ratio
            break
        waiting_pop(c)
        note_admission(c, r, reused, now)
        note_chunk(c, r, reused, chunk)
        if low < high:
            taken[n] = <double>(r.alloc - old + output)
        low -= <double>(r.alloc - old + output)
        high -= <double>(r.alloc - old + output)
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
            count_running(c, r, 1)
    return n


# ---- room -------------------------------------------------------------------------------------------------------

cdef inline int64_t burst_limit(SglangCore* c, SglRequest* r, int64_t longest) noexcept nogil:
    cdef int64_t rest = r.limit - r.gen
    return rest if rest < longest else longest


cdef inline int64_t growth(SglangCore* c, SglRequest* r, int64_t burst) noexcept nogil:
    """Tokens by which the pages of a request grow with a burst."""
    if r.len + burst <= r.alloc:               # whole pages: the usual case, without a division
        return 0
    return paged(c, r.len + burst) - r.alloc


cdef int64_t make_room(SglangCore* c, int64_t longest) noexcept nogil:
    """Retract requests, those with the fewest tokens first, until everybody left can decode; one always is left.

    The retracted go to the front of the queue in this order. Returns the tokens to reserve.
    """
    cdef int64_t i, best, needed = 0, grow = 0, actual, logical, burst, retracted = 0, n = c.n_running
    cdef int32_t slot
    cdef SglRequest* r
    if longest == 1 and not c.tree.told and n <= c.tree.available and (
            n * c.page <= c.tree.available + c.tree.evictable - c.extra):
        return n                               # even if each begins a page; what nobody takes goes back
    for i in range(n):
        r = &c.req[c.running[i]]
        if longest == 1 and r.len < r.calm:
            needed += 1
            continue
        burst = burst_limit(c, r, longest)
        needed += burst
        grow += growth(c, r, burst)
    while True:
        actual = c.tree.available + c.tree.evictable
        logical = actual - c.extra if actual > c.extra else 0
        if (actual >= needed and logical >= grow) or c.n_running <= 1:
            break
        best = 0 if c.victim.ask == NULL else lowest_score(c)
        for i in range(1, c.n_running if c.victim.ask == NULL else 0):
            if c.req[c.running[i]].gen < c.req[c.running[best]].gen:
                best = i
        slot = c.running[best]
        r = &c.req[slot]
        burst = burst_limit(c, r, longest)
        needed -= burst
        grow -= growth(c, r, burst)
        count_running(c, r, -1)
        c.n_running -= 1
        memmove(c.running + best, c.running + best + 1, (c.n_running - best) * sizeof(int32_t))
        abandon(c, r)
        r.node = NIL
        r.computed = r.alloc = r.prefix = r.calm = 0
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


# ---- decode -----------------------------------------------------------------------------------------------------

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


cdef inline int64_t calm_until(SglangCore* c, SglRequest* r) noexcept nogil:
    """Known tokens below which a request only decodes inside its page; 0: not even in the next pass."""
    cdef int64_t until
    if r.gen <= 1 or r.full > r.cached:
        return 0
    until = min(r.alloc, (r.full + <int64_t>1) * c.page - 1)
    return min(until, r.len + r.limit - r.gen - 1)


cdef int64_t calm_steps(SglangCore* c, double at) noexcept nogil:
    """The usual decode step for everybody who only takes that: inside its page, after its own last token.

    The others are left in `bursts`; returns their number.
    """
    cdef int64_t i, n = 0
    cdef int32_t* running = c.running
    cdef SglRequest* req = c.req
    cdef SglRequest* r
    cdef int64_t* others = c.bursts
    cdef double before = c.last_emit
    for i in range(c.n_running):
        r = &req[running[i]]
        if r.len < r.calm and r.last_ms == before:
            r.len += 1
            r.gen += 1
            r.computed += 1
            r.last_ms = at
        else:
            others[n] = running[i]
            n += 1
    return n


cdef double decode(SglangCore* c, double start) noexcept nogil:
    """Tokens for everybody who runs; returns when they are there."""
    cdef int64_t i, k, needed, burst, longest = 1, reserved, made, token, used = 0, together = 0, steps = 0, n
    cdef int32_t slot
    cdef SglRequest* r
    cdef double at
    cdef bint gone = False, done, plain
    if c.nextn and c.worker_type != WORKER_PREFILL:
        longest = c.nextn + 1
    needed = make_room(c, longest)
    n = c.n_running
    if c.tree.told and not indices(&c.scratch, &c.scratch_cap, needed + 1):
        c.error = ERR_MEMORY
        return start
    if not tokens_take(&c.tree, needed, c.scratch):
        return start                           # one request, and the pool is exhausted
    at = start + timing_decode_ms(&c.timing, n, min(c.known, c.total), c.known // n)
    for i in range(n if longest > 1 else 0):
        c.bursts[i] = sample_output_tokens(&c.rng, c.accepted, c.nextn,
                                           c.req[c.running[i]].limit - c.req[c.running[i]].gen)
    plain = longest == 1 and c.rows != NULL and not (c.real_tokens or c.record or c.tree.told)
    if plain:
        steps, n = n, calm_steps(c, at)
        steps -= n
    for i in range(n):
        r = &c.req[c.bursts[i] if plain else c.running[i]]
        burst = c.bursts[i] if longest > 1 else burst_limit(c, r, longest)
        done = r.gen >= r.limit                # wants no token: the reference keeps it running for ever
        if done:
            signal(c, r.id, NIL, END_COMPLETED, NAN)
            note(c, r.id)
        elif burst > 0:
            c.made_by += 1
        reserved, made = r.alloc, r.gen
        for k in range(burst):
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
        c.known += r.gen - made
        c.extra += r.alloc - reserved - (r.gen - made)
        c.rest -= r.gen - made
        if done:
            r.done = True
            gone = True
        else:
            r.calm = calm_until(c, r)
    c.known += steps
    c.extra -= steps
    c.rest -= steps
    c.made += steps
    c.made_by += steps
    used += steps
    together += steps
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
                count_running(c, &c.req[slot], -1)
                complete(c, slot)
            else:
                c.running[c.n_running] = slot
                c.n_running += 1
    return at


# ---- the pass ---------------------------------------------------------------------------------------------------

cdef void end_stuck(SglangCore* c, bint same_ratio) noexcept nogil:
    """End somebody if no later pass can differ from this one: the reference repeats it for ever.

    Not while a hand-off is under way, since its commands may free memory (of an embedder; in a replay a destination
    that waits for its reservation holds none).
    """
    cdef SglRequest* r
    cdef int64_t patience
    if c.made > 0 or c.completed > 0:
        c.dry = 0
        return
    c.dry += 1
    if c.count == 0 or c.n_held > 0 or c.n_reserved > 0 or (c.n_pending > 0 and c.record):
        return
    if c.put_off:
        return                                 # for as long as the user's score says so
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


cdef void run_pass(SglangCore* c, double now) noexcept nogil:
    """One engine iteration that starts at `now`; its results are in the core until the next one."""
    cdef int64_t i, retractions = c.preemptions
    cdef double start = now, ratio = c.ratio
    c.passes += 1
    c.last_start = now
    c.completed = c.admitted = c.made = c.made_by = c.ended_used = c.held_used = c.notes_used = 0
    c.admissions_used = c.signals_used = c.chunks_used = c.lengths_used = 0
    c.batch = c.batch_isl = c.batch_prefix = c.hit_tokens = c.hit_total = 0
    c.preempted = c.steady = c.put_off = False
    promote_prebuilt(c, now)
    if c.lpm:
        order_waiting(c)
    admit_waiting(c, now)
    c.seen_running, c.seen_waiting = c.n_running, c.n_waiting
    c.seen_used = c.total - c.tree.available - c.tree.evictable
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
        c.error = c.tree.error or c.fresh.error
