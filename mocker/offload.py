"""KV offload: which tiers engine arguments ask for, and putting them below engine cores.

The tiers themselves are compiled (`_offload*`); `docs/offload.md` has the rules.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ._offload_engine import OffloadTiers, OffloadWorld

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ._engine import EngineCore
    from .args import MockEngineArgs

LINKS = {"g1_to_g2": 14.0, "g2_to_g1": 14.0, "g2_to_g3": 7.0, "g3_to_g2": 7.0, "g2_to_g4": 4.0, "g4_to_g2": 4.0}
DEFAULT_BATCH_SIZE = 32
_SHARED = ("num_g3_blocks", "enable_g4_storage", "block_size", "kv_bytes_per_token", "bandwidth_g2_to_g3_gbps",
           "bandwidth_g3_to_g2_gbps", "bandwidth_g2_to_g4_gbps", "bandwidth_g4_to_g2_gbps", "latency_g2_to_g3_ms",
           "latency_g3_to_g2_ms", "latency_g2_to_g4_ms", "latency_g4_to_g2_ms")


def offload_settings(args: MockEngineArgs) -> dict[str, Any] | None:
    """Sizes and bandwidths of the tiers that `args` ask for; None without a host tier.

    Returns
    -------
    dict or None
        "g2_blocks", "g3_blocks" (0: none), "g4", "block_bytes", "batch_size", "policy", "min_seen", "through", and GB/s
        under "g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2" (0: unlimited); "latency" has ms by
        these names.

    Raises
    ------
    ValueError
        Offload is asked for and cannot work: bytes a token are unknown, the engine has none, a bandwidth is not finite.
    """
    if not args.num_g2_blocks:
        return None
    if args.engine_type == "sglang":
        raise ValueError(f"num_g2_blocks={args.num_g2_blocks}: engine_type 'sglang' has no storage tiers below the "
                         "GPU; leave num_g2_blocks out")
    if not args.kv_bytes_per_token:
        raise ValueError(f"num_g2_blocks={args.num_g2_blocks} requires kv_bytes_per_token >= 1 (transfers have no size "
                         "without it); give kv_bytes_per_token, or leave num_g2_blocks out")
    if not args.enable_prefix_caching:
        raise ValueError(f"num_g2_blocks={args.num_g2_blocks} requires enable_prefix_caching=True: nothing that is "
                         "copied down could ever be found again")
    out: dict[str, Any] = {
        "g2_blocks": args.num_g2_blocks, "g3_blocks": args.num_g3_blocks or 0, "g4": bool(args.enable_g4_storage),
        "block_bytes": args.block_size * args.kv_bytes_per_token,
        "batch_size": args.offload_batch_size or DEFAULT_BATCH_SIZE,
        "policy": args.offload_eviction_policy, "min_seen": args.offload_min_seen,
        "through": args.offload_write_mode == "write_through"}
    for name, default in LINKS.items():
        value = getattr(args, f"bandwidth_{name}_gbps")
        out[name] = default if value is None else float(value)
        if not (math.isfinite(out[name]) and out[name] >= 0.0):
            raise ValueError(f"bandwidth_{name}_gbps must be finite and >= 0 (0: unlimited), got {value}")
    out["latency"] = {name: float(getattr(args, f"latency_{name}_ms")) for name in LINKS}
    return out


def offload_world(args: MockEngineArgs) -> OffloadWorld | None:
    """The tiers that all workers of a simulation share; None without offload (ValueError as `offload_settings`)."""
    s = offload_settings(args)
    if s is None:
        return None
    return OffloadWorld(g3_blocks=s["g3_blocks"], g4=s["g4"], g2_to_g3=s["g2_to_g3"], g3_to_g2=s["g3_to_g2"],
                        g2_to_g4=s["g2_to_g4"], g4_to_g2=s["g4_to_g2"],
                        latency=tuple(s["latency"][name] for name in ("g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2")))


def attach_tiers(world: OffloadWorld, engine: EngineCore, args: MockEngineArgs, compat: str | None) -> OffloadTiers:
    """Put a worker's tiers below its engine.

    Parameters
    ----------
    world : OffloadWorld
    engine : EngineCore
        Without requests.
    args : MockEngineArgs
        Of this worker; what it shares must be as the world was made.
    compat : {"reference"} or None
        Lose what the reference loses: metadata of copied blocks, pins of staged ones.
    """
    s = offload_settings(args)
    assert s is not None
    if s["through"] and compat == "reference":
        raise ValueError("offload_write_mode='write_through' is not for compat='reference', which copies blocks when "
                         "they are evicted only; leave one of them out")
    return world.attach(engine, g2_blocks=s["g2_blocks"], block_bytes=s["block_bytes"], batch_size=s["batch_size"],
                        g1_to_g2=s["g1_to_g2"], g2_to_g1=s["g2_to_g1"], reference=compat == "reference",
                        latency=(s["latency"]["g1_to_g2"], s["latency"]["g2_to_g1"]), policy=s["policy"],
                        min_seen=s["min_seen"], through=s["through"])


def check_shared(first: MockEngineArgs, second: MockEngineArgs) -> None:
    """ValueError if two pools that use the same disk or remote store disagree about it."""
    if not (first.num_g2_blocks and second.num_g2_blocks) or not (first.num_g3_blocks or first.enable_g4_storage
                                                                  or second.num_g3_blocks or second.enable_g4_storage):
        return
    for name in _SHARED:
        a, b = getattr(first, name), getattr(second, name)
        if a != b:
            raise ValueError(f"the disk and the remote store are shared: {name} must be the same for all workers, "
                             f"got {a} and {b}")


def _link(parts: list[dict[str, Any]], duration_ms: float) -> dict[str, Any]:
    """One direction of a link; several parts are the links of several workers."""
    total = {name: sum(part[name] for part in parts) for name in ("bytes", "transfers", "busy_ms", "delay_ms")}
    busy = duration_ms * len(parts)
    return {"bytes": total["bytes"], "transfers": total["transfers"],
            "utilization": total["busy_ms"] / busy if busy > 0 else 0.0,
            "mean_queue_delay_ms": total["delay_ms"] / total["transfers"] if total["transfers"] else 0.0}


def offload_report(world: OffloadWorld, block_size: int, duration_ms: float) -> dict[str, Any]:
    """What the tiers did, for the report.

    Returns
    -------
    dict
        "g2", "g3", "g4": "hit_tokens" (that came up from where they were found), "blocks" (of one pool; None: no
        limit), "peak_blocks", "evicted_blocks", and the links "down" and "up" with "bytes", "transfers", "utilization"
        (share of `duration_ms` with something under way, mean over links) and "mean_queue_delay_ms" (what transfers
        took longer than alone). Then "promotions", "staged_promotions", "early_blocks" (written
        through), "blocked_allocations", "parked_ms" of all requests together.
    """
    own = [tiers.counters() for tiers in world.attached]
    shared = world.counters()
    out: dict[str, Any] = {"g2": {
        "hit_tokens": block_size * sum(c["from_g2_blocks"] for c in own), "blocks": own[0]["blocks"] if own else 0,
        "peak_blocks": max((c["peak_blocks"] for c in own), default=0),
        "evicted_blocks": sum(c["evicted_blocks"] for c in own),
        "down": _link([c["down"] for c in own], duration_ms), "up": _link([c["up"] for c in own], duration_ms)}}
    for name, c in shared.items():
        out[name] = {"hit_tokens": block_size * sum(t[f"from_{name}_blocks"] for t in own), "blocks": c["blocks"],
                     "peak_blocks": c["peak_blocks"], "evicted_blocks": c["evicted_blocks"],
                     "down": _link([c["down"]], duration_ms), "up": _link([c["up"]], duration_ms)}
    for name in ("promotions", "staged_promotions", "early_blocks", "blocked_allocations", "parked_ms"):
        out[name] = sum(c[name] for c in own)
    return out


def offload_columns(world: OffloadWorld, block_size: int, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Per request: tokens that came up from each tier, and how long it was parked for them, ms."""
    tokens = world.blocks[rows] * block_size
    return {"host_tokens": tokens[:, 0], "disk_tokens": tokens[:, 1], "remote_tokens": tokens[:, 2],
            "parked_ms": world.parked_ms[rows]}
