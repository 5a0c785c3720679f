# cython: language_level=3
"""The token phase of a pass: who is ready, one token each or speculative bursts, and the blocks that they open.

Answers to `emit_ready_tokens` and `emit_speculative_ready_tokens` of `scheduler/vllm/core.rs` and to `push` of
`common/sequence.rs`. A token costs a few loads and stores; one that opens a block also the pool's operations.
"""
from libc.math cimport NAN

from mocker._calendar cimport asleep_length, calendar_compact, calendar_turn
from mocker._collect cimport gaps_add
from mocker._common cimport (
    END_COMPLETED, END_NONE, ERR_MEMORY, ERR_OK, NIL, ST_RUNNING, WORKER_DECODE, WORKER_PREFILL, int32_t, int64_t,
    uint32_t, uint64_t)
from mocker._core cimport Core, Request
from mocker._hash cimport block_hash, chain_hash
from mocker._kv cimport Path, path_reserve, pool_promote_own, pool_promote_shared, pool_reserve
from mocker._offload cimport granted, must_wait
from mocker._offload_pass cimport tiers_deny
from mocker._requests cimport finish, note, outgrown, preempt, running_compact, signal
from mocker._spec cimport rng_u32, sample_output_tokens
from mocker._timing cimport timing_mixed_ms, timing_mixes, timing_step_ms


cdef void promote(Core* c, Request* r) noexcept nogil:
    """The last block is complete and a token follows it: register it under its content."""
    cdef Path* path = &r.path
    cdef uint64_t local, key
    cdef int32_t i
    r.full += 1
    r.partial = 0
    r.tail_used = 0
    if not c.caching:
        return
    if path_reserve(path, path.n + 1, c.real_tokens, c.tokens_per_block) != ERR_OK:
        c.error = ERR_MEMORY
        return
    if not c.real_tokens:
        if path.n == 0 or path.keys[path.n - 1] != r.own_key:
            path.keys[path.n] = r.own_key
            path.n += 1
        path.ends[path.n - 1] = r.full
        pool_promote_own(&c.pool, path)
        return
    local = block_hash(r.tail, <size_t>c.block_size)
    key = local if path.n == 0 else chain_hash(path.keys[path.n - 1], local)
    path.keys[path.n] = key
    path.local[path.n] = local
    path.ends[path.n] = path.n + 1
    if c.tokens_per_block:
        for i in range(<int32_t>c.block_size):
            path.tokens[path.n * c.block_size + i] = r.tail[i]
    path.n += 1
    pool_promote_shared(&c.pool, path)


cdef inline int64_t next_token(Core* c, Request* r) noexcept nogil:
    if not c.real_tokens:
        return NIL
    return r.plan[r.gen] if r.gen < r.plan_used else rng_u32(&c.token_rng)


cdef inline void push(Core* c, Request* r, int64_t token) noexcept nogil:
    """One more token; its block is there."""
    if c.real_tokens:
        r.tail[r.tail_used] = <uint32_t>token
        r.tail_used += 1
    r.len += 1
    r.gen += 1


cdef void collect_token(Core* c, Request* r, double at, int64_t* together) noexcept nogil:
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


cdef int64_t collect_ready(Core* c, int64_t* total_length) noexcept nogil:
    """Running requests whose known tokens are all computed, into `ready`; those that want no token end here."""
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
        elif r.limit == 0:
            signal(c, False, r.id, NIL, END_COMPLETED, NAN)
            finish(c, slot, END_COMPLETED)
            gone = True
    if gone:
        running_compact(c)
    return n


