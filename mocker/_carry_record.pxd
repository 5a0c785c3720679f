# State of a recording to bytes and back; see _carry.pxd.
from mocker._carry cimport Carrier
from mocker._record cimport Timeline


cdef void timeline_carry(Carrier* io, Timeline* t) noexcept nogil
cdef void timeline_free(Timeline* t) noexcept nogil
