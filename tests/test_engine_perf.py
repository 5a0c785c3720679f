"""The planner's model of an engine: the reference's answers to the last bit, and the package's models behind it."""
from __future__ import annotations

import gzip
import json
import sys

import pytest
from record_engine_perf import GOLDEN, cases, key

import mocker
from mocker import MockEngineArgs
from mocker.engine_perf import EngineCapacityRequest, EnginePerfLimits, EnginePerfModel, EnginePerfOptions

RECORDED = json.loads(gzip.decompress(GOLDEN.read_bytes()))


class Inner:
    """Step times as recorded; one that the reference did not ask for is an error."""

    def __init__(self, asked: dict) -> None:
        self.asked = asked

    def estimate_forward_pass_time_ms(self, text: str) -> float | None:
        return self.asked[key(text)]

    def tune_with_fpms(self, text: str) -> None:
        pass


@pytest.mark.parametrize(("seed", "case"), list(cases()), ids=str)
def test_answers_are_the_reference_s(seed, case):
    recorded = RECORDED[str(seed)]
    model = EnginePerfModel(Inner(recorded["asked"]), case["worker_type"], EnginePerfLimits(**case["limits"]), 1, 64)
    model.tune_with_fpms(case["observed"])
    answers: list = [[model.estimate_forward_pass_time(step), model.get_queued_prefill_time(step),
                      model.get_scheduled_decode_itl(step)] for step in case["steps"]]
    for request in case["requests"]:
        best = model.find_engine_capacity_rps(EngineCapacityRequest(**request, optimization_target=case["target"]))
        answers.append(best and [best.rps, best.ttft_ms, best.itl_ms, best.e2e_latency_ms, best.eligible])
    assert answers == recorded["answers"]


@pytest.fixture
def package():
    if sys.version_info < (3, 11):
        pytest.skip("aiconfigurator-core needs Python 3.11")
    return pytest.importorskip("aiconfigurator_core", reason="the extra aic is not installed")


def test_learns_from_a_simulated_engine(package):
    args = MockEngineArgs(num_gpu_blocks=4000)
    core = mocker.create_engine_core(args)
    now, steps = 0.0, []
    for i in range(60):
        core.receive(mocker.DirectRequest(tokens=list(range(i, i + 100 + 37 * i)), max_output_tokens=9))
        result = core.execute_pass(now)
        now = result.end_ms
        seconds = (result.end_ms - result.start_ms) / 1000.0
        nested = {"wall_time": seconds, "scheduled_requests": result.fpm.to_dict()}
        steps.append([nested])
    model = EnginePerfModel.best_available(args, EnginePerfOptions(min_observations=3))
    assert model.estimate_forward_pass_time(steps[-1]) is None
    model.tune_with_fpms(steps)
    assert model.estimate_forward_pass_time(steps[-1]) == pytest.approx(steps[-1][0]["wall_time"], rel=0.3)
    assert model.get_queued_prefill_time([result.fpm]) == 0.0
    best = model.find_engine_capacity_rps(EngineCapacityRequest(1000, 50, itl_sla_ms=1000.0))
    assert best is not None and best.eligible and best.rps > 0.1


def test_measured_kernels(package):
    args = MockEngineArgs(num_gpu_blocks=9000, aic_backend="vllm", aic_system="h200_sxm",
                          aic_model_path="Qwen/Qwen3-8B")
    model = EnginePerfModel.best_available(args)
    near, far = (model.find_engine_capacity_rps(EngineCapacityRequest(isl, 200)) for isl in (500, 4000))
    assert near is not None and far is not None and near.rps > far.rps > 0.1
    assert model.diagnostics() and model.correction_factors() == (None, None, None)
    with pytest.raises(ValueError, match="nearest: Qwen/Qwen3-8B"):
        EnginePerfModel.best_available(args.replace(aic_model_path="Qwen3-8"))


def test_bad_arguments():
    limits = EnginePerfLimits()
    model = EnginePerfModel(Inner({}), "aggregated", limits, 2, 64)
    with pytest.raises(ValueError, match="expected metrics of 2 attention ranks, got 1"):
        model.estimate_forward_pass_time([{}])
    with pytest.raises(ValueError, match=r"dp_rank must be each of 0..1 once, got \[1, 1\]"):
        model.estimate_forward_pass_time([{"dp_rank": 1}, {"dp_rank": 1}])
    with pytest.raises(ValueError, match="unsupported version of forward-pass metrics 7"):
        model.estimate_forward_pass_time([{"version": 7}, {}])
    with pytest.raises(ValueError, match="sum_prefill_tokens must be from 0"):
        model.estimate_forward_pass_time([{"scheduled_requests": {"sum_prefill_tokens": -1}}, {}])
    for make in (lambda: EnginePerfLimits(max_num_seqs=0), lambda: EngineCapacityRequest(-1, 5),
                 lambda: EngineCapacityRequest(5, 5, itl_sla_ms=float("nan")),
                 lambda: EngineCapacityRequest(5, 5, optimization_target="cost"),
                 lambda: EnginePerfModel(Inner({}), "both", limits, 1, 64)):
        with pytest.raises(ValueError, match="must be"):
            make()
