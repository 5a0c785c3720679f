"""The SGLang engine core as an object: submit requests, apply hand-off commands, run passes, read the results.

Answers to `scheduler/sglang/core.rs`; result classes are those of `mocker.engine`. The work is done in compiled code;
a call here costs a few microseconds.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ._engine import TERMINAL_NAMES
from ._sglang_engine import SglangEngine
from .args import DirectRequest, MockEngineArgs, SglangArgs
from .commands import HandoffCommands
from .engine import UNLIMITED, EnginePassResult, MockerMetrics, engine_hooks
from .timing import engine_timing, with_blocks

if TYPE_CHECKING:
    from uuid import UUID

    from numpy.typing import NDArray

    from .collector import TraceCollector

    _Form = tuple[int, NDArray[np.uint32], int, NDArray[np.uint32], int, int]

_NO_TOKENS = np.empty(0, np.uint32)


@dataclass(frozen=True)
class SglangRequestState:
    """One request in a core: its tokens and how often it was retracted.

    `status` is "waiting", "running", "preempted", "prebuilt" (destination activated), "held" (source completed),
    "pending" (destination without reservation) or "reserved".
    """

    uuid: UUID
    status: str
    num_input_tokens: int
    generated_tokens: int
    max_output_tokens: int
    num_computed_tokens: int
    num_allocated_tokens: int
    num_preemptions: int


class SglangState(Mapping["UUID", SglangRequestState]):
    """Read-only view of a core's requests by UUID; `waiting` and `running` are UUIDs in queue order."""

    def __init__(self, core: SglangCore) -> None:
        self._owner = core

    @property
    def waiting(self) -> list[UUID]:
        """Waiting requests, the next to be admitted first; activated destinations before all others."""
        return [self._owner._ids[h] for h in self._owner._core.queue(False)]

    @property
    def running(self) -> list[UUID]:
        """Running requests in the order they began."""
        return [self._owner._ids[h] for h in self._owner._core.queue(True)]

    @property
    def counts(self) -> dict[str, Any]:
        """Blocks, tokens and requests, the new-token ratio, and what retraction leaked and freed twice."""
        return self._owner._core.counts

    def __getitem__(self, uuid: UUID) -> SglangRequestState:
        r = self._owner._core.request(self._owner._slots[uuid][1])
        return SglangRequestState(uuid, r["status"], r["prompt"], r["generated"], r["limit"], r["computed"],
                                  r["allocated"], r["preemptions"])

    def __iter__(self) -> Iterator[UUID]:
        return iter(self._owner._slots)

    def __len__(self) -> int:
        return len(self._owner._slots)


def sglang_settings(args: MockEngineArgs) -> dict[str, Any]:
    """Arguments of the compiled core that follow from `args` (everything but seeds and what to record).

    Raises
    ------
    ValueError
        The arguments ask for something that this engine does not model.
    """
    if args.engine_type != "sglang":
        raise ValueError(f"engine_type {args.engine_type!r} is not supported by SglangCore; use 'sglang'")
    s = args.sglang if args.sglang is not None else SglangArgs()

    def bound(value: int | None, default: int) -> int:
        return min(default if value is None else value, UNLIMITED)

    total = args.block_size * args.num_gpu_blocks
    if total > 2**31 - 1:
        raise ValueError(f"num_gpu_blocks * block_size must be at most {2**31 - 1} tokens, got {total}")
    conservativeness = 1.0 if s.schedule_conservativeness is None else s.schedule_conservativeness
    if not math.isfinite(conservativeness):
        raise ValueError(f"sglang.schedule_conservativeness must be finite, got {conservativeness}")
    return {
        "page": args.block_size, "total": total, "max_seqs": bound(args.max_num_seqs, UNLIMITED),
        "max_prefill": bound(s.max_prefill_tokens, 16384), "chunk": bound(s.chunked_prefill_size, 8192),
        "clip": bound(s.clip_max_new_tokens, 4096), "lpm": s.schedule_policy == "lpm",
        "conserve": s.conserve_slots, "conservativeness": conservativeness,
        "worker_type": ("aggregated", "prefill", "decode").index(args.worker_type),
        "speedup": args.speedup_ratio, "decode_speedup": args.decode_speedup_ratio,
        "kv_bytes": math.nan if args.kv_bytes_per_token is None else float(args.kv_bytes_per_token),
        "kv_bandwidth": math.nan if args.kv_transfer_bandwidth is None else args.kv_transfer_bandwidth,
        "rates": args.accept_rates() or [], "timing": engine_timing(args), "hooks": engine_hooks(args),
    }


