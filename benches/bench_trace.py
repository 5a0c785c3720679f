"""Reading traces: the scanner beside the row-by-row path and beside reading and copying the bytes; the binary form."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import trace_file

from mocker import Trace, doctor, formats
from mocker.formats import columns
from mocker.synth import Recipe

ROWS = 120_000                  # some 40 MB of JSONL; the ratios are the same for ten times as many


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trace_file(tmp_path_factory.mktemp("trace"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "t.jsonl"
    recipe = Recipe(ROWS, arrivals="poisson:20", input="lognormal:8000,0.9,high=120000", output="uniform:10,900",
                    prefix="1x2048/50x2048,skew=1", block_size=512, seed=1)
    made = recipe.trace()
    replace(made, arrival_ms=np.floor(made.arrival_ms)).save(path)
    return path


def seconds(work: Callable[[], object], times: int = 5) -> float:
    """The best of some runs."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def test_load(benchmark, trace):
    began = time.perf_counter()
    slow = formats.load(trace, format="mooncake", _slow=True)
    middle = time.perf_counter()
    fast = Trace.load(trace)
    benchmark.extra_info["row by row / scanner"] = round((middle - began) / (time.perf_counter() - middle), 1)
    assert fast == slow
    benchmark(Trace.load, trace)


def test_load_of_a_large_trace(benchmark, large):
    copying = seconds(lambda: bytearray(large.read_bytes()))
    benchmark.extra_info["load / read and copy"] = round(seconds(lambda: Trace.load(large)) / copying, 2)
    benchmark(Trace.load, large)


def test_load_of_the_binary_form(benchmark, large):
    binary = large.with_suffix(columns.SUFFIX)
    columns.save(Trace.load(large), binary)
    benchmark.extra_info["JSONL / binary"] = round(
        seconds(lambda: Trace.load(large)) / seconds(lambda: Trace.load(binary)), 1)
    benchmark(Trace.load, binary)


def test_load_of_csv(benchmark, large):
    path = large.with_suffix(".csv")
    source = Trace.load(large)
    with open(path, "w") as file:
        file.write("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n")
        file.writelines(f"{t},ChatGPT,{i},{o},{i + o},Conversation log\n" for t, i, o in zip(
            source.arrival_ms.tolist(), source.input_length.tolist(), source.output_length.tolist(), strict=True))
    copying = seconds(lambda: bytearray(path.read_bytes()))
    benchmark.extra_info["load / read and copy"] = round(seconds(lambda: Trace.load(path)) / copying, 2)
    benchmark.extra_info["csv module / scanner"] = round(
        seconds(lambda: formats.load(path, _slow=True), 1) / seconds(lambda: Trace.load(path)), 1)
    benchmark(Trace.load, path)


def test_prefix_reuse(benchmark, large):
    loaded = Trace.load(large)
    benchmark.extra_info["blocks"] = int(loaded.hash_offsets[-1])
    benchmark(doctor.prefix_reuse, loaded)
