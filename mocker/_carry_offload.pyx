# cython: language_level=3
"""State of the tiers below the GPU: every array that `world_free`, `offload_free` and `lower_free` free. O(what the
tiers hold, transfers, and segments that were ever resident)."""
from libc.string cimport memcpy

from mocker._carry cimport LIST, Carrier, carry, carry_array
from mocker._carry_engines cimport path_carry
from mocker._common cimport int32_t, int64_t, uint8_t
from mocker._core cimport Core
from mocker._offload cimport Batch, Change, Going, Lane, Lease, Offload, Shared, Wait, World
from mocker._offload_blocks cimport Block, BlockSet, Catalog, Origin, Parent, Place, Span, Spans
from mocker._offload_links cimport Link, Transfer
from mocker._offload_marks cimport Mark, Marks
from mocker._offload_tiers cimport Future, Leaf, Run, Tier
from mocker._record cimport Timeline
from mocker._router cimport Lower
from mocker._router_tiers cimport LOWER_TIERS


cdef void spans_carry(Carrier* io, Spans* s) noexcept nogil:
    carry_array(io, <void**>&s.items, s.used, s.cap, sizeof(Span))


cdef void set_carry(Carrier* io, BlockSet* s) noexcept nogil:
    cdef int64_t places = <int64_t>s.mask + 1
    carry_array(io, <void**>&s.items, places, places, sizeof(Block))
    carry_array(io, <void**>&s.full, places, places, sizeof(uint8_t))


cdef void marks_carry(Carrier* io, Marks* m) noexcept nogil:
    carry_array(io, <void**>&m.items, m.used, m.cap, sizeof(Mark))
    carry_array(io, <void**>&m.first, m.first_cap, m.first_cap, sizeof(int32_t))


cdef void catalog_carry(Carrier* io, Catalog* c) noexcept nogil:
    cdef int64_t places = <int64_t>c.numbers.mask + 1
    cdef int i
    carry_array(io, <void**>&c.items, c.used, c.cap, sizeof(Origin))
    carry_array(io, <void**>&c.parents, c.used, c.cap, sizeof(Parent))
    for i in range(2):
        carry_array(io, <void**>&c.direct[i].numbers, c.direct[i].cap, c.direct[i].cap, sizeof(int32_t))
    carry_array(io, <void**>&c.numbers.places, places, places, sizeof(Place))


cdef void link_carry(Carrier* io, Link* k) noexcept nogil:
    carry_array(io, <void**>&k.active, k.used, k.cap, sizeof(Transfer))
    carry_array(io, <void**>&k.left, k.used, k.cap, sizeof(double))
    carry_array(io, <void**>&k.landing, k.landing_used, k.landing_cap, sizeof(Transfer))
    carry_array(io, <void**>&k.done, k.done_used, k.done_cap, sizeof(Transfer))


cdef void tier_carry(Carrier* io, Tier* t, Catalog* catalog, Future* future) noexcept nogil:
    """The arrays of a tier; its catalog and its future are those given."""
    cdef int i
    t.catalog, t.future = catalog, future
    carry_array(io, <void**>&t.runs, t.runs_used, t.runs_cap, sizeof(Run))
    carry_array(io, <void**>&t.heap_at, t.runs_used, t.runs_cap, sizeof(int32_t))
    carry_array(io, <void**>&t.first, t.first_cap, t.first_cap, sizeof(int32_t))
    for i in range(2):
        carry_array(io, <void**>&t.heaps[i].items, t.heaps[i].used, t.heaps[i].cap, sizeof(Leaf))
    marks_carry(io, &t.ghosts)
    carry_array(io, <void**>&t.changes, t.changes_used, t.changes_cap, sizeof(Block))


cdef void shared_carry(Carrier* io, Shared* s, Catalog* catalog) noexcept nogil:
    tier_carry(io, &s.pool, catalog, NULL)
    set_carry(io, &s.objects)
    set_carry(io, &s.pending)
    link_carry(io, &s.down)
    link_carry(io, &s.up)


cdef void lane_carry(Carrier* io, Lane* lane, BlockSet* pending) noexcept nogil:
    lane.pending = pending
    carry_array(io, <void**>&lane.queue, lane.used, lane.cap, sizeof(Batch))


