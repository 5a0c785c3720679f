"""The HTML report: one file without network access, of one run or of several side by side.

Tables are written here; charts are drawn by plotly.js, which the page carries, from the data that it carries too
(`page.js`).
"""
from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape as html_escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report import write_atomically
from ..text import reserve
from .compare import compare_reports
from .definitions import DISTRIBUTIONS, OFFLOAD, OUTCOMES, STATISTICS, TIERS, TIME_PER_TOKEN, TOTALS
from .library import packed, plotly
from .run import RunData, run_data

if TYPE_CHECKING:
    from ..simulation import Simulation

__all__ = ["write_html", "write_page"]

_HERE = Path(__file__).parent
_TITLE = "mocker report"
_PAGE = 4096
escape = functools.lru_cache(1024)(html_escape)        # definitions above all
_STALLED_SHOWN = 100
_EVENTS_SHOWN = 100


def write_html(path: str | os.PathLike[str], simulations: Mapping[str, Simulation],
               provenances: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """Write the report of one or more runs.

    Parameters
    ----------
    path
        The file to write.
    simulations : mapping
        The runs by name, in the order to show them; made with ``recording=Recording()``.
    provenances : mapping, optional
        Their `mocker.provenance.provenance`, by the same names.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ImportError
        The plotly package is not installed.
    """
    given = provenances or {}
    return write_page(path, [run_data(run, name, given.get(name, run.meta)) for name, run in simulations.items()])


def write_page(path: str | os.PathLike[str], runs: Sequence[RunData]) -> Path:
    """Write the report of runs that are already gathered (see `run_data` and `read_run`)."""
    library = packed()
    names = ", ".join(run["name"] for run in runs)
    data = json.dumps(runs, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(f'{_TITLE}: {names}')}</title>\n<style>\n{_text('page.css')}</style>\n</head>\n<body>\n")
    tail = (f'<script type="application/json" id="mocker-runs">{data}</script>\n<script>\n{_text("page.js")}</script>\n'
            "</body>\n</html>\n")
    with write_atomically(path) as file:
        text = (head + "".join(_body(runs))).encode()
        if library is not None:
            text += b'<script type="text/plain" id="plotly">\n'
            text += b"\n" * (-len(text) % _PAGE)                # whole pages of a file are copied faster
            reserve(file.fileno(), len(text) + len(library))
            file.write(text)
            file.write(library)
        else:
            file.write(text + b"<script>\n")
            with plotly().open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 18)      # a buffer that stays in the processor's cache
        file.write(b"\n</script>\n" + tail.encode())
    return Path(path)


@functools.cache
def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


# -- the parts of the page --------------------------------------------------------------------------------------------


def _body(runs: Sequence[RunData]) -> Iterable[str]:
    yield f"<header><h1>{_TITLE}</h1><p>{escape(_headline(runs))}</p></header>\n<main>\n"
    yield _section("runs", "How it was made", _provenance(runs))
    yield _section("summary", "Summary", _totals(runs) + _distributions(runs))
    yield _section("per-token", "Time per output token", _time_per_token(runs))
    if len(runs) > 1:
        yield _section("comparison", f"Differences to {runs[0]['name']}", _comparison(runs))
    yield _section("outcomes", "How requests ended", _outcomes(runs) + _attainment(runs) + _stalled(runs))
    if any(run.get("scaling") for run in runs):
        yield _section("scaling", "Changes of the number of workers", _scaling(runs))
    yield _section("latency", "Latency distributions", _note(
        "Share of the samples that are at most so long. Drag to zoom, double-click to reset.")
        + '<label><input type="checkbox" id="log"> logarithmic</label><div id="cdfs" class="charts"></div>')
    if any(run["report"].get("offload") for run in runs):
        yield _section("offload", "KV offload", _offload(runs))
    if any("series" in run for run in runs):
        yield _section("time", "Over simulated time", _time_controls(runs)
                       + '<div id="series" class="charts wide"></div>')
    yield "</main>\n"


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>\n{content}</section>\n'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>\n'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> str:
    """A table of cells that are HTML already; the first `text_columns` are text, the others numbers."""
    def line(tag: str, cells: Sequence[str]) -> str:
        text, number = f"</{tag}><{tag}>", f"</{tag}><{tag} class=n>"
        return (f"<tr><{tag}>" + number.join([text.join(cells[:text_columns]), *cells[text_columns:]])
                + f"</{tag}></tr>\n")

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", header)}</thead><tbody>{body}</tbody></table></div>\n'


