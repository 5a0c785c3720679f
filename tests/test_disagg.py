"""Disaggregated replays end, leak nothing, and refuse what they cannot run (what is exact is in test_exact)."""
from __future__ import annotations

import numpy as np
import pytest
from test_endings import statuses, trace_of

from mocker import MockEngineArgs, SglangArgs, SyntheticSpec, Trace, simulate
from mocker.replay.pools import Pools, Routing, make_cluster
from mocker.workload import from_trace

ENGINES = ["vllm", "sglang"]
ROUTERS = ["round_robin", "kv_router", "least_requests"]


def pool(role: str, engine: str = "vllm", **values) -> MockEngineArgs:
    blocks = values.pop("num_gpu_blocks", 40)
    return MockEngineArgs(**{"block_size": 4, "num_gpu_blocks": blocks, "worker_type": role, "engine_type": engine,
                             **values})


def pools(engine: str, prefill: dict | None = None, decode: dict | None = None) -> dict:
    return {"prefill_engine_args": pool("prefill", engine, **(prefill or {})),
            "decode_engine_args": pool("decode", engine, **(decode or {}))}


def random_trace(seed: int, count: int = 60) -> Trace:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 60, count)
    counts = -(-prompts // 4)
    ids = np.concatenate([np.where(np.arange(n) < 5, np.arange(n) + 10 * rng.integers(0, 3), 1000 * i + np.arange(n))
                          for i, n in enumerate(counts)])
    return Trace.from_columns(
        arrival_ms=np.cumsum(rng.integers(0, 30, count)).astype(float), input_length=prompts,
        output_length=rng.integers(0, 30, count), hash_offsets=np.cumsum([0, *counts]), hash_ids=ids.astype(np.uint64),
        block_size=4)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(6))
def test_everything_ends_and_nothing_is_held(engine, router, seed):
    """Pools that are too small for some prompts: all requests end by name, and both pools are empty after it."""
    workload = from_trace(random_trace(seed), closed_loop=False, speedup=1.0)
    both = Pools(pool("decode", engine, num_gpu_blocks=12 + seed), 2, pool("prefill", engine, num_gpu_blocks=14), 3)
    cluster, coupled = make_cluster(both, workload, Routing(router), cap_ms=None, real_tokens=False, fast=True)
    assert coupled
    cluster.set_links(*workload.links(), workload.delays(), 0)
    while not cluster.run_coupled(100):
        for core in cluster.engines:
            core.check()
    assert not cluster.stalled
    assert cluster.ended == len(workload)
    assert not cluster.unfinished()
    for core in cluster.engines:
        core.check()
    ended = cluster.collector.columns["terminal"]
    assert set(ended.tolist()) <= {1, 2, 3, 5}
    assert (ended == 1).any() and (ended != 1).any()
    released = cluster.details["source_released_ms"]
    assert not np.isnan(released[ended == 1]).any()


@pytest.mark.parametrize("engine", ENGINES)
def test_decode_pool_too_small(engine):
    trace = trace_of((0.0, 60, 3), (0.0, 8, 3), (5.0, 60, 3), (6.0, 8, 3))
    result = simulate(trace, **pools(engine, decode={"num_gpu_blocks": 10}))
    assert statuses(result) == ["failed", "completed", "failed", "completed"]
    assert result.report["failed_requests"] == 2
    assert result.report["completed_requests"] == 2
    assert list(result.per_request["output_tokens"]) == [0, 3, 0, 3]


