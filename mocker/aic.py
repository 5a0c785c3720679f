"""Measured GPU data: timing, KV blocks and router estimates from the package `aiconfigurator-core` (extra `aic`).

`MockEngineArgs(aic_backend=..., aic_system=..., aic_model_path=...)` ends up here when an engine is made. Answers to
the reference's `PerfModel::Aiconfigurator` and its Python side: prefill is asked for (batch, tokens + prefix, prefix),
decode for (batch, context, 2 tokens), each once, and remembered for the life of the process, so that times are those
of direct calls. Which versions, models and systems there are is the installed package's matter.
"""
from __future__ import annotations

import difflib
import hashlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from . import aic_memo
from ._lattice import LAYOUT, LatticeModel
from ._models import MemoModel
from .aic_parts import EngineParts
from .timing import TimingModel

if TYPE_CHECKING:
    from .args import MockEngineArgs

__all__ = ["AicPerfConfig", "AicTiming", "aic_models", "aic_systems", "estimate_kv", "prefill_estimator"]

BACKENDS = ("vllm", "sglang", "trtllm")
INSTALL = "pip install 'mocker-llm[aic]' (Python 3.11 or newer)"
MEMORY_SHARE = {"vllm": ("of_total", "gpu_memory_utilization", 0.9),
                "sglang": ("of_total", "mem_fraction_static", 0.88),
                "trtllm": ("of_free", "free_gpu_memory_fraction", 0.9)}
QUANT_ENUMS = {"aic_gemm_dtype": ("gemm_quant_mode", "GEMMQuantMode"),
               "aic_moe_dtype": ("moe_quant_mode", "MoEQuantMode"),
               "aic_fmha_dtype": ("fmha_quant_mode", "FMHAQuantMode"),
               "aic_kv_cache_dtype": ("kvcache_quant_mode", "KVCacheQuantMode"),
               "aic_comm_dtype": ("comm_quant_mode", "CommQuantMode")}


def _require() -> None:
    if find_spec("aiconfigurator_core") is None:
        raise ValueError(f"measured GPU data needs the package aiconfigurator-core: {INSTALL}")


@contextmanager
def _quiet() -> Iterator[None]:
    """The package warns of data that other models would need; errors still come as exceptions."""
    logger = logging.getLogger("aiconfigurator_core")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _nearest(name: str, known: Sequence[str]) -> str:
    """`did you mean …` for an unknown name, without regard to case, owner and punctuation."""
    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    tails = {plain(item.rsplit("/", 1)[-1]): item for item in known}
    words = plain(name.rsplit("/", 1)[-1])
    found = [tails[tail] for tail in difflib.get_close_matches(words, tails, 5, 0.6)]
    found += [item for tail, item in tails.items() if words and words in tail and item not in found][:5]
    return f"; nearest: {', '.join(found)}" if found else f"; known: {', '.join(sorted(known)[:12])} …"


