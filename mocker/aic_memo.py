"""Answers of measured kernels kept on disk from process to process.

One file for each package version, configuration and kind of model, written at the end of a process that asked
something new. `MOCKER_AIC_MEMO` names another folder than the user's cache, or is `off`.
"""
from __future__ import annotations

import atexit
import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from ._lattice import LatticeModel
from ._models import MemoModel
from .report import write_atomically

if TYPE_CHECKING:
    from .aic import AicTiming

__all__ = ["keep", "memo_folder", "read", "write"]

MOST_ANSWERS = 4_000_000                # of a file: 130 MB
log = logging.getLogger(__name__)


def memo_folder() -> str | None:
    """Where memos are kept; None: nowhere."""
    given = os.environ.get("MOCKER_AIC_MEMO")
    if given is not None:
        return None if given.strip().lower() in ("", "off", "0", "none") else given
    try:
        from platformdirs import user_cache_dir
    except ImportError:                 # comes with the extra, but the package may have been installed by itself
        return None
    return os.path.join(user_cache_dir("mocker", appauthor=False), "aic")


def _arrays(core: MemoModel | LatticeModel) -> dict[str, Any]:
    if isinstance(core, LatticeModel):
        found = {}
        for name, table in core.tables.items():
            at = np.flatnonzero(table)
            found.update({f"{name}_at": at, f"{name}_ms": table.reshape(-1)[at]})
        return found
    (keys, times), (more_keys, more_times) = (table.export() for table in core.tables)
    return {"prefill": keys, "prefill_ms": times, "decode": more_keys, "decode_ms": more_times}


def write(path: str | os.PathLike[str], about: str, core: MemoModel | LatticeModel) -> None:
    """Write the answers of a model; a reader sees the old file or the whole new one."""
    with write_atomically(path) as file:
        np.savez(file, about=np.array(about), **_arrays(core))


def read(path: str | os.PathLike[str], about: str, core: MemoModel | LatticeModel) -> None:
    """Take over the answers of `write`.

    Raises
    ------
    ValueError
        The file is damaged, or of another model.
    """
    where = os.fspath(path)
    try:
        with open(where, "rb") as file, np.load(file, allow_pickle=False) as data:
            if str(data["about"]) != about:
                raise ValueError(f"it is of {data['about']}, not of {about}")
            if isinstance(core, LatticeModel):
                points = {name: (data[f"{name}_at"], data[f"{name}_ms"]) for name in core.tables}
                for name, (at, times) in points.items():
                    if at.shape != times.shape or not (times > 0).all() or (at < 0).any() or (
                            at >= core.tables[name].size).any():
                        raise ValueError("its arrays do not fit each other")
                for name, (at, times) in points.items():
                    core.tables[name].reshape(-1)[at] = times
                return
            parts = [(data[name].astype(np.int64), data[f"{name}_ms"].astype(np.float64))
                     for name in ("prefill", "decode")]
        for table, (keys, times) in zip(core.tables, parts, strict=True):
            if keys.shape != (len(times), 3) or not np.isfinite(times).all():
                raise ValueError("its arrays do not fit each other")
            table.load(np.ascontiguousarray(keys), np.ascontiguousarray(times))
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ValueError(f"{where}: not a memo of this timing model: {error}; delete it") from None


def _merge(path: str, about: str, model: AicTiming) -> None:
    """At the end of a process: what others wrote meanwhile stays."""
    try:
        if isinstance(model.core, MemoModel) and os.path.exists(path):
            read(path, about, model.core)
            if sum(len(table) for table in model.core.tables) > MOST_ANSWERS:
                return
        write(path, about, model.core)
    except (OSError, ValueError) as error:
        log.warning("measured times are not kept: %s", error)


def keep(model: AicTiming, about: str) -> bool:
    """Read the memo of a model, and write it at the end of the process if there is anything new; whether it was there.
    """
    folder, found = memo_folder(), False
    if folder is None:
        return False
    path = os.path.join(folder, hashlib.sha256(about.encode()).hexdigest()[:24] + ".npz")
    if os.path.exists(path):
        try:
            read(path, about, model.core)
            found = True
        except (OSError, ValueError) as error:
            log.warning("measured times are asked again: %s", error)
            try:
                os.unlink(path)
            except OSError:
                return False
    atexit.register(lambda: _merge(path, about, model) if model.core.calls else None)
    return found
