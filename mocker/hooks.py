"""Functions of your own inside the simulation: which worker gets a request, which request is preempted.

A score is a function of five integers; the candidate with the lowest one is taken. It may be

- a Numba ``@cfunc("float64(int64, int64, int64, int64, int64)")``, a Cython function by its capsule in
  ``__pyx_capi__``, or an address: called without the GIL;
- a Python callable, to try things out: it takes the GIL and some 100 ns a candidate.

What a Python one raises comes out of the replay; a score that is NaN ends it with `ValueError`. See docs/hooks.md.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._hooks import ScoreHook
from ._router import RouterCore
from .router import RoutingPolicy
from .timing import function_address

__all__ = ["RoutingScore", "VictimScore"]


def _hook(what: str, function: Any) -> ScoreHook:
    address = function_address(what, function, 5)
    return ScoreHook(0 if address is None else address, function)


@dataclass(frozen=True)
class RoutingScore(RoutingPolicy):
    """Send each request to the worker with the lowest score, of equal ones to the first.

    As `router_mode` of a replay or the policy of a `mocker.router.Router`.

    Attributes
    ----------
    function : callable, Numba CFunc, capsule or int
        Of (worker, prompt tokens, blocks of the prompt that it has cached, its requests, their prompt tokens).

    Raises
    ------
    TypeError
        It is not callable, or has another signature.
    """

    function: Any
    kind = "function"

    def __post_init__(self) -> None:
        _hook("the score", self.function)

    def core(self, block_size: int, workers: int, **options: Any) -> RouterCore:
        """Make the compiled router; see :meth:`mocker.router.RoutingPolicy.core`."""
        options["function"] = self.function if callable(self.function) else abs
        made = super().core(block_size, workers, **options)
        made.use_score(_hook("the score", self.function))
        return made


@dataclass(frozen=True)
class VictimScore:
    """Preempt the running request with the lowest score, of equal ones the newest.

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

    function: Any

    def __post_init__(self) -> None:
        _hook("the score", self.function)

    def core(self) -> ScoreHook:
        """What an engine asks."""
        return _hook("the score", self.function)
