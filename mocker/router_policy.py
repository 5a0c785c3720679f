"""Routing policies: how a worker is chosen, and what has to be known for it.

A policy makes the compiled router of a replay or of :class:`mocker.router.Router`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ._router import RouterCore
from .router_config import KvRouterConfig

DEFAULT_BUDGET = 8192


class RequestView(NamedTuple):
    """What a user's function sees of a request."""

    id: Any
    """The caller's id; in a replay the row of the trace."""
    prompt_tokens: int
    now_ms: float


class WorkerView(NamedTuple):
    """What a user's function sees of a worker that it may choose."""

    worker: Any
    """The worker's id; what the function returns."""
    requests: int
    """Requests that it was given and that have not ended."""
    prompt_tokens: int
    """Their prompt tokens."""
    cached_blocks: int
    """Leading blocks of this request's prompt that it has in its cache."""


RouteFunction = Callable[[RequestView, Sequence[WorkerView]], Any]
Estimator = Callable[[int, int], "float | None"]


@dataclass(frozen=True)
class RoutingPolicy:
    """How a worker is chosen; the base of all policies."""

    kind: ClassVar[str] = ""

    def core(
        self, block_size: int, workers: int, *, max_num_batched_tokens: int | None = DEFAULT_BUDGET,
        tie_break: str = "random", seed: int = 0, model_name: str | None = None, skip_own: bool = False,
        prefill_estimator: Estimator | None = None, **more: Any,
    ) -> RouterCore:
        """Make the compiled router of this policy.

        Parameters
        ----------
        block_size : int
            Tokens a block.
        workers : int
            Workers 0, 1, … that may be chosen from the start.
        max_num_batched_tokens : int or None
            Token budget of a worker's pass; None is no limit.
        tie_break : {"random", "lowest"}
            Which of equally good workers is chosen.
        seed : int
            Of all random choices: equal calls give equal choices.
        model_name : str, optional
            Picks a model's queues in the policy file.
        skip_own : bool
            Trace replays: ignore blocks of generated tokens, which no prompt there can have.
        prefill_estimator : callable, optional
            ``(uncached tokens, cached tokens) -> seconds or None``.
        """
        if tie_break not in ("random", "lowest"):
            raise ValueError(f"tie_break must be 'random' or 'lowest', got {tie_break!r}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in 0..=2**64-1, got {seed}")
        more.setdefault("config", KvRouterConfig(router_queue_threshold=None))
        return RouterCore(
            self.kind, more.pop("config"), block_size, workers, max_num_batched_tokens, tie_break == "random", seed,
            model_name, skip_own, estimator=prefill_estimator, **more,
        )


@dataclass(frozen=True)
class KvAware(RoutingPolicy):
    """The KV-aware router: least prefill work left, cached blocks taken off, plus least blocks in use.

    It needs to know each worker's cached blocks (KV events), and of each request its prompt, when its prefill ended
    and when it ended. Requests wait in the router while all workers are busy.

    Attributes
    ----------
    config : KvRouterConfig
        Its settings.
    lower_tiers : bool
        Blocks in the host, on disk and in a remote store that follow the cached ones count too, at
        ``host_cache_hit_weight`` and ``disk_cache_hit_weight``. The reference's live router does so, its replays do
        not.
    """

    kind = "kv"
    config: KvRouterConfig = field(default_factory=KvRouterConfig)
    lower_tiers: bool = False

    def core(self, block_size: int, workers: int, **options: Any) -> RouterCore:
        """Make the compiled router; see :meth:`RoutingPolicy.core`."""
        return super().core(block_size, workers, config=self.config, lower_tiers=self.lower_tiers, **options)


@dataclass(frozen=True)
class RoundRobin(RoutingPolicy):
    """One worker after the other, by id. It needs to know nothing."""

    kind = "round_robin"


@dataclass(frozen=True)
class RandomChoice(RoutingPolicy):
    """Any worker, all alike. It needs to know nothing."""

    kind = "random"


