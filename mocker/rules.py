"""Scheduling by named rules: the reference's, real vLLM's, and anything between them.

`SchedulerRules` is the set of switches, `PRESETS` the named sets, `VllmRulesCore` an engine core that follows one.
Every difference between dynamo-mocker 1.3.0 and vLLM 0.33.0 that scheduling shows is one switch here, so that another
version is another set. What was compared with what is in docs/fidelity.md.
"""
from __future__ import annotations

import uuid as _uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ._engine import TERMINAL_NAMES
from ._rules_engine import PassRecord, RulesEngine
from .args import DEFAULT_SCHEDULER_RULES, FIELDS
from .commands import SchedulerCommandEffects
from .engine import UNLIMITED, AdmissionEvent, EnginePassResult, MockerMetrics, OutputSignal, VllmCore, engine_settings
from .engine_options import scheduler_conflicts, score_conflicts
from .timing import with_blocks

if TYPE_CHECKING:
    from uuid import UUID

    from .args import DirectRequest, MockEngineArgs
    from .collector import TraceCollector
    from .commands import SchedulerCommand

__all__ = ["PRESETS", "RulesPassResult", "SchedulerOptions", "SchedulerRules", "VllmRulesCore", "scheduler_options",
           "scheduler_rules"]

_NO_TOKENS = np.empty(0, np.uint32)


@dataclass(frozen=True)
class SchedulerRules:
    """Switches of the scheduler; all off is dynamo-mocker 1.3.0.

    Parameters
    ----------
    last_token : bool
        A prefix hit stops before the last known token, so a fully cached prompt that ends at a block boundary
        computes its last block again. Off: the whole prompt is reused, and admitted with nothing to compute.
    slot_at_use : bool
        The block for a sampled token is taken in the next pass, when the token is computed; a pass that is short of
        blocks then preempts first and admits nobody. Off: it is taken at once after sampling, and a victim loses the
        token that it would have had in this pass.
    last_slot : bool
        The final token never takes a block. Off: it does, and may preempt for it. (Without effect if `slot_at_use`.)
    own_copy : bool
        One look-up, at admission; blocks that turn out to have a known content are kept, so that one content may be
        held several times. A look-up finds the copy that was registered first. Off: one block a content, looked up
        whenever a block is taken or filled.
    gen_hit : bool
        After a preemption cached generated blocks are reused too. Off: hits count up to the prompt's end only.
    fill_early : bool
        A generated block can be found from the pass that computes its last token, by this pass's admissions already.
        Off: after them.
    full_only : bool
        A block can be found once all its tokens are scheduled. Off: as soon as the first one is.
    lru : bool
        Blocks that a failed allocation had picked up and gives back leave root first. Off: leaf first. (Only
        without `own_copy` does an allocation fail after it picked something up.)
    whole_tail : bool
        With chunked prefill off, a resumed request's prompt and generated tokens must fit the budget. Off: the
        prompt must.
    late : bool
        Asynchronous scheduling: a pass is planned before the tokens of the one before are seen. An ended request
        keeps its place and its blocks for one more planning, a generated block can be found a pass later, a request
        whose last token is under way is not scheduled, and a victim may be one that has ended already. Needs
        `slot_at_use`.
    charge_generated : bool
        Time, not order: generated tokens that a resumed request computes again take prefill time. Off: only prompt
        tokens do.
    """

    last_token: bool = False
    slot_at_use: bool = False
    last_slot: bool = False
    own_copy: bool = False
    gen_hit: bool = False
    fill_early: bool = False
    full_only: bool = False
    lru: bool = False
    whole_tail: bool = False
    late: bool = False
    charge_generated: bool = False

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, bool):
                raise ValueError(f"scheduler rule {name} must be True or False, got {value!r}")
        if self.late and not self.slot_at_use:
            raise ValueError("scheduler rule late needs slot_at_use: a token that is not known yet has no block")

    @property
    def bits(self) -> int:
        """The set as the compiled core takes it: bit k is field k."""
        return sum(getattr(self, f.name) << i for i, f in enumerate(fields(self)))


_VLLM = dict.fromkeys([f.name for f in fields(SchedulerRules)], True)
PRESETS: Mapping[str, SchedulerRules] = MappingProxyType({
    "dynamo-mocker-1.3.0": SchedulerRules(),
    "vllm-0.33": SchedulerRules(**{**_VLLM, "late": False}),
    "vllm-0.33-async": SchedulerRules(**_VLLM),
})
_REAL = frozenset({PRESETS["vllm-0.33"], PRESETS["vllm-0.33-async"]})


