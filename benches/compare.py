"""Pair this package with the reference, or with its own plain path, case by case; prints the table of README.

usage: python benches/compare.py [--reference PYTHON] [--rounds N] [CASE …]

PYTHON is an interpreter with the reference's wheel (``pip install ai-dynamo-runtime==1.3.0.post1`` in a virtual
environment of its own). The sides take turns, each in processes of its own, on one core; the ratio is the median
over the rounds of reference time / our time of neighbouring runs. Absolute times are printed to show what was
compared, they mean nothing elsewhere. Both sides must end at the same simulated time (nearly, where ties are broken at
random).
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, tolerance, trace_file  # noqa: E402


def side(python: str, which: str, case: str, trace: str, rounds: int) -> dict:
    """Run one side in a process of its own."""
    env = os.environ | {"DYN_LOG": "error", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if hasattr(os, "sched_setaffinity"):
        pin = {"preexec_fn": lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})}
    else:
        pin = {}
    out = subprocess.run([python, str(Path(__file__).parent / "cases.py"), which, case, trace, str(rounds)],
                         capture_output=True, text=True, env=env, check=True, **pin)
    return json.loads(out.stdout.strip().splitlines()[-1])


def compare(case: str, reference: str | None, rounds: int, trace: str) -> str:
    """One row of the table."""
    ratios, ours, theirs, memory = [], [], [], []
    for _ in range(rounds):
        other = side(reference or sys.executable, "reference" if reference else "plain", case, trace, 1)
        mine = side(sys.executable, "ours", case, trace, 5)
        if abs(mine["duration_ms"] - other["duration_ms"]) > tolerance(CASES[case]) * other["duration_ms"]:
            raise SystemExit(f"{case}: simulated {mine['duration_ms']} ms here, {other['duration_ms']} ms there")
        ours.append(statistics.median(mine["seconds"]))
        theirs.append(other["seconds"][0])
        ratios.append(theirs[-1] / ours[-1])
        memory.append((mine["peak_kib"] / 1024, other["peak_kib"] / 1024))
    return (f"| {case} | {statistics.median(theirs) * 1e3:,.0f} ms | {statistics.median(ours) * 1e3:,.1f} ms | "
            f"**{statistics.median(ratios):,.0f}×** | {min(ratios):,.0f}–{max(ratios):,.0f} | "
            f"{statistics.median(m[1] for m in memory):,.0f} / {statistics.median(m[0] for m in memory):,.0f} MiB |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", metavar="PYTHON", help="interpreter that has the reference's wheel")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("cases", nargs="*", help="cases to run (all by default)")
    options = parser.parse_args()
    name = "reference" if options.reference else "plain path"
    print(f"| case | {name} | mocker | ratio (median) | ratios | peak memory, {name} / mocker |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_file(Path(folder))
        for case in options.cases or CASES:
            print(compare(case, options.reference, options.rounds, trace), flush=True)


if __name__ == "__main__":
    main()
