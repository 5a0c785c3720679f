# Room in the block pool that is kept for a transfer.
from mocker._common cimport int32_t, int64_t
from mocker._kv cimport Path, Pool


cdef int32_t pool_pin(Pool* p, Path* path, int32_t full, int32_t partial) noexcept nogil
cdef void pool_forgo(Pool* p, Path* path, int32_t pinned) noexcept nogil
cdef void pool_unpin(Pool* p, Path* path, int32_t pinned, int32_t reserved) noexcept nogil
cdef void pool_adopt(Pool* p, Path* path, int32_t pinned, int32_t full) noexcept nogil
cdef void pool_pin_prefix(Pool* p, Path* path, int32_t count) noexcept nogil
cdef void pool_touch_prefix(Pool* p, Path* path, int32_t count) noexcept nogil
cdef void pool_promoted(Pool* p, Path* path, int32_t begin, int32_t end, int64_t slots) noexcept nogil
