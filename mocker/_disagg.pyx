# cython: language_level=3
"""Disaggregated prefill and decode: two pools of workers on one clock.

Answers to `replay/offline/disagg.rs`. At one timestamp passes end first, then transfers, then requests arrive, then
hand-offs take their steps in order (`_handoff_steps`), then prefill workers and decode workers start passes. Decode
workers go on alone until somebody may come (`go_on`), SGLang's until somebody does (`plan`, `_foresight`).

Decode workers are the `Cluster`'s workers 0 to D - 1, prefill workers come after them. Costs: O(workers) a timestamp
and O(log n) an event.
"""
from libc.math cimport INFINITY

from mocker._common cimport END_COMPLETED, NIL, int64_t
from mocker._core cimport Core
from mocker._handoff cimport handoff_due, handoff_yield
from mocker._handoff_steps cimport (
    ACTIVATE_DESTINATION, DECODE_ROUTED, RANK_SHIFT, SOURCE_ALIVE, SOURCE_HELD, Handoffs, event_of)
from mocker._heap cimport heap_earlier, heap_pop, order_of
from mocker._offload_pass cimport tiers_begin
from mocker._router cimport router_completed, router_prefill_completed
from mocker._sglang cimport SglangCore
from mocker._steps cimport steps_move
from mocker._workers cimport (
    FAST_AHEAD, FAST_CLOCK, IDLE_LIMIT, KIND_SGLANG, READY, ROLE_DECODE, ROLE_PREFILL, ROUND, Team, View)

cdef enum:
    PATIENCE = 1000                # as IDLE_LIMIT if a hand-off is to free some memory
    WAITS = -1                     # in `tries`: it waits
    FIRST_RANK = 2                 # of the decode passes that begin where nothing else happens: see `passes`


