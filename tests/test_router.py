"""The router driven by hand: index, cost, choice, loads, queue, workers, and the other policies."""
import json
import math
from collections import Counter

import numpy as np
import pytest

from mocker._hash import compute_block_hash_for_seq, compute_seq_hashes
from mocker._router import RouterCore
from mocker.router import (
    KvRouter,
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    QueueRejection,
    RandomChoice,
    RoundRobin,
    Router,
    routing_policy,
)
from mocker.router_config import KvRouterConfig

BS = 4
NO_BLOCKS = np.empty(0, np.uint64), np.empty(0, np.int32)


def block(n):
    """Four tokens that make one block."""
    return [n] * BS


def prompt(*blocks, rest=0):
    return [t for n in blocks for t in block(n)] + [99] * rest


def stored(tokens, parent=None, external=None, rank=0):
    """The stored event of a whole prompt, or of what comes after `parent`."""
    local, seq = compute_seq_hashes(tokens, BS)
    names = seq if external is None else external
    blocks = [{"block_hash": e, "tokens_hash": t, "mm_extra_info": None} for e, t in zip(names, local, strict=True)]
    return {"event_id": 0, "data": {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}},
            "dp_rank": rank}


def removed(*hashes):
    return {"event_id": 0, "data": {"removed": {"block_hashes": list(hashes)}}, "dp_rank": 0}


def kv(workers=2, **config):
    return KvRouter(KvRouterConfig(**config), BS, workers, tie_break="lowest", max_num_batched_tokens=BS)


# ---- index --------------------------------------------------------------------------------------------------------


def test_a_match_is_the_longest_prefix_that_a_worker_has():
    router = kv(3)
    router.apply_event(0, stored(prompt(1, 2, 3)))
    router.apply_event(1, stored(prompt(1, 2, 9)))
    assert router.find_matches(prompt(1, 2, 3, 4)) == {0: 3, 1: 2}
    assert router.find_matches(prompt(1, 2, 3, rest=2)) == {0: 3, 1: 2}
    assert router.find_matches(prompt(5)) == {}
    assert router.find_matches(prompt(2, 3)) == {}
    assert router.find_matches([1, 1]) == {}
    assert router.find_matches(hashes=compute_block_hash_for_seq(prompt(1, 2, 9), BS)) == {0: 2, 1: 3}


def test_a_store_may_go_on_below_a_parent_and_be_repeated():
    router = kv(1)
    chain = compute_seq_hashes(prompt(1, 2, 3), BS)[1]
    router.apply_event(0, stored(prompt(1)))
    below = stored(prompt(1, 2, 3))
    inner = below["data"]["stored"]
    inner["blocks"], inner["parent_hash"] = inner["blocks"][1:], chain[0]
    router.apply_event(0, below)
    router.apply_event(0, below)
    assert router.find_matches(prompt(1, 2, 3)) == {0: 3}
    assert router.loads()[0].cached_blocks == 3


def test_block_names_may_be_the_engines_own():
    router = kv(2)
    router.apply_event(0, stored(prompt(1, 2), external=[70, 71]))
    router.apply_event(1, stored(prompt(1, 2), external=[80, 81]))
    assert router.find_matches(prompt(1, 2)) == {0: 2, 1: 2}
    router.apply_event(0, removed(71))
    assert router.find_matches(prompt(1, 2)) == {0: 1, 1: 2}


def test_removal_clearing_and_reuse():
    router = kv(2)
    chain = compute_seq_hashes(prompt(1, 2, 3), BS)[1]
    for worker in (0, 1):
        router.apply_event(worker, stored(prompt(1, 2, 3)))
    router.apply_event(0, removed(chain[2], chain[1]))
    assert router.find_matches(prompt(1, 2, 3)) == {0: 1, 1: 3}
    router.apply_event(1, {"event_id": 0, "data": "cleared", "dp_rank": 0})
    assert router.find_matches(prompt(1, 2, 3)) == {0: 1}
    router.apply_event(1, stored(prompt(1)))
    assert router.find_matches(prompt(1, 2, 3)) == {0: 1, 1: 1}


