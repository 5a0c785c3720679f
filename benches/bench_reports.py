"""What reports add to the replay that they describe, as shares of its CPU time and of its time, measured in turns.

The shares are in ``extra_info``: of the shipped trace in this process and as a command, and of this trace repeated end
to end. A replay counts from what it is given until everything of it is gone again.
"""
from __future__ import annotations

import functools
import resource
import shutil
import subprocess
import sys
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


KINDS = {
    "recording": lambda run, to: run(recording=Recording()),
    "recording and page": lambda run, to: run(recording=Recording()).write_html(to / "r.html"),
    "recording and series, CSV": lambda run, to: run(recording=Recording()).write_timeseries(to / "s.csv"),
    "recording and series, Parquet": lambda run, to: run(recording=Recording()).write_timeseries(to / "s.parquet"),
    "recording, log and pass trace": lambda run, to: run(recording=Recording(passes=10_000)).write_pass_trace(
        to / "t.json"),
    "requests, JSON lines": lambda run, to: run().write_jsonl(to / "r.jsonl"),
    "requests, CSV": lambda run, to: run().write_csv(to / "r.csv"),
    "requests, Parquet": lambda run, to: run().write_parquet(to / "r.parquet"),
    "streamed, JSON lines": lambda run, to: run(stream_to=to / "a.jsonl"),
    "streamed, Parquet": lambda run, to: run(stream_to=to / "b.parquet"),
}
FLAGS = {
    "page": ["--report-html", "r.html"], "pass trace": ["--trace-out", "t.json"],
    "series, CSV": ["--timeseries", "s.csv"], "series, Parquet": ["--timeseries", "s.parquet"],
    "requests, JSON lines": ["--per-request", "r.jsonl"], "requests, CSV": ["--per-request", "r.csv"],
    "requests, Parquet": ["--per-request", "r.parquet"], "streamed, JSON lines": ["--stream-to", "a.jsonl"],
    "streamed, Parquet": ["--stream-to", "b.parquet"],
}


def spent():
    """CPU time of this process and of those it has waited for, and time on the clock, s."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return np.array([time.process_time() + children.ru_utime + children.ru_stime, time.perf_counter()])


def shares(plain, others, rounds, tmp_path):
    """What each adds to the least time of `plain`, as [share of CPU time, share of the time on the clock].

    Both are taken as often, in turns: the least of more would be less.
    """
    least = {name: np.full((2, 2), np.inf) for name in others}
    for turn in range(rounds):
        for name, other in others.items():
            for i, call in enumerate((plain, other)):
                to = tmp_path / f"{turn}-{name}-{i}"           # files that are there already take longer to write
                to.mkdir()
                began = spent()
                call(to)
                least[name][i] = np.minimum(least[name][i], spent() - began)
                shutil.rmtree(to)
    return {name: [round(float(share), 3) for share in with_it / without - 1.0]
            for name, (without, with_it) in least.items()}


@pytest.mark.parametrize("name", CASES)
def test_long_replays(benchmark, tmp_path, name):
    """Of 240,000 requests."""
    run = functools.partial(simulate, long_trace(REPEATS), **CASES[name])
    kinds = {kind: functools.partial(write, run) for kind, write in KINDS.items()}
    benchmark.extra_info.update(shares(lambda to: run(), kinds, 5, tmp_path))
    benchmark.pedantic(run, rounds=1)


def test_one_short_replay(benchmark, tmp_path):
    """Of the shipped trace, from its file."""
    run = functools.partial(simulate, mocker.sample_trace_path(), num_workers=4)
    kinds = {kind: functools.partial(write, run) for kind, write in KINDS.items()}
    benchmark.extra_info.update(shares(lambda to: run(), kinds, 15, tmp_path))
    benchmark.pedantic(run, rounds=1)


def test_command(benchmark, tmp_path):
    """`mocker replay` of the shipped trace, in a process of its own."""
    command = [sys.executable, "-m", "mocker", "replay", str(mocker.sample_trace_path()), "--num-workers", "4",
               "--quiet", "--report-json", "r.json"]

    def run(flags, to):
        subprocess.run([*command, *flags], cwd=to, check=True, capture_output=True)

    kinds = {kind: functools.partial(run, flags) for kind, flags in FLAGS.items()}
    benchmark.extra_info.update(shares(functools.partial(run, []), kinds, 6, tmp_path))
    benchmark.pedantic(run, args=([], tmp_path), rounds=1)


def test_memory_does_not_grow_with_the_run(benchmark, tmp_path):
    """Peak of what Python allocates for a page, in bytes a request, and of the recorder's own arrays."""
    peaks = {}
    for repeats in (1, 10):
        run = simulate(long_trace(repeats), num_workers=4, recording=Recording())
        tracemalloc.start()
        run.write_html(tmp_path / "r.html")
        peaks[repeats] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(run.timeline.start_ms) <= 512
    benchmark.extra_info["bytes a further request"] = round((peaks[10] - peaks[1]) / (9 * 12031))
    benchmark.pedantic(lambda: None, rounds=1)
