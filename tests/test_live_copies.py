"""Copies of simulations with prompts that grow and with planners: equal to the original to the last bit."""
from __future__ import annotations

import pickle
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
from test_live import cut, disagg, same, small, trace

from mocker import open_simulation, simulate


class Feedback:
    """Decides by all that it is told, and notes it."""

    fpm_format = "dicts"

    def __init__(self, first=20.0, every=80.0, fpm="dicts"):
        self.first, self.every, self.fpm_format, self.told = first, every, fpm, []

    def initial_tick_ms(self):
        return self.first

    def on_tick(self, metrics):
        told = repr({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in metrics.items()})
        self.told.append(told)
        prefill, decode = 1 + sum(told.encode()) % 3, 1 + sum(told.encode()[::2]) % 4
        return {"target_prefill": prefill, "target_decode": decode, "next_tick_ms": metrics["now_ms"] + self.every}


TIERS = {"num_gpu_blocks": 60, "num_g2_blocks": 60, "kv_bytes_per_token": 1000, "bandwidth_g1_to_g2_gbps": 0.002}
ENGINES = {
    "vllm": {"extra_engine_args": small(startup_time=0.01)}, "sglang": {"extra_engine_args": small("sglang")},
    "trtllm": {"extra_engine_args": small("trtllm", startup_time=0.01)},
    "rules": {"extra_engine_args": small(scheduler_rules="vllm-0.33-async")},
    "kv": {"extra_engine_args": small(), "router_mode": "kv_router"},
    "tiers": {"extra_engine_args": small(**TIERS, startup_time=0.01), "router_mode": "kv_router"},
    "shared": {"extra_engine_args": small(**TIERS, num_g3_blocks=80, enable_g4_storage=True)},
    "disagg": {**disagg("vllm"), "router_mode": "kv_router"}, "disagg_sglang": disagg("sglang"),
}


def workers(name):
    return {} if name.startswith("disagg") else {"num_workers": 2}


@pytest.mark.parametrize("closed", [{}, {"replay_concurrency": 6}], ids=["open", "closed"])
@pytest.mark.parametrize("name", ENGINES)
def test_prompts_that_grow(name, closed):
    work = replace(trace(5, 60, sessions=True), accumulate=True)
    arguments = {**ENGINES[name], **workers(name), **closed}
    whole = simulate(work, **arguments)
    assert (whole.per_request["input_length"] != np.sort(work.input_length)).any()
    sim, kept = open_simulation(work, **arguments), []
    same(cut(open_simulation(work, **arguments), 1).result(), whole)
    for _ in range(3):
        sim.run_completions(14)
        kept.append((sim.fork(), sim.snapshot(), pickle.loads(pickle.dumps(sim))))
        for _ in range(5):
            sim.step()
    same(sim.run().result(), whole)
    for seed, (fork, snapshot, pickled) in enumerate(kept):
        for each in (cut(fork, seed), pickled.run()):
            same(each.result(), whole)
        for _ in range(2):
            sim.restore(snapshot)
            same(sim.run().result(), whole)


@pytest.mark.parametrize(("name", "fpm"), [*((name, "dicts") for name in ENGINES), ("shared", "columns"),
                                           ("kv", "none")])
def test_planners(name, fpm):
    """Copies scale alike, and their planners are told the same; nobody else's planner is."""
    work, arguments = trace(5, 60, sessions=True), {**ENGINES[name], **workers(name)}
    first = Feedback(fpm=fpm)
    whole = simulate(work, planner=first, **arguments)
    assert len(whole.scaling) > 3
    mine = Feedback(fpm=fpm)
    sim, kept = open_simulation(work, planner=mine, **arguments), []
    for _ in range(2):
        sim.run_completions(18)
        kept.append((sim.fork(), sim.snapshot(), pickle.loads(pickle.dumps(sim)), sim.result()))
        for _ in range(4):
            sim.step()
    assert sim.planner is mine
    got = sim.run().result()
    same(got, whole)
    assert got.scaling == whole.scaling and mine.told == first.told
    for seed, (fork, snapshot, pickled, partial) in enumerate(kept):
        assert partial.scaling == whole.scaling[:len(partial.scaling)]
        for each in (cut(fork, seed), pickled.run(), fork.fork()):
            same(each.result(), whole)
            assert each.result().scaling == whole.scaling
            assert each.planner is not mine and each.planner.told == first.told
        for _ in range(2):
            sim.restore(snapshot)
            same(sim.run().result(), whole)
            assert sim.planner.told == first.told
    assert mine.told == first.told


def test_random_configurations():
    for seed in range(60):
        rng = random.Random(seed)
        name = rng.choice(list(ENGINES))
        work = replace(trace(seed, 50, sessions=True), accumulate=rng.random() < 0.6)
        arguments = {**ENGINES[name], **workers(name), **rng.choice([{}, {}, {"replay_concurrency": 7}])}
        planned = rng.random() < 0.7
        when = rng.choice([0.0, 15.0, 80.0]), rng.choice([50.0, 200.0])
        whole = simulate(work, planner=Feedback(*when) if planned else None, **arguments)
        sim = open_simulation(work, planner=Feedback(*when) if planned else None, **arguments)
        for _ in range(rng.randrange(150)):
            sim.step()
        fork = sim.fork()
        again = pickle.loads(pickle.dumps(fork)) if seed % 3 == 0 else fork.fork()
        for each in (again, sim, fork):
            got = cut(each, seed).result()
            same(got, whole)
            assert got.scaling == whole.scaling


def test_planners_that_cannot_be_copied():
    class Locked(Feedback):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    class Own(Locked):
        def __deepcopy__(self, memo):
            made = Own()
            made.told = list(self.told)
            return made

    arguments = {"extra_engine_args": small(), "num_workers": 2}
    sim = open_simulation(trace(5), planner=Locked(), **arguments)
    sim.run_completions(10)
    for copy in (sim.fork, sim.snapshot, sim.result):
        with pytest.raises(ValueError, match="planner cannot be copied: copy.deepcopy of Locked raised TypeError"):
            copy()
    whole = sim.run().result()
    sim = open_simulation(trace(5), planner=Own(), **arguments)
    sim.run_completions(10)
    same(sim.fork().run().result(), whole)
