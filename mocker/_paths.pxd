# Requests of a trace as paths through a tree of block contents, cut into segments that nothing branches off.
from mocker._common cimport int32_t, int64_t, uint64_t
from mocker._kv cimport Path


cdef class PathTable:
    cdef int32_t[::1] segment      # [n] deepest segment of each request, NIL if it has no full block
    cdef int32_t[::1] parent       # [segments] segment before, NIL at the root
    cdef int32_t[::1] blocks       # [segments] blocks in it
    cdef readonly object arrays    # dict of the NumPy arrays behind these
    cdef bint talks                # requests are turns that go on from each other; then there are
    cdef int32_t[::1] first        # [n] first turn of each request's session
    cdef int32_t[::1] bound        # [n] full blocks of that turn's prompt: what follows is the session's own
    cdef int64_t n                 # rows of these; those that came later have paths of their own:
    cdef int64_t later             # so many of them
    cdef int64_t[::1] starts       # [later + 1] into the next two
    cdef uint64_t[::1] keys        # segment of each stretch
    cdef int32_t[::1] ends         # block index one past its end

    cdef uint64_t own(self, int64_t row) noexcept nogil
    cdef int fill(self, Path* path, int64_t row, int32_t full) noexcept nogil
    cdef int fill_later(self, Path* path, int64_t row, int32_t full) noexcept nogil
