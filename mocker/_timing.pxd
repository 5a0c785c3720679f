# Timing model and the clock's arithmetic. Durations are whole nanoseconds; the clock is a float of milliseconds.
from mocker._common cimport int64_t


cdef enum:
    DECODE_RUN = 32                # decode times that `timing_decode_run` makes at once


# A model's time in ms, before limits and speed-up. Prefill: requests, new tokens and cached tokens of each (means).
# Decode: requests, KV tokens of the whole pool, known tokens of each (mean). Not a number: the model failed.
ctypedef double (*ModelTime)(void* data, int64_t batch, int64_t tokens, int64_t depth) noexcept nogil

# Of a pass that does both, whole: prompts, new and cached tokens of each; requests that decode, known tokens of each.
ctypedef double (*MixedTime)(void* data, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes,
                             int64_t context) noexcept nogil


cdef struct Model:
    ModelTime prefill
    ModelTime decode
    MixedTime mixed                # NULL: the sum of both
    void* data                     # what they get
    int64_t ranks                  # attention data parallelism: the two get the batch of the busiest rank
    bint by_context                # decode depends on the mean length


cdef struct Timing:
    double speedup                 # divides prefill and decode time; <= 0: unscaled
    double decode_speedup          # further divides decode time
    double total_tokens            # capacity of the pool in tokens
    int64_t block_size             # tokens a block
    double* decode_by_active       # [memo] decode ms by active blocks, -1 = not yet
    int64_t memo                   # places that it has so far
    int64_t memo_most              # places that it may get; 0: nothing is remembered
    int64_t blocks                 # capacity of the pool in blocks
    Model* model                   # asked in place of the polynomial; NULL: the polynomial


cdef inline bint timing_mixes(Timing* t) noexcept nogil:
    """Whether a pass of prompts and decoding requests has a time of its own."""
    return t.model != NULL and t.model.mixed != NULL


cdef inline bint timing_varies(Timing* t) noexcept nogil:
    """Whether decode time changes while requests only grow inside their blocks."""
    return t.model != NULL and t.model.by_context


cdef void timing_init(Timing* t, int64_t blocks, int64_t block_size, double speedup,
                      double decode_speedup) noexcept nogil
cdef void timing_free(Timing* t) noexcept nogil
cdef void timing_use(Timing* t, Model* model) noexcept nogil
cdef double model_prefill(Model* m, int64_t batch, int64_t tokens, int64_t prefix) noexcept nogil
cdef double model_decode(Model* m, int64_t batch, int64_t tokens, int64_t context) noexcept nogil
cdef double model_mixed(Model* m, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes,
                        int64_t context) noexcept nogil
cdef double timing_prefill_ms(Timing* t, int64_t batch, int64_t mean_isl, int64_t mean_prefix) noexcept nogil
cdef double timing_mixed_ms(Timing* t, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes,
                            int64_t context) noexcept nogil
cdef double timing_decode_ms(Timing* t, int64_t batch, int64_t active_blocks, int64_t context) noexcept nogil
cdef void timing_decode_run(Timing* t, int64_t active_blocks, int64_t step, int64_t most, int64_t count,
                            double* ms) noexcept nogil


cdef inline double timing_step_ms(Timing* t, int64_t batch, int64_t active_blocks, int64_t length) noexcept nogil:
    """`timing_decode_ms` for requests whose lengths sum up to `length`; a time that is remembered needs no mean."""
    if active_blocks < t.memo and t.decode_by_active[active_blocks] >= 0.0:
        return t.decode_by_active[active_blocks]
    return timing_decode_ms(t, batch, active_blocks, length // batch)
