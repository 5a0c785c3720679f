"""The benchmark cases, as plain data that both sides can run: ours in process, the reference in its own Python.

Run as a script it is one side: ``python benches/cases.py {ours|plain|reference} CASE ROUNDS`` prints one JSON object
with the seconds of each whole call (parsing and report included) and the peak memory of the process.
"""
from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path

POOL = {"block_size": 64, "num_gpu_blocks": 16384}
CASES = {
    "conversation, 4 workers": {"engine": POOL, "workers": 4},
    "conversation, 1 saturated worker": {"engine": POOL, "workers": 1},
    "conversation, 4 workers, no prefix caching": {"engine": POOL | {"enable_prefix_caching": False}, "workers": 4},
    "synthetic, 5000 x 1000 in, 100 out, 1 worker": {"engine": POOL, "workers": 1, "synthetic": (1000, 100, 5000)},
    "conversation, 4 workers, closed loop of 64": {"engine": POOL, "workers": 4, "replay_concurrency": 64},
    "conversation, 4 workers, MTP": {"engine": POOL | {"aic_nextn": 2}, "workers": 4},
    "conversation, 2 workers, TRT-LLM": {
        "engine": POOL | {"engine_type": "trtllm", "num_gpu_blocks": 6000}, "workers": 2},
    "conversation, 4 workers, SGLang": {"engine": POOL | {"engine_type": "sglang"}, "workers": 4},
    "conversation, 4 workers, SGLang, closed loop of 64": {
        "engine": POOL | {"engine_type": "sglang"}, "workers": 4, "replay_concurrency": 64},
    "conversation, 4 + 4 workers disaggregated, SGLang": {
        "prefill": POOL | {"engine_type": "sglang", "worker_type": "prefill", "kv_bytes_per_token": 131072},
        "decode": POOL | {"engine_type": "sglang", "worker_type": "decode"}, "workers": (4, 4)},
    "conversation, 4 workers, KV router": {"engine": POOL, "workers": 4, "router_mode": "kv_router"},
    "conversation, 64 workers, KV router": {"engine": POOL, "workers": 64, "router_mode": "kv_router"},
    "conversation, 4 + 4 workers disaggregated, KV router": {
        "prefill": POOL | {"worker_type": "prefill", "kv_bytes_per_token": 131072}, "workers": (4, 4),
        "decode": POOL | {"worker_type": "decode"}, "router_mode": "kv_router"},
    "600 conversations whose prompts grow, 4 workers": {
        "engine": POOL, "workers": 4, "trace_format": "mooncake-delta", "workload": "conversations"},
    "3000 requests whose answers the trace gives, 4 workers": {"engine": POOL, "workers": 4, "workload": "answers"},
}


def trace_file(folder: Path) -> str:
    """The shipped conversation trace, unpacked into `folder` (the reference reads plain files only)."""
    import gzip

    target = folder / "mooncake_conversation.jsonl"
    if not target.exists():
        packed = Path(__file__).parent.parent / "mocker" / "data" / "mooncake_conversation.jsonl.gz"
        target.write_bytes(gzip.decompress(packed.read_bytes()))
    return str(target)


def conversations(trace: str) -> str:
    """Sessions of 1 to 11 turns that add to what was said (mooncake-delta), as a file beside `trace`."""
    target = Path(trace).with_name("conversations.jsonl")
    if target.exists():
        return str(target)
    rng, rows, used = random.Random(1), [], 100
    for session in range(600):
        opening = [rng.randrange(5), 10 + rng.randrange(5)]
        for turn in range(rng.randrange(1, 12)):
            ids = list(range(used, used + rng.randrange(1, 6)))
            used += len(ids)
            ids = opening + ids if turn == 0 else ids
            when = {"timestamp": session * 400.0} if turn == 0 else {"delay": float(rng.randrange(500, 20000))}
            rows.append({"session_id": f"s{session}", "input_length": len(ids) * 512 - rng.randrange(400),
                         "output_length": rng.randrange(20, 500), "hash_ids": ids, **when})
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(target)


def answers(trace: str) -> str:
    """Single requests of up to 11 ids with the tokens of their answers, as a file beside `trace`."""
    target = Path(trace).with_name("answers.jsonl")
    if target.exists():
        return str(target)
    rng, rows = random.Random(2), []
    for i in range(3000):
        ids, made = [rng.randrange(3)] + [rng.randrange(5000) for _ in range(rng.randrange(11))], rng.randrange(20, 400)
        rows.append({"timestamp": i * 120.0, "input_length": len(ids) * 512 - rng.randrange(400), "hash_ids": ids,
                     "output_length": made, "output_token_ids": [rng.randrange(32000) for _ in range(made)]})
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(target)


WORKLOADS = {"conversations": conversations, "answers": answers}


def tolerance(case: dict) -> float:
    """How far the simulated time of two runs may differ: the KV router breaks ties at random."""
    return 1e-3 if "router_mode" in case else 1e-9


def _options(case: dict, engine_args: type) -> dict:
    """Keywords of a replay that both sides know; `engine_args` is the side's MockEngineArgs."""
    options = {name: case[name] for name in ("replay_concurrency", "router_mode", "trace_format") if name in case}
    if "engine" in case:
        return options | {"extra_engine_args": engine_args(**case["engine"]), "num_workers": case["workers"]}
    prefill, decode = case["workers"]
    return options | {
        "prefill_engine_args": engine_args(**case["prefill"]), "decode_engine_args": engine_args(**case["decode"]),
        "num_prefill_workers": prefill, "num_decode_workers": decode}


def run_ours(case: dict, trace: str, fast: bool = True) -> dict:
    """One whole call of this package; returns the report. `fast` False: the plain path, pass by pass."""
    from mocker import MockEngineArgs, SyntheticSpec, simulate
    from mocker.replay import run_synthetic_trace_replay, run_trace_replay

    options = _options(case, MockEngineArgs)
    if "workload" in case:
        trace = WORKLOADS[case["workload"]](trace)
    if not fast:
        workload = SyntheticSpec(*case["synthetic"]) if "synthetic" in case else trace
        return simulate(workload, fast_forward=False, **options).report
    if "synthetic" in case:
        return run_synthetic_trace_replay(*case["synthetic"], **options)
    return run_trace_replay(trace, **options)


def run_reference(case: dict, trace: str) -> dict:
    """One whole call of the reference (needs its wheel)."""
    from dynamo._core import MockEngineArgs, run_mocker_synthetic_trace_replay, run_mocker_trace_replay

    options = _options(case, MockEngineArgs)
    if "synthetic" in case:
        return run_mocker_synthetic_trace_replay(*case["synthetic"], **options)
    if "workload" in case:
        trace = WORKLOADS[case["workload"]](trace)
    return run_mocker_trace_replay([trace], **options)


def main() -> None:
    """One side of a comparison."""
    side, name, trace, rounds = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    case = CASES[name]
    seconds = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {}
    for i in range(rounds + 1):
        began = time.perf_counter()
        report = run_reference(case, trace) if side == "reference" else run_ours(case, trace, side == "ours")
        if i > 0 or rounds == 1:
            seconds.append(time.perf_counter() - began)
        if rounds == 1:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak_kib": peak, "start_kib": before,
                      "duration_ms": report["duration_ms"]}))


if __name__ == "__main__":
    main()
