"""The seeded generator of the reference, for other compiled modules: plain structs, no GIL, nothing can fail."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

ctypedef struct StdRng:
    uint32_t[8] key       # ChaCha key words, expanded from the seed
    uint64_t counter      # number of the next 64-byte block to make
    uint32_t index        # next unread word of buffer, 0..128; 128 = make blocks first
    uint32_t[128] buffer  # words of eight blocks, in output order

# Start the stream of a 64-bit seed. Every other function needs a seeded generator.
cdef void rng_seed(StdRng* rng, uint64_t seed) noexcept nogil
# Next word of the stream.
cdef uint32_t rng_u32(StdRng* rng) noexcept nogil
# Next two words of the stream, low word first.
cdef uint64_t rng_u64(StdRng* rng) noexcept nogil
# True with probability rate, 0 <= rate <= 1. Takes one u64, or nothing if rate == 1.0.
cdef bint rng_bool(StdRng* rng, double rate) noexcept nogil
# What a burst knows a rate as: a draft is accepted when the next u64 is below it; 2**64 - 1: without a draw.
cdef uint64_t accept_below(double rate) noexcept nogil
# `sample_output_tokens` where the buffer might not do.
cdef int64_t sample_slowly(StdRng* rng, const uint64_t* below, int n, int64_t remaining) noexcept nogil


cdef inline int64_t sample_output_tokens(StdRng* rng, const uint64_t* below, int n, int64_t remaining) noexcept nogil:
    """Tokens of one decode burst, 0..min(n + 1, remaining): 1 + drafts accepted before the first refusal.

    `below[n]`: conditional acceptance of draft i. Draws do not depend on `remaining`, unless it is 0: then none.
    Without branches, since nobody can guess them.
    """
    cdef uint32_t at = rng.index
    cdef uint64_t tokens = 1, going = 1, drawn
    cdef int i
    if at + 2 * n > 128 or remaining <= 0:
        return sample_slowly(rng, below, n, remaining)
    for i in range(n):
        drawn = below[i] + 1 != 0
        drawn &= going
        going &= ((rng.buffer[at] | <uint64_t>rng.buffer[at + 1] << 32) < below[i]) | (below[i] + 1 == 0)
        at += 2 * <uint32_t>drawn
        tokens += going
    rng.index = at
    return min(<int64_t>tokens, remaining)
