"""A folder of profiler results -> the grid that the reference's converter makes of it.

The folder has measurements of single prompts and of decode batches, each as NPZ or as JSON:

    selected_prefill_interpolation/raw_data.npz or prefill_raw_data.json    prefill_isl, prefill_ttft (ms)
    selected_decode_interpolation/raw_data.npz or decode_raw_data.json      x_kv_usage, y_context_length, z_itl (ms),
                                                                            max_kv_tokens

A straight line is fitted to prefill (new tokens), a plane to decode (requests and KV tokens), by least squares, and
both are read off at 100 points an axis. The sums of the fit run in the order of the reference's observations, which
it sorts into buckets, so that the arrays are its to the last bit.
"""
from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .timing import GridTiming

__all__ = ["is_profiler_folder", "load_profiler_folder"]

PREFILL = ("selected_prefill_interpolation/raw_data.npz", "prefill_raw_data.json")
DECODE = ("selected_decode_interpolation/raw_data.npz", "decode_raw_data.json")
BUCKETS = 16                           # of all axes together
LEAST_SECONDS = 1e-6                   # of a step
BATCH_NOISE = 1e-6                     # seconds a request: a fall as small as this stays

Array = NDArray[np.float64]


def is_profiler_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder has both kinds of measurements."""
    return all(any(os.path.exists(os.path.join(path, name)) for name in names) for names in (PREFILL, DECODE))


def _read(folder: str, names: Sequence[str], fields: Sequence[str]) -> tuple[str, dict[str, Array]]:
    """Arrays of the first file that is there, checked; and its name."""
    from zipfile import BadZipFile

    found = [path for name in names if os.path.exists(path := os.path.join(folder, *name.split("/")))]
    if not found:
        raise ValueError(f"{folder}: not a folder of profiler results: it has neither {names[0]} nor {names[1]}")
    path = found[0]
    data: Mapping[str, Any]
    try:
        if path.endswith(".json"):
            with open(path, encoding="utf-8") as text:
                data = json.load(text)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
        else:
            with np.load(path, allow_pickle=False) as archive:
                data = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    missing = [name for name in fields if name not in data]
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(missing)}; it has {', '.join(sorted(data)) or 'nothing'}")
    arrays: dict[str, Array] = {}
    for name in fields:
        try:
            array = np.asarray(data[name])
        except ValueError as error:
            raise ValueError(f"{path}: {name} is no array of numbers: {error}") from None
        if array.dtype.kind not in "iuf":
            raise ValueError(f"{path}: {name} must hold real numbers, got {array.dtype}")
        if name == "max_kv_tokens":
            if array.size != 1:
                raise ValueError(f"{path}: {name} must be one number, got shape {array.shape}")
            array = array.reshape(1)
        elif array.ndim != 1 or array.shape != arrays.get(fields[0], array).shape:
            raise ValueError(f"{path}: {name} must have one dimension and the length of {fields[0]}, got shape "
                             f"{array.shape}")
        bad = ~(np.isfinite(array) & (array >= 0))
        if bad.any():
            raise ValueError(f"{path}: {name}[{int(np.argmax(bad))}] must be a finite number of at least 0, got "
                             f"{array[bad][0]}")
        arrays[name] = array.astype(np.float64)
    if not len(arrays[fields[0]]):
        raise ValueError(f"{path}: {fields[0]} is empty")
    return path, arrays


def _ordered(rows: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Observations (features and seconds) bucket by bucket, in the order in which the reference has them.

    It sorts a new one into equal parts of each feature's range so far; when a range grows, all are sorted anew.
    """
    features = len(rows[0]) - 1 if rows else 0
    parts = BUCKETS if features == 1 else int(BUCKETS ** 0.5)
    low, high = [float("inf")] * features, [float("-inf")] * features
    buckets: dict[tuple[int, ...], list[tuple[float, ...]]] = {}

    def put(row: tuple[float, ...]) -> None:
        at = tuple(max(0, min(int((row[i] - low[i]) / (high[i] - low[i]) * parts), parts - 1))
                   if high[i] > low[i] else 0 for i in range(features))
        buckets.setdefault(at, []).append(row)

    for row in rows:
        before = low.copy(), high.copy()
        low, high = [min(a, b) for a, b in zip(low, row, strict=False)], [
            max(a, b) for a, b in zip(high, row, strict=False)]
        if (low, high) != before:
            all_rows = [old for bucket in buckets.values() for old in bucket]
            buckets.clear()
            for old in all_rows:
                put(old)
        put(row)
    return [row for bucket in buckets.values() for row in bucket]


