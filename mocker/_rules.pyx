# cython: language_level=3
"""A vLLM-style scheduler with one switch a rule: the reference's decisions, those of vLLM 0.33.0, and all between.

With no rule set it decides as `_vllm` (dynamo-mocker 1.3.0); with all but RULE_LATE as vLLM's synchronous scheduler
(`v1/core/sched/scheduler.py`, `kv_cache_manager.py`, `block_pool.py`), with RULE_LATE too as its asynchronous one.
`tests/model/vllm_rules.py` states the same in plain Python. `_vllm` does not know of this module.

Here are the state, the pass and many passes at once. Below them lie the scheduling phases (`_rules_schedule`), the
token phase (`_rules_tokens`), queue, endings and preemption (`_rules_requests`), a request's blocks (`_rules_blocks`)
and the copies of blocks (`_rules_copies`, which tells how memory is kept).

Costs: look-up, hold and release O(stretches of the path), times the copies of a segment where there are several;
eviction O(copies evicted); a pass O(running requests) plus the block operations of what happens in it; a
fast-forwarded pass a few additions.
"""
from libc.math cimport INFINITY, NAN
from libc.stdlib cimport free
from libc.string cimport memset

from mocker._collect cimport Gaps, gaps_add
from mocker._common cimport (
    ERR_MEMORY, ERR_TIME, NIL, ST_FREE, ST_RUNNING, WORKER_DECODE, WORKER_PREFILL, grown, int32_t, int64_t)
from mocker._core cimport STOP_SEQS, STOP_WAIT, Core, Request, Signal
from mocker._requests cimport core_enqueue, core_new, note, running_compact
from mocker._rules_blocks cimport lazy, let_go
from mocker._rules_copies cimport table_resize
from mocker._rules_requests cimport before, slot_free, waiting_remove, waiting_restore
from mocker._rules_schedule cimport admit_waiting, schedule_running
from mocker._rules_tokens cimport collect_ready, emit, settle
from mocker._timing cimport timing_decode_ms, timing_prefill_ms, timing_varies


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
    cdef int64_t had = x.extra_cap
    cdef void* moved
    if x.c.req_used <= had:
        return True
    moved = grown(x.extra, &x.extra_cap, x.c.req_used, sizeof(Extra))
    if moved == NULL:
        x.c.error = ERR_MEMORY
        return False
    x.extra = <Extra*>moved
    memset(&x.extra[had], 0, (x.extra_cap - had) * sizeof(Extra))
    return True


cdef int32_t rules_new(VllmRulesCore* x, int64_t id, int64_t prompt, int64_t limit) noexcept nogil:
    """A slot for a request, not queued yet; the caller gives it its path. NIL if memory is short."""
    cdef int32_t slot = core_new(x.c, id, prompt, limit)
    if slot != NIL and not rules_room(x):
        return NIL
    return slot


# ---- commands ---------------------------------------------------------------------------------------------------

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
    if (c.record or x.rules & RULE_LATE) and x.batch_cap <= c.req_used:   # nobody is scheduled twice in a pass
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
    if x.by_priority and c.admission.score.ask != NULL:
        waiting_restore(x)
    x.planning = False
    c.seen_running, c.seen_waiting, c.seen_used = c.n_running, c.n_waiting, c.pool.active
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
        if c.n_ready != NIL and not c.preempted:
            n, total = c.n_ready, c.ready_length
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


# ---- fast-forward -----------------------------------------------------------------------------------------------

cdef double rules_forward(VllmRulesCore* x, double now, double until, double last_start) noexcept nogil:
    """Fast-forward: passes that only decode, starting before `until` and not after `last_start`; returns the new now.

    Allowed after a pass in which everybody running made a token and nothing else can happen: then the next pass
    differs only when a request needs a block or ends, when somebody new arrives, or when the head of the queue
    could be admitted after all. The clock's additions are the same and in the same order as pass by pass.
    """
    cdef Core* c = x.c
    cdef int64_t i, k, m = 0, steps, stop, context = 0, n = c.n_running
    cdef bint varies
    cdef int32_t slot
    cdef Request* r
    cdef Extra* e
    cdef Gaps* gaps = c.gaps
    cdef double step, next_now, at, first = 0.0, emitted = c.last_emit, ends = x.flight_end, started = now
    cdef bint late = (x.rules & RULE_LATE) != 0, whole = lazy(x)
    if not c.steady or c.real_tokens or c.n_running == 0 or c.n_running > c.max_tokens:
        return now
    if c.n_waiting > 0 and (c.preempted or not (c.reason == STOP_WAIT or c.reason == STOP_SEQS)):
        return now
    if c.n_waiting > 0 and c.reason == STOP_WAIT and c.admission.score.ask != NULL and c.admission.timed:
        return now                             # somebody else may be the one to be admitted in the next pass
    k = (<int64_t>1) << 62
    for i in range(c.n_running):
        slot = c.running[i]
        r = &c.req[slot]
        if r.len < r.alloc:                    # it only counts until then
            if r.alloc - r.len < k:
                k = r.alloc - r.len
            continue
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
    varies = timing_varies(&c.timing) and c.worker_type != WORKER_PREFILL
    if varies:
        for i in range(c.n_running):
            context += c.req[c.running[i]].len
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
            at = ends if late else next_now
            if m == 0:
                first = at - emitted
            if gaps != NULL:
                gaps_add(gaps, at - emitted, n)
            emitted, ends, started, now = at, next_now, now, next_now
            m += 1
        if m < stop:
            break
    if m == 0:
        return now
    c.last_emit, x.flight_end, c.last_start = emitted, ends, started
    for i in range(c.n_running):
        r = &c.req[c.running[i]]
        if r.gen == 1 and c.rows != NULL:
            c.rows.second_gap[r.id] = first
        r.len += m
        r.gen += m
        r.computed = r.len if late else r.len - 1
        r.last_ms = c.last_emit
    c.pass_no += m
    c.passes += m
    return now
