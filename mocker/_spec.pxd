"""The seeded generator of the reference, for other compiled modules: plain structs, no GIL, nothing can fail."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

ctypedef struct StdRng:
    uint32_t[8] key      # ChaCha key words, expanded from the seed
    uint64_t counter     # number of the next 64-byte block to make
    uint32_t index       # next unread word of buffer, 0..64; 64 = make blocks first
    uint32_t[64] buffer  # words of four blocks, in output order

# Start the stream of a 64-bit seed. Every other function needs a seeded generator.
cdef void rng_seed(StdRng* rng, uint64_t seed) noexcept nogil
# Next word of the stream.
cdef uint32_t rng_u32(StdRng* rng) noexcept nogil
# Next two words of the stream, low word first.
cdef uint64_t rng_u64(StdRng* rng) noexcept nogil
# True with probability rate, 0 <= rate <= 1. Takes one u64, or nothing if rate == 1.0.
cdef bint rng_bool(StdRng* rng, double rate) noexcept nogil
# Tokens of one decode burst, 0..min(n + 1, remaining): 1 + drafts accepted before the first refusal.
# rates[n]: conditional acceptance of draft i. Draws do not depend on remaining, unless remaining <= 0: then none.
cdef int64_t sample_output_tokens(StdRng* rng, const double* rates, int n, int64_t remaining) noexcept nogil
