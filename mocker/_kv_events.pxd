# The log of a block pool's changes.
from mocker._common cimport int32_t, int64_t, uint32_t, uint64_t
from mocker._kv cimport Event, Path, Piece, Pool


cdef Event* event_new(Pool* p, bint stored) noexcept nogil     # NULL if memory is short
cdef void event_piece(Pool* p, uint64_t key, uint64_t local, int32_t start, int32_t count,
                      uint32_t* tokens) noexcept nogil
cdef void log_stored(Pool* p, Path* path, int32_t begin, int32_t end) noexcept nogil
cdef void log_removed(Pool* p) noexcept nogil
