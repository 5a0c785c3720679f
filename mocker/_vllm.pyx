# cython: language_level=3
"""The vLLM-style scheduler: one pass, and many at once where nothing happens.

Answers to `scheduler/vllm/core.rs` without KV offload and hand-off commands. A pass has four phases: running requests,
waiting requests (both here), tokens (`_tokens`), account. `core_forward` runs passes in which every running request
only decodes inside its last block: they change nothing but lengths and the clock, so it repeats the clock's additions
and nothing else.

Costs: a pass is O(running requests) plus the block operations of what happens in it; a fast-forwarded pass is a
few additions.
"""
from libc.math cimport INFINITY, NAN, isnan
from libc.string cimport memset

from mocker._calendar cimport (
    asleep_length, calendar_admit, calendar_open, calendar_rest, calendar_room, calendar_settle,
    calendar_wake, usual)
from mocker._collect cimport gaps_add
from mocker._common cimport (
    END_OVER_BUDGET, END_REJECTED, ERR_MEMORY, ERR_TIME, NIL, POLICY_TRTLLM, ST_PENDING, ST_RESERVED, ST_RUNNING,
    ST_WAITING, WORKER_DECODE, WORKER_PREFILL, grown, int32_t, int64_t)
from mocker._core cimport (
    STOP_EMPTY, STOP_OTHER, STOP_SEQS, STOP_WAIT, Admission, Core, Request, Signal, Work, spread_add)
from mocker._kv cimport pool_cost, pool_use
from mocker._offload cimport Offload, must_wait
from mocker._offload_forward cimport tiers_forward
from mocker._offload_pass cimport (
    UP_BLOCKED, UP_PARKED, Promotion, tiers_admit, tiers_begin, tiers_end, tiers_promote, tiers_rest,
    tiers_wait)
from mocker._requests cimport (
    note, outgrown, preempt, request_end, signal, waiting_first, waiting_next, waiting_pop, waiting_remove)
from mocker._timing cimport timing_decode_ms, timing_prefill_ms, timing_varies
from mocker._tokens cimport collect_ready, emit, emit_bursts
from mocker._trtllm cimport trt_blocks, trt_fits

cdef enum Outcome:                 # of an attempt to schedule one request
    SCHEDULED = 0
    BLOCKED = 1
    PREEMPTED_ITSELF = 2


# ---- scheduling -------------------------------------------------------------------------------------------------

cdef void work_note(Core* c, Request* r) noexcept nogil:
    cdef Work* w
    cdef void* moved = grown(c.works, &c.works_cap, c.works_used + 1, sizeof(Work))
    if moved == NULL:
        c.error = ERR_MEMORY
        return
    c.works = <Work*>moved
    w = &c.works[c.works_used]
    r.work = c.works_used
    c.works_used += 1
    w.id = r.id
    w.total, w.prompt_tokens, w.prefix, w.prompt, w.length = r.used, r.used_prompt, r.used_prefix, r.prompt, r.len
    w.undone = False


cdef void undo(Core* c, Request* r) noexcept nogil:
    """Give back what a request preempted in this pass was scheduled for."""
    if r.pass_no != c.pass_no and r.pass_no != -c.pass_no:
        return
    if c.metrics:
        c.works[r.work].undone = True
    if r.pass_no < 0:                          # a decode step
        c.budget += 1
        r.pass_no = 0
        return
    r.pass_no = 0
    c.budget += r.used
    if r.used_prompt > 0 and c.worker_type != WORKER_DECODE:
        c.batch -= 1
        c.batch_isl -= r.used_prefix + r.used_prompt
        c.batch_prefix -= r.used_prefix


cdef int64_t cached_tokens(Core* c, Request* r, int64_t* active) noexcept nogil:
    """Prompt tokens in resident blocks from the start on, and those of them in held blocks."""
    cdef int64_t blocks, held
    pool_cost(&c.pool, &r.path, r.full, &blocks, &held)
    blocks *= c.block_size
    held *= c.block_size
    active[0] = held if held < r.prompt else r.prompt
    return blocks if blocks < r.prompt else r.prompt


