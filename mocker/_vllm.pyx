# cython: language_level=3
"""The vLLM-style scheduler: queues, one pass, preemption, completion.

Answers to `scheduler/vllm/core.rs` without KV offload and hand-off commands. A pass has four phases, each a
function here: running requests, waiting requests, tokens, account. `core_forward` runs passes in which every
running request only decodes inside its last block: they change nothing but lengths and the clock, so it repeats
the clock's additions and nothing else.

Costs: a pass is O(running requests) plus the block operations of what happens in it; a fast-forwarded pass is a
few additions.
"""
from libc.math cimport INFINITY, NAN, isnan
from libc.stdlib cimport free, malloc
from libc.string cimport memmove, memset

from mocker._collect cimport gaps_add
from mocker._common cimport (
    END_CAPACITY, END_COMPLETED, END_NONE, END_OVER_BUDGET, END_REJECTED, ERR_MEMORY, ERR_OK, ERR_TIME, NIL,
    POLICY_TRTLLM, ST_FREE, ST_PREEMPTED, ST_RUNNING, ST_WAITING, WORKER_DECODE, WORKER_PREFILL, grown, int32_t,
    int64_t, uint32_t, uint64_t)
from mocker._core cimport (
    STOP_EMPTY, STOP_OTHER, STOP_SEQS, STOP_WAIT, Admission, Core, Request, Signal, Spread, Work)
from mocker._hash cimport block_hash, chain_hash
from mocker._kv cimport (
    Path, path_free, path_reserve, pool_cost, pool_free, pool_promote_own, pool_promote_shared, pool_release,
    pool_reserve, pool_use)
from mocker._spec cimport rng_u32, sample_output_tokens
from mocker._timing cimport timing_decode_ms, timing_free, timing_prefill_ms
from mocker._trtllm cimport trt_blocks, trt_fits, trt_limit

cdef enum Outcome:                 # of an attempt to schedule one request
    SCHEDULED = 0
    BLOCKED = 1
    PREEMPTED_ITSELF = 2


# ---- memory -----------------------------------------------------------------------------------------------------

cdef int core_init(Core* c) noexcept nogil:
    """Queues and slots of a core whose configuration, pool and timing are set; the rest is zeroed memory."""
    c.free_slot = NIL
    c.waiting_cap = 16
    c.waiting = <int32_t*>malloc(c.waiting_cap * sizeof(int32_t))
    c.last_emit = NAN
    c.next_own_key = <uint64_t>1 << 63
    c.next_place = NIL
    return ERR_OK if c.waiting != NULL else ERR_MEMORY


cdef void core_free(Core* c) noexcept nogil:
    cdef int64_t i
    for i in range(c.req_used):
        path_free(&c.req[i].path)
        free(c.req[i].tail)
        free(c.req[i].plan)
    free(c.req)
    free(c.running)
    free(c.waiting)
    free(c.ready)
    free(c.works)
    free(c.ended)
    free(c.admissions)
    free(c.signals)
    free(c.late)
    pool_free(&c.pool)
    timing_free(&c.timing)


cdef int32_t core_new(Core* c, int64_t id, int64_t prompt, int64_t limit) noexcept nogil:
    """A slot for a request, not queued yet; the caller gives it its path. NIL if memory is short."""
    cdef int32_t slot = c.free_slot
    cdef Request* r
    cdef void* moved
    if slot != NIL:
        c.free_slot = c.req[slot].next_free
    else:
        moved = grown(c.req, &c.req_cap, c.req_used + 1, sizeof(Request))
        if moved == NULL:
            c.error = ERR_MEMORY
            return NIL
        c.req = <Request*>moved
        slot = <int32_t>c.req_used
        c.req_used += 1
        memset(&c.req[slot], 0, sizeof(Request))
    moved = grown(c.running, &c.running_cap, c.req_used, sizeof(int32_t))
    if moved != NULL:
        c.running = <int32_t*>moved
        moved = grown(c.ready, &c.ready_cap, c.req_used, sizeof(int32_t))
    if moved == NULL:
        c.error = ERR_MEMORY
        return NIL
    c.ready = <int32_t*>moved
    r = &c.req[slot]
    if c.policy == POLICY_TRTLLM:
        limit = trt_limit(c, prompt, limit)
    r.len = r.prompt = prompt
    r.computed = r.alloc = r.gen = 0
    r.limit = limit
    r.full = <int32_t>(prompt >> c.shift)
    r.partial = 1 if prompt & c.mask else 0
    r.pass_no = 0
    r.id = id
    r.preemptions = 0
    r.path.n = 0
    r.own_key = 0
    r.tail_used = 0
    r.plan_used = 0
    r.last_ms = NAN
    return slot