class SglangCore(HandoffCommands):
    """One simulated engine rank with the SGLang scheduler.

    Parameters
    ----------
    args : MockEngineArgs
    worker_id : int
        Appears in KV events; added to `aic_mtp_seed`, so that workers draw differently.
    capture_kv_events : bool
        Log KV events.

    Notes
    -----
    A request that can never go on is ended, where the reference spins: "rejected" if it never fits the pool,
    "capacity" if it outgrew it, "over_budget" if no pass can hold its chunk, and one with ``max_output_tokens=0`` is
    "completed" when its prompt is computed. While a hand-off is under way nobody is ended for want of memory, since
    its commands may free some.
    """

    _core: SglangEngine

    def __init__(self, args: MockEngineArgs, *, worker_id: int = 0, capture_kv_events: bool = False) -> None:
        if worker_id < 0:
            raise ValueError(f"worker_id must be >= 0, got {worker_id}")
        args = with_blocks(args)
        self.args = args.copy()
        self.worker_id = worker_id
        self._core = SglangEngine(
            **self._settings(self.args), seed=(args.aic_mtp_seed + worker_id) % 2**64, real_tokens=True, record=True,
            capture=capture_kv_events, worker_id=worker_id)
        self._ids: dict[int, UUID] = {}
        self._slots: dict[UUID, tuple[int, int]] = {}
        self._init_commands()
        self._numbers: dict[UUID, int] = {}                # hand-off -> its number in the compiled queue
        self._next_number = 0
        self._next_handle = 0

    def _settings(self, args: MockEngineArgs) -> dict[str, Any]:
        """Arguments of the compiled core; a subclass may change some."""
        return sglang_settings(args)

    # -- requests and commands ----------------------------------------------------------------------------------------

    def receive(self, request: DirectRequest) -> UUID:
        """Queue a request; returns its UUID (a random one if it has none).

        Raises
        ------
        ValueError
            A request with this UUID is alive; nothing is changed.
        """
        uuid = self._fresh_id(request)
        self._store(uuid, self._core.submit(*self._form(uuid, request)), request)
        return uuid

    def _form(self, uuid: UUID, request: DirectRequest) -> _Form:
        plan = request.output_token_ids
        limit = request.max_output_tokens if plan is None else len(plan)
        return (self._next_handle, np.ascontiguousarray(request.tokens, np.uint32), min(limit, UNLIMITED),
                _NO_TOKENS if plan is None else np.ascontiguousarray(plan, np.uint32), uuid.int >> 64,
                uuid.int & (2**64 - 1))

    def _store(self, uuid: UUID, slot: int, request: DirectRequest) -> None:
        self._ids[self._next_handle] = uuid
        self._slots[uuid] = self._next_handle, slot
        self._next_handle += 1
        self._core.prefer(slot, request.priority)

    def _number(self, handoff: UUID) -> int:
        """Number of a hand-off for the compiled queue; the same as long as the queue may remember it."""
        number = self._numbers.get(handoff)
        if number is None:
            if not self._destinations:
                self._numbers.clear()
            number = self._numbers[handoff] = self._next_number
            self._next_number += 1
        return number

    def _submit_source(self, uuid: UUID, request: DirectRequest, handoff: UUID) -> None:
        self._store(uuid, self._core.submit(*self._form(uuid, request), self._number(handoff)), request)

    def _reserve_slot(self, uuid: UUID, request: DirectRequest, handoff: UUID) -> bool:
        slot = self._core.reserve(*self._form(uuid, request), self._number(handoff))
        if slot >= 0:
            self._store(uuid, slot, request)
        return slot >= 0

    def drop_request(self, uuid: UUID) -> bool:
        """Cancel a request, wherever it is, and free what it holds; False if it is not alive."""
        if uuid not in self._slots:
            return False
        self._core.drop(self._slots[uuid][1])
        self._forget(uuid)
        return True

    # -- passes -------------------------------------------------------------------------------------------------------

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
        raw = core.run_pass(now_ms)
        metrics = self._metrics(*core.cache_hits())
        result = EnginePassResult(now_ms, raw, self._ids, core.take_events(), metrics, core.forward_pass_metrics())
        result.router_event_visibility = "PassEnd"
        held = core.held_sources()
        for handle in held:
            result.lifecycle_events.append(self._source_held(handle))
        ended: list[tuple[UUID, str]] = []
        for handle, _, terminal, _ in raw[3]:
            if terminal:
                uuid = self._ids[handle]
                if handle not in held:
                    self._forget(uuid)
                ended.append((uuid, str(TERMINAL_NAMES[terminal])))
        if collector is not None:
            for event in result.admissions:
                collector.on_admit(event.uuid, now_ms, event.reused_input_tokens)
            for signal in result.output_signals:
                if signal.token_id is not None:
                    collector.on_token(signal.uuid, result.end_ms)
            for uuid, status in ended:
                collector.on_terminal(uuid, status)
        return result

    def execute_hidden_pass(self, now_ms: float) -> EnginePassResult:
        """Run one pass that no collector sees."""
        return self.execute_pass(now_ms)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> SglangState:
        """View of the requests and queues."""
        return SglangState(self)

    def is_empty(self) -> bool:
        """No request waits or runs; hand-offs may still hold memory."""
        return self.num_requests() == 0

    def is_drained(self) -> bool:
        """Nothing is alive or held."""
        return not self._slots

    def num_requests(self) -> int:
        """Requests that wait or run."""
        return self._core.count

    def _metrics(self, hit: int, total: int) -> MockerMetrics:
        c = self._core.counts
        waiting = c["waiting"] + c["prebuilt"] + c["pending"] + c["reserved"]
        return MockerMetrics(0, c["active_blocks"], c["total_blocks"], c["active_blocks"] / c["total_blocks"],
                             c["running"], waiting, 0, hit, total)

    def mocker_metrics(self) -> MockerMetrics:
        """State between passes."""
        return self._metrics(0, 0)

    def drain_kv_events(self) -> list[dict[str, Any]]:
        """Take the KV events that no pass result took."""
        return self._core.take_events()

    def check_invariants(self) -> None:
        """Verify the books of tree and pool against the requests; AssertionError names what is wrong."""
        self._core.check()
