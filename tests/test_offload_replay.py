"""KV offload in replays: the ways to run one agree, nothing is lost, and the report says what the tiers did."""
from __future__ import annotations

import collections
import os
import random

import numpy as np
import pytest
from fuzz import object_replay, random_trace
from fuzz_offload_replays import broken

from mocker import MockEngineArgs, Trace, sample_trace_path, simulate
from mocker.replay import pools
from mocker.replay.fast import FastPaths

COUNT = int(os.environ.get("MOCKER_FUZZ", "150"))
COLUMNS = ("first_admit_ms", "first_token_ms", "last_token_ms", "reused_input_tokens", "output_tokens", "host_tokens",
           "disk_tokens", "remote_tokens", "parked_ms")


def tiers(rng: random.Random) -> dict:
    out = {"kv_bytes_per_token": rng.choice([1000, 250_000]), "num_g2_blocks": rng.choice([2, 5, 12, 400])}
    for link in ("g1_to_g2", "g2_to_g1"):
        out[f"bandwidth_{link}_gbps"] = rng.choice([0.0, 0.05, 0.5, 14.0])
    if rng.random() < 0.5:
        out |= {"num_g3_blocks": rng.choice([3, 30]), "bandwidth_g2_to_g3_gbps": 0.3, "bandwidth_g3_to_g2_gbps": 0.3}
    if rng.random() < 0.4:
        out["enable_g4_storage"] = True
    if rng.random() < 0.4:
        out["offload_batch_size"] = rng.choice([1, 3])
    if rng.random() < 0.4:
        out["offload_write_mode"] = "write_through"
    if rng.random() < 0.4:
        out |= {"offload_eviction_policy": rng.choice(["lru", "lfu", "s3fifo"]), "offload_min_seen": rng.choice([1, 2])}
    return out


def same(a, b, names=COLUMNS) -> None:
    for name in names:
        np.testing.assert_array_equal(a.per_request[name], b.per_request[name], err_msg=name)
    assert a.report["offload"] == b.report["offload"]
    for name, value in a.report.items():       # means of gaps are summed in another order when passes are skipped
        if isinstance(value, float) and name != "wall_time_ms" and not name.startswith("processed_"):
            assert value == pytest.approx(b.report[name], rel=1e-12, abs=1e-9), name


@pytest.mark.parametrize("seed", range(25))
def test_ways_to_run_agree(seed):
    """Segments with and without the fast paths, and real tokens; one worker or several, either router, equal twice."""
    rng = random.Random(f"offload replay/{seed}")
    trace, settings, workers = random_trace(rng)
    settings = {k: v for k, v in settings.items() if k not in ("worker_type", "enable_prefix_caching")}
    args = MockEngineArgs(**{**settings, **tiers(rng)})
    mode = "kv_router" if workers > 1 and seed % 2 else "round_robin"
    kept = {"extra_engine_args": args, "num_workers": workers, "router_mode": mode, "router_tie_break": "lowest"}
    first = simulate(trace, **kept)
    same(first, simulate(trace, **kept))
    for fast in (False, FastPaths(clock=False), FastPaths(lanes=False), FastPaths(False, False, False)):
        same(first, simulate(trace, fast_forward=fast, **kept))
    if "aic_nextn" not in settings:
        same(first, simulate(trace, fast_forward=FastPaths(extents=False), **kept))