cdef class DisaggCluster(Handoffs):
    """A disaggregated replay under way; arguments as of `Handoffs`."""

    # -- passes -----------------------------------------------------------------------------------------------------

    cdef bint pass_ended(self, int64_t worker) noexcept nogil:
        """What a pass did becomes known."""
        cdef View* v = &self.views[worker]
        cdef int64_t i, row, n
        cdef int64_t* held
        cdef int terminal
        if self.watch is not None:
            self.observe(worker)
        if self.role[worker] == ROLE_DECODE:
            row = self.retry(worker)
            for i in range(v.ended_used):
                self.marks[v.ended[i]] &= ~DECODE_ROUTED
                if self.routes[1] != NULL:
                    router_completed(self.routes[1], v.ended[i], self.now)
                self.ended += 1
                if self.watch is not None:
                    self.saw_end(v.ended[i])
                if not self.turn_ended(v.ended[i], self.now) or not self.drain(1):
                    return False
            return self.reserved(worker, row)
        self.tell(worker)
        for i in range(v.ended_used):
            row = v.ended[i]
            terminal = self.prefill_collector.rows.terminal[row]
            if terminal != END_COMPLETED:
                self.marks[row] &= ~SOURCE_ALIVE
                if not self.fail(row, terminal):
                    return False
            elif self.routes[0] != NULL:
                router_prefill_completed(self.routes[0], row, self.now)
                if not self.drain(0):
                    return False
        if self.kind == KIND_SGLANG:
            held, n = (<SglangCore*>self.cores[worker]).held, (<SglangCore*>self.cores[worker]).held_used
        else:
            held, n = (<Core*>self.cores[worker]).held, (<Core*>self.cores[worker]).held_used
        for i in range(n):
            self.marks[held[i]] |= SOURCE_HELD
            self.held_ms[held[i]] = self.now
            if not self.advance(held[i]):
                return False
        return True

    cdef bint wake(self, int64_t worker) noexcept nogil:
        """A pass has ended: the steps that waited for it are due."""
        return steps_move(&self.deferred[worker], &self.pending)

    cdef bint passes(self, int role, int64_t* done, bint* changed) noexcept nogil:
        """Start the passes of the idle workers of a pool."""
        cdef Team* t = &self.teams[role]
        cdef int64_t worker, at = 0
        cdef View* v
        cdef bint news, apart = role == ROLE_DECODE and self.fast & FAST_AHEAD and self.offload is None
        self.sequence += 1
        while at < t.used:
            worker = t.members[at]
            v = &self.views[worker]
            if self.busy[worker] or ((v.count == 0 or self.tries[worker] == WAITS) and not v.early):
                at += 1
                continue
            if v.early:
                v.early = False                # `ahead` ran this pass
            else:
                self.run_pass(worker, self.now)
                done[0] += 1
                if v.error or self.failed:
                    return True
                if self.watch is not None:
                    self.measure(worker)
                if role == ROLE_DECODE and v.end_ms > self.cap:
                    self.uncount(v)
            news = v.admitted > 0 or v.completed > 0 or v.made > 0 or v.worked
            if role == ROLE_PREFILL and self.routes[0] != NULL and self.kind != KIND_SGLANG:
                news = news or (<Core*>self.cores[worker]).pool.events_used > 0
                self.tell(worker)
            if self.offload is not None and role == ROLE_DECODE:       # a copy down may have made room meanwhile
                news = news or handoff_due(<Core*>self.cores[worker])
            if self.brought(v):
                self.tries[worker] = self.idle_ticks = 0
            elif (self.tries[worker] >= PATIENCE and self.tries[worker] - self.pool_tokens(worker) >= (
                    PATIENCE if self.helped(worker) else IDLE_LIMIT)):
                if self.kind == KIND_SGLANG or not handoff_yield(<Core*>self.cores[worker]):
                    self.tries[worker] = WAITS
                    at += 1
                else:
                    self.tries[worker] = 0
                    if not self.capacity(worker):
                        return False
                continue
            else:
                self.tries[worker] += 1
            if v.end_ms > self.now:
                changed[0] = True
                self.busy[worker] = 1
                if apart:                      # `go_on` may take it further, when all that happens now has
                    self.begun[worker] = self.sequence
                elif not self.expect_at(v.end_ms, v.last_start, self.sequence, worker):
                    return False
                at += 1                        # nobody before it has anything new to do
            elif news:
                changed[0] = True
                if not self.pass_ended(worker):
                    return False
                at = 0
                self.sequence += 1
            else:
                at += 1
        return True

    cdef bint go_on(self, int64_t* done) noexcept nogil:
        """Note when the decode passes that began now end, those of workers that nobody concerns after a while alone.

        Nothing comes to a decode worker but by an arrival, the end of a prefill pass, of a transfer, or of a pass of
        another decode worker where somebody or a step of a hand-off waits for it, unless a router keeps requests. So it
        goes on until the next of these, or until one of its own requests ends.
        """
        cdef Team* t = &self.teams[ROLE_DECODE]
        cdef int64_t i, worker
        cdef double until = 0.0
        if not self.fast & FAST_AHEAD or self.offload is not None:
            return True
        if self.foresees:
            return self.plan()
        if self.limit_active == 0 and self.lag > 0.0 and self.queued() == 0:
            until = min(min(min(self.next_ready(), self.next_cancel()), self.horizon), self.now + self.lag)
            for i in range(self.events.used):
                worker = event_of(self.events.items[i])
                if worker >= READY or self.role[worker] != ROLE_DECODE or self.awaited(worker):
                    until = min(until, self.events.items[i].at)
            for worker in range(self.workers):
                if not self.busy[worker] and self.views[worker].count > 0 and self.tries[worker] != WAITS:
                    until = 0.0                # it tries again whenever anything happens, which may change its state
                elif self.begun[worker] and self.awaited(worker):
                    until = min(until, self.views[worker].end_ms)
        for i in range(t.used):
            worker = t.members[i]
            if self.begun[worker]:
                if not self.ahead_until(worker, 0.0 if self.awaited(worker) else until, done):
                    return False
                self.begun[worker] = 0
        return True

    cdef bint unforeseeable(self) noexcept nogil:
        return self.offload is None and (self.apart_gaps != NULL or self.teams[ROLE_DECODE].used == 1)

    cdef bint plan(self) noexcept nogil:
        """`go_on` with engines whose plain passes are foreseen, whatever comes meanwhile.

        Not while a router keeps requests, or an idle worker tries again whenever anything happens.
        """
        cdef Team* t = &self.teams[ROLE_DECODE]
        cdef int64_t i, worker
        cdef View* v
        cdef bint open = self.queued() == 0
        for worker in range(self.workers):
            open = open and (self.busy[worker] or self.views[worker].count == 0 or self.tries[worker] == WAITS)
        for i in range(0 if open else t.used):
            if self.views[t.members[i]].foreseen > 0:
                self.meet(t.members[i], self.now, False)
        for i in range(t.used):
            worker = t.members[i]
            if not self.begun[worker]:
                continue
            v = &self.views[worker]
            v.rank, v.passed, self.begun[worker] = self.begun[worker], 0, 0
            if open and v.ended_used == 0 and not self.awaited(worker):
                self.foresee(worker)
            if not self.expect_at(v.end_ms, v.last_start, FIRST_RANK if v.foreseen > 0 else v.rank, worker):
                return False
        return True

    cdef void coincide(self) noexcept nogil:
        """Passes that were foreseen to begin now, when something happens, begin as any other does."""
        cdef Team* t = &self.teams[ROLE_DECODE]
        cdef int64_t i, worker
        cdef View* v
        cdef double* ends
        for i in range(t.used):
            worker = t.members[i]
            v = &self.views[worker]
            if v.foreseen == 0:
                continue
            ends = (<SglangCore*>self.cores[worker]).ends
            while ends[v.passed] < self.now:
                v.passed += 1
            if ends[v.passed] == self.now and v.passed < v.foreseen:
                self.meet(worker, self.now, False)

    cdef void meet(self, int64_t worker, double at, bint begun) noexcept nogil:
        """Of the passes foreseen those happen that have begun, see `coincide`; the last of them is under way."""
        cdef View* v = &self.views[worker]
        cdef int64_t i, m = v.foreseen if at == INFINITY else v.passed
        self.cut(worker, m)
        for i in range(self.events.used):
            if event_of(self.events.items[i]) == worker:
                heap_earlier(&self.events, i, v.end_ms, order_of(v.last_start),
                             (FIRST_RANK if m > 0 else v.rank) << RANK_SHIFT | worker)
                break

    cdef bint awaited(self, int64_t worker) noexcept nogil:
        """Whether the end of a decode worker's pass may bring a hand-off further, or leave those who wait alone."""
        return (self.views[worker].n_waiting > 0 or self.deferred[worker].head < self.deferred[worker].used
                or ((<SglangCore*>self.cores[worker]).n_pending if self.kind == KIND_SGLANG
                    else (<Core*>self.cores[worker]).n_pending) > 0)

    cdef bint ahead_until(self, int64_t worker, double until, int64_t* done) noexcept nogil:
        """Take a decode worker that began a pass as far as it goes alone, and note when that ends.

        Passes on the way rank as those do that begin first at their time, in the order of the workers.
        """
        cdef View* v = &self.views[worker]
        cdef double end, since = v.last_start
        cdef int64_t rank = self.begun[worker]
        while v.end_ms < until and v.ended_used == 0 and v.end_ms <= self.cap:
            rank = FIRST_RANK
            if v.steady and self.fast & FAST_CLOCK:
                end = self.forward(worker, v.end_ms, until)
                self.look(worker)
                v.end_ms, since = end, v.last_start
                if end >= until or end > self.cap:
                    break
            self.run_pass(worker, v.end_ms)
            done[0] += 1
            if v.error or self.failed:
                return True
            if v.end_ms > self.cap:
                self.uncount(v)
            if not self.brought(v):
                v.early = True                 # what comes of it is seen to when its time has come
                return self.expect_at(v.last_start, since, rank, worker)
            self.tries[worker] = 0
            since = v.last_start
        return self.expect_at(v.end_ms, since, rank, worker)

    cdef bint rescue(self) noexcept nogil:
        """Nothing is going to happen any more: let destinations that wait give way to the heads of their queues."""
        cdef bint found = False
        cdef int64_t worker
        if self.kind == KIND_SGLANG:
            return False
        for worker in range(self.workers):
            if (self.role[worker] == ROLE_DECODE and self.views[worker].count > 0
                    and handoff_yield(<Core*>self.cores[worker])):
                self.tries[worker] = 0
                found = True
                if not self.busy[worker] and not self.capacity(worker):
                    self.failed = True
        return found

    cdef bint helped(self, int64_t worker) noexcept nogil:
        """Whether a hand-off holds memory of a worker that it will free, or put to use."""
        cdef SglangCore* g
        cdef Core* c
        if self.kind == KIND_SGLANG:
            g = <SglangCore*>self.cores[worker]
            return g.n_held + g.n_reserved > 0
        c = <Core*>self.cores[worker]
        return c.n_held + c.n_reserved > 0

    cdef bint tick_below(self) noexcept nogil:
        """Time passes below all workers, those that prefill first; whether anybody has to know.

        Idle decode workers look at who waits for a reservation there. The decode pool's router is told nothing.
        """
        cdef int64_t worker, row
        cdef int role
        cdef Core* c
        cdef bint told = False
        for role in range(2):                  # prefill, then decode
            for worker in range(self.workers):
                c = <Core*>self.cores[worker]
                if self.role[worker] != role or c == NULL or c.tiers == NULL:
                    continue
                tiers_begin(c, self.now)
                if c.pool.events_used > 0:
                    told = True
                    self.tell(worker)
                c.pool.events_used = c.pool.pieces_used = c.pool.event_tokens_used = 0
                if role == ROLE_DECODE and not self.busy[worker]:
                    row = self.retry(worker)
                    if row != NIL:
                        told = True
                        if not self.reserved(worker, row):
                            self.failed = True
        return told

    cdef bint settle(self, int64_t* done) noexcept nogil:
        """Everything that happens at `now`, until nothing does any more."""
        cdef bint changed = True
        cdef int64_t worker, before
        if self.ranked_at != self.now:
            self.ranked_at, self.sequence = self.now, 0
        if self.foresees:
            self.coincide()
        while changed and not self.failed:
            changed = self.offload is not None and self.tick_below()
            if self.failed:
                break
            while (self.events.used > 0 and self.events.items[0].at == self.now
                    and event_of(self.events.items[0]) < READY):
                worker = event_of(heap_pop(&self.events))
                self.busy[worker] = 0
                if self.views[worker].foreseen > 0:
                    self.fulfil(worker)
                changed = True
                if not self.wake(worker) or not self.pass_ended(worker):
                    return False
            if self.planner is not None and not self.starting():
                return False
            while (self.events.used > 0 and self.events.items[0].at == self.now
                    and event_of(self.events.items[0]) >= ROUND):
                changed = True
                if not self.issue(event_of(heap_pop(&self.events)) - ROUND, ACTIVATE_DESTINATION):
                    return False
            if self.cancels.used > 0 and not self.cancellations(&changed):
                return False
            before = self.in_flight
            if not self.arrivals(self.now):
                return False
            changed = changed or self.in_flight != before
            if not self.drive(&changed):
                return False
            if (not self.passes(ROLE_PREFILL, done, &changed)
                    or not self.passes(ROLE_DECODE, done, &changed)):
                return False
            for worker in range(self.workers):
                if self.views[worker].error:
                    return True
            if self.planner is not None and not self.planned(&changed):
                return False
        return self.go_on(done)

    # -- workers that come and go -------------------------------------------------------------------------------------

    cdef bint vacated(self, int role) noexcept nogil:
        return self.routes[role] == NULL or self.routes[role].n_eligible == 0 or self.drain(role)

    cdef bint took_over(self, int role) noexcept nogil:
        """Steps that waited for a worker of a role are due."""
        return steps_move(&self.waits[role], &self.pending)

    cdef bint expect(self, int64_t worker, double at) noexcept nogil:
        self.starts += 1
        self.sequence += 1
        return self.expect_at(at, self.now, self.sequence, READY + worker)

    cdef bint quiet(self) noexcept nogil:
        return (self.rows_left == 0 and self.events.used == self.starts and self.open == 0
                and self.pending.head == self.pending.used)
