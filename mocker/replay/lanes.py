"""Open loop, round robin: each worker replays its own requests, one worker after the other or several at a time."""
from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._cluster import Cluster


def run_lanes(cluster: Cluster, workers: int, passes: int, bounds: range, threads: int, seen: Callable[[], None],
              turned: Callable[[], None] | None = None) -> None:
    """Run all workers to their end.

    Parameters
    ----------
    cluster : Cluster
        Its order is set.
    workers, passes : int
        How many workers, and passes between two calls of `seen`.
    bounds : range
        Numbers of requests after which the next worker has its turn.
    threads : int
        Workers at the same time. Whatever it is, results and the gap log are those of one.
    seen : callable
        Called from one thread at a time; what it raises ends the run.
    turned : callable, optional
        Called when all workers have had a turn.
    """
    if min(threads, workers) <= 1:
        for arrivals in bounds:
            for worker in range(workers):
                while not cluster.run_lane(worker, passes, arrivals):
                    seen()
            if turned is not None:
                turned()
        return
    stop, turn = threading.Event(), threading.Lock()

    def lane(worker: int, arrivals: int) -> None:
        try:
            while not stop.is_set() and not cluster.run_lane(worker, passes, arrivals):
                with turn:
                    seen()
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(min(threads, workers), "mocker-lane") as pool:
        try:
            for arrivals in bounds:
                cluster.split_gaps()
                for future in [pool.submit(lane, worker, arrivals) for worker in range(workers)]:
                    future.result()
                cluster.join_gaps()
                if turned is not None:
                    turned()
        finally:
            stop.set()