def test_events_that_cannot_be_are_refused_and_change_nothing():
    router = kv(1)
    router.apply_event(0, stored(prompt(1)))
    chain = compute_seq_hashes(prompt(1), BS)[1]
    with pytest.raises(ValueError, match="below 12345"):
        router.apply_event(0, stored(prompt(2), parent=12345))
    with pytest.raises(ValueError, match="below itself"):
        router.apply_event(0, stored(prompt(1), parent=chain[0]))
    with pytest.raises(ValueError, match="removes block 5"):
        router.apply_event(0, removed(chain[0], 5))
    with pytest.raises(ValueError, match="worker .* does not exist"):
        router.apply_event(3, stored(prompt(1)))
    assert router.find_matches(prompt(1)) == {0: 1}


def test_events_of_other_tiers_are_ignored_and_ranks_are_workers():
    router = KvRouter(None, BS, [(7, 0), (7, 1)])
    event = {"worker_id": 7, "storage_tier": "host_pinned", "event": stored(prompt(1))}
    router.apply_events([event])
    assert router.find_matches(prompt(1)) == {}
    router.apply_events([{"worker_id": 7, "event": stored(prompt(1), rank=1)}])
    assert router.find_matches(prompt(1)) == {(7, 1): 1}
    router.apply_event(7, {"data": "cleared"})
    assert router.find_matches(prompt(1)) == {}


def test_index_memory_is_bounded_by_resident_blocks():
    core = RouterCore("kv", KvRouterConfig(), BS, 2)
    largest = (0, 0, 0)
    for i in range(60_000):
        core.stored(i % 2, i, 3)
        core.stored(i % 2, i + 10**9, 1)
        if i >= 100:
            core.removed((i - 100) % 2, i - 100 + 10**9, 0)
            core.removed((i - 100) % 2, i - 100, 1)
            core.removed((i - 100) % 2, i - 100, 0)
        if i == 1000:
            largest = core.sizes[1:3]
    assert core.sizes[1:3] == largest
    assert core.sizes[0] == 200
    assert [load[5] for load in core.loads()] == [200, 200]


# ---- cost and choice ------------------------------------------------------------------------------------------------


def test_cost_is_prefill_blocks_plus_active_blocks():
    router = KvRouter(None, 64, 1)
    tokens = list(range(1000))
    assert router.score(tokens)[0].cost == 15.625 + 15
    router.choose("a", tokens)
    assert router.score(list(range(5000, 6000)))[0] == (0, 1000, 15, 15, 31.25 + 30, 0, 0)
    assert router.score(tokens)[0] == (0, 1000, 15, 0, 31.25 + 15, 0, 0)


def test_cached_blocks_and_settings_change_the_cost():
    tokens = prompt(1, 2, 3, rest=2)
    for config, cost in [
        ({}, 3.5 - 2 + 3), ({"overlap_score_credit": 0.5}, 3.5 - 1 + 3), ({"prefill_load_scale": 3.0}, 4.5 + 3),
        ({"router_track_active_blocks": False}, 1.5), ({"router_track_prefill_tokens": False}, 3.0),
        ({"overlap_score_weight": 0}, 3.0),
    ]:
        router = kv(2, **config)
        router.apply_event(1, stored(prompt(1, 2)))
        assert router.score(tokens)[1].cost == cost
        assert router.score(tokens)[1].overlap_blocks == 2


def test_the_scale_comes_after_the_credit_and_the_prefill_part_is_never_negative():
    router = kv(1, prefill_load_scale=10.0)
    router.apply_event(0, stored(prompt(1, 2)))
    assert router.score(prompt(1, 2))[0].cost == 2.0


