# cython: language_level=3
"""The router's queues: which request waits, which is refused, which goes next.

Answers to `scheduling/{policy_queue,policy_config}.rs` of dynamo-kv-router 1.3.0: a heap a class, deficit round robin
between classes, a limit and a busy rule each.

Costs: in and out O(log queued + classes), the busy rule O(workers) at most. Memory: requests queued with their paths.
"""
from libc.stdlib cimport malloc

from mocker._common cimport NIL, grown, int32_t, int64_t, uint32_t, uint64_t
from mocker._kv cimport Path
from mocker._router cimport (
    QUEUE_FCFS, QUEUE_LCFS, ROUTED_ERROR, ROUTED_LATER, ROUTED_NEVER, ROUTER_MEMORY, QueueClass, Router, Ticket)
from mocker._router_loads cimport prefill_tokens, ticket_new
from mocker._router_tiers cimport lower_keep


# ---- heaps ------------------------------------------------------------------------------------------------------

cdef inline bint ahead(Router* r, int32_t a, int32_t b) noexcept nogil:
    cdef Ticket* x = &r.tickets[a]
    cdef Ticket* y = &r.tickets[b]
    if x.strict != y.strict:
        return x.strict > y.strict
    if x.score != y.score:
        return x.score > y.score
    return x.sequence < y.sequence


cdef void sift(Router* r, QueueClass* q, int64_t i) noexcept nogil:
    """Move the ticket at place i of a heap to where it belongs."""
    cdef int32_t ticket = q.heap[i]
    cdef int64_t other
    while i > 0:
        other = (i - 1) >> 1
        if not ahead(r, ticket, q.heap[other]):
            break
        q.heap[i] = q.heap[other]
        i = other
    while True:
        other = 2 * i + 1
        if other >= q.used:
            break
        if other + 1 < q.used and ahead(r, q.heap[other + 1], q.heap[other]):
            other += 1
        if not ahead(r, q.heap[other], ticket):
            break
        q.heap[i] = q.heap[other]
        i = other
    q.heap[i] = ticket


cdef int32_t heap_take(Router* r, QueueClass* q, int64_t i) noexcept nogil:
    """Take the ticket at place i out of its queue and its sums."""
    cdef int32_t ticket = q.heap[i]
    cdef Ticket* t = &r.tickets[ticket]
    q.used -= 1
    r.queued -= 1
    q.isl -= t.isl
    q.cached -= t.cached
    if i < q.used:
        q.heap[i] = q.heap[q.used]
        sift(r, q, i)
    return ticket


# ---- limits -----------------------------------------------------------------------------------------------------

cdef bint all_busy(Router* r, QueueClass* q, int64_t now) noexcept nogil:
    """Whether every eligible worker is busy by the rule of a class; so it is without workers."""
    cdef int32_t i
    cdef int64_t tokens
    for i in range(r.n_eligible):
        tokens = prefill_tokens(r, &r.loads[r.eligible[i]], now)
        if q.busy_tokens != NIL and tokens > q.busy_tokens:
            continue
        if <double>tokens > q.busy_fraction * <double>r.budget:        # False if there is no such threshold
            continue
        return False
    return True


cdef int64_t limit_of(int64_t per_worker, int64_t workers) noexcept nogil:
    if per_worker != 0 and workers > <int64_t>0x7FFFFFFFFFFFFFFF // per_worker:
        return 0x7FFFFFFFFFFFFFFF
    return per_worker * workers


cdef bint refused(Router* r, int32_t c) noexcept nogil:
    """Whether a class is full; what it holds counts, not what comes."""
    cdef QueueClass* q = &r.classes[c]
    cdef int kind
    cdef int64_t[3] current = [q.used, q.isl, q.cached]
    cdef int64_t[3] most = [q.max_requests, q.max_isl, q.max_cached]
    for kind in range(3):
        if most[kind] != NIL and current[kind] >= limit_of(most[kind], r.n_eligible):
            r.full_class, r.full_kind, r.full_current = c, kind, current[kind]
            r.full_limit = limit_of(most[kind], r.n_eligible)
            return True
    return False


# ---- in and out -------------------------------------------------------------------------------------------------

