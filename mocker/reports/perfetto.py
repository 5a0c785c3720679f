"""The pass trace: what every worker did, in the JSON format that Perfetto and chrome://tracing open.

A worker is a process with a track of passes (slices with the composition of the batch; passes in a row that are
alike make one slice) and counters for queue and KV blocks. A request is a flow from its arrival over its first pass
and the pass of its first token to its last pass. Times are microseconds of simulated time.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report import compressed, write_atomically
from ..timeline import Timeline, worker_numbers
from .parts import parts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..simulation import Simulation

__all__ = ["MAX_FLOWS", "write_trace"]

MAX_FLOWS = 10_000                 # requests drawn as flows
MAX_COUNTERS = 20_000              # samples of each counter, all workers together
ARRIVALS = 1                       # process of the arrivals; worker w is process w + 2
_CHUNK = 4096


def write_trace(path: str | os.PathLike[str], simulation: Simulation) -> Path:
    """Write the pass trace of a run.

    Parameters
    ----------
    path
        The file; compressed if its name ends in ``.gz``.
    simulation : Simulation
        Made with ``recording=Recording(passes=N)``.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        The run has no pass log.
    """
    timeline = simulation.timeline
    if timeline is None or timeline.passes is None:
        raise ValueError("the pass trace needs a run with a pass log: simulate(..., recording=Recording(passes=N))")
    window, stride = timeline.sampling
    note = {"clock": "simulated time", "passes": "all" if stride == 1 else
            f"those that begin in every {stride}th window of {window:g} ms"}
    with write_atomically(path) as raw, compressed(raw, path, 1) as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(note)},"traceEvents":[\n'.encode())
        first = True
        for chunk in _chunks(_events(simulation, timeline, timeline.passes)):
            file.write(("" if first else ",\n").encode() + ",\n".join(chunk).encode())
            first = False
        file.write(b"\n]}\n")
    return Path(path)


def _chunks(events: Iterator[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    for event in events:
        chunk.append(event)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _events(simulation: Simulation, timeline: Timeline, passes: dict[str, NDArray[Any]]) -> Iterator[str]:
    yield _named("process_name", ARRIVALS, 0, "arrivals")
    for w, name in enumerate(timeline.workers):
        yield _named("process_name", w + 2, 0, name)
        yield _named("thread_name", w + 2, 1, "passes")
        yield f'{{"ph":"M","name":"process_sort_index","pid":{w + 2},"args":{{"sort_index":{w + 2}}}}}'
    yield from _slices(passes)
    yield from _counters(timeline)
    yield from _flows(simulation.per_request, timeline, passes)


def _named(what: str, process: int, thread: int, name: str) -> str:
    return f'{{"ph":"M","name":"{what}","pid":{process},"tid":{thread},"args":{{"name":{json.dumps(name)}}}}}'


def _slices(passes: dict[str, NDArray[Any]]) -> Iterator[str]:
    counts = ("worker", "passes", "running", "waiting", "prefills", "batch_tokens", "prompt_tokens", "output_tokens",
              "used", "cached", "admitted", "completed", "preemptions")
    columns = [np.rint(passes[name]).astype(np.int64).tolist() for name in counts]
    times = [np.round(values * 1000.0, 3).tolist() for values in (passes["start_ms"],
                                                                  passes["end_ms"] - passes["start_ms"])]
    for (start, length, worker, count, running, waiting, prefills, batch, prompt, output, used, cached, admitted,
         completed, preempted) in zip(*times, *columns, strict=True):
        if prefills:
            name = f"prefill {prefills} + decode {running - prefills}" if running > prefills else f"prefill {prefills}"
        else:
            name = f"decode {running}" if running else "empty"
        if count > 1:
            name = f"{count} x {name}"
        yield (f'{{"ph":"X","name":"{name}","cat":"pass","pid":{worker + 2},"tid":1,"ts":{start},"dur":{length},'
               f'"args":{{"passes":{count},"requests":{running},"prefills":{prefills},"waiting":{waiting},'
               f'"batch_tokens":{batch},"prompt_tokens":{prompt},"output_tokens":{output},"kv_used_blocks":{used},'
               f'"kv_cached_blocks":{cached},"admitted":{admitted},"completed":{completed},'
               f'"preempted":{preempted}}}}}')


def _counters(timeline: Timeline) -> Iterator[str]:
    """Queue and KV blocks of each worker over the whole run, whatever the pass log left out."""
    bins = len(timeline.start_ms)
    step = -(-bins * len(timeline.workers) // MAX_COUNTERS)
    edges = np.arange(0, bins, step)
    span = timeline.end_ms - timeline.start_ms
    length = np.maximum(np.add.reduceat(span, edges), 1e-9)
    times = (timeline.start_ms[edges] * 1000.0).tolist()

    def means(name: str) -> list[list[float]]:
        values: list[list[float]] = (np.add.reduceat(timeline.series[name] * span, edges, axis=1) / length).tolist()
        return values

    if timeline.router_queue.any():
        queued = np.add.reduceat(timeline.router_queue * span, edges) / length
        for at, value in zip(times, queued.tolist(), strict=True):
            yield (f'{{"ph":"C","pid":{ARRIVALS},"ts":{at:.3f},"name":"kept back by the router",'
                   f'"args":{{"requests":{value:.3f}}}}}')
    running, waiting = means("running"), means("waiting")
    used, cached = means("kv_used_blocks"), means("kv_cached_blocks")
    for w in range(len(timeline.workers)):
        for at, r, q, u, c in zip(times, running[w], waiting[w], used[w], cached[w], strict=True):
            head = f'"ph":"C","pid":{w + 2},"ts":{at:.3f}'
            yield f'{{{head},"name":"requests","args":{{"running":{r:.3f},"waiting":{q:.3f}}}}}'
            yield f'{{{head},"name":"KV blocks","args":{{"used":{u:.2f},"cached":{c:.2f}}}}}'


def _flows(columns: dict[str, NDArray[Any]], timeline: Timeline, passes: dict[str, NDArray[Any]]) -> Iterator[str]:
    """Requests whose passes are all in the log: arrival, first pass, pass of the first token, last pass."""
    log = _Log(passes, len(timeline.workers))
    found = sum(len(_points(columns, part, timeline, log)[0]) for part in parts(len(columns["row"])))
    step = max(-(-found // MAX_FLOWS), 1)
    middle = (passes["start_ms"] + passes["end_ms"]) * 500.0
    ids = columns.get("request_id")
    seen = 0
    for part in parts(len(columns["row"])):
        rows, first_worker, last_worker, *places = _points(columns, part, timeline, log)
        for k in range(-seen % step, len(rows), step):
            row = int(rows[k])
            arrival = columns["arrival_time_ms"][row] * 1000.0
            name = f"request {row}" if ids is None or ids[row] is None else f"request {ids[row]}"
            args = {key: _plain(columns[key][row]) for key in ("input_length", "output_tokens", "reused_input_tokens",
                                                               "ttft_ms", "e2e_latency_ms", "terminal_status")}
            yield (f'{{"ph":"X","name":{json.dumps(name)},"cat":"request","pid":{ARRIVALS},"tid":1,"ts":{arrival:.3f},'
                   f'"dur":0,"args":{json.dumps(args)}}}')
            head = f'"cat":"request","name":"request","id":{row}'
            yield f'{{"ph":"s",{head},"pid":{ARRIVALS},"tid":1,"ts":{arrival:.3f}}}'
            admit, first, last = (int(place[k]) for place in places)
            steps = [(int(first_worker[k]), admit)]
            for place in (first, last):
                if place != steps[-1][1]:
                    steps.append((int(last_worker[k]), place))
            for i, (worker, place) in enumerate(steps):
                kind = '"ph":"f","bp":"e"' if i == len(steps) - 1 else '"ph":"t"'
                yield f'{{{kind},{head},"pid":{worker + 2},"tid":1,"ts":{middle[place]:.3f}}}'
        seen += len(rows)


def _points(columns: dict[str, NDArray[Any]], part: slice, timeline: Timeline,
            log: _Log) -> tuple[NDArray[np.int64], ...]:
    """Of the requests of a part that are all in the log: row, first and last worker, and the three log entries."""
    last_worker = worker_numbers(columns["decode_worker_idx"][part], timeline.pools, "decode")
    first_worker = last_worker
    if "prefill" in timeline.pools:
        first_worker = worker_numbers(columns["prefill_worker_idx"][part], timeline.pools, "prefill")
    admit = log.find(first_worker, columns["first_admit_ms"][part], starts=True)
    first = log.find(last_worker, columns["first_token_ms"][part], starts=False)
    last = log.find(last_worker, columns["last_token_ms"][part], starts=False)
    kept = np.flatnonzero((admit >= 0) & (first >= 0) & (last >= 0))
    return kept + part.start, first_worker[kept], last_worker[kept], admit[kept], first[kept], last[kept]


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value


class _Log:
    """Finds the entry of the pass log that a time of a worker falls into."""

    def __init__(self, passes: dict[str, NDArray[Any]], workers: int) -> None:
        self.start, self.end = passes["start_ms"], passes["end_ms"]
        self.bounds = np.searchsorted(passes["worker"], np.arange(workers + 1))

    def find(self, worker: NDArray[np.int64], at: NDArray[np.float64], *, starts: bool) -> NDArray[np.int64]:
        """Entry that begins at (`starts`) or ends at or spans each time, -1 if it is not logged."""
        out = np.full(len(at), -1, np.int64)
        for w in range(len(self.bounds) - 1):
            low, high = int(self.bounds[w]), int(self.bounds[w + 1])
            rows = np.flatnonzero((worker == w) & ~np.isnan(at))
            if low == high or not len(rows):
                continue
            side: Any = "right" if starts else "left"
            place = np.searchsorted(self.start[low:high], at[rows], side=side) - 1
            inside = (place >= 0) & (at[rows] <= self.end[low:high][np.maximum(place, 0)] + 1e-9)
            out[rows[inside]] = low + place[inside]
        return out
