"""Eviction policies of host memory and its admission filter: by hand, on a trace, and what holds in every cluster."""
from __future__ import annotations

import random

import pytest
from fuzz import random_trace
from fuzz_offload import broken
from test_offload_replay import same, tiers

from mocker import MockEngineArgs, Trace, VllmCore, sample_trace_path, simulate
from mocker.args import EVICTION_POLICIES
from mocker.replay.fast import FastPaths


def prompts(order: str) -> Trace:
    """One request a letter, a second apart: the letter's block and one token more."""
    n = len(order)
    ids = [value for i, letter in enumerate(order) for value in (ord(letter), 1000 + i)]
    return Trace.from_columns(block_size=4, arrival_ms=[1000.0 * i for i in range(n)], input_length=[5] * n,
                              output_length=[1] * n, hash_offsets=list(range(0, 2 * n + 1, 2)), hash_ids=ids)


# Two slots on the GPU: one for the letter, one for the token, so that every request evicts the letter before it. When A
# comes up for the third request it takes the free slot, and then the token's evicts B: in the host B is newer than A.
# - lru, two slots: D's request evicts C, and A makes room for it. A misses next time.
# - lfu: A has come up once, so B goes; the same with A in S3-FIFO's main queue.
# - Three slots: A, B and C are there when the second A evicts D, and B is the oldest (or the oldest without a use).
#   Belady knows that C never comes again.
# - offload_min_seen=2: A is copied when it is evicted by C's request, its second time, B when the last A evicts it.
@pytest.mark.parametrize(("changes", "hits"), [
    ({"num_g2_blocks": 2}, "..A....A"),
    ({"num_g2_blocks": 2, "offload_eviction_policy": "lfu"}, "..A..A.A"),
    ({"num_g2_blocks": 2, "offload_eviction_policy": "s3fifo"}, "..A..A.A"),
    ({"num_g2_blocks": 3}, "..A..A.A"),
    ({"num_g2_blocks": 3, "offload_eviction_policy": "belady"}, "..A..ABA"),
    ({"num_g2_blocks": 2, "offload_min_seen": 2}, ".....A.A"),
])
def test_by_hand(changes, hits):
    order = "ABACDABA"
    args = MockEngineArgs(num_gpu_blocks=2, block_size=4, max_num_seqs=1, kv_bytes_per_token=1,
                          bandwidth_g1_to_g2_gbps=0.0, bandwidth_g2_to_g1_gbps=0.0, **changes)
    found = simulate(prompts(order), extra_engine_args=args).per_request["host_tokens"]
    assert "".join(letter if n else "." for letter, n in zip(order, found, strict=True)) == hits


@pytest.mark.parametrize("workers", [1, 2])
def test_belady_is_an_upper_bound(workers):
    trace = Trace.load(sample_trace_path()).head(2500)
    hits = {policy: simulate(trace, num_workers=workers, extra_engine_args=MockEngineArgs(
        num_gpu_blocks=4000, kv_bytes_per_token=131_072, num_g2_blocks=6000, bandwidth_g1_to_g2_gbps=0.0,
        bandwidth_g2_to_g1_gbps=0.0, offload_eviction_policy=policy)).report["offload"]["g2"]["hit_tokens"]
        for policy in EVICTION_POLICIES}
    assert 0 < max(hits.values()) == hits["belady"]
    assert len(set(hits.values())) == 4


@pytest.mark.parametrize("changes", [{"offload_eviction_policy": "lfu"}, {"offload_eviction_policy": "s3fifo"},
                                     {"offload_min_seen": 2}, {"offload_eviction_policy": "s3fifo",
                                                               "offload_min_seen": 3}])
def test_nothing_is_lost(changes):
    """Random clusters end with nothing held, promised or pinned, and whole blocks moved."""
    assert not [(seed, what) for seed in range(150) if (what := broken(seed, changes))]


@pytest.mark.parametrize("changes", [{"offload_eviction_policy": "s3fifo"}, {"offload_min_seen": 2},
                                     {"offload_write_mode": "write_through", "offload_min_seen": 2}])
def test_blocks_count_one_by_one(changes):
    """How many blocks the trace's branches leave together makes no difference: alone each does the same."""
    evicted = 0
    for seed in (*range(20), 35, 161, 177, 202, 316, 392):
        rng = random.Random(f"offload replay/{seed}")
        trace, settings, workers = random_trace(rng)
        settings = {k: v for k, v in settings.items() if k not in ("worker_type", "enable_prefix_caching", "aic_nextn")}
        settings |= {**tiers(rng), **changes}
        together, alone = (simulate(trace, extra_engine_args=MockEngineArgs(**settings), num_workers=workers,
                                    fast_forward=FastPaths(extents=extents)) for extents in (True, False))
        same(together, alone)
        evicted += together.report["offload"]["g2"]["evicted_blocks"]
    assert evicted > 100


def test_the_future_has_to_be_known():
    kept = {"num_g2_blocks": 8, "kv_bytes_per_token": 1000, "offload_eviction_policy": "belady"}
    with pytest.raises(ValueError, match="for replays"):
        VllmCore(MockEngineArgs(**kept))
    trace = Trace.load(sample_trace_path()).head(5)
    with pytest.raises(ValueError, match="which requests each worker gets"):
        simulate(trace, extra_engine_args=MockEngineArgs(**kept), num_workers=2, router_mode="kv_router")
    with pytest.raises(ValueError, match="not for disaggregation"):
        simulate(trace, prefill_engine_args=MockEngineArgs(worker_type="prefill", **kept),
                 decode_engine_args=MockEngineArgs(worker_type="decode", **kept))
    with pytest.raises(ValueError, match="offload_min_seen requires num_g2_blocks"):
        MockEngineArgs(offload_min_seen=2)
