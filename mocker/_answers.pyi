import numpy as np
from numpy.typing import NDArray

def answers_apart(
    prompt: NDArray[np.int64], hash_offsets: NDArray[np.int64], hash_ids: NDArray[np.uint64], trace_block_size: int,
    answer_offsets: NDArray[np.int64], answers: NDArray[np.uint32], block_size: int,
) -> bool: ...
