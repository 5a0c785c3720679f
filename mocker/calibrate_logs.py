"""Logs of engines as observed steps: per-step logs, per-request records, dumps of vLLM's and SGLang's metrics.

Each is turned into `Steps`, rows of "this work took so long", which `mocker.calibrate` fits.
"""
from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Steps", "read_log", "steps_from_metrics", "steps_from_requests", "steps_from_rows"]

Column = NDArray[np.float64]
STEP_FIELDS: Mapping[str, tuple[str, ...]] = {
    "ms": ("step_ms", "duration_ms", "wall_time_ms", "latency_ms"),
    "prefills": ("num_prefill_requests", "prefill_requests"),
    "tokens": ("sum_prefill_tokens", "prefill_tokens"),
    "prefix": ("sum_prefill_kv_tokens", "prefill_cached_tokens"),
    "decodes": ("num_decode_requests", "decode_requests"),
    "context": ("sum_decode_kv_tokens", "decode_kv_tokens"),
    "pool": ("kv_tokens", "active_kv_tokens"),
}
"""What a step log has to say, and under which names; `wall_time` is the step in seconds."""


@dataclass(frozen=True)
class Steps:
    """Observed steps, a column each: ms and the work done.

    Parameters
    ----------
    ms : array
    prefills, tokens, prefix : array
        Prompts computed, all their new tokens and all their cached ones.
    decodes, context, pool : array
        Requests that got a token, the sum of their lengths, and tokens held in the pool (the same sum if not known).
    """

    ms: Column
    prefills: Column
    tokens: Column
    prefix: Column
    decodes: Column
    context: Column
    pool: Column

    def __len__(self) -> int:
        return len(self.ms)

    def terms(self) -> dict[str, Column]:
        """A column for each coefficient of `FormulaTiming`."""
        prompts, tokens = self.prefills > 0, self.tokens
        each = np.divide(tokens, self.prefills, out=np.zeros_like(tokens), where=prompts)
        cached = np.divide(self.prefix, self.prefills, out=np.zeros_like(tokens), where=prompts)
        decoding = self.decodes > 0
        return {
            "prefill.constant": (tokens > 0).astype(float), "prefill.tokens": tokens,
            "prefill.tokens_squared": tokens**2, "prefill.attention": tokens * (cached + 0.5 * each),
            "decode.constant": decoding.astype(float), "decode.batch": self.decodes,
            "decode.kv_tokens": np.where(decoding, self.pool, 0.0),
            "decode.kv_tokens_squared": np.where(decoding, self.pool, 0.0) ** 2, "decode.context_sum": self.context,
        }

    def pick(self, rows: NDArray[Any]) -> Steps:
        """Some of the rows."""
        return Steps(*(getattr(self, name)[rows] for name in STEP_FIELDS))


def _table(rows: Column) -> Steps:
    """Steps from rows of all fields but the last, which is the one before it."""
    ms, prefills, tokens, prefix, decodes, context = rows.T
    return Steps(ms, prefills, tokens, prefix, decodes, context, context.copy())


def steps_from_rows(rows: Sequence[Mapping[str, Any]], where: str = "log",
                    names: Mapping[str, str] | None = None) -> Steps:
    """Steps from a per-step log.

    Parameters
    ----------
    rows : sequence of mappings
        One a step, with the fields of `STEP_FIELDS` (all but the time may be absent: nothing of that kind happened);
        the reference's forward-pass metrics have these names.
    where : str
        What errors call the log.
    names : mapping, optional
        Further field names: from those of `Steps` to those of the log.

    Raises
    ------
    ValueError
        A field has no number; the message names row and field.
    """
    columns: dict[str, list[float]] = {name: [] for name in STEP_FIELDS}
    for number, row in enumerate(rows, 1):
        seconds = "wall_time" in row and not any(name in row for name in STEP_FIELDS["ms"])
        for name, known in STEP_FIELDS.items():
            choices = ((names[name],) if names and name in names else ()) + known
            found = next((choice for choice in choices if choice in row), None)
            if found is None and name == "ms" and seconds:
                found = "wall_time"
            if found is None:
                if name == "ms":
                    raise ValueError(f"{where}: row {number}: no step time; expected one of {', '.join(choices)}, "
                                     "or wall_time in seconds")
                columns[name].append(np.nan if name == "pool" else 0.0)
                continue
            try:
                value = float(row[found])
            except (TypeError, ValueError):
                value = np.nan
            if not 0.0 <= value < 1e15:
                raise ValueError(f"{where}: row {number}: {found} must be a number of at least 0, got {row[found]!r}")
            columns[name].append(value * 1000.0 if found == "wall_time" else value)
    arrays = {name: np.array(values) for name, values in columns.items()}
    arrays["pool"] = np.where(np.isnan(arrays["pool"]), arrays["context"], arrays["pool"])
    return Steps(**arrays)