@pytest.mark.parametrize("engine", ENGINES)
def test_prefill_pool_too_small(engine):
    trace = trace_of((0.0, 60, 3), (0.0, 8, 3), (5.0, 60, 3), (6.0, 8, 3))
    result = simulate(trace, **pools(engine, prefill={"num_gpu_blocks": 10}))
    assert statuses(result) == ["rejected", "completed", "rejected", "completed"]
    assert list(result.per_request["decode_worker_idx"]) == ([-1, 0, -1, 0] if engine == "vllm" else [0, 0, 0, 0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("concurrency", [None, 1, 2])
def test_few_outputs(engine, concurrency):
    trace = trace_of((0.0, 9, 0), (0.0, 9, 1), (5.0, 4, 2), (5.0, 4, 0))
    result = simulate(trace, replay_concurrency=concurrency, **pools(engine))
    assert statuses(result) == ["completed"] * 4
    assert list(result.per_request["output_tokens"]) == [0, 1, 2, 0]


def test_order_of_a_hand_off():
    """Every stage of a request follows the one before, in both orders, and transfers take their time."""
    for engine in ENGINES:
        slow = {"kv_bytes_per_token": 10_000_000, "kv_transfer_bandwidth": 64.0}
        result = simulate(random_trace(1), **pools(engine, slow), num_prefill_workers=2, num_decode_workers=2)
        columns = result.per_request
        done = columns["terminal_status"] == "completed"
        order = ["prefill_admit_ms", "source_held_ms", "destination_activated_ms", "decode_admit_ms"]
        for earlier, later in zip(order, order[1:], strict=False):
            assert (columns[earlier][done] <= columns[later][done]).all(), (engine, later)
        assert (columns["destination_activated_ms"] <= columns["source_released_ms"])[done].all()
        first, second = columns["source_held_ms"], columns["destination_reserved_ms"]
        assert (first <= second if engine == "vllm" else second <= first)[done].all()
        delay = columns["input_length"] * 10_000_000 / (64.0 * 1e9) * 1000.0
        sent = columns["destination_activated_ms"] - np.maximum(first, second)
        assert (sent >= delay - 1e-9)[done].all()
        assert result.report["prefill_worker_seconds"] == result.report["decode_worker_seconds"] > 0


def test_missing_tokens_only():
    """A decode worker that has a prompt cached gets nothing sent."""
    trace = trace_of((0.0, 40, 2), (5000.0, 40, 2), shared=True)
    slow = {"kv_bytes_per_token": 100_000_000, "kv_transfer_bandwidth": 64.0}
    whole = simulate(trace, **pools("vllm", slow)).per_request
    missing = simulate(trace, **pools("vllm", slow | {"kv_transfer_timing_mode": "destination_missing"})).per_request
    sent = [c["destination_activated_ms"] - c["destination_reserved_ms"] for c in (whole, missing)]
    assert sent[0] == pytest.approx([62.5, 62.5])
    assert sent[1] == pytest.approx([62.5, 0.0])


def test_time_cap():
    result = simulate(trace_of((0.0, 40, 30), (0.0, 40, 30), (900.0, 4, 1)), **pools("vllm"), max_sim_time_ms=60.0)
    assert statuses(result) == ["incomplete", "incomplete"]
    assert result.report["incomplete_requests"] == 2


@pytest.mark.parametrize("router", ["kv_router", "random", "power_of_two"])
def test_equal_calls_are_equal(router):
    runs = [simulate(random_trace(3), **pools("vllm"), num_prefill_workers=3, num_decode_workers=3, router_mode=router,
                     router_seed=7).per_request for _ in range(2)]
    for name, column in runs[0].items():
        assert np.array_equal(column, runs[1][name], equal_nan=column.dtype.kind == "f"), name


def test_synthetic():
    result = simulate(SyntheticSpec(20, 5, 30), **pools("sglang"), num_prefill_workers=2)
    assert result.report["completed_requests"] == 30


@pytest.mark.parametrize(("options", "message"), [
    ({"decode_engine_args": None}, "must be provided together"),
    ({"extra_engine_args": MockEngineArgs()}, "cannot be combined"),
    ({"num_workers": 2}, "only used for aggregated replay"),
    ({"num_prefill_workers": 0}, "num_prefill_workers must be at least 1"),
    ({"num_decode_workers": True}, "num_decode_workers must be an integer"),
    ({"prefill_engine_args": pool("decode")}, "prefill_engine_args.worker_type='prefill', got 'decode'"),
    ({"decode_engine_args": pool("prefill")}, "decode_engine_args.worker_type='decode', got 'prefill'"),
    ({"decode_engine_args": pool("decode", "sglang")}, "matching prefill/decode engine_type"),
    ({"decode_engine_args": pool("decode", block_size=8)}, "matching prefill/decode block_size"),
    ({"decode_engine_args": pool("decode", "trtllm")}, "does not support TRT-LLM"),
    ({"decode_engine_args": pool("decode", dp_size=2)}, "decode data_parallel_size=1"),
])
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(trace_of((0.0, 4, 1)), **{**pools("vllm"), **options})


def test_planned_answers_are_shared_between_sessions():
    """A later prompt that repeats an answer finds its blocks on the prefill worker."""
    trace = Trace.from_columns(
        arrival_ms=[0.0, 5000.0], input_length=[4, 12], output_length=[8, 1], hash_offsets=[0, 1, 4],
        hash_ids=[1, 1, 2, 3], block_size=4, output_token_offsets=[0, 8, 8], output_token_ids=[2] * 4 + [3] * 4)
    result = simulate(trace, **pools("vllm"))
    assert statuses(result) == ["completed"] * 2
    assert list(result.per_request["reused_input_tokens"]) == [0, 8]


@pytest.mark.parametrize("budget", [5, 8192])
def test_recomputing_in_circles_ends(budget):
    """One place to run, its request preempted for want of a block that a waiting destination holds: that gives way."""
    trace = trace_of(*[(0.0, 60, 30)] * 4, block=4)
    result = simulate(trace, replay_concurrency=4, **pools("vllm", {"max_num_batched_tokens": budget}, {
        "num_gpu_blocks": 31, "max_num_seqs": 1, "max_num_batched_tokens": budget}))
    assert statuses(result) == ["completed"] * 4
    assert list(result.per_request["output_tokens"]) == [30] * 4


def test_sglang_books_are_in_the_report():
    """Retractions leak slots as in the reference; `conserve_slots` keeps exact books."""
    leaked = []
    for conserve in (False, True):
        args = MockEngineArgs(engine_type="sglang", block_size=4, num_gpu_blocks=24, sglang=SglangArgs(
            page_size=4, schedule_conservativeness=0.1, chunked_prefill_size=8, conserve_slots=conserve))
        report = simulate(SyntheticSpec(11, 60, 30, arrival_interval_ms=0.0), extra_engine_args=args).report
        leaked.append(report["leaked_tokens"] + report["double_freed_tokens"])
    assert leaked[0] > 0 == leaked[1]
