"""Paths of prompts against a tree with a node for each id, in plain Python."""
from __future__ import annotations

import random

import numpy as np
import pytest

from mocker import Trace, sample_trace_path
from mocker._paths import PathTable


def plain_paths(offsets, ids, lengths, trace_block, block):
    """(segment, parent, blocks) as `PathTable` has them, from a tree of single ids."""
    nodes = [{"parent": -1, "blocks": 0, "children": {}}]
    leaf = []
    for row, length in enumerate(lengths):
        full, at = length // block, 0
        if trace_block % block == 0:
            per = trace_block // block
            steps = [(k, per) for k in range(-(-full // per))]
        else:
            steps = [(k, int(k == ((i + 1) * block - 1) // trace_block)) for i in range(full)
                     for k in range(i * block // trace_block, ((i + 1) * block - 1) // trace_block + 1)]
        for k, blocks in steps:
            token = int(ids[offsets[row] + k]) & 0xFFFFFFFF
            child = nodes[at]["children"].get(token)
            if child is None:
                child = len(nodes)
                nodes[at]["children"][token] = child
                nodes.append({"parent": at, "blocks": blocks, "children": {}})
            at = child
        leaf.append(at if full > 0 else -1)
    segment, parent, blocks = [0], [-1], [0]
    for node in nodes[1:]:
        up = node["parent"]
        if len(nodes[up]["children"]) == 1:
            segment.append(segment[up])
        else:
            segment.append(len(parent))
            parent.append(segment[up])
            blocks.append(0)
        blocks[segment[-1]] += node["blocks"]
    return [-1 if at < 0 else segment[at] for at in leaf], parent, blocks


def check(offsets, ids, lengths, trace_block, block):
    table = PathTable.from_hash_ids(np.array(offsets, np.int64), np.array(ids, np.uint64), np.array(lengths, np.int64),
                                    trace_block, block).arrays
    expected = plain_paths(offsets, ids, lengths, trace_block, block)
    assert tuple(table[name].tolist() for name in ("segment", "parent", "blocks")) == expected


@pytest.mark.parametrize("seed", range(300))
def test_random_prompts(seed):
    rng = random.Random(seed)
    trace_block = rng.choice([8, 12, 16, 64])
    block = rng.choice([2, 4, 8, 16, 24, 64])
    known: list[list[int]] = []
    offsets, ids, lengths = [0], [], []
    for _ in range(rng.choice([1, 2, 5, 40])):
        if known and rng.random() < 0.7:
            prompt = list(rng.choice(known))[:rng.randint(1, 12)] + [
                rng.randint(0, 3) + (rng.randint(0, 1) << 32) for _ in range(rng.choice([0, 0, 1, 4]))]
        else:
            prompt = [rng.choice([0, 1, 2, 2**32 + 1, 2**40]) for _ in range(rng.randint(1, 12))]
        known.append(prompt)
        ids += prompt
        offsets.append(len(ids))
        lengths.append(rng.randint(1, len(prompt) * trace_block))
    check(offsets, ids, lengths, trace_block, block)


@pytest.mark.parametrize("block", [16, 64, 96, 512, 1024])
def test_the_shipped_trace(block):
    trace = Trace.load(sample_trace_path()).head(2000)
    check(trace.hash_offsets.tolist(), trace.hash_ids.tolist(), trace.input_length.tolist(), trace.block_size, block)
