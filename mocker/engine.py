"""The engine cores as objects: submit requests, run passes, read what they produced.

Names are the reference's (`scheduler/mod.rs`, `scheduler/vllm/core.rs`). The work is done in compiled code; a call
here costs a few microseconds, and results are turned into objects when they are looked at.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ._engine import TERMINAL_NAMES, EngineCore
from ._offload_engine import OffloadWorld
from .args import DEFAULT_SCHEDULER_RULES, DirectRequest, MockEngineArgs
from .commands import HandoffCommands, PendingOrder, SchedulerCommandEffects
from .offload import attach_tiers, offload_settings, offload_world
from .timing import engine_timing, with_blocks

if TYPE_CHECKING:
    from uuid import UUID

    from numpy.typing import NDArray

    from ._hooks import ScoreHook
    from .collector import TraceCollector
    from .sglang import SglangCore

UNLIMITED = 2**62
_NO_TOKENS = np.empty(0, np.uint32)


@dataclass(frozen=True)
class AdmissionEvent:
    """A request began to run (again); `reused_input_tokens` of its prompt were cached."""

    uuid: UUID
    reused_input_tokens: int


@dataclass(frozen=True)
class OutputSignal:
    """One generated token, or the end of a request without one.

    `terminal_status` is None for a token that is not the last, else "completed", "rejected", "capacity" or
    "over_budget"; `handoff_delay_ms` is set on the last token of a prefill worker with a transfer model.
    """

    uuid: UUID
    token_id: int | None
    completed: bool
    rejected: bool
    handoff_delay_ms: float | None
    terminal_status: str | None = None


@dataclass(frozen=True)
class MockerMetrics:
    """State after a pass; blocks and requests are counts, `gpu_cache_usage_perc` is active / total."""

    dp_rank: int
    active_decode_blocks: int
    total_blocks: int
    gpu_cache_usage_perc: float
    running_requests: int
    waiting_requests: int
    vllm_preemptions_total: int
    sglang_cache_hit_tokens: int = 0
    sglang_cache_total_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The recorded form (without `dp_rank`)."""
        return {k: getattr(self, k) for k in self.__dataclass_fields__ if k != "dp_rank"}


@dataclass(frozen=True)
class ForwardPassSnapshot:
    """What a pass computed and what waits; lengths in tokens, variances over requests, wall time in s."""

    num_prefill_requests: int
    sum_prefill_tokens: int
    var_prefill_length: float
    sum_prefill_kv_tokens: int
    num_decode_requests: int
    sum_decode_kv_tokens: int
    var_decode_kv_tokens: float
    num_queued_prefill: int
    sum_queued_prefill_tokens: int
    var_queued_prefill_length: float
    num_queued_decode: int
    sum_queued_decode_kv_tokens: int
    var_queued_decode_kv_tokens: float
    wall_time_secs: float

    def to_dict(self) -> dict[str, Any]:
        """The recorded form."""
        return {k: getattr(self, k) for k in self.__dataclass_fields__}


