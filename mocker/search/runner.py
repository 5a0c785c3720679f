"""Runs candidates for the searches: in batches, never one twice, ended early when hopeless, recorded if wanted.

Every candidate serves the same requests with the same seeds (common random numbers), so that two candidates differ by
what they are and not by luck. A batch is told in the order it was asked, so that results do not depend on how many
workers there are.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..args import MockEngineArgs
from ..replay import simulate
from ..sweeps.backends import make_backend
from ..sweeps.configs import Config, config_key, plain_config, simulate_keywords
from ..sweeps.evaluate import DEFAULT_KEYS, WorkloadLike, chosen, load_workload
from ..sweeps.journal import Journal, workload_fingerprint
from ..sweeps.run import Meter, Progress
from ..sweeps.table import SweepTable
from .sla import MISSED, Bound, violation
from .watch import Hopeless, Watch

Bounds = tuple[Bound, ...]
Cost = str | Callable[[Config], float]
COLUMNS = ("cost", "feasible", "violation", "stopped")


@dataclass
class Trial:
    """A candidate and what came of it.

    Attributes
    ----------
    config : dict
    cost : float
        NaN if it is not known.
    report : dict
        Empty if the candidate failed or was ended early.
    violation : float
        0 or less: every bound holds.
    stopped : float
        Share of the requests that had ended when the candidate was given up; NaN if it ran to the end.
    error : str or None
    """

    config: Config
    cost: float
    report: dict[str, Any]
    violation: float
    stopped: float
    error: str | None

    @property
    def feasible(self) -> bool:
        """Whether it ran to the end and every bound holds."""
        return self.error is None and math.isnan(self.stopped) and self.violation <= 0


def gpus(config: Config) -> float:
    """GPUs of all workers of a configuration: the default cost."""
    keywords = simulate_keywords(config)
    total = 0
    pools = (("prefill_engine_args", "num_prefill_workers"), ("decode_engine_args", "num_decode_workers"))
    for args, count in pools if "prefill_engine_args" in keywords else (("extra_engine_args", "num_workers"),):
        engine = keywords.get(args)
        total += keywords.get(count, 1) * (1 if engine is None else MockEngineArgs.aic_gpus_per_worker(engine))
    return float(total)


def judge(workload: WorkloadLike, item: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The task of a backend: one candidate, with every seed."""
    bounds = tuple(Bound(*bound) for bound in item["bounds"])
    limits = tuple(Bound(*bound) for bound in item["limits"])
    reports, worst = [], -math.inf
    try:
        for seed in settings["seeds"]:
            config = item["config"] if seed is None else {**item["config"], "router_seed": seed}
            watch = Watch(bounds + limits) if settings["stop_early"] else None
            report = simulate(workload, **simulate_keywords(config), _watch=watch or None).report
            reports.append(chosen(report, settings["keys"]))
            worst = max(worst, violation(bounds, report))
    except Hopeless as end:
        return {"report": {}, "violation": 2.0 - end.ended, "stopped": end.ended}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"report": _mean(reports), "violation": worst}


def _mean(reports: list[dict[str, Any]]) -> dict[str, Any]:
    if len(reports) == 1:
        return reports[0]
    out = {}
    for key in reports[0]:
        values = [report[key] for report in reports]
        numbers = all(isinstance(value, (int, float)) for value in values)
        out[key] = sum(values) / len(values) if numbers else values[0]
    return out