def _fit(rows: list[tuple[float, ...]], what: str, path: str) -> tuple[Array, float]:
    """Coefficients and constant of the least squares, seconds."""
    table = np.array(_ordered([row for row in rows if row[-1] != 0.0]))
    if not len(table):
        raise ValueError(f"{path}: {what} has no time other than 0")
    x, y = table[:, :-1], table[:, -1]
    middle, mean = np.average(x, axis=0), np.average(y)
    found = np.linalg.lstsq(x - middle, y - mean, rcond=max(x.shape) * np.finfo(float).eps)[0]
    return found, float(mean - np.dot(middle, found))


def _step(values: Array, coefficients: Array, constant: float) -> float:
    return max(LEAST_SECONDS, float(np.dot(values, coefficients) + constant)) * 1000.0


def load_profiler_folder(folder: str | os.PathLike[str], resolution: int = 100) -> GridTiming:
    """Fit the measurements of a folder and read the fit off on a grid.

    Parameters
    ----------
    folder : path
        Has the files of the module's header.
    resolution : int
        Points of each axis of the grid.

    Raises
    ------
    ValueError
        A file or an array is missing or damaged, or times fall where there is more to do; the message names file and
        field.
    OSError
        A file cannot be read.
    """
    where = os.fspath(folder)
    if resolution < 2:
        raise ValueError(f"resolution must be at least 2, got {resolution}")
    path, data = _read(where, PREFILL, ("prefill_isl", "prefill_ttft"))
    tokens = np.trunc(data["prefill_isl"])
    if tokens.min() == tokens.max():
        raise ValueError(f"{path}: prefill_isl needs at least two different lengths, got {tokens[0]:g} only")
    slope, constant = _fit(list(zip(tokens.tolist(), (data["prefill_ttft"] / 1000.0).tolist(), strict=True)),
                           "prefill_ttft", path)
    if slope[0] < 0:
        raise ValueError(f"{path}: prefill_ttft falls with prefill_isl ({slope[0] * 1000:.3g} ms a token in a straight "
                         "fit); such measurements cannot be used")
    isl = np.linspace(tokens.min(), tokens.max(), resolution)
    ttft = np.array([_step(np.array([length]), slope, constant) for length in isl])

    path, data = _read(where, DECODE, ("x_kv_usage", "y_context_length", "z_itl", "max_kv_tokens"))
    pool = int(data["max_kv_tokens"][0])
    rows: list[tuple[float, ...]] = []
    for usage, context, itl in zip(data["x_kv_usage"].tolist(), data["y_context_length"].tolist(),
                                   data["z_itl"].tolist(), strict=True):
        held = round(usage * pool)
        rows.append((float(max(1, round(held / context)) if context > 0 else 1), float(held), itl / 1000.0))
    most = max(row[1] for row in rows)
    longest = max(row[1] / row[0] for row in rows)
    if most <= 0 or longest <= 1:
        raise ValueError(f"{path}: x_kv_usage * max_kv_tokens is {most:g} tokens at most, {longest:g} a request; the "
                         "grid needs more than one")
    plane, constant = _fit(rows, "z_itl", path)
    if plane[1] < 0:
        raise ValueError(f"{path}: z_itl falls with the KV tokens ({plane[1] * 1000:.3g} ms a token in a plane fit); "
                         "such measurements cannot be used")
    if plane[0] < -BATCH_NOISE:
        plane[0] = 0.0
    held_axis, context_axis = np.linspace(0, most, resolution), np.linspace(1, longest, resolution)
    itl = np.array([[_step(np.array([max(1, held / context), held]), plane, constant) for context in context_axis]
                    for held in held_axis])
    return GridTiming(isl, ttft, held_axis, context_axis, itl, where)
