"""The compiled router against the plain one: random events, arrivals, completions, queues and workers."""
import random

import numpy as np
import pytest
from model.router import Class, Full, Request, Router

from mocker._router import QueueRejection, RouterCore
from mocker._spec import StdRng
from mocker.router_config import KvRouterConfig
from mocker.router_queues import PolicyClass, PolicyProfile


class Config:
    """The few settings that the compiled router reads, with a profile of the test's own."""

    def __init__(self, config, profile):
        self.config, self.profile = config, profile

    def __getattr__(self, name):
        return getattr(self.config, name)

    def policy_profile(self, model_name=None):
        return self.profile


class Draws:
    """The random numbers of the compiled router, drawn the same way."""

    def __init__(self, seed):
        self.rng = StdRng(seed)

    def word(self):
        return self.rng.next_u64()

    def draw(self, n):
        return ((self.word() >> 32) * n) >> 32

    def sample(self):
        return (self.word() >> 11) / 2**53


def tree(rng):
    """Segments that branch: (key, length, parent)."""
    segments = []
    for key in range(rng.randint(1, 12)):
        parent = rng.choice([None, *range(key)]) if key else None
        segments.append((key if rng.random() < 0.9 else rng.getrandbits(62), rng.randint(1, 6), parent))
    return segments


def path(segments, rng, block_size):
    """A prompt that ends somewhere in the tree: (keys, ends, blocks, tokens)."""
    at, chain = rng.randrange(len(segments)), []
    while at is not None:
        chain.append(at)
        at = segments[at][2]
    chain.reverse()
    keys, ends, blocks = [], [], []
    for place, s in enumerate(chain):
        key, length, _ = segments[s]
        if place == len(chain) - 1:
            length = rng.randint(1, length)
        keys.append(key)
        blocks += [(key, i) for i in range(length)]
        ends.append(len(blocks))
    if rng.random() < 0.05:
        keys, ends, blocks = [], [], []
    isl = len(blocks) * block_size + rng.randrange(block_size)
    return np.array(keys, np.uint64), np.array(ends, np.int32), blocks, max(isl, 1)


def options(rng):
    """One set of settings for both sides."""
    config = KvRouterConfig(
        overlap_score_credit=rng.choice([1.0, 0.0, 0.3]),
        overlap_score_credit_decay=rng.choice([0.0, 0.0, 0.7]),
        prefill_load_scale=rng.choice([1.0, 0.0, 2.0, 2.3]),
        router_temperature=rng.choice([0.0, 0.0, 0.0, 0.5]),
        host_cache_hit_weight=rng.choice([0.75, 0.75, 0.0, 0.4]),
        disk_cache_hit_weight=rng.choice([0.25, 0.25, 1.0, 0.1]),
        router_track_active_blocks=rng.random() < 0.8,
        router_assume_kv_reuse=rng.random() < 0.8,
        router_track_prefill_tokens=rng.random() < 0.85,
    )
    if rng.random() < 0.6:
        classes = [PolicyClass("default", rng.choice(["fcfs", "lcfs", "wspt"]),
                               busy_fraction=rng.choice([None, 16.0, 0.0, 0.5, 2.0]))]
        return config, PolicyProfile(tuple(classes), {}, {})
    classes = [
        PolicyClass(f"c{i}", rng.choice(["fcfs", "wspt"]), rng.choice([1, 7, 64, 1000]),
                    rng.choice([None, 0, 40]), rng.choice([None, 0.5, 2.0]),
                    rng.choice([None, None, 2]), rng.choice([None, None, 100]), rng.choice([None, None, 30]))
        for i in range(5)
    ]
    return config, PolicyProfile(tuple(classes), {"c4": 4}, {"a": 0, "b": 1}, 1, (0, 30), (0, 1, 2, 3))


