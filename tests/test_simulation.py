"""mocker.simulation: columns, their other forms and files."""

import gzip
import json
import math
import os
import pickle
import sys
import uuid

import numpy as np
import pytest

import mocker
import mocker.simulation as simulation_module
from mocker.simulation import RECORD_KEYS, Simulation

NAN = math.nan


def sample_columns() -> dict[str, np.ndarray]:
    """Four requests: completed, rejected, cut off, and stopped for lack of memory; not in order of arrival."""
    return {
        "row": np.arange(4),
        "request_id": np.array(["a", 'quote " and \n', None, "é%s"], dtype=object),
        "session_id": np.array(["s0", "s0", None, "s1"], dtype=object),
        "turn_index": np.array([0, 1, -1, 0]),
        "arrival_time_ms": np.array([5.0, 0.1, 0.1, 0.1]),
        "first_admit_ms": np.array([6.0, NAN, 2.0, 3.0]),
        "first_token_ms": np.array([7.0, NAN, NAN, 1e-7]),
        "last_token_ms": np.array([9.0, NAN, NAN, 1e22]),
        "ttft_ms": np.array([2.0, NAN, NAN, 1 / 3]),
        "ttst_ms": np.array([1.0, NAN, NAN, NAN]),
        "e2e_latency_ms": np.array([4.0, NAN, NAN, 5.0]),
        "itl_ms": np.array([1.0, NAN, NAN, np.inf]),
        "input_length": np.array([100, 10**6, 50, 60], dtype=np.uint32),
        "output_length": np.array([3, 4, 5, 6], dtype=np.int32),
        "output_tokens": np.array([3, 0, 0, 1]),
        "reused_input_tokens": np.array([64, -1, 0, 0]),
        "prefill_worker_idx": np.array([-1, -1, -1, -1], dtype=np.int32),
        "decode_worker_idx": np.array([0, -1, 1, 2], dtype=np.int16),
        "terminal_status": np.array(["completed", "rejected", "incomplete", "capacity"], dtype=object),
    }


@pytest.fixture
def simulation() -> Simulation:
    report = {"num_requests": 4, "completed_requests": 1, "duration_ms": 9000.0, "median_ttft_ms": 2.04}
    report |= {"rejected_requests": 1, "output_throughput_tok_s": None, "mean_ttft_ms": 1.0}
    return Simulation(report, sample_columns(), {"version": "x"})


def read_jsonl(path) -> list[dict]:
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def plain(column: np.ndarray) -> list:
    """What a column means: None for a missing value."""
    values = column.tolist()
    if column.dtype.kind == "f":
        return [None if math.isnan(value) else value for value in values]
    return [None if value == -1 else value for value in values] if column.dtype.kind == "i" else values


def test_attributes(simulation):
    assert simulation.report["num_requests"] == 4
    assert list(simulation.per_request) == list(sample_columns())
    assert simulation.meta == {"version": "x"}
    copy = pickle.loads(pickle.dumps(simulation))
    assert copy.report == simulation.report
    assert copy.per_request["row"].tolist() == [0, 1, 2, 3]


def test_what_is_made_when_it_is_asked_for():
    args = mocker.MockEngineArgs(num_gpu_blocks=256)
    result = mocker.simulate(mocker.SyntheticSpec(100, 5, 3), extra_engine_args=args)
    args.aic_mtp_seed = 77
    copy = pickle.loads(pickle.dumps(result))
    assert copy.per_request["output_tokens"].tolist() == result.per_request["output_tokens"].tolist() == [5, 5, 5]
    assert copy.meta["engine_args"] == result.meta["engine_args"] and "77" not in result.meta["engine_args"]
    assert result.per_request is result.per_request
    broken = Simulation({}, lambda: {"a": np.zeros(2), "b": np.zeros(3)}, dict)
    with pytest.raises(ValueError, match="differ in length"):
        _ = broken.per_request


