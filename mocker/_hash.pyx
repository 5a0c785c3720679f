"""Content hashes of KV blocks: XXH3-64 with a seed, and the two hashes that are made of it.

Answers to dynamo-tokens 1.3.0 (`lib.rs`, `blocks.rs`) and to the published XXH3 specification. A block has
- a local hash: XXH3-64 of its tokens as little-endian u32, seed 1337, and
- a sequence hash: the local hash for the first block of a sequence, else XXH3-64 of the 16 bytes
  (sequence hash of the block before, local hash), both little-endian, seed 1337.

Inside a simulation blocks are dense numbers; hashes are computed only where they leave the process or where real
tokens come in. Cost: O(bytes), no allocation. Inputs over 240 bytes run eight independent lanes in plain loops, which
compilers turn into vector code; the seed-1337 secret of that path is made once, at import.
"""
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

import numpy as np

from mocker._wide cimport multiply

# What plain Cython cannot ask: the byte order of the machine.
cdef extern from *:
    """
    #if defined(__BYTE_ORDER__) && defined(__ORDER_BIG_ENDIAN__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #error "block hashes are defined over little-endian bytes; this module needs a little-endian machine"
    #endif
    """

cdef uint64_t P32_1 = 0x9E3779B1ULL
cdef uint64_t P32_2 = 0x85EBCA77ULL
cdef uint64_t P32_3 = 0xC2B2AE3DULL
cdef uint64_t P64_1 = 0x9E3779B185EBCA87ULL
cdef uint64_t P64_2 = 0xC2B2AE3D27D4EB4FULL
cdef uint64_t P64_3 = 0x165667B19E3779F9ULL
cdef uint64_t P64_4 = 0x85EBCA77C2B2AE63ULL
cdef uint64_t P64_5 = 0x27D4EB2F165667C5ULL

cdef enum:
    SECRET_BYTES = 192
    STRIPE = 64             # bytes that one accumulation takes: 8 lanes of 8
    STRIPES_PER_BLOCK = 16  # then the accumulators are scrambled

cdef uint8_t[SECRET_BYTES] SECRET       # the published default secret
cdef uint8_t[SECRET_BYTES] SECRET_1337  # derived for seed 1337, used by inputs over 240 bytes

cdef int _load_secrets() except -1:
    """Fill both secrets from the published bytes."""
    cdef bytes published = bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    )
    if len(published) != SECRET_BYTES:
        raise ImportError("the default secret of XXH3 has 192 bytes")
    memcpy(SECRET, <const uint8_t*>published, SECRET_BYTES)
    _derive_secret(SECRET_1337, HASH_SEED)
    return 0


_load_secrets()


cdef inline uint64_t mul_fold(uint64_t a, uint64_t b) noexcept nogil:
    """low ^ high half of a * b"""
    cdef uint64_t high, low = multiply(a, b, &high)
    return low ^ high


cdef inline uint64_t _u64(const uint8_t* p) noexcept nogil:
    cdef uint64_t v
    memcpy(&v, p, 8)
    return v


cdef inline uint64_t _u32(const uint8_t* p) noexcept nogil:
    cdef uint32_t v
    memcpy(&v, p, 4)
    return v


cdef inline uint64_t _swap32(uint64_t v) noexcept nogil:
    """Reverse the four low bytes; the rest of v is ignored."""
    return ((v & 0xFF) << 24) | ((v & 0xFF00) << 8) | ((v >> 8) & 0xFF00) | ((v >> 24) & 0xFF)


cdef inline uint64_t _swap64(uint64_t v) noexcept nogil:
    return (_swap32(v) << 32) | _swap32(v >> 32)


cdef inline uint64_t _rotl(uint64_t v, int bits) noexcept nogil:
    return (v << bits) | (v >> (64 - bits))


cdef inline uint64_t _avalanche(uint64_t h) noexcept nogil:
    h = (h ^ (h >> 37)) * <uint64_t>0x165667919E3779F9ULL
    return h ^ (h >> 32)


