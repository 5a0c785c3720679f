"""The trace doctor: reuse distances against a cache that is played through, lints that find what they are for."""
from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mocker import Trace, _reuse, doctor, sample_trace_path


def trace_of(rows: list[list[int]], block_size: int = 1, **columns: object) -> Trace:
    """A trace of prompts that fill their blocks, unless told otherwise."""
    values = {
        "input_length": [len(ids) * block_size for ids in rows], "output_length": [1] * len(rows),
        "arrival_ms": [float(i) for i in range(len(rows))],
        "hash_offsets": np.cumsum([0] + [len(ids) for ids in rows]),
        "hash_ids": [i for ids in rows for i in ids], "block_size": block_size, **columns,
    }
    return Trace.from_columns(**values)  # type: ignore[arg-type]


def played(trace: Trace, block_size: int) -> tuple[list[int], dict[int, int]]:
    """Hits of each row, and how many uses have each reuse distance, from a list that a cache could be."""
    recent: list[tuple[int, ...]] = []
    hits, distances = [], {}
    for row in np.argsort(trace.arrival_ms, kind="stable").tolist():
        ids = trace.hash_ids[trace.hash_offsets[row]:trace.hash_offsets[row + 1]]
        tokens = np.repeat(ids, trace.block_size)[:trace.input_length[row]].tolist()
        blocks = [tuple(tokens[:(k + 1) * block_size]) for k in range(len(tokens) // block_size)]
        found = [recent.index(block) for block in blocks if block in recent]
        hits.append((row, len(found)))
        for distance in found:
            distances[distance] = distances.get(distance, 0) + 1
        recent = blocks + [block for block in recent if block not in blocks]
    return [count for _, count in sorted(hits)], distances


@given(st.data())
def test_reuse_distances_equal_those_of_a_cache_that_is_played_through(data):
    draw = data.draw
    block = draw(st.sampled_from([1, 2, 4, 6]))
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 14))):
        start = draw(st.sampled_from(rows))[:draw(st.integers(1, 6))] if rows and draw(st.booleans()) else []
        rows.append(start + draw(st.lists(st.integers(0, 4), min_size=0 if start else 1, max_size=4)))
    lengths = [draw(st.integers((len(ids) - 1) * block + 1, len(ids) * block)) for ids in rows]
    times = [float(draw(st.integers(0, 9))) for _ in rows]
    trace = trace_of(rows, block, input_length=lengths, arrival_ms=times)
    size = draw(st.sampled_from([1, 2, 3, block]))
    reuse = doctor.prefix_reuse(trace, size)
    hits, distances = played(trace, size)
    assert reuse.hits.tolist() == hits
    assert {int(d): int(reuse.distances[d]) for d in np.flatnonzero(reuse.distances)} == distances
    assert reuse.hit_ratio == pytest.approx(sum(hits) * size / sum(lengths))
    assert reuse.hit_ratios(np.array([len(reuse.distances)]))[0] == pytest.approx(reuse.hit_ratio)


