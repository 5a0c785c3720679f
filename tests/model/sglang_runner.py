"""Runs a recorded SGLang script through the object API and gives its result in the recorded form."""
from __future__ import annotations

import json

from runner import run_steps

from mocker.args import MockEngineArgs
from mocker.sglang import SglangCore


def make_core(given: dict, worker_id: int = 0, capture: bool = True, **settings: object) -> SglangCore:
    """A core for the arguments of a script, with some compiled settings changed."""
    class Core(SglangCore):
        def _settings(self, args: MockEngineArgs) -> dict:
            return super()._settings(args) | settings

    return Core(MockEngineArgs.from_json(json.dumps(given)), worker_id=worker_id, capture_kv_events=capture)


def run_script(script: dict, *, check: bool = True, **settings: object) -> dict:
    """Result of `script`; with `check` the books are verified after every pass and command."""
    try:
        core = make_core(script["args"], script.get("worker_id", 0), **settings)
    except ValueError as error:
        return {"error": str(error)}
    return run_steps(core, script, check) | ({"counts": core.state.counts} if settings else {})