@dataclass(frozen=True)
class AicPerfConfig:
    """What the package is asked for: an engine, a GPU system, a model and how it is spread.

    Parameters
    ----------
    aic_backend : {"vllm", "sglang", "trtllm"}
        Whose kernels.
    aic_system, aic_model_path : str
        GPU system and model; `mocker systems` and `mocker models` list them.
    aic_tp_size : int
        Tensor parallelism of the attention.
    aic_backend_version : str, optional
        A version of the engine that the package has, or "current", "previous", "next"; None: the current one.
    aic_moe_tp_size, aic_moe_ep_size, aic_attention_dp_size : int, optional
        Parallelism of the experts, data parallelism of the attention. For a mixture of experts without the first two
        the experts are split as the attention is, by tensor.
    aic_nextn : int, optional
        Draft tokens of a speculative step, 1 to 5.
    aic_nextn_accept_rates : str, optional
        Not used here: engines sample what is accepted.
    aic_gemm_dtype, aic_moe_dtype, aic_fmha_dtype, aic_kv_cache_dtype, aic_comm_dtype : str, optional
        Quantisation; None, "" and "auto" are the model's own.

    Raises
    ------
    ValueError
        A value is out of range.
    """

    aic_backend: str
    aic_system: str
    aic_model_path: str
    aic_tp_size: int = 1
    aic_backend_version: str | None = None
    aic_moe_tp_size: int | None = None
    aic_moe_ep_size: int | None = None
    aic_attention_dp_size: int | None = None
    aic_nextn: int | None = None
    aic_nextn_accept_rates: str | None = None
    aic_gemm_dtype: str | None = None
    aic_moe_dtype: str | None = None
    aic_fmha_dtype: str | None = None
    aic_kv_cache_dtype: str | None = None
    aic_comm_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.aic_backend not in BACKENDS:
            raise ValueError(f"aic_backend must be one of {', '.join(BACKENDS)}, got {self.aic_backend!r}")
        for name in ("aic_system", "aic_model_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} is needed with aic_backend and must not be empty, got {value!r}")
        for name in ("aic_tp_size", "aic_moe_tp_size", "aic_moe_ep_size", "aic_attention_dp_size"):
            value = getattr(self, name)
            if value is None and name != "aic_tp_size":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= 4096:
                raise ValueError(f"{name} must be an integer from 1 to 4096, got {value!r}")
        if self.aic_nextn is not None and self.aic_nextn not in range(1, 6):
            raise ValueError(f"aic_nextn must be an integer from 1 to 5, got {self.aic_nextn!r}")

    @classmethod
    def of(cls, args: MockEngineArgs) -> AicPerfConfig:
        """What engine arguments ask for.

        Raises
        ------
        ValueError
            `aic_backend`, `aic_system` or `aic_model_path` is missing, or a value is out of range.
        """
        values = {f.name: getattr(args, f.name) for f in fields(cls)}
        values["aic_tp_size"] = values["aic_tp_size"] or 1
        return cls(**values)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of the attention."""
        return self.aic_attention_dp_size or 1

    def resolved(self) -> AicPerfConfig:
        """The same with version, quantisation and expert parallelism spelled out, checked against the package.

        Raises
        ------
        ValueError
            The package is missing, or has no such system, version, model or data type.
        """
        return _resolved(self)

    def options(self) -> dict[str, Any]:
        """Keywords of the package's functions."""
        given = {"tp_size": self.aic_tp_size, "attention_dp_size": self.ranks, "moe_tp_size": self.aic_moe_tp_size,
                 "moe_ep_size": self.aic_moe_ep_size}
        for name, (keyword, _) in QUANT_ENUMS.items():
            given[keyword] = getattr(self, name)
        return given


def _quant(field: str, value: str | None) -> str | None:
    if value is None or value.strip().lower() in ("", "auto", "none", "null"):
        return None
    from aiconfigurator_core.sdk import common

    name = "int4_wo" if value.strip() == "int4" else value.strip()
    known = [member.name for member in getattr(common, QUANT_ENUMS[field][1])]
    if name not in known:
        raise ValueError(f"{field} {value!r} is not supported; supported: {', '.join(known)}")
    return name


