"""A replay in pieces: step it, put requests in and take them out, look at it, fork it, keep it and come back to it.

`open_simulation` takes what `simulate` takes. However a replay is cut into pieces, its result is that of `simulate`
to the last bit, as long as nothing is put in or taken out.
"""
from __future__ import annotations

import inspect
import math
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _live, _snapshot
from ..collector import Sla
from ..simulation import Simulation
from ..trace import Trace
from ..workload import SyntheticSpec
from .api import SLICE_PASSES, Run, free_rows, prepare, run_report, set_links, set_up, simulate, simulation_of
from .fast import fast_paths
from .injection import Injected, Prefixes, checked
from .planner import DECODE, PREFILL, Planning, ScalingEvent, copied
from .pools import Routing, output_limits, set_growing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..args import MockEngineArgs
    from ..workload import Workload

__all__ = ["RunningSimulation", "Snapshot", "open_simulation"]

_ROLES = {"prefill": PREFILL, "decode": DECODE, "aggregated": DECODE}


class _NoTicks:
    """A planner that is never asked: the caller scales."""

    fpm_format = "none"

    def initial_tick_ms(self) -> float:
        return math.inf

    def on_tick(self, metrics: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class Snapshot:
    """The state of a `RunningSimulation`, for `restore`. Can be pickled; opened by the same version of mocker only.

    Attributes
    ----------
    now_ms : float
        When it was taken.
    nbytes : int
        Its size.
    """

    now_ms: float
    _data: bytes
    _head: dict[str, Any]
    _key: str
    _injected: tuple[Injected, ...]
    _planner: Any
    _scaling: tuple[ScalingEvent, ...]
    _said: dict[int, NDArray[np.uint32]] | None
    _busy_ms: float

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_check": zlib.crc32(self._data)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if zlib.crc32(state["_data"]) != state.pop("_check"):
            raise ValueError("this snapshot is damaged")
        self.__dict__.update(state)


class RunningSimulation:
    """A replay under way; made by `open_simulation`.

    What is in `columns` and `workers` is known up to the end of the passes under way, which began at `now_ms` or
    before. Not safe for several threads at once; different ones, forks included, are.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        a = self._arguments = arguments
        routing = Routing.of(a)
        self._sla = Sla.of(a)
        planner = _NoTicks() if a["scaling"] else a["planner"]
        self._workload, self._pools, self._concurrency, routing = prepare(a, routing, planner is not None)
        self._planning = None if planner is None else Planning(planner)
        if self._workload.trace is not None and not isinstance(a["workload"], SyntheticSpec):
            trace = a["workload"]              # forks and pickles do not read the file again
            self._arguments = {**a, "_read": trace if isinstance(trace, Trace) else self._workload.trace}
        self._base = len(self._workload)
        self._injected: list[Injected] = []
        self._known: Prefixes | None = None
        workload = self._workload if self._workload.tokens is None else replace(self._workload, tokens=self._tokens)
        self._cluster = set_up(workload, self._pools, a["max_sim_time_ms"], routing, fast_paths(a["fast_forward"]),
                               a["recording"], self._planning, self._concurrency is not None, a["compat"])[0]
        set_links(self._cluster, self._workload, self._concurrency)
        _live.keep_whole(self._cluster)
        if free_rows(self._cluster, self._pools, self._concurrency, self._planning):
            self._cluster.split_gaps(carried=True)
        self._begin(uuid.uuid4().hex)

    def _begin(self, key: str) -> None:
        self._key = key
        self._clock = 0.0                      # ms, where the last `run_until` ended
        self._ahead = False                    # interrupted while workers were ahead of the clock
        self._busy_ms = 0.0
        self._result: Simulation | None = None
        self._failed: Exception | None = None
        self._state = np.zeros(0, _live.WORKER)

    # -- the clock -------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> float:
        """Simulated time, ms."""
        return max(self._cluster.now, self._clock)

    @property
    def next_ms(self) -> float:
        """When something happens next, ms; infinity if nothing does any more."""
        return math.inf if self.finished else max(_live.upcoming(self._cluster), self.now_ms)

    @property
    def finished(self) -> bool:
        """Whether all requests are through, nothing can happen any more, or `max_sim_time_ms` is reached."""
        return self._cluster.finished

    @property
    def requests(self) -> int:
        """Requests of the workload and injected ones."""
        return _live.counts(self._cluster)[1]

    @property
    def ended(self) -> int:
        """Requests that have ended, however."""
        return self._cluster.ended

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not ended."""
        return _live.counts(self._cluster)[2]

    @property
    def queued(self) -> int:
        """Requests in flight that no worker has yet."""
        return _live.counts(self._cluster)[3]

    def _advance(self, horizon: float, target: int, fast: bool, passes: int = SLICE_PASSES) -> None:
        """Go on to a time, or until `target` requests have ended (negative: any number)."""
        self._sound()
        began = time.perf_counter()
        self._result = None
        self._ahead = self._ahead or (fast and horizon == math.inf)
        try:
            while not self.finished and (target < 0 or self.ended < target):
                more = -1 if target < 0 else target - self.ended
                if _live.advance(self._cluster, horizon, more, passes, fast) or passes == 1:
                    break
        except Exception as error:
            self._failed = error
            raise
        finally:
            self._busy_ms += (time.perf_counter() - began) * 1000.0
        self._ahead = self._ahead and not self.finished

    def _sound(self) -> None:
        if self._failed is not None:
            raise RuntimeError("this simulation has failed before; restore a snapshot, or open it again"
                               ) from self._failed

    def step(self) -> bool:
        """Go on to the next moment at which something happens, and through all of that; False when it was the last.

        A moment is a time at which requests arrive or passes end; passes of idle workers begin with it.
        """
        at = _live.upcoming(self._cluster)
        if at == math.inf:
            self._advance(at, -1, False, passes=1)
        else:
            self._advance(max(at, self._cluster.now), -1, False)
        return not self.finished

    def run_until(self, ms: float) -> bool:
        """Go on until `ms` of simulated time, events at `ms` included; False when all is over."""
        if not (math.isfinite(ms) and ms >= self.now_ms):
            raise ValueError(f"run_until takes a finite time that is not before {self.now_ms} ms, got {ms}")
        self._advance(float(ms), -1, True)
        self._clock = float(ms)
        return not self.finished

    def run_completions(self, count: int) -> int:
        """Go on until `count` more requests have ended, or all are over; how many did.

        Stops after the moment at which the last of them ended, so that it may be more.
        """
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
            raise ValueError(f"run_completions takes an integer of at least 0, got {count!r}")
        before = self.ended
        self._advance(math.inf, before + int(count), False)
        return self.ended - before

    def run(self) -> RunningSimulation:
        """Go on to the end; returns itself, so that ``open_simulation(...).run().result()`` is `simulate`."""
        self._advance(math.inf, -1, True)
        return self

    # -- requests in and out ---------------------------------------------------------------------------------------

    def _change(self, what: str) -> None:
        if self._ahead:
            raise RuntimeError(f"run() was interrupted: its workers are ahead of the clock, so that nothing can be "
                               f"{what} before the end; use run_until() or step() to go on in between")
        if self.finished and (self._cluster.stalled or self.now_ms >= self._cap):
            raise RuntimeError(f"nothing can be {what}: this simulation is over")
        self._result = None

    @property
    def _cap(self) -> float:
        cap = self._arguments["max_sim_time_ms"]
        return math.inf if cap is None else float(cap)

    def _tokens(self, row: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        if row < self._base:
            assert self._workload.tokens is not None
            return self._workload.tokens(row)
        return self._injected[row - self._base].tokens(row, self._id_tokens), np.empty(0, np.uint32)

    @property
    def _id_tokens(self) -> int:
        trace = self._workload.trace
        return self._pools.args.block_size if trace is None else trace.block_size

    def inject(self, request: Mapping[str, Any] | None = None, **fields: Any) -> int:
        """Add a request, as a session of its own.

        Parameters
        ----------
        request : mapping, optional
            Fields as in a trace: `input_length`, `output_length`; optional `hash_ids` (each as many tokens as in the
            workload; the prompt shares its beginning with all that begin so), `timestamp` (ms of simulated time, the
            present if left out; none in a closed loop), `priority`, `strict_priority`.
        **fields
            The same one by one.

        Returns
        -------
        int
            Its row.

        Raises
        ------
        ValueError
            A field is missing, unknown or out of range.
        """
        self._change("injected")
        if self._workload.growing is not None:
            raise ValueError("a simulation whose prompts depend on earlier answers takes no further requests")
        new = checked({**(request or {}), **fields}, self._id_tokens, self.now_ms, self._concurrency is not None)
        limit = int(output_limits(self._pools.args, np.array([new.input_length]), np.array([new.output_length]))[0])
        keys, ends = self._path(new)
        row = _live.append(self._cluster, np.nan if new.at_ms is None else new.at_ms, new.input_length, limit, keys,
                           ends, priority=new.priority, strict=new.strict_priority)
        self._injected.append(new)
        if self._known is not None:
            self._known.add(row, new.hash_ids, new.input_length)
        if self._concurrency is not None:
            _live.settle(self._cluster, self.now_ms)
        return row

    def _path(self, new: Injected) -> tuple[list[int], list[int]]:
        """Segments of a new prompt's blocks: as far as somebody's prompt begins so his, then its own."""
        if _live.tokens_wanted(self._cluster):
            return [], []
        block, trace = self._pools.args.block_size, self._workload.trace
        full, shared, row = new.input_length // block, 0, -1
        if new.hash_ids:
            if self._known is None:
                self._known = Prefixes(self._id_tokens, block) if trace is None else Prefixes.of_trace(trace, block)
                for i, other in enumerate(self._injected):
                    self._known.add(self._base + i, other.hash_ids, other.input_length)
            shared, row = self._known.find(new.hash_ids, new.input_length)
        keys: list[int] = []
        ends: list[int] = []
        if shared:
            for key, end in zip(*_live.path_of(self._cluster, row, shared), strict=True):
                if end > (ends[-1] if ends else 0):
                    keys.append(key)
                    ends.append(end)
        if full > shared:
            keys.append(_live.new_segment(self._cluster))
            ends.append(full)
        return keys, ends

    def cancel(self, row: int) -> bool:
        """Let its client give up a request (`terminal_status` "canceled"); False if it has ended, if only in the pass
        under way.

        A worker that is in a pass gives up what the request holds when that has ended. The next turn of its session
        follows as after any other end.

        Raises
        ------
        ValueError
            There is no such row, or those that it waits for have not ended.
        """
        self._change("cancelled")
        if not 0 <= row < self.requests:
            raise ValueError(f"there is no request {row}; rows are 0 to {self.requests - 1}")
        found = _live.cancel(self._cluster, row, self.now_ms)
        if found:
            _live.settle(self._cluster, self.now_ms)
        return found

    def scale(self, workers: int, role: str = "aggregated") -> None:
        """Bring the number of workers of a role to `workers`, as a planner would; needs ``scaling=True``.

        New ones start (`startup_time`), the newest leave when they have done what they have.
        """
        if not self._arguments["scaling"] or self._planning is None:
            raise ValueError("this simulation was not opened with scaling=True")
        both = self._pools.prefill_args is not None
        if role not in _ROLES or (role == "aggregated") == both:
            raise ValueError(f"role must be {'prefill or decode' if both else 'aggregated'}, got {role!r}")
        if isinstance(workers, bool) or not isinstance(workers, (int, np.integer)) or not 0 <= workers <= 100_000:
            raise ValueError(f"workers must be an integer from 0 to 100000, got {workers!r}")
        self._change("scaled")
        code = _ROLES[role]
        before = self._cluster.team(code)[0] + self._cluster.starting_workers(code)
        if before == workers:
            return
        self._planning.events.append(ScalingEvent(self.now_ms, role, before, int(workers)))
        _live.scale(self._cluster, code, int(workers), self.now_ms)
        _live.settle(self._cluster, self.now_ms)

    # -- what it looks like ----------------------------------------------------------------------------------------

    @property
    def workers(self) -> NDArray[np.void]:
        """State of each worker: a structured array, see `mocker._live.WORKER` and docs/embedding.md.

        The array is the same one each time, brought up to date in place, until there are more workers.
        """
        n = _live.counts(self._cluster)[0]
        if len(self._state) != n:
            self._state = np.zeros(n, _live.WORKER)
        _live.look(self._cluster, self._state)
        return self._state

    def waiting(self, worker: int) -> NDArray[np.void]:
        """Requests that wait at a worker, in the order of its queue: `row`, `prompt_tokens`, of them `cached_tokens`,
        `generated` (if it was preempted) and `limit`.

        Raises
        ------
        ValueError
            There is no such worker.
        """
        if not 0 <= worker < _live.counts(self._cluster)[0]:
            raise ValueError(f"there is no worker {worker}; workers are 0 to {_live.counts(self._cluster)[0] - 1}")
        return _live.waiting(self._cluster, worker)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """What is known of each row, as read-only views of the simulation's own memory: no copies.

        They follow the simulation. `inject` may move the columns; then ask again. `arrival_ms` (NaN: not yet),
        `worker` (-1: none yet), `first_admit_ms`, `first_token_ms`, `ttst_ms`, `last_token_ms`, `terminal` (code) and,
        by the time a request ends, `output_tokens`, `reused_input_tokens`.
        """
        n, cluster = self.requests, self._cluster
        out: dict[str, NDArray[Any]] = {"arrival_ms": cluster.arrival_of[:n], "worker": cluster.worker_of[:n]}
        out.update((name, column[:n]) for name, column in cluster.collector.columns.items())
        for column in out.values():
            column.flags.writeable = False
        return out

    @property
    def engine_args(self) -> MockEngineArgs:
        """Of the workers; of those that decode, in disaggregation."""
        return self._pools.args

    @property
    def planned_arrivals(self) -> NDArray[np.float64] | None:
        """When the workload's requests arrive, ms; None for sessions and in a closed loop, where that is not known."""
        w = self._workload
        if self._concurrency is not None or w.session is not None or w.wait_rows is not None:
            return None
        return self._workload.arrival

    @property
    def worker_seconds(self) -> float:
        """Provisioned worker-seconds so far, of both roles; needs ``scaling=True``."""
        return float(sum(self._cluster.team(role)[2] for role in (PREFILL, DECODE)))

    def prompt_tokens(self, row: int) -> int:
        """Length of a request's prompt."""
        return int(self._workload.prompt[row] if row < self._base else self._injected[row - self._base].input_length)

    def cached_blocks(self, row: int) -> NDArray[np.int32]:
        """Leading blocks of a request's prompt that each worker has cached, as the router knows; int32 by worker.

        Raises
        ------
        ValueError
            Nobody knows: round robin, disaggregation or real tokens.
        """
        router = self._cluster.router
        if router is None or _live.tokens_wanted(self._cluster):
            raise ValueError("cached_blocks needs a router that knows blocks; set router_mode to one")
        keys, ends = _live.path_of(self._cluster, row, self.prompt_tokens(row) // self._pools.args.block_size)
        return router.overlaps(np.array(keys, np.uint64), np.array(ends, np.int32))

    # -- copies ----------------------------------------------------------------------------------------------------

    def _attend(self, planner: Any, events: Sequence[ScalingEvent],
                said: dict[int, NDArray[np.uint32]] | None) -> None:
        """Tie a copied cluster to a planner, and to what was said in sessions whose prompts grow."""
        if self._planning is not None:
            self._planning = self._planning.taken_over(planner, self._cluster, events)
        if said is not None and self._workload.growing is not None:
            prompt, limit = _snapshot.lengths(self._cluster)
            growing = self._workload.growing.copied(prompt, said)
            self._workload = replace(self._workload, prompt=prompt, tokens=growing, growing=growing)
            set_growing(self._cluster, self._workload, self._pools.args, limit)

    @property
    def planner(self) -> Any:
        """The planner that is asked, or None: the one given, in copies and after `restore` a copy of it."""
        return None if self._planning is None or self._arguments["scaling"] else self._planning.planner

    def snapshot(self) -> Snapshot:
        """Its whole state, O(what is resident). Columns that nobody changes are shared, not copied.

        Raises
        ------
        ValueError
            Its planner cannot be copied.
        """
        self._sound()
        planning, growing = self._planning, self._workload.growing
        planner, events = (None, ()) if planning is None else (copied(planning.planner), tuple(planning.events))
        data, head = _snapshot.save(self._cluster)
        return Snapshot(self.now_ms, data, {**head, "ahead": self._ahead, "clock": self._clock}, self._key,
                        tuple(self._injected), planner, events, None if growing is None else dict(growing.said),
                        self._busy_ms)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back (or on) to a snapshot of this simulation or of one of its forks; any number of times."""
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"restore takes a Snapshot, got {type(snapshot).__name__}")
        if snapshot._key != self._key:
            raise ValueError("this snapshot is of another simulation")
        tokens = self._tokens if _live.tokens_wanted(self._cluster) else None
        planner = copied(snapshot._planner)
        self._cluster = _snapshot.load(self._cluster, snapshot._data, snapshot._head, tokens)
        self._begin(self._key)
        self._injected, self._known = list(snapshot._injected), None
        self._clock, self._ahead = snapshot._head["clock"], snapshot._head["ahead"]
        self._busy_ms = snapshot._busy_ms
        self._attend(planner, snapshot._scaling, snapshot._said)

    def fork(self) -> RunningSimulation:
        """An independent simulation in the same state; both go on the same way, bit for bit.

        Raises
        ------
        ValueError
            Its planner cannot be copied.
        """
        self._sound()
        planning, growing = self._planning, self._workload.growing
        planner = None if planning is None else copied(planning.planner)
        made = object.__new__(RunningSimulation)
        made.__dict__.update(self.__dict__)
        made._cluster = _snapshot.copy(self._cluster, made._tokens if _live.tokens_wanted(self._cluster) else None)
        made._injected, made._known = list(self._injected), None if self._known is None else self._known.copy()
        made._result, made._state = None, np.zeros(0, _live.WORKER)
        made._attend(planner, () if planning is None else planning.events, None if growing is None else growing.said)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = dict(self._arguments)
        arguments["workload"] = arguments.pop("_read", arguments["workload"])
        return _reopened, (arguments, self.snapshot())

    # -- the result ------------------------------------------------------------------------------------------------

    def result(self) -> Simulation:
        """The result so far, or the final one. Of an unfinished simulation a fork is asked.

        With injected requests the columns `session_id`, `turn_index` and `request_id` are left out.
        """
        self._sound()
        if not self.finished:
            return self.fork()._report()
        if self._result is None:
            self._result = self._report()
        return self._result

    def _report(self) -> Simulation:
        if self.finished:
            self._cluster.finish_below(self._cluster.last_timestamp())
        self._cluster.join_gaps()
        self._cluster.flush()
        a = self._arguments
        run = Run(self._cluster, self._rows(), self._pools, self._busy_ms, self._planning)
        call = {**a, "planner": None if a["scaling"] else a["planner"]}
        return simulation_of(run, run_report(run, self._sla, a["compat"]), call, self._sla, a["recording"]).complete()

    def _rows(self) -> Workload:
        """The workload with the injected requests, as long as the cluster's columns."""
        if not self._injected:
            return self._workload
        w, cap = self._workload, len(self._cluster.arrival_of)
        prompt, limit = np.zeros(cap, np.int64), np.zeros(cap, np.int64)
        n = self._base + len(self._injected)
        prompt[:n] = np.append(w.prompt, [new.input_length for new in self._injected])
        limit[:n] = np.append(w.limit, [new.output_length for new in self._injected])
        return replace(w, prompt=prompt, limit=limit, arrival=self._cluster.arrival_of, session=None, turn=None,
                       wait_offsets=None, wait_rows=None, trace=None)


def _reopened(arguments: dict[str, Any], snapshot: Snapshot) -> RunningSimulation:
    made = RunningSimulation(arguments)
    made._key = snapshot._key
    made.restore(snapshot)
    return made


def open_simulation(workload: Any, *, scaling: bool = False, **arguments: Any) -> RunningSimulation:
    """A replay that has not begun, to be run in pieces.

    Parameters
    ----------
    workload, **arguments
        As of `mocker.simulate`, without `progress`, `exact_gaps` and `stream_to`.
    scaling : bool
        Let `RunningSimulation.scale` change the number of workers. Passes are then taken one by one.

    Returns
    -------
    RunningSimulation

    Raises
    ------
    TypeError
        An unknown keyword.
    ValueError, OSError
        As `mocker.run_trace_replay`.
    """
    bound = inspect.signature(simulate).bind(workload, **arguments)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.pop("progress") is not None:
        raise ValueError("open_simulation takes no progress; ask the simulation between its pieces")
    for name in ("exact_gaps", "stream_to"):
        if given[name] is not None:
            raise ValueError(f"open_simulation takes no {name}: it keeps what it may have to go on with")
    if scaling and given["planner"] is not None:
        raise ValueError("scaling=True and planner= are both set; leave one of them out")
    return RunningSimulation({**given, "scaling": bool(scaling)})
