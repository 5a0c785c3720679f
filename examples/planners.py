"""Two small planners, and what they save: the number of workers follows the load of the shipped trace.

    python examples/planners.py [REQUESTS]

`QueuePlanner` looks at the requests that wait for a worker, `SlaPlanner` at the time to first token. Both are asked
every few seconds, and a new worker takes a while to start, so the target is reached late and given up slowly.
"""
from __future__ import annotations

import sys
from typing import Any

import mocker


class QueuePlanner:
    """As many workers as keep the queues short.

    Parameters
    ----------
    per_worker : float
        Waiting requests per worker that call for another one.
    least, most : int
        Workers.
    every_ms : float
        Time between two looks.
    """

    fpm_format = "columns"              # a structured array for the passes, which is cheaper than a dict each

    def __init__(self, per_worker: float = 1.0, least: int = 1, most: int = 16, every_ms: float = 5000.0) -> None:
        self.per_worker, self.least, self.most, self.every_ms = per_worker, least, most, every_ms
        self.calm = 0

    def initial_tick_ms(self) -> float:
        return self.every_ms

    def on_tick(self, metrics: dict[str, Any]) -> dict[str, Any]:
        passes, workers = metrics["decode_fpm_snapshots"], metrics["active_decode_count"]
        newest = {row["worker_id"]: row for row in passes}.values()     # the last pass of each worker that had any
        waiting = sum(int(row["num_queued_prefill"] + row["num_queued_decode"]) for row in newest)
        self.calm = self.calm + 1 if waiting == 0 else 0
        target = workers
        if waiting > self.per_worker * workers:
            target = workers + 1 + int(waiting // (4 * max(workers, 1)))
        elif self.calm >= 6:                                            # calm for a while: try with one less
            target, self.calm = workers - 1, 0
        target = min(max(target, self.least), self.most)
        return {"target_prefill": None, "target_decode": target, "next_tick_ms": metrics["now_ms"] + self.every_ms}


class SlaPlanner:
    """As many workers as keep the mean time to first token of each window below a bound, with some room.

    Parameters
    ----------
    ttft_ms : float
        The bound.
    least, most, every_ms
        As of `QueuePlanner`.
    """

    fpm_format = "none"

    def __init__(self, ttft_ms: float = 500.0, least: int = 1, most: int = 16, every_ms: float = 10000.0) -> None:
        self.ttft_ms, self.least, self.most, self.every_ms = ttft_ms, least, most, every_ms

    def initial_tick_ms(self) -> float:
        return self.every_ms

    def on_tick(self, metrics: dict[str, Any]) -> dict[str, Any]:
        traffic, workers = metrics["traffic"], metrics["active_decode_count"]
        target = workers
        if traffic["num_req"] == 0 or traffic["avg_ttft_ms"] > self.ttft_ms:
            target = workers + 1
        elif traffic["avg_ttft_ms"] < 0.5 * self.ttft_ms:
            target = workers - 1
        target = min(max(target, self.least), self.most)
        return {"target_prefill": None, "target_decode": target, "next_tick_ms": metrics["now_ms"] + self.every_ms}


def main(requests: int) -> None:
    trace = mocker.Trace.load(mocker.sample_trace_path()).head(requests)
    args = mocker.MockEngineArgs(num_gpu_blocks=8192, block_size=64, startup_time=20.0)
    runs: list[tuple[str, int, Any]] = [(f"{n} workers", n, None) for n in (2, 4, 8)]
    runs += [("queue depth", 2, QueuePlanner()), ("time to first token", 2, SlaPlanner())]
    print(f"{'':<22}{'mean TTFT':>12}{'p99 TTFT':>12}{'good':>8}{'GPU hours':>12}{'changes':>9}")
    for name, workers, planner in runs:
        result = mocker.simulate(trace, extra_engine_args=args, num_workers=workers, planner=planner, sla_ttft_ms=1000)
        r = result.report
        good = r["goodput_completed_requests"] / r["num_requests"]
        print(f"{name:<22}{r['mean_ttft_ms']:>9.0f} ms{r['p99_ttft_ms']:>9.0f} ms{good:>8.1%}{r['gpu_hours']:>12.2f}"
              f"{len(result.scaling):>9}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12031)
