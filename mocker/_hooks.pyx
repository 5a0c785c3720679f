# cython: language_level=3
"""Scores from the user's own functions: which worker gets a request, which request is preempted.

A function of five integers that returns a double; the lowest score is taken. Compiled ones are called by address
without the GIL. O(candidates) calls a decision.
"""
from libc.math cimport isnan
from libc.stdint cimport uintptr_t

from mocker._common cimport ERR_HOOK, NIL, ST_RUNNING, int32_t, int64_t
from mocker._core cimport Core, Request
from mocker._router cimport Ask, Load


cdef class ScoreHook:
    """A score function.

    Parameters
    ----------
    address : int
        Of a ``double f(int64_t, int64_t, int64_t, int64_t, int64_t)`` that needs no GIL; 0: call `function`.
    function : callable or None
        The Python function, or what keeps the compiled one alive.
    """

    def __cinit__(self, uintptr_t address, function):
        self.compiled = <ScoreFn>address
        self.function, self.keep = (None, function) if address else (function, None)

    cdef double ask(self, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e) noexcept nogil:
        """The score; not a number if there is none."""
        if self.compiled != NULL:
            return self.compiled(a, b, c, d, e)
        return self.call(a, b, c, d, e)

    cdef double call(self, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e) noexcept with gil:
        try:
            return float(self.function(a, b, c, d, e))
        except BaseException as error:
            self.failure = error
            return float("nan")

    cdef void complain(self) noexcept with gil:
        """A score was not a number."""
        if self.failure is None:
            self.failure = ValueError("a score function returned NaN; it must return a number")

    cdef int raise_failure(self) except -1:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return 0


cdef int32_t hook_choose(void* hook, const Ask* ask) noexcept nogil:
    """The eligible worker with the lowest score, of equal ones the first; NIL if a score is not a number."""
    cdef int32_t i, worker, best = NIL
    cdef double score, least = 0.0
    cdef const Load* load
    for i in range(ask.n):
        worker = ask.workers[i]
        load = &ask.loads[worker]
        score = (<ScoreHook>hook).ask(worker, ask.isl, ask.overlap[worker], load.requests, load.tokens)
        if isnan(score):
            (<ScoreHook>hook).complain()
            return NIL
        if best == NIL or score < least:
            best, least = worker, score
    return best


cdef int64_t hook_victim(void* hook, Core* c) noexcept nogil:
    """Place among the running of the request with the lowest score, of equal ones the newest; NIL: none, or failed."""
    cdef int64_t i, best = NIL
    cdef double score, least = 0.0
    cdef Request* r
    for i in range(c.n_running - 1, -1, -1):
        r = &c.req[c.running[i]]
        if r.status != ST_RUNNING:
            continue
        score = (<ScoreHook>hook).ask(r.prompt, r.gen, r.limit, r.preemptions, (r.alloc + c.mask) >> c.shift)
        if isnan(score):
            (<ScoreHook>hook).complain()
            c.error = ERR_HOOK
            return NIL
        if best == NIL or score < least:
            best, least = i, score
    return best
