# Data dictionary of the queues of steps that hand-offs wait to take.
from mocker._common cimport int64_t


cdef struct Steps:                 # first in, first out
    int64_t* items
    int64_t head
    int64_t used                   # items are [head, used)
    int64_t cap


cdef bint steps_push(Steps* q, int64_t item) noexcept nogil
cdef bint steps_move(Steps* q, Steps* to) noexcept nogil
