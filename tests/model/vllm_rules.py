"""A vLLM-style scheduler in plain Python with one switch a rule: slow and readable, the statement of the semantics.

With every switch off it decides as dynamo-mocker 1.3.0, with all but `late` on as the synchronous scheduler of vLLM
0.33.0, with `late` as well as its asynchronous one. It keeps physical blocks, one object each, so that nothing of
what the compiled engine does in runs of blocks is taken for granted. It knows passes, not time.

A content is a tuple of tokens from the start of the sequence to the end of the block: only equality matters.
"""

from dataclasses import dataclass, field
from math import inf

RULES = (
    "last_token",
    "slot_at_use",
    "last_slot",
    "own_copy",
    "gen_hit",
    "fill_early",
    "full_only",
    "lru",
    "whole_tail",
    "late",
)
DYNAMO = dict.fromkeys(RULES, False)
VLLM = {**dict.fromkeys(RULES, True), "late": False}
VLLM_ASYNC = dict.fromkeys(RULES, True)


class Block:
    """A physical block: its content once it has one that others may find, and how many requests hold it."""

    __slots__ = ("content", "ref")

    def __init__(self) -> None:
        self.content: tuple[int, ...] | None = None
        self.ref = 1


class Pool:
    """`capacity` blocks: held ones, blank ones (no content, no holder) and cached ones (content, no holder)."""

    def __init__(self, capacity: int, caching: bool) -> None:
        self.capacity = capacity
        self.caching = caching
        self.active = 0
        self.cached: dict[Block, None] = {}  # in the order of eviction
        self.copies: dict[tuple[int, ...], dict[Block, None]] = {}  # in the order of registration

    @property
    def free(self) -> int:
        return self.capacity - self.active

    def find(self, content: tuple[int, ...]) -> Block | None:
        """The copy of a content that was registered first."""
        copies = self.copies.get(content)
        return next(iter(copies)) if copies else None

    def take(self, count: int) -> list[Block]:
        """`count` blocks that are known to be there: blank ones first, then the cached ones that left use first."""
        for _ in range(count):
            if self.active + len(self.cached) == self.capacity:
                victim = next(iter(self.cached))
                del self.cached[victim]
                self.forget(victim)
            self.active += 1
        return [Block() for _ in range(count)]

    def forget(self, block: Block) -> None:
        copies = self.copies[block.content]
        del copies[block]
        if not copies:
            del self.copies[block.content]

    def hold(self, block: Block) -> None:
        if block.ref == 0:
            del self.cached[block]
            self.active += 1
        block.ref += 1

    def register(self, block: Block, content: tuple[int, ...]) -> None:
        if self.caching:
            block.content = content
            self.copies.setdefault(content, {})[block] = None

    def release(self, blocks: list[Block]) -> None:
        """Given back from the last to the first."""
        for block in reversed(blocks):
            block.ref -= 1
            if block.ref == 0:
                self.active -= 1
                if block.content is not None:
                    self.cached[block] = None


@dataclass(eq=False)
class Request:
    uuid: int
    tokens: list[int]
    out: list[int]  # what it will generate; its length is the limit
    priority: int
    order: int  # of arrival
    prompt: int = 0
    gen: int = 0
    computed: int = 0  # tokens, those that are being computed included
    pending: int = 0  # tokens sampled that the scheduler has not seen (asynchronous scheduling)
    flight: int = 0  # tokens scheduled whose outcome it has not seen
    status: str = "waiting"
    preemptions: int = 0
    held: list[Block] = field(default_factory=list)
    named: int = 0  # leading blocks whose content counts as known
    done: int = 0  # leading held blocks that have their content

    def __len__(self) -> int:
        return len(self.tokens)


