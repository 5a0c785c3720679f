from mocker._common cimport int64_t
from mocker._record cimport Timeline


cdef void record_pass(Timeline* t, int64_t worker, void* core, double start) noexcept nogil
cdef void record_sgl_pass(Timeline* t, int64_t worker, void* core, double start) noexcept nogil
cdef void record_stretch(Timeline* t, int64_t worker, void* core, double start, double end,
                         int64_t passes) noexcept nogil
cdef void record_sgl_stretch(Timeline* t, int64_t worker, void* core, double start, double end,
                             int64_t passes) noexcept nogil
cdef void record_rest(Timeline* t, int64_t worker, bint sglang, void* core, double now) noexcept nogil