cdef void offload_carry(Carrier* io, Offload* o) noexcept nogil:
    """The tiers of a worker; loaded ones keep their place below their core, which is loaded before."""
    cdef int64_t i
    cdef Lease* e
    cdef World* world = o.world
    cdef Core* core = o.core
    cdef Catalog* catalog = o.g2.catalog
    cdef Future* future = o.g2.future
    cdef double* row_parked = o.row_parked
    cdef int64_t* row_blocks = o.row_blocks
    cdef bint strides = o.strides
    carry(io, o, sizeof(Offload))
    o.world, o.core, o.row_parked, o.row_blocks, o.strides = world, core, row_parked, row_blocks, strides
    marks_carry(io, &o.seen)
    spans_carry(io, &o.fresh)
    marks_carry(io, &o.moving)
    catalog_carry(io, &o.catalog)
    tier_carry(io, &o.g2, catalog, future)
    if future != NULL:
        carry(io, &future.clock, sizeof(int64_t))
    link_carry(io, &o.down)
    link_carry(io, &o.up)
    set_carry(io, &o.pending)
    lane_carry(io, &o.lane, &o.pending)
    lane_carry(io, &o.lane3, &world.g3.pending)
    lane_carry(io, &o.lane4, &world.g4.pending)
    carry_array(io, <void**>&o.leases, o.leases_used, o.leases_cap, sizeof(Lease))
    if o.leases == NULL:
        o.leases_used = 0
    for i in range(0 if io.mode == LIST else o.leases_used):       # arrays are not listed
        e = &o.leases[i]
        spans_carry(io, &e.blocks)
        spans_carry(io, &e.other)
        spans_carry(io, &e.arrived)
        path_carry(io, &e.path, core.tokens_per_block)
    set_carry(io, &o.known)
    carry_array(io, <void**>&o.changes, o.changes_used, o.changes_cap, sizeof(Change))
    spans_carry(io, &o.chain)
    carry_array(io, <void**>&o.chain_ends, o.chain_ends_cap, o.chain_ends_cap, sizeof(int64_t))
    carry_array(io, <void**>&o.ready, o.n_ready, o.ready_cap, sizeof(int32_t))
    spans_carry(io, &o.plan)
    carry_array(io, <void**>&o.parked, o.n_parked, o.parked_cap, sizeof(int32_t))
    carry_array(io, <void**>&o.done, 0, o.done_cap, sizeof(int32_t))
    carry_array(io, <void**>&o.places, 0, o.places_cap, sizeof(Going))
    carry_array(io, <void**>&o.waits, o.waits_cap, o.waits_cap, sizeof(Wait))


cdef void world_carry(Carrier* io, World* w) noexcept nogil:
    """All tiers of a simulation; loaded ones keep their cores and their recorder."""
    cdef void* workers[1024]
    cdef Timeline* timeline = w.timeline
    cdef int32_t i, n = w.n_workers
    memcpy(workers, w.workers, sizeof(workers))
    carry(io, w, sizeof(World))
    memcpy(w.workers, workers, sizeof(workers))
    w.timeline, w.n_workers = timeline, n
    catalog_carry(io, &w.catalog)
    shared_carry(io, &w.g3, &w.catalog)
    shared_carry(io, &w.g4, NULL)
    for i in range(n):
        offload_carry(io, <Offload*>w.workers[i])


cdef void lower_carry(Carrier* io, Lower* b) noexcept nogil:
    """What a router knows of the tiers; a loaded one keeps the world that it looks into."""
    cdef World* world = b.world
    cdef int64_t i
    carry(io, b, sizeof(Lower))
    b.world = world
    carry_array(io, <void**>&b.sets, LOWER_TIERS * b.cap, LOWER_TIERS * b.cap, sizeof(BlockSet))
    if b.sets == NULL:
        b.cap = 0
    for i in range(0 if io.mode == LIST else LOWER_TIERS * b.cap):
        set_carry(io, &b.sets[i])
    carry_array(io, <void**>&b.host, b.cap, b.cap, sizeof(int32_t))
    carry_array(io, <void**>&b.disk, b.cap, b.cap, sizeof(int32_t))
