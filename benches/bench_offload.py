"""What KV offload costs: the conversation trace with 64 k host blocks a worker beside the same replay without tiers.

usage: python benches/bench_offload.py [--rounds N]

The two take turns in one process; times are of its CPU, ratios are those of the least of each. Whole calls read the
trace from its file, too, as those of README; the others have it. The last column is without fast paths on both sides.
"""
from __future__ import annotations

import argparse
import time
from pathlib import Path

from mocker import MockEngineArgs, Trace, sample_trace_path, simulate
from mocker.replay.fast import FastPaths

CASES = {"1 worker": {}, "4 workers": {"num_workers": 4},
         "4 workers, KV router": {"num_workers": 4, "router_mode": "kv_router"}}
HOST_BLOCKS = 65_536
PLAIN = FastPaths(clock=False, ahead=False, lanes=False, calendar=0)


def seconds(trace: Trace | Path, blocks: int | None, fast: bool | FastPaths, options: dict) -> float:
    args = MockEngineArgs(num_gpu_blocks=16_384, block_size=64, kv_bytes_per_token=131_072, num_g2_blocks=blocks)
    began = time.process_time()
    simulate(trace, extra_engine_args=args, fast_forward=fast, **options)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    file = sample_trace_path()
    trace = Trace.load(file)
    print("| case | without | with | ratio, whole calls | ratio | ratio, no fast paths |\n|---|---|---|---|---|---|")
    for name, options in CASES.items():
        ratios, shown = [], []
        for source, fast, times in ((file, True, rounds), (trace, True, rounds), (trace, PLAIN, 3)):
            pairs = [[seconds(source, blocks, fast, options) for blocks in (None, HOST_BLOCKS)] for _ in range(times)]
            without, with_ = (min(column) for column in zip(*pairs, strict=True))
            ratios.append(f"{with_ / without:.2f}")
            shown.append(f"{without * 1e3:.0f} ms | {with_ * 1e3:.0f} ms")
        print(f"| {name} | {shown[0]} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
