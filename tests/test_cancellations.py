"""Clients that give up after a time: who is cancelled when, what they keep, and that everything else goes on."""
from __future__ import annotations

from uuid import UUID

import numpy as np
import pytest
from test_disagg import ENGINES, ROUTERS, pool, pools, random_trace

from mocker import DirectRequest, MockEngineArgs, Trace, VllmCore, simulate
from mocker.formats import load
from mocker.replay.pools import Pools, Routing, make_cluster
from mocker.trace import TraceError
from mocker.workload import from_trace


def impatient(trace, seed, **times):
    """The trace with clients of whom about half give up within the given times, ms."""
    rng = np.random.default_rng(seed)
    patience = rng.integers(times.get("low", 0), times.get("high", 300), len(trace)).astype(float)
    patience[rng.random(len(trace)) < 0.5] = np.nan
    return Trace.from_columns(
        arrival_ms=trace.arrival_ms, input_length=trace.input_length, output_length=trace.output_length,
        hash_offsets=trace.hash_offsets, hash_ids=trace.hash_ids, block_size=trace.block_size, session=trace.session,
        delay_ms=trace.delay_ms, cancel_after_ms=patience)


def columns(result):
    return {name: np.asarray(column).tolist() for name, column in result.per_request.items()}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "vllm-0.33", "vllm-0.33-async"])
@pytest.mark.parametrize("workers", [1, 3])
def test_many_workers(engine, router, workers):
    """Fast-forward changes nothing; whoever is cancelled had no more than its patience and one pass."""
    if router != "round_robin" and workers == 1:
        return
    kind, rules = ("vllm", engine) if engine.startswith("vllm-") else (engine, None)
    args = MockEngineArgs(engine_type=kind, block_size=4, num_gpu_blocks=40, max_num_seqs=3,
                          **({"scheduler_rules": rules} if rules else {}))
    seen = 0
    for seed in range(6):
        trace = impatient(random_trace(seed), seed)
        runs = [simulate(trace, extra_engine_args=args, num_workers=workers, router_mode=router,
                         router_tie_break="lowest", fast_forward=fast) for fast in (True, False)]
        assert str(columns(runs[0])) == str(columns(runs[1]))
        status = np.array(runs[0].per_request["terminal_status"])
        assert len(status) == len(trace) and not (status == "incomplete").any()
        gone = status == "canceled"
        assert not np.isnan(trace.cancel_after_ms[gone]).any()
        seen += int(gone.sum())
        tokens, limit = runs[0].per_request["output_tokens"], trace.output_length
        assert (tokens[gone] < np.maximum(limit[gone], 1)).all()
        assert (tokens[status == "completed"] == limit[status == "completed"]).all()
        assert runs[0].report["canceled_requests"] == gone.sum()
    assert seen > 10


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(4))
def test_two_pools_hold_nothing_after_it(engine, router, seed):
    workload = from_trace(impatient(random_trace(seed), seed), closed_loop=False, speedup=1.0)
    both = Pools(pool("decode", engine, num_gpu_blocks=30 + seed), 2, pool("prefill", engine, num_gpu_blocks=30), 3)
    cluster, _ = make_cluster(both, workload, Routing(router), cap_ms=None, real_tokens=False, fast=True)
    cluster.set_links(*workload.links(), workload.delays(), 0)
    while not cluster.run_coupled(100):
        for core in cluster.engines:
            core.check()
    assert not cluster.stalled and cluster.ended == len(workload) and not cluster.unfinished()
    for core in cluster.engines:
        core.check()
    ended = cluster.collector.columns["terminal"]
    assert (ended == 6).any() and (ended == 1).any() and (ended != 0).all()
    assert not np.isnan(workload.cancel_after[ended == 6]).any()


