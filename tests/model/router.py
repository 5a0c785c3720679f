"""The KV-aware router in plain Python: sets of blocks, counters and lists, one rule after the other.

A request is the list of its full prompt blocks, root first; any hashable names a block. Workers are numbers. Times are
milliseconds. Nothing here is fast, and everything random comes in from outside.
"""
import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class Class:
    """One queue: see `mocker.router_queues.PolicyClass`."""

    name: str = "default"
    policy: str = "fcfs"
    quantum: int = 1
    busy_tokens: int | None = None
    busy_fraction: float | None = 16.0
    max_requests: int | None = None
    max_isl: int | None = None
    max_cached: int | None = None
    waiting: list = field(default_factory=list)
    credit: int = 0


@dataclass
class Request:
    """A request that waits or is in flight."""

    row: int
    blocks: list
    isl: int
    overlaps: dict
    lower: dict = field(default_factory=dict)
    strict: int = 0
    score: float = 0.0
    number: int = 0
    cost: int = 1
    cached: int = 0
    worker: int | None = None
    counted: list = field(default_factory=list)


class Full(Exception):
    """A queue holds as much as it may: (class name, kind, current, limit)."""


def nanos(ms):
    """Nearest nanosecond of a time in ms that was first divided by 1000 as a float; ties to even."""
    return round(Fraction(max(ms, 0.0) / 1000.0) * 10**9)


