# cython: language_level=3
"""Tiers of KV offload as objects: what they are made from, their counters, and the checks that tests run.

Everything that happens in a simulation is in `_offload` and `_offload_pass`.
"""
from libc.math cimport INFINITY

import numpy as np

from mocker._common cimport NIL, int32_t, int64_t, uint64_t
from mocker._engine cimport EngineCore
from mocker._offload cimport (
    LEASE_FREE, LEASE_G2, LEASE_UP, Lease, Offload, World, offload_deadline, offload_free, offload_init,
    world_free, world_init)
from mocker._offload_links cimport Link, link_init, link_next
from mocker._offload_pass cimport tiers_make_room
from mocker._offload_tiers cimport MOST_REQUESTS, Run, Tier, tier_init
from mocker._record cimport Recorder

MAX_WORKERS = 1024
POLICIES = "lru", "lfu", "s3fifo", "belady"


cdef dict link_counters(Link* k):
    return {"bytes": int(k.bytes), "transfers": k.starts, "busy_ms": k.busy, "delay_ms": k.delay}


cdef class OffloadWorld:
    """What the workers of one simulation share: the disk, the remote store, and where segments come from.

    Parameters
    ----------
    g3_blocks : int
        Blocks of the disk tier; 0: none.
    g4 : bool
        Whether there is a remote store, which has no limit.
    g2_to_g3, g3_to_g2, g2_to_g4, g4_to_g2 : float
        GB/s; 0: unlimited.
    latency : tuple of four floats
        ms of each transfer on them.
    """

    def __cinit__(self, int64_t g3_blocks=0, bint g4=False, double g2_to_g3=0.0, double g3_to_g2=0.0,
                  double g2_to_g4=0.0, double g4_to_g2=0.0, tuple latency=(0.0, 0.0, 0.0, 0.0)):
        world_init(&self.w)
        self.attached = []
        self.w.g3.there = g3_blocks > 0
        self.w.g4.there = g4
        self.w.g4.unbounded = True
        tier_init(&self.w.g3.pool, g3_blocks, &self.w.catalog, False)
        link_init(&self.w.g3.down, g2_to_g3, latency[0])
        link_init(&self.w.g3.up, g3_to_g2, latency[1])
        link_init(&self.w.g4.down, g2_to_g4, latency[2])
        link_init(&self.w.g4.up, g4_to_g2, latency[3])

    def __dealloc__(self):
        world_free(&self.w)

    cdef double deadline(self) noexcept nogil:
        """The earliest thing to happen below any worker; infinity if nothing is under way."""
        cdef int32_t i
        cdef double at = INFINITY, other
        for i in range(self.w.n_workers):
            other = offload_deadline(<Offload*>self.w.workers[i])
            if other < at:
                at = other
        return at

    def attach(self, EngineCore engine, *, int64_t g2_blocks, int64_t block_bytes, int64_t batch_size, double g1_to_g2,
               double g2_to_g1, bint reference, tuple latency=(0.0, 0.0), str policy="lru", int32_t min_seen=1,
               bint through=False):
        """Put tiers below an engine that has no requests yet.

        Parameters
        ----------
        engine : EngineCore
        g2_blocks : int
            Blocks of its host tier.
        block_bytes, batch_size : int
            Bytes a block, and blocks a transfer at most.
        g1_to_g2, g2_to_g1 : float
            GB/s of its links; 0: unlimited.
        reference : bool
            Lose the metadata and the pins that the reference loses.
        latency : tuple of two floats
            ms of each transfer on its links.
        policy : {"lru", "lfu", "s3fifo", "belady"}
            Who makes room in the host; the last one needs `OffloadTiers.foresee`.
        min_seen : int
            A block is copied from the so-manieth time on that the GPU evicts it.
        through : bool
            Copy blocks when they are computed, not only when they are evicted.

        Returns
        -------
        OffloadTiers
        """
        cdef OffloadTiers tiers = OffloadTiers.__new__(OffloadTiers)
        cdef Offload* o = &tiers.o
        self.seat(tiers, engine, through)
        o.reference, o.block_bytes, o.batch_size = reference, block_bytes, batch_size
        tier_init(&o.g2, g2_blocks, engine.c.pool.catalog, engine.c.pool.capture and not self.hushed)
        link_init(&o.down, g1_to_g2, latency[0])
        link_init(&o.up, g2_to_g1, latency[1])
        offload_init(o)
        o.g2.policy, o.min_seen = POLICIES.index(policy), min_seen
        engine.c.pool.keep_evicted = True
        o.through = through
        o.plain = not (reference or through or self.w.g3.there or self.w.g4.there)
        engine.c.next_own_key += <uint64_t>o.worker << 40      # generated blocks of two workers are never the same
        return tiers

    cdef int seat(self, OffloadTiers tiers, EngineCore engine, bint through) except -1:
        """Tie the next worker's tiers and its engine together."""
        cdef Offload* o = &tiers.o
        if self.w.n_workers == MAX_WORKERS:
            raise ValueError(f"KV offload simulates at most {MAX_WORKERS} workers")
        tiers.world, tiers.engine = self, engine
        o.world, o.core, o.worker = &self.w, &engine.c, self.w.n_workers
        self.w.workers[o.worker] = o
        self.w.n_workers += 1
        self.attached.append(tiers)
        engine.c.tiers = engine.c.pool.tiers = o
        engine.c.pool.make_room = tiers_make_room
        engine.c.pool.catalog = o.g2.catalog = (
            &self.w.catalog if self.w.g3.there or self.w.g4.there else &o.catalog)
        engine.c.pool.fresh = &o.fresh if through else NULL
        engine.tiers = tiers
        self.note(tiers)
        return 0

    cdef OffloadWorld empty(self, list seats, int64_t rows):
        """A world to be loaded, like this one; `seats`: engine of each worker with tiers, and if it writes through."""
        cdef OffloadTiers tiers, like
        cdef OffloadWorld made = OffloadWorld(g3_blocks=self.w.g3.there, g4=self.w.g4.there)
        made.apart, made.hushed = self.apart, self.hushed
        made.parked_ms, made.blocks = np.empty(rows), np.empty((rows, 3), np.int64)
        for i, (engine, through) in enumerate(seats):
            tiers = OffloadTiers.__new__(OffloadTiers)
            made.seat(tiers, engine, through)
            like = self.attached[i] if i < len(self.attached) else None
            if like is not None and like.o.g2.future != NULL:
                tiers.future, tiers.arrays = like.future, like.arrays
                tiers.o.g2.future = &tiers.future
        return made

    def dissolve(self):
        """The simulation is over: engines and tiers let go of each other, so that memory comes back at once."""
        cdef OffloadTiers tiers
        cdef EngineCore engine
        for tiers in self.attached:
            engine = tiers.engine
            engine.c.tiers = engine.c.pool.tiers = NULL
            engine.c.pool.make_room, engine.c.pool.catalog, engine.c.pool.fresh = NULL, NULL, NULL
            engine.tiers = tiers.engine = None
            tiers.o.core, tiers.o.n_parked = NULL, 0
        self.attached.clear()

    cdef note(self, OffloadTiers tiers):
        cdef double[::1] parked
        cdef int64_t[:, ::1] blocks
        if self.parked_ms is None or len(self.parked_ms) == 0:
            return
        parked, blocks = self.parked_ms, self.blocks
        tiers.o.row_parked, tiers.o.row_blocks = &parked[0], &blocks[0, 0]

    def part(self):
        """Let time pass below each of the workers, which share no tier, on its own."""
        cdef OffloadTiers tiers
        self.apart = True
        for tiers in self.attached:
            tiers.o.alone = True

    def hush(self):
        """Nobody asks what comes to the hosts and goes."""
        cdef OffloadTiers tiers
        self.hushed = True
        for tiers in self.attached:
            tiers.o.g2.log = False

    def record(self, Recorder recorder):
        """Let a recorder see the shared tiers, if there are any, from now on."""
        if self.w.g3.there or self.w.g4.there:
            recorder.look_below(self.w.g3.there, self.w.g4.there)
            self.recorder, self.w.timeline = recorder, &recorder.t

    def seats(self):
        """Of each worker that ever had tiers, in order: its engine, and whether blocks are written through."""
        cdef OffloadTiers tiers
        return [(tiers.engine, bool(tiers.o.through)) for tiers in self.attached]

    def collect(self, int64_t rows):
        """Note for each row how long it was parked, and how many blocks it had from the host, disk and remote store."""
        parked, blocks, n = np.zeros(rows), np.zeros((rows, 3), np.int64), 0
        if self.parked_ms is not None:         # there are more rows now
            n = len(self.parked_ms)
            parked[:n], blocks[:n] = self.parked_ms, self.blocks
        self.parked_ms, self.blocks = parked, blocks
        for tiers in self.attached:
            self.note(tiers)

    def counters(self):
        """Use of the shared tiers: "g3" and "g4" with their links."""
        out = {}
        if self.w.g3.there:
            out["g3"] = {"blocks": self.w.g3.pool.capacity, "peak_blocks": self.w.g3.pool.peak,
                         "evicted_blocks": self.w.g3.pool.evictions, "down": link_counters(&self.w.g3.down),
                         "up": link_counters(&self.w.g3.up)}
        if self.w.g4.there:
            out["g4"] = {"blocks": None, "peak_blocks": self.w.g4.objects.used, "evicted_blocks": 0,
                         "down": link_counters(&self.w.g4.down), "up": link_counters(&self.w.g4.up)}
        return out