class RulesModel:
    """One engine; `receive` requests, call `run_pass`, look at what it returns.

    `rules` maps the names in `RULES` to switches. `priority`, `threshold`, `max_model_len`, `watermark` (a fraction
    of the pool and the null block) and `gate` are vLLM's options of (about) those names.
    """

    def __init__(
        self,
        rules: dict[str, bool],
        *,
        block: int,
        pool: int,
        seqs: int | float = inf,
        budget: int | float = inf,
        chunked: bool = True,
        caching: bool = True,
        fifo: bool = False,
        priority: bool = False,
        threshold: int = 0,
        max_model_len: int | None = None,
        watermark: float = 0.0,
        gate: bool = True,
    ) -> None:
        if rules["late"] and not rules["slot_at_use"]:
            raise ValueError("late needs slot_at_use")
        self.rule = rules
        self.block = block
        self.seqs = seqs
        self.max_tokens = budget
        self.chunked = chunked
        self.fifo = fifo
        self.by_priority = priority
        self.threshold = threshold
        self.max_model_len = max_model_len
        self.watermark = int(watermark * (pool + 1))
        self.gate = gate
        self.pool = Pool(pool, caching)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.arrivals = 0
        self.preemptions = 0
        self.flight: list[tuple[Request, int, bool]] = []  # of the last pass, if the scheduler has not seen it end

    # ---- arrival

    def receive(self, uuid: int, tokens: list[int], out: list[int], priority: int = 0) -> None:
        if self.max_model_len is not None:
            if len(tokens) >= self.max_model_len:
                raise ValueError("longer than max_model_len")
            out = out[: self.max_model_len - len(tokens)]
        request = Request(uuid, list(tokens), list(out), priority, self.arrivals, prompt=len(tokens))
        request.named = len(tokens) // self.block
        self.arrivals += 1
        self._queue(request, False)

    def _queue(self, request: Request, front: bool) -> None:
        self.waiting.insert(0 if front else len(self.waiting), request)
        if self.by_priority:
            self.waiting.sort(key=lambda r: (r.priority, r.order))

    def is_empty(self) -> bool:
        return not (self.waiting or self.running or self.flight)

    # ---- one pass

    def run_pass(self) -> dict:
        self.budget = self.max_tokens
        self.batch: dict[Request, int] = {}
        self.admitted: list[list[int]] = []
        self.victims: list[int] = []
        self.out: list[list] = []  # [uuid, token, how it ended]
        self.late_out: list[list] = []
        several = len(self.running) + len(self.waiting) > 1
        self.cap = self.threshold if self.threshold and several else inf
        self.planning = True
        self._schedule_running()
        if not self.victims:
            self._schedule_waiting()
        self.planning = False
        if self.rule["late"]:
            self._settle()
        else:
            self._emit()
        return {
            "sched": [[r.uuid, n] for r, n in self.batch.items()],
            "admit": self.admitted,
            "preempt": sorted(self.victims),
            "out": self.out + self.late_out,
            "active": self.pool.active,
            "running": len(self.running),
            "waiting": len(self.waiting),
        }

    def _schedule_running(self) -> None:
        self.place = 0
        while self.place < len(self.running) and self.budget > 0:
            request = self.running[self.place]
            last = request.gen + request.pending >= len(request.out) and request.computed >= len(request)
            if last and self.rule["late"]:
                self.place += 1  # its last token is on its way
                continue
            outcome = self._schedule(request, [], 0)
            if outcome == "scheduled":
                self.place += 1
            elif outcome == "blocked":
                break

    def _schedule_waiting(self) -> None:
        while self.waiting and len(self.running) < self.seqs and self._may_admit():
            request = self.waiting[0]
            if request.status == "waiting" and self._blocks(len(request)) > self.pool.capacity:
                self._end(request, "rejected", self.late_out)
                continue
            hits, cached, active = self._lookup(request)
            want = min(len(request) - cached, self.cap, self.budget)
            need = self._blocks(len(request) if self.gate else cached + want) - active
            if self.running:
                need += self.watermark
            if need > self.pool.free:
                if not self.running and self.pool.active == 0:  # nothing can make room for it any more
                    self._end(request, "capacity" if request.status == "preempted" else "rejected", self.late_out)
                    continue
                break
            outcome = self._schedule(request, hits, cached)
            if outcome != "scheduled":
                if (
                    not self.chunked
                    and not self.running
                    and not self.batch
                    and self._unchunked(request, cached) > self.max_tokens
                ):
                    self._end(request, "over_budget", self.late_out)
                    continue
                break
            self.waiting.remove(request)
            self.running.append(request)
            request.status = "running"
            self.admitted.append([request.uuid, cached])
            if self.batch[request] == 0 and self.budget == 0:
                break

    def _may_admit(self) -> bool:
        """Whether the head of the queue may be looked at."""
        return True

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def _name(self, request: Request) -> None:
        if self.rule["fill_early"]:
            request.named = max(request.named, len(request) // self.block)

    def _content(self, request: Request, index: int) -> tuple[int, ...]:
        return tuple(request.tokens[: (index + 1) * self.block])

    def _lookup(self, request: Request) -> tuple[list[Block], int, int]:
        """Cached blocks that an admission takes, the tokens they save, and how many of them are held anyway."""
        if not self.pool.caching:
            return [], 0, 0
        self._name(request)
        count = request.named
        if self.rule["last_token"]:
            count = min(count, (len(request) - 1) // self.block)
        hits: list[Block] = []
        for index in range(count):
            block = self.pool.find(self._content(request, index))
            if block is None:
                break
            hits.append(block)
        most = len(request) if self.rule["gen_hit"] else request.prompt
        cached = min(len(hits) * self.block, most)
        active = min(sum(b.ref > 0 for b in hits) * self.block, most) // self.block
        return hits[: self._blocks(cached)], cached, active

    def _unchunked(self, request: Request, cached: int) -> int:
        """Tokens that must go into one pass with chunking off."""
        rest = (len(request) if self.rule["whole_tail"] else request.prompt) - request.computed - cached
        return min(rest, self.cap)

    def _schedule(self, request: Request, hits: list[Block], cached: int) -> str:
        """Give a request its share of the budget, and the blocks for it."""
        before = request.computed + cached
        rest = len(request) + request.pending - before
        new = request.status != "running"
        if not self.chunked and (new or not self.rule["whole_tail"]) and self._unchunked(request, cached) > self.budget:
            return "blocked"
        if self.budget == 0 and rest > 0:
            return "blocked"
        want = min(rest, self.cap, self.budget)
        target = before + want
        while not self._allocate(request, hits, target):
            victim = self._victim()
            self._preempt(victim)
            if victim is request:
                if not self.rule["late"] and self.pool.active == 0:
                    self._end(request, "capacity", self.late_out)
                return "left"
        request.computed = target
        request.flight += want
        self.batch[request] = want
        self.budget -= want
        return "scheduled"

    # ---- memory

    def _allocate(self, request: Request, hits: list[Block], target: int) -> bool:
        """Blocks for the first `target` tokens, all or nothing; contents that this completes are registered."""
        pool, first, last = self.pool, len(request.held), self._blocks(target)
        self._name(request)
        known = request.named
        if self.rule["full_only"]:
            known = min(known, target // self.block)
        picked: dict[int, Block] = dict(enumerate(hits))
        if not self.rule["own_copy"] and pool.caching:
            for index in range(first, min(known, last)):
                block = pool.find(self._content(request, index))
                if block is not None:
                    picked[index] = block
        idle = [b for b in picked.values() if b.ref == 0]
        fresh = max(last - first, 0) - len(picked)
        if fresh + len(idle) > pool.free:
            if not self.rule["own_copy"]:  # picked up and given back: they count as released just now
                order = idle if self.rule["lru"] else reversed(idle)
                for block in order:
                    del pool.cached[block]
                    pool.cached[block] = None
            return False
        for block in picked.values():
            pool.hold(block)
        new = iter(pool.take(fresh))
        self._fill(request, min(known, first))
        for index in range(first, last):
            request.held.append(picked[index] if index in picked else next(new))
        while request.done < len(request.held) and request.held[request.done].content is not None:
            request.done += 1
        self._fill(request, min(known, len(request.held)))
        return True

    def _fill(self, request: Request, count: int) -> None:
        """The first `count` blocks have their content: others can find them."""
        pool = self.pool
        while request.done < count:
            index = request.done
            request.done += 1
            own = request.held[index]
            if own.content is not None or not pool.caching:
                continue
            content = self._content(request, index)
            other = None if self.rule["own_copy"] else pool.find(content)
            if other is None:
                pool.register(own, content)
            else:
                pool.hold(other)
                request.held[index] = other
                pool.release([own])

    def _release(self, request: Request) -> None:
        self.pool.release(request.held)
        request.held = []
        request.done = 0

    # ---- preemption and endings

    def _victim(self) -> Request:
        if self.by_priority:
            return max(self.running, key=lambda r: (r.priority, r.order))
        return self.running[0 if self.fifo else -1]

    def _preempt(self, victim: Request) -> None:
        at = self.running.index(victim)
        if (self.by_priority or not self.fifo) and at < self.place:
            self.place -= 1
        del self.running[at]
        if self.planning and victim in self.batch:  # what it had been given goes back
            tokens = self.batch.pop(victim)
            self.budget += tokens
            victim.flight -= tokens
        self._release(victim)
        victim.status = "preempted"
        victim.computed = 0
        victim.pending = 0
        victim.preemptions += 1
        self.preemptions += 1
        self.victims.append(victim.uuid)
        self._queue(victim, True)

    def _end(self, request: Request, how: str, out: list[list]) -> None:
        """It leaves without a token."""
        out.append([request.uuid, None, how])
        self._leave(request, how)

    def _leave(self, request: Request, how: str) -> None:
        self._release(request)
        request.status = how
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    # ---- tokens

    def _token(self, request: Request) -> None:
        request.tokens.append(request.out[request.gen])
        request.gen += 1
        done = request.gen == len(request.out)
        self.out.append([request.uuid, request.tokens[-1], "completed" if done else None])

    def _emit(self) -> None:
        """Synchronous: the tokens of this pass, in order of admission."""
        for request in list(self.running):
            if request.computed >= len(request) and not request.out:
                self._end(request, "completed", self.out)
        ready = [r for r in self.running if r.computed >= len(r)]
        for request in list(self.batch):
            request.flight = 0
        for request in ready:
            if request.status != "running":
                continue
            if len(request) % self.block == 0 and not self._next_slot(request):
                continue
            self._token(request)
            if request.gen == len(request.out):
                self._leave(request, "completed")

    def _next_slot(self, request: Request) -> bool:
        """The last block is full: it gets its content, and the token to come a slot unless that is left for later."""
        count = len(request) // self.block
        request.named = max(request.named, count)
        self._fill(request, min(count, len(request.held)))
        if self.rule["slot_at_use"] or (self.rule["last_slot"] and request.gen + 1 == len(request.out)):
            return True
        while self.pool.free == 0:
            victim = self._victim()
            self._preempt(victim)
            if victim is request:
                if self.pool.active == 0:
                    self._end(request, "capacity", self.out)
                return False
        request.held += self.pool.take(1)
        return True

    def _settle(self) -> None:
        """Asynchronous: this pass is under way; the scheduler now sees what the one before made."""
        seen, self.flight = self.flight, []
        for request, tokens in self.batch.items():
            makes = request.computed >= len(request) + request.pending
            if makes and request.out:
                request.pending += 1
            self.flight.append((request, tokens, makes))
        for request, tokens, makes in seen:
            request.flight -= tokens
            if request.status not in ("running", "preempted") or not makes:
                continue
            if not request.out:
                self._end(request, "completed", self.out)
                continue
            stale = request.status == "preempted"
            self._token(request)
            if not stale:
                request.pending -= 1
                settled = request.computed - request.flight
                request.named = max(request.named, min(settled, len(request)) // self.block)
                self._fill(request, min(request.named, settled // self.block, len(request.held)))
            if request.gen == len(request.out):
                self._leave(request, "completed")
