"""KV offload in whole replays: what must hold in every cluster, however it is put together.

`python tests/fuzz_offload_replays.py [first] [count]` simulates that many small random clusters: one to three workers
or two pools, any router, open or closed loop, disk and remote store, latencies, cancellations (also of requests that
are parked just then), workers that come and go.
Of each: all requests end, nobody is parked or waits any more; then everything below comes to rest, and nothing is held,
kept, promised or pinned, no slot has two owners, and every byte moved was that of a block that was asked for. Some are
run twice: equal calls give equal results.
"""
from __future__ import annotations

import collections
import random
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
from fuzz import random_trace

from mocker import MockEngineArgs, Trace, open_simulation
from mocker.replay.live import RunningSimulation
from mocker.simulation import Simulation

REST = 400                         # ticks after which nothing may move any more
ENDED = {"completed", "rejected", "capacity", "canceled", "failed", "over_budget"}


class Script:
    """A planner that wants so many workers at its ticks."""

    def __init__(self, rng: random.Random, pools: int) -> None:
        self.first, self.period = rng.choice([0.0, 5.0, 60.0]), rng.choice([3.0, 40.0, 300.0])
        self.targets = [[rng.choice([None, 1, 2, 3]) for _ in range(pools)] for _ in range(rng.randrange(1, 12))]
        self.targets.append([2] * pools)
        self.at = 0

    def initial_tick_ms(self) -> float:
        return self.first

    def on_tick(self, metrics: dict[str, Any]) -> dict[str, Any]:
        *prefill, decode = self.targets[min(self.at, len(self.targets) - 1)]
        self.at += 1
        return {"target_prefill": prefill[0] if prefill else None, "target_decode": decode,
                "next_tick_ms": metrics["now_ms"] + self.period}


def tiers(rng: random.Random) -> dict[str, Any]:
    """Settings of small tiers and slow links."""
    def gbps() -> float:
        return rng.choice([0.0, 0.02, 0.1, 0.5, 4.0, 14.0])

    out = {"kv_bytes_per_token": rng.choice([1000, 25_000, 250_000]), "num_g2_blocks": rng.choice([1, 2, 5, 12, 400]),
           "bandwidth_g1_to_g2_gbps": gbps(), "bandwidth_g2_to_g1_gbps": gbps()}
    if rng.random() < 0.5:
        out |= {"num_g3_blocks": rng.choice([1, 3, 30]), "bandwidth_g2_to_g3_gbps": gbps(),
                "bandwidth_g3_to_g2_gbps": gbps()}
    if rng.random() < 0.35:
        out |= {"enable_g4_storage": True, "bandwidth_g2_to_g4_gbps": gbps(), "bandwidth_g4_to_g2_gbps": gbps()}
    if rng.random() < 0.4:
        out["offload_batch_size"] = rng.choice([1, 2, 3])
    if rng.random() < 0.3:
        for link in ("g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2"):
            out[f"latency_{link}_ms"] = rng.choice([0.0, 0.0, 0.05, 1.0, 7.5, 40.0])
    return out


