"""Routers on their own: feed KV events, ask for a choice and its scores; and the policies that a replay can use.

A policy says how a worker is chosen, and its text says what it needs to know. :class:`Router` runs any policy outside
a replay; :class:`KvRouter` is the KV-aware one. Both do what a replay does, with the same compiled code.

>>> router = KvRouter(block_size=4, workers=2, tie_break="lowest")
>>> router.choose("a", [1, 2, 3, 4, 5]).worker
0
>>> router.choose("b", [9, 9, 9, 9, 9]).worker
1
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._hash import compute_block_hash_for_seq, xxh3_64
from ._router import QueueRejection
from .router_config import KvRouterConfig
from .router_policy import (
    DEFAULT_BUDGET,
    Estimator,
    KvAware,
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    RandomChoice,
    RequestView,
    RoundRobin,
    RouteFunction,
    RoutingPolicy,
    UserFunction,
    WorkerView,
    routing_policy,
)

__all__ = [
    "Decision",
    "KvAware",
    "KvRouter",
    "LeastLoaded",
    "PowerOfTwo",
    "PrefixAffinity",
    "QueueRejection",
    "RandomChoice",
    "RequestView",
    "RoundRobin",
    "Router",
    "RoutingPolicy",
    "Score",
    "UserFunction",
    "WorkerLoad",
    "WorkerView",
    "routing_policy",
]

HASH_SEED = 1337
_LOWER = {"host_pinned": 1, "disk": 2, "external": 3}
Worker = int | tuple[int, int]
"""A worker's id, or (worker id, data-parallel rank)."""


# --- routers outside a replay ----------------------------------------------------------------------------------------


class Score(NamedTuple):
    """Parts of the cost of one worker for one request; the lowest cost wins."""

    overlap_blocks: int
    """Leading prompt blocks in the worker's cache."""
    active_prefill_tokens: int
    """Uncached prompt tokens of requests that are in their prefill there."""
    active_blocks: int
    """Distinct prompt blocks of requests in flight there."""
    new_blocks: int
    """Prompt blocks of this request that are not among them."""
    cost: float
    host_blocks: int = 0
    """Blocks in the worker's host tier that follow the cached ones; 0 if the router does not look there."""
    disk_blocks: int = 0
    """Blocks on disk or in a remote store that follow these."""


class WorkerLoad(NamedTuple):
    """What a router knows of one worker's load."""

    eligible: bool
    """Whether it may be chosen."""
    requests: int
    """Requests in flight."""
    prompt_tokens: int
    """Their prompt tokens."""
    active_prefill_tokens: int
    active_blocks: int
    cached_blocks: int


@dataclass(frozen=True)
class Decision:
    """What became of a request.

    Attributes
    ----------
    request_id : hashable
        The caller's id.
    worker : int, tuple or None
        Where it goes; None if it waits in the router.
    overlap_blocks : int
        Leading prompt blocks in that worker's cache when the request arrived.
    scores : dict
        The cost of each worker at that moment (policy "kv"; empty for the others and for requests that waited).
    """

    request_id: Hashable
    worker: Worker | None
    overlap_blocks: int
    scores: Mapping[Worker, Score]


class _Known:
    """One worker: its number in the core, and the keys of the blocks that its events named."""

    def __init__(self, number: int, name: Worker) -> None:
        self.number, self.name = number, name
        self.keys: dict[int, int] = {}
        self.lower: dict[str, set[int]] = {tier: set() for tier in _LOWER}


def _child(parent: int, local: int) -> int:
    return xxh3_64(struct.pack("<QQ", parent, local), HASH_SEED)


def _identity(worker: Worker) -> tuple[int, int]:
    """Give (worker id, rank) of a worker as the caller writes it."""
    if isinstance(worker, tuple):
        first, rank = worker
        return operator.index(first), operator.index(rank)
    return operator.index(worker), 0


