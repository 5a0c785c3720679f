import numpy as np
from numpy.typing import NDArray

def split_segments(
    segment: NDArray[np.int32], parent: NDArray[np.int32], blocks: NDArray[np.int32], full: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]: ...
def reuse_distances(
    leaf: NDArray[np.int32], above: NDArray[np.int32], size: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def repeated_ids(offsets: NDArray[np.int64], ids: NDArray[np.uint64]) -> NDArray[np.uint8]: ...
