"""What a replay runs on: engines, routers and the cluster around them, made of the arguments.

One pool of workers, or a prefill and a decode pool. Answers to the reference's `replay/validate.rs` and the set-up in
`replay/offline/{agg,disagg}.rs`.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .._cluster import Cluster
from .._collect import Collector
from .._disagg import DisaggCluster
from .._engine import EngineCore
from .._offload_engine import OffloadWorld
from .._paths import PathTable
from .._router import RouterCore
from .._rules_engine import RulesEngine
from .._sglang_engine import SglangEngine
from ..args import DEFAULT_SCHEDULER_RULES, MockEngineArgs
from ..engine import engine_settings
from ..offload import attach_tiers, check_shared, offload_world
from ..router import KvAware, routing_policy
from ..router_config import KvRouterConfig, decode_router_config, prefill_router_config, replay_router_config
from ..rules import scheduler_options
from ..sglang import sglang_settings
from ..timing import TimingModel
from .fast import FastPaths, fast_paths

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..aic import AicPerfConfig
    from ..trace import Trace
    from ..workload import Workload
    from .planner import Planning

Engines = list[EngineCore] | list[RulesEngine] | list[SglangEngine]


@dataclass(frozen=True)
class Routing:
    """How requests get their workers."""

    mode: Any = "round_robin"
    config: KvRouterConfig | None = None
    tie_break: str = "random"
    seed: int = 0
    model_name: str | None = None
    estimator: Callable[[int, int], float | None] | None = None    # uncached, cached tokens -> seconds of a prefill
    lower_tiers: bool = False          # the KV router credits blocks in the host, on disk and in the remote store

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Routing:
        """That of the arguments of `mocker.simulate`, by name."""
        mode, config, tie_break, seed, name, lower = [call[argument] for argument in (
            "router_mode", "router_config", "router_tie_break", "router_seed", "model_name", "router_lower_tiers")]
        if (mode == "round_robin" and config is None and tie_break == "random" and seed == 0 and type(seed) is int
                and name is None and lower is False):
            return IN_TURN
        return cls(mode, config, tie_break, seed, name, lower_tiers=lower)

    @property
    def routed(self) -> bool:
        """Whether somebody chooses the workers."""
        return bool(self.mode != "round_robin")

    def __post_init__(self) -> None:
        if self.tie_break not in ("random", "lowest"):
            raise ValueError(f"router_tie_break must be 'random' or 'lowest', got {self.tie_break!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ValueError(f"router_seed must be an integer from 0 to 2**64 - 1, got {self.seed!r}")
        if self.model_name == "":
            raise ValueError("model_name must not be empty; leave it out instead")
        if self.config is not None and not isinstance(self.config, KvRouterConfig):
            raise TypeError(f"router_config must be KvRouterConfig, got {type(self.config).__name__}")
        if self.mode not in ("round_robin", "kv_router"):
            routing_policy(self.mode)
        if self.lower_tiers and self.mode != "kv_router":
            raise ValueError("router_lower_tiers requires router_mode='kv_router'")


IN_TURN = Routing()


def with_prefill_loads(routing: Routing, source: AicPerfConfig | TimingModel | None) -> Routing:
    """The same with an estimator of prefill times; refuses one that nobody asks, and a router that lacks one.

    Raises
    ------
    ValueError
        The router's configuration does not fit.
    """
    wanted = routing.config is not None and routing.config.router_prefill_load_model == "aic"
    if source is None:
        if wanted and routing.mode == "kv_router":
            raise ValueError("router_prefill_load_model='aic' requires aic_perf_config")
        return routing
    from ..aic import AicPerfConfig, prefill_estimator

    if not isinstance(source, (AicPerfConfig, TimingModel)):
        raise TypeError(f"aic_perf_config must be AicPerfConfig or a timing model, got {type(source).__name__}")
    if routing.mode != "kv_router":
        raise ValueError("aic_perf_config requires router_mode='kv_router'")
    if not wanted:
        raise ValueError("aic_perf_config requires a router_config with router_prefill_load_model='aic'")
    return replace(routing, estimator=prefill_estimator(source))


@dataclass(frozen=True)
class Pools:
    """Whose arguments and how many workers: those that decode, and before them in disaggregation those that prefill."""

    args: MockEngineArgs
    workers: int
    prefill_args: MockEngineArgs | None = None
    prefill_workers: int = 0

    def check(self, closed_loop: bool, mode: Any) -> None:
        """Refuse what no replay can run.

        Raises
        ------
        ValueError
            The engine arguments do not fit each other or the topology.
        """
        kind = "concurrency replay" if closed_loop else "trace replay"
        if self.prefill_args is not None:
            self._check_both(self.prefill_args, kind)
            return
        if mode == "kv_router" and self.workers == 1:
            raise ValueError("offline replay only supports router_mode=kv_router when num_workers > 1")
        if self.args.worker_type != "aggregated":
            raise ValueError(f"{kind} only supports aggregated workers, got worker_type={self.args.worker_type!r}")
        if self.args.dp_size != 1:
            raise ValueError(f"{kind} only supports data_parallel_size=1, got dp_size={self.args.dp_size}")

    def _check_both(self, prefill: MockEngineArgs, kind: str) -> None:
        decode = self.args
        if "trtllm" in (prefill.engine_type, decode.engine_type):
            raise ValueError(f"{kind} disaggregation does not support TRT-LLM; use engine_type 'vllm' or 'sglang'")
        for name in ("engine_type", "block_size"):
            if getattr(prefill, name) != getattr(decode, name):
                raise ValueError(f"{kind} disaggregation requires matching prefill/decode {name}, got "
                                 f"{getattr(prefill, name)!r} and {getattr(decode, name)!r}")
        for args, role in ((prefill, "prefill"), (decode, "decode")):
            if args.worker_type != role:
                raise ValueError(f"{kind} requires {role}_engine_args.worker_type={role!r}, got {args.worker_type!r}")
            if args.dp_size != 1:
                raise ValueError(f"{kind} only supports {role} data_parallel_size=1, got dp_size={args.dp_size}")


def output_limits(args: MockEngineArgs, prompt: NDArray[np.int64], limit: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens that each request may make: its own limit, or less by `max_model_len`; -1: its prompt is too long."""
    if args.scheduler_rules == DEFAULT_SCHEDULER_RULES:
        return limit
    longest = scheduler_options(args).max_model_len
    if longest is None:
        return limit
    return np.where(prompt >= longest, -1, np.minimum(limit, longest - prompt)).astype(np.int64)


