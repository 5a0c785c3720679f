# What each worker is busy with, the requests' tickets, and the router's memory; structures in _router.pxd.
# The count of active prefill tokens is inline, since it is taken once a worker that is compared.
from libc.math cimport ceil

from mocker._common cimport NIL, int32_t, int64_t
from mocker._router cimport Load, Router, Ticket

cdef enum:
    NANOS = 1000000000


cdef inline double seconds_of(int64_t nanos) noexcept nogil:
    return <double>(nanos // NANOS) + <double>(nanos % NANOS) / 1e9


cdef inline int64_t prefill_tokens(Router* r, Load* load, int64_t now) noexcept nogil:
    """Prompt tokens that a worker still has to compute; with an estimator they melt.

    Rule: `PrefillLoadSnapshot::active_tokens_at`. The time since the oldest prefill became the oldest is taken from
    the sum of all; if any has no estimate, only from the oldest itself.
    """
    cdef Ticket* t
    cdef int64_t elapsed, rounds, gone
    cdef double left
    if r.estimate == NULL or load.first == NIL:
        return load.prefill
    t = &r.tickets[load.first]
    elapsed = now - load.anchor if now > load.anchor else 0
    if load.unmodeled > 0:
        if t.duration == NIL:
            return load.prefill
        if t.duration == 0:
            return load.prefill - t.prefill
        left = 1.0 - seconds_of(elapsed) / seconds_of(t.duration)
        left = 0.0 if left < 0.0 else left
        return load.prefill - t.prefill + <int64_t>ceil(<double>t.prefill * left)
    if t.duration == 0:
        gone = t.prefill
    else:
        rounds = elapsed // t.duration
        if rounds > load.prefill:                      # each is a token at least
            return 0
        gone = t.prefill * rounds + t.prefill * (elapsed % t.duration) // t.duration
    return load.prefill - gone if gone < load.prefill else 0


cdef int64_t nanos_of(double ms) noexcept nogil
cdef void prefill_add(Router* r, int32_t ticket, int64_t fresh, int64_t cached, int64_t now) noexcept nogil
cdef void prefill_remove(Router* r, int32_t ticket, int64_t now) noexcept nogil
cdef int32_t ticket_new(Router* r, int64_t row, int64_t isl, int32_t n) noexcept nogil
cdef void ticket_drop(Router* r, int32_t ticket) noexcept nogil
cdef bint router_init(Router* r) noexcept nogil
cdef void router_free(Router* r) noexcept nogil
