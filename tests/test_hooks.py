"""Scores of users: equal to built-in choices where they say the same, compiled and in Python; errors; copies."""
from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numba
import numpy as np
import pytest
from test_live import cut, disagg, same, small, trace

from mocker import DirectRequest, MockEngineArgs, SglangArgs, create_engine_core, open_simulation, simulate
from mocker.hooks import AdmissionScore, RoutingScore, VictimScore
from mocker.replay.fast import FastPaths
from mocker.router import Router

ROOT = Path(__file__).resolve().parent.parent
compiled = numba.cfunc("float64(int64, int64, int64, int64, int64)")
compiled_nine = numba.cfunc("float64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")


def by_requests(worker, prompt, cached, requests, tokens):
    return float(requests)


def by_cache(worker, prompt, cached, requests, tokens):
    return 2.0 * requests - cached


def oldest(prompt, generated, limit, preemptions, blocks):
    return float(-blocks)


def nothing(prompt, generated, limit, preemptions, blocks):
    return 0.0


def in_order(request, us, prompt, cached, generated, limit, priority, running, free):
    return 0.0


def shortest(request, us, prompt, cached, generated, limit, priority, running, free):
    return float(prompt - cached + 4 * limit)


def patient(request, us, prompt, cached, generated, limit, priority, running, free):
    """The longest wait first, at most four at a time, and nobody before 5 ms."""
    return np.inf if running > 3 or us < 5000 else -float(us)


def keep_shared(us, release, before, blocks, hits):
    """Blocks that were of use stay; of others the longest tails go first."""
    return 100.0 * hits - blocks


TIGHT = {"num_gpu_blocks": 40, "max_num_seqs": 12}
EAGER = SglangArgs(clip_max_new_tokens=1, schedule_conservativeness=0.0, conserve_slots=True)
ENGINES = {
    "vllm": {}, "fifo": {"preemption_mode": "fifo"}, "mtp": {"aic_nextn": 2, "aic_nextn_accept_rates": "0.7,0.5"},
    "rules": {"scheduler_rules": "vllm-0.33"}, "late": {"scheduler_rules": "vllm-0.33-async"},
    "sglang": {"engine": "sglang", "sglang": EAGER},
    "priority": {"scheduler_rules": "vllm-0.33", "vllm_scheduling_policy": "priority"},
    "tiers": {"num_g2_blocks": 60, "kv_bytes_per_token": 1000, "bandwidth_g1_to_g2_gbps": 0.002,
              "bandwidth_g2_to_g1_gbps": 0.002},
}


@pytest.mark.parametrize("kind", [compiled, lambda f: f, lambda f: compiled(f).address])
def test_a_score_of_requests_is_least_requests(kind):
    built_in = simulate(trace(2), num_workers=3, router_mode="least_requests", router_tie_break="lowest",
                        extra_engine_args=small())
    same(simulate(trace(2), num_workers=3, router_mode=RoutingScore(kind(by_requests)), extra_engine_args=small()),
         built_in)


def test_scores_that_do_not_use_cached_blocks():
    told = set()

    def seen(worker, prompt, cached, requests, tokens):
        told.add(cached)
        return float(requests)

    plain = simulate(trace(2), num_workers=3, router_mode=RoutingScore(seen), extra_engine_args=small())
    assert len(told) > 1
    told.clear()
    same(simulate(trace(2), num_workers=3, router_mode=RoutingScore(seen, uses_cached=False),
                  extra_engine_args=small()), plain)
    assert told == {0}


def test_scores_see_cached_blocks():
    router = Router(RoutingScore(compiled(by_cache)), 4, 3)
    assert router.choose("a", list(range(8))).worker == 0
    results = [simulate(trace(2), num_workers=3, router_mode=RoutingScore(f), extra_engine_args=small())
               for f in (by_cache, compiled(by_cache))]
    same(*results)
    plain = simulate(trace(2), num_workers=3, router_mode=RoutingScore(by_requests), extra_engine_args=small())
    assert results[0].report["prefix_cache_reused_ratio"] > plain.report["prefix_cache_reused_ratio"]


