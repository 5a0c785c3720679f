"""KV offload in the compiled core: the reference's recorded scripts, the plain model's order, and what is refused."""
from __future__ import annotations

import collections
import gzip
import json
import os
import uuid
from pathlib import Path

import pytest
from fuzz_offload import broken, difference
from model.script import differences
from runner import run_script

from mocker import DirectRequest, MockEngineArgs, VllmCore, create_engine_core
from mocker.offload import LINKS, offload_settings

GOLDEN = Path(__file__).parent / "golden"
COUNT = int(os.environ.get("MOCKER_FUZZ", "120"))


@pytest.mark.parametrize("name", ["offload", "offload_batches"])
def test_recorded_scripts(name):
    """`offload_batches`: bursts in batches, where starting them in order would give another result."""
    with gzip.open(GOLDEN / f"{name}.jsonl.gz", "rt") as file:
        for number, line in enumerate(file):
            entry = json.loads(line)
            found = differences(run_script(entry["script"], compat="reference"), entry["result"])
            assert not found, f"offload script {number}: {found[:5]}"


def test_equals_the_model():
    """Several requests and workers, tiny pools, slow links: and all that can happen does."""
    seen: collections.Counter = collections.Counter()
    for seed in range(COUNT):
        found = difference(seed, seen)
        assert found is None, f"script {seed}: {found}"
    for what in ("swap_ins", "staged", "blocked", "retries", "cancelled", "preemptions"):
        assert seen[f"scripts with {what}"] > 0, what


def test_nothing_is_left_of_a_cluster():
    for seed in range(10_000, 10_000 + 2 * COUNT):
        found = broken(seed)
        assert found is None, f"script {seed}: {found}"


def core(**changes) -> VllmCore:
    return VllmCore(MockEngineArgs(**{"block_size": 4, "num_gpu_blocks": 6, "num_g2_blocks": 8,
                                      "kv_bytes_per_token": 250_000, "bandwidth_g1_to_g2_gbps": 1.0,
                                      "bandwidth_g2_to_g1_gbps": 1.0, **changes}), capture_kv_events=True)


def test_evicted_prompt_comes_back_from_the_host():
    """A block a millisecond: the second prompt waits for one, the first one's repetition comes up and is reused."""
    engine = core(max_num_seqs=1)
    now = 0.0
    reused = []
    for number, start in enumerate((1, 101, 1)):
        engine.receive(DirectRequest(list(range(start, start + 12)), 1, uuid=uuid.UUID(int=number + 1)))
        while not engine.is_empty():
            result = engine.execute_pass(now)
            engine.check_invariants()
            now = result.end_ms
            reused += [admission.reused_input_tokens for admission in result.admissions]
    assert reused == [0, 0, 12]
    counters = engine._core.tiers.counters()
    assert counters["promotions"] == 1
    assert counters["up"]["bytes"] == counters["from_g2_blocks"] * 1_000_000
    assert counters["parked_ms"] == pytest.approx(counters["from_g2_blocks"])


def test_latencies():
    """One block of 1 MB at 1 GB/s makes room, 1 ms and 2.5 ms more; then as many come up, 7 ms more in one transfer."""
    for latency in ({}, {"latency_g1_to_g2_ms": 2.5, "latency_g2_to_g1_ms": 7.0}):
        engine = core(max_num_seqs=1, **latency)
        starts, now = [], 0.0
        for number, (start, blocks) in enumerate(((1, 3), (101, 4), (1, 3))):
            now = max(now, 100.0 * number)
            engine.receive(DirectRequest(list(range(start, start + 4 * blocks)), 1, uuid=uuid.UUID(int=number + 1)))
            while not engine.is_empty():
                result = engine.execute_pass(now)
                starts += [now - 100.0 * number for _ in result.admissions]
                now = result.end_ms
        down, up = latency.get("latency_g1_to_g2_ms", 0.0), latency.get("latency_g2_to_g1_ms", 0.0)
        assert starts == pytest.approx([0.0, 1.0 + down, 3.0 + down + up], abs=1e-9)
        counters = engine._core.tiers.counters()
        assert counters["parked_ms"] == pytest.approx(2.0 + up)
        assert counters["down"]["delay_ms"] == pytest.approx(0.0, abs=1e-9)
    args = MockEngineArgs(latency_g2_to_g1_ms=1.5)
    assert "latency_g2_to_g1_ms" not in MockEngineArgs().to_dict()
    assert MockEngineArgs.from_json(args.to_json()) == args


def test_dropped_while_parked():
    engine = core()
    first, second = (DirectRequest(list(range(1, 13)), 1, uuid=uuid.UUID(int=n)) for n in (1, 3))
    now = 0.0
    for request in (first, DirectRequest(list(range(101, 121)), 1, uuid=uuid.UUID(int=2)), second):
        engine.receive(request)
        for _ in range(20):
            now = max(engine.execute_pass(now).end_ms, now)
            if request is second and engine._core.tiers.parked:
                assert engine.state[second.uuid].status == "parked"
                assert engine.drop_request(second.uuid)
                engine.check_invariants()
                break
    assert engine.is_empty()
    assert not engine.is_drained()
    for _ in range(20):
        now = engine.execute_pass(now).end_ms
        engine.check_invariants()
    assert engine.is_drained()
    assert engine.mocker_metrics().active_decode_blocks == 0


@pytest.mark.parametrize(("changes", "text"), [
    ({"kv_bytes_per_token": None}, "kv_bytes_per_token"),
    ({"engine_type": "sglang"}, "sglang"),
    ({"enable_prefix_caching": False}, "enable_prefix_caching"),
])
def test_offload_that_cannot_work_is_refused(changes, text):
    args = MockEngineArgs(**{"num_g2_blocks": 8, "kv_bytes_per_token": 1000, **changes})
    with pytest.raises(ValueError, match=text):
        offload_settings(args)
    with pytest.raises(ValueError, match=text):
        create_engine_core(args)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_bandwidths_are_finite(value):
    with pytest.raises(ValueError, match="bandwidth_g2_to_g1_gbps"):
        MockEngineArgs(num_g2_blocks=8, bandwidth_g2_to_g1_gbps=value)


def test_settings_have_the_reference_defaults():
    settings = offload_settings(MockEngineArgs(block_size=16, num_g2_blocks=8, kv_bytes_per_token=10, num_g3_blocks=0))
    assert settings == {"g2_blocks": 8, "g3_blocks": 0, "g4": False, "block_bytes": 160, "batch_size": 32,
                        "policy": "lru", "min_seen": 1, "through": False,
                        "g1_to_g2": 14.0, "g2_to_g1": 14.0, "g2_to_g3": 7.0, "g3_to_g2": 7.0, "g2_to_g4": 4.0,
                        "g4_to_g2": 4.0, "latency": dict.fromkeys(LINKS, 0.0)}
    assert offload_settings(MockEngineArgs(num_g2_blocks=0)) is None


def test_blocks_that_an_allocation_finds_to_have_come_up():
    """Nothing is due any more when the next pass begins, and yet somebody who is parked has to be let in."""
    assert difference(92000330) is None