def test_columns_of_different_length():
    with pytest.raises(ValueError, match=r"differ in length: \{'a': 2, 'b': 3\}"):
        Simulation({}, {"a": np.zeros(2), "b": np.zeros(3)}, {})


def test_jsonl(simulation, tmp_path):
    path = simulation.write_jsonl(tmp_path / "deep" / "r.jsonl")
    assert path == tmp_path / "deep" / "r.jsonl"
    assert os.listdir(path.parent) == ["r.jsonl"]
    records = read_jsonl(path)
    assert [list(record) for record in records] == [[*RECORD_KEYS, "row", "request_id", "output_tokens"]] * 4
    for name, column in simulation.per_request.items():
        expected = [None if value == math.inf else value for value in plain(column)]
        assert [record[name] for record in records] == expected, name
    assert [record["uuid"] for record in records] == [str(uuid.UUID(int=row + 1)) for row in range(4)]
    assert records[0]["prefill_admit_ms"] is None
    assert "NaN" not in path.read_text()
    assert ", " not in path.read_text().replace("quote", "")


def test_jsonl_gz_is_the_same_and_repeatable(simulation, tmp_path):
    plain_path = simulation.write_jsonl(tmp_path / "r.jsonl")
    first = simulation.write_jsonl(tmp_path / "r.jsonl.gz")
    second = simulation.write_jsonl(tmp_path / "s.jsonl.gz")
    assert gzip.decompress(first.read_bytes()) == plain_path.read_bytes()
    assert first.read_bytes() == second.read_bytes()


def test_jsonl_key_order_of_the_reference():
    assert len(RECORD_KEYS) == len(set(RECORD_KEYS)) == 26
    assert RECORD_KEYS[:4] == ("session_id", "turn_index", "uuid", "arrival_time_ms")
    assert RECORD_KEYS[-1] == "terminal_status"


def test_report_jsonl_has_ended_requests_by_arrival(simulation, tmp_path):
    records = read_jsonl(simulation.write_report_jsonl(tmp_path / "r.jsonl"))
    assert [record["row"] for record in records] == [1, 3, 0]
    assert [record["uuid"][-1] for record in records] == ["2", "4", "1"]


def test_jsonl_in_several_chunks(monkeypatch, tmp_path):
    monkeypatch.setattr(simulation_module, "_CHUNK_ROWS", 7)
    arrival = np.random.default_rng(1).integers(0, 9, 50).astype(float)
    status = np.array(["completed", None] * 25, dtype=object)
    simulation = Simulation(
        {},
        {"row": np.arange(50), "arrival_time_ms": arrival, "x": np.arange(50) % 2 == 0, "terminal_status": status},
        {},
    )
    records = read_jsonl(simulation.write_jsonl(tmp_path / "r.jsonl"))
    assert [record["row"] for record in records] == list(range(50))
    assert [record["x"] for record in records[:3]] == [True, False, True]
    records = read_jsonl(simulation.write_report_jsonl(tmp_path / "r.jsonl"))
    assert [(record["arrival_time_ms"], record["row"]) for record in records] == sorted(
        (arrival[row], row) for row in range(0, 50, 2)
    )


def test_jsonl_of_unusual_columns(tmp_path):
    columns = {
        "50%": np.array([1.0, 2.0]),
        "tags": np.array([None, None], dtype=object),
        "name": np.array(["x", "yy"]),
        "uuid": np.array(["u1", "u2"], dtype=object),
    }
    columns["tags"][0] = ["a", {"b": np.int64(1)}, np.float64(0.5)]
    records = read_jsonl(Simulation({}, columns, {}).write_jsonl(tmp_path / "r.jsonl"))
    assert [record["50%"] for record in records] == [1.0, 2.0]
    assert [record["tags"] for record in records] == [["a", {"b": 1}, 0.5], None]
    assert [record["name"] for record in records] == ["x", "yy"]
    assert [record["uuid"] for record in records] == ["u1", "u2"]