@pytest.mark.parametrize("kind", [compiled, lambda f: f])
def test_equal_scores_preempt_the_newest(kind):
    plain = simulate(trace(4), extra_engine_args=small(**TIGHT))
    same(simulate(trace(4), extra_engine_args=small(**TIGHT, victim_score=kind(nothing))), plain)
    other = simulate(trace(4), extra_engine_args=small(**TIGHT, victim_score=kind(oldest)))
    assert other.report["completed_requests"] == len(trace(4))
    assert (other.per_request["last_token_ms"] != plain.per_request["last_token_ms"]).any()
    same(simulate(trace(4), extra_engine_args=small(**TIGHT, victim_score=compiled(oldest))), other)


def test_victims_leave_the_books_in_order():
    sim = open_simulation(trace(4), extra_engine_args=small(**TIGHT, victim_score=oldest))
    while sim.step():
        sim._cluster.engines[0].check()
    assert sim.workers["preemptions"][0] > 0


def test_copies_score_alike():
    arguments = {"extra_engine_args": small(**TIGHT, victim_score=oldest), "num_workers": 2,
                 "router_mode": RoutingScore(by_cache)}
    whole = simulate(trace(4), **arguments)
    sim = open_simulation(trace(4), **arguments)
    sim.run_completions(20)
    for copy in (sim.fork(), pickle.loads(pickle.dumps(sim))):
        same(copy.run().result(), whole)


@pytest.mark.parametrize("name", [*ENGINES, "trtllm", "lpm"])
def test_equal_scores_change_nothing(name):
    common = {**TIGHT, **ENGINES.get(name, {"engine": "trtllm"})}
    if name == "lpm":
        common |= {"engine": "sglang", "sglang": SglangArgs(schedule_policy="lpm")}
    scores = {"admission_score": compiled_nine(in_order), "eviction_score": compiled(nothing)}
    if name != "trtllm":
        scores["victim_score"] = nothing
    work = replace(trace(4), priority=(np.arange(60) % 4).astype(np.int32)) if name == "priority" else trace(4)
    for more in ({}, {"num_workers": 2, "router_mode": "kv_router"}):
        plain = simulate(work, extra_engine_args=small(**common), **more)
        same(simulate(work, extra_engine_args=small(**common, **scores), **more), plain)
    if name in ("vllm", "sglang"):
        pools = disagg(name)
        scored = {k: v.replace(**scores) if k.endswith("args") else v for k, v in pools.items()}
        same(simulate(trace(4), **scored), simulate(trace(4), **pools))


@pytest.mark.parametrize("name", [*ENGINES, "trtllm"])
def test_scores_do_not_depend_on_the_way_to_replay(name):
    """Compiled and in Python, with and without fast-forward, in one go, in pieces and from a copy."""
    common = {**TIGHT, **ENGINES.get(name, {"engine": "trtllm"})}
    common["eviction_score"] = keep_shared
    if name != "trtllm":
        common["victim_score"] = oldest
    results = []
    for score in (shortest, patient):
        args = small(**common, admission_score=score)
        whole = simulate(trace(4), num_workers=2, extra_engine_args=args)
        assert whole.report["completed_requests"] == len(trace(4))
        same(simulate(trace(4), num_workers=2, extra_engine_args=args, fast_forward=False), whole)
        same(simulate(trace(4), num_workers=2, extra_engine_args=args.replace(admission_score=compiled_nine(score)),
                      fast_forward=False), whole)
        sim = open_simulation(trace(4), num_workers=2, extra_engine_args=args)
        sim.run_completions(20)
        for copy in (sim, sim.fork(), pickle.loads(pickle.dumps(sim))):
            same(copy.run().result(), whole)
        results.append(whole.per_request["first_token_ms"])
    assert (results[0] != results[1]).any()


