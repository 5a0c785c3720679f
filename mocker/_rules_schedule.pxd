# The scheduling phases of a pass under the scheduler with switches.
from mocker._rules cimport VllmRulesCore


cdef void schedule_running(VllmRulesCore* x) noexcept nogil
cdef void admit_waiting(VllmRulesCore* x, double now) noexcept nogil
