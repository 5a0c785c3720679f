"""Write-through to host memory: when copies start, who waits for them, what is refused; `fuzz_offload*` do the rest.
"""
from __future__ import annotations

import uuid

import pytest
from test_offload_replay import At

from mocker import DirectRequest, MockEngineArgs, Trace, VllmCore, sample_trace_path, simulate


def core(**changes) -> VllmCore:
    """Blocks of 4 tokens and 1 MB, links of 1 GB/s: a block a millisecond."""
    return VllmCore(MockEngineArgs(**{"block_size": 4, "num_gpu_blocks": 4, "max_num_seqs": 1, "num_g2_blocks": 20,
                                      "kv_bytes_per_token": 250_000, "offload_write_mode": "write_through",
                                      "bandwidth_g1_to_g2_gbps": 1.0, "bandwidth_g2_to_g1_gbps": 1.0, **changes}),
                    capture_kv_events=True)


def prompt(number: int, blocks: int) -> DirectRequest:
    return DirectRequest(list(range(100 * number, 100 * number + 4 * blocks)), 1, uuid=uuid.UUID(int=number))


def serve(engine: VllmCore, now: float, request: DirectRequest) -> tuple[float, float, list[tuple]]:
    """When it was admitted and done; its passes' events as (pass start, tier, kind, blocks)."""
    engine.receive(request)
    admitted, events = None, []
    while not engine.is_empty():
        result = engine.execute_pass(now)
        engine.check_invariants()
        for event in result.to_dict()["kv_events"]:
            (kind, data), = event["event"]["data"].items()
            events.append((now, event["storage_tier"], kind, len(data.get("blocks") or data["block_hashes"])))
        if result.admissions:
            admitted = now
        now = result.end_ms
    return admitted, now, events


def down(engine: VllmCore) -> float:
    return engine._core.tiers.counters()["down"]["bytes"] / 1e6


def test_eviction_does_not_wait_for_what_was_copied_before():
    """Three blocks move when their pass has ended. A second later the next prompt takes their slots at once, or,
    written back, after a millisecond each."""
    for changes, waited in (({}, 0.0), ({"offload_write_mode": "write_back"}, 3.0)):
        engine = core(**changes)
        serve(engine, 0.0, prompt(1, 3))
        admitted, end, events = serve(engine, 1000.0, prompt(2, 4))
        assert admitted == pytest.approx(1000.0 + waited, abs=1e-9)
        assert (1000.0, "device", "removed", 3) in events
        host = [(at, blocks) for at, tier, kind, blocks in events if (tier, kind) == ("host_pinned", "stored")]
        assert host == [(1000.0 + waited, 1)] * 3
        assert down(engine) == 3.0
        assert engine._core.tiers.counters()["blocked_allocations"] == (waited > 0)


def test_slot_is_held_while_its_block_is_read():
    """A pass ends at `end`, and its three blocks are copied one after the other. At `end` + 1 the last one is evicted:
    its slot is free when it has been read, at `end` + 3, and nothing is copied twice."""
    engine = core(offload_batch_size=1)
    end = serve(engine, 0.0, prompt(1, 3))[1]
    admitted, _, events = serve(engine, end + 1.0, prompt(2, 2))
    assert admitted == pytest.approx(end + 3.0, abs=1e-6)
    assert events[:2] == [(end + 1.0, "host_pinned", "stored", 1), (end + 1.0, "device", "removed", 1)]
    assert down(engine) == 3.0
    assert engine._core.tiers.counters()["blocked_allocations"] == 1


def test_host_without_room():
    """Two host blocks: two of four are copied early. The others are when they are evicted, and push these out."""
    engine = core(num_g2_blocks=2)
    serve(engine, 0.0, prompt(1, 4))
    engine.execute_pass(500.0)
    assert (down(engine), engine._core.tiers.counters()["early_blocks"]) == (2.0, 2)
    admitted, _, events = serve(engine, 1000.0, prompt(2, 4))
    assert admitted == pytest.approx(1002.0, abs=1e-9)
    assert down(engine) == 4.0
    assert sum(kind == "removed" and tier == "host_pinned" for _, tier, kind, _ in events) == 2


def test_block_that_was_seen_too_seldom_is_not_copied():
    """With offload_min_seen=2 the first stay on the GPU counts, and the second one is written through."""
    engine = core(offload_min_seen=2)
    for at, number, copied in ((0.0, 1, 0), (1000.0, 2, 0), (2000.0, 1, 0), (3000.0, 2, 4), (4000.0, 1, 8)):
        serve(engine, at, prompt(number, 4))
        assert down(engine) == copied
    assert engine._core.tiers.counters()["early_blocks"] == 8


def test_reference_has_no_write_through():
    args = MockEngineArgs(num_g2_blocks=8, kv_bytes_per_token=1000, offload_write_mode="write_through")
    with pytest.raises(ValueError, match="offload_write_mode='write_through' is not for compat='reference'"):
        VllmCore(args, compat="reference")
    with pytest.raises(ValueError, match="offload_write_mode='write_through' is not for compat='reference'"):
        simulate(Trace.load(sample_trace_path()).head(3), extra_engine_args=args, compat="reference")
    with pytest.raises(ValueError, match="offload_write_mode requires num_g2_blocks"):
        MockEngineArgs(offload_write_mode="write_through")
    assert MockEngineArgs.from_json(args.to_json()) == args


def test_worker_drains_until_what_it_computed_is_copied():
    """A batch of two blocks of 64 kB at 10 bytes a ms takes 12.8 s; the planner wants nobody from the first one on."""
    trace = Trace.from_columns(arrival_ms=[0.0, 50_000.0], input_length=[128] * 2, output_length=[1] * 2, block_size=64,
                               hash_offsets=[0, 2, 4], hash_ids=[0, 1, 2, 3])
    seconds = []
    for changes in ({}, {"num_g2_blocks": 9, "kv_bytes_per_token": 1000, "bandwidth_g1_to_g2_gbps": 1e-5,
                         "offload_write_mode": "write_through"}):
        result = simulate(trace, extra_engine_args=MockEngineArgs(num_gpu_blocks=30, block_size=64, **changes),
                          num_workers=1, planner=At({1000.0: 0, 49_000.0: 1}))
        assert set(result.per_request["terminal_status"]) == {"completed"}
        seconds.append(result.report["decode_worker_seconds"])
    assert 11.7 < seconds[1] - seconds[0] < 11.9


@pytest.mark.parametrize("workers", [1, 2])
def test_on_a_trace(workers):
    """With room in the host written-through blocks come up as written-back ones do, and nobody waits to be evicted."""
    trace = Trace.load(sample_trace_path()).head(3000)
    kept = {"num_gpu_blocks": 12_288, "kv_bytes_per_token": 131_072, "num_g2_blocks": 400_000}
    back, through = (simulate(trace, num_workers=workers, extra_engine_args=MockEngineArgs(
        **kept, offload_write_mode=mode)).report for mode in ("write_back", "write_through"))
    tiers = through["offload"]
    assert tiers["early_blocks"] > 10_000 and back["offload"]["early_blocks"] == 0
    assert tiers["blocked_allocations"] < back["offload"]["blocked_allocations"] / 10
    assert tiers["g2"]["down"]["bytes"] > back["offload"]["g2"]["down"]["bytes"]
    assert through["prefix_cache_reused_ratio"] > back["prefix_cache_reused_ratio"] - 0.005
