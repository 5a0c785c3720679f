# Block identities of requests that come while a replay runs.
from mocker._common cimport int32_t, int64_t, uint32_t, uint64_t
from mocker._kv cimport Path
from mocker._paths cimport PathTable


cdef struct Stretch:               # of ids, as `_paths.Node`, with ids of its own
    uint64_t key                   # segment; both parts of a stretch that was split have the same
    int64_t text                   # where the ids are, in `texts`
    int32_t begin                  # steps from the root to its first step
    int32_t end                    # and to behind its last
    int32_t parent


cdef struct Child:                 # by (parent, first id)
    uint64_t key
    int32_t child                  # 0: nobody


cdef class Interned(PathTable):
    cdef Stretch* nodes            # [used] 0: the root
    cdef int64_t used
    cdef int64_t cap
    cdef uint32_t* texts           # [texts_used]
    cdef int64_t texts_used
    cdef int64_t texts_cap
    cdef Child* children           # [mask + 1] open addressing
    cdef uint64_t mask
    cdef uint64_t next_key
    cdef int32_t per               # blocks an id
    cdef int64_t block             # tokens a block
    cdef int32_t[::1] leaf         # [places] the stretch that a request ends in; NIL: no full block

    cdef int32_t find(self, int32_t parent, uint32_t token, uint64_t* at) noexcept nogil
    cdef bint reserve(self, int64_t nodes, int64_t texts) noexcept nogil
    cdef int32_t grow(self, int32_t parent, const uint64_t* ids, int32_t begin, int32_t end) noexcept nogil
    cdef int32_t split(self, int32_t node, int32_t step) noexcept nogil
    cdef int32_t insert(self, const uint64_t* ids, int32_t steps) noexcept nogil
    cdef int32_t upto(self, int32_t node, int32_t steps) noexcept nogil
    cdef bint sweep(self, int32_t[::1] kept, const int64_t[::1] places) noexcept nogil