@pytest.mark.parametrize("columns", [{}, {name: column[:0] for name, column in sample_columns().items()}])
def test_no_requests(columns, tmp_path):
    simulation = Simulation({}, columns, {})
    assert simulation.write_jsonl(tmp_path / "r.jsonl").read_bytes() == b""
    assert simulation.write_report_jsonl(tmp_path / "r.jsonl").read_bytes() == b""
    assert simulation.to_arrow().num_rows == 0
    assert len(simulation.to_pandas()) == 0
    assert "0 of 0 requests" in repr(simulation)


def test_a_failed_write_keeps_the_old_file(simulation, tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    path.write_text("old")

    def fail(keys, columns, out):
        raise OSError("disk full")

    monkeypatch.setattr(simulation_module, "json_lines", fail)
    with pytest.raises(OSError, match="disk full"):
        simulation.write_jsonl(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.jsonl"]


def test_arrow(simulation):
    table = simulation.to_arrow()
    assert table.column_names == list(simulation.per_request)
    for name, column in simulation.per_request.items():
        assert table[name].to_pylist() == plain(column), name
    assert str(table.schema.field("prefill_worker_idx").type) == "int32"
    assert str(table.schema.field("terminal_status").type) == "string"


def test_arrow_of_a_column_without_values():
    column = np.array([None, None], dtype=object)
    table = Simulation({}, {"session_id": column}, {}).to_arrow()
    assert str(table.schema.field("session_id").type) == "string"
    assert table["session_id"].null_count == 2


def test_parquet(simulation, tmp_path):
    import pyarrow.parquet as pq

    path = simulation.write_parquet(tmp_path / "deep" / "r.parquet")
    assert os.listdir(path.parent) == ["r.parquet"]
    assert pq.read_table(path).equals(simulation.to_arrow())


def test_pandas(simulation):
    frame = simulation.to_pandas()
    assert list(frame.columns) == list(simulation.per_request)
    assert frame["decode_worker_idx"].dtype == "Int64"
    assert frame["decode_worker_idx"].isna().tolist() == [False, True, False, False]
    assert frame["reused_input_tokens"].dropna().tolist() == [64, 0, 0]
    assert frame["input_length"].dtype == np.uint32
    assert frame["row"].dtype == np.int64
    assert frame["ttft_ms"].isna().tolist() == [False, True, True, False]
    frame.loc[0, "ttft_ms"] = 99.0
    assert simulation.per_request["ttft_ms"][0] == 2.0


@pytest.mark.parametrize(
    ("method", "module", "message"),
    [
        ("to_arrow", "pyarrow", r"to_arrow needs pyarrow.*mocker-llm\[parquet\]"),
        ("write_parquet", "pyarrow.parquet", r"write_parquet needs pyarrow.*mocker-llm\[parquet\]"),
        ("to_pandas", "pandas", r"to_pandas needs pandas.*mocker-llm\[pandas\]"),
    ],
)
def test_missing_package(simulation, method, module, message, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    arguments = [tmp_path / "r.parquet"] if method == "write_parquet" else []
    with pytest.raises(ImportError, match=message):
        getattr(simulation, method)(*arguments)
    assert os.listdir(tmp_path) == []


def test_text(simulation):
    assert simulation.table().splitlines()[-1] == "Rejected: 1 (larger than the KV pool)"
    assert repr(simulation) == (
        "<Simulation: 1 of 4 requests completed, 9.000 s simulated, TTFT p50 2.0 ms; "
        "Rejected: 1 (larger than the KV pool)>"
    )


def test_html(simulation):
    simulation.report["stalled"] = ["<r&1>"]
    text = simulation._repr_html_()
    assert text.startswith("<div><table>")
    assert text.count("<tr>") == text.count("</tr>") == 9
    assert text.count("<th") - text.count("<thead") == 8
    assert "&lt;r&amp;1&gt;" in text
    assert "<r&1>" not in text
