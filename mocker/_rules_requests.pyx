# cython: language_level=3
"""The requests of the scheduler with switches: the queue by arrival or priority, endings, preemption.

Answers to `_requests`, and to vLLM 0.33.0 `v1/core/sched/{scheduler,request_queue}.py` (`_preempt_request`,
`finish_requests`). What `_requests` does the same way is used from there.

Costs: queue operations O(1), with priorities O(places passed), a removal O(requests queued); preemption O(running
requests); endings what `_rules_blocks` needs to release the blocks.
"""
from libc.math cimport NAN, isnan
from libc.stdlib cimport free, malloc
from libc.string cimport memmove

from mocker._common cimport (
    END_CAPACITY, ERR_HOOK, ERR_MEMORY, NIL, ST_FREE, ST_PREEMPTED, ST_RUNNING, WORKER_DECODE, grown, int32_t, int64_t)
from mocker._core cimport Core, Request
from mocker._requests cimport note, signal, waiting_pop
from mocker._rules cimport RULE_LATE, Extra, VllmRulesCore
from mocker._rules_blocks cimport let_go


# ---- queue ------------------------------------------------------------------------------------------------------

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


cdef void waiting_restore(VllmRulesCore* x) noexcept nogil:
    """Back to the order by priority, which a score has left for one request or few."""
    cdef Core* c = x.c
    cdef int64_t i, at, m = c.waiting_cap - 1
    cdef int32_t slot, up
    for i in range(1, c.waiting_places):
        slot = c.waiting[(c.waiting_head + i) & m]
        at = i
        while at > 0:
            up = c.waiting[(c.waiting_head + at - 1) & m]
            if not before(x, slot, up):
                break
            c.waiting[(c.waiting_head + at) & m] = up
            at -= 1
        c.waiting[(c.waiting_head + at) & m] = slot


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
    if r.len >= r.alloc:                       # else it only counts, and has not more in flight than before
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


cdef int64_t lowest_score(VllmRulesCore* x) noexcept nogil:
    """Place of the running request that the user's score preempts; NIL: nobody, or the score failed."""
    cdef Core* c = x.c
    cdef int64_t i, k, best = NIL
    cdef int64_t[5] facts
    cdef double score, least = 0.0
    cdef Request* r
    for k in range(c.n_running):
        i = k if c.fifo else c.n_running - 1 - k
        r = &c.req[c.running[i]]
        if r.status != ST_RUNNING:
            continue
        facts[0], facts[1], facts[2], facts[3] = r.prompt, r.gen, r.limit, r.preemptions
        facts[4] = x.extra[c.running[i]].done + x.extra[c.running[i]].blank
        score = c.victim.ask(c.victim.context, facts)
        if isnan(score):
            c.error = ERR_HOOK
            return NIL
        if best == NIL or score < least or (
                score == least and x.by_priority and before(x, c.running[best], c.running[i])):
            best, least = i, score
    return best


cdef int32_t preempt(VllmRulesCore* x) noexcept nogil:
    """Take the blocks of one running request and queue it again."""
    cdef Core* c = x.c
    cdef int64_t i, best = NIL
    cdef int32_t slot
    cdef Request* r
    cdef void* moved
    if c.victim.ask != NULL:
        best = lowest_score(x)
    for i in range(c.n_running if c.victim.ask == NULL else 0):
        if c.req[c.running[i]].status != ST_RUNNING:
            continue
        if best != NIL and x.by_priority and before(x, c.running[i], c.running[best]):
            continue
        best = i
        if c.fifo and not x.by_priority:
            break
    if best == NIL:
        return NIL
    if best < x.place and (x.by_priority or not c.fifo):
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
