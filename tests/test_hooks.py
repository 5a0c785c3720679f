"""Scores of users: equal to built-in choices where they say the same, compiled and in Python; errors; copies."""
from __future__ import annotations

import pickle

import numba
import numpy as np
import pytest
from test_live import same, small, trace

from mocker import MockEngineArgs, open_simulation, simulate
from mocker.hooks import RoutingScore, VictimScore
from mocker.router import Router

compiled = numba.cfunc("float64(int64, int64, int64, int64, int64)")


def by_requests(worker, prompt, cached, requests, tokens):
    return float(requests)


def by_cache(worker, prompt, cached, requests, tokens):
    return 2.0 * requests - cached


def oldest(prompt, generated, limit, preemptions, blocks):
    return float(-blocks)


def nothing(prompt, generated, limit, preemptions, blocks):
    return 0.0


TIGHT = {"num_gpu_blocks": 40, "max_num_seqs": 12}


@pytest.mark.parametrize("kind", [compiled, lambda f: f, lambda f: compiled(f).address])
def test_a_score_of_requests_is_least_requests(kind):
    built_in = simulate(trace(2), num_workers=3, router_mode="least_requests", router_tie_break="lowest",
                        extra_engine_args=small())
    same(simulate(trace(2), num_workers=3, router_mode=RoutingScore(kind(by_requests)), extra_engine_args=small()),
         built_in)


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


def test_errors_come_out():
    def broken(*numbers):
        raise KeyError("mine")

    def nan(*numbers):
        return np.nan

    for function, kind, message in [(broken, KeyError, "mine"), (nan, ValueError, "NaN")]:
        with pytest.raises(kind, match=message):
            simulate(trace(4), num_workers=2, router_mode=RoutingScore(function), extra_engine_args=small())
        with pytest.raises(kind, match=message):
            simulate(trace(4), extra_engine_args=small(**TIGHT, victim_score=function))
    three = numba.cfunc("float64(int64, int64, int64)")(lambda a, b, c: 0.0)
    for make in (RoutingScore, VictimScore):
        with pytest.raises(TypeError, match="must be a cfunc of float64"):
            make(three)
        with pytest.raises(TypeError, match="must be callable"):
            make("load")
    with pytest.raises(ValueError, match="victim_score"):
        MockEngineArgs(victim_score=3.5)
    with pytest.raises(ValueError, match="victim_score is for engine_type='vllm'"):
        MockEngineArgs(engine_type="sglang", victim_score=nothing)
