"""Traces that are read while they are replayed: equal to the loaded trace, whatever is in memory at a time."""
from __future__ import annotations

import contextlib
import gzip
import json
import os

import numpy as np
import pytest

import mocker
from mocker.formats import columns, stream
from mocker.replay import api, streamed
from mocker.trace import TraceError

HOST = ("wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s")
FUZZ = int(os.environ.get("MOCKER_FUZZ", "14"))


@pytest.fixture
def small(monkeypatch):
    """Little blocks and short turns, so that rows and prompts are soon used again and forgotten."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1500)
    monkeypatch.setattr(stream, "BLOCK_ROWS", 7)
    monkeypatch.setattr(streamed, "FORGET_FROM", 8)
    for module in (api, streamed):
        monkeypatch.setattr(module, "LANE_ROWS", 12)
        monkeypatch.setattr(module, "STREAM_PASSES", 40)


def random_trace(rng, block=64):
    """Requests whose prompts branch off each other anywhere, come again after a while, and are often short."""
    n, texts, length, output, ids = int(rng.integers(30, 250)), [[1]], [], [], []
    for _ in range(n):
        old = texts[int(rng.integers(max(len(texts) - 30, 0), len(texts)))]
        kept = old[:int(rng.integers(0, len(old) + 1))]
        new = [*kept, *rng.integers(1, 2**33, int(rng.integers(0 if kept else 1, 9))).tolist()]
        texts.append(new)
        ids.append(new)
        length.append(int(rng.integers((len(new) - 1) * block + 1, len(new) * block + 1)))
        output.append(int(rng.integers(1, 60)))
    at = np.cumsum(rng.exponential(rng.choice([5.0, 80.0, 400.0]), n)) * (rng.random() < 0.9) + 5.0
    return mocker.Trace.from_columns(
        block_size=block, arrival_ms=np.round(at, 2) if rng.random() < 0.5 else at, input_length=length,
        output_length=output, hash_offsets=np.cumsum([0, *map(len, ids)]), hash_ids=np.array(sum(ids, []), np.uint64),
        request_ids=[f"r{i}" for i in range(n)] if rng.random() < 0.3 else None)


def both(trace, folder, binary, **options):
    """Rows and reports of the loaded and of the streamed trace."""
    path = folder / ("t.mtrace" if binary else "t.jsonl")
    columns.save(trace, path) if binary else trace.save(path)
    given = {} if binary else {"block_size": trace.block_size}
    out = []
    for i, workload in enumerate((mocker.Trace.load(path, **given), mocker.TraceStream(path, **given))):
        result = mocker.simulate(workload, stream_to=folder / f"{i}.jsonl", **options)
        assert result.per_request == {}
        rows = (folder / f"{i}.jsonl").read_text().splitlines()
        out.append((sorted(rows), {key: value for key, value in result.report.items() if key not in HOST}))
    return out


@pytest.mark.parametrize("seed", range(FUZZ))
def test_streamed_as_loaded(tmp_path, small, seed):
    rng = np.random.default_rng(seed)
    trace = random_trace(rng)
    engine = {"block_size": int(rng.choice([16, 64])), "num_gpu_blocks": int(rng.choice([60, 200, 4000])),
              "max_num_seqs": int(rng.choice([4, 64])), "enable_prefix_caching": rng.random() < 0.85}
    kind = ("vllm", "vllm", "vllm", "sglang", "trtllm", "rules", "drafts")[seed % 7]
    if kind == "rules":
        engine["scheduler_rules"] = str(rng.choice(["vllm-0.33", "vllm-0.33-async"]))
    elif kind == "drafts":
        engine["aic_nextn"] = 2
    else:
        engine["engine_type"] = kind
    options = {"num_workers": int(rng.integers(1, 5))}
    if rng.random() < 0.4:
        options["router_mode"] = str(rng.choice(["kv_router"] * (options["num_workers"] > 1) + [
            "least_requests", "least_tokens", "random", "power_of_two"]))
        if options["router_mode"] == "kv_router" and rng.random() < 0.3:
            options["router_config"] = mocker.KvRouterConfig(router_queue_threshold=0.5)
    if rng.random() < 0.3:
        options["exact_gaps"] = int(rng.choice([20, 10**6]))
    if rng.random() < 0.3:
        options["max_sim_time_ms"] = float(trace.arrival_ms.mean())
    if rng.random() < 0.3:
        options |= {"sla_ttft_ms": 200.0, "sla_e2e_ms": 3000.0}
    if rng.random() < 0.3:
        options["arrival_speedup_ratio"] = 3.0
    if rng.random() < 0.3:
        options["compat"] = "reference"
    options["extra_engine_args"] = mocker.MockEngineArgs(**engine)
    loaded, read = both(trace, tmp_path, rng.random() < 0.5, **options)
    assert read[0] == loaded[0]
    assert read[1] == loaded[1]


@pytest.mark.parametrize("mode", ["round_robin", "kv_router"])
def test_the_shipped_trace(tmp_path, monkeypatch, mode):
    """Packed; and little of it is in memory at a time."""
    seen = []
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(streamed, "FORGET_FROM", 200)
    for module in (api, streamed):
        monkeypatch.setattr(module, "LANE_ROWS", 512)
    drain = streamed._Feed.drain

    def watched(feed):
        drain(feed)
        seen.append((len(feed._rows), feed.paths.stretches, feed.read))

    monkeypatch.setattr(streamed._Feed, "drain", watched)
    options = {"extra_engine_args": mocker.MockEngineArgs(num_gpu_blocks=4096, block_size=64), "num_workers": 4,
               "router_mode": mode}
    loaded = mocker.simulate(mocker.sample_trace_path(), stream_to=tmp_path / "a.jsonl", **options).report
    read = mocker.simulate(mocker.TraceStream(mocker.sample_trace_path()), **options).report
    assert {key: read[key] for key in read if key not in HOST} == {key: loaded[key] for key in read if key not in HOST}
    rows, stretches, total = np.array(seen).max(axis=0)
    assert total == 12_031 and rows < 4000 and stretches < 3000
    sketch = mocker.simulate(mocker.TraceStream(mocker.sample_trace_path()), exact_gaps=100, **options).report
    assert len(sketch["sketched"]) == 6 and sketch["p99_ttft_ms"] == pytest.approx(read["p99_ttft_ms"], rel=2.0**-13)


def lines(count):
    return [json.dumps({"timestamp": i * 10, "input_length": 100, "output_length": 5, "hash_ids": [i]})
            for i in range(count)]


@pytest.mark.parametrize(("text", "match"), [
    ('{"timestamp": 3990', r"t\.jsonl.*:400:.*"), ('{"timestamp": 20, "input_length": 5, "output_length": 1, '
                                                      '"hash_ids": [1]}', ":400:.*timestamp.*above.*sort"),
    ('{"timestamp": 3990, "input_length": 5, "output_length": 1, "hash_ids": [1], "session_id": "a"}',
     "session_id"), ('{"timestamp": 3990, "input_length": 5, "output_length": 1, "hash_ids": [1], "priority": 3}',
                     ":400:.*priority.*loaded"), ('{"input_length": 5, "output_length": 1, "hash_ids": [1]}',
                                                     ":400:.*timestamp"),
    ('{"timestamp": 3990, "input_length": 5000, "output_length": 1, "hash_ids": [1]}', ":400:.*input_length")])
def test_an_error_far_down(tmp_path, small, text, match):
    """It names the line, and what was done before it is on the disk."""
    path, out = tmp_path / "t.jsonl", tmp_path / "rows.jsonl"
    rows = lines(600)
    rows[399] = text
    path.write_text("\n".join(rows))
    with pytest.raises(TraceError, match=match):
        mocker.simulate(mocker.TraceStream(path), stream_to=out, extra_engine_args=mocker.MockEngineArgs())
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) > 350 and [row["row"] for row in written] == list(range(len(written)))
    assert all(row["terminal_status"] == "completed" for row in written)


def test_rows_left_out(tmp_path, small, monkeypatch):
    path = tmp_path / "t.jsonl.gz"
    rows = lines(200)
    rows[20] = rows[150] = "{"
    rows[180:] = ["nothing here"] * 20 + [""]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    result = mocker.simulate(mocker.TraceStream(path, on_error="skip"))
    assert result.report["completed_requests"] == 178
    monkeypatch.setattr(stream, "MAX_SKIPPED", 10)
    with pytest.raises(TraceError, match="more than 10 rows"):
        mocker.simulate(mocker.TraceStream(path, on_error="skip"))
    assert len(result.meta["skipped_rows"]) == 22 and ":151:" in result.meta["skipped_rows"][1]
    path.write_bytes(gzip.compress("\n".join(lines(2000)).encode())[:-300])
    with pytest.raises(TraceError, match="gzip data ends too early"):
        mocker.simulate(mocker.TraceStream(path))


def test_zstandard(tmp_path, small):
    zstandard = pytest.importorskip("zstandard", reason="optional")
    path = tmp_path / "t.jsonl.zst"
    data = "\n".join(lines(1000)).encode()
    packed = [zstandard.ZstdCompressor().compress(part) for part in (data[:20_000], data[20_000:])]
    path.write_bytes(b"".join(packed))
    assert mocker.simulate(mocker.TraceStream(path)).report["completed_requests"] == 1000
    path.write_bytes(b"".join(packed)[:-20])
    with pytest.raises(TraceError, match="Zstandard data ends too early"):
        mocker.simulate(mocker.TraceStream(path))


def test_what_needs_the_whole_trace(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines(5)))
    for options, match in (
            ({"num_workers": 2, "router_mode": lambda *_: 0}, "of your own"),
            ({"num_workers": 2, "router_mode": "prefix_affinity"}, "prefix_affinity"),
            ({"replay_concurrency": 4}, "concurrency"),
            ({"num_workers": 2, "router_lower_tiers": True}, "requires router_mode='kv_router'"),
            ({"num_workers": 2, "router_mode": "kv_router", "router_lower_tiers": True}, "requires num_g2_blocks"),
            ({"recording": mocker.Recording()}, "recording"), ({"arrival_speedup_ratio": 0.0}, "speedup"),
            ({"arrival_speedup_ratio": 1e-308}, "infinite"),
            ({"extra_engine_args": mocker.MockEngineArgs(block_size=1024)}, "must divide"),
            ({"extra_engine_args": mocker.MockEngineArgs(num_g2_blocks=9, kv_bytes_per_token=1)}, "num_g2_blocks"),
            ({"trace_format": "qwen"}, "trace_format")):
        with pytest.raises(ValueError, match=match):
            mocker.simulate(mocker.TraceStream(path), **options)
    with pytest.raises(TypeError, match="load the trace"):
        mocker.open_simulation(mocker.TraceStream(path))
    for format, match in (("qwen", "cannot be streamed"), ("nope", "does not exist")):
        with pytest.raises(ValueError, match=match):
            mocker.TraceStream(path, format)
    csv = tmp_path / "t.csv"
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n")
    with pytest.raises(ValueError, match="trace convert"):
        mocker.simulate(mocker.TraceStream(csv))
    path.write_text("\n\n")
    (tmp_path / "rows.jsonl").write_text("of an earlier run")
    with pytest.raises(TraceError, match="did not contain any requests"):
        mocker.simulate(mocker.TraceStream(path), stream_to=tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_text() == "of an earlier run"
    sessions = mocker.Trace.from_columns(
        block_size=64, arrival_ms=[0.0, np.nan], input_length=[9, 9], output_length=[1, 1], hash_offsets=[0, 1, 2],
        hash_ids=np.array([1, 2], np.uint64), session=[0, 0], turn=[0, 1])
    columns.save(sessions, tmp_path / "s.mtrace")
    with pytest.raises(TraceError, match="session"):
        mocker.simulate(mocker.TraceStream(tmp_path / "s.mtrace"))
    with contextlib.suppress(TraceError):
        for stop in range(0, 400, 7):          # cut off anywhere: an error, nothing else
            (tmp_path / "s.mtrace").write_bytes((tmp_path / "s.mtrace").read_bytes()[:-7])
            mocker.simulate(mocker.TraceStream(tmp_path / "s.mtrace"))
            assert stop < 0
