# cython: language_level=3
"""How long a pass takes: the polynomial model, the seam to other models, and the rounding of the reference's clock.

Answers to `common/perf_model.rs` and to the scaling functions of the vLLM core. A predicted time becomes a whole
number of nanoseconds, exactly rounded (half to even) from the product of its seconds and 1e9; scaling divides the
seconds of that and rounds again. Milliseconds handed out are nanoseconds / 1e9 * 1000 in this order.

Without a model the polynomial is inline, and decode times are remembered by active blocks. Models are in `_models`
and behind two function pointers; one costs a call a pass, and a call a stretch of passes where it does not depend on
the requests' lengths (`by_context`).
"""
from libc.math cimport INFINITY, fabs, fma, isfinite, rint
from libc.stdlib cimport free, realloc

from mocker._common cimport int64_t

cdef enum:
    MEMO_LIMIT = 1 << 20           # pools larger than this get no memo of decode times
    MEMO_FIRST = 512               # places of a memo at first

cdef double LONGEST = 9.0e9        # seconds (285 years): the nanoseconds of a duration fit 63 bits
cdef double SHORT = 1e6            # seconds: below it a double tells nanoseconds apart
cdef double PLAIN = 1e12           # nanoseconds: below it a product's error is under 1e-4
cdef double WHOLE = 6755399441055744.0  # 1.5 * 2**52: adding and subtracting it rounds a double to a whole number