@dataclass(frozen=True)
class LeastLoaded(RoutingPolicy):
    """The worker with the fewest requests in flight, or the fewest prompt tokens of such requests.

    It needs to know when requests end, and for ``by="tokens"`` how long their prompts are.

    Attributes
    ----------
    by : {"requests", "tokens"}
        What is counted.
    """

    by: str = "requests"

    def __post_init__(self) -> None:
        if self.by not in ("requests", "tokens"):
            raise ValueError(f"by must be 'requests' or 'tokens', got {self.by!r}")

    def core(self, block_size: int, workers: int, **options: Any) -> RouterCore:
        """Make the compiled router; see :meth:`RoutingPolicy.core`."""
        policy = _LeastTokens() if self.by == "tokens" else _LeastRequests()
        return policy.core(block_size, workers, **options)


@dataclass(frozen=True)
class _LeastRequests(RoutingPolicy):
    kind = "least_requests"


@dataclass(frozen=True)
class _LeastTokens(RoutingPolicy):
    kind = "least_tokens"


@dataclass(frozen=True)
class PowerOfTwo(RoutingPolicy):
    """Two different random workers; of them the one with fewer requests in flight, the first if they are equal.

    It needs to know the load of only the two that it asks, and when requests end.
    """

    kind = "two_choices"


@dataclass(frozen=True)
class PrefixAffinity(RoutingPolicy):
    """Equal first blocks go to the same worker, by rendezvous hashing.

    It needs to know the prompt's first blocks, nothing of the workers' caches; with a load bound also when requests
    end. When a worker comes or goes, only prompts that it gets or had move. A prompt without a full block goes
    anywhere.

    Attributes
    ----------
    blocks : int
        Leading blocks of the prompt that are hashed (all, if it has fewer).
    load_bound : float
        A worker with this many times the mean number of requests is passed over for the next in hash order; 0 turns
        that off, and 1 keeps all loads equal.
    """

    kind = "prefix"
    blocks: int = 4
    load_bound: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.blocks < 2**31:
            raise ValueError(f"blocks must be in 1..=2**31-1, got {self.blocks}")
        if not (self.load_bound == 0.0 or 1.0 <= self.load_bound < float("inf")):
            raise ValueError(f"load_bound must be 0 (off) or a finite number of at least 1, got {self.load_bound}")

    def core(self, block_size: int, workers: int, **options: Any) -> RouterCore:
        """Make the compiled router; see :meth:`RoutingPolicy.core`."""
        return super().core(block_size, workers, prefix_blocks=self.blocks, prefix_bound=self.load_bound, **options)


@dataclass(frozen=True)
class UserFunction(RoutingPolicy):
    """A function of your own, called once a request.

    ``function(request, workers)`` gets a :class:`RequestView` and a list of :class:`WorkerView` in order of their
    ids, and returns the id of one of them. It may look at all that is in these, so KV events are needed as well as
    the end of requests.

    Attributes
    ----------
    function : callable
        The function.
    """

    kind = "function"
    function: RouteFunction

    def core(self, block_size: int, workers: int, **options: Any) -> RouterCore:
        """Make the compiled router; see :meth:`RoutingPolicy.core`."""
        function = self.function

        def call(row: int, isl: int, now: float, views: list[tuple[int, int, int, int]]) -> int:
            return operator.index(function(RequestView(row, isl, now), [WorkerView(*view) for view in views]))

        options.setdefault("function", call)
        return super().core(block_size, workers, **options)


_BY_NAME: Mapping[str, Callable[[], RoutingPolicy]] = {
    "kv": KvAware,
    "kv_router": KvAware,
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_requests": lambda: LeastLoaded("requests"),
    "least_tokens": lambda: LeastLoaded("tokens"),
    "power_of_two": PowerOfTwo,
    "prefix_affinity": PrefixAffinity,
}


def routing_policy(policy: str | RoutingPolicy | RouteFunction) -> RoutingPolicy:
    """Make a policy of its name, of a function, or of a policy.

    Parameters
    ----------
    policy : str, RoutingPolicy or callable
        "kv" or "kv_router", "round_robin", "random", "least_requests", "least_tokens", "power_of_two",
        "prefix_affinity"; or a function (see :class:`UserFunction`).

    Raises
    ------
    ValueError
        For another name.
    """
    if isinstance(policy, RoutingPolicy):
        return policy
    if callable(policy):
        return UserFunction(policy)
    if policy not in _BY_NAME:
        raise ValueError(f"routing policy must be one of {', '.join(_BY_NAME)}, or a function, got {policy!r}")
    return _BY_NAME[policy]()
