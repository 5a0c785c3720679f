"""Every shortcut of a replay changes nothing: random replays with random ones off, against the run without any."""
from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest
from fuzz_replays import disaggregate, random_replay
from record_replays import engines

from mocker import simulate
from mocker.args import DEFAULT_SCHEDULER_RULES
from mocker.replay.fast import FastPaths, fast_paths

COUNT = int(os.environ.get("MOCKER_FUZZ", "150"))
RULES = ["vllm-0.33", "vllm-0.33-async"]


def random_case(seed: int) -> tuple[list[dict], dict]:
    """A trace and arguments of `simulate`: any engine, router, topology; half of them by vLLM's rules."""
    rng = random.Random(f"paths/{seed}")
    rows, config = random_replay(rng)
    args = config.get("engine_args")
    if args is not None and rng.random() < 0.6:
        for name in ("aic_nextn", "sglang"):
            args.pop(name, None)
        args["engine_type"] = "vllm"
        args["max_num_seqs"] = min(args["max_num_seqs"], args["max_num_batched_tokens"])
        args |= {"scheduler_rules": rng.choice(RULES), "watermark": rng.choice([0.0, 0.0, 0.1]),
                 "reserve_full_isl": rng.random() < 0.8, "long_prefill_token_threshold": rng.choice([0, 0, 9])}
    gap = rng.choice([0.0, 4.5, 23.5, 40.0])
    if rng.random() < 0.6:             # arrivals within passes, or all at once; loads that decide who gets the next
        rows = [dict(rng.choice(rows)) for _ in range(60)]
        for i, row in enumerate(rows):
            row.pop("session_id", None)
            row.pop("delay", None)
            row["timestamp"] = gap * i
        if args is not None:
            config["router_mode"] = rng.choice(["kv_router", "least_requests", "power_of_two", "round_robin"])
            config["num_workers"] = rng.randrange(2, 5)
            config.pop("router_config", None)
            config.pop("replay_concurrency", None)
            args["max_num_batched_tokens"] = args["max_num_batched_tokens"] + 30
    return rows, engines(config)


def check(seed: int, tmp_path, case=random_case) -> None:
    rows, options = case(seed)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rng = random.Random(seed)
    one_pool = "prefill_engine_args" not in options
    none = FastPaths(clock=False, ahead=False, lanes=False, extents=not one_pool, books=False,
                     calendar=False)
    some = FastPaths(*(rng.random() < 0.5 for _ in range(3)), extents=rng.random() < 0.5 or not one_pool,
                     books=rng.random() < 0.5, calendar=rng.randrange(4))
    want = simulate(path, fast_forward=none, **options)
    for choice in (FastPaths(), FastPaths(calendar=1), some):
        got = simulate(path, fast_forward=choice, **options)
        assert got.report.get("stalled") == want.report.get("stalled"), f"seed {seed} with {choice}"
        for name, column in want.per_request.items():
            assert np.array_equal(got.per_request[name], column, equal_nan=column.dtype.kind == "f"), (
                f"seed {seed}: {name} with {choice}")
        assert steady(got.report) == pytest.approx(steady(want.report), rel=1e-12, abs=1e-9, nan_ok=True), (
            f"seed {seed} with {choice}")      # sums over the gaps run in the order in which these came


def growing_case(seed: int) -> tuple[list[dict], dict]:
    """Sessions whose turns add to what was said before, on one pool; few first prompts, so that they are shared."""
    rng = random.Random(f"growing/{seed}")
    while True:
        rows, options = random_case(rng.randrange(10**9))
        if "prefill_engine_args" not in options:
            break
    options.pop("replay_concurrency", None)
    starts = [dict(rng.choice(rows)) for _ in range(rng.randrange(1, 4))]
    delays, out = rng.choice([[0.0, 7.5, 200.0], [7.5, 200.0], [31.0, 900.0]]), []
    for s in range(rng.randrange(2, 9)):
        first = dict(rng.choice(starts), session_id=f"s{s}", timestamp=rng.choice([0.0, 10.0 * s, 300.0 * s]))
        first.pop("delay", None)
        out.append(first)
        for _ in range(rng.randrange(5)):
            turn = dict(rng.choice(rows), session_id=f"s{s}", delay=rng.choice(delays))
            turn.pop("timestamp", None)
            out.append(turn)
    leaves = rng.random() < 0.2
    for row in out:
        row["output_length"] = max(row["output_length"], 1)
        if leaves and rng.random() < 0.3:
            row["cancel_after_ms"] = rng.choice([1.0, 30.0, 500.0])
    args = options["extra_engine_args"]
    plain = args.engine_type == "vllm" and args.scheduler_rules == DEFAULT_SCHEDULER_RULES
    if plain and args.enable_prefix_caching and rng.random() < 0.4:
        options["extra_engine_args"] = args.replace(
            num_g2_blocks=rng.choice([2, 5, 40]), num_g3_blocks=rng.choice([None, 30]), kv_bytes_per_token=250_000,
            bandwidth_g1_to_g2_gbps=rng.choice([0.0, 0.05, 20.0]), offload_batch_size=rng.choice([1, 32]))
    return out, options | {"trace_format": "mooncake-delta"}


def waiting_case(seed: int) -> tuple[list[dict], dict]:
    """Turns that come some time after the one before, on workers that go on alone meanwhile."""
    rng = random.Random(f"waiting/{seed}")
    rows, options = growing_case(rng.randrange(10**9))
    for row in rows:
        if "delay" in row:
            row["delay"] = max(row["delay"], 3.0)
        if "output_token_ids" not in row:
            row["output_length"] += rng.choice([0, 0, 40])
    return rows, options | {"trace_format": "mooncake", "num_workers": rng.randrange(2, 5)}


