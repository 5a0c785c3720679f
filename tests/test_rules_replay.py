"""Replays by vLLM's scheduling rules: as a core driven by hand; priorities, lengths, several workers, routers."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_disagg import random_trace
from test_endings import statuses, trace_of
from test_live import same, small, trace

from mocker import DirectRequest, MockEngineArgs, SglangArgs, Trace, create_engine_core, simulate
from mocker.replay.fast import FastPaths

RULES = ["vllm-0.33", "vllm-0.33-async"]


def args(rules: str, **values) -> MockEngineArgs:
    return MockEngineArgs(**{"block_size": 4, "num_gpu_blocks": 24, "max_num_batched_tokens": 32, "max_num_seqs": 6,
                             "scheduler_rules": rules, **values})


def by_hand(trace: Trace, engine: MockEngineArgs) -> dict[int, tuple[int, float]]:
    """Tokens and the time of the last one by row, with one core that is driven pass by pass."""
    core = create_engine_core(engine)
    arrival = trace.arrival_ms - trace.arrival_ms[0]
    rows, out, now, next_row = {}, {}, 0.0, 0
    while next_row < len(trace) or not core.is_empty():
        if core.is_empty():
            now = max(now, arrival[next_row])
        while next_row < len(trace) and arrival[next_row] <= now:
            ids = trace.hash_ids[trace.hash_offsets[next_row]:trace.hash_offsets[next_row + 1]]
            tokens = np.repeat(ids.astype(np.uint32), 4)[:trace.input_length[next_row]]
            uuid = core.receive(DirectRequest(tokens, int(trace.output_length[next_row])))
            rows[uuid] = next_row
            next_row += 1
        result = core.execute_pass(now)
        for signal in result.output_signals:
            if signal.token_id is not None:
                made = out.get(rows[signal.uuid], (0, 0.0))[0]
                out[rows[signal.uuid]] = made + 1, result.tokens_ms
        now = result.end_ms
    return out


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(8))
def test_like_a_core_driven_by_hand(rules, seed):
    trace, engine = random_trace(seed), args(rules)
    expected = by_hand(trace, engine)
    columns = simulate(trace, extra_engine_args=engine).per_request
    got = {int(row): (int(tokens), float(last)) for row, tokens, last in zip(
        columns["row"], columns["output_tokens"], columns["last_token_ms"], strict=True) if tokens}
    assert got == expected


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("options", [
    {}, {"num_workers": 3}, {"num_workers": 3, "router_mode": "kv_router"}, {"replay_concurrency": 5},
    {"num_workers": 2, "replay_concurrency": 7}, {"num_workers": 2, "router_mode": "least_requests"}],
    ids=["alone", "in turn", "kv router", "closed loop", "closed loop of two", "least requests"])
def test_fast_forward_changes_nothing(rules, options):
    for seed in range(4):
        fast, plain = (simulate(random_trace(seed), extra_engine_args=args(rules), fast_forward=flag, **options)
                       for flag in (True, False))
        for name, column in fast.per_request.items():
            assert np.array_equal(column, plain.per_request[name], equal_nan=column.dtype.kind == "f"), name
        assert "stalled" not in fast.report


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("concurrency", [None, 2])
def test_model_length(rules, workers, concurrency):
    """A prompt as long as the model is refused; outputs end where the model does."""
    trace = trace_of((0.0, 20, 3), (0.0, 19, 3), (0.0, 10, 30), (1.0, 10, 10), (2.0, 21, 1))
    result = simulate(trace, extra_engine_args=args(rules, max_model_len=20), num_workers=workers,
                      replay_concurrency=concurrency)
    assert statuses(result) == ["rejected", "completed", "completed", "completed", "rejected"]
    assert list(result.per_request["output_tokens"]) == [0, 1, 10, 10, 0]
    assert result.report["rejected_requests"] == 2


@pytest.mark.parametrize("rules", RULES)
def test_priorities(rules, tmp_path):
    """Smaller first, whoever arrived first."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(
        f'{{"timestamp":{at},"input_length":8,"output_length":2,"hash_ids":[{i},{i + 50}],"priority":{priority}}}\n'
        for i, (at, priority) in enumerate([(0, 5), (1, 4), (1, 1), (1, 9), (1, 0)])))
    engine = args(rules, vllm_scheduling_policy="priority", max_num_seqs=1)
    first = simulate(path, extra_engine_args=engine, trace_block_size=4).per_request["first_admit_ms"]
    assert list(np.argsort(first)) == [0, 4, 2, 1, 3]


def test_no_switch_by_name_is_the_default():
    for seed in range(4):
        runs = [simulate(random_trace(seed), extra_engine_args=engine, num_workers=2).per_request
                for engine in (args("dynamo-mocker-1.3.0"), MockEngineArgs(
                    block_size=4, num_gpu_blocks=24, max_num_batched_tokens=32, max_num_seqs=6))]
        for name, column in runs[0].items():
            assert np.array_equal(column, runs[1][name], equal_nan=column.dtype.kind == "f"), name


def test_planned_outputs_of_sglang_are_cached_always(tmp_path):
    """Its tree is on whatever `enable_prefix_caching` says, so a later prompt finds what was generated."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp":0,"input_length":4,"output_length":9,"hash_ids":[1],'
                    '"output_token_ids":[2,2,2,2,2,2,2,2,2]}\n'
                    '{"timestamp":900,"input_length":12,"output_length":1,"hash_ids":[1,2,3]}\n')
    reused = [list(simulate(path, trace_block_size=4, extra_engine_args=MockEngineArgs(
        engine_type="sglang", block_size=4, num_gpu_blocks=50, enable_prefix_caching=caching,
        sglang=SglangArgs(page_size=4))).per_request["reused_input_tokens"]) for caching in (True, False)]
    assert reused == [[0, 8], [0, 8]]


@pytest.mark.parametrize("rules", RULES)
def test_priorities_by_every_way_to_replay(rules):
    """Who comes goes before those who wait with less priority, also where passes are skipped or prompts are tokens."""
    engine = small(scheduler_rules=rules, vllm_scheduling_policy="priority", num_gpu_blocks=36, max_num_seqs=8)
    for seed in range(14):
        work = trace(seed, 100)
        work = replace(work, priority=np.random.default_rng(seed).integers(0, 3, 100).astype(np.int32))
        for more in ({}, {"num_workers": 3}, {"num_workers": 2, "router_mode": "kv_router"}):
            plain = simulate(work, extra_engine_args=engine, fast_forward=False, **more)
            for fast in (True, FastPaths(extents=False)):
                same(simulate(work, extra_engine_args=engine, fast_forward=fast, **more), plain)
