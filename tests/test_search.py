"""Searches: bounds, early ends that change no answer, and answers that agree with trying everything."""
from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

import mocker
from mocker._distribution import statistics
from mocker.cli import main
from mocker.report import DISTRIBUTIONS
from mocker.search import Between, highest_rate, optimize, pareto_front
from mocker.search.runner import Runner, gpus
from mocker.search.sla import Bound, bounds_of, violation
from mocker.search.watch import allowed_above

TRACE = mocker.Trace.load(mocker.sample_trace_path()).head(600)
BASE = {"block_size": 64, "num_gpu_blocks": 4096}
SPACE = {"num_workers": [1, 2, 3, 4, 6, 8], "router_mode": ["round_robin", "kv_router"]}


def report_of(config: dict) -> dict | None:
    table = mocker.sweep(TRACE, [config], base=BASE)
    return None if table.errors else table.rows()[0]


@pytest.fixture(scope="module")
def everything() -> list[tuple[dict, dict | None]]:
    return [(dict(zip(SPACE, pair, strict=True)), report_of(dict(zip(SPACE, pair, strict=True))))
            for pair in itertools.product(*SPACE.values())]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("sla", [{"p99_ttft_ms": 6000}, {"p95_itl_ms": 20, "mean_e2e_latency_ms": 6000},
                                 {"p90_tpot_ms": 12.0}, {"request_throughput_rps": ">= 2"}, {"max_ttft_ms": 1}])
def test_cheapest_is_that_of_trying_everything(everything, sla, early):
    bounds = bounds_of(sla)
    good = [(config["num_workers"], violation(bounds, report)) for config, report in everything
            if report is not None and violation(bounds, report) <= 0]
    found = optimize(TRACE, SPACE, sla=sla, base=BASE, stop_early=early, workers=2)
    assert found.proved
    if not good:
        assert found.config is None and math.isnan(found.cost) and len(found.table) == 12
        return
    assert (found.cost, violation(bounds, found.report)) == min(good)
    assert found.report["num_requests"] == 600


def test_an_early_end_never_takes_a_feasible_candidate():
    """Bounds on both sides of what random configurations reach, for every statistic that is watched."""
    rng = random.Random(3)
    stopped = 0
    for _ in range(25):
        config = {**BASE, "num_workers": rng.choice([1, 2, 4]), "num_gpu_blocks": rng.choice([2048, 4096]),
                  "router_mode": "round_robin", "engine_type": rng.choice(["vllm", "sglang"]),
                  "replay_concurrency": rng.choice([None, 16]), "max_num_batched_tokens": rng.choice([2048, 8192])}
        if rng.random() < 0.2:
            del config["num_workers"]
            config |= {"num_prefill_workers": 2, "num_decode_workers": 2}
        report = mocker.sweep(TRACE, [config]).rows()[0]
        assert report["error"] is None
        for statistic in ("mean", "max", "median", "p90", "p99"):
            name = rng.choice(DISTRIBUTIONS[:-1])
            key = f"{statistic}_{name}"
            if report[key] is None:
                continue
            for factor in (1.0, 1.0 + 1e-6, 0.5, 0.02):
                bound = report[key] * factor
                with Runner(TRACE, cost="gpus", keys=[key], seeds=None, stop_early=True, backend="threads", workers=1,
                            out=None, progress=False, total=None) as runner:
                    trial = runner.run([config], (Bound(key, bound),))[0]
                if factor >= 1:
                    assert trial.report[key] == report[key], (config, key, factor)
                    assert trial.feasible == (report["completed_requests"] == report["num_requests"])
                else:
                    assert not trial.feasible
                    stopped += not math.isnan(trial.stopped)
    assert stopped > 50


def test_allowed_above_is_the_percentile_rule():
    for total in (1, 2, 7, 100, 101, 12031):
        values = np.arange(total, dtype=float)
        for statistic in ("median", "p75", "p90", "p95", "p99"):
            percentile = statistics(values)[statistic]
            for bound in (percentile - 0.5, percentile + 0.5):
                lost = np.count_nonzero(values > bound) > allowed_above(total, statistic)
                assert lost == (percentile > bound)


