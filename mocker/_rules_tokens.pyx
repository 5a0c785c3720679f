# cython: language_level=3
"""The token phase of a pass under the scheduler with switches: tokens made at once, or seen one pass later.

Answers to `_tokens`, and to `update_from_output` of vLLM 0.33.0 `v1/core/sched/{scheduler,async_scheduler}.py`.
A token costs a few loads and stores; one that opens or fills a block also the block operations.
"""
from libc.math cimport NAN

from mocker._collect cimport gaps_add
from mocker._common cimport (
    END_COMPLETED, END_NONE, NIL, ST_FREE, ST_PREEMPTED, ST_RUNNING, WORKER_PREFILL, int32_t, int64_t, uint32_t)
from mocker._core cimport Core, Request
from mocker._kv_events cimport log_removed
from mocker._requests cimport note, running_compact, signal
from mocker._rules cimport RULE_LAST_SLOT, RULE_LATE, RULE_SLOT_AT_USE, Batched, Extra, VllmRulesCore, least, most
from mocker._rules_blocks cimport append_token, fill, lazy, take
from mocker._rules_requests cimport outgrown, preempt, request_end, waiting_remove
from mocker._spec cimport rng_u32
from mocker._timing cimport timing_decode_ms
from mocker._tokens cimport collect_token, handoff_ms


# ---- requests that only count -----------------------------------------------------------------------------------

cdef inline bint counts(VllmRulesCore* x) noexcept nogil:
    """Whether requests may only count: nobody looks at single tokens."""
    return x.c.rows != NULL and not x.c.real_tokens and not x.c.record and not x.c.metrics and not x.strict


cdef inline int64_t counting_until(VllmRulesCore* x, int32_t slot) noexcept nogil:
    """Known tokens up to which each pass gives a decoding request one more and nothing else; goes into its `alloc`.

    Until then it has the block for the next token, fills none that must be registered, and does not end.
    """
    cdef Core* c = x.c
    cdef Request* r = &c.req[slot]
    cdef Extra* e = &x.extra[slot]
    cdef int64_t tokens
    if x.rules & RULE_LATE:                    # the next token is one further, and the block must not be full
        tokens = (e.done + (1 if c.caching and e.blank > 0 else e.blank)) << c.shift
    else:
        tokens = ((e.done + e.blank) << c.shift) + 1
    return least(tokens, r.prompt + r.limit - 1)


# ---- one token --------------------------------------------------------------------------------------------------

cdef bint give_token(VllmRulesCore* x, int32_t slot, double at, int64_t* together) noexcept nogil:
    """One more token; true if it was the last."""
    cdef Core* c = x.c
    cdef Request* r = &c.req[slot]
    cdef int64_t token = NIL
    cdef bint done
    if c.real_tokens:
        token = r.plan[r.gen] if r.gen < r.plan_used else rng_u32(&c.token_rng)
    if c.rows != NULL:
        collect_token(c, r, at, together)
    if c.real_tokens:
        append_token(x, r, <uint32_t>token)
    r.len += 1
    r.gen += 1
    c.made += 1
    done = r.gen >= r.limit
    if c.record:
        signal(c, False, r.id, token, END_COMPLETED if done else END_NONE, handoff_ms(c, r) if done else NAN)
    if c.note_first and r.gen == 1 and not done:
        note(c, ~r.id)
    return done


cdef bint next_slot(VllmRulesCore* x, int32_t slot) noexcept nogil:
    """The last block is full: it gets its content, and the token to come a block unless that is left for later.

    False if the request had to be preempted for it.
    """
    cdef Core* c = x.c
    cdef Request* r = &c.req[slot]
    cdef Extra* e = &x.extra[slot]
    cdef int64_t count = r.len >> c.shift
    cdef int32_t victim
    if not lazy(x):
        if count > r.full:
            r.full = <int32_t>count
        fill(x, r, e, least(count, e.done + e.blank))
    if x.rules & RULE_SLOT_AT_USE or (x.rules & RULE_LAST_SLOT and r.gen + 1 == r.limit):
        return True
    while c.pool.active == c.pool.capacity:
        victim = preempt(x)
        if victim == NIL or c.error:
            return False
        c.steady = False
        if victim == slot:
            outgrown(x, slot, False)
            return False
    take(x, 1)
    log_removed(&x.c.pool)
    e.blank += 1
    r.partial = 1
    return True


# ---- synchronous: tokens of this pass ---------------------------------------------------------------------------