cdef inline uint64_t _avalanche_xxh64(uint64_t h) noexcept nogil:
    """The finish of the older XXH64, which XXH3 keeps for at most 3 bytes."""
    h = (h ^ (h >> 33)) * P64_2
    h = (h ^ (h >> 29)) * P64_3
    return h ^ (h >> 32)


cdef inline uint64_t _mix16(const uint8_t* p, const uint8_t* secret, uint64_t seed) noexcept nogil:
    return mul_fold(_u64(p) ^ (_u64(secret) + seed), _u64(p + 8) ^ (_u64(secret + 8) - seed))


cdef inline uint64_t _hash_1_3(const uint8_t* p, size_t n, uint64_t seed) noexcept nogil:
    cdef uint64_t word = (<uint64_t>p[0] << 16) | (<uint64_t>p[n >> 1] << 24) | p[n - 1] | (<uint64_t>n << 8)
    return _avalanche_xxh64(word ^ ((_u32(SECRET) ^ _u32(SECRET + 4)) + seed))


cdef inline uint64_t _hash_4_8(const uint8_t* p, size_t n, uint64_t seed) noexcept nogil:
    cdef uint64_t h
    seed ^= _swap32(seed) << 32
    h = (_u32(p + n - 4) + (_u32(p) << 32)) ^ ((_u64(SECRET + 8) ^ _u64(SECRET + 16)) - seed)
    h ^= _rotl(h, 49) ^ _rotl(h, 24)
    h *= <uint64_t>0x9FB21C651E98DF25ULL
    h ^= (h >> 35) + <uint64_t>n
    h *= <uint64_t>0x9FB21C651E98DF25ULL
    return h ^ (h >> 28)


cdef inline uint64_t _hash_9_16(uint64_t first, uint64_t last, size_t n, uint64_t seed) noexcept nogil:
    """Hash of 9 to 16 bytes, given as the first eight and the last eight of them."""
    cdef uint64_t low = first ^ ((_u64(SECRET + 24) ^ _u64(SECRET + 32)) + seed)
    cdef uint64_t high = last ^ ((_u64(SECRET + 40) ^ _u64(SECRET + 48)) - seed)
    return _avalanche(<uint64_t>n + _swap64(low) + high + mul_fold(low, high))


cdef uint64_t _hash_17_128(const uint8_t* p, size_t n, uint64_t seed) noexcept nogil:
    """Pairs of 16-byte pieces from both ends, the outermost pair with the first secret."""
    cdef uint64_t acc = <uint64_t>n * P64_1
    cdef size_t i, pairs = (n - 1) // 32 + 1
    for i in range(pairs):
        acc += _mix16(p + 16 * i, SECRET + 32 * i, seed)
        acc += _mix16(p + n - 16 * (i + 1), SECRET + 32 * i + 16, seed)
    return _avalanche(acc)


cdef uint64_t _hash_129_240(const uint8_t* p, size_t n, uint64_t seed) noexcept nogil:
    cdef uint64_t acc = <uint64_t>n * P64_1
    cdef size_t i, pieces = n // 16
    for i in range(8):
        acc += _mix16(p + 16 * i, SECRET + 16 * i, seed)
    acc = _avalanche(acc)
    for i in range(8, pieces):
        acc += _mix16(p + 16 * i, SECRET + 16 * (i - 8) + 3, seed)
    acc += _mix16(p + n - 16, SECRET + 136 - 17, seed)
    return _avalanche(acc)


cdef void _derive_secret(uint8_t* out, uint64_t seed) noexcept nogil:
    """Write the 192-byte secret of a seed: even words of the default secret plus the seed, odd ones minus it."""
    cdef uint64_t word
    cdef int i
    for i in range(0, SECRET_BYTES, 16):
        word = _u64(SECRET + i) + seed
        memcpy(out + i, &word, 8)
        word = _u64(SECRET + i + 8) - seed
        memcpy(out + i + 8, &word, 8)


