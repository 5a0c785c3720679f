# State of SGLang cores to bytes and back; see _carry.pxd.
from mocker._carry cimport Carrier
from mocker._sglang cimport SglangCore


cdef void sgl_carry(Carrier* io, SglangCore* c) noexcept nogil
