"""Hand-offs of disaggregated serving: sources, destinations, their order, costs and cancellation, on both engines.

What the reference did is recorded and compared in test_exact.py and test_sglang_golden.py; here is what must hold,
stated one by one. The books of the core are checked after every command and pass.
"""
from __future__ import annotations

import json
import random
from uuid import UUID

import pytest

from mocker import DirectRequest, MockEngineArgs, SchedulerCommand, create_engine_core

ENGINES = ("vllm", "sglang")
BOTH = pytest.mark.parametrize("engine", ENGINES)


def uid(number: int) -> UUID:
    return UUID(int=number)


class Driver:
    """A core of 4-token blocks under command; hand-off n is that of request n unless said otherwise."""

    def __init__(self, engine: str, role: str = "decode", blocks: int = 12, **settings: object) -> None:
        sglang = {"sglang": {"page_size": 4, "conserve_slots": True}} if engine == "sglang" else {}
        args = {"engine_type": engine, "block_size": 4, "num_gpu_blocks": blocks, "worker_type": role,
                "max_num_batched_tokens": 64} | sglang | settings
        self.core = create_engine_core(MockEngineArgs.from_json(json.dumps(args)), capture_kv_events=True)
        self.engine = engine
        self.now = 0.0

    def apply(self, command: SchedulerCommand, **options: bool):
        try:
            return self.core.apply_command(command, **options)
        finally:
            self.core.check_invariants()

    def submit(self, n: int, tokens: list[int], outputs: int):
        return self.apply(SchedulerCommand.Submit(request(n, tokens, outputs)))

    def source(self, n: int, tokens: list[int], outputs: int, handoff: int | None = None):
        return self.apply(SchedulerCommand.SubmitHandoffPrefill(uid(handoff or n), request(n, tokens, outputs)))

    def release(self, handoff: int):
        return self.apply(SchedulerCommand.ReleaseSource(uid(handoff)))

    def cancel_source(self, handoff: int):
        return self.apply(SchedulerCommand.CancelSource(uid(handoff)))

    def reserve(self, n: int, tokens: list[int], outputs: int, handoff: int | None = None, now: bool = True):
        return self.apply(SchedulerCommand.ReserveDestination(uid(handoff or n), request(n, tokens, outputs)),
                          allow_destination_admission=now)

    def activate(self, handoff: int):
        return self.apply(SchedulerCommand.ActivateDestination(uid(handoff)))

    def cancel(self, handoff: int):
        return self.apply(SchedulerCommand.CancelDestination(uid(handoff)))

    def retry(self):
        effects = self.core.retry_pending_destinations()
        self.core.check_invariants()
        return effects

    def step(self):
        result = self.core.execute_pass(self.now)
        self.core.check_invariants()
        self.now = result.end_ms
        return result

    def run(self, passes: int = 1000) -> dict[int, str]:
        """Run until nobody waits or runs: how each request ended."""
        ended = {}
        while not self.core.is_empty():
            passes -= 1
            assert passes > 0, "no end"
            ended |= {s.uuid.int: s.terminal_status for s in self.step().output_signals if s.completed}
        return ended

    @property
    def active(self) -> int:
        """Blocks that cannot be evicted."""
        if self.engine == "sglang":
            c = self.core.state.counts
            return c["total_blocks"] - (c["available_tokens"] + c["evictable_tokens"]) // 4
        return self.core.mocker_metrics().active_decode_blocks

    def status(self, n: int) -> str:
        return str(getattr(self.core.state[uid(n)].status, "value", self.core.state[uid(n)].status))

    def is_clean(self) -> bool:
        return self.core.is_drained() and self.active == 0 and len(self.core.state) == 0

    def snapshot(self) -> tuple:
        state = self.core.state
        return (dict(state), state.waiting, state.running, self.core.mocker_metrics(), self.active)


def request(n: int, tokens: list[int], outputs: int) -> DirectRequest:
    return DirectRequest(tokens, outputs, uuid=uid(n), output_token_ids=[1000 * n + i for i in range(outputs)])


