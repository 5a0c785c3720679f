"""Functions of your own inside the simulation: who gets a request, who is admitted or preempted, what is evicted.

A score is a function of five or nine integers; the candidate with the lowest one is taken. It may be

- a Numba ``@cfunc("float64(int64, int64, int64, int64, int64)")``, a Cython function by its capsule in
  ``__pyx_capi__``, or an address: called without the GIL;
- a Python callable, to try things out: it takes the GIL and some 100 ns a candidate.

What a Python one raises comes out of the replay; a score that is NaN ends it with `ValueError`. See docs/hooks.md.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ._hooks import ScoreHook
from ._router import RouterCore
from .router import RoutingPolicy
from .timing import function_address

__all__ = ["AdmissionScore", "EvictionScore", "RoutingScore", "VictimScore"]


def _hook(function: Any, numbers: int, **flags: bool) -> ScoreHook:
    address = function_address("the score", function, numbers)
    return ScoreHook(0 if address is None else address, function, numbers, **flags)


@dataclass(frozen=True)
class RoutingScore(RoutingPolicy):
    """Send each request to the worker with the lowest score, of equal ones to the first.

    As `router_mode` of a replay or the policy of a `mocker.router.Router`.

    Attributes
    ----------
    function : callable, Numba CFunc, capsule or int
        Of (worker, prompt tokens, blocks of the prompt that it has cached, its requests, their prompt tokens).
    uses_cached : bool
        The score depends on cached blocks. Without, nobody keeps track of them, and the function gets 0.

    Raises
    ------
    TypeError
        It is not callable, or has another signature.
    """

    function: Any
    uses_cached: bool = True
    kind = "function"

    def __post_init__(self) -> None:
        _hook(self.function, 5)

    def core(self, block_size: int, workers: int, **options: Any) -> RouterCore:
        """Make the compiled router; see :meth:`mocker.router.RoutingPolicy.core`."""
        options["function"] = self.function if callable(self.function) else abs
        made = super().core(block_size, workers, **options)
        made.use_score(_hook(self.function, 5), self.uses_cached)
        return made


@dataclass(frozen=True)
class EngineScore:
    """A score that engines ask; see its subclasses."""

    function: Any
    numbers: ClassVar[int]

    def __post_init__(self) -> None:
        self.core()

    def core(self) -> ScoreHook:
        """What an engine asks."""
        return _hook(self.function, self.numbers)


class VictimScore(EngineScore):
    """Preempt (SGLang: retract) the running request with the lowest score, of equal ones the engine's own choice.

    As `MockEngineArgs(victim_score=...)`.

    Attributes
    ----------
    function : callable, Numba CFunc, capsule or int
        Of (prompt tokens, tokens generated, tokens to generate, times that it was preempted, blocks that it holds).

    Raises
    ------
    TypeError
        It is not callable, or has another signature.
    """

    numbers = 5


@dataclass(frozen=True)
class AdmissionScore(EngineScore):
    """Admit the waiting request with the lowest score, of equal ones the first; nobody while all scores are infinite.

    As `MockEngineArgs(admission_score=...)`. Asked of everybody who waits, before each admission. If the one that is
    taken does not fit, nobody is admitted in this pass: a score that returns infinity for those without room lets
    others pass by.

    Attributes
    ----------
    function : callable, Numba CFunc, capsule or int
        Of (request: row of the workload, or an engine object's handle; microseconds since it arrived; prompt tokens;
        of them cached here; tokens generated before it was preempted; tokens to generate; priority; requests running;
        blocks that nobody holds).
    uses_time : bool
        The score depends on how long a request has waited. Without, the function gets 0, and passes for which somebody
        waits for room can be fast-forwarded.
    uses_cached : bool
        It depends on what is cached. Without, the function gets 0, and nobody looks it up.

    Raises
    ------
    TypeError
        It is not callable, or has another signature.
    """

    uses_time: bool = True
    uses_cached: bool = True
    numbers = 9

    def core(self) -> ScoreHook:
        """What an engine asks."""
        return _hook(self.function, self.numbers, timed=self.uses_time, looks=self.uses_cached)


class EvictionScore(EngineScore):
    """Evict the cached blocks with the lowest score, of equal ones those that were given back first.

    As `MockEngineArgs(eviction_score=...)`. When a request gives its blocks back, those that nobody else holds become
    evictable: they are the end of its sequence. They fall into stretches of blocks with equally many hits, and each
    stretch is scored once, then. It is evicted from its end; a block counts with at least the highest score that was
    given to blocks which continue it, since those go first. SGLang: blocks are pages, and of equal ones the longest
    unvisited end of its radix tree goes.

    Attributes
    ----------
    function : callable, Numba CFunc, capsule or int
        Of (microseconds of simulated time, at the beginning of the pass; number of this release, 1 for the first;
        blocks of the sequence before the stretch; blocks in it; times that a request took these blocks over from the
        cache).

    Raises
    ------
    TypeError
        It is not callable, or has another signature.
    """

    numbers = 5
