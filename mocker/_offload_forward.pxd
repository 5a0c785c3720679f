# Fast-forward of a worker with tiers.
from mocker._core cimport Core


cdef double tiers_forward(Core* c, double now, double until, double last_start) noexcept nogil
