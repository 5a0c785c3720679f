"""The router by itself: time of a decision against the number of workers, and memory against the chains that passed.

    python benches/bench_router.py

A decision is an arrival, its first token and its end, with a prompt of 16 blocks of which a worker may have some. The
call from Python is in every figure, so the table says how it grows, not what a decision costs inside a replay.
"""
from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np

from mocker.router import KvAware
from mocker.router_config import KvRouterConfig

BLOCK = 16
DECISIONS = 20_000
CHAINS = 10_000_000


def core(workers: int) -> Any:
    return KvAware(KvRouterConfig()).core(BLOCK, workers, max_num_batched_tokens=8192, tie_break="random",
                                                  seed=1, model_name=None, skip_own=True)


def decisions(workers: int) -> float:
    """Microseconds a decision, with as many requests in flight as workers."""
    router = core(workers)
    rng = np.random.default_rng(3)
    keys = rng.integers(1, 1 << 40, (512, 4)).astype(np.uint64)
    ends = np.array([4, 8, 12, 16], np.int32)
    for prompt in range(512):                    # who has which prompt
        worker = int(rng.integers(workers))
        for key in keys[prompt].tolist():
            router.stored(worker, key, 4)
    flying: list[int] = []
    best = float("inf")
    row = 0
    for _ in range(3):
        began = time.process_time()
        for _ in range(DECISIONS):
            router.arrival(row, keys[row % 512], ends, 256, 0.0)
            router.prefill_completed(row, 0.0)
            flying.append(row)
            row += 1
            if len(flying) > workers:
                router.completed(flying.pop(0), 0.0)
        best = min(best, time.process_time() - began)
    return best / DECISIONS * 1e6


def chains() -> None:
    """Store and remove chains, and print what the process needs."""
    router = core(8)
    for chain in range(CHAINS):                  # a segment of eight blocks; a thousand of them are resident
        router.stored(chain % 8, chain + 1, 8)
        if chain >= 1000:
            router.removed((chain - 1000) % 8, chain - 999, 0)
        if chain in (CHAINS // 100, CHAINS // 10, CHAINS - 1):
            print(f"{chain + 1:>12,} chains: {router.sizes}, peak memory "
                  f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.1f} MiB")


def main() -> None:
    first = None
    for workers in (4, 16, 64, 256, 1024, 4096):
        cost = decisions(workers)
        first = first or cost
        print(f"{workers:>5} workers: {cost:6.2f} us a decision, {cost / first:5.2f} x that with 4")
    chains()


if __name__ == "__main__":
    main()
