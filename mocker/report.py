"""The report of a replay: its keys, the text table, and the JSON file.

A report is a plain dict with the keys of `REPORT_KEYS`, in that order. A value of a distribution is None where there
was no sample. A report may carry further keys behind those (see `problem_lines`).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import numbers
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

__all__ = [
    "DISTRIBUTIONS",
    "GOODPUT_KEYS",
    "REPORT_KEYS",
    "STATISTICS",
    "TITLE",
    "compressed",
    "format_report_table",
    "format_value",
    "order_report",
    "plain",
    "problem_lines",
    "read_report_json",
    "table_rows",
    "write_atomically",
    "write_report_json",
]

TITLE = "mocker | LLM serving simulation"

STATISTICS = ("mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std")
"""Prefixes of the keys of one distribution, in report order."""

DISTRIBUTIONS = ("ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "e2e_latency_ms", "output_token_throughput_per_user")
"""Suffixes of the keys of the distributions, in report order."""

GOODPUT_KEYS = ("goodput_completed_requests", "goodput_request_throughput_rps", "goodput_output_throughput_tok_s")
"""Keys that a report has only if an SLA was set."""

REPORT_KEYS = (
    "num_requests",
    "completed_requests",
    "total_input_tokens",
    "total_output_tokens",
    "duration_ms",
    "wall_time_ms",
    "request_throughput_rps",
    "input_throughput_tok_s",
    "output_throughput_tok_s",
    "total_throughput_tok_s",
    "prefill_worker_seconds",
    "decode_worker_seconds",
    "prefill_gpus_per_worker",
    "decode_gpus_per_worker",
    "gpu_hours",
    *GOODPUT_KEYS,
    "processed_tokens",
    "processed_tokens_per_s",
    "processed_output_tokens_per_s",
    "prefix_cache_reused_ratio",
    "first_admission_prefix_cache_reused_ratio",
    *(f"{statistic}_{name}" for name in DISTRIBUTIONS for statistic in STATISTICS),
)
"""All keys of the reference's report in order of emission; 74 without `GOODPUT_KEYS`, 77 with them."""

TABLE_COLUMNS = ("avg", "min", "max", "p99", "p90", "p75", "std")
_TABLE_STATISTICS = ("mean", "min", "max", "p99", "p90", "p75", "std")
_TABLE_DISTRIBUTIONS = (
    ("Time to First Token (ms)", "ttft_ms"),
    ("Time to Second Token (ms)", "ttst_ms"),
    ("Request Latency (ms)", "e2e_latency_ms"),
    ("Inter Token Latency (ms)", "itl_ms"),
    ("Output Token Throughput Per User (tokens/sec/user)", "output_token_throughput_per_user"),
)
_TABLE_TOTALS = (
    ("Output Token Throughput (tokens/sec)", ("output_throughput_tok_s",)),
    ("Request Throughput (requests/sec)", ("request_throughput_rps",)),
    ("Request Count (requests)", ("completed_requests", "num_requests")),
)
_SUMMARY = (
    ("Wall Time (ms)", "wall_time_ms"),
    ("Prefix Cache Reused Ratio", "prefix_cache_reused_ratio"),
    ("First Admission Prefix Cache Reused Ratio", "first_admission_prefix_cache_reused_ratio"),
)
_PROBLEMS = (
    ("Rejected", "rejected_requests", "larger than the KV pool"),
    ("Capacity", "capacity_requests", "stopped early: prompt and output outgrew the KV pool"),
    ("Incomplete", "incomplete_requests", "not finished when the replay ended"),
    ("Over budget", "over_budget_requests", "prompt larger than the batch budget, and chunked prefill is off"),
    ("Clamped", "clamped_requests", "output limit cut to what the KV pool can hold"),
    ("Shortened", "shortened_prompts", "prompt cut to what its hash ids cover"),
)
_MAX_STALLED_SHOWN = 5


def order_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return `report` with its keys in the order of `REPORT_KEYS`, followed by all other keys as they came."""
    ordered = {key: report[key] for key in REPORT_KEYS if key in report}
    ordered.update((key, value) for key, value in report.items() if key not in ordered)
    return ordered


def format_value(value: object) -> str:
    """Return a number with two decimals and thousands separators, "N/A" for None and NaN, other values as text."""
    if value is None:
        return "N/A"
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        return "N/A" if math.isnan(number) else f"{number:,.2f}"
    return str(value)


def table_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the text table: a label, then one text for each of `TABLE_COLUMNS`."""
    rows = []
    for label, name in _TABLE_DISTRIBUTIONS:
        rows.append([label, *(format_value(report.get(f"{statistic}_{name}")) for statistic in _TABLE_STATISTICS)])
    for label, keys in _TABLE_TOTALS:
        value = next((report[key] for key in keys if report.get(key) is not None), None)
        rows.append([label, format_value(value), *["N/A"] * (len(TABLE_COLUMNS) - 1)])
    return rows


