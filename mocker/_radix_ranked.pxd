# Eviction from the radix tree by a score of the user's; see _radix_ranked.pyx.
from mocker._common cimport int32_t
from mocker._hooks cimport Hook
from mocker._radix cimport Radix


cdef int radix_rank(Radix* t, Hook score, const double* now) noexcept nogil
cdef void ranked_put(Radix* t, int32_t node) noexcept nogil
cdef int32_t ranked_first(Radix* t) noexcept nogil
cdef void ranked_gone(Radix* t, int32_t node, int32_t up) noexcept nogil
cdef void ranked_release(Radix* t, int32_t node) noexcept nogil
