"""The engine rank with tiers below its block pool: waiting for copies, parking for promotions, stall-advance."""

from collections.abc import Callable

from .core import WAITING, ModelCore, Pass, Request
from .kv import KvPool, PrefillCost
from .offload_engine import COMPLETED, Lease, OffloadEngine, SwapIn
from .sequence import Full

DENIALS = 16
DEFAULTS = {"g1_to_g2": 14.0, "g2_to_g1": 14.0, "g2_to_g3": 7.0, "g3_to_g2": 7.0, "g2_to_g4": 4.0, "g4_to_g2": 4.0}


def offload_config(args: dict) -> dict | None:
    """The tiers that engine arguments ask for, None without a host tier."""
    if not args.get("num_g2_blocks"):
        return None
    block = args.get("block_size") or (32 if args.get("engine_type", "vllm").lower() == "trtllm" else 64)
    config = {"g2": args["num_g2_blocks"], "g3": args.get("num_g3_blocks") or None,
              "g4": args.get("enable_g4_storage", False), "batch_size": args.get("offload_batch_size") or 32,
              "block_bytes": block * args["kv_bytes_per_token"], "min_seen": args.get("offload_min_seen", 1),
              "policy": args.get("offload_eviction_policy", "lru"),
              "through": args.get("offload_write_mode") == "write_through"}
    for name, default in DEFAULTS.items():
        given = args.get(f"bandwidth_{name}_gbps")
        config[name] = default if given is None else given, args.get(f"latency_{name}_ms", 0.0)
    return config


class Blocked(Exception):
    """Room comes when `lease` has gone."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease


class Retry(Exception):
    """The evicted blocks' slots are free already."""


class OffloadPool(KvPool):
    def __init__(self, capacity: int, block_size: int, caching: bool, worker_id: int, engine: OffloadEngine) -> None:
        super().__init__(capacity, block_size, caching, worker_id)
        self.engine = engine
        engine.give_back = self._give_back
        engine.resident = lambda block: block.seq_hash in self.full_by_hash
        self.failed_hits = 0

    def _take_slots(self, count: int) -> list[Full] | None:
        """As without tiers while nothing must be evicted. Else all slots go back but those of the evicted blocks."""
        evicted = super()._take_slots(count)
        if not evicted:
            return evicted
        self.free += count - len(evicted)
        lease, released = self.engine.enqueue(evicted)
        self._removed(evicted)
        self._publish_host()
        if lease is not None:
            raise Blocked(lease)
        self.free += released
        raise Retry

    def _room(self, count: int, resurrected: list[Full]) -> list[Full] | None:
        try:
            return super()._room(count, resurrected)
        except (Blocked, Retry):
            for block in resurrected:
                self.inactive.insert(block)
            raise

    def _twice(self, attempt: Callable[[], bool]) -> bool:
        try:
            return attempt()
        except Retry:
            return attempt()

    def use(self, blocks, parent=None) -> bool:
        return self._twice(lambda: super(OffloadPool, self).use(blocks, parent))

    def reserve(self, count: int) -> bool:
        return self._twice(lambda: super(OffloadPool, self).reserve(count))

    def _reference(self, block: Full) -> None:
        if self.engine.through and block.seq_hash not in self.full_by_hash:
            self.engine.fresh.append(block)
        super()._reference(block)

    def tick(self, now: float) -> None:
        released = self.engine.tick(now)
        self._publish_host()
        self.free += released

    def _publish_host(self) -> None:
        for kind, block in self.engine.take_events():
            first = len(self.events)
            if kind == "created":
                self._stored([block], block.parent_hash)
            else:
                self._removed([block])
            for event in self.events[first:]:
                event["storage_tier"] = "host_pinned"

    # ---- promotion

    def pin(self, blocks: list[Full]) -> None:
        for block in blocks:
            if block in self.inactive:
                self.inactive.remove(block)
            self.pins[block.seq_hash] = self.pins.get(block.seq_hash, 0) + 1

    def unpin(self, blocks: list[Full]) -> None:
        for block in blocks:
            self.pins[block.seq_hash] -= 1
            if self.pins[block.seq_hash] == 0:
                del self.pins[block.seq_hash]
                if block.seq_hash not in self.references:
                    self.inactive.insert(block)

    def _give_back(self, swap: SwapIn) -> None:
        self.free += swap.slots
        self.unpin(swap.prefix)

    def kept(self, blocks: list[Full]) -> None:
        """Blocks pinned just now stay so for a promotion."""

    def forgo(self, blocks: list[Full]) -> None:
        """Blocks pinned just now are not needed after all."""
        self.unpin(blocks)

    def promoted(self, prefix: list[Full], blocks: list[Full], parent: int | None, slots: int) -> None:
        """Promoted blocks take reserved slots and become inactive, those before come out of their pins."""
        self._come_up(blocks, parent, slots)
        self.unpin(prefix)

    def _come_up(self, blocks: list[Full], parent: int | None, slots: int) -> None:
        """Who is here already needs no slot."""
        run: list[Full] = []
        self.free += slots - len(blocks)
        for block in blocks:
            here = block.seq_hash in self.references or block.seq_hash in self.pins or block in self.inactive
            if here:
                self.free += 1
                self._stored(run, parent)
                run, parent = [], block.seq_hash
                continue
            self.full_by_hash[block.seq_hash] = block
            self.inactive.insert(block)
            run.append(block)
        self._stored(run, parent)