@pytest.mark.parametrize("more", [{}, {"num_workers": 2, "router_mode": "kv_router"}, {"replay_concurrency": 9}])
@pytest.mark.parametrize("name", [*ENGINES, "trtllm"])
def test_admission_without_time_or_cache(name, more):
    """Stretches of passes with somebody waiting are skipped, with the same outcome; facts not wanted are 0."""
    common = {**TIGHT, **ENGINES.get(name, {"engine": "trtllm"})}
    told = set()

    def largest(request, us, prompt, cached, generated, limit, priority, running, free):
        told.add((us, cached))
        return np.inf if running > 6 else -float(prompt)

    results = [simulate(trace(4), extra_engine_args=small(**common, admission_score=score), fast_forward=fast, **more)
               for score in (AdmissionScore(largest), AdmissionScore(largest, uses_time=False, uses_cached=False))
               for fast in (True, False) if told.clear() is None]
    for other in results[1:]:
        same(other, results[0])
    assert told == {(0, 0)}


@pytest.mark.parametrize("name", ["vllm", "trtllm", "rules", "late", "sglang", "tiers", "disagg", "disagg_sglang"])
def test_scores_of_evictions(name):
    """Equal scores give the built-in order; what was of use stays; the books are in order."""
    def arguments(score):
        if name.startswith("disagg"):
            return {k: v.replace(num_gpu_blocks=44, eviction_score=score) if k.endswith("args") else v
                    for k, v in disagg(name[7:] or "vllm").items()}
        return {"extra_engine_args": small(**{"num_gpu_blocks": 44, **ENGINES.get(name, {"engine": name})},
                                           eviction_score=score)}

    work = trace(4, 200)
    plain, kept = simulate(work, **arguments(None)), simulate(work, **arguments(keep_shared))
    same(simulate(work, **arguments(compiled(nothing))), plain)
    same(simulate(work, **arguments(compiled(keep_shared)), fast_forward=False), kept)
    if name == "tiers":                        # where what is evicted is not lost
        assert kept.report["offload"] != plain.report["offload"]
    else:
        assert kept.report["prefix_cache_reused_ratio"] > plain.report["prefix_cache_reused_ratio"]
    sim = open_simulation(work, **arguments(keep_shared))
    while sim.step():
        if name in ("vllm", "trtllm", "sglang", "tiers"):      # rules put off some of the books in replays
            sim._cluster.engines[0].check()
    same(sim.result(), kept)


@pytest.mark.parametrize("name", [*ENGINES, "trtllm"])
def test_who_is_held_back_is_asked_about_at_the_same_times(name):
    """Workers that share nothing are asked when somebody comes to them, also where they are on one clock."""
    args = small(**{**TIGHT, **ENGINES.get(name, {"engine": "trtllm"})}, admission_score=patient)
    for seed in range(4):
        whole = simulate(trace(seed), num_workers=3, extra_engine_args=args)
        for other in (seed, seed + 9):
            same(cut(open_simulation(trace(seed), num_workers=3, extra_engine_args=args), other).result(), whole)


@pytest.mark.parametrize("name", ["vllm", "trtllm", "rules", "late", "sglang", "tiers"])
def test_evictions_do_not_depend_on_how_blocks_are_kept(name):
    """One by one or in runs, where scores get lower and lower, or jump."""
    for seed in range(6):
        for score in (lambda us, release, before, blocks, hits: -float(release),
                      lambda us, release, before, blocks, hits: (5 * release + 3 * before + blocks) % 4):
            args = small(**{"num_gpu_blocks": 40, **ENGINES.get(name, {"engine": name})}, eviction_score=score)
            same(simulate(trace(seed, 120), extra_engine_args=args, fast_forward=FastPaths(extents=False)),
                 simulate(trace(seed, 120), extra_engine_args=args))


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
def test_nobody_is_admitted_at_an_infinite_score(engine):
    sim = simulate(trace(4), extra_engine_args=small(engine, admission_score=lambda *facts: np.inf))
    assert sim.report["completed_requests"] == 0 and sim.report["stalled"]
    sim = simulate(trace(4), extra_engine_args=small(
        engine, admission_score=compiled_nine(lambda i, us, p, c, g, n, q, r, f: np.inf if i % 2 else 0.0)))
    assert sim.report["completed_requests"] == (len(trace(4)) + 1) // 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_admission_is_told_priorities(engine):
    told = []

    def first(request, us, prompt, cached, generated, limit, priority, running, free):
        told.append(priority)
        return -float(priority)

    core = create_engine_core(small(engine, max_num_seqs=1, admission_score=first))
    for i in range(4):
        core.receive(DirectRequest([i] * 8, 2, uuid=UUID(int=i), priority=i))
    now, order = 0.0, []
    while not core.is_empty():
        result = core.execute_pass(now)
        order += [event.uuid.int for event in result.admissions]
        now = result.end_ms
    assert order == [3, 2, 1, 0] and set(told) == {0, 1, 2, 3}
    told.clear()
    simulate(replace(trace(4), priority=np.arange(60, dtype=np.int32)),
             extra_engine_args=small(engine, admission_score=first))
    assert max(told) == 59
    sim = open_simulation(trace(4), extra_engine_args=small(engine, admission_score=first))
    sim.inject(input_length=8, output_length=2, priority=77)
    sim.run()
    assert 77 in told


