"""Speculative decoding: how many tokens a burst yields, drawn from the reference's own seeded generator.

Answers to dynamo-mocker 1.3.0 `common/speculative.rs`, whose generator is `StdRng` of the Rust crate rand 0.9: the
ChaCha stream cipher with 12 rounds, a 64-bit block counter from 0 and a zero nonce. The 256-bit key is expanded from
the 64-bit seed by eight PCG32 outputs. Words leave the stream in order and none is skipped, so how many blocks the
reference buffers at a time cannot be seen; one is buffered here.

Cost: one cipher block (about 0.1 us) per eight draws, no allocation. Streams are equal to the reference's bit by bit.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

import numpy as np

cdef enum:
    MAX_RATES = 16  # far above the 5 drafts that the engine arguments allow

cdef uint64_t PCG_MULTIPLIER = 6364136223846793005ULL
cdef uint64_t PCG_INCREMENT = 11634580027462260723ULL


cdef inline uint32_t _rotl(uint32_t v, int bits) noexcept nogil:
    return (v << bits) | (v >> (32 - bits))


cdef inline void _quarter(uint32_t* x, int a, int b, int c, int d) noexcept nogil:
    """ChaCha quarter round on words a, b, c, d of the state."""
    x[a] += x[b]
    x[d] = _rotl(x[d] ^ x[a], 16)
    x[c] += x[d]
    x[b] = _rotl(x[b] ^ x[c], 12)
    x[a] += x[b]
    x[d] = _rotl(x[d] ^ x[a], 8)
    x[c] += x[d]
    x[b] = _rotl(x[b] ^ x[c], 7)


cdef void _make_block(StdRng* rng) noexcept nogil:
    """Fill the buffer with the block of the current counter and go on to the next."""
    # "expand 32-byte k" in little-endian words, the key, the counter, the nonce
    cdef uint32_t[16] start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    cdef uint32_t[16] x
    cdef int i, _round
    memcpy(&start[4], rng.key, 32)
    start[12] = <uint32_t>rng.counter
    start[13] = <uint32_t>(rng.counter >> 32)
    memcpy(x, start, 64)
    for _round in range(6):  # twelve rounds: six of columns, then diagonals
        _quarter(x, 0, 4, 8, 12)
        _quarter(x, 1, 5, 9, 13)
        _quarter(x, 2, 6, 10, 14)
        _quarter(x, 3, 7, 11, 15)
        _quarter(x, 0, 5, 10, 15)
        _quarter(x, 1, 6, 11, 12)
        _quarter(x, 2, 7, 8, 13)
        _quarter(x, 3, 4, 9, 14)
    for i in range(16):
        rng.buffer[i] = x[i] + start[i]
    rng.counter += 1
    rng.index = 0


cdef void rng_seed(StdRng* rng, uint64_t seed) noexcept nogil:
    cdef uint32_t mixed, turn
    cdef int i
    for i in range(8):
        seed = seed * PCG_MULTIPLIER + PCG_INCREMENT
        mixed = <uint32_t>(((seed >> 18) ^ seed) >> 27)
        turn = <uint32_t>(seed >> 59)
        rng.key[i] = (mixed >> turn) | (mixed << ((32 - turn) & 31))
    rng.counter = 0
    rng.index = 16


cdef uint32_t rng_u32(StdRng* rng) noexcept nogil:
    if rng.index >= 16:
        _make_block(rng)
    rng.index += 1
    return rng.buffer[rng.index - 1]


cdef uint64_t rng_u64(StdRng* rng) noexcept nogil:
    cdef uint64_t low = rng_u32(rng)
    return low | (<uint64_t>rng_u32(rng) << 32)


cdef bint rng_bool(StdRng* rng, double rate) noexcept nogil:
    if rate == 1.0:
        return True
    return rng_u64(rng) < <uint64_t>(rate * 18446744073709551616.0)  # rate * 2**64 is exact and below 2**64


cdef int64_t sample_output_tokens(StdRng* rng, const double* rates, int n, int64_t remaining) noexcept nogil:
    cdef int64_t tokens = 1
    cdef int i
    if remaining <= 0:
        return 0
    for i in range(n):
        if not rng_bool(rng, rates[i]):
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
    cdef double[MAX_RATES] _rates
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
            self._rates[<int>i] = rate
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
        return sample_output_tokens(&self._rng, self._rates, self._n, left)


globals()["StdRng"] = SeededRng  # for Python; in compiled code that name is the struct