class EnginePassResult:
    """What one pass did. Times in ms of simulated time; events are visible from the start of the pass.

    Attributes
    ----------
    start_ms, end_ms : float
    completed_requests : int
        Requests gone, rejected ones included.
    kv_events : list of dict
        Stored and removed events in the reference's JSON form.
    mocker_metrics : MockerMetrics
    fpm : ForwardPassSnapshot
    accept_length_output_tokens, accept_length_decode_forwards : int
        Tokens made, and the requests that made them.
    """

    __slots__ = ("start_ms", "end_ms", "completed_requests", "kv_events", "mocker_metrics", "_fpm",
                 "accept_length_output_tokens", "accept_length_decode_forwards", "_admissions", "_signals", "_ids",
                 "lifecycle_events", "router_event_visibility", "_schedule")

    def __init__(self, start_ms: float, raw: tuple[Any, ...], ids: Mapping[int, UUID], kv_events: list[dict[str, Any]],
                 metrics: MockerMetrics, fpm: tuple[Any, ...],
                 schedule: tuple[list[tuple[int, int]], list[int]] | None = None) -> None:
        self.start_ms = start_ms
        (self.end_ms, self.completed_requests, self._admissions, self._signals, self.accept_length_output_tokens,
         self.accept_length_decode_forwards) = raw
        self._ids = [ids[a[0]] for a in self._admissions], [ids[s[0]] for s in self._signals]
        self._schedule = None if schedule is None else (
            [(ids[handle], tokens) for handle, tokens in schedule[0]], [ids[handle] for handle in schedule[1]])
        self.kv_events = kv_events
        self.mocker_metrics = metrics
        self._fpm = fpm
        self.lifecycle_events: list[Any] = []
        self.router_event_visibility = "PassStart"

    @property
    def admissions(self) -> list[AdmissionEvent]:
        """Admissions in order."""
        return [AdmissionEvent(uuid, a[1]) for uuid, a in zip(self._ids[0], self._admissions, strict=True)]

    @property
    def output_signals(self) -> list[OutputSignal]:
        """Tokens and endings in the order they were made."""
        return [OutputSignal(uuid, s[1] if s[1] >= 0 else None, s[2] != 0, s[2] in (2, 4), s[3], TERMINAL_NAMES[s[2]])
                for uuid, s in zip(self._ids[1], self._signals, strict=True)]

    @property
    def scheduled(self) -> list[tuple[UUID, int]]:
        """The batch in its order: requests, with the tokens that this pass computes of each.

        Empty unless the core was made with `record_schedule`.
        """
        return [] if self._schedule is None else self._schedule[0]

    @property
    def preempted(self) -> list[UUID]:
        """Requests that lost their blocks in this pass, in order; those that ended because they outgrew the pool last.

        Empty unless the core was made with `record_schedule`.
        """
        return [] if self._schedule is None else self._schedule[1]

    @property
    def fpm(self) -> ForwardPassSnapshot:
        """Forward-pass metrics."""
        (prefill, decode, queued_prefill, queued_decode), tokens, prefix = self._fpm
        return ForwardPassSnapshot(
            prefill[0], tokens, prefill[2], prefix, decode[0], decode[1], decode[2], queued_prefill[0],
            queued_prefill[1], queued_prefill[2], queued_decode[0], queued_decode[1], queued_decode[2],
            (self.end_ms - self.start_ms) / 1000.0)

    def to_dict(self) -> dict[str, Any]:
        """The recorded form of a pass; UUIDs as their integer value.

        `scheduled` and `preempted` are in it if the core was made with `record_schedule`.
        """
        out = {
            "op": "pass", "start_ms": self.start_ms, "end_ms": self.end_ms,
            "completed_requests": self.completed_requests,
            "admissions": [[uuid.int, a[1]] for uuid, a in zip(self._ids[0], self._admissions, strict=True)],
            "output": [[s.uuid.int, s.token_id, s.completed, s.rejected, s.handoff_delay_ms]
                       for s in self.output_signals],
            "lifecycle": list(self.lifecycle_events), "visibility": self.router_event_visibility,
            "kv_events": self.kv_events, "metrics": self.mocker_metrics.to_dict(), "fpm": self.fpm.to_dict(),
            "accept_length": [self.accept_length_output_tokens, self.accept_length_decode_forwards],
        }
        if self._schedule is not None:
            out["scheduled"] = [[uuid.int, tokens] for uuid, tokens in self._schedule[0]]
            out["preempted"] = [uuid.int for uuid in self._schedule[1]]
        return out


class RequestStatus(str, Enum):
    """Where a request is; compares equal to its text."""

    Waiting = "waiting"
    Running = "running"
    Preempted = "preempted"
    Held = "held"
    Pending = "pending"
    Reserved = "reserved"
    Parked = "parked"


@dataclass(frozen=True)
class RequestState:
    """One request in a core: its tokens and how often it was preempted."""

    uuid: UUID
    status: RequestStatus
    num_input_tokens: int
    generated_tokens: int
    max_output_tokens: int
    num_computed_tokens: int
    num_allocated_tokens: int
    num_preemptions: int