@pytest.mark.parametrize("early", [True, False])
def test_front_is_that_of_trying_everything(everything, early):
    points = sorted((config["num_workers"], report["p99_ttft_ms"]) for config, report in everything if report)
    expected = []
    for cost, value in points:
        if not expected or value < expected[-1][1]:
            expected.append((cost, value))
    found = pareto_front(TRACE, SPACE, base=BASE, stop_early=early, workers=2)
    assert [(row["cost"], row["p99_ttft_ms"]) for row in found.front] == expected
    assert found.proved and len(found.table) == 12


def test_large_spaces_are_drawn_the_same_on_any_number_of_workers():
    space = {"num_workers": Between(1, 16, log=True), "num_gpu_blocks": Between(2048, 16384),
             "router_mode": ["round_robin", "least_requests"], "watermark": [0.0]}
    options = {"sla": {"p99_ttft_ms": 6000}, "base": {"block_size": 64}, "trials": 24, "seed": 5}
    one, three = (optimize(TRACE, space, workers=workers, **options) for workers in (1, 3))
    assert one.table.rows() == three.table.rows() or str(one.table.rows()) == str(three.table.rows())   # NaN
    assert not one.proved and one.config == three.config and one.config is not None
    assert violation(bounds_of(options["sla"]), one.report) <= 0
    fronts = [pareto_front(TRACE, space, workers=workers, base={"block_size": 64}, trials=16) for workers in (1, 3)]
    assert str(fronts[0].front.rows()) == str(fronts[1].front.rows()) and len(fronts[0].front) > 1


def test_highest_rate_is_bracketed_and_warm():
    sla = {"p99_ttft_ms": 8000}
    bounds = bounds_of(sla)
    found = highest_rate(TRACE, {"num_workers": 2}, base=BASE, sla=sla, tolerance=0.02)
    assert found.speedup < found.missed <= found.speedup * 1.02
    for speedup, good in ((found.speedup, True), (found.missed, False)):
        report = report_of({"num_workers": 2, "arrival_speedup_ratio": speedup})
        assert (violation(bounds, report) <= 0) == good
    span = (TRACE.arrival_ms.max() - TRACE.arrival_ms.min()) / 1000
    assert found.rate_rps == pytest.approx(599 / span * found.speedup)
    again = highest_rate(TRACE, [{"num_workers": 2}, {"num_workers": 2}], base=BASE, sla=sla, tolerance=0.02)
    assert len(again[1].table) <= 4 < len(again[0].table)
    assert again[1].speedup == pytest.approx(found.speedup, rel=0.03)
    none = highest_rate(TRACE.head(20), {"num_workers": 2}, base=BASE, sla={"max_ttft_ms": 1e-3})
    assert none.speedup == 0 and none.rate_rps == 0 and none.report == {}


def test_seeds_repeat_each_candidate_and_files_go_on(tmp_path):
    options = {"sla": {"mean_ttft_ms": 1e6}, "base": BASE, "seeds": [1, 2, 3], "out": tmp_path / "trials.jsonl"}
    space = {"num_workers": [2], "router_mode": ["random"]}
    found = optimize(TRACE, space, **options)
    each = [report_of({"num_workers": 2, "router_mode": "random", "router_seed": seed})["mean_ttft_ms"]
            for seed in (1, 2, 3)]
    assert len(set(each)) == 3 and found.report["mean_ttft_ms"] == pytest.approx(sum(each) / 3)
    steps = []
    assert optimize(TRACE, space, progress=lambda *step: steps.append(step), **options).report == found.report
    assert steps == [(1, None, 0, None)]


def test_costs():
    assert gpus({"num_workers": 3, "aic_tp_size": 4}) == 12
    assert gpus({"num_prefill_workers": 2, "num_decode_workers": 3, "prefill.aic_tp_size": 2}) == 7
    assert gpus({}) == 1
    shapes = [{"num_workers": 4}, {"num_prefill_workers": 1, "num_decode_workers": 2}]
    table = pareto_front(TRACE, {"shape": shapes}, base=BASE).table
    assert sorted(row["cost"] for row in table) == [3, 4] and not table.errors
    dear = optimize(TRACE, {"num_workers": [2, 4]}, sla={"mean_ttft_ms": 1e9}, base=BASE,
                    cost=lambda config: -config["num_workers"])
    assert dear.config["num_workers"] == 4 and len(dear.table) == 1
    hours = optimize(TRACE, {"num_workers": [4, 2]}, sla={"mean_ttft_ms": 1e9}, base={**BASE, "aic_tp_size": 1},
                     cost="gpu_hours")
    assert hours.config["num_workers"] == 2 and hours.cost == hours.report["gpu_hours"]