def problem_lines(report: Mapping[str, Any]) -> list[str]:
    """Return one short line for each kind of request that did not run as asked; empty if all did."""
    lines = [f"{label}: {report[key]:,} ({meaning})" for label, key, meaning in _PROBLEMS if report.get(key)]
    stalled = report.get("stalled")
    if stalled:
        shown = "; ".join(_describe_stalled(entry) for entry in stalled[:_MAX_STALLED_SHOWN])
        hidden = len(stalled) - _MAX_STALLED_SHOWN
        more = f"; and {hidden:,} more, see the report" if hidden > 0 else ""
        lines.append(f"Stalled: {len(stalled):,} (can never go on: {shown}{more})")
    return lines


def _describe_stalled(entry: object) -> str:
    if isinstance(entry, Mapping):
        return ", ".join(f"{key} {value}" for key, value in entry.items() if value is not None)
    return str(entry)


def format_report_table(report: Mapping[str, Any]) -> str:
    """Return the report as text: title, box table, wall time, reuse ratios, and a line for each problem.

    Parameters
    ----------
    report
        A report; keys that are missing or None show as "N/A".

    Returns
    -------
    str
        Lines without a trailing newline.
    """
    lines = [TITLE, *_render_table(["Metric", *TABLE_COLUMNS], table_rows(report))]
    lines.extend(f"{label}: {format_value(report[key])}" for label, key in _SUMMARY if report.get(key) is not None)
    lines.extend(problem_lines(report))
    return "\n".join(lines)


def _render_table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("━" * (width + 2) for width in widths) + right

    def line(cells: list[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded.extend(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "┃ " + " ┃ ".join(padded) + " ┃"

    return [rule("┏", "┳", "┓"), line(header), rule("┡", "╇", "┩"), *map(line, rows), rule("└", "┴", "┘")]


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its name only when everything is written.

    The bytes go to a temporary file in the same folder, which is renamed at the end and deleted on an error. Missing
    parent folders are created; a symbolic link stays and its target is replaced. What is there and is no regular file
    (a pipe, a device) is written in place.

    Parameters
    ----------
    path
        The file to create or replace.

    Yields
    ------
    BinaryIO
        The open file.
    """
    target = os.fspath(path)
    if os.path.islink(target) or not os.path.basename(target):
        target = os.path.realpath(target)
    if _is_device(target):
        # Not `target`: the kernel's links of open files (/dev/stdout) have no real path that could be opened.
        with open(path, "wb") as file:
            yield file
        return
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:200]}.{os.urandom(4).hex()}.tmp")
    try:
        with _created(temporary) as file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _created(path: str) -> BinaryIO:
    try:
        return open(path, "xb")
    except FileNotFoundError:                  # rarely: looking first would take longer
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, "xb")


def _is_device(path: str) -> bool:
    """Whether there is something that is neither a regular file nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextlib.contextmanager
def compressed(file: BinaryIO, path: str | os.PathLike[str], level: int = 6) -> Iterator[BinaryIO]:
    """Yield `file`, or a gzip stream into it if the name of `path` says so (no time stamp: equal runs, equal bytes)."""
    if not os.fspath(path).endswith(".gz"):
        yield file
        return
    with gzip.GzipFile(filename="", mode="wb", compresslevel=level, fileobj=file, mtime=0) as stream:
        yield cast("BinaryIO", stream)


def write_report_json(report: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> Path:
    """Write a report as JSON with sorted keys, and return the path of the file.

    Parameters
    ----------
    report
        The report; NumPy scalars and arrays in it become numbers and lists, NaN and infinities null.
    path
        The file; a folder, or None for the current folder, stands for a file
        ``dynamo_replay_report_<timestamp>.json`` in it, which never replaces another.

    Returns
    -------
    Path
        The file that was written.
    """
    target = Path.cwd() if path is None else Path(path)
    if target.is_dir() or (path is not None and os.fspath(path).endswith(("/", os.sep))):
        target = _unused_default_path(target)
    text = json.dumps(plain(report), indent=2, sort_keys=True, allow_nan=False) + "\n"
    with write_atomically(target) as file:
        file.write(text.encode())
    return target


def _unused_default_path(folder: Path) -> Path:
    stem = f"dynamo_replay_report_{datetime.now():%Y%m%d_%H%M%S}"
    path = folder / f"{stem}.json"
    count = 1
    while path.exists():
        count += 1
        path = folder / f"{stem}_{count}.json"
    return path


def plain(value: Any) -> Any:
    """Return `value` as what JSON has: NumPy values become Python's, non-finite numbers None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    to_list: Callable[[], Any] | None = getattr(value, "tolist", None)
    if to_list is not None:
        return plain(to_list())
    return str(value)


def read_report_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a report that `write_report_json` or the reference wrote, with the keys back in report order.

    Parameters
    ----------
    path
        The JSON file.

    Returns
    -------
    dict
        The report.

    Raises
    ------
    ValueError
        If the file is not a JSON object.
    """
    try:
        report = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: not a report: not valid JSON: {error}") from None
    if not isinstance(report, dict):
        raise ValueError(f"{os.fspath(path)}: not a report: expected a JSON object, got {type(report).__name__}")
    return order_report(cast("dict[str, Any]", report))
