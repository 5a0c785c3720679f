"""KV offload in the plain Python model: the links' and tiers' own rules, and the reference's recorded scripts."""
from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from model.offload_core import OffloadCore
from model.offload_engine import COMPLETED
from model.offload_links import Link
from model.offload_order import start_order
from model.offload_tiers import Places, Tier
from model.script import differences, run_script
from model.sequence import Full

GOLDEN = Path(__file__).parent / "golden"
MB = 1_000_000


def finished(link: Link, until: float) -> list[tuple[float, str]]:
    """Everything that finishes on a link by `until`, each at its own deadline."""
    out = []
    while (at := link.earliest()) is not None and at <= until:
        out += [(round(at, 9), what) for what in link.advance(at)]
    return out


def test_link_shares_its_bandwidth():
    link = Link(1.0)
    link.start(0.0, MB, "a")
    assert link.earliest() == 1.0
    assert finished(link, 9.0) == [(1.0, "a")]
    assert link.earliest() is None
    link.advance(9.0)
    for name in "bc":
        link.start(9.0, MB, name)
    assert finished(link, 99.0) == [(11.0, "b"), (11.0, "c")]
    link = Link(1.0)
    link.start(0.0, MB, "a")
    link.advance(0.5)
    link.start(0.5, MB, "b")
    assert finished(link, 9.0) == [(1.5, "a"), (2.0, "b")]
    link = Link(1.0)
    for number in range(10):
        link.start(0.0, MB, str(number))
    done = finished(link, 99.0)
    assert [at for at, _ in done] == [10.0] * 10
    assert [what for _, what in done] == list("0987654321")     # the last one takes the place of one that is done


def test_latency_comes_on_top_of_the_shares():
    """As without it (1 ms, two at once 2 ms, staggered 1.5 and 2.0 ms), each 0.25 ms later; and by itself."""
    for starts, ends in (([0.0], [1.25]), ([0.0, 0.0], [2.25, 2.25]), ([0.0, 0.5], [1.75, 2.25])):
        link, done = Link(1.0, 0.25), []
        for number, at in enumerate(starts):
            link.advance(at)
            link.start(at, MB, number)
        done = finished(link, 9.0)
        assert done == list(zip(ends, range(len(ends)), strict=True))
    link = Link(0.0, 3.0)
    link.start(5.0, MB, "a")
    link.advance(6.0)
    link.start(6.0, MB, "b")
    assert link.advance(7.9) == []
    assert finished(link, 99.0) == [(8.0, "a"), (9.0, "b")]


def test_link_without_limit_and_misuse():
    link = Link(0.0)
    link.start(5.0, MB, "a")
    assert link.earliest() == 5.0
    assert link.advance(5.0) == ["a"]
    link = Link(1.0)
    link.start(3.0, MB, "a")
    link.start(2.0, MB, "b")                       # a clock that went back: it starts at the link's time
    assert link.advance(1.0) == []
    assert finished(link, 9.0) == [(5.0, "a"), (5.0, "b")]
    for gbps in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="finite"):
            Link(gbps)
    with pytest.raises(AssertionError, match="advanced"):
        link = Link(1.0)
        link.start(0.0, MB, "a")
        link.start(0.5, MB, "b")


def test_tier_promises_and_evicts_leaves():
    a, b, c, d = (Full(n, 100 + n, 99 + n if n else None, None) for n in range(4))
    tier = Tier(3)
    assert tier.promise(3)
    assert not tier.promise(1)
    assert tier.take(3)
    for block in (a, b, c):
        tier.register(block)
    assert not tier.take(1)
    tier.unpin([a, b, c])
    assert tier.match([a, b, d]) == [a, b]
    assert tier.take(1)                            # only c is neither pinned nor above another one
    assert tier.log[-1] == ("removed", c)
    tier.register(b)                               # it is there already: the slot is free again
    assert tier.available == 1
    tier.unpin([b, a, b])
    assert tier.take(3)
    assert [block for _, block in tier.log[-2:]] == [b, a]


