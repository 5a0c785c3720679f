"""mocker.report: keys, table, JSON file."""

import json
import os
import re
import stat
import threading

import numpy as np
import pytest

from mocker import report as report_module
from mocker.report import (
    DISTRIBUTIONS,
    GOODPUT_KEYS,
    REPORT_KEYS,
    STATISTICS,
    TITLE,
    format_report_table,
    format_value,
    order_report,
    problem_lines,
    read_report_json,
    write_atomically,
    write_report_json,
)

GOLDEN_TABLE = """\
mocker | LLM serving simulation
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━┳━━━━━━━━┳━━━━━━━┳━━━━━━━┳━━━━━━━┳━━━━━━┓
┃ Metric                                             ┃      avg ┃  min ┃    max ┃   p99 ┃   p90 ┃   p75 ┃  std ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━╇━━━━━━━━╇━━━━━━━╇━━━━━━━╇━━━━━━━╇━━━━━━┩
┃ Time to First Token (ms)                           ┃     1.00 ┃ 2.00 ┃   3.00 ┃  8.00 ┃  6.00 ┃  5.00 ┃ 9.00 ┃
┃ Time to Second Token (ms)                          ┃      N/A ┃  N/A ┃    N/A ┃   N/A ┃   N/A ┃   N/A ┃  N/A ┃
┃ Request Latency (ms)                               ┃    10.00 ┃ 0.00 ┃ 123.46 ┃ 80.00 ┃ 60.00 ┃ 50.00 ┃  N/A ┃
┃ Inter Token Latency (ms)                           ┃      N/A ┃  N/A ┃    N/A ┃   N/A ┃   N/A ┃   N/A ┃  N/A ┃
┃ Output Token Throughput Per User (tokens/sec/user) ┃      N/A ┃  N/A ┃    N/A ┃   N/A ┃   N/A ┃   N/A ┃  N/A ┃
┃ Output Token Throughput (tokens/sec)               ┃ 9,876.54 ┃  N/A ┃    N/A ┃   N/A ┃   N/A ┃   N/A ┃  N/A ┃
┃ Request Throughput (requests/sec)                  ┃     2.50 ┃  N/A ┃    N/A ┃   N/A ┃   N/A ┃   N/A ┃  N/A ┃
┃ Request Count (requests)                           ┃    12.00 ┃  N/A ┃    N/A ┃   N/A ┃   N/A ┃   N/A ┃  N/A ┃
└━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┴━━━━━━━━━━┴━━━━━━┴━━━━━━━━┴━━━━━━━┴━━━━━━━┴━━━━━━━┴━━━━━━┘
Wall Time (ms): 1,234.50
Prefix Cache Reused Ratio: 0.38
First Admission Prefix Cache Reused Ratio: 0.25
Rejected: 3 (larger than the KV pool)
Incomplete: 1,200 (not finished when the replay ended)"""


def sample_report() -> dict:
    report = {f"{name}_ttft_ms": float(value) for value, name in enumerate(STATISTICS, 1)}
    report |= {f"{name}_ttst_ms": None for name in STATISTICS}
    report |= {f"{name}_e2e_latency_ms": 10.0 * value for value, name in enumerate(STATISTICS, 1)}
    report |= {"min_e2e_latency_ms": 0, "max_e2e_latency_ms": 123.456, "std_e2e_latency_ms": float("nan")}
    report |= {"output_throughput_tok_s": 9876.543, "request_throughput_rps": 2.5, "completed_requests": 12}
    report |= {"wall_time_ms": 1234.5, "prefix_cache_reused_ratio": 0.375}
    report |= {"first_admission_prefix_cache_reused_ratio": 0.25, "num_requests": 15}
    report |= {"rejected_requests": 3, "capacity_requests": 0, "incomplete_requests": 1200, "stalled": []}
    report |= {"samples": {"ttft_ms": 12}, "clamped_requests": None}
    return report


def test_report_keys():
    assert len(REPORT_KEYS) == len(set(REPORT_KEYS)) == 77
    assert len(set(REPORT_KEYS) - set(GOODPUT_KEYS)) == 74
    assert REPORT_KEYS[:3] == ("num_requests", "completed_requests", "total_input_tokens")
    start = REPORT_KEYS.index("goodput_completed_requests")
    assert REPORT_KEYS[start - 1 : start + 4] == ("gpu_hours", *GOODPUT_KEYS, "processed_tokens")
    assert REPORT_KEYS[-54:-44] == (*(f"{name}_ttft_ms" for name in STATISTICS), "mean_ttst_ms")
    assert REPORT_KEYS[-1] == "std_output_token_throughput_per_user"
    assert len(DISTRIBUTIONS) == 6