class Router:
    """A router with any policy, driven by hand.

    Parameters
    ----------
    policy : str, RoutingPolicy or callable
        See :func:`routing_policy`.
    block_size : int
        Tokens a block.
    workers : int or iterable
        A number of workers, or their ids: integers, or pairs of worker id and data-parallel rank.
    tie_break : {"random", "lowest"}
        Which of equally good workers is chosen; "lowest" goes by id, then rank.
    seed : int
        Of all random choices: equal calls give equal choices.
    max_num_batched_tokens : int or None
        Token budget of a worker's pass, which the queue threshold is a multiple of.
    model_name : str, optional
        Picks a model's queues in the policy file.
    prefill_estimator : callable, optional
        ``(uncached tokens, cached tokens) -> seconds or None`` of a prefill. With it the active prefill tokens of a
        worker melt as time goes on.
    """

    def __init__(
        self,
        policy: str | RoutingPolicy | RouteFunction = "kv",
        block_size: int = 64,
        workers: int | Iterable[Worker] = 1,
        *,
        tie_break: str = "random",
        seed: int = 0,
        max_num_batched_tokens: int | None = DEFAULT_BUDGET,
        model_name: str | None = None,
        prefill_estimator: Estimator | None = None,
    ) -> None:
        self.policy = routing_policy(policy)
        self.block_size = operator.index(block_size)
        self._workers: dict[tuple[int, int], _Known] = {}
        self._by_number: list[_Known] = []
        self._rows: dict[Hashable, int] = {}
        self._ids: dict[int, Hashable] = {}
        self._next_row = 0
        self._named: dict[int, int] = {}       # keys of all blocks that events named, for parents that are gone
        options: dict[str, Any] = {}
        if isinstance(self.policy, UserFunction):
            options["function"] = self._call
        self._core = self.policy.core(
            self.block_size, 0, max_num_batched_tokens=max_num_batched_tokens, tie_break=tie_break, seed=seed,
            model_name=model_name, prefill_estimator=prefill_estimator, **options,
        )
        for worker in range(workers) if isinstance(workers, int) else workers:
            self._add(worker)
        self._sort()

    # --- workers

    def add_worker(self, worker: Worker, now_ms: float = 0.0) -> list[Decision]:
        """Let a worker be chosen.

        What is known of a worker that was removed but not finalised still holds.

        Returns
        -------
        list of Decision
            Requests that waited and go now.

        Raises
        ------
        ValueError
            If it may be chosen already.
        """
        self._add(worker)
        self._sort()
        return self._drained(now_ms)

    def _add(self, worker: Worker) -> None:
        identity = _identity(worker)
        known = self._workers.get(identity)
        if known is None:
            known = self._workers[identity] = _Known(len(self._by_number), worker)
            self._by_number.append(known)
        if not self._core.add_worker(known.number):
            raise ValueError(f"router worker {worker} already exists")

    def _sort(self) -> None:
        """Let ties go by id, whenever a worker came."""
        self._core.sort_workers([self._workers[identity].number for identity in sorted(self._workers)])

    def remove_worker(self, worker: Worker) -> None:
        """Do not choose a worker any more; its requests and blocks stay known until it is finalised."""
        self._core.remove_worker(self._known(worker).number)

    def finalize_worker(self, worker: Worker) -> None:
        """Forget the requests and blocks of a worker that was removed."""
        known = self._known(worker)
        self._core.remove_worker(known.number)
        self._core.finalize_worker(known.number)
        known.keys.clear()
        for blocks in known.lower.values():
            blocks.clear()
        for request_id in [id_ for id_, row in self._rows.items() if not self._core.knows(row)]:
            self._forget(request_id)

    def _known(self, worker: Worker) -> _Known:
        known = self._workers.get(_identity(worker))
        if known is None:
            raise ValueError(f"router worker {worker} does not exist")
        return known

    # --- KV events

    def apply_event(self, worker_id: int | None, event: Mapping[str, Any]) -> None:
        """Apply one KV event.

        Parameters
        ----------
        worker_id : int or None
            The worker that sends it; None takes the event's own ``worker_id``.
        event : mapping
            The reference's JSON form: ``{"event_id", "data", "dp_rank"}``, bare or as the ``"event"`` of
            ``{"worker_id", "storage_tier", "event"}``. Events of other tiers than "device" ("host_pinned", "disk",
            "external") are ignored, unless the policy is ``KvAware(lower_tiers=True)``.

        Raises
        ------
        ValueError
            For an unknown worker, a block whose parent the worker does not have (below the GPU: that no event has
            named), or a removed block that it does not have; nothing is changed then.
        """
        inner = event.get("event", event)
        if worker_id is None:
            worker_id = operator.index(event["worker_id"])
        tier = event.get("storage_tier", "device")
        rank, data = inner.get("dp_rank", 0), inner["data"]
        if tier != "device":
            self._lower_event(worker_id, rank, tier, data)
            return
        if data == "cleared":
            for (other, _), cleared in self._workers.items():
                if other == worker_id:
                    cleared.keys.clear()
                    self._core.cleared(cleared.number)
            return
        known = self._known((worker_id, rank))
        if "stored" in data:
            self._stored(known, data["stored"])
        elif "removed" in data:
            hashes = [int(hash_) for hash_ in data["removed"]["block_hashes"]]
            for hash_ in hashes:
                if hash_ not in known.keys:
                    raise ValueError(f"worker {known.name} removes block {hash_}, which it does not have")
            for hash_ in hashes:
                key = known.keys.pop(hash_, None)
                if key is not None:
                    self._core.removed(known.number, key, 0)
        else:
            raise ValueError(f"a KV event's data must be stored, removed or cleared, got {data!r}")

    def _lower_event(self, worker_id: int, rank: int, tier: str, data: Any) -> None:
        """Apply an event of a tier below the GPU, if such blocks count."""
        if tier not in _LOWER:
            raise ValueError(f"storage_tier must be device, {', '.join(_LOWER)}, got {tier!r}")
        if not self._core.lower_tiers:
            return
        number = _LOWER[tier]
        if data == "cleared":
            for (other, _), cleared in self._workers.items():
                if other == worker_id:
                    cleared.lower[tier].clear()
                    self._core.lower_cleared(cleared.number, number)
            return
        known = self._known((worker_id, rank))
        blocks = known.lower[tier]
        if "stored" in data:
            parent = data["stored"].get("parent_hash")
            if parent is not None and parent not in self._named:
                raise ValueError(f"worker {known.name} stores blocks below {parent}, which no event has named")
            above = None if parent is None else self._named[parent]
            for block in data["stored"]["blocks"]:
                hash_, local = int(block["block_hash"]), int(block["tokens_hash"])
                above = local if above is None else _child(above, local)
                self._named[hash_] = above
                blocks.add(hash_)
                self._core.lower_block(known.number, number, above, True)
        elif "removed" in data:
            hashes = [int(hash_) for hash_ in data["removed"]["block_hashes"]]
            for hash_ in hashes:
                if hash_ not in blocks:
                    raise ValueError(f"worker {known.name} removes block {hash_} from {tier}, which does not have it")
            for hash_ in hashes:
                blocks.discard(hash_)
                self._core.lower_block(known.number, number, self._named[hash_], False)
        else:
            raise ValueError(f"a KV event's data must be stored, removed or cleared, got {data!r}")

    def apply_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Apply KV events that name their workers, in order."""
        for event in events:
            self.apply_event(None, event)

    def _stored(self, known: _Known, data: Mapping[str, Any]) -> None:
        parent = data.get("parent_hash")
        blocks = [(int(block["block_hash"]), int(block["tokens_hash"])) for block in data["blocks"]]
        above: int | None = None
        if parent is not None:
            if any(hash_ == parent for hash_, _ in blocks):
                raise ValueError(f"worker {known.name} stores block {parent} below itself")
            if parent not in known.keys:
                raise ValueError(f"worker {known.name} stores blocks below {parent}, which it does not have")
            above = known.keys[parent]
        for hash_, local in blocks:
            above = local if above is None else _child(above, local)
            known.keys[hash_] = above
            if self._core.lower_tiers:
                self._named[hash_] = above
            self._core.stored(known.number, above, 1)

    # --- questions

    def _prompt(
        self, tokens: Sequence[int] | npt.NDArray[Any] | None, hashes: Iterable[int] | None, isl: int | None
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32], int]:
        """Give the keys of a prompt's full blocks, how they are counted, and its length."""
        if (tokens is None) == (hashes is None):
            raise ValueError("give either tokens or hashes")
        locals_: list[int]
        if tokens is not None:
            locals_ = compute_block_hash_for_seq(tokens, self.block_size)
            isl = len(tokens)
        else:
            locals_ = [int(hash_) for hash_ in hashes or ()]
            isl = len(locals_) * self.block_size if isl is None else operator.index(isl)
        keys = np.empty(len(locals_), np.uint64)
        for i, local in enumerate(locals_):
            keys[i] = local if i == 0 else _child(int(keys[i - 1]), local)
        return keys, np.arange(1, len(locals_) + 1, dtype=np.int32), isl

    def find_matches(
        self, tokens: Sequence[int] | npt.NDArray[Any] | None = None, *, hashes: Iterable[int] | None = None
    ) -> dict[Worker, int]:
        """Count the leading blocks of a prompt that workers have.

        Parameters
        ----------
        tokens : sequence of int, optional
            The prompt.
        hashes : iterable of int, optional
            In its place the hashes of its blocks' tokens (``tokens_hash`` of the events), root first.

        Returns
        -------
        dict
            Workers that have at least one, with how many.
        """
        keys, ends, _ = self._prompt(tokens, hashes, None)
        found = self._core.overlaps(keys, ends)
        return {known.name: int(found[known.number]) for known in self._by_number if found[known.number] > 0}

    def score(
        self, tokens: Sequence[int] | npt.NDArray[Any] | None = None, *, hashes: Iterable[int] | None = None,
        isl: int | None = None, now_ms: float = 0.0,
    ) -> dict[Worker, Score]:
        """Give each worker's cost for a prompt and the parts of it; changes nothing.

        Parameters
        ----------
        tokens, hashes
            The prompt; see :meth:`find_matches`.
        isl : int, optional
            Prompt tokens, if `hashes` are given (all blocks full if None).
        now_ms : float
            The time; only an estimator needs it.
        """
        keys, ends, isl = self._prompt(tokens, hashes, isl)
        return self._scores(keys, ends, isl, now_ms)

    def _scores(
        self, keys: npt.NDArray[np.uint64], ends: npt.NDArray[np.int32], isl: int, now_ms: float
    ) -> dict[Worker, Score]:
        parts = self._core.parts(keys, ends, isl, now_ms)
        return {self._by_number[number].name: Score(*part) for number, part in parts.items()}

    def loads(self, now_ms: float = 0.0) -> dict[Worker, WorkerLoad]:
        """Give the load of every worker, those that may not be chosen included."""
        return {known.name: WorkerLoad(*load)
                for known, load in zip(self._by_number, self._core.loads(now_ms), strict=True)}

    @property
    def pending_count(self) -> int:
        """Number of requests that wait in the router."""
        return self._core.queued

    # --- requests

    def choose(
        self, request_id: Hashable, tokens: Sequence[int] | npt.NDArray[Any] | None = None, *,
        hashes: Iterable[int] | None = None, isl: int | None = None, priority: int = 0, strict_priority: int = 0,
        policy_class: str | None = None, now_ms: float = 0.0,
    ) -> Decision:
        """Choose a worker for a request, and count the request there from now on.

        Parameters
        ----------
        request_id : hashable
            The caller's id of the request; must not be in flight or waiting.
        tokens, hashes, isl
            The prompt; see :meth:`score`.
        priority, strict_priority : int
            Order among waiting requests: strict first, then priority within the queue's policy.
        policy_class : str, optional
            A queue or family of the policy file.
        now_ms : float
            When it arrives.

        Returns
        -------
        Decision

        Raises
        ------
        QueueRejection
            If it should wait and its queue is full.
        ValueError
            If the prompt is empty, or the id is in use.
        """
        if request_id in self._rows:
            raise ValueError(f"request {request_id!r} is in flight or waits already")
        keys, ends, isl = self._prompt(tokens, hashes, isl)
        scores = self._scores(keys, ends, isl, now_ms) if self.policy.kind == "kv" else {}
        row = self._next_row
        self._rows[request_id], self._ids[row] = row, request_id
        self._next_row += 1
        try:
            placed = self._core.arrival(
                row, keys, ends, isl, priority, strict_priority, self._core.profile.code(policy_class), now_ms
            )
        except BaseException:
            self._forget(request_id)
            raise
        if placed is None:
            return Decision(request_id, None, 0, {})
        return Decision(request_id, self._by_number[placed[0]].name, placed[1], scores)

    def prefill_completed(self, request_id: Hashable, now_ms: float = 0.0) -> list[Decision]:
        """Tell that a request made its first token; gives the requests that waited and go now."""
        if request_id not in self._rows or not self._core.prefill_completed(self._rows[request_id], now_ms):
            raise KeyError(request_id)
        return self._drained(now_ms)

    def completed(self, request_id: Hashable, now_ms: float = 0.0) -> list[Decision]:
        """Tell that a request ended, however; gives the requests that waited and go now.

        An unknown request changes nothing.
        """
        if request_id in self._rows and self._core.completed(self._rows[request_id], now_ms):
            self._forget(request_id)
        return self._drained(now_ms)

    def cancel(self, request_id: Hashable) -> bool:
        """Take a request out of the queue; False if it does not wait."""
        if request_id not in self._rows or not self._core.cancel(self._rows[request_id]):
            return False
        self._forget(request_id)
        return True

    def drain(self, now_ms: float = 0.0) -> list[Decision]:
        """Give the requests that waited and go now."""
        return self._drained(now_ms)

    def _forget(self, request_id: Hashable) -> None:
        del self._ids[self._rows.pop(request_id)]

    def _drained(self, now_ms: float) -> list[Decision]:
        return [Decision(self._ids[row], self._by_number[worker].name, overlap, {})
                for row, worker, overlap in self._core.drain(now_ms)]

    def _call(self, row: int, isl: int, now: float, views: list[tuple[int, int, int, int]]) -> int:
        assert isinstance(self.policy, UserFunction)
        named = [WorkerView(self._by_number[number].name, *rest) for number, *rest in views]
        choice = self.policy.function(RequestView(self._ids[row], isl, now), named)
        return self._known(choice).number


class KvRouter(Router):
    """The KV-aware router, driven by hand.

    Parameters
    ----------
    config : KvRouterConfig, optional
        Its settings.
    lower_tiers : bool
        Let blocks below the GPU count, see :class:`KvAware`.
    block_size, workers, tie_break, seed, max_num_batched_tokens, model_name, prefill_estimator
        See :class:`Router`.
    """

    def __init__(
        self,
        config: KvRouterConfig | None = None,
        block_size: int = 64,
        workers: int | Iterable[Worker] = 1,
        *,
        tie_break: str = "random",
        seed: int = 0,
        max_num_batched_tokens: int | None = DEFAULT_BUDGET,
        model_name: str | None = None,
        prefill_estimator: Estimator | None = None,
        lower_tiers: bool = False,
    ) -> None:
        super().__init__(
            KvAware(config or KvRouterConfig(), lower_tiers), block_size, workers, tie_break=tie_break, seed=seed,
            max_num_batched_tokens=max_num_batched_tokens, model_name=model_name, prefill_estimator=prefill_estimator,
        )
