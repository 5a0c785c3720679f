"""KV offload of one worker: host tier G2, disk tier G3 and remote tier G4 (both shared), in virtual time.

Order of everything that happens in one tick: the worker's links (to the host, from it), then the disk's, then the
remote store's; on one link by time. Batches start in the order in which they were asked for. Leases
progress in the order of their places. `reference`: the metadata and pins that the reference loses, too.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from .offload_links import Link, earliest
from .offload_order import start_order
from .offload_tiers import TIERS, Places, Tier
from .sequence import Full

PENDING, COMPLETED, CANCELLED = "pending", "completed", "cancelled"


@dataclass
class Batch:
    lease: "Lease"
    blocks: list[Full]
    prepared: bool = False


class Lane:
    """Batches of one direction of one worker on their way down: at most `limit` at a time, the others wait."""

    def __init__(self, limit: int, pending: set[int]) -> None:
        self.limit = limit
        self.pending = pending  # hashes asked for and not yet prepared for transfer
        self.waiting: list[Batch] = []
        self.active = 0

    def add(self, lease: "Lease", blocks: list[Full], size: int, reference: bool = False) -> None:
        """In order, but for the reference's own."""
        batches = [Batch(lease, blocks[first : first + size]) for first in range(0, len(blocks), size)]
        if reference and len(batches) > 1:
            order = start_order(len(batches), self.limit - self.active, len(self.waiting))
            batches = [batches[number] for number in order]
        self.waiting += batches

    def pump(self, start) -> None:
        """Start what may start; the next one is prepared, whether it may start or not."""
        while self.waiting:
            batch = self.waiting[0]
            if not batch.prepared:
                batch.prepared = True
                for block in batch.blocks:
                    self.pending.discard(block.seq_hash)
            if self.active >= self.limit:
                return
            self.waiting.pop(0)
            if start(batch):
                self.active += 1


@dataclass(eq=False)
class Lease:
    """A copy downwards under way. `kind` is the tier that it goes to."""

    kind: str
    outstanding: int = 0  # blocks that passed the filters and have not arrived
    slots: int = 0  # G1 slots held, one per evicted block
    freed: int = 0  # of them those of blocks that an earlier copy has read, not booked yet
    evicted: list[Full] = field(default_factory=list)
    arrived: list[Full] = field(default_factory=list)  # not booked yet
    failed: int = 0  # not booked yet
    copied: set[int] = field(default_factory=set)


@dataclass(eq=False)
class SwapIn:
    """A promotion under way; `owned` G2 blocks are pinned, `slots` G1 slots and the G1 blocks `prefix` are kept."""

    slots: int
    prefix: list[Full]
    status: str = PENDING
    cancel_requested: bool = False
    count: int = 0
    owned: list[Full] = field(default_factory=list)
    session: "Session | None" = None
    promised: int = 0
    started: bool = False
    tiers: tuple[int, int, int] = (0, 0, 0)  # blocks from G2, G3, G4


@dataclass(eq=False)
class Session:
    """Blocks of G3 and G4 on their way to G2: first all from G4 at once, then all from G3."""

    lookup: list[Full]
    g2: list[Full]
    g3: list[Full]
    g4: list[Full] = field(default_factory=list)
    done: bool = False
    failed: bool = False


@dataclass
class Plan:
    blocks: int
    owned: list[Full]  # pinned, when no staging is needed
    lookup: list[Full] = field(default_factory=list)  # to be staged
    promised: int = 0


class SharedTier:
    """G3 or G4: one for all workers, with one link pair."""

    def __init__(self, down: tuple[float, float], up: tuple[float, float], capacity: int | None) -> None:
        self.pool = Tier(capacity) if capacity is not None else None  # None: unbounded object store
        self.objects: set[int] = set()
        self.pending: set[int] = set()
        self.down = Link(*down)
        self.up = Link(*up)
        self.owed: dict[int, float] = {}  # worker -> since when it has completions that it has not booked

    def __contains__(self, block: Full) -> bool:
        return block.seq_hash in self.objects if self.pool is None else block in self.pool

    def drain(self, now: float, engine: "OffloadEngine") -> None:
        """Effects are at once, whoever owns the transfer; an owner that is not ticking books them at its next tick."""
        done = [(owner, True, what) for owner, what in self.down.advance(now)]
        done += [(owner, False, what) for owner, what in self.up.advance(now)]
        self.owed.pop(engine.worker_id, None)
        for owner, is_down, what in done:
            if owner is not engine:
                self.owed[owner.worker_id] = min(self.owed.get(owner.worker_id, now), now)
            if is_down:
                owner.copied_down(self, what)
            else:
                owner.staged_up(what)
        for owner in sorted({owner for owner, is_down, _ in done if is_down}, key=lambda o: o.worker_id):
            owner.pump_shared()


