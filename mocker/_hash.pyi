from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

def xxh3_64(data: Buffer, seed: int = 0) -> int: ...
def compute_block_hash_for_seq(
    tokens: Sequence[int] | npt.NDArray[np.integer], block_size: int
) -> list[int]: ...
def compute_seq_hashes(
    tokens: Sequence[int] | npt.NDArray[np.integer], block_size: int
) -> tuple[list[int], list[int]]: ...
