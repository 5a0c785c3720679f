"""Gymnasium environments of a simulated cluster: choose a worker for each request, who goes first, how many workers.

Needs the extra `gym`. `RoutingEnv` asks at every arrival, `SchedulingEnv` at every pass for which requests wait,
`ScalingEnv` after every interval; `ThreadedVectorEnv` steps many of them at once, since simulations run without the
GIL. See docs/embedding.md.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .args import MockEngineArgs
from .replay.live import RunningSimulation, open_simulation
from .router import RequestView, WorkerView
from .simulation import Simulation

try:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError as error:
    raise ImportError("mocker.gym needs Gymnasium: pip install 'mocker-llm[gym]'") from error

__all__ = ["RoutingEnv", "ScalingEnv", "SchedulingEnv", "ThreadedVectorEnv"]

Observation = NDArray[np.float32]
MOST = 1e6                         # of an observation
Made = tuple[Observation, float, bool, bool, dict[str, Any]]


class _Env(gymnasium.Env[Observation, np.int64]):
    """What they have in common: the simulation, and what its requests are worth."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, workload: Any, ttft_ms: float, arguments: dict[str, Any]) -> None:
        self.workload, self.ttft_ms, self.arguments = workload, ttft_ms, arguments
        self.simulation: RunningSimulation | None = None
        self._before = (0, 0)

    @property
    def _sim(self) -> RunningSimulation:
        if self.simulation is None:
            raise RuntimeError("call reset() before step()")
        return self.simulation

    def result(self) -> Simulation:
        """The result of the episode so far."""
        return self._sim.result()

    def _open(self) -> RunningSimulation:
        raise NotImplementedError

    def _good(self) -> tuple[int, int]:
        """First tokens since the last time that came within the bound, and those that came too late."""
        columns, now = self._sim.columns, self._sim.now_ms
        ttft = columns["first_token_ms"] - columns["arrival_ms"]
        seen = columns["first_token_ms"] <= (np.inf if self._sim.finished else now)
        good, total = int(np.count_nonzero(seen & (ttft <= self.ttft_ms))), int(np.count_nonzero(seen))
        before, self._before = self._before, (good, total - good)
        return good - before[0], total - good - before[1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None,
              ) -> tuple[Observation, dict[str, Any]]:
        """Begin the replay again; it is the same each time, whatever the seed."""
        super().reset(seed=seed)
        self._before = (0, 0)
        self.simulation = self._open()
        self._start()
        return self._observe(), {}

    def _start(self) -> None:
        raise NotImplementedError

    def _observe(self) -> Observation:
        raise NotImplementedError


