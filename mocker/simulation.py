"""The result of one simulation: the report, and what happened to each request as NumPy columns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mocker.arrow_arrays import arrow_array, write_parquet
from mocker.extras import import_extra
from mocker.report import (
    TABLE_COLUMNS,
    TITLE,
    format_report_table,
    problem_lines,
    table_rows,
    write_atomically,
)
from mocker.text import Writer, json_lines, open_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mocker.replay.planner import ScalingEvent
    from mocker.timeline import Timeline

__all__ = ["RECORD_KEYS", "Simulation"]

RECORD_KEYS = (
    "session_id",
    "turn_index",
    "uuid",
    "arrival_time_ms",
    "first_admit_ms",
    "first_token_ms",
    "last_token_ms",
    "ttft_ms",
    "ttst_ms",
    "e2e_latency_ms",
    "itl_ms",
    "input_length",
    "output_length",
    "reused_input_tokens",
    "prefill_worker_idx",
    "decode_worker_idx",
    "prefill_admit_ms",
    "source_held_ms",
    "destination_reserved_ms",
    "destination_activated_ms",
    "decode_admit_ms",
    "source_released_ms",
    "decode_reused_input_tokens",
    "prefill_route_overlap_tokens",
    "decode_route_overlap_tokens",
    "terminal_status",
)
"""Keys of the reference's per-request record, in order."""

_NEVER_MISSING = frozenset({"row", "input_length", "output_length", "output_tokens"})
_NOT_TERMINAL = frozenset({None, "incomplete", "stalled"})
_CHUNK_ROWS = 1 << 14
_SHORT = 1 << 16                   # requests of a run whose page a second thread does not speed up


