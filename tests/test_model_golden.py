"""The plain Python model gives the recorded results of the reference, pass by pass and field by field.

Then what recordings of whole scripts hardly show: the pool by itself, and the endings that the reference lacks.
"""

import gzip
import json
from pathlib import Path

import pytest
from model.core import REFERENCE
from model.kv import KvPool
from model.script import differences, run_script
from model.scripts import FAMILIES, random_script
from model.sequence import Full, Partial

GOLDEN = Path(__file__).parent / "golden"
CHUNKS = 4


def load(family: str) -> list[dict]:
    with gzip.open(GOLDEN / f"{family}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_scripts(family: str, chunk: int) -> None:
    recorded = load(family)
    assert len(recorded) == 100
    for number in range(chunk, len(recorded), CHUNKS):
        found = differences(run_script(recorded[number]["script"]), recorded[number]["result"])
        assert not found, f"{family} script {number}: {found[:5]}"


def chain(*links: tuple[int, int | None, int]) -> list[Full]:
    """Full blocks from (hash, parent's hash, position)."""
    return [Full(position, block, parent, None) for block, parent, position in links]


def told(pool: KvPool) -> list[tuple]:
    """The events since last time: ("stored", parent, hashes) and ("removed", hashes)."""
    out = []
    for event in pool.drain_events():
        ((kind, data),) = event["event"]["data"].items()
        if kind == "stored":
            out.append((kind, data["parent_hash"], [block["block_hash"] for block in data["blocks"]]))
        else:
            out.append((kind, data["block_hashes"]))
    return out


def test_pool_life_cycle() -> None:
    """Two branches under a common prefix are stored, released, used again and evicted leaf first."""
    main = chain((100, None, 0), (101, 100, 1), (102, 101, 2), (103, 102, 3), (104, 103, 4))
    branch = main[:2] + chain((105, 101, 2), (106, 105, 3))
    other = main[:3] + chain((107, 102, 3), (108, 107, 4), (109, 108, 5))
    pool = KvPool(10, 16, True, 0)
    assert pool.use(main)
    assert told(pool) == [("stored", None, [100, 101, 102, 103, 104])]
    assert pool.use(branch)
    assert told(pool) == [("stored", 101, [105, 106])]
    for block in main[::-1] + branch[::-1]:
        pool.release(block)
    assert told(pool) == []
    assert pool.active == 0
    assert pool.use(other)
    assert told(pool) == [("stored", 102, [107, 108, 109])]
    assert pool.use(chain((110, None, 0), (111, 110, 1), (112, 111, 2)))
    assert told(pool) == [("stored", None, [110, 111, 112]), ("removed", [104, 103, 106])]
    assert pool.use(chain((113, None, 0)))
    assert told(pool) == [("stored", None, [113]), ("removed", [105])]
    assert pool.active == 10
    assert not pool.use([Partial(-1)])


def test_failed_use_makes_its_hits_recent() -> None:
    old = chain((1, None, 0), (2, 1, 1), (3, 2, 2))
    young = chain((9, None, 0))
    pool = KvPool(6, 4, True, 0)
    for blocks in (old, young):
        assert pool.use(blocks)
        for block in blocks[::-1]:
            pool.release(block)
    told(pool)
    assert not pool.use(old + [Partial(-n) for n in range(1, 5)])  # two free, one evictable, four wanted
    assert told(pool) == []
    assert pool.use([Partial(-n) for n in range(1, 6)])
    assert told(pool) == [("removed", [9, 3, 2])]


def ends(args: dict, *requests: dict, **additions: bool) -> tuple[list, dict]:
    """All output signals and how each request ended."""
    trace = [{"uuid": n, "arrival_timestamp_ms": 0.0, **request} for n, request in enumerate(requests, 1)]
    result = run_script({"args": args, "steps": [{"trace": trace}, {"run": 200}]}, **additions)
    signals = [signal for step in result["steps"] for signal in step.get("output", [])]
    return signals, {int(row["uuid"][-4:], 16): row["terminal_status"] for row in result["per_request"]}


def wants(tokens: int, output: int, start: int = 1) -> dict:
    ids = list(range(500, 500 + output))
    return {"tokens": list(range(start, start + tokens)), "max_output_tokens": output, "output_token_ids": ids}


@pytest.mark.parametrize("speculation", [{}, {"aic_nextn": 2, "aic_nextn_accept_rates": "0"}])
def test_request_that_outgrows_the_pool_ends(speculation: dict) -> None:
    args = {"block_size": 4, "num_gpu_blocks": 3, **speculation}
    signals, status = ends(args, wants(10, 6), wants(4, 1, 50))
    # A speculative step wants room for its longest burst, so it gives up a token earlier.
    tokens = [500, 501] if not speculation else []
    assert signals[: len(tokens) + 1] == [[1, t, False, False, None] for t in tokens] + [[1, None, True, False, None]]
    assert signals[len(tokens) + 1 :] == [[2, 500, True, False, None]]
    assert status == {1: "capacity", 2: "completed"}
    assert ends(args, wants(10, 6), **REFERENCE)[1] == {}


def test_request_without_output_completes() -> None:
    args = {"block_size": 4, "num_gpu_blocks": 8, "max_num_batched_tokens": 4}
    signals, status = ends(args, wants(6, 0), wants(3, 1, 50))
    assert signals == [[1, None, True, False, None], [2, 500, True, False, None]]
    assert status == {1: "completed", 2: "completed"}
    assert ends(args, wants(6, 0), **REFERENCE)[1] == {}


def test_prompt_over_the_budget_without_chunking_is_rejected() -> None:
    args = {"block_size": 4, "num_gpu_blocks": 8, "max_num_batched_tokens": 5, "enable_chunked_prefill": False}
    signals, status = ends(args, wants(6, 2), wants(5, 1, 50))
    assert signals == [[2, 500, True, False, None], [1, None, True, True, None]]
    assert status == {1: "over_budget", 2: "completed"}
    assert ends(args, wants(6, 2), **REFERENCE)[1] == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_additions_change_nothing_that_ends(family: str) -> None:
    for seed in range(60):
        script = random_script(family, seed)
        plain = run_script(script, **REFERENCE)
        if "error" in plain or plain["drained"]:
            assert run_script(script) == plain
