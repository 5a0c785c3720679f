"""Reading each format of the reference beside a bare JSON parse of the same lines, which no reader can do without."""
from __future__ import annotations

import json
import random
import time

import pytest

from mocker import formats

ROWS = 3000
NAMES = ("mooncake", "mooncake-delta", "agentic_mooncake", "applied_compute_agentic", "dynamo")


def rows(name: str) -> list[dict]:
    rng = random.Random(name)
    out = []
    for k in range(ROWS):
        ids = [rng.randrange(1 << 40) for _ in range(20)]
        row = {"timestamp": k, "input_length": 10_000, "output_length": 100, "hash_ids": ids}
        if name == "agentic_mooncake":
            row |= {"request_id": f"r{k}", "wait_for": [f"r{k - 1}"] if k % 8 else [], "tool_wait_ms": 5}
        elif name == "applied_compute_agentic":
            row = {"num_turns": 4, "input_prompt_length": 9000, "assistant_response_length": [50] * 4,
                   "tool_call_output_length": [500] * 4, "tool_call_latency": [0.5] * 4,
                   "final_assistant_response_length": 100}
        elif name == "dynamo":
            row = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 9 + k,
                   "agent_context": {"session_id": f"s{k // 8}"},
                   "request": {"request_id": f"r{k}", "request_received_ms": k, "output_tokens": 100,
                               "replay": {"trace_block_size": 512, "input_length": 10_000,
                                          "input_sequence_hashes": ids}}}
        out.append(row)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_load(benchmark, tmp_path, name):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(name)))
    began = time.perf_counter()
    for line in path.read_bytes().splitlines():
        json.loads(line)
    parsed = time.perf_counter()
    formats.load(path, format=name)
    benchmark.extra_info["this / JSON parse"] = round((time.perf_counter() - parsed) / (parsed - began), 2)
    benchmark(formats.load, path, format=name)
