"""Where a result comes from: versions, digests of the trace and of the arguments, and how to make it again."""
from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ._hash import xxh3_64
from ._version import __version__
from .trace import Trace

if TYPE_CHECKING:
    from .simulation import Simulation

__all__ = ["arguments_of", "provenance"]

_CHUNK = 1 << 20
_KNOWN = 256                       # files whose digests are kept
_SETTLED_NS = 2_000_000_000
_digests: dict[tuple[int, ...], str] = {}      # by the file's place, size and times
_LEFT_OUT = frozenset({"progress", "recording", "fast_forward"})


def arguments_of(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that differ from the defaults, without those that do not change results."""
    defaults = _defaults(function)
    return {name: value for name, value in call.items()
            if name in defaults and not name.startswith("_") and name not in _LEFT_OUT and value != defaults[name]}


@functools.cache
def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def provenance(simulation: Simulation, command: str | None = None) -> dict[str, Any]:
    """Describe how a simulation was made. Reads the trace's file again for its digest, unless that is known.

    Parameters
    ----------
    simulation : Simulation
        Made by `mocker.simulate`.
    command : str, optional
        The shell command that made it; None: the call of `mocker.simulate` that makes it.

    Returns
    -------
    dict
        JSON values: `command`, `mocker_version`, `python`, `numpy`, `platform`, `workload`, `arguments`,
        `arguments_sha256`; equal inputs give equal digests.
    """
    arguments = dict(simulation.meta.get("arguments", {}))
    workload = arguments.pop("workload", None)
    described = {name: _described(value) for name, value in arguments.items()}
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return {
        "command": _call(workload, arguments) if command is None else command,
        "mocker_version": __version__, "python": platform.python_version(), "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}", "workload": _workload(workload),
        "arguments": described, "arguments_sha256": hashlib.sha256(text.encode()).hexdigest()}


def _described(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return json.loads(value.to_json())
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return getattr(value, "__qualname__", None) or repr(value)


def _workload(workload: Any) -> Any:
    if workload is None:
        return None
    if isinstance(workload, str | os.PathLike):
        return _file(workload)
    if isinstance(workload, list | tuple):
        return [_file(path) for path in workload]
    if isinstance(workload, Trace):
        return {"trace": workload.path, "requests": len(workload), "columns_xxh3": _digest(vars(workload))}
    return {"synthetic": {name: _described(value) for name, value in vars(workload).items()}}


def _file(path: str | os.PathLike[str]) -> dict[str, Any]:
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            status = os.fstat(file.fileno())
            known = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            size, digest = status.st_size, _digests.get(known)
            if digest is None:
                size, digest = _digest_of_file(file)
                # A file that has changed a moment ago may do so once more at the same time of the system's clock.
                if size == status.st_size and time.time_ns() - status.st_mtime_ns > _SETTLED_NS:
                    if len(_digests) >= _KNOWN:
                        _digests.clear()
                    _digests[known] = digest
            return {"file": name, "bytes": size, "sha256": digest}
    except OSError as error:                   # gone since it was read, or a pipe
        return {"file": name, "sha256": None, "error": error.strerror}


def _digest_of_file(file: BinaryIO) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()


def _digest(columns: Mapping[str, Any]) -> str:
    """Digest of a trace's columns, wherever it was read from (XXH3: a file's digest would take longer than a page)."""
    digest = 0
    for name, values in columns.items():
        if name != "path":
            data = np.ascontiguousarray(values).data if isinstance(values, np.ndarray) else repr(values).encode()
            digest = xxh3_64(data, xxh3_64(name.encode(), digest))
    return f"{digest:016x}"


def _call(workload: Any, arguments: Mapping[str, Any]) -> str:
    """The call of `mocker.simulate` as Python text."""
    parts = [_source(workload)]
    parts += [f"{name}={_source(value)}" for name, value in arguments.items()]
    return f"mocker.simulate({', '.join(parts)})"


def _source(value: Any) -> str:
    if hasattr(value, "to_json"):
        return f"mocker.{type(value).__name__}.from_json({value.to_json()!r})"
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    return repr(value)