def test_credit_decay_can_prefer_a_cold_idle_worker():
    for decay, winner in [(0.0, 0), (10.0, 1)]:
        router = kv(2, overlap_score_credit_decay=decay, router_track_active_blocks=False, router_queue_threshold=None)
        router.apply_event(0, stored(prompt(1, 2, 3, 4)))
        router.apply_event(0, stored(prompt(9)))
        assert router.choose("busy", prompt(9, 8, 7)).worker == 0
        assert router.choose("next", prompt(1, 2, 3, 4)).worker == winner


def test_cached_prefix_wins_and_is_reported():
    router = kv(3)
    router.apply_event(2, stored(prompt(1, 2)))
    decision = router.choose("a", prompt(1, 2, 3))
    assert (decision.worker, decision.overlap_blocks) == (2, 2)
    assert min(decision.scores, key=lambda w: decision.scores[w].cost) == 2
    assert router.loads()[2].active_prefill_tokens == 4


def test_lowest_ties_go_by_id_whenever_a_worker_came():
    router = KvRouter(None, BS, [8, 5], tie_break="lowest")
    assert router.choose("a", prompt(1)).worker == 5
    router.add_worker(3)
    assert router.choose("b", prompt(2)).worker == 3
    assert router.choose("c", prompt(3)).worker == 8


def chi_square(counts, expected):
    return sum((count - e) ** 2 / e for count, e in zip(counts, expected, strict=True))


def test_random_ties_are_uniform():
    for workers, bound in [(2, 15.1), (4, 21.1), (7, 27.9)]:      # exceeded once in 10,000
        router = KvRouter(None, BS, workers, seed=workers)
        seen = Counter()
        for i in range(8000):
            seen[router.choose(i, prompt(1)).worker] += 1
            router.completed(i)
        assert chi_square([seen[w] for w in range(workers)], [8000 / workers] * workers) < bound


def test_seed_decides_random_ties():
    def run(seed):
        router = KvRouter(None, BS, 8, seed=seed)
        return [router.choose(i, prompt(i)).worker for i in range(200)]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_temperature_draws_with_the_softmax_of_normalised_costs():
    router = kv(3, router_temperature=0.7, router_queue_threshold=None)
    router.apply_event(0, stored(prompt(1, 2)))
    router.apply_event(1, stored(prompt(1)))
    costs = [score.cost for score in router.score(prompt(1, 2, 3)).values()]
    weights = [math.exp(-(c - min(costs)) / ((max(costs) - min(costs)) * 0.7)) for c in costs]
    seen = Counter()
    for i in range(20_000):
        seen[router.choose(i, prompt(1, 2, 3)).worker] += 1
        router.completed(i)
    assert chi_square([seen[w] for w in range(3)], [20_000 * w / sum(weights) for w in weights]) < 18.5
    router = kv(4, router_temperature=0.1)
    seen = Counter()
    for i in range(8000):
        seen[router.choose(i, prompt(1)).worker] += 1
        router.completed(i)
    assert chi_square([seen[w] for w in range(4)], [2000] * 4) < 21.1


def test_empty_prompts_and_used_ids_are_refused():
    router = kv(1)
    with pytest.raises(ValueError, match="at least 1 token"):
        router.choose("a", [])
    router.choose("a", prompt(1))
    with pytest.raises(ValueError, match="in flight"):
        router.choose("a", prompt(1))
    with pytest.raises(ValueError, match="either tokens or hashes"):
        router.choose("b")


# ---- loads ----------------------------------------------------------------------------------------------------------


def test_shared_blocks_count_once_until_the_last_request_ends():
    router = kv(1, router_queue_threshold=None)
    router.choose("a", prompt(1, 2, 3))
    router.choose("b", prompt(1, 2, 4, 5))
    assert router.loads()[0].active_blocks == 5
    assert router.score(prompt(1, 2, 4, 6))[0].new_blocks == 1
    router.completed("b")
    assert router.loads()[0].active_blocks == 3
    router.completed("a")
    assert router.loads()[0] == (True, 0, 0, 0, 0, 0)


