# State of routers to bytes and back; see _carry.pxd.
from mocker._carry cimport Carrier
from mocker._common cimport int64_t
from mocker._router cimport Router


cdef void router_carry(Carrier* io, Router* r, int64_t bucket_places) noexcept nogil
