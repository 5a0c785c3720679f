"""Fuzzer of the hand-off commands: random scripts through both engines' cores and through the reference.

usage: python tests/fuzz_handoff.py ORACLE COUNT [FIRST_SEED] [ENGINE...]

ORACLE is a program that reads one script a line and prints what the reference did, one JSON object a line, in the
form of the recorded results (tests/golden/handoff.jsonl.gz). ENGINE is vllm, sglang or trtllm; all by default. For
each of them COUNT scripts are compared step by step, with the books of our core checked after every command and
pass. Not part of the automatic tests, which have no oracle.

A script commands a prefill, a decode or an aggregated core: hand-off sources and destinations beside plain requests,
prompts that share prefixes with one another and with outputs, pools of a few blocks, cancels at every stage, ids that
come again, alive or not, destinations that exceed the pool. Most scripts end with everything cancelled, and passes
until nothing is left. Left out are scripts at which the reference panics or makes 1,024 passes without progress; where
our core ends a request that the reference keeps for ever, they are compared up to there ("parted").
"""
from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from model.handoff import random_script  # noqa: E402
from model.script import differences  # noqa: E402
from runner import run_script  # noqa: E402

ENGINES = ("vllm", "sglang", "trtllm")
BATCH = 200


def reference(oracle: str, scripts: list[dict]) -> list[dict]:
    """What the reference did at each script."""
    run = subprocess.run([oracle], input="".join(json.dumps(s) + "\n" for s in scripts), capture_output=True,
                         text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def endless(result: dict) -> bool:
    """Whether the reference gave up or spun: then there is nothing to be equal to."""
    return "panic" in result or any(step["op"] == "dead_end" for step in result.get("steps", ()))


def compare(got: dict, want: dict, repeats: bool) -> tuple[str | None, bool]:
    """First differences of two script results, and whether they part for a known reason.

    Texts of refused arguments may differ. Our core ends a request that can never go on, where the reference spins:
    from there on the results have nothing in common. The collectors part at a refused submission: the oracle tells
    its own of the arrival all the same. With `repeats` (ids come again to a paged core) the metrics of the queue are
    not compared: the reference counts a request twice while the place of its cancelled namesake is left.
    """
    if "error" in want or "error" in got:
        return None if ("error" in want) == ("error" in got) else f"one side refuses: {got.get('error')!r}", False
    for i, (ours, theirs) in enumerate(zip(got["steps"], want["steps"], strict=False)):
        for entry in ours.get("output", ()) if ours["op"] == "pass" else ():
            if entry[1] is None and entry not in theirs.get("output", ()):
                if completes(want["steps"][i:], entry[0]):
                    return f".steps[{i}]: request {entry[0]} can go on in the reference", False
                got, want = {"steps": got["steps"][:i]}, {"steps": want["steps"][:i]}
                return listed(got, want, repeats), True
    if any(step["op"] == "submit" and "error" in step for step in want["steps"]):
        got, want = ({key: result[key] for key in ("steps", "drained")} for result in (got, want))
    return listed(got, want, repeats), False


def listed(got: dict, want: dict, repeats: bool) -> str | None:
    found = [d for d in differences(got, want) if not (repeats and "queued" in d)]
    return "; ".join(found[:4]) if found else None


def has_repeats(script: dict) -> bool:
    """Whether a request id comes twice."""
    ids = [argument["uuid"] for step in script["steps"] for argument in step.values() if isinstance(argument, dict)]
    return len(set(ids)) < len(ids)


def completes(steps: list[dict], uuid: int) -> bool:
    """Whether a request completes in the passes before the next command."""
    for step in steps:
        if step["op"] != "pass":
            return False
        if any(entry[0] == uuid and entry[2] for entry in step["output"]):
            return True
    return False


def main() -> None:
    oracle, count, rest = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    first = int(rest.pop(0)) if rest and rest[0].isdigit() else 0
    bad, began = 0, time.monotonic()
    for engine in rest or ENGINES:
        left = 0
        seen: Counter[str] = Counter()
        for start in range(first, first + count, BATCH):
            seeds = range(start, min(start + BATCH, first + count))
            scripts = [random_script(engine, seed) for seed in seeds]
            for seed, script, want in zip(seeds, scripts, reference(oracle, scripts), strict=True):
                if endless(want):
                    left += 1
                    continue
                try:
                    found, parted = compare(run_script(script), want, engine != "sglang" and has_repeats(script))
                    seen["parted"] += parted
                except Exception as error:     # broken books or a crash of ours: a finding like any other
                    found = f"{type(error).__name__}: {error}"
                tally(seen, want)
                if found:
                    bad += 1
                    print(f"{engine} seed {seed}: {found}", flush=True)
        print(f"{engine}: {count - left} scripts compared, {left} left out, {bad} differ so far, "
              f"{time.monotonic() - began:.0f} s; {dict(sorted(seen.items()))}", flush=True)
    raise SystemExit(1 if bad else 0)


def tally(seen: Counter[str], result: dict) -> None:
    """Count what the scripts reached."""
    if "error" in result:
        seen["refused arguments"] += 1
        return
    seen["drained"] += result["drained"]
    for step in result["steps"]:
        seen[step["op"]] += 1
        for key in ("error", "lifecycle"):
            if step.get(key):
                seen[f"{step['op']}: {key}"] += 1
    seen["preemptions"] += max((s["metrics"]["vllm_preemptions_total"] for s in result["steps"] if s["op"] == "pass"),
                               default=0)
    seen["removed"] += sum("removed" in event["event"]["data"] for s in result["steps"]
                           for event in s.get("kv_events", ()) if isinstance(event["event"]["data"], dict))


if __name__ == "__main__":
    main()
