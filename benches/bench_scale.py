"""Long replays: time a request and peak memory as the workload grows, beside the reference at 12,000 requests.

usage: python benches/bench_scale.py [--reference PYTHON] [--requests N] [--rounds N]

The conversation trace is repeated with fresh hash ids, one copy after the other. Each measurement is a whole call in a
process of its own on one core; the ratios are of neighbouring runs, their median over the rounds. PYTHON is an
interpreter with the reference's wheel.
"""
from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from cases import POOL, trace_file  # noqa: E402
from compare import side  # noqa: E402

CASES = {                          # our case, the reference's case at 12,000 requests
    "round robin": ({"num_workers": 4}, "conversation, 4 workers"),
    "KV router": ({"num_workers": 4, "router_mode": "kv_router"}, "conversation, 4 workers, KV router"),
    "synthetic": ({"num_workers": 1}, "synthetic, 5000 x 1000 in, 100 out, 1 worker"),
}
REFERENCE_REQUESTS = {"synthetic": 5000}


def repeated(trace, copies: int):
    """A trace `copies` times over, each copy with hash ids of its own, after the one before."""
    import numpy as np

    from mocker import Trace

    turn = np.arange(copies)[:, None]
    span = float(trace.arrival_ms.max()) + 1000.0
    ids = np.uint64(int(trace.hash_ids.max()) + 1)
    return Trace.from_columns(
        block_size=trace.block_size, arrival_ms=(trace.arrival_ms[None] + turn * span).ravel(),
        input_length=np.tile(trace.input_length, copies), output_length=np.tile(trace.output_length, copies),
        hash_offsets=np.concatenate([[0], np.cumsum(np.tile(np.diff(trace.hash_offsets), copies))]),
        hash_ids=(trace.hash_ids[None] + turn.astype(np.uint64) * ids).ravel())


def peak_mib() -> float:
    """Most memory that this process has had, MiB."""
    try:                                       # of Linux' two numbers the one that does not count what began it
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, requests: int, file: str, rows: str) -> dict:
    """One whole call in this process: time a request, peak memory and the trace's columns in MiB.

    `file` has the trace, or "" for the synthetic workload; `rows` is where requests are written, "stream" to read the
    trace on the way, "" for neither.
    """
    import mocker

    options, _ = CASES[name]
    options = options | {"extra_engine_args": mocker.MockEngineArgs(**POOL)}
    if rows:
        options |= {"exact_gaps": 1 << 18}
    if rows not in ("", "stream"):
        options |= {"stream_to": rows}
    began = time.perf_counter()
    workload = (mocker.SyntheticSpec(1000, 100, requests) if not file else mocker.TraceStream(file)
                if rows == "stream" else mocker.Trace.load(file))
    report = mocker.simulate(workload, **options).report
    seconds = time.perf_counter() - began
    assert report["completed_requests"] == report["num_requests"]
    return {"us": seconds / report["num_requests"] * 1e6, "peak_mib": peak_mib(), "requests": report["num_requests"]}


def ours(name: str, requests: int, folder: str, rows: str = "") -> dict:
    """The same in a process of its own, pinned to one core; the trace is in the binary form, made here."""
    import mocker
    from mocker.formats import columns

    path = Path(folder) / f"{requests}.mtrace"
    if name != "synthetic" and not path.exists():
        trace = mocker.Trace.load(mocker.sample_trace_path())
        columns.save(repeated(trace, max(round(requests / len(trace)), 1)), path)
    file = "" if name == "synthetic" else str(path)
    import os
    import subprocess

    pin = {"preexec_fn": lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})} if hasattr(
        os, "sched_setaffinity") else {}
    out = subprocess.run([sys.executable, __file__, "--measure", name, str(requests), file, rows], capture_output=True,
                         text=True, check=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}, **pin)
    return json.loads(out.stdout) | {"columns_mib": path.stat().st_size / 2**20 if file else 0.0}


def main() -> None:
    """Print a line for each case."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), *sys.argv[4:6])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", metavar="PYTHON", help="interpreter that has the reference's wheel")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("cases", nargs="*", help="cases to run (all by default)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_file(Path(folder))
        for name in options.cases or CASES:
            grown, reference, large = [], [], {}
            for _ in range(options.rounds):
                small = min((ours(name, 12_000, folder) for _ in range(3)), key=lambda one: one["us"])
                large = ours(name, options.requests, folder)
                grown.append(large["us"] / small["us"])
                if options.reference:
                    theirs = side(options.reference, "reference", CASES[name][1], trace, 1)["seconds"][0]
                    reference.append(theirs / REFERENCE_REQUESTS.get(name, 12_031) * 1e6 / large["us"])
            rows = ours(name, options.requests, folder, str(Path(folder) / "rows.jsonl"))
            ratio = f", reference at 12,000 / ours {statistics.median(reference):,.0f}x" if reference else ""
            print(f"{name}, {large['requests']:,} requests: {large['us']:.2f} us a request, by that of 12,000 "
                  f"{statistics.median(grown):.2f}{ratio}; peak {large['peak_mib']:,.0f} MiB, "
                  f"{large['columns_mib']:,.0f} MiB of them the trace's columns; rows written as they end "
                  f"{rows['peak_mib']:,.0f} MiB", flush=True)
            if name == "round robin":
                peaks = [ours(name, options.requests // part, folder, "stream") for part in (4, 2, 1)]
                print("  trace read on the way: " + ", ".join(
                    f"{one['requests']:,} requests {one['peak_mib']:,.0f} MiB" for one in peaks), flush=True)


if __name__ == "__main__":
    main()