def test_without_reuse_equal_blocks_count_apart():
    router = kv(1, router_assume_kv_reuse=False, router_queue_threshold=None)
    router.choose("a", prompt(1, 2))
    router.choose("b", prompt(1, 2))
    assert router.loads()[0].active_blocks == 4
    assert router.score(prompt(1, 2))[0].new_blocks == 2


def test_prefill_tokens_are_what_is_not_cached_until_the_first_token():
    router = kv(1, router_queue_threshold=None)
    router.apply_event(0, stored(prompt(1)))
    router.choose("a", prompt(1, 2, rest=1))
    router.choose("full", prompt(1))
    assert router.loads()[0].active_prefill_tokens == 5
    router.prefill_completed("full")
    router.prefill_completed("a")
    assert router.loads()[0].active_prefill_tokens == 0
    router.prefill_completed("a")
    router.completed("a")
    router.completed("a")
    with pytest.raises(KeyError):
        router.prefill_completed("a")


def melting(durations):
    """A router whose prefills take so many seconds each, in order."""
    durations = iter(durations)
    return KvRouter(KvRouterConfig(router_queue_threshold=None), 64, 1,
                    prefill_estimator=lambda fresh, cached: next(durations))


def test_active_prefill_tokens_melt_with_an_estimate():
    router = melting([10.0])
    router.choose("a", list(range(64)), now_ms=0.0)
    assert [router.loads(t)[0].active_prefill_tokens for t in (0.0, 5000.0, 9999.0, 10_000.0, 20_000.0)] \
        == [64, 32, 1, 0, 0]


def test_time_flows_from_the_oldest_prefill_into_the_younger():
    router = melting([1.0, 4.0])
    router.choose("a", list(range(100)), now_ms=0.0)
    router.choose("b", list(range(1000, 1040)), now_ms=500.0)
    assert router.loads(1000.0)[0].active_prefill_tokens == 40
    assert router.loads(1200.0)[0].active_prefill_tokens == 20      # past the oldest's own time
    router.prefill_completed("a", now_ms=1200.0)
    assert router.loads(1200.0)[0].active_prefill_tokens == 40      # counted anew
    assert router.loads(2200.0)[0].active_prefill_tokens == 30


def test_a_younger_prefill_that_ends_first_takes_its_time_along():
    router = melting([10.0, 2.0, 50.0])
    router.choose("a", list(range(100)), now_ms=0.0)
    router.choose("b", list(range(1000, 1100)), now_ms=0.0)
    router.prefill_completed("b", now_ms=3000.0)
    assert router.loads(3000.0)[0].active_prefill_tokens == 90      # one of three seconds is left for a
    router.choose("c", list(range(2000, 2100)), now_ms=3000.0)
    router.prefill_completed("c", now_ms=3500.0)
    assert router.loads(3500.0)[0].active_prefill_tokens == 100     # never beyond now


def test_one_prefill_without_an_estimate_stops_the_flow():
    router = melting([4.0, None])
    router.choose("a", list(range(10)), now_ms=0.0)
    router.choose("b", list(range(1000, 1010)), now_ms=0.0)
    assert [router.loads(t)[0].active_prefill_tokens for t in (0.0, 1000.0, 4000.0, 9000.0)] == [20, 18, 10, 10]
    router.prefill_completed("a", now_ms=9000.0)
    assert router.loads(90_000.0)[0].active_prefill_tokens == 10


def test_an_estimators_exception_comes_out():
    def broken(fresh, cached):
        raise ZeroDivisionError

    router = KvRouter(None, 64, 1, prefill_estimator=broken)
    with pytest.raises(ZeroDivisionError):
        router.choose("a", list(range(64)))
    assert router.loads()[0] == (True, 0, 0, 0, 0, 0)


# ---- queue ----------------------------------------------------------------------------------------------------------