class RoutingEnv(_Env):
    """Choose the worker of each request as it arrives.

    Observation (float32, shape (5 * workers + 1,)): of each worker requests running and waiting (shares of
    `max_num_seqs`), blocks held and blocks cached (shares of its pool), cached blocks of this prompt (share of the
    prompt); then the prompt's tokens (share of `max_num_batched_tokens`). Action: the worker. Reward: first tokens
    since the last step within `ttft_ms`, less those that came later.

    Parameters
    ----------
    workload : path, Trace or SyntheticSpec
        Single requests, no sessions, as for `mocker.simulate`.
    num_workers : int
        At least 2.
    ttft_ms : float
    **arguments
        As of `mocker.simulate`.
    """

    def __init__(self, workload: Any, *, num_workers: int, ttft_ms: float = 1000.0, **arguments: Any) -> None:
        super().__init__(workload, ttft_ms, {**arguments, "num_workers": num_workers})
        for name in ("router_mode", "replay_concurrency", "prefill_engine_args"):
            if arguments.get(name) is not None:
                raise ValueError(f"RoutingEnv does not take {name}")
        self._n = num_workers
        self._choice: dict[int, int] = {}
        self.action_space = spaces.Discrete(num_workers)
        self.observation_space = spaces.Box(0.0, MOST, (5 * num_workers + 1,), np.float32)

    def _route(self, request: RequestView, workers: list[WorkerView]) -> int:
        return self._choice[request.id]

    def _open(self) -> RunningSimulation:
        self._choice = {}
        simulation = open_simulation(self.workload, router_mode=self._route, **self.arguments)
        arrival = simulation.planned_arrivals
        if arrival is None:
            raise ValueError("RoutingEnv takes single requests, no sessions")
        self._order, self._arrival, self._at = np.argsort(arrival, kind="stable"), arrival, 0
        return simulation

    def _start(self) -> None:
        self._until(0)

    def _until(self, at: int) -> None:
        """To just before the arrival at a position of the order."""
        time = float(np.nextafter(self._arrival[self._order[at]], -np.inf))
        if time > self._sim.now_ms:
            self._sim.run_until(time)

    def _observe(self) -> Observation:
        sim, args = self._sim, self._sim.engine_args
        out = np.zeros((self._n, 5), np.float32)
        if self._at == len(self._order):
            return np.append(out.ravel(), np.float32(0.0))
        state, row = sim.workers, int(self._order[self._at])
        tokens = sim.prompt_tokens(row)
        out[:, 0], out[:, 1] = state["running"], state["waiting"]
        out[:, :2] /= args.max_num_seqs or 256
        out[:, 2] = state["used_blocks"] / np.maximum(state["capacity_blocks"], 1)
        out[:, 3] = state["cached_blocks"] / np.maximum(state["capacity_blocks"], 1)
        out[:, 4] = sim.cached_blocks(row) / max(tokens // args.block_size, 1)
        return np.append(out.ravel(), np.float32(tokens / (args.max_num_batched_tokens or 8192)))

    def step(self, action: np.int64) -> Made:
        """Send the request that has arrived to a worker, and go on to the next arrival, or to the end."""
        sim = self._sim
        if self._at == len(self._order):
            raise RuntimeError("the episode is over; call reset()")
        if not self.action_space.contains(np.int64(action)):
            raise ValueError(f"action must be a worker from 0 to {self._n - 1}, got {action!r}")
        self._choice[int(self._order[self._at])] = int(action)
        self._at += 1
        over = self._at == len(self._order)
        if over:
            sim.run()
        else:
            self._until(self._at)
        good, late = self._good()
        return self._observe(), float(good - late), over, False, {}


class SchedulingEnv(_Env):
    """Choose which waiting request is admitted first, or that none is, before each pass of a worker where some wait.

    Observation (float32, shape (4 + 4 * candidates,)): requests running at the worker (share of `max_num_seqs`),
    blocks that nobody holds (share of its pool), requests that wait there (share of `candidates`), prompt tokens that
    wait there (share of `max_num_batched_tokens`); then of each of the first `candidates` of its queue seconds since
    it arrived, prompt tokens (share of `max_num_batched_tokens`), those cached (share of the prompt) and tokens to make
    (thousands). Action: the place in the queue of the one that goes first, the others follow in order; `candidates`:
    nobody is admitted in this pass. A place where nobody waits is the first. Reward: first tokens since the last step
    within `ttft_ms`, less those that came later; at the end also less requests that got none.

    Parameters
    ----------
    workload : path, Trace or SyntheticSpec
    candidates : int
        At least 1.
    ttft_ms : float
    **arguments
        As of `mocker.simulate`, for one pool.
    """

    def __init__(self, workload: Any, *, candidates: int = 8, ttft_ms: float = 1000.0, **arguments: Any) -> None:
        super().__init__(workload, ttft_ms, arguments)
        if candidates < 1:
            raise ValueError(f"candidates must be at least 1, got {candidates}")
        if arguments.get("prefill_engine_args") is not None:
            raise ValueError("SchedulingEnv does not take prefill_engine_args")
        given = arguments.get("extra_engine_args")
        if given is not None and given.admission_score is not None:
            raise ValueError("SchedulingEnv is the admission_score; leave it out")
        self._args = (MockEngineArgs() if given is None else given).replace(admission_score=self._score)
        self._k = candidates
        self._first, self._nobody, self._worker = -1, False, -1
        self.action_space = spaces.Discrete(candidates + 1)
        self.observation_space = spaces.Box(0.0, MOST, (4 + 4 * candidates,), np.float32)

    def _score(self, request: int, *facts: int) -> float:
        return np.inf if self._nobody else float(request != self._first)

    def _open(self) -> RunningSimulation:
        return open_simulation(self.workload, **{**self.arguments, "extra_engine_args": self._args})

    def _start(self) -> None:
        self._first, self._nobody = -1, False
        self._onwards()

    def _onwards(self) -> None:
        """To just before the next pass of a worker where requests wait, or to the end."""
        sim = self._sim
        while sim.step():
            state, at = sim.workers, sim.next_ms
            begins = np.where(state["busy"] != 0, state["pass_end_ms"], at)
            asked = np.flatnonzero((state["waiting"] > 0) & (begins <= at))
            if len(asked):
                self._worker, self._queue = int(asked[0]), sim.waiting(int(asked[0]))
                return
            self._first, self._nobody = -1, False
        self._worker = -1

    def _observe(self) -> Observation:
        out = np.zeros((1 + self._k, 4), np.float32)
        if self._worker < 0:
            return out.ravel()
        sim, queue, k = self._sim, self._queue, self._k
        state, budget = sim.workers[self._worker], self._args.max_num_batched_tokens or 8192
        out[0] = (state["running"] / (self._args.max_num_seqs or 256),
                  1.0 - state["used_blocks"] / max(state["capacity_blocks"], 1),
                  len(queue) / k, queue["prompt_tokens"].sum() / budget)
        first = queue[:k]
        waited = sim.now_ms - sim.columns["arrival_ms"][first["row"]]
        out[1:len(first) + 1, 0] = np.maximum(waited, 0.0) / 1000.0
        out[1:len(first) + 1, 1] = first["prompt_tokens"] / budget
        out[1:len(first) + 1, 2] = np.minimum(first["cached_tokens"] / np.maximum(first["prompt_tokens"], 1), 1.0)
        out[1:len(first) + 1, 3] = first["limit"] / 1000.0
        return np.clip(out.ravel(), 0.0, MOST)

    def step(self, action: np.int64) -> Made:
        """Let the pass begin, and go on to the next one for which requests wait."""
        sim = self._sim
        if self._worker < 0:
            raise RuntimeError("the episode is over; call reset()")
        if not self.action_space.contains(np.int64(action)):
            raise ValueError(f"action must be from 0 to {self._k}, got {action!r}")
        place = int(action)
        self._nobody = place == self._k
        self._first = int(self._queue["row"][place if place < len(self._queue) else 0])
        self._onwards()
        good, late = self._good()
        if self._worker < 0:
            late += int(np.count_nonzero(np.isnan(sim.columns["first_token_ms"])))
        return self._observe(), float(good - late), self._worker < 0, False, {"worker": self._worker}


class ScalingEnv(_Env):
    """Choose the number of workers after every interval.

    Observation (float32, shape (6,)): active and starting workers (shares of `max_workers`), requests running, and
    those waiting or queued, a worker of `max_workers` (shares of `max_num_seqs`), blocks held (share of the active
    pools), arrivals a second in the last interval. Action: workers wanted, less one. Reward: first tokens since the
    last step within `ttft_ms`, less those that came later, less `worker_cost` a provisioned worker-second.

    Parameters
    ----------
    workload : path, Trace or SyntheticSpec
    max_workers : int
    interval_ms : float
    ttft_ms : float
    worker_cost : float
    **arguments
        As of `mocker.simulate`; `num_workers` is where it starts.
    """

    def __init__(self, workload: Any, *, max_workers: int, interval_ms: float = 5000.0, ttft_ms: float = 1000.0,
                 worker_cost: float = 0.1, **arguments: Any) -> None:
        super().__init__(workload, ttft_ms, arguments)
        if max_workers < 1 or not interval_ms > 0:
            raise ValueError("max_workers must be at least 1 and interval_ms above 0")
        if arguments.get("prefill_engine_args") is not None:
            raise ValueError("ScalingEnv does not take prefill_engine_args")
        self._most, self._interval, self._cost = max_workers, interval_ms, worker_cost
        self.action_space = spaces.Discrete(max_workers)
        self.observation_space = spaces.Box(0.0, MOST, (6,), np.float32)

    def _open(self) -> RunningSimulation:
        return open_simulation(self.workload, scaling=True, **self.arguments)

    def _start(self) -> None:
        self._arrived, self._rate, self._seconds = 0, 0.0, 0.0

    def _observe(self) -> Observation:
        sim = self._sim
        state, seqs = sim.workers, (sim.engine_args.max_num_seqs or 256) * self._most
        here = state[state["life"] != 3]
        waiting = float(here["waiting"].sum()) + sim.queued
        return np.array([
            np.count_nonzero(here["life"] == 1) / self._most, np.count_nonzero(here["life"] == 0) / self._most,
            float(here["running"].sum()) / seqs, waiting / seqs,
            float(here["used_blocks"].sum()) / max(float(here["capacity_blocks"].sum()), 1.0),
            self._rate], np.float32)

    def step(self, action: np.int64) -> Made:
        """Ask for `action` + 1 workers and let an interval pass."""
        sim = self._sim
        if sim.finished:
            raise RuntimeError("the episode is over; call reset()")
        if not self.action_space.contains(np.int64(action)):
            raise ValueError(f"action must be from 0 to {self._most - 1}, got {action!r}")
        sim.scale(int(action) + 1)
        sim.run_until(sim.now_ms + self._interval)
        arrived = int(np.count_nonzero(~np.isnan(sim.columns["arrival_ms"])))
        self._rate, self._arrived = (arrived - self._arrived) / self._interval * 1000.0, arrived
        seconds, self._seconds = sim.worker_seconds - self._seconds, sim.worker_seconds
        good, late = self._good()
        return self._observe(), good - late - self._cost * seconds, sim.finished, False, {"worker_seconds": seconds}


class ThreadedVectorEnv(VectorEnv[NDArray[np.float32], NDArray[np.int64], Any]):
    """Environments of one kind, stepped at once by threads; one that is over begins again with the next step.

    Parameters
    ----------
    makers : sequence of callable
        Each makes an environment.
    threads : int, optional
        As many as environments if None.
    """

    def __init__(self, makers: Sequence[Callable[[], _Env]], threads: int | None = None) -> None:
        self.envs = [make() for make in makers]
        if not self.envs:
            raise ValueError("ThreadedVectorEnv takes at least one environment")
        self.num_envs = len(self.envs)
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._threads = ThreadPoolExecutor(threads or self.num_envs)
        self._over = np.zeros(self.num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None,
              ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin all of them again."""
        self._over[:] = False
        return np.stack([one for one, _ in self._threads.map(lambda env: env.reset(), self.envs)]), {}

    def _step(self, i: int, action: Any) -> Made:
        if self._over[i]:
            return self.envs[i].reset()[0], 0.0, False, False, {}
        seen, reward, over, cut, info = self.envs[i].step(action)
        return seen, float(reward), over, cut, info

    def step(self, actions: NDArray[np.int64]) -> tuple[NDArray[np.float32], Any, Any, Any, dict[str, Any]]:
        """One step of each."""
        made = list(self._threads.map(self._step, range(self.num_envs), actions))
        over = np.array([m[2] for m in made])
        self._over = over.copy()
        return (np.stack([m[0] for m in made]), np.array([m[1] for m in made]), over, np.zeros(self.num_envs, bool), {})

    def close_extras(self, **kwargs: Any) -> None:
        self._threads.shutdown()
