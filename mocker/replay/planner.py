"""A planner in the loop of a replay: it is asked now and then, and changes the number of workers.

Answers to the reference's `replay/planner_handle.rs` and `replay/offline/planner_hook.rs`. Any object with two methods
is a planner::

    class Planner:
        def initial_tick_ms(self): ...          # when it is asked first; infinity for never
        def on_tick(self, metrics): ...         # -> {"target_prefill": int | None, "target_decode": int | None,
                                                #     "next_tick_ms": float | None}

`simulate(..., planner=...)` takes one; `PlannerReplayBridge` is the same with the reference's constructors.
"""
from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .._disagg import DisaggCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .._cluster import Cluster
    from .._watch import Watch
    from .pools import Pools

__all__ = ["Planner", "Planning", "ScalingEvent"]

PREFILL, DECODE = 0, 1
TARGETS = ("target_prefill", "target_decode")
KEYS = (*TARGETS, "next_tick_ms")
FPM_FORMATS = ("dicts", "columns", "none")
MOST_WORKERS = 100_000


class Planner(Protocol):
    """What a replay asks; see the module. `fpm_format` may be left out.

    `metrics` has, as in the reference: `now_ms`; `prefill_fpm_snapshots` and `decode_fpm_snapshots`, the metrics of
    every pass since the last tick with the `worker_id` (aggregated workers' passes are all under decode);
    `active_prefill_count`, `active_decode_count` of workers that take requests, and `total_prefill_count`,
    `total_decode_count` with those that start or drain; `traffic` since the last tick: `duration_s`, `num_req`,
    `avg_isl`, `avg_osl`, `avg_ttft_ms`, `avg_itl_ms`, `avg_accept_length` or None, `avg_kv_hit_rate`,
    `hit_rate_count`, `accept_length_forward_count`. Averages without samples are 0.

    Attributes
    ----------
    fpm_format : str
        "dicts" (the default): the metrics of passes are lists of dicts, a microsecond or two a pass. "columns":
        structured arrays of `mocker.replay.PASS_METRICS`. "none": they are left out.
    """

    def initial_tick_ms(self) -> float: ...

    def on_tick(self, metrics: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ScalingEvent:
    """A change that a planner made.

    Attributes
    ----------
    at_ms : float
    role : str
        "prefill", "decode" or "aggregated".
    before, target : int
        Active and starting workers before it, and those wanted.
    """

    at_ms: float
    role: str
    before: int
    target: int


class Planning:
    """A planner at work in one replay.

    Attributes
    ----------
    events : list of ScalingEvent
    """

    def __init__(self, planner: Planner) -> None:
        for name in ("initial_tick_ms", "on_tick"):
            if not callable(getattr(planner, name, None)):
                raise TypeError(f"a planner needs the methods initial_tick_ms() and on_tick(metrics); "
                                f"{type(planner).__name__} has no {name}")
        self._fpm = getattr(planner, "fpm_format", "dicts")
        if self._fpm not in FPM_FORMATS:
            raise ValueError(f"fpm_format of a planner must be one of {', '.join(FPM_FORMATS)}, got {self._fpm!r}")
        self.planner = planner
        self.events: list[ScalingEvent] = []
        self._cluster: Cluster
        self._watch: Watch

    def join(self, cluster: Cluster, pools: Pools, recruit: Callable[[int, int, Any], Any]) -> None:
        """Take part in a replay that has not begun."""
        first = self.planner.initial_tick_ms()
        if isinstance(first, bool) or not isinstance(first, (int, float, np.number)):
            raise TypeError(f"initial_tick_ms() must return a number, got {first!r}")
        startup = [0.0 if args is None or args.startup_time is None else args.startup_time * 1000.0
                   for args in (pools.prefill_args, pools.args)]
        self._cluster, self._roles = cluster, ("prefill", "decode" if pools.prefill_args is not None else "aggregated")
        self._watch = cluster.set_planner(
            self._tick, recruit, first_tick=max(float(first), 0.0) if math.isfinite(first) else math.inf,
            startup_ms=startup[DECODE], prefill_startup_ms=startup[PREFILL], metrics=self._fpm != "none")

    def taken_over(self, planner: Planner, cluster: Cluster, events: Sequence[ScalingEvent]) -> Planning:
        """The same by another planner, in a copy of the replay with this history."""
        made = Planning(planner)
        made.events, made._cluster, made._roles = list(events), cluster, self._roles
        made._watch = cluster.replan(made._tick)
        return made

    def _tick(self, now: float) -> tuple[tuple[int | None, int | None] | None, float | None]:
        prefill, decode = (self._cluster.team(role)[:2] for role in (PREFILL, DECODE))
        metrics: dict[str, Any] = {"now_ms": now}
        if self._fpm != "none":
            metrics["prefill_fpm_snapshots"] = self._passes(PREFILL)
            metrics["decode_fpm_snapshots"] = self._passes(DECODE)
        metrics.update(active_prefill_count=prefill[0], active_decode_count=decode[0], total_prefill_count=prefill[1],
                       total_decode_count=decode[1], traffic=self._watch.take_traffic(now))
        decision = self.planner.on_tick(metrics)
        targets, at = _checked(decision)
        if not isinstance(self._cluster, DisaggCluster):
            targets = None, targets[DECODE]
        if targets == (None, None):
            return None, at
        if isinstance(self._cluster, DisaggCluster):    # the reference takes the whole pool, those that drain included
            targets = (prefill[1] if targets[PREFILL] is None else targets[PREFILL],
                       decode[1] if targets[DECODE] is None else targets[DECODE])
        for role, target in enumerate(targets):
            if target is None:
                continue
            before = self._cluster.team(role)[0] + self._cluster.starting_workers(role)
            if before != target:
                self.events.append(ScalingEvent(now, self._roles[role], before, target))
        return targets, at

    def _passes(self, role: int) -> list[dict[str, Any]] | NDArray[Any]:
        passes = self._watch.take_passes(role)
        if self._fpm == "columns":
            return passes
        names = passes.dtype.names or ()
        return [dict(zip(names, row, strict=True)) for row in passes.tolist()]


def copied(planner: Any) -> Any:
    """A copy of a planner as it is now; ValueError if it cannot be copied."""
    try:
        return copy.deepcopy(planner)
    except Exception as error:
        kind = type(planner).__name__
        raise ValueError(f"the planner cannot be copied: copy.deepcopy of {kind} raised {type(error).__name__}: "
                         f"{error}; give {kind} a __deepcopy__ that copies its state") from error


def _checked(decision: Any) -> tuple[tuple[int | None, int | None], float | None]:
    """The targets and the next tick of a decision; raises TypeError, KeyError or ValueError with what is wrong."""
    wanted = f"on_tick() must return a dict with {', '.join(KEYS)}"
    try:
        values = [decision[key] for key in KEYS]
    except KeyError as error:
        raise KeyError(f"{wanted}; {error.args[0]} is missing (None changes nothing)") from None
    except TypeError:
        raise TypeError(f"{wanted}, got {decision!r}") from None
    for key, value in zip(TARGETS, values, strict=False):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{key} must be an integer or None, got {value!r}")
        if not 0 <= value <= MOST_WORKERS:
            raise ValueError(f"{key} must be from 0 to {MOST_WORKERS}, got {value}")
    at = values[2]
    if at is not None and (isinstance(at, bool) or not isinstance(at, (int, float, np.number))):
        raise TypeError(f"next_tick_ms must be a number or None, got {at!r}")
    prefill, decode = (None if value is None else int(value) for value in values[:2])
    return (prefill, decode), None if at is None else float(at)