cdef inline void slot_free(Core* c, int32_t slot) noexcept nogil:
    c.req[slot].status = ST_FREE
    c.req[slot].next_free = c.free_slot
    c.free_slot = slot
    c.count -= 1


# ---- queues -----------------------------------------------------------------------------------------------------

cdef bint waiting_room(Core* c) noexcept nogil:
    """Make room for one more place in the ring."""
    cdef int32_t* ring
    cdef int64_t i
    if c.waiting_places < c.waiting_cap:
        return True
    ring = <int32_t*>malloc(2 * c.waiting_cap * sizeof(int32_t))
    if ring == NULL:
        c.error = ERR_MEMORY
        return False
    for i in range(c.waiting_places):
        ring[i] = c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]
    free(c.waiting)
    c.waiting = ring
    c.waiting_cap *= 2
    c.waiting_head = 0
    return True


cdef void core_enqueue(Core* c, int32_t slot, int64_t place) noexcept nogil:
    """Queue a new request at the back, or in the place kept for a dropped one (`place` as `core_drop` gave it)."""
    cdef int64_t i, at
    c.req[slot].status = ST_WAITING
    c.count += 1
    c.n_waiting += 1
    if place < NIL:
        for i in range(c.waiting_places):
            at = (c.waiting_head + i) & (c.waiting_cap - 1)
            if c.waiting[at] == <int32_t>place:
                c.waiting[at] = slot
                return
    if waiting_room(c):
        c.waiting[(c.waiting_head + c.waiting_places) & (c.waiting_cap - 1)] = slot
        c.waiting_places += 1


cdef inline void waiting_prepend(Core* c, int32_t slot) noexcept nogil:
    if waiting_room(c):
        c.waiting_head = (c.waiting_head - 1) & (c.waiting_cap - 1)
        c.waiting[c.waiting_head] = slot
        c.waiting_places += 1
        c.n_waiting += 1


cdef inline int32_t waiting_first(Core* c) noexcept nogil:
    """First waiting request; places kept for dropped ones are given up when they come to the front."""
    while c.waiting_places > 0 and c.waiting[c.waiting_head] < 0:
        c.waiting_head = (c.waiting_head + 1) & (c.waiting_cap - 1)
        c.waiting_places -= 1
    return c.waiting[c.waiting_head] if c.waiting_places > 0 else NIL


cdef inline void waiting_pop(Core* c) noexcept nogil:
    c.waiting_head = (c.waiting_head + 1) & (c.waiting_cap - 1)
    c.waiting_places -= 1
    c.n_waiting -= 1


cdef void running_compact(Core* c) noexcept nogil:
    cdef int64_t i, n = 0
    for i in range(c.n_running):
        if c.req[c.running[i]].status == ST_RUNNING:
            c.running[n] = c.running[i]
            n += 1
    c.n_running = n


# ---- endings ----------------------------------------------------------------------------------------------------

cdef void signal(Core* c, bint late, int64_t id, int64_t token, int terminal, double handoff_ms) noexcept nogil:
    """Note a token or an ending for the caller; late ones follow the tokens of the pass."""
    cdef Signal* s
    cdef void* moved
    if not c.record:
        return
    if late:
        moved = grown(c.late, &c.late_cap, c.late_used + 1, sizeof(Signal))
        if moved != NULL:
            c.late = <Signal*>moved
            s = &c.late[c.late_used]
            c.late_used += 1
    else:
        moved = grown(c.signals, &c.signals_cap, c.signals_used + 1, sizeof(Signal))
        if moved != NULL:
            c.signals = <Signal*>moved
            s = &c.signals[c.signals_used]
            c.signals_used += 1
    if moved == NULL:
        c.error = ERR_MEMORY
        return
    s.id, s.token, s.handoff_ms = id, token, handoff_ms
    s.terminal = <unsigned char>terminal
    s.completed = terminal != END_NONE
    s.rejected = terminal == END_REJECTED or terminal == END_OVER_BUDGET


cdef void blocks_release(Core* c, Request* r, int64_t tokens) noexcept nogil:
    """Drop the blocks that `tokens` tokens of the request take, last to first."""
    cdef int64_t blocks = (tokens + c.mask) >> c.shift
    if blocks > r.full:
        pool_release(&c.pool, &r.path, r.full, r.partial)
    else:
        pool_release(&c.pool, &r.path, <int32_t>blocks, 0)


