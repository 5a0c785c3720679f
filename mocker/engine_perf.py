"""What a planner or router asks about an engine: step times, queue drain, sustainable request rate.

Answers to the reference's `common/engine_perf.rs`: not how simulated engines take time, but a model of one that is
looked at from outside through forward-pass metrics. The step times are those of the package `aiconfigurator-core`
(extra `aic`): measured kernels that observed steps correct, or a regression on observed steps alone.
"""
from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from .aic import AicPerfConfig, _require

if TYPE_CHECKING:
    from .args import MockEngineArgs
    from .engine import ForwardPassSnapshot

__all__ = ["EngineCapacity", "EngineCapacityRequest", "EnginePerfLimits", "EnginePerfModel", "EnginePerfOptions"]

Metrics: TypeAlias = "ForwardPassSnapshot | Mapping[str, Any]"

U32_MAX = 2**32 - 1
FPM_VERSION = 1
CANDIDATES = 128                        # batch sizes that a capacity search looks at, at most
MOST_CACHED = 0.95                      # of a prompt
SCHEDULED = ("num_prefill_requests", "sum_prefill_tokens", "var_prefill_length", "sum_prefill_kv_tokens",
             "num_decode_requests", "sum_decode_kv_tokens", "var_decode_kv_tokens")
QUEUED = {"num_queued_prefill": "num_prefill_requests", "sum_queued_prefill_tokens": "sum_prefill_tokens",
          "var_queued_prefill_length": "var_prefill_length", "num_queued_decode": "num_decode_requests",
          "sum_queued_decode_kv_tokens": "sum_decode_kv_tokens", "var_queued_decode_kv_tokens": "var_decode_kv_tokens"}


