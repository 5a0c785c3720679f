# cython: language_level=3
"""Workers of a replay: one way to hand requests to the engine cores of every kind, run their passes, look at them.

Knows engines and the columns of the workload, no clock and no routes; `_cluster` and `_disagg` run on top of it.
Costs: O(prompt segments) a request, O(1) a look.
"""
from libc.math cimport INFINITY, NAN
from libc.stdlib cimport free, realloc
from libc.string cimport memset

import numpy as np

from mocker._calendar cimport calendar_settle
from mocker._collect cimport Collector
from mocker._common cimport END_NONE, END_REJECTED, NIL, grown, int32_t, int64_t, uint8_t
from mocker._core cimport Core, Request
from mocker._engine cimport EngineCore
from mocker._hooks cimport AdmissionHook, wish_note
from mocker._kv cimport Pool
from mocker._offload_engine cimport OffloadTiers, OffloadWorld
from mocker._offload_pass cimport tiers_deadline, tiers_look, tiers_quiet
from mocker._paths cimport PathTable
from mocker._record cimport Recorder, timeline_arrival, timeline_edge
from mocker._record_engines cimport record_pass, record_rest, record_sgl_pass, record_sgl_stretch, record_stretch
from mocker._requests cimport core_drop, core_enqueue, core_new
from mocker._router cimport ROUTER_MEMORY, Router, RouterCore, router_events, router_finalize_worker
from mocker._router_choice cimport router_add_worker, router_remove_worker
from mocker._rules cimport VllmRulesCore, rules_drop, rules_enqueue, rules_forward, rules_new, rules_pass
from mocker._rules_engine cimport RulesEngine
from mocker._sglang cimport (
    SglangCore, SglRequest, sgl_drop, sgl_enqueue, sgl_forward, sgl_metrics, sgl_new, sgl_pass)
from mocker._sglang_engine cimport SglangEngine
from mocker._timing cimport timing_varies
from mocker._vllm cimport core_forward, core_metrics, core_pass

cdef void* resized(void* array, int64_t cap, size_t size) except NULL:
    cdef void* moved = realloc(array, cap * size)
    if moved == NULL:
        raise MemoryError
    return moved


cdef void tell_sglang(Router* route, int32_t worker, SglangCore* g) noexcept nogil:
    """Tell a router an SGLang core's KV events since the last time."""
    cdef Pool log
    log.events, log.pieces = g.events, g.pieces
    log.events_used, log.pieces_used, log.event_tokens_used = g.events_used, g.pieces_used, 0
    router_events(route, worker, &log)
    g.events_used = g.pieces_used = 0


