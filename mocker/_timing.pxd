# Timing model and the clock's arithmetic. Durations are whole nanoseconds; the clock is a float of milliseconds.
from mocker._common cimport int64_t


cdef struct Timing:
    double speedup                 # divides prefill and decode time; <= 0: unscaled
    double decode_speedup          # further divides decode time
    double total_tokens            # capacity of the pool in tokens
    int64_t block_size             # tokens a block
    double* decode_by_active       # [blocks + 1] memo: decode ms by active blocks, -1 = not yet; NULL if too many
    int64_t blocks                 # capacity of the pool in blocks


cdef int timing_init(Timing* t, int64_t blocks, int64_t block_size, double speedup,
                     double decode_speedup) noexcept nogil
cdef void timing_free(Timing* t) noexcept nogil
cdef double timing_prefill_ms(Timing* t, int64_t batch, int64_t mean_isl, int64_t mean_prefix) noexcept nogil
cdef double timing_decode_ms(Timing* t, int64_t batch, int64_t active_blocks, int64_t context) noexcept nogil