def prompt(length: int, seed: int = 0) -> list[int]:
    return [100 * seed + i for i in range(length)]


def reserved(effects) -> list[tuple[int, int]]:
    return [(e["destination_reserved"], e["transferable_prompt_tokens"]) for e in effects.lifecycle_events]


def stored(events: list[dict]) -> list[int]:
    """Hashes of the blocks that events store, in order."""
    return [b["block_hash"] for e in events if isinstance(e["event"]["data"], dict) and "stored" in e["event"]["data"]
            for b in e["event"]["data"]["stored"]["blocks"]]


# ---- sources --------------------------------------------------------------------------------------------------------

@BOTH
def test_source_is_held_when_done_and_freed_by_its_release(engine: str) -> None:
    d = Driver(engine, "prefill", 8, max_num_seqs=1, enable_prefix_caching=engine == "sglang",
               kv_bytes_per_token=1000, kv_transfer_bandwidth=2.0)
    assert d.source(1, prompt(8), 2).result == ("submitted", uid(1))
    before, held = 0, []
    while not d.core.is_empty():
        before = d.active
        held = d.step().lifecycle_events
    assert held == [{"source_held": 1, "transfer_timing": {
        "mode": "full_prompt", "full_prompt_tokens": 8, "kv_bytes_per_token": 1000, "bandwidth_gb_s": 2.0}}]
    assert d.core.num_requests() == 0
    assert not d.core.is_drained()
    assert d.status(1) == "held"
    assert d.active >= before > 0
    m = d.core.mocker_metrics()
    assert (m.running_requests, m.waiting_requests) == (0, 0)
    assert d.release(1).result == "applied"
    assert d.is_clean()
    assert d.release(1).result == "noop"
    assert d.cancel_source(1).result == "noop"
    assert d.is_clean()


@BOTH
def test_held_source_is_cancelled_once_and_its_ids_may_come_again(engine: str) -> None:
    d = Driver(engine, "prefill", 8)
    for _ in range(3):
        d.source(1, prompt(8), 2, handoff=5)
        d.run()
        assert d.status(1) == "held"
        assert d.cancel_source(5).result == "applied"
        assert d.cancel_source(5).result == "noop"
        assert d.is_clean()


@BOTH
def test_source_released_before_it_is_done_is_a_plain_request(engine: str) -> None:
    d = Driver(engine, "prefill", 8)
    d.source(1, prompt(8), 4)
    d.step()
    assert d.release(1).result == "applied"
    assert d.release(1).result == "noop"
    d.source(2, prompt(8, 1), 1, handoff=1)             # the hand-off is free again
    assert d.run() == {1: "completed", 2: "completed"}
    assert uid(1) not in d.core.state
    assert d.status(2) == "held"
    d.release(1)
    assert d.is_clean()


@BOTH
@pytest.mark.parametrize("passes", [0, 1])
def test_cancelled_source_goes_once_whether_it_waits_or_runs(engine: str, passes: int) -> None:
    d = Driver(engine, "prefill", 8)
    d.source(1, prompt(8), 5)
    for _ in range(passes):
        d.step()
    assert d.status(1) == ("running" if passes else "waiting")
    assert d.cancel_source(1).result == "applied"
    assert d.cancel_source(1).result == "noop"
    assert d.is_clean()
    assert not d.step().output_signals


@BOTH
def test_id_that_is_alive_is_refused_and_nothing_is_held(engine: str) -> None:
    d = Driver(engine, "prefill", 16)
    d.source(1, prompt(8), 2)
    d.run()
    d.source(2, prompt(8, 1), 9)
    d.step()
    before = d.snapshot()
    for alive in (1, 2):                                 # held, running
        with pytest.raises(ValueError, match=f"request {uid(alive)} is already active"):
            d.submit(alive, prompt(4), 1)
        with pytest.raises(ValueError, match=f"request {uid(alive)} is already active"):
            d.source(alive, prompt(4), 1, handoff=9)
        with pytest.raises(ValueError, match="is already active"):
            d.source(8, prompt(4), 1, handoff=alive)
    assert d.snapshot() == before
    assert d.release(9).result == "noop"
    assert d.cancel_source(9).result == "noop"
    d.release(1)
    d.cancel_source(2)
    assert d.is_clean()


