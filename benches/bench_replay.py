"""Whole replays, each beside its plain path (no fast-forward) and, if there is one, beside the reference.

Set MOCKER_REFERENCE_PYTHON to an interpreter with the reference's wheel to add its side. The ratios and the peak
memory are in ``extra_info``; the timings of the table are this machine's.
"""
from __future__ import annotations

import os
import statistics
import sys
import time

import pytest
from cases import CASES, run_ours, tolerance, trace_file
from compare import side


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trace_file(tmp_path_factory.mktemp("trace"))


@pytest.mark.parametrize("name", CASES)
def test_replay(benchmark, trace, name):
    case = CASES[name]
    plain, fast = [], []
    for _ in range(3):
        began = time.perf_counter()
        expected = run_ours(case, trace, fast=False)
        middle = time.perf_counter()
        report = run_ours(case, trace)
        plain.append(middle - began)
        fast.append(time.perf_counter() - middle)
    assert report["duration_ms"] == expected["duration_ms"]
    benchmark.extra_info["plain path / fast path"] = round(statistics.median(
        p / f for p, f in zip(plain, fast, strict=True)), 2)
    benchmark.extra_info["peak MiB"] = round(side(sys.executable, "ours", name, trace, 1)["peak_kib"] / 1024)
    reference = os.environ.get("MOCKER_REFERENCE_PYTHON")
    if reference:
        other = side(reference, "reference", name, trace, 1)
        assert report["duration_ms"] == pytest.approx(other["duration_ms"], rel=tolerance(case))
        benchmark.extra_info["reference / mocker"] = round(other["seconds"][0] / statistics.median(fast), 1)
        benchmark.extra_info["reference peak MiB"] = round(other["peak_kib"] / 1024)
    benchmark.pedantic(run_ours, args=(case, trace), rounds=3, warmup_rounds=1)
