"""Binary columns, the cache, packed files, rows left out: whatever is damaged ends in an error that names the place."""
from __future__ import annotations

import gzip
import io
import json
import os
import random
import sys

import numpy as np
import pytest
import zstandard

from mocker import Trace, TraceError, formats, sample_trace_path, trace_tools
from mocker.formats import columns
from mocker.formats.write import to_arrow, write
from mocker.synth import Recipe

ROW = '{"timestamp": %d, "input_length": 5, "output_length": 1, "hash_ids": [%d]}\n'


def rich() -> Trace:
    """A trace that has every column."""
    plain = Recipe(20, arrivals="poisson:5", input="uniform:1,200", output=4, turns=2, think="exponential:1", seed=3,
                   answers=True, block_size=16).trace()
    n = plain.n
    return Trace.from_columns(**{
        **vars(plain), "request_ids": [None if i % 3 else f"r{i}ü" for i in range(n)], "priority": np.arange(n) - 5,
        "strict_priority": np.arange(n), "policy_class": [None, "gold"] * (n // 2),
        "session_ids": [f"s{k}" for k in range(plain.n_sessions)], "path": "x.jsonl"})


@pytest.mark.parametrize("suffix", ["mtrace", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
@pytest.mark.parametrize("make", [rich, lambda: Trace.load(sample_trace_path()).head(100)])
def test_every_way_to_write_is_lossless(tmp_path, suffix, make):
    trace = make()
    path = tmp_path / f"t.{suffix}"
    write(trace, path)
    loaded = Trace.load(path, block_size=trace.block_size if "jsonl" in suffix else None)
    assert loaded == trace
    again = tmp_path / f"again.{suffix}"
    write(loaded, again)
    assert again.read_bytes() == path.read_bytes()


def test_columns_are_mapped_not_copied(tmp_path):
    trace = Trace.load(sample_trace_path())
    columns.save(trace, tmp_path / "t.mtrace")
    loaded = Trace.load(tmp_path / "t.mtrace")
    base = loaded.hash_ids
    while isinstance(base, np.ndarray):
        base = base.base
    assert type(base).__name__ in ("mmap", "memoryview") and not loaded.hash_ids.flags.writeable
    assert loaded.path == trace.path and loaded.line.tolist() == trace.line.tolist()
    (tmp_path / "t.mtrace").unlink()
    assert loaded == trace                      # the map outlives the name
    packed = tmp_path / "t.mtrace.gz"
    columns.save(trace, tmp_path / "u.mtrace")
    packed.write_bytes(gzip.compress((tmp_path / "u.mtrace").read_bytes(), 1))
    assert Trace.load(packed) == trace


def test_damaged_columns_are_refused_or_harmless(tmp_path):
    path = tmp_path / "t.mtrace"
    columns.save(rich(), path)
    good = path.read_bytes()
    assert good == (columns.save(rich(), path), path.read_bytes())[1]
    rng = random.Random(1)
    refused = 0
    for trial in range(400):
        bad = bytearray(good)
        if trial % 4 == 0:
            del bad[rng.randrange(len(bad)):]
        else:
            for _ in range(rng.randint(1, 4)):
                place = rng.randrange(len(bad) if trial % 2 else 1500)
                bad[place] = rng.randrange(256) if trial % 3 else rng.choice(b'0123456789"[]{},:-n')
        path.write_bytes(bad)
        try:
            trace = Trace.load(path)
        except (TraceError, ValueError) as error:
            assert str(path) in str(error)
            refused += 1
            continue
        assert trace.n == 40 and (trace.input_length <= np.diff(trace.hash_offsets) * trace.block_size).all()
        assert trace.hash_offsets[-1] == len(trace.hash_ids) and (np.diff(trace.hash_offsets) > 0).all()
    assert refused > 150
    path.write_bytes(good[:16] + b"[" * (len(good) - 16))
    with pytest.raises(TraceError, match=r"t\.mtrace: header: is damaged"):
        Trace.load(path)
    path.write_bytes(good)
    with pytest.raises(TraceError, match="block_size: is 16 in this file, not 64"):
        Trace.load(path, block_size=64)


def test_the_cache_gives_the_same_trace_and_notices_changes(tmp_path, monkeypatch):
    source, folder = tmp_path / "a b.jsonl", tmp_path / "cache"
    source.write_text(ROW % (0, 1) + ROW % (1, 2))
    first = Trace.load(source, cache=folder)
    (copy,) = folder.iterdir()
    assert copy.name.startswith("a_b.jsonl-") and first.path == str(source)
    reads = []
    monkeypatch.setattr(formats, "read_file", lambda name: reads.append(name) or real(name))
    real = formats.source.read_file
    assert Trace.load(source, cache=folder) == first and reads == []
    assert Trace.load(source, cache=folder, block_size=8).block_size == 8 and len(list(folder.iterdir())) == 2
    copy.write_bytes(copy.read_bytes()[:-100])           # damaged: made again
    assert Trace.load(source, cache=folder) == first and reads == [str(source)] * 2
    source.write_text(ROW % (0, 1))
    os.utime(source, ns=(5, 5))
    assert Trace.load(source, cache=folder).n == 1
    monkeypatch.setenv("MOCKER_TRACE_CACHE", str(folder))
    source.write_text("{broken\n")
    with pytest.raises(TraceError, match="is not JSON"):
        Trace.load(source)


def test_packed_files_and_standard_input(tmp_path, monkeypatch):
    text = (ROW % (0, 1) + ROW % (4, 2)).encode()
    plain = tmp_path / "t.jsonl"
    plain.write_bytes(text)
    want = Trace.load(plain)
    one, two = (zstandard.ZstdCompressor().compress(part) for part in (text[:40], text[40:]))
    packed = tmp_path / "t.zst"
    packed.write_bytes(one + two)
    assert Trace.load(packed) == want
    for data in (text, one + two, gzip.compress(text)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert Trace.load("-") == want
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{")))
    with pytest.raises(TraceError, match=r"^<stdin>:1: row: ends too early"):
        Trace.load("-")
    packed.write_bytes(one + two[:-5])
    with pytest.raises(TraceError, match=r"t\.zst:1: row: the Zstandard data ends too early"):
        Trace.load(packed)
    packed.write_bytes(one[:4] + b"\xff" * 30)
    with pytest.raises(TraceError, match=r"t\.zst: the Zstandard data is damaged"):
        Trace.load(packed)


def test_rows_that_are_left_out_are_listed(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    rows = [
        ROW % (0, 1), "{oops\n", ROW % (1, 2), '{"input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
        '{"timestamp": 2, "output_length": 1, "hash_ids": [1], "session_id": "a", "delay": 4}\n',
        '{"timestamp": 7, "output_length": 1, "hash_ids": [1], "session_id": "a"}\n',
        '{"timestamp": 3, "output_length": 1, "hash_ids": [1], "session_id": "a"}\n',
        '{"timestamp": 9, "output_length": 1, "hash_ids": [4, 5], "session_id": "a"}\n', "\xff\n", "[" * 10_000 + "\n",
        '{"timestamp": 3, "output_length": -1, "hash_ids": [1]}\n',
    ]
    path.write_text("".join(rows), encoding="latin-1")
    trace = Trace.load(path, on_error="skip")
    assert trace.line.tolist() == [1, 3, 6, 8]
    assert [(e.line, e.field) for e in trace.skipped] == [
        (2, "row"), (4, "input_length"), (5, "delay"), (7, "timestamp"), (9, "row"), (10, "row"), (11, "output_length")]
    assert trace.delay_ms.tolist() == [0, 0, 0, 2] and trace.turn.tolist() == [0, 0, 0, 1]
    assert trace.hash_ids.tolist() == [1, 2, 1, 4, 5]
    assert trace == Trace.load(path, on_error="skip", _slow=True)
    assert trace.head(2).skipped == trace.skipped
    with pytest.raises(TraceError, match=r"t\.jsonl:2: row: is not JSON"):
        Trace.load(path)
    path.write_text("{oops\n" * 3)
    with pytest.raises(TraceError, match="no row that can be read; the first: line 1: row: is not JSON"):
        Trace.load(path, on_error="skip")
    monkeypatch.setattr(formats.source, "MAX_SKIPPED", 50)
    path.write_text("{oops\n" * 52)
    with pytest.raises(TraceError, match="more than 50 rows that cannot be read; is this the right format"):
        Trace.load(path, on_error="skip")
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip'"):
        Trace.load(path, on_error="ignore")


def test_reorder_sort_and_renumber():
    trace = rich()
    order = np.lexsort((trace.turn, trace.session[::-1]))
    moved = trace_tools.reorder(trace, order)
    assert [moved.request_ids[i] for i in range(moved.n)] == [trace.request_ids[i] for i in order]
    for row, was in enumerate(order.tolist()):
        for offsets, content in (("hash_offsets", "hash_ids"), ("output_token_offsets", "output_token_ids")):
            new, old = (getattr(t, content)[getattr(t, offsets)[i]:getattr(t, offsets)[i + 1]].tolist()
                        for t, i in ((moved, row), (trace, was)))
            assert new == old
        assert moved.session_ids[moved.session[row]] == trace.session_ids[trace.session[was]]
    assert Trace.from_columns(**vars(moved)) == moved
    assert trace_tools.sort_by_time(moved) == trace_tools.sort_by_time(trace)
    with pytest.raises(ValueError, match="turns of each session"):
        trace_tools.reorder(trace, np.arange(trace.n)[::-1])
    with pytest.raises(ValueError, match="each of the 40 rows once"):
        trace_tools.reorder(trace, np.zeros(trace.n, np.int64))
    one = trace_tools.renumber(trace, 7)
    assert one.hash_ids[0] == 7 and len(np.unique(one.hash_ids)) == len(np.unique(trace.hash_ids))
    first, second = trace_tools.apart([trace, trace])
    assert not np.isin(first.hash_ids, second.hash_ids).any()


def test_new_times():
    trace = Trace.load(sample_trace_path()).head(1000)
    scaled = trace_tools.scale_rate(trace, 50)
    assert 999 / (np.ptp(scaled.arrival_ms) / 1e3) == pytest.approx(50)
    assert trace_tools.with_start(trace, 250.0).arrival_ms.min() == 250
    from mocker.synth import parse_arrivals, parse_distribution

    new = trace_tools.with_arrivals(rich(), parse_arrivals("constant:4"), parse_distribution("3"), seed=1)
    assert new.arrival_ms[::2].tolist() == [250.0 * k for k in range(20)] and (new.delay_ms[1::2] == 3000).all()
    with pytest.raises(ValueError, match="no two different arrival times"):
        trace_tools.scale_rate(trace.head(1), 5)


def test_tables_hold_what_a_row_holds():
    table = to_arrow(rich())
    assert set(table.column_names) == {
        "timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay", "request_id", "priority",
        "strict_priority", "policy_class", "output_token_ids"}
    assert table.schema.metadata == {b"mocker.block_size": b"16"}
    assert table["delay"][0].as_py() is None and table["request_id"][0].as_py() == "r0ü"
    json.dumps(table.slice(0, 2).to_pylist())


def test_rows_are_left_out_of_formats_whose_readers_end_at_the_first(tmp_path):
    row = '{"request_id": "%s", "input_length": 5, "output_length": 1, "hash_ids": [1]%s}\n'
    path = tmp_path / "t.jsonl"
    path.write_text(row % ("a", ', "timestamp": 0') + "{oops\n" + row % ("b", ', "wait_for": ["a"]')
                    + row % ("a", "") + row % ("c", ', "wait_for": ["z"]'))
    trace = Trace.load(path, format="agentic_mooncake", on_error="skip")
    assert trace.line.tolist() == [1, 3] and trace.wait_rows.tolist() == [0]
    assert [(error.line, error.field) for error in trace.skipped] == [
        (2, "row"), (4, "request_id"), (5, "wait_for")]
    columns.save(trace, tmp_path / "t.mtrace")
    again = Trace.load(tmp_path / "t.mtrace")
    assert again == trace and [str(error) for error in again.skipped] == [str(error) for error in trace.skipped]
    path.write_text("{oops\n" * 1100)
    with pytest.raises(TraceError, match="more than 1,000 rows that format 'agentic_mooncake' cannot read"):
        Trace.load(path, format="agentic_mooncake", on_error="skip")
