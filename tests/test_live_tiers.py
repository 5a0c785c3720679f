"""Copies of simulations with KV tiers: equal to the original to the last bit, whatever is under way below."""
from __future__ import annotations

import gc
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
from test_live import copies_agree, cut, disagg, halves, same, small, trace

import mocker
from mocker import KvRouterConfig, open_simulation, simulate

SLOW = {"bandwidth_g1_to_g2_gbps": 0.002, "bandwidth_g2_to_g1_gbps": 0.002, "bandwidth_g2_to_g3_gbps": 0.001,
        "bandwidth_g3_to_g2_gbps": 0.001, "bandwidth_g2_to_g4_gbps": 0.001, "bandwidth_g4_to_g2_gbps": 0.001}
SHARED = {"num_g3_blocks": 120, "enable_g4_storage": True}


def below(**changes):
    return small(**{"num_gpu_blocks": 40, "num_g2_blocks": 60, "kv_bytes_per_token": 1000, **SLOW, **changes})


def both(**changes):
    return {k: below(worker_type=v.worker_type, kv_transfer_bandwidth=1.0, **changes) if k.endswith("args") else v
            for k, v in disagg("vllm").items()}


CASES = {
    "one": {"extra_engine_args": below()},
    "two": {"extra_engine_args": below(), "num_workers": 2},
    "kv": {"extra_engine_args": below(), "num_workers": 2, "router_mode": "kv_router"},
    "credit": {"extra_engine_args": below(**SHARED), "num_workers": 2, "router_mode": "kv_router",
               "router_lower_tiers": True, "router_config": KvRouterConfig(router_queue_threshold=0.5)},
    "disk": {"extra_engine_args": below(num_g3_blocks=90), "num_workers": 2},
    "remote": {"extra_engine_args": below(**SHARED, latency_g2_to_g1_ms=3.0), "num_workers": 3},
    "reference": {"extra_engine_args": below(**SHARED), "num_workers": 2, "compat": "reference"},
    "trtllm": {"extra_engine_args": below(**SHARED, engine_type="trtllm"), "num_workers": 2},
    "lfu": {"extra_engine_args": below(offload_eviction_policy="lfu", offload_min_seen=2), "num_workers": 2},
    "s3fifo": {"extra_engine_args": below(offload_eviction_policy="s3fifo"), "num_workers": 2},
    "belady": {"extra_engine_args": below(offload_eviction_policy="belady"), "num_workers": 2},
    "through": {"extra_engine_args": below(**SHARED, offload_write_mode="write_through"), "num_workers": 2},
    "closed": {"extra_engine_args": below(num_g3_blocks=90), "num_workers": 2, "replay_concurrency": 5},
    "disagg": both(),
    "disagg_shared": {**both(**SHARED), "router_mode": "kv_router"},
}


@pytest.mark.parametrize(("name", "sessions"), [
    (name, sessions) for name in CASES for sessions in (False, True)
    if (name, sessions) != ("belady", True)])              # which knows the order of requests beforehand
def test_copies_go_on_alike(name, sessions):
    arguments = CASES[name]
    work = trace(17, 90, sessions=sessions)
    whole = simulate(work, **arguments)
    assert name == "reference" or whole.report["offload"]["promotions"] > 0
    copies_agree(work, arguments, whole, 5, 12)


def test_random_configurations():
    for seed in range(40):
        rng = random.Random(seed)
        args = below(
            num_gpu_blocks=rng.choice([30, 44, 70]), num_g2_blocks=rng.choice([8, 40, 100]),
            engine_type=rng.choice(["vllm", "vllm", "trtllm"]), offload_min_seen=rng.choice([1, 1, 3]),
            offload_batch_size=rng.choice([1, 4, 32]), offload_eviction_policy=rng.choice(["lru", "lfu", "s3fifo"]),
            offload_write_mode=rng.choice(["write_back", "write_through"]), latency_g1_to_g2_ms=rng.choice([0.0, 2.0]),
            **rng.choice([{}, {"num_g3_blocks": 50}, SHARED]))
        more = rng.choice([{}, {"num_workers": 3}, {"num_workers": 2, "router_mode": "kv_router"},
                           {"num_workers": 2, "replay_concurrency": 7}])
        work = trace(seed, 60, sessions=rng.random() < 0.3)
        whole = simulate(work, extra_engine_args=args, **more)
        sim = open_simulation(work, extra_engine_args=args, **more)
        for _ in range(rng.randrange(200)):
            sim.step()
        fork = sim.fork()
        again = pickle.loads(pickle.dumps(fork)) if seed % 4 == 0 else fork.fork()
        for each in (again, sim, fork):
            same(cut(each, seed).result(), whole)


@pytest.mark.parametrize("name", ["two", "credit", "remote"])
def test_copies_record_alike(name):
    arguments = {**CASES[name], "recording": mocker.Recording(passes=60)}
    sim = open_simulation(trace(17, 90), **arguments)
    sim.run_completions(30)
    copies = [sim.fork(), pickle.loads(pickle.dumps(sim))]
    whole = sim.run().result()
    for copy in copies:
        got = copy.run().result()
        same(got, whole)
        for field in ("interval_ms", "series", "router_queue", "passes"):
            np.testing.assert_equal(getattr(got.timeline, field), getattr(whole.timeline, field))


@pytest.mark.parametrize("name", ["two", "credit", "remote", "disagg"])
def test_injected_requests(name):
    """They are as if there from the start, in the tiers' columns too."""
    work = trace(7)
    work = replace(work, arrival_ms=work.arrival_ms - work.arrival_ms[0])
    whole = simulate(work, **CASES[name])
    first, rest = halves(work, 20)
    sim = open_simulation(first, **CASES[name])
    for i, request in enumerate(rest):
        sim.run_until(min(max(sim.now_ms, request["timestamp"] - 0.01), request["timestamp"]))
        if i == 10:
            sim = pickle.loads(pickle.dumps(sim.fork()))
        assert sim.inject(request) == 20 + i
    got = sim.run().result()
    for column, values in got.per_request.items():
        np.testing.assert_array_equal(values, whole.per_request[column], err_msg=column)


def test_copies_are_freed_at_once():
    sim = open_simulation(trace(17), **CASES["credit"])
    sim.run_completions(20)

    def alive():
        return sum(type(thing).__name__ == "OffloadTiers" for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        for _ in range(3):
            sim.fork().run()
        assert alive() == before
    finally:
        gc.enable()