def scheduler_rules(rules: str | SchedulerRules) -> SchedulerRules:
    """The rules of a name, or what is a set of rules already.

    Raises
    ------
    ValueError
        No such name.
    """
    if isinstance(rules, SchedulerRules):
        return rules
    if rules not in PRESETS:
        raise ValueError(f"scheduler_rules must be one of {', '.join(map(repr, PRESETS))} or a SchedulerRules, "
                         f"got {rules!r}")
    return PRESETS[rules]


def _metrics(counts: tuple[int, int, int, int, int]) -> MockerMetrics:
    active, blocks, running, waiting, preemptions = counts
    return MockerMetrics(0, active, blocks, active / blocks, running, waiting, preemptions)


class RulesPassResult(EnginePassResult):
    """What one pass did, with the names of `EnginePassResult`; read off the compiled record when it is asked for."""

    __slots__ = ("_record",)

    def __init__(self, record: PassRecord) -> None:
        self._record = record

    if not TYPE_CHECKING:                      # plain attributes of the base class
        lifecycle_events = property(lambda self: [])
        router_event_visibility = property(lambda self: "PassStart")
        start_ms = property(lambda self: self._record.start_ms)
        end_ms = property(lambda self: self._record.end_ms)
        completed_requests = property(lambda self: self._record.completed)
        accept_length_output_tokens = property(lambda self: self._record.made)
        accept_length_decode_forwards = property(lambda self: self._record.made_by)
        kv_events = property(lambda self: self._record.kv_events)
        mocker_metrics = property(lambda self: _metrics(self._record.counts))
        _fpm = property(lambda self: self._record.forward_pass_metrics)

    @property
    def tokens_ms(self) -> float:
        """When the tokens of `output_signals` were made: the end of the pass, or (asynchronous) of the one before."""
        return self._record.tokens_ms

    @property
    def admissions(self) -> list[AdmissionEvent]:
        """Admissions in order."""
        return [AdmissionEvent(uuid, reused) for uuid, reused in self._record.admissions()]

    @property
    def output_signals(self) -> list[OutputSignal]:
        """Tokens and endings in the order they were made."""
        return [OutputSignal(uuid, token, end != 0, end in (2, 4), handoff_ms, TERMINAL_NAMES[end])
                for uuid, token, end, handoff_ms in self._record.signals()]

    @property
    def scheduled(self) -> list[tuple[UUID, int]]:
        """The batch in its order: requests, with the tokens that this pass computes of each."""
        return self._record.scheduled()

    @property
    def preempted(self) -> list[UUID]:
        """Requests that lost their blocks in this pass, in order."""
        return self._record.preempted()

    def to_dict(self) -> dict[str, Any]:
        """The recorded form of a pass; UUIDs as their integer value."""
        return {
            "op": "pass", "start_ms": self.start_ms, "end_ms": self.end_ms,
            "completed_requests": self.completed_requests,
            "admissions": [[uuid.int, reused] for uuid, reused in self._record.admissions()],
            "output": [[uuid.int, token, end != 0, end in (2, 4), handoff_ms]
                       for uuid, token, end, handoff_ms in self._record.signals()],
            "lifecycle": list(self.lifecycle_events), "visibility": self.router_event_visibility,
            "kv_events": self.kv_events, "metrics": self.mocker_metrics.to_dict(), "fpm": self.fpm.to_dict(),
            "accept_length": [self.accept_length_output_tokens, self.accept_length_decode_forwards],
            "scheduled": [[uuid.int, tokens] for uuid, tokens in self.scheduled],
            "preempted": [uuid.int for uuid in self.preempted],
        }


