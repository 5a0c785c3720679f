"""Where tasks run: threads of this process, a process pool, any executor, Dask or Ray.

A backend takes numbered items (here: configurations) and gives numbered outcomes ``task(workload, item, settings)`` in
whatever order they end; task, workload and settings go to each worker once. Threads suit most sweeps, since a
simulation holds the interpreter lock only to be set up and read.
"""
from __future__ import annotations

import concurrent.futures as futures
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from ..extras import import_extra
from .evaluate import WorkloadLike

Outcome = dict[str, Any]
Task = Callable[[WorkloadLike, Any, Any], Outcome]         # of workload, item, settings; must not raise
BACKENDS = ("threads", "processes", "dask", "ray")


class Backend(Protocol):
    """What `sweep` needs of a backend."""

    room: int                      # configurations that it takes at a time

    def submit(self, index: int, item: Any) -> None:
        """Start a configuration."""

    def finished(self) -> list[tuple[int, Outcome]]:
        """Wait for at least one to end, and give all that have."""

    def close(self) -> None:
        """Let go of what is still running and of everything that the backend started."""


def cpu_count() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Bound:
    """A task with its workload and settings; it can be pickled."""

    def __init__(self, task: Task, workload: WorkloadLike, settings: Any) -> None:
        self._task, self._workload, self._settings = task, workload, settings

    def __call__(self, item: Any) -> Outcome:
        return self._task(self._workload, item, self._settings)


def _call(bound: _Bound, item: Any) -> Outcome:
    return bound(item)


