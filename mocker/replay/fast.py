"""The shortcuts that a replay takes, each with its switch; none of them changes a bit of the result.

`tests/test_fast_paths.py` compares random replays with random switches off.
"""
from __future__ import annotations

from dataclasses import dataclass

CLOCK_BIT, AHEAD_BIT, CALENDAR = 1, 2, 4       # as in `_workers.pxd`


@dataclass(frozen=True)
class FastPaths:
    """Which shortcuts to take.

    Attributes
    ----------
    clock : bool
        Passes in which everybody decodes inside its last block only move the clock.
    ahead : bool
        In the event loop a worker goes on alone until the next arrival, if until then nothing that it does concerns
        another one. In a closed loop an SGLang worker's plain passes are worked out until somebody comes.
    lanes : bool
        Open loop, round robin, single requests: one worker after the other instead of the event loop.
    extents : bool
        Blocks are kept by segment of the trace, in runs, instead of one by one by the hash of their tokens. (Off only
        where the workload has tokens and one pool.)
    books : bool
        Under vLLM's rules generated blocks are registered when somebody could find them, and a request that decodes
        is counted instead of planned, until it needs a block.
    calendar : int
        From so many running requests on, a request that decodes is not touched until it needs a block or ends
        (vLLM-like engines without scheduler rules); 0 or False: never.
    """

    clock: bool = True
    ahead: bool = True
    lanes: bool = True
    extents: bool = True
    books: bool = True
    calendar: int = 8

    @property
    def bits(self) -> int:
        """For the compiled workers."""
        return CLOCK_BIT * self.clock | AHEAD_BIT * self.ahead | CALENDAR * self.calendar


def fast_paths(choice: bool | FastPaths) -> FastPaths:
    """All of them for True; for False none that skips passes or changes their order.

    Raises
    ------
    TypeError
        Neither a bool nor `FastPaths`.
    """
    if isinstance(choice, FastPaths):
        return choice
    if not isinstance(choice, bool):
        raise TypeError(f"fast_forward must be a bool or FastPaths, got {type(choice).__name__}")
    return ALL_PATHS if choice else PLAIN


ALL_PATHS = FastPaths()
PLAIN = FastPaths(clock=False, ahead=False, calendar=0)
