"""One configuration -> one outcome: what threads, processes and clusters run. It never raises because of the
configuration: an error is an outcome.
"""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..replay import simulate
from ..report import REPORT_KEYS
from ..trace import Trace
from ..workload import SyntheticSpec
from .configs import simulate_keywords

WorkloadLike = Trace | SyntheticSpec
HOST_TIME_KEYS = frozenset({"wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s"})
DEFAULT_KEYS = (*(key for key in REPORT_KEYS if key not in HOST_TIME_KEYS),
                *(f"{status}_requests" for status in ("incomplete", "rejected", "capacity", "over_budget", "failed",
                                                      "canceled")))
"""Keys of a row unless told otherwise: those that do not depend on how fast this machine is."""


def load_workload(workload: Any) -> WorkloadLike:
    """A trace (read if a path is given) or a synthetic specification.

    Raises
    ------
    TypeError, ValueError, OSError
        It is neither, or cannot be read.
    """
    if isinstance(workload, (Trace, SyntheticSpec)):
        return workload
    if isinstance(workload, (str, os.PathLike)):
        return Trace.load(workload)
    if isinstance(workload, Mapping):
        return SyntheticSpec(**workload)
    raise TypeError(f"workload must be a Trace, a path or a SyntheticSpec, got {type(workload).__name__}")


def look_up(report: Mapping[str, Any], key: str) -> Any:
    """A value of a report; a dot leads into an inner one (``samples.ttft``); None if it is not there."""
    value: Any = report
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def chosen(report: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Values of a report as `look_up` finds them, by key."""
    return {key: report[key] if key in report else look_up(report, key) for key in keys}


def evaluate(workload: WorkloadLike, config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Simulate one configuration.

    Returns
    -------
    dict
        ``{"report": {key: value}}``, or ``{"error": text}`` if the configuration fails.
    """
    try:
        report = simulate(workload, **simulate_keywords(config)).report
        return {"report": chosen(report, keys)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