def steps_from_requests(arrival_ms: Column, first_token_ms: Column, last_token_ms: Column, input_tokens: Column,
                        output_tokens: Column, cached_tokens: Column | None = None, budget: int = 8192) -> Steps:
    """Steps as far as they can be seen in the requests of one worker: arrival, first and last token.

    A request's mean gap between tokens is a decode step with the mean of the requests that were decoding beside it,
    where no prompt was computed meanwhile for most of that time; its TTFT is a prefill where nobody else waited for
    a first token, and besides a decode step and on average half of one before it.

    Parameters
    ----------
    arrival_ms, first_token_ms, last_token_ms : array
        Of each request that ended.
    input_tokens, output_tokens, cached_tokens : array
        Prompt, generated and reused prompt tokens.
    budget : int
        Tokens of a pass: longer prompts took several, and say nothing of one.
    """
    start, first, last = (np.asarray(x, float) for x in (arrival_ms, first_token_ms, last_token_ms))
    prompt, made = np.asarray(input_tokens, float), np.asarray(output_tokens, float)
    cached = np.zeros(len(start)) if cached_tokens is None else np.asarray(cached_tokens, float)
    fine = np.isfinite(start) & np.isfinite(first) & np.isfinite(last) & (made >= 1) & (last >= first)
    start, first, last, prompt, made, cached = (x[fine] for x in (start, first, last, prompt, made, cached))
    gap = np.divide(last - first, made - 1, out=np.zeros(len(made)), where=made > 1)
    rows: list[tuple[float, ...]] = []
    order = np.argsort(first)
    for i in order:
        if made[i] < 8:
            continue
        span = last[i] - first[i]
        others = np.minimum(last, last[i]) - np.maximum(first, first[i])
        beside = (others > 0) & (made > 1)
        share = np.where(beside, others, 0.0) / span
        waiting = np.minimum(first, last[i]) - np.maximum(start, first[i])
        waiting[i] = 0.0
        if np.maximum(waiting, 0.0).sum() > 0.02 * span:
            continue                           # prompts were computed between its tokens
        middle = np.clip(0.5 * (np.maximum(first, first[i]) + np.minimum(last, last[i])), first, last)
        grown = np.divide(middle - first, gap, out=np.zeros(len(gap)), where=gap > 0)
        rows.append((gap[i], 0.0, 0.0, 0.0, share.sum(), (share * (prompt + 1 + grown)).sum()))
    for i in range(len(start)):
        apart = (start < first[i]) & (first > start[i])
        apart[i] = False
        if apart.any() or prompt[i] - cached[i] > budget:
            continue
        running = (first < start[i]) & (last > first[i])
        ended = (first < start[i]) & (last > start[i]) & ~running
        if ended.any():
            continue
        grown = np.divide(start[i] - first, gap, out=np.zeros(len(gap)), where=gap > 0)
        context = np.where(running, prompt + grown, 0.0).sum()
        wait = 0.5 * gap[running].mean() if running.any() else 0.0
        rows.append((first[i] - start[i] - wait, 1.0, prompt[i] - cached[i], cached[i], running.sum() + 1.0,
                     context + prompt[i]))
    table = np.array(rows, float).reshape(-1, 6)
    return _table(table[table[:, 0] > 0])