class Runner:
    """Evaluates candidates; a context manager.

    Parameters
    ----------
    workload, backend, workers, out, progress
        As `mocker.sweep` takes them.
    keys : sequence of str
        Report keys to keep besides the default ones.
    cost : str or callable
        "gpus", another function of the configuration, or a report key.
    seeds : sequence of int or None
        Router seeds that each candidate is simulated with; None: as the configuration says.
    stop_early : bool
    """

    def __init__(self, workload: Any, *, cost: Cost, keys: Sequence[str], seeds: Sequence[int] | None, stop_early: bool,
                 backend: Any, workers: int | None, out: Any, progress: bool | Progress, total: int | None) -> None:
        self.workload = load_workload(workload)
        self.trials: list[Trial] = []
        self._cost_key = cost if isinstance(cost, str) and cost != "gpus" else None
        self._cost = cost if callable(cost) else gpus
        if self._cost_key is not None and self._cost_key not in DEFAULT_KEYS:
            raise ValueError(f"cost must be 'gpus', a function of the configuration or a report key, got {cost!r}")
        if seeds is not None and not seeds:
            raise ValueError("seeds must not be empty")
        kept = list(dict.fromkeys([*DEFAULT_KEYS, *keys]))
        settings = {"seeds": [None] if seeds is None else list(seeds), "stop_early": stop_early, "keys": kept}
        self._keys = kept
        self._memo: dict[str, dict[str, Any]] = {}
        self._journal = None if out is None else Journal(
            out, workload_fingerprint(self.workload), [f"seeds {settings['seeds']}", f"early {stop_early}", *kept])
        try:
            self._backend = make_backend(backend, workers, judge, self.workload, settings)
            self._meter = Meter(progress, total)
        except BaseException:
            if self._journal is not None:
                self._journal.close()
            raise

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._backend.close()
        self._meter.close()
        if self._journal is not None:
            self._journal.close()

    def known_cost(self, config: Config) -> float | None:
        """The cost of a candidate before it is simulated; None if it depends on the report, NaN if it is invalid."""
        if self._cost_key is not None:
            return None
        try:
            return float(self._cost(config))
        except Exception:
            return math.nan                    # its simulation will say what is wrong

    def run(self, configs: Sequence[Config], bounds: Bounds, limits: Sequence[Bounds] | None = None) -> list[Trial]:
        """Evaluate candidates against bounds; results in the order of the candidates.

        A candidate may also be given up when one of its `limits` cannot hold, but need not keep them.
        """
        keys: list[str] = []
        started: dict[int, str] = {}
        for config, own in zip(configs, [()] * len(configs) if limits is None else limits, strict=True):
            item = {"config": config, "bounds": [[b.key, b.value, b.at_least] for b in bounds],
                    "limits": [[b.key, b.value, b.at_least] for b in own]}
            key, plain = self._key(item)
            keys.append(key)
            if key in self._memo:
                continue
            recorded = None if self._journal is None or plain is None else self._journal.find(plain)
            if recorded is not None:
                self._memo[key] = recorded
                self._meter.step(recorded, counts=False)
                continue
            self._memo[key] = {}
            started[len(started)] = key
            self._backend.submit(len(started) - 1, item)
        left = len(started)
        while left:
            for index, outcome in self._backend.finished():
                left -= 1
                key = started[index]
                self._memo[key] = outcome
                self._meter.step(outcome)
                if self._journal is not None:
                    self._journal.add_text(key, outcome)
        out = [self._trial(config, self._memo[key]) for config, key in zip(configs, keys, strict=True)]
        self.trials += out
        return out

    def _key(self, item: Config) -> tuple[str, Config | None]:
        try:
            return config_key(item), plain_config(item)
        except ValueError:
            if self._journal is not None:
                raise
            return repr(item), None

    def _trial(self, config: Config, outcome: Mapping[str, Any]) -> Trial:
        report = outcome.get("report", {})
        cost = self.known_cost(config) if self._cost_key is None else report.get(self._cost_key)
        return Trial(config, math.nan if cost is None else cost, report, outcome.get("violation", MISSED),
                     outcome.get("stopped", math.nan), outcome.get("error"))

    def table(self, trials: Sequence[Trial] | None = None) -> SweepTable:
        """Candidates with their cost, whether they are feasible, and their reports."""
        rows = self.trials if trials is None else trials
        outcomes = []
        for trial in rows:
            own = {"cost": trial.cost, "feasible": trial.feasible, "violation": trial.violation,
                   "stopped": trial.stopped}
            outcomes.append({"report": own | trial.report, **({"error": trial.error} if trial.error else {})})
        return SweepTable([trial.config for trial in rows], outcomes, [*COLUMNS, *self._keys])