cdef class OffloadTiers:
    """The tiers of one worker; made by `OffloadWorld.attach`."""

    def __dealloc__(self):
        offload_free(&self.o)

    def foresee(self, order, segment, parent):
        """Tell Belady's policy the requests of this worker.

        Parameters
        ----------
        order : ndarray of int64
            Their rows in the order in which they come.
        segment, parent : ndarray of int32
            As of `PathTable`: deepest segment of each row, and segment before each segment (-1: none).
        """
        cdef Future* f = &self.future
        cdef int64_t[::1] starts, uses, rows, place
        cdef int32_t[::1] deepest, before
        if len(order) > MOST_REQUESTS:
            raise ValueError(f"Belady's policy knows at most {MOST_REQUESTS:,} requests a worker, got {len(order):,}")
        at, found, places = segment[order], [], []
        while (at >= 0).any():                 # segment by segment towards the root
            here = np.flatnonzero(at >= 0)
            found.append(at[here])
            places.append(here)
            at = np.where(at >= 0, parent[at], -1)
        found = np.concatenate([np.zeros(0, np.int64), *found]).astype(np.int64)
        places = np.concatenate([np.zeros(0, np.int64), *places])
        sort = np.lexsort((places, found))
        starts = np.searchsorted(found[sort], np.arange(len(parent) + 1)).astype(np.int64)
        uses = np.append(places[sort], 0).astype(np.int64)
        rows = np.append(order, 0).astype(np.int64)
        where = np.full(len(segment) + 1, -1, np.int64)
        where[order] = np.arange(len(order))
        place, deepest, before = where, np.append(segment, 0).astype(np.int32), np.append(parent, 0).astype(np.int32)
        self.arrays = starts, uses, rows, place, deepest, before
        f.segments, f.rows, f.clock = len(parent), len(segment), 0
        f.starts, f.uses, f.order, f.place = &starts[0], &uses[0], &rows[0], &place[0]
        f.segment, f.parent = &deepest[0], &before[0]
        self.o.g2.future = f

    def counters(self):
        """Use of the host tier and its links, and what requests had from below."""
        cdef Offload* o = &self.o
        return {"blocks": o.g2.capacity, "block_bytes": o.block_bytes, "peak_blocks": o.g2.peak,
                "evicted_blocks": o.g2.evictions,
                "down": link_counters(&o.down), "up": link_counters(&o.up), "promotions": o.n_swaps,
                "staged_promotions": o.n_staged, "blocked_allocations": o.n_blocked,
                "early_blocks": o.n_through, "retried_allocations": o.n_retried, "cancelled_promotions": o.n_cancelled,
                "parked_ms": o.parked_ms, "from_g2_blocks": o.up_blocks[0], "from_g3_blocks": o.up_blocks[1],
                "from_g4_blocks": o.up_blocks[2]}

    @property
    def deadline(self):
        """When something below finishes next, ms; None if nothing is under way."""
        cdef double at = offload_deadline(&self.o)
        return at if at < INFINITY else None

    @property
    def parked(self):
        """Handles of the parked requests in the order of their parking."""
        cdef int64_t i
        return [self.o.core.req[self.o.leases[self.o.parked[i]].slot].id for i in range(self.o.n_parked)]

    def books(self):
        """(GPU slots held by copies and promotions, GPU blocks kept for promotions, leases alive, host blocks pinned,
        host slots promised)."""
        cdef int64_t i, slots = 0, prefix = 0, alive = 0
        cdef Lease* e
        for i in range(self.o.leases_used):
            e = &self.o.leases[i]
            if e.kind == LEASE_FREE:
                continue
            alive += 1
            if e.kind == LEASE_G2 or e.kind == LEASE_UP:
                slots += e.slots
                prefix += e.prefix
        return slots, prefix, alive, self.o.g2.pinned, self.o.g2.reserved

    def check(self):
        """Verify the tiers' books; AssertionError says what is wrong. O(everything)."""
        cdef World* w = &self.world.w
        check_tier("host", &self.o.g2)
        if self.o.moving.blocks > 0 and link_next(&self.o.down) == INFINITY:
            raise AssertionError(f"{self.o.moving.blocks} blocks are said to move to the host, and nothing does")
        if w.g3.there:
            check_tier("disk", &w.g3.pool)


