# Owners of the tiers' memory: one world for all workers of a simulation, one set of tiers a worker.
from mocker._engine cimport EngineCore
from mocker._offload cimport Offload, World


cdef class OffloadTiers


cdef class OffloadWorld:
    cdef World w
    cdef readonly list attached
    cdef readonly object parked_ms       # float64[rows], see `collect`; None
    cdef readonly object blocks          # int64[rows, 3]

    cdef double deadline(self) noexcept nogil
    cdef note(self, OffloadTiers tiers)


cdef class OffloadTiers:
    cdef Offload o
    cdef OffloadWorld world
    cdef readonly EngineCore engine
