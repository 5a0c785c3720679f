"""Runs a script in the form of the recorded ones and compares two results."""

import math
import uuid as uuid_module

from .collector import Collector
from .core import ArgsError, ModelCore
from .offload_core import OffloadCore, offload_config

DEAD_END = 1024  # passes in a row without an output, an admission or time going on


def run_script(script: dict, kind: type[ModelCore] | None = None, **additions: object) -> dict:
    """Result of `script`, whose steps are trace, run, now and submit, on a `kind` that takes `additions`."""
    try:
        tiers = offload_config(script["args"]) is not None
        kind = kind or (OffloadCore if tiers else ModelCore)
        core = kind(script["args"], script.get("worker_id", 0), **additions)
    except ArgsError as error:
        return {"error": str(error)}
    collector = Collector()
    steps: list[dict] = []
    pending: list[dict] = []
    now = 0.0
    for step in script["steps"]:
        ((op, argument),) = step.items()
        if op == "trace":
            pending = list(argument)
        elif op == "now":
            now = float(argument)
        elif op == "submit":
            collector.on_arrival(argument["uuid"], now, len(argument["tokens"]), argument["max_output_tokens"])
            steps.append(_submit(core, argument))
        elif op == "run":
            now = _run(core, collector, pending, steps, now, argument)
        else:
            raise ValueError(f"unknown step {op!r}")
    return {
        "steps": steps,
        "report": collector.report(),
        "per_request": collector.per_request(),
        "drained": core.is_drained(),
    }


def _submit(core: ModelCore, request: dict) -> dict:
    if request["uuid"] in core.requests:
        return {"op": "submit", "error": f"request {uuid_module.UUID(int=request['uuid'])} is already active"}
    return {"op": "submit", "result": {"submitted": core.receive(request)}, "lifecycle": [], "kv_events": []}


def _run(core: ModelCore, collector: Collector, pending: list, steps: list, now: float, passes: int) -> float:
    """Single-worker offline replay, at most `passes` passes. What has arrived leaves `pending`."""
    idle = 0
    while True:
        while pending and pending[0]["arrival_timestamp_ms"] <= now:
            request = pending.pop(0)
            at = float(request["arrival_timestamp_ms"])
            collector.on_arrival(request["uuid"], at, len(request["tokens"]), request["max_output_tokens"])
            core.receive(request)
        if core.is_empty():
            if not pending:
                return now
            now = float(pending[0]["arrival_timestamp_ms"])
            continue
        if passes == 0:
            return now
        passes -= 1
        step = core.execute_pass(now)
        steps.append(step)
        collector.on_pass(step, core.terminals)
        progress = step["output"] or step["admissions"] or step["end_ms"] > now
        now = step["end_ms"]
        idle = 0 if progress else idle + 1
        if idle > DEAD_END:
            steps.append({"op": "dead_end"})
            return now


def differences(got: object, want: object, path: str = "") -> list[str]:
    """Where two results differ; exact, but for variances, means and deviations, and without wall-clock rates."""
    if isinstance(got, dict) and isinstance(want, dict):
        found = [f"{path}.{key}: only on one side" for key in sorted(got.keys() ^ want.keys())]
        for key in sorted(got.keys() & want.keys()):
            if key.startswith(("processed_", "wall_time_ms")) and key != "processed_tokens":
                continue
            found += _compare(got[key], want[key], f"{path}.{key}", key)
        return found
    if isinstance(got, list) and isinstance(want, list):
        if len(got) != len(want):
            return [f"{path}: {len(got)} items instead of {len(want)}"]
        return [d for i, (a, b) in enumerate(zip(got, want, strict=True)) for d in differences(a, b, f"{path}[{i}]")]
    return [] if got == want and isinstance(got, bool) == isinstance(want, bool) else [f"{path}: {got!r} != {want!r}"]


def _compare(got: object, want: object, path: str, key: str) -> list[str]:
    tolerance = None
    if key.startswith("var_"):
        tolerance = {"rel_tol": 1e-9, "abs_tol": 1e-12}
    elif key.startswith(("mean_", "std_")):
        # The deviation of equal values is nothing but the rounding error of their mean.
        tolerance = {"rel_tol": 1e-9, "abs_tol": 1e-9 if key.startswith("std_") else 0.0}
    if tolerance is not None and isinstance(got, float) and isinstance(want, float):
        return [] if math.isclose(got, want, **tolerance) else [f"{path}: {got!r} is not nearly {want!r}"]
    return differences(got, want, path)