cdef Outcome schedule(Core* c, int32_t slot, int64_t cached, bint admit) noexcept nogil:
    """Give one request its share of the budget and the blocks for it; `cached` < 0: look it up if needed."""
    cdef Request* r = &c.req[slot]
    cdef int64_t before, prompt_before, rest, target, ignored, first, last, partial
    cdef int32_t victim
    if r.computed != 0:
        cached = 0
    elif cached < 0:
        cached = cached_tokens(c, r, &ignored)
    before = r.computed + cached
    prompt_before = before if before < r.prompt else r.prompt
    rest = r.len - before if r.len > before else 0
    if not c.chunked and r.prompt - prompt_before > c.budget:
        return BLOCKED
    if c.budget == 0 and rest > 0:
        return BLOCKED
    if c.tiers != NULL and must_wait(c, slot):
        return BLOCKED
    target = before + (rest if rest < c.budget else c.budget)
    if target > r.alloc:
        first = (r.alloc + c.mask) >> c.shift
        last = (target + c.mask) >> c.shift
        if last > r.full + r.partial:
            last = r.full + r.partial
        if last > first:
            partial = 1 if last > r.full else 0
            while not pool_use(&c.pool, &r.path, <int32_t>first, <int32_t>(last - partial), <int32_t>partial):
                if c.pool.blocked != NIL:
                    tiers_wait(c, slot)
                    c.pool.blocked = NIL
                    return BLOCKED
                calendar_settle(c, True, slot)
                victim = preempt(c)
                if victim == NIL:
                    return BLOCKED
                c.preempted = True
                undo(c, &c.req[victim])
                if victim == slot:
                    outgrown(c, slot, True)
                    return PREEMPTED_ITSELF
                r = &c.req[slot]
        r.alloc = target
    r.computed = target
    r.used = target - before
    if r.used == 0 and target < r.len:
        return BLOCKED
    r.pass_no = c.pass_no
    r.used_prefix = prompt_before
    r.used_prompt = (target if target < r.prompt else r.prompt) - prompt_before
    if c.metrics:
        work_note(c, r)
    if r.used_prompt > 0 and c.worker_type != WORKER_DECODE:
        c.batch += 1
        c.batch_isl += prompt_before + r.used_prompt
        c.batch_prefix += prompt_before
    if admit:
        if slot == waiting_first(c):
            waiting_pop(c)
        else:
            waiting_remove(c, slot)            # a prebuilt prompt behind the head
        r.status = ST_RUNNING
        c.running[c.n_running] = slot
        c.n_running += 1
        if c.calendar.is_open:
            calendar_admit(c, slot)
    c.budget -= r.used
    return SCHEDULED


cdef void schedule_awake(Core* c) noexcept nogil:
    """`schedule_running` with a calendar: those who are awake; for those asleep the budget is enough."""
    cdef int64_t i = 0, n = 0, total = 0, awake = c.calendar.n_awake
    cdef int32_t slot
    cdef Request* r
    cdef Outcome outcome
    cdef bint known = True
    c.budget -= c.calendar.asleep
    while i < awake and c.budget > 0:
        slot = <int32_t>c.calendar.awake[i]
        r = &c.req[slot]
        if usual(c, r):
            r.computed = r.len
            if r.alloc < r.len:
                r.alloc = r.len
            r.pass_no = -c.pass_no
            c.budget -= 1
        else:
            outcome = schedule(c, slot, -1, False)
            if not c.calendar.is_open:         # it wanted a block that there was not
                if outcome == BLOCKED:
                    c.n_ready = NIL
                else:
                    schedule_running(c, c.calendar.at + (outcome == SCHEDULED), False)
                return
            if outcome == BLOCKED:
                break
            if r.computed < r.len:
                i += 1
                continue
            known &= r.gen < r.limit
        c.ready[n] = slot
        n += 1
        total += r.len
        i += 1
    while i < awake:                           # not scheduled; somebody may still want a token that it did not get
        slot = <int32_t>c.calendar.awake[i]
        r = &c.req[slot]
        if r.computed >= r.len:
            known &= r.gen < r.limit
            c.ready[n] = slot
            n += 1
            total += r.len
        i += 1
    c.n_ready = n if known else NIL
    c.ready_length = total


