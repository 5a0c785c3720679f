"""The models with scores of users: who is preempted, who is admitted, what is evicted."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

from .core import ModelCore, Request
from .kv import KvPool, Lineage
from .offload_core import OffloadCore, OffloadPool
from .sequence import Block, Full, Partial, ceil_div
from .sglang import Node, SglangModel, Tree
from .sglang import Request as SglangRequest
from .vllm_rules import Block as RulesBlock
from .vllm_rules import Pool as RulesPool
from .vllm_rules import Request as RulesRequest
from .vllm_rules import RulesModel

Score = Callable[..., float] | None


def to_front(waiting: list, score: Callable[[Any], float]) -> bool:
    """Bring the entry with the lowest score to the front; False if there is none below infinity."""
    scores = [score(entry) for entry in waiting]
    best = scores.index(min(scores))
    if scores[best] == math.inf:
        return False
    waiting.insert(0, waiting.pop(best))
    return True


class Rank:
    """What an order of eviction by scores knows of a cached block."""

    def __init__(self) -> None:
        self.key = 0.0
        self.floor = -math.inf  # highest key of what was released below it
        self.hits = 0


def rank(released: list[tuple[Rank, int, bool]], score: Callable[[int, int, int], float]) -> None:
    """Score the blocks of a release, last to first: rank, place in the sequence, whether nobody holds it any more."""
    highest = -math.inf
    for (free, _), group in itertools.groupby(released, key=lambda r: (r[2], r[0].hits)):
        stretch = list(group)
        key = score(stretch[-1][1], len(stretch), stretch[0][0].hits) if free else 0.0
        for one, _, _ in stretch:
            one.floor = max(one.floor, highest)
            if free:
                one.key = max(key, one.floor)
                highest = max(highest, one.key)


class ScoredLineage(Lineage):
    """Of the blocks without a child the one with the lowest key goes first, of equal ones by tick."""

    def __init__(self, ranks: dict[int, Rank]) -> None:
        super().__init__()
        self.ranks = ranks

    def evict(self) -> Full:
        leaves = [node for node in self.nodes.values() if node.block is not None and not node.children]
        victim = min(leaves, key=lambda node: (self.ranks[node.block.seq_hash].key, node.tick)).block
        self.remove(victim)
        del self.ranks[victim.seq_hash]
        return victim


class ScoredPool(KvPool):
    """`KvPool` that evicts as `mocker.hooks.EvictionScore` says."""

    def __init__(self, pool: KvPool, score: Score) -> None:
        self.__dict__.update(pool.__dict__)
        self.score, self.ranks, self.releases = score, {}, 0
        self.inactive = ScoredLineage(self.ranks)

    def _reference(self, block: Full) -> None:
        super()._reference(block)
        self.ranks.setdefault(block.seq_hash, Rank())

    def use(self, blocks: list[Block], parent: Block | None = None) -> bool:
        found = [b for b in blocks if not isinstance(b, Partial) and b.seq_hash in self.full_by_hash]
        taken = super().use(blocks, parent)
        for block in found if taken else ():
            self.ranks[block.seq_hash].hits += 1
        return taken

    def promote(self, partial: Partial, block: Full, parent_hash: int | None) -> None:
        found = block.seq_hash in self.full_by_hash
        super().promote(partial, block, parent_hash)
        self.ranks[block.seq_hash].hits += found

    def release_all(self, blocks: list[Block], now_ms: float) -> None:
        """A request lets go of its blocks, the last one first."""
        for block in blocks:
            self.release(block)
        self.rank([block for block in blocks if not isinstance(block, Partial)], now_ms)

    def rank(self, full: list[Full], now_ms: float) -> None:
        """Score blocks that were given back, the last one first."""
        if full:
            self.releases += 1
        rank([(self.ranks[b.seq_hash], b.position, b in self.inactive) for b in full],
             lambda *facts: self.score(int(now_ms * 1000.0), self.releases, *facts))


class ScoredOffloadPool(ScoredPool, OffloadPool):
    """The same with tiers below. What a promotion keeps or brings up is given back when it ends."""

    now_ms = 0.0

    def __init__(self, pool: OffloadPool, score: Score) -> None:
        super().__init__(pool, score)
        self.engine.give_back = self._give_back

    def kept(self, blocks: list[Full]) -> None:
        for block in blocks:
            self.ranks[block.seq_hash].hits += 1

    def unpin(self, blocks: list[Full]) -> None:
        super().unpin(blocks)
        self.rank(blocks[::-1], self.now_ms)

    def forgo(self, blocks: list[Full]) -> None:
        super().unpin(blocks)

    def promoted(self, prefix: list[Full], blocks: list[Full], parent: int | None, slots: int) -> None:
        here = [block for block in blocks if block.seq_hash in self.full_by_hash]
        self._come_up(blocks, parent, slots)
        super().unpin(prefix)
        given = [*prefix, *(blocks if len(here) < len(blocks) else [])]
        for block in given[::-1]:              # as the newest ones, the last one first
            if block in self.inactive:
                self.inactive.remove(block)
                self.inactive.insert(block)
        for block in given[len(prefix):]:
            self.ranks.setdefault(block.seq_hash, Rank())
            self.ranks[block.seq_hash].hits += block in here
        self.rank(given[::-1], self.now_ms)


class ScoredCore(ModelCore):
    """`ModelCore` whose choices are the scores of `mocker.hooks` of the functions given."""

    scored_pool = ScoredPool

    def __init__(self, args: dict, worker_id: int = 0, *, victim: Score, admission: Score, eviction: Score,
                 **tiers: Any) -> None:
        super().__init__(args, worker_id, **tiers)
        self.victim, self.admission = victim, admission
        if eviction is not None:
            self.kv = self.scored_pool(self.kv, eviction)
        self.told: dict[int, tuple[int, float]] = {}  # uuid -> number of the submission, when it was made
        self.end_ms = self.now_ms = 0.0

    def receive(self, request: dict) -> int:
        uuid = super().receive(request)
        self.told[uuid] = len(self.told), self.end_ms
        return uuid

    def execute_pass(self, now_ms: float) -> dict:
        self.now_ms = now_ms
        step = super().execute_pass(now_ms)
        self.end_ms = step["end_ms"]
        return step

    def _free(self, request: Request, tokens: int) -> None:
        if isinstance(self.kv, ScoredPool):
            self.kv.release_all(list(request.sequence.held(tokens)), self.now_ms)
        else:
            super()._free(request, tokens)

    def _may_admit(self) -> bool:
        return self.admission is None or to_front(self.waiting, lambda uuid: self._waits(self.requests[uuid]))

    def _waits(self, request: Request) -> float:
        number, arrived = self.told[request.uuid]
        s = request.sequence
        cached = s.prompt_len if request.prebuilt else self.kv.prefill_cost(s).cached_tokens
        return self.admission(number, int((self.now_ms - arrived) * 1000.0), s.prompt_len, cached, s.generated,
                              s.max_output, 0, len(self.running), self.args.num_blocks - self.kv.active)

    def _victim(self, candidates: list[int]) -> int | None:
        if self.victim is None:
            return super()._victim(candidates)
        return min(candidates, key=lambda uuid: self._runs(self.requests[uuid]), default=None)

    def _runs(self, request: Request) -> float:
        s = request.sequence
        return self.victim(s.prompt_len, s.generated, s.max_output, request.preemptions,
                           ceil_div(s.allocated, self.args.block_size))


class ScoredOffload(ScoredCore, OffloadCore):
    """The same with tiers below the pool."""

    scored_pool = ScoredOffloadPool

    def execute_pass(self, now_ms: float) -> dict:
        self.kv.now_ms = now_ms
        return super().execute_pass(now_ms)

    def _may_admit(self) -> bool:
        return OffloadCore._may_admit(self) and super()._may_admit()


class ScoredRulesPool(RulesPool):
    """The pool of `RulesModel` with an order of eviction by scores that are told no time."""

    def __init__(self, pool: RulesPool, score: Score) -> None:
        super().__init__(pool.capacity, pool.caching)
        self.score, self.releases = score, 0
        self.ranks: dict[RulesBlock, Rank] = {}

    def take(self, count: int) -> list[RulesBlock]:
        taken = []
        for _ in range(count):
            if self.active + len(self.cached) == self.capacity:
                victim = min(self.cached, key=lambda block: self.ranks[block].key)  # of equal ones the first
                self.cached = {victim: None, **self.cached}
            taken += super().take(1)
        return taken

    def hold(self, block: RulesBlock) -> None:
        super().hold(block)
        self.ranks[block].hits += 1

    def register(self, block: RulesBlock, content: tuple[int, ...]) -> None:
        super().register(block, content)
        self.ranks[block] = Rank()

    def release(self, blocks: list[RulesBlock]) -> None:
        super().release(blocks)
        named = [(i, block) for i, block in enumerate(blocks) if block.content is not None]
        if named:
            self.releases += 1
        rank([(self.ranks[block], i, block.ref == 0) for i, block in reversed(named)],
             lambda *facts: self.score(0, self.releases, *facts))


class ScoredRules(RulesModel):
    """The same of `RulesModel`, where scores of who waits are told neither a number nor a time."""

    def __init__(self, rules: dict[str, bool], *, victim: Score, admission: Score, eviction: Score,
                 **options: object) -> None:
        super().__init__(rules, **options)
        self.victim, self.admission = victim, admission
        if eviction is not None:
            self.pool = ScoredRulesPool(self.pool, eviction)

    def _may_admit(self) -> bool:
        if self.by_priority:
            self.waiting.sort(key=lambda r: (r.priority, r.order))
        return self.admission is None or to_front(self.waiting, self._waits)

    def _waits(self, r: RulesRequest) -> float:
        return self.admission(None, None, r.prompt, self._lookup(r)[1], r.gen, len(r.out), r.priority,
                              len(self.running), self.pool.capacity - self.pool.active)

    def _victim(self) -> RulesRequest:
        if self.victim is None:
            return super()._victim()
        if self.by_priority:
            order = sorted(self.running, key=lambda r: (r.priority, r.order), reverse=True)
        else:
            order = self.running if self.fifo else self.running[::-1]
        return min(order, key=lambda r: self.victim(r.prompt, r.gen, len(r.out), r.preemptions, len(r.held)))


class ScoredTree(Tree):
    """Of the leaves that nobody locks the one with the lowest score goes first; its parent takes over a higher one."""

    def _split(self, node: Node, at: int) -> Node:
        upper = super()._split(node, at)
        upper.rank = copy.copy(node.rank)
        return upper

    def _first(self, leaves: list[Node]) -> Node:
        victim = min(leaves, key=lambda n: (n.rank.key, n.time))
        if victim.parent is not self.root:
            victim.parent.rank.key = max(victim.parent.rank.key, victim.rank.key)
        return victim


class ScoredSglang(SglangModel):
    """The same of `SglangModel`; a prompt that is being computed in chunks stays first."""

    def __init__(self, args: dict, worker_id: int = 0, *, victim: Score, admission: Score, eviction: Score) -> None:
        super().__init__(args, worker_id)
        self.victim, self.admission, self.eviction, self.releases = victim, admission, eviction, 0
        if eviction is not None:
            self.tree = ScoredTree(self.total, self.page)
        self.told: dict[int, tuple[int, float]] = {}
        self.retracted: dict[int, int] = {}
        self.end_ms = self.now_ms = 0.0

    def receive(self, request: dict) -> None:
        super().receive(request)
        self.told[request["uuid"]] = len(self.told), self.end_ms

    def execute_pass(self, now: float) -> dict:
        self.now_ms = now
        step = super().execute_pass(now)
        self.end_ms = step["end_ms"]
        return step

    def _reach(self, node: Node, held: Node) -> None:
        """A request holds, or has cached, the path from `held` on down to `node`."""
        while self.eviction is not None and node is not held:
            if hasattr(node, "rank"):
                node.rank.hits += 1
            else:
                node.rank = Rank()
            node = node.parent

    def _allocate(self, r: SglangRequest, end: int) -> int | None:
        first = not r.slots
        done = super()._allocate(r, end)
        if first and done is not None:
            self._reach(r.node, self.tree.root)
        return done

    def _cache(self, r: SglangRequest) -> None:
        held = r.node
        super()._cache(r)
        self._reach(r.node, held)

    def _release(self, r: SglangRequest, node: Node) -> None:
        self._reach(node, r.node)
        super()._release(r, node)
        if self.eviction is None or node is self.tree.root:
            return
        self.releases += 1
        freed = []
        while node is not self.tree.root:
            freed += [node] if node.lock == 0 else []
            node = node.parent
        for hits, group in itertools.groupby(freed, key=lambda n: n.rank.hits):
            stretch = list(group)
            before = len(self.tree.path(stretch[-1].parent)) // self.page
            blocks = sum(len(n.key) for n in stretch) // self.page
            key = self.eviction(int(self.now_ms * 1000.0), self.releases, before, blocks, hits)
            for n in stretch:
                n.rank.key = key

    def _may_admit(self) -> bool:
        return self.admission is None or bool(self.waiting[0].slots) or to_front(self.waiting, self._waits)

    def _waits(self, r: SglangRequest) -> float:
        number, arrived = self.told[r.uuid]
        free = (len(self.tree.free) + self.tree.evictable) // self.page
        return self.admission(number, int((self.now_ms - arrived) * 1000.0), len(r.prompt),
                              self.tree.match_length(r.text[:self._floor(len(r.text))]), len(r.outputs), len(r.plan),
                              0, len(self.running), free)

    def _victim(self) -> SglangRequest:
        if self.victim is None:
            return super()._victim()
        chosen = min(self.running, key=lambda r: (self._runs(r), len(r.outputs)))
        self.retracted[chosen.uuid] = self.retracted.get(chosen.uuid, 0) + 1
        return chosen

    def _runs(self, r: SglangRequest) -> float:
        return self.victim(len(r.prompt), len(r.outputs), len(r.plan), self.retracted.get(r.uuid, 0),
                           r.reserved // self.page)
