"""The file of a sweep under way: a line for each finished configuration, so that a killed sweep goes on.

A row is one JSON object on one line and counts once its newline is there; a line without one is what a killed process
left behind and is cut off. The first line says what sweep it is, so that rows of another are never mixed in. One
process writes; a lock keeps others away.
"""
from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._version import __version__
from ..trace import Trace
from ..workload import SyntheticSpec

try:
    import fcntl
except ImportError:                # Windows: no lock
    fcntl = None                   # type: ignore[assignment]

FORMAT = 1
SYNC_SECONDS = 1.0                 # a power failure may cost rows of this time; a killed process costs none


def workload_fingerprint(workload: Trace | SyntheticSpec) -> str:
    """Text that differs between workloads that differ."""
    if isinstance(workload, SyntheticSpec):
        return repr(workload)
    digest = hashlib.blake2b(digest_size=16)
    for name, value in vars(workload).items():
        if name in ("path", "line"):
            continue
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value).data.cast("B") if isinstance(value, np.ndarray) and value.size
                      else repr(value).encode())
    return f"trace of {len(workload)} requests, {digest.hexdigest()}"


class Journal:
    """Rows on disk.

    Parameters
    ----------
    path : path-like
        The file; made if missing, gone on with if it holds the same sweep.
    fingerprint : str
        Of the workload.
    keys : sequence of str
        The report keys of a row.

    Attributes
    ----------
    rows : dict
        Rows found in the file, by the key of their configuration.

    Raises
    ------
    ValueError
        The file holds another sweep, something else, or a damaged line; or another process writes to it.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: str, keys: Sequence[str]) -> None:
        self.path = os.fspath(path)
        self.rows: dict[str, dict[str, Any]] = {}
        self._synced = time.monotonic()
        folder = os.path.dirname(self.path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        header = {"mocker_sweep": FORMAT, "version": __version__, "workload": fingerprint, "keys": list(keys)}
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._lock()
            self._read(header)
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"{self.path}: another sweep is writing to this file; wait for it or name another "
                                 "file") from None

    def _read(self, header: dict[str, Any]) -> None:
        with open(self.path, "rb") as file:
            data = file.read()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        if not lines:
            if data and not json.dumps(header).encode().startswith(data):
                raise ValueError(f"{self.path}: not a file of a sweep; name another one")
            os.ftruncate(self._fd, 0)
            self._write(header)
            return
        found = self._parse(lines[0], 1)
        if not isinstance(found.get("mocker_sweep"), int):
            raise ValueError(f"{self.path}: not a file of a sweep; name another one")
        for name, value in header.items():
            if found.get(name) != value:
                raise ValueError(f"{self.path}: this file belongs to another sweep: its {name} is "
                                 f"{_short(found.get(name))}, not {_short(value)}; name another file or remove it")
        for number, line in enumerate(lines[1:], 2):
            row = self._parse(line, number)
            if not isinstance(row.get("config"), dict) or ("report" in row) == ("error" in row):
                raise ValueError(f"{self.path}:{number}: not a row of a sweep; remove the line")
            self.rows[json.dumps(row["config"], sort_keys=True)] = row
        if whole < len(data):
            os.ftruncate(self._fd, whole)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.path}:{number}: damaged line ({error}); remove it to compute that row again"
                             ) from None
        if not isinstance(row, dict):
            raise ValueError(f"{self.path}:{number}: not a row of a sweep; remove the line")
        return row

    def find(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """The outcome of a configuration (in its plain form) that the file has; None if it has none."""
        row = self.rows.get(json.dumps(config, sort_keys=True))
        return None if row is None else {name: value for name, value in row.items() if name != "config"}

    def add(self, config: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        """Append the row of a configuration (in its plain form)."""
        self._write({"config": config, **outcome})

    def add_text(self, config: str, outcome: Mapping[str, Any]) -> None:
        """The same for a configuration given as JSON text."""
        self.add(json.loads(config), outcome)

    def _write(self, row: Mapping[str, Any]) -> None:
        left = memoryview((json.dumps(row) + "\n").encode())
        while left:
            left = left[os.write(self._fd, left):]
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            os.fsync(self._fd)
            self._synced = time.monotonic()

    def close(self) -> None:
        """Bring everything to the disk and let go of the file."""
        os.fsync(self._fd)
        os.close(self._fd)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else text[:97] + "..."
