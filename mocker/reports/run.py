"""What a page shows of one run, as plain JSON: report, provenance, CDFs, time series.

Every page carries this data of its runs, so that pages can be compared later; series are base64 of float32 columns.
"""
from __future__ import annotations

import binascii
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report import plain, read_report_json
from ..timeline import Timeline
from .parts import PART, counted, parts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..simulation import Simulation

    FloatArray = NDArray[np.float64]

__all__ = ["CDFS", "RunData", "read_run", "run_data", "time_per_token"]

RunData = dict[str, Any]
FORMAT = 1
CDFS = ("ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "e2e_latency_ms")
CDF_POINTS = 256
SERIES_VALUES = 16_384             # of one series, all workers together
_COLUMNS = {"ttft_ms": "ttft_ms", "ttst_ms": "ttst_ms", "tpot_ms": "itl_ms"}
_LEVELS = ("running", "waiting", "kv_used_blocks", "kv_cached_blocks", "kv_host_blocks", "kv_usage", "busy")
_COUNTS = ("passes", "batch_tokens", "prompt_tokens", "output_tokens", "preemptions", "arrivals", "completed",
           "admitted_prompt_tokens", "reused_prompt_tokens")


def run_data(simulation: Simulation, name: str, provenance: Mapping[str, Any]) -> RunData:
    """Gather what a page shows of a run.

    Parameters
    ----------
    simulation : Simulation
        Made with ``recording=Recording()``; without, it has no time series and no CDF of the gaps.
    name : str
        What the page calls the run.
    provenance : mapping
        See `mocker.provenance.provenance`.

    Returns
    -------
    dict
        JSON values only.
    """
    columns = simulation.per_request
    timeline = simulation.timeline
    data: RunData = {
        "format": FORMAT, "name": name, "provenance": plain(provenance), "report": plain(simulation.report),
        "time_per_token": time_per_token(columns, simulation.report), "sla": plain(simulation.meta.get("sla", {})),
        "attainment": _attainment(columns, simulation.meta.get("sla", {})), "cdf": _cdfs(columns, simulation.report)}
    if simulation.scaling:
        data["scaling"] = [plain(vars(event)) for event in simulation.scaling]
    if simulation.gaps is not None:
        data["cdf"]["itl_ms"] = _cdf_of_bins(*simulation.gaps)
    if timeline is not None:
        data["series"] = _series(timeline)
        data["preemptions"] = round(float(timeline.series["preemptions"].sum()))
    return data


def time_per_token(columns: Mapping[str, NDArray[Any]], report: Mapping[str, Any]) -> list[float | None]:
    """The means of `definitions.TIME_PER_TOKEN`, in its order, ms."""
    span = gaps = whole = count = 0.0
    for part in parts(len(columns["row"])):
        tokens = columns["output_tokens"][part].astype(np.float64)
        several = tokens > 1
        span += float((columns["last_token_ms"][part] - columns["first_token_ms"][part])[several].sum())
        gaps += float((tokens[several] - 1).sum())
        latency = columns["e2e_latency_ms"][part]
        served = (tokens > 0) & ~np.isnan(latency)
        whole += float((latency[served] / tokens[served]).sum())
        count += float(np.count_nonzero(served))
    per_request = report.get("mean_tpot_ms")
    return [per_request, report.get("mean_itl_ms"), span / gaps if gaps else None, per_request,
            whole / count if count else None]


def _attainment(columns: Mapping[str, NDArray[Any]], sla: Mapping[str, float | None]) -> dict[str, dict[str, float]]:
    """For each bound that is set, and for all of them together: requests that keep it, of how many."""
    bounds = {name: float(bound) for name, bound in sla.items() if bound is not None}
    total = len(columns["row"])
    good = dict.fromkeys([*bounds, "all"], 0)
    for part in parts(total) if bounds else ():
        every = columns["terminal_status"][part] == "completed"
        done = every.copy()
        # A request with one token has no gap that could be too long.
        values = {"ttft_ms": columns["ttft_ms"][part], "e2e_ms": columns["e2e_latency_ms"][part],
                  "itl_ms": np.where(columns["output_tokens"][part] > 1, columns["itl_ms"][part], 0.0)}
        for name, bound in bounds.items():
            kept = done & (values[name] <= bound)
            every &= kept
            good[name] += int(np.count_nonzero(kept))
        good["all"] += int(np.count_nonzero(every))
    return {name: {"bound": bounds.get(name, 0.0), "good": number, "of": total} for name, number in good.items()
            } if bounds else {}


def _packed(values: FloatArray) -> dict[str, str]:
    """A column as plotly.js reads it."""
    return {"dtype": "f4", "bdata": binascii.b2a_base64(values.astype("<f4").data, newline=False).decode("ascii")}


def _packed_rows(values: FloatArray) -> list[dict[str, str]]:
    return [{"dtype": "f4", "bdata": binascii.b2a_base64(row, newline=False).decode("ascii")}
            for row in np.ascontiguousarray(values, "<f4")]


def _cdfs(columns: Mapping[str, NDArray[Any]], report: Mapping[str, Any]) -> dict[str, Any]:
    """CDFs of the per-request latencies."""
    out = {key: _cdf(len(columns["row"]), columns[column].__getitem__) for key, column in _COLUMNS.items()}
    status, latency = columns["terminal_status"], columns["e2e_latency_ms"]
    everything = report.get("completed_requests") == len(status)       # comparing texts takes longer than sorting
    out["e2e_latency_ms"] = _cdf(len(status), latency.__getitem__ if everything else (
        lambda part: latency[part][status[part] == "completed"]))
    return out


def _cdf(total: int, take: Callable[[slice], FloatArray]) -> dict[str, Any]:
    """CDF of what `take` gives of each slice: from the sorted values, or of a long run from bins of 1.6 %."""
    if total > PART:
        return _cdf_of_bins(*counted(take(part) for part in parts(total)))
    ordered = np.sort(take(slice(0, total)))   # NaN come last
    n = len(ordered) - int(np.count_nonzero(np.isnan(ordered)))
    if n == 0:
        return {"samples": 0}
    ranks = _ranks(n)
    return {"samples": n, "x": _packed(ordered[ranks]), "y": _packed((ranks + 1) / n)}


@functools.lru_cache(maxsize=8)
def _ranks(n: int) -> NDArray[np.int64]:
    """Which of `n` sorted values to draw: evenly spaced ones, and more and more towards the last."""
    tail = n - np.geomspace(1, n, 64).astype(np.int64)
    return np.unique(np.concatenate([np.linspace(0, n - 1, CDF_POINTS).astype(np.int64), tail]))


def _cdf_of_bins(upper: FloatArray, weights: NDArray[np.int64]) -> dict[str, Any]:
    n = int(weights.sum())
    if n == 0:
        return {"samples": 0}
    return {"samples": n, "x": _packed(upper), "y": _packed(np.cumsum(weights) / n)}


def _series(timeline: Timeline) -> dict[str, Any]:
    """Time series with few enough points to draw."""
    workers, bins = len(timeline.workers), len(timeline.start_ms)
    factor = math.ceil(bins / min(max(SERIES_VALUES // workers, 64), 400))
    edges = np.arange(0, bins, factor)
    span = timeline.end_ms - timeline.start_ms
    length = np.maximum(np.add.reduceat(span, edges), 1e-9)
    sums = {name: np.add.reduceat(timeline.series[name], edges, axis=1) for name in _COUNTS}
    out = {name: np.add.reduceat(timeline.series[name] * span, edges, axis=1) / length for name in _LEVELS}
    out["output_tok_s"] = sums["output_tokens"] / length * 1000.0
    out["prompt_tok_s"] = sums["prompt_tokens"] / length * 1000.0
    out["arrivals_rps"] = sums["arrivals"] / length * 1000.0
    out["completed_rps"] = sums["completed"] / length * 1000.0
    out["preemptions"] = sums["preemptions"]
    counted = np.array([pool != "prefill" for pool in timeline.pools])
    total = {name: values.sum(0) for name, values in out.items()}
    total["output_tok_s"] = out["output_tok_s"][counted].sum(0)
    total["kv_usage"] = total["kv_used_blocks"] / max(int(timeline.capacity.sum()), 1)
    total["busy"] = out["busy"].mean(0)
    for name, values in {"router_queue": timeline.router_queue, **timeline.shared}.items():
        total[name] = np.add.reduceat(values * span, edges) / length
    for name, above, below in (("batch_tokens_per_pass", "batch_tokens", "passes"),
                               ("cache_hit_ratio", "reused_prompt_tokens", "admitted_prompt_tokens")):
        out[name] = _ratio(sums[above], sums[below])
        total[name] = _ratio(sums[above].sum(0), sums[below].sum(0))
    if not out["kv_host_blocks"].any():
        del out["kv_host_blocks"], total["kv_host_blocks"]
    seconds = (timeline.start_ms[edges] + length / 2.0) / 1000.0
    return {"workers": timeline.workers, "capacity_blocks": timeline.capacity.tolist(),
            "interval_s": timeline.interval_ms * factor / 1000.0, "t": _packed(seconds),
            "of_workers": {name: _packed_rows(values) for name, values in out.items()},
            "total": {name: _packed(values) for name, values in total.items()}}


def _ratio(above: FloatArray, below: FloatArray) -> FloatArray:
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


_EMBEDDED = re.compile(rb'<script type="application/json" id="mocker-runs">(.*?)</script>', re.DOTALL)


def read_run(path: str | Path) -> list[RunData]:
    """Read the runs of an HTML page that this package wrote, or the one of a JSON report.

    Returns
    -------
    list of dict
        As `run_data` makes them; of a JSON report, with `name` and `report` only.

    Raises
    ------
    ValueError
        The file is neither.
    OSError
        It cannot be read.
    """
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        report = read_report_json(path)
        if not isinstance(report.get("num_requests"), int | float):
            raise ValueError(f"{path}: not a report: it has no num_requests")
        return [{"format": FORMAT, "name": path.stem, "report": plain(report)}]
    found = _EMBEDDED.search(path.read_bytes())
    if found is None:
        raise ValueError(f"{path}: not a page of this program: its data is missing")
    try:
        runs = json.loads(unescape(found[1].decode()), parse_constant=lambda _: None)
        if not isinstance(runs, list) or not all(isinstance(run["report"], dict) for run in runs):
            raise ValueError("no list of runs")
        if any(run["format"] > FORMAT for run in runs):
            raise ValueError("written by a newer version of this program")
        for run in runs:
            run["name"] = str(run["name"])
            for key in ("provenance", "attainment", "cdf", "series"):
                if not isinstance(run.get(key, {}), dict):
                    raise ValueError(f"{key} is no object")
            if not isinstance(run.get("scaling", []), list):
                raise ValueError("scaling is no list")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: the data in the page cannot be read: {error}") from None
    return runs