class SchedulerState(Mapping["UUID", RequestState]):
    """Read-only view of a core's requests by UUID; `waiting` and `running` are UUIDs in queue order."""

    def __init__(self, core: VllmCore) -> None:
        self._owner = core

    @property
    def waiting(self) -> list[UUID]:
        """Waiting requests, the next to be admitted first."""
        return [self._owner._ids[h] for h in self._owner._core.queue(False)]

    @property
    def running(self) -> list[UUID]:
        """Running requests in admission order."""
        return [self._owner._ids[h] for h in self._owner._core.queue(True)]

    def __getitem__(self, uuid: UUID) -> RequestState:
        slot = self._owner._slots[uuid][1]
        r = self._owner._core.request(slot)
        return RequestState(uuid, RequestStatus(r["status"]), r["prompt"], r["generated"], r["limit"], r["computed"],
                            r["allocated"], r["preemptions"])

    def __iter__(self) -> Iterator[UUID]:
        return iter(self._owner._slots)

    def __len__(self) -> int:
        return len(self._owner._slots)


def engine_hooks(args: MockEngineArgs) -> tuple[ScoreHook | None, ...]:
    """Scores of the user's that an engine asks: who is preempted, who is admitted, what is evicted."""
    return tuple(None if score is None else score.core()
                 for score in (args.victim_score, args.admission_score, args.eviction_score))


def engine_settings(args: MockEngineArgs) -> dict[str, Any]:
    """Arguments of the compiled core that follow from `args` (everything but seeds and what to record).

    Raises
    ------
    ValueError
        The arguments ask for something that this engine does not model.
    """
    if args.engine_type not in ("vllm", "trtllm"):
        raise ValueError(f"engine_type {args.engine_type!r} is not supported by VllmCore; use 'vllm' or 'trtllm'")
    return {
        "block_size": args.block_size, "num_blocks": args.num_gpu_blocks,
        "max_seqs": UNLIMITED if args.max_num_seqs is None else min(args.max_num_seqs, UNLIMITED),
        "max_tokens": (UNLIMITED if args.max_num_batched_tokens is None
                       else min(args.max_num_batched_tokens, UNLIMITED)),
        "caching": args.enable_prefix_caching, "chunked": args.enable_chunked_prefill,
        "fifo": args.preemption_mode == "fifo", "trtllm": args.engine_type == "trtllm",
        "worker_type": ("aggregated", "prefill", "decode").index(args.worker_type),
        "speedup": args.speedup_ratio, "decode_speedup": args.decode_speedup_ratio,
        "kv_bytes": math.nan if args.kv_bytes_per_token is None else float(args.kv_bytes_per_token),
        "kv_bandwidth": math.nan if args.kv_transfer_bandwidth is None else args.kv_transfer_bandwidth,
        "rates": args.accept_rates() or [], "timing": engine_timing(args),
        "hooks": engine_hooks(args),
    }


