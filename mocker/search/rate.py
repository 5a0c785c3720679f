"""`highest_rate`: how fast requests may come before a configuration misses its bounds."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..sweeps.configs import Config
from ..sweeps.evaluate import WorkloadLike
from ..sweeps.run import Progress
from ..sweeps.table import SweepTable
from ..workload import SyntheticSpec
from .runner import Runner, Trial
from .sla import bounds_of

LIMIT = 2.0**30                    # speed-ups beyond it, or below its inverse, are not tried


@dataclass(frozen=True)
class RateResult:
    """What `highest_rate` found.

    Attributes
    ----------
    config : dict
        The configuration.
    speedup : float
        The largest ``arrival_speedup_ratio`` found at which every bound holds; 0 if none does, infinity if none fails.
    rate_rps : float
        Requests a second that arrive at it.
    missed : float
        A speed-up at which a bound fails, at most (1 + tolerance) times `speedup`; infinity if none does.
    report : dict
        The report at `speedup`.
    table : SweepTable
        Every simulation, in order.
    """

    config: Config
    speedup: float
    rate_rps: float
    missed: float
    report: dict[str, Any]
    table: SweepTable


def arrival_rate(workload: WorkloadLike) -> float:
    """Requests a second that a workload brings, from its first arrival to its last; infinity if all come at once.

    Raises
    ------
    ValueError
        It has no arrival times.
    """
    if isinstance(workload, SyntheticSpec):
        gap = workload.arrival_interval_ms
        return math.inf if gap == 0 else 1000.0 / gap * workload.turns_per_session
    times = workload.arrival_ms[~np.isnan(workload.arrival_ms)]
    if len(times) == 0:
        raise ValueError("the workload has no arrival times, so it has no rate")
    span = float(times.max() - times.min())
    return math.inf if span == 0 else (len(times) - 1) / span * 1000.0 * (len(workload) / len(times))


def highest_rate(workload: Any, configs: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, sla: Mapping[str, Any],
                 base: Mapping[str, Any] | None = None, start: float = 1.0, tolerance: float = 0.01,
                 seeds: Sequence[int] | None = None, stop_early: bool = True, out: Any = None,
                 progress: bool | Progress = False) -> Any:
    """Find the highest rate of arrivals that a configuration sustains within bounds.

    The workload's arrivals are sped up (or slowed down) as ``arrival_speedup_ratio`` does; the largest factor is
    bracketed and then bisected, on the assumption that what fails at a rate fails at higher ones too. Each
    configuration of a sequence starts from the answer of the one before.

    Parameters
    ----------
    workload, base, out, progress
        As in `mocker.sweep`.
    configs : mapping or sequence of mappings
        One configuration, or several.
    sla : mapping
        As in `mocker.optimize`. Also, every request must complete.
    start : float
        Speed-up to begin with.
    tolerance : float
        Relative distance between the answer and a rate that fails.
    seeds, stop_early
        As in `mocker.optimize`.

    Returns
    -------
    RateResult, or list of RateResult
        As `configs` is one or several.

    Raises
    ------
    ValueError, TypeError, OSError
        A bad argument, a workload without arrival times, or a configuration that fails.
    """
    bounds = bounds_of(sla)
    for name, value in (("start", start), ("tolerance", tolerance)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite positive number, got {value!r}")
    several = not isinstance(configs, Mapping)
    todo = [configs] if isinstance(configs, Mapping) else list(configs)
    results = []
    with Runner(workload, cost="gpus", keys=list(sla), seeds=seeds, stop_early=stop_early, backend="threads", workers=1,
                out=out, progress=progress, total=None) as runner:
        rate = arrival_rate(runner.workload)
        if rate == math.inf:
            raise ValueError("all requests of the workload arrive at once, so that no speed-up changes its rate")
        for given in todo:
            config = {**(base or {}), **given}
            for name in ("replay_concurrency", "arrival_speedup_ratio"):
                if config.get(name) is not None:
                    raise ValueError(f"{name} cannot be part of a configuration whose rate is searched")
            first = len(runner.trials)

            def attempt(speedup: float, config: Config = config) -> Trial:
                trial = runner.run([config | {"arrival_speedup_ratio": speedup}], bounds)[0]
                if trial.error is not None:
                    raise ValueError(f"the configuration fails at a speed-up of {speedup:g}: {trial.error}")
                return trial

            best, good, bad = _bisect(attempt, start, tolerance)
            results.append(RateResult(config, good, good * rate, bad, {} if best is None else best.report,
                                      runner.table(runner.trials[first:])))
            if best is not None and good < math.inf:
                start = good
    return results if several else results[0]


def _bisect(attempt: Any, start: float, tolerance: float) -> tuple[Trial | None, float, float]:
    """(Trial at the largest good speed-up, that speed-up, a bad one close above it)."""
    good, bad, best = 0.0, math.inf, None
    at, step = float(start), (1.0 + tolerance) ** 4
    while True:                            # gallop away from the start until both sides are known
        trial = attempt(at)
        if trial.feasible:
            good, best = at, trial
        else:
            bad = at
        if good > 0.0 and bad < math.inf:
            break
        at = good * step if good > 0.0 else bad / step
        if at > LIMIT:
            return best, math.inf, math.inf
        if at < 1.0 / LIMIT:
            return None, 0.0, bad
        step = min(step * step, 16.0)
    while bad > good * (1.0 + tolerance):
        at = math.sqrt(good * bad)
        trial = attempt(at)
        if trial.feasible:
            good, best = at, trial
        else:
            bad = at
    return best, good, bad
