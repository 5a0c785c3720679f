"""KV offload, compiled against the plain Python model: several requests and workers, slow links, cancellations.

`python tests/fuzz_offload.py [first] [count]` runs that many random scripts through both and says what happened in
them; `python tests/fuzz_offload.py properties [first] [count]` runs the compiled core alone and checks what must hold
at the end of every cluster: nobody is left, nothing is held, promised or pinned, and every byte moved was a block's.
"""
from __future__ import annotations

import collections
import random
import sys
import uuid as uuid_module

from model.offload_core import OffloadCore
from model.script import differences

from mocker import DirectRequest, MockEngineArgs, VllmCore
from mocker.offload import offload_world

PASSES = 2000
IDLE = 300                         # passes of one worker in a row that bring nobody further, and no time


def random_script(seed: int) -> dict:
    """Workers with tiny pools, requests that share prefixes, and cancellations by (pass, request)."""
    rng = random.Random(f"offload/{seed}")
    block = rng.choice([2, 4, 4, 8])
    pool = rng.choice([5, 6, 7, 8, 10, 14, 20])

    def gbps() -> float:
        return rng.choice([0.02, 0.1, 0.25, 1.0, 4.0, 20.0] + [0.0] * (rng.random() < 0.2))

    args = {"block_size": block, "num_gpu_blocks": pool, "kv_bytes_per_token": rng.choice([25_000, 250_000, 999_983]),
            "max_num_batched_tokens": rng.choice([block, 2 * block + 1, 16, 64]),
            "max_num_seqs": rng.choice([1, 2, 3, 4, 8]), "enable_chunked_prefill": rng.random() < 0.9,
            "preemption_mode": rng.choice(["lifo", "fifo"]), "speedup_ratio": rng.choice([1.0, 1.0, 10.0, 100.0]),
            "num_g2_blocks": rng.choice([1, 2, 4, 6, 9, 16, 64]),
            "bandwidth_g1_to_g2_gbps": gbps(), "bandwidth_g2_to_g1_gbps": gbps()}
    if rng.random() < 0.5:
        args["offload_batch_size"] = rng.choice([1, 1, 2, 3])
    if rng.random() < 0.5:
        args |= {"num_g3_blocks": rng.choice([1, 3, 8, 64]), "bandwidth_g2_to_g3_gbps": gbps(),
                 "bandwidth_g3_to_g2_gbps": gbps()}
    if rng.random() < 0.4:
        args |= {"enable_g4_storage": True, "bandwidth_g2_to_g4_gbps": gbps(), "bandwidth_g4_to_g2_gbps": gbps()}
    if rng.random() < 0.15:
        args["engine_type"] = "trtllm"
    elif rng.random() < 0.2:
        args |= {"aic_nextn": rng.randrange(1, 4), "aic_nextn_accept_rates": "0.5,0.9"}
    slow = random.Random(f"offload latency/{seed}")
    if slow.random() < 0.3:
        for link in ("g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2"):
            args[f"latency_{link}_ms"] = slow.choice([0.0, 0.0, 0.05, 1.0, 7.5, 40.0])
    beyond = random.Random(f"offload beyond/{seed}")
    if beyond.random() < 0.4:
        args["offload_write_mode"] = "write_through"
    if beyond.random() < 0.2:
        args["offload_min_seen"] = beyond.choice([2, 3])
    if beyond.random() < 0.25:
        args["offload_eviction_policy"] = beyond.choice(["lfu", "s3fifo"])
    large = beyond.random() < 0.08                 # bursts of more batches than the reference's queues hold
    if large:
        pool = args["num_gpu_blocks"] = beyond.choice([20, 30, 40])
        args |= {"offload_batch_size": beyond.choice([1, 1, 2]), "max_num_batched_tokens": 400, "num_g2_blocks": 64}
    roots = [[rng.randrange(1, 50) for _ in range(block * rng.randrange(1, 5))] for _ in range(rng.randrange(2, 6))]
    workers = rng.choice([1, 1, 1, 2, 3])
    at, requests = 0.0, []
    for number in range(rng.randrange(4, 30)):
        tokens = list(rng.choice(roots))
        if rng.random() < 0.3:
            tokens = tokens[:rng.randrange(1, len(tokens) + 1)]
        tokens += [rng.randrange(1, 50) for _ in range(rng.choice([0, 0, 1, block, 2 * block]))]
        if large:
            tokens += [beyond.randrange(1, 50) for _ in range(block * beyond.choice([0, 9, 14, 25]))]
        budget = args["max_num_batched_tokens"] if not args["enable_chunked_prefill"] else pool * block
        tokens = tokens[:min(pool * block - 1, budget)]
        wanted = min(rng.choice([1, 2, 3, 5, 9, 14]), pool * block - len(tokens))
        requests.append({"uuid": number + 1, "tokens": tokens, "max_output_tokens": wanted,
                         "output_token_ids": [rng.randrange(50, 70) for _ in range(wanted)],
                         "arrival_timestamp_ms": at, "worker": rng.randrange(workers)})
        if rng.random() < 0.7:
            at += rng.choice([0.0, 0.3, 5.0, 30.0, 200.0])
    drops = {}
    if rng.random() < 0.5:
        for _ in range(rng.randrange(1, 25)):
            drops[rng.randrange(1, 120)] = rng.randrange(1, len(requests) + 1)
    return {"args": args, "workers": workers, "requests": requests, "drops": drops,
            "reference": rng.random() < 0.2 and "offload_write_mode" not in args}


