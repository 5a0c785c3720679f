"""Planners in the loop: recorded replays of the reference, worker-seconds, ends of every kind, bad decisions."""
from __future__ import annotations

import gzip
import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from fuzz_planner import compare

import mocker
from mocker import MockEngineArgs, PlannerReplayBridge, SyntheticSpec, simulate
from mocker.cli import main
from mocker.replay import PASS_METRICS, ScalingEvent
from mocker.replay.planner import Planning
from mocker.replay.pools import Pools, Routing, make_cluster
from mocker.workload import from_synthetic

ROOT = Path(__file__).resolve().parent.parent
with gzip.open(ROOT / "tests" / "golden" / "planner.jsonl.gz", "rt") as file:
    RECORDED = [json.loads(line) for line in file]


class Steps:
    """Decides by a function of the tick's number; notes what it is told."""

    def __init__(self, decide, *, first=0.0, every=10.0, fpm="dicts"):
        self.decide, self.first, self.every, self.fpm_format = decide, first, every, fpm
        self.told = []

    def initial_tick_ms(self):
        return self.first

    def on_tick(self, metrics):
        self.told.append(metrics)
        prefill, decode = self.decide(len(self.told))
        return {"target_prefill": prefill, "target_decode": decode, "next_tick_ms": metrics["now_ms"] + self.every}


def small(**changes):
    return MockEngineArgs(**{"block_size": 4, "num_gpu_blocks": 200, "max_num_seqs": 4, "max_num_batched_tokens": 64,
                             **changes})


def two_pools(**changes):
    return {"prefill_engine_args": small(worker_type="prefill", kv_bytes_per_token=100_000, kv_transfer_bandwidth=1.0,
                                         **changes),
            "decode_engine_args": small(worker_type="decode", **changes)}


WORK = SyntheticSpec(40, 30, 40, arrival_interval_ms=5.0)


@pytest.mark.parametrize("case", RECORDED, ids=[str(case["seed"]) for case in RECORDED])
def test_recorded(case, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in case["rows"]))
    assert compare(str(path), case["config"], case) is None


def test_columns_are_the_dicts_and_none_is_none():
    told = {}
    for fpm in ("dicts", "columns", "none"):
        planner = Steps(lambda n: (None, 1 + n % 3), fpm=fpm)
        simulate(WORK, extra_engine_args=small(), planner=planner)
        told[fpm] = planner.told
    assert len(told["dicts"]) > 10 and sum(len(m["decode_fpm_snapshots"]) for m in told["dicts"]) > 50
    for dicts, columns, none in zip(*told.values(), strict=True):
        passes = columns["decode_fpm_snapshots"]
        assert passes.dtype == PASS_METRICS
        assert [dict(zip(passes.dtype.names, row, strict=True)) for row in passes.tolist()] == dicts[
            "decode_fpm_snapshots"]
        assert "decode_fpm_snapshots" not in none and none["traffic"] == dicts["traffic"] == columns["traffic"]


def test_worker_seconds_count_starting_and_draining_workers():
    planner = Steps(lambda n: (None, 2 if n == 1 else None), first=20.0, every=math.inf)
    result = simulate(WORK, extra_engine_args=small(startup_time=0.1), planner=planner)
    end = result.report["duration_ms"]
    assert result.report["decode_worker_seconds"] == pytest.approx((end + (end - 20.0)) / 1000.0, rel=1e-12)
    assert result.scaling == [ScalingEvent(20.0, "aggregated", 1, 2)]
    first = result.per_request["arrival_time_ms"][result.per_request["decode_worker_idx"] == 1].min()
    assert first >= 120.0                        # nobody is sent to a worker that still starts


def test_no_planner_is_asked_twice_at_a_time_and_a_calm_one_changes_nothing():
    plain = simulate(WORK, extra_engine_args=small(), num_workers=2)
    planner = Steps(lambda n: (None, 2))
    planned = simulate(WORK, extra_engine_args=small(), num_workers=2, planner=planner)
    times = [m["now_ms"] for m in planner.told]
    assert times == sorted(set(times)) and planned.scaling == []
    for name, column in plain.per_request.items():
        assert np.array_equal(column, planned.per_request[name], equal_nan=column.dtype.kind == "f"), name


