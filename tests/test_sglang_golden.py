"""The SGLang core gives the recorded results of the reference, pass by pass and field by field."""
from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from model.script import differences
from model.sglang import SglangModel
from model.sglang_runner import run_script

GOLDEN = Path(__file__).parent / "golden"
CHUNKS = 4


def load(family: str) -> list[dict]:
    with gzip.open(GOLDEN / f"{family}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("family", ["sglang", "sglang_pressure"])
def test_recorded_scripts(family: str, chunk: int) -> None:
    recorded = load(family)
    assert len(recorded) == 100
    for number in range(chunk, len(recorded), CHUNKS):
        found = differences(run_script(recorded[number]["script"]), recorded[number]["result"])
        assert not found, f"{family} script {number}: {found[:5]}"


def reduced(step: dict) -> dict:
    """The part of a recorded pass that the plain model gives."""
    m = step["metrics"]
    return {k: step[k] for k in ("start_ms", "end_ms", "admissions", "output", "kv_events")} | {
        "active": m["active_decode_blocks"], "running": m["running_requests"], "waiting": m["waiting_requests"],
        "hit": m["sglang_cache_hit_tokens"], "all": m["sglang_cache_total_tokens"]}


def model_steps(script: dict, model: SglangModel | None = None) -> list[dict]:
    """Passes of the plain model, as single-worker replay runs them."""
    model = model or SglangModel(script["args"], script["worker_id"])
    pending, steps, now = list(script["steps"][0]["trace"]), [], 0.0
    while pending or not model.is_empty():
        if model.is_empty():
            now = max(now, float(pending[0]["arrival_timestamp_ms"]))
        while pending and pending[0]["arrival_timestamp_ms"] <= now:
            model.receive(pending.pop(0))
        steps.append(model.execute_pass(now))
        now = steps[-1]["end_ms"]
    return steps


@pytest.mark.parametrize("family", ["sglang", "sglang_pressure"])
def test_plain_model(family: str) -> None:
    """The plain model states the semantics: it gives the recorded passes too."""
    for number, entry in enumerate(load(family)):
        want = [reduced(step) for step in entry["result"].get("steps", [])]
        got = model_steps(entry["script"]) if want else []
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert a == b, f"{family} script {number}, pass {i}: {differences(a, b)[:3]}"


def random_script(seed: int) -> dict:
    """Shared prompts and a pool so tight that the cache evicts and running requests are retracted."""
    rng = random.Random(seed)
    page, pages = rng.choice([1, 1, 2, 3, 8]), rng.choice([10, 14, 20, 40])
    args = {"engine_type": "sglang", "block_size": page, "num_gpu_blocks": pages, "max_num_seqs": rng.choice([3, 256]),
            "sglang": {"page_size": page, "schedule_policy": rng.choice(["fifo", "lpm"]),
                       "clip_max_new_tokens": rng.choice([1, 2, 4]),
                       "schedule_conservativeness": rng.choice([0.0, 0.1, 1.0]),
                       "chunked_prefill_size": page * rng.choice([1, 2, 64])}}
    base, trace, at = [rng.randrange(1, 9) for _ in range(6 * page)], [], 0.0
    outputs = [rng.randrange(1000, 2**31) for _ in range(16)]
    for i in range(rng.randrange(4, 20)):
        made = rng.choice([1, 3, 6, 10, 16])
        prompt = base[:rng.randrange(1, len(base))] + [rng.randrange(1, 9) for _ in range(rng.randrange(0, 3 * page))]
        plan = outputs if rng.random() < 0.5 else [rng.randrange(1000, 2**31) for _ in range(16)]
        trace.append({"uuid": i + 1, "tokens": prompt[:max(1, pages * page - made - page)], "max_output_tokens": made,
                      "output_token_ids": plan[:made], "arrival_timestamp_ms": at})
        at += rng.choice([0.0, 0.0, 3.0, 60.0])
    return {"args": args, "worker_id": 0, "steps": [{"trace": trace}, {"run": 2000}]}


def test_core_and_plain_model_agree() -> None:
    retracted = compared = 0
    for seed in range(120):
        script = random_script(seed)
        result = run_script(script, conserve=False)
        steps = result["steps"]
        if any(token is None for step in steps for _, token, *_ in step["output"]):
            continue                           # somebody could not go on: the model, like the reference, has no end
        got = [reduced(step) for step in steps]
        for i, (a, b) in enumerate(zip(got, model_steps(script), strict=True)):
            assert a == b, f"seed {seed}, pass {i}: {differences(a, b)[:3]}"
        compared += 1
        retracted += result["counts"]["preemptions"]
    assert compared > 60
    assert retracted > 50
