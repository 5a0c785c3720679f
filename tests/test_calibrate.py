"""Calibration: known models from noisy logs of every kind, what the logs cannot say, and bad logs."""
from __future__ import annotations

import csv
import json

import numpy as np
import pytest

import mocker
from mocker import MockEngineArgs, simulate
from mocker.calibrate import Steps, fit, read_log, steps_from_requests, steps_from_rows
from mocker.cli import main
from mocker.timing import FormulaTiming, load_timing

LINEAR = FormulaTiming((8.0, 0.02, 0.0, 4e-6), (6.0, 0.05, 0.0, 0.0, 2e-5))
POLYNOMIAL = FormulaTiming((16.5, 0.0152, 4.2e-7, 0.0), (5.7, 0.0, 5e-5, -1e-10, 0.0))
FIELDS = ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens", "num_decode_requests",
          "sum_decode_kv_tokens")


def step_log(model: FormulaTiming, count: int, noise: float) -> tuple[list[dict], Steps]:
    """Work as engines do it, with times of the model, noise on them, and some pauses; and the same without these."""
    rng = np.random.default_rng(4)
    rows = []
    while len(rows) < count:
        decodes = int(rng.integers(0, 60))
        context = int(decodes * np.exp(rng.uniform(4, 8.5)))
        prompts = int(rng.integers(1, 5)) if rng.random() < 0.5 or decodes == 0 else 0
        tokens = prompts * int(np.exp(rng.uniform(3, 7.6)))
        prefix = prompts * int(rng.integers(0, 6000)) if rng.random() < 0.5 else 0
        rows.append(dict(zip(FIELDS, (prompts, tokens, prefix, decodes, context), strict=True)) | {"step_ms": 1.0})
    clean = steps_from_rows(rows)
    true = dict(zip((f"prefill.{n}" for n in model.PREFILL_TERMS), model.prefill, strict=True))
    true |= dict(zip((f"decode.{n}" for n in model.DECODE_TERMS), model.decode, strict=True))
    ms = sum(value * clean.terms()[name] for name, value in true.items())
    factor = np.exp(rng.normal(0.0, noise, count)) * np.where(rng.random(count) < 0.03, 8.0, 1.0)
    for row, time in zip(rows, ms * factor, strict=True):
        row["step_ms"] = float(time)
    return rows, Steps(ms, *(getattr(clean, n) for n in ("prefills", "tokens", "prefix", "decodes", "context", "pool")))


@pytest.mark.parametrize(("model", "kind"), [(LINEAR, "jsonl"), (LINEAR, "csv"), (POLYNOMIAL, "jsonl.gz"),
                                             (POLYNOMIAL, "parquet")], ids=lambda x: x if isinstance(x, str) else "")
