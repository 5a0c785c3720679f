"""Requests written as they end: the rows and the report of a run that keeps everything, and what kill -9 leaves."""
from __future__ import annotations

import gzip
import json
import math
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import mocker
from mocker import extras
from mocker.replay import api, stream

TRACE = mocker.Trace.load(mocker.sample_trace_path()).head(700)
ENGINE = {"block_size": 64, "num_gpu_blocks": 4096}
HOST = dict.fromkeys(("wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s"))


def engine(**more):
    return mocker.MockEngineArgs(**ENGINE, **more)


def options_of(name):
    pools = {"prefill_engine_args": engine(worker_type="prefill"), "decode_engine_args": engine(worker_type="decode"),
             "num_prefill_workers": 2, "num_decode_workers": 2}
    return {
        "one": {"extra_engine_args": engine()}, "four": {"extra_engine_args": engine(), "num_workers": 4},
        "router": {"extra_engine_args": engine(), "num_workers": 4, "router_mode": "kv_router"},
        "closed": {"extra_engine_args": engine(), "num_workers": 2, "replay_concurrency": 16},
        "cap": {"extra_engine_args": engine(), "num_workers": 3, "max_sim_time_ms": 60_000.0},
        "capped router": {"extra_engine_args": engine(), "num_workers": 3, "max_sim_time_ms": 60_000.0,
                          "router_mode": "least_requests"},
        "reference": {"extra_engine_args": engine(), "max_sim_time_ms": 60_000.0, "compat": "reference"},
        "sglang": {"extra_engine_args": engine(engine_type="sglang"), "num_workers": 2},
        "late": {"extra_engine_args": engine(scheduler_rules="vllm-0.33-async"), "num_workers": 2},
        "drafts": {"extra_engine_args": engine(aic_nextn=2), "num_workers": 2},
        "small pool": {"extra_engine_args": mocker.MockEngineArgs(block_size=64, num_gpu_blocks=512), "num_workers": 2},
        "disaggregated": pools, "disaggregated router": pools | {"router_mode": "kv_router"}}[name]


NAMES = ("one", "four", "router", "closed", "cap", "capped router", "reference", "sglang", "late", "drafts",
         "small pool", "disaggregated", "disaggregated router")


@pytest.fixture
def often(monkeypatch):
    """Look at ended requests often, and change lanes often."""
    monkeypatch.setattr(api, "LANE_ROWS", 16)
    monkeypatch.setattr(api, "STREAM_PASSES", 40)
    monkeypatch.setattr(stream, "BATCH_ROWS", 5)


def close(report, expected):
    assert report.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, float) and key.startswith(("mean", "std")):
            assert report[key] == pytest.approx(value, rel=1e-9), key
        elif key not in HOST:
            assert report[key] == value, key


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_report(tmp_path, often, name):
    path = tmp_path / "rows.jsonl"
    sla = {"sla_ttft_ms": 3000.0, "sla_itl_ms": 30.0, "sla_e2e_ms": 20_000.0}
    streamed = mocker.simulate(TRACE, stream_to=path, **options_of(name), **sla)
    assert streamed.per_request == {}
    lines = path.read_text().splitlines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "LANE_ROWS", 8192)
        whole = mocker.simulate(TRACE, **options_of(name), **sla)
    close(streamed.report, whole.report)
    whole.write_jsonl(tmp_path / "whole.jsonl")
    assert sorted(lines) == sorted((tmp_path / "whole.jsonl").read_text().splitlines())
    if name in ("one", "router"):
        ends = [json.loads(line)["last_token_ms"] for line in lines]
        assert ends != sorted(ends) and np.corrcoef(ends, range(len(ends)))[0, 1] > 0.99    # about as they end


