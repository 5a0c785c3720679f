from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._cluster import Cluster

TERMINAL_NAMES: tuple[str, ...]
DISTRIBUTIONS: tuple[tuple[str, str], ...]

def report_of(
    requests: int, totals: Mapping[str, Any], latencies: Sequence[Mapping[str, Any]], gaps: Mapping[str, Any],
    rates: Mapping[str, Any], *, goodput: bool, decode_worker_seconds: float | None, prefill_worker_seconds: float,
    decode_gpus: int, prefill_gpus: int, wall_time_ms: float, compat: str | None,
) -> dict[str, Any]: ...
def report_of_columns(
    arrival: NDArray[np.float64], first_admit: NDArray[np.float64], first_token: NDArray[np.float64],
    second_gap: NDArray[np.float64], last_token: NDArray[np.float64], input_length: NDArray[np.int64],
    output_length: NDArray[np.int64], output_tokens: NDArray[np.int64], reused: NDArray[np.int64],
    first_reused: NDArray[np.int64], terminal: NDArray[np.int8], gaps: Mapping[str, Any], rates: Mapping[str, Any],
    sla: tuple[float | None, ...], *, decode_worker_seconds: float | None, prefill_worker_seconds: float,
    decode_gpus: int, prefill_gpus: int, wall_time_ms: float, compat: str | None,
) -> dict[str, Any]: ...
def report_of_run(
    cluster: Cluster, input_length: NDArray[np.int64], output_length: NDArray[np.int64],
    sla: tuple[float | None, ...], *, decode_worker_seconds: float | None, prefill_worker_seconds: float,
    decode_gpus: int, prefill_gpus: int, wall_time_ms: float, compat: str | None,
) -> dict[str, Any]: ...
