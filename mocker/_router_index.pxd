# Who has which blocks: the key tables and what the rest of the router asks of the index; structures in _router.pxd.
# Table look-ups and the note of a warm worker are inline, since they are made once a path element.
from mocker._common cimport NIL, int32_t, int64_t, uint64_t
from mocker._kv cimport Pool
from mocker._router cimport KeyTable, Router, Ticket


cdef inline uint64_t home(KeyTable* t, uint64_t key) noexcept nogil:
    return ((key * <uint64_t>0x9E3779B97F4A7C15) >> 24) & t.mask


cdef inline int32_t table_find(KeyTable* t, uint64_t key) noexcept nogil:
    cdef uint64_t at = home(t, key)
    while t.values[at] != NIL:
        if t.keys[at] == key:
            return t.values[at]
        at = (at + 1) & t.mask
    return NIL


cdef inline void warm_up(Router* r, int32_t worker) noexcept nogil:
    """Note a worker whose `overlap` or `shared` is about to leave 0."""
    if r.overlap[worker] == 0 and r.shared[worker] == 0:
        r.warm[r.n_warm] = worker
        r.n_warm += 1


cdef bint table_resize(KeyTable* t, int64_t places) noexcept nogil
cdef bint table_insert(KeyTable* t, uint64_t key, int32_t value) noexcept nogil
cdef void table_delete(KeyTable* t, uint64_t key) noexcept nogil
cdef void router_stored(Router* r, int32_t worker, uint64_t key, int32_t end) noexcept nogil
cdef void router_removed(Router* r, int32_t worker, uint64_t key, int32_t start) noexcept nogil
cdef void router_cleared(Router* r, int32_t worker) noexcept nogil
cdef void index_forget(Router* r, int32_t worker) noexcept nogil
cdef bint walk(Router* r, const uint64_t* keys, const int32_t* ends, int32_t n, bint cached,
               bint active) noexcept nogil
cdef void blocks_add(Router* r, Ticket* t, const uint64_t* keys, const int32_t* ends, int32_t n) noexcept nogil
cdef void blocks_remove(Router* r, Ticket* t) noexcept nogil
cdef void index_events(Router* r, int32_t worker, Pool* pool) noexcept nogil
