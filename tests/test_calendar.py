"""Large batches with a calendar are those without, to the last bit: pools that preempt, budgets that do not go round,
prompts in pieces, both policies, two pools, cancellations, scores and timing models of lengths, tiers below that refuse
blocks and have requests wait, and whoever looks."""
from __future__ import annotations

import collections
import json
import os
import pickle
import random

import numpy as np
import pytest
from record_replays import engines
from test_offload_replay import tiers

from mocker import open_simulation, simulate
from mocker.hooks import VictimScore
from mocker.replay.fast import FastPaths
from mocker.timing import FunctionTiming

COUNT = int(os.environ.get("MOCKER_FUZZ", "200"))


def prefill(batch: int, tokens: int, prefix: int) -> float:
    return 5.0 + batch * tokens / 64


def decode(batch: int, tokens: int, context: int) -> float:
    return 2.0 + batch / 16 + context / 128 + tokens / 4096


def victim(prompt: int, made: int, limit: int, preemptions: int, blocks: int) -> float:
    return made % 7 + preemptions


LENGTHS, SCORE = FunctionTiming(prefill, decode), VictimScore(victim)


def large_case(seed: int) -> tuple[list[dict], dict]:
    """Rows of a trace and arguments of `simulate`: many that run at the same time."""
    rng = random.Random(f"calendar/{seed}")
    block = rng.choice([2, 4, 16, 16, 64])
    gap, shared, most = rng.choice([0.0, 0.0, 0.5, 4.0, 30.0]), rng.random() < 0.5, rng.choice([2, 20, 60, 200])
    families = rng.choice([0, 6, 15, 15])      # prompts that come again, while their blocks are there
    rows, at = [], 0.0
    for i in range(rng.randrange(30, 120)):
        pieces = rng.randrange(1, rng.choice([2, 5]))
        like = rng.randrange(families) if families else i
        path = [j if shared and j < 2 else 100 + 10 * like + j for j in range(pieces)]
        row = {"timestamp": at, "input_length": 16 * (pieces - 1) + rng.randrange(1, 17), "hash_ids": path,
               "output_length": rng.choice([1, 2, 3, most, most, rng.randrange(1, most + 1)])}
        if rng.random() < 0.05:
            row["cancel_after_ms"] = rng.choice([1.0, 60.0, 400.0])
        rows.append(row)
        at += gap * rng.randrange(2)
    least = max(-(-(row["input_length"] + row["output_length"]) // block) for row in rows) + 1
    args = {"block_size": block, "num_gpu_blocks": least + rng.choice([0, 20, 2000, 10000 // block]),
            "max_num_seqs": rng.choice([8, 30, 64, 256]),
            "max_num_batched_tokens": rng.choice([60, 97, 256, 8192]),
            "enable_chunked_prefill": rng.random() < 0.7, "enable_prefix_caching": rng.random() < 0.8,
            "preemption_mode": rng.choice(["lifo", "lifo", "fifo"]),
            "engine_type": rng.choice(["vllm", "vllm", "vllm", "trtllm"])}
    config: dict = {"trace_block_size": 16}
    if rng.random() < 0.2 and not any("cancel_after_ms" in row for row in rows):
        config |= {"prefill_engine_args": args | {"worker_type": "prefill"}, "num_prefill_workers": 2,
                   "decode_engine_args": args | {"worker_type": "decode"}, "num_decode_workers": rng.randrange(1, 3)}
        for pool in ("prefill_engine_args", "decode_engine_args"):
            config[pool]["engine_type"] = "vllm"
    else:
        config |= {"engine_args": args, "num_workers": rng.choice([1, 1, 2])}
        if config["num_workers"] == 2:
            config["router_mode"] = rng.choice(["round_robin", "kv_router", "least_requests"])
    if rng.random() < 0.2:
        config["max_sim_time_ms"] = rng.choice([50.0, 300.5])
    options = engines(config)
    for pool in ("extra_engine_args", "prefill_engine_args", "decode_engine_args"):
        if pool in options and rng.random() < 0.3:
            options[pool] = options[pool].replace(timing_model=LENGTHS)
        if pool in options and rng.random() < 0.2 and options[pool].engine_type == "vllm":
            options[pool] = options[pool].replace(victim_score=SCORE)
    return rows, options


def tiered_case(seed: int, name: str = "calendar tiers") -> tuple[list[dict], dict]:
    """The same above small tiers and slow links."""
    rows, options = large_case(seed)
    below = tiers(random.Random(f"{name}/{seed}"))
    for pool in ("extra_engine_args", "prefill_engine_args", "decode_engine_args"):
        if pool in options:
            options[pool] = options[pool].replace(enable_prefix_caching=True, **below)
    return rows, options | {"router_tie_break": "lowest"}


def same(got, want, what: str) -> None:
    assert got.report.get("offload") == want.report.get("offload"), what
    assert got.report.get("stalled") == want.report.get("stalled"), what
    for name, column in want.per_request.items():
        assert np.array_equal(got.per_request[name], column, equal_nan=column.dtype.kind == "f"), f"{what}: {name}"
    for name, value in want.report.items():
        if isinstance(value, (int, float)) and "wall" not in name and "per_s" not in name:
            assert got.report[name] == value or (value != value and got.report[name] != got.report[name]), (
                f"{what}: {name}")


@pytest.mark.parametrize("case", [large_case, tiered_case])
def test_a_calendar_changes_no_bit(case, tmp_path):
    path = tmp_path / "trace.jsonl"
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(COUNT):
        rows, options = case(seed)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for clock in (True, False):
            want = simulate(path, fast_forward=FastPaths(clock=clock, calendar=0), **options)
            for least in (1, 24):
                same(simulate(path, fast_forward=FastPaths(clock=clock, calendar=least), **options), want,
                     f"seed {seed}, calendar={least}, clock={clock}")
        seen.update({name: value for name, value in want.report.get("offload", {}).items() if isinstance(value, int)})
    assert case is large_case or (seen["blocked_allocations"] > 20 * COUNT and seen["promotions"] > COUNT // 4)


def test_blocks_come_from_the_disk_while_passes_are_skipped(tmp_path):
    """A promotion that waits for a shared tier goes on at the next look, though nothing moves on a link."""
    rows, options = tiered_case(22190, "lt")
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    same(simulate(path, **options), simulate(path, fast_forward=False, **options), "disk")


@pytest.mark.parametrize("case", [large_case, tiered_case])
def test_whoever_looks_sees_what_is_there(case, tmp_path):
    """Copies in the middle, cancellations, requests and books read between passes."""
    path = tmp_path / "trace.jsonl"
    for seed in range(max(COUNT // 4, 2)):
        rows, options = case(seed)
        options["fast_forward"] = FastPaths(calendar=1)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        one, two = open_simulation(path, **options), open_simulation(path, **options | {"fast_forward": False})
        rng = random.Random(seed)
        while not one.finished:
            for sim in (one, two):
                sim.run_completions(4)
            if rng.random() < 0.5 and not one.finished and one.now_ms == two.now_ms:
                row = rng.randrange(len(rows))
                assert one.cancel(row) == two.cancel(row)
            for sim in (one, two):
                if rng.random() < 0.3:
                    for engine in sim._cluster.engines:
                        engine.check()
            if rng.random() < 0.3:
                one = rng.choice([one.fork, lambda sim=one: pickle.loads(pickle.dumps(sim))])()
        same(one.result(), two.run().result(), f"seed {seed}")
