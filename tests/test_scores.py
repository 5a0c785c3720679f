"""Scores of users inside the engines: the compiled cores against the plain models, on random scripts."""
from __future__ import annotations

import collections
import json
import math
import random

import pytest
from fuzz import compare
from fuzz_offload import Compiled, Model
from fuzz_offload import random_script as offload_script
from fuzz_offload import run as run_offload
from model import script as model_script
from model.scored import ScoredCore, ScoredOffload, ScoredRules, ScoredSglang
from model.script import differences
from model.scripts import FAMILIES, random_script
from record_vllm import model_passes
from runner import run_steps
from test_rules import case, compiled_passes
from test_sglang_golden import model_steps, reduced
from test_sglang_golden import random_script as sglang_script

from mocker import MockEngineArgs, create_engine_core
from mocker.rules import SchedulerRules

VICTIMS = [
    None,
    lambda prompt, generated, limit, preemptions, blocks: 0.0,
    lambda prompt, generated, limit, preemptions, blocks: -blocks,
    lambda prompt, generated, limit, preemptions, blocks: (7 * prompt + 3 * generated + preemptions) % 4,
]
ADMISSIONS = [
    None,
    lambda *facts: 0.0,
    lambda row, us, prompt, cached, generated, limit, priority, running, free: prompt - cached,
    lambda row, us, prompt, cached, generated, limit, priority, running, free:
        math.inf if running and 3 * running > free else -generated,
    lambda row, us, prompt, cached, generated, limit, priority, running, free: (5 * prompt + priority + free) % 3,
]
EVICTIONS = [
    None,
    lambda us, release, before, blocks, hits: 0.0,
    lambda us, release, before, blocks, hits: hits - before,
    lambda us, release, before, blocks, hits: -us,
    lambda us, release, before, blocks, hits: (5 * release + 3 * before + blocks) % 4,
]
TIMED = [*ADMISSIONS, lambda row, us, *facts: -us, lambda row, us, *facts: (7 * row) % 5 + (us > 20_000)]


def capped(script: dict) -> dict:
    return {**script, "steps": [{"run": min(step["run"], 300)} if "run" in step else step for step in script["steps"]]}


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_core(family):
    preempted = 0
    for seed in range(100):
        rng, script = random.Random(seed), capped(random_script(family, seed))
        try:
            args = MockEngineArgs.from_json(json.dumps(script["args"]))
        except ValueError:
            continue
        scores = {"victim": None if args.engine_type == "trtllm" else rng.choice(VICTIMS),
                  "admission": rng.choice(TIMED), "eviction": rng.choice(EVICTIONS)}
        core = create_engine_core(args.replace(**{f"{k}_score": v for k, v in scores.items()}),
                                  worker_id=script["worker_id"], capture_kv_events=True)
        got = run_steps(core, script, True)
        found = compare(got, model_script.run_script(script, ScoredCore, **scores))
        assert found is None, f"{family} {seed}: {found}"
        preempted += got["steps"][-1]["metrics"]["vllm_preemptions_total"] if got["steps"] else 0
    assert preempted > 0 or family == "trtllm"


def test_tiers():
    seen = collections.Counter()
    for seed in range(120):
        rng, script = random.Random(seed), offload_script(seed)
        scores = {"victim": rng.choice(VICTIMS if script["args"].get("engine_type") != "trtllm" else [None]),
                  "admission": rng.choice(TIMED), "eviction": rng.choice(EVICTIONS)}
        model, shared = Model(script), {}
        model.cores = [ScoredOffload(script["args"], worker, shared=shared, reference=script["reference"], **scores)
                       for worker in range(script["workers"])]
        expected = run_offload(script, model)
        scored = {**script, "args": {**script["args"], **{f"{k}_score": v for k, v in scores.items()}}}
        found = differences(run_offload(scored, Compiled(scored)), expected)
        assert not found, f"{seed}: {found[:4]}"
        seen.update({k: v for k, v in model.counts().items() if v})
    assert min(seen["swap_ins"], seen["staged"], seen["blocked"], seen["cancelled"], seen["preemptions"]) > 0


def test_rules():
    preempted = 0
    for seed in range(160):
        rng = random.Random(seed)
        s, rules = case(seed)
        scores = {"victim": rng.choice(VICTIMS), "admission": rng.choice(ADMISSIONS),
                  "eviction": rng.choice(EVICTIONS[:3] + EVICTIONS[4:])}
        got = compiled_passes(s, SchedulerRules(**rules), {f"{k}_score": v for k, v in scores.items()})
        assert got == model_passes(s, rules, ScoredRules, **scores), f"seed {seed}, rules {rules}"
        preempted += sum(len(p["preempt"]) for p in got if p)
    assert preempted > 0


def test_sglang():
    retracted = 0
    for seed in [*range(100), 1107, 1147, 1510, 1559]:         # the last ones: scores that fall behind the heap's order
        rng, script = random.Random(seed), sglang_script(seed)
        scores = {"victim": rng.choice(VICTIMS), "admission": rng.choice(TIMED),
                  "eviction": rng.choice(EVICTIONS[2 * (seed > 100):])}
        args = MockEngineArgs.from_json(json.dumps(script["args"]))
        core = create_engine_core(args.replace(**{f"{k}_score": v for k, v in scores.items()}), capture_kv_events=True)
        steps = run_steps(core, script, True)["steps"]
        if any(token is None for step in steps for _, token, *_ in step["output"]):
            continue                           # somebody could not go on: the model has no end
        want = model_steps(script, ScoredSglang(script["args"], **scores))
        assert [reduced(step) for step in steps] == want, f"seed {seed}"
        retracted += core.state.counts["preemptions"]
    assert retracted > 0
