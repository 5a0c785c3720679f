# cython: language_level=3
"""Processor sharing on one direction of a link between storage tiers.

Answers to the reference's `kvbm_offload/bandwidth_sharing_model.rs`: n transfers move at 1/n of the bandwidth each. The
list keeps the reference's order (the last transfer takes the place of a finished one), since the floating-point sums
behind a deadline follow it. Of transfers with equally much left, the first in the list is done first. A latency comes
on top of each: whether it comes before the bytes move or after is the same, since shares depend on differences of time.
Costs: an advance O(transfers under way) per transfer finished.
"""
from libc.math cimport INFINITY
from libc.stdlib cimport free

from mocker._common cimport ERR_MEMORY, grown, int32_t, int64_t


cdef void link_init(Link* k, double gbps, double latency) noexcept nogil:
    """An idle link in zeroed memory; 0 GB/s means unlimited. `latency`: ms of each transfer."""
    k.rate = gbps * 1e6 if gbps > 0.0 else INFINITY
    k.latency = latency


cdef void link_free(Link* k) noexcept nogil:
    free(k.active)
    free(k.landing)
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
    k.known = False
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


cdef Transfer* transfer_new(Link* k, Transfer** list, int64_t* cap, int64_t* used) noexcept nogil:
    """Room for one more; NULL if memory is short."""
    cdef void* moved = grown(list[0], cap, used[0] + 1, sizeof(Transfer))
    if moved == NULL:
        k.error = ERR_MEMORY
        return NULL
    list[0] = <Transfer*>moved
    used[0] += 1
    return &list[0][used[0] - 1]


cdef void land(Link* k, double now) noexcept nogil:
    """Transfers whose latency is over by `now` are done."""
    cdef Transfer* to
    while k.first_landing < k.landing_used and k.landing[k.first_landing].at <= now + 1e-9:
        to = transfer_new(k, &k.done, &k.done_cap, &k.done_used)
        if to == NULL:
            return
        to[0] = k.landing[k.first_landing]
        k.first_landing += 1
    if k.first_landing == k.landing_used:
        k.first_landing = k.landing_used = 0


cdef void link_advance(Link* k, double now) noexcept nogil:
    """Let time pass up to `now`; what finished is in `done`. A clock that went back changes nothing."""
    cdef int64_t i, least
    cdef double rate, need, end, wait
    cdef Transfer* t
    cdef Transfer* to
    k.done_used = 0
    if now < k.last:
        return
    k.known = False
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
        if k.latency > 0.0:
            to = transfer_new(k, &k.landing, &k.landing_cap, &k.landing_used)
        else:
            to = transfer_new(k, &k.done, &k.done_cap, &k.done_used)
        if to == NULL:
            return
        t = &k.active[least]
        t.at = end + k.latency
        wait = end - t.begun - (t.size / k.rate if k.rate < INFINITY else 0.0)
        if wait > 0.0:
            k.delay += wait
        to[0] = t[0]
        k.used -= 1
        k.active[least] = k.active[k.used]
    k.last = now
    if k.landing_used > 0:
        land(k, now)


cdef double link_earliest(Link* k) noexcept nogil:
    """When the next transfer is done if none is added; there is one."""
    cdef int64_t i
    cdef double least = INFINITY, total = 0.0
    k.known = True
    if k.landing_used > 0:                     # the others need their latency too, and begin it later
        k.next = k.landing[k.first_landing].at
        return k.next
    if not (k.rate < INFINITY):
        k.next = k.last + k.latency
        return k.next
    for i in range(k.used):
        if k.active[i].left < least:
            least = k.active[i].left
    for i in range(k.used):
        total += k.active[i].left if k.active[i].left < least else least
    k.next = k.last + total / k.rate + k.latency
    return k.next