cdef class Workers:
    """The workers of a replay.

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
        Chooses workers; None: each in turn.
    cap_ms : float
        No pass starts after this time; infinity for none.
    single : bool
        Follow the single-worker runtime in what happens at the cap.
    fast : int
        Set of FastBit: shortcuts to take.
    """

    def __cinit__(self, list engines, Collector collector, const double[::1] arrival,
                  const int64_t[::1] prompt, const int64_t[::1] limit, PathTable paths, tokens,
                  RouterCore router, double cap_ms, bint single, int fast):
        cdef int64_t i
        if len(engines) >= READY:
            raise ValueError(f"at most {READY - 1} workers, got {len(engines)}")
        self.engines, self.collector, self.arrival, self.prompt, self.limit = engines, collector, arrival, prompt, limit
        self.paths, self.tokens, self.cap, self.single, self.fast = paths, tokens, cap_ms, single, fast
        self.n = prompt.shape[0]
        self.worker_of, self.arrival_of = np.empty(self.n, np.int32), np.empty(self.n)
        self.worker, self.arrived = self.worker_of, self.arrival_of
        for i in range(self.n):
            self.worker[i], self.arrived[i] = NIL, NAN
        self.kind = (KIND_SGLANG if isinstance(engines[0], SglangEngine)
                     else KIND_RULES if isinstance(engines[0], RulesEngine) else KIND_CORE)
        self.router = router
        if router is not None:
            self.route = self.routes[ROLE_DECODE] = &router.r
        self.reserve_workers(len(engines))
        for i in range(<int64_t>len(engines)):
            self.attach(engines[i], i)
            self.workers += 1
            if not self.enlist(i, ROLE_DECODE, LIFE_ACTIVE):
                raise MemoryError
        self.departed, self.leavers = {}, []

    def __dealloc__(self):
        free(self.cores)
        free(self.rules)
        free(self.views)
        free(self.busy)
        free(self.role)
        free(self.life)
        free(self.number)
        for i in range(2):
            free(self.teams[i].members)
            free(self.teams[i].active)

    def __del__(self):
        if self.offload is not None:
            self.offload.dissolve()

    cdef int reserve_workers(self, int64_t need) except -1:
        """Make room for so many workers."""
        cdef int64_t cap = max(need, 2 * self.workers_cap)
        if need <= self.workers_cap:
            return 0
        self.cores = <void**>resized(self.cores, cap, sizeof(void*))
        self.rules = <VllmRulesCore**>resized(self.rules, cap, sizeof(VllmRulesCore*))
        self.views = <View*>resized(self.views, cap, sizeof(View))
        self.busy = <uint8_t*>resized(self.busy, cap, 1)
        self.role = <uint8_t*>resized(self.role, cap, 1)
        self.life = <uint8_t*>resized(self.life, cap, 1)
        self.number = <int32_t*>resized(self.number, cap, sizeof(int32_t))
        self.workers_cap = cap
        return 0

    cdef int attach(self, object engine, int64_t worker) except -1:
        """Point an engine at the collector and keep its address."""
        cdef EngineCore core
        cdef SglangEngine sglang
        memset(&self.views[worker], 0, sizeof(View))
        self.busy[worker], self.rules[worker] = 0, NULL
        if self.kind == KIND_SGLANG:
            sglang = engine
            sglang.collect(self.collector)
            self.wishes = self.wishes or sglang.c.admission.score.ask != NULL
            sglang.c.note_first = self.router is not None
            sglang.c.metrics = self.watch is not None
            self.cores[worker] = &sglang.c
        else:
            core = engine
            self.wishes = self.wishes or core.c.admission.score.ask != NULL
            core.c.rows, core.c.gaps = &self.collector.rows, &self.collector.gaps
            core.c.note_first = self.router is not None
            core.c.metrics = self.watch is not None
            core.c.calendar.least = self.fast // FAST_CALENDAR
            self.cores[worker] = &core.c
            if self.kind == KIND_RULES:
                self.rules[worker] = &(<RulesEngine>engine).x
                self.overtaking = self.overtaking or self.rules[worker].by_priority
        self.overtaking = self.overtaking or self.wishes
        return 0

    def set_ranks(self, const int64_t[::1] priority, const int64_t[::1] strict, const int32_t[::1] policy):
        """Priority, strict priority and router queue class code of each row."""
        self.priority, self.strict, self.policy, self.ranked = priority, strict, policy, True

    def record(self, Recorder recorder):
        """Let a recorder see every pass from now on."""
        self.recorder = recorder
        self.timeline = &recorder.t
        if self.offload is not None:
            self.offload.record(recorder)
        self.allow_strides()

    def capacities(self):
        """Blocks of each worker's KV pool (SGLang: pages), int64, shape (workers,)."""
        return np.array([self.pool_tokens(w) // ((<SglangCore*>self.cores[w]).page if self.kind == KIND_SGLANG
                                                 else (<Core*>self.cores[w]).block_size)
                         for w in range(self.workers)], np.int64)

    def set_offload(self, OffloadWorld world):
        """The tiers below the workers' pools, which are attached to the engines already."""
        self.offload = world
        if self.recorder is not None:
            world.record(self.recorder)
        self.allow_strides()

    cdef void allow_strides(self):
        """Tiers that nobody else concerns, while nobody records passes or asks between them what is cached."""
        cdef OffloadTiers tiers
        for tiers in self.offload.attached if self.offload is not None else ():
            tiers.o.strides = (self.kind == KIND_CORE and self.timeline == NULL and tiers.o.core.pool.fresh == NULL
                               and (tiers.o.alone or self.offload.w.n_workers == 1)
                               and (self.route == NULL or self.workers > 1))

    def finish_below(self, double at):
        """What ends in the tiers of lone workers by `at`, the end of the simulation, happens."""
        cdef int64_t w
        if self.offload is None or not self.offload.apart:
            return
        for w in range(self.workers):
            if self.cores[w] != NULL:
                tiers_look(<Core*>self.cores[w], at)

    cdef bint below(self, int64_t worker) noexcept nogil:
        """Whether something moves in the tiers below a worker, or in those that all share."""
        cdef Core* c
        if self.kind != KIND_CORE:
            return False
        c = <Core*>self.cores[worker]
        return c.tiers != NULL and tiers_deadline(c) < INFINITY

    cdef double next_below(self) noexcept nogil:
        """When somebody has to look at the tiers next; infinity: never. Passes look by themselves.

        Beyond that tiers that workers share matter, and what a router is told.
        """
        if self.offload is None or self.single or (self.offload.apart and self.route == NULL):
            return INFINITY
        return self.offload.deadline()

    cdef bint submit(self, int64_t row, int64_t worker) noexcept nogil:
        """Hand a request to a worker; false if memory is short. A negative limit: no engine takes it."""
        cdef Core* c
        cdef int32_t slot
        if self.limit[row] < 0:
            self.collector.rows.terminal[row] = END_REJECTED
            self.views[worker].gone += 1
            return self.turn_ended(row, self.now)
        self.worker[row] = <int32_t>worker
        self.views[worker].count += 1
        self.views[worker].asleep = False
        if self.timeline != NULL:
            timeline_arrival(self.timeline, worker, max(self.arrived[row], self.now))
        if self.paths is None:
            return self.submit_tokens(row, worker)
        slot = self.form(row, worker, self.limit[row])
        if slot == NIL or (self.wishes and not self.wish(row, worker, slot)):
            return False
        if self.kind == KIND_SGLANG:
            sgl_enqueue(<SglangCore*>self.cores[worker], slot)
            self.views[worker].n_waiting = (<SglangCore*>self.cores[worker]).n_waiting
            return True
        c = <Core*>self.cores[worker]
        if c.req[slot].limit < self.limit[row]:
            self.views[worker].clamped += 1
        if self.kind == KIND_RULES:
            rules_enqueue(self.rules[worker], slot, NIL, self.priority[row] if self.ranked else 0)
        else:
            core_enqueue(c, slot, NIL)
        self.views[worker].n_waiting = c.n_waiting
        return True

    cdef int32_t form(self, int64_t row, int64_t worker, int64_t limit) noexcept nogil:
        """A slot on a worker for a request, not queued yet; NIL if memory is short."""
        cdef SglangCore* g
        cdef Core* c
        cdef int32_t slot
        if self.paths is None:
            return self.form_tokens(row, worker, limit)
        if self.kind == KIND_SGLANG:
            g = <SglangCore*>self.cores[worker]
            slot = sgl_new(g, row, self.prompt[row], limit)
            if slot == NIL or self.paths.fill(&g.req[slot].path, row, <int32_t>g.req[slot].full) != 0:
                return NIL
            g.req[slot].own_key = self.paths.own(row)
            if not g.req[slot].own_key:
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
        c.req[slot].own_key = self.paths.own(row)
        if not c.req[slot].own_key:
            c.req[slot].own_key = c.next_own_key
            c.next_own_key += 1
        return slot

    cdef bint wish(self, int64_t row, int64_t worker, int32_t slot) noexcept nogil:
        """Tell a score of waiting requests of a new one; false if memory is short."""
        cdef AdmissionHook* h = (&(<SglangCore*>self.cores[worker]).admission if self.kind == KIND_SGLANG
                                 else &(<Core*>self.cores[worker]).admission)
        return h.score.ask == NULL or wish_note(
            h, slot, self.arrived[row], self.priority[row] if self.ranked else 0)

    cdef int32_t form_tokens(self, int64_t row, int64_t worker, int64_t limit) noexcept with gil:
        """`form` for a request of real tokens. As in the reference, a planned answer is made to its end whatever the
        limit, so also on a prefill worker."""
        try:
            prompt, plan = self.tokens(row)
            if len(plan):
                limit = len(plan)
            if self.kind == KIND_SGLANG:
                return (<SglangEngine>self.engines[worker]).load(row, prompt, limit, plan, 0, row)
            return (<EngineCore>self.engines[worker]).load(row, prompt, limit, plan)
        except MemoryError:
            return NIL

    cdef void run_pass(self, int64_t worker, double now) noexcept nogil:
        """One pass of a worker; its view shows what came of it."""
        if self.kind == KIND_SGLANG:
            sgl_pass(<SglangCore*>self.cores[worker], now)
        elif self.kind == KIND_RULES:
            rules_pass(self.rules[worker], now)
        else:
            core_pass(<Core*>self.cores[worker], now)
        self.look(worker)
        if self.timeline == NULL:
            return
        if self.kind == KIND_SGLANG:
            record_sgl_pass(self.timeline, worker, self.cores[worker], now)
        else:
            record_pass(self.timeline, worker, self.cores[worker], now)

    cdef double forward(self, int64_t worker, double now, double until) noexcept nogil:
        """Fast-forward a worker through passes that only decode; returns its new now."""
        return self.forward_recorded(worker, now, until) if self.timeline != NULL else self.repeat(worker, now, until)

    cdef double repeat(self, int64_t worker, double now, double until) noexcept nogil:
        """The engine's own fast-forward."""
        if self.kind == KIND_SGLANG:
            now = sgl_forward(<SglangCore*>self.cores[worker], now, until, self.cap)
        elif self.kind == KIND_RULES:
            now = rules_forward(self.rules[worker], now, until, self.cap)
        else:
            now = core_forward(<Core*>self.cores[worker], now, until, self.cap)
        return now

    cdef double forward_recorded(self, int64_t worker, double now, double until) noexcept nogil:
        """The same, bin by bin where the passes differ: their decode time depends on lengths, as SGLang's always."""
        cdef double start, edge = INFINITY
        cdef int64_t before
        cdef void* core = self.cores[worker]
        cdef bint sglang = self.kind == KIND_SGLANG, differ = sglang or timing_varies(&(<Core*>core).timing)
        cdef int64_t* passes = &(<SglangCore*>core).passes if sglang else &(<Core*>core).passes
        while True:
            start, before = now, passes[0]
            if differ:
                edge = timeline_edge(self.timeline, worker, now)
            now = self.repeat(worker, start, min(until, edge))
            if passes[0] != before:
                if sglang:
                    record_sgl_stretch(self.timeline, worker, core, start, now, passes[0] - before)
                else:
                    record_stretch(self.timeline, worker, core, start, now, passes[0] - before)
            if now < edge or now >= until:     # it stopped of itself
                return now

    cdef void look(self, int64_t worker) noexcept nogil:
        cdef View* v = &self.views[worker]
        cdef Core* c
        cdef SglangCore* g
        if self.kind == KIND_SGLANG:
            g = <SglangCore*>self.cores[worker]
            v.end_ms, v.last_start, v.count, v.n_waiting = g.end_ms, g.last_start, g.count, g.n_waiting
            v.made, v.completed, v.admitted, v.passes = g.made, g.completed, g.admitted, g.passes
            v.preempted, v.worked, v.steady, v.error = g.preempted, g.admitted > 0, g.steady, g.error or g.tree.error
            v.ended, v.ended_used = g.notes, g.notes_used
            return
        c = <Core*>self.cores[worker]
        v.end_ms, v.last_start, v.count, v.n_waiting = c.end_ms, c.last_start, c.count, c.n_waiting
        v.made, v.completed, v.admitted, v.passes = c.made, c.completed, c.admitted, c.passes
        v.preempted, v.worked, v.steady = c.preempted, c.budget < c.max_tokens, c.steady
        v.error = c.error or c.pool.error
        v.ended, v.ended_used = c.ended, c.ended_used

    cdef void fold(self, int64_t worker) noexcept nogil:
        """Add a worker's own counts to those of all; not while threads run."""
        cdef View* v = &self.views[worker]
        self.ended += v.gone
        self.clamped += v.clamped
        v.gone = v.clamped = 0

    cdef bint submit_tokens(self, int64_t row, int64_t worker) noexcept with gil:
        cdef EngineCore engine
        try:
            prompt, plan = self.tokens(row)
            if self.kind == KIND_SGLANG:
                slot = (<SglangEngine>self.engines[worker]).submit(row, prompt, self.limit[row], plan, 0, row)
                return not self.wishes or self.wish(row, worker, slot)
            engine = self.engines[worker]
            slot = EngineCore.submit(engine, row, prompt, self.limit[row], plan, NIL)
            if self.kind == KIND_RULES:
                (<RulesEngine>engine).queue_at(slot, NIL, self.priority[row] if self.ranked else 0)
        except MemoryError:
            return False
        if self.wishes and not self.wish(row, worker, slot):
            return False
        if engine.c.req[slot].limit < self.limit[row]:
            self.views[worker].clamped += 1
        self.views[worker].n_waiting = engine.c.n_waiting
        return True

    cdef bint brought(self, View* c) noexcept nogil:
        """Whether the pass brought somebody further: made a token or ended a request."""
        return c.made > 0 or c.completed > 0

    cdef bint drop(self, int64_t row, int64_t worker) noexcept nogil:
        """Cancel a request of a worker between passes, which keeps the tokens that it got; false if it is not there."""
        cdef int32_t slot = 0
        cdef Core* c
        cdef SglangCore* g
        if self.kind == KIND_SGLANG:
            g = <SglangCore*>self.cores[worker]
            while slot < g.req_used and (g.req[slot].status == 0 or g.req[slot].id != row):
                slot += 1
            if slot == g.req_used:
                return False
            if g.req[slot].gen > 0:
                self.collector.rows.tokens[row] = g.req[slot].gen
                self.collector.rows.last_token[row] = g.req[slot].last_ms
            sgl_drop(g, slot)
        else:
            c = <Core*>self.cores[worker]
            if c.tiers != NULL and self.offload.apart:
                tiers_look(c, self.now)
            calendar_settle(c, False, NIL)
            while slot < c.req_used and (c.req[slot].status == 0 or c.req[slot].id != row):
                slot += 1
            if slot == c.req_used:
                return False
            if c.req[slot].gen > 0:
                self.collector.rows.tokens[row] = c.req[slot].gen
                self.collector.rows.last_token[row] = c.req[slot].last_ms
            if self.kind == KIND_RULES:
                rules_drop(self.rules[worker], slot)
            else:
                core_drop(c, slot)
        self.look(worker)
        self.views[worker].asleep = False
        if self.timeline != NULL:
            record_rest(self.timeline, worker, self.kind == KIND_SGLANG, self.cores[worker], self.now)
        return True

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
        for w in range(self.workers):
            if self.role[w] != ROLE_DECODE or self.life[w] == LIFE_GONE:
                continue
            if self.kind == KIND_SGLANG:
                g = <SglangCore*>self.cores[w]
                for i in range(g.req_used):
                    q = &g.req[i]
                    if q.status != 0 and q.gen > 0:
                        self.collector.rows.tokens[q.id] = q.gen
                        self.collector.rows.last_token[q.id] = q.last_ms
                continue
            c = <Core*>self.cores[w]
            calendar_settle(c, False, NIL)
            for i in range(c.req_used):
                r = &c.req[i]
                if r.status != 0 and r.gen > 0:
                    self.collector.rows.tokens[r.id] = r.gen
                    self.collector.rows.last_token[r.id] = r.last_ms

    def raise_errors(self):
        """Turn an error of an engine or the collector into an exception."""
        for engine in self.engines:
            if engine is None:
                continue
            if self.kind == KIND_SGLANG:
                (<SglangEngine>engine).raise_error()
            else:
                (<EngineCore>engine).raise_error()
        if self.router is not None:
            self.router.raise_error()
        if self.collector.gaps.error:
            raise MemoryError

    # -- who is there --------------------------------------------------------------------------------------------------

    cdef bint enlist(self, int64_t worker, int role, int life) noexcept nogil:
        """Give a worker its number in a team; false if memory is short."""
        cdef Team* t = &self.teams[role]
        cdef void* moved = grown(t.members, &t.cap, t.used + 1, sizeof(int64_t))
        if moved == NULL:
            return False
        t.members = <int64_t*>moved
        t.members[t.used] = worker
        self.role[worker], self.number[worker], self.life[worker] = <uint8_t>role, <int32_t>t.used, <uint8_t>life
        t.used += 1
        t.n_starting += 1
        return life == LIFE_STARTING or self.begin(worker)

    cdef int64_t hire(self, object engine, int role, int life) except -1:
        """Take on a worker; its index."""
        cdef int64_t worker = self.workers
        self.reserve_workers(worker + 1)
        self.attach(engine, worker)
        self.engines.append(engine)
        self.workers += 1
        if not self.enlist(worker, role, life):
            raise MemoryError
        return worker

    cdef bint begin(self, int64_t worker) noexcept nogil:
        """A starting worker takes requests from now on; false if memory is short."""
        cdef Team* t = &self.teams[self.role[worker]]
        cdef int64_t i
        cdef void* moved = grown(t.active, &t.active_cap, t.n_active + 1, sizeof(int64_t))
        if moved == NULL:
            return False
        t.active = <int64_t*>moved
        i = t.n_active
        while i > 0 and self.number[t.active[i - 1]] > self.number[worker]:
            t.active[i] = t.active[i - 1]
            i -= 1
        t.active[i] = worker
        t.n_active += 1
        t.n_starting -= 1
        self.life[worker] = LIFE_ACTIVE
        if self.routes[self.role[worker]] == NULL:
            return True
        router_add_worker(self.routes[self.role[worker]], self.number[worker], self.number[worker])
        return self.routes[self.role[worker]].error != ROUTER_MEMORY

    cdef void retire(self, int64_t worker) noexcept nogil:
        """A worker takes no more requests; it goes when it has nothing left to do."""
        cdef Team* t = &self.teams[self.role[worker]]
        cdef int64_t i, at = 0
        for i in range(t.n_active):
            if t.active[i] != worker:
                t.active[at] = t.active[i]
                at += 1
        t.n_active = at
        t.n_draining += 1
        self.life[worker] = LIFE_DRAINING
        if self.routes[self.role[worker]] != NULL:
            router_remove_worker(self.routes[self.role[worker]], self.number[worker])

    cdef void go(self, int64_t worker) noexcept with gil:
        """A worker is gone."""
        self.life[worker] = LIFE_GONE
        self.leavers.append(worker)

    cdef bint drained(self, int64_t worker) noexcept nogil:
        """Whether a worker has nothing left to do, for requests or hand-offs or in the tiers below it."""
        cdef SglangCore* g
        cdef Core* c
        if self.busy[worker] or self.views[worker].count > 0:
            return False
        if self.kind == KIND_SGLANG:
            g = <SglangCore*>self.cores[worker]
            return g.count == 0 and g.n_held + g.n_reserved + g.n_pending == 0
        c = <Core*>self.cores[worker]
        return c.count == 0 and c.n_held + c.n_reserved + c.n_pending == 0 and (c.tiers == NULL or tiers_quiet(c))

    cdef bint leave(self) noexcept nogil:
        """Let the workers go that were to and have drained; whether any did."""
        cdef Team* t
        cdef int64_t i, worker
        cdef int role
        cdef bint gone = False
        for role in range(2):
            t = &self.teams[role]
            if t.n_draining == 0:
                continue
            for i in range(t.used):
                worker = t.members[i]
                if self.life[worker] == LIFE_DRAINING and self.drained(worker):
                    self.go(worker)
                    t.n_draining -= 1
                    if self.routes[role] != NULL:
                        router_finalize_worker(self.routes[role], <int32_t>i)
                    gone = True
        return gone

    def free_departed(self):
        """Give back the memory of the engines of workers that are gone; SGLang's books are kept in `departed`."""
        cdef int64_t worker
        if self.recorder is not None:          # which asks them at the end
            return
        for worker in self.leavers:
            if self.kind == KIND_SGLANG:
                for name in ("leaked_tokens", "double_freed_tokens"):
                    self.departed[name] = self.departed.get(name, 0) + self.engines[worker].counts[name]
            self.engines[worker], self.cores[worker], self.rules[worker] = None, NULL, NULL
        self.leavers.clear()

    def team(self, int role):
        """Active and provisioned workers of a role (0: prefill, 1: decode or both), and its worker-seconds."""
        cdef Team* t = &self.teams[role]
        return t.n_active, t.n_active + t.n_starting + t.n_draining, t.seconds

    def starting_workers(self, int role):
        """Workers of a role that do not take requests yet."""
        return self.teams[role].n_starting

    @property
    def roles(self):
        """Role of each worker: 0 prefill, 1 decode or both."""
        return [self.role[w] for w in range(self.workers)]

    @property
    def numbers(self):
        """Number of each worker within its team: array of int32, shape (workers,)."""
        return np.array([self.number[w] for w in range(self.workers)], np.int32)

    cdef void clock_to(self, double at) noexcept nogil:
        """The clock moves on: worker-seconds of starting and draining workers count too."""
        cdef int role
        cdef Team* t
        for role in range(2):
            t = &self.teams[role]
            t.seconds += <double>(t.n_active + t.n_starting + t.n_draining) * (at - self.now) / 1000.0
        self.now = at

    # -- what a planner is told ----------------------------------------------------------------------------------------

    cdef void measure(self, int64_t worker) noexcept nogil:
        """Work out the metrics of the pass that a worker has just been given."""
        if not self.watch.s.collect:
            return
        if self.kind == KIND_SGLANG:
            sgl_metrics(<SglangCore*>self.cores[worker])
        else:
            core_metrics(<Core*>self.cores[worker])

    cdef void observe(self, int64_t worker) noexcept nogil:
        """A pass of a worker ends."""
        cdef View* v = &self.views[worker]
        cdef SglangCore* g
        cdef Core* c
        cdef int64_t made_by
        cdef double seconds = (v.end_ms - v.last_start) / 1000.0
        if self.kind == KIND_SGLANG:
            g = <SglangCore*>self.cores[worker]
            made_by = g.made_by
            if self.watch.s.collect:
                self.watch.saw_pass(self.role[worker], self.number[worker], seconds, &g.fpm[0], g.fpm_prefill_tokens,
                                    g.fpm_prefix_tokens)
        else:
            c = <Core*>self.cores[worker]
            made_by = c.made_by
            if self.watch.s.collect:
                self.watch.saw_pass(self.role[worker], self.number[worker], seconds, &c.fpm[0], c.fpm_prefill_tokens,
                                    c.fpm_prefix_tokens)
        if self.role[worker] == ROLE_DECODE:
            self.watch.saw_tokens(v.made, made_by)

    cdef void saw_end(self, int64_t row) noexcept nogil:
        """A request ended; those that were refused are nobody's traffic."""
        if self.collector.rows.terminal[row] != END_REJECTED:
            self.watch.saw_end(self.prompt[row], self.limit[row], self.arrived[row],
                               self.collector.rows.first_token[row], self.collector.rows.last_token[row],
                               self.collector.rows.tokens[row])

    cdef bint turn_ended(self, int64_t row, double now) noexcept nogil:
        """A request has ended, however; false if memory is short. For those who have to know."""
        return True

    cdef bint stuck(self, int64_t worker, double start) noexcept nogil:
        """Count a pass that brought nobody further; true when no other pass can, at once if this one changed nothing.

        Without a preemption each pass computes a token that the pool has room for, so more passes than the pool has
        tokens go round in circles.
        """
        cdef View* c = &self.views[worker]
        c.idle += 1
        return ((c.admitted == 0 and not c.preempted and not c.worked and c.end_ms <= start and not self.below(worker))
                or (c.idle >= IDLE_LIMIT and c.idle >= IDLE_LIMIT + self.pool_tokens(worker)))

    cdef int64_t pool_tokens(self, int64_t worker) noexcept nogil:
        """Tokens that a worker's pool holds."""
        cdef Core* c
        if self.kind == KIND_SGLANG:
            return (<SglangCore*>self.cores[worker]).total
        c = <Core*>self.cores[worker]
        return c.pool.capacity << c.shift
