"""What recording and reports add to the replay that they describe, as shares of its CPU time, measured in turns.

The trace is repeated end to end until a replay takes some seconds, since a page has a constant part (copying
plotly.js) that no longer matters then. The shares are in ``extra_info``.
"""
from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

import mocker
from mocker import Recording, simulate

REPEATS = 20
CASES = {
    "round robin, 4 workers": {"num_workers": 4},
    "kv router, 4 workers": {"num_workers": 4, "router_mode": "kv_router", "router_tie_break": "lowest"},
    "sglang, 4 workers": {"num_workers": 4, "extra_engine_args": mocker.MockEngineArgs(engine_type="sglang")},
}


def long_trace(repeats: int) -> mocker.Trace:
    """The shipped trace, `repeats` times in a row."""
    once = mocker.Trace.load(mocker.sample_trace_path())
    length = float(np.nanmax(once.arrival_ms)) + 1.0
    columns = {
        "arrival_ms": np.concatenate([once.arrival_ms + i * length for i in range(repeats)]),
        "input_length": np.tile(once.input_length, repeats), "output_length": np.tile(once.output_length, repeats),
        "hash_ids": np.tile(once.hash_ids, repeats),
        "hash_offsets": np.concatenate([[0], *(once.hash_offsets[1:] + i * len(once.hash_ids)
                                               for i in range(repeats))])}
    return mocker.Trace.from_columns(block_size=once.block_size, **columns)


def cpu_time(call):
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


@pytest.mark.parametrize("name", CASES)
def test_share_of_the_time(benchmark, tmp_path, name):
    trace, options = long_trace(REPEATS), CASES[name]
    shares: dict[str, list[float]] = {}
    for turn in range(3):
        folder = tmp_path / str(turn)          # files that are there already take longer to write
        plain, _ = cpu_time(lambda: simulate(trace, **options))
        recorded, run = cpu_time(lambda: simulate(trace, recording=Recording(), **options))
        logged, passes = cpu_time(lambda: simulate(trace, recording=Recording(passes=25_000), **options))
        for what, spent, write in (
                ("recording", recorded - plain, None),
                ("recording and page", recorded - plain, lambda to=folder, run=run: run.write_html(to / "r.html")),
                ("recording and series", recorded - plain,
                 lambda to=folder, run=run: run.write_timeseries(to / "s.csv")),
                ("recording, log and pass trace", logged - plain,
                 lambda to=folder, run=passes: run.write_pass_trace(to / "t.json")),
                ("requests as JSON lines", 0.0, lambda to=folder, run=run: run.write_jsonl(to / "r.jsonl")),
                ("requests as CSV", 0.0, lambda to=folder, run=run: run.write_csv(to / "r.csv"))):
            if write is not None:
                spent += cpu_time(write)[0]
            shares.setdefault(what, []).append(spent / plain)
    benchmark.extra_info.update({what: round(min(values), 3) for what, values in shares.items()})
    benchmark.pedantic(simulate, args=(trace,), kwargs=options, rounds=1)


def test_memory_does_not_grow_with_the_run(benchmark, tmp_path):
    """Peak of what Python allocates for a page, in bytes a request, and of the recorder's own arrays."""
    peaks = {}
    for repeats in (1, 10):
        run = simulate(long_trace(repeats), num_workers=4, recording=Recording())
        tracemalloc.start()
        run.write_html(tmp_path / "r.html")
        peaks[repeats] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(run.timeline.start_ms) <= 1024
    benchmark.extra_info["bytes a further request"] = round((peaks[10] - peaks[1]) / (9 * 12031))
    benchmark.pedantic(lambda: None, rounds=1)