def test_known_model_from_steps(model, kind, tmp_path, capsys):
    rows, clean = step_log(model, 4000, 0.08)
    path, output = tmp_path / f"steps.{kind}", tmp_path / "profile.json"
    if kind == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, [*FIELDS, "step_ms"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        import gzip

        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    assert main(["calibrate", str(path), "-o", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "held-out rows (prefill): median" in shown and "not identified" not in shown
    found = load_timing(output)
    assert isinstance(found, FormulaTiming)
    for batch, tokens, prefix in ((1, 60, 0), (1, 500, 0), (2, 900, 0), (4, 1500, 0), (3, 300, 4000)):
        want = model.prefill_ms(batch, tokens, prefix)
        assert found.prefill_ms(batch, tokens, prefix) == pytest.approx(want, rel=0.02)
    for batch, length in ((1, 100), (5, 2000), (30, 300), (30, 3000), (55, 1000)):
        kv = batch * length
        assert found.decode_ms(batch, kv, length) == pytest.approx(model.decode_ms(batch, kv, length), rel=0.02)
    errors = found.about["held_out_errors"]["all"]
    assert errors["median"] == pytest.approx(0.054, abs=0.01) and abs(errors["bias"]) < 0.02
    result = simulate(mocker.SyntheticSpec(500, 20, 10), extra_engine_args=MockEngineArgs(planner_profile_data=output))
    assert result.report["completed_requests"] == 10


def test_known_model_from_requests(tmp_path):
    trace = mocker.Trace.load(mocker.sample_trace_path()).head(3000)
    model = FormulaTiming((8.0, 0.02, 0.0, 4e-7), (6.0, 0.05, 0.0, 0.0, 2e-5))
    replay = simulate(trace, extra_engine_args=MockEngineArgs(timing_model=model), num_workers=8,
                      arrival_speedup_ratio=0.5)
    replay.write_jsonl(tmp_path / "requests.jsonl")
    found = fit(read_log([tmp_path / "requests.jsonl"])).model
    for tokens in (500, 2000, 7000):
        assert found.prefill_ms(1, tokens) == pytest.approx(model.prefill_ms(1, tokens), rel=0.02)
    for batch, length in ((1, 2000), (2, 8000), (4, 12000)):
        kv = batch * length
        assert found.decode_ms(batch, kv, length) == pytest.approx(model.decode_ms(batch, kv, length), rel=0.02)
    records = [{"arrival_ms": a, "ttft_ms": f - a, "itl_ms": (t - f) / max(n - 1, 1), "isl": i, "osl": n,
                "cached_tokens": c, "worker": w} for a, f, t, i, n, c, w in zip(*(
                    replay.per_request[name].tolist() for name in (
                        "arrival_time_ms", "first_token_ms", "last_token_ms", "input_length", "output_length",
                        "reused_input_tokens", "decode_worker_idx")), strict=True)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    again = fit(read_log([tmp_path / "records.jsonl"])).model
    assert again.decode_ms(4, 48000, 12000) == pytest.approx(found.decode_ms(4, 48000, 12000), rel=1e-3)


def metrics_page(engine: str, t: dict) -> str:
    if engine == "vllm":
        return (f'# HELP vllm:num_requests_running now\nvllm:num_requests_running{{model_name="m"}} {t["running"]}\n'
                f'vllm:kv_cache_usage_perc{{model_name="m"}} {t["pool"] / (1000 * 16)}\n'
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",x="a b"} 1.0\n'
                f"vllm:inter_token_latency_seconds_sum {t['itl']}\nvllm:inter_token_latency_seconds_count {t['gaps']}\n"
                f"vllm:request_prefill_time_seconds_sum {t['prefill']}\n"
                f"vllm:request_prefill_time_seconds_count {t['prompts']}\nvllm:prompt_tokens_total {t['tokens']}\n")
    return (f"sglang:num_running_reqs {t['running']}\nsglang:num_used_tokens {t['pool']}\n"
            f"sglang:inter_token_latency_seconds_sum {t['itl']}\nsglang:inter_token_latency_seconds_count {t['gaps']}\n"
            f"sglang:time_to_first_token_seconds_sum {t['prefill']}\n"
            f"sglang:time_to_first_token_seconds_count {t['prompts']}\nsglang:prompt_tokens_total {t['tokens']}\n"
            "sglang:cached_tokens_total 0\n")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_known_model_from_metrics(engine, tmp_path):
    rng = np.random.default_rng(1)
    total = dict.fromkeys(("itl", "gaps", "prefill", "prompts", "tokens"), 0.0)
    files = []
    for i in range(120):
        level = rng.integers(1, 40)
        for k in range(2):                     # a steady spell between two dumps, then a change
            if k:
                total["gaps"] += 500
                total["itl"] += 0.5 * LINEAR.decode_ms(int(level), int(level) * 300, 300)
                size = int(rng.integers(50, 4000))
                total["prompts"] += 4
                total["tokens"] += 4 * size
                total["prefill"] += 4e-3 * LINEAR.prefill_ms(1, size)
            files.append(tmp_path / f"{i:03}{k}.prom")
            files[-1].write_text(metrics_page(engine, total | {"running": level, "pool": level * 300}))
    found = fit(read_log(files)).model
    for size in (100, 1000, 3500):
        assert found.prefill_ms(1, size) == pytest.approx(LINEAR.prefill_ms(1, size), rel=0.02)
    for batch in (2, 10, 35):
        want = LINEAR.decode_ms(batch, batch * 300, 300)
        assert found.decode_ms(batch, batch * 300, 300) == pytest.approx(want, rel=0.02)
    joined = tmp_path / "all.prom"
    joined.write_text("".join(path.read_text() for path in files))
    if engine == "vllm":
        assert len(read_log([joined])) == len(read_log(files))
    with pytest.raises(ValueError, match="at least two dumps of the metrics are needed, got 1"):
        read_log(files[:1])
    bare = [tmp_path / "a.prom", tmp_path / "b.prom"]
    for path in bare:
        path.write_text("x 1\n")
    with pytest.raises(ValueError, match="metrics: no metric vllm:num_requests_running or sglang:num_running_reqs"):
        read_log(bare)


def test_what_the_data_cannot_say(capsys, tmp_path):
    rows, _ = step_log(LINEAR, 1500, 0.05)
    one_size = [row | {"sum_prefill_tokens": 512 * row["num_prefill_requests"], "sum_prefill_kv_tokens": 0,
                       "step_ms": 10.0} for row in rows if row["num_prefill_requests"] in (0, 1)]
    found = fit(steps_from_rows(one_size))
    assert any("prefill.tokens: the data cannot tell it from prefill.constant" in doubt for doubt in found.doubts)
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in one_size))
    assert main(["calibrate", str(tmp_path / "one.jsonl"), "-o", str(tmp_path / "p.json")]) == 0
    assert "not identified: prefill.tokens" in capsys.readouterr().out
    assert load_timing(tmp_path / "p.json").about["doubts"]
    proportional = [row | {"sum_decode_kv_tokens": 700 * row["num_decode_requests"]} for row in rows]
    found = fit(steps_from_rows(proportional))
    assert found.model.decode[4] == 0.0 or found.model.decode[1] == 0.0       # not split between the two at random
    with pytest.raises(ValueError, match="0 steps with decode work and at least 20 are needed: nothing can be said of "
                                         "decode times"):
        fit(steps_from_rows([row | {"num_decode_requests": 0, "sum_decode_kv_tokens": 0} for row in rows]))
    with pytest.raises(ValueError, match="steps with prefill work"):
        nothing = np.zeros(0)
        fit(steps_from_requests(nothing, nothing, nothing, nothing, nothing))


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", "", "a.jsonl: the log is empty"),
    ("a.jsonl", "{", "a.jsonl: line 1: not JSON"),
    ("a.jsonl", "[1]", "a.jsonl: line 1: expected an object"),
    ("a.jsonl", '{"x": 1}', "neither a step time .* nor ttft_ms or first_token_ms among the fields x"),
    ("a.jsonl", '{"step_ms": 1}\n{"step_ms": "slow"}', "a.jsonl: row 2: step_ms must be a number of at least 0"),
    ("a.jsonl", '{"step_ms": -1}', "a.jsonl: row 1: step_ms must be a number of at least 0, got -1"),
    ("a.jsonl", '{"step_ms": 1, "num_decode_requests": null}', "row 1: num_decode_requests must be a number"),
    ("a.csv", "ttft_ms,isl,osl\n1,2,3", "a.csv: no field arrival_time_ms or arrival_ms"),
    ("a.csv", "arrival_ms,ttft_ms,isl,osl\n0,1,2,3", "none of last_token_ms, e2e_latency_ms, itl_ms"),
    ("a.csv", "arrival_ms,ttft_ms,isl,osl,e2e_ms\n0,1,x,3,4", "a.csv: row 1: isl must be a number, got 'x'"),
    ("a.jsonl.gz", "no gzip", "a.jsonl.gz: not a text"),
])
def test_bad_logs(name, content, message, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_log([path])
    assert main(["calibrate", str(path), "-o", str(tmp_path / "p.json")]) == 2
    assert not (tmp_path / "p.json").exists()
    with pytest.raises(OSError):
        read_log([tmp_path / "none.jsonl"])
