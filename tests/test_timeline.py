"""What is recorded over simulated time: exact sums, the same with and without fast-forward, in bounded memory."""
import numpy as np
import pytest

import mocker
from mocker import timeline
from mocker._record import find_passes
from mocker.timeline import SERIES, Recording


@pytest.fixture(scope="module")
def trace():
    return mocker.Trace.load(mocker.sample_trace_path()).head(700)


def _args(**options):
    return mocker.MockEngineArgs(**options)


CASES = {
    "one saturated worker": {},
    "four workers": {"num_workers": 4},
    "kv router": {"num_workers": 3, "router_mode": "kv_router", "router_tie_break": "lowest"},
    "closed loop": {"num_workers": 2, "replay_concurrency": 48},
    "small pool": {"extra_engine_args": _args(num_gpu_blocks=3000), "replay_concurrency": 64},
    "sglang": {"num_workers": 2, "extra_engine_args": _args(engine_type="sglang", num_gpu_blocks=400_000)},
    "vllm rules": {"num_workers": 2, "extra_engine_args": _args(scheduler_rules="vllm-0.33")},
    "two pools": {"num_prefill_workers": 2, "num_decode_workers": 2,
                  "prefill_engine_args": _args(worker_type="prefill", kv_bytes_per_token=100_000,
                                               kv_transfer_bandwidth=20.0),
                  "decode_engine_args": _args(worker_type="decode")},
}


@pytest.mark.parametrize("case", CASES)
def test_recording_changes_nothing_and_counts_everything(trace, case):
    options = CASES[case]
    plain = mocker.simulate(trace, **options)
    seen = mocker.simulate(trace, recording=Recording(passes=1000), **options)
    slow = mocker.simulate(trace, recording=Recording(), fast_forward=False, **options)
    for name, column in plain.per_request.items():
        np.testing.assert_array_equal(seen.per_request[name], column, err_msg=name)
    wall = {"wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s"}
    assert {k: v for k, v in seen.report.items() if k not in wall} == {
        k: v for k, v in plain.report.items() if k not in wall}
    t = seen.timeline
    assert t.start_ms.shape == slow.timeline.start_ms.shape
    tolerance = 1e-3 if case == "sglang" else 1e-9     # whose passes grow longer inside a bin
    for name in SERIES:
        fast, exact = t.series[name], slow.timeline.series[name]
        np.testing.assert_allclose(fast, exact, rtol=tolerance, atol=tolerance * max(np.nanmax(exact), 1), err_msg=name)
    report = plain.report
    assert report["completed_requests"] == 700
    assert t.total("output_tokens").sum() == pytest.approx(report["total_output_tokens"], rel=1e-9)
    assert t.series["completed"].sum() == report["completed_requests"]
    assert t.series["arrivals"].sum() == report["num_requests"]
    reused = t.series["reused_prompt_tokens"].sum() / t.series["admitted_prompt_tokens"].sum()
    assert reused == pytest.approx(report["prefix_cache_reused_ratio"], rel=1e-9)
    assert 0 < t.series["kv_usage"].max() <= 1 and t.series["busy"].max() <= 1 + 1e-9
    if case not in ("sglang", "two pools"):    # chunked prompts count as waiting there; transfers are on no worker
        span = t.end_ms - t.start_ms
        inside = (t.total("running") + t.total("waiting") + t.router_queue) @ span
        assert inside == pytest.approx(plain.per_request["e2e_latency_ms"].sum(), rel=1e-9)      # Little's law


def test_pass_log_of_one_request():
    """100 prompt tokens, 40 output tokens, blocks of 64: two blocks until token 129 needs a third."""
    spec = mocker.SyntheticSpec(100, 40, 1)
    run = mocker.simulate(spec, extra_engine_args=_args(block_size=64, num_gpu_blocks=100),
                          recording=Recording(passes=100), fast_forward=False)
    p = run.timeline.passes
    assert len(p["start_ms"]) == 40 and (p["passes"] == 1).all() and (p["running"] == 1).all()
    assert p["prompt_tokens"].tolist() == [100] + [0] * 39
    assert p["batch_tokens"].tolist() == [100] + [1] * 39
    assert p["used"].tolist() == [2] * 29 + [3] * 11          # the block of token 129 is taken as that token is made
    assert (p["end_ms"][:-1] == p["start_ms"][1:]).all()
    assert p["end_ms"][-1] == run.per_request["last_token_ms"][0]
    assert p["completed"].tolist() == [0] * 39 + [1]