def test_requests_wait_while_all_workers_are_busy_and_go_when_one_is_not():
    router = kv(2, router_queue_threshold=0.5)
    assert [router.choose(i, prompt(i)).worker for i in range(3)] == [0, 1, None]
    assert router.pending_count == 1
    assert router.choose(3, prompt(3)).worker is None
    assert [(d.request_id, d.worker) for d in router.prefill_completed(1)] == [(2, 1)]
    assert [(d.request_id, d.worker) for d in router.completed(0)] == [(3, 0)]
    assert router.pending_count == 0


def test_a_backlog_is_not_overtaken():
    router = kv(1, router_queue_threshold=1.0)
    router.choose("a", prompt(1, 2))
    assert router.choose("b", prompt(2)).worker is None
    router._core.prefill_completed(0)                   # nobody has drained the queue
    assert router.choose("c", prompt(3)).worker is None
    assert [d.request_id for d in router.drain()] == ["b", "c"]


def test_no_threshold_no_queue():
    router = kv(1, router_queue_threshold=None)
    assert all(router.choose(i, prompt(i)).worker == 0 for i in range(9))


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "bcd"), ("lcfs", "dcb"), ("wspt", "cdb")])
def test_queue_policies(policy, order):
    router = kv(1, router_queue_threshold=0.0, router_queue_policy=policy)
    router.choose("a", prompt(0))
    for at, (name, length) in enumerate([("b", 4), ("c", 1), ("d", 2)], 1):
        assert router.choose(name, prompt(*range(length)), now_ms=1000.0 * at).worker is None
    went = []
    name = "a"
    for _ in order:
        (decision,) = router.completed(name, now_ms=9000.0)
        name = decision.request_id
        went.append(name)
    assert "".join(went) == order


def test_strict_priority_beats_all_and_ties_keep_the_order_of_arrival():
    router = kv(1, router_queue_threshold=0.0)
    router.choose("a", prompt(0))
    given = [("b", 0, 0), ("c", 5, 0), ("d", 0, 2), ("e", 0, 2), ("f", -9, 0), ("g", 1, 2)]
    for name, priority, strict in given:
        router.choose(name, prompt(1), priority=priority, strict_priority=strict)
    went, name = [], "a"
    for _ in given:
        (decision,) = router.completed(name)
        name = decision.request_id
        went.append(name)
    assert "".join(went) == "gdecbf"


def test_overlaps_are_of_the_arrival_but_loads_of_the_dispatch():
    router = kv(2, router_queue_threshold=0.0)
    router.choose("a", prompt(5))
    router.choose("b", prompt(6))
    router.apply_event(1, stored(prompt(1, 2)))
    assert router.choose("c", prompt(1, 2, 3)).worker is None
    router.apply_event(1, {"data": "cleared"})
    router.apply_event(0, stored(prompt(1, 2, 3)))
    router._core.prefill_completed(0)
    (decision,) = router.prefill_completed("b")
    assert (decision.worker, decision.overlap_blocks) == (1, 2)


def test_cancelled_requests_are_never_dispatched():
    router = kv(1, router_queue_threshold=0.0)
    router.choose("a", prompt(1))
    router.choose("b", prompt(2))
    assert router.cancel("b") and not router.cancel("b") and not router.cancel("a")
    assert router.completed("a") == []
    assert router.choose("b", prompt(2)).worker == 0


POLICY = {
    "default_policy_family": "chat",
    "uncached_isl_buckets": [{"min_tokens": 0, "bucket": "short"}, {"min_tokens": 8, "bucket": "long"}],
    "policy_classes": [
        {"name": "chat-short", "policy_family": "chat", "cache_bucket": "short", "quantum": 4,
         "prefill_busy_threshold": 0},
        {"name": "chat-long", "policy_family": "chat", "cache_bucket": "long", "quantum": 8,
         "prefill_busy_threshold": 0, "request_queue_limit_per_worker": 1},
        {"name": "batch", "quantum": 1, "prefill_busy_threshold": 0, "queue_policy": "wspt"},
    ],
}


@pytest.fixture
def policy_file(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(POLICY))
    return path


