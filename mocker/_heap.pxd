# Data dictionary of the time heap.
from mocker._common cimport int64_t


cdef struct Pending:               # an entry of a time heap
    double at                      # ms
    int64_t first                  # ties: event sequence number, or rank
    int64_t second                 # what: worker, or row


cdef struct Heap:
    Pending* items
    int64_t used
    int64_t cap


cdef inline int64_t order_of(double at) noexcept nogil:
    """A number that orders as the time does (which is not negative)."""
    return (<int64_t*>&at)[0]


cdef bint heap_push(Heap* h, double at, int64_t first, int64_t second) noexcept nogil
cdef Pending heap_pop(Heap* h) noexcept nogil
cdef void heap_earlier(Heap* h, int64_t i, double at, int64_t first, int64_t second) noexcept nogil
