# cython: language_level=3
"""Scores from the user's own functions: who gets a request, who is admitted, preempted or evicted.

A function of five or nine integers that returns a double; the lowest score is taken. Engines and routers hold a `Hook`,
fill an array of facts for each candidate and ask. Compiled functions are called by address without the GIL.
O(candidates) calls a decision.
"""
from libc.math cimport isnan
from libc.stdint cimport uintptr_t

from mocker._common cimport grown, int32_t, int64_t


cdef class ScoreHook:
    """A score function.

    Parameters
    ----------
    address : int
        Of a ``double f(int64_t, ...)`` that needs no GIL; 0: call `function`.
    function : callable or None
        The Python function, or what keeps the compiled one alive.
    numbers : int
        How many integers it takes: 5 or 9.
    timed, looks : bool
        Of those who wait: it depends on how long, and on what is cached.
    """

    def __cinit__(self, uintptr_t address, function, int numbers, bint timed=True, bint looks=True):
        if numbers != FIVE and numbers != NINE:
            raise ValueError(f"a score function takes 5 or 9 integers, got {numbers}")
        self.compiled, self.numbers, self.timed, self.looks = <void*>address, numbers, timed, looks
        self.function, self.keep = (None, function) if address else (function, None)

    cdef double call(self, const int64_t* facts) noexcept with gil:
        cdef int i
        self.failure = None
        try:
            return float(self.function(*[facts[i] for i in range(self.numbers)]))
        except BaseException as error:
            self.failure = error
            return float("nan")

    cdef void complain(self) noexcept with gil:
        """A score was not a number."""
        if self.failure is None or self.compiled != NULL:
            self.failure = ValueError("a score function returned NaN; it must return a number")

    cdef int raise_failure(self) except -1:
        """Raise what was wrong with the newest score that failed; again each time, since its engine cannot go on."""
        if self.failure is not None:
            raise self.failure
        return 0


cdef double ask(void* context, const int64_t* x) noexcept nogil:
    cdef void* compiled = (<ScoreHook>context).compiled
    cdef double score
    if compiled == NULL:
        score = (<ScoreHook>context).call(x)
    elif (<ScoreHook>context).numbers == FIVE:
        score = (<ScoreFive>compiled)(x[0], x[1], x[2], x[3], x[4])
    else:
        score = (<ScoreNine>compiled)(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8])
    if isnan(score):
        (<ScoreHook>context).complain()
    return score


cdef Hook hook_of(ScoreHook hook) noexcept:
    """What engines ask; valid as long as `hook` is. None: there is no score."""
    cdef Hook made
    made.ask = NULL
    if hook is not None:
        made.ask = ask
    made.context = <void*>hook
    return made


cdef void admission_use(AdmissionHook* h, ScoreHook hook) noexcept:
    """Let a score, or none, say who is admitted."""
    h.score = hook_of(hook)
    if hook is not None:
        h.timed, h.looks = hook.timed, hook.looks


cdef bint wish_note(AdmissionHook* h, int32_t slot, double arrived, int64_t priority) noexcept nogil:
    """Keep when a request arrived, and its priority; false if memory is short."""
    cdef void* moved = grown(h.wishes, &h.cap, slot + 1, sizeof(Wish))
    if moved == NULL:
        return False
    h.wishes = <Wish*>moved
    h.wishes[slot].arrived, h.wishes[slot].priority = arrived, priority
    return True


cdef void ring_to_front(int32_t* ring, int64_t head, int64_t cap, int64_t place) noexcept nogil:
    """Bring the request `place` places behind the head of a queue to its front; `cap` is a power of two."""
    cdef int64_t m = cap - 1
    cdef int32_t slot = ring[(head + place) & m]
    while place > 0:
        ring[(head + place) & m] = ring[(head + place - 1) & m]
        place -= 1
    ring[head & m] = slot