def floor_us(ms: float) -> float:
    return int(max(ms, 0.0) * 1000.0) / 1000.0


class OffloadEngine:
    def __init__(self, config: dict, worker_id: int, shared: dict, reference: bool) -> None:
        self.worker_id = worker_id
        self.reference = reference
        self.block_bytes: int = config["block_bytes"]
        self.batch_size: int = config["batch_size"]
        self.now = 0.0
        self.g2 = TIERS[config.get("policy", "lru")](config["g2"])
        self.down = Link(*config["g1_to_g2"])
        self.up = Link(*config["g2_to_g1"])
        self.lane = Lane(self.batch_size, set())
        self.g3: SharedTier | None = None
        self.g4: SharedTier | None = None
        if config["g3"]:
            self.g3 = shared.setdefault("g3", SharedTier(config["g2_to_g3"], config["g3_to_g2"], config["g3"]))
            self.lane3 = Lane(1, self.g3.pending)
        if config["g4"]:
            self.g4 = shared.setdefault("g4", SharedTier(config["g2_to_g4"], config["g4_to_g2"], None))
            self.lane4 = Lane(self.batch_size, self.g4.pending)
        self.leases = Places()
        self.seen: list[set[int]] = [set() for _ in range(config.get("min_seen", 1) - 1)]
        self.known: set[int] = set()  # reference: hashes with metadata
        self.through: bool = config.get("through", False)
        self.fresh: list[Full] = []  # write-through: registered in G1, to be copied when they are computed
        self.fresh_at = math.inf  # ms when they are
        self.moving: dict[int, Lease | None] = {}  # write-through: what is copied; the lease that holds its slot
        self.resident: Callable[[Full], bool] = lambda block: True  # in G1
        self.events: list[tuple[str, Full]] = []  # of G2, for the KV manager
        self.counts = dict.fromkeys(
            ("swap_ins", "blocked", "retries", "cancelled", "staged", "through", "claimed"), 0)

    # ---- G1 -> G2

    def enqueue(self, evicted: list[Full]) -> tuple[Lease | None, int]:
        """Blocks evicted from G1 whose slots are kept: (lease that holds them, 0) or (None, slots released)."""
        self.known |= {block.seq_hash for block in evicted}
        lease = Lease("g2", slots=len(evicted), evicted=list(evicted))
        passed = []
        claimed = 0
        for block in evicted:
            if block in self.g2 or block.seq_hash in self.lane.pending:
                continue
            if block.seq_hash in self.moving:
                if self.moving[block.seq_hash] is None:  # its slot is held until the copy has read it
                    self.moving[block.seq_hash] = lease
                    claimed += 1
                    self.counts["claimed"] += 1
            elif self._seen(block, count=True) and self.g2.promise(1):
                self._ask(block, lease)
                passed.append(block)
        lease.outstanding = len(passed) + claimed
        self.leases.add(lease)
        self.lane.add(lease, passed, self.batch_size, self.reference)
        self.lane.pump(self._start_down)
        if lease.outstanding > 0:
            self.counts["blocked"] += 1
            return lease, 0
        self.counts["retries"] += 1
        return None, self.tick(self.now)

    def _start_down(self, batch: Batch) -> bool:
        if not self.g2.take(len(batch.blocks)):
            self._fail(batch)
            return False
        self.down.start(self.now, len(batch.blocks) * self.block_bytes, batch)
        return True

    def _ask(self, block: Full, holder: Lease | None) -> None:
        if self.through:
            self.moving[block.seq_hash] = holder
        else:
            self.lane.pending.add(block.seq_hash)

    def _seen(self, block: Full, count: bool) -> bool:
        """Whether the block was evicted so often that it is copied; evictions count."""
        for seen in self.seen:
            if block.seq_hash not in seen:
                if count:
                    seen.add(block.seq_hash)
                return False
        return True

    def _fail(self, batch: Batch) -> None:
        batch.lease.outstanding -= len(batch.blocks)
        batch.lease.failed += len(batch.blocks)
        if batch.lease.kind == "g2":
            self._read(batch)

    def _read(self, batch: Batch) -> None:
        """A batch to the host needs its G1 slots no more: those of blocks evicted meanwhile can go."""
        for block in batch.blocks if self.through else []:
            holder = self.moving.pop(block.seq_hash)
            if holder is not None and holder is not batch.lease:
                holder.outstanding -= 1
                holder.freed += 1

    def computed(self, at: float) -> None:
        """What was registered in G1 so far is computed at `at`."""
        if self.fresh and self.fresh_at == math.inf:
            self.fresh_at = at

    def _write_through(self) -> None:
        """Copy the blocks that have been computed and are still in G1, as far as there is room."""
        lease, passed = Lease("g2"), []
        for block in self.fresh:
            if (self.resident(block) and block not in self.g2 and block.seq_hash not in self.moving
                    and self._seen(block, count=False) and self.g2.promise(1)):
                self._ask(block, None)
                passed.append(block)
        self.fresh, self.fresh_at = [], math.inf
        if passed:
            self.counts["through"] += len(passed)
            lease.outstanding = len(passed)
            self.leases.add(lease)
            self.lane.add(lease, passed, self.batch_size)
            self.lane.pump(self._start_down)

    # ---- time

    def tick(self, now: float) -> int:
        """Book what finished by `now`; G1 slots released. Copies of computed blocks start when these are."""
        released = 0
        while self.fresh and self.fresh_at < now:
            released += self._tick(self.fresh_at)
        return released + self._tick(now)

    def _tick(self, now: float) -> int:
        self.now = floor_us(now)
        for batch in self.down.advance(now):
            for block in batch.blocks:
                self.g2.register(block)
            self.g2.unpin(batch.blocks)
            self._arrived(batch)
            self.lane.active -= 1
            if self.reference:  # its task ends, and the next one may start before another registers anything
                self.lane.pump(self._start_down)
        for swap in self.up.advance(now):
            swap.status = COMPLETED
        self.lane.pump(self._start_down)
        for tier in (self.g3, self.g4):
            if tier is not None:
                tier.drain(now, self)

        chains, released, abandoned = [], 0, []
        promised = {"g2": 0, "g3": 0, "g4": 0}
        for lease in self.leases:
            if not isinstance(lease, Lease) or not (
                    lease.arrived or lease.failed or lease.freed or lease.outstanding == 0):
                continue
            booked = len(lease.arrived) + lease.failed
            promised[lease.kind] += booked
            if lease.kind == "g2":
                given = min(booked, lease.slots) + lease.freed  # write-through holds none
                released += given
                lease.slots -= given
                if lease.arrived:
                    chains.append(lease.arrived)
                if lease.outstanding == 0:
                    released += lease.slots
                    lease.slots = 0
                    abandoned += [b.seq_hash for b in lease.evicted if b.seq_hash not in lease.copied]
            lease.arrived, lease.failed, lease.freed = [], 0, 0
        for blocks in chains:
            for tier, lane in self._lower():
                self._chain(tier, lane, blocks)
        self._pump_staged(now)
        self._collect()
        self.g2.reserved -= promised["g2"]
        if self.g3 is not None:
            self.g3.pool.reserved -= promised["g3"]
        for lease in list(self.leases):
            if isinstance(lease, Lease) and lease.outstanding == 0 and not (
                    lease.arrived or lease.failed or lease.freed):
                self.leases.remove(lease)
        if self.reference:
            self.known -= set(abandoned)
        self._reap()
        if self.fresh and self.fresh_at <= now:
            self._write_through()
        return released

    def _arrived(self, batch: Batch) -> None:
        batch.lease.arrived += batch.blocks
        batch.lease.copied |= {block.seq_hash for block in batch.blocks}
        batch.lease.outstanding -= len(batch.blocks)
        if batch.lease.kind == "g2":
            self._read(batch)

    def deadline(self) -> float | None:
        """When something finishes next."""
        times = [self.down.earliest(), self.up.earliest(), self.fresh_at if self.fresh_at < math.inf else None]
        for tier in (self.g3, self.g4):
            if tier is not None:
                times += [tier.down.earliest(), tier.up.earliest(), tier.owed.get(self.worker_id)]
        return earliest(*times)

    def _collect(self) -> None:
        for kind, block in self.g2.log:
            if not self.reference:
                self.events.append((kind, block))
            elif block.seq_hash in self.known:
                self.events.append((kind, block))
                if kind == "removed":
                    self.known.discard(block.seq_hash)
        self.g2.log = []

    def take_events(self) -> list[tuple[str, Full]]:
        events, self.events = self.events, []
        return events

    # ---- G2 -> G3, G2 -> G4

    def _lower(self) -> list[tuple[SharedTier, Lane]]:
        tiers = []
        if self.g3 is not None:
            tiers.append((self.g3, self.lane3))
        if self.g4 is not None:
            tiers.append((self.g4, self.lane4))
        return tiers

    def _chain(self, tier: SharedTier, lane: Lane, blocks: list[Full]) -> None:
        """Copy what has just reached G2 further down; it stays pinned in G2 until then."""
        lease = Lease("g3" if tier.pool is not None else "g4")
        sources = [block for block in blocks if self.g2.pin(block)]
        passed = []
        for block in sources:
            wanted = block not in tier and block.seq_hash not in tier.pending
            if wanted and (tier.pool is None or tier.pool.promise(1)):
                tier.pending.add(block.seq_hash)
                passed.append(block)
            else:
                self.g2.unpin([block])
        lease.outstanding = len(passed)
        self.leases.add(lease)
        lane.add(lease, passed, self.batch_size, self.reference)
        self.pump_shared()

    def pump_shared(self) -> None:
        for tier, lane in self._lower():
            lane.pump(lambda batch, tier=tier: self._start_shared(tier, batch))

    def _start_shared(self, tier: SharedTier, batch: Batch) -> bool:
        if tier.pool is not None and not tier.pool.take(len(batch.blocks)):
            self._fail(batch)
            self.g2.unpin(batch.blocks)
            return False
        tier.down.start(self.now, len(batch.blocks) * self.block_bytes, (self, batch))
        return True

    def copied_down(self, tier: SharedTier, batch: Batch) -> None:
        if tier.pool is None:
            tier.objects |= {block.seq_hash for block in batch.blocks}
            self.lane4.active -= 1
        else:
            for block in batch.blocks:
                tier.pool.register(block)
            tier.pool.unpin(batch.blocks)
            tier.pool.log = []
            self.lane3.active -= 1
        self.g2.unpin(batch.blocks)
        self._arrived(batch)

    # ---- promotion

    def prepare(self, wanted: list[Full], stage: bool = True) -> Plan | None:
        """The longest run of `wanted` that can come from below, not started yet; nothing found: None."""
        if self.g3 is None and self.g4 is None:
            owned = self.g2.match(wanted)
            return Plan(len(owned), owned) if owned else None
        in_g2 = self.g2.prefix(wanted)
        rest = wanted[in_g2:]
        in_g3 = self.g3.pool.prefix(rest) if self.g3 is not None else 0
        in_g4 = 0
        if self.g4 is not None:
            in_g4 = len(list(itertools.takewhile(lambda b: b in self.g4, rest[in_g3:])))
        staged = in_g3 + in_g4
        room = self.g2.available
        if not self.reference:  # what it will pin itself is no room
            room -= sum(1 for block in wanted[:in_g2] if block in self.g2.inactive)
        if staged > 0 and stage and self.g2.reserved + staged <= room:
            self.g2.reserved += staged
            total = in_g2 + staged
            return Plan(total, [], wanted[:total], staged)
        owned = self.g2.match(wanted[:in_g2])
        return Plan(len(owned), owned) if owned else None

    def drop_plan(self, plan: Plan) -> None:
        self.g2.unpin(plan.owned)
        self.g2.reserved -= plan.promised

    def start(self, plan: Plan, slots: int, prefix: list[Full], now: float) -> SwapIn:
        self.now = floor_us(now)
        self.counts["swap_ins"] += 1
        swap = SwapIn(slots, prefix)
        if not plan.promised:
            swap.owned, swap.count, swap.started = plan.owned, plan.blocks, True
            swap.tiers = (plan.blocks, 0, 0)
            self._start_up(swap, now)
            self.leases.add(swap)
            return swap
        self.counts["staged"] += 1
        swap.promised = plan.promised
        swap.session = self._open(plan.lookup)
        self.leases.add(swap)
        self._pump_staged(now)
        return swap

    def _start_up(self, swap: SwapIn, now: float) -> None:
        self.up.start(now, swap.count * self.block_bytes, swap)

    def _open(self, lookup: list[Full]) -> Session:
        g2 = self.g2.match(lookup)
        g3 = self.g3.pool.match(lookup[len(g2) :]) if self.g3 is not None else []
        session = Session(lookup, g2, g3)
        if not g3 and self.g4 is None:
            session.done = True
            return session
        if self.reference:  # these pins are never given up
            self.g2.match(g2)
            if self.g3 is not None:
                self.g3.pool.match(g3)
        if self.g4 is not None:
            session.g4 = list(itertools.takewhile(lambda b: b in self.g4, lookup[len(g2) + len(g3) :]))
        if session.g4:
            self._fetch(session, self.g4, session.g4)
        else:
            self._fetch_g3(session)
        return session

    def _fetch(self, session: Session, tier: SharedTier, blocks: list[Full]) -> None:
        if not self.g2.take(len(blocks)):
            session.failed = True
            self.g2.unpin(session.g2)
            if self.g3 is not None:
                self.g3.pool.unpin(session.g3)
            session.g2, session.g3 = [], []
            return
        tier.up.start(self.now, len(blocks) * self.block_bytes, (self, session))

    def _fetch_g3(self, session: Session) -> None:
        if session.g3:
            self._fetch(session, self.g3, session.g3)
        else:
            session.done = True

    def staged_up(self, session: Session) -> None:
        """One of the session's transfers arrived in G2."""
        if session.g4:
            for block in session.g4:
                self.g2.register(block)
            session.g2 += session.g4
            session.g4 = []
            self._fetch_g3(session)
            return
        for block in session.g3:
            self.g2.register(block)
        self.g3.pool.unpin(session.g3)
        session.g2 += session.g3
        session.g3 = []
        session.g2.sort(key=lambda block: block.position)
        session.done = True

    def _pump_staged(self, now: float) -> None:
        """Staged blocks go on. The reference notices a failed staging only while nothing moves in the foreground."""
        links = [self.down, self.up] + [tier.up for tier in (self.g3, self.g4) if tier is not None]
        busy = self.reference and any(link.active for link in links)
        for swap in self.leases:
            if not isinstance(swap, SwapIn) or swap.started or not (swap.session.done or swap.session.failed):
                continue
            if swap.session.failed and busy:
                continue
            swap.started = True
            self.g2.reserved -= swap.promised
            swap.promised = 0
            swap.owned = swap.session.g2
            swap.count = len(swap.owned)
            if swap.cancel_requested:
                swap.status, swap.count = CANCELLED, 0
            elif swap.count == 0:
                swap.status = COMPLETED
            else:
                self._start_up(swap, now)

    def finish(self, swap: SwapIn) -> None:
        """A completed promotion gives up its place and its G2 blocks."""
        self.leases.remove(swap)
        self.g2.unpin(swap.owned, used=True)
        swap.owned = []

    def cancel(self, swap: SwapIn) -> None:
        self.counts["cancelled"] += 1
        swap.cancel_requested = True

    def _reap(self) -> None:
        """What cancelled promotions kept goes back when their running phase is over."""
        for swap in list(self.leases):
            if isinstance(swap, SwapIn) and swap.cancel_requested and swap.status != PENDING:
                self.give_back(swap)
                self.leases.remove(swap)
                self.g2.unpin(swap.owned)

    def give_back(self, swap: SwapIn) -> None:
        """Replaced by the pool that the slots and the prefix belong to."""
        raise NotImplementedError

    def idle(self) -> bool:
        return self.deadline() is None and not list(self.leases)

    def check(self) -> None:
        """Books that must balance; called between ticks."""
        tiers = [self.g2] + ([self.g3.pool] if self.g3 is not None else [])
        for tier in tiers:
            flight = tier.capacity - tier.free - len(tier.inactive) - len(tier.pins)
            assert flight >= 0 and tier.free >= 0 and tier.reserved >= 0
            assert len(tier.blocks) == len(tier.inactive) + len(tier.pins)
        assert all(math.isfinite(link.last) for link in (self.down, self.up))
