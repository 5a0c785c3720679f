from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS: dict[str, int]

def scan_csv(
    data: Any, start: int, kinds: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]: ...
