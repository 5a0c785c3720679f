# Which evictable blocks of a host tier go first, if not the ones that became evictable first.
from mocker._common cimport int32_t, int64_t
from mocker._offload_blocks cimport Span
from mocker._offload_tiers cimport Tier


cdef int64_t policy_bias(Tier* t, int32_t run) noexcept nogil
cdef void policy_use(Tier* t, int32_t run) noexcept nogil
cdef int32_t policy_alike(Tier* t, Span* s) noexcept nogil
cdef void policy_enter(Tier* t, int32_t run, Span* s) noexcept nogil
cdef int policy_queue(Tier* t) noexcept nogil
cdef int64_t policy_most(Tier* t, int64_t n) noexcept nogil
cdef bint policy_spares(Tier* t, int32_t run) noexcept nogil
cdef void policy_gone(Tier* t, Span* s) noexcept nogil
cdef void policy_reach(Tier* t, int64_t row) noexcept nogil
cdef void policy_free(Tier* t) noexcept nogil
