from typing import Any

from numpy.typing import NDArray

from ._cluster import Cluster
from ._collect import Collector
from ._router import RouterCore

class DisaggCluster(Cluster):
    prefill_collector: Collector
    details: dict[str, NDArray[Any]]
    def split(self, *, decode_workers: int, prefill_collector: Collector, prefill_router: RouterCore | None,
              decode_router: RouterCore | None, kv_bytes: float, bandwidth: float, full_prompt: bool) -> None: ...
