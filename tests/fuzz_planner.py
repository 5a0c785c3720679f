"""Fuzzer of replays with a planner against the reference: random traces, clusters and scripts of scaling decisions.

usage: python tests/fuzz_planner.py ORACLE COUNT [FIRST_SEED [RECORD.jsonl.gz]]

ORACLE reads one JSON object a line (as for `fuzz_replays`) with `planner_script` (`first_ms`, `period_ms`, and
`targets`, a pair for each tick) and prints the report and what it told the planner. The variances in the metrics of
passes are sums in the order of a hash map of random ids there; they are compared within 1e-9. With a fourth argument
the reference's answers to short cases are recorded, for `test_planner`.
"""
from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_replays import random_replay  # noqa: E402
from record_replays import engines  # noqa: E402

from mocker import simulate  # noqa: E402


class Script:
    """A planner that decides by a list."""

    def __init__(self, script: dict[str, Any]) -> None:
        self.script = script
        self.log: list[dict[str, Any]] = []

    def initial_tick_ms(self) -> float:
        return self.script["first_ms"]

    def on_tick(self, metrics: dict[str, Any]) -> dict[str, Any]:
        targets = self.script["targets"]
        prefill, decode = targets[len(self.log)] if len(self.log) < len(targets) else (None, None)
        self.log.append(metrics)
        return {"target_prefill": prefill, "target_decode": decode,
                "next_tick_ms": metrics["now_ms"] + self.script["period_ms"]}


def random_script(rng: random.Random, lowest: int) -> dict[str, Any]:
    """First tick, period and targets; the last ones leave somebody at work."""
    targets = [[rng.choice([None, None, rng.randint(lowest, 5)]) for _ in range(2)]
               for _ in range(rng.randrange(40))]
    return {"first_ms": rng.choice([0.0, 3.0, 40.0, 1000.0]), "period_ms": rng.choice([1.0, 10.0, 64.5, 500.0, 4000.0]),
            "targets": [*targets, [2, 2]]}


def random_planned(rng: random.Random) -> tuple[list[dict], dict]:
    """Rows and a configuration that the reference runs to its end."""
    rows, config = random_replay(rng)
    for row in rows:
        row.pop("output_token_ids", None)
    config.pop("max_sim_time_ms", None)
    routed = config.get("router_mode") == "kv_router"
    queues = routed and (config.get("router_config") or {}).get("router_queue_threshold", 16.0) is not None
    both = "prefill_engine_args" in config
    config["planner_script"] = random_script(rng, 0 if both or queues else 1)
    startup = rng.choice([None, 0.0, 0.01, 0.2, 5.0])
    for name in ("engine_args", "prefill_engine_args", "decode_engine_args"):
        if name in config:
            config[name]["startup_time"] = startup if rng.random() < 0.8 else None
    return rows, config


def same(name: str, ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(key, ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(same(name, a, b) for a, b in zip(ours, theirs, strict=True))
    if name.startswith("var_"):
        return abs(ours - theirs) <= 1e-9 * max(abs(ours), abs(theirs))
    return ours == theirs


def run(path: str, config: dict, planner: Script, compat: str | None) -> dict[str, Any]:
    options = {key: value for key, value in config.items() if key != "planner_script"}
    return simulate(path, compat=compat, router_tie_break="lowest", planner=planner, **engines(options)).report


def compare(path: str, config: dict, want: dict) -> str | None:
    """What differs from the reference, or None."""
    planner = Script(config["planner_script"])
    report = run(path, config, planner, "reference")
    if len(planner.log) != len(want["log"]):
        return f"{len(planner.log)} ticks, not {len(want['log'])}"
    for tick, (a, b) in enumerate(zip(planner.log, want["log"], strict=True)):
        for key in b:
            if not same(key, a[key], b[key]):
                return f"tick {tick}, {key}: {a[key]}, not {b[key]}"
    for key, value in want["report"].items():
        ours = report[key]
        if not key.startswith("processed_") and "wall" not in key and ours != value and not (
                abs(ours - value) <= 1e-9 * max(abs(ours), abs(value))):
            return f"{key} {ours}, not {value}"
    return None


def main() -> int:
    oracle, count = sys.argv[1], int(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    recorded: list[str] = []
    seen: Counter[str] = Counter()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.jsonl")
        for seed in range(first, first + count):
            rows, config = random_planned(random.Random(f"planner/{seed}"))
            Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
            try:
                done = subprocess.run([oracle], input=json.dumps(config | {"trace_file": path}) + "\n", text=True,
                                      capture_output=True, timeout=5)
            except subprocess.TimeoutExpired:
                seen["the reference hangs"] += 1
                continue
            answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
            want = json.loads(answers[0]) if answers else {"error": "it crashed"}
            if "error" in want:
                seen[f"the reference: {want['error'][:60]}"] += 1
                run(path, config, Script(config["planner_script"]), None)
                continue
            problem = compare(path, config, want)
            seen["two pools" if "prefill_engine_args" in config else "one pool"] += 1
            seen["ticks"] += len(want["log"])
            if len(sys.argv) > 4 and 0 < len(want["log"]) < 60:
                recorded.append(json.dumps({"seed": seed, "rows": rows, "config": config, **want}))
            if problem:
                bad += 1
                print(f"seed {seed}: {problem[:300]}")
    if recorded:
        with gzip.GzipFile(sys.argv[4], "wb", mtime=0) as file:
            file.write(("\n".join(recorded) + "\n").encode())
    print(f"{bad} different; {dict(seen)}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
