# State of the tiers below the GPU to bytes and back; see _carry.pxd.
from mocker._carry cimport Carrier
from mocker._offload cimport World
from mocker._router cimport Lower


cdef void lower_carry(Carrier* io, Lower* b) noexcept nogil
cdef void world_carry(Carrier* io, World* w) noexcept nogil
