# Data dictionary of passes that are known before they happen.
from mocker._common cimport int64_t
from mocker._heap cimport Heap
from mocker._lanes cimport Lanes


cdef class Foresight(Lanes):
    cdef Heap events                     # what ends or starts when
    cdef bint foresees                   # passes are foreseen up to the next that is not plain

    cdef void foresee(self, int64_t worker) noexcept nogil
    cdef void fulfil(self, int64_t worker) noexcept nogil
    cdef void cut(self, int64_t worker, int64_t m) noexcept nogil
    cdef void meet(self, int64_t worker, double at, bint begun) noexcept nogil
