# cython: language_level=3
"""Processor sharing on one direction of a link between storage tiers.

Answers to the reference's `kvbm_offload/bandwidth_sharing_model.rs`: n transfers move at 1/n of the bandwidth each. The
list keeps the reference's order (the last transfer takes the place of a finished one), since the floating-point sums
behind a deadline follow it. Of transfers with equally much left, the first in the list is done first. A latency comes
on top of each: whether it comes before the bytes move or after is the same, since shares depend on differences of time.
Costs: an advance O(transfers under way) per transfer finished, O(1) where one moves.
"""
from libc.math cimport INFINITY
from libc.stdlib cimport free

from mocker._common cimport ERR_MEMORY, grown, grown_both, int64_t


cdef void link_init(Link* k, double gbps, double latency) noexcept nogil:
    """An idle link in zeroed memory; 0 GB/s means unlimited. `latency`: ms of each transfer."""
    k.rate = gbps * 1e6 if gbps > 0.0 else INFINITY
    k.latency = latency


cdef void link_free(Link* k) noexcept nogil:
    free(k.active)
    free(k.left)
    free(k.landing)
    free(k.done)


cdef bint link_room(Link* k) noexcept nogil:
    """Room for one more transfer; false if memory is short."""
    if not grown_both(<void**>&k.active, sizeof(Transfer), <void**>&k.left, sizeof(double), &k.cap, k.used + 1):
        k.error = ERR_MEMORY
        return False
    return True


cdef inline double less(double left, double size) noexcept nogil:
    left -= size
    return left if left > 0.0 else 0.0


cdef inline void progress(Link* k, double size) noexcept nogil:
    cdef int64_t i
    for i in range(k.used):
        k.left[i] = less(k.left[i], size)
    k.least = less(k.least, size)              # rounding keeps the order


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


cdef inline void late(Link* k, Transfer* t, double need) noexcept nogil:
    """Book by how much a transfer that is done in `need` ms took longer than it would have alone."""
    cdef double wait = k.last + need - t.begun
    if k.rate < INFINITY:
        wait -= need if k.used == 1 and k.least == t.size else t.size / k.rate
    if wait > 0.0:
        k.delay += wait


cdef bint others_done(Link* k) noexcept nogil:
    """Those of which nothing is left either are done at the same time; false if memory is short."""
    cdef int64_t i
    cdef Transfer* to
    while k.ties > 0:
        i = 0
        while k.left[i] != 0.0:
            i += 1
        to = transfer_new(k, &k.done, &k.done_cap, &k.done_used)
        if to == NULL:
            return False
        to[0] = k.active[i]
        to.at = k.last
        late(k, to, 0.0)
        k.used -= 1
        k.active[i], k.left[i] = k.active[k.used], k.left[k.used]
        k.ties -= 1
    return True


cdef bint finish(Link* k, double rate, double need) noexcept nogil:
    """The first of those with the least left is done in `need` ms; false if memory is short."""
    cdef int64_t i = 0
    cdef double end = k.last + need
    cdef Transfer* to
    while k.left[i] != k.least:
        i += 1
    if k.latency > 0.0:
        to = transfer_new(k, &k.landing, &k.landing_cap, &k.landing_used)
    else:
        to = transfer_new(k, &k.done, &k.done_cap, &k.done_used)
    if to == NULL:
        return False
    to[0] = k.active[i]
    to.at = end + k.latency
    late(k, to, need)
    k.last = end
    if need > 0.0:
        k.busy += need
        if k.used > 1:
            progress(k, need * rate)
    k.used -= 1
    k.active[i], k.left[i] = k.active[k.used], k.left[k.used]
    k.ties -= 1
    if k.ties > 0 and k.least == 0.0 and k.latency == 0.0 and not others_done(k):
        return False
    if k.ties == 0 and k.used > 0:
        k.least = k.left[0]
        for i in range(1, k.used):
            k.least = k.left[i] if k.left[i] < k.least else k.least
        k.ties = 1
    return True


cdef bint lone(Link* k, double now) noexcept nogil:
    """`finish` of a transfer that has the link to itself if it is done by `now`; false: it is another case."""
    cdef double need = k.left[0] / k.rate, end = k.last + need
    cdef Transfer* t = k.active
    if end > now + 1e-9 or k.done_cap == 0 or k.latency > 0.0:
        return False
    late(k, t, need)
    k.busy += need
    t.at = end
    k.done[0] = t[0]
    k.done_used, k.used, k.ties = 1, 0, 0
    k.last = now
    return True


cdef void link_advance(Link* k, double now) noexcept nogil:
    """Let time pass up to `now`; what finished is in `done`. A clock that went back changes nothing."""
    cdef double rate, need
    k.done_used = 0
    if now < k.last:
        return
    k.known = False
    if k.used == 1 and k.landing_used == 0 and k.rate < INFINITY and lone(k, now):
        return
    while k.used > 0:
        rate = k.rate / <double>k.used if k.used > 1 else k.rate
        need = k.least / rate if rate < INFINITY else 0.0
        if k.last + need > now + 1e-9:
            if now > k.last:
                progress(k, (now - k.last) * rate)
                k.busy += now - k.last
            break
        if not finish(k, rate, need):
            return
    k.last = now
    if k.landing_used > 0:
        land(k, now)


cdef double link_earliest(Link* k) noexcept nogil:
    """When the next transfer is done if none is added; there is one."""
    cdef int64_t _
    cdef double total = 0.0
    k.known = True
    if k.landing_used > 0:                     # the others need their latency too, and begin it later
        k.next = k.landing[k.first_landing].at
        return k.next
    if not (k.rate < INFINITY):
        k.next = k.last + k.latency
        return k.next
    for _ in range(k.used):                    # the reference's sum
        total += k.least
    k.next = k.last + total / k.rate + k.latency
    return k.next