cdef int32_t enqueue(Router* r, int64_t row, Path* path, int32_t n, int64_t isl, int64_t cached, int64_t priority,
                     uint32_t strict, int32_t c, double now) noexcept nogil:
    cdef QueueClass* q = &r.classes[c]
    cdef int32_t ticket, i, w
    cdef Ticket* t
    cdef void* moved
    cdef double bump = <double>(priority if priority > 0 else 0), at = (now if now > 0.0 else 0.0) / 1000.0
    if refused(r, c):
        return ROUTED_NEVER
    ticket = ticket_new(r, row, isl, n)
    moved = grown(q.heap, &q.cap, q.used + 1, sizeof(int32_t))
    if ticket == NIL or moved == NULL:
        r.error = ROUTER_MEMORY
        return ROUTED_ERROR
    q.heap = <int32_t*>moved
    t = &r.tickets[ticket]
    t.overlaps_used = 0
    t.overlaps = <int32_t*>malloc((2 * <int64_t>r.n_warm + 1) * sizeof(int32_t))
    t.keys = <uint64_t*>malloc((<int64_t>n + 1) * sizeof(uint64_t))
    if t.overlaps == NULL or t.keys == NULL or (r.lower != NULL and not lower_keep(r, t)):
        r.error = ROUTER_MEMORY
        return ROUTED_ERROR
    for i in range(r.n_warm):
        w = r.warm[i]
        if r.overlap[w] > 0:
            t.overlaps[2 * t.overlaps_used], t.overlaps[2 * t.overlaps_used + 1] = w, r.overlap[w]
            t.overlaps_used += 1
    for i in range(n):
        t.keys[i], t.depths[i] = path.keys[i], path.ends[i]
    t.n = n
    t.cached = cached
    t.cost = isl - cached if isl > cached else 1
    t.queue, t.strict, t.sequence = c, strict, r.next_sequence
    r.next_sequence += 1
    if q.policy == QUEUE_FCFS:
        t.score = bump - at
    elif q.policy == QUEUE_LCFS:
        t.score = bump + at
    else:
        t.score = (1.0 + bump) / <double>t.cost
    q.heap[q.used] = ticket
    q.used += 1
    q.isl += isl
    q.cached += cached
    r.queued += 1
    sift(r, q, q.used - 1)
    return ROUTED_LATER


cdef int32_t class_take(Router* r, int32_t c) noexcept nogil:
    cdef QueueClass* q = &r.classes[c]
    cdef int32_t ticket = heap_take(r, q, 0)
    q.credit -= r.tickets[ticket].cost
    if q.credit < 0:
        q.credit = 0
    if q.used == 0:
        q.credit = 0
    r.next_class = c
    if q.used == 0 or r.tickets[q.heap[0]].cost > q.credit:
        r.next_class = (c + 1) % r.n_classes
    return ticket


cdef int32_t next_ticket(Router* r, int64_t now) noexcept nogil:
    """The ticket to dispatch next, taken out of its queue; NIL if none may go.

    Rule: `PolicyQueue::pop_next`, deficit round robin: a class earns its quantum a round while its head may go, pays
    for what it sends, and rounds in which nobody can pay are skipped at once.
    """
    cdef int32_t i, c
    cdef int64_t rounds = -1, need
    cdef QueueClass* q
    for i in range(r.n_classes):
        c = (r.next_class + i) % r.n_classes
        q = &r.classes[c]
        q.ready = False
    for i in range(r.n_classes):
        c = (r.next_class + i) % r.n_classes
        q = &r.classes[c]
        if q.used == 0:
            q.credit = 0
            continue
        if all_busy(r, q, now):
            continue
        q.ready = True
        need = r.tickets[q.heap[0]].cost
        if need <= q.credit:
            return class_take(r, c)
        q.credit += q.quantum
        if need <= q.credit:
            return class_take(r, c)
    for c in range(r.n_classes):
        q = &r.classes[c]
        if q.ready:
            need = (r.tickets[q.heap[0]].cost - q.credit + q.quantum - 1) // q.quantum
            if rounds < 0 or need < rounds:
                rounds = need
    if rounds < 0:
        return NIL
    for c in range(r.n_classes):
        if r.classes[c].ready:
            r.classes[c].credit += r.classes[c].quantum * rounds
    for i in range(r.n_classes):
        c = (r.next_class + i) % r.n_classes
        q = &r.classes[c]
        if q.ready and r.tickets[q.heap[0]].cost <= q.credit:
            return class_take(r, c)
    return NIL