cdef void request_end(Core* c, int32_t slot, int terminal) noexcept nogil:
    """Forget a request that holds no blocks any more."""
    cdef Request* r = &c.req[slot]
    cdef void* moved = grown(c.ended, &c.ended_cap, c.ended_used + 1, sizeof(int64_t))
    if moved == NULL:
        c.error = ERR_MEMORY
        return
    c.ended = <int64_t*>moved
    c.ended[c.ended_used] = r.id
    c.ended_used += 1
    if c.rows != NULL:
        c.rows.terminal[r.id] = <signed char>terminal
        c.rows.tokens[r.id] = r.gen
        c.rows.last_token[r.id] = r.last_ms
    slot_free(c, slot)
    c.completed += 1


cdef int64_t core_drop(Core* c, int32_t slot) noexcept nogil:
    """Cancel a request. Returns the place to give to `core_enqueue` if the same id comes again, else NIL."""
    cdef Request* r = &c.req[slot]
    cdef int64_t i, at, place = NIL
    blocks_release(c, r, r.alloc)
    if r.status == ST_RUNNING:
        r.status = ST_FREE
        running_compact(c)
    else:
        for i in range(c.waiting_places):
            at = (c.waiting_head + i) & (c.waiting_cap - 1)
            if c.waiting[at] == slot:
                c.next_place -= 1
                place = c.next_place
                c.waiting[at] = c.next_place
                c.n_waiting -= 1
                break
    slot_free(c, slot)
    return place


# ---- preemption -------------------------------------------------------------------------------------------------

cdef int32_t preempt(Core* c) noexcept nogil:
    """Take the blocks of one running request and queue it first; NIL if the policy or the queue forbids it."""
    cdef int64_t i
    cdef int32_t slot
    cdef Request* r
    if c.policy == POLICY_TRTLLM:
        return NIL
    if c.fifo:
        i = 0
        while i < c.n_running and c.req[c.running[i]].status != ST_RUNNING:
            i += 1
    else:
        i = c.n_running - 1
        while i >= 0 and c.req[c.running[i]].status != ST_RUNNING:
            i -= 1
    if i < 0 or i >= c.n_running:
        return NIL
    slot = c.running[i]
    c.n_running -= 1
    memmove(c.running + i, c.running + i + 1, (c.n_running - i) * sizeof(int32_t))
    r = &c.req[slot]
    r.status = ST_PREEMPTED
    r.computed = 0
    r.preemptions += 1
    c.preemptions += 1
    blocks_release(c, r, r.alloc)
    r.alloc = 0
    waiting_prepend(c, slot)
    return slot


cdef bint outgrown(Core* c, int32_t slot, bint late) noexcept nogil:
    """End a request that was preempted for its own sake while nobody else holds a block: it can never fit.

    The reference admits and preempts it for ever. It keeps the tokens that it got.
    """
    if c.pool.active > 0:
        return False
    waiting_pop(c)
    signal(c, late, c.req[slot].id, NIL, END_CAPACITY, NAN)
    request_end(c, slot, END_CAPACITY)
    return True


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
    target = before + (rest if rest < c.budget else c.budget)
    if target > r.alloc:
        first = (r.alloc + c.mask) >> c.shift
        last = (target + c.mask) >> c.shift
        if last > r.full + r.partial:
            last = r.full + r.partial
        if last > first:
            partial = 1 if last > r.full else 0
            while not pool_use(&c.pool, &r.path, <int32_t>first, <int32_t>(last - partial), <int32_t>partial):
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
        waiting_pop(c)
        r.status = ST_RUNNING
        c.running[c.n_running] = slot
        c.n_running += 1
    c.budget -= r.used
    return SCHEDULED


cdef void schedule_running(Core* c) noexcept nogil:
    """Phase A: running requests in admission order, as far as the budget goes."""
    cdef int64_t i = 0
    cdef int32_t slot
    cdef Request* r
    cdef Outcome outcome
    while i < c.n_running and c.budget > 0:
        slot = c.running[i]
        r = &c.req[slot]
        if r.computed == r.len - 1 and r.gen > 0 and r.computed > 0 and (r.alloc >= r.len or r.alloc & c.mask):
            r.computed = r.len                 # one token of a block that it has: the usual decode step
            if r.alloc < r.len:
                r.alloc = r.len
            r.pass_no = -c.pass_no
            if c.metrics:
                r.used, r.used_prompt, r.used_prefix = 1, 0, r.prompt
                work_note(c, r)
            c.budget -= 1
            i += 1
            continue
        outcome = schedule(c, slot, -1, False)
        if outcome == BLOCKED:
            break
        if outcome == SCHEDULED:
            i += 1