class Model:
    def __init__(self, script: dict) -> None:
        shared: dict = {}
        self.cores = [OffloadCore(script["args"], worker, shared=shared, reference=script["reference"])
                      for worker in range(script["workers"])]

    def receive(self, worker: int, request: dict) -> None:
        self.cores[worker].receive(request)

    def alive(self, worker: int, uuid: int) -> bool:
        return uuid in self.cores[worker].requests

    def drop(self, worker: int, uuid: int) -> None:
        self.cores[worker].drop(uuid)

    def empty(self, worker: int) -> bool:
        return self.cores[worker].is_empty()

    def execute(self, worker: int, now: float) -> dict:
        step = self.cores[worker].execute_pass(now)
        self.cores[worker].tiers.check()
        return step

    def tick(self, worker: int, now: float) -> None:
        self.cores[worker].tick(now)

    def parked(self, worker: int) -> list[int]:
        return [parked.request.uuid for parked in self.cores[worker].parked]

    def below(self, worker: int) -> bool:
        """Something is parked or moves."""
        core = self.cores[worker]
        return bool(core.parked) or core.tiers.deadline() is not None

    def counts(self) -> collections.Counter:
        total: collections.Counter = collections.Counter()
        for core in self.cores:
            total.update(core.tiers.counts)
            total["preemptions"] += core.preemptions_total
        return total

    def left(self) -> list[str]:
        """What is held though nobody is there any more."""
        out = []
        for core in self.cores:
            if core.kv.active or core.kv.pins or core.parked or list(core.tiers.leases):
                out.append(f"worker {core.tiers.worker_id}: {core.kv.active} active, {list(core.tiers.leases)}")
            if not core.tiers.reference and (core.tiers.g2.pins or core.tiers.g2.reserved):
                out.append(f"worker {core.tiers.worker_id}: host pins {core.tiers.g2.pins}, {core.tiers.g2.reserved}")
        return out


class Compiled:
    def __init__(self, script: dict, check: bool = True) -> None:
        self.check = check
        args = MockEngineArgs(**script["args"])
        world = offload_world(args)
        compat = "reference" if script["reference"] else None
        self.cores = [VllmCore(args, worker_id=worker, capture_kv_events=True, compat=compat, offload=world)
                      for worker in range(script["workers"])]

    def receive(self, worker: int, request: dict) -> None:
        self.cores[worker].receive(DirectRequest(
            request["tokens"], request["max_output_tokens"], output_token_ids=request["output_token_ids"],
            uuid=uuid_module.UUID(int=request["uuid"])))

    def alive(self, worker: int, uuid: int) -> bool:
        return uuid_module.UUID(int=uuid) in self.cores[worker].state

    def drop(self, worker: int, uuid: int) -> None:
        assert self.cores[worker].drop_request(uuid_module.UUID(int=uuid))
        if self.check:
            self.cores[worker].check_invariants()

    def empty(self, worker: int) -> bool:
        return self.cores[worker].is_empty()

    def execute(self, worker: int, now: float) -> dict:
        step = self.cores[worker].execute_pass(now).to_dict()
        if self.check:
            self.cores[worker].check_invariants()
        return step

    def parked(self, worker: int) -> list[int]:
        core = self.cores[worker]
        return [core._ids[handle].int for handle in core._core.tiers.parked]

    def below(self, worker: int) -> bool:
        tiers = self.cores[worker]._core.tiers
        return bool(tiers.parked) or tiers.deadline is not None