def test_repeated_ids_equal_a_set():
    rng = np.random.default_rng(0)
    for size in (3, 3000):
        counts = rng.integers(0, size, 6000 // size + 2)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        ids = rng.integers(0, 40_000, offsets[-1]).astype(np.uint64)
        rows = [ids[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        assert _reuse.repeated_ids(offsets, ids).tolist() == [len(set(row)) < len(row) for row in rows]


def test_statistics():
    stats = doctor.statistics(Trace.load(sample_trace_path()))
    assert (stats.requests, stats.sessions, stats.timed) == (12_031, 12_031, 12_031)
    assert stats.rate == pytest.approx(3.40, abs=0.01) and stats.arrivals.sum() == 12_031
    assert stats.arriving_tokens.sum() == stats.input_tokens == 144_793_823
    assert stats.reuse is not None and stats.reuse.hit_ratio == pytest.approx(0.37338, abs=1e-5)
    sizes, ratios = stats.reuse.curve()
    assert (np.diff(ratios) >= 0).all() and ratios[-1] == pytest.approx(stats.reuse.hit_ratio)
    enough = stats.reuse.capacity_for(0.9)
    assert stats.reuse.hit_ratios(np.array([enough - 1, enough])) == pytest.approx([0.336, 0.336], abs=1e-3)
    json.dumps(stats.to_dict(), allow_nan=False)
    text = doctor.stats_text(stats)
    assert "saves 37.3% of the prompt tokens" in text and "12,031 requests" in text
    with pytest.raises(ValueError, match="more than 1,000,000"):
        doctor.statistics(Trace.load(sample_trace_path()), bin_ms=0.01)


def test_prompts_that_depend_on_answers():
    trace = replace(trace_of([[1], [1]], session=[0, 0]), accumulate=True)
    assert doctor.statistics(trace).reuse is None
    assert "those of the additions" in doctor.stats_text(doctor.statistics(trace))
    with pytest.raises(ValueError, match="depend on the answers"):
        doctor.prefix_reuse(trace)


def test_statistics_of_almost_nothing():
    for trace in (trace_of([[1]]), trace_of([[1], [2]], arrival_ms=[math.nan] * 2), trace_of([[1], [2]],
                  arrival_ms=[5, 5]), trace_of([], hash_ids=np.empty(0, np.uint64))):
        stats = doctor.statistics(trace)
        json.dumps(stats.to_dict(), allow_nan=False)
        assert doctor.stats_text(stats) and doctor.check(trace) is not None
    session = trace_of([[1], [2], [3], [4]], session=[0, 1, 0, 0], arrival_ms=[10, 12, math.nan, math.nan],
                       delay_ms=[0, 0, 5, 7])
    assert doctor.statistics(session).duration_ms == 12        # 10, 12, 15, 22


@pytest.mark.parametrize(("code", "lines", "trace", "options"), [
    ("out-of-order", (3,), trace_of([[1], [2], [3]], arrival_ms=[1, 5, 4]), {}),
    ("time-back", (3,), trace_of([[1], [2], [3]], arrival_ms=[1, 5, 4], session=[0, 0, 0]), {}),
    ("no-time", (2,), trace_of([[1], [2]], arrival_ms=[1, math.nan]), {}),
    ("negative-time", (1,), trace_of([[1], [2]], arrival_ms=[-1, 0]), {}),
    ("gap", (3,), trace_of([[1], [2], [3]], arrival_ms=[0, 1, 20_000]), {"gap_ms": 1000}),
    ("same-time", (1,), trace_of([[k] for k in range(100)], arrival_ms=[3.0] * 100), {}),
    ("duplicate-id", (3,), trace_of([[1], [2], [3]], request_ids=["a", "b", "a"]), {}),
    ("duplicate-row", (2,), trace_of([[1, 7], [1, 7], [1, 8]], arrival_ms=[4, 4, 4]), {}),
    ("zero-output", (2,), trace_of([[1], [2]], output_length=[4, 0]), {}),
    ("unused-hash-ids", (2,), trace_of([[1], [2, 3]], 8, input_length=[8, 8]), {}),
    ("clamped", (2,), trace_of([[1], [2]], clamped=[1]), {}),
    ("block-size", (1, 2), trace_of([[1, 2, 3], [4, 5]], 512, input_length=[47, 32]), {}),
    ("repeated-hash-id", (2,), trace_of([[1, 2], [3, 3]]), {}),
    ("wide-hash-ids", (1,), trace_of([[1], [2**32 + 1]]), {}),
    ("huge-prompt", (2,), trace_of([[1], [2, 3]], 8, output_length=[1, 5]), {"pool_tokens": 20}),
    ("huge-prompt", (1,), trace_of([[1, 2]], 8), {"max_model_len": 16}),
])
def test_lints_find_what_they_are_for(code, lines, trace, options):
    found = {finding.code: finding for finding in doctor.check(trace, **options)}
    assert code in found and code in doctor.LINTS
    assert found[code].lines == lines
    assert f": {code}: " in doctor.findings_text(list(found.values()), "x.jsonl", trace.n)


def test_a_clean_trace_has_no_findings():
    assert doctor.check(trace_of([[1, 2], [1, 3], [4]])) == []
    assert doctor.check(trace_of([[1], [2], [1]], session=[0, 1, 0], arrival_ms=[0, 1, math.nan])) == []


def test_plot_is_one_page(tmp_path):
    trace = trace_of([[1, 2], [1, 3], [4]])
    page = doctor.plot(trace, doctor.statistics(trace), tmp_path / "t.html").read_text(encoding="utf-8")
    for text in ("Arrivals", "Prefix reuse", "Lengths, cumulative", "unlimited cache"):
        assert text in page
    assert page.count("<script") >= 2 and 'src="http' not in page
    with pytest.raises(ValueError, match=r"must end in \.html"):
        doctor.plot(trace, doctor.statistics(trace), tmp_path / "t.gif")