def test_places_are_used_again_newest_first():
    places = Places()
    for number in range(4):
        places.add(number)
    places.remove(1)
    places.remove(2)
    places.add(5)
    places.add(6)
    assert list(places) == [0, 6, 5, 3]


@pytest.mark.parametrize("name", ["offload", "offload_batches"])
def test_recorded_scripts(name):
    with gzip.open(GOLDEN / f"{name}.jsonl.gz", "rt") as file:
        for number, line in enumerate(file):
            entry = json.loads(line)
            found = differences(run_script(entry["script"], reference=True), entry["result"])
            assert not found, f"offload script {number}: {found[:5]}"


def core(**changes) -> OffloadCore:
    """Blocks of 4 tokens and 1 MB, links of 1 GB/s: a block a millisecond."""
    args = {"block_size": 4, "num_gpu_blocks": 6, "max_num_seqs": 1, "kv_bytes_per_token": 250_000, "num_g2_blocks": 8,
            "bandwidth_g1_to_g2_gbps": 1.0, "bandwidth_g2_to_g1_gbps": 1.0, "bandwidth_g2_to_g3_gbps": 1.0,
            "bandwidth_g3_to_g2_gbps": 1.0, "bandwidth_g2_to_g4_gbps": 1.0, "bandwidth_g4_to_g2_gbps": 1.0, **changes}
    return OffloadCore(args)


def request(uuid: int, tokens: list[int], output: int = 1) -> dict:
    return {"uuid": uuid, "tokens": tokens, "max_output_tokens": output, "output_token_ids": [900 + uuid] * output}


def run(engine: OffloadCore, now: float, *requests: dict) -> list[dict]:
    """Passes from `now` on until nobody is left."""
    for entry in requests:
        engine.receive(entry)
    passes = []
    while not engine.is_empty():
        passes.append(engine.execute_pass(now))
        now = passes[-1]["end_ms"]
        engine.tiers.check()
    return passes


def tokens(start: int, blocks: int) -> list[int]:
    return list(range(start, start + 4 * blocks))


def in_host(engine: OffloadCore, blocks: list[Full]) -> None:
    assert engine.tiers.g2.take(len(blocks))
    for block in blocks:
        engine.tiers.g2.register(block)
    engine.tiers.g2.unpin(blocks)


def test_cold_request_is_parked_and_admitted_with_reuse():
    """Two blocks in the host: parked at 0, in flight at 0.5, admitted at 2.0 with 8 tokens reused."""
    engine = core()
    engine.receive(request(1, tokens(1, 3)))
    in_host(engine, engine.requests[1].sequence.blocks[:2])
    first = engine.execute_pass(0.0)
    assert (first["admissions"], first["end_ms"], first["metrics"]["waiting_requests"]) == ([], 2.0, 0)
    assert len(engine.parked) == 1
    middle = engine.execute_pass(0.5)
    assert (middle["admissions"], middle["end_ms"]) == ([], 2.0)
    assert engine.execute_pass(2.0)["admissions"] == [[1, 8]]


def test_worked_example():
    """Four blocks meet three free slots: one is copied out first, 1 ms; decoding then waits for another one."""
    engine = core()
    run(engine, 0.0, request(1, tokens(1, 3)))
    passes = run(engine, 100.0, request(2, tokens(101, 4)))
    kinds = [[(e["storage_tier"], *e["event"]["data"]) for e in p["kv_events"]] for p in passes]
    assert (passes[0]["end_ms"], passes[0]["admissions"], kinds[0]) == (101.0, [], [("device", "removed")])
    assert passes[0]["metrics"]["active_decode_blocks"] == 1
    assert (passes[1]["admissions"], passes[1]["output"]) == ([[2, 0]], [])
    assert kinds[1][0] == ("host_pinned", "stored")
    assert passes[1]["end_ms"] > 101.0
    assert [signal[:3] for signal in passes[2]["output"]] == [[2, 902, True]]
    passes = run(engine, 200.0, request(3, tokens(1, 3)))
    assert [(p["end_ms"], p["admissions"]) for p in passes[:2]] == [(201.0, []), (203.0, [])]
    assert (passes[2]["start_ms"], passes[2]["admissions"]) == (203.0, [[3, 12]])
    stored = [e for e in passes[2]["kv_events"] if e["storage_tier"] == "device"][0]["event"]["data"]["stored"]
    assert stored["parent_hash"] is not None
    assert len(stored["blocks"]) == 2


