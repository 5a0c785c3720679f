# cython: language_level=3
"""The scheduling phases of a pass under the scheduler with switches: running requests, then waiting ones.

Answers to `schedule` of vLLM 0.33.0 `v1/core/sched/scheduler.py`, and with no rule set to the first two phases of
`_vllm`. Costs: O(running requests) plus the block operations of those that need a block or are admitted.
"""
from libc.math cimport isnan

from mocker._common cimport (
    END_CAPACITY, END_OVER_BUDGET, END_REJECTED, ERR_MEMORY, NIL, ST_PREEMPTED, ST_RUNNING, ST_WAITING, WORKER_DECODE,
    grown, int32_t, int64_t)
from mocker._core cimport STOP_EMPTY, STOP_OTHER, STOP_SEQS, STOP_WAIT, Admission, Core, Request, Work
from mocker._kv_events cimport log_removed
from mocker._requests cimport waiting_next, waiting_pop
from mocker._rules cimport (
    RULE_CHARGE_GENERATED, RULE_FILL_EARLY, RULE_FULL_ONLY, RULE_GEN_HIT, RULE_LAST_TOKEN, RULE_LATE, RULE_OWN_COPY,
    RULE_WHOLE_TAIL, Batched, Extra, VllmRulesCore, blocks_of, least)
from mocker._rules_blocks cimport allocate, cover, lazy, name, take, unseen
from mocker._rules_copies cimport find, shorten
from mocker._rules_requests cimport end_head, outgrown, preempt

cdef enum Outcome:                 # of an attempt to schedule one request
    SCHEDULED = 0
    BLOCKED = 1
    LEFT = 2                       # it was preempted for its own sake


# ---- one request ------------------------------------------------------------------------------------------------

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
    r.computed = target
    r.alloc = 0
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


cdef inline void open_block(VllmRulesCore* x, Request* r, Extra* e, int64_t target) noexcept nogil:
    """What `allocate` does for a decode step that needs one block, which is there, if its blocks are `unseen`."""
    cdef int64_t known
    take(x, 1)
    if x.c.pool.evicted_used > 0:
        log_removed(&x.c.pool)
    if not lazy(x):
        name(x, r)
        known = least(r.full, target >> x.c.shift) if x.rules & RULE_FULL_ONLY else r.full
        if known > e.done:
            e.blank -= <int32_t>known - e.done
            e.done = <int32_t>known
    e.blank += 1
    r.partial = 1
    r.alloc = 0


# ---- running requests -------------------------------------------------------------------------------------------

cdef void schedule_running(VllmRulesCore* x) noexcept nogil:
    """Running requests in admission order, as far as the budget goes."""
    cdef Core* c = x.c
    cdef int32_t slot
    cdef Request* r
    cdef Extra* e
    cdef int64_t target
    cdef Outcome outcome
    cdef bint late = (x.rules & RULE_LATE) != 0, put_off = lazy(x), early = (x.rules & RULE_FILL_EARLY) != 0
    cdef bint opens = c.caching and x.rules & RULE_OWN_COPY and unseen(x)
    cdef bint noted = c.record or c.metrics, known = True      # `ready` holds all that are
    cdef Batched* b
    cdef int32_t* ready = c.ready
    cdef int64_t n = 0, total = 0
    x.place = 0
    while x.place < c.n_running and c.budget > 0:
        slot = c.running[x.place]
        r = &c.req[slot]
        if r.len < r.alloc:                    # nothing but one more token: see `counting_until`
            r.computed += 1
            r.pass_no = -c.pass_no
            if late:
                b = &x.batch[x.batch_used]
                b.id, b.tokens, b.slot, b.makes = r.id, 1, slot, 1
                x.batch_used += 1
                x.making += 1
                x.making_length += r.len
            else:
                ready[n] = slot
                n += 1
                total += r.len
            c.budget -= 1
            x.place += 1
            continue
        e = &x.extra[slot]
        if late and r.computed >= r.len and r.gen + e.pending >= r.limit:
            x.place += 1                       # its last token is on its way
            continue
        target = r.len + e.pending
        if (opens and r.computed == target - 1 and r.computed >= r.prompt and e.done >= r.prompt >> c.shift
                and target == ((e.done + e.blank) << c.shift) + 1 and c.pool.active < c.pool.capacity):
            open_block(x, r, e, target)
        if (r.computed == target - 1 and r.computed >= r.prompt and target <= ((e.done + e.blank) << c.shift)
                and (put_off or not early or not c.caching or e.blank == 0
                     or least(r.len, target) >> c.shift <= e.done)):
            r.computed = target                # one token of a block that it has: the usual decode step
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
            if not late:
                ready[n] = slot
                n += 1
                total += r.len
            c.budget -= 1
            x.place += 1
            continue
        outcome = schedule(x, slot, 0, 0, False)
        if outcome == BLOCKED:
            break
        if outcome == SCHEDULED:
            x.place += 1
            if not late and r.computed >= r.len:
                known &= r.gen < r.limit       # else it wants no token: `collect_ready` ends it
                ready[n] = slot
                n += 1
                total += r.len
    c.n_ready = n if known and x.place == c.n_running else NIL
    c.ready_length = total


# ---- waiting requests -------------------------------------------------------------------------------------------

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


cdef int64_t cached_known(void* x, void* request) noexcept nogil:
    """Known tokens that an admission would not compute, for scores."""
    cdef int64_t cached, active
    look_up(<VllmRulesCore*>x, <Request*>request, &cached, &active)
    return cached


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
        slot = waiting_next(c)
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
        if c.n_ready != NIL and r.computed >= r.len:
            c.ready[c.n_ready] = slot
            c.n_ready = c.n_ready + 1 if r.gen < r.limit else NIL
            c.ready_length += r.len
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
