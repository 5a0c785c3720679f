"""Runs a recorded script through the object API and gives its result in the recorded form."""
from __future__ import annotations

import json
import uuid

from mocker import (
    DirectRequest,
    MockEngineArgs,
    SchedulerCommand,
    SglangCore,
    TraceCollector,
    VllmCore,
    create_engine_core,
)

DEAD_END = 1024


def request_of(entry: dict) -> DirectRequest:
    return DirectRequest(entry["tokens"], entry["max_output_tokens"], output_token_ids=entry.get("output_token_ids"),
                         uuid=uuid.UUID(int=entry["uuid"]), arrival_timestamp_ms=entry.get("arrival_timestamp_ms"))


def run_script(script: dict, *, check: bool = True, compat: str | None = None) -> dict:
    """Result of `script`; with `check` the pool's books are verified after every pass and command."""
    try:
        args = MockEngineArgs.from_json(json.dumps(script["args"]))
    except ValueError as error:
        return {"error": str(error)}
    return run_steps(create_engine_core(args, worker_id=script.get("worker_id", 0), capture_kv_events=True,
                                        compat=compat), script, check)


def run_steps(core: VllmCore | SglangCore, script: dict, check: bool) -> dict:
    """Result of a script's steps on a fresh core."""
    collector = TraceCollector()
    steps: list[dict] = []
    pending: list[dict] = []
    now = 0.0
    for step in script["steps"]:
        ((op, argument),) = step.items()
        if op == "trace":
            pending = list(argument)
        elif op == "now":
            now = float(argument)
        elif op == "run":
            now = _run(core, collector, pending, steps, now, argument, check)
        elif op == "retry_destinations":
            steps.append(core.retry_pending_destinations().to_dict())
        else:
            request = request_of(argument) if isinstance(argument, dict) else None
            handoff = argument.get("handoff_id") if isinstance(argument, dict) else argument
            if request is not None and op == "submit":
                collector.on_arrival(request.uuid, now, len(argument["tokens"]), argument["max_output_tokens"])
            command = SchedulerCommand(op, request, None if handoff is None else uuid.UUID(int=handoff))
            try:
                steps.append(core.apply_command(command).to_dict())
            except ValueError as error:
                steps.append({"op": op, "error": str(error)})
            if check:
                core.check_invariants()
    return {"steps": steps, "report": collector.finish(compat="reference"),
            "per_request": collector.per_request_records(), "drained": core.is_drained()}


def _run(core: VllmCore | SglangCore, collector: TraceCollector, pending: list, steps: list, now: float, passes: int,
         check: bool) -> float:
    idle = 0
    while True:
        while pending and pending[0]["arrival_timestamp_ms"] <= now:
            entry = pending.pop(0)
            collector.on_arrival(core.receive(request_of(entry)), float(entry["arrival_timestamp_ms"]),
                                 len(entry["tokens"]), entry["max_output_tokens"])
        if core.is_empty():
            if not pending:
                return now
            now = float(pending[0]["arrival_timestamp_ms"])
            continue
        if passes == 0:
            return now
        passes -= 1
        result = core.execute_pass(now, collector)
        if check:
            core.check_invariants()
        steps.append(result.to_dict())
        assert result.end_ms >= now, "the clock went back"
        progress = steps[-1]["output"] or steps[-1]["admissions"] or result.end_ms > now
        now = result.end_ms
        idle = 0 if progress else idle + 1
        if idle > DEAD_END:
            steps.append({"op": "dead_end"})
            return now