def test_cancelled_promotion_keeps_its_slots_until_the_copy_ends():
    engine = core()
    engine.receive(request(1, tokens(1, 3)))
    in_host(engine, engine.requests[1].sequence.blocks[:2])
    engine.execute_pass(0.0)
    engine.drop(1)
    assert engine.kv.active == 2
    engine.tick(1.0)
    assert engine.kv.active == 2
    engine.tick(2.0)
    assert (engine.kv.active, engine.tiers.g2.pins, engine.is_drained()) == (0, {}, True)


def test_promotions_that_end_together_come_back_in_parking_order():
    engine = core(max_num_seqs=4, num_gpu_blocks=12)
    for uuid in (1, 2):
        engine.receive(request(uuid, tokens(100 * uuid, 2)))
        in_host(engine, engine.requests[uuid].sequence.blocks)
    engine.execute_pass(0.0)
    engine.receive(request(3, tokens(700, 2)))
    assert [parked.request.uuid for parked in engine.parked] == [1, 2]
    engine.tick(4.0)
    assert engine.waiting == [1, 2, 3]


def test_disk_is_staged_through_the_host():
    """A G3 run is copied to G2 and then, with the G2 run before it, to G1; its pins go."""
    engine = core(num_g3_blocks=8)
    engine.receive(request(1, tokens(1, 4)))
    blocks = engine.requests[1].sequence.blocks
    in_host(engine, blocks[:1])
    disk = engine.tiers.g3.pool
    disk.take(2)
    for block in blocks[1:3]:
        disk.register(block)
    disk.unpin(blocks[1:3])
    first = engine.execute_pass(0.0)
    assert first["end_ms"] == 2.0                  # two blocks from the disk
    second = engine.execute_pass(2.0)
    assert second["end_ms"] == 5.0                 # three to the GPU
    assert engine.parked[0].swap.count == 3
    assert engine.execute_pass(5.0)["admissions"] == [[1, 12]]
    assert not disk.pins
    assert not engine.tiers.g2.pins


def test_remote_store_comes_before_the_disk():
    engine = core(num_g3_blocks=8, enable_g4_storage=True)
    engine.receive(request(1, tokens(1, 4)))
    blocks = engine.requests[1].sequence.blocks
    disk = engine.tiers.g3.pool
    disk.take(1)
    disk.register(blocks[0])
    disk.unpin(blocks[:1])
    engine.tiers.g4.objects |= {block.seq_hash for block in blocks[1:3]}
    ends = []
    now = 0.0
    while engine.parked or not ends:
        ends.append(engine.execute_pass(now)["end_ms"])
        now = ends[-1]
        if len(engine.parked) == 0:
            break
    assert ends[:3] == [2.0, 3.0, 6.0]             # two from the store, one from the disk, three to the GPU


def test_staging_without_host_room_takes_the_host_run():
    engine = core(num_g3_blocks=8, num_g2_blocks=2)
    engine.receive(request(1, tokens(1, 4)))
    blocks = engine.requests[1].sequence.blocks
    in_host(engine, blocks[:1])
    disk = engine.tiers.g3.pool
    disk.take(2)
    for block in blocks[1:3]:
        disk.register(block)
    disk.unpin(blocks[1:3])
    assert engine.execute_pass(0.0)["end_ms"] == 1.0
    assert engine.parked[0].swap.count == 1