def _engines(args: MockEngineArgs, workers: range, real_tokens: bool, events: bool, strict: bool = False) -> Engines:
    """Engines of the workers with these numbers."""
    if args.engine_type == "sglang":
        settings = sglang_settings(args)
        return [SglangEngine(**settings, seed=(args.aic_mtp_seed + w) % 2**64, real_tokens=real_tokens, record=False,
                             capture=events, worker_id=w) for w in workers]
    settings = engine_settings(args)
    if args.scheduler_rules != DEFAULT_SCHEDULER_RULES:
        options = scheduler_options(args)
        ruled = [RulesEngine(**settings, seed=0, token_seed=w, real_tokens=real_tokens, record=False, capture=events,
                             event_tokens=False, worker_id=w) for w in workers]
        for engine in ruled:
            options.configure(engine, skip_own=not real_tokens, strict=strict)
        return ruled
    return [EngineCore(**settings, seed=(args.aic_mtp_seed + w) % 2**64, token_seed=w, real_tokens=real_tokens,
                       record=False, capture=events, event_tokens=False, worker_id=w) for w in workers]


def _recruit(args: MockEngineArgs, number: int, real_tokens: bool, events: bool, world: OffloadWorld | None,
             compat: str | None, strict: bool = False) -> Any:
    """The engine of a worker that comes later, with tiers of its own."""
    engine = _engines(args, range(number, number + 1), real_tokens, events, strict)[0]
    if world is not None and args.num_g2_blocks:
        attach_tiers(world, cast(EngineCore, engine), args, compat)
    return engine


def _router(choice: Routing, args: MockEngineArgs, workers: int, real_tokens: bool, config: KvRouterConfig,
            seed: int) -> RouterCore | None:
    """The compiled router of one pool, or None for round robin."""
    if not choice.routed:
        return None
    policy = KvAware(config, choice.lower_tiers) if choice.mode == "kv_router" else routing_policy(choice.mode)
    return policy.core(args.block_size, workers, max_num_batched_tokens=args.max_num_batched_tokens,
                       tie_break=choice.tie_break, seed=seed % 2**64, model_name=choice.model_name,
                       skip_own=not real_tokens, prefill_estimator=choice.estimator)