def test_policy_file_sorts_requests_by_uncached_tokens_and_limits_queues(policy_file):
    router = kv(1, router_policy_config=policy_file)
    router.apply_event(0, stored(prompt(7, 8, 9)))
    router.choose("a", prompt(1))
    router.choose("long", prompt(2, 3))
    router.choose("cached", prompt(7, 8, 9))            # nothing left to compute: short
    with pytest.raises(QueueRejection, match=r"'chat-long' queue requests .*current=1, limit=1") as info:
        router.choose("longer", prompt(2, 3, 4))
    assert info.value.limit_kind == "requests"
    router.choose("batch", prompt(2, 3, 4), policy_class="batch")
    router.choose("unknown", prompt(4), policy_class="nobody")
    assert router.pending_count == 4
    assert router.choose("longer", prompt(1), policy_class="batch").worker is None


def test_classes_share_by_quantum(policy_file):
    router = kv(1, router_policy_config=policy_file)
    router.choose("first", prompt(0))
    for i in range(12):
        router.choose(("short", i), prompt(i))
        router.choose(("batch", i), prompt(i), policy_class="batch")
    went, last = Counter(), "first"
    for _ in range(10):
        (decision,) = router.completed(last)
        last = decision.request_id
        went[last[0]] += 1
    assert went == {"short": 8, "batch": 2}


# ---- workers --------------------------------------------------------------------------------------------------------


def test_removed_workers_are_not_chosen_but_still_counted():
    router = kv(2)
    router.apply_event(0, stored(prompt(1)))
    assert router.choose("a", prompt(1, 2)).worker == 0
    router.remove_worker(0)
    assert router.choose("b", prompt(1, 2)).worker == 1
    assert router.find_matches(prompt(1)) == {0: 1}
    assert router.loads()[0].requests == 1
    router.completed("a")
    router.add_worker(0)
    assert router.choose("c", prompt(1, 2)).worker == 0
    with pytest.raises(ValueError, match="already exists"):
        router.add_worker(0)


def test_finalising_drops_what_is_known_of_a_worker():
    router = kv(2)
    router.apply_event(0, stored(prompt(1)))
    router.choose("a", prompt(1, 2))
    router.remove_worker(0)
    router.finalize_worker(0)
    assert router.loads()[0] == (False, 0, 0, 0, 0, 0)
    assert router.find_matches(prompt(1)) == {}
    assert router.completed("a") == []
    assert router.choose("a", prompt(1)).worker == 1


def test_without_workers_requests_wait_for_one():
    router = kv(1, router_queue_threshold=None)
    router.remove_worker(0)
    assert router.choose("a", prompt(1)).worker is None
    assert router.completed("nobody") == []
    assert [(d.request_id, d.worker) for d in router.add_worker(4)] == [("a", 4)]


def test_a_removed_worker_does_not_count_as_cached_in_the_queue(policy_file):
    router = kv(2, router_policy_config=policy_file)
    router.apply_event(0, stored(prompt(1, 2)))
    router.remove_worker(0)
    router.choose("a", prompt(9))
    router.choose("b", prompt(1, 2))                    # long: the one that has it is gone
    with pytest.raises(QueueRejection):
        router.choose("c", prompt(1, 2))


# ---- other policies -------------------------------------------------------------------------------------------------


def test_round_robin_goes_on_from_its_place_when_workers_change():
    router = Router(RoundRobin(), BS, 3)
    assert [router.choose(i, prompt(i)).worker for i in range(5)] == [0, 1, 2, 0, 1]
    router.remove_worker(0)
    assert [router.choose(i, prompt(i)).worker for i in range(5, 8)] == [1, 2, 1]


def test_least_loaded():
    router = Router(LeastLoaded("requests"), BS, 2, tie_break="lowest")
    assert [router.choose(n, prompt(*range(n))).worker for n in (5, 1, 2)] == [0, 1, 0]
    router.completed(5)
    router.completed(2)
    assert router.choose(3, prompt(1)).worker == 0
    router = Router("least_tokens", BS, 2, tie_break="lowest")
    assert [router.choose(n, prompt(*range(n))).worker for n in (5, 1, 2, 3)] == [0, 1, 1, 1]