def decoding_case(seed: int) -> tuple[Trace, dict]:
    """Long answers in pools that evict all the time: blocks are opened, refused and waited for while others decode."""
    rng = random.Random(f"offload decoding/{seed}")
    block = rng.choice([2, 4, 16, 64])
    heads = [list(range(1000 * k, 1000 * k + rng.randrange(1, 12))) for k in range(rng.randrange(1, 6))]
    at, prompts, arrivals = 0.0, [], []
    for i in range(rng.randrange(10, 40)):
        prompts.append(rng.choice(heads) + [10_000 + 50 * i + j for j in range(rng.randrange(1, 9))])
        arrivals.append(at)
        at += rng.choice([0.0, 7.0, 120.0, 900.0])
    trace = Trace.from_columns(
        arrival_ms=arrivals, input_length=[block * len(p) - rng.randrange(block) for p in prompts],
        output_length=[rng.randrange(1, rng.choice([3, 40, 300])) for _ in prompts], block_size=block,
        hash_offsets=np.cumsum([0, *map(len, prompts)]), hash_ids=np.array([i for p in prompts for i in p], np.uint64))
    args = {"block_size": block, "num_gpu_blocks": rng.choice([24, 40, 90]) + 300 // block,
            "max_num_seqs": rng.choice([2, 5, 40]), "max_num_batched_tokens": rng.choice([48, 200, 8192]),
            "num_g2_blocks": rng.choice([3, 200]), "kv_bytes_per_token": rng.choice([20_000, 250_000]),
            "engine_type": rng.choice(["vllm", "vllm", "trtllm"])}
    args |= {f"bandwidth_{link}_gbps": rng.choice([0.0, 0.05, 0.5, 14.0]) for link in ("g1_to_g2", "g2_to_g1")}
    if rng.random() < 0.3:
        args |= {"num_g3_blocks": 60, "bandwidth_g2_to_g3_gbps": 0.3, "bandwidth_g3_to_g2_gbps": 0.3}
    if rng.random() < 0.2:
        args |= {"latency_g1_to_g2_ms": 3.0, "offload_batch_size": 2}
    workers = rng.choice([1, 1, 2, 3])
    if rng.random() < 0.2:
        args["offload_write_mode"] = "write_through"
    options = {"extra_engine_args": MockEngineArgs(**args), "num_workers": workers, "router_tie_break": "lowest",
               "router_mode": rng.choice(["round_robin", "kv_router"]) if workers > 1 else "round_robin"}
    if rng.random() < 0.2:
        options["replay_concurrency"] = rng.choice([2, 6])
    if rng.random() < 0.2:
        options["max_sim_time_ms"] = rng.choice([300.0, 4000.0])
    return trace, options


@pytest.mark.parametrize("part", range(4))
def test_passes_with_blocks_and_refusals_are_taken_together(part):
    """The fast-forward of workers with tiers against every pass one by one."""
    for seed in range(part, COUNT, 4):
        trace, options = decoding_case(seed)
        same(simulate(trace, **options), simulate(trace, fast_forward=FastPaths(False, False, False), **options))