def run(script: dict, system: Model | Compiled) -> list[dict]:
    """Passes of all workers, always of the one that is furthest behind; then time goes on until nothing moves."""
    workers = range(script["workers"])
    pending = [[r for r in script["requests"] if r["worker"] == worker] for worker in workers]
    worker_of = {r["uuid"]: r["worker"] for r in script["requests"]}
    clock = [0.0] * script["workers"]
    idle = 0
    steps: list[dict] = []
    while len(steps) < PASSES:
        for worker in workers:
            if system.empty(worker) and pending[worker]:
                clock[worker] = max(clock[worker], pending[worker][0]["arrival_timestamp_ms"])
        busy = [worker for worker in workers if pending[worker] or not system.empty(worker)]
        if not busy:
            break
        worker = min(busy, key=lambda w: clock[w])
        now = clock[worker]
        while pending[worker] and pending[worker][0]["arrival_timestamp_ms"] <= now:
            system.receive(worker, pending[worker].pop(0))
        drop = script["drops"].get(len(steps))
        if drop is not None:           # a parked request if there is one
            parked = system.parked(worker)
            drop = parked[drop % len(parked)] if parked else drop
            if system.alive(worker_of[drop], drop):
                system.drop(worker_of[drop], drop)
        if system.empty(worker):
            continue
        step = system.execute(worker, now)
        steps.append({**step, "worker": worker})
        clock[worker] = step["end_ms"]
        idle = 0 if step["output"] or step["end_ms"] > now else idle + 1
        if idle >= IDLE:               # the engine's own: requests that preempt one another for ever
            assert step["metrics"]["vllm_preemptions_total"] > IDLE // 2, f"the clock stands still at {now}"
            assert not system.below(worker), f"the clock stands still at {now} while something is under way"
            return steps
    # The reference lets requests starve one another; and the oldest first, two may preempt each other for ever.
    # Somebody parked may have to wait for many short passes of others.
    circles = system.below(worker) or script["args"]["preemption_mode"] == "fifo" and (
        steps[-1]["metrics"]["vllm_preemptions_total"] > PASSES // 4)
    assert len(steps) < PASSES or script["reference"] or circles, "too many passes"
    return steps


def settle(script: dict, system: Model, until: float = 1e9) -> None:
    """Let everything that still moves arrive: what reaches the host goes further down, batch after batch."""
    for _ in range(2000):
        if all(core.tiers.idle() for core in system.cores):
            return
        for worker in range(script["workers"]):
            until += 1e6
            system.tick(worker, until)


def difference(seed: int, seen: collections.Counter | None = None) -> str | None:
    """The first thing in which the two differ, or that is wrong at the end; None if all is well."""
    script = random_script(seed)
    model = Model(script)
    expected = run(script, model)
    got = run(script, Compiled(script))
    found = differences(got, expected)
    if seen is not None:
        seen.update({k: v for k, v in model.counts().items() if v})
        seen.update({f"scripts with {k}": 1 for k, v in model.counts().items() if v})
        seen["scripts"] += 1
        seen["passes"] += len(expected)
    if found:
        return str(found[:4])
    if not all(model.empty(worker) for worker in range(script["workers"])):
        return None
    settle(script, model)
    left = model.left()
    return str(left) if left else None


def broken(seed: int, changes: dict | None = None) -> str | None:
    """What does not hold after a random cluster of the compiled core; None if all is well. Twice gives the same.

    With `changes` of the engine's arguments the books are checked after every pass.
    """
    script = random_script(seed)
    script["reference"] = False
    script["args"] |= changes or {}
    system = Compiled(script, check=changes is not None)
    try:
        steps = run(script, system)
    except AssertionError as error:
        return str(error)
    if seed % 20 == 0 and run(script, Compiled(script, check=False)) != steps:
        return "two equal calls differ"
    if not all(system.empty(worker) for worker in range(script["workers"])):
        return None                            # the engine's own: requests that preempt one another for ever
    now = 1e9
    for _ in range(200):
        if all(core.is_drained() for core in system.cores):
            break
        for core in system.cores:
            now += 1e6
            core.execute_pass(now)
    for core in system.cores:
        core.check_invariants()
        tiers = core._core.tiers
        counts = tiers.counters()
        block = script["args"]["block_size"] * script["args"]["kv_bytes_per_token"]
        if not core.is_drained() or tiers.books() != (0, 0, 0, 0, 0) or core.mocker_metrics().active_decode_blocks:
            return f"left: {tiers.books()}, {core.mocker_metrics()}, drained {core.is_drained()}"
        if counts["up"]["bytes"] % block or counts["down"]["bytes"] % block:
            return f"bytes of half a block: {counts}"
        came = counts["from_g2_blocks"] + counts["from_g3_blocks"] + counts["from_g4_blocks"]
        if counts["up"]["bytes"] < came * block or (not counts["cancelled_promotions"]
                                                   and counts["up"]["bytes"] != came * block):
            return f"{came} blocks came up, but {counts['up']['bytes']} bytes of {block}"
    return None


def properties(first: int, count: int) -> int:
    bad = 0
    for seed in range(first, first + count):
        found = broken(seed)
        if found:
            bad += 1
            print(seed, found, flush=True)
    print(f"{count} clusters, {bad} broken")
    return bad


def main() -> int:
    if sys.argv[1:2] == ["properties"]:
        numbers = [int(text) for text in sys.argv[2:]]
        return properties(*(numbers + [0, 1000][len(numbers):])) > 0
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    seen: collections.Counter = collections.Counter()
    bad = 0
    for seed in range(first, first + count):
        try:
            found = difference(seed, seen)
        except Exception as error:
            found = repr(error)
        if found:
            bad += 1
            print(seed, found, flush=True)
            if bad > 10:
                break
    print(dict(seen))
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