def _count(name: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
    return int(value)


@dataclass(frozen=True)
class SchedulerOptions:
    """vLLM's options beside the rules, checked against the engine arguments; what `RulesEngine` takes."""

    rules: SchedulerRules
    by_priority: bool
    gate: bool
    threshold: int
    watermark_blocks: int
    max_model_len: int | None
    usable_blocks: int

    def configure(self, engine: RulesEngine, *, skip_own: bool = False, strict: bool = False) -> None:
        """Set up an engine that was made of the same arguments; the flags are those of `RulesEngine.configure`."""
        engine.configure(rules=self.rules.bits, by_priority=self.by_priority, gate=self.gate,
                         threshold=self.threshold, watermark=self.watermark_blocks, skip_own=skip_own,
                         strict=strict)


def scheduler_options(args: MockEngineArgs, rules: str | SchedulerRules | None = None, *,
                      scheduling_policy: str | None = None, long_prefill_token_threshold: int | None = None,
                      max_model_len: int | None = None, watermark: float | None = None,
                      reserve_full_isl: bool | None = None, null_block: bool = False) -> SchedulerOptions:
    """Check rules and options against the engine arguments.

    Parameters and errors are those of `VllmRulesCore`; what is None is taken from `args`, the rules too.
    """
    chosen = scheduler_rules(args.scheduler_rules if rules is None else rules)
    if scheduling_policy is None:
        scheduling_policy = args.vllm_scheduling_policy
    elif scheduling_policy not in ("fcfs", "priority"):
        raise ValueError(f"scheduling_policy must be 'fcfs' or 'priority', got {scheduling_policy!r}")
    if long_prefill_token_threshold is None:
        long_prefill_token_threshold = args.long_prefill_token_threshold
    threshold = _count("long_prefill_token_threshold", long_prefill_token_threshold, 0)
    longest = args.max_model_len if max_model_len is None else _count("max_model_len", max_model_len, 2)
    if watermark is None:
        watermark = args.watermark
    elif not 0.0 <= watermark < 1.0:
        raise ValueError(f"watermark must be in [0, 1), got {watermark}")
    gate = args.reserve_full_isl if reserve_full_isl is None else bool(reserve_full_isl)
    usable = args.num_gpu_blocks - bool(null_block)
    if usable < 1:
        raise ValueError("null_block leaves no usable block: num_gpu_blocks must be at least 2")
    switched = chosen != PRESETS[DEFAULT_SCHEDULER_RULES]
    values = {name: getattr(args, name) for name in FIELDS}
    values.update(vllm_scheduling_policy=scheduling_policy, long_prefill_token_threshold=threshold,
                  max_model_len=longest)
    problems = scheduler_conflicts(values, vllm=switched, preset=chosen in _REAL) + score_conflicts(values)
    if problems:
        raise ValueError("\n".join(text for _, text in problems))
    if switched and longest is None and not args.enable_chunked_prefill and args.max_num_batched_tokens is not None:
        longest = max(args.max_num_batched_tokens, 2)
    return SchedulerOptions(chosen, scheduling_policy == "priority", gate, min(threshold, UNLIMITED),
                            int(watermark * (usable + 1)), None if longest is None else min(longest, UNLIMITED), usable)


class VllmRulesCore(VllmCore):
    """One simulated engine rank that schedules by rules; used as `VllmCore` is.

    Parameters
    ----------
    args : MockEngineArgs
        `engine_type` "vllm". `num_gpu_blocks` is the usable pool: vLLM's own argument of that name counts its null
        block too, which no request can have (see `null_block`).
    rules : str or SchedulerRules, optional
        A name in `PRESETS` or a set of switches; if not given, `args.scheduler_rules`, or "vllm-0.33" where that is
        the reference's.
    worker_id, capture_kv_events, token_seed
        As in `VllmCore`. A block's `stored` event comes with the first copy of its content, its `removed` event when
        the last copy goes.
    scheduling_policy : {"fcfs", "priority"}, optional
        "priority": the queue is ordered by a request's `priority` (smaller first), then by arrival; the victim is the
        running request that is last in this order. This and the next four, if not given, are those of `args`, where
        this one is called `vllm_scheduling_policy`.
    long_prefill_token_threshold : int, optional
        Most tokens of one request in a pass while there is another; 0 for no cap.
    max_model_len : int, optional
        A prompt must be shorter; a request ends when prompt and output are so long. With chunked prefill off vLLM
        does not start with more than the budget, which is then the default.
    watermark : float, optional
        Part of the pool (null block included) that an admission leaves free while somebody runs.
    reserve_full_isl : bool, optional
        Admit a request only if its whole known sequence fits. Off: if its first chunk does.
    null_block : bool
        `num_gpu_blocks` counts the null block, as vLLM's argument does: one is set aside.

    Raises
    ------
    ValueError
        Bad options, something that the rules do not model, or a combination with which vLLM does not start.

    Notes
    -----
    Nothing gets stuck: a request whose known tokens need more than the whole pool ends "rejected" if it never ran,
    "capacity" if it outgrew the pool, where vLLM's queue would wait for ever; "over_budget" is as in `VllmCore`.
    With the rule `late` the tokens of a pass are reported by the next one.
    """

    _core: RulesEngine

    def __init__(self, args: MockEngineArgs, rules: str | SchedulerRules | None = None, *, worker_id: int = 0,
                 capture_kv_events: bool = False, token_seed: int = 0, scheduling_policy: str | None = None,
                 long_prefill_token_threshold: int | None = None, max_model_len: int | None = None,
                 watermark: float | None = None, reserve_full_isl: bool | None = None,
                 null_block: bool = False) -> None:
        if rules is None and args.scheduler_rules == DEFAULT_SCHEDULER_RULES:
            rules = "vllm-0.33"
        args = with_blocks(args)
        options = scheduler_options(
            args, rules, scheduling_policy=scheduling_policy,
            long_prefill_token_threshold=long_prefill_token_threshold, max_model_len=max_model_len,
            watermark=watermark, reserve_full_isl=reserve_full_isl, null_block=null_block)
        if options.usable_blocks != args.num_gpu_blocks:
            args = args.replace(num_gpu_blocks=options.usable_blocks)
        self._start(args, worker_id, record_schedule=True)
        self.rules = options.rules
        self.options = options
        self._core = RulesEngine(
            **engine_settings(args), seed=worker_id % 2**64, token_seed=token_seed % 2**64, real_tokens=True,
            record=True, capture=capture_kv_events, event_tokens=args.zmq_kv_events_port is not None,
            worker_id=worker_id)
        options.configure(self._core)

    def receive(self, request: DirectRequest) -> UUID:
        """Queue a request; returns its UUID (a random one if it has none).

        Raises
        ------
        ValueError
            A request with this UUID is alive, or the prompt is empty or as long as `max_model_len`; nothing is
            changed.
        """
        uuid = request.uuid if request.uuid is not None else _uuid.uuid4()
        if uuid in self._slots:
            raise ValueError(f"request {uuid} is already active")
        prompt = len(request.tokens)
        if prompt == 0:
            raise ValueError(f"request {uuid} has an empty prompt")
        plan = request.output_token_ids
        limit = request.max_output_tokens if plan is None else len(plan)
        longest = self.options.max_model_len
        if longest is not None:
            if prompt >= longest:
                raise ValueError(f"request {uuid}: the prompt of {prompt} tokens leaves no room for output within "
                                 f"max_model_len {longest}")
            limit = min(limit, longest - prompt)
        handle, slot = self._core.submit_owned(
            uuid, np.ascontiguousarray(request.tokens, np.uint32), min(limit, UNLIMITED),
            _NO_TOKENS if plan is None else np.ascontiguousarray(plan, np.uint32), self._places.pop(uuid, -1),
            request.priority)
        self._ids[handle] = uuid
        self._slots[uuid] = handle, slot
        return uuid

    def apply_command(self, command: SchedulerCommand,
                      allow_destination_admission: bool = True) -> SchedulerCommandEffects:
        """Submit a request; `ValueError` for the commands of hand-off, which these rules do not model."""
        if command.op != "submit" or command.request is None:
            raise ValueError(f"scheduler rules do not model hand-off between workers, got {command.op!r}")
        return SchedulerCommandEffects(command.op, ("submitted", self.receive(command.request)))

    def execute_pass(self, now_ms: float, collector: TraceCollector | None = None) -> RulesPassResult:
        """Run one pass that starts at `now_ms` and tell the collector, if any; errors as in `VllmCore`."""
        record = self._core.run_owned(now_ms)
        for handle, uuid, _ in record.ended:
            del self._ids[handle], self._slots[uuid]
        if collector is not None:
            for uuid, reused in record.admissions():
                collector.on_admit(uuid, now_ms, reused)
            for uuid, token, _, _ in record.signals():
                if token is not None:
                    collector.on_token(uuid, record.tokens_ms)
            for _, uuid, end in record.ended:
                collector.on_terminal(uuid, str(TERMINAL_NAMES[end]))
        return RulesPassResult(record)

    @property
    def requests_under_way(self) -> int:
        """Asynchronous scheduling: requests in the batch whose outcome is not seen yet."""
        return self._core.under_way