def test_second_engine_sees_the_disk_and_owners_book_for_themselves():
    """Who ticks first moves the shared link on; the owner books at its own next tick, which is due at once."""
    shared: dict = {}
    args = {"block_size": 4, "num_gpu_blocks": 6, "kv_bytes_per_token": 250_000, "num_g2_blocks": 8,
            "num_g3_blocks": 8, "bandwidth_g2_to_g3_gbps": 1.0}
    first, second = (OffloadCore(args, worker, shared=shared) for worker in (0, 1))
    blocks = [Full(n, 50 + n, 49 + n if n else None, None) for n in range(2)]
    for engine in (first, second):
        in_host(engine, blocks)
    tiers = first.tiers
    tiers._chain(tiers.g3, tiers.lane3, blocks)
    assert (tiers.deadline(), tiers.g3.pool.reserved) == (2.0, 2)
    second.tick(2.0)
    assert all(block in second.tiers.g3 for block in blocks)
    assert (tiers.deadline(), tiers.g3.pool.reserved) == (2.0, 2)
    assert second.tiers.deadline() is None
    first.tick(2.0)
    assert (tiers.deadline(), tiers.g3.pool.reserved, tiers.g2.pins) == (None, 0, {})


def test_burst_in_batches_releases_wave_by_wave():
    engine = core(offload_batch_size=2, num_gpu_blocks=16, num_g2_blocks=16)
    blocks = [Full(0, 10 + n, None, None) for n in range(5)]
    engine.kv.free -= 5
    lease, released = engine.tiers.enqueue(blocks)
    assert released == 0
    assert len(engine.tiers.down.active) == 2      # two at a time; the third batch waits
    held = []
    now = 0.0
    while lease in engine.tiers.leases:
        now = engine.tiers.deadline()
        engine.kv.tick(now)
        held.append((round(now, 6), lease.slots))
    assert held == [(4.0, 1), (5.0, 0)]
    assert engine.kv.active == 0


def test_block_that_is_below_already_waits_for_nothing():
    engine = core()
    blocks = [Full(0, 10, None, None)]
    in_host(engine, blocks)
    engine.kv.free -= 1
    assert engine.tiers.enqueue(blocks) == (None, 1)
    assert list(engine.tiers.leases) == []


def test_equal_runs_and_swap_status():
    script = {"args": {"block_size": 4, "num_gpu_blocks": 5, "max_num_batched_tokens": 16, "kv_bytes_per_token": 25_000,
                       "num_g2_blocks": 6, "num_g3_blocks": 8, "enable_g4_storage": True},
              "worker_id": 0,
              "steps": [{"trace": [{**request(n + 1, tokens(16 * (n % 3), 3), 3), "arrival_timestamp_ms": 40.0 * n}
                                   for n in range(12)]}, {"run": 500}]}
    results = [run_script(script) for _ in range(2)]
    assert results[0] == results[1]
    assert any(admitted[1] for step in results[0]["steps"] for admitted in step["admissions"])
    assert COMPLETED == "completed"


def test_order_of_the_reference():
    """Up to 8 batches the last one is first, and of those that may start the last once more; then queues are full."""
    for batches in range(2, 9):
        for room in range(1, 10):
            order = [batches - 1, *range(batches - 1)]
            order.insert(0, order.pop(min(room, batches) - 1))
            assert start_order(batches, room, 0) == order
    assert start_order(8, 0, 3) == [7, 0, 1, 2, 3, 4, 5, 6]
    # recorded of tokio 1.48 with one thread, two queues of 8 places and these tasks
    assert start_order(9, 32, 0) == [5, 6, 7, 8, 0, 1, 2, 3, 4]
    assert start_order(18, 12, 0) == [5, 8, 9, 10, 7, 15, 0, 1, 2, 3, 4, 17, 11, 12, 13, 14, 6, 16]
    assert start_order(18, 1, 0) == [7, 15, 0, 1, 2, 3, 4, 5, 17, 6, 8, 9, 10, 11, 12, 13, 14, 16]