cdef bint gate(Core* c, Request* r, int64_t* cached) noexcept nogil:
    """Whether the head of the queue may be admitted beside the running requests."""
    cdef int64_t active, need
    cached[0] = cached_tokens(c, r, &active)
    if c.policy == POLICY_TRTLLM:
        return trt_fits(c, r, active)
    need = ((r.len + c.mask) >> c.shift) - (active >> c.shift)
    return need <= c.pool.capacity - c.pool.active


cdef void admit_waiting(Core* c, double now) noexcept nogil:
    """Phase B: waiting requests strictly in order, as long as they fit and there is budget to start them."""
    cdef int32_t slot
    cdef int64_t cached
    cdef Request* r
    cdef Admission* a
    cdef void* moved
    cdef Outcome outcome
    c.reason = STOP_OTHER
    while not c.preempted:
        if c.n_running >= c.max_seqs:
            c.reason = STOP_SEQS
            return
        slot = waiting_first(c)
        if slot == NIL:
            c.reason = STOP_EMPTY
            return
        r = &c.req[slot]
        if r.prompt == 0:
            cached = 0                         # nothing to compute: admitted without asking for room
        else:
            if r.status == ST_WAITING:
                if (trt_blocks(c, r) if c.policy == POLICY_TRTLLM else (r.len + c.mask) >> c.shift) > c.pool.capacity:
                    waiting_pop(c)
                    signal(c, True, r.id, NIL, END_REJECTED, NAN)
                    request_end(c, slot, END_REJECTED)
                    continue
            if not gate(c, r, &cached):
                c.reason = STOP_WAIT
                return
        outcome = schedule(c, slot, cached, True)
        if outcome == BLOCKED:
            if not c.chunked and c.n_running == 0 and c.budget == c.max_tokens and r.prompt - cached > c.max_tokens:
                # It needs more than a whole pass and nothing runs that could change that: the reference waits for ever.
                waiting_pop(c)
                signal(c, True, r.id, NIL, END_OVER_BUDGET, NAN)
                request_end(c, slot, END_OVER_BUDGET)
                continue
            return
        if outcome != SCHEDULED:
            return
        r = &c.req[slot]
        c.admitted += 1
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


# ---- tokens -----------------------------------------------------------------------------------------------------

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


cdef inline double handoff_ms(Core* c, Request* r) noexcept nogil:
    """Time to transfer the prompt's KV when a prefill worker finishes it; NaN if not modelled."""
    if c.worker_type != WORKER_PREFILL or isnan(c.kv_bytes) or not (c.kv_bandwidth > 0.0):
        return NAN
    return <double>r.prompt * c.kv_bytes / (c.kv_bandwidth * 1e9) * 1000.0


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


cdef void finish(Core* c, int32_t slot, int terminal) noexcept nogil:
    """A running request has all its tokens: free its blocks at once, so that later ones of this pass can use them."""
    blocks_release(c, &c.req[slot], c.req[slot].len)
    request_end(c, slot, terminal)


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