@pytest.mark.parametrize("mode", ["round_robin", "kv_router", "least_requests"])
@pytest.mark.parametrize("pools", ["one", "prefill", "decode", "both"])
def test_scaling_to_zero_ends_and_names_who_waits(mode, pools):
    gone = {"one": (None, 0), "prefill": (0, 2), "decode": (2, 0), "both": (0, 0)}[pools]
    options = {"extra_engine_args": small(), "num_workers": 2} if pools == "one" else {
        **two_pools(), "num_prefill_workers": 2, "num_decode_workers": 2}
    result = simulate(WORK, planner=Steps(lambda n: gone, first=50.0), router_mode=mode, **options)
    status = result.per_request["terminal_status"]
    waiting = np.flatnonzero(status == "incomplete")
    assert 0 < len(waiting) < 40 and set(status) == {"completed", "incomplete"}
    assert sorted(entry["row"] for entry in result.report["stalled"]) == waiting.tolist()
    assert all("waits_for" in entry for entry in result.report["stalled"])


@pytest.mark.parametrize("mode", ["round_robin", "kv_router"])
@pytest.mark.parametrize("disagg", [False, True])
@pytest.mark.parametrize("startup", [None, 0.03])
def test_workers_that_come_back_serve_who_waited(mode, disagg, startup):
    planner = Steps(lambda n: (0, 0) if n < 20 else (1, 2), first=30.0)
    options = two_pools(startup_time=startup) if disagg else {"extra_engine_args": small(startup_time=startup)}
    result = simulate(WORK, planner=planner, router_mode=mode, **options)
    assert set(result.per_request["terminal_status"]) == {"completed"}
    assert result.report["total_output_tokens"] == 40 * 30


def test_a_planner_that_never_lets_a_worker_start_ends():
    planner = Steps(lambda n: (None, n % 2), first=5.0, every=1.0)
    result = simulate(WORK, extra_engine_args=small(startup_time=60.0), planner=planner)
    assert "incomplete" in result.per_request["terminal_status"] and len(planner.told) < 10_000


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_workers_removed_while_they_hold_a_source_leak_nothing(engine):
    planner = Steps(lambda n: (1 + n % 3, 1 + (n + 1) % 3), every=3.0)
    spec = SyntheticSpec(64, 10, 60, arrival_interval_ms=2.0, shared_prefix_ratio=0.5, num_prefix_groups=1)
    workload = from_synthetic(spec, block_size=4, closed_loop=False, speedup=1.0)
    args = two_pools(engine_type=engine)
    planning = Planning(planner)
    cluster, _ = make_cluster(Pools(args["decode_engine_args"], 1, args["prefill_engine_args"], 1), workload,
                              Routing("kv_router"), cap_ms=None, real_tokens=False, fast=True, planning=planning)
    cluster.set_links(*workload.links(), workload.delays(), 0)
    while not cluster.run_coupled(50):
        for core in cluster.engines:
            assert core is None or core.check() is None
    assert (cluster.collector.columns["terminal"] == 1).all() and not cluster.unfinished()
    for core in filter(None, cluster.engines):
        core.check()
        counts = core.counts
        assert (counts["protected_tokens"] + counts["held"] if engine == "sglang" else counts[0]) == 0
    assert len(planning.events) > 20 and cluster.engines.count(None) > 10
    assert max(m["total_prefill_count"] - m["active_prefill_count"] for m in planner.told) > 0    # some did drain
    assert (cluster.details["source_released_ms"] > cluster.details["source_held_ms"]).all()


def test_recording_and_a_planner_together():
    result = simulate(WORK, extra_engine_args=small(), planner=Steps(lambda n: (None, 1 + n % 3)),
                      recording=mocker.Recording())
    assert len(result.timeline.workers) == 1 + sum(e.target - e.before for e in result.scaling if e.target > e.before)
    assert result.timeline.series["output_tokens"].sum() == pytest.approx(40 * 30)