cdef inline void _accumulate(uint64_t* acc, const uint8_t* p, const uint8_t* secret) noexcept nogil:
    """Add one 64-byte stripe. Each lane takes its neighbour's input and the product of its own keyed halves."""
    cdef uint64_t[8] word
    cdef uint64_t[8] keyed
    cdef int i
    memcpy(word, p, STRIPE)
    memcpy(keyed, secret, STRIPE)
    for i in range(8):
        keyed[i] ^= word[i]
    for i in range(8):
        acc[i] += word[i ^ 1]
    for i in range(8):
        acc[i] += (keyed[i] & 0xFFFFFFFFULL) * (keyed[i] >> 32)


cdef inline void _scramble(uint64_t* acc, const uint8_t* secret) noexcept nogil:
    cdef uint64_t[8] key
    cdef int i
    memcpy(key, secret, STRIPE)
    for i in range(8):
        acc[i] = (acc[i] ^ (acc[i] >> 47) ^ key[i]) * P32_1


cdef uint64_t _hash_long(const uint8_t* p, size_t n, const uint8_t* secret) noexcept nogil:
    """Hash of more than 240 bytes: blocks of 16 stripes, a rest, and the last 64 bytes once more."""
    cdef uint64_t[8] acc = [P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1]
    cdef size_t _block, stripe
    cdef size_t n_blocks = (n - 1) // (STRIPE * STRIPES_PER_BLOCK)
    cdef size_t n_rest = (n - 1 - n_blocks * STRIPE * STRIPES_PER_BLOCK) // STRIPE
    cdef const uint8_t* q = p
    cdef uint64_t h = <uint64_t>n * P64_1
    cdef int i
    for _block in range(n_blocks):
        for stripe in range(<size_t>STRIPES_PER_BLOCK):
            _accumulate(acc, q, secret + 8 * stripe)
            q += STRIPE
        _scramble(acc, secret + SECRET_BYTES - STRIPE)
    for stripe in range(n_rest):
        _accumulate(acc, q, secret + 8 * stripe)
        q += STRIPE
    _accumulate(acc, p + n - STRIPE, secret + SECRET_BYTES - STRIPE - 7)
    for i in range(0, 8, 2):
        h += mul_fold(acc[i] ^ _u64(secret + 11 + 8 * i), acc[i + 1] ^ _u64(secret + 19 + 8 * i))
    return _avalanche(h)


cdef uint64_t xxh3_64(const void* data, size_t n, uint64_t seed) noexcept nogil:
    cdef const uint8_t* p = <const uint8_t*>data
    cdef uint8_t[SECRET_BYTES] secret
    if n == 0:
        return _avalanche_xxh64(seed ^ _u64(SECRET + 56) ^ _u64(SECRET + 64))
    if n <= 3:
        return _hash_1_3(p, n, seed)
    if n <= 8:
        return _hash_4_8(p, n, seed)
    if n <= 16:
        return _hash_9_16(_u64(p), _u64(p + n - 8), n, seed)
    if n <= 128:
        return _hash_17_128(p, n, seed)
    if n <= 240:
        return _hash_129_240(p, n, seed)
    if seed == HASH_SEED:
        return _hash_long(p, n, SECRET_1337)
    _derive_secret(secret, seed)
    return _hash_long(p, n, secret)


cdef uint64_t block_hash(const uint32_t* tokens, size_t n) noexcept nogil:
    return xxh3_64(tokens, 4 * n, HASH_SEED)


cdef uint64_t chain_hash(uint64_t parent, uint64_t local) noexcept nogil:
    return _hash_9_16(parent, local, 16, HASH_SEED)


cdef uint64_t hash16_of_secret(uint64_t first, uint64_t last, uint64_t secret_seed) noexcept nogil:
    cdef uint64_t low = first ^ ((_u64(SECRET + 24) - secret_seed) ^ (_u64(SECRET + 32) + secret_seed))
    cdef uint64_t high = last ^ ((_u64(SECRET + 40) - secret_seed) ^ (_u64(SECRET + 48) + secret_seed))
    return _avalanche(16 + _swap64(low) + high + mul_fold(low, high))


