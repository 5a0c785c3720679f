"""The compiled scheduler with switches equals the plain model for any switches, and the core that it stands beside."""

import random
import uuid
from dataclasses import replace

import numpy as np
import pytest
from model.vllm_rules import DYNAMO, RULES, VLLM, VLLM_ASYNC
from record_vllm import model_passes, scenario

from mocker._cluster import Cluster
from mocker._collect import Collector
from mocker._paths import PathTable
from mocker._rules_engine import RulesEngine
from mocker.args import DirectRequest, MockEngineArgs
from mocker.commands import SchedulerCommand
from mocker.engine import VllmCore, engine_settings
from mocker.replay.fast import fast_paths
from mocker.rules import PRESETS, SchedulerRules, VllmRulesCore, scheduler_options


def arguments(s: dict, **more: object) -> MockEngineArgs:
    """Engine arguments of a scenario."""
    return MockEngineArgs(
        block_size=s["block"], num_gpu_blocks=s["pool"], max_num_seqs=s["seqs"], max_num_batched_tokens=s["budget"],
        enable_chunked_prefill=s["chunked"], enable_prefix_caching=s["caching"],
        preemption_mode="fifo" if s.get("fifo") else "lifo", **more)


def compiled_passes(s: dict, rules: str | SchedulerRules, scores: dict | None = None,
                    **more: object) -> list[dict | None]:
    """What the compiled core does with a scenario, in the form of the recordings; its books are checked every pass."""
    core = VllmRulesCore(
        arguments(s, **(scores or {})), rules, scheduling_policy="priority" if s.get("priority") else "fcfs",
        long_prefill_token_threshold=s.get("threshold", 0), max_model_len=s.get("max_model_len"),
        watermark=s.get("watermark", 0.0), reserve_full_isl=s.get("gate", True), **more)
    todo = sorted(s["reqs"], key=lambda r: r["pass"])
    ended = fed = 0
    passes: list[dict | None] = []
    while ended < len(todo) and len(passes) < 4000:
        while fed < len(todo) and todo[fed]["pass"] <= len(passes):
            r = todo[fed]
            core.receive(DirectRequest(r["tokens"], len(r["out"]), r["out"], uuid=uuid.UUID(int=r["uuid"]),
                                       priority=r.get("priority", 0)))
            fed += 1
        if core.is_empty() and not core.requests_under_way:
            passes.append(None)
            continue
        p = core.execute_pass(float(len(passes))).to_dict()
        core.check_invariants()
        out = [[o[0], o[2]] for o in p["output"]]
        ended += sum(done for _, done in out)
        metrics = p["metrics"]
        passes.append({"sched": p["scheduled"], "admit": [list(a) for a in p["admissions"]],
                       "preempt": sorted(p["preempted"]), "out": out, "active": metrics["active_decode_blocks"],
                       "running": metrics["running_requests"], "waiting": metrics["waiting_requests"]})
    return passes


def random_rules(rng: random.Random) -> dict[str, bool]:
    """Any switches, or a preset with one changed."""
    if rng.random() < 0.5:
        rules = {name: rng.random() < 0.5 for name in RULES}
    else:
        rules = dict(rng.choice([DYNAMO, VLLM, VLLM_ASYNC]))
        name = rng.choice(RULES)
        rules[name] = not rules[name]
    if rules["late"]:
        rules["slot_at_use"] = True
    return rules