# ---- destinations: costs --------------------------------------------------------------------------------------------

@BOTH
@pytest.mark.parametrize("outputs", [1, 128])
def test_transfer_is_the_prompt_in_whole_blocks(engine: str, outputs: int) -> None:
    d = Driver(engine)
    assert reserved(d.reserve(1, prompt(10), outputs)) == [(1, 12)]
    assert d.active == 3
    d.cancel(1)
    assert d.is_clean()


@BOTH
@pytest.mark.parametrize(("length", "shared", "transfer"), [(12, 0, 12), (12, 8, 4), (10, 8, 4), (8, 8, 0), (8, 7, 4)])
def test_cached_blocks_are_not_transferred(engine: str, length: int, shared: int, transfer: int) -> None:
    d = Driver(engine)
    d.submit(9, prompt(12), 1)
    d.run()
    assert reserved(d.reserve(1, prompt(12)[:shared] + prompt(length - shared, 3), 2)) == [(1, transfer)]
    d.activate(1)
    assert d.run() == {1: "completed"}
    assert d.is_clean()


def test_without_caching_everything_is_transferred() -> None:
    d = Driver("vllm", enable_prefix_caching=False)
    d.submit(9, prompt(12), 1)
    d.run()
    assert reserved(d.reserve(1, prompt(12), 2)) == [(1, 12)]
    d.activate(1)
    assert d.run() == {1: "completed"}
    assert d.is_clean()


@BOTH
def test_a_destination_counts_once_in_the_metrics(engine: str) -> None:
    d = Driver(engine, max_num_seqs=1)

    def queued() -> tuple:
        result = d.step()
        return (result.fpm.num_queued_decode, result.fpm.sum_queued_decode_kv_tokens,
                result.fpm.var_queued_decode_kv_tokens, result.fpm.num_queued_prefill,
                result.mocker_metrics.waiting_requests)

    assert reserved(d.reserve(1, prompt(4), 3)) == [(1, 4)]
    assert queued() == (1, 4, 0.0, 0, 1)
    d.submit(2, prompt(4, 1), 8)
    assert queued() == (1, 4, 0.0, 0, 1)                 # the blocker runs
    d.reserve(3, prompt(24, 2), 1, now=False)
    assert queued() == (2, 28, 100.0, 0, 2)
    d.cancel(3)
    d.activate(1)
    assert queued() == (1, 4, 0.0, 0, 1)
    d.run()
    assert queued() == (0, 0, 0.0, 0, 0)
    assert d.is_clean()


# ---- destinations: order --------------------------------------------------------------------------------------------

def test_whole_handoff_on_a_full_core() -> None:
    d = Driver("vllm", max_num_seqs=1, max_num_batched_tokens=16)
    d.submit(1, prompt(4) + prompt(4, 1), 2)
    d.step()
    assert reserved(d.reserve(2, prompt(4) + prompt(4, 2), 3)) == []     # nobody else may run
    assert d.status(2) == "pending"
    assert d.run() == {1: "completed"}
    effects = d.retry()
    assert reserved(effects) == [(2, 4)]                 # 4 of 8 are cached
    assert not stored(effects.kv_events)
    d.submit(3, prompt(4, 3), 3)
    d.step()
    active = d.active
    assert d.activate(2).result == "applied"
    assert d.active == active
    first = stored(d.core.drain_kv_events())
    assert len(first) == 1
    assert d.core.state.waiting == [uid(2)]
    assert d.core.state.running == [uid(3)]
    later, admitted = [], []
    while not d.core.is_empty():
        result = d.step()
        later += stored(result.kv_events)
        admitted += [(a.uuid.int, a.reused_input_tokens) for a in result.admissions]
    assert admitted == [(2, 0)]
    assert not set(first) & set(later)
    assert d.is_clean()