cdef check_tier(str name, Tier* t):
    cdef int64_t i, inactive = 0, pinned = 0, leaves = 0, small = 0
    cdef int32_t run, down
    cdef Run* r
    cdef bint held
    for i in range(t.first_cap):
        run = t.first[i]
        down = NIL                             # the run before
        while run != NIL:
            r = &t.runs[run]
            if (r.seg != i or r.up != down or r.start >= r.end
                    or (down != NIL and t.runs[down].end > r.start)):
                raise AssertionError(f"{name}: run {r.start} of segment {i} is misplaced")
            if r.pins < 0 and (r.kids == 0 or r.linked or r.end - r.start != 1):
                raise AssertionError(f"{name}: ghost {r.start} of segment {i} stands for nothing")
            inactive += r.end - r.start if r.pins == 0 else 0
            small += r.end - r.start if r.pins == 0 and r.queue == 0 else 0
            pinned += r.end - r.start if r.pins > 0 else 0
            down, run = run, r.down
            held = r.kids > 0 or (run != NIL and t.runs[run].start == r.end and t.runs[run].linked)
            if (t.heap_at[down] >= 0) != (r.pins == 0 and not held) or (r.pins == 0 and not r.linked):
                raise AssertionError(f"{name}: block {r.end - 1} of segment {i} is misplaced among the evictable")
            leaves += t.heap_at[down] >= 0
            if t.heap_at[down] >= 0 and t.heaps[r.queue].items[t.heap_at[down]].run != down:
                raise AssertionError(f"{name}: block {r.end - 1} of segment {i} is misplaced in the heap")
    if leaves != t.heaps[0].used + t.heaps[1].used:
        raise AssertionError(f"{name}: {t.heaps[0].used} + {t.heaps[1].used} runs in the eviction order, not {leaves}")
    if small != t.small:
        raise AssertionError(f"{name}: {small} blocks in the small queue, counted {t.small}")
    if inactive != t.inactive or pinned != t.pinned:
        raise AssertionError(f"{name}: {inactive} inactive, {pinned} pinned; counted {t.inactive}, {t.pinned}")
    if t.free < 0 or t.reserved < 0 or t.free + t.inactive + t.pinned > t.capacity:
        raise AssertionError(f"{name}: {t.free} free, {t.inactive} inactive, {t.pinned} pinned of {t.capacity} slots")
