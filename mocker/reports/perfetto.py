"""The pass trace: what every worker did, in the JSON format that Perfetto and chrome://tracing open.

A worker is a process with a track of passes (slices with the composition of the batch; passes in a row that are
alike make one slice) and counters for queue and KV blocks. A request is a flow from its arrival over its first pass
and the pass of its first token to its last pass. Times are microseconds of simulated time.
"""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..text import Writer, encoded, json_text, lines, open_text
from ..timeline import Timeline, worker_numbers
from .parts import PART, parts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..simulation import Simulation

__all__ = ["MAX_FLOWS", "write_trace"]

MAX_FLOWS = 10_000                 # requests drawn as flows
MAX_COUNTERS = 20_000              # samples of each counter, all workers together
ARRIVALS = 1                       # process of the arrivals; worker w is process w + 2


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
    with open_text(path, 1) as out:
        out.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(note)},"traceEvents":[\n'.encode())
        out.write(_names(timeline))
        _slices(out, timeline.passes)
        _counters(out, timeline)
        _flows(out, simulation.per_request, timeline, timeline.passes)
        out.write(b"\n]}\n")
    return Path(path)


def _names(timeline: Timeline) -> bytes:
    """Names of the tracks; every later event begins with the comma behind the one before."""
    events = [_named("process_name", ARRIVALS, 0, "arrivals")]
    for w, name in enumerate(timeline.workers):
        events += [_named("process_name", w + 2, 0, name), _named("thread_name", w + 2, 1, "passes"),
                   f'{{"ph":"M","name":"process_sort_index","pid":{w + 2},"args":{{"sort_index":{w + 2}}}}}']
    return ",\n".join(events).encode()


def _rows(out: Writer, template: str, *columns: Any) -> None:
    """Write events of one kind; % stands for the next column."""
    lines((",\n" + template).encode().split(b"%"), list(columns), b"null", out)


def _named(what: str, process: int, thread: int, name: str) -> str:
    return f'{{"ph":"M","name":"{what}","pid":{process},"tid":{thread},"args":{{"name":{json.dumps(name)}}}}}'


def _slices(out: Writer, passes: dict[str, NDArray[Any]]) -> None:
    for part in parts(len(passes["worker"])):
        c = {name: np.rint(passes[name][part]).astype(np.int64) for name in (
            "worker", "passes", "running", "waiting", "prefills", "batch_tokens", "prompt_tokens", "output_tokens",
            "used", "cached", "admitted", "completed", "preemptions")}
        start, end = passes["start_ms"][part], passes["end_ms"][part]
        _rows(
            out, '{"ph":"X","name":"%%","cat":"pass","pid":%,"tid":1,"ts":%,"dur":%,"args":{"passes":%,"requests":%,'
            '"prefills":%,"waiting":%,"batch_tokens":%,"prompt_tokens":%,"output_tokens":%,"kv_used_blocks":%,'
            '"kv_cached_blocks":%,"admitted":%,"completed":%,"preempted":%}}',
            encoded(c["passes"].tolist(), _repeated),
            encoded((c["prefills"] * 2**32 + c["running"]).tolist(), _composition), c["worker"] + 2, _us(start),
            _us(end - start), c["passes"], c["running"], c["prefills"], c["waiting"], c["batch_tokens"],
            c["prompt_tokens"], c["output_tokens"], c["used"], c["cached"], c["admitted"], c["completed"],
            c["preemptions"])


def _us(ms: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.round(ms * 1000.0, 3)


def _repeated(passes: int) -> bytes:
    return b"%d x " % passes if passes > 1 else b""


def _composition(batch: int) -> bytes:
    """The name of a slice, of prefills * 2**32 + requests."""
    prefills, requests = batch >> 32, batch & 0xFFFFFFFF
    if not prefills:
        return b"decode %d" % requests if requests else b"empty"
    if requests > prefills:
        return b"prefill %d + decode %d" % (prefills, requests - prefills)
    return b"prefill %d" % prefills


def _counters(out: Writer, timeline: Timeline) -> None:
    """Queue and KV blocks of each worker over the whole run, whatever the pass log left out."""
    bins = len(timeline.start_ms)
    step = -(-bins * len(timeline.workers) // MAX_COUNTERS)
    edges = np.arange(0, bins, step)
    span = timeline.end_ms - timeline.start_ms
    length = np.maximum(np.add.reduceat(span, edges), 1e-9)
    at = _us(timeline.start_ms[edges])

    def means(values: NDArray[np.float64]) -> NDArray[np.float64]:
        out: NDArray[np.float64] = np.round(np.add.reduceat(values * span, edges, axis=-1) / length, 3)
        return out

    if timeline.router_queue.any():
        _rows(
            out, f'{{"ph":"C","pid":{ARRIVALS},"ts":%,"name":"kept back by the router","args":{{"requests":%}}}}',
            at, means(timeline.router_queue))
    tiers = [(ARRIVALS, name, values) for name, values in timeline.shared.items()]
    if timeline.series["kv_host_blocks"].any():
        tiers += [(w + 2, "kv_host_blocks", values) for w, values in enumerate(timeline.series["kv_host_blocks"])]
    for pid, name, blocks in tiers:
        _rows(out, f'{{"ph":"C","pid":{pid},"ts":%,"name":"{name}","args":{{"blocks":%}}}}', at, means(blocks))
    running, waiting, used, cached = (means(timeline.series[name]) for name in (
        "running", "waiting", "kv_used_blocks", "kv_cached_blocks"))
    for w in range(len(timeline.workers)):
        head = f'{{"ph":"C","pid":{w + 2},"ts":%,"name":'
        _rows(out, head + '"requests","args":{"running":%,"waiting":%}}', at, running[w], waiting[w])
        _rows(out, head + '"KV blocks","args":{"used":%,"cached":%}}', at, used[w], cached[w])


def _flows(out: Writer, columns: dict[str, NDArray[Any]], timeline: Timeline,
           passes: dict[str, NDArray[Any]]) -> None:
    """Requests whose passes are all in the log: arrival, first pass, pass of the first token, last pass."""
    log = _Log(passes, len(timeline.workers))
    found, known = 0, []
    for part in parts(len(columns["row"])):
        of_part = _points(columns, part, timeline, log)
        found += len(of_part[0])
        known.append(of_part if found <= PART else None)       # few of a long run, but who knows
    step = max(-(-found // MAX_FLOWS), 1)
    middle = np.round((passes["start_ms"] + passes["end_ms"]) * 500.0, 3)
    ids = columns.get("request_id")
    seen = 0
    for part, kept in zip(parts(len(columns["row"])), known, strict=True):
        rows, *points = kept or _points(columns, part, timeline, log)
        chosen = slice(-seen % step, None, step)
        seen += len(rows)
        row, first_worker, last_worker, admit, first, last = (values[chosen] for values in (rows, *points))
        arrival = _us(columns["arrival_time_ms"][row])
        named = [str(number) if ids is None or ids[number] is None else ids[number] for number in row.tolist()]
        _rows(
            out, f'{{"ph":"X","name":%,"cat":"request","pid":{ARRIVALS},"tid":1,"ts":%,"dur":0,"args":'
            '{"input_length":%,"output_tokens":%,"reused_input_tokens":%,"ttft_ms":%,"e2e_latency_ms":%,'
            '"terminal_status":%}}', [json_text(f"request {name}") for name in named], arrival,
            *(columns[key][row] for key in ("input_length", "output_tokens", "reused_input_tokens", "ttft_ms",
                                            "e2e_latency_ms")),
            encoded(columns["terminal_status"][row].tolist(), json_text))
        event = '"cat":"request","name":"request","id":%,"pid":%,"tid":1,"ts":%}'
        _rows(out, '{"ph":"s",' + event, row, np.full(len(row), ARRIVALS), arrival)
        # The pass of the first token may be that of the admission, and the last one that of the first token.
        later, longer = first != admit, last != first
        for before, kind, which, worker, place in (
                ("", "t", later | longer, first_worker, admit), ("", "t", later & longer, last_worker, first),
                ('"bp":"e",', "f", slice(None), np.where(later | longer, last_worker, first_worker), last)):
            _rows(out, f'{{"ph":"{kind}",{before}{event}', row[which], worker[which] + 2, middle[place[which]])


def _points(columns: dict[str, NDArray[Any]], part: slice, timeline: Timeline,
            log: _Log) -> tuple[NDArray[np.int64], ...]:
    """Of the requests of a part that are all in the log: row, first and last worker, and the three log entries."""
    last_worker = worker_numbers(columns["decode_worker_idx"][part], timeline.pools, "decode")
    first_worker = last_worker
    if "prefill" in timeline.pools:
        first_worker = worker_numbers(columns["prefill_worker_idx"][part], timeline.pools, "prefill")
    kept = np.arange(len(last_worker))
    entries: list[NDArray[np.int64]] = []
    for key, worker, starts in (("first_admit_ms", first_worker, True), ("first_token_ms", last_worker, False),
                                ("last_token_ms", last_worker, False)):
        entry = log.find(worker[kept], columns[key][part][kept], starts=starts)
        inside = entry >= 0
        kept, entries = kept[inside], [values[inside] for values in (*entries, entry)]
    return kept + part.start, first_worker[kept], last_worker[kept], *entries


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