def case(seed: int) -> tuple[dict, dict[str, bool]]:
    """A scenario and switches, some with requests that want nothing, never fit or outgrow the pool."""
    rng = random.Random(seed)
    s, rules = scenario(seed, options=rng.random() < 0.6), random_rules(rng)
    if not s["priority"] and rules not in (VLLM, VLLM_ASYNC):
        s["fifo"] = rng.random() < 0.2
    if rng.random() < 0.1:
        s["reqs"][0]["out"] = []
    if rng.random() < 0.15:
        s["pool"] = max(2, s["pool"] // 3)
    if not s["chunked"] and s["max_model_len"] is None:
        s["max_model_len"] = s["budget"]
    s["reqs"] = [r for r in s["reqs"] if s["max_model_len"] is None or len(r["tokens"]) < s["max_model_len"]]
    return s, rules


@pytest.mark.parametrize("chunk", range(6))
def test_any_switches_equal_the_model(chunk: int) -> None:
    for seed in range(chunk, 600, 6):
        s, rules = case(seed)
        assert compiled_passes(s, SchedulerRules(**rules)) == model_passes(s, rules), f"seed {seed}, rules {rules}"


@pytest.mark.parametrize("chunk", range(3))
def test_no_switch_is_the_default_core(chunk: int) -> None:
    """Every field of every pass; KV events, times, the batch and the victims included."""
    for seed in range(chunk, 240, 3):
        rng = random.Random(seed)
        s = scenario(seed, options=False)
        s["fifo"] = rng.random() < 0.3
        if rng.random() < 0.2:
            s["pool"] = max(2, s["pool"] // 3)
        args = arguments(s, worker_type=rng.choice(["aggregated", "prefill", "decode"]))
        ours = VllmRulesCore(args, "dynamo-mocker-1.3.0", capture_kv_events=True)
        theirs = VllmCore(args, capture_kv_events=True, record_schedule=True)
        now, number = 0.0, 0
        todo = sorted(s["reqs"], key=lambda r: r["pass"])
        while todo or not theirs.is_empty():
            while todo and todo[0]["pass"] <= number:
                r = todo.pop(0)
                for core in (ours, theirs):
                    core.receive(DirectRequest(r["tokens"], len(r["out"]), r["out"], uuid=uuid.UUID(int=r["uuid"])))
            number += 1
            if theirs.is_empty():
                continue
            got, want = ours.execute_pass(now).to_dict(), theirs.execute_pass(now).to_dict()
            ours.check_invariants()
            assert got == want, f"seed {seed} pass {number}"
            now = want["end_ms"]


# ---- traces: segments instead of tokens, and fast-forward


def trace(seed: int) -> tuple[dict, list[list[int]]]:
    """A small trace of hash ids (8 tokens each) with shared prefixes, as columns and as token lists."""
    rng = random.Random(seed)
    size = 8
    roots = [[rng.randrange(1000) for _ in range(rng.randrange(1, 14))] for _ in range(3)]
    ids, lengths, limits, arrivals = [], [], [], []
    at = 0.0
    for _ in range(rng.randrange(5, 60)):
        root = rng.choice(roots)
        own = root[: rng.randrange(1, len(root) + 1)] + [rng.randrange(1000) for _ in range(rng.randrange(0, 4))]
        if ids and rng.random() < 0.2:
            own = list(rng.choice(ids))
        ids.append(own)
        full = len(own) * size
        lengths.append(full if rng.random() < 0.4 else full - rng.randrange(0, size))
        limits.append(rng.choice([1, 2, 5, 8, 9, 30, 70]))
        arrivals.append(at)
        at += rng.choice([0.0, 1.0, 20.0, 100.0, 1000.0])
    columns = {"offsets": np.concatenate(([0], np.cumsum([len(i) for i in ids]))).astype(np.int64),
               "ids": np.array([k for i in ids for k in i], np.uint64), "prompt": np.array(lengths, np.int64),
               "limit": np.array(limits, np.int64), "arrival": np.array(arrivals)}
    return columns, [[k for k in i for _ in range(size)][:n] for i, n in zip(ids, lengths, strict=True)]


def by_segments(t: dict, args: MockEngineArgs, rules: SchedulerRules, fast: bool, **more: object) -> Collector:
    """Replay by segments, one worker."""
    n = len(t["prompt"])
    collector = Collector(n)
    options = scheduler_options(args, rules, **more)
    engine = RulesEngine(**engine_settings(args), seed=0, token_seed=0, real_tokens=False, record=False,
                         capture=False, event_tokens=False, worker_id=0)
    options.configure(engine)
    paths = PathTable.from_hash_ids(t["offsets"], t["ids"], t["prompt"], 8, args.block_size)
    cluster = Cluster([engine], collector, t["arrival"], t["prompt"], t["limit"], paths, None, None, np.inf, True,
                      fast_paths(fast).bits)
    cluster.set_order()
    assert cluster.run_lane(0, 10**9, n) and not cluster.stalled
    engine.check()
    return collector


def by_tokens(t: dict, tokens: list[list[int]], args: MockEngineArgs, rules: SchedulerRules,
              **more: object) -> dict[str, list]:
    """The same request by request through the object API, with outputs that nobody shares."""
    core = VllmRulesCore(args, rules, **more)
    n, now, fed = len(tokens), 0.0, 0
    out: dict[str, list] = {"first_admit_ms": [np.nan] * n, "first_token_ms": [np.nan] * n,
                            "last_token_ms": [np.nan] * n, "output_tokens": [0] * n, "reused_input_tokens": [0] * n}
    while fed < n or not core.is_empty():
        if core.is_empty():
            now = max(now, t["arrival"][fed])
        while fed < n and t["arrival"][fed] <= now:
            plan = [10**6 + 1000 * fed + k for k in range(t["limit"][fed])]
            core.receive(DirectRequest(tokens[fed], len(plan), plan, uuid=uuid.UUID(int=fed)))
            fed += 1
        result = core.execute_pass(now)
        for a in result.admissions:
            row = a.uuid.int
            if np.isnan(out["first_admit_ms"][row]):
                out["first_admit_ms"][row] = now
            reused = min(a.reused_input_tokens, len(tokens[row]))
            out["reused_input_tokens"][row] = max(out["reused_input_tokens"][row], reused)
        for s in result.output_signals:
            if s.token_id is not None:
                row = s.uuid.int
                if not out["output_tokens"][row]:
                    out["first_token_ms"][row] = result.tokens_ms
                out["output_tokens"][row] += 1
                out["last_token_ms"][row] = result.tokens_ms
        now = result.end_ms
    return out


@pytest.mark.parametrize("chunk", range(4))
def test_segments_and_fast_forward_change_nothing(chunk: int) -> None:
    for seed in (*range(chunk, 200, 4), 2019 + chunk):
        rng = random.Random(seed)
        t, tokens = trace(seed)
        block = rng.choice([4, 8, 16])
        longest = max(len(x) + k for x, k in zip(tokens, t["limit"], strict=True))
        pool = int(longest) // block + rng.choice([1, 2, 5, 20, 100])
        args = MockEngineArgs(
            block_size=block, num_gpu_blocks=pool, max_num_seqs=rng.choice([1, 2, 4, 16]),
            max_num_batched_tokens=rng.choice([16, 40, 64, 300]), enable_prefix_caching=rng.random() < 0.85)
        rules = SchedulerRules(**rng.choice([VLLM, VLLM_ASYNC, DYNAMO, random_rules(rng)]))
        more = {"watermark": rng.choice([0.0, 0.0, 0.1]), "reserve_full_isl": rng.random() < 0.8,
                "long_prefill_token_threshold": rng.choice([0, 0, 24])}
        want = by_tokens(t, tokens, args, rules, **more)
        fast, slow = by_segments(t, args, rules, True, **more), by_segments(t, args, rules, False, **more)
        for name, column in want.items():
            assert np.array_equal(fast.columns[name], column, equal_nan=True), f"seed {seed} {name} {rules}"
        for name, column in slow.columns.items():
            assert np.array_equal(fast.columns[name], column, equal_nan=column.dtype.kind == "f"), f"seed {seed} {name}"
        for a, b in zip(fast.gap_log(), slow.gap_log(), strict=True):
            assert np.array_equal(a, b), f"seed {seed}"


# ---- the seam


def test_presets() -> None:
    assert list(PRESETS) == ["dynamo-mocker-1.3.0", "vllm-0.33", "vllm-0.33-async"]
    assert PRESETS["dynamo-mocker-1.3.0"].bits == 0
    assert PRESETS["vllm-0.33-async"].bits == 2047
    assert PRESETS["vllm-0.33"].bits == 2047 - 512
    for preset, switches in (("vllm-0.33", VLLM), ("vllm-0.33-async", VLLM_ASYNC), ("dynamo-mocker-1.3.0", DYNAMO)):
        assert all(getattr(PRESETS[preset], name) is on for name, on in switches.items())


@pytest.mark.parametrize(("rules", "args", "more", "text"), [
    ("vllm-9", {}, {}, "scheduler_rules"),
    ("vllm-0.33", {"max_num_seqs": 9, "max_num_batched_tokens": 8}, {}, "max_num_seqs 9 exceeds"),
    ("vllm-0.33", {"max_num_batched_tokens": 512, "enable_chunked_prefill": False}, {"max_model_len": 513},
     "smaller than max_model_len"),
    ("vllm-0.33", {"preemption_mode": "fifo"}, {}, "fifo"),
    ("vllm-0.33", {"engine_type": "trtllm"}, {}, "engine_type"),
    ("vllm-0.33", {"aic_nextn": 2}, {}, "speculative"),
    ("vllm-0.33", {"worker_type": "decode"}, {}, "hand-off"),
    ("vllm-0.33", {"num_g2_blocks": 9}, {}, "storage tiers"),
    ("vllm-0.33", {"num_gpu_blocks": 1}, {"null_block": True}, "null_block"),
    ("vllm-0.33", {}, {"scheduling_policy": "sjf"}, "scheduling_policy"),
    ("vllm-0.33", {}, {"watermark": 1.0}, "watermark"),
    ("vllm-0.33", {}, {"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
    ("vllm-0.33", {}, {"long_prefill_token_threshold": 9, "max_model_len": 8}, "long_prefill_token_threshold 9"),
    ("vllm-0.33", {}, {"max_model_len": 1}, "max_model_len"),
])
def test_refusals(rules: str, args: dict, more: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        VllmRulesCore(MockEngineArgs(**args), rules, **more)


def test_bad_switches() -> None:
    with pytest.raises(ValueError, match="late needs slot_at_use"):
        SchedulerRules(late=True)
    with pytest.raises(ValueError, match="lru"):
        SchedulerRules(lru=1)  # type: ignore[arg-type]


def core_of(rules: str = "vllm-0.33", **args: object) -> VllmRulesCore:
    settings = {"block_size": 4, "num_gpu_blocks": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return VllmRulesCore(MockEngineArgs(**{**settings, **args}), rules, capture_kv_events=True)


def run(core: VllmRulesCore) -> list[tuple[int, str]]:
    """Run to the end; how each request ended."""
    out = []
    for _ in range(300):
        if core.is_empty():
            return out
        out += [(s.uuid.int, s.terminal_status) for s in core.execute_pass(0.0).output_signals if s.terminal_status]
        core.check_invariants()
    raise AssertionError("stuck")


@pytest.mark.parametrize("rules", list(PRESETS))
def test_nothing_gets_stuck(rules: str) -> None:
    core = core_of(rules)
    core.receive(DirectRequest(list(range(17)), 1, uuid=uuid.UUID(int=1)))     # more than the pool
    core.receive(DirectRequest([50] * 8, 40, uuid=uuid.UUID(int=2)))           # outgrows it
    core.receive(DirectRequest([60] * 4, 2, uuid=uuid.UUID(int=3)))
    assert sorted(run(core)) == [(1, "rejected"), (2, "capacity"), (3, "completed")]


def test_lengths_beyond_the_model() -> None:
    core = VllmRulesCore(MockEngineArgs(block_size=4, num_gpu_blocks=8), "vllm-0.33", max_model_len=10)
    with pytest.raises(ValueError, match="max_model_len 10"):
        core.receive(DirectRequest([1] * 10, 1))
    with pytest.raises(ValueError, match="empty prompt"):
        core.receive(DirectRequest([], 1))
    assert core.is_empty()
    core.receive(DirectRequest([1] * 7, 9, uuid=uuid.UUID(int=1)))
    made = 0
    while not core.is_empty():
        made += len(core.execute_pass(0.0).output_signals)
    assert made == 3


def test_commands() -> None:
    core = core_of()
    request = DirectRequest([1] * 4, 1, uuid=uuid.UUID(int=1))
    assert core.apply_command(SchedulerCommand.Submit(request)).result == ("submitted", uuid.UUID(int=1))
    with pytest.raises(ValueError, match="hand-off"):
        core.apply_command(replace(SchedulerCommand.Submit(request), op="reserve_destination"))
    assert run(core) == [(1, "completed")]


def test_collector_sees_asynchronous_tokens_when_they_were_made() -> None:
    core = core_of("vllm-0.33-async")
    core.receive(DirectRequest([1] * 6, 2, uuid=uuid.UUID(int=1)))
    first = core.execute_pass(0.0)
    second = core.execute_pass(first.end_ms)
    third = core.execute_pass(second.end_ms)
    assert not first.output_signals
    assert [s.completed for s in second.output_signals] == [False]
    assert [s.completed for s in third.output_signals] == [True]
    assert (second.tokens_ms, third.tokens_ms) == (first.end_ms, second.end_ms)
    assert core.is_empty()
    assert third.end_ms == third.start_ms


def test_null_block() -> None:
    args = MockEngineArgs(block_size=4, num_gpu_blocks=5)
    assert VllmRulesCore(args, null_block=True).mocker_metrics().total_blocks == 4
    assert VllmRulesCore(args).mocker_metrics().total_blocks == 5


def test_a_duplicate_is_announced_once_and_removed_with_the_last_copy() -> None:
    """Two equal prompts at once keep the last block twice; its one removal comes when no copy is left."""
    core = core_of(num_gpu_blocks=4)
    for number in (1, 2):
        core.receive(DirectRequest([7] * 8, 1, uuid=uuid.UUID(int=number)))
    first = core.execute_pass(0.0)
    assert [n for _, n in first.scheduled] == [8, 4]
    stored = [b["block_hash"] for e in first.kv_events for b in e["event"]["data"]["stored"]["blocks"]]
    assert len(stored) == len(set(stored)) == 2
    assert first.mocker_metrics.active_decode_blocks == 0                      # both are done; 3 blocks are cached
    removed = []
    for number in range(3, 6):                                                 # one, then two, then all blocks go
        core.receive(DirectRequest([number] * 4 * (number - 1), 1, uuid=uuid.UUID(int=number)))
        for e in core.execute_pass(0.0).kv_events:
            removed += e["event"]["data"].get("removed", {}).get("block_hashes", [])
        core.check_invariants()
    assert [h for h in removed if h in stored].count(stored[1]) == 1
    assert set(stored) <= set(removed)


def test_events_describe_what_is_cached() -> None:
    """Stored and removed keep a set: no content twice, none removed that is not there."""
    for seed in range(40):
        s, rules = scenario(seed), random_rules(random.Random(seed))
        if not s["caching"]:
            continue
        s["max_model_len"] = s["budget"] if not s["chunked"] else None
        core = VllmRulesCore(arguments(s), SchedulerRules(**rules), capture_kv_events=True)
        there: set[int] = set()
        for r in s["reqs"]:
            if s["max_model_len"] is None or len(r["tokens"]) < s["max_model_len"]:
                core.receive(DirectRequest(r["tokens"], len(r["out"]), r["out"]))
        while not core.is_empty():
            for e in core.execute_pass(0.0).kv_events:
                data = e["event"]["data"]
                if "stored" in data:
                    parent = data["stored"]["parent_hash"]
                    assert parent is None or parent in there or rules["own_copy"]
                    hashes = [b["block_hash"] for b in data["stored"]["blocks"]]
                    assert not there.intersection(hashes)
                    there.update(hashes)
                else:
                    assert there.issuperset(data["removed"]["block_hashes"])
                    there.difference_update(data["removed"]["block_hashes"])


@pytest.mark.parametrize("rules", list(PRESETS))
def test_dropped_requests_leave_nothing(rules: str) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        s = scenario(seed, options=False)
        s["max_model_len"] = None
        core = VllmRulesCore(arguments({**s, "chunked": True}), rules,
                             scheduling_policy=rng.choice(["fcfs", "priority"]))
        alive = [core.receive(DirectRequest(r["tokens"], len(r["out"]), r["out"])) for r in s["reqs"]]
        for number in range(600):
            if core.is_empty():
                break
            core.execute_pass(float(number))
            if rng.random() < 0.3:
                core.drop_request(rng.choice(alive))
            core.check_invariants()
        assert core.is_empty()
        assert core.mocker_metrics().active_decode_blocks == 0


def test_random_drop_of_unknown() -> None:
    assert not core_of().drop_request(uuid.uuid4())