def test_segments_that_come_in_any_order():
    """Two workers see a trace's segments in random order: some are looked up directly, some searched for, some first
    this way and then that; names of blocks that are all searched for give the same."""
    rows = 2400
    order = random.Random("offload order").sample(range(rows), rows)
    arrivals = np.zeros(rows)
    arrivals[order] = 3.0 * np.arange(rows)
    ids = np.array([[10 * (row // 2), 10 * row + 1] for row in range(rows)], np.uint64)
    trace = Trace.from_columns(arrival_ms=arrivals, input_length=[8] * rows, output_length=[3] * rows, block_size=4,
                               hash_offsets=2 * np.arange(rows + 1), hash_ids=ids.ravel())
    kept = {"num_workers": 2, "extra_engine_args": MockEngineArgs(
        block_size=4, num_gpu_blocks=12, num_g2_blocks=900, kv_bytes_per_token=1000)}
    first = simulate(trace, **kept)
    assert first.report["offload"]["g2"]["hit_tokens"] > 1000
    same(first, simulate(trace, fast_forward=FastPaths(extents=False), **kept))


@pytest.mark.parametrize("seed", [123, 607, 773, 787, 955, 21198, 100019])
def test_a_router_and_workers_that_run_ahead(seed):
    """These looked at their links at other moments than the event loop did, which rounds otherwise."""
    trace, options = decoding_case(seed)
    if seed < 1000:
        options["extra_engine_args"] = options["extra_engine_args"].replace(offload_write_mode="write_through")
    assert options["router_mode"] == "kv_router"
    same(simulate(trace, **options), simulate(trace, fast_forward=FastPaths(False, False, False), **options))


@pytest.mark.parametrize("seed", range(30))
def test_lone_workers_are_looked_at_no_more_often_than_need_be(seed, monkeypatch):
    """Links that move on only when something of their own happens: but for rounding as if all did at every event."""
    rng = random.Random(f"offload alone/{seed}")
    trace, settings, _ = random_trace(rng)
    settings = {k: v for k, v in settings.items() if k not in ("worker_type", "enable_prefix_caching")}
    own = {k: v for k, v in tiers(rng).items() if not k.startswith(("num_g3", "enable_g4", "bandwidth_g2_to_g3",
                                                                    "bandwidth_g3"))}
    kept = {"extra_engine_args": MockEngineArgs(**{**settings, **own}), "num_workers": rng.choice([2, 3]),
            "router_mode": rng.choice(["round_robin", "kv_router"]), "router_tie_break": "lowest"}
    first = simulate(trace, **kept)
    monkeypatch.setattr(pools, "_apart", lambda *_: False)
    other = simulate(trace, **kept)
    for name in COLUMNS:
        if first.per_request[name].dtype.kind == "f":
            np.testing.assert_allclose(first.per_request[name], other.per_request[name], rtol=1e-9, err_msg=name)
        else:
            np.testing.assert_array_equal(first.per_request[name], other.per_request[name], err_msg=name)
    for name in ("hit_tokens", "evicted_blocks", "peak_blocks"):
        assert first.report["offload"]["g2"][name] == other.report["offload"]["g2"][name], name


@pytest.mark.parametrize("seed", range(12))
def test_one_worker_is_the_core(seed):
    """A replay of one worker is the core's own loop, request by request, with the books checked after every pass."""
    rng = random.Random(f"offload one worker/{seed}")
    trace, settings, _ = random_trace(rng)
    settings = {k: v for k, v in settings.items() if k not in ("worker_type", "enable_prefix_caching")}
    args = MockEngineArgs(**{**settings, **tiers(rng)})
    result = simulate(trace, extra_engine_args=args, fast_forward=FastPaths(extents=False))
    expected = object_replay(trace, args, 1)
    for name in ("first_admit_ms", "first_token_ms", "last_token_ms", "reused_input_tokens"):
        assert result.per_request[name].tolist() == expected[name], name


def test_nothing_is_lost_in_disaggregation():
    """Both pools have tiers, one disk below them; hand-offs wait for slots and all requests end."""
    part = Trace.load(sample_trace_path()).head(600)
    tier = {"num_gpu_blocks": 2500, "kv_bytes_per_token": 131_072, "num_g2_blocks": 3000, "num_g3_blocks": 20_000}
    results = [simulate(part, prefill_engine_args=MockEngineArgs(worker_type="prefill", **tier),
                        decode_engine_args=MockEngineArgs(worker_type="decode", **tier), num_prefill_workers=2,
                        num_decode_workers=2, router_mode=mode, router_tie_break="lowest")
               for mode in ("round_robin", "kv_router", "kv_router")]
    same(results[1], results[2])
    for result in results:
        assert set(result.per_request["terminal_status"]) <= {"completed", "rejected", "capacity"}
        assert result.report["offload"]["promotions"] > 0
        assert result.report["offload"]["g3"]["hit_tokens"] > 0


def test_report_says_what_the_tiers_did():
    trace = Trace.load(sample_trace_path())
    args = MockEngineArgs(num_gpu_blocks=8192, kv_bytes_per_token=131_072, num_g2_blocks=30_000, num_g3_blocks=60_000)
    result = simulate(trace, extra_engine_args=args, max_sim_time_ms=600_000.0)
    offload = result.report["offload"]
    columns = result.per_request
    block = 64 * 131_072
    assert offload["g2"]["hit_tokens"] == columns["host_tokens"].sum() > 0
    assert offload["g3"]["hit_tokens"] == columns["disk_tokens"].sum() > 0
    assert offload["parked_ms"] == pytest.approx(columns["parked_ms"].sum())
    assert offload["g2"]["up"]["bytes"] >= (columns["host_tokens"].sum() + columns["disk_tokens"].sum()) * 131_072
    assert offload["g2"]["down"]["bytes"] % block == 0
    assert offload["g2"]["peak_blocks"] <= 30_000
    assert 0.0 < offload["g2"]["down"]["utilization"] < 1.0
    assert offload["g2"]["evicted_blocks"] > 0
    assert (columns["parked_ms"] > 0).sum() == ((columns["host_tokens"] + columns["disk_tokens"]) > 0).sum()
    assert "offload" not in simulate(trace, extra_engine_args=MockEngineArgs(), max_sim_time_ms=1e3).report


def test_time_cap_of_a_single_worker():
    """The closed loop of one worker ends at its cap as without tiers, when these never come into play."""
    trace = Trace.load(sample_trace_path()).head(300)
    kept = {"num_gpu_blocks": 200_000, "kv_bytes_per_token": 1000}
    results = [simulate(trace, extra_engine_args=MockEngineArgs(**kept, num_g2_blocks=n), replay_concurrency=4,
                        max_sim_time_ms=20_000.0) for n in (None, 10)]
    for name in ("last_token_ms", "output_tokens", "terminal_status"):
        np.testing.assert_array_equal(results[0].per_request[name], results[1].per_request[name])
    assert results[0].report["duration_ms"] == results[1].report["duration_ms"]


def test_endless_host_reaches_the_unlimited_cache():
    """Unlimited host memory and links reuse what an unlimited GPU would; no host memory is no offload, bit for bit."""
    trace = Trace.load(sample_trace_path())
    small = {"num_gpu_blocks": 16_384, "kv_bytes_per_token": 131_072}
    unlimited = simulate(trace, extra_engine_args=MockEngineArgs(**{**small, "num_gpu_blocks": 4_000_000}))
    endless = simulate(trace, extra_engine_args=MockEngineArgs(
        **small, num_g2_blocks=4_000_000, bandwidth_g1_to_g2_gbps=0.0, bandwidth_g2_to_g1_gbps=0.0))
    assert endless.report["prefix_cache_reused_ratio"] >= unlimited.report["prefix_cache_reused_ratio"] - 1e-3
    none = [simulate(trace, extra_engine_args=MockEngineArgs(**small, num_g2_blocks=n), num_workers=2)
            for n in (None, 0)]
    for name, column in none[0].per_request.items():
        np.testing.assert_array_equal(column, none[1].per_request[name])


@pytest.mark.parametrize(("first", "second", "text"), [
    ({"num_g3_blocks": 5}, {"num_g3_blocks": 6}, "num_g3_blocks"),
    ({"enable_g4_storage": True}, {"enable_g4_storage": True, "bandwidth_g2_to_g4_gbps": 1.0}, "bandwidth_g2_to_g4"),
])
def test_pools_agree_about_what_they_share(first, second, text):
    kept = {"num_g2_blocks": 9, "kv_bytes_per_token": 1000}
    with pytest.raises(ValueError, match=text):
        simulate(Trace.load(sample_trace_path()),
                 prefill_engine_args=MockEngineArgs(worker_type="prefill", **kept, **first),
                 decode_engine_args=MockEngineArgs(worker_type="decode", **kept, **second))


def test_properties_of_clusters():
    """See `fuzz_offload_replays`: whatever the cluster is made of, and all that can happen does."""
    seen = collections.Counter()
    for seed in range(100_000, 100_000 + COUNT):
        found = broken(seed, seen)
        assert found is None, f"cluster {seed}: {found}"
    for what in ("promotions", "staged_promotions", "blocked_allocations", "retried_allocations",
                 "cancelled_promotions", "early_blocks", "disagg", "planner", "closed", "router_mode"):
        assert seen[what] > 0, what


def test_destination_is_reserved_when_a_copy_has_made_room():
    """A decode worker with nothing to do had its slots back from a copy down, and nobody told who waited for them."""
    assert broken(306_279, collections.Counter()) is None


class At:
    """A planner that wants so many workers from so many ms on."""

    def __init__(self, wanted):
        self.wanted = dict(wanted)

    def initial_tick_ms(self):
        return min(self.wanted, default=1e12)

    def on_tick(self, metrics):
        return {"target_prefill": None, "target_decode": self.wanted[metrics["now_ms"]],
                "next_tick_ms": min((at for at in self.wanted if at > metrics["now_ms"]), default=None)}


@pytest.mark.parametrize("mode", ["round_robin", "kv_router"])
def test_planner_that_changes_nothing(mode):
    trace = Trace.load(sample_trace_path()).head(300)
    args = MockEngineArgs(num_gpu_blocks=3000, kv_bytes_per_token=131_072, num_g2_blocks=5000, num_g3_blocks=9000)
    kept = {"extra_engine_args": args, "num_workers": 2, "router_mode": mode, "router_tie_break": "lowest",
            "fast_forward": False}
    same(simulate(trace, **kept), simulate(trace, planner=At({1000.0 * n: 2 for n in range(1, 60)}), **kept))


@pytest.mark.parametrize(("below", "wanted", "came"), [
    ({}, {}, (512, 0)), ({}, {40_000.0: 0, 50_000.0: 1}, (0, 0)),
    ({"num_g3_blocks": 100}, {40_000.0: 0, 50_000.0: 1}, (0, 512)),
])
def test_workers_that_leave_take_their_host_along(below, wanted, came):
    """A prompt is evicted to the host; its worker goes and another one comes, which has only the disk in common."""
    first, other = list(range(8)), [list(range(100 * n, 100 * n + 8)) for n in range(1, 4)]
    rows = [first, *other, first]
    trace = Trace.from_columns(
        arrival_ms=[0.0, 5000.0, 10_000.0, 15_000.0, 60_000.0], input_length=[512] * 5, output_length=[1] * 5,
        hash_offsets=np.arange(6) * 8, hash_ids=np.array([i for row in rows for i in row], np.uint64), block_size=64)
    args = MockEngineArgs(num_gpu_blocks=10, block_size=64, kv_bytes_per_token=1000, num_g2_blocks=100, **below)
    result = simulate(trace, extra_engine_args=args, num_workers=1, planner=At(wanted))
    columns = result.per_request
    assert [columns[name].tolist()[-1] for name in ("host_tokens", "disk_tokens")] == list(came)
    assert columns["decode_worker_idx"].tolist()[-1] == (1 if wanted else 0)
    assert set(columns["terminal_status"]) == {"completed"}


def test_worker_drains_until_its_copies_have_ended():
    """At a byte a ms a block of 64 kB takes 64 s down to the disk: the worker that is to go stays for it."""
    rows = [[0, 1], [2, 3], [4, 5]]
    trace = Trace.from_columns(
        arrival_ms=[0.0, 100.0, 50_000.0], input_length=[128] * 3, output_length=[1] * 3,
        hash_offsets=np.arange(4) * 2, hash_ids=np.array([i for row in rows for i in row], np.uint64), block_size=64)
    args = MockEngineArgs(num_gpu_blocks=3, block_size=64, kv_bytes_per_token=1000, num_g2_blocks=100, num_g3_blocks=9,
                          bandwidth_g2_to_g3_gbps=1e-6)
    busy = [simulate(trace, extra_engine_args=args, num_workers=1, planner=At({1000.0: 0, 49_000.0: 1})),
            simulate(trace, extra_engine_args=MockEngineArgs(num_gpu_blocks=3, block_size=64), num_workers=1,
                     planner=At({1000.0: 0, 49_000.0: 1}))]
    seconds = [r.report["decode_worker_seconds"] for r in busy]
    down = busy[0].report["offload"]["g3"]["down"]
    assert down["bytes"] == 64_000 * down["transfers"] > 0
    assert seconds[0] > seconds[1] + 30.0
