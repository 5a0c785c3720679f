"""Random scripts of hand-off commands, in the form of the recorded ones."""
from __future__ import annotations

import random


class Prompts:
    """Prompts that share beginnings with earlier ones, and with what those generated."""

    def __init__(self, rng: random.Random, block: int) -> None:
        self.rng = rng
        self.block = block
        self.known: list[list[int]] = [[rng.randrange(1, 40) for _ in range(rng.randrange(1, 5 * block))]
                                       for _ in range(rng.randrange(1, 4))]
        self.outputs = [rng.randrange(1000, 2**31) for _ in range(40)]

    def draw(self) -> tuple[list[int], list[int]]:
        """A prompt and the outputs planned for it."""
        rng, block = self.rng, self.block
        tokens: list[int] = []
        if rng.random() < 0.85:
            tokens = list(rng.choice(self.known[-8:]))
            if rng.random() < 0.4:
                tokens = tokens[:rng.randrange(1, len(tokens) + 1)]
            if rng.random() < 0.3:
                tokens = tokens[:len(tokens) // block * block]
        if rng.random() < 0.6:
            tokens += [rng.randrange(1, 40) for _ in range(rng.randrange(0, 3 * block + 1))]
        tokens = tokens or [rng.randrange(1, 40)]
        wanted = rng.choice([1, 1, 2, 3, 5, 9, 16, 30])
        plan = self.outputs[:wanted] if rng.random() < 0.5 else [rng.randrange(1000, 2**31) for _ in range(wanted)]
        self.known.append(tokens + plan if rng.random() < 0.4 else tokens)
        return tokens, plan


def random_args(rng: random.Random, engine: str, block: int) -> dict:
    """Arguments of a core in one of the roles."""
    args = {
        "block_size": block, "num_gpu_blocks": rng.choice([3, 5, 6, 8, 8, 10, 12, 16, 24, 64]),
        "worker_type": rng.choice(["prefill", "prefill", "decode", "decode", "decode", "aggregated"]),
        "max_num_seqs": rng.choice([1, 1, 2, 3, 4, 8, None, 256]),
        "max_num_batched_tokens": rng.choice([block, 2 * block + 1, 16, 33, 64, 256, 8192, None]),
        "enable_prefix_caching": rng.random() < 0.8, "enable_chunked_prefill": rng.random() < 0.75,
        "speedup_ratio": rng.choice([1.0, 1.0, 1.0, 0.0, 2.5]), "decode_speedup_ratio": rng.choice([1.0, 1.0, 1.7]),
        "preemption_mode": rng.choice(["lifo", "lifo", "fifo"]),
    }
    if rng.random() < 0.25:
        args |= {"aic_nextn": rng.randrange(1, 6), "aic_mtp_seed": rng.choice([0, 7, 42, 2**63 + 5]),
                 "decode_speedup_ratio": 1.0}
        if rng.random() < 0.7:
            args["aic_nextn_accept_rates"] = ",".join(
                str(rng.choice([0, 1, 0.25, 0.5, 0.85])) for _ in range(rng.randrange(1, 6)))
    if rng.random() < 0.7:
        args |= {"kv_bytes_per_token": rng.choice([1, 1000, 250000]),
                 "kv_transfer_bandwidth": rng.choice([0.001, 1.0, 64.0]),
                 "kv_transfer_timing_mode": rng.choice(["full_prompt", "destination_missing"])}
    elif rng.random() < 0.5:
        args["kv_transfer_timing_mode"] = "destination_missing"
    if engine == "trtllm":
        args["engine_type"] = "trtllm"
    elif engine == "sglang":
        sglang = {"schedule_policy": rng.choice(["fifo", "lpm"]),
                  "max_prefill_tokens": rng.choice([16, 400, 16384, 16384]),
                  "chunked_prefill_size": block * rng.choice([1, 2, 4, 64]),
                  "clip_max_new_tokens": rng.choice([1, 2, 4, 4096]),
                  "schedule_conservativeness": rng.choice([0.0, 0.1, 0.5, 1.0, 1.3])}
        args |= {"engine_type": "sglang",
                 "sglang": {k: v for k, v in sglang.items() if rng.random() < 0.7} | {"page_size": block}}
    return args


class Writer:
    """Writes the steps of one script; it guesses which hand-offs are alive.

    Request ids come again, but not to a paged core a third time: there the reference may give a request the place in
    the queue that an id of its two predecessors left behind, which ours forgets.
    """

    def __init__(self, rng: random.Random, args: dict, block: int) -> None:
        self.rng = rng
        self.args = args
        self.prompts = Prompts(rng, block)
        self.capacity = (args["num_gpu_blocks"] - (args.get("engine_type") == "sglang")) * block
        self.steps: list[dict] = []
        self.uuids: list[int] = []
        self.twice: dict[int, bool] = {}
        self.sources: list[int] = []
        self.destinations: list[int] = []
        self.plain: list[int] = []
        self.again = rng.choice([0.0, 0.1, 0.1, 0.4])      # how often ids come again

    def request(self, oversize: bool = False) -> dict:
        rng = self.rng
        tokens, plan = self.prompts.draw()
        if oversize:
            tokens = tokens + [1] * max(0, self.args["num_gpu_blocks"] * self.args["block_size"] - len(tokens)
                                        + rng.choice([0, 1, 3]))
        else:                                  # what prompt and output never fit spins in the reference
            tokens = tokens[:max(1, self.capacity - 1)]
            if self.args.get("engine_type") != "trtllm":
                plan = plan[:max(1, self.capacity - len(tokens))]
        uuid = len(self.uuids) + 1
        if self.uuids and rng.random() < self.again:
            uuid = rng.choice(self.uuids[-6:])
            if self.twice.get(uuid) and self.args.get("engine_type") != "sglang":
                uuid = len(self.uuids) + 1
            self.twice[uuid] = True
        if uuid > len(self.uuids):
            self.uuids.append(uuid)
        if rng.random() < 0.01 and self.args.get("engine_type") != "sglang":
            tokens = []                        # SGLang's books do not expect it, though its core gets it right
        wanted = len(plan) + (1 if rng.random() < 0.03 else 0)             # the plan decides
        return {"uuid": uuid, "tokens": tokens, "max_output_tokens": wanted, "output_token_ids": plan}

    def handoff_id(self, uuid: int, known: list[int]) -> int:
        if known and self.rng.random() < self.again:
            return self.rng.choice(known[-6:])
        return uuid if self.rng.random() < 0.8 else 100 + len(self.steps)

    def pick(self, known: list[int]) -> int:
        """A hand-off, most often one of the newest or the oldest ones; sometimes one that was never there."""
        rng = self.rng
        if not known or rng.random() < 0.03:
            return 999999
        return rng.choice(known[-2:]) if rng.random() < 0.4 else rng.choice(known[:2] + known[-4:])

    def source_step(self) -> None:
        x, rng = self.rng.random(), self.rng
        if x < 0.40:
            request = self.request()
            self.sources.append(self.handoff_id(request["uuid"], self.sources))
            self.steps.append({"submit_handoff_prefill": request | {"handoff_id": self.sources[-1]}})
        elif x < 0.62:
            self.end(self.sources, "release_source")
        elif x < 0.76:
            self.end(self.sources, "cancel_source")
        else:
            self.steps.append({"run": rng.randrange(1, 4)})

    def destination_step(self) -> None:
        x, rng = self.rng.random(), self.rng
        if x < 0.36:
            oversize = rng.random() < 0.05
            request = self.request(oversize)
            self.destinations.append(self.handoff_id(request["uuid"], self.destinations))
            self.steps.append({"reserve_destination": request | {"handoff_id": self.destinations[-1]}})
        elif x < 0.58:
            self.steps.append({"activate_destination": self.pick(self.destinations)})
        elif x < 0.70:
            self.end(self.destinations, "cancel_destination")
        elif x < 0.76:
            self.steps.append({"retry_destinations": 0})
        else:
            self.steps.append({"run": rng.randrange(1, 4)})

    def end(self, known: list[int], op: str) -> None:
        handoff = self.pick(known)
        self.steps.append({op: handoff})
        if handoff in known and self.rng.random() < 0.8:
            known.remove(handoff)

    def finish(self) -> None:
        """Cancel or serve everything, in random order, and let the core run dry."""
        rng = self.rng
        serve = rng.random() < 0.4
        for _ in range(2):
            ends = [("release_source" if serve else "cancel_source", h) for h in self.sources_ever()]
            ends += [("activate_destination" if serve else "cancel_destination", h) for h in self.destinations_ever()]
            rng.shuffle(ends)
            for op, handoff in ends:
                self.steps.append({op: handoff})
                if serve and rng.random() < 0.3:
                    self.steps.append({"run": rng.randrange(1, 6)})
            self.steps.append({"run": 100})
            if serve:
                self.steps += [{"retry_destinations": 0}, {"run": 100}]
        self.steps += [{op: h} for op, h in [("cancel_source", h) for h in self.sources_ever()]
                       + [("cancel_destination", h) for h in self.destinations_ever()]]
        self.steps.append({"run": 300})

    def sources_ever(self) -> list[int]:
        return sorted({s["submit_handoff_prefill"]["handoff_id"] for s in self.steps if "submit_handoff_prefill" in s})

    def destinations_ever(self) -> list[int]:
        return sorted({s["reserve_destination"]["handoff_id"] for s in self.steps if "reserve_destination" in s})


def random_script(engine: str, seed: int) -> dict:
    """Script number `seed` for "vllm", "sglang" or "trtllm"."""
    rng = random.Random(f"handoff/{engine}/{seed}")
    block = rng.choice([1, 2, 4, 4, 8]) if engine == "sglang" else rng.choice([2, 4, 4, 8])
    args = random_args(rng, engine, block)
    writer = Writer(rng, args, block)
    destinations = {"prefill": 0.05, "decode": 0.95, "aggregated": 0.5}[args["worker_type"]]
    submits = rng.choice([0.0, 0.1, 0.25])
    for _ in range(rng.randrange(8, 60) if rng.random() < 0.9 else rng.randrange(100, 250)):
        if rng.random() < submits:
            writer.steps.append({"submit": writer.request()})
        elif rng.random() < destinations:
            writer.destination_step()
        else:
            writer.source_step()
        if rng.random() < 0.04:
            writer.steps.append({"now": len(writer.steps) * 1000.0})
    if rng.random() < 0.75:
        writer.finish()
    return {"args": args, "worker_id": rng.randrange(3), "steps": writer.steps}