@lru_cache(maxsize=256)
def _resolved(config: AicPerfConfig) -> AicPerfConfig:
    _require()
    from aiconfigurator_core.sdk import models, perf_database

    slots = perf_database.get_version_slots(config.aic_system, config.aic_backend) or {}
    if not slots:                           # else there are data: to list all systems takes half a second
        systems = aic_systems()
        if config.aic_system not in systems:
            raise ValueError(f"aic_system {config.aic_system!r} is unknown{_nearest(config.aic_system, list(systems))}")
        backends = systems[config.aic_system]
        if config.aic_backend not in backends:
            raise ValueError(f"no data of {config.aic_backend} on {config.aic_system}; there is "
                             f"{', '.join(backends) or 'none at all'}")
    wanted = config.aic_backend_version
    found = slots.get(wanted or "current") if wanted in (None, "current", "previous", "next") else wanted
    if found is None or found not in slots.values():
        known = sorted({*slots.values(), *aic_systems()[config.aic_system].get(config.aic_backend, ())})
        if found not in known:
            raise ValueError(f"aic_backend_version {wanted!r} of {config.aic_backend} on {config.aic_system} is "
                             f"{'not there' if found is None else 'unknown'}; versions: {', '.join(known)}")
    wanted = found
    if not os.path.exists(config.aic_model_path) and config.aic_model_path not in aic_models():
        raise ValueError(f"aic_model_path {config.aic_model_path!r} is unknown"
                         f"{_nearest(config.aic_model_path, aic_models())}; or give a folder with its config.json")
    dtypes: dict[str, Any] = {field: _quant(field, getattr(config, field)) for field in QUANT_ENUMS}
    experts: dict[str, Any] = {}
    with _quiet():
        if models.check_is_moe(config.aic_model_path):
            width = config.aic_tp_size * config.ranks
            tensor, expert = config.aic_moe_tp_size, config.aic_moe_ep_size
            if tensor is None:
                tensor = max(width // (expert or 1), 1)
            if expert is None:
                expert = max(width // tensor, 1)
            if tensor * expert != width:
                raise ValueError(f"aic_moe_tp_size {tensor} * aic_moe_ep_size {expert} must equal aic_tp_size "
                                 f"{config.aic_tp_size} * aic_attention_dp_size {config.ranks}")
            experts = {"aic_moe_tp_size": tensor, "aic_moe_ep_size": expert}
    return replace(config, aic_backend_version=wanted, **experts, **dtypes)


@lru_cache(maxsize=1)
def _systems() -> dict[str, dict[str, list[str]]]:
    from aiconfigurator_core.sdk import perf_database

    with _quiet():
        found = perf_database.get_supported_databases()
    return {system: {name: list(found[system][name]) for name in BACKENDS if found[system].get(name)}
            for system in sorted(found)}


def aic_systems() -> dict[str, dict[str, list[str]]]:
    """GPU systems with data: for each, engines and their versions.

    Raises
    ------
    ValueError
        The package is not installed.
    """
    _require()
    return _systems()


@lru_cache(maxsize=1)
def _models() -> tuple[str, ...]:
    from aiconfigurator_core.sdk import common

    return tuple(sorted(common.DefaultHFModels))


def aic_models() -> tuple[str, ...]:
    """Models whose configuration comes with the package, by their names on Hugging Face.

    Raises
    ------
    ValueError
        The package is not installed.
    """
    _require()
    return _models()


def aic_support(system: str) -> dict[str, list[str]]:
    """Models that the package's own tests have priced on a system: for each the engines.

    Raises
    ------
    ValueError
        The package is not installed, or the system is unknown.
    """
    _require()
    if system not in aic_systems():
        raise ValueError(f"system {system!r} is unknown{_nearest(system, list(aic_systems()))}")
    from aiconfigurator_core.sdk import common

    found: dict[str, list[str]] = {}
    for row in common.get_support_matrix():
        if row["System"] == system and row["Mode"] == "agg" and row["Status"] == "PASS":
            engines = found.setdefault(row["HuggingFaceID"], [])
            if row["Backend"] not in engines:
                engines.append(row["Backend"])
    return {name: sorted(engines) for name, engines in found.items()}


def model_config_file(model: str) -> str:
    """Path of a model's `config.json`: in its own folder, or the one that comes with the package.

    Raises
    ------
    ValueError
        There is none.
    """
    if os.path.isdir(model):
        return os.path.join(model, "config.json")
    if os.path.isfile(model):
        return model
    if find_spec("aiconfigurator_core") is not None:
        from importlib.resources import files

        path = str(files("aiconfigurator_core") / "model_configs" / f"{model.replace('/', '--')}_config.json")
        if os.path.isfile(path):
            return path
    raise ValueError(f"there is no configuration of the model {model!r}; give its config.json or the folder of it")


@lru_cache(maxsize=32)
def _engine(config: AicPerfConfig) -> Any:
    """The package's compiled engine for a resolved configuration."""
    from aiconfigurator_core.sdk.engine import EngineHandle

    with _quiet():
        try:
            return EngineHandle.compile(config.aic_model_path, config.aic_system, config.aic_backend,
                                        backend_version=config.aic_backend_version, nextn=config.aic_nextn or 0,
                                        **config.options())
        except Exception as error:  # the package raises many kinds
            raise _no_data(config, error) from error


def _no_data(config: AicPerfConfig, error: Exception) -> ValueError:
    return ValueError(f"no timing data of {config.aic_model_path} on {config.aic_system} with {config.aic_backend} "
                      f"{config.aic_backend_version}: {error}")


class AicTiming(TimingModel):
    """Timing by measured kernels.

    Parameters
    ----------
    config : AicPerfConfig
    interpolate : bool
        False: each distinct question is a call of the package, as the reference makes it, and its answer remembered.
        True: the package is asked at the points of a lattice, about a thousand for a replay; ``docs/timing.md`` says
        how near that is.
    mixed : bool
        Passes that compute prompts beside decoding requests take the package's time of mixed steps; False: the sum of
        both parts, as in the reference. For engines "vllm" and "trtllm" without `scheduler_rules`.

    Raises
    ------
    ValueError
        The package is missing or has no data for this.
    """

    core: MemoModel | LatticeModel

    def __init__(self, config: AicPerfConfig, interpolate: bool = False, mixed: bool = False,
                 _remembered: bool = False) -> None:
        self.config = config.resolved()
        self.interpolate, self.mixed = interpolate, mixed
        self._parts = parts = EngineParts(partial(_engine, self.config), self.config.aic_nextn or 0,
                                          lambda error: _no_data(self.config, error))
        if interpolate:
            parts.split()
            self.core = LatticeModel(parts, parts.square, mixed, parts.mixed_width() if mixed else 0)
        else:
            self.core = MemoModel(parts.prefill, lambda batch, _, context: parts.decode(batch, context), False, True, 0,
                                  parts.mixed if mixed else None)
            if not _remembered:
                parts.open()
        self.core.ranks = self.config.ranks

    def save_memo(self, path: str | os.PathLike[str]) -> None:
        """Write the answers so far, for `load_memo` of a later process."""
        aic_memo.write(path, self._about(), self.core)

    def load_memo(self, path: str | os.PathLike[str]) -> None:
        """Take over the answers of `save_memo`.

        Raises
        ------
        ValueError
            The file is damaged, or of another configuration or version of the package.
        """
        aic_memo.read(path, self._about(), self.core)

    def _about(self) -> str:
        """Everything that answers depend on."""
        from importlib.metadata import version

        about = f"aiconfigurator-core {version('aiconfigurator-core')}, {self}"
        if self.interpolate:
            about += f", lattice {LAYOUT}"
        if os.path.exists(self.config.aic_model_path):
            with open(model_config_file(self.config.aic_model_path), "rb") as file:
                about += f", config.json {hashlib.sha256(file.read()).hexdigest()[:16]}"
        if os.environ.get("AICONFIGURATOR_SYSTEMS_PATH"):
            about += f", data of {os.environ['AICONFIGURATOR_SYSTEMS_PATH']}"
        return about

    def __reduce__(self) -> tuple[Any, ...]:
        return AicTiming, (self.config, self.interpolate, self.mixed)

    def __repr__(self) -> str:
        shown = {name[4:]: value for name, value in asdict(self.config).items() if value is not None}
        if self.interpolate:
            shown["interpolate"] = True
        if self.mixed:
            shown["mixed"] = True
        return f"AicTiming({', '.join(f'{k}={v}' for k, v in shown.items())})"


_timings: dict[tuple[AicPerfConfig, bool, bool], AicTiming] = {}


def aic_timing(config: AicPerfConfig, interpolate: bool = False, mixed: bool = False) -> AicTiming:
    """The model of a configuration, the same object for equal ones, so that its memo is shared, also on disk."""
    key = replace(config.resolved(), aic_nextn_accept_rates=None)
    if (key, interpolate, mixed) not in _timings:
        model = AicTiming(key, interpolate, mixed, True)
        if not aic_memo.keep(model, model._about()):
            model._parts.open()            # nothing is remembered: an error comes now, not in the replay
        _timings[key, interpolate, mixed] = model
    return _timings[key, interpolate, mixed]


@dataclass(frozen=True)
class KvEstimate:
    """Room for KV state on one rank (GPU), bytes and tokens, and what else takes memory."""

    tokens: int
    bytes_per_token: float
    capacity_bytes: float
    kv_bytes: float
    weight_bytes: float
    other_bytes: float


def estimate_kv(args: MockEngineArgs) -> KvEstimate:
    """Memory for KV state on one GPU under engine arguments with `aic_backend`.

    Raises
    ------
    ValueError
        The package is missing, has no data for this, or the model leaves no memory.
    """
    share = getattr(args, MEMORY_SHARE[AicPerfConfig.of(args).aic_backend][1])
    return _estimate(AicPerfConfig.of(args).resolved(), args.max_num_batched_tokens or 8192, share)


@lru_cache(maxsize=256)
def _estimate(config: AicPerfConfig, budget: int, share: float | None) -> KvEstimate:
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    kind, name, usual = MEMORY_SHARE[config.aic_backend]
    with _quiet():
        try:
            found = estimate_kv_cache(
                config.aic_model_path, config.aic_system, config.aic_backend, config.aic_backend_version,
                max_num_tokens=budget, max_batch_size=1, memory_fraction_kind=kind,
                memory_fraction_value=usual if share is None else share, **config.options())
        except Exception as error:  # the package raises many kinds
            raise ValueError(f"the KV memory of {config.aic_model_path} on {config.aic_tp_size} GPUs of "
                             f"{config.aic_system} cannot be estimated: {error}; set num_gpu_blocks") from error
    parts = found["memory_breakdown"] or {}
    tokens = int(found["total_kv_size_tokens"])
    if tokens < 1:
        raise ValueError(f"{config.aic_model_path} leaves no memory for KV state on {config.aic_tp_size} GPUs of "
                         f"{config.aic_system}; use more of them, or raise {name}")
    weights = float(parts.get("weights_bytes", math.nan))
    others = sum(float(size) for name, size in parts.items() if name != "weights_bytes") if parts else math.nan
    return KvEstimate(tokens, float(found["kv_size_per_token_bytes"]), float(found["total_gpu_capacity_bytes"]),
                      float(found["total_kv_size_bytes"]), weights, others)


def estimate_blocks(args: MockEngineArgs) -> int:
    """KV blocks of a worker: those of a rank, times the data-parallel ranks of the attention.

    Raises
    ------
    ValueError
        As `estimate_kv`, or no block fits.
    """
    kv = estimate_kv(args)
    blocks = kv.tokens // args.block_size
    if blocks < 1:
        raise ValueError(f"the KV memory of a GPU holds {kv.tokens} tokens, less than a block of {args.block_size}")
    return blocks * AicPerfConfig.of(args).ranks


def prefill_estimator(source: AicPerfConfig | TimingModel) -> Callable[[int, int], float]:
    """How long a router expects the prefill of one prompt to take: (uncached tokens, cached tokens) -> seconds."""
    model = aic_timing(source) if isinstance(source, AicPerfConfig) else source
    ask = model.prefill_ms

    def seconds(fresh: int, cached: int) -> float:
        return ask(1, fresh, cached) / 1000.0

    return seconds


if sys.version_info < (3, 11):
    INSTALL = "it needs Python 3.11 or newer"