def test_parquet_parts_and_sketches(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "LANE_ROWS", 100)
    monkeypatch.setattr(stream, "BATCH_ROWS", 20)
    folder = tmp_path / "rows.parquet"
    options = options_of("four")
    streamed = mocker.simulate(TRACE, stream_to=folder, exact_gaps=50, **options)
    parts = sorted(folder.iterdir())
    assert len(parts) > 5
    import pyarrow.parquet as pq

    whole = mocker.simulate(TRACE, **options)
    assert pq.read_table(folder).sort_by("row").equals(whole.to_arrow())
    assert streamed.report["sketched"] == ["ttft_ms", "ttst_ms", "tpot_ms", "e2e_latency_ms", "itl_ms",
                                           "output_token_throughput_per_user"]
    for key in ("median_ttft_ms", "p99_e2e_latency_ms", "p75_tpot_ms", "p95_ttst_ms", "p90_itl_ms"):
        assert streamed.report[key] == pytest.approx(whole.report[key], rel=2.0**-13)
    mocker.simulate(TRACE.head(3), stream_to=folder, **options)
    assert pq.read_table(folder).num_rows == 3
    before = sorted(file.name for file in folder.iterdir())
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        mocker.simulate(TRACE, stream_to=folder, **options)
    assert sorted(file.name for file in folder.iterdir()) == ["notes.txt", *before]
    for path, match in ((tmp_path / "rows.csv", "must end in"), (tmp_path / "file.parquet", "but this is a file")):
        path.write_text("x")
        with pytest.raises(ValueError, match=match):
            mocker.simulate(TRACE, stream_to=path, **options)
    with pytest.raises(ValueError, match="exclude each other"):
        mocker.simulate(TRACE, stream_to=tmp_path / "a.jsonl", recording=mocker.Recording(), **options)


def test_parts_need_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"stream_to a Parquet folder needs pyarrow.*mocker-llm\[parquet\]"):
        mocker.simulate(TRACE, stream_to=tmp_path / "rows.parquet", **options_of("four"))
    assert not list(tmp_path.iterdir())


def test_a_failed_write_ends_the_replay(tmp_path, often, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(stream.RowStream, "add", fail)
    with pytest.raises(OSError, match="disk full"):
        mocker.simulate(TRACE, stream_to=tmp_path / "rows.jsonl", **options_of("four"))
    assert not any(thread.name.startswith("mocker-rows") for thread in threading.enumerate())


@pytest.mark.parametrize("name", ["one", "four", "cap", "small pool", "sglang", "late"])
def test_turns_of_lanes_change_nothing(often, name):
    short = mocker.simulate(TRACE, **options_of(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "LANE_ROWS", 10**9)
        long = mocker.simulate(TRACE, **options_of(name))
    close(short.report, long.report)
    for key, column in long.per_request.items():
        assert np.array_equal(short.per_request[key], column, equal_nan=column.dtype.kind == "f"), key


@pytest.mark.parametrize(("suffix", "workload"), [
    ("jsonl", "sys.argv[1]"), ("parquet", "sys.argv[1]"), ("jsonl", "mocker.TraceStream(sys.argv[1])")])
def test_kill_9_leaves_whole_rows(tmp_path, suffix, workload):
    """A streaming replay in a process of its own, killed at random moments."""
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(gzip.decompress(mocker.sample_trace_path().read_bytes()))
    whole = mocker.simulate(trace, extra_engine_args=engine(), num_workers=2)
    expected = {int(row["row"]): row for row in map(json.loads, lines_of(whole, tmp_path))}
    script = ("import sys, mocker; from mocker.replay import api, stream, streamed; "
              f"api.LANE_ROWS = streamed.LANE_ROWS = stream.BATCH_ROWS = 256; "
              f"args = mocker.MockEngineArgs(**{ENGINE}); "
              f"mocker.simulate({workload}, extra_engine_args=args, num_workers=2, stream_to=sys.argv[2])")
    rng = random.Random(5)
    cut = 0
    for turn in range(3):
        path = tmp_path / f"{turn}.{suffix}"
        process = subprocess.Popen([sys.executable, "-c", script, str(trace), str(path)])
        wanted = rng.randint(1, 6000)
        seen = 0
        while process.poll() is None and seen < wanted:
            seen = path.read_bytes().count(b"\n") if path.is_file() else 200 * len(list(path.glob("part-*")))
            time.sleep(0.001)
        time.sleep(rng.random() * 0.002)
        process.send_signal(signal.SIGKILL)
        cut += process.wait() == -signal.SIGKILL
        rows = rows_of(path)
        assert len({row["row"] for row in rows}) == len(rows) > 0
        for row in rows:
            want = expected[row["row"]]
            for key in ("first_token_ms", "last_token_ms", "terminal_status", "output_tokens", "ttst_ms"):
                assert row[key] == want[key] or (row[key] is None) or math.isnan(row[key]), (row, want)
    assert cut >= 2


def lines_of(simulation, folder):
    return simulation.write_jsonl(folder / "whole.jsonl").read_text().splitlines()


def rows_of(path):
    """Rows on disk by the rule of the documentation: whole lines, named parts."""
    if path.suffix == ".jsonl":
        data = path.read_bytes() if path.exists() else b""
        return [json.loads(line) for line in data[:data.rfind(b"\n") + 1].splitlines()]
    import pyarrow.parquet as pq

    return [row for part in sorted(path.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]