class Parked:
    def __init__(self, request: Request, swap: SwapIn, skip: int, since: float) -> None:
        self.request, self.swap, self.skip, self.since = request, swap, skip, since


class OffloadCore(ModelCore):
    """`shared` holds the tiers that several workers use together; `reference` keeps what the reference loses."""

    def __init__(self, args: dict, worker_id: int = 0, *, shared: dict | None = None, reference: bool = False,
                 **additions: bool) -> None:
        super().__init__(args, worker_id, **additions)
        config = offload_config(args)
        self.tiers = OffloadEngine(config, worker_id, {} if shared is None else shared, reference)
        a = self.args
        self.kv = OffloadPool(a.num_blocks, a.block_size, a.caching, worker_id, self.tiers)
        self.parked: list[Parked] = []
        self.dependency: dict[int, Lease] = {}
        self.denied: dict[int, int] = {}  # blocks for a next token refused, since the newest token
        self.unstaged: set[int] = set()  # requests whose staging found no room in G2
        self.parked_ms: dict[int, float] = {}
        self.from_tiers: dict[int, list[int]] = {}  # uuid -> tokens from G2, G3, G4

    def is_drained(self) -> bool:
        return self.is_empty() and not self.parked and self.tiers.deadline() is None

    def tick(self, now: float) -> None:
        """Time passes below; parked requests whose blocks came go to the front, in the order of their parking."""
        self.kv.tick(now)
        done = [parked for parked in self.parked if parked.swap.status == COMPLETED]
        self.parked = [parked for parked in self.parked if parked.swap.status != COMPLETED]
        for parked in done[::-1]:
            request, swap, skip = parked.request, parked.swap, parked.skip
            blocks = [b for b in request.sequence.blocks[skip : skip + swap.count] if isinstance(b, Full)]
            self.tiers.finish(swap)
            self.kv.promoted(swap.prefix, blocks, request.sequence.blocks[skip - 1].seq_hash if skip else None,
                             swap.slots)
            self.waiting.insert(0, request.uuid)
            if swap.session is not None and swap.session.failed and not self.tiers.reference:
                self.unstaged.add(request.uuid)

    def execute_pass(self, now_ms: float) -> dict:
        self.tick(now_ms)
        return super().execute_pass(now_ms)

    def _run_model(self, p: Pass) -> float:
        end_ms = super()._run_model(p)
        if end_ms <= p.now_ms:
            deadline = self.tiers.deadline()
            if deadline is not None:
                end_ms = max(deadline, p.now_ms)
        self.tiers.computed(end_ms)
        return end_ms

    def _must_wait(self, request: Request) -> bool:
        lease = self.dependency.get(request.uuid)
        if lease is not None and lease not in self.tiers.leases:
            del self.dependency[request.uuid]
            lease = None
        return lease is not None

    def _may_admit(self) -> bool:
        """Not while a running request was refused its next token's block too often: others took it every time."""
        return self.tiers.reference or all(self.denied.get(uuid, 0) < DENIALS for uuid in self.running)

    def _emitted(self, p: Pass, request: Request, token: int, crossed: bool) -> bool:
        self.denied.pop(request.uuid, None)
        return super()._emitted(p, request, token, crossed)

    def _blocked(self, attempt: Callable[[], bool], waiters: list[Request], decode: bool = False) -> bool | None:
        try:
            return attempt()
        except Blocked as blocked:
            for request in waiters:
                self.dependency[request.uuid] = blocked.lease
                if decode:
                    self.denied[request.uuid] = self.denied.get(request.uuid, 0) + 1
            return None

    def _promote_from_below(self, p: Pass, request: Request, cost: PrefillCost) -> str:
        if request.status != WAITING:
            return "miss"
        full = [block for block in request.sequence.blocks if isinstance(block, Full)]
        skip = cost.cached_tokens // self.args.block_size
        if skip >= len(full):
            return "miss"
        self.kv.pin(full[:skip])
        plan = self.tiers.prepare(full[skip:], request.uuid not in self.unstaged)
        if plan is None:
            self.kv.forgo(full[:skip])
            return "miss"
        taken = self._blocked(lambda: self.kv.reserve(plan.blocks), [request])
        if not taken:
            self.tiers.drop_plan(plan)
            self.kv.forgo(full[:skip])
            return "miss" if taken is False else "blocked"
        self.kv.kept(full[:skip])
        swap = self.tiers.start(plan, plan.blocks, full[:skip], p.now_ms)
        self.waiting.remove(request.uuid)
        self.parked.append(Parked(request, swap, skip, p.now_ms))
        return "parked"

    def drop(self, uuid: int) -> None:
        """Cancel a request. What a parked one keeps comes back when the copy under way is done."""
        for parked in self.parked:
            if parked.request.uuid == uuid:
                self.tiers.cancel(parked.swap)
        self.parked = [parked for parked in self.parked if parked.request.uuid != uuid]
        self.dependency.pop(uuid, None)
        self.denied.pop(uuid, None)
        request = self.requests[uuid]
        self._free(request, request.sequence.allocated)
        self._forget(request, "cancelled")
