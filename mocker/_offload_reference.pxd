# The order in which the reference starts what it copies down.
from mocker._common cimport int64_t
from mocker._offload cimport Lane


cdef bint lane_reorder(Lane* lane, int64_t before) noexcept nogil
