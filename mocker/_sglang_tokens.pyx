# cython: language_level=3
"""One token of an SGLang request: its value, and the page that it fills.

Answers to `scheduler/sglang/request.rs`, and to SipHash-1-3 of Rust's standard library for tokens that no plan gives.
A token costs a few loads and stores (`push_token`, inline), one that fills a page also its hash.
"""
from mocker._common cimport ERR_MEMORY, ERR_OK, uint32_t, uint64_t
from mocker._hash cimport block_hash, chain_hash
from mocker._kv cimport Path, path_reserve
from mocker._sglang cimport SglangCore, SglRequest


# ---- value ------------------------------------------------------------------------------------------------------

cdef uint64_t rotated(uint64_t x, int by) noexcept nogil:
    return (x << by) | (x >> (64 - by))


cdef void sip_round(uint64_t* v) noexcept nogil:
    v[0] += v[1]
    v[1] = rotated(v[1], 13) ^ v[0]
    v[0] = rotated(v[0], 32)
    v[2] += v[3]
    v[3] = rotated(v[3], 16) ^ v[2]
    v[0] += v[3]
    v[3] = rotated(v[3], 21) ^ v[0]
    v[2] += v[1]
    v[1] = rotated(v[1], 17) ^ v[2]
    v[2] = rotated(v[2], 32)


cdef uint64_t swapped(uint64_t x) noexcept nogil:
    """Bytes in the other order."""
    cdef uint64_t out = 0
    cdef int i
    for i in range(8):
        out = (out << 8) | ((x >> (8 * i)) & 0xFF)
    return out


cdef uint32_t hashed_token(SglRequest* r) noexcept nogil:
    """Token that no plan gives: SipHash-1-3 with zero keys of the UUID's bytes and the number of tokens so far."""
    cdef uint64_t[4] v
    cdef uint64_t[4] words
    cdef int i, _i
    v[0], v[1] = <uint64_t>0x736f6d6570736575, <uint64_t>0x646f72616e646f6d
    v[2], v[3] = <uint64_t>0x6c7967656e657261, <uint64_t>0x7465646279746573
    words[0], words[1], words[2] = swapped(r.uuid[0]), swapped(r.uuid[1]), <uint64_t>r.gen
    words[3] = <uint64_t>24 << 56              # length of the message
    for i in range(4):
        v[3] ^= words[i]
        sip_round(v)
        v[0] ^= words[i]
    v[2] ^= 0xFF
    for _i in range(3):
        sip_round(v)
    return <uint32_t>(v[0] ^ v[1] ^ v[2] ^ v[3])


# ---- page -------------------------------------------------------------------------------------------------------

cdef void page_filled(SglangCore* c, SglRequest* r) noexcept nogil:
    """The last page is full: it gets its identity."""
    cdef Path* path = &r.path
    cdef uint64_t local
    r.full += 1
    if not c.real_tokens:
        if path.n > 0 and path.keys[path.n - 1] == r.own_key:
            path.ends[path.n - 1] = r.full
            return
        if path_reserve(path, path.n + 1, False, 0) != ERR_OK:
            c.error = ERR_MEMORY
            return
        path.keys[path.n] = r.own_key
        path.ends[path.n] = r.full
        path.n += 1
        return
    if path_reserve(path, path.n + 1, True, 0) != ERR_OK:
        c.error = ERR_MEMORY
        return
    local = block_hash(r.tail, <size_t>c.page)
    path.keys[path.n] = local if path.n == 0 else chain_hash(path.keys[path.n - 1], local)
    path.local[path.n] = local
    path.ends[path.n] = path.n + 1
    path.n += 1
    r.tail_used = 0
