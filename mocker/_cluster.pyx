# cython: language_level=3
"""The clock: arrivals, workers, passes. Requests are rows of the workload; workers are engine cores.

Answers to `replay/offline/{single,agg}.rs` and `loadgen/driver.rs`. Two ways to the same events: `run_lane` (`_lanes`)
where no worker concerns another, and `run_coupled`, the event loop for workloads whose arrivals depend on completions
(closed loop, sessions, requests that wait for others) and for routers. At one timestamp completions come first, then
arrivals, then passes by worker number.

Costs: O(passes) heap operations. It stops after a given number of passes, so that a caller can show progress and be
interrupted.
"""
from libc.math cimport INFINITY, isnan
from libc.stdint cimport INT64_MAX
from libc.stdlib cimport free

import numpy as np

from mocker._common cimport END_CANCELED, END_NONE, END_REJECTED, NIL, int32_t, int64_t, uint32_t
from mocker._core cimport Core
from mocker._hash cimport hash_blocks
from mocker._foresight cimport Foresight
from mocker._heap cimport Pending, heap_pop, heap_push, order_of
from mocker._kv cimport path_free, path_reserve
from mocker._offload_pass cimport tiers_begin, tiers_look
from mocker._record cimport timeline_queue
from mocker._router cimport (
    ROUTED_ERROR, ROUTED_LATER, ROUTED_NEVER, router_arrival, router_cancel, router_completed, router_drain,
    router_events, router_prefill_completed)
from mocker._rules cimport RULE_LATE
from mocker._sglang cimport SglangCore
from mocker._watch cimport Watch
from mocker._workers cimport (
    FAST_AHEAD, FAST_CLOCK, IDLE_LIMIT, KIND_RULES, KIND_SGLANG, LIFE_ACTIVE, LIFE_STARTING, READY, ROLE_DECODE,
    ROLE_PREFILL, ROUND, Team, View, Workers, tell_sglang)

cdef enum:
    TICKS_LIMIT = 1000            # ticks in a row with nobody at work, coming or starting: the rest is stuck


