"""Random scripts for one core: `random_script(family, seed)` with the families vllm, trtllm and speculative.

They are made to meet one another: prompts share prefixes, repeat, or continue what another request was to generate;
planned outputs are shared; pools are tiny; every switch is on and off. Unless `wild`, a script stays where the
reference is well defined: prompt and output fit the pool (TRT-LLM clamps and rejects by itself), and without chunked
prefill a prompt fits the batch budget. A wild one may ask for what never fits, for no output, or for an over-long
prompt.

Timestamps and ratios are numbers that every parser reads alike.
"""

import random

FAMILIES = ("vllm", "trtllm", "speculative")


def random_script(family: str, seed: int, *, wild: bool = False) -> dict:
    rng = random.Random(f"{family}/{seed}/{wild}")
    args = _args(rng, family)
    worker_id = rng.choice([0, 0, 1, 2, 3, 7])
    squeezed = rng.random() < 0.3
    if squeezed:
        _squeeze(rng, args)
    requests = _squeezed_requests(rng, args) if squeezed else _requests(rng, args, wild)
    if rng.random() < 0.8:
        return {"args": args, "worker_id": worker_id, "steps": [{"trace": requests}, {"run": 1500}]}
    # Handed over between passes instead, some of them to a busy engine.
    steps: list[dict] = []
    for request in requests:
        at = request.pop("arrival_timestamp_ms")
        if rng.random() < 0.2:
            steps.append({"now": at})
        steps.append({"submit": request})
        if rng.random() < 0.5:
            steps.append({"run": rng.randrange(1, 9)})
    return {"args": args, "worker_id": worker_id, "steps": [*steps, {"run": 1500}]}


def _args(rng: random.Random, family: str) -> dict:
    block = rng.choice([2, 2, 4, 4, 4, 8, 16, 32])
    args: dict = {
        "block_size": block,
        "num_gpu_blocks": rng.choice([4, 5, 6, 7, 8, 10, 12, 16, 24, 40, 128]),
        "max_num_seqs": rng.choice([1, 2, 3, 4, 6, 8, 16, 64, None]),
        "max_num_batched_tokens": rng.choice([1, 3, block, block + 1, 2 * block, 16, 25, 48, 100, 300, 2048, None]),
        "enable_prefix_caching": rng.random() < 0.85,
        "enable_chunked_prefill": rng.random() < 0.75,
        "preemption_mode": rng.choice(["lifo", "fifo"]),
        "speedup_ratio": rng.choice([1.0, 1.0, 0.0, 0.3, 1.9, 7.0, 1000.0]),
        "decode_speedup_ratio": rng.choice([1.0, 1.0, 0.7, 3.3, 0.0]),
    }
    if rng.random() < 0.25:
        args["worker_type"] = rng.choice(["prefill", "decode", "aggregated"])
    if rng.random() < 0.2:
        args["kv_bytes_per_token"] = rng.choice([1, 999, 131072])
    if rng.random() < 0.2:
        args["kv_transfer_bandwidth"] = rng.choice([0.0, 0.07, 1.0, 50.0])
    if family == "trtllm" or (family == "speculative" and rng.random() < 0.25):
        args["engine_type"] = "trtllm"
    if family == "speculative":
        args["aic_nextn"] = rng.randrange(1, 6)
        args["decode_speedup_ratio"] = 1.0 if rng.random() < 0.97 else rng.choice([2.0, 0.5, 1.7])
        if rng.random() < 0.75:
            rates = [
                rng.choice(["0", "1", "0.9", "0.5", "0.125", "0.3", " 0.75", "1.0"]) for _ in range(rng.randrange(1, 7))
            ]
            args["aic_nextn_accept_rates"] = ",".join(rates)
        if rng.random() < 0.7:
            args["aic_mtp_seed"] = rng.choice([0, 1, 7, 2**32, 2**64 - 1, rng.randrange(2**64)])
    for name in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "speedup_ratio",
        "preemption_mode",
        "enable_chunked_prefill",
    ):
        if rng.random() < 0.05:
            del args[name]
    if rng.random() < 0.04:
        del args["block_size"]
    return args


def _squeeze(rng: random.Random, args: dict) -> None:
    """Later chunks fail for want of blocks, with others running before and behind them."""
    block = args["block_size"] = rng.choice([2, 2, 4, 4, 8])
    args["num_gpu_blocks"] = rng.randrange(6, 24)
    args["max_num_seqs"] = rng.choice([3, 4, 6, 8, None])
    args["max_num_batched_tokens"] = rng.randrange(block, 7 * block)
    args["enable_chunked_prefill"] = True
    args["enable_prefix_caching"] = rng.random() < 0.95
    args["preemption_mode"] = rng.choice(["fifo", "lifo"])