@dataclass(frozen=True)
class EnginePerfLimits:
    """Limits of an engine.

    Parameters
    ----------
    max_num_batched_tokens, max_num_seqs : int
        Tokens and requests of a pass.
    max_kv_tokens : int
        Tokens of the KV pool.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 512
    max_kv_tokens: int = 2_000_000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= U32_MAX:
                raise ValueError(f"{name} must be an integer from 1 to 2**32-1, got {value!r}")

    @classmethod
    def of(cls, args: MockEngineArgs) -> EnginePerfLimits:
        """Those of engine arguments."""
        return cls(args.max_num_batched_tokens or 8192, args.max_num_seqs or 512, args.num_gpu_blocks * args.block_size)


@dataclass(frozen=True)
class EnginePerfOptions:
    """How the package learns from observed steps; None: ranges from the limits."""

    max_observations: int = 64
    min_observations: int = 5
    bucket_count: int = 16
    max_num_tokens: int | None = None
    max_batch_size: int | None = None
    max_kv_tokens: int | None = None


@dataclass(frozen=True)
class EngineCapacityRequest:
    """What is to be served.

    Parameters
    ----------
    isl, osl : int
        Prompt and output tokens.
    ttft_sla_ms, itl_sla_ms, e2e_latency_sla_ms : float, optional
        Bounds, ms.
    accept_length : float
        Tokens of a decode step, the base token included.
    kv_hit_rate : float, optional
        Cached part of the prompt, at most 0.95: it saves prefill work, not memory.
    optimization_target : {"throughput", "latency"}
        What the best point is.
    """

    isl: int
    osl: int
    ttft_sla_ms: float | None = None
    itl_sla_ms: float | None = None
    e2e_latency_sla_ms: float | None = None
    accept_length: float = 1.0
    kv_hit_rate: float | None = None
    optimization_target: str = "throughput"

    def __post_init__(self) -> None:
        for name in ("isl", "osl"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= U32_MAX:
                raise ValueError(f"{name} must be an integer from 0 to 2**32-1, got {value!r}")
        for name in ("ttft_sla_ms", "itl_sla_ms", "e2e_latency_sla_ms"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value!r}")
        if self.optimization_target not in ("throughput", "latency"):
            raise ValueError(f"optimization_target must be 'throughput' or 'latency', got {self.optimization_target!r}")

    def context(self) -> int:
        """Mean length of a request while it decodes."""
        return max(min(self.isl + self.osl // 2, U32_MAX), 1)

    def uncached(self) -> int:
        """Prompt tokens to compute."""
        rate = self.kv_hit_rate
        share = 0.0 if rate is None or not math.isfinite(rate) else min(max(rate, 0.0), MOST_CACHED)
        return max(_ceiled(self.isl * (1.0 - share), "effective isl"), 1)

    def burst(self) -> float:
        """Tokens of a decode step; at least 1."""
        return self.accept_length if math.isfinite(self.accept_length) and self.accept_length > 1.0 else 1.0


@dataclass(frozen=True)
class EngineCapacity:
    """The best point found: requests/s, times in ms, and whether it keeps the bounds."""

    rps: float
    ttft_ms: float | None
    itl_ms: float | None
    e2e_latency_ms: float | None
    eligible: bool


def _ceiled(value: float, name: str) -> int:
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite")
    found = max(math.ceil(value), 0)
    if found > U32_MAX:
        raise ValueError(f"{name} exceeds 2**32-1")
    return found


def _nanos(seconds: float) -> int:
    """Whole nanoseconds, exactly rounded."""
    if not 0.0 <= seconds < 2.0**64:
        raise OverflowError(f"a time of {seconds} s is beyond the range of durations")
    return round(Fraction(seconds) * 10**9)


def _seconds(nanos: int) -> float:
    return nanos // 10**9 + (nanos % 10**9) / 1e9


def _flat(metrics: Metrics) -> dict[str, Any]:
    """One rank's metrics as plain values; takes our snapshots and the reference's nested dictionaries."""
    if isinstance(metrics, Mapping):
        scheduled, queued = metrics.get("scheduled_requests") or {}, metrics.get("queued_requests") or {}
        flat = {name: scheduled.get(name, 0) for name in SCHEDULED}
        flat |= {name: queued.get(inner, 0) for name, inner in QUEUED.items()}
        flat |= {name: metrics.get(name, default) for name, default in (
            ("version", 0), ("worker_id", ""), ("dp_rank", 0), ("counter_id", 0), ("wall_time", 0.0))}
    else:
        flat = {name: getattr(metrics, name) for name in (*SCHEDULED, *QUEUED)}
        flat |= {"version": getattr(metrics, "version", 0), "worker_id": str(getattr(metrics, "worker_id", "")),
                 "dp_rank": getattr(metrics, "dp_rank", 0), "counter_id": getattr(metrics, "counter_id", 0),
                 "wall_time": getattr(metrics, "wall_time_secs", 0.0)}
    if flat["version"] not in (0, FPM_VERSION):
        raise ValueError(f"unsupported version of forward-pass metrics {flat['version']}; expected {FPM_VERSION}")
    for name in (*SCHEDULED, *QUEUED):
        value = flat[name]
        if not name.startswith("var") and not 0 <= value <= U32_MAX:
            raise ValueError(f"{name} must be from 0 to 2**32-1, got {value}")
    return flat


def _nested(flat: Mapping[str, Any], work: Mapping[str, Any], queued: bool = False) -> dict[str, Any]:
    """The package's form of one rank: identity from `flat`, scheduled work from `work`."""
    return {"version": FPM_VERSION, "worker_id": flat.get("worker_id", ""), "dp_rank": flat.get("dp_rank", 0),
            "counter_id": flat.get("counter_id", 0), "wall_time": flat.get("wall_time", 0.0),
            "scheduled_requests": {name: work.get(name, 0) for name in SCHEDULED},
            "queued_requests": {inner: flat[name] if queued else 0 for name, inner in QUEUED.items()}}


class _Average:
    """Mean of the newest samples; zeros before the first other one do not count where that is asked."""

    def __init__(self, length: int) -> None:
        self.samples: deque[float] = deque()
        self.length, self.sum, self.begun = max(length, 1), 0.0, False

    def add(self, value: float) -> None:
        self.begun = self.begun or value > 0.0
        if self.begun:
            self.samples.append(max(value, 0.0))
            self.sum += max(value, 0.0)
            while len(self.samples) > self.length:
                self.sum -= self.samples.popleft()

    def value(self) -> float:
        return self.sum / len(self.samples) if self.samples else 0.0