cdef void schedule_running(Core* c, int64_t i, bint known) noexcept nogil:
    """Phase A: running requests from the `i`-th on in admission order, as far as the budget goes.

    `known`: those before it are in `ready`, and so `ready` can hold all that are.
    """
    cdef int64_t n = 0, total = 0
    cdef int32_t slot
    cdef int32_t* ready = c.ready
    cdef Request* r
    cdef Outcome outcome
    while i < c.n_running and c.budget > 0:
        slot = c.running[i]
        r = &c.req[slot]
        if usual(c, r):
            r.computed = r.len                 # one token of a block that it has: the usual decode step
            if r.alloc < r.len:
                r.alloc = r.len
            r.pass_no = -c.pass_no
            if c.metrics:
                r.used, r.used_prompt, r.used_prefix = 1, 0, r.prompt
                work_note(c, r)
            ready[n] = slot
            n += 1
            total += r.len
            c.budget -= 1
            i += 1
            continue
        outcome = schedule(c, slot, -1, False)
        if outcome == BLOCKED:
            break
        if outcome == SCHEDULED:
            i += 1
            if r.computed >= r.len:
                known &= r.gen < r.limit       # else it wants no token: `collect_ready` ends it
                ready[n] = slot
                n += 1
                total += r.len
    c.n_ready = n if known and i == c.n_running else NIL
    c.ready_length = total


cdef inline bint prebuilt(Request* r) noexcept nogil:
    """The prompt's blocks are there: it is empty, or was transferred here."""
    return r.computed >= r.prompt and r.alloc >= r.prompt


cdef int32_t first_prebuilt(Core* c) noexcept nogil:
    cdef int64_t i
    cdef int32_t slot
    for i in range(c.waiting_places):
        slot = c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]
        if slot >= 0 and prebuilt(&c.req[slot]):
            return slot
    return NIL


cdef bint gate(Core* c, Request* r, int64_t* cached, int64_t* active) noexcept nogil:
    """Whether the head of the queue may be admitted beside the running requests."""
    cdef int64_t need
    cached[0] = cached_tokens(c, r, active)
    if c.policy == POLICY_TRTLLM:
        return trt_fits(c, r, active[0])
    need = ((r.len + c.mask) >> c.shift) - (active[0] >> c.shift)
    return need <= c.pool.capacity - c.pool.active


cdef int64_t cached_prompt(void* core, void* request) noexcept nogil:
    """Prompt tokens whose KV is there, for scores."""
    cdef Request* r = <Request*>request
    cdef int64_t ignored
    return r.prompt if prebuilt(r) else cached_tokens(<Core*>core, r, &ignored)


cdef void admit_waiting(Core* c, double now) noexcept nogil:
    """Phase B: waiting requests strictly in order, as long as they fit and there is budget to start them."""
    cdef int32_t slot
    cdef int64_t cached, active = 0
    cdef Request* r
    cdef Admission* a
    cdef void* moved
    cdef Outcome outcome
    cdef Promotion promotion
    c.reason = STOP_OTHER
    if c.tiers != NULL and not tiers_admit(c):
        return
    while not c.preempted:
        if c.n_running >= c.max_seqs:
            c.reason = STOP_SEQS
            return
        slot = waiting_next(c)
        if slot == NIL:
            c.reason = STOP_EMPTY
            return
        if c.n_pending > 0:
            slot = first_prebuilt(c)           # a destination waits for room: nobody else may take it
            if slot == NIL:
                return
        r = &c.req[slot]
        if c.tiers != NULL and must_wait(c, slot):
            return
        if prebuilt(r):
            cached = 0                         # nothing to compute: admitted without asking for room
        else:
            if r.status == ST_WAITING:
                if (trt_blocks(c, r) if c.policy == POLICY_TRTLLM else (r.len + c.mask) >> c.shift) > c.pool.capacity:
                    waiting_pop(c)
                    signal(c, True, r.id, NIL, END_REJECTED, NAN)
                    request_end(c, slot, END_REJECTED, True)
                    continue
            if not gate(c, r, &cached, &active):
                c.reason = STOP_WAIT
                return
            if c.tiers != NULL and r.status == ST_WAITING:
                promotion = tiers_promote(c, slot, cached, cached - active, now)
                if promotion == UP_PARKED:
                    continue
                if promotion == UP_BLOCKED:
                    return
        outcome = schedule(c, slot, cached, True)
        if outcome == BLOCKED:
            if (c.end_over_budget and not c.chunked and c.n_running == 0 and c.budget == c.max_tokens
                    and r.prompt - cached > c.max_tokens):
                # It needs more than a whole pass and nothing runs that could change that: the reference waits for ever.
                waiting_pop(c)
                signal(c, True, r.id, NIL, END_OVER_BUDGET, NAN)
                request_end(c, slot, END_OVER_BUDGET, True)
                continue
            return
        if outcome != SCHEDULED:
            return
        r = &c.req[slot]
        c.admitted += 1
        if r.computed >= r.len and c.n_ready != NIL:
            c.ready[c.n_ready] = slot
            c.n_ready = c.n_ready + 1 if r.gen < r.limit else NIL
            c.ready_length += r.len
        if c.rows != NULL:
            if isnan(c.rows.first_admit[r.id]):
                c.rows.first_admit[r.id] = now
                c.rows.first_reused[r.id] = cached
            if cached > c.rows.reused[r.id]:
                c.rows.reused[r.id] = cached
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


