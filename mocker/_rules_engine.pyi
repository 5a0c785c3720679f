from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._collect import Collector
from ._engine import EngineCore
from ._paths import PathTable

class PassRecord:
    start_ms: float
    end_ms: float
    tokens_ms: float
    completed: int
    made: int
    made_by: int
    ended: list[tuple[int, Any, int]]
    kv_events: list[dict[str, Any]]
    @property
    def counts(self) -> tuple[int, int, int, int, int]: ...
    @property
    def forward_pass_metrics(self) -> tuple[tuple[tuple[int, int, float], ...], int, int]: ...
    def admissions(self) -> list[tuple[Any, int]]: ...
    def signals(self) -> list[tuple[Any, int | None, int, float | None]]: ...
    def scheduled(self) -> list[tuple[Any, int]]: ...
    def preempted(self) -> list[Any]: ...

class RulesEngine(EngineCore):
    def configure(self, *, rules: int, by_priority: bool, gate: bool, threshold: int, watermark: int,
                  skip_own: bool = False, strict: bool = False) -> None: ...
    def submit_owned(self, owner: Any, tokens: NDArray[np.uint32], limit: int, plan: NDArray[np.uint32] | None,
                     place: int, priority: int) -> tuple[int, int]: ...
    def run_owned(self, now: float) -> PassRecord: ...
    @property
    def under_way(self) -> int: ...

def replay_lanes(engines: list[RulesEngine], collector: Collector, arrival: NDArray[np.float64],
                 prompt: NDArray[np.int64], limit: NDArray[np.int64], order: NDArray[np.int64], paths: PathTable,
                 fast: bool = True) -> list[bool]: ...
