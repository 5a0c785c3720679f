# Links between storage tiers, on which the transfers under way share the bandwidth equally.
from libc.math cimport INFINITY

from mocker._common cimport int32_t, int64_t


cdef struct Transfer:
    double begun                   # ms
    double size                    # bytes
    double at                      # ms, when it is done, once its bytes have moved
    int32_t worker                 # whose it is
    int32_t place                  # its lease
    int32_t first                  # copies down: first span of the batch in the lease
    int32_t count                  # spans


cdef struct Link:
    double rate                    # bytes/ms; infinity: unlimited
    double latency                 # ms of each transfer, beside the time that its bytes take
    double last                    # ms up to which `active` is true
    double next                    # `link_earliest` while `known`
    bint known
    int64_t starts
    Transfer* active               # [used] in the reference's list order
    double* left                   # [used] bytes that they have still to move at `last`
    int64_t cap
    int64_t used
    double least                   # the least of `left`
    int64_t ties                   # so many of them are that much, or more
    Transfer* landing              # [first_landing, landing_used) their bytes have moved, by time
    int64_t landing_cap
    int64_t first_landing
    int64_t landing_used
    Transfer* done                 # [done_used] what the newest advance finished, in order
    int64_t done_cap
    int64_t done_used
    double bytes                   # moved or moving, since the start
    double busy                    # ms with something under way
    double delay                   # ms that finished transfers took longer than they would have taken alone
    int error                      # ErrorCode


cdef void link_init(Link* k, double gbps, double latency) noexcept nogil
cdef void link_free(Link* k) noexcept nogil
cdef bint link_room(Link* k) noexcept nogil
cdef void link_advance(Link* k, double now) noexcept nogil
cdef double link_earliest(Link* k) noexcept nogil     # notes it


cdef inline void link_start(Link* k, double now, double size, int32_t worker, int32_t place, int32_t first,
                            int32_t count) noexcept nogil:
    """Begin to move `size` bytes at `now`, but not before the link's own time."""
    cdef Transfer* t
    cdef double left = size if k.rate < INFINITY else 0.0
    if k.used == k.cap and not link_room(k):
        return
    if now > k.last:
        k.last = now
    if k.used == 0 or left < k.least:
        k.least, k.ties = left, 0
    k.ties += left == k.least
    k.left[k.used] = left
    t = &k.active[k.used]
    k.used += 1
    k.known = False
    t.begun, t.size = k.last, size
    t.worker, t.place, t.first, t.count = worker, place, first, count
    k.starts += 1
    k.bytes += size


cdef inline void link_pass(Link* k, double now) noexcept nogil:
    """`link_advance`, at once on an idle link."""
    if k.used + k.landing_used > 0:
        link_advance(k, now)
        return
    k.done_used = 0
    if now > k.last:
        k.last = now


cdef inline double link_next(Link* k) noexcept nogil:
    """`link_earliest`, worked out once after each change."""
    if k.used + k.landing_used == 0:
        return INFINITY
    return k.next if k.known else link_earliest(k)