@pytest.mark.parametrize(("decision", "error", "text"), [
    (None, TypeError, "must return a dict"), ({}, KeyError, "target_prefill is missing"),
    ({"target_prefill": 1, "target_decode": 1}, KeyError, "next_tick_ms is missing"),
    ({"target_prefill": None, "target_decode": -1, "next_tick_ms": None}, ValueError, "target_decode must be from 0"),
    ({"target_prefill": None, "target_decode": 10**9, "next_tick_ms": None}, ValueError, "to 100000"),
    ({"target_prefill": 1.5, "target_decode": 1, "next_tick_ms": None}, TypeError, "target_prefill must be an integer"),
    ({"target_prefill": True, "target_decode": 1, "next_tick_ms": None}, TypeError, "target_prefill must be"),
    ({"target_prefill": 1, "target_decode": 1, "next_tick_ms": "soon"}, TypeError, "next_tick_ms must be a number"),
])
def test_bad_decisions(decision, error, text):
    planner = Steps(lambda n: (None, None))
    planner.on_tick = lambda metrics: decision
    with pytest.raises(error, match=text):
        simulate(WORK, extra_engine_args=small(), planner=planner)


def test_a_planner_s_exception_comes_out_unchanged():
    raised = RuntimeError("mine")

    def fail(_):
        raise raised

    with pytest.raises(RuntimeError) as caught:
        simulate(WORK, extra_engine_args=small(), planner=Steps(fail))
    assert caught.value is raised


@pytest.mark.parametrize("planner", [object(), type("P", (), {"initial_tick_ms": lambda self: 0.0})()])
def test_what_is_no_planner(planner):
    with pytest.raises(TypeError, match="initial_tick_ms"):
        simulate(WORK, extra_engine_args=small(), planner=planner)


@pytest.mark.parametrize("first", [math.inf, math.nan, None])
def test_first_tick(first):
    planner = Steps(lambda n: (None, 3), first=first)
    if first is None:
        with pytest.raises(TypeError, match="must return a number"):
            simulate(WORK, extra_engine_args=small(), planner=planner)
        return
    assert simulate(WORK, extra_engine_args=small(), planner=planner).scaling == [] and planner.told == []


def test_bridge_has_the_reference_s_constructors(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 3, "input_length": 20, "output_length": 5, "hash_ids": [1]}\n' * 3)
    pools = (small(worker_type="prefill"), small(worker_type="decode"))
    for bridge in (PlannerReplayBridge(path, small(), 1, "kv_router"),
                   PlannerReplayBridge.create_disagg(path, *pools, 1, 1, trace_block_size=32),
                   PlannerReplayBridge.from_synthetic(20, 5, 3, small(), 2, replay_concurrency=2),
                   PlannerReplayBridge.from_synthetic_disagg(20, 5, 3, *pools, 1, 1, turns_per_session=2)):
        report = bridge.run(Steps(lambda n: (1, 1)))
        assert report["completed_requests"] == report["num_requests"] and bridge.simulation.report is report
        with pytest.raises(RuntimeError, match="finalized"):
            bridge.run(Steps(lambda n: (1, 1)))
    with pytest.raises(ValueError, match="num_workers must be at least 1"):
        PlannerReplayBridge(path, small(), 0).run(Steps(lambda n: (1, 1)))
    with pytest.raises(TypeError, match="extra_engine_args must be MockEngineArgs"):
        PlannerReplayBridge(path, None, 1)


def test_command_line(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    example = str(ROOT / "examples" / "planners.py")
    flags = ["replay", "--input-tokens", "2000", "--output-tokens", "20", "--request-count", "3000",
             "--arrival-interval-ms", "5", "--report-json", "report.json", "--quiet", "--planner"]
    assert main([*flags, f"{example}:SlaPlanner"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["scaling"]) > 1 and report["scaling"][0]["role"] == "aggregated"
    for name, text in ((example, "expected FILE.py:NAME"), (f"{example}:Nobody", "has no Nobody"),
                       ("gone.py:P", "there is no file gone.py"), (f"{tmp_path / 'report.json'}:P", "not a Python")):
        with pytest.raises(SystemExit) as stop:
            main([*flags, name])
        assert stop.value.code == 2 and text in capsys.readouterr().err


def test_example(capsys):
    spec = importlib.util.spec_from_file_location("planners", ROOT / "examples" / "planners.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(600)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 6 and [row[0] for row in rows[1:4]] == ["2", "4", "8"]
    assert all(int(row[-1]) == 0 for row in rows[1:4]) and all(int(row[-1]) > 3 for row in rows[4:])
    hours = [float(row[-2]) for row in rows[1:]]
    assert hours[0] < hours[3] < hours[2] and hours[0] < hours[4] < hours[2]
