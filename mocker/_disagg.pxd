# Data dictionary of disaggregated replays: what their clock does.
from mocker._common cimport int64_t
from mocker._handoff_steps cimport Handoffs


cdef class DisaggCluster(Handoffs):
    cdef bint pass_ended(self, int64_t worker) noexcept nogil
    cdef bint wake(self, int64_t worker) noexcept nogil
    cdef bint go_on(self, int64_t* done) noexcept nogil
    cdef bint plan(self) noexcept nogil
    cdef void coincide(self) noexcept nogil
    cdef bint awaited(self, int64_t worker) noexcept nogil
    cdef bint ahead_until(self, int64_t worker, double until, int64_t* done) noexcept nogil
    cdef bint passes(self, int role, int64_t* done, bint* changed) noexcept nogil
    cdef bint helped(self, int64_t worker) noexcept nogil