def number(value: object) -> str:
    """A number for a person: seven digits, thousands separated; a dash for what is missing."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape(str(value))
    if abs(value) >= 1e15:
        return f"{value:.6g}"
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.3f}" if abs(value) >= 1 else f"{value:.4g}"


def _headline(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs: " + ", ".join(run["name"] for run in runs)
    report = runs[0]["report"]
    seconds = (report.get("duration_ms") or 0.0) / 1000.0
    return (f"{runs[0]['name']}: {number(report.get('completed_requests'))} of {number(report.get('num_requests'))} "
            f"requests completed in {seconds:,.1f} s of simulated time")


def _provenance(runs: Sequence[RunData]) -> str:
    parts = []
    for run in runs:
        given = run.get("provenance") or {}
        rows = []
        for key, value in given.items():
            if key == "command" and value:
                cell = f"<pre>{escape(str(value))}</pre>"
            elif isinstance(value, dict | list):
                text = json.dumps(value, indent=1, ensure_ascii=False)
                cell = f"<details><summary>{len(value)} entries</summary><pre>{escape(text)}</pre></details>"
            else:
                cell = escape(str(value))
            rows.append([escape(key.replace("_", " ")), cell])
        parts.append(f"<h3>{escape(run['name'])}</h3>" if len(runs) > 1 else "")
        parts.append(_table(["", ""], rows, text_columns=2) if rows else _note("nothing is known of this run"))
    written = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return "".join(parts) + _note(f"Page written {written}. All times below are simulated, except the wall time.")


def _names(runs: Sequence[RunData]) -> list[str]:
    return [escape(run["name"]) for run in runs]


def _totals(runs: Sequence[RunData]) -> str:
    keys = [key for key in TOTALS if any(run["report"].get(key) is not None for run in runs)]
    rows = [[TOTALS[key].title, *(number(run["report"].get(key)) for run in runs), TOTALS[key].unit,
             f'<span class="def">{escape(TOTALS[key].definition)}</span>'] for key in keys]
    return _table(["metric", *_names(runs), "unit", "definition"], rows)


def _distributions(runs: Sequence[RunData]) -> str:
    rows = []
    for key, metric in DISTRIBUTIONS.items():
        name = key.removesuffix("_ms")
        for run in runs:
            report = run["report"]
            samples = report["samples"].get(name) if isinstance(report.get("samples"), dict) else None
            label = escape(f"{metric.title} ({metric.unit})")
            rows.append([label if run is runs[0] else "", escape(run["name"]), number(samples),
                         *(number(report.get(f"{statistic}_{key}")) for statistic in STATISTICS)])
    terms = "".join(f"<dt>{escape(m.title)}</dt><dd>{escape(m.definition)}</dd>" for m in DISTRIBUTIONS.values())
    return (_table(["distribution", "run", "samples", *STATISTICS], rows, text_columns=2) + f"<dl>{terms}</dl>"
            + _note("Served requests were admitted and made a first token. Percentile p is the value at rank "
                    "round((n - 1) p / 100), halves up, counted from 0; std is that of the population."))


def _time_per_token(runs: Sequence[RunData]) -> str:
    rows = [[escape(name), *(number(_nth(run.get("time_per_token"), i)) for run in runs),
             f'<span class="def">{escape(definition)}</span>', f'<span class="def">{escape(who)}</span>']
            for i, (name, definition, who) in enumerate(TIME_PER_TOKEN)]
    return _note("Tools disagree about what TPOT and ITL mean. Means, in ms:") + _table(
        ["name here", *_names(runs), "definition", "remarks"], rows)


def _nth(values: Any, i: int) -> Any:
    return values[i] if isinstance(values, list) and i < len(values) else None


def _comparison(runs: Sequence[RunData]) -> str:
    parts = []
    for run in runs[1:]:
        rows = [[escape(row.title), number(row.before), number(row.after), escape(row.change()),
                 f'<span class="{row.verdict}">{row.verdict}</span>']
                for row in compare_reports(runs[0]["report"], run["report"]) if row.verdict != "same"]
        parts.append(f"<h3>{escape(run['name'])}</h3>" + _table(
            ["metric", escape(runs[0]["name"]), escape(run["name"]), "change", ""], rows))
    return "".join(parts)


def _outcomes(runs: Sequence[RunData]) -> str:
    rows = [[name.replace("_", " "), *(number(run["report"].get(f"{name}_requests", 0)) for run in runs),
             f'<span class="def">{escape(meaning)}</span>'] for name, meaning in OUTCOMES.items()]
    rows.append(["stalled", *(number(len(_stuck(run))) for run in runs),
                 '<span class="def">of the incomplete ones, those that could never have gone on</span>'])
    for key, title, meaning in (("clamped_requests", "clamped", "output limit cut to what the KV pool can hold"),
                                ("shortened_prompts", "shortened", "prompt cut to what its hash ids cover")):
        if any(run["report"].get(key) for run in runs):
            rows.append([title, *(number(run["report"].get(key, 0)) for run in runs),
                         f'<span class="def">{meaning}</span>'])
    if any("preemptions" in run for run in runs):
        rows.append(["preemptions", *(number(run.get("preemptions")) for run in runs),
                     '<span class="def">times that a request lost its blocks and had to start over</span>'])
    return _table(["requests", *_names(runs), "meaning"], rows)


def _attainment(runs: Sequence[RunData]) -> str:
    if not any(run.get("attainment") for run in runs):
        return _note("No SLA was set (--sla-ttft-ms, --sla-itl-ms, --sla-e2e-ms).")
    rows = []
    for run in runs:
        for name, entry in (run.get("attainment") or {}).items():
            title = "every bound"
            if name != "all":
                title = f"{name.removesuffix('_ms').upper()} ≤ {number(entry['bound'])} ms"
            share = entry["good"] / entry["of"] if entry["of"] else 0.0
            rows.append([escape(title), escape(run["name"]), number(entry["good"]), number(entry["of"]),
                         f"{share:.2%}", f'<meter value="{share:.4f}"></meter>'])
    return "<h3>SLA attainment</h3>" + _table(["bound", "run", "requests within", "of", "share", ""], rows,
                                              text_columns=2) + _note(
        "Only completed requests can be within a bound. ITL is here a request's mean gap; a request of one token has "
        "none and keeps the bound.")


def _stuck(run: RunData) -> list[Any]:
    found = run["report"].get("stalled")
    return found if isinstance(found, list) else []


def _stalled(runs: Sequence[RunData]) -> str:
    rows = []
    for run in runs:
        for entry in _stuck(run)[:_STALLED_SHOWN]:
            text = ", ".join(f"{k} {v}" for k, v in entry.items()) if isinstance(entry, dict) else str(entry)
            rows.append([escape(run["name"]), escape(text)])
    return f"<h3>Stalled requests</h3>{_table(['run', 'request'], rows, text_columns=2)}" if rows else ""


def _scaling(runs: Sequence[RunData]) -> str:
    rows = []
    for run in runs:
        events = [event for event in run.get("scaling") or [] if isinstance(event, dict)]
        rows += [[escape(run["name"]), escape(str(event.get("role"))), number((event.get("at_ms") or 0.0) / 1000.0),
                  number(event.get("before")), number(event.get("target"))] for event in events[:_EVENTS_SHOWN]]
        if len(events) > _EVENTS_SHOWN:
            rows.append([escape(run["name"]), f"and {len(events) - _EVENTS_SHOWN:,} more", "", "", ""])
    return _table(["run", "pool", "at, s", "workers before", "wanted"], rows, text_columns=2)


def _offload(runs: Sequence[RunData]) -> str:
    """Storage tiers and their links; a run without them is left out."""
    tiers, links, sums = [], [], []
    for run in runs:
        given = run["report"].get("offload") or {}
        name = escape(run["name"])
        for key, title in TIERS.items():
            tier = given.get(key)
            if not isinstance(tier, dict):
                continue
            size = tier.get("blocks")
            share = f"{tier['peak_blocks'] / size:.1%}" if size else "–"
            tiers.append([name, title, number(tier["hit_tokens"]), "no limit" if size is None else number(size),
                          number(tier["peak_blocks"]), share, number(tier["evicted_blocks"])])
            for way in ("down", "up"):
                link = tier[way]
                links.append([name, f"{title}, {way}", number(link["transfers"]), number(link["bytes"] / 1e9),
                              f"{link['utilization']:.1%}", f'<meter value="{link["utilization"]:.4f}"></meter>',
                              number(link["mean_queue_delay_ms"])])
        if given:
            sums.append([name, *(number(given[key]) for key in OFFLOAD)])
    terms = "".join(f"<dt>{escape(m.title)}</dt><dd>{escape(m.definition)}</dd>" for m in OFFLOAD.values())
    return (_table(["run", "tier", "hit tokens", "blocks", "peak blocks", "peak", "evicted blocks"], tiers,
                   text_columns=2)
            + _table(["run", "link", "transfers", "GB", "utilization", "", "queue delay, ms"], links, text_columns=2)
            + _table(["run", *(escape(m.title) for m in OFFLOAD.values())], sums) + f"<dl>{terms}</dl>"
            + _note("Hit tokens came up from where they were found. Blocks and peak are those of one pool: the host of "
                    "one worker, the largest of all peaks. Utilization is the share of the duration with something "
                    "under way, mean over the links of all workers; queue delay is what a transfer took longer than it "
                    "would have taken alone, mean."))


def _time_controls(runs: Sequence[RunData]) -> str:
    options = "".join(f'<option value="{i}">workers of {escape(run["name"])}</option>' for i, run in enumerate(runs)
                      if "series" in run)
    total = '<option value="total">all workers together</option>'
    order = total + options if len(runs) > 1 else options + total
    return _note("Levels are means over a point's time, counts of a pass are spread evenly over it. Zooming one chart "
                 "zooms all. Many workers are drawn as a heat map.") + f'<select id="view">{order}</select>'