cdef inline double rounded_seconds(double seconds) noexcept nogil:
    """Seconds after a trip through whole nanoseconds; infinity if out of range."""
    cdef double product, error, part
    cdef int64_t nanos
    if not (seconds <= LONGEST):
        return INFINITY
    product = seconds * 1e9
    if product < PLAIN:
        nanos = <int64_t>product
        part = product - <double>nanos
        if fabs(part - 0.5) > 1e-4:            # one test: each side of it is as likely as the other
            nanos += part > 0.5
            if nanos < 1000000000:
                return <double>nanos / 1e9
            return <double>(nanos // 1000000000) + <double>(nanos % 1000000000) / 1e9
    error = fma(seconds, 1e9, -product)        # the exact product is product + error
    nanos = <int64_t>product
    part = product - <double>nanos
    if part == 0.0:                            # also every product beyond 2**52
        part = rint(error)
        nanos += <int64_t>part
        if (error - part == 0.5 or error - part == -0.5) and nanos & 1:
            nanos += 1 if error > part else -1     # rint made its own result even, not the sum
    elif part > 0.5 or (part == 0.5 and (error > 0.0 or (error == 0.0 and nanos & 1))):
        nanos += 1
    return <double>(nanos // 1000000000) + <double>(nanos % 1000000000) / 1e9


cdef inline double scaled_ms(double ms, double ratio) noexcept nogil:
    cdef double seconds = rounded_seconds(ms / 1000.0)
    if ratio == 1.0 and seconds < SHORT:
        return seconds * 1000.0
    if ratio > 0.0 and seconds > 0.0:
        seconds = rounded_seconds(seconds / ratio)
    return seconds * 1000.0


cdef void timing_init(Timing* t, int64_t blocks, int64_t block_size, double speedup,
                      double decode_speedup) noexcept nogil:
    t.speedup, t.decode_speedup = speedup, decode_speedup
    t.total_tokens = <double>(blocks * block_size)
    t.block_size, t.blocks = block_size, blocks
    t.decode_by_active = NULL
    t.memo = 0
    t.memo_most = blocks + 1 if blocks <= MEMO_LIMIT else 0
    t.model = NULL


cdef void timing_free(Timing* t) noexcept nogil:
    free(t.decode_by_active)


cdef void timing_use(Timing* t, Model* model) noexcept nogil:
    """Ask `model` from now on; it has to outlive the timing."""
    free(t.decode_by_active)
    t.decode_by_active = NULL
    t.memo = t.memo_most = 0
    t.model = model


cdef void remember(Timing* t, int64_t active_blocks, double ms) noexcept nogil:
    """Keep a decode time, in a memo that grows with the blocks that are really in use. Short memory: not kept."""
    cdef int64_t i, places
    cdef double* moved
    if active_blocks >= t.memo:
        places = min(max(2 * active_blocks, MEMO_FIRST), t.memo_most)
        moved = <double*>realloc(t.decode_by_active, places * sizeof(double))
        if moved == NULL:
            return
        for i in range(t.memo, places):
            moved[i] = -1.0
        t.decode_by_active, t.memo = moved, places
    t.decode_by_active[active_blocks] = ms


cdef int64_t per_rank(Model* m, int64_t batch) noexcept nogil:
    return batch if m.ranks <= 1 else (batch + m.ranks - 1) // m.ranks


cdef double model_prefill(Model* m, int64_t batch, int64_t tokens, int64_t prefix) noexcept nogil:
    """Unscaled ms, not negative, of `batch` > 0 prompts of `tokens` > 0 new tokens each after `prefix` cached ones."""
    cdef double ms = m.prefill(m.data, per_rank(m, batch), tokens, prefix)
    return 0.0 if ms < 0.0 else ms


cdef double model_decode(Model* m, int64_t batch, int64_t tokens, int64_t context) noexcept nogil:
    """Unscaled ms, at least 1, of `batch` > 0 requests of mean length `context` with `tokens` in the pool."""
    cdef double ms = m.decode(m.data, per_rank(m, batch), tokens, context)
    return 1.0 if ms < 1.0 else ms


cdef double model_mixed(Model* m, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes,
                        int64_t context) noexcept nogil:
    """Unscaled ms, at least 1, of a pass of both: `batch` > 0 prompts, and `decodes` > 0 requests of mean length."""
    cdef double ms = m.mixed(m.data, per_rank(m, batch), tokens, prefix, per_rank(m, decodes), context)
    return 1.0 if ms < 1.0 else ms


cdef double timing_prefill_ms(Timing* t, int64_t batch, int64_t mean_isl, int64_t mean_prefix) noexcept nogil:
    """Duration of the prefill part, ms; `batch` prompts with the given truncated means of context and prefix."""
    cdef double tokens, ms
    if batch == 0 or mean_isl <= mean_prefix:
        return 0.0
    if t.model != NULL:
        return scaled_ms(model_prefill(t.model, batch, mean_isl - mean_prefix, mean_prefix), t.speedup)
    tokens = <double>(batch * (mean_isl - mean_prefix))
    ms = 4.209989e-07 * (tokens * tokens) + 1.518344e-02 * tokens + 1.650142e+01
    return scaled_ms(ms, t.speedup)


cdef inline double polynomial_decode(Timing* t, int64_t active_blocks) noexcept nogil:
    cdef double share = <double>(active_blocks * t.block_size) / t.total_tokens
    cdef double ms = -25.74 * (share * share) + 54.01 * share + 5.74
    if not (ms >= 1.0):
        ms = 1.0
    return scaled_ms(ms, t.speedup * t.decode_speedup)


cdef bint decode_row(Timing* t, double active, double step, int count, double* ms) noexcept nogil:
    """`timing_decode_run` of a row that stays within the pool; false if a time may lie between two nanoseconds.

    Without branches, so that a processor makes several times at once.
    """
    cdef double[DECODE_RUN] away               # from the next nanosecond
    cdef double block = <double>t.block_size, total = t.total_tokens, whole = WHOLE, sure = 0.4998
    cdef double share, product, nanos
    cdef int64_t bits = (<int64_t*>&sure)[0], under = -1
    cdef int i
    for i in range(count):
        share = (active + step * <double>i) * block / total
        product = (-25.74 * (share * share) + 54.01 * share + 5.74) / 1000.0 * 1e9
        nanos = product + whole - whole
        away[i] = fabs(product - nanos)
        ms[i] = nanos / 1e9 * 1000.0
    for i in range(count):                     # of numbers >= 0 the bits order as they do
        under &= (<int64_t*>away)[i] - bits
    return under < 0


cdef void timing_decode_run(Timing* t, int64_t active_blocks, int64_t step, int64_t most, int64_t count,
                            double* ms) noexcept nogil:
    """Durations of `count` decode passes without a model, each with `step` more active blocks, up to `most`.

    Nothing is remembered. A row within the pool at ordinary speed lasts less than a second each pass, and is made at
    once.
    """
    cdef int64_t k, last = active_blocks + step * (count - 1)
    if (count <= DECODE_RUN and t.speedup * t.decode_speedup == 1.0 and last <= most
            and <double>(last * t.block_size) <= t.total_tokens
            and decode_row(t, <double>active_blocks, <double>step, <int>count, ms)):
        return
    for k in range(count):
        ms[k] = polynomial_decode(t, min(active_blocks, most)) if k == 0 or active_blocks - step < most else ms[k - 1]
        active_blocks += step


cdef double timing_decode_ms(Timing* t, int64_t batch, int64_t active_blocks, int64_t context) noexcept nogil:
    """Duration of the decode part, ms; `batch` > 0 ready requests of mean length `context`, `active_blocks` held."""
    cdef double result
    if active_blocks < t.memo and t.decode_by_active[active_blocks] >= 0.0:
        return t.decode_by_active[active_blocks]
    if t.model != NULL:
        return scaled_ms(model_decode(t.model, batch, active_blocks * t.block_size, context),
                         t.speedup * t.decode_speedup)
    result = polynomial_decode(t, active_blocks)
    if active_blocks < t.memo_most:
        remember(t, active_blocks, result)
    return result


cdef double timing_mixed_ms(Timing* t, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes,
                            int64_t context) noexcept nogil:
    """Duration of a whole pass of prompts (at least one new token each) and decoding requests, ms."""
    return scaled_ms(model_mixed(t.model, batch, tokens, prefix, decodes, context), t.speedup)


def duration_ms(double ms, double ratio=0.0) -> float:
    """Milliseconds as the clock sees them.

    Parameters
    ----------
    ms : float
        Predicted time, milliseconds, not negative.
    ratio : float
        Speed-up; 0 or less leaves the time as it is.

    Returns
    -------
    float
        Milliseconds after rounding to whole nanoseconds, before and after the division.

    Raises
    ------
    OverflowError
        The result is beyond 9e9 seconds.
    """
    cdef double result = scaled_ms(ms, ratio)
    if not isfinite(result):
        raise OverflowError(f"a duration of {ms} ms at speed-up {ratio} is beyond the clock's range of 9e9 seconds")
    return result


def prefill_ms(int64_t batch, int64_t mean_isl, int64_t mean_prefix, double speedup=1.0) -> float:
    """Polynomial prefill time, ms, of `batch` prompts (mean context and mean prefix in tokens, truncated)."""
    cdef Timing t
    timing_init(&t, 0, 1, speedup, 1.0)
    cdef double result = timing_prefill_ms(&t, batch, mean_isl, mean_prefix)
    timing_free(&t)
    return result


def decode_ms(int64_t batch, int64_t active_blocks, int64_t blocks, int64_t block_size, double speedup=1.0) -> float:
    """Polynomial decode time, ms, of one pass with `active_blocks` of `blocks` held; `speedup` is the whole ratio."""
    cdef Timing t
    if batch == 0:
        return 0.0
    timing_init(&t, blocks, block_size, speedup, 1.0)
    cdef double result = timing_decode_ms(&t, batch, active_blocks, 0)
    timing_free(&t)
    return result


def decode_row_ms(int64_t active_blocks, int64_t step, int64_t most, int64_t count, int64_t blocks, int64_t block_size,
                  double speedup=1.0) -> list:
    """Polynomial decode times, ms, of `count` passes in a row, each with `step` more active blocks, up to `most`."""
    cdef Timing t
    cdef double[DECODE_RUN] ms
    if not 0 < count <= DECODE_RUN:
        raise ValueError(f"count must be from 1 to {DECODE_RUN}, got {count}")
    timing_init(&t, blocks, block_size, speedup, 1.0)
    timing_decode_run(&t, active_blocks, step, most, count, ms)
    return [ms[k] for k in range(count)]
