"""Bad and extreme input at the seam: a clear error that names the argument, or the right result."""
from __future__ import annotations

import math
import uuid

import numpy as np
import pytest
from test_endings import engine, statuses, trace_of

import mocker
from mocker import DirectRequest, MockEngineArgs, SchedulerCommand, SyntheticSpec, Trace, VllmCore, simulate
from mocker.replay import run_synthetic_trace_replay, run_trace_replay

ONE = trace_of((0.0, 8, 2))


@pytest.mark.parametrize(("options", "text"), [
    ({"num_workers": 0}, "num_workers must be at least 1"),
    ({"num_workers": -3}, "num_workers"),
    ({"num_workers": 1.5}, "num_workers must be an integer"),
    ({"num_workers": True}, "num_workers must be an integer"),
    ({"num_workers": 2**40}, "num_workers must be below"),
    ({"replay_concurrency": 0}, "replay_concurrency must be at least 1"),
    ({"replay_concurrency": 2.0}, "replay_concurrency must be an integer"),
    ({"arrival_speedup_ratio": 0.0}, "arrival_speedup_ratio must be a finite positive number"),
    ({"arrival_speedup_ratio": math.nan}, "arrival_speedup_ratio"),
    ({"arrival_speedup_ratio": math.inf}, "arrival_speedup_ratio"),
    ({"max_sim_time_ms": -1.0}, "max_sim_time_ms must be a finite, non-negative value"),
    ({"max_sim_time_ms": math.nan}, "max_sim_time_ms"),
    ({"sla_ttft_ms": -1.0}, "sla_ttft_ms must be a finite, non-negative value"),
    ({"sla_itl_ms": math.inf}, "sla_itl_ms"),
    ({"sla_e2e_ms": math.nan}, "sla_e2e_ms"),
    ({"compat": "dynamo"}, "compat must be"),
    ({"replay_mode": "sometimes"}, "replay_mode must be either"),
    ({"replay_mode": "online"}, "not supported yet"),
    ({"router_mode": "none"}, "routing policy must be one of"),
    ({"router_mode": "kv_router"}, "only supports router_mode=kv_router when num_workers > 1"),
    ({"router_seed": -1}, "router_seed must be"),
    ({"router_tie_break": "first"}, "router_tie_break"),
    ({"num_prefill_workers": 2}, "only used for disagg replay"),
    ({"model_name": ""}, "model_name"),
    ({"trace_block_size": 8}, "trace_block_size 8 does not match"),
])
def test_replay_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        simulate(ONE, extra_engine_args=engine(), **options)


@pytest.mark.parametrize(("values", "text"), [
    ({"worker_type": "prefill"}, "only supports aggregated workers"),
    ({"dp_size": 2}, "data_parallel_size=1"),
    ({"aic_backend": "vllm"}, "aic_backend"),
    ({"planner_profile_data": "profile.npz"}, "planner_profile_data"),
])
def test_engines_that_are_not_here(values, text):
    with pytest.raises(ValueError, match=text):
        simulate(ONE, extra_engine_args=engine(**values))


def test_engine_arguments_of_the_wrong_kind():
    with pytest.raises(TypeError, match="extra_engine_args must be MockEngineArgs"):
        simulate(ONE, extra_engine_args={"block_size": 4})


@pytest.mark.parametrize("size", [0, 3, 6, 1, 2048])
def test_refused_block_sizes(size):
    if size == 0:
        assert MockEngineArgs(block_size=size).block_size == 64
        return
    with pytest.raises(ValueError, match="block_size"):
        MockEngineArgs(block_size=size)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
def test_block_sizes(size):
    """A prompt at, above and one below a block boundary, and outputs that end on one."""
    rows = [(float(i), size * k + d, out) for i, (k, d, out) in enumerate(
        [(1, 0, 1), (1, 1, 1), (2, -1, 1), (2, 0, size), (1, 0, size + 1), (1, 1, 2 * size - 1)])]
    result = simulate(trace_of(*rows, block=size), extra_engine_args=MockEngineArgs(
        block_size=size, num_gpu_blocks=16), num_workers=1)
    assert statuses(result) == ["completed"] * len(rows)
    assert list(result.per_request["output_tokens"]) == [r[2] for r in rows]


