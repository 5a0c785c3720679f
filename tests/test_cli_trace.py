"""`mocker trace`: what the commands print, write and exit with."""
from __future__ import annotations

import io
import json
import sys

import pytest

from mocker import Trace
from mocker.cli import main
from mocker.synth import Recipe


def run(capsys, *argv: object) -> tuple[int, str, str]:
    code = main(["trace", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def trace_file(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    code, out, err = run(capsys, "generate", "--count", 200, "--arrivals", "poisson:10", "--input", "uniform:1,900",
                         "--output", "64", "--turns", "2", "--prefix", "1x512", "--seed", 5, "--block-size", 512,
                         "--out", path)
    assert (code, out) == (0, "") and err == f"{path}: 400 requests, block size 512\n"
    return path


def test_generate_equals_the_recipe(tmp_path, trace_file, capsys):
    recipe = "count=200; arrivals=poisson:10; input=uniform:1,900; output=64; turns=2; " \
        "prefix=1x512; seed=5; block_size="
    assert Trace.load(trace_file).hash_ids.tolist() == Recipe.parse(recipe + "512").trace().hash_ids.tolist()
    (tmp_path / "recipe").write_text(recipe + "512")
    assert run(capsys, "generate", "--recipe", f"@{tmp_path / 'recipe'}", "-o", tmp_path / "u.jsonl")[0] == 0
    assert (tmp_path / "u.jsonl").read_bytes() == trace_file.read_bytes()
    code, _, err = run(capsys, "generate", "--recipe", recipe + "64", "-o", tmp_path / "v.jsonl.gz")
    assert code == 0 and "read it with --trace-block-size 64" in err
    code, _, err = run(capsys, "generate", "--count", 5, "--arrivals", "tidal:3")
    assert code == 2 and "there are constant, poisson" in err
    code, _, err = run(capsys, "generate", "--count", 5, "--recipe", "count=5")
    assert code == 2 and "--recipe stands alone; leave out --count" in err


def test_info(tmp_path, trace_file, capsys):
    code, out, _ = run(capsys, "info", trace_file, "--plot", tmp_path / "p.html")
    assert code == 0 and "400 requests in 200 sessions" in out and "prefix reuse in blocks of 512" in out
    assert (tmp_path / "p.html").stat().st_size > 10_000
    code, out, _ = run(capsys, "info", trace_file, trace_file, "--json", "--bin-ms", 1000, "--block-size", 64)
    found = json.loads(out)[str(trace_file)]
    assert code == 0 and found["requests"] == 400 and found["prefix_reuse"]["block_size"] == 64
    assert sum(found["arrivals"]["requests"]) == 400


def test_check_lists_and_exits(trace_file, capsys):
    code, out, _ = run(capsys, "check", trace_file)
    assert code == 0 and "0 kinds of errors" in out
    code, out, _ = run(capsys, "check", trace_file, "--num-gpu-blocks", 20, "--block-size", 64, "--json")
    found = json.loads(out)[str(trace_file)]["findings"]
    assert code == 1 and [f["code"] for f in found] == ["huge-prompt"]
    with open(trace_file, "a") as file:
        file.write('{"input_length": 5, "output_length": 0, "hash_ids": [1], "timestamp": 1e9}\n{"oops\n')
    code, out, _ = run(capsys, "check", trace_file)
    assert code == 1 and "skipped-row: 1 of 401 rows (line 402): could not be read" in out and "zero-output" in out
    code, out, err = run(capsys, "head", trace_file, "--on-error", "skip", "-n", 1)
    assert code == 0 and out.count("\n") == 1
    assert "t.jsonl:402: row: ends too early" in err and "skipped 1 rows" in err
    code, out, err = run(capsys, "head", trace_file)
    assert code == 2 and "t.jsonl:402: row: ends too early" in err


def test_convert_head_merge_scale(tmp_path, trace_file, capsys, monkeypatch):
    trace = Trace.load(trace_file)
    assert run(capsys, "convert", trace_file, "-o", tmp_path / "t.mtrace")[0] == 0
    assert Trace.load(tmp_path / "t.mtrace") == trace
    code, out, _ = run(capsys, "head", tmp_path / "t.mtrace", "-n", 3)
    assert out == "".join(trace_file.read_text().splitlines(keepends=True)[:3])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(trace_file.read_bytes())))
    assert run(capsys, "head", "-", "-n", 3)[1] == out
    assert run(capsys, "merge", trace_file, tmp_path / "t.mtrace", "-o", tmp_path / "m.mtrace")[0] == 0
    merged = Trace.load(tmp_path / "m.mtrace")
    assert merged.n == 800 and len(set(merged.hash_ids.tolist())) == 2 * len(set(trace.hash_ids.tolist()))
    run(capsys, "merge", trace_file, trace_file, "--shared-hash-ids", "-o", tmp_path / "s.mtrace")
    assert set(Trace.load(tmp_path / "s.mtrace").hash_ids.tolist()) == set(trace.hash_ids.tolist())
    run(capsys, "scale", trace_file, "--speed", 2, "--start", 100, "-o", tmp_path / "x.mtrace")
    fast = Trace.load(tmp_path / "x.mtrace")
    first = trace.arrival_ms[0]
    assert fast.arrival_ms[::2] == pytest.approx((trace.arrival_ms[::2] - first) / 2 + 100)
    run(capsys, "scale", trace_file, "--arrivals", "constant:2", "--think", "1.5", "-o", tmp_path / "y.mtrace")
    assert Trace.load(tmp_path / "y.mtrace").arrival_ms[2] == 500
    code, _, err = run(capsys, "scale", trace_file, "--think", "1")
    assert code == 2 and "--think needs --arrivals" in err
    code, _, err = run(capsys, "convert", trace_file, "-o", tmp_path / "t.xml")
    assert code == 2 and "is written as .jsonl" in err


def test_bad_flags(trace_file, capsys):
    code, _, err = run(capsys, "info", trace_file, "--trace-option", "color=red")
    assert code == 2 and "color means nothing to format 'mooncake'" in err
    code, _, err = run(capsys, "info", trace_file, "--trace-option", "color")
    assert code == 2 and "expected NAME=VALUE" in err
    code, _, err = run(capsys, "info", trace_file.parent / "none.jsonl")
    assert code == 2 and "none.jsonl: No such file" in err
    for argv in (["trace"], ["trace", "info"], ["trace", "dance"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