class Pair:
    """Both routers under the same calls; every answer is compared."""

    def __init__(self, rng, workers, seed):
        self.config, self.profile = options(rng)
        self.bs = rng.choice([1, 4, 16, 7])
        budget = rng.choice([None, 16, 64])
        random_ties = rng.random() < 0.5
        draws = Draws(seed)
        modelled = rng.random() < 0.3
        kind = rng.choice(["all", "some"])

        def duration(fresh, cached):
            if not modelled or (kind == "some" and fresh % 3 == 0):
                return None
            return (fresh * 1.5 + cached * 0.25) * 1e-3 if fresh % 5 else 0.0

        self.lower = rng.random() < 0.4
        self.core = RouterCore("kv", Config(self.config, self.profile), self.bs, workers, budget, random_ties, seed,
                               estimator=duration if modelled else None, tree_from=rng.choice([0, 33]),
                               lower_tiers=self.lower)
        weights = self.config.host_cache_hit_weight, self.config.disk_cache_hit_weight
        self.model = Router(
            self.bs, workers, budget=10_000_000 if budget is None else budget, credit=self.config.overlap_score_credit,
            decay=self.config.overlap_score_credit_decay, scale=self.config.prefill_load_scale,
            temperature=self.config.router_temperature, track_blocks=self.config.router_track_active_blocks,
            share_blocks=self.config.router_assume_kv_reuse, track_prefill=self.config.router_track_prefill_tokens,
            classes=[Class(c.name, c.queue_policy, c.quantum, c.busy_tokens, c.busy_fraction, c.max_requests,
                           c.max_isl_tokens, c.max_cached_tokens) for c in self.profile.classes],
            buckets=self.profile.buckets, table=[self.profile.table[:2], self.profile.table[2:]],
            draw=draws.draw if random_ties else None, sample=draws.sample,
            estimate=(lambda fresh, cached: None if duration(fresh, cached) is None
                      else round(duration(fresh, cached) * 1000.0 / 1000.0 * 1e9)) if modelled else None,
            weights=weights if self.lower else None,
        )
        self.workers = set(range(workers))

    def compare(self, now):
        tokens, blocks = self.model.active_tokens(now), self.model.active_blocks()
        for w, (eligible, requests, _, prefill, active, cached) in enumerate(self.core.loads(now)):
            assert eligible == (w in self.model.eligible)
            assert (prefill, active, cached) == (tokens[w], blocks[w], len(self.model.cached[w]))
            assert requests == sum(r.worker == w for r in self.model.flight.values())
        assert self.core.queued == sum(len(c.waiting) for c in self.model.classes)
        assert self.core.in_flight == len(self.model.flight)

    def arrival(self, row, prompt, priority, strict, policy, now):
        keys, ends, blocks, isl = prompt
        overlaps = self.model.overlaps(blocks)
        assert self.core.overlaps(keys, ends).tolist() == [overlaps.get(w, 0) for w in sorted(self.workers)]
        try:
            expected = self.model.arrival(row, blocks, isl, priority, strict, policy, now)
        except Full as full:
            with pytest.raises(QueueRejection) as caught:
                self.core.arrival(row, keys, ends, isl, priority, strict, policy, now)
            error = caught.value
            assert (error.policy_class, error.limit_kind, error.current, error.limit) == full.args
            return
        assert self.core.arrival(row, keys, ends, isl, priority, strict, policy, now) == expected


