"""`optimize`: the cheapest configuration that keeps the bounds; `pareto_front`: the best latency for each cost."""
from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..sweeps.configs import Config
from ..sweeps.run import Progress
from ..sweeps.table import SweepTable
from .runner import Bounds, Cost, Runner, Trial
from .sla import Bound, bounds_of
from .space import Space, import_optuna

BATCH = 8                          # candidates asked for at a time, whatever the number of workers


@dataclass(frozen=True)
class OptimizeResult:
    """What a search found.

    Attributes
    ----------
    config : dict or None
        The best configuration; None if no candidate keeps the bounds.
    cost : float
        Its cost, NaN without one.
    report : dict
        Its report.
    table : SweepTable
        Every candidate, in the order of the search, with ``cost``, ``feasible``, ``violation`` (share by which the
        worst bound is missed) and ``stopped`` (share of the requests at which it was given up).
    proved : bool
        Every configuration of the space that could be better was looked at.
    """

    config: Config | None
    cost: float
    report: dict[str, Any]
    table: SweepTable
    proved: bool


@dataclass(frozen=True)
class ParetoResult:
    """A front of cost against latency.

    Attributes
    ----------
    front : SweepTable
        By rising cost and falling latency.
    table : SweepTable
        Every candidate.
    proved : bool
        Every configuration of the space was looked at.
    """

    front: SweepTable
    table: SweepTable
    proved: bool


def optimize(workload: Any, space: Mapping[str, Any], *, sla: Mapping[str, Any], cost: Cost = "gpus",
             base: Mapping[str, Any] | None = None, trials: int = 100, seed: int = 0,
             seeds: Sequence[int] | None = None, stop_early: bool = True, backend: Any = "threads",
             workers: int | None = None, out: Any = None, progress: bool | Progress = False) -> OptimizeResult:
    """Find the cheapest configuration that keeps bounds on a workload.

    A space of at most `trials` configurations is tried out, from the cheapest up, and the answer is proved. A larger
    one is searched with Optuna (extra ``optimize``).

    Parameters
    ----------
    workload, base, backend, workers, out, progress
        As in `mocker.sweep`.
    space : mapping
        Name to a list of choices or `mocker.search.Between`; names as in `mocker.sweep`.
    sla : mapping
        Report key to its largest value, or to a text such as ``">= 20"``. Also, every request must complete.
    cost : "gpus", callable or report key
        What to keep small: the GPUs of all workers, a function of the configuration, or a key such as ``gpu_hours``.
    trials : int
        Most candidates.
    seed : int
        Of the search.
    seeds : sequence of int, optional
        Router seeds that every candidate is simulated with; bounds must hold for each, reports are averaged.
    stop_early : bool
        Give up a candidate as soon as a bound cannot hold any more, whatever the rest of the workload brings. This
        never changes which candidates are feasible.

    Returns
    -------
    OptimizeResult
        Of equally cheap candidates, the one whose worst bound has most room.

    Raises
    ------
    ValueError, TypeError, OSError, ImportError
        A bad argument; a search that needs Optuna without it.
    """
    bounds = bounds_of(sla)
    search = Space(space, base)
    _check_trials(trials)
    with Runner(workload, cost=cost, keys=list(sla), seeds=seeds, stop_early=stop_early, backend=backend,
                workers=workers, out=out, progress=progress, total=None) as runner:
        small = search.size <= trials
        if small:
            for level in _levels(runner, search.all()):
                found = runner.run(level, bounds)
                if any(trial.feasible for trial in found):
                    break
        else:
            _draw_cheap(runner, search, bounds, trials, seed)
        best = min((trial for trial in runner.trials if trial.feasible),
                   key=lambda trial: (trial.cost, trial.violation), default=None)
        if best is None:
            return OptimizeResult(None, math.nan, {}, runner.table(), small)
        return OptimizeResult(best.config, best.cost, best.report, runner.table(), small)


