"""Answers that a trace gives: blocks are known by segment where nobody can share an answer, else by tokens."""
from __future__ import annotations

import os
import random

import numpy as np
import pytest

from mocker import MockEngineArgs, SglangArgs, Trace, simulate
from mocker.replay.fast import FastPaths
from mocker.workload import trace_answers_apart

COUNT = int(os.environ.get("MOCKER_FUZZ", "150"))


def random_trace(seed: int) -> tuple[Trace, int]:
    """Few ids, few tokens: prompts that go on as answers do, answers alike; and the block size of the engine."""
    rng = random.Random(f"answers/{seed}")
    block, of_trace = rng.choice([(4, 4), (4, 8), (8, 8), (4, 6), (8, 4), (2, 4)])
    tokens, ids, offsets, answers, ends, prompts, outputs = rng.choice([2, 3, 50, 50]), [], [0], [], [0], [], []
    for _ in range(rng.randrange(2, 25)):
        prompts.append(rng.randrange(1, 5 * of_trace))
        ids += [rng.randrange(3) for _ in range(-(-prompts[-1] // of_trace))]
        offsets.append(len(ids))
        kind = rng.random() if answers else 1.0
        answer = ([] if kind < 0.2 else [rng.randrange(3)] * rng.randrange(1, 30) if kind < 0.25 else
                  [rng.randrange(tokens) for _ in range(rng.randrange(1, 30))])
        answers += answer
        ends.append(len(answers))
        outputs.append(len(answer) or rng.randrange(1, 20))
    n = len(prompts)
    return Trace.from_columns(
        block_size=of_trace, arrival_ms=np.sort(np.array([rng.random() * 900.0 for _ in range(n)])),
        input_length=prompts, output_length=outputs, hash_offsets=offsets, hash_ids=ids,
        output_token_offsets=ends, output_token_ids=answers), block


def blocks_apart(trace: Trace, block: int) -> bool:
    """The same by the contents of all blocks."""
    offsets, tokens = trace.output_token_offsets, trace.output_token_ids
    assert offsets is not None and tokens is not None
    made, had = [], set()
    for row in range(trace.n):
        ids = trace.hash_ids[trace.hash_offsets[row]:trace.hash_offsets[row + 1]]
        prompt = np.repeat(ids, trace.block_size)[:trace.input_length[row]].tolist()
        whole = prompt + tokens[offsets[row]:offsets[row + 1]].tolist()
        full = len(prompt) // block
        had |= {tuple(whole[:(k + 1) * block]) for k in range(full)}
        made += [tuple(whole[:(k + 1) * block]) for k in range(full, len(whole) // block)]
    return len(set(made)) == len(made) and not had & set(made)


def test_apart_where_no_block_is_shared():
    outcomes = [0, 0, 0]
    for seed in range(4 * COUNT):
        trace, block = random_trace(seed)
        want, got = blocks_apart(trace, block), trace_answers_apart(trace, block)
        assert want or not got, f"seed {seed}"
        if trace.block_size % block == 0:
            assert got == want, f"seed {seed}"
        outcomes[got + want] += 1
    assert min(outcomes) > 0


@pytest.mark.parametrize("part", range(3))
def test_segments_change_nothing(part):
    for seed in range(part, 2 * COUNT, 3):
        trace, block = random_trace(seed)
        rng = random.Random(seed)
        options = {"engine_type": rng.choice(["vllm", "vllm", "trtllm", "sglang"]), "block_size": block,
                   "num_gpu_blocks": rng.randrange(80 // block + 2, 300 // block), "max_num_seqs": rng.randrange(1, 9),
                   "max_num_batched_tokens": rng.choice([16, 300])}
        if options["engine_type"] == "sglang":
            options["sglang"] = SglangArgs(page_size=block)
        call = {"num_workers": rng.randrange(1, 4), "router_mode": rng.choice(["round_robin", "kv_router"]),
                "extra_engine_args": MockEngineArgs(**options), "max_sim_time_ms": 60_000.0}
        if call["num_workers"] == 1:
            del call["router_mode"]
        by_tokens, by_segments = (simulate(trace, fast_forward=FastPaths(extents=extents), **call)
                                  for extents in (False, True))
        for name, column in by_tokens.per_request.items():
            assert np.array_equal(by_segments.per_request[name], column, equal_nan=column.dtype.kind == "f"), (
                f"seed {seed}: {name}")


def test_too_many_runs_are_not_looked_into():
    """Answers of one token over and over: tokens, which are right whatever they are."""
    n = 100
    trace = Trace.from_columns(
        block_size=4, arrival_ms=np.arange(n) * 5.0, input_length=np.full(n, 8), output_length=np.full(n, 4),
        hash_offsets=np.arange(0, 2 * n + 1, 2), hash_ids=np.arange(2 * n), output_token_offsets=np.arange(n + 1) * 4,
        output_token_ids=np.repeat(np.arange(n), 4))
    assert not trace_answers_apart(trace, 4)
