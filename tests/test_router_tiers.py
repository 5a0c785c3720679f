"""Blocks below the GPU in the KV router's score: scores by hand, and a replay in which they choose the worker.

The compiled router is compared with the plain one, such blocks included, in `test_router_model`.
"""
from __future__ import annotations

import json

import pytest

from mocker import MockEngineArgs, Trace, compute_block_hash_for_seq, sample_trace_path, simulate
from mocker.router import KvAware, KvRouter, Router
from mocker.router_config import KvRouterConfig
from mocker.sequence import compute_seq_hashes

BLOCK = 16
PROMPT = list(range(14 * BLOCK))


def event(tier: str | None, first: int, last: int, worker: int = 0, removed: bool = False) -> dict:
    """Blocks [first, last) of the prompt come to a tier, or leave it."""
    local, hashes = compute_block_hash_for_seq(PROMPT, BLOCK), compute_seq_hashes(PROMPT, BLOCK)[1]
    data: dict = {"removed": {"block_hashes": [int(hash_) for hash_ in hashes[first:last]]}}
    if not removed:
        data = {"stored": {
            "parent_hash": int(hashes[first - 1]) if first else None,
            "blocks": [{"block_hash": int(hashes[i]), "tokens_hash": int(local[i])} for i in range(first, last)]}}
    inner = {"event_id": 0, "dp_rank": 0, "data": data}
    return {"worker_id": worker, "event": inner, **({} if tier is None else {"storage_tier": tier})}


def test_reference_numbers():
    """2 blocks on the GPU, 3 in the host, 4 on disk, 5 outside; at 0.5 and 0.25 that is 5.75 blocks, 92 tokens."""
    config = KvRouterConfig(host_cache_hit_weight=0.5, disk_cache_hit_weight=0.25)
    router = KvRouter(config, BLOCK, 2, tie_break="lowest", lower_tiers=True)
    router.apply_events([event(None, 0, 2), event("host_pinned", 2, 5), event("disk", 5, 9), event("external", 9, 14)])
    score = router.score(PROMPT)
    assert score[0] == (2, 0, 0, 14, 14 - (2 + 1.5 + 2.25) + 14, 3, 9)
    assert score[1] == (0, 0, 0, 14, 14 + 14, 0, 0)
    assert router.choose("a", PROMPT).worker == 0
    assert router.loads()[0].active_prefill_tokens == 14 * BLOCK - 92
    # Without a block of the host its run ends there, and the disk has nothing that follows.
    router.apply_event(None, event("host_pinned", 3, 4, removed=True))
    assert router.score(PROMPT)[0][5:] == (1, 0)
    router.apply_event(None, event("host_pinned", 3, 4))
    # What left the GPU and is nowhere else is missing at the front.
    router.apply_event(None, event(None, 1, 2, removed=True))
    assert router.score(PROMPT)[0][::5] == (1, 0)
    router.apply_event(None, event("host_pinned", 1, 2))
    assert router.score(PROMPT)[0][5:] == (4, 9)
    router.apply_event(None, {"worker_id": 0, "storage_tier": "disk", "event": {"data": "cleared"}})
    assert router.score(PROMPT)[0][5:] == (4, 0)
    # With the default weights; a credit for the GPU that is 0 leaves these as they are.
    router = KvRouter(KvRouterConfig(overlap_score_credit=0.0), BLOCK, 1, lower_tiers=True)
    router.apply_events([event(None, 0, 2), event("host_pinned", 2, 5), event("disk", 5, 9)])
    assert router.score(PROMPT)[0].cost == 14 - 3 * 0.75 - 4 * 0.25 + 14


def test_off_by_default_and_refused_where_it_means_nothing():
    events = [event(None, 0, 2), event("host_pinned", 2, 5)]
    router = KvRouter(None, BLOCK, 1)
    router.apply_events(events)
    assert router.score(PROMPT)[0] == (2, 0, 0, 14, 12 + 14, 0, 0)
    router = Router(KvAware(lower_tiers=True), BLOCK, 1)
    with pytest.raises(ValueError, match="below .* which no event has named"):
        router.apply_event(None, event("host_pinned", 2, 5))
    with pytest.raises(ValueError, match="removes block .* from disk"):
        router.apply_event(None, event("disk", 0, 1, removed=True))
    with pytest.raises(ValueError, match="storage_tier must be"):
        router.apply_event(None, event("tape", 0, 1))
    for kept, text in (({"router_mode": "least_tokens"}, "requires router_mode='kv_router'"),
                       ({"router_mode": "kv_router"}, "requires num_g2_blocks")):
        with pytest.raises(ValueError, match=text):
            simulate(sample_trace_path(), num_workers=2, router_lower_tiers=True, **kept)


def write(path, rows) -> Trace:
    path.write_text("".join(json.dumps({"timestamp": at, "input_length": 64 * len(ids), "output_length": 1,
                                        "hash_ids": ids}) + "\n" for at, ids in rows))
    return Trace.load(path, "mooncake", block_size=64)


@pytest.mark.parametrize("below", [{}, {"num_g3_blocks": 100, "enable_g4_storage": True}])
def test_prompt_goes_back_to_the_worker_whose_host_has_it(tmp_path, below):
    """Request 1 runs on worker 1, its blocks are evicted to the host there, and it comes again.

    No GPU has anything of it then, so that the lowest worker would be taken.
    """
    first, second = list(range(100, 108)), list(range(200, 208))
    fill = [list(range(300 + 8 * i, 308 + 8 * i)) for i in range(4)]
    between = [(5000 + 5000 * (i // 2), ids) for i, ids in enumerate(fill)]
    trace = write(tmp_path / "t.jsonl", [(0, first), (0, second), *between, (60_000, second)])
    args = MockEngineArgs(num_gpu_blocks=10, block_size=64, kv_bytes_per_token=1000, num_g2_blocks=100, **below)
    results = [simulate(trace, extra_engine_args=args, num_workers=2, router_mode="kv_router",
                        router_tie_break="lowest", router_lower_tiers=on).per_request for on in (False, True)]
    assert [r["decode_worker_idx"].tolist()[-1] for r in results] == [0, 1]
    assert [r["decode_worker_idx"].tolist()[:-1] for r in results] == [[0, 1] * 3] * 2
    assert results[1]["host_tokens"].tolist()[-1] == 8 * 64
    assert results[0]["host_tokens"].tolist()[-1] == 0
    assert results[0]["disk_tokens"].tolist()[-1] == (8 * 64 if below else 0)