class Simulation:
    """What `mocker.simulate` returns.

    Parameters
    ----------
    report
        The report (`mocker.report.REPORT_KEYS`, then further keys).
    columns
        One array for each per-request field, all of one length, in trace order; or a function that makes them when
        they are asked for first.
    meta
        How the result came about: version, configuration, workload; or a function that says so.
    timeline
        What was recorded over simulated time.
    gaps
        Upper ends of bins of inter-token gaps, ms, and the gaps in each; kept with a timeline.
    scaling
        What a planner changed.

    Attributes
    ----------
    report : dict
        The report.
    per_request : dict
        Field name to NumPy column, in trace order. A missing value is NaN in a column of floats, -1 in a column of
        signed integers and None in a column of objects.
    meta, timeline, gaps, scaling
        As given.

    Raises
    ------
    ValueError
        If the columns differ in length.
    """

    def __init__(self, report: dict[str, Any],
                 columns: Mapping[str, NDArray[Any]] | Callable[[], Mapping[str, NDArray[Any]]],
                 meta: dict[str, Any] | Callable[[], dict[str, Any]], timeline: Timeline | None = None,
                 gaps: tuple[NDArray[np.float64], NDArray[np.int64]] | None = None,
                 scaling: Sequence[ScalingEvent] = ()) -> None:
        self.report = report
        self._columns, self._meta = columns, meta
        self.timeline = timeline
        self.gaps = gaps
        self.scaling = list(scaling)
        if not callable(columns):
            self.per_request = _checked(columns)
        if not callable(meta):
            self.meta = meta

    @cached_property
    def per_request(self) -> dict[str, NDArray[Any]]:
        """Field name to NumPy column."""
        assert callable(self._columns)
        made, self._columns = self._columns(), {}
        return _checked(made)

    @cached_property
    def meta(self) -> dict[str, Any]:
        """How the result came about."""
        assert callable(self._meta)
        made, self._meta = self._meta(), {}
        return made

    def complete(self) -> Simulation:
        """Make now what is otherwise made when it is asked for first; returns itself."""
        _ = self.per_request, self.meta
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.complete().__dict__

    @property
    def _num_rows(self) -> int:
        return len(next(iter(self.per_request.values()), ()))

    # -- other forms --------------------------------------------------------------------------------------------------

    def to_pandas(self) -> Any:
        """Return the per-request columns as a `pandas.DataFrame`.

        Integer columns that can have missing values get the nullable type Int64.
        """
        pd = import_extra("pandas", "pandas", "to_pandas")
        series: dict[str, Any] = {}
        for name, column in self.per_request.items():
            if column.dtype.kind == "i" and name not in _NEVER_MISSING:
                series[name] = pd.arrays.IntegerArray(column.astype(np.int64), column == -1)
            else:
                series[name] = column
        return pd.DataFrame(series, copy=True)

    def to_arrow(self) -> Any:
        """Return the per-request columns as a `pyarrow.Table`, with nulls for missing values."""
        pa = import_extra("pyarrow", "parquet", "to_arrow")
        return pa.table({name: arrow_array(column, None if name in _NEVER_MISSING else _missing(column))
                         for name, column in self.per_request.items()})

    def write_parquet(self, path: str | os.PathLike[str]) -> Path:
        """Write the per-request columns to a Parquet file (needs pyarrow) and return its path."""
        import_extra("pyarrow.parquet", "parquet", "write_parquet")
        table = self.to_arrow()
        with write_atomically(path) as file:
            write_parquet(table, file)
        return Path(path)

    def write_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the per-request columns as CSV, with empty cells for missing values; ``.gz`` compresses."""
        from mocker.reports.tables import write_csv

        return write_csv(path, self.per_request, self.per_request.keys() - _NEVER_MISSING)

    def write_jsonl(self, path: str | os.PathLike[str]) -> Path:
        """Write one JSON object for each request, in trace order, and return the path of the file.

        The keys are `RECORD_KEYS`, then those that only this package has; a missing value is null. Without a column
        `uuid`, it is the number of the request in the trace, from 1, as a UUID.

        Parameters
        ----------
        path
            The file; compressed if its name ends in ``.gz``.
        """
        return self._write_records(path, None)

    def write_report_jsonl(self, path: str | os.PathLike[str]) -> Path:
        """Write the records of `write_jsonl`, but only of requests that ended, by arrival time, then trace order.

        These are the rows and the order of the reference's ``report_jsonl_path``.
        """
        rows: NDArray[Any] = np.arange(self._num_rows)
        status = self.per_request.get("terminal_status")
        if status is not None:
            ended = np.fromiter((value not in _NOT_TERMINAL for value in status.tolist()), bool, len(status))
            rows = rows[ended]
        arrival = self.per_request.get("arrival_time_ms")
        if arrival is not None:
            rows = rows[np.argsort(arrival[rows], kind="stable")]
        return self._write_records(path, rows)

    def _write_records(self, path: str | os.PathLike[str], rows: NDArray[Any] | None) -> Path:
        total = self._num_rows if rows is None else len(rows)
        with open_text(path) as out:
            for start in range(0, total, _CHUNK_ROWS):
                chunk = slice(start, min(start + _CHUNK_ROWS, total))
                write_records(out, self.per_request, chunk if rows is None else rows[chunk])
        return Path(path)

    # -- what was recorded over simulated time ------------------------------------------------------------------------

    def write_html(self, path: str | os.PathLike[str], name: str | None = None, command: str | None = None) -> Path:
        """Write the HTML report (needs plotly) and return its path.

        Parameters
        ----------
        path
            The file.
        name
            What the page calls the run; the name of the file if not given.
        command
            The shell command that made the run, for the page.
        """
        from mocker.provenance import provenance
        from mocker.report import plain
        from mocker.reports.html import write_page
        from mocker.reports.run import run_data

        name = Path(path).stem if name is None else name
        if len(self.per_request["row"]) < _SHORT:
            return write_page(path, [run_data(self, name, provenance(self, command))])
        with ThreadPoolExecutor(1) as beside:      # the digest of a long trace takes as long as all the rest
            made = beside.submit(provenance, self, command)
            data = run_data(self, name, {})
            data["provenance"] = plain(made.result())
        return write_page(path, [data])

    def write_pass_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the passes for Perfetto or chrome://tracing (``recording=Recording(passes=N)``); ``.gz`` compresses."""
        from mocker.reports.perfetto import write_trace

        return write_trace(path, self)

    def write_timeseries(self, path: str | os.PathLike[str]) -> Path:
        """Write the time series as .csv, .csv.gz or .parquet (``recording=Recording(interval_ms=...)``)."""
        from mocker.reports.tables import write_timeseries

        if self.timeline is None:
            raise ValueError("time series need a recorded run: simulate(..., recording=Recording())")
        return write_timeseries(path, self.timeline)

    # -- text ---------------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """Return the report as a text table (`mocker.report.format_report_table`)."""
        return format_report_table(self.report)

    def _headline(self) -> str:
        report = self.report
        parts = [f"{report.get('completed_requests', 0):,} of {report.get('num_requests', 0):,} requests completed"]
        for key, text, scale in (
            ("duration_ms", "{:,.3f} s simulated", 1e-3),
            ("median_ttft_ms", "TTFT p50 {:,.1f} ms", 1.0),
            ("median_itl_ms", "ITL p50 {:,.2f} ms", 1.0),
            ("output_throughput_tok_s", "{:,.1f} output tok/s", 1.0),
        ):
            value = report.get(key)
            if value is not None:
                parts.append(text.format(value * scale))
        return ", ".join(parts)

    def __repr__(self) -> str:
        return "; ".join([f"<Simulation: {self._headline()}", *problem_lines(self.report)]) + ">"

    def _repr_html_(self) -> str:
        from html import escape  # its table of entities is for notebooks only

        def cells(tag: str, texts: list[str]) -> str:
            first = f'<{tag} style="text-align:left">{escape(texts[0])}</{tag}>'
            return "<tr>" + first + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts[1:]) + "</tr>"

        head = cells("th", ["Metric", *TABLE_COLUMNS])
        # A total stands in its first cell only.
        body = "".join(
            cells("td", [row[0], row[1], *("" if text == "N/A" else text for text in row[2:])])
            for row in table_rows(self.report)
        )
        below = "".join(f"<div>{escape(line)}</div>" for line in problem_lines(self.report))
        caption = escape(f"{TITLE}: {self._headline()}")
        return (
            f'<div><table><caption style="text-align:left">{caption}</caption>'
            f"<thead>{head}</thead><tbody>{body}</tbody></table>{below}</div>"
        )


def _checked(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """A copy of the mapping, whose columns have to be of one length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"per-request columns differ in length: {lengths}")
    return dict(columns)


def write_records(out: Writer, columns: Mapping[str, NDArray[Any]], index: Any) -> None:
    """Add per-request records as JSON lines; `index` selects the rows (see `Simulation.write_jsonl`)."""
    keys = [*RECORD_KEYS, *(name for name in columns if name not in RECORD_KEYS)]
    chosen: dict[str, Any] = {name: column[index] for name, column in columns.items()}
    if "uuid" not in columns:
        row = columns.get("row")
        numbers = (np.arange(len(next(iter(columns.values()), ()))) if row is None else row)[index]
        # The text of uuid.UUID(int=row + 1), without making the object.
        chosen["uuid"] = b'"00000000-0000-0000-0000-', (numbers + 1, "hex"), b'"'
    json_lines(keys, chosen, out)


def _missing(column: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Return which values of a column are missing, or None if none is."""
    kind = column.dtype.kind
    if kind == "f":
        missing = np.isnan(column)
    elif kind == "i":
        missing = np.equal(column, -1)
    else:                          # None is missing in any case
        return None
    return missing if missing.any() else None
