"""What other compiled modules may call of `_hash`: all functions are pure, need no GIL and cannot fail."""
from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    HASH_SEED = 1337  # the salt that the reference gives to every request

# XXH3-64 of n bytes. n may be 0 (data is not read then). Any alignment.
cdef uint64_t xxh3_64(const void* data, size_t n, uint64_t seed) noexcept nogil

# Local hash of a block: XXH3-64 of n tokens as little-endian u32, seed HASH_SEED.
cdef uint64_t block_hash(const uint32_t* tokens, size_t n) noexcept nogil

# Sequence hash of a block: XXH3-64 of (sequence hash of the block before, local hash), 16 bytes, seed HASH_SEED.
# The first block of a sequence is not chained: its sequence hash is its local hash.
cdef uint64_t chain_hash(uint64_t parent, uint64_t local) noexcept nogil

# XXH3-64 of 16 bytes (first, last, little-endian) with seed 0 under the secret derived from secret_seed.
# Only the frequency sketch of the multi-LRU order asks for this form.
cdef uint64_t hash16_of_secret(uint64_t first, uint64_t last, uint64_t secret_seed) noexcept nogil

# Hashes of n_blocks full blocks from tokens[0]. local[n_blocks] and seq[n_blocks] are written; seq may be NULL.
# If has_parent, the first block is chained to parent (the sequence goes on); otherwise it starts a sequence.
cdef void hash_blocks(const uint32_t* tokens, size_t n_blocks, size_t block_size, bint has_parent, uint64_t parent,
                      uint64_t* local, uint64_t* seq) noexcept nogil
