# Eviction from the block pool by a score; see _ranks.pxd.
from mocker._hooks cimport Hook
from mocker._kv cimport Pool


cdef void pool_rank(Pool* p, Hook score, const double* now) noexcept nogil
