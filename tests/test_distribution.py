"""Distributions against NumPy, and logs of gaps that are folded, sketched or neither."""
from __future__ import annotations

import numpy as np
import pytest

import mocker
from mocker._distribution import PERCENTILES, STATISTICS, nearest_rank_of, statistics, weighted_statistics


def expected(values):
    """Statistics of a plain sample, by sorting it."""
    n = len(values)
    if n == 0:
        return {"samples": 0}
    ordered = np.sort(values)
    out = {"samples": n, "mean": values.mean(), "min": ordered[0], "max": ordered[-1], "std": values.std()}
    for name, percent in PERCENTILES:
        out[name] = ordered[nearest_rank_of(n, percent)]
    return out


def same(got, want, relative=0.0):
    assert got.keys() == want.keys()
    for key, value in want.items():
        if key in ("mean", "std"):
            assert got[key] == pytest.approx(value, rel=1e-12, abs=1e-9 * abs(want["max"]))
        elif relative and key not in ("samples", "min", "max"):
            assert abs(got[key] - value) <= relative * abs(value), key
        else:
            assert got[key] == value, key


@pytest.mark.parametrize("seed", range(60))
def test_plain_and_weighted(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.choice([1, 2, 3, 10, 47, 48, 101, 300, 1000, 1023, 5000]))
    values = rng.choice([0.0, 5.0, 7.25, 1e-12, 3e5], n) if rng.random() < 0.3 else rng.lognormal(2, 3, n)
    if rng.random() < 0.2:
        values[:] = values[0]
    elif rng.random() < 0.3:                   # nearly all in one bin, and in one bin of that, with ties
        values = 7.0 + rng.integers(0, n, n) * 2.0 ** rng.choice([-50, -40], n) + (rng.random(n) < 0.01) * 1e4
    same(statistics(values - (10 if seed % 2 else 0)), expected(values - (10 if seed % 2 else 0)))
    weights = rng.integers(1, 9, n)
    samples = np.repeat(values, weights)
    same(weighted_statistics(values, weights), expected(samples))
    rates = 1000.0 / samples[samples > 0]
    if len(rates) and np.isfinite(rates).all():
        same(weighted_statistics(values, weights, rates=True), expected(rates))


def test_nothing():
    assert statistics(np.empty(0)) == weighted_statistics([], []) == {"samples": 0}
    assert weighted_statistics([0.0], [3], rates=True) == {"samples": 0}
    same(statistics([-0.0, 1.0] * 50), expected(np.array([0.0, 1.0] * 50)))
    with pytest.raises(ValueError, match="2 elements"):
        weighted_statistics([1.0], [1, 2])


@pytest.mark.parametrize(("engine", "workers"), [
    ({}, 1), ({}, 3), ({"engine_type": "sglang"}, 2), ({"aic_nextn": 2}, 2)])
def test_gap_logs_of_every_length(engine, workers):
    """A log folded many times over gives what one folded once gives; a sketch stays within its bound."""
    trace = mocker.Trace.load(mocker.sample_trace_path()).head(2500)
    args = mocker.MockEngineArgs(block_size=64, num_gpu_blocks=8192, **engine)

    def run(exact_gaps=None):
        return mocker.simulate(trace, extra_engine_args=args, num_workers=workers, exact_gaps=exact_gaps).report

    whole = run()
    assert "sketched" not in whole and run(10**9) | {"wall_time_ms": 0} | dict.fromkeys(
        ("processed_tokens_per_s", "processed_output_tokens_per_s")) == whole | {"wall_time_ms": 0} | dict.fromkeys(
        ("processed_tokens_per_s", "processed_output_tokens_per_s"))
    for exact_gaps in (1, 100, 5000):
        sketch = run(exact_gaps)
        assert sketch["sketched"] == ["itl_ms", "output_token_throughput_per_user"]
        for name in ("itl_ms", "output_token_throughput_per_user"):
            distribution = [{key: report[f"{key}_{name}"] for key in STATISTICS} for report in (sketch, whole)]
            same(*distribution, relative=2.0**-13)
        assert sketch["samples"] == whole["samples"]
        assert sketch["p99_ttft_ms"] == whole["p99_ttft_ms"]
    with pytest.raises(ValueError, match="exact_gaps"):
        run(0)
