# Owners of the tiers' memory: one world for all workers of a simulation, one set of tiers a worker.
from mocker._common cimport int64_t
from mocker._engine cimport EngineCore
from mocker._offload cimport Offload, World
from mocker._offload_tiers cimport Future


cdef class OffloadTiers


cdef class OffloadWorld:
    cdef World w
    cdef readonly list attached
    cdef readonly object parked_ms       # float64[rows], see `collect`; None
    cdef readonly object blocks          # int64[rows, 3]

    cdef readonly bint apart             # nothing in the tiers of one worker concerns another
    cdef bint hushed                     # nobody asks what comes to the hosts and goes

    cdef object recorder

    cdef double deadline(self) noexcept nogil
    cdef int seat(self, OffloadTiers tiers, EngineCore engine, bint through) except -1
    cdef OffloadWorld empty(self, list seats, int64_t rows)
    cdef note(self, OffloadTiers tiers)


cdef class OffloadTiers:
    cdef Offload o
    cdef OffloadWorld world
    cdef readonly EngineCore engine
    cdef Future future
    cdef tuple arrays                    # behind it