@pytest.mark.parametrize("spread", [-1, 0, 1])
def test_limits(spread):
    """One below, at and one above the limits of tokens, sequences and blocks."""
    budget = simulate(trace_of((0.0, 16 + spread, 2)), extra_engine_args=engine(max_num_batched_tokens=16))
    assert statuses(budget) == ["completed"]
    assert budget.per_request["first_token_ms"][0] > 0
    pool = simulate(trace_of((0.0, 32 + spread, 1)), extra_engine_args=engine(num_gpu_blocks=8))
    assert statuses(pool) == [{-1: "completed", 0: "capacity", 1: "rejected"}[spread]]
    seqs = simulate(trace_of(*[(0.0, 4, 3)] * (3 + spread)), extra_engine_args=engine(max_num_seqs=3))
    admitted = seqs.per_request["first_admit_ms"]
    assert (admitted[:3] == 0.0).all() and (admitted[3:] > 0.0).all()


def test_one_sequence_one_block():
    result = simulate(trace_of((0.0, 1, 1), (0.0, 2, 2), (0.0, 4, 1), (0.0, 5, 1)),
                      extra_engine_args=engine(num_gpu_blocks=1, max_num_seqs=1))
    assert statuses(result) == ["completed", "completed", "capacity", "rejected"]


def test_order_and_size_of_timestamps():
    """Out of order, equal and huge arrival times."""
    rows = [(50.0, 4, 2), (0.0, 4, 2), (50.0, 4, 2), (1e15, 4, 2), (1e15, 4, 1)]
    result = simulate(trace_of(*rows), extra_engine_args=engine())
    assert statuses(result) == ["completed"] * 5
    assert result.per_request["arrival_time_ms"].tolist() == [r[0] for r in rows]
    assert (result.per_request["first_token_ms"] >= result.per_request["arrival_time_ms"]).all()


def test_negative_timestamps_are_shifted():
    result = simulate(trace_of((-20.0, 4, 1), (-10.0, 4, 1)), extra_engine_args=engine())
    assert result.per_request["arrival_time_ms"].tolist() == [0.0, 10.0]


def test_missing_timestamps():
    trace = Trace.from_columns(input_length=[4, 4], output_length=[1, 1], hash_offsets=[0, 1, 2], hash_ids=[1, 2],
                               block_size=4)
    with pytest.raises(ValueError, match="arrival|timestamp"):
        simulate(trace, extra_engine_args=engine())
    assert statuses(simulate(trace, extra_engine_args=engine(), replay_concurrency=1)) == ["completed"] * 2


