from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

class MooncakeRows:
    arrival_ms: NDArray[np.float64]
    delay_ms: NDArray[np.float64]
    input_length: NDArray[np.int64]
    output_length: NDArray[np.int64]
    hash_offsets: NDArray[np.int64]
    hash_ids: NDArray[np.uint64]
    line: NDArray[np.int64]
    slow: NDArray[np.int64]
    session_ids: list[str | None] | None
    request_ids: list[str | None] | None
    policy_class: list[str | None] | None
    priority: NDArray[np.int32]
    strict_priority: NDArray[np.uint32]
    planned: NDArray[np.int64]
    output_token_ids: NDArray[np.uint32]

def scan_mooncake(
    data: Any, start: int = 0, all_slow: bool = False, release: Callable[[int, int], None] | None = None
) -> MooncakeRows: ...