def random_cluster(seed: int) -> tuple[Any, dict[str, Any], int | None, bool]:
    """A trace, the arguments of `open_simulation` but the planner, the seed of that (None: no planner), and whether
    who is parked gives up."""
    rng = random.Random(f"offload cluster/{seed}")
    trace, settings, workers = random_trace(rng)
    settings = {k: v for k, v in settings.items() if k not in ("worker_type", "enable_prefix_caching")}
    if rng.random() < 0.6:                     # pools so small that they evict
        settings["num_gpu_blocks"] = max(settings["num_gpu_blocks"] - rng.choice([0, 3, 9, 90]), 2)
    below = tiers(rng)
    beyond = random.Random(f"offload beyond/{seed}")
    if beyond.random() < 0.4:
        below["offload_write_mode"] = "write_through"
    if beyond.random() < 0.2:
        below |= {"offload_min_seen": beyond.choice([1, 2]),
                  "offload_eviction_policy": beyond.choice(["lru", "lfu", "s3fifo"])}
    out: dict[str, Any] = {"router_mode": rng.choice(["round_robin", "kv_router"])}
    if rng.random() < 0.35:
        settings |= {"engine_type": "vllm", "kv_transfer_bandwidth": rng.choice([1.0, 64.0])}
        settings.pop("aic_nextn", None)
        pools = []
        for role in ("prefill", "decode"):
            own = dict(below)
            if rng.random() < 0.3:
                own = {} if rng.random() < 0.3 else own | {
                    "num_g2_blocks": rng.choice([3, 50]), "bandwidth_g1_to_g2_gbps": rng.choice([0.0, 0.3])}
            pools.append(MockEngineArgs(**settings, **own, worker_type=role))
        out |= {"prefill_engine_args": pools[0], "decode_engine_args": pools[1],
                "num_prefill_workers": rng.choice([1, 2]), "num_decode_workers": rng.choice([1, 2])}
        tiered = bool(pools[0].num_g2_blocks)
    else:
        if workers == 1:
            out["router_mode"] = "round_robin"
        out |= {"extra_engine_args": MockEngineArgs(**settings, **below), "num_workers": workers}
        tiered = True
    if rng.random() < 0.2:
        out["replay_concurrency"] = rng.choice([1, 3, 8])
    if out["router_mode"] == "kv_router":
        out |= {"router_tie_break": rng.choice(["random", "lowest"]),
                "router_lower_tiers": tiered and rng.random() < 0.5}
    if rng.random() < 0.4:
        after = np.full(len(trace), np.nan)
        some = rng.sample(range(len(trace)), rng.randrange(1, len(trace) + 1))
        after[some] = [rng.choice([0.0, 1.0, 5.0, 30.0, 60.0, 300.0]) for _ in some]
        trace = replace(trace, cancel_after_ms=after)
    planned = rng.getrandbits(32) if rng.random() < 0.2 else None
    return trace, out, planned, "replay_concurrency" not in out and rng.random() < 0.3


def run(trace: Trace, arguments: dict[str, Any], planned: int | None) -> RunningSimulation:
    planner = None
    if planned is not None:
        planner = Script(random.Random(planned), 1 + ("prefill_engine_args" in arguments))
    return open_simulation(trace, planner=planner, **arguments).run()


def simulated(seed: int) -> tuple[Any, Simulation]:
    """The cluster after its replay, and the result."""
    trace, arguments, planned, giving_up = random_cluster(seed)
    done = run(trace, arguments, planned)
    columns = done.result().per_request
    if giving_up and np.any(columns.get("parked_ms", np.zeros(1)) > 0):
        parked, rng = columns["parked_ms"], random.Random(seed)
        some = rng.choice(np.flatnonzero(parked > 0).tolist())
        after = np.full(len(trace), np.nan) if trace.cancel_after_ms is None else trace.cancel_after_ms.copy()
        # Up to that moment everything is as before: the request waits for its blocks.
        waited = columns["first_admit_ms"][some] - columns["arrival_time_ms"][some]
        after[some] = max(waited - parked[some] * rng.choice([0.1, 0.5, 0.9]), 0.0) if waited > 0 else 0.0
        done = run(replace(trace, cancel_after_ms=after), arguments, planned)
    return done._cluster, done.result()