def test_bins_merge_and_keep_their_sums(trace, monkeypatch):
    options = {"num_workers": 2, "router_mode": "kv_router", "router_tie_break": "lowest"}
    fine = mocker.simulate(trace, recording=Recording(interval_ms=64.0), **options).timeline
    monkeypatch.setattr(timeline, "_MAX_CELLS", 0)
    monkeypatch.setattr(timeline, "_AUTO_BINS", 16)
    coarse = mocker.simulate(trace, recording=Recording(interval_ms=64.0), **options).timeline
    factor = int(coarse.interval_ms / fine.interval_ms)
    assert fine.interval_ms == 64.0 and coarse.interval_ms == 64.0 * factor and factor & (factor - 1) == 0
    assert 8 < len(coarse.start_ms) <= 16
    width = {"fine": fine.end_ms - fine.start_ms, "coarse": coarse.end_ms - coarse.start_ms}
    edges = np.arange(0, len(fine.start_ms), factor)
    for name in ("running", "waiting", "kv_used_blocks", "busy"):
        np.testing.assert_allclose(np.add.reduceat(fine.series[name] * width["fine"], edges, axis=1),
                                   coarse.series[name] * width["coarse"], rtol=1e-9, atol=1e-6, err_msg=name)
    for name in ("passes", "prompt_tokens", "output_tokens", "arrivals", "completed"):
        np.testing.assert_allclose(np.add.reduceat(fine.series[name], edges, axis=1), coarse.series[name], rtol=1e-9,
                                   atol=1e-6, err_msg=name)


def test_full_pass_log_keeps_whole_windows(trace):
    full = mocker.simulate(trace, num_workers=2, recording=Recording(passes=10**6)).timeline
    some = mocker.simulate(trace, num_workers=2, recording=Recording(passes=500)).timeline
    window, stride = some.sampling
    assert full.sampling[1] == 1 and stride > 1 and 0 < len(some.passes["start_ms"]) <= 500
    kept = np.floor(full.passes["start_ms"] / window) % stride == 0
    none = mocker.simulate(trace, num_workers=2, recording=Recording()).timeline
    for t in (full, some):                     # the series do not show what is logged
        for name, values in none.series.items():
            np.testing.assert_array_equal(t.series[name], values, err_msg=name)
    for name, column in some.passes.items():
        np.testing.assert_array_equal(column, full.passes[name][kept], err_msg=name)
    cut = mocker.simulate(trace, num_workers=2, recording=Recording(passes=10**6, window_ms=(20_000.0, 30_000.0)))
    inside = (full.passes["start_ms"] < 30_000.0) & (full.passes["end_ms"] > 20_000.0)
    np.testing.assert_array_equal(cut.timeline.passes["start_ms"], full.passes["start_ms"][inside])


def test_table_has_a_row_per_bin_and_worker(trace):
    t = mocker.simulate(trace, num_workers=2, recording=Recording(interval_ms=10_000.0)).timeline
    columns = t.columns()
    assert {len(column) for column in columns.values()} == {2 * len(t.start_ms)}
    assert columns["worker"][:4].tolist() == [0, 1, 0, 1] and columns["start_ms"][:3].tolist() == [0.0, 0.0, 10_000.0]
    assert columns["running"][1] == t.series["running"][1, 0]


def test_gap_histogram_agrees_with_the_report(trace):
    run = mocker.simulate(trace, num_workers=2, recording=Recording())
    upper, weights = run.gaps
    assert weights.sum() == run.report["samples"]["itl"]
    for percent in (50, 90, 99):
        rank = int((weights.sum() - 1) * percent / 100 + 0.5)
        name = {50: "median"}.get(percent, f"p{percent}")
        value = run.report[f"{name}_itl_ms"]
        assert value <= upper[np.searchsorted(np.cumsum(weights), rank, side="right")] <= value * (1 + 1 / 64)


@pytest.mark.parametrize("bad", [{"interval_ms": 0.0}, {"interval_ms": float("nan")}, {"passes": -1},
                                 {"window_ms": (5.0, 5.0)}])
def test_bad_recordings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Recording(**bad)


def test_workers_by_pool():
    pools = ["decode", "prefill", "decode", "prefill"]
    assert timeline.worker_numbers(np.array([1, 0, -1], np.int32), pools, "decode").tolist() == [2, 0, -1]
    assert timeline.worker_numbers(np.array([1, 0, -1], np.int32), pools, "prefill").tolist() == [3, 1, -1]
    assert timeline.worker_numbers(np.array([1]), ["aggregated"] * 2, "decode").tolist() == [1]
    assert timeline.worker_numbers(np.array([-1, -1]), ["aggregated"], "decode").tolist() == [0, 0]


@pytest.mark.parametrize("starts", [True, False])
def test_entries_of_times(starts):
    """In any order, with ties, outside and between entries."""
    rng = np.random.default_rng(4)
    sizes = np.array([0, 40, 1, 300])
    start = np.concatenate([np.sort(rng.integers(0, 500, n)).astype(float) for n in sizes])
    end = start + rng.integers(0, 3, len(start))
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    worker, at = rng.integers(-1, 4, 5000), rng.integers(-2, 520, 5000) / 1.0
    at[:2500].sort()
    at[::97] = np.nan
    expected = []
    for w, time in zip(worker.tolist(), at.tolist(), strict=True):
        begun = [i for i in range(bounds[w], bounds[w + 1]) if (start[i] <= time if starts else start[i] < time)
                 ] if w >= 0 else []
        expected.append(begun[-1] if begun and time <= end[begun[-1]] else -1)
    assert find_passes(start, end, bounds, worker, at, starts).tolist() == expected