# ---- the pass ---------------------------------------------------------------------------------------------------

cdef void core_pass(Core* c, double now) noexcept nogil:
    """One engine iteration that starts at `now`; its results are in the core until the next one."""
    cdef int64_t i, n, total
    cdef double start, decode
    cdef void* moved
    c.pass_no += 1
    c.passes += 1
    c.last_start = now
    c.completed = c.admitted = c.made = c.made_by = c.ended_used = c.gone_late_used = c.held_used = 0
    c.admissions_used = c.signals_used = c.late_used = c.works_used = 0
    c.budget = c.max_tokens
    c.batch = c.batch_isl = c.batch_prefix = 0
    c.preempted = False
    c.steady = False
    if c.tiers != NULL:
        tiers_begin(c, now)
    if c.calendar.is_open and calendar_wake(c):
        schedule_awake(c)
    else:
        schedule_running(c, 0, True)
    admit_waiting(c, now)
    c.seen_running, c.seen_waiting, c.seen_used = c.n_running, c.n_waiting, c.pool.active
    start = now
    if c.batch > 0 and c.worker_type != WORKER_DECODE:
        start = now + timing_prefill_ms(&c.timing, c.batch, c.batch_isl // c.batch, c.batch_prefix // c.batch)
    if c.calendar.is_open and (c.n_ready == NIL or not calendar_room(c)):
        calendar_settle(c, True, NIL)
        c.n_ready = NIL
    if c.n_ready != NIL and not c.preempted:
        n, total = c.n_ready, c.ready_length
    else:
        n = collect_ready(c, &total)
    decode = 0.0
    if n + c.calendar.asleep > 0:
        decode = emit_bursts(c, n, start) if c.nextn else emit(c, n, total, start)
    if c.n_running >= c.calendar.least > 0 and not c.calendar.is_open:
        calendar_open(c)
    c.end_ms = start + decode
    if c.tiers != NULL:
        if c.end_ms <= now or c.pool.fresh != NULL:
            c.end_ms = tiers_end(c, now, c.end_ms)
        if (<Offload*>c.tiers).strides and not c.calendar.is_open:
            c.steady = c.made > 0              # the fast-forward sees for itself who decodes
    if not (c.end_ms < INFINITY):
        c.error = ERR_TIME
    for i in range(c.gone_late_used):
        note(c, c.gone_late[i])
    for i in range(c.late_used):
        moved = grown(c.signals, &c.signals_cap, c.signals_used + 1, sizeof(Signal))
        if moved == NULL:
            c.error = ERR_MEMORY
            return
        c.signals = <Signal*>moved
        c.signals[c.signals_used] = c.late[i]
        c.signals_used += 1


cdef double core_forward(Core* c, double now, double until, double last_start) noexcept nogil:
    """Fast-forward: passes that only decode, starting before `until` and not after `last_start`; returns the new now.

    Allowed after a pass in which everybody running made a token and nothing else can happen: then the next pass
    differs only when a request needs a block or ends, when somebody new arrives, or when the head of the queue
    could be admitted after all. The clock's additions are the same and in the same order as pass by pass.
    """
    cdef int64_t i, k, m = 0, steps, stop, context = 0
    cdef bint varies
    cdef Request* r
    cdef double step, next_now, first = now
    if c.tiers != NULL:
        if (<Offload*>c.tiers).strides and not c.calendar.is_open:
            return tiers_forward(c, now, until, last_start)
        until = tiers_rest(c, until)           # passes book what ends below
        if until <= now:
            return now
    if not c.steady or c.nextn or c.real_tokens or c.n_running == 0 or c.n_running > c.max_tokens:
        return now
    if c.n_waiting > 0 and (c.preempted or not (c.reason == STOP_WAIT or c.reason == STOP_SEQS)):
        return now
    if c.n_waiting > 0 and c.reason == STOP_WAIT and c.admission.score.ask != NULL and c.admission.timed:
        return now                             # somebody else may be the one to be admitted in the next pass
    varies = timing_varies(&c.timing) and c.worker_type != WORKER_PREFILL
    if c.calendar.is_open:
        k = calendar_rest(c)
        if k == 0:
            return now
        context = asleep_length(c)
    else:
        k = (<int64_t>1) << 62
        for i in range(c.n_running):
            r = &c.req[c.running[i]]
            steps = (-r.len) & c.mask          # tokens before the one that needs a block
            if steps > r.limit - r.gen - 1:    # tokens before the last one
                steps = r.limit - r.gen - 1
            if steps < k:
                k = steps
                if k == 0:
                    return now
        for i in range(c.n_running if varies else 0):
            context += c.req[c.running[i]].len
    if varies:
        context //= c.n_running                # grows by one a pass
    while m < k:
        step = 0.0
        if c.worker_type != WORKER_PREFILL:
            step = timing_decode_ms(&c.timing, c.n_running, c.pool.active, context + m)
        if not (step < INFINITY):
            break                              # the next pass says so
        stop = m + 1 if varies else k          # passes that take as long
        while m < stop and now < until and now <= last_start:
            next_now = now + step
            if c.gaps != NULL:
                gaps_add(c.gaps, next_now - now, c.n_running)
            if m == 0:
                first = next_now - now
            c.last_start = now
            now = next_now
            m += 1
        if m < stop:
            break
    if m == 0:
        return now
    if c.calendar.is_open:
        c.calendar.tick += m
    for i in range(0 if c.calendar.is_open else c.n_running):
        r = &c.req[c.running[i]]
        if r.gen == 1 and c.rows != NULL:
            c.rows.second_gap[r.id] = first
        r.len += m
        r.gen += m
        r.computed = r.alloc = r.len - 1
        r.last_ms = now
    c.last_emit = now
    c.pass_no += m
    c.passes += m
    return now


# ---- forward-pass metrics ---------------------------------------------------------------------------------------

cdef void core_metrics(Core* c) noexcept nogil:
    """Forward-pass metrics of the pass just run, from `works` and the queue (rule: `compute_fpm`)."""
    cdef int64_t i
    cdef int32_t slot
    cdef Work* w
    cdef Request* r
    cdef double mean[4]
    memset(&c.fpm[0], 0, sizeof(c.fpm))
    memset(&mean[0], 0, sizeof(mean))
    c.fpm_prefill_tokens = c.fpm_prefix_tokens = 0
    for i in range(c.works_used):
        w = &c.works[i]
        if w.undone:
            continue
        if w.prompt_tokens > 0:
            spread_add(&c.fpm[0], &mean[0], w.prompt)
            c.fpm_prefill_tokens += w.total
            c.fpm_prefix_tokens += w.prefix
        else:
            spread_add(&c.fpm[1], &mean[1], w.length)
    for i in range(c.waiting_places):
        slot = c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]
        if slot < 0:
            continue
        r = &c.req[slot]
        if r.destination:
            spread_add(&c.fpm[3], &mean[3], r.prompt)
        elif r.status == ST_WAITING:
            spread_add(&c.fpm[2], &mean[2], r.prompt)
        else:
            spread_add(&c.fpm[3], &mean[3], r.len)
    if c.n_pending + c.n_reserved > 0:
        for i in range(c.req_used):
            if c.req[i].status == ST_PENDING or c.req[i].status == ST_RESERVED:
                spread_add(&c.fpm[3], &mean[3], c.req[i].prompt)
    for i in range(4):
        if c.fpm[i].count > 0:
            c.fpm[i].variance /= <double>c.fpm[i].count