class _OnThreads:
    """Threads of its own, without an executor's futures, which cost a twentieth of a short simulation."""

    def __init__(self, run: Callable[[Any], Outcome], count: int) -> None:
        self.room, self._run, self._count = 2 * count, run, count
        self._todo: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Outcome | BaseException]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def _work(self) -> None:
        while (task := self._todo.get()) is not None:
            outcome: Outcome | BaseException
            try:
                outcome = self._run(task[1])
            except BaseException as error:
                outcome = error
            self._done.put((task[0], outcome))

    def submit(self, index: int, item: Any) -> None:
        if len(self._threads) < self._count:
            self._threads.append(threading.Thread(target=self._work, name=f"mocker-sweep-{len(self._threads)}"))
            self._threads[-1].start()
        self._todo.put((index, item))

    def finished(self) -> list[tuple[int, Outcome]]:
        out: list[tuple[int, Outcome]] = []
        while not out or not self._done.empty():
            index, outcome = self._done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            out.append((index, outcome))
        return out

    def close(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()


class _OnExecutor:
    """Futures as `concurrent.futures` has them."""

    def __init__(self, executor: futures.Executor, room: int, run: Callable[[Any], Outcome], own: bool) -> None:
        self.room, self._executor, self._run, self._own = room, executor, run, own
        self._pending: dict[futures.Future[Outcome], tuple[int, Any]] = {}

    def submit(self, index: int, item: Any) -> None:
        self._pending[self._executor.submit(self._run, item)] = index, item

    def finished(self) -> list[tuple[int, Outcome]]:
        done, _ = futures.wait(self._pending, return_when=futures.FIRST_COMPLETED)
        return [(self._pending.pop(future)[0], future.result()) for future in done]

    def close(self) -> None:
        for future in self._pending:
            future.cancel()
        if self._own:
            self._executor.shutdown(wait=True, cancel_futures=True)


_bound: _Bound | None = None       # of a worker process


def _start_process(bound: _Bound) -> None:
    global _bound
    _bound = bound


def _run_in_process(item: Any) -> Outcome:
    assert _bound is not None
    return _bound(item)


class _OnProcesses(_OnExecutor):
    """A process pool that outlives its processes: what was running when one died runs again, one by one."""

    def __init__(self, bound: _Bound, workers: int) -> None:
        self._workers, self._bound = workers, bound
        super().__init__(self._pool(workers), 2 * workers, _run_in_process, True)

    def _pool(self, workers: int) -> futures.ProcessPoolExecutor:
        return futures.ProcessPoolExecutor(workers, initializer=_start_process, initargs=(self._bound,))

    def submit(self, index: int, item: Any) -> None:
        try:
            super().submit(index, item)
        except futures.BrokenExecutor:          # found out while submitting: `finished` mends it
            broken: futures.Future[Outcome] = futures.Future()
            broken.set_exception(futures.BrokenExecutor())
            self._pending[broken] = index, item

    def finished(self) -> list[tuple[int, Outcome]]:
        done, _ = futures.wait(self._pending, return_when=futures.FIRST_COMPLETED)
        if not any(isinstance(future.exception(), futures.BrokenExecutor) for future in done):
            return [(self._pending.pop(future)[0], future.result()) for future in done]
        self._executor.shutdown(wait=True)
        out = []
        for future, (index, item) in self._pending.items():
            if future.done() and future.exception() is None:
                out.append((index, future.result()))
            else:
                out.append((index, self._alone(item)))
        self._pending.clear()
        self._executor = self._pool(self._workers)
        return out

    def _alone(self, item: Any) -> Outcome:
        with self._pool(1) as pool:
            try:
                return pool.submit(_run_in_process, item).result()
            except futures.BrokenExecutor:
                return {"error": "WorkerDied: the process that simulated this configuration was killed, perhaps for "
                                 "want of memory"}


class _OnDask:
    """A Dask client: a local cluster of our own, or whatever the given one is connected to."""

    def __init__(self, bound: _Bound, workers: int | None, client: Any) -> None:
        distributed = import_extra("distributed", "dask", "the dask backend")
        self._own = client is None
        self._client = client if client is not None else distributed.Client(
            n_workers=workers or cpu_count(), threads_per_worker=1, dashboard_address=":0", set_as_default=False)
        self.room = 2 * max(sum(self._client.nthreads().values()), 1)
        self._bound = self._client.scatter(bound, broadcast=True, hash=False)
        self._pending: dict[Any, int] = {}
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def submit(self, index: int, item: Any) -> None:
        future = self._client.submit(_call, self._bound, item, pure=False)
        self._pending[future] = index
        future.add_done_callback(self._done.put)

    def finished(self) -> list[tuple[int, Outcome]]:
        future = self._done.get()
        return [(self._pending.pop(future), _outcome(future.result))]

    def close(self) -> None:
        self._client.cancel(list(self._pending))
        del self._bound
        if self._own:
            self._client.close()


class _OnRay:
    """Ray tasks: on the cluster that the program has joined, or on one of our own."""

    def __init__(self, bound: _Bound, workers: int | None) -> None:
        self._ray = ray = import_extra("ray", "ray", "the ray backend")
        self._own = not ray.is_initialized()
        if self._own:
            ray.init(num_cpus=workers or cpu_count(), include_dashboard=False, log_to_driver=False)
        self.room = 2 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        self._bound = ray.put(bound)
        self._task = ray.remote(num_cpus=1)(_call)
        self._pending: dict[Any, int] = {}

    def submit(self, index: int, item: Any) -> None:
        self._pending[self._task.remote(self._bound, item)] = index

    def finished(self) -> list[tuple[int, Outcome]]:
        done, _ = self._ray.wait(list(self._pending), num_returns=1)
        return [(self._pending.pop(reference), _outcome(partial(self._ray.get, reference))) for reference in done]

    def close(self) -> None:
        for reference in self._pending:
            self._ray.cancel(reference, force=False)
        if self._own:
            self._ray.shutdown()


def _outcome(get: Callable[[], Outcome]) -> Outcome:
    """The outcome of a task on a cluster, where the task itself can be lost with its worker."""
    try:
        return get()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"}


def make_backend(backend: Any, workers: int | None, task: Task, workload: WorkloadLike, settings: Any) -> Backend:
    """The backend of a name, an executor or a Dask client.

    Raises
    ------
    ValueError, TypeError
        Not a backend, or a bad number of workers.
    ImportError
        Its package is not installed.
    """
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers must be a positive integer or None, got {workers!r}")
    count = workers or cpu_count()
    bound = _Bound(task, workload, settings)
    if backend == "threads":
        return _OnThreads(bound, count)
    if backend == "processes":
        return _OnProcesses(bound, count)
    if backend == "dask":
        return _OnDask(bound, workers, None)
    if backend == "ray":
        return _OnRay(bound, workers)
    if isinstance(backend, str):
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, an Executor or a Dask client, got {backend!r}")
    if isinstance(backend, futures.Executor):
        return _OnExecutor(backend, 2 * count, bound, False)
    if hasattr(backend, "scatter") and hasattr(backend, "nthreads"):
        return _OnDask(bound, None, backend)
    raise TypeError(f"backend must be a name, a concurrent.futures.Executor or a Dask client, got "
                    f"{type(backend).__name__}")