def seconds(ns):
    return float(ns // 10**9) + float(ns % 10**9) / 1e9


class Prefills:
    """Active prefill tokens of one worker."""

    def __init__(self):
        self.order = []  # [row, tokens, duration ns or None], oldest first
        self.anchor = None

    def add(self, row, tokens, duration, now):
        if not self.order:
            self.anchor = now
        self.order.append((row, tokens, duration))

    def remove(self, row, now):
        for place, (other, _, duration) in enumerate(self.order):
            if other == row:
                del self.order[place]
                if place == 0:
                    self.anchor = now
                elif duration is not None:
                    self.anchor = min(self.anchor + duration, now)
                return

    def tokens(self, now):
        if not self.order:
            return 0
        total = sum(tokens for _, tokens, _ in self.order)
        _, oldest, duration = self.order[0]
        elapsed = max(now - self.anchor, 0)
        if any(d is None for _, _, d in self.order):
            if duration is None:
                left = oldest
            elif duration == 0:
                left = 0
            else:
                left = math.ceil(oldest * min(max(1.0 - seconds(elapsed) / seconds(duration), 0.0), 1.0))
            return total - oldest + left
        done = oldest if duration == 0 else oldest * elapsed // duration
        return max(total - done, 0)


class Router:
    """Index, loads, choice and queues.

    `buckets` is a list of lower ends; `table[family][bucket]` and an explicit class are numbers of `classes`.
    `draw(n)` gives a number under n for ties and `sample()` one in [0, 1) for a temperature; `estimate(fresh, cached)`
    gives ns or None. `weights` of (host, disk and external) blocks: those count too; None: only blocks on the GPU do.
    """

    def __init__(self, block_size, workers, *, budget=10_000_000, credit=1.0, decay=0.0, scale=1.0, temperature=0.0,
                 track_blocks=True, share_blocks=True, track_prefill=True, classes=None, buckets=(), table=(),
                 draw=None, sample=None, estimate=None, weights=None):
        self.bs, self.budget = block_size, budget
        self.credit, self.decay, self.scale, self.temperature = credit, decay, scale, temperature
        self.track_blocks, self.share_blocks, self.track_prefill = track_blocks, share_blocks, track_prefill
        self.classes = classes or [Class()]
        self.buckets, self.table = buckets, table
        self.draw, self.sample, self.estimate = draw, sample, estimate
        self.eligible = set()
        self.weights = weights
        self.cached, self.active, self.prefills = {}, {}, {}
        self.below = {}  # worker -> blocks of the host, the disk, the external store
        self.flight = {}
        self.next_number = self.next_class = 0
        for worker in range(workers):
            self.add_worker(worker)

    # -- workers and their blocks

    def add_worker(self, worker):
        assert worker not in self.eligible
        self.eligible.add(worker)
        self.cached.setdefault(worker, set())
        self.below.setdefault(worker, [set(), set(), set()])
        self.active.setdefault(worker, Counter())
        self.prefills.setdefault(worker, Prefills())

    def remove_worker(self, worker):
        self.eligible.discard(worker)

    def finalize_worker(self, worker):
        for row in [r.row for r in self.flight.values() if r.worker == worker]:
            self.completed(row, 0.0)
        self.cached[worker].clear()
        self.below[worker] = [set(), set(), set()]

    def stored(self, worker, blocks):
        self.cached[worker].update(blocks)

    def removed(self, worker, blocks):
        self.cached[worker].difference_update(blocks)

    # -- what the cost is made of

    @staticmethod
    def prefix(blocks, known):
        n = 0
        while n < len(blocks) and blocks[n] in known:
            n += 1
        return n

    def overlaps(self, blocks):
        found = {worker: self.prefix(blocks, known) for worker, known in self.cached.items()}
        return {worker: n for worker, n in found.items() if n > 0}

    def lower(self, blocks):
        """Worker -> (blocks in its host that follow the cached ones, blocks on disk and beyond that follow these)."""
        out = {}
        for worker in self.eligible if self.weights else ():
            at, found = self.prefix(blocks, self.cached[worker]), []
            for tier in self.below[worker]:
                found.append(self.prefix(blocks[at:], tier))
                at += found[-1]
            out[worker] = found[0], found[1] + found[2]
        return out

    def cached_tokens(self, request, worker):
        """Prompt tokens that count as cached on a worker."""
        blocks = float(request.overlaps.get(worker, 0))
        for n, weight in zip(request.lower.get(worker, (0, 0)), self.weights or (0.0, 0.0), strict=True):
            blocks += n * weight
        return math.floor(blocks * self.bs + 0.5)

    def active_tokens(self, now):
        return {worker: prefills.tokens(nanos(now)) for worker, prefills in self.prefills.items()}

    def active_blocks(self):
        return {worker: len(+counter) for worker, counter in self.active.items()}

    def tracked(self, request):
        """Blocks to be counted for a request; with private names if equal blocks count apart."""
        if not self.track_blocks:
            return []
        if self.share_blocks:
            return request.blocks
        return [(request.row, "alone", i) for i in range(request.isl // self.bs)]

    def costs(self, request, now):
        tokens, blocks, mine = self.active_tokens(now), self.active_blocks(), self.tracked(request)
        least = min((tokens[w] for w in self.eligible), default=0)
        out = {}
        for w in sorted(self.eligible):
            o, p = request.overlaps.get(w, 0), tokens[w]
            cached = self.cached_tokens(request, w)
            raw = p + max(request.isl - cached, 0) + cached if self.track_prefill else 0
            host, disk = request.lower.get(w, (0, 0))
            host_weight, disk_weight = self.weights or (0.0, 0.0)
            fade = 1.0
            if self.track_prefill and self.decay > 0.0:
                fade = 1.0 / (1.0 + self.decay * (float(p - least) / self.bs / math.ceil(request.isl / self.bs)))
            credit = self.credit * fade * float(o) + host_weight * host + disk_weight * disk
            prefill = self.scale * max(float(raw) / self.bs - credit, 0.0)
            new = len(mine) - self.prefix(mine, +self.active[w])
            out[w] = prefill + float(blocks[w] + new)
        return out

    def select(self, request, now):
        costs = self.costs(request, now)
        low, high = min(costs.values()), max(costs.values())
        if self.temperature == 0.0:
            ties = [w for w, cost in costs.items() if cost == low]
            return ties[self.draw(len(ties)) if self.draw is not None and len(ties) > 1 else 0]
        if low == high:
            weights = {w: 1.0 / len(costs) for w in costs}
        else:
            scale = -1.0 / ((high - low) * self.temperature)
            weights = {w: math.exp(cost * scale - low * scale) for w, cost in costs.items()}
        total, sum_, draw = 0.0, 0.0, self.sample()
        for weight in weights.values():
            total += weight
        for w, weight in weights.items():
            sum_ += weight / total
            if draw <= sum_:
                return w
        return w

    def admit(self, request, now):
        w = request.worker = self.select(request, now)
        request.counted = self.tracked(request)
        self.active[w].update(request.counted)
        cached = min(self.cached_tokens(request, w), request.isl)
        if self.track_prefill and request.isl > cached:
            fresh = request.isl - cached
            duration = self.estimate(fresh, cached) if self.estimate is not None else None
            self.prefills[w].add(request.row, fresh, duration, nanos(now))
        self.flight[request.row] = request
        return w, request.overlaps.get(w, 0)

    # -- queue

    def busy(self, cls, now):
        tokens = self.active_tokens(now)

        def worker_busy(n):
            over = cls.busy_tokens is not None and n > cls.busy_tokens
            return over or (cls.busy_fraction is not None and n > cls.busy_fraction * self.budget)

        return all(worker_busy(tokens[w]) for w in self.eligible)

    def class_of(self, policy, uncached):
        if policy >= 0:
            return policy
        bucket = max(i for i, start in enumerate(self.buckets) if start <= uncached)
        return self.table[-1 - policy][bucket]

    def enqueue(self, cls, request, priority, now):
        sums = (
            ("requests", len(cls.waiting), cls.max_requests),
            ("raw_isl_tokens", sum(r.isl for r in cls.waiting), cls.max_isl),
            ("cached_tokens", sum(r.cached for r in cls.waiting), cls.max_cached),
        )
        for kind, current, most in sums:
            if most is not None and current >= most * len(self.eligible):
                raise Full(cls.name, kind, current, most * len(self.eligible))
        bump, at = float(max(priority, 0)), max(now, 0.0) / 1000.0
        request.score = {"fcfs": bump - at, "lcfs": bump + at, "wspt": (1.0 + bump) / request.cost}[cls.policy]
        request.number = self.next_number
        self.next_number += 1
        cls.waiting.append(request)
        cls.waiting.sort(key=lambda r: (-r.strict, -r.score, r.number))

    def pay(self, place):
        cls = self.classes[place]
        request = cls.waiting.pop(0)
        cls.credit = max(cls.credit - request.cost, 0)
        if not cls.waiting:
            cls.credit = 0
        stays = cls.waiting and cls.waiting[0].cost <= cls.credit
        self.next_class = place if stays else (place + 1) % len(self.classes)
        return request

    def next_request(self, now):
        if not any(cls.waiting for cls in self.classes):
            return None
        ring = [(self.next_class + i) % len(self.classes) for i in range(len(self.classes))]
        ready = []
        for place in ring:
            cls = self.classes[place]
            if not cls.waiting:
                cls.credit = 0
                continue
            if self.busy(cls, now):
                continue
            ready.append(place)
            if cls.waiting[0].cost <= cls.credit:
                return self.pay(place)
            cls.credit += cls.quantum
            if cls.waiting[0].cost <= cls.credit:
                return self.pay(place)
        if not ready:
            return None
        while True:  # round by round, where the real one jumps
            for place in ready:
                self.classes[place].credit += self.classes[place].quantum
            for place in ring:
                if place in ready and self.classes[place].waiting[0].cost <= self.classes[place].credit:
                    return self.pay(place)

    # -- events of requests

    def arrival(self, row, blocks, isl, priority=0, strict=0, policy=0, now=0.0):
        """Give (worker, cached blocks), or None for a request that waits."""
        request = Request(row, list(blocks), isl, self.overlaps(blocks), self.lower(blocks), strict)
        request.cached = min(max((self.cached_tokens(request, w) for w in self.eligible), default=0), isl)
        request.cost = max(isl - request.cached, 1)
        cls = self.classes[self.class_of(policy, isl - request.cached)]
        limited = cls.busy_tokens is not None or cls.busy_fraction is not None
        if not self.eligible or (limited and (cls.waiting or self.busy(cls, now))):
            self.enqueue(cls, request, priority, now)
            return None
        return self.admit(request, now)

    def prefill_completed(self, row, now):
        self.prefills[self.flight[row].worker].remove(row, nanos(now))

    def completed(self, row, now):
        request = self.flight.pop(row)
        self.prefills[request.worker].remove(row, nanos(now))
        self.active[request.worker].subtract(request.counted)
        self.active[request.worker] = +self.active[request.worker]

    def cancel(self, row):
        for cls in self.classes:
            for request in cls.waiting:
                if request.row == row:
                    cls.waiting.remove(request)
                    if not cls.waiting:
                        cls.credit = 0
                    return True
        return False

    def drain(self, now):
        out = []
        while (request := self.next_request(now)) is not None:
            out.append((request.row, *self.admit(request, now)))
        return out
