# Selection: values at given ranks of samples, without sorting them.
from mocker._common cimport int64_t, uint64_t


cdef inline uint64_t bits_of(double value) noexcept nogil:
    """Bits of a non-negative float; they order like the float."""
    return (<uint64_t*>&value)[0]


cdef int64_t nearest_rank(int64_t total, int percent) noexcept nogil
cdef double select_weighted(const double* v, const int64_t* w, int64_t n, int64_t rank, double* spare,
                            int64_t* spare_weights) noexcept nogil
cdef void select_ranks(double* v, int64_t n, double low, double high, const int64_t* ranks, int count, double* at,
                       double* spare) noexcept nogil
cdef bint select_log(const double* v, const int64_t* w, int64_t n, double low, double high, const int64_t* ranks,
                     int count, double* at) noexcept nogil
