from typing import Any

import numpy as np
from numpy.typing import NDArray

PERCENTILES: tuple[tuple[str, int], ...]
STATISTICS: tuple[str, ...]

class Collector:
    columns: dict[str, NDArray[Any]]
    n: int
    def __init__(self, n: int) -> None: ...
    def gap_log(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]: ...
    def gap_statistics(self) -> tuple[dict[str, Any], dict[str, Any]]: ...

def weighted_statistics(values: NDArray[np.float64], weights: NDArray[np.int64],
                        rates: bool = False) -> dict[str, Any]: ...
def statistics(values: NDArray[np.float64]) -> dict[str, Any]: ...
