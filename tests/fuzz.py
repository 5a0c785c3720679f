"""Fuzzers: the compiled core against the plain model, and both against the reference.

usage: python tests/fuzz.py model COUNT [FIRST_SEED]
       python tests/fuzz.py reference ORACLE COUNT [FIRST_SEED]
       python tests/fuzz.py trace COUNT [FIRST_SEED]

`model` runs COUNT random scripts a family through both, with the pool's books checked after every pass, every
fourth of them wild (requests that never fit, no output, over-long prompts). `reference` needs a program that
reads one script a line and prints its result, one JSON object a line. `trace` replays random small traces in four
ways that must agree to the last bit: segments with and without fast-forward, real tokens, and the object API.
"""
from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from model.script import differences  # noqa: E402
from model.script import run_script as run_model  # noqa: E402
from model.scripts import FAMILIES, random_script  # noqa: E402
from runner import run_script  # noqa: E402

from mocker import DirectRequest, MockEngineArgs, Trace, TraceCollector, VllmCore, simulate  # noqa: E402
from mocker.replay.fast import FastPaths  # noqa: E402

PASSES = 400                       # a wild script may spin without end, as the reference does


def difference(family: str, seed: int, wild: bool) -> str | None:
    """What differs between the compiled core and the model on one random script."""
    script = random_script(family, seed, wild=wild)
    for step in script["steps"]:
        if "run" in step:
            step["run"] = min(step["run"], PASSES)
    return compare(run_script(script), run_model(script))


def compare(got: dict, want: dict) -> str | None:
    """First differences of two script results; texts of refused arguments may differ."""
    if "error" in want or "error" in got:
        return None if ("error" in want) == ("error" in got) else f"one side refuses: {got.get('error')!r}"
    found = differences(got, want)
    return "; ".join(found[:4]) if found else None


# ---- traces -------------------------------------------------------------------------------------------------------