class VllmCore(HandoffCommands):
    """One simulated engine rank with the vLLM scheduler, or TRT-LLM's GUARANTEED_NO_EVICT by `args.engine_type`.

    Parameters
    ----------
    args : MockEngineArgs
    worker_id : int
        Appears in KV events; added to `aic_mtp_seed`, so that workers draw differently.
    capture_kv_events : bool
        Log KV events (only with prefix caching, as in the reference).
    token_seed : int
        Seed of generated tokens that a request's `output_token_ids` do not give.
    record_schedule : bool
        Fill `scheduled` and `preempted` of the pass results, and add both to their `to_dict`.
    compat : {"reference"}, optional
        KV offload with the reference's losses, see `docs/offload.md`.
    offload : OffloadWorld, optional
        The disk and the remote store that several cores share; without it the core has its own.

    Raises
    ------
    ValueError
        `args` ask for something that this core does not model; for vLLM's own scheduling (`args.scheduler_rules`) see
        `create_engine_core`.

    Notes
    -----
    A request that can never go on is ended, where the reference spins: "capacity" if it outgrew the pool,
    "over_budget" if a pass can never hold its prompt with chunked prefill off (aggregated workers only: whoever
    drives the hand-offs of a pool can cancel it), and one with ``max_output_tokens=0`` is "completed" when its prompt
    is computed.
    """

    _core: EngineCore

    def __init__(self, args: MockEngineArgs, *, worker_id: int = 0, capture_kv_events: bool = False,
                 token_seed: int = 0, record_schedule: bool = False, compat: str | None = None,
                 offload: OffloadWorld | None = None) -> None:
        if args.scheduler_rules != DEFAULT_SCHEDULER_RULES:
            raise ValueError(f"VllmCore does not schedule by scheduler_rules {args.scheduler_rules!r}; use "
                             "create_engine_core or mocker.rules.VllmRulesCore")
        if args.offload_eviction_policy == "belady":
            raise ValueError("offload_eviction_policy='belady' has to know the requests to come: it is for replays")
        args = with_blocks(args)
        self._start(args, worker_id, record_schedule)
        self._core = EngineCore(
            **engine_settings(args), seed=(args.aic_mtp_seed + worker_id) % 2**64, token_seed=token_seed % 2**64,
            real_tokens=True, record=True, capture=capture_kv_events,
            event_tokens=args.zmq_kv_events_port is not None, worker_id=worker_id)
        if args.num_g2_blocks:
            world = offload_world(args) if offload is None else offload
            assert world is not None
            self.offload = world
            attach_tiers(world, self._core, args, compat)

    def _start(self, args: MockEngineArgs, worker_id: int, record_schedule: bool) -> None:
        """Everything but the compiled core."""
        if worker_id < 0:
            raise ValueError(f"worker_id must be >= 0, got {worker_id}")
        self.args = args.copy()
        self.worker_id = worker_id
        self.record_schedule = record_schedule
        self._ids: dict[int, UUID] = {}
        self._slots: dict[UUID, tuple[int, int]] = {}
        self._places: dict[UUID, int] = {}
        self._next_handle = 0
        self._init_commands(PendingOrder())

    def receive(self, request: DirectRequest) -> UUID:
        """Queue a request; returns its UUID (a random one if it has none).

        Raises
        ------
        ValueError
            A request with this UUID is alive; nothing is changed.
        """
        uuid = self._fresh_id(request)
        self._store(uuid, self._core.submit(*self._form(request), self._places.pop(uuid, -1)), request)
        return uuid

    def _form(self, request: DirectRequest) -> tuple[int, NDArray[np.uint32], int, NDArray[np.uint32]]:
        """Handle, tokens, limit and plan of a request, as the compiled core takes them."""
        plan = request.output_token_ids
        limit = request.max_output_tokens if plan is None else len(plan)
        return (self._next_handle, np.ascontiguousarray(request.tokens, np.uint32), min(limit, UNLIMITED),
                _NO_TOKENS if plan is None else np.ascontiguousarray(plan, np.uint32))

    def _store(self, uuid: UUID, slot: int, request: DirectRequest) -> None:
        self._ids[self._next_handle] = uuid
        self._slots[uuid] = self._next_handle, slot
        self._next_handle += 1
        self._core.prefer(slot, request.priority)

    def _submit_source(self, uuid: UUID, request: DirectRequest, handoff: UUID) -> None:
        self._store(uuid, self._core.submit(*self._form(request), self._places.pop(uuid, -1)), request)
        self._core.mark_source(self._slots[uuid][1])

    def _reserve_slot(self, uuid: UUID, request: DirectRequest, handoff: UUID) -> bool:
        slot = self._core.reserve(*self._form(request))
        if slot >= 0:
            self._store(uuid, slot, request)
        return slot >= 0

    def _activate(self, uuid: UUID) -> None:
        self._core.activate(self._slots[uuid][1], self._places.pop(uuid, -1))

    def _reserve(self, handoff: UUID, request: DirectRequest, now: bool) -> SchedulerCommandEffects:
        if self.args.engine_type == "trtllm":
            raise ValueError("destination reservation is not supported for TRT-LLM")
        return super()._reserve(handoff, request, now)

    def execute_pass(self, now_ms: float, collector: TraceCollector | None = None) -> EnginePassResult:
        """Run one pass that starts at `now_ms` and tell the collector, if any.

        Raises
        ------
        ValueError
            `now_ms` is not finite.
        OverflowError
            The pass would last longer than the clock can hold.
        """
        if not math.isfinite(now_ms):
            raise ValueError(f"now_ms must be finite, got {now_ms}")
        core = self._core
        before = core.counts[5] if self.record_schedule else 0
        raw = core.run_pass(now_ms)
        events = core.take_events()
        result = EnginePassResult(now_ms, raw, self._ids, events, self.mocker_metrics(), core.forward_pass_metrics(),
                                  core.schedule(before) if self.record_schedule else None)
        held = core.held_sources()
        for handle in held:
            result.lifecycle_events.append(self._source_held(handle))
        ended: list[tuple[UUID, str]] = []
        for handle, _, terminal, _ in raw[3]:
            if terminal:
                ended.append((self._ids[handle], str(TERMINAL_NAMES[terminal])))
                if handle not in held:
                    self._forget(self._ids[handle])
        if collector is not None:
            for uuid, admission in zip(result._ids[0], raw[2], strict=True):
                collector.on_admit(uuid, now_ms, admission[1])
            token_ms = raw[0]
            for uuid, signal in zip(result._ids[1], raw[3], strict=True):
                if signal[1] >= 0:
                    collector.on_token(uuid, token_ms)
            for uuid, status in ended:
                collector.on_terminal(uuid, status)
        return result

    def execute_hidden_pass(self, now_ms: float) -> EnginePassResult:
        """Run one pass that no collector sees."""
        return self.execute_pass(now_ms)

    def drop_request(self, uuid: UUID) -> bool:
        """Cancel a request and free its blocks; False if it is not alive.

        Its place in the queue is kept until it comes to the front, for the same UUID submitted again.
        """
        entry = self._slots.get(uuid)
        if entry is None:
            return False
        status = self._status(uuid)
        if status == "held":
            self._core.release(entry[1])
        elif status in ("pending", "reserved"):
            self._core.withdraw(entry[1])
        else:
            place = self._core.drop(entry[1])
            if place >= -1:
                self._places.pop(uuid, None)
            else:
                self._places[uuid] = place
        self._forget(uuid)
        return True

    @property
    def state(self) -> SchedulerState:
        """View of the requests and queues."""
        return SchedulerState(self)

    def is_empty(self) -> bool:
        """No request waits or runs."""
        return self.num_requests() == 0

    def is_drained(self) -> bool:
        """Nothing is alive or held, and nothing moves between storage tiers."""
        return not self._slots and (self._core.tiers is None or self._core.tiers.deadline is None)

    def num_requests(self) -> int:
        """Requests that wait or run."""
        return int(self._core.counts[6])

    def mocker_metrics(self) -> MockerMetrics:
        """State between passes."""
        active, _, total, running, waiting, preemptions, _, _, _ = self._core.counts
        return MockerMetrics(0, active, total, active / total, running, waiting, preemptions)

    def drain_kv_events(self) -> list[dict[str, Any]]:
        """Take the KV events that no pass result took."""
        return self._core.take_events()

    def check_invariants(self) -> None:
        """Verify the books of the pool against the requests; AssertionError names what is wrong."""
        self._core.check()


