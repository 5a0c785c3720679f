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


cdef struct Seen:                  # since the last tick
    bint collect                   # note passes
    bint short_of_memory
    Note* notes[2]                 # [used] by role
    int64_t used[2]
    int64_t cap[2]
    double began                   # ms, when the window began
    int64_t requests
    int64_t prompt_tokens
    int64_t output_tokens
    double ttft                    # ms, sum
    int64_t ttfts
    double itl                     # ms, sum of the requests' means
    int64_t itls
    double hit_rate                # sum of the admissions' cached shares
    int64_t hits
    int64_t made                   # tokens
    int64_t made_by                # requests in the passes that made them


cdef class Watch:
    cdef Seen s

    cdef void saw_pass(self, int role, int64_t number, double seconds, const Spread* fpm, int64_t prefill,
                       int64_t prefix) noexcept nogil
    cdef void saw_tokens(self, int64_t made, int64_t made_by) noexcept nogil
    cdef void saw_end(self, int64_t prompt, int64_t output, double arrival, double first, double last,
                      int64_t tokens) noexcept nogil
    cdef void saw_admission(self, int64_t overlap, int64_t blocks) noexcept nogil