def random_trace(rng: random.Random) -> tuple[Trace, dict, int]:
    """A small trace whose prompts share prefixes, engine arguments that suit it, and a number of workers."""
    block = rng.choice([2, 4, 8, 16])
    trace_block = rng.choice([block, 2 * block, 4 * block, 3 * block, block // 2, 7, 10])
    n = rng.randrange(1, 30)
    paths: list[list[int]] = []
    arrival = 0.0
    rows = []
    for _ in range(n):
        base = list(rng.choice(paths)) if paths and rng.random() < 0.7 else []
        path = base[:rng.randrange(0, len(base) + 1)] + [rng.randrange(9) for _ in range(rng.randrange(0, 5))]
        path = path or [rng.randrange(9)]
        paths.append(path)
        low = (len(path) - 1) * trace_block + 1
        outputs = rng.choice([1, 1, 2, 3, 9, 20, 40])
        rows.append((arrival, rng.randrange(low, len(path) * trace_block + 1), outputs, path))
        arrival += rng.choice([0.0, 0.0, 0.25, 5.0, 12.5, 60.0, 700.0])
    longest = max(r[1] + r[2] for r in rows)
    fitting = -(-longest // block) + 1
    args = {
        "block_size": block, "num_gpu_blocks": fitting + rng.choice([0, 1, 3, 10, 100]),
        "max_num_seqs": rng.choice([1, 2, 3, 8, 256]),
        "max_num_batched_tokens": rng.choice([5, block, 2 * block + 1, 33, 128, 8192]),
        "enable_prefix_caching": rng.random() < 0.85, "enable_chunked_prefill": True,
        "speedup_ratio": rng.choice([1.0, 1.0, 2.5]), "preemption_mode": rng.choice(["lifo", "lifo", "lifo", "fifo"]),
        "engine_type": rng.choice(["vllm", "vllm", "vllm", "trtllm"]),
    }
    if rng.random() < 0.2:
        args["aic_nextn"] = rng.randrange(1, 4)
    offsets = np.cumsum([0] + [len(r[3]) for r in rows])
    trace = Trace.from_columns(
        arrival_ms=[r[0] for r in rows], input_length=[r[1] for r in rows], output_length=[r[2] for r in rows],
        hash_offsets=offsets, hash_ids=np.array([i for r in rows for i in r[3]], np.uint64), block_size=trace_block)
    return trace, args, rng.choice([1, 1, 2, 3])


TIMES = ("arrival_time_ms", "first_admit_ms", "first_token_ms", "last_token_ms", "ttst_ms", "reused_input_tokens",
         "output_tokens", "terminal_status")


def object_replay(trace: Trace, args: MockEngineArgs, workers: int) -> dict[str, list]:
    """The trace through `VllmCore` objects of real tokens, worker by worker, as an embedder would drive them."""
    from mocker.workload import trace_tokens

    tokens = trace_tokens(trace)
    out: dict[str, list] = {name: [None] * trace.n for name in TIMES}
    order = np.argsort(trace.arrival_ms, kind="stable")
    for worker in range(workers):
        core, collector = VllmCore(args, worker_id=worker), TraceCollector()
        rows = {}
        now = 0.0
        mine = list(order[worker::workers])
        idle = 0
        while mine or not core.is_empty():
            while mine and trace.arrival_ms[mine[0]] <= now:
                row = int(mine.pop(0))
                uuid = core.receive(DirectRequest(tokens(row)[0], int(trace.output_length[row])))
                collector.on_arrival(uuid, float(trace.arrival_ms[row]), int(trace.input_length[row]),
                                     int(trace.output_length[row]))
                rows[str(uuid)] = row
            if core.is_empty():
                now = float(trace.arrival_ms[mine[0]])
                continue
            result = core.execute_pass(now, collector)
            core.check_invariants()
            idle = 0 if result.accept_length_output_tokens or result.completed_requests else idle + 1
            if idle > 3000:
                return {}
            now = result.end_ms
        for record in collector.per_request_records():
            row = rows[record["uuid"]]
            for name in TIMES:
                out[name][row] = record.get(name)
            out["output_tokens"][row] = len(collector._times[next(
                u for u in collector._times if str(u) == record["uuid"])])
    return out


def trace_difference(seed: int) -> str | None:
    """What differs between the ways to replay one random trace."""
    trace, args, workers = random_trace(random.Random(f"trace/{seed}"))
    engine = MockEngineArgs.from_json(json.dumps(args))
    runs = {
        "fast": simulate(trace, extra_engine_args=engine, num_workers=workers),
        "plain": simulate(trace, extra_engine_args=engine, num_workers=workers, fast_forward=False),
        "tokens": simulate(trace, extra_engine_args=engine, num_workers=workers, fast_forward=FastPaths(extents=False)),
    }
    base = runs["fast"]
    for name, run in runs.items():
        for column in TIMES:
            a, b = base.per_request[column], run.per_request[column]
            same = np.array_equal(a, b, equal_nan=True) if a.dtype.kind == "f" else list(a) == list(b)
            if not same:
                return f"{name}: {column}"
        for key, value in base.report.items():
            if "wall" in key or "processed_" in key:
                continue
            other = run.report[key]
            if value != other and not (isinstance(value, float) and abs(value - other) <= 1e-9 * abs(value) + 1e-12):
                return f"{name}: report {key} {value} {other}"
    if base.report.get("stalled"):
        return None
    objects = object_replay(trace, engine, workers)
    for column in TIMES if objects else ():
        for row, value in enumerate(base.per_request[column].tolist()):
            other = objects[column][row]
            if value != other and not (other is None and value != value):
                return f"object API: {column} of row {row}: {other} instead of {value}"
    return None


def main() -> None:
    mode = sys.argv[1]
    if mode == "reference":
        oracle, count, first = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0
    else:
        oracle, count, first = "", int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    bad = checked = 0
    began = time.monotonic()
    if mode == "trace":
        for seed in range(first, first + count):
            found = trace_difference(seed)
            checked += 1
            if found:
                bad += 1
                print(f"trace seed {seed}: {found}", flush=True)
        print(f"trace: {checked} traces, {bad} differ, {time.monotonic() - began:.0f} s")
        raise SystemExit(1 if bad else 0)
    for family in FAMILIES:
        checked = left = 0
        for start in range(first, first + count, 200):
            seeds = range(start, min(start + 200, first + count))
            scripts = [random_script(family, seed, wild=mode == "model" and seed % 4 == 3) for seed in seeds]
            wanted: list[dict | None] = [None] * len(scripts)
            if mode == "reference":
                run = subprocess.run([oracle], input="".join(json.dumps(s) + "\n" for s in scripts),
                                     capture_output=True, text=True, check=True)
                wanted = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
            for seed, script, want in zip(seeds, scripts, wanted, strict=True):
                if mode == "model":
                    found = difference(family, seed, seed % 4 == 3)
                elif "panic" in want or ("steps" in want and not want["drained"]):
                    left += 1      # the reference spins: there is nothing to be equal to
                    continue
                else:
                    found = compare(run_script(script), want)
                checked += 1
                if found:
                    bad += 1
                    print(f"{family} seed {seed}: {found}", flush=True)
        print(f"{family}: {checked} scripts compared, {left} left out, {bad} differ so far, "
              f"{time.monotonic() - began:.0f} s", flush=True)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