cdef int64_t collect_ready(VllmRulesCore* x, int64_t* total_length) noexcept nogil:
    """Running requests whose known tokens are all computed, into `ready`; those that want no token end here."""
    cdef Core* c = x.c
    cdef int64_t i, n = 0
    cdef int32_t slot
    cdef Request* r
    cdef bint gone = False
    total_length[0] = 0
    for i in range(c.n_running):
        slot = c.running[i]
        r = &c.req[slot]
        if r.computed < r.len:
            continue
        if r.gen < r.limit:
            c.ready[n] = slot
            n += 1
            total_length[0] += r.len
        else:
            signal(c, False, r.id, NIL, END_COMPLETED, NAN)
            request_end(x, slot, END_COMPLETED, False)
            gone = True
    if gone:
        running_compact(c)
        c.preempted = True
    return n


cdef double emit(VllmRulesCore* x, int64_t n, int64_t total_length, double start) noexcept nogil:
    """One token for each of the `n` ready requests in order; returns the decode time, ms (0 if none was made)."""
    cdef Core* c = x.c
    cdef int64_t i, together = 0, steps = 0
    cdef double decode = 0.0, at
    cdef int32_t slot
    cdef Request* r
    cdef bint changed = False, whole = lazy(x)
    cdef bint plain = counts(x)
    c.steady = n == c.n_running                # so far: whoever runs on will have made a token
    if c.worker_type != WORKER_PREFILL:
        decode = timing_decode_ms(&c.timing, n, c.pool.active, total_length // n)
    at = start + decode
    for i in range(n):
        slot = c.ready[i]
        r = &c.req[slot]
        if r.len < r.alloc and r.last_ms == c.last_emit:
            r.len += 1
            r.gen += 1
            r.last_ms = at
            steps += 1
            continue
        if (plain and (whole or r.len & c.mask) and r.gen > 1 and r.gen + 1 < r.limit and r.last_ms == c.last_emit
                and r.status == ST_RUNNING):
            r.len += 1                         # the usual decode step, after its own last token
            r.gen += 1
            r.last_ms = at
            steps += 1
            if whole:
                r.alloc = counting_until(x, slot)
            continue
        if r.status != ST_RUNNING or (not r.len & c.mask and not next_slot(x, slot)):
            changed = True
            continue
        if give_token(x, slot, at, &together):
            request_end(x, slot, END_COMPLETED, False)
            changed = True
    c.made += steps
    c.made_by = c.made
    if changed:
        c.preempted = True                     # whoever waits has to be looked at again
        running_compact(c)
    if c.made == 0:
        return 0.0
    if c.rows != NULL and together + steps > 0:
        gaps_add(c.gaps, at - c.last_emit, together + steps)
    c.last_emit = at
    return decode


# ---- asynchronous: what the pass before made --------------------------------------------------------------------

cdef void settle(VllmRulesCore* x) noexcept nogil:
    """This pass is planned; now the tokens of the one before are seen, made when that ended.

    Of a request that only counts, what is pending and in flight stays as it is.
    """
    cdef Core* c = x.c
    cdef int64_t i, settled, together = 0, steps = 0
    cdef int32_t slot
    cdef Batched* f
    cdef Request* r
    cdef Extra* e
    cdef bint stale, gone = False
    cdef bint plain = counts(x)
    cdef double at = x.flight_end
    for i in range(x.flight_used):
        f = &x.flight[i]
        slot = f.slot
        r = &c.req[slot]
        if r.pass_no == -c.pass_no and r.len < r.alloc:
            r.len += 1                         # the usual decode step, after its own last token
            r.gen += 1
            r.last_ms = at
            steps += 1
            continue
        if f.tokens == NIL or r.status == ST_FREE or r.id != f.id:
            continue
        r.alloc = 0
        e = &x.extra[slot]
        e.flight -= f.tokens
        if not f.makes:
            continue
        settled = r.computed - e.flight
        stale = r.status == ST_PREEMPTED
        if r.limit == 0:
            signal(c, False, r.id, NIL, END_COMPLETED, NAN)
        else:
            give_token(x, slot, at, &together)
            if not stale:
                e.pending -= 1
                if settled >> c.shift > e.done:
                    r.full = <int32_t>most(r.full, least(settled, r.len) >> c.shift)
                    fill(x, r, e, least(least(r.full, settled >> c.shift), e.done + e.blank))
        if r.gen >= r.limit:
            if stale:
                waiting_remove(c, slot)
            request_end(x, slot, END_COMPLETED, False)
            gone = True
        elif plain and not stale and r.gen > 1 and e.pending == 1 and e.flight == 1 and r.computed == r.len:
            r.alloc = counting_until(x, slot)
    c.made += steps
    c.made_by = c.made
    if gone:
        running_compact(c)
        c.preempted = True
    if c.made > 0:
        if c.rows != NULL and together + steps > 0:
            gaps_add(c.gaps, at - c.last_emit, together + steps)
        c.last_emit = at