def _squeezed_requests(rng: random.Random, args: dict) -> list[dict]:
    """Two kinds of load.

    Either short whole-block prompts that come again and again and decode for long, and long prompts among them: a
    long prompt's next chunk finds the pool full. Or short prompts with long outputs only: who was preempted computes
    its long output again, in chunks, partly from what is left of its own blocks, while others grow and end.
    """
    block = args["block_size"]
    pool = block * args["num_gpu_blocks"]
    short = [_tokens(rng, block * rng.randrange(1, 3), 40) for _ in range(rng.randrange(1, 4))]
    long_prompts = rng.random() < 0.5
    requests: list[dict] = []
    at = 0.0
    for uuid in range(1, rng.randrange(5, 16)):
        if not long_prompts:
            prompt = _tokens(rng, rng.randrange(1, 2 * block + 1), 40)
            wanted = rng.choice([rng.randrange(1, 3 * block), rng.randrange(3 * block, pool)])
        elif rng.random() < 0.65:
            prompt = list(rng.choice(short))
            wanted = rng.randrange(1, 4 * block)
        else:
            head = list(rng.choice(short)) if rng.random() < 0.3 else []
            prompt = head + _tokens(rng, rng.randrange(2 * block, pool * 3 // 4 + 1), 40)
            wanted = rng.randrange(1, 2 * block)
        prompt = prompt[: pool - 1]
        wanted = min(wanted, pool - len(prompt))
        planned = _tokens(rng, wanted, 2**32 - 2)
        request = {"uuid": uuid, "tokens": prompt, "max_output_tokens": wanted, "output_token_ids": planned}
        if rng.random() < 0.5:
            at += rng.choice([0.125, 8.0, 30.0, 64.0, 130.0, 400.0])
        requests.append({**request, "arrival_timestamp_ms": at})
    return requests


def _tokens(rng: random.Random, count: int, alphabet: int) -> list[int]:
    return [rng.randrange(1, 1 + alphabet) for _ in range(count)]


def _requests(rng: random.Random, args: dict, wild: bool) -> list[dict]:
    trtllm = args.get("engine_type") == "trtllm"
    block = args.get("block_size") or (32 if trtllm else 64)
    pool = block * args["num_gpu_blocks"]
    alphabet = rng.choice([2, 40, 2**32 - 2])
    longest = min(pool, rng.choice([block, 4 * block, 9 * block, 200]))
    roots = [_tokens(rng, rng.randrange(1, longest + 1), alphabet) for _ in range(rng.randrange(1, 4))]
    shared_output = _tokens(rng, 48, alphabet)
    count = rng.randrange(1, 15)
    uuids = range(1, count + 1) if rng.random() < 0.7 else rng.sample(range(1, 2**62), count)
    simultaneous = rng.random() < 0.3
    requests: list[dict] = []
    at = 0.0
    for uuid in uuids:
        prompt = _prompt(rng, roots, requests, block, alphabet)
        wanted = rng.choice([1, 1, 2, 3, 4, 6, 9, block, 2 * block + 1, 30])
        prompt, wanted = _fit(rng, prompt, wanted, pool, args, wild)
        planned = shared_output[:wanted] if rng.random() < 0.5 else _tokens(rng, wanted, 2**32 - 2)
        planned += _tokens(rng, wanted - len(planned), alphabet)
        request = {"uuid": uuid, "tokens": prompt, "max_output_tokens": wanted, "output_token_ids": planned}
        if rng.random() < 0.05:
            request["max_output_tokens"] = wanted + rng.randrange(5)  # the plan is what counts
        if not simultaneous and rng.random() < 0.6:
            at += rng.choice([0.125, 1.0, 6.5, 21.25, 64.0, 130.0, 1000.0])
        request["arrival_timestamp_ms"] = at
        requests.append(request)
    return requests


def _prompt(rng: random.Random, roots: list, earlier: list[dict], block: int, alphabet: int) -> list[int]:
    kind = rng.random()
    if earlier and kind < 0.15:  # the same again
        return list(rng.choice(earlier)["tokens"])
    if earlier and kind < 0.35:  # next turn of a conversation
        before = rng.choice(earlier)
        start = before["tokens"] + before["output_token_ids"][: rng.randrange(len(before["output_token_ids"]) + 1)]
    elif kind < 0.85:
        root = rng.choice(roots)
        start = root if rng.random() < 0.5 else root[: rng.randrange(1, len(root) + 1)]
    else:
        start = []
    prompt = start + _tokens(rng, rng.choice([0, 1, block, rng.randrange(0, 3 * block)]), alphabet)
    if len(prompt) > block and rng.random() < 0.3:  # whole blocks only
        prompt = prompt[: len(prompt) // block * block]
    return prompt or _tokens(rng, 1, alphabet)


def _fit(
    rng: random.Random, prompt: list[int], wanted: int, pool: int, args: dict, wild: bool
) -> tuple[list[int], int]:
    if wild and rng.random() < 0.3:
        kind = rng.randrange(5)
        if kind == 0:
            wanted = 0
        elif kind == 1:
            prompt = (prompt * pool)[:pool]
        elif kind == 2:
            prompt = (prompt * (pool + 9))[: pool + rng.randrange(1, 9)]
        elif kind == 3:
            wanted = pool - len(prompt) + rng.randrange(1, 9) if len(prompt) <= pool else wanted
        return prompt, wanted
    budget = args.get("max_num_batched_tokens", 8192)
    if budget is not None and not args.get("enable_chunked_prefill", True):
        prompt = prompt[:budget]
    if args.get("engine_type") == "trtllm" and rng.random() < 0.3:
        return prompt, wanted
    prompt = prompt[: pool - 1]
    return prompt, min(wanted, pool - len(prompt))
