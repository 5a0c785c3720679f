from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

PERCENTILES: tuple[tuple[str, int], ...]
STATISTICS: tuple[str, ...]

def nearest_rank_of(total: int, percent: int) -> int: ...
def weighted_statistics(values: ArrayLike, weights: ArrayLike, rates: bool = False) -> dict[str, Any]: ...
def statistics(values: ArrayLike) -> dict[str, Any]: ...
def summarise(
    arrival: NDArray[np.float64], first_admit: NDArray[np.float64], first_token: NDArray[np.float64],
    second_gap: NDArray[np.float64], last_token: NDArray[np.float64], input_length: NDArray[np.int64],
    output_length: NDArray[np.int64], output_tokens: NDArray[np.int64], reused: NDArray[np.int64],
    first_reused: NDArray[np.int64], terminal: NDArray[np.int8], reference: bool, sla_ttft: float, sla_itl: float,
    sla_e2e: float,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]: ...
