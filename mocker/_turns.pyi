import numpy as np
from numpy.typing import NDArray

OK: int
FIRST_DELAY: int
BAD_DELAY: int
NO_EARLIER_TIMESTAMP: int
BAD_GAP: int
LEFT_OUT: int

def link_turns(
    session: NDArray[np.int32],
    sessions: int,
    arrival_ms: NDArray[np.float64],
    delay_ms: NDArray[np.float64],
    turn: NDArray[np.int32],
    left_out: NDArray[np.uint8] | None = None,
) -> tuple[int, int]: ...