def _set_ranks(cluster: Cluster, router: RouterCore | None, trace: Trace | None, rows: int, scored: bool) -> None:
    """Priorities and policy classes of a trace, for queues; zeros if there are none and a score is told of them."""
    classes = None if trace is None else trace.policy_class
    if trace is None or (classes is None and not trace.priority.any() and not trace.strict_priority.any()):
        if scored:
            cluster.set_ranks(np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.int32))
        return
    codes = np.zeros(len(trace), np.int32)
    if router is not None:
        codes[:] = [router.profile.code(None if classes is None else classes[i]) for i in range(len(trace))]
    cluster.set_ranks(trace.priority.astype(np.int64), trace.strict_priority.astype(np.int64), codes)


def set_growing(cluster: Cluster, workload: Workload, args: MockEngineArgs, limit: NDArray[np.int64]) -> None:
    """Let prompts that become known during the replay, and what follows from their lengths, be written."""
    growing = workload.growing
    if growing is None:
        return
    growing.collector = cluster.collector
    prepare: Callable[[int], object] = growing.prepare if growing.with_tokens else growing.counter()

    def grow(row: int) -> None:
        prepare(row)
        limit[row] = output_limits(args, workload.prompt[row], workload.limit[row])

    cluster.set_growing(prepare if args.scheduler_rules == DEFAULT_SCHEDULER_RULES else grow)


def _below(pools: Pools, first: list[Any], second: list[Any], rows: int, compat: str | None) -> OffloadWorld | None:
    """Tiers below the engines of one pool, or of a prefill (`first`) and a decode pool (`second`); None without."""
    args, prefill = pools.args, pools.prefill_args
    if prefill is not None:
        check_shared(prefill, args)
    world = offload_world(args)
    if prefill is not None:
        world = offload_world(prefill) or world
    if world is None:
        return None
    for engines, own in ((first, prefill or args), (second, args)):
        if own.num_g2_blocks:
            for engine in engines:
                attach_tiers(world, engine, own, compat)
    world.collect(rows)
    return world


def _apart(pools: Pools, routed: bool, compat: str | None) -> bool:
    """Whether time passes below each worker on its own: several, which share no tier.

    Not where a router sees what comes up and a link without limit gives one moment many turns.
    """
    args = pools.args
    limited = args.bandwidth_g1_to_g2_gbps != 0.0 and args.bandwidth_g2_to_g1_gbps != 0.0
    return (pools.workers > 1 and compat != "reference" and not args.num_g3_blocks
            and not args.enable_g4_storage and (limited or not routed))


def _foresee(world: OffloadWorld, paths: PathTable | None, workload: Workload, routed: bool) -> None:
    """Tell Belady's policy of each worker its requests; refuses workloads of which they are not known."""
    if (paths is None or routed or not workload.is_single or workload.growing is not None
            or len(paths.arrays["segment"]) != len(workload)):
        raise ValueError("offload_eviction_policy='belady' has to know which requests each worker gets: it is for "
                         "single requests of a trace, aggregated, round robin")
    order = np.argsort(workload.arrival, kind="stable")
    for worker, tiers in enumerate(world.attached):
        tiers.foresee(order[worker::len(world.attached)], paths.arrays["segment"], paths.arrays["parent"])


def _look_below(router: RouterCore | None, world: OffloadWorld | None, args: MockEngineArgs, reference: bool) -> None:
    """Let a router that credits blocks below the GPU see the shared tiers; refuses one that would see nothing."""
    if router is None or not router.lower_tiers:
        if world is not None and not reference:
            world.hush()
        return
    if world is None or not args.num_g2_blocks:
        raise ValueError("router_lower_tiers requires num_g2_blocks: there is nothing below the routed workers' pools")
    router.use_world(world)