cdef void hash_blocks(const uint32_t* tokens, size_t n_blocks, size_t block_size, bint has_parent, uint64_t parent,
                      uint64_t* local, uint64_t* seq) noexcept nogil:
    cdef size_t i
    for i in range(n_blocks):
        local[i] = block_hash(tokens + i * block_size, block_size)
    if seq == NULL:
        return
    for i in range(n_blocks):
        parent = chain_hash(parent, local[i]) if has_parent else local[i]
        has_parent = True
        seq[i] = parent


def _xxh3_64(data, seed=0):
    """Hash bytes with XXH3-64.

    Parameters
    ----------
    data : bytes-like
        Any contiguous buffer; its raw bytes are hashed.
    seed : int
        0 <= seed < 2**64.

    Returns
    -------
    int
        The hash, 0 <= h < 2**64.

    Raises
    ------
    TypeError
        If `data` has no contiguous buffer.
    OverflowError
        If `seed` does not fit 64 bits.
    """
    cdef const uint8_t[::1] view = memoryview(data).cast("B") if memoryview(data).nbytes else None
    cdef uint64_t s = seed
    cdef size_t n
    cdef uint64_t h
    if view is None:
        return xxh3_64(NULL, 0, s)
    n = view.shape[0]
    with nogil:
        h = xxh3_64(&view[0], n, s)
    return h


globals()["xxh3_64"] = _xxh3_64  # the C function of the same name, for compiled callers, has no Python name
_xxh3_64.__name__ = _xxh3_64.__qualname__ = "xxh3_64"


cdef object _as_tokens(object tokens):
    """Return tokens as a contiguous uint32 array; refuse what uint32 cannot hold instead of wrapping it."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must be one-dimensional, got {array.ndim} dimensions")
    if array.dtype == np.uint32 or array.size == 0:
        return np.ascontiguousarray(array, dtype=np.uint32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers, got dtype {array.dtype}")
    if array.min() < 0 or array.max() > 0xFFFFFFFF:
        raise ValueError("tokens must be in 0..=4294967295")
    return np.ascontiguousarray(array, dtype=np.uint32)


cdef tuple _hash_full_blocks(object tokens, object block_size, bint with_sequence):
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    array = _as_tokens(tokens)
    cdef Py_ssize_t blocks = array.shape[0] // block_size
    local = np.empty(blocks, dtype=np.uint64)
    sequence = np.empty(blocks if with_sequence else 0, dtype=np.uint64)
    if blocks == 0:
        return local, sequence
    cdef const uint32_t[::1] token_view = array
    cdef uint64_t[::1] local_view = local
    cdef uint64_t[::1] sequence_view = sequence
    cdef uint64_t* out = &sequence_view[0] if with_sequence else NULL
    cdef size_t size = block_size
    with nogil:
        hash_blocks(&token_view[0], blocks, size, False, 0, &local_view[0], out)
    return local, sequence


def compute_block_hash_for_seq(tokens, block_size):
    """Local hashes of the full blocks of a token sequence; a trailing partial block has none.

    Parameters
    ----------
    tokens : sequence of int, shape (n,)
        Token ids, each 0 <= t < 2**32. A uint32 array is read in place.
    block_size : int
        Tokens a block, at least 1.

    Returns
    -------
    list of int, length n // block_size

    Raises
    ------
    ValueError
        If `block_size` < 1, or `tokens` is not one-dimensional or holds an id out of range.
    TypeError
        If `tokens` are not integers.
    """
    return _hash_full_blocks(tokens, block_size, False)[0].tolist()


def compute_seq_hashes(tokens, block_size):
    """Local and sequence hashes of the full blocks of a token sequence.

    Parameters
    ----------
    tokens, block_size
        As for `compute_block_hash_for_seq`.

    Returns
    -------
    local, sequence : list of int, each of length n // block_size
        ``sequence[0] == local[0]``; each later one chains its local hash to the sequence hash before it.

    Raises
    ------
    ValueError, TypeError
        As for `compute_block_hash_for_seq`.
    """
    local, sequence = _hash_full_blocks(tokens, block_size, True)
    return local.tolist(), sequence.tolist()
