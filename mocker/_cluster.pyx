# cython: language_level=3
"""The clock: arrivals, workers, passes. Requests are rows of the workload; workers are engine cores.

Answers to `replay/offline/{single,agg}.rs` and `loadgen/driver.rs` for round robin. Two ways to the same events:
`run_lane` simulates one worker of an open-loop replay on its own, since request k goes to worker k mod W whatever
happens, and fast-forwards it; `run_coupled` is the event loop for workloads whose arrivals depend on completions
(closed loop, sessions). At one timestamp completions come first, then arrivals, then passes by worker number.

Costs: a lane O(passes in which something happens); the loop O(passes) heap operations. Both stop after a given
number of passes, so that a caller can show progress and be interrupted.
"""
from libc.math cimport INFINITY, isnan
from libc.stdlib cimport calloc, free, malloc

import numpy as np

from mocker._collect cimport Collector
from mocker._common cimport END_NONE, END_REJECTED, ERR_MEMORY, NIL, int32_t, int64_t, uint8_t, uint32_t
from mocker._core cimport Core, Request
from mocker._engine cimport EngineCore
from mocker._hash cimport hash_blocks
from mocker._heap cimport Pending, heap_pop, heap_push
from mocker._kv cimport Pool, path_free, path_reserve
from mocker._paths cimport PathTable
from mocker._requests cimport core_enqueue, core_new
from mocker._router cimport (
    ROUTED_ERROR, ROUTED_LATER, ROUTED_NEVER, Router, RouterCore, router_arrival, router_completed, router_drain,
    router_events, router_prefill_completed)
from mocker._rules cimport RULE_LATE, VllmRulesCore, rules_enqueue, rules_forward, rules_new, rules_pass
from mocker._rules_engine cimport RulesEngine
from mocker._sglang cimport (
    SglangCore, SglRequest, sgl_enqueue, sgl_forward, sgl_new, sgl_pass)
from mocker._sglang_engine cimport SglangEngine
from mocker._vllm cimport core_forward, core_pass

cdef enum:
    IDLE_LIMIT = 100000            # passes in a row, beyond the tokens of the pool, that bring nobody further: stuck


cdef inline int64_t order_of(double at) noexcept nogil:
    """A number that orders as the time does (which is not negative)."""
    return (<int64_t*>&at)[0]


cdef void tell_sglang(Router* route, int32_t worker, SglangCore* g) noexcept nogil:
    """Tell a router an SGLang core's KV events since the last time."""
    cdef Pool log
    log.events, log.pieces = g.events, g.pieces
    log.events_used, log.pieces_used, log.event_tokens_used = g.events_used, g.pieces_used, 0
    router_events(route, worker, &log)
    g.events_used = g.pieces_used = 0