def make_cluster(pools: Pools, workload: Workload, routing: Routing, *, cap_ms: float | None, real_tokens: bool,
                 fast: bool | FastPaths, planning: Planning | None = None,
                 compat: str | None = None) -> tuple[Cluster, bool]:
    """The cluster of a replay, ready to run.

    Returns
    -------
    cluster : Cluster
    coupled : bool
        Its arrivals or its routing depend on what happens in it, so that its workers cannot run one by one.

    Raises
    ------
    ValueError
        This workload cannot run on these pools.
    """
    args, prefill, fast = pools.args, pools.prefill_args, fast_paths(fast)
    collector = Collector(len(workload))
    cap = math.inf if cap_ms is None else cap_ms
    limit = output_limits(args, workload.prompt, workload.limit)
    if workload.growing is not None:
        limit = limit.copy()
    if prefill is not None:
        both = _make_both(pools, prefill, workload, routing, collector, cap, real_tokens, fast, compat)
        if planning is not None:
            planning.join(both, pools, lambda role, number, below: _recruit(
                (prefill, args)[role], number, real_tokens, role == 0 and routing.routed, below, compat))
        return both, True
    router = None
    if routing.routed:
        router = _router(routing, args, pools.workers, real_tokens, replay_router_config(args, routing.config),
                         routing.seed)
    if workload.growing is not None:
        workload.growing.with_tokens = real_tokens
    strict = not fast.books or workload.growing is not None    # later turns look for blocks that earlier ones generated
    engines = _engines(args, range(pools.workers), real_tokens, routing.routed, strict)
    world = _below(pools, engines, [], len(workload), compat)
    if world is not None and planning is None and _apart(pools, routing.routed, compat):
        world.part()
    paths = None if real_tokens else workload.make_paths(args.block_size)
    if world is not None and args.offload_eviction_policy == "belady":
        _foresee(world, paths, workload, routing.routed or planning is not None)
    cluster = Cluster(
        engines, collector, workload.arrival, workload.prompt, limit, paths,
        workload.tokens if real_tokens else None, router, cap,
        pools.workers == 1 and planning is None, fast.bits)
    if world is not None:
        cluster.set_offload(world)
    _look_below(router, world, args, compat == "reference")
    if router is not None or args.vllm_scheduling_policy == "priority" or args.admission_score is not None:
        _set_ranks(cluster, router, workload.trace, len(workload), args.admission_score is not None)
    set_growing(cluster, workload, args, limit)
    if workload.cancel_after is not None:
        cluster.set_cancellations(workload.cancel_after)
    if planning is not None:
        planning.join(cluster, pools, lambda _, number, below: _recruit(args, number, real_tokens, routing.routed,
                                                                        below, compat, strict))
    return cluster, routing.routed or planning is not None or (world is not None and pools.workers > 1
                                                               and not world.apart)


def _make_both(pools: Pools, prefill: MockEngineArgs, workload: Workload, routing: Routing, collector: Collector,
               cap: float, real_tokens: bool, fast: FastPaths, compat: str | None) -> DisaggCluster:
    decode = pools.args
    if "belady" in (prefill.offload_eviction_policy, decode.offload_eviction_policy):
        raise ValueError("offload_eviction_policy='belady' has to know which requests each worker gets: it is not for "
                         "disaggregation")
    first = _router(routing, prefill, pools.prefill_workers, real_tokens,
                    prefill_router_config(prefill, routing.config), routing.seed)
    second = _router(routing, decode, pools.workers, real_tokens, decode_router_config(decode, routing.config),
                     routing.seed + 1)
    limit = workload.limit if workload.growing is None else workload.limit.copy()
    decoding: list[Any] = list(_engines(decode, range(pools.workers), real_tokens, False))
    prefilling: list[Any] = list(_engines(prefill, range(pools.prefill_workers), real_tokens, routing.routed))
    world = _below(pools, prefilling, decoding, len(workload), compat)
    cluster = DisaggCluster([*decoding, *prefilling], collector, workload.arrival, workload.prompt, limit,
                            None if real_tokens else workload.make_paths(decode.block_size),
                            workload.tokens if real_tokens else None, None, cap, False, fast.bits)
    if world is not None:
        cluster.set_offload(world)
    _look_below(first, world, prefill, compat == "reference")
    timing = prefill.kv_bytes_per_token, prefill.kv_transfer_bandwidth
    cluster.split(
        decode_workers=pools.workers, prefill_collector=Collector(len(workload)), prefill_router=first,
        decode_router=second, kv_bytes=math.nan if timing[0] is None else float(timing[0]),
        bandwidth=math.nan if timing[1] is None else timing[1],
        full_prompt=prefill.kv_transfer_timing_mode == "full_prompt")
    scored = prefill.admission_score is not None or decode.admission_score is not None
    if first is not None or scored:
        _set_ranks(cluster, first, workload.trace, len(workload), scored)
    set_growing(cluster, workload, decode, limit)
    if workload.cancel_after is not None:
        cluster.set_cancellations(workload.cancel_after)
    return cluster
