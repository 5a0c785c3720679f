# Data dictionary of what a planner is told: metrics of passes, and traffic since the last tick.
from mocker._common cimport int64_t
from mocker._core cimport Spread


cdef struct Note:                  # one pass; the fields of `NOTE`
    int64_t worker_id
    double wall_time               # s
    int64_t num_prefill_requests
    int64_t sum_prefill_tokens
    double var_prefill_length
    int64_t sum_prefill_kv_tokens
    int64_t num_decode_requests
    int64_t sum_decode_kv_tokens
    double var_decode_kv_tokens
    int64_t num_queued_prefill
    int64_t sum_queued_prefill_tokens
    double var_queued_prefill_length
    int64_t num_queued_decode
    int64_t sum_queued_decode_kv_tokens
    double var_queued_decode_kv_tokens


cdef class Watch:
    cdef bint collect              # note passes
    cdef bint short_of_memory
    cdef Note* notes[2]            # [used] by role
    cdef int64_t used[2]
    cdef int64_t cap[2]
    cdef double began              # ms, when the window began
    cdef int64_t requests
    cdef int64_t prompt_tokens
    cdef int64_t output_tokens
    cdef double ttft               # ms, sum
    cdef int64_t ttfts
    cdef double itl                # ms, sum of the requests' means
    cdef int64_t itls
    cdef double hit_rate           # sum of the admissions' cached shares
    cdef int64_t hits
    cdef int64_t made              # tokens
    cdef int64_t made_by           # requests in the passes that made them

    cdef void saw_pass(self, int role, int64_t number, double seconds, const Spread* fpm, int64_t prefill,
                       int64_t prefix) noexcept nogil
    cdef void saw_tokens(self, int64_t made, int64_t made_by) noexcept nogil
    cdef void saw_end(self, int64_t prompt, int64_t output, double arrival, double first, double last,
                      int64_t tokens) noexcept nogil
    cdef void saw_admission(self, int64_t overlap, int64_t blocks) noexcept nogil