cdef class Cluster:
    """A replay under way.

    Parameters
    ----------
    engines : list of EngineCore or of SglangEngine
        One per worker, not recording, with no requests.
    collector : Collector
        A row per request of the workload.
    arrival : array of float64, shape (n,)
        Arrival times, ms (sessions: of the first turns; ignored in closed loop).
    prompt, limit : array of int64, shape (n,)
        Prompt tokens and tokens to generate.
    paths : PathTable or None
        Block identities; None if the engines take real tokens.
    tokens : callable or None
        ``tokens(row) -> (prompt uint32 array, planned output uint32 array)`` for engines of real tokens.
    router : RouterCore or None
        Chooses workers in `run_coupled`; None: each in turn.
    cap_ms : float
        No pass starts after this time; infinity for none.
    single : bool
        Follow the single-worker runtime in what happens at the cap.
    fast : bool
        Fast-forward passes that only decode.
    """

    def __cinit__(self, list engines, Collector collector, const double[::1] arrival,
                  const int64_t[::1] prompt, const int64_t[::1] limit, PathTable paths, tokens,
                  RouterCore router, double cap_ms, bint single, bint fast):
        cdef int64_t i
        self.engines, self.collector, self.arrival, self.prompt, self.limit = engines, collector, arrival, prompt, limit
        self.paths, self.tokens, self.cap, self.single, self.fast = paths, tokens, cap_ms, single, fast
        self.workers, self.n = len(engines), prompt.shape[0]
        self.counted = self.workers
        self.worker_of = np.full(self.n, NIL, np.int32)
        self.arrival_of = np.full(self.n, np.nan)
        self.worker, self.arrived = self.worker_of, self.arrival_of
        self.kind = (KIND_SGLANG if isinstance(engines[0], SglangEngine)
                     else KIND_RULES if isinstance(engines[0], RulesEngine) else KIND_CORE)
        self.cores = <void**>malloc(self.workers * sizeof(void*))
        self.rules = <VllmRulesCore**>calloc(self.workers, sizeof(VllmRulesCore*))
        self.views = <View*>calloc(self.workers, sizeof(View))
        self.lanes = <Lane*>malloc(self.workers * sizeof(Lane))
        self.busy = <uint8_t*>malloc(self.workers)
        if self.cores == NULL or self.rules == NULL or self.views == NULL or self.lanes == NULL or self.busy == NULL:
            raise MemoryError
        self.router = router
        if router is not None:
            self.route = &router.r
        for i in range(self.workers):
            self.attach(engines[i], i)
            self.lanes[i] = Lane(0.0, i, 0.0, 0, False, False)
            self.busy[i] = 0

    cdef int attach(self, object engine, int64_t worker) except -1:
        """Point an engine at the collector and keep its address."""
        cdef EngineCore core
        cdef SglangEngine sglang
        if self.kind == KIND_SGLANG:
            sglang = engine
            sglang.collect(self.collector)
            sglang.c.note_first = self.router is not None
            self.cores[worker] = &sglang.c
        else:
            core = engine
            core.c.rows, core.c.gaps = &self.collector.rows, &self.collector.gaps
            core.c.note_first = self.router is not None
            self.cores[worker] = &core.c
            if self.kind == KIND_RULES:
                self.rules[worker] = &(<RulesEngine>engine).x
        return 0

    def __dealloc__(self):
        free(self.cores)
        free(self.rules)
        free(self.views)
        free(self.lanes)
        free(self.busy)
        free(self.events.items)
        free(self.ready.items)
        path_free(&self.scratch)

    def set_order(self, const int64_t[::1] order):
        """Open loop of single requests: rows by arrival time (stable)."""
        self.order = order

    def set_sessions(self, const int64_t[::1] turn_offsets, const int64_t[::1] turn_rows,
                     const int32_t[::1] session_of, const double[::1] delay, int64_t concurrency):
        """Sessions: rows of each in turn order, think times, and how many may be active (0: open loop)."""
        cdef int64_t s
        self.turn_offsets, self.turn_rows, self.session_of, self.delay = turn_offsets, turn_rows, session_of, delay
        self.sessions = turn_offsets.shape[0] - 1
        self.next_turn = np.zeros(self.sessions, np.int64)
        self.sessions_left = self.sessions
        self.limit_active = concurrency
        if concurrency > 0:
            self.activate(0.0)
            return
        for s in range(self.sessions):
            if not heap_push(&self.ready, 0.0 if isnan(self.arrival[turn_rows[turn_offsets[s]]])
                             else self.arrival[turn_rows[turn_offsets[s]]], s, 0):
                raise MemoryError

    def set_ranks(self, const int64_t[::1] priority, const int64_t[::1] strict, const int32_t[::1] policy):
        """Priority, strict priority and router queue class code of each row."""
        self.priority, self.strict, self.policy, self.ranked = priority, strict, policy, True

    # -- what both ways share ---------------------------------------------------------------------------------------

    cdef bint submit(self, int64_t row, int64_t worker) noexcept nogil:
        """Hand a request to a worker; false if memory is short. A negative limit: no engine takes it."""
        cdef Core* c
        cdef int32_t slot
        if self.limit[row] < 0:
            self.collector.rows.terminal[row] = END_REJECTED
            self.ended += 1
            return self.sessions == 0 or self.turn_ended(row, self.now)
        self.worker[row] = <int32_t>worker
        self.views[worker].count += 1
        if self.paths is None:
            return self.submit_tokens(row, worker)
        slot = self.form(row, worker, self.limit[row])
        if slot == NIL:
            return False
        if self.kind == KIND_SGLANG:
            sgl_enqueue(<SglangCore*>self.cores[worker], slot)
            self.views[worker].n_waiting = (<SglangCore*>self.cores[worker]).n_waiting
            return True
        c = <Core*>self.cores[worker]
        if c.req[slot].limit < self.limit[row]:
            self.clamped += 1
        if self.kind == KIND_RULES:
            rules_enqueue(self.rules[worker], slot, NIL, self.priority[row] if self.ranked else 0)
        else:
            core_enqueue(c, slot, NIL)
        self.views[worker].n_waiting = c.n_waiting
        return True

    cdef int32_t form(self, int64_t row, int64_t worker, int64_t limit) noexcept nogil:
        """A slot on a worker for a request of trace segments, not queued yet; NIL if memory is short."""
        cdef SglangCore* g
        cdef Core* c
        cdef int32_t slot
        if self.kind == KIND_SGLANG:
            g = <SglangCore*>self.cores[worker]
            slot = sgl_new(g, row, self.prompt[row], limit)
            if slot == NIL or self.paths.fill(&g.req[slot].path, row, <int32_t>g.req[slot].full) != 0:
                return NIL
            g.req[slot].own_key = g.next_own_key
            g.next_own_key += 1
            return slot
        c = <Core*>self.cores[worker]
        if self.kind == KIND_RULES:
            slot = rules_new(self.rules[worker], row, self.prompt[row], limit)
        else:
            slot = core_new(c, row, self.prompt[row], limit)
        if slot == NIL or not c.caching:
            return slot
        if self.paths.fill(&c.req[slot].path, row, c.req[slot].full) != 0:
            return NIL
        c.req[slot].own_key = c.next_own_key
        c.next_own_key += 1
        return slot

    cdef void run_pass(self, int64_t worker, double now) noexcept nogil:
        """One pass of a worker; its view shows what came of it."""
        if self.kind == KIND_SGLANG:
            sgl_pass(<SglangCore*>self.cores[worker], now)
        elif self.kind == KIND_RULES:
            rules_pass(self.rules[worker], now)
        else:
            core_pass(<Core*>self.cores[worker], now)
        self.look(worker)

    cdef double forward(self, int64_t worker, double now, double until) noexcept nogil:
        """Fast-forward a worker through passes that only decode; returns its new now."""
        if self.kind == KIND_SGLANG:
            now = sgl_forward(<SglangCore*>self.cores[worker], now, until, self.cap)
        elif self.kind == KIND_RULES:
            now = rules_forward(self.rules[worker], now, until, self.cap)
        else:
            now = core_forward(<Core*>self.cores[worker], now, until, self.cap)
        return now

    cdef void look(self, int64_t worker) noexcept nogil:
        cdef View* v = &self.views[worker]
        cdef Core* c
        cdef SglangCore* g
        if self.kind == KIND_SGLANG:
            g = <SglangCore*>self.cores[worker]
            v.end_ms, v.last_start, v.count, v.n_waiting = g.end_ms, g.last_start, g.count, g.n_waiting
            v.made, v.completed, v.admitted, v.passes = g.made, g.completed, g.admitted, g.passes
            v.preempted, v.worked, v.steady, v.error = g.preempted, g.admitted > 0, g.steady, g.error
            v.ended, v.ended_used = g.notes, g.notes_used
            return
        c = <Core*>self.cores[worker]
        v.end_ms, v.last_start, v.count, v.n_waiting = c.end_ms, c.last_start, c.count, c.n_waiting
        v.made, v.completed, v.admitted, v.passes = c.made, c.completed, c.admitted, c.passes
        v.preempted, v.worked, v.steady = c.preempted, c.budget < c.max_tokens, c.steady
        v.error = c.error or c.pool.error
        v.ended, v.ended_used = c.ended, c.ended_used

    cdef bint submit_tokens(self, int64_t row, int64_t worker) noexcept with gil:
        cdef EngineCore engine
        try:
            prompt, plan = self.tokens(row)
            if self.kind == KIND_SGLANG:
                (<SglangEngine>self.engines[worker]).submit(row, prompt, self.limit[row], plan, 0, row)
                return True
            engine = self.engines[worker]
            slot = engine.submit(row, prompt, self.limit[row], plan, NIL)
        except MemoryError:
            return False
        if engine.c.req[slot].limit < self.limit[row]:
            self.clamped += 1
        self.views[worker].n_waiting = engine.c.n_waiting
        return True

    cdef bint brought(self, View* c) noexcept nogil:
        """Whether the pass brought somebody further: made a token or ended a request."""
        return c.made > 0 or c.completed > 0

    cdef void uncount(self, View* c) noexcept nogil:
        """Requests whose last pass ends after the cap: nobody sees them end."""
        cdef int64_t i
        for i in range(c.ended_used):
            if c.ended[i] >= 0:
                self.collector.rows.terminal[c.ended[i]] = END_NONE

    def flush(self):
        """Write what is known of the requests that have not ended into the columns."""
        cdef int64_t w, i
        cdef Core* c
        cdef Request* r
        cdef SglangCore* g
        cdef SglRequest* q
        for w in range(self.counted):
            if self.kind == KIND_SGLANG:
                g = <SglangCore*>self.cores[w]
                for i in range(g.req_used):
                    q = &g.req[i]
                    if q.status != 0 and q.gen > 0:
                        self.collector.rows.tokens[q.id] = q.gen
                        self.collector.rows.last_token[q.id] = q.last_ms
                continue
            c = <Core*>self.cores[w]
            for i in range(c.req_used):
                r = &c.req[i]
                if r.status != 0 and r.gen > 0:
                    self.collector.rows.tokens[r.id] = r.gen
                    self.collector.rows.last_token[r.id] = r.last_ms

    def raise_errors(self):
        """Turn an error of an engine or the collector into an exception."""
        for engine in self.engines:
            if self.kind == KIND_SGLANG:
                (<SglangEngine>engine).raise_error()
            else:
                (<EngineCore>engine).raise_error()
        if self.router is not None:
            self.router.raise_error()
        if self.collector.gaps.error:
            raise MemoryError

    def last_timestamp(self):
        """Newest time that the cluster processed, ms."""
        cdef double last = self.now
        cdef int64_t w
        for w in range(self.workers):
            if self.lanes[w].last > last:
                last = self.lanes[w].last
        return last

    # -- open loop, one worker at a time ------------------------------------------------------------------------------

    def run_lane(self, int64_t worker, int64_t passes):
        """Go on with one worker of an open-loop replay for about `passes` passes; True when it is done."""
        with nogil:
            self.lane(worker, passes)
        self.raise_errors()
        if self.lanes[worker].stalled:
            self.stalled = True
        return self.lanes[worker].done

    cdef void lane(self, int64_t worker, int64_t passes) noexcept nogil:
        cdef View* c = &self.views[worker]
        cdef Lane* lane = &self.lanes[worker]
        cdef double until, now = lane.now
        cdef int64_t stop = c.passes + passes
        while c.passes < stop:
            if not self.deliver(worker, now if now <= self.cap or self.single else self.cap):
                c.error = ERR_MEMORY
            if c.error:
                break
            if c.count == 0 and lane.next < self.n and now <= self.cap:
                now = self.arrival[self.order[lane.next]]
                if now > self.cap and not self.single:
                    lane.done = True
                    break
                lane.last = now
                continue
            if c.count == 0 or now > self.cap:
                lane.done = True
                break
            self.run_pass(worker, now)
            self.ended += c.ended_used
            lane.last = now
            if self.brought(c):
                lane.idle_passes = 0
            elif self.stuck(worker, now, &lane.idle_passes):
                if lane.next >= self.n:
                    lane.done = lane.stalled = True
                    break
                c.end_ms = self.arrival[self.order[lane.next]]
            now = c.end_ms
            if now > self.cap and not self.single:
                self.uncount(c)
                continue
            lane.last = now
            if c.steady and self.fast:
                until = INFINITY
                if c.n_waiting == 0 and lane.next < self.n:
                    until = self.arrival[self.order[lane.next]]
                now = self.forward(worker, now, until)
                if now > self.cap and not self.single:
                    self.look(worker)
                    lane.last = c.last_start
                else:
                    lane.last = now
        lane.now = now

    cdef bint deliver(self, int64_t worker, double at) noexcept nogil:
        """Submit the worker's arrivals until `at`; false if memory is short."""
        cdef Lane* lane = &self.lanes[worker]
        cdef int64_t row
        while lane.next < self.n:
            row = self.order[lane.next]
            if self.arrival[row] > at:
                break
            self.arrived[row] = self.arrival[row]
            if not self.submit(row, worker):
                return False
            if self.arrival[row] > lane.last:
                lane.last = self.arrival[row]
            lane.next += self.workers
        return True

    cdef bint stuck(self, int64_t worker, double start, int64_t* idle) noexcept nogil:
        """Count a pass that brought nobody further; true when no other pass can, at once if this one changed nothing.

        Without a preemption each pass computes a token that the pool has room for, so more passes than the pool has
        tokens go round in circles.
        """
        cdef View* c = &self.views[worker]
        idle[0] += 1
        return ((c.admitted == 0 and not c.preempted and not c.worked and c.end_ms <= start)
                or (idle[0] >= IDLE_LIMIT and idle[0] >= IDLE_LIMIT + self.pool_tokens(worker)))

    cdef int64_t pool_tokens(self, int64_t worker) noexcept nogil:
        """Tokens that a worker's pool holds."""
        cdef Core* c
        if self.kind == KIND_SGLANG:
            return (<SglangCore*>self.cores[worker]).total
        c = <Core*>self.cores[worker]
        return c.pool.capacity << c.shift

    # -- arrivals that depend on completions -------------------------------------------------------------------------

    cdef bint activate(self, double now) noexcept nogil:
        """Closed loop: start sessions in order while fewer than the limit are active."""
        while self.active_sessions < self.limit_active and self.next_session < self.sessions:
            if not heap_push(&self.ready, now, self.next_session, 0):
                return False
            self.next_session += 1
            self.active_sessions += 1
        return True

    cdef bint turn_ended(self, int64_t row, double now) noexcept nogil:
        """A turn ended (however): its session goes on after its think time, or gives up its place."""
        cdef int64_t s = self.session_of[row], turn = self.next_turn[s]
        self.in_flight -= 1
        if self.turn_offsets[s] + turn < self.turn_offsets[s + 1]:
            return heap_push(&self.ready, now + self.delay[self.turn_rows[self.turn_offsets[s] + turn]], s, turn)
        self.sessions_left -= 1
        if self.limit_active > 0:
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
            row = self.turn_rows[self.turn_offsets[turn.first] + turn.second]
            self.next_turn[turn.first] = turn.second + 1
            self.in_flight += 1
            self.arrived[row] = now if self.limit_active > 0 else turn.at
            if not self.dispatch(row, now):
                return False
        return True

    cdef bint dispatch(self, int64_t row, double now) noexcept nogil:
        """Give an arrival to a worker, or to whoever chooses one; false if memory is short."""
        if self.route != NULL:
            return self.routed(row, now)
        if not self.submit(row, self.next_worker):
            return False
        self.next_worker = (self.next_worker + 1) % self.workers
        return True

    cdef bint routed(self, int64_t row, double now) noexcept nogil:
        """Ask the router about an arrival; it may be queued there."""
        cdef int32_t worker
        if self.paths is None:
            if not self.path_of_tokens(row):
                return False
        elif self.paths.fill(&self.scratch, row, <int32_t>(self.prompt[row] // self.route.block_size)) != 0:
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
        return self.submit(row, worker)

    cdef bint path_of_tokens(self, int64_t row) noexcept with gil:
        """Path of a request of real tokens: an element a block, named by its sequence hash."""
        cdef const uint32_t[::1] prompt = self.tokens(row)[0]
        cdef int32_t i, full = <int32_t>(prompt.shape[0] // self.route.block_size)
        if path_reserve(&self.scratch, full + 1, True, 0) != 0:
            return False
        if full:
            hash_blocks(&prompt[0], full, <size_t>self.route.block_size, False, 0, self.scratch.local,
                        self.scratch.keys)
        for i in range(full):
            self.scratch.ends[i] = i + 1
        self.scratch.n = full
        return True

    cdef bint placed(self, double now) noexcept nogil:
        """Dispatch what the router lets go, now that loads have changed."""
        cdef int64_t i, n = router_drain(self.route, now)
        for i in range(n):
            if not self.submit(self.route.placed[i].row, self.route.placed[i].worker):
                return False
        return True

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
                if not self.turn_ended(c.ended[i], now):
                    return False
            if self.route != NULL and self.route.queued > 0 and not self.placed(now):
                return False
        return True

    def run_coupled(self, int64_t passes):
        """Go on for about `passes` passes; True when the replay is done."""
        cdef bint ok
        with nogil:
            ok = self.coupled(passes)
        self.raise_errors()
        if not ok:
            raise MemoryError
        return self.finished

    cdef bint coupled(self, int64_t passes) noexcept nogil:
        cdef double at, other
        cdef int64_t worker, done = 0
        if not self.started:
            self.started = True
            if not self.settle(&done):
                return False
        while done < passes and not self.failed:
            if self.stalled or (self.sessions_left == 0 and self.events.used == 0):
                self.finished = True
                return True
            at = self.next_ready()
            other = self.events.items[0].at if self.events.used > 0 else INFINITY
            if other < at or (self.single and self.limit_active > 0 and other < INFINITY):
                at = other                     # the single-worker closed loop looks for arrivals between passes only
            if at == INFINITY:
                if self.rescue():
                    if not self.settle(&done):
                        return False
                    continue
                self.finished = self.stalled = True
                return True
            if at > self.cap:
                for worker in range(self.workers):
                    if self.busy[worker] and self.views[worker].last_start > self.now:
                        self.now = self.views[worker].last_start
                if self.single:
                    self.now = other if other < INFINITY else at
                    if not self.completions() or (self.limit_active == 0 and not self.arrivals(self.now)):
                        return False
                self.finished = True
                return True
            if at > self.now:
                self.now = at
            if not self.settle(&done):
                return False
        return True

    cdef bint rescue(self) noexcept nogil:
        """Whether something could be done about a dead end."""
        return False

    cdef bint completions(self) noexcept nogil:
        """Passes that end now, in the order they began."""
        cdef int64_t worker
        while self.events.used > 0 and self.events.items[0].at == self.now:
            worker = heap_pop(&self.events).second % self.workers
            self.busy[worker] = 0
            self.late_events(worker)
            if not self.ended_rows(&self.views[worker], self.now):
                return False
        return True

    cdef bint settle(self, int64_t* done) noexcept nogil:
        """Everything that happens at `now`, until nothing does any more."""
        cdef int64_t worker, dispatched
        cdef View* c
        cdef bint changed = True
        cdef double until
        self.sequence = 0
        while changed:
            changed = self.events.used > 0 and self.events.items[0].at == self.now
            if not self.completions():
                return False
            dispatched = self.in_flight
            if not self.arrivals(self.now):
                return False
            changed = changed or dispatched != self.in_flight
            worker = 0
            while worker < self.workers:
                c = &self.views[worker]
                if self.busy[worker] or c.count == 0:
                    worker += 1
                    continue
                self.run_pass(worker, self.now)
                done[0] += 1
                if c.error or self.failed:
                    return True
                if self.route != NULL and self.kind != KIND_SGLANG:
                    router_events(self.route, <int32_t>worker, &(<Core*>self.cores[worker]).pool)
                if c.end_ms > self.cap and not self.single:
                    self.uncount(c)
                if self.brought(c):
                    self.idle_passes = 0
                elif self.stuck(worker, self.now, &self.idle_passes):
                    worker += 1
                    continue
                changed = True
                if self.kind == KIND_RULES and self.rules[worker].rules & RULE_LATE:
                    if not self.ended_rows(c, self.now):   # these tokens were made when the pass before ended
                        return False
                    c.ended_used = 0
                if c.end_ms <= self.now:
                    self.late_events(worker)
                    if not self.ended_rows(c, self.now):
                        return False
                    worker = 0                 # whoever is ready now, lowest number first
                    self.sequence += 1
                    continue
                if self.fast and c.ended_used == 0:
                    if self.workers > 1:
                        if self.apart() and not self.ahead(worker, done):
                            return True
                    elif c.steady:
                        until = self.next_ready() if c.n_waiting == 0 or self.limit_active > 0 else INFINITY
                        c.end_ms = self.forward(worker, c.end_ms, until)
                self.busy[worker] = 1
                if not heap_push(&self.events, c.end_ms, order_of(c.last_start),
                                 worker + self.workers * self.sequence):
                    return False
                worker += 1
            self.sequence += 1
        return True

    cdef bint apart(self) noexcept nogil:
        """Whether until the next arrival nothing that one worker does concerns another or the router's choices."""
        return (self.limit_active == 0 and self.sessions == self.n and (self.route == NULL or self.route.queued == 0)
                and not (self.kind == KIND_RULES and self.rules[0].rules & RULE_LATE))

    cdef bint ahead(self, int64_t worker, int64_t* done) noexcept nogil:
        """Go on with a worker alone until the next arrival, or until a request ends or makes its first token.

        False after an error. The KV events of the passes are told early, but nobody asks for them before the arrival.
        """
        cdef View* c = &self.views[worker]
        cdef double start, end, until = self.next_ready()
        while c.ended_used == 0 and self.brought(c):
            if c.steady:
                end = self.forward(worker, c.end_ms, until)
                self.look(worker)
                c.end_ms = end
            if c.end_ms >= until or c.end_ms > self.cap:
                break
            self.late_events(worker)
            start = c.end_ms
            self.run_pass(worker, start)
            done[0] += 1
            if c.error:
                return False
            if self.route != NULL and self.kind != KIND_SGLANG:
                router_events(self.route, <int32_t>worker, &(<Core*>self.cores[worker]).pool)
            if c.end_ms > self.cap:
                self.uncount(c)
        return True

    # -- stuck requests ---------------------------------------------------------------------------------------------

    def unfinished(self):
        """Rows of the requests alive in the engines, with their worker and status.

        Returns
        -------
        list of tuple
            (row, worker, status code, tokens known, tokens computed, preemptions).
        """
        cdef int64_t w, i
        cdef Core* c
        cdef Request* r
        cdef SglangCore* g
        cdef SglRequest* q
        out = []
        for w in range(self.workers):
            if self.kind == KIND_SGLANG:
                g = <SglangCore*>self.cores[w]
                for i in range(g.req_used):
                    q = &g.req[i]
                    if q.status != 0:
                        out.append((q.id, w, 1, q.len, q.computed, q.retractions))
                continue
            c = <Core*>self.cores[w]
            for i in range(c.req_used):
                r = &c.req[i]
                if r.status != 0:
                    out.append((r.id, w, r.status, r.len, r.computed, r.preemptions))
        return out