def test_trace_files():
    with pytest.raises(ValueError, match="at least one trace file"):
        run_trace_replay([])
    with pytest.raises(ValueError, match="exactly one trace file, got 2"):
        run_trace_replay(["a.jsonl", "b.jsonl"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run_trace_replay("nowhere.jsonl")
    with pytest.raises(ValueError, match="planner_config"):
        run_trace_replay("nowhere.jsonl", planner_config={})


@pytest.mark.parametrize(("values", "text"), [
    ((0, 1, 1), "input_tokens must be at least 1"), ((1, 0, 1), "output_tokens"), ((1, 1, 0), "request_count"),
    ((1, 1, 1.5), "request_count must be an integer"), ((2**70, 1, 1), "input_tokens"),
])
def test_synthetic_counts(values, text):
    with pytest.raises(ValueError, match=text):
        run_synthetic_trace_replay(*values)


@pytest.mark.parametrize(("name", "value"), [
    ("arrival_interval_ms", -1.0), ("arrival_interval_ms", math.nan), ("inter_turn_delay_ms", -0.5),
    ("shared_prefix_ratio", 1.5), ("shared_prefix_ratio", math.nan), ("num_prefix_groups", -1),
    ("turns_per_session", 0),
])
def test_synthetic_options(name, value):
    with pytest.raises(ValueError, match=name):
        SyntheticSpec(4, 4, 4, **{name: value})


def test_huge_outputs_are_cut_off_by_the_cap():
    result = simulate(trace_of((0.0, 4, 2**61)), extra_engine_args=engine(num_gpu_blocks=10**9), max_sim_time_ms=1e4)
    assert statuses(result) == ["incomplete"]
    assert result.per_request["output_tokens"][0] > 1000


def test_tiny_speedup_is_an_error():
    with pytest.raises(OverflowError, match="speedup_ratio"):
        simulate(ONE, extra_engine_args=engine(speedup_ratio=1e-300))


def test_object_api_refuses():
    core = VllmCore(engine())
    same = uuid.uuid4()
    core.receive(DirectRequest([1, 2, 3], 2, uuid=same))
    before = core.num_requests(), core.mocker_metrics()
    with pytest.raises(ValueError, match=f"request {same} is already active"):
        core.receive(DirectRequest([1], 1, uuid=same))
    with pytest.raises(ValueError, match="already active"):
        core.apply_command(SchedulerCommand.Submit(DirectRequest([1], 1, uuid=same)))
    assert (core.num_requests(), core.mocker_metrics()) == before
    for now in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="now_ms must be finite"):
            core.execute_pass(now)
    with pytest.raises(ValueError, match="worker_id"):
        VllmCore(engine(), worker_id=-1)
    with pytest.raises(ValueError, match="compat"):
        mocker.create_engine_core(engine(), compat="rust")
    assert core.execute_pass(0.0).output_signals[0].uuid == same


def test_planned_outputs_win_over_the_requested_count():
    core = VllmCore(engine())
    core.receive(DirectRequest([1, 2, 3], 7, output_token_ids=[5, 6]))
    tokens = [s.token_id for _ in range(2) for s in core.execute_pass(0.0).output_signals]
    assert tokens == [5, 6] and core.is_empty()


def test_dropped_requests():
    """Cancelling frees everything; the same id sent again takes its old place in the queue."""
    core = VllmCore(engine(max_num_seqs=1, num_gpu_blocks=100))
    ids = [core.receive(DirectRequest([i] * 9, 3)) for i in range(4)]
    core.execute_pass(0.0)
    assert core.state.running == [ids[0]] and core.state.waiting == ids[1:]
    assert core.drop_request(ids[2]) and not core.drop_request(ids[2])
    assert core.state.waiting == [ids[1], ids[3]]
    core.receive(DirectRequest([2] * 9, 3, uuid=ids[2]))
    assert core.state.waiting == ids[1:]
    assert core.drop_request(ids[0])
    core.check_invariants()
    assert core.mocker_metrics().active_decode_blocks == 0
    now, order = 0.0, []
    while not core.is_empty():
        result = core.execute_pass(now)
        core.check_invariants()
        now = result.end_ms
        order += [a.uuid for a in result.admissions]
    assert order == ids[1:]


def test_equal_calls_give_equal_results():
    def run() -> list:
        core = VllmCore(engine(num_gpu_blocks=100), capture_kv_events=True)
        core.receive(DirectRequest(list(range(9)), 20))
        now, out = 0.0, []
        while not core.is_empty():
            result = core.execute_pass(now)
            now = result.end_ms
            out.append((result.kv_events, [s.token_id for s in result.output_signals]))
        return out

    assert run() == run()


def test_inputs_stay_as_they_were():
    trace = trace_of((0.0, 8, 2), (3.0, 9, 4))
    before = {name: np.array(getattr(trace, name)) for name in ("arrival_ms", "input_length", "hash_ids")}
    simulate(trace, extra_engine_args=engine(), arrival_speedup_ratio=3.0)
    for name, value in before.items():
        assert np.array_equal(getattr(trace, name), value)
