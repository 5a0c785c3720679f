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

from .._record import find_passes
from ..text import Writer, encoded, json_text, lines, open_text
from ..timeline import Timeline, worker_numbers
from .parts import PART, parts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..simulation import Simulation

__all__ = ["MAX_FLOWS", "write_trace"]

MAX_FLOWS = 10_000                 # requests drawn as flows
MAX_COUNTERS = 20_000              # samples of each counter, all workers together
_US = 1000.0                       # in a ms
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
        c = {name: values[part] for name, values in passes.items()}
        names = encoded((c["prefills"] * 2.0**32 + c["running"]).astype(np.int64), _composition)
        _rows(
            out, '{"ph":"X","name":"%%","cat":"pass","pid":%,"tid":1,"ts":%,"dur":%,"args":{"passes":%,"requests":%,'
            '"prefills":%,"waiting":%,"batch_tokens":%,"prompt_tokens":%,"output_tokens":%,"kv_used_blocks":%,'
            '"kv_cached_blocks":%,"admitted":%,"completed":%,"preempted":%}}',
            encoded(c["passes"].astype(np.int64), _repeated), names, c["worker"] + 2, (c["start_ms"], _US),
            (c["end_ms"] - c["start_ms"], _US), *((c[name], "whole") for name in (
                "passes", "running", "prefills", "waiting", "batch_tokens", "prompt_tokens", "output_tokens", "used",
                "cached", "admitted", "completed", "preemptions")))


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
    at = timeline.start_ms[edges], _US

    def means(values: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = values * span
        out: NDArray[np.float64] = (sums if step == 1 else np.add.reduceat(sums, edges, axis=-1)) / length
        return out

    if timeline.router_queue.any():
        _rows(
            out, f'{{"ph":"C","pid":{ARRIVALS},"ts":%,"name":"kept back by the router","args":{{"requests":%}}}}',
            at, (means(timeline.router_queue), 1.0))
    tiers = [(ARRIVALS, name, values) for name, values in timeline.shared.items()]
    if timeline.series["kv_host_blocks"].any():
        tiers += [(w + 2, "kv_host_blocks", values) for w, values in enumerate(timeline.series["kv_host_blocks"])]
    for pid, name, blocks in tiers:
        _rows(out, f'{{"ph":"C","pid":{pid},"ts":%,"name":"{name}","args":{{"blocks":%}}}}', at, (means(blocks), 1.0))
    running, waiting, used, cached = (means(timeline.series[name]) for name in (
        "running", "waiting", "kv_used_blocks", "kv_cached_blocks"))
    for w in range(len(timeline.workers)):
        head = f'{{"ph":"C","pid":{w + 2},"ts":%,"name":'
        _rows(out, head + '"requests","args":{"running":%,"waiting":%}}', at, (running[w], 1.0), (waiting[w], 1.0))
        _rows(out, head + '"KV blocks","args":{"used":%,"cached":%}}', at, (used[w], 1.0), (cached[w], 1.0))


def _flows(out: Writer, columns: dict[str, NDArray[Any]], timeline: Timeline,
           passes: dict[str, NDArray[Any]]) -> None:
    """Requests whose passes are all in the log: arrival, first pass, pass of the first token, last pass."""
    bounds = np.searchsorted(passes["worker"], np.arange(len(timeline.workers) + 1))
    found, known = 0, []
    for part in parts(len(columns["row"])):
        of_part = _points(columns, part, timeline, passes, bounds)
        found += len(of_part[0])
        known.append(of_part if found <= PART else None)       # few of a long run, but who knows
    step = max(-(-found // MAX_FLOWS), 1)
    middle = passes["start_ms"] + passes["end_ms"]
    ids = columns.get("request_id")
    seen = 0
    for part, kept in zip(parts(len(columns["row"])), known, strict=True):
        rows, *points = kept or _points(columns, part, timeline, passes, bounds)
        chosen = slice(-seen % step, None, step)
        seen += len(rows)
        row, first_worker, last_worker, admit, first, last = (values[chosen] for values in (rows, *points))
        arrival = columns["arrival_time_ms"][row], _US
        names: Any = row if ids is None else [
            json_text(str(number) if ids[number] is None else ids[number])[1:-1] for number in row.tolist()]
        _rows(
            out, f'{{"ph":"X","name":"request %","cat":"request","pid":{ARRIVALS},"tid":1,"ts":%,"dur":0,"args":'
            '{"input_length":%,"output_tokens":%,"reused_input_tokens":%,"ttft_ms":%,"e2e_latency_ms":%,'
            '"terminal_status":%}}', names, arrival,
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
            _rows(out, f'{{"ph":"{kind}",{before}{event}', row[which], worker[which] + 2,
                  (middle[place[which]], _US / 2))


def _points(columns: dict[str, NDArray[Any]], part: slice, timeline: Timeline,
            passes: dict[str, NDArray[Any]], bounds: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Of the requests of a part that are all in the log: row, first and last worker, and the three log entries."""
    last_worker = worker_numbers(columns["decode_worker_idx"][part], timeline.pools, "decode")
    first_worker = last_worker
    if "prefill" in timeline.pools:
        first_worker = worker_numbers(columns["prefill_worker_idx"][part], timeline.pools, "prefill")
    start, end = passes["start_ms"], passes["end_ms"]
    entry = find_passes(start, end, bounds, first_worker, columns["first_admit_ms"][part], True)
    kept = np.flatnonzero(entry >= 0)          # few, where the log holds a small part of the run
    entries = [entry[kept]]
    for key in ("first_token_ms", "last_token_ms"):
        entry = find_passes(start, end, bounds, last_worker[kept], columns[key][part][kept], False)
        inside = entry >= 0
        kept, entries = kept[inside], [values[inside] for values in (*entries, entry)]
    return kept + part.start, first_worker[kept], last_worker[kept], *entries
