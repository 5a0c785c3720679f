"""`sweep`: a workload times configurations, to a table."""
from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .backends import make_backend
from .configs import Config, as_configs, plain_config
from .evaluate import DEFAULT_KEYS, evaluate, load_workload
from .journal import Journal, workload_fingerprint
from .table import SweepTable

Progress = Callable[[int, "int | None", int, "float | None"], None]


def sweep(workload: Any, configs: Mapping[str, Any] | Iterable[Mapping[str, Any]], *,
          base: Mapping[str, Any] | None = None, keys: Sequence[str] | None = None, backend: Any = "threads",
          workers: int | None = None, out: Any = None, retry_errors: bool = False,
          progress: bool | Progress = False) -> SweepTable:
    """Simulate a workload on many configurations.

    Parameters
    ----------
    workload : Trace, path, SyntheticSpec or mapping of its fields
        What every configuration serves; read once.
    configs : mapping or iterable of mappings
        A grid (name to a list of values; all combinations), a list or a generator of configurations. Names are
        keywords of `simulate` (``num_workers``), engine arguments (``block_size``, ``sglang.page_size``), those of
        one pool (``prefill.num_gpu_blocks``) and settings of the KV router (``router.router_temperature``).
    base : mapping, optional
        What all configurations have in common, unless they say otherwise.
    keys : sequence of str, optional
        Report keys of the table; a dot leads into inner objects (``samples.ttft``). By default all that do not
        depend on the speed of this machine.
    backend : {"threads", "processes", "dask", "ray"}, Executor or dask.distributed.Client
        Where to run. "dask" and "ray" start a local cluster unless the program has joined one (for Dask: give its
        client).
    workers : int, optional
        Threads, processes or workers of a local cluster; the processors of this machine by default. Of an executor:
        half of the configurations to give to it at a time.
    out : path, optional
        File of finished rows, a JSON object a line. If it holds rows of the same sweep, these are not computed again.
    retry_errors : bool
        Compute rows of `out` again that are errors.
    progress : bool or callable
        A bar with the time left, or ``progress(done, total, failed, seconds_left)`` after each row; `total` is None
        for a generator, `seconds_left` None as long as it is not known.

    Returns
    -------
    SweepTable
        A row per configuration, in their order, whatever the backend and the number of workers. A configuration that
        fails has its error in the column ``error``.

    Raises
    ------
    ValueError, TypeError, OSError
        A bad argument, workload or `out` file; not: a bad configuration.
    """
    loaded = load_workload(workload)
    names = list(DEFAULT_KEYS if keys is None else keys)
    if isinstance(keys, str) or not names or not all(isinstance(key, str) for key in names):
        raise ValueError("keys must be a list of report keys")
    source, total = as_configs(configs)
    journal = None if out is None else Journal(out, workload_fingerprint(loaded), names)
    try:
        runner = make_backend(backend, workers, evaluate, loaded, names)
        try:
            with Meter(progress, total) as meter:
                return _run(runner, journal, source, dict(base or {}), names, retry_errors, meter)
        finally:
            runner.close()
    finally:
        if journal is not None:
            journal.close()


def _run(runner: Any, journal: Journal | None, source: Iterable[Config], base: Config, keys: list[str],
         retry_errors: bool, meter: Meter) -> SweepTable:
    configs: list[Config] = []
    outcomes: dict[int, dict[str, Any]] = {}
    waiting = 0

    def collect() -> None:
        nonlocal waiting
        for index, outcome in runner.finished():
            waiting -= 1
            if journal is not None:
                journal.add(configs[index], outcome)
            outcomes[index] = outcome
            meter.step(outcome)

    for index, one in enumerate(source):
        config = base | one
        try:
            configs.append(plain_config(config))
        except ValueError:
            if journal is not None:
                raise
            configs.append(config)
        known = None if journal is None else journal.find(configs[index])
        if known is not None and not (retry_errors and "error" in known):
            outcomes[index] = known
            meter.step(known, counts=False)
            continue
        while waiting >= runner.room:
            collect()
        runner.submit(index, config)
        waiting += 1
    while waiting:
        collect()
    return SweepTable(configs, [outcomes[index] for index in range(len(configs))], keys)


class Meter:
    """Tells how far a sweep is and how long it will take."""

    def __init__(self, progress: bool | Progress, total: int | None) -> None:
        self._tell = progress if callable(progress) else None
        self._bar: Any = None
        if progress and self._tell is None:
            self._bar = importlib.import_module("tqdm").tqdm(total=total, unit=" configurations", dynamic_ncols=True)
        self._total, self._began = total, time.monotonic()
        self._done = self._computed = self._failed = 0

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def step(self, outcome: Mapping[str, Any], counts: bool = True) -> None:
        """A row is there; `counts` False: it was in the file already, which says nothing of the speed."""
        self._done += 1
        self._computed += counts
        self._failed += "error" in outcome
        if self._bar is not None:
            if not counts:
                self._bar.initial += 1
            self._bar.set_postfix_str(f"{self._failed} failed" if self._failed else "", refresh=False)
            self._bar.update()
        if self._tell is not None:
            left = None
            if self._total is not None and self._computed:
                left = (time.monotonic() - self._began) / self._computed * max(self._total - self._done, 0)
            self._tell(self._done, self._total, self._failed, left)
