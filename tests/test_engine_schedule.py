"""What a pass result says of whom it scheduled and preempted, and which core the arguments ask for."""

import random
import uuid
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from record_vllm import scenario

from mocker import (
    DirectRequest,
    EnginePassResult,
    MockEngineArgs,
    SchedulerCommand,
    SglangCore,
    VllmCore,
    create_engine_core,
)
from mocker.args import FIELDS
from mocker.engine import engine_settings
from mocker.rules import PRESETS, VllmRulesCore, scheduler_options

PRESET_NAMES = list(PRESETS)
TODAY = ["op", "start_ms", "end_ms", "completed_requests", "admissions", "output", "lifecycle", "visibility",
         "kv_events", "metrics", "fpm", "accept_length"]


def arguments(s: dict, **more: object) -> MockEngineArgs:
    """Engine arguments of a scenario, its options among them if vLLM's rules are asked for."""
    values = {
        "block_size": s["block"], "num_gpu_blocks": s["pool"], "max_num_seqs": s["seqs"],
        "max_num_batched_tokens": s["budget"], "enable_chunked_prefill": s["chunked"],
        "enable_prefix_caching": s["caching"]}
    if "scheduler_rules" in more:
        values.update(
            vllm_scheduling_policy="priority" if s.get("priority") else "fcfs",
            long_prefill_token_threshold=s.get("threshold", 0), max_model_len=s.get("max_model_len"),
            watermark=s.get("watermark", 0.0), reserve_full_isl=s.get("gate", True))
    return MockEngineArgs(**{**values, **more})


def passes(core: VllmCore, s: dict) -> list[dict]:
    """Every pass of a scenario, its requests given to the core when they come."""
    todo = sorted(s["reqs"], key=lambda r: r["pass"])
    out: list[dict] = []
    number, now = 0, 0.0
    while todo or not core.is_empty():
        while todo and todo[0]["pass"] <= number:
            r = todo.pop(0)
            core.receive(DirectRequest(r["tokens"], len(r["out"]), r["out"], uuid=uuid.UUID(int=r["uuid"]),
                                       priority=r.get("priority", 0)))
        number += 1
        assert number < 5000
        if not core.is_empty():
            out.append(core.execute_pass(now).to_dict())
            now = out[-1]["end_ms"]
    return out


def one_pass(core: VllmCore, *lengths: int) -> EnginePassResult:
    for number, length in enumerate(lengths):
        core.receive(DirectRequest([100 * number + k for k in range(length)], 3, uuid=uuid.UUID(int=number)))
    return core.execute_pass(0.0)


def test_only_when_asked_for() -> None:
    args = MockEngineArgs(block_size=4, num_gpu_blocks=8, max_num_batched_tokens=8)
    silent, telling = one_pass(VllmCore(args), 5, 6), one_pass(VllmCore(args, record_schedule=True), 5, 6)
    assert (silent.scheduled, silent.preempted) == ([], [])
    assert list(silent.to_dict()) == TODAY
    assert telling.scheduled == [(uuid.UUID(int=0), 5), (uuid.UUID(int=1), 3)]
    assert telling.preempted == []
    told = telling.to_dict()
    assert list(told) == [*TODAY, "scheduled", "preempted"]
    assert (told.pop("scheduled"), told.pop("preempted")) == ([[0, 5], [1, 3]], [])
    assert told == silent.to_dict()


def test_a_victim_by_hand() -> None:
    core = VllmCore(MockEngineArgs(block_size=4, num_gpu_blocks=3), record_schedule=True)
    first = one_pass(core, 4, 4)                # each needs a second block for its token, there is one
    assert first.scheduled == [(uuid.UUID(int=0), 4), (uuid.UUID(int=1), 4)]
    assert first.preempted == [uuid.UUID(int=1)]
    assert first.to_dict()["preempted"] == [1]


