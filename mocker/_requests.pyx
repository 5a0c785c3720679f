# cython: language_level=3
"""The requests of one engine core: slots, the waiting and running queues, endings, preemption.

Answers to the state half of `scheduler/vllm/core.rs` (`SchedulerState`, `policy_preempt`, `drop_request`). Slots are
reused with their buffers. Costs: queue operations O(1), preemption and compaction O(running requests), endings
O(runs of blocks freed).
"""
from libc.math cimport NAN
from libc.stdlib cimport free, malloc
from libc.string cimport memmove, memset

from mocker._calendar cimport calendar_free, calendar_settle
from mocker._common cimport (
    END_CAPACITY, END_NONE, END_OVER_BUDGET, END_REJECTED, ERR_MEMORY, ERR_OK, NIL, POLICY_TRTLLM, ST_FREE, ST_HELD,
    ST_PARKED, ST_PREEMPTED, ST_RUNNING, ST_WAITING, grown, int32_t, int64_t, uint64_t)
from mocker._core cimport Core, Request, Signal
from mocker._kv cimport path_free, pool_free, pool_release
from mocker._offload cimport forget_wait, must_wait
from mocker._offload_pass cimport tiers_cancel
from mocker._scored cimport lowest_score, lowest_waiting
from mocker._timing cimport timing_free
from mocker._trtllm cimport trt_limit


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
        if c.req[i].path.keys != NULL:         # of thousands of slots, most of which have nothing else
            path_free(&c.req[i].path)
        if c.req[i].tail != NULL:
            free(c.req[i].tail)
        if c.req[i].plan != NULL:
            free(c.req[i].plan)
    free(c.req)
    free(c.running)
    free(c.waiting)
    free(c.ready)
    free(c.works)
    free(c.ended)
    free(c.gone_late)
    free(c.pending)
    free(c.held)
    free(c.admissions)
    free(c.signals)
    free(c.late)
    free(c.admission.wishes)
    calendar_free(c)
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
    r.source = r.destination = 0
    r.pinned = 0
    r.attempt = NIL
    return slot


cdef void slot_free(Core* c, int32_t slot) noexcept nogil:
    """Give back a slot whose request no queue knows any more."""
    if c.tiers != NULL:
        forget_wait(c, slot)
    c.req[slot].status = ST_FREE
    c.req[slot].next_free = c.free_slot
    c.free_slot = slot


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


cdef void waiting_prepend(Core* c, int32_t slot) noexcept nogil:
    if waiting_room(c):
        c.waiting_head = (c.waiting_head - 1) & (c.waiting_cap - 1)
        c.waiting[c.waiting_head] = slot
        c.waiting_places += 1
        c.n_waiting += 1


cdef int32_t waiting_first(Core* c) noexcept nogil:
    """First waiting request; places kept for dropped ones are given up when they come to the front."""
    while c.waiting_places > 0 and c.waiting[c.waiting_head] < 0:
        c.waiting_head = (c.waiting_head + 1) & (c.waiting_cap - 1)
        c.waiting_places -= 1
    return c.waiting[c.waiting_head] if c.waiting_places > 0 else NIL


cdef int32_t waiting_next(Core* c) noexcept nogil:
    """The waiting request that is to be admitted next, which comes to the front; NIL: none, or none now."""
    cdef int32_t slot = waiting_first(c)
    if slot != NIL and c.admission.score.ask != NULL and c.n_pending == 0:
        return lowest_waiting(c)
    return slot


cdef void waiting_pop(Core* c) noexcept nogil:
    c.waiting_head = (c.waiting_head + 1) & (c.waiting_cap - 1)
    c.waiting_places -= 1
    c.n_waiting -= 1


cdef void waiting_remove(Core* c, int32_t slot) noexcept nogil:
    """Take a request out of the queue, wherever it is."""
    cdef int64_t i, n = 0
    cdef int32_t other
    for i in range(c.waiting_places):
        other = c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]
        if other != slot:
            c.waiting[(c.waiting_head + n) & (c.waiting_cap - 1)] = other
            n += 1
    c.waiting_places = n
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


