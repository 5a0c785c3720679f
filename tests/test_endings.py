"""Every replay ends, and says how each request did: the table of docs/differences.md, row by row."""
from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest

from mocker import DirectRequest, MockEngineArgs, SyntheticSpec, Trace, TraceError, VllmCore, simulate


def trace_of(*rows: tuple[float, int, int], shared: bool = False, block: int = 4) -> Trace:
    """Rows of (arrival ms, prompt, output) with prompts that share everything or nothing."""
    counts = [-(-prompt // block) for _, prompt, _ in rows]
    ids = [i if shared else 1000 * r + i for r, count in enumerate(counts) for i in range(count)]
    return Trace.from_columns(
        arrival_ms=[r[0] for r in rows], input_length=[r[1] for r in rows], output_length=[r[2] for r in rows],
        hash_offsets=np.cumsum([0, *counts]), hash_ids=np.array(ids, np.uint64), block_size=block)


def statuses(result) -> list[str]:
    return list(result.per_request["terminal_status"])


def engine(**values) -> MockEngineArgs:
    return MockEngineArgs(**{"block_size": 4, "num_gpu_blocks": 8, **values})


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_outgrown_pool(workers, caching):
    """Prompt and output exceed the pool: it ends with what it got, and its neighbours go on."""
    trace = trace_of((0.0, 20, 100), (1.0, 8, 3), (2.0, 8, 3))
    result = simulate(trace, extra_engine_args=engine(enable_prefix_caching=caching), num_workers=workers)
    assert statuses(result) == ["capacity", "completed", "completed"]
    assert list(result.per_request["output_tokens"]) == [12, 3, 3]
    assert result.report["capacity_requests"] == 1
    assert result.report["completed_requests"] == 2
    assert result.report["total_output_tokens"] == result.per_request["output_tokens"].sum()


def test_prompt_fills_pool():
    trace = trace_of((0.0, 32, 1), (1.0, 31, 1), (2.0, 33, 1), (3.0, 4, 1))
    result = simulate(trace, extra_engine_args=engine())
    assert statuses(result) == ["capacity", "completed", "rejected", "completed"]
    assert list(result.per_request["output_tokens"]) == [0, 1, 0, 1]
    assert result.report["rejected_requests"] == 1


@pytest.mark.parametrize("concurrency", [None, 1, 2])
def test_no_output_wanted(concurrency):
    trace = trace_of((0.0, 9, 0), (0.0, 9, 2), (5.0, 4, 0))
    result = simulate(trace, extra_engine_args=engine(), replay_concurrency=concurrency)
    assert statuses(result) == ["completed"] * 3
    assert list(result.per_request["output_tokens"]) == [0, 2, 0]
    assert np.isnan(result.per_request["first_token_ms"][[0, 2]]).all()


def test_prompt_over_budget_without_chunking():
    """The prompt never fits a pass: it ends, whether it is first or comes back after a preemption."""
    args = engine(enable_chunked_prefill=False, max_num_batched_tokens=8, num_gpu_blocks=100)
    result = simulate(trace_of((0.0, 8, 2), (0.0, 9, 2), (0.0, 7, 2)), extra_engine_args=args)
    assert statuses(result) == ["completed", "over_budget", "completed"]
    shared = trace_of((0.0, 8, 2), (0.0, 12, 2), shared=True)
    assert statuses(simulate(shared, extra_engine_args=args)) == ["completed", "completed"]


def test_requests_that_evict_each_other_are_named():
    """Oldest-first preemption in a tiny pool can go round for ever; the others of the cluster complete."""
    rows = [(0.0, 39, 3, [2, 6, 7, 7, 5, 7]), (0.0, 7, 2, [9]), (717.5, 29, 40, [2, 6, 5, 6, 4]), (720.0, 7, 2, [9]),
            (735.0, 33, 20, [5, 1, 4, 6, 8]), (740.0, 7, 2, [9])]
    trace = Trace.from_columns(
        arrival_ms=[r[0] for r in rows], input_length=[r[1] for r in rows], output_length=[r[2] for r in rows],
        hash_offsets=np.cumsum([0] + [len(r[3]) for r in rows]), hash_ids=[i for r in rows for i in r[3]], block_size=7)
    args = engine(num_gpu_blocks=20, max_num_seqs=2, max_num_batched_tokens=9, preemption_mode="fifo")
    result = simulate(trace, extra_engine_args=args, num_workers=2)
    assert statuses(result) == ["completed"] * 2 + ["incomplete", "completed"] * 2
    assert {entry["row"] for entry in result.report["stalled"]} == {2, 4}
    assert all(entry["worker"] == 0 and entry["waits_for"] for entry in result.report["stalled"])


@pytest.mark.parametrize("workers", [1, 3])
def test_time_cap(workers):
    trace = trace_of((0.0, 8, 50), (0.0, 8, 2), (0.0, 8, 400), (900.0, 8, 2), (5000.0, 8, 2))
    args = engine(num_gpu_blocks=1000)
    full = simulate(trace, extra_engine_args=args, num_workers=workers)
    cut = simulate(trace, extra_engine_args=args, num_workers=workers, max_sim_time_ms=1000.0)
    assert statuses(cut) == ["completed", "completed", "incomplete", "completed"]
    assert cut.report["incomplete_requests"] == 1
    assert cut.report["completed_requests"] == 3
    assert 0 < cut.per_request["output_tokens"][2] < 400
    assert cut.report["total_output_tokens"] == cut.per_request["output_tokens"].sum()
    for column in ("first_admit_ms", "first_token_ms", "last_token_ms"):
        same = np.array(statuses(cut)) == "completed"
        assert np.array_equal(cut.per_request[column][same], full.per_request[column][:4][same])
    reference = simulate(trace, extra_engine_args=args, num_workers=workers, max_sim_time_ms=1000.0, compat="reference")
    assert reference.report["completed_requests"] == 4
    assert reference.report["total_output_tokens"] == 50 + 2 + 400 + 2
    nothing = simulate(trace, extra_engine_args=args, num_workers=workers, max_sim_time_ms=0.0)
    assert nothing.report["num_requests"] == 3


def test_time_cap_is_the_same_pass_by_pass():
    trace = trace_of((0.0, 8, 50), (0.0, 8, 7), (3.0, 40, 100), (900.0, 8, 2))
    for cap in np.linspace(0.0, 1500.0, 61):
        for workers in (1, 2):
            runs = [simulate(trace, extra_engine_args=engine(num_gpu_blocks=1000), num_workers=workers,
                             max_sim_time_ms=float(cap), fast_forward=fast) for fast in (True, False)]
            for key, value in runs[0].report.items():
                if "wall" not in key and "_per_s" not in key:
                    same = isinstance(value, (dict, list)) or value is None
                    assert runs[1].report[key] == (value if same else pytest.approx(value, rel=1e-12)), key


def test_no_samples():
    result = simulate(trace_of((0.0, 8, 1)), extra_engine_args=engine())
    assert result.report["mean_itl_ms"] is None and result.report["samples"]["itl"] == 0
    assert result.report["mean_ttft_ms"] > 0 and result.report["samples"]["ttft"] == 1
    assert simulate(trace_of((0.0, 8, 1)), extra_engine_args=engine(), compat="reference").report["mean_itl_ms"] == 0.0


def test_clamped_outputs_of_trtllm():
    args = engine(engine_type="trtllm")
    result = simulate(trace_of((0.0, 20, 100), (0.0, 4, 3)), extra_engine_args=args)
    assert statuses(result) == ["completed", "completed"]
    assert list(result.per_request["output_tokens"]) == [12, 3]
    assert result.report["clamped_requests"] == 1
    assert result.report["total_output_tokens"] == 15
    reference = simulate(trace_of((0.0, 20, 100), (0.0, 4, 3)), extra_engine_args=args, compat="reference")
    assert reference.report["total_output_tokens"] == 103


def test_short_hash_ids(tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n'
                    '{"timestamp": 1, "input_length": 600, "output_length": 2, "hash_ids": [1]}\n')
    with pytest.raises(TraceError, match=rf"{path}:2: input_length") as caught:
        simulate(path)
    assert caught.value.line == 2
    result = simulate(path, on_short_hash_ids="clamp")
    assert result.report["shortened_prompts"] == 1
    assert list(result.per_request["input_length"]) == [5, 512]


def test_fractional_timestamps_are_the_nearest_double(tmp_path):
    texts = ["0.1", "27482.123456789", "1e3", "123456789012345.67", "4.35", "0.30000000000000004"]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f'{{"timestamp": {t}, "input_length": 5, "output_length": 1, "hash_ids": [1]}}\n'
                            for t in texts))
    assert Trace.load(path).arrival_ms.tolist() == [float(t) for t in texts]


