import numpy as np
from numpy.typing import NDArray

from ._paths import PathTable

class Interned(PathTable):
    stretches: int
    def sizes(self, trace_block: int, block: int) -> None: ...
    def add(self, leaf: NDArray[np.int32], places: NDArray[np.int64], offsets: NDArray[np.int64],
            ids: NDArray[np.uint64], lengths: NDArray[np.int64]) -> None: ...
    def forget(self, known: NDArray[np.uint64], places: NDArray[np.int64]) -> None: ...