@pytest.mark.parametrize("seed", range(8))
def test_one_worker_is_an_engine_with_requests_dropped_between_passes(seed):
    """The same replay by hand: a client's request is dropped at the first end of a pass after it gave up."""
    trace = impatient(random_trace(seed), seed, high=120)
    args = MockEngineArgs(block_size=4, num_gpu_blocks=200, max_num_seqs=2)
    result = simulate(trace, extra_engine_args=args)
    core, now, waiting = VllmCore(args), 0.0, list(np.argsort(trace.arrival_ms, kind="stable"))
    arrival = trace.normalize_session_starts().arrival_ms
    alive, made = {}, {}
    while waiting or alive:
        if not alive and arrival[waiting[0]] > now:
            now = float(arrival[waiting[0]])
        for row in [row for row in alive if arrival[row] + trace.cancel_after_ms[row] <= now]:
            core.drop_request(UUID(int=row + 1))
            del alive[row]
        while waiting and arrival[waiting[0]] <= now:
            row = int(waiting.pop(0))
            ids = trace.hash_ids[trace.hash_offsets[row]:trace.hash_offsets[row + 1]]
            tokens = np.repeat(ids.astype(np.uint32), 4)[:trace.input_length[row]]
            core.receive(DirectRequest(tokens.tolist(), int(trace.output_length[row]), uuid=UUID(int=row + 1)))
            alive[row], made[row] = True, 0
        if not alive:
            continue
        done = core.execute_pass(now)
        now = done.end_ms
        for signal in done.output_signals:
            made[signal.uuid.int - 1] += signal.token_id is not None
            if signal.completed:
                alive.pop(signal.uuid.int - 1)
    assert result.per_request["output_tokens"].tolist() == [made[row] for row in range(len(trace))]
    assert result.report["canceled_requests"] > 0


def test_a_session_goes_on_when_a_turn_is_given_up():
    trace = Trace.from_columns(
        arrival_ms=[0.0, np.nan], input_length=[4, 4], output_length=[1000, 2], hash_offsets=[0, 1, 2], hash_ids=[1, 2],
        block_size=4, session=[0, 0], delay_ms=[0.0, 50.0], cancel_after_ms=[100.0, np.nan])
    for options in ({}, {"replay_concurrency": 1}, pools("vllm"), pools("sglang")):
        result = simulate(trace, **options)
        assert list(result.per_request["terminal_status"]) == ["canceled", "completed"]
        first_end = float(result.per_request["last_token_ms"][0])
        assert 100.0 <= first_end < 200.0
        if "replay_concurrency" not in options:
            assert result.per_request["arrival_time_ms"][1] >= first_end + 50.0


def test_read_and_written(tmp_path):
    row = '{"timestamp": 0, "output_length": 1, "hash_ids": [1]'
    path = tmp_path / "t.jsonl"
    path.write_text(f'{row}}}\n{row}, "cancel_after_ms": 2.5}}\n{row}, "cancel_after_ms": null}}\n')
    trace = load(path, block_size=4)
    assert np.array_equal(trace.cancel_after_ms, [np.nan, 2.5, np.nan], equal_nan=True)
    trace.save(tmp_path / "twin.jsonl")
    assert load(tmp_path / "twin.jsonl", block_size=4) == trace
    assert Trace.concat(trace.head(1), trace).cancel_after_ms[2] == 2.5
    assert trace.head(2).cancel_after_ms.tolist()[1] == 2.5
    for value, text in (("-1", "at least 0"), ('"x"', "must be a number"), ("1e999", "finite")):
        path.write_text(f'{row}}}\n{row}, "cancel_after_ms": {value}}}\n')
        with pytest.raises(TraceError, match=text) as caught:
            load(path, block_size=4)
        assert (caught.value.line, caught.value.field) == (2, "cancel_after_ms")


@pytest.mark.parametrize("fast", [True, False])
def test_whoever_comes_and_gives_up_behind_others_is_seen(fast):
    """Passes that are skipped, since whoever comes has to wait anyway, stop for clients without patience."""
    trace = Trace.from_columns(arrival_ms=[0.0, 1.0, 100.0], input_length=[64] * 3, output_length=[200, 200, 2],
                               block_size=64, hash_offsets=[0, 1, 2, 3], hash_ids=np.arange(3, dtype=np.uint64),
                               cancel_after_ms=[np.nan, np.nan, 50.0])
    result = simulate(trace, extra_engine_args=MockEngineArgs(block_size=64, num_gpu_blocks=1000, max_num_seqs=1),
                      max_sim_time_ms=250.0, fast_forward=fast)
    assert list(result.per_request["terminal_status"]) == ["incomplete", "incomplete", "canceled"]