def test_memory_grows_with_requests_not_tokens():
    """Peak memory of a replay: a few hundred bytes a request, whatever the prompts' lengths."""
    code = ("import resource, sys, mocker; from mocker import *\n"
            "t = Trace.load(sample_trace_path()); t = Trace.concat(*[t] * int(sys.argv[1]))\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "simulate(t, num_workers=4)\n"
            "print(len(t), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)")
    one, four = (tuple(map(int, subprocess.run([sys.executable, "-c", code, n], capture_output=True, text=True,
                                                check=True).stdout.split())) for n in ("1", "4"))
    assert resource.getpagesize() <= 65536
    assert (four[1] - one[1]) * 1024 / (four[0] - one[0]) < 2500


def test_object_api_endings():
    core = VllmCore(engine())
    big = core.receive(DirectRequest(list(range(20)), 100))
    never = core.receive(DirectRequest(list(range(33)), 1))
    empty = core.receive(DirectRequest([7] * 5, 0))
    no_prompt = core.receive(DirectRequest([], 3))
    now, ended = 0.0, {}
    while not core.is_empty():
        result = core.execute_pass(now)
        core.check_invariants()
        now = result.end_ms
        ended |= {s.uuid: s.terminal_status for s in result.output_signals if s.completed}
    assert ended == {big: "capacity", never: "rejected", empty: "completed", no_prompt: "completed"}
    assert core.mocker_metrics().active_decode_blocks == 0


def test_synthetic_over_capacity():
    result = simulate(SyntheticSpec(64, 64, 5), extra_engine_args=engine())
    assert statuses(result) == ["rejected"] * 5
    assert result.report["mean_ttft_ms"] is None