def test_power_of_two_choices_balances():
    router = Router(PowerOfTwo(), BS, 20, seed=3)
    for i in range(2000):
        router.choose(i, prompt(1))
    spread = [load.requests for load in router.loads().values()]
    assert max(spread) - min(spread) <= 6
    router = Router(RandomChoice(), BS, 20, seed=3)
    for i in range(2000):
        router.choose(i, prompt(1))
    assert max(load.requests for load in router.loads().values()) > 106


def test_prefix_affinity_moves_only_what_a_worker_had():
    def chosen(router):
        out = {}
        for n in range(600):
            out[n] = router.choose(n, prompt(n, n + 1, len(out) % 9)).worker
            router.completed(n)
        return out

    router = Router(PrefixAffinity(blocks=2), BS, 6)
    before = chosen(router)
    assert before == chosen(router)
    assert chi_square([Counter(before.values())[w] for w in range(6)], [100] * 6) < 25.8
    router.remove_worker(2)
    after = chosen(router)
    assert all(after[n] == w for n, w in before.items() if w != 2)
    assert {after[n] for n, w in before.items() if w == 2} == {0, 1, 3, 4, 5}


def test_prefix_affinity_with_a_load_bound():
    router = Router(PrefixAffinity(blocks=1, load_bound=1.0), BS, 4)
    for i in range(40):
        router.choose(i, prompt(1))
    assert [load.requests for load in router.loads().values()] == [10] * 4


def test_a_function_sees_requests_and_workers():
    seen = []

    def most_cached(request, workers):
        seen.append((request, workers))
        return max(workers, key=lambda w: w.cached_blocks).worker

    router = Router(most_cached, BS, [10, 20], tie_break="lowest")
    router.apply_event(20, stored(prompt(1)))
    assert router.choose("a", prompt(1, 2), now_ms=3.0).worker == 20
    assert seen == [(("a", 8, 3.0), [(10, 0, 0, 0), (20, 0, 0, 1)])]
    assert router.loads()[20].requests == 1


@pytest.mark.parametrize(("function", "error"), [
    (lambda request, workers: 5, ValueError), (lambda request, workers: 1 / 0, ZeroDivisionError),
    (lambda request, workers: None, TypeError),
])
def test_errors_of_a_function_come_out_and_book_nothing(function, error):
    router = Router(function, BS, 2)
    with pytest.raises(error):
        router.choose("a", prompt(1))
    assert router.loads()[0].requests == 0
    assert "a" not in router._rows


def test_policies_by_name():
    assert routing_policy("kv_router").kind == "kv"
    assert routing_policy("least_tokens") == LeastLoaded("tokens")
    with pytest.raises(ValueError, match="routing policy must be one of"):
        routing_policy("best")
    with pytest.raises(ValueError, match="load_bound"):
        PrefixAffinity(load_bound=0.5)
    with pytest.raises(ValueError, match="by must be"):
        LeastLoaded("blocks")
    with pytest.raises(ValueError, match="tie_break"):
        Router("kv", tie_break="first")


def test_the_core_refuses_what_it_cannot_hold():
    core = RouterCore("kv", KvRouterConfig(), BS, 1)
    assert core.arrival(0, *NO_BLOCKS, 3) == (0, 0)
    for row, isl in [(0, 3), (-1, 3), (1, 0)]:
        with pytest.raises(ValueError):
            core.arrival(row, *NO_BLOCKS, isl)
    with pytest.raises(ValueError, match="worker 1 does not exist"):
        core.stored(1, 5, 1)
    with pytest.raises(ValueError, match="same length"):
        core.overlaps(np.zeros(2, np.uint64), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="kind"):
        RouterCore("best", KvRouterConfig(), BS, 1)