cdef void note(Core* c, int64_t what) noexcept nogil:
    """Append to `ended`: the id of a request gone, or ~id of one that made its first token."""
    cdef void* moved = grown(c.ended, &c.ended_cap, c.ended_used + 1, sizeof(int64_t))
    if moved == NULL:
        c.error = ERR_MEMORY
        return
    c.ended = <int64_t*>moved
    c.ended[c.ended_used] = what
    c.ended_used += 1


cdef void note_late(Core* c, int64_t id) noexcept nogil:
    cdef void* moved = grown(c.gone_late, &c.gone_late_cap, c.gone_late_used + 1, sizeof(int64_t))
    if moved == NULL:
        c.error = ERR_MEMORY
        return
    c.gone_late = <int64_t*>moved
    c.gone_late[c.gone_late_used] = id
    c.gone_late_used += 1


cdef void request_end(Core* c, int32_t slot, int terminal, bint late) noexcept nogil:
    """Forget a request that holds no blocks any more; `late` if its signal follows the tokens of the pass."""
    request_ended(c, slot, terminal, late)
    slot_free(c, slot)


cdef void request_ended(Core* c, int32_t slot, int terminal, bint late) noexcept nogil:
    """Tell the collector and the caller that a request is done."""
    cdef Request* r = &c.req[slot]
    c.count -= 1
    if late:
        note_late(c, r.id)
    else:
        note(c, r.id)
    if c.rows != NULL:
        c.rows.terminal[r.id] = <signed char>terminal
        c.rows.tokens[r.id] = r.gen
        c.rows.last_token[r.id] = r.last_ms
    c.completed += 1


cdef void finish(Core* c, int32_t slot, int terminal) noexcept nogil:
    """A running request has all its tokens: free its blocks at once, so that later ones of this pass can use them."""
    cdef void* moved
    c.generation += 1
    if c.req[slot].source:
        request_ended(c, slot, terminal, False)
        c.req[slot].status = ST_HELD
        c.n_held += 1
        moved = grown(c.held, &c.held_cap, c.held_used + 1, sizeof(int64_t))
        if moved == NULL:
            c.error = ERR_MEMORY
            return
        c.held = <int64_t*>moved
        c.held[c.held_used] = c.req[slot].id
        c.held_used += 1
        return
    blocks_release(c, &c.req[slot], c.req[slot].len)
    request_end(c, slot, terminal, False)


cdef int64_t core_drop(Core* c, int32_t slot) noexcept nogil:
    """Cancel a request. Returns the place to give to `core_enqueue` if the same id comes again, else NIL."""
    cdef Request* r = &c.req[slot]
    cdef int64_t i, at, place = NIL
    calendar_settle(c, False, NIL)
    if r.alloc > 0 or r.status == ST_RUNNING:
        c.generation += 1
    if r.status == ST_PARKED:
        tiers_cancel(c, slot)
    else:
        blocks_release(c, r, r.alloc)
    c.count -= 1
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

cdef inline bint may_preempt(Core* c, int32_t slot) noexcept nogil:
    return c.req[slot].status == ST_RUNNING and (c.tiers == NULL or not must_wait(c, slot))


cdef int32_t preempt(Core* c) noexcept nogil:
    """Take the blocks of one running request and queue it first; NIL if the policy or the queue forbids it."""
    cdef int64_t i
    cdef int32_t slot
    cdef Request* r
    if c.policy == POLICY_TRTLLM:
        return NIL
    if c.victim.ask != NULL:
        i = lowest_score(c)
    elif c.fifo:
        i = 0
        while i < c.n_running and not may_preempt(c, c.running[i]):
            i += 1
    else:
        i = c.n_running - 1
        while i >= 0 and not may_preempt(c, c.running[i]):
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
    c.generation += 1
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
    request_end(c, slot, END_CAPACITY, late)
    return True