def test_failures_are_rows():
    found = optimize(TRACE, {"num_workers": [0, 2]}, sla={"mean_ttft_ms": 1e9}, base=BASE)
    assert found.config["num_workers"] == 2 and "at least 1" in found.table.errors[0]
    with pytest.raises(ValueError, match="fails at a speed-up"):
        highest_rate(TRACE, {"num_workers": 0}, sla={"mean_ttft_ms": 1e9})


@pytest.mark.parametrize(("call", "match"), [
    (lambda: optimize(TRACE, SPACE, sla={}), "at least one bound"),
    (lambda: optimize(TRACE, SPACE, sla={"p98_ttft_ms": 1}), "no report key"),
    (lambda: optimize(TRACE, SPACE, sla={"p99_ttft_ms": "fast"}), "finite number"),
    (lambda: optimize(TRACE, SPACE, sla={"p99_ttft_ms": True}), "finite number"),
    (lambda: optimize(TRACE, {}, sla={"p99_ttft_ms": 1}), "space must be"),
    (lambda: optimize(TRACE, SPACE, sla={"p99_ttft_ms": 1}, trials=0), "trials"),
    (lambda: optimize(TRACE, SPACE, sla={"p99_ttft_ms": 1}, cost="money"), "cost"),
    (lambda: optimize(TRACE, SPACE, sla={"p99_ttft_ms": 1}, seeds=[]), "seeds"),
    (lambda: Between(3, 1), "low must not be above"), (lambda: Between(0, 1, log=True), "above 0"),
    (lambda: Between(0.5, 1.5, step=2), "step"), (lambda: Between(math.nan, 1), "finite"),
    (lambda: highest_rate(TRACE, {}, sla={"p99_ttft_ms": 1}, tolerance=0), "tolerance"),
    (lambda: highest_rate(TRACE, {"replay_concurrency": 2}, sla={"p99_ttft_ms": 1}), "replay_concurrency"),
    (lambda: highest_rate(TRACE.head(1), {}, sla={"p99_ttft_ms": 1}), "at once"),
    (lambda: pareto_front(TRACE, SPACE, latency="ttft"), "no report key"),
])
def test_bad_arguments(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_command(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    TRACE.head(200).save(trace)
    common = [str(trace), "--set", "block_size=64", "--space", "num_workers=1..4"]
    assert main(["optimize", *common, "--sla", "p99_ttft_ms=8000", "--csv", str(tmp_path / "all.csv")]) == 0
    assert "Cheapest (proved): cost" in capsys.readouterr().out
    assert (tmp_path / "all.csv").read_text().startswith("block_size,num_workers,cost,feasible")
    assert main(["optimize", *common, "--sla", "p99_ttft_ms=0.1"]) == 1
    assert "No configuration keeps the bounds." in capsys.readouterr().out
    assert main(["optimize", *common, "--goal", "pareto"]) == 0
    assert "p99_ttft_ms" in capsys.readouterr().out
    spec = tmp_path / "spec.yaml"
    spec.write_text("workload: trace.jsonl\ngoal: rate\nsla: {p99_ttft_ms: 8000}\nbase: {block_size: 64}\n"
                    "space: {num_workers: [2]}\ntolerance: 0.1\n")
    assert main(["optimize", "--spec", str(spec)]) == 0
    assert "requests/s (speed-up" in capsys.readouterr().out
    assert main(["optimize", "--spec", str(spec), "--trials", "5"]) == 2
    assert "trials means nothing" in capsys.readouterr().err
    assert main(["optimize", "--spec", str(spec), "--goal", "cheapest"]) == 2
    assert "tolerance means nothing" in capsys.readouterr().err