def broken(seed: int, seen: collections.Counter[str]) -> str | None:
    """What does not hold; None if all is well."""
    cluster, result = simulated(seed)
    report, columns, world = result.report, result.per_request, cluster.offload
    seen["clusters"] += 1
    if world is None:                          # neither of two pools has tiers
        return None
    if seed % 10 == 0:
        again = simulated(seed)[1]
        for name, column in columns.items():
            if not np.array_equal(column, again.per_request[name], equal_nan=column.dtype.kind == "f"):
                return f"two equal calls differ in {name}"
        if again.report["offload"] != report["offload"]:
            return "two equal calls differ in their tiers"
    engines = [tiers.engine for tiers in world.attached]
    if report.get("stalled"):
        seen["stalled"] += 1
        if any(tiers.parked or tiers.deadline is not None for tiers in world.attached):
            return f"stalled while something is under way: {report['stalled'][:2]}"
        return None if preempting(report["stalled"], seed) else f"stalled: {report['stalled'][:2]}"
    if not set(columns["terminal_status"].tolist()) <= ENDED:
        return f"not all have ended: {collections.Counter(columns['terminal_status'].tolist())}"
    if any(tiers.parked for tiers in world.attached):
        return "somebody is parked"
    now = cluster.last_timestamp() + 1.0
    for _ in range(REST):
        if all(tiers.deadline is None and tiers.books() == (0, 0, 0, 0, 0) for tiers in world.attached):
            break
        now += 1e6
        for engine in engines:
            engine.run_pass(now)
    total: collections.Counter[str] = collections.Counter()
    for number, tiers in enumerate(world.attached):
        tiers.engine.check()
        if tiers.deadline is not None or tiers.books() != (0, 0, 0, 0, 0):
            return f"worker {number}: left {tiers.books()}, something moves: {tiers.deadline is not None}"
        total.update({key: value for key, value in tiers.counters().items() if isinstance(value, int)})
        problem = bytes_of(tiers, result)
        if problem:
            return f"worker {number}: {problem}"
    shared = world.counters()
    for name in shared:
        if sum(tiers.counters()[f"from_{name}_blocks"] for tiers in world.attached) and not shared[name]["up"]["bytes"]:
            return f"blocks came from {name}, but no byte"
    for name in ("promotions", "staged_promotions", "blocked_allocations", "retried_allocations",
                 "cancelled_promotions", "early_blocks"):
        seen[name] += total[name]
        seen[f"clusters with {name}"] += total[name] > 0
    for name in ("router_mode", "disagg", "planner", "closed"):
        seen[name] += kind_of(seed)[name]
    if np.nansum(columns["parked_ms"]) < 0 or (columns["host_tokens"] < 0).any():
        return "negative times or tokens"
    return None


def preempting(stalled: list[dict[str, Any]], seed: int) -> bool:
    """Requests that preempt one another for ever, the oldest first, are the engine's own; tiers or not."""
    arguments = random_cluster(seed)[1]
    fifo = any(args.preemption_mode == "fifo" for args in arguments.values() if isinstance(args, MockEngineArgs))
    return fifo and any(row["preemptions"] > 1000 for row in stalled)


def bytes_of(tiers: Any, result: Simulation) -> str | None:
    """A worker's bytes up and down against its blocks."""
    counts = tiers.counters()
    size = counts["block_bytes"]
    for way in ("up", "down"):
        if counts[way]["bytes"] % size:
            return f"bytes of half a block went {way}: {counts}"
    came = counts["from_g2_blocks"] + counts["from_g3_blocks"] + counts["from_g4_blocks"]
    if counts["up"]["bytes"] < came * size or (
            not counts["cancelled_promotions"] and counts["up"]["bytes"] != came * size):
        return f"{came} blocks came up, but {counts['up']['bytes']} bytes of {size}"
    if counts["peak_blocks"] > counts["blocks"]:
        return f"{counts['peak_blocks']} of {counts['blocks']} blocks in the host"
    return None


def kind_of(seed: int) -> dict[str, bool]:
    _, arguments, planned, _ = random_cluster(seed)
    return {"router_mode": arguments["router_mode"] == "kv_router", "disagg": "prefill_engine_args" in arguments,
            "planner": planned is not None, "closed": "replay_concurrency" in arguments}


def main() -> int:
    numbers = [int(text) for text in sys.argv[1:]]
    first, count = (numbers + [0, 1000][len(numbers):])[:2]
    seen: collections.Counter[str] = collections.Counter()
    bad, began = 0, time.monotonic()
    for seed in range(first, first + count):
        try:
            found = broken(seed, seen)
        except Exception as error:
            found = repr(error)
        if found:
            bad += 1
            print(seed, found, flush=True)
            if bad > 20:
                break
    print(f"{count} clusters, {bad} broken, {time.monotonic() - began:.0f} s", dict(seen))
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