def pareto_front(workload: Any, space: Mapping[str, Any], *, latency: str = "p99_ttft_ms", cost: Cost = "gpus",
                 sla: Mapping[str, Any] | None = None, base: Mapping[str, Any] | None = None, trials: int = 100,
                 seed: int = 0, seeds: Sequence[int] | None = None, stop_early: bool = True, backend: Any = "threads",
                 workers: int | None = None, out: Any = None, progress: bool | Progress = False) -> ParetoResult:
    """Find the configurations of which no other is cheaper and as fast, or as cheap and faster.

    Parameters
    ----------
    latency : str
        Report key to keep small.
    workload, space, cost, sla, …
        As in `optimize`. A candidate is given up early also when a cheaper one is certain to be as fast.

    Returns
    -------
    ParetoResult

    Raises
    ------
    ValueError, TypeError, OSError, ImportError
        As `optimize`.
    """
    fixed = () if sla is None else bounds_of(sla)
    target = bounds_of({latency: 0.0})[0]
    search = Space(space, base)
    _check_trials(trials)
    with Runner(workload, cost=cost, keys=[latency, *(sla or ())], seeds=seeds, stop_early=stop_early, backend=backend,
                workers=workers, out=out, progress=progress, total=None) as runner:
        small = search.size <= trials

        def limits(config: Config) -> Bounds:
            """To be as fast as everything that is no dearer."""
            known = runner.known_cost(config)
            if known is None or math.isnan(known):
                return ()
            best = min((trial.report[latency] for trial in _front(runner.trials, latency) if trial.cost <= known),
                       default=math.inf)
            return () if best == math.inf else (Bound(target.key, best),)

        def evaluate(configs: list[Config]) -> list[Trial]:
            return runner.run(configs, fixed, [limits(config) for config in configs])

        if small:
            for level in _levels(runner, search.all()):
                evaluate(level)
        else:
            _draw_front(evaluate, search, latency, trials, seed)
        return ParetoResult(runner.table(_front(runner.trials, latency)), runner.table(), small)


def _check_trials(trials: int) -> None:
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ValueError(f"trials must be a positive integer, got {trials!r}")


def _levels(runner: Runner, configs: Iterator[Config]) -> Iterator[list[Config]]:
    """Configurations of equal cost together, cheapest first; all at once if costs are not known before."""
    costs = [(runner.known_cost(config), config) for config in configs]
    if any(cost is None for cost, _ in costs):
        yield [config for _, config in costs]
        return
    ordered = sorted(((math.inf if cost is None or math.isnan(cost) else cost, config) for cost, config in costs),
                     key=lambda pair: pair[0])
    for _, level in itertools.groupby(ordered, key=lambda pair: pair[0]):
        yield [config for _, config in level]


def _front(trials: Sequence[Trial], latency: str) -> list[Trial]:
    """Feasible trials that no other one beats, by rising cost; the first of equal ones."""
    out: list[Trial] = []
    good = [trial for trial in trials if trial.feasible and trial.report.get(latency) is not None]
    for trial in sorted(good, key=lambda trial: (trial.cost, trial.report[latency])):
        if not out or trial.report[latency] < out[-1].report[latency]:
            out.append(trial)
    return out


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Optuna without its messages."""
    optuna = import_optuna()
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield optuna
    finally:
        optuna.logging.set_verbosity(level)


def _draw_cheap(runner: Runner, search: Space, bounds: Bounds, trials: int, seed: int) -> None:
    """Draw candidates with Optuna; those that cannot be cheaper than the best one so far are not simulated."""
    with _quiet() as optuna:
        study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(
            seed=seed, multivariate=True))
        distributions = search.distributions()
        best = math.inf
        for start in range(0, trials, BATCH):
            asked = [study.ask(distributions) for _ in range(min(BATCH, trials - start))]
            configs = [search.config(trial.params) for trial in asked]
            costs = [runner.known_cost(config) for config in configs]
            worth = [cost is None or not cost > best for cost in costs]
            found = iter(runner.run([c for c, w in zip(configs, worth, strict=True) if w], bounds))
            for trial, wanted, cost in zip(asked, worth, costs, strict=True):
                if not wanted:                 # its cost is all that matters, and whether it is feasible unknown
                    study.tell(trial, cost)
                    continue
                result = next(found)
                if math.isnan(result.cost):
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                    continue
                trial.set_constraint("sla", result.violation)
                study.tell(trial, result.cost)
                if result.feasible:
                    best = min(best, result.cost)


def _draw_front(evaluate: Callable[[list[Config]], list[Trial]], search: Space, latency: str, trials: int,
                seed: int) -> None:
    """Draw candidates for a front with Optuna."""
    with _quiet() as optuna:
        study = optuna.create_study(directions=["minimize", "minimize"],
                                    sampler=optuna.samplers.TPESampler(seed=seed))
        distributions = search.distributions()
        for start in range(0, trials, BATCH):
            asked = [study.ask(distributions) for _ in range(min(BATCH, trials - start))]
            found = evaluate([search.config(trial.params) for trial in asked])
            for trial, result in zip(asked, found, strict=True):
                reached = result.report.get(latency)
                if math.isnan(result.cost) or (reached is None and math.isnan(result.stopped)):
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                    continue
                trial.set_constraint("sla", result.violation)
                study.tell(trial, [result.cost, 1e12 if reached is None else reached])