class EnginePerfModel:
    """A model of one engine, asked through forward-pass metrics: a list of them, one an attention rank.

    Make it with `from_native`, `from_regression` or `best_available`. Times are seconds; None where the model has not
    seen enough steps of that kind.
    """

    def __init__(self, model: Any, worker_type: str, limits: EnginePerfLimits, ranks: int, observations: int) -> None:
        if worker_type not in ("aggregated", "prefill", "decode"):
            raise ValueError(f"worker_type must be 'aggregated', 'prefill' or 'decode', got {worker_type!r}")
        self.worker_type, self.limits, self.ranks = worker_type, limits, ranks
        self._model = model
        self._prefills, self._prefill_tokens = _Average(observations), _Average(observations)

    @classmethod
    def from_regression(cls, worker_type: str, limits: EnginePerfLimits,
                        options: EnginePerfOptions | None = None) -> EnginePerfModel:
        """A model that knows only what it observes.

        Raises
        ------
        ValueError
            A value is out of range, or the package aiconfigurator-core is missing.
        """
        _require()
        import aiconfigurator_core

        options = options or EnginePerfOptions()
        inner = aiconfigurator_core.RustForwardPassPerfModel.from_regression(_options(options, limits))
        return cls(inner, worker_type, limits, 1, options.max_observations)

    @classmethod
    def from_native(cls, config: AicPerfConfig, worker_type: str, limits: EnginePerfLimits,
                    options: EnginePerfOptions | None = None) -> EnginePerfModel:
        """A model of measured kernels, corrected by what it observes.

        Raises
        ------
        ValueError
            The package is missing or has no data for this.
        """
        config = config.resolved()
        import aiconfigurator_core

        options = options or EnginePerfOptions()
        known = {"schema_version": 2, "model_name": config.aic_model_path, "system_name": config.aic_system,
                 "backend": config.aic_backend, "backend_version": config.aic_backend_version,
                 "tp_size": config.aic_tp_size, "pp_size": 1, "attention_dp_size": config.ranks,
                 "moe_tp_size": config.aic_moe_tp_size, "moe_ep_size": config.aic_moe_ep_size,
                 "weight_dtype": config.aic_gemm_dtype, "moe_dtype": config.aic_moe_dtype,
                 "activation_dtype": config.aic_fmha_dtype, "kv_cache_dtype": config.aic_kv_cache_dtype,
                 "extra": {} if config.aic_nextn is None else {"nextn": str(config.aic_nextn)}}
        try:
            inner = aiconfigurator_core.RustForwardPassPerfModel.from_native(json.dumps(known),
                                                                            _options(options, limits))
        except Exception as error:  # the package raises many kinds
            raise ValueError(f"no forward-pass model of {config.aic_model_path} on {config.aic_system}: {error}") \
                from error
        return cls(inner, worker_type, limits, config.ranks, options.max_observations)

    @classmethod
    def best_available(cls, args: MockEngineArgs, options: EnginePerfOptions | None = None,
                       bootstrap: Iterable[Sequence[Metrics]] = ()) -> EnginePerfModel:
        """Of engine arguments: measured kernels with `aic_backend`, else regression; then tuned with `bootstrap`."""
        limits = EnginePerfLimits.of(args)
        model = (cls.from_regression(args.worker_type, limits, options) if args.aic_backend is None
                 else cls.from_native(AicPerfConfig.of(args), args.worker_type, limits, options))
        model.tune_with_fpms(bootstrap)
        return model

    # -- steps --------------------------------------------------------------------------------------------------------

    def _checked(self, metrics: Sequence[Metrics]) -> list[dict[str, Any]]:
        if len(metrics) != self.ranks:
            raise ValueError(f"expected metrics of {self.ranks} attention ranks, got {len(metrics)}")
        flat = [_flat(one) for one in metrics]
        if self.ranks > 1 and sorted(one["dp_rank"] for one in flat) != list(range(self.ranks)):
            raise ValueError(f"dp_rank must be each of 0..{self.ranks - 1} once, got "
                             f"{[one['dp_rank'] for one in flat]}")
        return flat

    def _estimate(self, metrics: list[dict[str, Any]]) -> int | None:
        """Nanoseconds of a step."""
        ms = self._model.estimate_forward_pass_time_ms(json.dumps(metrics))
        return None if ms is None else _nanos(max(ms, 0.0) / 1000.0)

    def estimate_forward_pass_time(self, metrics: Sequence[Metrics]) -> float | None:
        """Time of one step with the scheduled work of `metrics`, s."""
        found = self._estimate([_nested(one, one, True) for one in self._checked(metrics)])
        return None if found is None else _seconds(found)

    def tune_with_fpms(self, iterations: Iterable[Sequence[Metrics]]) -> None:
        """Learn from observed steps, whose `wall_time` is positive."""
        steps = [self._checked(one) for one in iterations]
        if not steps:
            return
        self._model.tune_with_fpms(json.dumps([[_nested(rank, rank, True) for rank in step] for step in steps]))
        for step in steps:
            loads = [rank["sum_prefill_tokens"] + rank["sum_decode_kv_tokens"] + rank["num_decode_requests"]
                     for rank in step]
            busiest = step[len(loads) - 1 - loads[::-1].index(max(loads))]
            self._prefills.add(busiest["num_prefill_requests"])
            self._prefill_tokens.add(busiest["sum_prefill_tokens"])

    def diagnostics(self) -> dict[str, Any]:
        """What the package says of its model: source, readiness, samples, warning."""
        found: dict[str, Any] = json.loads(self._model.diagnostics())
        return found

    def correction_factors(self) -> tuple[float | None, float | None, float | None]:
        """Smallest, largest and mean correction of the measured kernels; None before enough steps."""
        return (self._model.min_correction_factor(), self._model.max_correction_factor(),
                self._model.avg_correction_factor())

    # -- questions ----------------------------------------------------------------------------------------------------

    def get_queued_prefill_time(self, metrics: Sequence[Metrics]) -> float | None:
        """How long the queued prompts take, s, in chunks of a pass; None for decode workers.

        Aggregated workers go on decoding meanwhile. Tokens that are cached have to be taken off before.
        """
        if self.worker_type == "decode":
            return None
        ranks = self._checked(metrics)
        most = self.limits.max_num_batched_tokens
        plans = [divmod(rank["sum_queued_prefill_tokens"], most) for rank in ranks]
        edges = sorted({0} | {full for full, _ in plans if full} | {full + 1 for full, tail in plans if tail})
        total = 0
        for begin, end in zip(edges, edges[1:], strict=False):
            step = []
            for rank, (full, tail) in zip(ranks, plans, strict=True):
                chunk = most if begin < full else tail if begin == full else 0
                work: dict[str, Any] = {"sum_prefill_tokens": chunk,
                                        "num_prefill_requests": max(rank["num_queued_prefill"], 1) if chunk else 0}
                if self.worker_type == "aggregated":
                    work |= {name: rank[name] for name in ("num_decode_requests", "sum_decode_kv_tokens",
                                                           "var_decode_kv_tokens")}
                step.append(_nested(rank, work))
            found = self._estimate(step)
            if found is None:
                return None
            total += found * (end - begin)
        return _seconds(total)

    def get_scheduled_decode_itl(self, metrics: Sequence[Metrics]) -> float | None:
        """Time to the next token of the running requests, s; None for prefill workers.

        Aggregated workers compute prompts beside: the scheduled ones, or without any as many as lately.
        """
        if self.worker_type == "prefill":
            return None
        step = []
        for rank in self._checked(metrics):
            work = {name: rank[name] for name in ("num_decode_requests", "sum_decode_kv_tokens",
                                                  "var_decode_kv_tokens")}
            if self.worker_type == "aggregated":
                count, tokens = rank["num_prefill_requests"], rank["sum_prefill_tokens"]
                if not count and not tokens:
                    tokens = _ceiled(self._prefill_tokens.value(), "prefill tokens")
                    count = max(_ceiled(self._prefills.value(), "prefill requests"), int(tokens > 0))
                work |= {"num_prefill_requests": count, "sum_prefill_tokens": tokens,
                         "var_prefill_length": rank["var_prefill_length"],
                         "sum_prefill_kv_tokens": rank["sum_prefill_kv_tokens"]}
            step.append(_nested(rank, work))
        found = self._estimate(step)
        return None if found is None else _seconds(found)

    def find_engine_capacity_rps(self, request: EngineCapacityRequest) -> EngineCapacity | None:
        """The best request rate, among at most 128 batch sizes.

        Returns
        -------
        EngineCapacity or None
            None: not even one request fits, or the model has not seen enough. Look at `eligible`: the best point may
            break the bounds.
        """
        if request.isl == 0 or (request.osl == 0 and self.worker_type != "prefill"):
            return None
        search = {"prefill": self._prefill_points, "decode": self._decode_points, "aggregated": self._mixed_points}
        best: EngineCapacity | None = None
        for point in search[self.worker_type](request):
            if point is None:
                return None
            best = point if best is None else _better(best, point, request.optimization_target)
        return best

    def _synthetic(self, tokens: int, requests: int, kv: int) -> int | None:
        """Nanoseconds of a step of work spread evenly over the ranks."""
        def part(total: int, rank: int) -> int:
            return total // self.ranks + int(rank < total % self.ranks)

        return self._estimate([
            _nested({"dp_rank": rank}, {
                "sum_prefill_tokens": part(tokens, rank), "num_prefill_requests": int(part(tokens, rank) > 0),
                "num_decode_requests": part(requests, rank), "sum_decode_kv_tokens": part(kv, rank)})
            for rank in range(self.ranks)])

    def _chunks(self, tokens: int, estimate: Callable[[int], int | None]) -> int | None:
        full, tail = divmod(tokens, self.limits.max_num_batched_tokens)
        total = 0
        for size, times in ((self.limits.max_num_batched_tokens, full), (tail, 1)):
            if size and times:
                found = estimate(size)
                if found is None:
                    return None
                total += found * times
        return total

    def _prefill_points(self, request: EngineCapacityRequest) -> Iterable[EngineCapacity | None]:
        isl, limits = request.uncached(), self.limits
        most = 1 if isl > limits.max_num_batched_tokens else min(limits.max_num_seqs,
                                                                 limits.max_num_batched_tokens // isl)
        for batch in _batches(most):
            ttft = self._chunks(min(isl * batch, U32_MAX), lambda size: self._synthetic(size, 0, 0))
            if ttft is None:
                yield None
            elif ttft:
                yield _point(batch / _seconds(ttft), ttft, None, ttft, request)

    def _decode_points(self, request: EngineCapacityRequest) -> Iterable[EngineCapacity | None]:
        context = request.context()
        for batch in _batches(min(self.limits.max_num_seqs, self.limits.max_kv_tokens // context)):
            step = self._synthetic(0, batch, min(batch * context, U32_MAX))
            if step is None:
                yield None
            elif step and (itl := _nanos(_seconds(step) / request.burst())):
                yield _point(batch / (request.osl * _seconds(itl)), None, itl, None, request)

    def _mixed_points(self, request: EngineCapacityRequest) -> Iterable[EngineCapacity | None]:
        isl, context, budget = request.uncached(), request.context(), self.limits.max_num_batched_tokens
        if budget <= 1:
            return
        most = min(self.limits.max_num_seqs, self.limits.max_kv_tokens // context, budget - 1)
        for batch in _batches(most):
            share = _ceiled(batch * request.burst() * isl / max(request.osl, 1), "prefill of a step")
            if share > budget - batch:
                continue
            kv = min(batch * context, U32_MAX)
            step = self._synthetic(min(budget, share), batch, kv)
            if step is None:
                yield None
                return
            itl = _nanos(_seconds(step) / request.burst())
            if not step or not itl:
                continue
            ttft = self._chunks(min(min(budget, share) + isl, U32_MAX),
                                lambda size: self._synthetic(size, batch, kv))     # noqa: B023 (called here)
            if ttft is None:
                yield None
                return
            e2e = ttft + itl * (request.osl - 1)
            yield _point(batch / (request.osl * _seconds(itl)), ttft, itl, e2e, request)


def _options(options: EnginePerfOptions, limits: EnginePerfLimits) -> str:
    given = asdict(options)
    for name, value in (("max_num_tokens", limits.max_num_batched_tokens), ("max_batch_size", limits.max_num_seqs),
                        ("max_kv_tokens", limits.max_kv_tokens)):
        if given[name] is None:
            given[name] = value
    return json.dumps(given)


def _batches(most: int) -> list[int]:
    if most <= CANDIDATES:
        return list(range(1, most + 1))
    return [1 + i * (most - 1) // (CANDIDATES - 1) for i in range(CANDIDATES)]


def _point(rps: float, ttft: int | None, itl: int | None, e2e: int | None,
           request: EngineCapacityRequest) -> EngineCapacity:
    kept = True
    for value, bound in ((ttft, request.ttft_sla_ms), (itl, request.itl_sla_ms), (e2e, request.e2e_latency_sla_ms)):
        if bound is not None:
            kept = kept and value is not None and value <= _nanos(bound / 1000.0)
    shown = [None if value is None else _seconds(value) * 1000.0 for value in (ttft, itl, e2e)]
    return EngineCapacity(rps, shown[0], shown[1], shown[2], kept)


def _better(one: EngineCapacity, other: EngineCapacity, target: str) -> EngineCapacity:
    if one.eligible != other.eligible:
        return one if one.eligible else other
    if target == "throughput":
        return other if other.rps > one.rps else one

    def latency(point: EngineCapacity) -> float:
        return next((x for x in (point.e2e_latency_ms, point.ttft_ms, point.itl_ms) if x is not None), math.inf)

    return other if latency(other) < latency(one) else one
