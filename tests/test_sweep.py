"""Sweeps: the same table from every backend, rows that survive kill -9, errors as rows, the command."""
from __future__ import annotations

import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest

import mocker
from mocker.cli import main
from mocker.sweeps import grid, simulate_keywords
from mocker.sweeps.backends import make_backend

SPEC = mocker.SyntheticSpec(200, 20, 60, arrival_interval_ms=5.0, turns_per_session=2, inter_turn_delay_ms=50.0)
GRID = {"num_workers": [1, 2, 3], "num_gpu_blocks": [64, 256], "router_mode": ["round_robin", "kv_router"],
        "block_size": 16}


def killer(*_: object) -> int:
    """A routing policy that takes its process down."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.fixture(scope="module")
def expected() -> mocker.SweepTable:
    return mocker.sweep(SPEC, GRID, workers=1)


def test_rows_are_those_of_simulate_and_failures_are_rows(expected):
    assert len(expected) == 12
    assert set(expected.errors) == {1, 3}       # the KV router needs two workers
    assert all("num_workers > 1" in text for text in expected.errors.values())
    args = mocker.MockEngineArgs(num_gpu_blocks=256, block_size=16)
    report = mocker.simulate(SPEC, extra_engine_args=args, num_workers=2, router_mode="kv_router").report
    row = expected.rows()[7]
    assert row["error"] is None and row["num_workers"] == 2
    assert {key: row[key] for key in expected.keys if key in report} == {
        key: report[key] for key in expected.keys if key in report}
    columns = expected.columns
    assert columns["num_workers"].dtype == np.int64
    assert np.isnan(columns["mean_ttft_ms"][[1, 3]]).all()
    assert expected.to_pandas().shape == (12, len(columns))
    assert expected.to_arrow()["error"].null_count == 10
    assert expected.best("gpu_hours")["num_workers"] == 1


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_backends_give_the_same_table(expected, backend):
    assert mocker.sweep(SPEC, grid(GRID), backend=backend, workers=3).rows() == expected.rows()


def test_an_executor_is_a_backend(expected):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert mocker.sweep(SPEC, list(grid(GRID)), backend=pool).rows() == expected.rows()
        assert pool.submit(int).result() == 0       # still ours


def test_dask(expected):
    distributed = pytest.importorskip("distributed", reason="Dask is an optional extra")
    with distributed.Client(processes=False, n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
        assert mocker.sweep(SPEC, GRID, backend=client).rows() == expected.rows()


def test_ray(expected, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is an optional extra")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")             # its own
        assert mocker.sweep(SPEC, GRID, backend="ray", workers=2).rows() == expected.rows()
    assert not ray.is_initialized()


def test_a_killed_process_costs_only_its_own_row(expected):
    configs = [*grid(GRID), {"num_workers": 2, "router_mode": killer}]
    table = mocker.sweep(SPEC, configs, backend="processes", workers=2)
    assert table.rows()[:12] == list(expected.rows())
    assert "WorkerDied" in table.errors[12]


def test_base_keys_and_progress():
    seen = []
    table = mocker.sweep(SPEC, ({"num_workers": n} for n in (1, 0, 2)), base={"num_workers": 9, "block_size": 32},
                         keys=["mean_ttft_ms", "samples.ttft"], progress=lambda *step: seen.append(step))
    assert [step[0] for step in seen] == [1, 2, 3] and seen[-1][2] == 1 and seen[0][1] is None
    assert table.columns["samples.ttft"].tolist()[::2] == [120.0, 120.0]
    assert list(table.rows()[0]) == ["num_workers", "block_size", "mean_ttft_ms", "samples.ttft", "error"]
    seen.clear()
    mocker.sweep(SPEC, {"num_workers": [1, 2]}, progress=lambda *step: seen.append(step))
    assert [step[:3] for step in seen] == [(1, 2, 0), (2, 2, 0)] and seen[-1][3] == 0.0


def test_names_of_a_configuration():
    keywords = simulate_keywords({
        "num_prefill_workers": 2, "block_size": 32, "decode.max_num_seqs": 8, "prefill.kv_bytes_per_token": 7,
        "router.router_temperature": 0.5})
    assert keywords["prefill_engine_args"].worker_type == "prefill"
    assert keywords["prefill_engine_args"].kv_bytes_per_token == 7
    assert keywords["decode_engine_args"].max_num_seqs == 8 and keywords["decode_engine_args"].block_size == 32
    assert keywords["router_config"].router_temperature == 0.5
    page = simulate_keywords({"engine_type": "sglang", "sglang.page_size": 16})["extra_engine_args"]
    assert page.sglang.page_size == 16
    base = mocker.MockEngineArgs(block_size=32, max_num_seqs=5)
    assert simulate_keywords({"extra_engine_args": base, "max_num_seqs": 7})["extra_engine_args"] == base.replace(
        max_num_seqs=7)
    for name in ("blocksize", "prefill.num_workers", "router.blocksize", "progress", "_real_tokens"):
        with pytest.raises(ValueError, match=f"'{name}' is no keyword"):
            simulate_keywords({name: 1})


def test_bad_arguments():
    for options, match in (({"backend": "spark"}, "backend"), ({"workers": 0}, "workers"), ({"keys": "p50"}, "keys")):
        with pytest.raises(ValueError, match=match):
            mocker.sweep(SPEC, GRID, **options)
    with pytest.raises(TypeError, match="configuration"):
        mocker.sweep(SPEC, [1])
    with pytest.raises(TypeError, match="workload"):
        mocker.sweep(5, GRID)


def test_resumes_from_every_torn_file(tmp_path, expected):
    path = tmp_path / "rows.jsonl"
    mocker.sweep(SPEC, GRID, workers=1, out=path)
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    rng = random.Random(1)
    for cut in [0, 1, ends[0] - 1, ends[0], ends[1] - 1, len(data) - 1, len(data), *rng.sample(range(len(data)), 8)]:
        path.write_bytes(data[:cut])
        computed = []
        table = mocker.sweep(SPEC, GRID, out=path, progress=lambda *step, to=computed: to.append(step[3] is not None))
        assert table.rows() == expected.rows()
        assert sum(computed) == 12 - max(sum(end <= cut for end in ends) - 1, 0)
        assert sorted(path.read_bytes().splitlines()) == sorted(data.splitlines())
    path.write_bytes(data)
    retried = []
    mocker.sweep(SPEC, GRID, out=path, retry_errors=True, progress=lambda *step: retried.append(step[3] is not None))
    assert sum(retried) == 2


def test_files_of_other_sweeps_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    mocker.sweep(SPEC, {"num_workers": [1, 2]}, out=path)
    data = path.read_bytes()
    other = mocker.SyntheticSpec(200, 20, 61)
    for call in (lambda: mocker.sweep(other, {"num_workers": [1]}, out=path),
                 lambda: mocker.sweep(SPEC, {"num_workers": [1]}, keys=["mean_ttft_ms"], out=path)):
        with pytest.raises(ValueError, match="another sweep"):
            call()
    assert path.read_bytes() == data
    for text, match in ((b"hello\n", ":1: damaged"), (b"hello", "not a file of a sweep"), (b"{}\n", "not a file"),
                        (data + b"{\n", ":4: damaged"), (data + b"{}\n", ":4: not a row")):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=match):
            mocker.sweep(SPEC, {"num_workers": [1]}, out=path)
        assert path.read_bytes() == text
    with pytest.raises(ValueError, match="router_mode: .*recorded"):
        mocker.sweep(SPEC, [{"router_mode": killer}], out=tmp_path / "new.jsonl")


def test_two_sweeps_never_share_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    refused = []

    def again(*_: object) -> None:
        with pytest.raises(ValueError, match="another sweep is writing"):
            mocker.sweep(SPEC, {"num_workers": [1]}, out=path)
        refused.append(True)

    mocker.sweep(SPEC, {"num_workers": [1]}, out=path, progress=again)
    assert refused


def test_kill_9_loses_no_finished_row(tmp_path):
    """A sweep in a process of its own, killed at random moments until it is through."""
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "mocker", "sweep", "--input-tokens", "500", "--output-tokens", "40",
               "--request-count", "20000", "--arrival-interval-ms", "2",
               "--grid", f"num_workers={','.join(map(str, range(1, 41)))}", "--set", "block_size=16",
               "--out", str(path), "--quiet", "--workers", "2"]
    rng = random.Random(7)
    whole: dict[str, str] = {}
    kills = 0
    while True:
        process = subprocess.Popen(command)
        more = rng.randint(1, 8)
        while process.poll() is None and (path.read_bytes().count(b"\n") if path.exists() else 0) < len(whole) + more:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.003)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
        else:
            assert process.returncode == 0
        data = path.read_bytes()
        lines = data[:data.rfind(b"\n") + 1].decode().splitlines()
        now = {json.dumps(json.loads(line).get("config")): line for line in lines}
        assert len(now) == len(lines), "a row was computed twice"
        assert whole.items() <= now.items(), "a finished row is gone"
        whole = now
        if process.returncode == 0:
            break
    assert kills >= 3 and len(whole) == 41
    spec = mocker.SyntheticSpec(500, 40, 20_000, arrival_interval_ms=2.0)
    table = mocker.sweep(spec, {"num_workers": range(1, 41)}, base={"block_size": 16})
    written = {row["config"]["num_workers"]: row for row in map(json.loads, whole.values()) if "config" in row}
    for config, row in zip(range(1, 41), table.rows(), strict=True):
        assert written[config]["report"] == {key: row[key] for key in table.keys}


@pytest.mark.parametrize("kind", ["yaml", "toml"])
def test_command_with_a_spec_file(tmp_path, capsys, kind):
    spec = tmp_path / f"spec.{kind}"
    spec.write_text("""
