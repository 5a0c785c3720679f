"""Speculative decoding: how many tokens a burst yields, drawn from the reference's own seeded generator.

Answers to dynamo-mocker 1.3.0 `common/speculative.rs`, whose generator is `StdRng` of the Rust crate rand 0.9: the
ChaCha stream cipher with 12 rounds, a 64-bit block counter from 0 and a zero nonce. The 256-bit key is expanded from
the 64-bit seed by eight PCG32 outputs. Words leave the stream in order and none is skipped, so how many blocks the
reference buffers at a time cannot be seen; eight are made at a time here.

Cost: a few nanoseconds a draw, no allocation. Streams are equal to the reference's bit by bit.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

import numpy as np

from mocker._chacha cimport chacha, chacha_any

cdef enum:
    MAX_RATES = 16  # far above the 5 drafts that the engine arguments allow
    WORDS = 128     # of the buffer

cdef uint64_t ALWAYS = <uint64_t>-1            # accepted without a draw; all rates below 1 are less
cdef uint64_t PCG_MULTIPLIER = 6364136223846793005ULL
cdef uint64_t PCG_INCREMENT = 11634580027462260723ULL


cdef void rng_seed(StdRng* rng, uint64_t seed) noexcept nogil:
    cdef uint32_t mixed, turn
    cdef int i
    for i in range(8):
        seed = seed * PCG_MULTIPLIER + PCG_INCREMENT
        mixed = <uint32_t>(((seed >> 18) ^ seed) >> 27)
        turn = <uint32_t>(seed >> 59)
        rng.key[i] = (mixed >> turn) | (mixed << ((32 - turn) & 31))
    rng.counter = 0
    rng.index = WORDS


cdef uint32_t rng_u32(StdRng* rng) noexcept nogil:
    if rng.index >= WORDS:
        chacha(rng.key, rng.counter, rng.buffer)
        rng.counter += 8
        rng.index = 0
    rng.index += 1
    return rng.buffer[rng.index - 1]


cdef uint64_t rng_u64(StdRng* rng) noexcept nogil:
    cdef uint64_t low
    if rng.index + 2 <= WORDS:
        rng.index += 2
        return rng.buffer[rng.index - 2] | <uint64_t>rng.buffer[rng.index - 1] << 32
    low = rng_u32(rng)
    return low | (<uint64_t>rng_u32(rng) << 32)


cdef uint64_t accept_below(double rate) noexcept nogil:
    return ALWAYS if rate == 1.0 else <uint64_t>(rate * 18446744073709551616.0)  # * 2**64: exact, and below ALWAYS


cdef inline bint accepted(StdRng* rng, uint64_t below) noexcept nogil:
    return below == ALWAYS or rng_u64(rng) < below


cdef bint rng_bool(StdRng* rng, double rate) noexcept nogil:
    return accepted(rng, accept_below(rate))


cdef int64_t sample_slowly(StdRng* rng, const uint64_t* below, int n, int64_t remaining) noexcept nogil:
    cdef int64_t tokens = 1
    cdef int i
    if remaining <= 0:
        return 0
    for i in range(n):
        if not accepted(rng, below[i]):
            break
        tokens += 1
    return min(tokens, remaining)


cdef int _check_rate(double rate) except -1:
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"acceptance rate must be in 0..=1, got {rate}")
    return 0


cdef class SeededRng:
    """The reference's seeded generator (`StdRng` of rand 0.9), also named `StdRng`.

    Parameters
    ----------
    seed : int
        0 <= seed < 2**64.

    Raises
    ------
    OverflowError
        If `seed` does not fit 64 bits.
    """
    cdef StdRng _rng

    def __init__(self, seed):
        cdef uint64_t s = seed
        rng_seed(&self._rng, s)

    def next_u32(self):
        """Return the next word of the stream, 0 <= w < 2**32."""
        return rng_u32(&self._rng)

    def next_u64(self):
        """Return the next two words of the stream as one number, the low word first."""
        return rng_u64(&self._rng)

    def words(self, int64_t count):
        """The next `count` words of the stream, as a uint32 array."""
        cdef int64_t i
        cdef uint32_t[::1] out
        values = np.empty(count, np.uint32)
        out = values
        for i in range(count):
            out[i] = rng_u32(&self._rng)
        return values

    def random_bool(self, rate):
        """Return True with probability `rate`; a rate of exactly 1 takes nothing from the stream.

        Raises
        ------
        ValueError
            If `rate` is not in 0..=1.
        """
        cdef double r = rate
        _check_rate(r)
        return rng_bool(&self._rng, r)


def plain_words(uint64_t seed):
    """The first 128 words of a seed's stream, made without the wide vectors that not every processor has."""
    cdef StdRng rng
    cdef uint32_t[::1] out
    values = np.empty(WORDS, np.uint32)
    out = values
    rng_seed(&rng, seed)
    chacha_any(rng.key, 0, &out[0])
    return values


cdef class SpeculativeDecodeSampler:
    """Draws the length of decode bursts.

    Parameters
    ----------
    rates : sequence of float
        Conditional acceptance rate of each draft token, given that the drafts before it were accepted; at most 16.
    seed : int
        0 <= seed < 2**64; the engine passes `aic_mtp_seed + worker_id`, wrapping.

    Raises
    ------
    ValueError
        If a rate is not in 0..=1, or there are too many.
    OverflowError
        If `seed` does not fit 64 bits.
    """
    cdef StdRng _rng
    cdef uint64_t[MAX_RATES] _below
    cdef int _n

    def __init__(self, rates, seed):
        cdef uint64_t s = seed
        cdef double rate
        values = [float(r) for r in rates]
        if len(values) > MAX_RATES:
            raise ValueError(f"at most {MAX_RATES} acceptance rates, got {len(values)}")
        for i, value in enumerate(values):
            rate = value
            _check_rate(rate)
            self._below[<int>i] = accept_below(rate)
        self._n = len(values)
        rng_seed(&self._rng, s)

    def sample_output_tokens(self, remaining):
        """Return the tokens of the next burst.

        One token is always produced; each accepted draft adds one, up to the first refusal. The draws are the same
        whatever `remaining` is, and the result is cut to it; only ``remaining == 0`` draws nothing and returns 0.

        Parameters
        ----------
        remaining : int
            Output tokens that the request may still get, at least 0.

        Raises
        ------
        ValueError
            If `remaining` is negative.
        """
        cdef int64_t left = remaining
        if left < 0:
            raise ValueError(f"remaining must be at least 0, got {remaining}")
        return sample_output_tokens(&self._rng, self._below, self._n, left)


globals()["StdRng"] = SeededRng  # for Python; in compiled code that name is the struct
