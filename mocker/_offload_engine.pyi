from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._engine import EngineCore

MAX_WORKERS: int

class OffloadWorld:
    attached: list[OffloadTiers]
    parked_ms: NDArray[np.float64]
    blocks: NDArray[np.int64]
    def __init__(
        self, g3_blocks: int = ..., g4: bool = ..., g2_to_g3: float = ..., g3_to_g2: float = ...,
        g2_to_g4: float = ..., g4_to_g2: float = ..., latency: tuple[float, ...] = ...,
    ) -> None: ...
    def attach(
        self, engine: EngineCore, *, g2_blocks: int, block_bytes: int, batch_size: int, g1_to_g2: float,
        g2_to_g1: float, reference: bool, latency: tuple[float, ...] = ...,
    ) -> OffloadTiers: ...
    def collect(self, rows: int) -> None: ...
    def counters(self) -> dict[str, Any]: ...

class OffloadTiers:
    engine: EngineCore
    def counters(self) -> dict[str, Any]: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def parked(self) -> list[int]: ...
    def books(self) -> tuple[int, int, int, int, int]: ...
    def check(self) -> None: ...