cdef class Cluster(Foresight):
    """A replay under way; arguments as of `Workers`."""

    def __cinit__(self, *_arguments):
        self.tick_at = self.first_tick = self.horizon = self.lag = INFINITY
        self.enough = INT64_MAX

    def __dealloc__(self):
        free(self.ready.items)
        free(self.cancels.items)
        path_free(&self.scratch)

    def set_links(self, const int64_t[::1] roots, const int64_t[::1] next_offsets, const int64_t[::1] next_rows,
                  waits, const int32_t[::1] rank, const double[::1] delay, int64_t concurrency):
        """What each request waits for: a number of others, and then a time.

        Parameters
        ----------
        roots : array of int64, shape (sessions,)
            The request that begins each session; closed loop starts sessions in this order.
        next_offsets, next_rows : arrays of int64, shapes (n + 1,) and (links,)
            Whom the end of a request brings nearer: of row i those from next_offsets[i] to next_offsets[i + 1].
        waits : array of int64, shape (n,)
            How many ends a request waits for; those of none are ready at their arrival time.
        rank : array of int32, shape (n,)
            Who goes first of those that are ready at the same time.
        delay : array of float64, shape (n,)
            Time from the last of these ends until the request is ready, ms.
        concurrency : int
            How many sessions may be active; 0: open loop.
        """
        cdef int64_t i
        self.next_offsets, self.next_rows, self.rank, self.delay, self.roots = (
            next_offsets, next_rows, rank, delay, roots)
        self.ends_due = np.array(waits, np.int64)
        self.linked, self.rows_left = True, self.n
        self.lag = np.min(np.asarray(delay)[np.asarray(next_rows)], initial=INFINITY)
        self.limit_active = concurrency
        if concurrency > 0:
            self.activate(0.0)
            return
        for i in range(self.n):
            if self.ends_due[i] == 0 and not heap_push(
                    &self.ready, 0.0 if isnan(self.arrival[i]) else self.arrival[i], rank[i], i):
                raise MemoryError

    def set_cancellations(self, const double[::1] after):
        """When clients give up, ms from the arrival; NaN: never."""
        self.patience, self.impatient = after, True

    def set_growing(self, grow):
        """Call `grow(row)` when a row is ready: it writes the prompt and limit of the row into the arrays given."""
        self.grow = grow

    # -- arrivals that depend on completions -------------------------------------------------------------------------

    cdef bint activate(self, double now) noexcept nogil:
        """Closed loop: start sessions in order while fewer than the limit are active."""
        cdef int64_t row
        while self.active_sessions < self.limit_active and self.next_session < self.roots.shape[0]:
            row = self.roots[self.next_session]
            if not heap_push(&self.ready, now, self.rank[row], row):
                return False
            self.next_session += 1
            self.active_sessions += 1
        return True

    cdef bint turn_ended(self, int64_t row, double now) noexcept nogil:
        """A request ended (however): those that waited for it come nearer, or its session gives up its place."""
        cdef int64_t i, other
        if not self.linked:
            return True
        self.in_flight -= 1
        self.rows_left -= 1
        self.ends_due[row] = NIL               # everybody has been told
        for i in range(self.next_offsets[row], self.next_offsets[row + 1]):
            other = self.next_rows[i]
            self.ends_due[other] -= 1
            if self.ends_due[other] == 0 and not heap_push(
                    &self.ready, now + self.delay[other], self.rank[other], other):
                return False
        if self.limit_active > 0 and self.next_offsets[row] == self.next_offsets[row + 1]:
            self.active_sessions -= 1
            return self.activate(now)
        return True

    cdef bint arrivals(self, double now) noexcept nogil:
        """Dispatch every turn that is ready at `now`; false if memory is short."""
        cdef Pending turn
        cdef int64_t row
        while self.ready.used > 0 and self.ready.items[0].at <= now:
            if self.limit_active > 0 and self.in_flight >= self.limit_active:
                break
            turn = heap_pop(&self.ready)
            row = turn.second
            self.in_flight += 1
            self.arrived[row] = now if self.limit_active > 0 else turn.at
            if (self.impatient and not isnan(self.patience[row]) and not heap_push(
                    &self.cancels, self.arrived[row] + self.patience[row], self.rank[row], row)):
                return False
            if self.grow is not None and not self.grown(row):
                return False
            if not self.dispatch(row, now):
                return False
        return True

    cdef double next_cancel(self) noexcept nogil:
        """When the next client gives up a request that is still alive; infinity if none does."""
        while self.cancels.used > 0 and self.collector.rows.terminal[self.cancels.items[0].second] != END_NONE:
            heap_pop(&self.cancels)
        return self.cancels.items[0].at if self.cancels.used > 0 else INFINITY

    cdef bint cancellations(self, bint* changed) noexcept nogil:
        """Requests that their clients give up now; false if memory is short."""
        while self.next_cancel() <= self.now:
            if not self.cancel(heap_pop(&self.cancels).second, changed):
                return False
        return True

    cdef bint cancel(self, int64_t row, bint* changed) noexcept nogil:
        """Take a request away from the router or its worker, there when the pass that runs has ended."""
        cdef int32_t worker = self.worker[row]
        if worker != NIL:
            if self.busy[worker]:
                return heap_push(&self.cancels, self.views[worker].end_ms, self.rank[row], row)
            if not self.drop(row, worker):
                return True
            if self.route != NULL:
                router_completed(self.route, row, self.now)
        elif self.route != NULL and not router_cancel(self.route, row):
            return True
        changed[0] = True
        self.collector.rows.terminal[row] = END_CANCELED
        self.ended += 1
        return self.turn_ended(row, self.now) and (
            self.route == NULL or self.route.queued == 0 or self.placed(self.now))

    cdef bint grown(self, int64_t row) noexcept with gil:
        """Let the prompt of a row become known; false if memory is short."""
        try:
            self.grow(row)
        except MemoryError:
            return False
        return True

    cdef bint dispatch(self, int64_t row, double now) noexcept nogil:
        """Give an arrival to a worker, or to whoever chooses one; false if memory is short."""
        cdef Team* t = &self.teams[ROLE_DECODE]
        if self.route != NULL:
            return self.routed(row, now)
        if t.n_active == 0:
            self.held[(self.held_first + self.n_held) % self.n] = row
            self.n_held += 1
            return True
        t.turn = t.turn % t.n_active + 1
        if self.views[t.active[t.turn - 1]].foreseen > 0:
            self.meet(t.active[t.turn - 1], now, False)
        return self.submit(row, t.active[t.turn - 1])

    cdef bint took_over(self, int role) noexcept nogil:
        """A role has a new worker: it gets what waited for one."""
        cdef int64_t row, _
        for _ in range(self.n_held):
            row = self.held[self.held_first]
            self.held_first = (self.held_first + 1) % self.n
            self.n_held -= 1
            if self.collector.rows.terminal[row] == END_NONE and not self.dispatch(row, self.now):
                return False
        return True

    cdef bint routed(self, int64_t row, double now) noexcept nogil:
        """Ask the router about an arrival; it may be queued there."""
        cdef int32_t worker
        if not self.route_path(row, self.route.block_size):
            return False
        worker = router_arrival(self.route, row, &self.scratch, self.prompt[row],
                                self.priority[row] if self.ranked else 0,
                                <uint32_t>self.strict[row] if self.ranked else 0,
                                self.policy[row] if self.ranked else 0, now)
        if worker == ROUTED_LATER:
            return True
        if worker == ROUTED_NEVER:             # the reference gives up the whole replay here
            self.collector.rows.terminal[row] = END_REJECTED
            self.ended += 1
            return self.turn_ended(row, now)
        if worker == ROUTED_ERROR:
            self.failed = True
            return True
        if self.watch is not None:
            self.saw_admission(self.route.last_overlap, self.prompt[row])
        return self.submit(row, worker)

    cdef bint route_path(self, int64_t row, int64_t block_size) noexcept nogil:
        """Write the path that a router looks at into `scratch`; false if memory is short."""
        if self.paths is None:
            return self.path_of_tokens(row, block_size)
        return self.paths.fill(&self.scratch, row, <int32_t>(self.prompt[row] // block_size)) == 0

    cdef bint path_of_tokens(self, int64_t row, int64_t block_size) noexcept with gil:
        """Path of a request of real tokens: an element a block, named by its sequence hash."""
        cdef const uint32_t[::1] prompt = self.tokens(row)[0]
        cdef int32_t i, full = <int32_t>(prompt.shape[0] // block_size)
        if path_reserve(&self.scratch, full + 1, True, 0) != 0:
            return False
        if full:
            hash_blocks(&prompt[0], full, <size_t>block_size, False, 0, self.scratch.local, self.scratch.keys)
        for i in range(full):
            self.scratch.ends[i] = i + 1
        self.scratch.n = full
        return True

    cdef bint placed(self, double now) noexcept nogil:
        """Dispatch what the router lets go, now that loads have changed."""
        cdef int64_t i, n = router_drain(self.route, now)
        for i in range(n):
            if self.watch is not None:
                self.saw_admission(self.route.placed[i].overlap, self.route.placed[i].isl)
            if not self.submit(self.route.placed[i].row, self.route.placed[i].worker):
                return False
        return True

    cdef void saw_admission(self, int64_t overlap, int64_t prompt) noexcept nogil:
        self.watch.saw_admission(overlap, (prompt + self.route.block_size - 1) // self.route.block_size)

    cdef void late_events(self, int64_t worker) noexcept nogil:
        """KV events that are visible when a pass ends (SGLang's), to the router."""
        if self.route != NULL and self.kind == KIND_SGLANG:
            tell_sglang(self.route, <int32_t>worker, <SglangCore*>self.cores[worker])

    cdef double next_ready(self) noexcept nogil:
        """When the next turn is ready; infinity if none is, or none may start."""
        if self.ready.used == 0 or (self.limit_active > 0 and self.in_flight >= self.limit_active):
            return INFINITY
        return self.ready.items[0].at

    cdef bint ended_rows(self, View* c, double now) noexcept nogil:
        cdef int64_t i
        for i in range(c.ended_used):
            if c.ended[i] < 0:                 # a first token
                router_prefill_completed(self.route, ~c.ended[i], now)
            else:
                self.ended += 1
                if self.route != NULL:
                    router_completed(self.route, c.ended[i], now)
                if self.watch is not None:
                    self.saw_end(c.ended[i])
                if not self.turn_ended(c.ended[i], now):
                    return False
            if self.route != NULL and self.route.queued > 0 and not self.placed(now):
                return False
        return True

    def raise_errors(self):
        """Turn an error of an engine, a router, a planner or the collector into an exception."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        Workers.raise_errors(self)

    def run_coupled(self, int64_t passes):
        """Go on for about `passes` passes; True when the replay is done."""
        cdef bint ok
        cdef int64_t worker
        with nogil:
            ok = self.coupled(passes)
            for worker in range(self.workers):
                self.fold(worker)
        self.raise_errors()
        if not ok:
            raise MemoryError
        return self.finished

    cdef bint coupled(self, int64_t passes) noexcept nogil:
        """The event loop; whoever looks when it comes back sees every worker in the pass that runs now."""
        cdef int64_t worker
        cdef bint ok
        self.foresees = (self.kind == KIND_SGLANG and self.unforeseeable()
                         and self.fast & FAST_AHEAD and self.fast & FAST_CLOCK and self.horizon == INFINITY
                         and self.timeline == NULL and self.planner is None and not self.impatient
                         and self.cancels.used == 0)
        ok = self.events_until(passes)
        for worker in range(self.workers if self.foresees else 0):
            if self.views[worker].foreseen > 0:
                self.meet(worker, INFINITY if self.finished else self.now, True)
        return ok

    cdef bint unforeseeable(self) noexcept nogil:
        """Whether workers concern each other, so that none can run ahead, but only by requests that come to them."""
        return self.workers > 1 and self.limit_active > 0 and self.route == NULL and self.apart_gaps != NULL

    cdef bint events_until(self, int64_t passes) noexcept nogil:
        cdef double at
        cdef int64_t worker, done = 0
        if not self.started:
            self.started = True
            if not self.settle(&done):
                return False
            self.tick_at = self.first_tick
        while done < passes and not self.failed and self.ended < self.enough:
            if self.stalled or (self.rows_left == 0 and self.events.used == self.starts):
                self.finished = True
                return True
            at = self.upcoming()
            if at == INFINITY:
                if self.rescue():
                    if not self.settle(&done):
                        return False
                    continue
                if self.tick_at == INFINITY:
                    self.finished = self.stalled = True
                    return True
            if self.idle_ticks > TICKS_LIMIT:
                self.finished = self.stalled = True
                return True
            if self.tick_at < at:
                at = self.tick_at
            if at > self.horizon:
                return True
            if at > self.cap:
                for worker in range(self.workers):
                    if self.busy[worker] and self.views[worker].last_start > self.now:
                        self.now = self.views[worker].last_start
                if self.single:
                    self.now = self.events.items[0].at if self.events.used > 0 else at
                    if not self.completions() or (self.limit_active == 0 and not self.arrivals(self.now)):
                        return False
                self.finished = True
                return True
            if at > self.now:
                if self.timeline != NULL:
                    timeline_queue(self.timeline, self.now, at, self.queued())
                if self.planner is not None:
                    self.clock_to(at)
                self.now = at
            if not self.settle(&done):
                return False
        return True

    cdef double upcoming(self) noexcept nogil:
        """When something happens next, ticks aside; infinity for never."""
        cdef double at = self.next_ready() if self.cancels.used == 0 else min(self.next_ready(), self.next_cancel())
        cdef double other = self.events.items[0].at if self.events.used > 0 else INFINITY
        if other < at or (self.single and self.limit_active > 0 and other < INFINITY):
            at = other                         # the single-worker closed loop looks for arrivals between passes only
        return at if self.offload is None else min(at, self.next_below())

    cdef int64_t queued(self) noexcept nogil:
        """Requests that a router keeps back."""
        return 0 if self.route == NULL else self.route.queued

    cdef bint rescue(self) noexcept nogil:
        """Whether something could be done about a dead end."""
        return False

    cdef bint completions(self) noexcept nogil:
        """Passes that end now, in the order they began."""
        cdef int64_t worker
        while self.events.used > 0 and self.events.items[0].at == self.now:
            worker = self.events.items[0].second % ROUND
            if worker >= READY:
                break
            heap_pop(&self.events)
            self.busy[worker] = 0
            if self.views[worker].foreseen > 0:
                self.fulfil(worker)
            if self.watch is not None:
                self.observe(worker)
            self.late_events(worker)
            if not self.views[worker].early and not self.ended_rows(&self.views[worker], self.now):
                return False
        return True

    cdef bint settle(self, int64_t* done) noexcept nogil:
        """Everything that happens at `now`, until nothing does any more."""
        cdef int64_t worker, dispatched
        cdef View* c
        cdef bint changed = True
        cdef double until
        while changed:
            changed = self.events.used > 0 and self.events.items[0].at == self.now
            if self.offload is not None and self.tick_below():
                changed = True
            if not self.completions():
                return False
            if self.planner is not None and not self.starting():
                return False
            if self.cancels.used > 0 and not self.cancellations(&changed):
                return False
            dispatched = self.in_flight
            if not self.arrivals(self.now):
                return False
            changed = changed or dispatched != self.in_flight
            worker = 0
            while worker < self.workers:
                c = &self.views[worker]
                if self.busy[worker] or ((c.count == 0 or c.asleep) and not c.early):
                    worker += 1
                    continue
                if c.early:
                    c.early = False            # `ahead` ran this pass, which told nobody of its endings
                else:
                    self.run_pass(worker, self.now)
                    done[0] += 1
                    if c.error or self.failed:
                        return True
                    if self.watch is not None:
                        self.measure(worker)
                    if self.route != NULL and self.kind != KIND_SGLANG:
                        router_events(self.route, <int32_t>worker, &(<Core*>self.cores[worker]).pool)
                    if c.end_ms > self.cap and not self.single:
                        self.uncount(c)
                if self.brought(c):
                    c.idle = self.idle_ticks = 0
                elif self.stuck(worker, self.now):
                    # a score might say another thing later, which no lone worker would ask
                    c.asleep = self.wishes or c.idle >= IDLE_LIMIT
                    worker += 1
                    continue
                changed = True
                if self.kind == KIND_RULES and self.rules[worker].rules & RULE_LATE:
                    if not self.ended_rows(c, self.now):   # these tokens were made when the pass before ended
                        return False
                    c.ended_used = (<Core*>self.cores[worker]).ended_used = 0
                if c.end_ms <= self.now:
                    if self.watch is not None:
                        self.observe(worker)
                    self.late_events(worker)
                    if not self.ended_rows(c, self.now):
                        return False
                    worker = 0                 # whoever is ready now, lowest number first
                    self.sequence += 1
                    continue
                if c.ended_used == 0:
                    if self.foresees:
                        self.foresee(worker)
                    elif self.workers > 1:
                        if self.fast & FAST_AHEAD and self.apart() and not self.ahead(worker, done):
                            return True
                    elif c.steady and self.fast & FAST_CLOCK:
                        until = INFINITY
                        if c.n_waiting == 0 or self.limit_active > 0 or self.overtaking or self.impatient:
                            until = self.next_ready()      # or else whoever comes has to wait anyway
                        until = min(min(until, self.next_cancel()), self.horizon)
                        c.end_ms = self.forward(worker, c.end_ms, until)
                self.busy[worker] = 1
                if not heap_push(&self.events, c.last_start if c.early else c.end_ms, order_of(c.last_start),
                                 worker + ROUND * self.sequence):
                    return False
                worker += 1
            if self.planner is not None and not self.planned(&changed):
                return False
            self.sequence += 1
        return True

    # -- workers that come and go -------------------------------------------------------------------------------------

    def set_planner(self, planner, recruit, *, double first_tick, double startup_ms, double prefill_startup_ms=0.0,
                    bint metrics=True):
        """Let a planner change the number of workers; comes before `run_coupled`, which then takes passes one by one.

        Parameters
        ----------
        planner : callable
            ``planner(now_ms) -> ((prefill, decode) or None, next tick in ms or None)``; the targets may be None too.
        recruit : callable
            ``recruit(role, number, offload) -> engine`` for new workers, above the tiers of this replay; role 0 is
            prefill, 1 decode or both.
        first_tick : float
            When the planner is asked first, ms; infinity for never.
        startup_ms, prefill_startup_ms : float
            Time that a new worker of the decode role, or of the prefill role, takes to start.
        metrics : bool
            Note the metrics of every pass.

        Returns
        -------
        Watch
            What happened since the last tick.
        """
        cdef int64_t worker
        self.planner, self.recruit, self.first_tick = planner, recruit, first_tick
        self.startup_ms[ROLE_PREFILL], self.startup_ms[ROLE_DECODE] = prefill_startup_ms, startup_ms
        self.watch, self.fast = Watch(metrics and first_tick < INFINITY), 0
        self.held = np.zeros(self.n, np.int64)
        for worker in range(self.workers):
            if self.kind == KIND_SGLANG:
                (<SglangCore*>self.cores[worker]).metrics = True
            else:
                (<Core*>self.cores[worker]).metrics = True
        return self.watch

    def replan(self, planner):
        """Let another planner go on in place of the one of `set_planner`; returns the Watch."""
        self.planner = planner
        return self.watch

    cdef bint starting(self) noexcept nogil:
        """Workers that have started by now, unless they were cancelled."""
        cdef int64_t worker
        while self.events.used > 0 and self.events.items[0].at == self.now:
            worker = self.events.items[0].second % ROUND - READY
            if worker < 0:
                break
            heap_pop(&self.events)
            self.starts -= 1
            if self.life[worker] == LIFE_STARTING:
                if (not self.begin(worker) or not self.vacated(self.role[worker])
                        or not self.took_over(self.role[worker])):
                    return False
        return True

    cdef bint vacated(self, int role) noexcept nogil:
        """The workers of a role have changed: its router may let queued requests go."""
        return self.route == NULL or self.route.queued == 0 or self.route.n_eligible == 0 or self.placed(self.now)

    cdef bint expect(self, int64_t worker, double at) noexcept nogil:
        """Note when a worker will have started."""
        self.starts += 1
        return heap_push(&self.events, at, order_of(self.now), READY + worker + ROUND * self.sequence)

    cdef bint planned(self, bint* changed) noexcept nogil:
        """Let drained workers go, and ask the planner if it is time and everything else of now has happened."""
        if self.leave():
            changed[0] = True
        if self.tick_at != self.now or (self.events.used > 0 and self.events.items[0].at == self.now):
            return True
        self.tick_at = INFINITY
        if self.quiet():
            return True
        if (self.events.used == self.starts and self.teams[0].n_starting + self.teams[1].n_starting == 0
                and self.next_ready() == INFINITY and self.next_below() == INFINITY):
            self.idle_ticks += 1
        changed[0] = True
        return self.tick()

    cdef bint quiet(self) noexcept nogil:
        """Whether all requests are through."""
        return self.rows_left == 0 and self.events.used == self.starts

    cdef bint tick(self) noexcept with gil:
        cdef int role
        cdef double now = self.now
        try:
            self.ticks += 1
            targets, at = self.planner(now)
            if targets is not None:
                for role in range(2):
                    if targets[role] is not None:
                        self.scale(role, targets[role])
                for role in range(2):
                    if targets[role] is not None and not self.vacated(role):
                        raise MemoryError
                self.free_departed()
            if at is not None and now < at < INFINITY and not self.quiet():
                self.tick_at = at
            else:
                self.watch.stop()
        except BaseException as error:
            self.failure, self.failed = error, True
        return True

    cdef int scale(self, int role, int64_t target) except -1:
        """Bring the active and starting workers of a role to a number; the newest go first."""
        cdef Team* t = &self.teams[role]
        cdef int64_t i, _, worker, excess = t.n_active + t.n_starting - target
        cdef double startup = self.startup_ms[role]
        cdef bint added = excess < 0
        for _ in range(-excess):
            worker = self.hire(self.recruit(role, t.used, self.offload), role,
                               LIFE_STARTING if startup > 0.0 else LIFE_ACTIVE)
            if startup > 0.0 and not self.expect(worker, self.now + startup):
                raise MemoryError
        i = t.used - 1
        while i >= 0 and excess > 0 and t.n_starting > 0:
            if self.life[t.members[i]] == LIFE_STARTING:
                t.n_starting -= 1
                self.go(t.members[i])
                excess -= 1
            i -= 1
        for _ in range(excess):
            self.retire(t.active[t.n_active - 1])
        self.leave()
        if added and startup <= 0.0 and not self.took_over(role):
            raise MemoryError
        return 0

    cdef bint tick_below(self) noexcept nogil:
        """Time passes below all workers, busy ones too, by number; whether a router was told something."""
        cdef int64_t worker
        cdef Core* c
        cdef bint told = False
        if self.single or (self.offload.apart and self.route == NULL):
            return False
        for worker in range(self.workers):
            c = <Core*>self.cores[worker]
            if c == NULL or c.tiers == NULL:   # it is gone, or has no tiers
                continue
            if self.offload.apart:
                tiers_look(c, self.now)
            else:
                tiers_begin(c, self.now)
            if self.route != NULL and c.pool.events_used > 0:
                told = True
                router_events(self.route, <int32_t>worker, &c.pool)
        return told

    # -- going on alone -----------------------------------------------------------------------------------------------

    cdef bint apart(self) noexcept nogil:
        """Whether until the next arrival nothing that one worker does concerns another or the router's choices."""
        return (self.limit_active == 0 and self.lag > 0.0
                and (self.route == NULL or self.route.queued == 0)
                and (self.offload is None or self.offload.apart))

    cdef bint ahead(self, int64_t worker, int64_t* done) noexcept nogil:
        """Go on with a worker alone until the next arrival, or until a request ends or makes its first token.

        No worker ends a request before now, so none that waits for an end arrives before now and the least delay.
        False after an error. The KV events of the passes are told early, but nobody asks for them before the arrival.
        With RULE_LATE endings belong to the time when their pass began: `early` asks the loop to tell them then.
        """
        cdef View* c = &self.views[worker]
        cdef bint late = self.kind == KIND_RULES and (self.rules[worker].rules & RULE_LATE) != 0
        cdef double start, end, until = min(min(min(self.next_ready(), self.next_cancel()), self.horizon),
                                            self.now + self.lag)
        cdef bint apart = self.offload is None or self.offload.apart
        while c.ended_used == 0 and self.brought(c) and (apart or not self.below(worker)):
            if c.steady and self.fast & FAST_CLOCK:
                if c.end_ms < until:           # what the pass before stored is seen then, not at the end of the stretch
                    self.late_events(worker)
                end = self.forward(worker, c.end_ms, until)
                self.look(worker)
                c.end_ms = end
                if self.offload is not None and self.route != NULL:
                    router_events(self.route, <int32_t>worker, &(<Core*>self.cores[worker]).pool)
            if c.end_ms >= until or c.end_ms > self.cap:
                break
            self.late_events(worker)
            start = c.end_ms
            self.run_pass(worker, start)
            done[0] += 1
            if c.error:
                return False
            c.idle = not self.brought(c)
            if self.route != NULL and self.kind != KIND_SGLANG:
                router_events(self.route, <int32_t>worker, &(<Core*>self.cores[worker]).pool)
            if c.end_ms > self.cap:
                self.uncount(c)
        c.early = late and c.ended_used > 0
        return True
