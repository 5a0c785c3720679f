"""Regressions as ratios, each of two things that are measured in turns in the same run: in under a minute, for CI.

usage: python benches/check_ratios.py [--check] [NAME ...]

Times are the least of several rounds, so that other work on the machine hardly shows. With --check the exit code is 1
if a ratio is worse than its limit, which is generous: about twice what it is.
"""
from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bench_scale import repeated  # noqa: E402
from cases import POOL  # noqa: E402

import mocker  # noqa: E402
from mocker.formats import columns  # noqa: E402
from mocker.replay import api  # noqa: E402
from mocker.replay.fast import FastPaths  # noqa: E402

TRACE = mocker.Trace.load(mocker.sample_trace_path())
OPTIONS = {"extra_engine_args": mocker.MockEngineArgs(**POOL), "num_workers": 4}


@dataclass(frozen=True)
class Ratio:
    """What is measured, by what it is divided, and the largest quotient that is no regression."""

    what: str
    measure: Callable[[], float]
    limit: float


def quotient(one: Callable[[], object], other: Callable[[], object], rounds: int) -> float:
    """Least time of one thing by that of another, in turns."""
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for function, found in zip((one, other), times, strict=True):
            began = time.perf_counter()
            kept = function()
            found.append(time.perf_counter() - began)
            del kept
    return min(times[0]) / min(times[1])


def replay(workload: object = TRACE, **more: object) -> None:
    """One replay, and its report."""
    _ = mocker.simulate(workload, **(OPTIONS | more)).report


def fast_forward() -> float:
    """The fast path by the plain one."""
    return quotient(replay, lambda: replay(fast_forward=False), 5)


def calendar() -> float:
    """One saturated worker with a calendar by one without."""
    return quotient(lambda: replay(num_workers=1),
                    lambda: replay(num_workers=1, fast_forward=FastPaths(calendar=0)), 5)


def kv_router() -> float:
    """Workers that run ahead of each other by those that do not, with the KV router."""
    return quotient(lambda: replay(router_mode="kv_router"),
                    lambda: replay(router_mode="kv_router", fast_forward=False), 3)


def short(workers: int) -> float:
    """What 1,000 different configurations of 1,000 requests pay besides the engine, by the engine."""
    trace, draw, engine = TRACE.head(1000), random.Random(1), [0.0]
    configs = [{"num_gpu_blocks": draw.randrange(8192, 65536), "max_num_seqs": draw.randrange(64, 512),
                "max_num_batched_tokens": draw.randrange(1024, 16384), "speedup_ratio": draw.uniform(1, 2)}
               for _ in range(1000)]
    lanes = api.run_lanes

    def timed(*arguments: object) -> None:
        began = time.perf_counter()
        lanes(*arguments)
        engine[0] = time.perf_counter() - began

    best = [[float("inf")] * 2 for _ in configs]
    api.run_lanes = timed
    try:
        for _ in range(4):
            for config, least in zip(configs, best, strict=True):
                began = time.perf_counter()
                args = mocker.MockEngineArgs(**config)
                _ = mocker.simulate(trace, extra_engine_args=args, num_workers=workers).report
                whole = time.perf_counter() - began
                least[0], least[1] = min(least[0], whole - engine[0]), min(least[1], engine[0])
    finally:
        api.run_lanes = lanes
    return sum(least[0] for least in best) / sum(least[1] for least in best)


def growth() -> float:
    """Time a request of 120,000 requests by that of 12,000."""
    long = repeated(TRACE, 10)
    return quotient(lambda: replay(long), replay, 3) / 10


def streamed() -> float:
    """A trace that is read on the way by the same one read before, from the binary form."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.mtrace"
        columns.save(repeated(TRACE, 4), path)
        return quotient(lambda: replay(mocker.TraceStream(path)), lambda: replay(str(path)), 5)


PEAK = """
import sys, mocker
from bench_scale import peak_mib
args = mocker.MockEngineArgs(num_gpu_blocks=16384, block_size=64)
mocker.simulate(mocker.TraceStream(sys.argv[1]), extra_engine_args=args, num_workers=4, exact_gaps=1000)
print(peak_mib())
"""


def memory() -> float:
    """Peak memory of 385,000 streamed requests by that of half as many."""
    with tempfile.TemporaryDirectory() as folder:
        peaks = []
        for copies in (32, 16):
            path = Path(folder) / f"{copies}.mtrace"
            columns.save(repeated(TRACE, copies), path)
            out = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True,
                                 cwd=Path(__file__).parent, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
            peaks.append(float(out.stdout))
        return peaks[0] / peaks[1]


TIERS = mocker.MockEngineArgs(num_gpu_blocks=2048, block_size=64, num_g2_blocks=8192, num_g3_blocks=32768,
                              kv_bytes_per_token=131072)


def fork(**options: object) -> float:
    """A fork by a copy of as many bytes."""
    sim = mocker.open_simulation(TRACE, num_workers=4, **options)
    sim.run_completions(4000)
    data = sim.snapshot()._data
    return quotient(sim.fork, lambda: bytearray(data), 15)


RATIOS = {
    "fast": Ratio("fast path / plain path", fast_forward, 0.6),
    "calendar": Ratio("a saturated worker with a calendar / without", calendar, 0.85),
    "router": Ratio("fast path / plain path, KV router", kv_router, 0.8),
    "short": Ratio("1,000 requests: set-up and report / engine", lambda: short(4), 0.15),
    "short_one": Ratio("the same with one worker", lambda: short(1), 0.18),
    "growth": Ratio("time a request, 120,000 / 12,000", growth, 1.6),
    "streamed": Ratio("trace read on the way / before", streamed, 2.0),
    "memory": Ratio("streamed, peak memory, 385,000 / 192,000 requests", memory, 1.3),
    "fork": Ratio("fork / copy of its bytes, KV router", lambda: fork(router_mode="kv_router"), 5.0),
    "fork_tiers": Ratio("fork / copy of its bytes, KV tiers", lambda: fork(extra_engine_args=TIERS), 5.0),
}


def main() -> int:
    """Print a line for each ratio; the number of regressions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ratio is worse than its limit")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RATIOS)} (default: all)")
    options = parser.parse_args()
    worse = 0
    for name in options.names or RATIOS:
        ratio = RATIOS[name]
        found = ratio.measure()
        if found > ratio.limit:                # once more: the machine may have been busy
            found = min(found, ratio.measure())
        worse += found > ratio.limit
        print(f"{ratio.what:<55} {found:6.3f}  (limit {ratio.limit})"
              f"{'  REGRESSION' if found > ratio.limit else ''}", flush=True)
    return min(worse, 1) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
