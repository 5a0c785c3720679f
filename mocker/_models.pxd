# Timing models other than the polynomial: objects that own what their two functions read.
from libc.stdint cimport uint64_t

from mocker._common cimport int64_t
from mocker._timing cimport Model


cdef class CompiledModel:
    cdef Model model               # what engines ask; points into this object
    cdef object failure            # exception of a Python function, not raised yet

    cdef int raise_failure(self) except -1


cdef int raise_time(object model) except -1
cdef int refuse_mixed(CompiledModel model, object whose) except -1


cdef struct Grid:
    int64_t n_isl
    int64_t n_kv
    int64_t n_context
    double* isl                    # [n_isl] tokens of a prefill
    double* ttft                   # [n_isl] ms
    double* ttft_slope             # [n_isl - 1] ms a token
    double* kv                     # [n_kv] tokens in the pool
    double* context                # [n_context] mean length
    double* itl                    # [n_kv, n_context] ms
    double* itl_slope              # [n_kv - 1, n_context] ms a token in the pool


cdef struct Formula:
    double prefill[4]              # of 1, T, T * T, T * (prefix + tokens / 2); T = batch * tokens
    double decode[5]               # of 1, batch, KV, KV * KV, batch * context


cdef struct Page:                  # times of consecutive third numbers, NaN where there is none yet
    int64_t first                  # batch; 0: the page is free
    int64_t second
    int64_t third                  # shifted
    double* ms                     # [1 << shift]


cdef struct Memo:
    Page* pages                    # [mask + 1], open addressing
    uint64_t mask
    int64_t used
    int shift                      # a page holds 1 << shift times
    double* slab                   # where the next page's times go
    int64_t slab_left              # times left in it
