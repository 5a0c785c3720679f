# Data dictionary of KV offload: copies down and promotions under way, and the tiers of one worker and of all.
from mocker._common cimport NIL, int32_t, int64_t, uint8_t, uint64_t
from mocker._core cimport Core
from mocker._kv cimport Path
from mocker._offload_blocks cimport Block, BlockSet, Catalog, Spans
from mocker._offload_links cimport Link, link_next, link_pass
from mocker._offload_marks cimport Marks
from mocker._offload_tiers cimport Tier
from mocker._record cimport Timeline


cdef enum LeaseKind:
    LEASE_FREE = 0
    LEASE_G2 = 1                   # copy from the GPU to the host; holds the evicted blocks' slots
    LEASE_G3 = 2                   # copy from the host to the disk
    LEASE_G4 = 3                   # copy from the host to the remote store
    LEASE_UP = 4                   # promotion to the GPU
    LEASE_THROUGH = 5              # copy to the host of blocks that are still on the GPU

cdef enum LeaseStatus:             # of a promotion
    UP_PENDING = 0
    UP_COMPLETED = 1
    UP_CANCELLED = 2

cdef enum Stage:                   # of the blocks of a promotion on their way to the host
    STAGE_NONE = 0                 # they are there
    STAGE_G4 = 1                   # those of the remote store are coming
    STAGE_G3 = 2                   # those of the disk are coming
    STAGE_DONE = 3
    STAGE_FAILED = 4               # no room in the host


cdef struct Lease:
    int kind                       # LeaseKind
    int64_t serial                 # tells it from earlier ones in the same place; 0: none
    int32_t next_free
    Spans blocks                   # copies: what passed the filters, cut in batches; promotions: what is to come up
    Spans other                    # copies to the host: evicted blocks that are not copied
    Spans arrived                  # copied, not booked yet; empty if nobody asks which
    int64_t n                      # promotions: of `blocks`, so many from the first one on still come
    int64_t n_arrived              # blocks copied, not booked yet
    bint ready                     # in the list of those with something to book
    int64_t failed                 # not copied for want of room, not booked yet
    int64_t freed                  # blocks of `slots` that an earlier copy has read, not booked yet
    int64_t outstanding            # blocks under way or waiting
    int64_t slots                  # GPU slots that it holds
    # promotions
    int32_t slot                   # request
    int32_t skip                   # blocks before the first one that comes up
    int64_t prefix                 # of them kept on the GPU
    int status                     # LeaseStatus
    int stage                      # Stage
    bint cancel
    bint started                   # the copy to the GPU is under way, or there is none
    int64_t promised               # host slots
    int64_t count                  # blocks that come up
    int64_t n2                     # of them found in the host, on the disk, in the remote store
    int64_t n3
    int64_t n4
    double since                   # when the request was parked, ms
    Path path                      # of a cancelled request


cdef struct Batch:
    int32_t place                  # lease
    bint prepared
    bint marked                    # its blocks are in `pending`
    int64_t first                  # of the lease's spans
    int64_t spans
    int64_t blocks


cdef struct Lane:                  # batches of one worker in one direction down
    int64_t limit                  # at a time
    int64_t active
    BlockSet* pending              # asked for and not yet prepared for transfer
    Batch* queue                   # [head, used)
    int64_t cap
    int64_t head
    int64_t used


cdef struct Shared:                # disk or remote store, of all workers
    bint there
    bint unbounded                 # an object store: `objects` instead of `pool`
    Tier pool
    BlockSet objects
    BlockSet pending
    Link down
    Link up
    double owed[1024]              # worker -> since when it has completions to book; infinity: none


cdef struct World:
    Catalog catalog
    Shared g3
    Shared g4
    void* workers[1024]            # Offload*
    int32_t n_workers
    Timeline* timeline             # records the shared tiers; NULL: nobody does, or there are none
    int error


cdef struct Change:                # of the host tier, for the router
    Block block
    bint created


cdef struct Wait:                  # what a request waits for
    int64_t serial                 # 0: nothing
    int32_t place
    bint unstaged                  # it is not offered the lower tiers again
    int32_t denied                 # times that it was refused the block of its next token


cdef struct Going:                 # of a running request during a fast-forward
    int64_t wants                  # number of the pass in which it wants a block
    int64_t base                   # passes that are in its numbers already


