# cython: language_level=3
"""What the user's scores choose in vLLM-like cores: who is preempted, who is admitted next.

In a module of its own, so that the engines' loops do not carry it along. O(requests that run, or that wait).
"""
from libc.math cimport INFINITY, isnan

from mocker._common cimport ERR_HOOK, NIL, ST_RUNNING, int32_t, int64_t
from mocker._core cimport Core, Request
from mocker._hooks cimport ring_to_front
from mocker._offload cimport must_wait


cdef int64_t lowest_score(Core* c) noexcept nogil:
    """Place of the running request that the user's score preempts; NIL: nobody, or the score failed."""
    cdef int64_t i, k, best = NIL
    cdef int64_t[5] facts
    cdef double score, least = 0.0
    cdef Request* r
    for k in range(c.n_running):
        i = k if c.fifo else c.n_running - 1 - k
        r = &c.req[c.running[i]]
        if r.status != ST_RUNNING or (c.tiers != NULL and must_wait(c, c.running[i])):
            continue
        facts[0], facts[1], facts[2], facts[3] = r.prompt, r.gen, r.limit, r.preemptions
        facts[4] = (r.alloc + c.mask) >> c.shift
        score = c.victim.ask(c.victim.context, facts)
        if isnan(score):
            c.error = ERR_HOOK
            return NIL
        if best == NIL or score < least:
            best, least = i, score
    return best


cdef int32_t lowest_waiting(Core* c) noexcept nogil:
    """Bring the waiting request with the lowest score to the front; NIL: none may go now, or the score failed."""
    cdef int64_t i, best = NIL
    cdef int64_t[9] facts
    cdef double score, least = INFINITY
    cdef int32_t slot
    cdef Request* r
    facts[7], facts[8] = c.n_running, c.pool.capacity - c.pool.active
    for i in range(c.waiting_places):
        slot = c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]
        if slot < 0:
            continue
        r = &c.req[slot]
        facts[0], facts[1], facts[2], facts[3] = r.id, 0, r.prompt, 0
        if c.admission.timed:
            facts[1] = <int64_t>((c.last_start - c.admission.wishes[slot].arrived) * 1000.0)
        if c.admission.looks:
            facts[3] = c.admission.cached(c.admission.engine, r)
        facts[4], facts[5], facts[6] = r.gen, r.limit, c.admission.wishes[slot].priority
        score = c.admission.score.ask(c.admission.score.context, facts)
        if isnan(score):
            c.error = ERR_HOOK
            return NIL
        if score < least:
            best, least = i, score
    if best > 0:
        ring_to_front(c.waiting, c.waiting_head, c.waiting_cap, best)
    return c.waiting[c.waiting_head] if best != NIL else NIL