def test_the_cython_example(tmp_path, monkeypatch):
    """The `cython` block of docs/hooks.md compiles against the shipped declarations and scores victims."""
    block = re.search(r"^```cython\n(.*?)^```$", (ROOT / "docs" / "hooks.md").read_text(), re.M | re.S).group(1)
    (tmp_path / "fewest.pyx").write_text("# cython: language_level=3\n" + block)
    build = "import Cython.Build, setuptools; setuptools.setup(ext_modules=Cython.Build.cythonize('fewest.pyx'))"
    done = subprocess.run([sys.executable, "-c", build, "build_ext", "--inplace"], cwd=tmp_path, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "CFLAGS": "-O0"})
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    fewest = importlib.import_module("fewest")
    same(simulate(trace(4), extra_engine_args=small(**TIGHT, victim_score=fewest.address)),
         simulate(trace(4), extra_engine_args=small(**TIGHT, victim_score=lambda *facts: facts[4])))


def test_errors_come_out():
    def broken(*numbers):
        raise KeyError("mine")

    def nan(*numbers):
        return np.nan

    for function, kind, message in [(broken, KeyError, "mine"), (nan, ValueError, "NaN")]:
        with pytest.raises(kind, match=message):
            simulate(trace(4), num_workers=2, router_mode=RoutingScore(function), extra_engine_args=small())
        for more in (*ENGINES.values(), {"engine": "trtllm"}):
            for score in ("victim_score", "admission_score", "eviction_score"):
                if score == "victim_score" and "trtllm" in more.values():
                    continue
                with pytest.raises(kind, match=message):
                    simulate(trace(4), extra_engine_args=small(**{**TIGHT, **more, score: function}))
        for more in ({"extra_engine_args": small(admission_score=function)},
                     {"extra_engine_args": small("sglang", admission_score=function)},
                     {"extra_engine_args": small(num_gpu_blocks=40, eviction_score=function), "num_workers": 2},
                     {"extra_engine_args": small("sglang", num_gpu_blocks=40, eviction_score=function)},
                     {"router_mode": RoutingScore(function), "extra_engine_args": small(), "num_workers": 2}):
            sim = open_simulation(trace(4), **more)
            with pytest.raises(kind, match=message):
                sim.run()
            for go_on in (sim.run, sim.step, sim.result, sim.fork):
                with pytest.raises(RuntimeError, match="has failed before"):
                    go_on()
    router = Router(RoutingScore(lambda worker, prompt, *facts: np.nan if prompt > 9 else 0.0), 4, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="NaN"):
            router.choose("a", list(range(12)))
        assert router.choose("b", list(range(8))).worker == 0
        router.completed("b")
    three = numba.cfunc("float64(int64, int64, int64)")(lambda a, b, c: 0.0)
    for make in (RoutingScore, VictimScore):
        with pytest.raises(TypeError, match="must be a cfunc of float64"):
            make(three)
        with pytest.raises(TypeError, match="must be callable"):
            make("load")
    with pytest.raises(ValueError, match="victim_score"):
        MockEngineArgs(victim_score=3.5)
    with pytest.raises(TypeError, match="must be a cfunc of float64"):
        AdmissionScore(compiled(nothing))
    for arguments, message in [
            ({"engine_type": "trtllm", "victim_score": nothing}, "preempts nobody"),
            ({"admission_score": "fcfs"}, "must be callable")]:
        with pytest.raises(ValueError, match=message):
            MockEngineArgs(**arguments)
