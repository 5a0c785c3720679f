"""Reading the shipped trace: the scanner beside the row-by-row path, on the same bytes."""
from __future__ import annotations

import time

import pytest
from cases import trace_file

from mocker import Trace, formats


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trace_file(tmp_path_factory.mktemp("trace"))


def test_load(benchmark, trace):
    began = time.perf_counter()
    slow = formats.load(trace, format="mooncake", _slow=True)
    middle = time.perf_counter()
    fast = Trace.load(trace)
    benchmark.extra_info["row by row / scanner"] = round((middle - began) / (time.perf_counter() - middle), 1)
    assert fast == slow
    benchmark(Trace.load, trace)