def test_whole_handoff_on_sglang_waits_for_a_running_slot_only_after_activation() -> None:
    d = Driver("sglang", max_num_seqs=1)
    d.submit(1, prompt(4, 1), 3)
    d.step()
    effects = d.reserve(2, prompt(8), 2)
    assert reserved(effects) == [(2, 8)]
    assert not d.core.drain_kv_events()
    d.activate(2)
    assert len(stored(d.core.drain_kv_events())) == 2
    admitted = []
    while not d.core.is_empty():
        result = d.step()
        admitted += [(a.uuid.int, a.reused_input_tokens) for a in result.admissions]
        assert d.status(2) == "prebuilt" if uid(1) in d.core.state else True
    assert admitted == [(2, 0)]
    assert d.is_clean()


@BOTH
def test_pending_head_is_reserved_by_the_command_that_makes_room(engine: str) -> None:
    for state in ("reserved", "waiting", "running"):
        d = Driver(engine, blocks=5)
        d.reserve(1, prompt(16), 2)
        assert reserved(d.reserve(2, prompt(16, 1), 2)) == []
        assert reserved(d.reserve(3, prompt(4, 2), 2)) == []              # it would fit, but it is not the first
        if state != "reserved":
            d.activate(1)
        if state == "running":
            d.step()
        assert reserved(d.cancel(1)) == [(2, 16)]
        assert d.cancel(1).result == "noop"
        assert reserved(d.retry()) == [(3, 4)]                            # one at a time
        assert reserved(d.retry()) == []
        d.activate(3)
        d.activate(2)
        assert d.run() == {2: "completed", 3: "completed"}
        assert d.is_clean()


@BOTH
def test_release_of_a_source_reserves_too(engine: str) -> None:
    for end in ("release", "cancel_source"):
        d = Driver(engine, "aggregated", 5)
        d.source(1, prompt(14), 1)
        d.run()
        assert reserved(d.reserve(2, prompt(12, 1), 1)) == []
        assert reserved(getattr(d, end)(1)) == [(2, 12)]
        d.cancel(2)
        assert d.is_clean()


@BOTH
def test_order_survives_cancellation_of_the_head(engine: str) -> None:
    d = Driver(engine, blocks=4)
    d.reserve(1, prompt(16), 1)
    for n in (2, 3, 4):
        d.reserve(n, prompt(16, n), 1)
    for gone, expected in ((2, []), (1, [(3, 16)]), (3, [(4, 16)])):
        assert reserved(d.cancel(gone)) == expected
    assert d.core.mocker_metrics().waiting_requests == 1
    d.cancel(4)
    assert d.is_clean()


@BOTH
def test_handoff_that_comes_again_has_its_old_place_while_others_wait(engine: str) -> None:
    d = Driver(engine, blocks=4)
    d.reserve(1, prompt(16), 1)
    for n in (2, 3, 4):
        d.reserve(n, prompt(16, n), 1)
    d.cancel(3)
    d.reserve(5, prompt(16, 5), 1, handoff=3)
    assert reserved(d.cancel(1)) == [(2, 16)]
    assert reserved(d.cancel(2)) == [(5, 16)]             # before 4
    d.cancel(4)
    d.reserve(6, prompt(16, 6), 1, handoff=2)
    d.reserve(7, prompt(16, 7), 1, handoff=4)
    assert reserved(d.cancel(3)) == [(6, 16)]
    d.cancel(2)
    d.cancel(4)
    assert d.is_clean()


def test_activated_destination_has_the_place_of_its_cancelled_namesake() -> None:
    d = Driver("vllm", max_num_seqs=1)
    d.reserve(1, prompt(4), 1)
    d.submit(2, prompt(4, 2), 1)
    d.submit(3, prompt(4, 3), 1)
    d.core.drop_request(uid(2))
    d.reserve(2, prompt(4, 2), 1)
    d.activate(1)
    d.activate(2)
    assert d.core.state.waiting == [uid(2), uid(3), uid(1)]
    d.run()
    assert d.is_clean()