cdef double beside_prompts(Core* c, int64_t n, int64_t active, double start) noexcept nogil:
    """What ready requests that have a token add to a pass of prompts, ms; first tokens come with the prompts."""
    cdef int64_t i, others = c.calendar.asleep, length = asleep_length(c), mean
    cdef Request* r
    cdef double ms
    for i in range(n):
        r = &c.req[c.ready[i]]
        if r.gen > 0:
            others += 1
            length += r.len
    if others == 0:
        return 0.0
    mean = c.batch_isl // c.batch - c.batch_prefix // c.batch
    if mean <= 0:
        return timing_step_ms(&c.timing, others, active, length)
    ms = timing_mixed_ms(&c.timing, c.batch, mean, c.batch_prefix // c.batch, others, length // others)
    ms -= start - c.last_start
    return ms if not ms < 0.0 else 0.0


cdef double emit(Core* c, int64_t n, int64_t total_length, double start) noexcept nogil:
    """One token for each of the `n` ready requests in order, and for all asleep; returns the decode time, ms (0 if none
    was made)."""
    cdef int64_t i, token, together = 0, steps = c.calendar.asleep, makers = n + steps
    cdef double decode = 0.0, at
    cdef int32_t slot, victim
    cdef Request* r
    cdef bint changed = False, made, done, plain = c.rows != NULL and not c.real_tokens and not c.record
    c.steady = makers == c.n_running           # so far: whoever runs on will have made a token
    if c.worker_type != WORKER_PREFILL:
        if c.batch and timing_mixes(&c.timing) and c.worker_type != WORKER_DECODE:
            decode = beside_prompts(c, n, c.pool.active, start)
        else:
            decode = timing_step_ms(&c.timing, makers, c.pool.active, total_length + asleep_length(c))
    at = start + decode
    for i in range(n):
        slot = c.ready[i]
        r = &c.req[slot]
        if (plain and r.len & c.mask and r.gen > 1 and r.gen + 1 < r.limit and r.last_ms == c.last_emit
                and r.status == ST_RUNNING):
            r.len += 1                         # the usual decode step: inside its block, after its own last token
            r.gen += 1
            r.last_ms = at
            steps += 1
            continue
        made = False
        while r.status == ST_RUNNING:
            if r.len & c.mask:
                made = True
                break
            if c.tiers != NULL and must_wait(c, slot):
                c.steady = False
                break
            if r.partial:
                promote(c, r)
            if pool_reserve(&c.pool, 1):
                if c.tiers != NULL:
                    granted(c, slot)
                r.partial = 1
                if r.gen + 1 < r.limit:
                    r.alloc = r.len + 1
                made = True
                break
            if c.pool.blocked != NIL:
                tiers_deny(c, slot)
                c.pool.blocked = NIL
                c.steady = False
                break
            victim = preempt(c)
            if victim == NIL:
                c.steady = False
                break
            changed = True
            if victim == slot:
                outgrown(c, slot, False)
                break
        if not made:
            continue
        token = next_token(c, r)
        if c.rows != NULL:
            collect_token(c, r, at, &together)
        push(c, r, token)
        c.made += 1
        done = r.gen >= r.limit
        if c.record:
            signal(c, False, r.id, token, END_COMPLETED if done else END_NONE, handoff_ms(c, r) if done else NAN)
        if done:
            finish(c, slot, END_COMPLETED)
            changed = True
        elif c.note_first and r.gen == 1:
            note(c, ~r.id)
    c.made += steps
    c.made_by = c.made
    if changed:
        c.preempted = True                     # whoever waits has to be looked at again
        if c.calendar.is_open:
            calendar_compact(c)
        else:
            running_compact(c)
    if c.made == 0:
        return 0.0
    if c.rows != NULL and together + steps > 0:
        gaps_add(c.gaps, at - c.last_emit, together + steps)
    c.last_emit = at
    if c.calendar.is_open:
        calendar_turn(c)
    return decode


cdef double emit_bursts(Core* c, int64_t n, double start) noexcept nogil:
    """Speculative decoding: blocks for the longest bursts first, then the sampled burst of each ready request."""
    cdef int64_t i, k, need, burst, token, spare, longest = 1 if c.worker_type == WORKER_PREFILL else c.nextn + 1
    cdef int64_t together = 0, zeros = 0, total_length
    cdef double decode = 0.0, at
    cdef int32_t slot, victim
    cdef Request* r
    cdef bint changed = False, done, plain = c.rows != NULL and not c.real_tokens and not c.record
    if c.tiers != NULL:
        for i in range(n):
            if must_wait(c, c.ready[i]):
                return 0.0
    while True:
        need = 0
        total_length = 0
        for i in range(n):
            r = &c.req[c.ready[i]]
            burst = r.limit - r.gen
            if burst > longest:
                burst = longest
            need += ((r.len + burst + c.mask) >> c.shift) - ((r.len + c.mask) >> c.shift)
            total_length += r.len
        if pool_reserve(&c.pool, need):
            break
        if c.pool.blocked != NIL:
            for i in range(n):
                tiers_deny(c, c.ready[i])
            c.pool.blocked = NIL
            return 0.0
        victim = preempt(c)
        if victim == NIL:
            return 0.0
        c.preempted = True
        if c.n_running == 0:
            outgrown(c, victim, False)
        n = 0
        for i in range(c.n_running):
            slot = c.running[i]
            r = &c.req[slot]
            if r.computed == r.len and r.gen < r.limit:
                c.ready[n] = slot
                n += 1
        if n == 0:
            return 0.0
    if c.worker_type != WORKER_PREFILL:
        if c.batch and timing_mixes(&c.timing) and c.worker_type != WORKER_DECODE:
            decode = beside_prompts(c, n, c.pool.active - need, start)
        else:
            decode = timing_step_ms(&c.timing, n, c.pool.active - need, total_length)
    at = start + decode
    spare = need
    if c.tiers != NULL:
        for i in range(n):
            granted(c, c.ready[i])
    for i in range(n):
        slot = c.ready[i]
        r = &c.req[slot]
        burst = 1
        if c.worker_type != WORKER_PREFILL:
            burst = sample_output_tokens(&c.rng, c.accepted, c.nextn, r.limit - r.gen)
        if (plain and r.len & c.mask and (r.len & c.mask) + burst <= c.mask + 1 and r.gen > 1
                and r.gen + burst < r.limit and r.last_ms == c.last_emit):
            r.len += burst                     # the usual burst: inside its block, after its own last token
            r.gen += burst
            r.last_ms = at
            r.alloc = r.len
            r.computed = r.len - 1
            c.made += burst
            together += 1
            zeros += burst - 1
            continue
        done = False
        for k in range(burst):
            if not r.len & c.mask:
                if r.partial:
                    promote(c, r)
                r.partial = 1
                spare -= 1
            token = next_token(c, r)
            if c.rows != NULL:
                if k == 0:
                    collect_token(c, r, at, &together)
                else:
                    zeros += 1
                    if r.gen == 1:
                        c.rows.second_gap[r.id] = 0.0
            push(c, r, token)
            c.made += 1
            done = r.gen >= r.limit
            if not done:
                r.alloc = r.len
            if c.note_first and r.gen == 1 and not done:
                note(c, ~r.id)
            if c.record:
                signal(c, False, r.id, token, END_COMPLETED if done else END_NONE, handoff_ms(c, r) if done else NAN)
        if done:
            finish(c, slot, END_COMPLETED)
            changed = True
        else:
            r.computed = r.len - 1
    c.pool.active -= spare
    c.made_by = n
    if changed:
        running_compact(c)
    if c.rows != NULL and together > 0:
        gaps_add(c.gaps, at - c.last_emit, together)
    if c.rows != NULL and zeros > 0:
        gaps_add(c.gaps, 0.0, zeros)
    c.last_emit = at
    return decode
