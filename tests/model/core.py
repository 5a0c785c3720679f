"""One simulated engine rank, pass by pass: vLLM's policy, TRT-LLM's GUARANTEED_NO_EVICT, speculative decoding."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from . import clock
from .kv import KvPool, PrefillCost
from .rng import BurstSampler, accept_rates
from .sequence import Promote, Sequence, UseNew, ceil_div

UNLIMITED = 2**64 - 1
M64 = 2**64 - 1

WAITING, RUNNING, PREEMPTED = "waiting", "running", "preempted"

# Switches the three additions off, so that the model does what the reference does where that never ends.
REFERENCE = {"capacity_end": False, "empty_output_end": False, "over_budget_end": False}


class ArgsError(ValueError):
    """The engine arguments were refused."""


class Args:
    """The engine arguments that matter to a core, with their defaults."""

    def __init__(self, args: dict) -> None:
        def text(name: str, default: str) -> str:
            return args.get(name, default).lower()

        self.trtllm = text("engine_type", "vllm") == "trtllm"
        self.block_size: int = args.get("block_size") or (32 if self.trtllm else 64)
        blocks = args.get("num_gpu_blocks")
        self.num_blocks: int = 16384 if blocks is None else blocks
        seqs = args.get("max_num_seqs", 256)
        self.max_seqs: int = UNLIMITED if seqs is None else seqs
        budget = args.get("max_num_batched_tokens", 8192)
        self.max_tokens: int = UNLIMITED if budget is None else budget
        self.caching: bool = args.get("enable_prefix_caching", True)
        self.chunked: bool = args.get("enable_chunked_prefill", True)
        self.speedup = float(args.get("speedup_ratio", 1.0))
        self.decode_speedup = float(args.get("decode_speedup_ratio", 1.0))
        self.fifo_preemption = text("preemption_mode", "lifo") == "fifo"
        worker = text("worker_type", "aggregated")
        self.prefill_worker = worker == "prefill"
        self.decode_worker = worker == "decode"
        self.bytes_per_token: int | None = args.get("kv_bytes_per_token")
        self.bandwidth: float | None = args.get("kv_transfer_bandwidth")
        self.nextn: int | None = args.get("aic_nextn")
        self.accept_rates: str | None = args.get("aic_nextn_accept_rates")
        self.mtp_seed: int = args.get("aic_mtp_seed", 42)
        if self.nextn is not None and self.decode_speedup != 1.0:
            shown = repr(self.decode_speedup).removesuffix(".0")
            raise ArgsError(
                "Failed to validate MockEngineArgs: __all__: aic_nextn requires decode_speedup_ratio=1.0 because MTP "
                f"output acceleration is modeled by burst sampling, got {shown}"
            )


@dataclass
class Request:
    uuid: int
    sequence: Sequence
    status: str = WAITING
    computed: int = 0  # tokens whose keys and values are there
    preemptions: int = 0

    @property
    def prebuilt(self) -> bool:
        """The whole prompt is computed and allocated. (An empty prompt always is.)"""
        prompt = self.sequence.prompt_len
        return self.computed >= prompt and self.sequence.allocated >= prompt


@dataclass
class Work:
    """What a request does in this pass, as it was when it was scheduled."""

    total: int  # tokens computed
    prompt: int  # of them, prompt tokens
    prefix: int  # prompt tokens that were there before
    prompt_len: int
    sequence_len: int


@dataclass
class Pass:
    """What one pass accumulates."""

    now_ms: float
    budget: int
    scheduled: dict[int, Work] = field(default_factory=dict)
    batch_count: int = 0
    batch_isl: int = 0
    batch_prefix: int = 0
    preempted_any: bool = False
    admissions: list[list] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    ended_scheduling: list[int] = field(default_factory=list)  # capacity ends of the phases A and B
    output: list[list] = field(default_factory=list)


class ModelCore:
    """`capacity_end`, `empty_output_end` and `over_budget_end` turn on the three endings that the reference lacks.

    After a pass `terminals` says how each request that left in it ended: completed, rejected, capacity or over_budget.
    """

    def __init__(
        self,
        args: dict,
        worker_id: int = 0,
        *,
        capacity_end: bool = True,
        empty_output_end: bool = True,
        over_budget_end: bool = True,
    ) -> None:
        self.args = Args(args)
        self.capacity_end = capacity_end
        self.empty_output_end = empty_output_end
        self.over_budget_end = over_budget_end
        self.kv = KvPool(self.args.num_blocks, self.args.block_size, self.args.caching, worker_id)
        self.requests: dict[int, Request] = {}
        self.waiting: list[int] = []  # next one first; preempted ones come back to the front
        self.running: list[int] = []  # in order of admission
        self.preemptions_total = 0
        self.terminals: dict[int, str] = {}
        self.sampler: BurstSampler | None = None
        if self.args.nextn is not None:
            rates = accept_rates(self.args.nextn, self.args.accept_rates)
            self.sampler = BurstSampler(rates, (self.args.mtp_seed + worker_id) & M64)

    def is_empty(self) -> bool:
        return not self.requests

    def is_drained(self) -> bool:
        return self.is_empty()

    # ---- arrival

    def receive(self, request: dict) -> int:
        uuid = request.get("uuid")
        if uuid is None:
            uuid = random.randrange(1 << 63)
        if uuid in self.requests:
            raise ValueError(f"request {uuid} is already active")
        args = self.args
        prompt_len = len(request["tokens"])
        max_output = request["max_output_tokens"]
        planned = request.get("output_token_ids")
        if planned is not None:
            max_output = len(planned)  # the plan wins
        capacity = args.num_blocks * args.block_size
        if args.trtllm and prompt_len < capacity:
            max_output = min(max_output, capacity - prompt_len)
        sequence = Sequence(request["tokens"], max_output, planned, args.block_size, args.caching)
        self.requests[uuid] = Request(uuid, sequence)
        self.waiting.append(uuid)
        return uuid

    # ---- one pass

    def execute_pass(self, now_ms: float) -> dict:
        before = len(self.requests)
        self.terminals = {}
        p = Pass(now_ms, self.args.max_tokens)
        self._schedule_running(p)
        self._schedule_waiting(p)
        end_ms = self._run_model(p)
        return {
            "op": "pass",
            "start_ms": now_ms,
            "end_ms": end_ms,
            "completed_requests": before - len(self.requests),
            "admissions": p.admissions,
            "output": p.output,
            "lifecycle": [],
            "visibility": "PassStart",
            "kv_events": self.kv.drain_events(),
            "metrics": self._metrics(),
            "fpm": self._forward_pass_metrics(p, (end_ms - now_ms) / 1000.0),
            "accept_length": self._accept_length(p.output),
        }

    def _schedule_running(self, p: Pass) -> None:
        """Phase A. A victim taken from before position i moves the list, but i is not corrected: one is skipped."""
        i = 0
        while i < len(self.running) and p.budget > 0:
            outcome, _ = self._schedule(p, self.requests[self.running[i]], None)
            if outcome == "blocked":
                break
            if outcome == "scheduled":
                i += 1

    def _schedule_waiting(self, p: Pass) -> None:
        """Phase B. Strictly first come, first served; not at all after a preemption. The budget is not looked at."""
        while not p.preempted_any and len(self.running) < self.args.max_seqs and self.waiting and self._may_admit():
            request = self.requests[self.waiting[0]]
            if self._must_wait(request):
                break
            if request.prebuilt:
                cost = PrefillCost(request.sequence.prompt_len, request.sequence.prompt_len)
            else:
                verdict, cost = self._admission(request)
                if verdict == "wait":
                    break
                if verdict == "reject":
                    self._reject(p, request, "rejected")
                    continue
            promotion = self._promote_from_below(p, request, cost)
            if promotion == "parked":
                continue
            if promotion == "blocked":
                break
            if not request.prebuilt and self._over_budget(p, request, cost):
                self._reject(p, request, "over_budget")
                continue
            outcome, used = self._schedule(p, request, cost)
            if outcome != "scheduled" or (used == 0 and p.budget == 0):
                break

    def _run_model(self, p: Pass) -> float:
        """Phase C: prefill time, decode time, tokens. Returns the end of the pass."""
        args = self.args
        prefill_ns = 0
        if p.batch_count > 0 and not args.decode_worker:
            mean_isl, mean_prefix = p.batch_isl // p.batch_count, p.batch_prefix // p.batch_count
            prefill_ns = clock.scaled_ns(clock.predict_prefill_ms(p.batch_count, mean_isl, mean_prefix), args.speedup)
        decode_start = clock.advance(p.now_ms, prefill_ns)
        self._end_empty_outputs(p)
        ready = self._ready()
        decode_ns = 0
        if ready:
            decode_ns = self._emit_bursts(p, ready) if self.sampler is not None else self._emit_tokens(p, ready)
        if not any(token is not None for _, token, *_ in p.output):
            decode_ns = 0
        p.output += [[uuid, None, True, True, None] for uuid in p.rejected]
        p.output += [[uuid, None, True, False, None] for uuid in p.ended_scheduling]
        return clock.advance(decode_start, decode_ns)

    # ---- admission

    def _admission(self, request: Request) -> tuple[str, PrefillCost | None]:
        args, sequence = self.args, request.sequence
        if request.status == WAITING:  # a preempted request is never rejected
            footprint = sequence.to_completion_blocks() if args.trtllm else sequence.known_blocks()
            if footprint > args.num_blocks:
                return "reject", None
        cost = self.kv.prefill_cost(sequence)
        available = args.num_blocks - self.kv.active
        if args.trtllm:
            needed = self._needed_to_finish(sequence, cost)
            reserved = sum(self._needed_to_finish(self.requests[uuid].sequence, None) for uuid in self.running)
            available = max(available - reserved, 0)
        else:
            needed = max(sequence.known_blocks() - cost.active_cached_tokens // args.block_size, 0)
        return ("wait" if needed > available else "admit"), cost

    def _needed_to_finish(self, sequence: Sequence, cost: PrefillCost | None) -> int:
        """TRT-LLM: blocks still to be taken until the last token."""
        full = sequence.to_completion_blocks()
        if sequence.allocated == 0:
            cost = cost or self.kv.prefill_cost(sequence)
            return max(full - cost.active_cached_tokens // self.args.block_size, 0)
        return max(full - ceil_div(sequence.allocated, self.args.block_size), 0)

    def _reject(self, p: Pass, request: Request, status: str) -> None:
        p.rejected.append(request.uuid)
        self._free(request, request.sequence.allocated)
        self._forget(request, status)

    # ---- KV offload: what a core without it answers

    def _may_admit(self) -> bool:
        """Whether those who wait may be looked at."""
        return True

    def _must_wait(self, request: Request) -> bool:
        """Whether the request waits for room that a copy to a lower tier still takes."""
        return False

    def _promote_from_below(self, p: Pass, request: Request, cost: PrefillCost) -> str:
        """Whether the request was parked, is blocked, or (miss) goes on to be scheduled."""
        return "miss"

    def _blocked(self, attempt: Callable[[], bool], waiters: list[Request], decode: bool = False) -> bool | None:
        """What an attempt to take blocks gives; None if `waiters` must wait for a copy first."""
        return attempt()

    # ---- scheduling one request

    def _schedule(self, p: Pass, request: Request, cost: PrefillCost | None) -> tuple[str, int]:
        """Give `request` its share of the budget and the blocks for it; `cost` is given for a waiting one.

        Outcome: scheduled (with the tokens used), blocked, or preempted (this request itself).
        """
        args, sequence = self.args, request.sequence
        from_waiting = cost is not None
        cached = 0
        if request.computed == 0:
            cached = (cost or self.kv.prefill_cost(sequence)).cached_tokens
        start = request.computed + cached
        prompt_before = min(start, sequence.prompt_len)
        remaining = max(len(sequence) - start, 0)
        prompt_remaining = sequence.prompt_len - prompt_before
        if prompt_remaining > 0 and not args.chunked and prompt_remaining > p.budget:
            return "blocked", 0
        want = min(remaining, p.budget)
        if want == 0 and remaining > 0:
            return "blocked", 0

        if self._must_wait(request):
            return "blocked", 0
        target = start + want
        done = target
        while True:
            if target <= sequence.allocated:
                request.computed = done
                break
            first = sequence.blocks_for(sequence.allocated)
            blocks = sequence.blocks[first : sequence.blocks_for(target)]
            parent = sequence.blocks[first - 1] if first > 0 else None
            taken = not blocks or self._blocked(lambda: self.kv.use(blocks, parent), [request])  # noqa: B023
            if taken is None:
                done = start
                break
            if taken:
                sequence.allocated = target
                request.computed = done
                break
            victim = self._preempt()
            if victim is None:
                done = start
                break
            p.preempted_any = True
            self._undo(p, victim)
            if victim is request:
                if self._cannot_fit(victim):
                    self._end_at_capacity(victim)
                    p.ended_scheduling.append(victim.uuid)
                return "preempted", 0

        used = done - start
        if used == 0 and done < len(sequence):
            return "blocked", 0
        prompt_tokens = max(min(done, sequence.prompt_len) - prompt_before, 0)
        p.scheduled[request.uuid] = Work(used, prompt_tokens, prompt_before, sequence.prompt_len, len(sequence))
        if prompt_tokens > 0 and not args.decode_worker:
            p.batch_count += 1
            p.batch_isl += prompt_before + prompt_tokens
            p.batch_prefix += prompt_before
        if from_waiting:
            self.waiting.remove(request.uuid)
            self.running.append(request.uuid)
            request.status = RUNNING
            p.admissions.append([request.uuid, cached])
        p.budget = max(p.budget - used, 0)
        return "scheduled", used

    def _undo(self, p: Pass, victim: Request) -> None:
        """What the victim had been given in this pass goes back."""
        work = p.scheduled.pop(victim.uuid, None)
        if work is None:
            return
        p.budget += work.total
        if work.prompt > 0 and not self.args.decode_worker:
            p.batch_count = max(p.batch_count - 1, 0)
            p.batch_isl = max(p.batch_isl - work.prefix - work.prompt, 0)
            p.batch_prefix = max(p.batch_prefix - work.prefix, 0)

    # ---- leaving

    def _preempt(self) -> Request | None:
        """Newest (lifo) or oldest (fifo) running request, possibly the one that asks. TRT-LLM never preempts.

        It keeps its tokens and its promoted blocks' identities, and goes to the front of the waiting ones.
        """
        if self.args.trtllm or not self.running:
            return None
        order = self.running if self.args.fifo_preemption else self.running[::-1]
        uuid = self._victim([uuid for uuid in order if not self._must_wait(self.requests[uuid])])
        if uuid is None:
            return None
        self.running.remove(uuid)
        victim = self.requests[uuid]
        victim.status = PREEMPTED
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions_total += 1
        self._free(victim, victim.sequence.allocated)
        victim.sequence.allocated = 0
        self.waiting.insert(0, victim.uuid)
        return victim

    def _victim(self, candidates: list[int]) -> int | None:
        return candidates[0] if candidates else None

    def _free(self, request: Request, tokens: int) -> None:
        for block in request.sequence.held(tokens):
            self.kv.release(block)

    def _forget(self, request: Request, status: str) -> None:
        for queue in (self.waiting, self.running):
            if request.uuid in queue:
                queue.remove(request.uuid)
        del self.requests[request.uuid]
        self.terminals[request.uuid] = status

    # ---- ADDITION 1 to the reference, which requeues the request here and spins for ever

    def _cannot_fit(self, victim: Request) -> bool:
        """`victim` has just preempted itself. If now no block is active, it held all that was, and needed more."""
        return self.capacity_end and victim.status == PREEMPTED and self.kv.active == 0

    def _end_at_capacity(self, victim: Request) -> None:
        """It leaves the engine with the tokens it got; the preemption stays counted."""
        self._forget(victim, "capacity")

    # ---- ADDITION 2 to the reference, where a request without output stays for ever

    def _end_empty_outputs(self, p: Pass) -> None:
        """At the start of phase C, before anything is ready: what wants no token and is computed is completed."""
        if not self.empty_output_end:
            return
        for uuid in list(self.running):
            request = self.requests[uuid]
            if request.sequence.max_output == 0 and request.computed >= len(request.sequence):
                p.output.append([uuid, None, True, False, None])
                self._free(request, len(request.sequence))
                self._forget(request, "completed")

    # ---- ADDITION 3 to the reference, where such a head blocks the queue for ever

    def _over_budget(self, p: Pass, request: Request, cost: PrefillCost) -> bool:
        """Without chunking, a prompt over the whole budget in an engine that has nothing else to do.

        Not in a pool's worker: whoever drives its hand-offs can cancel the request.
        """
        if not self.over_budget_end or self.args.chunked or self.args.prefill_worker or self.args.decode_worker:
            return False
        uncached = request.sequence.prompt_len - cost.cached_tokens
        return uncached > self.args.max_tokens and not self.running and not p.scheduled

    # ---- tokens

    def _ready(self) -> list[Request]:
        ready = [self.requests[uuid] for uuid in self.running]
        return [r for r in ready if r.computed >= len(r.sequence) and r.sequence.generated < r.sequence.max_output]

    def _decode_ns(self, ready: list[Request], reserved: int = 0) -> int:
        """Predicted before any token of the pass; a prefill worker's first token comes with the prefill."""
        if self.args.prefill_worker:
            return 0
        active_tokens = (self.kv.active - reserved) * self.args.block_size
        total_tokens = self.args.num_blocks * self.args.block_size
        predicted = clock.predict_decode_ms(len(ready), active_tokens, total_tokens)
        return clock.scaled_ns(predicted, self.args.speedup * self.args.decode_speedup)

    def _emit_tokens(self, p: Pass, ready: list[Request]) -> int:
        """One token each. Who was preempted on the way gets none; who came earlier keeps its own."""
        decode_ns = self._decode_ns(ready)
        for request in ready:
            if request.status != RUNNING:
                continue
            sequence = request.sequence
            while not self._must_wait(request):
                token = sequence.next_token()
                signals = sequence.push(token)
                applied = self._blocked(lambda: self._apply(signals), [request], True)  # noqa: B023
                if applied:
                    self._emitted(p, request, token, bool(signals))
                    break
                sequence.pop()
                if applied is None:
                    break
                victim = self._preempt()
                if victim is None:
                    break
                if victim is request:
                    if self._cannot_fit(victim):
                        self._end_at_capacity(victim)
                        p.output.append([victim.uuid, None, True, False, None])
                    break
        return decode_ns

    def _apply(self, signals: list[Promote | UseNew]) -> bool:
        """Promotion never fails and is not undone; the new block may fail."""
        for signal in signals:
            if isinstance(signal, Promote):
                self.kv.promote(*signal)
            elif not self.kv.use([signal.partial]):
                return False
        return True

    def _emitted(self, p: Pass, request: Request, token: int, crossed: bool) -> bool:
        """Book a token; if it was the last one the request leaves at once, its blocks are free for later ones."""
        args, sequence = self.args, request.sequence
        completed = sequence.generated >= sequence.max_output
        delay = None
        if args.prefill_worker and completed:
            delay = clock.handoff_delay_ms(sequence.prompt_len, args.bytes_per_token, args.bandwidth)
        p.output.append([request.uuid, token, completed, False, delay])
        if completed:
            self._free(request, len(sequence))
            self._forget(request, "completed")
        elif crossed:
            sequence.allocated = len(sequence)
        return completed

    def _emit_bursts(self, p: Pass, ready: list[Request]) -> int:
        """Speculative decoding: room for the longest bursts is reserved for all, then bursts are drawn for all."""
        args = self.args
        longest = 1 if args.prefill_worker else args.nextn + 1
        if any(self._must_wait(request) for request in ready):
            return 0
        while True:
            reserved = 0
            for request in ready:
                sequence = request.sequence
                burst = min(longest, sequence.max_output - sequence.generated)
                reserved += ceil_div(len(sequence) + burst, args.block_size) - sequence.known_blocks()
            taken = self._blocked(lambda: self.kv.reserve(reserved), ready, True)  # noqa: B023
            if taken is None:
                return 0
            if taken:
                break
            victim = self._preempt()
            if victim is None:
                return 0
            if ready == [victim] and self._cannot_fit(victim):
                self._end_at_capacity(victim)
                p.output.append([victim.uuid, None, True, False, None])
            ready = self._ready()
            if not ready:
                return 0

        decode_ns = self._decode_ns(ready, reserved)
        bursts = []
        for request in ready:
            remaining = request.sequence.max_output - request.sequence.generated
            bursts.append(min(1, remaining) if args.prefill_worker else self.sampler.sample(remaining))
        for request, burst in zip(ready, bursts, strict=True):
            sequence = request.sequence
            for _ in range(burst):
                token = sequence.next_token()
                for signal in sequence.push(token):
                    if isinstance(signal, Promote):
                        self.kv.promote(*signal)
                    else:
                        self.kv.use_reserved(signal.partial)
                        reserved -= 1
                if self._emitted(p, request, token, True):
                    break
            else:
                request.computed = len(sequence) - 1
        self.kv.release_reserved(reserved)
        return decode_ns

    # ---- what an observer gets

    def _metrics(self) -> dict:
        active = self.kv.active
        return {
            "active_decode_blocks": active,
            "total_blocks": self.args.num_blocks,
            "gpu_cache_usage_perc": active / self.args.num_blocks,
            "running_requests": len(self.running),
            "waiting_requests": len(self.waiting),
            "vllm_preemptions_total": self.preemptions_total,
            "sglang_cache_hit_tokens": 0,
            "sglang_cache_total_tokens": 0,
        }

    def _forward_pass_metrics(self, p: Pass, wall_time_secs: float) -> dict:
        """Scheduled work as it was when scheduled; the queues as they are at the end of the pass."""
        prefills = [w for w in p.scheduled.values() if w.prompt > 0]
        decodes = [w.sequence_len for w in p.scheduled.values() if w.prompt == 0]
        waiting = [self.requests[uuid] for uuid in self.waiting]
        queued_prefills = [r.sequence.prompt_len for r in waiting if r.status == WAITING]
        queued_decodes = [len(r.sequence) for r in waiting if r.status == PREEMPTED]
        return {
            "num_prefill_requests": len(prefills),
            "sum_prefill_tokens": sum(w.total for w in prefills),
            "var_prefill_length": _variance([w.prompt_len for w in prefills]),
            "sum_prefill_kv_tokens": sum(w.prefix for w in prefills),
            "num_decode_requests": len(decodes),
            "sum_decode_kv_tokens": sum(decodes),
            "var_decode_kv_tokens": _variance(decodes),
            "num_queued_prefill": len(queued_prefills),
            "sum_queued_prefill_tokens": sum(queued_prefills),
            "var_queued_prefill_length": _variance(queued_prefills),
            "num_queued_decode": len(queued_decodes),
            "sum_queued_decode_kv_tokens": sum(queued_decodes),
            "var_queued_decode_kv_tokens": _variance(queued_decodes),
            "wall_time_secs": wall_time_secs,
        }

    @staticmethod
    def _accept_length(output: list[list]) -> list[int]:
        """Tokens, and the requests that they are of."""
        tokens = [uuid for uuid, token, *_ in output if token is not None]
        return [len(tokens), len(set(tokens))]


def _variance(values: list[int]) -> float:
    """Population variance, the running way."""
    mean = m2 = 0.0
    for count, value in enumerate(values, 1):
        delta = value - mean
        mean += delta / count
        m2 += delta * (value - mean)
    return m2 / len(values) if values else 0.0
