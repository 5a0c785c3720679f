"""What vLLM 0.33.0 did on recorded scenarios, pass by pass: the compiled core and the plain model do the same.

The recordings hold, for each pass, the scheduled tokens in batch order, cached tokens at admission, preempted requests,
outputs and completions, blocks in use, running and waiting requests (`record_vllm.py` made half of them, and says how).
"""

import gzip
import json
from functools import cache
from pathlib import Path

import pytest
from model.vllm_rules import VLLM, VLLM_ASYNC
from record_vllm import model_passes
from test_rules import compiled_passes

GOLDEN = Path(__file__).parent / "golden"
PRESET = {"sync": ("vllm-0.33", VLLM), "async": ("vllm-0.33-async", VLLM_ASYNC)}
CHUNKS = 5


@cache
def recorded(name: str) -> list[dict]:
    with gzip.open(GOLDEN / f"vllm_{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def first_difference(got: list, want: list) -> str | None:
    """Where two runs part, or None."""
    for number, (a, b) in enumerate(zip(got, want, strict=False)):
        if a != b:
            return f"pass {number}: {a}, recorded {b}"
    return None if len(got) == len(want) else f"{len(got)} passes, recorded {len(want)}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("name", ["sync", "async"])
def test_recorded_passes(name: str, chunk: int) -> None:
    preset, switches = PRESET[name]
    for number in range(chunk, len(recorded(name)), CHUNKS):
        s, want = recorded(name)[number]["scenario"], recorded(name)[number]["passes"]
        assert first_difference(compiled_passes(s, preset), want) is None, f"{name} scenario {number}, compiled"
        assert first_difference(model_passes(s, switches), want) is None, f"{name} scenario {number}, model"


@pytest.mark.parametrize("rule", ["last_token", "slot_at_use", "own_copy", "gen_hit", "fill_early", "full_only"])
def test_the_recordings_need_each_rule(rule: str) -> None:
    """Without the rule some recorded scenario goes otherwise, so the recordings do test it."""
    changed = {**VLLM, rule: False}
    assert any(model_passes(r["scenario"], changed) != r["passes"] for r in recorded("sync"))


@pytest.mark.parametrize(("option", "neutral"), [
    ("priority", False), ("threshold", 0), ("max_model_len", None), ("watermark", 0.0), ("gate", True)])
def test_the_recordings_need_each_option(option: str, neutral: object) -> None:
    used = [r for r in recorded("sync") if r["scenario"].get(option, neutral) != neutral]
    assert any(model_passes({**r["scenario"], option: neutral}, VLLM) != r["passes"] for r in used)


def test_asynchronous_scheduling_differs() -> None:
    assert any(model_passes(r["scenario"], VLLM) != r["passes"] for r in recorded("async"))
