import numpy as np
from numpy.typing import NDArray

REQUIRED: frozenset[str]

def check_columns(
    rows: int, block_size: int, arrival: NDArray[np.float64], inputs: NDArray[np.int64], outputs: NDArray[np.int64],
    offsets: NDArray[np.int64], ids: int, line: NDArray[np.int64], session: NDArray[np.int32], turn: NDArray[np.int32],
    delay: NDArray[np.float64], priority: NDArray[np.int32], strict: NDArray[np.uint32],
) -> tuple[int, str]: ...
