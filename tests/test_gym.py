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
from mocker.gym import RoutingEnv, ScalingEnv, SchedulingEnv, ThreadedVectorEnv

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def routing():
    return RoutingEnv(trace(21), num_workers=3, ttft_ms=200.0, extra_engine_args=small())


def scaling():
    return ScalingEnv(trace(21), max_workers=4, interval_ms=100.0, ttft_ms=200.0,
                      extra_engine_args=small(startup_time=0.03))


def scheduling(engine="vllm", **more):
    return SchedulingEnv(trace(21), candidates=4, ttft_ms=200.0,
                         **{"extra_engine_args": small(engine, max_num_seqs=3), **more})


def played(env, policy):
    """Total reward of an episode, and how many steps it took."""
    seen, _ = env.reset()
    total, steps, over = 0.0, 0, False
    while not over:
        assert env.observation_space.contains(seen)
        seen, reward, over, _, _ = env.step(policy(seen))
        total, steps = total + reward, steps + 1
    return total, steps


@pytest.mark.parametrize("make", [routing, scaling, scheduling])
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


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang", "rules"])
def test_the_first_in_the_queue_as_a_policy_is_first_come_first_served(engine):
    args = small(scheduler_rules="vllm-0.33") if engine == "rules" else small(engine, max_num_seqs=3)
    for more in ({}, {"num_workers": 2, "router_mode": "kv_router"}):
        env = scheduling(extra_engine_args=args, **more)
        total, steps = played(env, lambda seen: 0)
        whole, got = simulate(trace(21), extra_engine_args=args, **more), env.result()
        for name, column in whole.per_request.items():
            np.testing.assert_array_equal(got.per_request[name], column, err_msg=name)
        ttft = whole.per_request["ttft_ms"]
        assert total == np.count_nonzero(ttft <= 200.0) - np.count_nonzero(ttft > 200.0) and steps > 10


def test_the_order_of_a_queue_matters():
    def shortest(seen):
        queue = seen[4:].reshape(-1, 4)
        return int(np.argmin(np.where(queue[:, 1] > 0.0, queue[:, 1] * (1.0 - queue[:, 2]), np.inf)))

    def newest(seen):
        return int(np.argmin(np.where(seen[4:].reshape(-1, 4)[:, 1] > 0.0, seen[4::4], np.inf)))

    means = []
    for policy in (shortest, newest):
        env = scheduling()
        played(env, policy)
        assert env.result().report["completed_requests"] == len(trace(21))
        means.append(env.result().report["mean_ttft_ms"])
    assert means[0] < means[1]
    env = scheduling()                         # nobody is ever admitted where somebody waited
    total, _ = played(env, lambda seen: 4)
    served = env.result().per_request["ttft_ms"]
    assert total < 0 and np.isnan(served).any() and env.result().report["stalled"]


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
    with pytest.raises(ValueError, match="leave it out"):
        scheduling(extra_engine_args=small(admission_score=lambda *facts: 0.0))
    with pytest.raises(ValueError, match="at least 1"):
        SchedulingEnv(trace(1), candidates=0)
    env = scheduling()
    env.reset()
    with pytest.raises(ValueError, match="from 0 to 4"):
        env.step(5)
    env = routing()
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(0)
    env.reset()
    with pytest.raises(ValueError, match="worker from 0 to 2"):
        env.step(3)


@pytest.fixture
def example(request, tmp_path):
    """Main of an example, and a short trace."""
    spec = importlib.util.spec_from_file_location(request.param, EXAMPLES / f"{request.param}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path / "trace.jsonl"
    with gzip.open(mocker.sample_trace_path(), "rt") as file:
        path.write_text("".join(itertools.islice(file, 80)))
    return module.main, str(path)


@pytest.mark.parametrize("example", ["routing_policy"], indirect=True)
def test_the_routing_example_runs(example, capsys):
    main, path = example
    weights = main([path, "--workers", "3", "--trials", "3"])
    assert weights.shape == (5,) and "kv_router" in capsys.readouterr().out


@pytest.mark.parametrize("example", ["scheduling_policy"], indirect=True)
def test_the_scheduling_example_runs(example, capsys):
    main, path = example
    rewards = main([path, "--trials", "3"])
    assert rewards.shape == (4,) and "first come" in capsys.readouterr().out