@BOTH
def test_retries_change_nothing_until_room_is_made(engine: str) -> None:
    d = Driver(engine, blocks=4)
    d.reserve(1, prompt(12), 1)
    d.reserve(2, prompt(8, 1), 1)
    d.reserve(3, prompt(4, 2), 1)
    before = d.snapshot()
    for _ in range(3):
        assert reserved(d.retry()) == []
        assert d.snapshot() == before
    d.activate(1)
    assert d.run(200) == {1: "completed"}
    assert [reserved(d.retry()) for _ in range(3)] == [[(2, 8)], [(3, 4)], []]
    d.cancel(2)
    d.cancel(3)
    assert d.is_clean()


@BOTH
def test_while_one_is_pending_only_activated_ones_are_admitted(engine: str) -> None:
    d = Driver(engine, blocks=4)
    d.reserve(1, prompt(4), 2)
    d.reserve(2, prompt(16, 1), 2)                        # blocked
    d.submit(3, prompt(4, 2), 2)
    result = d.step()
    assert not result.admissions
    assert result.end_ms == result.start_ms
    assert d.core.state.waiting == [uid(3)]
    d.activate(1)
    admitted = []
    while uid(1) in d.core.state:
        admitted += [a.uuid.int for a in d.step().admissions]
    assert admitted == [1]
    assert reserved(d.retry()) == [(2, 16)]
    d.cancel(2)
    assert [a.uuid.int for a in d.step().admissions] == [3]
    d.run()
    assert d.is_clean()


@BOTH
def test_activated_but_waiting_destination_is_cancelled_beside_a_running_request(engine: str) -> None:
    d = Driver(engine, max_num_seqs=1)
    d.reserve(1, prompt(8), 4)
    d.submit(2, prompt(4, 1), 6)
    d.step()
    active = d.active
    d.activate(1)
    assert d.active == active
    assert d.status(1) == ("prebuilt" if engine == "sglang" else "waiting")
    assert d.cancel(1).result == "applied"
    assert d.cancel(1).result == "noop"
    assert d.core.state.running == [uid(2)]
    assert d.run() == {2: "completed"}
    assert d.is_clean()


def test_surplus_of_the_last_page_goes_to_the_next_one_at_activation() -> None:
    d = Driver("sglang", blocks=4)
    assert reserved(d.reserve(1, prompt(13), 1)) == [(1, 16)]
    assert reserved(d.reserve(2, [7], 1)) == []
    assert reserved(d.activate(1)) == []                  # 3 tokens came free, a page is 4
    d = Driver("sglang", blocks=5)
    d.reserve(1, prompt(9), 1)
    d.reserve(2, prompt(5, 1), 1)
    assert d.activate(1).result == "applied"
    assert reserved(d.reserve(3, prompt(4, 2), 1)) == []
    assert reserved(d.activate(2)) == [(3, 4)]            # 3 and 3 tokens came free
    assert d.run() == {1: "completed", 2: "completed"}
    d.activate(3)
    d.run()
    assert d.is_clean()


def test_blocks_that_became_resident_before_activation_are_shared() -> None:
    d = Driver("vllm")
    d.reserve(1, prompt(10), 3)
    d.submit(2, prompt(12), 8)                            # computes the same blocks meanwhile
    d.step()
    assert d.active == 3 + 4
    d.core.drain_kv_events()
    d.activate(1)
    assert d.active == 5                                  # two of three were there
    assert not d.core.drain_kv_events()
    assert d.run() == {1: "completed", 2: "completed"}
    assert d.is_clean()


def test_blocks_that_activation_frees_go_to_the_next_one() -> None:
    d = Driver("vllm", blocks=8)
    d.reserve(1, prompt(10), 3)
    d.submit(2, prompt(12), 8)
    d.step()
    assert reserved(d.reserve(3, prompt(8, 1), 1)) == []
    assert reserved(d.activate(1)) == [(3, 8)]
    d.cancel(3)
    assert d.run() == {1: "completed", 2: "completed"}
    assert d.is_clean()