@pytest.mark.parametrize("kind", ["vllm", "fifo", "speculative", "trtllm"])
def test_victims_are_those_whose_count_grew(kind: str) -> None:
    """Also with empty prompts, cancelled requests, and requests that outgrow the pool."""
    more = {"vllm": {}, "fifo": {"preemption_mode": "fifo"}, "speculative": {"aic_nextn": 3},
            "trtllm": {"engine_type": "trtllm"}}[kind]
    seen: Counter[str] = Counter()
    for seed in range(150):
        rng = random.Random(seed)
        s = scenario(seed, options=False)
        if rng.random() < 0.4:
            s["pool"] = max(1, s["pool"] // 4)
        core = VllmCore(arguments(s, **more), record_schedule=True)
        budget = s["budget"]
        for r in s["reqs"]:
            tokens = [] if rng.random() < 0.1 else r["tokens"]
            core.receive(DirectRequest(tokens, len(r["out"]), r["out"], uuid=uuid.UUID(int=r["uuid"])))
        for number in range(3000):
            if core.is_empty():
                break
            if rng.random() < 0.05:
                core.drop_request(rng.choice([*core.state]))
            before = {u: r.num_preemptions for u, r in core.state.items()}
            result = core.execute_pass(float(number))
            core.check_invariants()
            after = {u: r.num_preemptions for u, r in core.state.items()}
            capacity = [o.uuid for o in result.output_signals if o.terminal_status == "capacity"]
            grown = [u for u, n in after.items() if n > before[u]]
            assert Counter(result.preempted) == Counter([*grown, *capacity]), f"{kind} seed {seed} pass {number}"
            assert result.preempted[len(grown):] == capacity
            assert [u for u in core.state.waiting if u in grown] == result.preempted[:len(grown)][::-1]
            assert sum(n for _, n in result.scheduled) <= budget
            batch = [u for u, _ in result.scheduled]
            assert len(set(batch)) == len(batch)
            made = {o.uuid for o in result.output_signals if o.token_id is not None}
            assert made <= set(batch)
            seen["victims"] += len(result.preempted)
            seen["capacity"] += len(capacity)
        else:
            raise AssertionError(f"{kind} seed {seed} is stuck")
    assert (seen["victims"] > 0) == (kind != "trtllm")
    assert (seen["capacity"] > 0) == (kind != "trtllm")


def test_sources_that_stay_are_scheduled() -> None:
    core = VllmCore(MockEngineArgs(block_size=4, num_gpu_blocks=8, worker_type="prefill"), record_schedule=True)
    request = DirectRequest([1, 2, 3, 4, 5], 1, uuid=uuid.UUID(int=7))
    core.apply_command(SchedulerCommand.SubmitHandoffPrefill(uuid.UUID(int=8), request))
    assert core.execute_pass(0.0).scheduled == [(request.uuid, 5)]


# ---- arguments choose the core


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_factory(name: str) -> None:
    args = MockEngineArgs(block_size=4, num_gpu_blocks=8, scheduler_rules=name)
    core = create_engine_core(args, worker_id=3, capture_kv_events=True, record_schedule=True)
    assert type(core) is (VllmCore if name == PRESET_NAMES[0] else VllmRulesCore)
    assert (core.worker_id, core.args) == (3, args)
    if isinstance(core, VllmRulesCore):
        assert core.rules is PRESETS[name]
    result = one_pass(core, 5)
    assert result.scheduled == [(uuid.UUID(int=0), 5)]
    assert result.kv_events[0]["worker_id"] == 3
    assert engine_settings(args)["num_blocks"] == 8


def test_factory_refuses() -> None:
    with pytest.raises(ValueError, match="record_schedule is not supported for engine_type 'sglang'"):
        create_engine_core(MockEngineArgs(engine_type="sglang"), record_schedule=True)
    assert isinstance(create_engine_core(MockEngineArgs(engine_type="sglang")), SglangCore)
    for name in PRESET_NAMES[1:]:
        with pytest.raises(ValueError, match=f"scheduler_rules '{name}'; use create_engine_core"):
            VllmCore(MockEngineArgs(scheduler_rules=name))
        with pytest.raises(ValueError, match="worker_id must be >= 0"):
            create_engine_core(MockEngineArgs(scheduler_rules=name), worker_id=-1)


@pytest.mark.parametrize("name", PRESET_NAMES[1:])
def test_options_in_the_arguments_are_those_of_the_core(name: str) -> None:
    for seed in range(80):
        s = scenario(seed)
        if not s["chunked"] and s["max_model_len"] is None:
            s["max_model_len"] = s["budget"]
        longest = s["max_model_len"]
        s["reqs"] = [r for r in s["reqs"] if longest is None or len(r["tokens"]) < longest]
        explicit = VllmRulesCore(
            arguments(s), name, scheduling_policy="priority" if s["priority"] else "fcfs",
            long_prefill_token_threshold=s["threshold"], max_model_len=longest, watermark=s["watermark"],
            reserve_full_isl=s["gate"])
        chosen = create_engine_core(arguments(s, scheduler_rules=name))
        assert chosen.options == explicit.options
        assert passes(chosen, s) == passes(explicit, s), f"seed {seed}"


def test_what_is_given_wins_over_the_arguments() -> None:
    args = MockEngineArgs(
        num_gpu_blocks=99, scheduler_rules="vllm-0.33-async", vllm_scheduling_policy="priority",
        long_prefill_token_threshold=5, max_model_len=1000, watermark=0.1, reserve_full_isl=False)
    options = scheduler_options(args)
    assert options.rules is PRESETS["vllm-0.33-async"]
    assert (options.by_priority, options.gate, options.threshold) == (True, False, 5)
    assert (options.watermark_blocks, options.max_model_len, options.usable_blocks) == (10, 1000, 99)
    options = scheduler_options(args, "vllm-0.33", scheduling_policy="fcfs", long_prefill_token_threshold=0,
                                max_model_len=50, watermark=0.0, reserve_full_isl=True, null_block=True)
    assert options.rules is PRESETS["vllm-0.33"]
    assert (options.by_priority, options.gate, options.threshold) == (False, True, 0)
    assert (options.watermark_blocks, options.max_model_len, options.usable_blocks) == (0, 50, 98)
    assert VllmRulesCore(args).rules is PRESETS["vllm-0.33-async"]
    assert VllmRulesCore(MockEngineArgs()).rules is PRESETS["vllm-0.33"]
    assert scheduler_options(MockEngineArgs()).rules is PRESETS["dynamo-mocker-1.3.0"]
    huge = MockEngineArgs(scheduler_rules="vllm-0.33", max_model_len=2**64 - 1, long_prefill_token_threshold=2**64 - 1)
    core = create_engine_core(huge)
    assert one_pass(core, 3).scheduled == [(uuid.UUID(int=0), 3)]
    unchunked = MockEngineArgs(scheduler_rules="vllm-0.33", enable_chunked_prefill=False, max_num_batched_tokens=300)
    assert scheduler_options(unchunked).max_model_len == 300


def test_the_page_names_every_argument() -> None:
    page = (Path(__file__).parent.parent / "docs" / "fidelity.md").read_text()
    names = [*FIELDS][[*FIELDS].index("scheduler_rules"):[*FIELDS].index("timing_model")]
    assert len(names) == 6
    for name in (*names, *asdict(PRESETS["vllm-0.33"])):
        assert f"| `{name}` |" in page, name
