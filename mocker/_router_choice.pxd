# Which worker a request gets, and which workers may be chosen; structures in _router.pxd.
from mocker._common cimport int32_t, int64_t, uint64_t
from mocker._router cimport Router


cdef void fill_costs(Router* r, int64_t isl, int64_t blocks, int64_t now) noexcept nogil
cdef void load_changed(Router* r, int32_t worker) noexcept nogil
cdef int32_t select(Router* r, int64_t row, int64_t isl, int64_t blocks, const uint64_t* keys, const int32_t* ends,
                    int32_t n, double now) noexcept nogil
cdef void reorder(Router* r) noexcept nogil
cdef bint router_add_worker(Router* r, int32_t worker, int64_t order) noexcept nogil
cdef bint router_remove_worker(Router* r, int32_t worker) noexcept nogil
