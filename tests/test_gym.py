"""Gymnasium environments: Gymnasium's own checks, known policies, vectors of environments, the example."""
from __future__ import annotations

import gzip
import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from test_live import small, trace

import mocker
from mocker import simulate
from mocker.gym import RoutingEnv, ScalingEnv, ThreadedVectorEnv

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "routing_policy.py"


def routing():
    return RoutingEnv(trace(21), num_workers=3, ttft_ms=200.0, extra_engine_args=small())


def scaling():
    return ScalingEnv(trace(21), max_workers=4, interval_ms=100.0, ttft_ms=200.0,
                      extra_engine_args=small(startup_time=0.03))


@pytest.mark.parametrize("make", [routing, scaling])
def test_gymnasium_accepts_them(make):
    check_env(make(), skip_render_check=True)


def test_round_robin_as_a_policy_is_round_robin():
    env = routing()
    env.reset()
    rewards = 0.0
    for i in itertools.count():
        seen, reward, over, _, _ = env.step(i % 3)
        assert env.observation_space.contains(seen)
        rewards += reward
        if over:
            break
    whole = simulate(trace(21), num_workers=3, extra_engine_args=small())
    got = env.result()
    for name, column in whole.per_request.items():
        np.testing.assert_array_equal(got.per_request[name], column, err_msg=name)
    ttft = whole.per_request["ttft_ms"]
    assert rewards == np.count_nonzero(ttft <= 200.0) - np.count_nonzero(ttft > 200.0)


def test_more_workers_are_faster_and_cost_more():
    def episode(action):
        env, over, seconds, total = scaling(), False, 0.0, 0.0
        env.reset()
        while not over:
            _, reward, over, _, info = env.step(action)
            seconds += info["worker_seconds"]
            total += reward + 0.1 * info["worker_seconds"]
        return env.result().report["mean_ttft_ms"], seconds, total

    one, four = episode(0), episode(3)
    assert four[0] < one[0] and four[1] > one[1] and four[2] > one[2]


def test_a_vector_is_its_environments():
    many, alone = ThreadedVectorEnv([routing, routing, routing], threads=2), routing()
    seen, _ = many.reset()
    assert many.observation_space.contains(seen)
    np.testing.assert_array_equal(seen[1], alone.reset()[0])
    total = 0.0
    for _ in range(60):
        seen, rewards, over, cut, _ = many.step(np.array([0, 1, 2]))
        one = alone.step(1)
        np.testing.assert_array_equal(seen[1], one[0])
        total += rewards[1] - one[1]
        assert over.tolist() == [one[2]] * 3 and not cut.any()
    assert over.all() and total == 0.0
    seen, rewards, over, _, _ = many.step(np.array([0, 0, 0]))     # they begin again
    assert not over.any() and not rewards.any()
    np.testing.assert_array_equal(seen[0], alone.reset()[0])
    many.close()


def test_what_is_refused():
    with pytest.raises(ValueError, match="no sessions"):
        RoutingEnv(trace(1, sessions=True), num_workers=2, extra_engine_args=small()).reset()
    with pytest.raises(ValueError, match="does not take router_mode"):
        RoutingEnv(trace(1), num_workers=2, router_mode="random")
    env = routing()
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(0)
    env.reset()
    with pytest.raises(ValueError, match="worker from 0 to 2"):
        env.step(3)


def test_the_example_runs(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("routing_policy", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path / "trace.jsonl"
    with gzip.open(mocker.sample_trace_path(), "rt") as file:
        path.write_text("".join(itertools.islice(file, 80)))
    weights = module.main([str(path), "--workers", "3", "--trials", "3"])
    assert weights.shape == (5,) and "kv_router" in capsys.readouterr().out
