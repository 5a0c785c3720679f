import numpy as np
from numpy.typing import NDArray

class PathTable:
    arrays: dict[str, NDArray[np.int32]]
    def __init__(self, segment: NDArray[np.int32], parent: NDArray[np.int32], blocks: NDArray[np.int32]) -> None: ...
    @staticmethod
    def from_hash_ids(offsets: NDArray[np.int64], ids: NDArray[np.uint64], lengths: NDArray[np.int64],
                      trace_block_size: int, block_size: int) -> PathTable: ...
    @staticmethod
    def unique(lengths: NDArray[np.int64], block_size: int) -> PathTable: ...