workload = {input_tokens = 200, output_tokens = 20, request_count = 30}
base = {block_size = 16}
grid = {num_workers = [1, 2]}
keys = ["mean_ttft_ms"]
out = "rows.jsonl"
configs = [{num_workers = 0}]
""" if kind == "toml" else """
workload: {input_tokens: 200, output_tokens: 20, request_count: 30}
base: {block_size: 16}
grid: {num_workers: [1, 2]}
keys: [mean_ttft_ms]
out: rows.jsonl
configs: [{num_workers: 0}]
""")
    assert main(["sweep", "--spec", str(spec), "--csv", str(tmp_path / "t.csv"), "--grid", "max_num_seqs=[4,8]"]) == 0
    shown = capsys.readouterr().out
    assert "num_workers" in shown and "mean_ttft_ms" in shown and "block_size" not in shown and "at least 1" in shown
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[0] == "block_size,num_workers,max_num_seqs,mean_ttft_ms,error" and len(lines) == 6
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 6


def test_command_refuses_bad_input(tmp_path, capsys):
    bad = tmp_path / "spec.yaml"
    for text, match in (("grit: {}", "grit: unknown field"), ("workers: many", "workers: expected int"), ("[", "YAML"),
                        ("- 1", "expected a mapping")):
        bad.write_text(text)
        assert main(["sweep", "--spec", str(bad)]) == 2
        assert match in capsys.readouterr().err
    synthetic = ["--input-tokens", "10", "--output-tokens", "1", "--request-count", "1"]
    for arguments, match in (([], "no workload"), (synthetic, "no configurations"), (synthetic[:2], "needs"),
                             ([*synthetic, "--grid", "x"], "expected NAME=VALUE"),
                             ([*synthetic, "f.jsonl"], "exclude")):
        assert main(["sweep", *arguments]) == 2
        assert match in capsys.readouterr().err
    assert main(["sweep", *synthetic, "--grid", "num_workers=0"]) == 1
    assert "every configuration failed" in capsys.readouterr().err


def test_threads_pass_on_what_a_task_raises_and_end():
    def task(workload, item, settings):
        if item == 3:
            raise KeyboardInterrupt
        return {"report": {"sum": workload + item + settings}}

    before = threading.active_count()
    backend = make_backend("threads", 2, task, 10, 100)
    backend.submit(0, 1)
    assert backend.finished() == [(0, {"report": {"sum": 111}})]
    backend.submit(1, 3)
    with pytest.raises(KeyboardInterrupt):
        backend.finished()
    for index in range(2, 50):
        backend.submit(index, 1)               # which nobody will wait for
    backend.close()
    assert threading.active_count() == before
    make_backend("threads", 2, task, 10, 100).close()
