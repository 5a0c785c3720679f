from typing import Any

from numpy.typing import ArrayLike

PERCENTILES: tuple[tuple[str, int], ...]
STATISTICS: tuple[str, ...]

def nearest_rank_of(total: int, percent: int) -> int: ...
def weighted_statistics(values: ArrayLike, weights: ArrayLike, rates: bool = False) -> dict[str, Any]: ...
def statistics(values: ArrayLike) -> dict[str, Any]: ...