def foreseen_case(seed: int) -> tuple[list[dict], dict]:
    """SGLang workers whose passes are foreseen, closed loops or two pools: queues, retractions, sessions, caps."""
    rng = random.Random(f"foreseen/{seed}")
    rows, config = random_replay(rng)
    gap = rng.choice([0.0, 1.0, 8.0, 30.0])
    rows = [dict(rng.choice(rows), timestamp=gap * i) for i in range(rng.randrange(10, 80))]
    most, sessions = rng.choice([3, 20, 90]), rng.random() < 0.3
    for row in rows:
        row.pop("output_token_ids", None)
        row.pop("session_id", None)
        row.pop("delay", None)
        row["output_length"] = rng.choice([1, 2, most, rng.randrange(1, most + 1)])
        if sessions and rng.random() < 0.7:
            row["session_id"] = f"s{rng.randrange(9)}"
    block = config.get("engine_args", config.get("decode_engine_args"))["block_size"]
    least = max(row["input_length"] + row["output_length"] for row in rows) // block + 2
    args = {"block_size": block, "num_gpu_blocks": least + rng.choice([0, 3, 30, 400]), "engine_type": "sglang",
            "max_num_seqs": rng.choice([2, 8, 256]), "speedup_ratio": rng.choice([1.0, 1.0, 2.5])}
    args["sglang"] = {"schedule_policy": rng.choice(["fifo", "lpm"]),
                      "chunked_prefill_size": block * rng.choice([4, 99])}
    config = {"trace_block_size": config["trace_block_size"], "replay_concurrency": rng.randrange(1, 40),
              "engine_args": args, "num_workers": rng.randrange(2, 6)}
    if rng.random() < 0.5:
        disaggregate(rng, config)
        if rng.random() < 0.5:
            config.pop("replay_concurrency")
        config["router_mode"] = rng.choice(["round_robin", "kv_router", "least_requests"])
    if rng.random() < 0.3:
        config["max_sim_time_ms"] = rng.choice([60.0, 400.5])
    return rows, engines(config)


def steady(report: dict) -> dict:
    """The numbers of a report that do not depend on this machine."""
    return {name: value for name, value in report.items()
            if isinstance(value, (int, float)) and "wall" not in name and "per_s" not in name}


@pytest.mark.parametrize("part", range(3))
def test_no_shortcut_changes_a_bit(part, tmp_path):
    for seed in range(part, COUNT, 3):
        check(seed, tmp_path)


@pytest.mark.parametrize("part", range(3))
def test_prompts_that_grow_by_segments_as_by_their_tokens(part, tmp_path):
    for seed in range(part, COUNT, 3):
        check(seed, tmp_path, growing_case)


@pytest.mark.parametrize("part", range(3))
def test_workers_go_ahead_of_turns_that_wait_for_them(part, tmp_path):
    for seed in range(part, COUNT, 3):
        check(seed, tmp_path, waiting_case)


@pytest.mark.parametrize("part", range(3))
def test_passes_that_are_foreseen_happen(part, tmp_path):
    coincide = (1477, 2534)            # a foreseen pass begins when something happens on another worker
    for seed in [*range(part, COUNT, 3), *coincide[part:part + 1]]:
        check(seed, tmp_path, foreseen_case)


def test_events_before_a_stretch_are_told_in_time(tmp_path):
    """An arrival during a fast-forwarded stretch of SGLang sees the pages that were stored before it."""
    rows, config = random_replay(random.Random("replay/9149"))
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, fast = (simulate(path, fast_forward=choice, router_tie_break="lowest", **engines(config)).per_request
                   for choice in (False, True))
    assert np.array_equal(plain["decode_worker_idx"], fast["decode_worker_idx"])
    assert np.array_equal(plain["last_token_ms"], fast["last_token_ms"], equal_nan=True)


def test_threads_change_no_byte(tmp_path):
    """Every worker on a thread, and the report to the last digit."""
    lanes = 0
    for seed in range(COUNT):
        rows, options = random_case(seed)
        if "prefill_engine_args" not in options:
            for name in ("router_mode", "router_config", "replay_concurrency"):
                options.pop(name, None)
            options["num_workers"] = 2 + seed % 4
            lanes += not any("session_id" in row for row in rows)
            path = tmp_path / "trace.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            one, many = (simulate(path, threads=threads, **options) for threads in (1, 3))
            assert repr(steady(one.report)) == repr(steady(many.report)), f"seed {seed}"
            assert one.report.get("stalled") == many.report.get("stalled"), f"seed {seed}"
            for name, column in one.per_request.items():
                assert repr(column.tolist()) == repr(many.per_request[name].tolist()), f"seed {seed}: {name}"
    assert lanes > COUNT / 2


def test_an_error_on_a_thread_ends_the_run(tmp_path):
    def stop(done, total, at):
        raise KeyError("seen")

    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f'{{"timestamp":{i},"input_length":4,"output_length":2,"hash_ids":[{i}]}}\n'
                            for i in range(9)))
    with pytest.raises(KeyError, match="seen"):
        simulate(path, num_workers=3, threads=2, progress=stop)
    with pytest.raises(ValueError, match="threads must be at least 1"):
        simulate(path, threads=0)


def test_choices():
    assert fast_paths(True) == FastPaths()
    assert fast_paths(False) == FastPaths(clock=False, ahead=False, calendar=0)
    with pytest.raises(TypeError, match="FastPaths"):
        fast_paths(1)
