# cython: language_level=3
"""TRT-LLM's GUARANTEED_NO_EVICT policy: a request is admitted only if everybody running can still finish.

Answers to `scheduler/vllm/policy.rs`. The rest of the pass is vLLM's. A check costs O(running requests).
"""
from mocker._common cimport int64_t
from mocker._core cimport Core, Request
from mocker._kv cimport pool_cost


cdef int64_t trt_limit(Core* c, int64_t prompt, int64_t limit) noexcept nogil:
    """Output tokens after the clamp to the pool; a prompt that fills the pool is left for the gate to reject."""
    cdef int64_t capacity = c.pool.capacity * c.block_size
    if prompt < capacity and limit > capacity - prompt:
        return capacity - prompt
    return limit


cdef int64_t trt_blocks(Core* c, Request* r) noexcept nogil:
    """Blocks that the request holds when it ends."""
    return (r.prompt + r.limit + c.mask) >> c.shift


cdef int64_t needed(Core* c, Request* r, int64_t active_cached) noexcept nogil:
    """Blocks it still has to take, given its cached prompt tokens that are held by others (used before it runs)."""
    cdef int64_t blocks = trt_blocks(c, r)
    blocks -= active_cached >> c.shift if r.alloc == 0 else (r.alloc + c.mask) >> c.shift
    return blocks if blocks > 0 else 0


cdef bint trt_fits(Core* c, Request* r, int64_t active_cached) noexcept nogil:
    """Whether the request and all running ones can finish with the blocks there are."""
    cdef int64_t i, reserved = 0, cached, active, room
    cdef Request* other
    for i in range(c.n_running):
        other = &c.req[c.running[i]]
        active = 0
        if other.alloc == 0:
            pool_cost(&c.pool, &other.path, other.full, &cached, &active)
            active *= c.block_size
            if active > other.prompt:
                active = other.prompt
        reserved += needed(c, other, active)
    room = c.pool.capacity - c.pool.active - reserved
    return needed(c, r, active_cached) <= (room if room > 0 else 0)
