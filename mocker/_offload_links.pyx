# cython: language_level=3
"""Processor sharing on one direction of a link between storage tiers.

Answers to the reference's `kvbm_offload/bandwidth_sharing_model.rs`: n transfers move at 1/n of the bandwidth each. The
list keeps the reference's order (the last transfer takes the place of a finished one), since the floating-point sums
behind a deadline follow it. Of transfers with equally much left, the first in the list is done first.
Costs: an advance O(transfers under way) per transfer finished.
"""
from libc.math cimport INFINITY
from libc.stdlib cimport free

from mocker._common cimport ERR_MEMORY, grown, int32_t, int64_t


cdef void link_init(Link* k, double gbps) noexcept nogil:
    """An idle link in zeroed memory; 0 GB/s means unlimited."""
    k.rate = gbps * 1e6 if gbps > 0.0 else INFINITY


cdef void link_free(Link* k) noexcept nogil:
    free(k.active)
    free(k.done)


cdef void link_start(Link* k, double now, double size, int32_t worker, int32_t place, int64_t first,
                     int64_t count) noexcept nogil:
    """Begin to move `size` bytes at `now`, but not before the link's own time."""
    cdef Transfer* t
    cdef void* moved = grown(k.active, &k.cap, k.used + 1, sizeof(Transfer))
    if moved == NULL:
        k.error = ERR_MEMORY
        return
    k.active = <Transfer*>moved
    if now > k.last:
        k.last = now
    t = &k.active[k.used]
    k.used += 1
    t.worker, t.place, t.first, t.count = worker, place, first, count
    t.left = size if k.rate < INFINITY else 0.0
    t.begun, t.size = k.last, size
    k.starts += 1
    k.bytes += size


cdef inline void progress(Link* k, double size) noexcept nogil:
    cdef int64_t i
    cdef double left
    for i in range(k.used):
        left = k.active[i].left - size
        k.active[i].left = left if left > 0.0 else 0.0


cdef void link_advance(Link* k, double now) noexcept nogil:
    """Let time pass up to `now`; what finished is in `done`. A clock that went back changes nothing."""
    cdef int64_t i, least
    cdef double rate, need, end, wait
    cdef Transfer* t
    cdef void* moved
    k.done_used = 0
    if now < k.last:
        return
    while k.used > 0:
        least = 0
        for i in range(1, k.used):
            if k.active[i].left < k.active[least].left:
                least = i
        rate = k.rate / <double>k.used
        need = k.active[least].left / rate if rate < INFINITY else 0.0
        end = k.last + need
        if end > now + 1e-9:
            if now > k.last:
                progress(k, (now - k.last) * rate)
                k.busy += now - k.last
            break
        if rate < INFINITY and need > 0.0:
            progress(k, need * rate)
            k.busy += need
        k.last = end
        moved = grown(k.done, &k.done_cap, k.done_used + 1, sizeof(Transfer))
        if moved == NULL:
            k.error = ERR_MEMORY
            return
        k.done = <Transfer*>moved
        t = &k.active[least]
        wait = end - t.begun - (t.size / k.rate if k.rate < INFINITY else 0.0)
        if wait > 0.0:
            k.delay += wait
        k.done[k.done_used] = t[0]
        k.done_used += 1
        k.used -= 1
        k.active[least] = k.active[k.used]
    k.last = now


cdef double link_earliest(Link* k) noexcept nogil:
    """When the next transfer is done if none is added; infinity on an idle link."""
    cdef int64_t i
    cdef double least = INFINITY, total = 0.0
    if k.used == 0:
        return INFINITY
    if not (k.rate < INFINITY):
        return k.last
    for i in range(k.used):
        if k.active[i].left < least:
            least = k.active[i].left
    for i in range(k.used):
        total += k.active[i].left if k.active[i].left < least else least
    return k.last + total / k.rate