@pytest.mark.parametrize("seed", range(400))
def test_core_is_the_model(seed):
    rng = random.Random(seed)
    pair = Pair(rng, rng.choice([1, 2, 4, 9, 40]), seed)
    segments, now, row, gone, draining = tree(rng), 0.0, 0, [], set()
    depth = {}  # (worker, segment place) -> cached blocks, kept prefix-closed
    for _ in range(rng.choice([30, 150])):
        now += rng.choice([0.0, 0.0, 1.0, 0.37, 12.5])
        live = sorted(pair.model.flight)
        what = rng.random()
        if pair.lower and rng.random() < 0.4:          # below the GPU anything may be anywhere
            worker, tier = rng.choice(sorted(pair.workers - set(gone))), rng.randrange(3)
            key, length, _ = rng.choice(segments)
            at, stored = rng.randrange(length), rng.random() < 0.8
            if rng.random() < 0.03:
                pair.core.lower_cleared(worker, tier + 1)
                pair.model.below[worker][tier].clear()
            else:
                pair.core.lower_block(worker, tier + 1, key, stored, at)
                (set.add if stored else set.discard)(pair.model.below[worker][tier], (key, at))
        elif what < 0.35:
            policy = 0 if not pair.profile.buckets else rng.choice([4, -1, -2])
            priority, strict = rng.choice([0, 0, 3, -2]), rng.choice([0, 0, 1])
            pair.arrival(row, path(segments, rng, pair.bs), priority, strict, policy, now)
            row += 1
        elif what < 0.55:
            worker, place = rng.choice(sorted(pair.workers - set(gone))), rng.randrange(len(segments))
            key, length, parent = segments[place]
            if parent is not None and depth.get((worker, parent), 0) < segments[parent][1]:
                continue
            had = depth.get((worker, place), 0)
            if had < length:
                end = rng.randint(had + 1, length)
                depth[worker, place] = end
                pair.core.stored(worker, key, end)
                pair.model.stored(worker, [(key, i) for i in range(had, end)])
        elif what < 0.65:
            held = [k for k, d in depth.items() if d > 0
                    and not any(segments[p][2] == k[1] and depth.get((k[0], p), 0) for p in range(len(segments)))]
            if held:
                worker, place = rng.choice(held)
                key, had = segments[place][0], depth[worker, place]
                start = rng.randrange(had)
                depth[worker, place] = start
                pair.core.removed(worker, key, start)
                pair.model.removed(worker, [(key, i) for i in range(start, had)])
        elif what < 0.75 and live:
            done = rng.choice(live)
            assert pair.core.prefill_completed(done, now)
            pair.model.prefill_completed(done, now)
            assert pair.core.drain(now) == pair.model.drain(now)
        elif what < 0.93 and live:
            done = rng.choice(live)
            assert pair.core.completed(done, now)
            assert not pair.core.completed(done, now)
            pair.model.completed(done, now)
            assert pair.core.drain(now) == pair.model.drain(now)
        elif what < 0.95:
            waiting = [r.row for c in pair.model.classes for r in c.waiting]
            some = rng.choice([*waiting, row + 1])
            assert pair.core.cancel(some) == pair.model.cancel(some)
        elif what < 0.97 and pair.model.eligible:
            worker = rng.choice(sorted(pair.model.eligible))
            assert pair.core.remove_worker(worker)
            pair.model.remove_worker(worker)
            draining.add(worker)
        elif what < 0.98 and draining:
            worker = draining.pop()
            pair.core.finalize_worker(worker)
            pair.model.finalize_worker(worker)
            gone.append(worker)
            depth = {k: d for k, d in depth.items() if k[0] != worker}
            if len(gone) == len(pair.workers):
                back = gone.pop()
                pair.core.add_worker(back)
                pair.model.add_worker(back)
        else:
            worker = draining.pop() if draining and rng.random() < 0.5 else len(pair.workers)
            pair.workers.add(worker)
            assert pair.core.add_worker(worker)
            pair.model.add_worker(worker)
            assert pair.core.drain(now) == pair.model.drain(now)
        pair.compare(now)
    prompt = path(segments, rng, pair.bs)
    if pair.model.eligible:
        request = Request(row, prompt[2], prompt[3], pair.model.overlaps(prompt[2]), pair.model.lower(prompt[2]))
        assert {w: p[4] for w, p in pair.core.parts(prompt[0], prompt[1], prompt[3], now).items()} \
            == pair.model.costs(request, now)
    for some in sorted(pair.model.flight):
        pair.core.completed(some, now)
    for worker in pair.workers:
        pair.core.cleared(worker)
    assert pair.core.sizes[0] == 0
