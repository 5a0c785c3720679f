"""One pass through the object API, as an embedding loop pays for it, at several batch sizes."""
from __future__ import annotations

import numpy as np
import pytest

from mocker import DirectRequest, MockEngineArgs, VllmCore


def decoding_core(batch: int) -> tuple[VllmCore, list[float]]:
    """A core in which `batch` requests decode, and its clock."""
    core = VllmCore(MockEngineArgs(num_gpu_blocks=65536, max_num_seqs=None, max_num_batched_tokens=None))
    for i in range(batch):
        core.receive(DirectRequest(np.full(100, i, np.uint32), 10**6))
    clock = [core.execute_pass(0.0).end_ms]
    return core, clock


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_execute_pass(benchmark, batch):
    core, clock = decoding_core(batch)

    def one() -> None:
        clock[0] = core.execute_pass(clock[0]).end_ms

    benchmark(one)
    assert core.num_requests() == batch