REQUEST_FIELDS: Mapping[str, tuple[str, ...]] = {
    "arrival": ("arrival_time_ms", "arrival_ms", "start_ms"), "first": ("first_token_ms",), "ttft": ("ttft_ms",),
    "last": ("last_token_ms",), "e2e": ("e2e_latency_ms", "e2e_ms", "latency_ms"),
    "itl": ("itl_ms", "mean_itl_ms", "tpot_ms", "inter_token_latency_ms"),
    "input": ("input_length", "input_tokens", "prompt_tokens", "isl"),
    "output": ("output_length", "output_tokens", "completion_tokens", "osl"),
    "cached": ("reused_input_tokens", "cached_tokens"),
    "worker": ("decode_worker_idx", "worker", "worker_id", "instance"),
}
"""What a per-request log has to say, and under which names."""
METRICS: Mapping[str, tuple[str, ...]] = {
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds",
            "sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    "prefill": ("vllm:request_prefill_time_seconds", "sglang:time_to_first_token_seconds"),
    "prompt": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "used": ("sglang:num_used_tokens",),
    "usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
"""Metrics that are read, by what they say; a histogram by its sum and count."""
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{.*\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def steps_from_metrics(dumps: Sequence[str], where: str = "metrics") -> Steps:
    """Steps from what vLLM or SGLang showed at its metrics page, at times one after the other.

    Between two dumps the mean gap between tokens is a decode step with the mean of the running requests and of the
    tokens in the pool, and the mean prefill time is the prefill of one prompt of the mean size.

    Parameters
    ----------
    dumps : sequence of str
        Texts in the Prometheus format, of one engine.
    where : str
        What errors call them.

    Raises
    ------
    ValueError
        There are fewer than two, or they lack a metric, which the message names.
    """
    if len(dumps) < 2:
        raise ValueError(f"{where}: at least two dumps of the metrics are needed, got {len(dumps)}")
    seen = [_samples(text) for text in dumps]

    def column(name: str, suffix: str = "", needed: bool = True) -> Column:
        for metric in METRICS[name]:
            if all(metric + suffix in samples for samples in seen):
                return np.array([samples[metric + suffix] for samples in seen])
        if needed:
            raise ValueError(f"{where}: no metric {' or '.join(m + suffix for m in METRICS[name])} in all dumps")
        return np.zeros(len(seen))

    def middle(values: Column) -> Column:
        return 0.5 * (values[1:] + values[:-1])

    running, used = middle(column("running")), column("used", needed=False)
    if not used.any():
        pools = [samples.get("pool", 0.0) for samples in seen]
        if not all(pools):
            raise ValueError(f"{where}: the tokens in the pool are not known: neither {METRICS['used'][0]} nor "
                             "vllm:cache_config_info with num_gpu_blocks and block_size in all dumps")
        used = column("usage") * np.array(pools)
    pool = middle(used)
    gaps, count = np.diff(column("itl", "_sum")), np.diff(column("itl", "_count"))
    rows = [(1000.0 * gap / n, 0.0, 0.0, 0.0, batch, held)
            for gap, n, batch, held in zip(gaps, count, running, pool, strict=True) if n > 0 and batch > 0]
    spent, prompts = np.diff(column("prefill", "_sum")), np.diff(column("prefill", "_count"))
    tokens, hits = np.diff(column("prompt")), np.diff(column("hits", needed=False))
    rows += [(1000.0 * time / n, 1.0, max(new - old, 0.0) / n, old / n, 0.0, 0.0)
             for time, n, new, old in zip(spent, prompts, tokens, hits, strict=True) if n > 0]
    return _table(np.array(rows, float).reshape(-1, 6))


def _samples(text: str) -> dict[str, float]:
    """Values by name, added over labels; `pool`: tokens of the KV pool, where the engine says so."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line.strip())
        if match is None:
            continue
        name, labels, value = match.groups()
        if name == "vllm:cache_config_info":
            info = dict(_LABEL.findall(labels or ""))
            if info.get("num_gpu_blocks", "").isdigit() and info.get("block_size", "").isdigit():
                found["pool"] = float(info["num_gpu_blocks"]) * float(info["block_size"])
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        found[name] = found.get(name, 0.0) + number
    return found


def _requests(rows: Sequence[Mapping[str, Any]], where: str, budget: int) -> Steps:
    """Steps from per-request records under any of the known names, worker by worker."""
    def column(name: str, needed: bool = True) -> Column | None:
        choices = REQUEST_FIELDS[name]
        found = next((choice for choice in choices if choice in rows[0]), None)
        if found is None:
            if needed:
                raise ValueError(f"{where}: no field {' or '.join(choices)}")
            return None
        values = []
        for number, row in enumerate(rows, 1):
            value = row.get(found)
            try:
                values.append(float("nan") if value in (None, "") else float(value))
            except (TypeError, ValueError):
                raise ValueError(f"{where}: row {number}: {found} must be a number, got {value!r}") from None
        return np.array(values)

    arrival, prompt, made = column("arrival"), column("input"), column("output")
    assert arrival is not None and prompt is not None and made is not None
    first, ttft, last = column("first", False), column("ttft", False), column("last", False)
    if first is None:
        if ttft is None:
            raise ValueError(f"{where}: neither first_token_ms nor ttft_ms")
        first = arrival + ttft
    if last is None:
        e2e, itl = column("e2e", False), column("itl", False)
        if e2e is None and itl is None:
            raise ValueError(f"{where}: none of last_token_ms, e2e_latency_ms, itl_ms")
        last = arrival + e2e if e2e is not None else first + itl * np.maximum(made - 1, 0)
    cached = column("cached", False)
    cached = np.zeros(len(rows)) if cached is None else np.nan_to_num(np.maximum(cached, 0.0))
    worker = column("worker", False)
    worker = np.zeros(len(rows)) if worker is None else worker
    parts = []
    for one in np.unique(worker[np.isfinite(worker)]):
        mine = worker == one
        parts.append(steps_from_requests(arrival[mine], first[mine], last[mine], prompt[mine], made[mine],
                                         cached[mine], budget))
    return Steps(*(np.concatenate([getattr(part, name) for part in parts]) for name in STEP_FIELDS))


def read_log(paths: Sequence[str | os.PathLike[str]], kind: str = "auto", names: Mapping[str, str] | None = None,
             budget: int = 8192) -> Steps:
    """Steps from files.

    Parameters
    ----------
    paths : sequence of path
        JSON lines, CSV or Parquet (.gz too) with a row for each step or request; or, as ``.prom`` or ``.txt``, dumps
        of a metrics page in order of time: several files, or one with several.
    kind : {"auto", "steps", "requests", "metrics"}
        What the rows are; "auto": by name and fields.
    names : mapping, optional
        For step logs, from names of `Steps` to other field names.
    budget : int
        Tokens of a pass, for requests.

    Raises
    ------
    ValueError
        A file is no such log; the message names file, row and field.
    OSError
        It cannot be read.
    """
    files = [os.fspath(path) for path in paths]
    if kind == "metrics" or (kind == "auto" and all(name.endswith((".prom", ".txt")) for name in files)):
        dumps = []
        for name in files:
            text = _text(name)
            mark = next((line for line in text.splitlines() if line.startswith("# HELP")), None)
            parts = text.split(mark) if mark is not None else [text]
            dumps += [part for part in parts if part.strip()]
        return steps_from_metrics(dumps, files[0] if len(files) == 1 else "metrics")
    rows = [row for name in files for row in _rows(name)]
    where = files[0] if len(files) == 1 else f"{len(files)} files"
    if not rows:
        raise ValueError(f"{where}: the log is empty")
    if kind == "auto":
        timed = {"wall_time", *STEP_FIELDS["ms"], *((names or {}).values())} & rows[0].keys()
        kind = "requests" if {"ttft_ms", "first_token_ms"} & rows[0].keys() else "steps" if timed else "?"
        if kind == "?":
            raise ValueError(f"{where}: neither a step time ({', '.join(STEP_FIELDS['ms'])}, wall_time) nor ttft_ms or "
                             f"first_token_ms among the fields {', '.join(map(str, rows[0]))}")
    return steps_from_rows(rows, where, names) if kind == "steps" else _requests(rows, where, budget)


def _text(name: str) -> str:
    with open(name, "rb") as file:
        data = file.read()
    try:
        return (gzip.decompress(data) if name.endswith(".gz") else data).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{name}: not a text: {error}") from None


def _rows(name: str) -> list[dict[str, Any]]:
    plain = name.removesuffix(".gz")
    if plain.endswith(".parquet"):
        try:
            import pyarrow.parquet as parquet  # type: ignore[import-untyped]
        except ImportError:
            raise ValueError(f"{name}: Parquet files need pyarrow: pip install 'mocker-llm[parquet]'") from None
        return list(parquet.read_table(name).to_pylist())
    text = _text(name)
    if plain.endswith(".csv"):
        return [dict(row) for row in csv.DictReader(io.StringIO(text))]
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}: line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{name}: line {number}: expected an object, got {line[:60]}")
        rows.append(row)
    return rows
