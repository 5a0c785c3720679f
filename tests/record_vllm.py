"""Records what the scheduler of an installed vLLM does on random small scenarios; run by hand, never by the tests.

usage, with the Python of an environment that has vllm (0.33.0; 9 GB, no GPU and no model needed):

    python tests/record_vllm.py SEED COUNT [--async] > traces.jsonl     one {"scenario", "passes"} a line
    python tests/record_vllm.py SEED COUNT --check [--async]            compare with the plain model, print differences
    python tests/record_vllm.py --speed                                 time one step at batch 8, 64 and 256

A scenario: block size, `pool` (usable blocks: vLLM gets one more, its null block), `seqs`, `budget`, `chunked`,
`caching`, the options `priority`, `threshold`, `max_model_len`, `watermark`, `gate`, and requests with tokens, planned
outputs, priority and the pass before which they arrive. A pass: `sched` [uuid, tokens] in batch order, `admit`
[uuid, cached tokens], `preempt` uuids, `out` [uuid, completed], `active` blocks, `running`, `waiting`; an idle pass
is null. In asynchronous scheduling one batch is under way while the next is planned; `out` is what was seen after
that planning.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

MOST_PASSES = 4000


# ---- scenarios


def scenario(seed: int, *, options: bool = True) -> dict:
    """A random scenario whose requests all end; with `options` about half of it uses the options beyond the rules."""
    rng = random.Random(f"vllm {seed}")
    block = rng.choice([4, 8, 16, 16, 16])
    pool = rng.choice([12, 16, 20, 24, 32, 48, 80, 160])
    budget = rng.choice([16, 32, 33, 48, 64, 100, 128, 256, 512])
    s = {"seed": seed, "block": block, "pool": pool, "budget": budget, "chunked": rng.random() < 0.8,
         "caching": rng.random() < 0.85, "seqs": min(budget, rng.choice([1, 2, 3, 4, 8, 16, 64])),
         "priority": False, "threshold": 0, "max_model_len": None, "watermark": 0.0, "gate": True}
    if options:
        s["priority"] = rng.random() < 0.4
        if s["chunked"] and rng.random() < 0.4:
            s["threshold"] = rng.choice([1, 5, block, 3 * block, budget // 2])
        if rng.random() < 0.3:
            s["watermark"] = rng.choice([0.02, 0.05, 0.1, 0.3])
        s["gate"] = rng.random() < 0.7
    longest = pool * block - 1  # the last token needs no slot, but leave one: nobody may outgrow the pool
    if not s["chunked"]:
        longest = min(longest, budget)
    if options and rng.random() < 0.3:
        s["max_model_len"] = rng.randrange(2, longest + 1)
        s["threshold"] = min(s["threshold"], s["max_model_len"])
    cap = min(longest, s["max_model_len"] or longest)

    def words(most: int) -> list[int]:
        return [rng.randrange(50) for _ in range(rng.randrange(1, most + 1))]

    heads = [words(8 * block) for _ in range(rng.randrange(1, 4))]
    reply = [rng.randrange(1000, 2000) for _ in range(6 * block)]
    requests: list[dict] = []
    arrival = 0
    together = rng.random() < 0.3
    for uuid in range(1, rng.randrange(3, 30)):
        kind = rng.random()
        if kind < 0.15 and requests:
            tokens = list(rng.choice(requests)["tokens"])
        elif kind < 0.3 and requests:
            old = rng.choice(requests)
            tokens = old["tokens"] + old["out"] + words(2 * block)
        elif kind < 0.8:
            head = rng.choice(heads)
            tokens = head[: rng.randrange(1, len(head) + 1)] + (words(3 * block) if rng.random() < 0.7 else [])
        else:
            tokens = words(10 * block)
        if rng.random() < 0.3 and len(tokens) > block:
            tokens = tokens[: len(tokens) // block * block]
        tokens = tokens[: cap - 1]
        want = rng.choice([1, 1, 2, 4, 7, block, block + 1, 2 * block, 3 * block + 1])
        # one that goes beyond max_model_len is cut off there; nobody may go beyond the pool
        want = min(want, longest - len(tokens)) if rng.random() < 0.3 else min(want, cap - len(tokens))
        out = reply[:want] if rng.random() < 0.3 else [rng.randrange(1000, 2000) for _ in range(want)]
        if not together and rng.random() < 0.7:
            arrival += rng.choice([0, 1, 1, 2, 3, 6, 15])
        requests.append({"uuid": uuid, "tokens": tokens, "out": out, "pass": arrival,
                         "priority": rng.choice([0, 0, 0, 1, 2, -1]) if s["priority"] else 0})
    s["reqs"] = requests
    return s


# ---- vLLM


class Engine:
    """A scheduler of the installed vLLM, with what it needs around it and no model."""

    def __init__(self, s: dict, use_async: bool) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        length = s["max_model_len"] or (s["budget"] if not s["chunked"] else 1 << 16)
        config = VllmConfig(
            model_config=ModelConfig(model=tiny_model(), dtype="float16", skip_tokenizer_init=True,
                                     enforce_eager=True, max_model_len=length),
            scheduler_config=SchedulerConfig(
                max_num_seqs=s["seqs"], max_num_batched_tokens=s["budget"], max_model_len=length,
                is_encoder_decoder=False, enable_chunked_prefill=s["chunked"], async_scheduling=use_async,
                policy="priority" if s["priority"] else "fcfs", long_prefill_token_threshold=s["threshold"],
                watermark=s["watermark"], scheduler_reserve_full_isl=s["gate"]),
            cache_config=CacheConfig(block_size=s["block"], enable_prefix_caching=s["caching"]),
            device_config=DeviceConfig(device="cpu"))
        blocks = s["pool"] + 1
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=s["block"], num_kv_heads=1, head_size=1, dtype=torch.float16)
        made = config.scheduler_config
        if (made.max_num_seqs, made.max_num_batched_tokens, made.enable_chunked_prefill,
                made.long_prefill_token_threshold) != (s["seqs"], s["budget"], s["chunked"], s["threshold"]):
            raise RuntimeError("vLLM changed the configuration")
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(s["block"], sha256) if s["caching"] else None
        self.scheduler = (AsyncScheduler if use_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[],
                                          kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config), block_size=s["block"])
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.plans: dict[str, list[int]] = {}

    def add(self, r: dict) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.plans[str(r["uuid"])] = r["out"]
        self.scheduler.add_request(Request(
            request_id=str(r["uuid"]), prompt_token_ids=list(r["tokens"]), pooling_params=None,
            block_hasher=self.hasher, priority=r.get("priority", 0), arrival_time=float(len(self.plans)),
            sampling_params=SamplingParams(max_tokens=len(r["out"]), ignore_eos=True, temperature=0.0)))

    def sample(self, plan: object) -> object:
        """What a model runner would return for a batch that has just been planned."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(plan.num_scheduled_tokens)
        made = []
        for name in ids:
            r = self.scheduler.requests[name]
            index = r.num_output_tokens + max(r.num_output_placeholders - 1, 0)
            made.append([] if r.is_prefill_chunk else [self.plans[name][index]])
        return ModelRunnerOutput(req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)},
                                 sampled_token_ids=made)