@BOTH
def test_preempted_destination_is_computed_again(engine: str) -> None:
    d = Driver(engine, blocks=6, **({"sglang": {"page_size": 4, "clip_max_new_tokens": 1, "conserve_slots": True,
                                                "schedule_conservativeness": 0.0}} if engine == "sglang" else {}))
    d.reserve(1, prompt(8), 12)
    d.reserve(2, prompt(8, 1), 12)
    d.activate(1)
    d.activate(2)
    times = []
    while not d.core.is_empty():
        times += [d.core.state[u].num_preemptions for u in d.core.state]
        d.step()
    assert max(times) > 0
    assert d.is_clean()


# ---- refusals -------------------------------------------------------------------------------------------------------

@BOTH
@pytest.mark.parametrize("stage", ["pending", "reserved", "activated", "running"])
def test_refused_reservation_changes_nothing(engine: str, stage: str) -> None:
    d = Driver(engine)
    d.reserve(1, prompt(8), 9, now=stage != "pending")
    if stage in ("activated", "running"):
        d.activate(1)
    if stage == "running":
        d.step()
    before = d.snapshot()
    with pytest.raises(ValueError, match=f"request {uid(1)} is already active"):
        d.reserve(1, prompt(4), 1, handoff=2)
    with pytest.raises(ValueError, match=f"request {uid(1)} is already active"):
        d.submit(1, prompt(4), 1)
    with pytest.raises(ValueError, match="is already (pending|active)"):
        d.reserve(2, prompt(4), 1, handoff=1)
    with pytest.raises(ValueError, match="destination prompt exceeds the KV pool capacity"):
        d.reserve(3, prompt(49), 1)
    assert d.snapshot() == before
    assert d.cancel(2).result == d.cancel(3).result == "noop"
    assert d.cancel(1).result == "applied"
    assert d.is_clean()


@BOTH
def test_destination_that_fills_the_pool_is_accepted(engine: str) -> None:
    d = Driver(engine)
    assert reserved(d.reserve(1, prompt(48), 1)) == [(1, 48)]
    d.cancel(1)
    assert d.is_clean()


@BOTH
def test_commands_of_unknown_handoffs_do_nothing(engine: str) -> None:
    d = Driver(engine)
    d.reserve(1, prompt(8), 2, now=False)
    before = d.snapshot()
    for command in (d.release, d.cancel_source, d.activate):
        assert command(1).result == "noop"                # a destination, and not reserved
    for command in (d.release, d.cancel_source, d.activate, d.cancel):
        assert command(7).result == "noop"
    assert d.snapshot() == before
    d.cancel(1)
    assert d.is_clean()


def test_trtllm_reserves_nothing() -> None:
    d = Driver("trtllm")
    with pytest.raises(ValueError, match="^destination reservation is not supported for TRT-LLM$"):
        d.reserve(1, prompt(8), 2)
    assert d.is_clean()
    assert d.activate(1).result == d.cancel(1).result == "noop"
    d.source(1, prompt(8), 2)
    assert d.run() == {1: "completed"}
    assert d.status(1) == "held"
    d.release(1)
    assert d.is_clean()


def test_command_needs_its_parts() -> None:
    d = Driver("vllm")
    for command in (SchedulerCommand("submit"), SchedulerCommand("release_source"), SchedulerCommand("nothing", None,
                    uid(1)), SchedulerCommand("reserve_destination", None, uid(1))):
        with pytest.raises(ValueError, match="command"):
            d.apply(command)
    with pytest.raises(TypeError, match="handoff_id"):
        SchedulerCommand("release_source", None, 7)
    assert d.is_clean()


# ---- liveness -------------------------------------------------------------------------------------------------------

@BOTH
@pytest.mark.parametrize("by", ["command", "drop"])
@pytest.mark.parametrize("stage", ["pending", "reserved", "activated", "running", "source waiting", "source running",
                                   "source held"])
