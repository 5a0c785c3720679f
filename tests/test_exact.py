"""The engine against what the reference did, recorded: single cores pass by pass, whole replays request by request."""
from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from model.script import differences
from record_replays import digest, engines
from runner import run_script

from mocker import Trace, sample_trace_path, simulate

GOLDEN = Path(__file__).parent / "golden"
REPLAYS = json.loads((GOLDEN / "replays.json").read_text())


@pytest.mark.parametrize("family", ["vllm", "trtllm", "speculative", "handoff"])
def test_core_scripts(family):
    with gzip.open(GOLDEN / f"{family}.jsonl.gz", "rt") as file:
        recorded = [json.loads(line) for line in file]
    assert len(recorded) == 100
    for number, entry in enumerate(recorded):
        got = run_script(entry["script"])
        if "error" in entry["result"]:
            assert "decode_speedup_ratio" in got["error"], f"{family} script {number}"
            continue
        found = differences(got, entry["result"])
        assert not found, f"{family} script {number}: {found[:5]}"


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {"mooncake_conversation.jsonl": Trace.load(sample_trace_path()),
            "mooncake_synthetic.jsonl": Trace.load(GOLDEN / "mooncake_synthetic.jsonl.gz")}


def plain(column: np.ndarray) -> list:
    """A column as JSON values, with null for a missing one."""
    if column.dtype.kind == "f":
        return [None if math.isnan(v) else v for v in column.tolist()]
    if column.dtype.kind == "i":
        return [None if v == -1 else v for v in column.tolist()]
    return column.tolist()


@pytest.mark.parametrize("fast", [True, False], ids=["fast-forward", "pass by pass"])
@pytest.mark.parametrize("name", REPLAYS)
def test_replays(traces, name, fast):
    recorded = REPLAYS[name]
    config = engines(recorded["config"])
    trace = traces[config.pop("trace")]
    result = simulate(trace, compat="reference", fast_forward=fast, router_tie_break="lowest", **config)
    ended = result.per_request["terminal_status"] != "incomplete"
    rows = digest({name: plain(column[ended]) for name, column in result.per_request.items()})
    assert rows == (recorded["rows"], recorded["sha256"])
    for key, value in recorded["report"].items():
        assert result.report[key] == pytest.approx(value, rel=1e-9, abs=0), key