_folder = ""


def tiny_model() -> str:
    """A folder with the configuration of a one-layer model; there are no weights."""
    global _folder
    if not _folder:
        _folder = tempfile.mkdtemp(prefix="one_layer_")
        (Path(_folder) / "config.json").write_text(json.dumps({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 32000,
            "max_position_embeddings": 1 << 17, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float16"}))
    return _folder


def record(s: dict, use_async: bool) -> list[dict | None]:
    """The passes of a scenario."""
    engine = Engine(s, use_async)
    scheduler = engine.scheduler
    todo = sorted(s["reqs"], key=lambda r: r["pass"])
    ended = fed = 0
    passes: list[dict | None] = []
    under_way = None
    while ended < len(todo) and len(passes) < MOST_PASSES:
        while fed < len(todo) and todo[fed]["pass"] <= len(passes):
            engine.add(todo[fed])
            fed += 1
        if not scheduler.has_unfinished_requests() and under_way is None:
            passes.append(None)
            continue
        plan = scheduler.schedule()
        order = {name: i for i, name in enumerate(plan.num_scheduled_tokens)}
        admitted = [(r.req_id, r.num_computed_tokens) for r in plan.scheduled_new_reqs]
        again = plan.scheduled_cached_reqs
        admitted += [(name, n) for name, n in zip(again.req_ids, again.num_computed_tokens, strict=True)
                     if name in again.resumed_req_ids]
        admitted.sort(key=lambda a: order[a[0]])
        made = engine.sample(plan) if plan.total_num_scheduled_tokens else None
        if use_async:
            seen, under_way = under_way, (plan, made) if made is not None else None
        else:
            seen = (plan, made if made is not None else engine.sample(plan))
        out = []
        if seen is not None:
            for outputs in scheduler.update_from_output(*seen).values():
                out += [[int(o.request_id), o.finish_reason is not None] for o in outputs.outputs]
        ended += sum(done for _, done in out)
        running, waiting = scheduler.get_request_counts()
        passes.append({"sched": [[int(name), n] for name, n in plan.num_scheduled_tokens.items()],
                       "admit": [[int(name), n] for name, n in admitted],
                       "preempt": sorted(int(name) for name in plan.preempted_req_ids or ()), "out": out,
                       "active": s["pool"] - engine.pool.get_num_free_blocks(), "running": running,
                       "waiting": waiting})
    return passes


# ---- the plain model on the same scenario


def model_passes(s: dict, rules: dict[str, bool], kind: type | None = None, **more: object) -> list[dict | None]:
    """What `model.vllm_rules` does, or a subclass of its model that takes `more`."""
    from model.vllm_rules import RulesModel

    model = (kind or RulesModel)(
        rules, **more, **{k: s[k] for k in ("block", "pool", "seqs", "budget", "chunked", "caching")},
        **{k: s[k] for k in ("fifo", "priority", "threshold", "max_model_len", "watermark", "gate") if k in s})
    todo = sorted(s["reqs"], key=lambda r: r["pass"])
    ended = fed = 0
    passes: list[dict | None] = []
    while ended < len(todo) and len(passes) < MOST_PASSES:
        while fed < len(todo) and todo[fed]["pass"] <= len(passes):
            r = todo[fed]
            model.receive(r["uuid"], r["tokens"], r["out"], r.get("priority", 0))
            fed += 1
        if model.is_empty():
            passes.append(None)
            continue
        p = model.run_pass()
        p["out"] = [[uuid, how is not None] for uuid, _, how in p["out"]]
        ended += sum(done for _, done in p["out"])
        passes.append(p)
    return passes


def check(seeds: range, use_async: bool) -> int:
    """Compare the model with vLLM on fresh scenarios; the number of those that differ."""
    from model.vllm_rules import VLLM, VLLM_ASYNC

    wrong = 0
    for seed in seeds:
        s = scenario(seed, options=seed % 2 == 1)
        want, got = record(s, use_async), model_passes(s, VLLM_ASYNC if use_async else VLLM)
        if got == want:
            continue
        wrong += 1
        at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
        print(f"seed {seed} pass {at}:\n  vllm  {want[at : at + 1]}\n  model {got[at : at + 1]}", flush=True)
    return wrong


def speed() -> None:
    """Median time of one step with everybody decoding, µs."""
    for batch in (8, 64, 256):
        engine = Engine({"block": 16, "pool": 1 << 16, "seqs": batch, "budget": 8192, "chunked": True, "caching": True,
                         "max_model_len": None, "priority": False, "threshold": 0, "watermark": 0.0, "gate": True},
                        False)
        for uuid in range(batch):
            engine.add({"uuid": uuid, "tokens": [uuid] * 64, "out": [7] * 1200})
        times = []
        for step in range(400):
            start = time.perf_counter()
            plan = engine.scheduler.schedule()
            planned = time.perf_counter()
            made = engine.sample(plan)
            ready = time.perf_counter()
            engine.scheduler.update_from_output(plan, made)
            if step > 100:
                times.append((time.perf_counter() - ready + planned - start) * 1e6)
        print(f"batch {batch}: {statistics.median(times):.0f} us a step")


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    flags = {a for a in sys.argv[1:] if a.startswith("--")}
    numbers = [int(a) for a in sys.argv[1:] if not a.startswith("--")]
    if "--speed" in flags:
        speed()
        return 0
    seeds = range(numbers[0], numbers[0] + numbers[1])
    if "--check" in flags:
        wrong = check(seeds, "--async" in flags)
        print(f"{len(seeds)} scenarios, {wrong} differ")
        return wrong > 0
    for seed in seeds:
        s = scenario(seed)
        print(json.dumps({"scenario": s, "passes": record(s, "--async" in flags)}, separators=(",", ":")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