def test_cancellation_at_each_stage_frees_everything(engine: str, stage: str, by: str) -> None:
    d = Driver(engine, "prefill" if stage.startswith("source") else "decode", 8)
    if stage.startswith("source"):
        d.source(1, prompt(10), 1 if stage == "source held" else 5)
        if stage != "source waiting":
            d.step()
        assert d.status(1) == stage.removeprefix("source ")
    else:
        d.reserve(1, prompt(10), 5, now=stage != "pending")
        if stage in ("activated", "running"):
            d.activate(1)
        if stage == "running":
            d.step()
    if by == "drop":
        assert d.core.drop_request(uid(1))
        assert not d.core.drop_request(uid(1))
        d.core.check_invariants()
    else:
        cancel = d.cancel_source if stage.startswith("source") else d.cancel
        assert cancel(1).result == "applied"
        assert cancel(1).result == "noop"
    assert d.is_clean()
    assert not d.step().output_signals
    d.reserve(1, prompt(32), 1)                           # the whole pool and both ids are free
    assert d.status(1) == "reserved"
    d.cancel(1)
    assert d.is_clean()


@BOTH
def test_both_sides_drain_when_the_destination_finds_no_room(engine: str) -> None:
    source, destination = Driver(engine, "prefill", 8), Driver(engine, "decode", 4)
    source.source(1, prompt(8), 1)
    source.run()
    destination.reserve(9, prompt(16, 1), 1)
    assert reserved(destination.reserve(1, prompt(8), 4)) == []
    assert source.status(1) == "held"
    assert not source.core.is_drained()
    source.cancel_source(1)
    destination.cancel(1)
    destination.cancel(9)
    assert source.is_clean()
    assert destination.is_clean()


def random_commands(d: Driver, rng: random.Random, count: int) -> None:
    """Commands and passes in any order, on few ids; some are refused."""
    shared = [prompt(rng.randrange(1, 30), rng.randrange(3)) for _ in range(4)]
    for _ in range(count):
        n, handoff = rng.randrange(1, 17), rng.randrange(1, 9)
        tokens = rng.choice(shared)[:rng.randrange(1, 30)] + prompt(rng.randrange(0, 9), n)
        outputs = rng.choice([1, 1, 3, 8, 20])
        act, *given = rng.choice([
            (d.submit, n, tokens, outputs), (d.source, n, tokens, outputs, handoff),
            (d.reserve, n, tokens, outputs, handoff), (d.reserve, n, tokens, outputs, handoff, False),
            (d.activate, handoff), (d.activate, handoff), (d.release, handoff), (d.cancel_source, handoff),
            (d.cancel, handoff), (d.retry,), (d.step,), (d.step,), (d.step,)])
        before = d.snapshot()
        try:
            act(*given)
        except ValueError:
            assert d.snapshot() == before


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
def test_any_order_of_commands_keeps_the_books(engine: str, role: str) -> None:
    for seed in range(40):
        rng = random.Random(f"{engine}/{role}/{seed}")
        speculative = {"aic_nextn": 2, "aic_nextn_accept_rates": "0.5,0.9"} if rng.random() < 0.3 else {}
        d = Driver(engine, role, rng.choice([4, 6, 8, 20]), enable_prefix_caching=rng.random() < 0.8,
                   max_num_seqs=rng.choice([1, 2, 256]), max_num_batched_tokens=rng.choice([8, 64]),
                   preemption_mode=rng.choice(["lifo", "fifo"]), **speculative)
        random_commands(d, rng, 120)
        ends = [(d.cancel, h) for h in range(1, 9)] + [(d.cancel_source, h) for h in range(1, 9)]
        rng.shuffle(ends)
        for cancel, handoff in ends:
            cancel(handoff)
        if rng.random() < 0.5:
            for uuid in list(d.core.state):
                assert d.core.drop_request(uuid)
                d.core.check_invariants()
        for _ in range(400):
            if d.core.is_empty():
                break
            d.step()
        for uuid in list(d.core.state):                   # those that preempt one another without end
            d.core.drop_request(uuid)
        d.core.check_invariants()
        assert d.is_clean(), f"seed {seed}"