cdef double emit(Core* c, int64_t n, int64_t total_length, double start) noexcept nogil:
    """One token for each of the `n` ready requests in order; returns the decode time, ms (0 if none was made)."""
    cdef int64_t i, token, together = 0, steps = 0
    cdef double decode = 0.0, at
    cdef int32_t slot, victim
    cdef Request* r
    cdef bint changed = False, made, done, plain = c.rows != NULL and not c.real_tokens and not c.record
    c.steady = n == c.n_running                # so far: whoever runs on will have made a token
    if c.worker_type != WORKER_PREFILL:
        decode = timing_decode_ms(&c.timing, n, c.pool.active, total_length // n)
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
            if r.partial:
                promote(c, r)
            if pool_reserve(&c.pool, 1):
                r.partial = 1
                if r.gen + 1 < r.limit:
                    r.alloc = r.len + 1
                made = True
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


cdef double emit_bursts(Core* c, int64_t n, int64_t total_length, double start) noexcept nogil:
    """Speculative decoding: blocks for the longest bursts first, then the sampled burst of each ready request."""
    cdef int64_t i, k, need, burst, token, spare, longest = 1 if c.worker_type == WORKER_PREFILL else c.nextn + 1
    cdef int64_t together = 0
    cdef int64_t* bursts
    cdef double decode = 0.0, at
    cdef int32_t slot, victim
    cdef Request* r
    cdef bint changed = False, done
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
        decode = timing_decode_ms(&c.timing, n, c.pool.active - need, total_length // n)
    at = start + decode
    bursts = <int64_t*>malloc(n * sizeof(int64_t))
    if bursts == NULL:
        c.error = ERR_MEMORY
        return 0.0
    for i in range(n):
        r = &c.req[c.ready[i]]
        burst = r.limit - r.gen
        if c.worker_type == WORKER_PREFILL:
            bursts[i] = 1
        else:
            bursts[i] = sample_output_tokens(&c.rng, c.rates, c.nextn, burst)
    spare = need
    for i in range(n):
        slot = c.ready[i]
        r = &c.req[slot]
        done = False
        for k in range(bursts[i]):
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
                    gaps_add(c.gaps, 0.0, 1)
                    if r.gen == 1:
                        c.rows.second_gap[r.id] = 0.0
            push(c, r, token)
            c.made += 1
            done = r.gen >= r.limit
            if not done:
                r.alloc = r.len
            if c.record:
                signal(c, False, r.id, token, END_COMPLETED if done else END_NONE, handoff_ms(c, r) if done else NAN)
        if done:
            finish(c, slot, END_COMPLETED)
            changed = True
        else:
            r.computed = r.len - 1
    free(bursts)
    c.pool.active -= spare
    c.made_by = n
    if changed:
        running_compact(c)
    if c.rows != NULL and together > 0:
        gaps_add(c.gaps, at - c.last_emit, together)
    c.last_emit = at
    return decode


# ---- the pass ---------------------------------------------------------------------------------------------------

cdef void core_pass(Core* c, double now) noexcept nogil:
    """One engine iteration that starts at `now`; its results are in the core until the next one."""
    cdef int64_t i, n, total
    cdef double start, decode
    cdef void* moved
    c.pass_no += 1
    c.passes += 1
    c.last_start = now
    c.completed = c.admitted = c.made = c.made_by = c.ended_used = 0
    c.admissions_used = c.signals_used = c.late_used = c.works_used = 0
    c.budget = c.max_tokens
    c.batch = c.batch_isl = c.batch_prefix = 0
    c.preempted = False
    c.steady = False
    schedule_running(c)
    admit_waiting(c, now)
    start = now
    if c.batch > 0 and c.worker_type != WORKER_DECODE:
        start = now + timing_prefill_ms(&c.timing, c.batch, c.batch_isl // c.batch, c.batch_prefix // c.batch)
    n = collect_ready(c, &total)
    decode = 0.0
    if n > 0:
        decode = emit_bursts(c, n, total, start) if c.nextn else emit(c, n, total, start)
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


cdef double core_forward(Core* c, double now, double until, double last_start) noexcept nogil:
    """Fast-forward: passes that only decode, starting before `until` and not after `last_start`; returns the new now.

    Allowed after a pass in which everybody running made a token and nothing else can happen: then the next pass
    differs only when a request needs a block or ends, when somebody new arrives, or when the head of the queue
    could be admitted after all. The clock's additions are the same and in the same order as pass by pass.
    """
    cdef int64_t i, k, m = 0, steps
    cdef Request* r
    cdef double step, next_now, first = now
    if not c.steady or c.nextn or c.real_tokens or c.n_running == 0 or c.n_running > c.max_tokens:
        return now
    if c.n_waiting > 0 and (c.preempted or not (c.reason == STOP_WAIT or c.reason == STOP_SEQS)):
        return now
    k = (<int64_t>1) << 62
    steps = 0
    for i in range(c.n_running):
        r = &c.req[c.running[i]]
        steps = (-r.len) & c.mask              # tokens before the one that needs a block
        if steps > r.limit - r.gen - 1:        # tokens before the last one
            steps = r.limit - r.gen - 1
        if steps < k:
            k = steps
            if k == 0:
                return now
    step = timing_decode_ms(&c.timing, c.n_running, c.pool.active, 0) if c.worker_type != WORKER_PREFILL else 0.0
    while m < k and now < until and now <= last_start:
        next_now = now + step
        if c.gaps != NULL:
            gaps_add(c.gaps, next_now - now, c.n_running)
        if m == 0:
            first = next_now - now
        c.last_start = now
        now = next_now
        m += 1
    if m == 0:
        return now
    for i in range(c.n_running):
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

cdef void spread_add(Spread* s, double* mean, int64_t value) noexcept nogil:
    cdef double delta
    s.count += 1
    s.total += value
    delta = <double>value - mean[0]
    mean[0] += delta / <double>s.count
    s.variance += delta * (<double>value - mean[0])


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
        if r.status == ST_WAITING:
            spread_add(&c.fpm[2], &mean[2], r.prompt)
        else:
            spread_add(&c.fpm[3], &mean[3], r.len)
    for i in range(4):
        if c.fpm[i].count > 0:
            c.fpm[i].variance /= <double>c.fpm[i].count