def create_engine_core(args: MockEngineArgs, *, worker_id: int = 0, capture_kv_events: bool = False,
                       compat: str | None = None, record_schedule: bool = False) -> VllmCore | SglangCore:
    """The core for `args.engine_type`; with vLLM's `args.scheduler_rules` a `mocker.rules.VllmRulesCore`.

    Parameters
    ----------
    args, worker_id, capture_kv_events
        As in `VllmCore`.
    compat : {"reference"}, optional
        Bring back the reference's repeatable faults that this engine mends: those of KV offload (`docs/offload.md`);
        `SglangArgs.conserve_slots` mends SGLang's.
    record_schedule : bool
        Pass results say whom the pass scheduled and preempted, as in `VllmCore`. With vLLM's rules they always do,
        SGLang's core cannot.

    Raises
    ------
    ValueError
        Something that the core does not model, by name.
    """
    if compat not in (None, "reference"):
        raise ValueError(f"compat must be None or 'reference', got {compat!r}")
    offload_settings(args)
    if args.engine_type == "sglang":
        from .sglang import SglangCore

        if record_schedule:
            raise ValueError("record_schedule is not supported for engine_type 'sglang'; leave it out")
        return SglangCore(args, worker_id=worker_id, capture_kv_events=capture_kv_events)
    if args.scheduler_rules != DEFAULT_SCHEDULER_RULES:
        from .rules import VllmRulesCore

        return VllmRulesCore(args, worker_id=worker_id, capture_kv_events=capture_kv_events)
    return VllmCore(args, worker_id=worker_id, capture_kv_events=capture_kv_events, record_schedule=record_schedule,
                    compat=compat)
