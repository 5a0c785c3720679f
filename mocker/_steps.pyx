# cython: language_level=3
"""Queues of the steps that hand-offs wait to take. O(1) a step, amortised."""
from libc.string cimport memmove

from mocker._common cimport grown, int64_t


cdef bint steps_push(Steps* q, int64_t item) noexcept nogil:
    """Put a step at the end; false if memory is short."""
    cdef void* moved
    if q.used == q.cap and q.head > q.cap // 2:
        memmove(q.items, q.items + q.head, (q.used - q.head) * sizeof(int64_t))
        q.used -= q.head
        q.head = 0
    moved = grown(q.items, &q.cap, q.used + 1, sizeof(int64_t))
    if moved == NULL:
        return False
    q.items = <int64_t*>moved
    q.items[q.used] = item
    q.used += 1
    return True


cdef bint steps_move(Steps* q, Steps* to) noexcept nogil:
    """Put all steps of a queue behind those of another."""
    cdef int64_t i
    for i in range(q.head, q.used):
        if not steps_push(to, q.items[i]):
            return False
    q.head = q.used = 0
    return True
