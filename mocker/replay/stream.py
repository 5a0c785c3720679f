"""Requests written to disk as they end, and the report made of what is kept of them: a few numbers each, or a sketch.

A file holds whole rows at any moment: a JSONL line counts once its newline is there, a part of a Parquet folder has
its name once it is complete. So a killed replay leaves every row that it had written.
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._collect import SampleLog
from .._disagg import DisaggCluster
from ..arrow_arrays import write_parquet
from ..collector import Sla
from ..extras import import_ahead
from ..report import write_atomically
from ..simulation import Simulation, write_records
from ..text import Writer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._cluster import Cluster

    Columns = dict[str, NDArray[Any]]

BATCH_ROWS = 8192                  # requests that are held as text or as a part
HELD_S = 0.25                      # time that requests are held until there are so many
SUFFIXES = (".jsonl", ".parquet")
DISTRIBUTIONS = ("ttft", "ttst", "tpot", "e2e")


class RowStream:
    """Writes rows of a replay.

    Parameters
    ----------
    path : path-like or None
        ``*.jsonl``: a line a request; ``*.parquet``: a folder of parts. Rows of an earlier run are replaced. None: rows
        are only counted.
    exact : int or None
        Most samples of a distribution to keep before it is sketched; None: all.
    reference : bool
        Count as the reference does.
    sla : Sla
        Goodput bounds.

    Raises
    ------
    ValueError
        Another suffix, or something else is in the folder.
    """

    def __init__(self, path: str | os.PathLike[str] | None, exact: int | None, reference: bool, sla: Sla) -> None:
        self.path = Path() if path is None else Path(path)
        self.keeps_rows = path is not None
        self._reference, self._sla = reference, sla
        self._logs = {name: SampleLog(exact) for name in DISTRIBUTIONS}
        self.totals: dict[str, Any] = dict.fromkeys(
            ("completed", "inputs", "outputs", "reused", "first_reused", "good", "good_outputs"), 0)
        self.totals |= {"duration_ms": 0.0, "terminal": [0] * 8}
        self.rows = 0
        self.drain: Drain | None = None
        self._fd, self._part = -1, 0
        if path is None:
            return
        if self.path.suffix == ".jsonl":
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._out = Writer(self._write, self._fd)
        elif self.path.suffix == ".parquet":
            import_ahead("pyarrow.parquet", "parquet", "stream_to a Parquet folder")
            self._empty_folder()
        else:
            raise ValueError(f"stream_to must end in {' or '.join(SUFFIXES)}, got {os.fspath(path)}")

    def _empty_folder(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: a streamed Parquet result is a folder, but this is a file; remove it or "
                             "name another one")
        self.path.mkdir(parents=True, exist_ok=True)
        old = list(self.path.iterdir())
        for file in old:
            if not (file.name.lstrip(".").startswith("part-") and file.suffix in (".parquet", ".tmp")):
                raise ValueError(f"{self.path}: {file.name} is in the folder, which is none of its parts; name another "
                                 "folder")
        for file in old:
            file.unlink()

    def add(self, columns: Columns, kept: Columns) -> None:
        """Write requests.

        Parameters
        ----------
        columns : dict
            Their per-request columns.
        kept : dict
            Their columns of `mocker.collector.Columns`.
        """
        count = len(columns["row"])
        if count == 0:
            return
        if self._fd >= 0:
            write_records(self._out, columns, slice(0, count))
            self._out.flush()
        elif self.keeps_rows:
            with write_atomically(self.path / f"part-{self._part:06d}.parquet") as file:
                write_parquet(Simulation({}, columns, {}).to_arrow(), file)
            self._part += 1
        self.rows += count
        self._count(kept)

    def _write(self, text: memoryview) -> None:
        while text:
            text = text[os.write(self._fd, text):]

    def _count(self, c: Columns) -> None:
        """Add requests to totals and distributions (see `mocker._report.report_of`)."""
        t = self.totals
        served = ~np.isnan(c["first_admit"]) & ~np.isnan(c["first_token"])
        done = served if self._reference else c["terminal"] == 1
        outputs = c["output_length"] if self._reference else c["output_tokens"]
        t["completed"] += int(np.count_nonzero(done))
        for name, values in (("inputs", c["input_length"]), ("outputs", outputs), ("reused", c["reused"]),
                             ("first_reused", c["first_reused"])):
            t[name] += int(values[served].sum())
        ends = np.bincount(c["terminal"], minlength=8).tolist()
        t["terminal"] = [before + now for before, now in zip(t["terminal"], ends, strict=True)]
        if served.any():
            t["duration_ms"] = max(t["duration_ms"], float(np.nanmax(c["last_token"][served])))
        ended = served & done
        first = np.maximum(c["first_token"] - c["arrival"], 0.0)
        whole = np.maximum(c["last_token"] - c["arrival"], 0.0)
        several = served & (c["output_tokens"] >= 2)
        self._logs["ttft"].add(first[served])
        self._logs["ttst"].add(c["second_gap"][served & ~np.isnan(c["second_gap"])])
        self._logs["tpot"].add(np.maximum(c["last_token"][several] - c["first_token"][several], 0.0)
                               / (c["output_tokens"][several] - 1))
        self._logs["e2e"].add(whole[ended])
        good = ended.copy()
        if self._sla.e2e_ms is not None:
            good &= whole <= self._sla.e2e_ms
        if self._sla.ttft_ms is not None:
            good &= first <= self._sla.ttft_ms
        if self._sla.itl_ms is not None:
            good &= ((whole - first) / np.maximum(outputs - 1, 1) <= self._sla.itl_ms) | (outputs <= 1)
        t["good"] += int(np.count_nonzero(good))
        t["good_outputs"] += int(outputs[good].sum())

    def distributions(self) -> list[dict[str, Any]]:
        """Statistics of the times to the first and the second token, per token and to the end, ms."""
        return [self._logs[name].statistics() for name in DISTRIBUTIONS]

    def sketched(self) -> list[str]:
        """Suffixes of report keys whose percentiles are not exact."""
        names = [name for name in DISTRIBUTIONS if self._logs[name].sketched]
        return [("e2e_latency" if name == "e2e" else name) + "_ms" for name in names]

    def close(self) -> None:
        """Write what is held back, and end the file."""
        try:
            if self.drain is not None:
                self.drain.close()
            if self._fd >= 0:
                self._out.close()
        finally:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


class Drain:
    """Takes requests that have ended from a running cluster to a stream, which also asks for them when it is closed.

    A thread of its own writes them in order, one batch at a time, while the replay goes on.

    Parameters
    ----------
    stream : RowStream
    count : int
        Requests of the workload.
    cluster : Cluster
    columns, kept : callable
        ``(rows) -> columns``, see `RowStream.add`.
    """

    def __init__(self, stream: RowStream, count: int, cluster: Cluster,
                 columns: Callable[[NDArray[np.int64]], Columns],
                 kept: Callable[[NDArray[np.int64]], Columns]) -> None:
        self._stream, self._cluster, self._columns, self._kept = stream, cluster, columns, kept
        self._taken = np.zeros(count, np.bool_)
        self._low = 0                          # every request before it is taken
        self._held: list[NDArray[np.int64]] = []
        self._holds, self._since = 0, time.monotonic()
        self._writer = ThreadPoolExecutor(1, "mocker-rows")
        self._batch: Future[None] | None = None                # that is being written
        stream.drain = self

    def ended(self) -> None:
        """Take those that have ended since the last time, and write what makes a batch or has waited long enough."""
        terminal = self._cluster.collector.columns["terminal"][self._low:]
        rows = self._low + np.flatnonzero((terminal != 0) & ~self._taken[self._low:])
        self._take(rows[self._settled(rows)])
        if time.monotonic() - self._since > HELD_S:
            self._write(self._holds)
        elif self._holds >= BATCH_ROWS:
            self._write(self._holds // BATCH_ROWS * BATCH_ROWS)

    def _settled(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of requests that have ended, whether that is everything that is said of them."""
        settled: NDArray[np.bool_] = ~np.isnan(self._cluster.arrival_of[rows])
        if isinstance(self._cluster, DisaggCluster):           # a source may be released after its request has ended
            details = self._cluster.details
            settled &= ~np.isnan(details["source_released_ms"][rows]) | np.isnan(details["source_held_ms"][rows])
        return settled

    def rest(self, arrival: NDArray[np.float64]) -> None:
        """Write all others that arrived."""
        self._take(np.flatnonzero(~self._taken & ~np.isnan(arrival)))
        self.flush()

    def _take(self, rows: NDArray[np.int64]) -> None:
        self._taken[rows] = True
        self._held.append(rows)
        self._holds += len(rows)

    def flush(self) -> None:
        """Write what has ended, and wait for it."""
        self._write(self._holds)
        self._wait()

    def close(self) -> None:
        """Write what has ended; the last call."""
        try:
            self.flush()
        finally:
            self._writer.shutdown()

    def _wait(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.result()

    def _write(self, count: int) -> None:
        rows = np.concatenate([np.empty(0, np.int64), *self._held])
        rows, self._held = rows[:count], [rows[count:]]
        self._holds -= count
        for start in range(0, len(rows), BATCH_ROWS):
            batch = rows[start:start + BATCH_ROWS]
            columns, kept = self._columns(batch), self._kept(batch)
            self._wait()
            self._batch = self._writer.submit(self._stream.add, columns, kept)
        left = np.flatnonzero(~self._taken[self._low:])
        self._low += int(left[0]) if len(left) else len(self._taken) - self._low
        self._since = time.monotonic()