cdef struct Offload:               # tiers of one worker
    World* world
    Core* core
    int32_t worker
    bint reference                 # lose what the reference loses
    bint alone                     # nothing here concerns another worker, see `tiers_begin`
    bint strides                   # `tiers_forward` may go through passes that open blocks
    bint plain                     # no tier below the host, no write-through, not the reference's ways
    bint risen                     # a promotion has ended that is not looked at yet
    bint looked                    # time has passed here up to the start of the next pass
    int pause                      # times that it is not tried
    Going* places                  # [n_running] scratch of it
    int64_t places_cap
    int64_t block_bytes
    int64_t batch_size
    int32_t min_seen               # times that a block is evicted from the GPU until it is copied
    Marks seen                     # how often blocks were evicted and not copied
    bint through                   # write-through: blocks are copied when they are computed
    Spans fresh                    # registered on the GPU, to be copied then
    double fresh_at                # ms, infinity: nobody knows yet
    Marks moving                   # write-through: what is copied to the host: lease with its slot + 2, 1: none
    double now                     # ms, in whole microseconds
    double at                      # the same as it is
    Catalog catalog                # unless the world's is used
    Tier g2
    Link down
    Link up
    BlockSet pending
    Lane lane
    Lane lane3
    Lane lane4
    Lease* leases                  # [leases_used]
    int64_t leases_cap
    int64_t leases_used
    int32_t free_lease
    int64_t serial
    BlockSet known                 # reference: blocks whose metadata is there
    Change* changes                # [changes_used] to tell the router
    int64_t changes_cap
    int64_t changes_used
    Spans chain                    # scratch
    int64_t booked[2]              # promises of host and disk slots that the tick has booked
    int64_t* chain_ends
    int64_t chain_ends_cap
    int32_t* ready                 # [n_ready] copies with something to book, by place
    int64_t ready_cap
    int64_t n_ready
    int64_t n_dropped              # cancelled promotions that still hold something
    int64_t n_starved              # requests that were refused too often
    Spans plan                     # blocks that a promotion would bring up
    int64_t plan_promised          # 0: they are pinned
    int32_t* parked                # [n_parked] leases of parked requests, in the order of parking
    int64_t parked_cap
    int64_t n_parked
    int32_t* done                  # scratch
    int64_t done_cap
    Wait* waits                    # [waits_cap] by request slot
    int64_t waits_cap
    int64_t n_swaps                # promotions started
    int64_t n_staged               # of them through the host
    int64_t n_blocked              # allocations that had to wait
    int64_t n_retried              # allocations that found their slots free after all
    int64_t n_cancelled
    int64_t n_through              # blocks copied while they were on the GPU
    int64_t up_blocks[3]           # blocks that came up, by the tier that they were found in
    double parked_ms               # all parked requests together
    double* row_parked             # [rows] ms parked; NULL: nobody asks
    int64_t* row_blocks            # [3 * rows] blocks that came up
    int error


cdef enum:
    DENIALS = 16                   # refusals of one token's block after which nobody is admitted


cdef bint offload_tells(Offload* o) noexcept nogil
cdef int64_t offload_tick(Offload* o, double now) noexcept nogil
cdef double offload_deadline(Offload* o) noexcept nogil
cdef void offload_computed(Offload* o, double at) noexcept nogil
cdef void offload_sync(Offload* o, Link* k) noexcept nogil
cdef void offload_init(Offload* o) noexcept nogil
cdef void offload_free(Offload* o) noexcept nogil
cdef void world_init(World* w) noexcept nogil
cdef void world_free(World* w) noexcept nogil
cdef int offload_error(Offload* o) noexcept nogil


cdef inline double whole_us(double ms) noexcept nogil:
    return <double>(<int64_t>(ms * 1000.0)) / 1000.0 if ms > 0.0 else 0.0


cdef inline void clock_set(Offload* o, double now) noexcept nogil:
    """Time passes for a lone worker, and nothing ends."""
    o.now = whole_us(now)
    o.at = now


cdef inline bint must_wait(Core* c, int32_t slot) noexcept nogil:
    """Whether the request waits for slots that a copy to the host still holds."""
    cdef Offload* o = <Offload*>c.tiers
    cdef Wait* w
    if slot >= o.waits_cap:
        return False
    w = &o.waits[slot]
    if w.serial == 0:
        return False
    if o.leases[w.place].serial != w.serial:
        w.serial = 0
        return False
    return True


cdef inline void granted(Core* c, int32_t slot) noexcept nogil:
    """The request has the block of its next token."""
    cdef Offload* o = <Offload*>c.tiers
    if slot < o.waits_cap:
        o.n_starved -= o.waits[slot].denied >= DENIALS
        o.waits[slot].denied = 0


cdef inline void forget_wait(Core* c, int32_t slot) noexcept nogil:
    cdef Offload* o = <Offload*>c.tiers
    if slot < o.waits_cap:
        o.waits[slot].serial = 0
        o.waits[slot].unstaged = False
        granted(c, slot)


cdef inline double soon(double due) noexcept nogil:
    """From when on links are looked at if something ends at `due`."""
    return due - 1e-6


cdef inline double offload_due(Offload* o) noexcept nogil:
    """`offload_deadline`, at once where no tier is shared."""
    cdef double at, other
    if o.world.g3.there or o.world.g4.there:
        return offload_deadline(o)
    at, other = link_next(&o.down), link_next(&o.up)
    return min(min(at, other), o.fresh_at)


cdef inline bint offload_risen(Offload* o) noexcept nogil:
    """Whether blocks have come up for somebody who is still parked, as an allocation's look has found."""
    return o.risen and o.n_parked > 0


cdef inline bint offload_stirs(Offload* o) noexcept nogil:
    """Whether a look may find something new though nothing is due: to be booked, or come from a tier of all."""
    return (o.n_ready > 0 or offload_risen(o)
            or (o.n_parked + o.n_dropped > 0 and (o.world.g3.there or o.world.g4.there)))


cdef inline bint offload_still(Offload* o, double now) noexcept nogil:
    """Let time pass up to `now` if nothing ends by then, and nothing waits to be booked."""
    if (o.n_ready > 0 or offload_risen(o) or o.n_dropped > 0 or o.fresh.blocks > 0 or o.g2.changes_used > 0
            or o.world.g3.there or o.world.g4.there
            or soon(link_next(&o.down)) <= now or soon(link_next(&o.up)) <= now):
        return False
    o.now = whole_us(now)
    if now > o.at:
        o.at = now
    if o.down.last < now:
        link_pass(&o.down, now)
    if o.up.last < now:
        link_pass(&o.up, now)
    o.down.done_used = o.up.done_used = 0
    return True
