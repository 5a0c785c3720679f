"""Fuzzer of whole replays against the reference: random traces with sessions, planned outputs and caps, few workers,
one pool or two.

usage: python tests/fuzz_replays.py ORACLE COUNT [FIRST_SEED]

ORACLE reads one JSON object a line (trace file, engine arguments, workers …) and prints report and per-request rows.
"""
from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from record_replays import COLUMNS, HANDOFF_COLUMNS, engines  # noqa: E402
from test_exact import plain  # noqa: E402

from mocker import Simulation, simulate  # noqa: E402


def random_replay(rng: random.Random) -> tuple[list[dict], dict]:
    """Rows of a Mooncake file and a configuration; timestamps are dyadic, which every parser reads alike."""
    block = rng.choice([2, 4, 8, 16])
    trace_block = rng.choice([block, 2 * block, 4 * block, 3 * block, 7])
    sessions = rng.random() < 0.4
    planned = rng.random() < 0.25
    shared = [rng.randrange(1000, 1 << 31) for _ in range(40)]
    paths: list[list[int]] = []
    rows, at, last = [], 0.0, {}
    for _ in range(rng.randrange(1, 40)):
        base = list(rng.choice(paths)) if paths and rng.random() < 0.7 else []
        path = base[:rng.randrange(0, len(base) + 1)] + [rng.randrange(9) for _ in range(rng.randrange(0, 5))]
        path = path or [rng.randrange(9)]
        paths.append(path)
        outputs = rng.choice([1, 1, 2, 3, 9, 20, 40])
        row: dict = {"timestamp": at, "input_length": rng.randrange((len(path) - 1) * trace_block + 1,
                                                                     len(path) * trace_block + 1),
                     "output_length": outputs, "hash_ids": path}
        if planned and rng.random() < 0.6:
            row["output_token_ids"] = (shared[:outputs] if rng.random() < 0.5
                                       else [rng.randrange(9) for _ in range(outputs)])
        if sessions and rng.random() < 0.7:
            name = f"s{rng.randrange(6)}"
            row["session_id"] = name
            if name in last and rng.random() < 0.5:
                row["delay"] = rng.choice([0.0, 5.0, 80.5])
            last[name] = at
        rows.append(row)
        at += rng.choice([0.0, 0.0, 0.25, 5.0, 12.5, 60.0, 700.0])
    fitting = -(-max(r["input_length"] + r["output_length"] for r in rows) // block) + 1
    args = {
        "block_size": block, "num_gpu_blocks": fitting + rng.choice([0, 1, 3, 10, 100]),
        "max_num_seqs": rng.choice([1, 2, 3, 8, 256]),
        "max_num_batched_tokens": rng.choice([5, block, 2 * block + 1, 33, 128, 8192]),
        "enable_prefix_caching": rng.random() < 0.85,
        "speedup_ratio": rng.choice([1.0, 1.0, 2.5]),
        "engine_type": rng.choice(["vllm", "vllm", "vllm", "trtllm", "sglang", "sglang"]),
    }
    if args["engine_type"] == "sglang":
        args["num_gpu_blocks"] += 20
        args["sglang"] = {"schedule_policy": rng.choice(["fifo", "lpm"]),
                          "chunked_prefill_size": block * rng.choice([1, 4, 100]),
                          "max_prefill_tokens": rng.choice([16, 100, 16384])}
    if rng.random() < 0.2:
        args["aic_nextn"] = rng.randrange(1, 4)
    config: dict = {"engine_args": args, "num_workers": rng.choice([1, 1, 2, 3, 5]), "trace_block_size": trace_block}
    if rng.random() < 0.5:
        config["num_workers"] = rng.choice([2, 3, 4, 8, 12])
        config["router_mode"] = "kv_router"
        if rng.random() < 0.6:
            config["router_config"] = {
                "overlap_score_credit": rng.choice([0.0, 0.5, 1.0]),
                "prefill_load_scale": rng.choice([0.0, 0.3, 1.0, 4.0]),
                "overlap_score_credit_decay": rng.choice([0.0, 0.0, 1.5]),
                "router_queue_threshold": rng.choice([None, 0.0, 0.01, 0.5, 16.0]),
                "router_queue_policy": rng.choice(["fcfs", "lcfs", "wspt"]),
                "router_assume_kv_reuse": rng.random() < 0.8, "router_track_prefill_tokens": rng.random() < 0.8,
                "router_track_active_blocks": rng.random() < 0.8}
    if args["engine_type"] != "trtllm" and not planned and rng.random() < 0.35:
        disaggregate(rng, config)
    if rng.random() < 0.4:
        config["replay_concurrency"] = rng.choice([1, 2, 3, 8, 100])
    elif rng.random() < 0.4:
        config["arrival_speedup_ratio"] = rng.choice([0.5, 2.0, 4.0])
    if rng.random() < 0.25:
        config["max_sim_time_ms"] = rng.choice([0.0, 20.0, 100.0, 333.5, 1500.0])
    if rng.random() < 0.2:
        config |= {"sla_ttft_ms": 50.0, "sla_itl_ms": 12.0}
    return rows, config


def disaggregate(rng: random.Random, config: dict) -> None:
    """Two pools in place of one; the prompts that fit one pool fit both."""
    decode = config.pop("engine_args")
    prefill = decode | {"num_gpu_blocks": decode["num_gpu_blocks"] + rng.choice([0, 0, 5, 100]),
                        "max_num_seqs": rng.choice([1, 2, 8, 256]), "worker_type": "prefill"}
    prefill.pop("aic_nextn", None)
    if rng.random() < 0.8:
        prefill |= {"kv_bytes_per_token": rng.choice([1000, 131072, 10_000_000]),
                    "kv_transfer_timing_mode": rng.choice(["full_prompt", "destination_missing"])}
        prefill |= rng.choice([{}, {"kv_transfer_bandwidth": 0.5}])
    workers = config.pop("num_workers")
    config |= {"prefill_engine_args": prefill, "decode_engine_args": decode | {"worker_type": "decode"},
               "num_prefill_workers": rng.choice([1, 1, 2, 3, 6]), "num_decode_workers": min(workers, 6)}


def compare(result, want: dict) -> str | None:
    """First difference of rows (as sorted sets) or report."""
    ended = result.per_request["terminal_status"] != "incomplete"
    names = [c for c in COLUMNS + HANDOFF_COLUMNS if c in result.per_request]
    columns = {c: plain(result.per_request[c][ended]) for c in names}
    got = sorted(json.dumps([columns[c][i] for c in names]) for i in range(int(ended.sum())))
    expected = sorted(json.dumps([row.get(c) for c in names]) for row in want["per_request"])
    if got != expected:
        extra, missing = [g for g in got if g not in expected], [e for e in expected if e not in got]
        return f"rows: {extra[:2]} instead of {missing[:2]}"
    for key, value in want["report"].items():
        if "wall" in key or "_per_s" in key:
            continue
        other = result.report[key]
        if abs(other - value) > 1e-9 * abs(value) + (1e-9 if key.startswith("std_") else 0.0):
            return f"report {key}: {other} instead of {value}"
    return None


def against(oracle: str, config: dict, options: dict, path: Path, seed: int) -> tuple[Simulation, str | None] | None:
    """Our result and how it differs from the reference's; None where the reference has none to compare with."""
    try:
        run = subprocess.run([oracle], input=json.dumps(config | {"trace_file": str(path)}) + "\n",
                             capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return None                # the reference spins
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    want = json.loads(lines[0]) if lines else {}
    if "report" not in want:
        print(f"seed {seed}: reference says {str(want)[:200]}")
        return None
    found = None
    for fast in (True, False):
        result = simulate(path, compat="reference", fast_forward=fast, router_tie_break="lowest", **options)
        found = found or compare(result, want)
    whole = {name: value for name, value in options.items() if name != "max_sim_time_ms"}
    ended = set(simulate(path, **whole).per_request["terminal_status"])
    if ended & {"capacity", "over_budget"}:
        return None                # the reference keeps such a request waiting until the cap
    return result, found


def main() -> None:
    oracle, count = sys.argv[1], int(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    bad = checked = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        for seed in range(first, first + count):
            rows, config = random_replay(random.Random(f"replay/{seed}"))
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            both = against(oracle, config, engines(config), path, seed)
            if both is None:
                continue
            found = both[1]
            checked += 1
            if found:
                bad += 1
                print(f"seed {seed}: {found}", flush=True)
    print(f"{checked} replays compared, {bad} differ")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