def test_order_report():
    assert list(order_report({"zz": 1, "std_itl_ms": 2, "aa": 3, "num_requests": 4})) == [
        "num_requests",
        "std_itl_ms",
        "zz",
        "aa",
    ]


def test_table_golden():
    assert format_report_table(sample_report()) == GOLDEN_TABLE


def test_table_of_an_empty_report():
    lines = format_report_table({}).splitlines()
    assert lines[0] == TITLE
    assert len(lines) == 1 + 3 + 8 + 1
    assert all(line.count("N/A") == 7 for line in lines[4:-1])
    assert len({len(line) for line in lines[1:]}) == 1


def test_request_count_falls_back_to_num_requests():
    assert re.search(r"Request Count \(requests\) +┃ 7\.00 ", format_report_table({"num_requests": 7}))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "N/A"),
        (float("nan"), "N/A"),
        (0, "0.00"),
        (1234567, "1,234,567.00"),
        (-1234.567, "-1,234.57"),
        (np.float32(1.5), "1.50"),
        (np.int64(2000), "2,000.00"),
        ("text", "text"),
        (True, "True"),
    ],
)
def test_format_value(value, text):
    assert format_value(value) == text


def test_problem_lines():
    assert problem_lines({"num_requests": 5, "rejected_requests": 0, "stalled": []}) == []
    report = {
        "shortened_prompts": 1000,
        "clamped_requests": 7,
        "capacity_requests": 1,
        "stalled": [{"request_id": "r1", "waits_for": "KV blocks", "x": None}, "r2"],
    }
    assert problem_lines(report) == [
        "Capacity: 1 (stopped early: prompt and output outgrew the KV pool)",
        "Clamped: 7 (output limit cut to what the KV pool can hold)",
        "Shortened: 1,000 (prompt cut to what its hash ids cover)",
        "Stalled: 2 (can never go on: request_id r1, waits_for KV blocks; r2)",
    ]
    (line,) = problem_lines({"stalled": [f"r{index}" for index in range(8)]})
    assert line == "Stalled: 8 (can never go on: r0; r1; r2; r3; r4; and 3 more, see the report)"


def test_write_and_read(tmp_path):
    report = {"num_requests": 2, "b": [1, (2.5, np.int32(3))], "a": {"x": np.array([1.0, np.nan])}, "é": "ü"}
    report |= {
        "mean_ttft_ms": None,
        "max_ttft_ms": float("inf"),
        "min_ttft_ms": np.float64(0.1),
        "flag": np.bool_(True),
    }
    path = write_report_json(report, tmp_path / "new" / "folder" / "r.json")
    assert path == tmp_path / "new" / "folder" / "r.json"
    text = path.read_text()
    expected = {"num_requests": 2, "b": [1, [2.5, 3]], "a": {"x": [1.0, None]}, "é": "ü"}
    expected |= {"mean_ttft_ms": None, "max_ttft_ms": None, "min_ttft_ms": 0.1, "flag": True}
    assert text == json.dumps(expected, indent=2, sort_keys=True) + "\n"
    assert os.listdir(path.parent) == ["r.json"]
    read = read_report_json(path)
    assert read == expected
    assert list(read)[:3] == ["num_requests", "mean_ttft_ms", "min_ttft_ms"]


def test_default_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = write_report_json({})
    assert first.parent == tmp_path
    assert re.fullmatch(r"dynamo_replay_report_\d{8}_\d{6}\.json", first.name)
    folder = tmp_path / "reports"
    folder.mkdir()
    paths = [write_report_json({}, folder) for _ in range(3)]
    assert len(set(paths)) == 3  # also within one second
    assert {path.parent for path in paths} == {folder}
    assert write_report_json({}, f"{tmp_path}/not_there_yet/").parent == tmp_path / "not_there_yet"


def test_write_replaces_and_follows_links(tmp_path):
    target = tmp_path / "target.json"
    target.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    write_report_json({"a": 1}, link)
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"a": 1}
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~umask


def test_a_failed_write_changes_nothing(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    with pytest.raises(RuntimeError), write_atomically(path) as file:
        file.write(b"half of it")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.json"]


def test_write_into_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    write_report_json({"a": 1}, path)
    reader.join(10)
    assert json.loads(got[0]) == {"a": 1}
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[1]", "expected a JSON object, got list")])
def test_read_errors_name_the_file(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_report_json(path)
    assert str(path) in str(error.value)


def test_all_names_exist():
    assert all(hasattr(report_module, name) for name in report_module.__all__)
