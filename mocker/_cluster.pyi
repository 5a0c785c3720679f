from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ._collect import Collector
from ._engine import EngineCore
from ._offload_engine import OffloadWorld
from ._paths import PathTable
from ._record import Recorder
from ._router import RouterCore
from ._rules_engine import RulesEngine
from ._sglang_engine import SglangEngine
from ._watch import Watch

class Cluster:
    engines: list[EngineCore] | list[RulesEngine] | list[SglangEngine]
    collector: Collector
    worker_of: NDArray[np.int32]
    arrival_of: NDArray[np.float64]
    now: float
    clamped: int
    finished: bool
    stalled: bool
    ended: int
    router: RouterCore | None
    departed: dict[str, int]
    numbers: NDArray[np.int32]
    roles: list[int]
    ticks: int
    offload: OffloadWorld | None
    def __init__(
        self, engines: list[EngineCore] | list[RulesEngine] | list[SglangEngine], collector: Collector,
        arrival: NDArray[np.float64],
        prompt: NDArray[np.int64], limit: NDArray[np.int64], paths: PathTable | None,
        tokens: Callable[[int], tuple[NDArray[np.uint32], NDArray[np.uint32]]] | None, router: RouterCore | None,
        cap_ms: float, single: bool, fast: bool,
    ) -> None: ...
    recorder: Recorder | None
    def record(self, recorder: Recorder) -> None: ...
    def capacities(self) -> NDArray[np.int64]: ...
    def set_offload(self, world: OffloadWorld) -> None: ...
    def set_ranks(self, priority: NDArray[np.int64], strict: NDArray[np.int64],
                  policy: NDArray[np.int32]) -> None: ...
    def set_planner(self, planner: Callable[[float], tuple[tuple[int | None, int | None] | None, float | None]],
                    recruit: Callable[[int, int], EngineCore | SglangEngine], *, first_tick: float, startup_ms: float,
                    prefill_startup_ms: float = 0.0, metrics: bool = True) -> Watch: ...
    def team(self, role: int) -> tuple[int, int, float]: ...
    def starting_workers(self, role: int) -> int: ...
    def set_order(self, order: NDArray[np.int64]) -> None: ...
    def set_links(self, roots: NDArray[np.int64], next_offsets: NDArray[np.int64], next_rows: NDArray[np.int64],
                  waits: NDArray[np.int64], rank: NDArray[np.int32], delay: NDArray[np.float64],
                  concurrency: int) -> None: ...
    def set_cancellations(self, after: NDArray[np.float64]) -> None: ...
    def set_growing(self, grow: Callable[[int], object]) -> None: ...
    def flush(self) -> None: ...
    def raise_errors(self) -> None: ...
    def last_timestamp(self) -> float: ...
    def run_lane(self, worker: int, passes: int, arrivals: int) -> bool: ...
    def run_coupled(self, passes: int) -> bool: ...
    def unfinished(self) -> list[tuple[int, int, int, int, int, int]]: ...
