"""The models with scores of users: who is preempted and who is admitted."""

import math
from collections.abc import Callable
from typing import Any

from .core import ModelCore, Request
from .sequence import ceil_div
from .sglang import Request as SglangRequest
from .sglang import SglangModel
from .vllm_rules import Request as RulesRequest
from .vllm_rules import RulesModel

Score = Callable[..., float] | None


def to_front(waiting: list, score: Callable[[Any], float]) -> bool:
    """Bring the entry with the lowest score to the front; False if there is none below infinity."""
    scores = [score(entry) for entry in waiting]
    best = scores.index(min(scores))
    if scores[best] == math.inf:
        return False
    waiting.insert(0, waiting.pop(best))
    return True


class ScoredCore(ModelCore):
    """`ModelCore` whose choices are `mocker.hooks.VictimScore` and `AdmissionScore` of the functions given."""

    def __init__(self, args: dict, worker_id: int = 0, *, victim: Score, admission: Score) -> None:
        super().__init__(args, worker_id)
        self.victim, self.admission = victim, admission
        self.told: dict[int, tuple[int, float]] = {}  # uuid -> number of the submission, when it was made
        self.end_ms = self.now_ms = 0.0

    def receive(self, request: dict) -> int:
        uuid = super().receive(request)
        self.told[uuid] = len(self.told), self.end_ms
        return uuid

    def execute_pass(self, now_ms: float) -> dict:
        self.now_ms = now_ms
        step = super().execute_pass(now_ms)
        self.end_ms = step["end_ms"]
        return step

    def _may_admit(self) -> bool:
        return self.admission is None or to_front(self.waiting, lambda uuid: self._waits(self.requests[uuid]))

    def _waits(self, request: Request) -> float:
        number, arrived = self.told[request.uuid]
        s = request.sequence
        cached = s.prompt_len if request.prebuilt else self.kv.prefill_cost(s).cached_tokens
        return self.admission(number, int((self.now_ms - arrived) * 1000.0), s.prompt_len, cached, s.generated,
                              s.max_output, 0, len(self.running), self.args.num_blocks - self.kv.active)

    def _victim(self, candidates: list[int]) -> int | None:
        if self.victim is None:
            return super()._victim(candidates)
        return min(candidates, key=lambda uuid: self._runs(self.requests[uuid]), default=None)

    def _runs(self, request: Request) -> float:
        s = request.sequence
        return self.victim(s.prompt_len, s.generated, s.max_output, request.preemptions,
                           ceil_div(s.allocated, self.args.block_size))


class ScoredRules(RulesModel):
    """The same of `RulesModel`, where scores of who waits are told neither a number nor a time."""

    def __init__(self, rules: dict[str, bool], *, victim: Score, admission: Score, **options: object) -> None:
        super().__init__(rules, **options)
        self.victim, self.admission = victim, admission

    def _may_admit(self) -> bool:
        return self.admission is None or to_front(self.waiting, self._waits)

    def _waits(self, r: RulesRequest) -> float:
        return self.admission(None, None, r.prompt, self._lookup(r)[1], r.gen, len(r.out), r.priority,
                              len(self.running), self.pool.capacity - self.pool.active)

    def _victim(self) -> RulesRequest:
        if self.victim is None:
            return super()._victim()
        if self.by_priority:
            order = sorted(self.running, key=lambda r: (r.priority, r.order), reverse=True)
        else:
            order = self.running if self.fifo else self.running[::-1]
        return min(order, key=lambda r: self.victim(r.prompt, r.gen, len(r.out), r.preemptions, len(r.held)))


class ScoredSglang(SglangModel):
    """The same of `SglangModel`; a prompt that is being computed in chunks stays first."""

    def __init__(self, args: dict, worker_id: int = 0, *, victim: Score, admission: Score) -> None:
        super().__init__(args, worker_id)
        self.victim, self.admission = victim, admission
        self.told: dict[int, tuple[int, float]] = {}
        self.retracted: dict[int, int] = {}
        self.end_ms = self.now_ms = 0.0

    def receive(self, request: dict) -> None:
        super().receive(request)
        self.told[request["uuid"]] = len(self.told), self.end_ms

    def execute_pass(self, now: float) -> dict:
        self.now_ms = now
        step = super().execute_pass(now)
        self.end_ms = step["end_ms"]
        return step

    def _may_admit(self) -> bool:
        return self.admission is None or bool(self.waiting[0].slots) or to_front(self.waiting, self._waits)

    def _waits(self, r: SglangRequest) -> float:
        number, arrived = self.told[r.uuid]
        free = (len(self.tree.free) + self.tree.evictable) // self.page
        return self.admission(number, int((self.now_ms - arrived) * 1000.0), len(r.prompt),
                              self.tree.match_length(r.text[:self._floor(len(r.text))]), len(r.outputs), len(r.plan),
                              0, len(self.running), free)

    def _victim(self) -> SglangRequest:
        if self.victim is None:
            return super()._victim()
        chosen = min(self.running, key=lambda r: (self._runs(r), len(r.outputs)))
        self.retracted[chosen.uuid] = self.retracted.get(chosen.uuid, 0) + 1
        return chosen

    def _runs(self, r: SglangRequest) -> float:
        return self.victim(len(r.prompt), len(r.outputs), len(r.plan), self.retracted.get(r.uuid, 0),
                           r.reserved // self.page)
