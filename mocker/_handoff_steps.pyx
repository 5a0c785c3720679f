# cython: language_level=3
"""The hand-offs of disaggregated replays: a request's steps from the prefill pool to the decode pool, and their routes.

Answers to `common/handoff.rs` and to the routing of `replay/offline/disagg.rs`. vLLM computes the prompt first and then
looks for a decode worker; SGLang reserves its place in the decode pool first. In both the prompt's blocks stay held on
the prefill worker until the decode worker has them. Nobody changes a worker in the middle of a pass: what a hand-off
does to a busy one waits for the pass to end. The clock is `_disagg`'s. Costs: O(log n) a step.
"""
from libc.math cimport isnan
from libc.stdlib cimport free
from libc.string cimport memset

import numpy as np

from mocker._cluster cimport Cluster
from mocker._collect cimport Collector
from mocker._common cimport END_CANCELED, END_FAILED, END_NONE, END_REJECTED, NIL, ST_HELD, int32_t, int64_t, uint32_t
from mocker._core cimport Core
from mocker._engine cimport EngineCore
from mocker._handoff cimport handoff_activate, handoff_release_source, handoff_reserve, handoff_retry, handoff_withdraw
from mocker._heap cimport heap_push, order_of
from mocker._record cimport timeline_arrival
from mocker._record_engines cimport record_rest
from mocker._requests cimport core_drop, core_enqueue
from mocker._router cimport (
    ROUTED_ERROR, ROUTED_LATER, ROUTED_NEVER, Router, RouterCore, router_arrival, router_cancel, router_completed,
    router_drain, router_events)
from mocker._sglang cimport (
    SglangCore, sgl_activate, sgl_drop, sgl_enqueue_source, sgl_release_source, sgl_reserve, sgl_retry)
from mocker._sglang_engine cimport SglangEngine
from mocker._steps cimport Steps, steps_push
from mocker._workers cimport (
    KIND_RULES, KIND_SGLANG, LIFE_ACTIVE, ROLE_DECODE, ROLE_PREFILL, ROUND, Team, resized, tell_sglang)


cdef class Handoffs(Cluster):
    """Requests on their way through two pools; arguments as of `Cluster`, decode workers before prefill workers.

    `split` comes before anything else, `set_links` and `run_coupled` after it.
    """

    def split(self, *, int64_t decode_workers, Collector prefill_collector, RouterCore prefill_router,
              RouterCore decode_router, double kv_bytes, double bandwidth, bint full_prompt):
        """Say which workers are which, and how prompts travel.

        Parameters
        ----------
        decode_workers : int
            The first so many workers decode.
        prefill_collector : Collector
            A row per request, for admissions to the prefill pool.
        prefill_router, decode_router : RouterCore or None
            Who chooses the workers of each pool; None: each in turn.
        kv_bytes, bandwidth : float
            Bytes of a token's cache, and GB/s; NaN for transfers in no time.
        full_prompt : bool
            Send the whole prompt, or only what the decode worker has not cached.

        Notes
        -----
        `details` has, by row: `prefill_worker_idx` (int32, -1: none), `source_held_ms`, `destination_reserved_ms`,
        `destination_activated_ms`, `source_released_ms` (float64, NaN: never), `prefill_route_overlap_tokens`,
        `decode_route_overlap_tokens` (int64, -1: never routed).
        """
        cdef int64_t n = self.n, w
        cdef int role
        if self.kind == KIND_RULES:
            raise ValueError("disaggregation takes engines without scheduler rules")
        self.prefill_collector = prefill_collector
        self.prefill_router, self.decode_router = prefill_router, decode_router
        if prefill_router is not None:
            self.routes[ROLE_PREFILL] = &prefill_router.r
        if decode_router is not None:
            self.routes[ROLE_DECODE] = &decode_router.r
        self.kv_bytes, self.bandwidth, self.full_prompt = kv_bytes, bandwidth, full_prompt
        self.source_first = self.kind != KIND_SGLANG
        for role in range(2):
            self.teams[role].used = self.teams[role].n_active = 0
        for w in range(self.workers):
            if not self.enlist(w, ROLE_DECODE if w < decode_workers else ROLE_PREFILL, LIFE_ACTIVE):
                raise MemoryError
            self.equip(w)
        self.marks, self.missing = np.zeros(n, np.int32), np.zeros(n, np.int64)
        self.source_slot, self.slot = np.full(n, NIL, np.int32), np.full(n, NIL, np.int32)
        self.details = {
            "prefill_worker_idx": np.full(n, NIL, np.int32), "source_held_ms": np.full(n, np.nan),
            "destination_reserved_ms": np.full(n, np.nan), "destination_activated_ms": np.full(n, np.nan),
            "source_released_ms": np.full(n, np.nan), "prefill_route_overlap_tokens": np.full(n, NIL, np.int64),
            "decode_route_overlap_tokens": np.full(n, NIL, np.int64)}
        d = self.details
        self.source, self.held_ms, self.reserved_ms = (
            d["prefill_worker_idx"], d["source_held_ms"], d["destination_reserved_ms"])
        self.activated_ms, self.released_ms = d["destination_activated_ms"], d["source_released_ms"]
        self.prefill_overlap, self.decode_overlap = (
            d["prefill_route_overlap_tokens"], d["decode_route_overlap_tokens"])

    def __dealloc__(self):
        cdef int64_t w
        free(self.pending.items)
        free(self.waits[0].items)
        free(self.waits[1].items)
        for w in range(self.places):
            free(self.deferred[w].items)
        free(self.deferred)
        free(self.tries)
        free(self.begun)

    cdef int equip(self, int64_t worker) except -1:
        """Give a worker of a role what it needs here."""
        cdef int64_t cap = max(worker + 1, 2 * self.places)
        if worker >= self.places:
            self.tries = <int64_t*>resized(self.tries, cap, sizeof(int64_t))
            self.begun = <int64_t*>resized(self.begun, cap, sizeof(int64_t))
            self.deferred = <Steps*>resized(self.deferred, cap, sizeof(Steps))
            memset(self.begun + self.places, 0, (cap - self.places) * sizeof(int64_t))
            memset(self.tries + self.places, 0, (cap - self.places) * sizeof(int64_t))
            memset(self.deferred + self.places, 0, (cap - self.places) * sizeof(Steps))
            self.places = cap
        if self.role[worker] == ROLE_DECODE:
            return 0
        if self.kind == KIND_SGLANG:
            (<SglangEngine>self.engines[worker]).collect(self.prefill_collector)
        else:
            (<EngineCore>self.engines[worker]).c.rows = &self.prefill_collector.rows
            (<EngineCore>self.engines[worker]).c.gaps = &self.prefill_collector.gaps
        return 0

    cdef int64_t hire(self, object engine, int role, int life) except -1:
        cdef int64_t worker = Cluster.hire(self, engine, role, life)
        self.equip(worker)
        return worker

    def raise_errors(self):
        """Turn an error of an engine, a router or a collector into an exception."""
        Cluster.raise_errors(self)
        for router in (self.prefill_router, self.decode_router):
            if router is not None:
                (<RouterCore>router).raise_error()

    # -- steps of a hand-off -----------------------------------------------------------------------------------------

    cdef bint issue(self, int64_t row, int step) noexcept nogil:
        return steps_push(&self.pending, row * STEPS + step)

    cdef bint defer(self, int64_t row, int step, int64_t worker) noexcept nogil:
        return steps_push(&self.deferred[worker], row * STEPS + step)

    cdef bint dispatch(self, int64_t row, double now) noexcept nogil:
        """A request arrives: its hand-off begins."""
        self.open += 1
        return self.advance(row)

    cdef bint advance(self, int64_t row) noexcept nogil:
        """Issue the step that is due after what is known of a request."""
        cdef int32_t* m = &self.marks[row]
        cdef bint source = m[0] & SOURCE_HELD, destination = m[0] & RESERVED
        if m[0] & CANCELING:
            return True
        if not m[0] & SUBMIT_ISSUED and (self.source_first or destination):
            m[0] |= SUBMIT_ISSUED
            return self.issue(row, SUBMIT_PREFILL)
        if not m[0] & RESERVE_ISSUED and (source or not self.source_first):
            m[0] |= RESERVE_ISSUED
            return self.issue(row, RESERVE_DESTINATION)
        if source and destination and not m[0] & TRANSFER_ISSUED:
            m[0] |= TRANSFER_ISSUED
            return self.issue(row, START_TRANSFER)
        return True

    cdef bint fail(self, int64_t row, int terminal) noexcept nogil:
        """A request cannot go on: undo what was done for it."""
        cdef int32_t* m = &self.marks[row]
        if self.collector.rows.terminal[row] == END_NONE:
            self.collector.rows.terminal[row] = <signed char>terminal
        if m[0] & CANCELING:
            return True
        m[0] |= CANCELING
        if m[0] & SUBMIT_ISSUED and not self.issue(row, CANCEL_SOURCE):
            return False
        if m[0] & RESERVE_ISSUED and not self.issue(row, CANCEL_DESTINATION):
            return False
        return True

    cdef bint cleaned(self, int64_t row, int mark) noexcept nogil:
        """One half of a hand-off is undone."""
        cdef int32_t* m = &self.marks[row]
        m[0] |= mark
        if ((m[0] & SUBMIT_ISSUED and not m[0] & SOURCE_CLEAN)
                or (m[0] & RESERVE_ISSUED and not m[0] & DESTINATION_CLEAN)):
            return True
        return self.issue(row, COMPLETE)

    cdef bint drive(self, bint* changed) noexcept nogil:
        """Take all steps that are due, in order."""
        cdef int64_t item
        while self.pending.head < self.pending.used:
            item = self.pending.items[self.pending.head]
            self.pending.head += 1
            if self.pending.head == self.pending.used:
                self.pending.head = self.pending.used = 0
            if not self.take_step(item // STEPS, <int>(item % STEPS), changed):
                return False
        return True

    cdef bint cancel(self, int64_t row, bint* changed) noexcept nogil:
        """Take a request away from both pools, each when the pass that runs there has ended."""
        changed[0] = True
        return self.fail(row, END_CANCELED)

    cdef bint take_step(self, int64_t row, int step, bint* changed) noexcept nogil:
        cdef int64_t worker
        cdef double delay
        cdef int role = ROLE_PREFILL if step == SUBMIT_PREFILL else ROLE_DECODE
        if self.marks[row] & CANCELING and step < CANCEL_SOURCE:
            return True                        # its client has given up meanwhile
        if step == SUBMIT_PREFILL or step == RESERVE_DESTINATION:
            if self.teams[role].n_active == 0:
                return steps_push(&self.waits[role], row * STEPS + step)
            changed[0] = True
            return self.route_to(row, role)
        if step == START_TRANSFER:
            changed[0] = True
            delay = 0.0
            if not isnan(self.kv_bytes) and not isnan(self.bandwidth) and self.bandwidth > 0.0:
                delay = (<double>(self.prompt[row] if self.full_prompt else self.missing[row]) * self.kv_bytes
                         / (self.bandwidth * 1e9) * 1000.0)
            if delay > 0.0:
                self.sequence += 1
                return self.expect_at(self.now + delay, self.now, self.sequence, ROUND + row)
            return self.issue(row, ACTIVATE_DESTINATION)
        if step == COMPLETE:
            changed[0] = True
            return self.complete(row)
        worker = self.worker[row]
        if step == RELEASE_SOURCE or step == CANCEL_SOURCE:
            worker = NIL if self.source[row] == NIL else self.teams[ROLE_PREFILL].members[self.source[row]]
        if worker == NIL:                      # it never got there
            changed[0] = True
            if not self.leave_router(row, 0 if step == CANCEL_SOURCE else 1):
                return False
            return self.cleaned(row, SOURCE_CLEAN if step == CANCEL_SOURCE else DESTINATION_CLEAN)
        if self.busy[worker]:
            if self.views[worker].foreseen > 0:
                self.meet(worker, self.now, False)
            return self.defer(row, step, worker)
        changed[0] = True
        self.tries[worker] = 0
        if step == ACTIVATE_DESTINATION:
            if self.kind == KIND_SGLANG:
                sgl_activate(<SglangCore*>self.cores[worker], self.slot[row])
            else:
                handoff_activate(<Core*>self.cores[worker], self.slot[row])
            self.activated_ms[row] = self.now
            self.rest(worker)
            return self.issue(row, RELEASE_SOURCE) and self.capacity(worker)
        if step == CANCEL_DESTINATION:
            if self.kind == KIND_SGLANG:
                self.drop(row, worker)
            else:
                if not handoff_withdraw(<Core*>self.cores[worker], self.slot[row]):
                    self.drop(row, worker)
            self.rest(worker)
            return self.cleaned(row, DESTINATION_CLEAN) and self.capacity(worker)
        if self.marks[row] & SOURCE_ALIVE:
            if self.kind == KIND_SGLANG:
                if step == CANCEL_SOURCE:
                    sgl_drop(<SglangCore*>self.cores[worker], self.source_slot[row])
                    self.look(worker)
                else:
                    sgl_release_source(<SglangCore*>self.cores[worker], self.source_slot[row])
            elif step == CANCEL_SOURCE and (<Core*>self.cores[worker]).req[self.source_slot[row]].status != ST_HELD:
                core_drop(<Core*>self.cores[worker], self.source_slot[row])
                self.look(worker)
            else:
                handoff_release_source(<Core*>self.cores[worker], self.source_slot[row])
            self.marks[row] &= ~SOURCE_ALIVE
            self.rest(worker)
            self.tell(worker)
        if step == RELEASE_SOURCE:
            self.released_ms[row] = self.now
            return self.issue(row, COMPLETE)
        return self.cleaned(row, SOURCE_CLEAN)

    cdef void rest(self, int64_t worker) noexcept nogil:
        """An idle worker holds more or less than before, to the recorder."""
        if self.timeline != NULL:
            record_rest(self.timeline, worker, self.kind == KIND_SGLANG, self.cores[worker], self.now)

    cdef int64_t queued(self) noexcept nogil:
        return ((0 if self.routes[0] == NULL else self.routes[0].queued)
                + (0 if self.routes[1] == NULL else self.routes[1].queued))

    cdef bint capacity(self, int64_t worker) noexcept nogil:
        """Something changed on an idle decode worker: look at it, and reserve for who waits there."""
        self.look(worker)
        return self.reserved(worker, self.retry(worker))

    cdef int64_t retry(self, int64_t worker) noexcept nogil:
        """Row of the destination that got its reservation, or NIL."""
        cdef SglangCore* g
        cdef Core* c
        cdef int32_t slot
        cdef int64_t row
        if self.kind == KIND_SGLANG:
            g = <SglangCore*>self.cores[worker]
            slot = sgl_retry(g)
            if slot == NIL:
                return NIL
            row = g.req[slot].id
            self.missing[row] = g.req[slot].transferable
            return row
        c = <Core*>self.cores[worker]
        slot = handoff_retry(c)
        if slot == NIL:
            return NIL
        row = c.req[slot].id
        self.missing[row] = (c.req[slot].full + c.req[slot].partial - c.req[slot].pinned) * c.block_size
        return row

    cdef bint reserved(self, int64_t worker, int64_t row) noexcept nogil:
        """A destination of an idle worker (or NIL: none) has its reservation."""
        cdef SglangCore* g
        if row == NIL:
            if self.kind == KIND_SGLANG:
                g = <SglangCore*>self.cores[worker]
                if g.count == 0 and g.n_reserved == 0 and g.n_pending > 0:
                    # Nobody else holds anything: retractions have lost too much memory for it.
                    return self.fail(g.pending[0], END_FAILED)
            return True
        self.marks[row] |= RESERVED
        self.reserved_ms[row] = self.now
        self.rest(worker)
        return self.advance(row)

    cdef bint complete(self, int64_t row) noexcept nogil:
        """A hand-off is over; a request that is cancelled after it comes here again."""
        if not self.marks[row] & OVER:
            self.marks[row] |= OVER
            self.open -= 1
        if not self.marks[row] & CANCELING:
            return self.leave_router(row, 0)
        if not self.leave_router(row, 0) or not self.leave_router(row, 1):
            return False
        self.ended += 1
        return self.turn_ended(row, self.now)

    # -- routing ----------------------------------------------------------------------------------------------------

    cdef bint route_to(self, int64_t row, int pool) noexcept nogil:
        """Choose a worker of a pool; the router may keep the request."""
        cdef Router* route = self.routes[pool]
        cdef Team* t = &self.teams[pool]
        cdef int32_t worker
        if route == NULL:
            t.turn = t.turn % t.n_active + 1
            return self.assign(row, pool, self.number[t.active[t.turn - 1]], 0)
        if not self.route_path(row, route.block_size):
            return False
        self.marks[row] |= PREFILL_ROUTED if pool == 0 else DECODE_ROUTED
        worker = router_arrival(route, row, &self.scratch, self.prompt[row], self.priority[row] if self.ranked else 0,
                                <uint32_t>self.strict[row] if self.ranked else 0,
                                self.policy[row] if self.ranked else 0, self.now)
        if worker == ROUTED_LATER:
            return True
        if worker == ROUTED_NEVER:             # the reference gives up the whole replay here
            self.marks[row] &= ~(PREFILL_ROUTED if pool == 0 else DECODE_ROUTED)
            return self.fail(row, END_REJECTED)
        if worker == ROUTED_ERROR:
            self.failed = True
            return True
        return self.assign(row, pool, worker, route.last_overlap)

    cdef bint drain(self, int pool) noexcept nogil:
        """Assign what a router lets go, now that loads have changed."""
        cdef Router* route = self.routes[pool]
        cdef int64_t i, n
        if route == NULL or route.queued == 0:
            return True
        n = router_drain(route, self.now)
        for i in range(n):
            if not self.assign(route.placed[i].row, pool, route.placed[i].worker, route.placed[i].overlap):
                return False
        return True

    cdef bint leave_router(self, int64_t row, int pool) noexcept nogil:
        """A request does not load a pool any more, as far as its router knows."""
        cdef int mark = PREFILL_ROUTED if pool == 0 else DECODE_ROUTED
        if not self.marks[row] & mark:
            return True
        self.marks[row] &= ~mark
        if router_cancel(self.routes[pool], row):
            return True
        router_completed(self.routes[pool], row, self.now)
        return self.drain(pool)

    cdef bint assign(self, int64_t row, int pool, int32_t worker, int64_t overlap) noexcept nogil:
        """Hand a request to a worker of a pool, as a source or as a destination."""
        cdef int64_t tokens = 0, size
        if self.routes[pool] != NULL:
            size = self.routes[pool].block_size
            tokens = min(overlap * size, self.prompt[row])
            if self.watch is not None and pool == ROLE_PREFILL:
                self.watch.saw_admission(overlap, (self.prompt[row] + size - 1) // size)
        if pool == 0:
            if self.prefill_overlap[row] == NIL:
                self.prefill_overlap[row] = tokens
            return self.submit_source(row, worker)
        if self.decode_overlap[row] == NIL:
            self.decode_overlap[row] = tokens
        return self.reserve(row, self.teams[ROLE_DECODE].members[worker])

    cdef bint submit_source(self, int64_t row, int32_t worker) noexcept nogil:
        cdef int64_t w = self.teams[ROLE_PREFILL].members[worker]
        cdef int32_t slot = self.form(row, w, 1)
        if slot == NIL or (self.wishes and not self.wish(row, w, slot)):
            return False
        if self.kind == KIND_SGLANG:
            sgl_enqueue_source(<SglangCore*>self.cores[w], slot, row)
        else:
            (<Core*>self.cores[w]).req[slot].source = 1
            core_enqueue(<Core*>self.cores[w], slot, NIL)
        if self.timeline != NULL:
            timeline_arrival(self.timeline, w, self.now)
        self.source[row], self.source_slot[row] = worker, slot
        self.marks[row] |= SOURCE_ALIVE
        self.tries[w] = 0
        self.look(w)
        return True

    cdef bint reserve(self, int64_t row, int64_t worker) noexcept nogil:
        cdef int32_t slot
        cdef bint fits
        if self.views[worker].foreseen > 0:
            self.meet(worker, self.now, False)
        slot = self.form(row, worker, self.limit[row])
        if slot == NIL or (self.wishes and not self.wish(row, worker, slot)):
            return False
        if self.kind == KIND_SGLANG:
            fits = sgl_reserve(<SglangCore*>self.cores[worker], slot, row)
        else:
            fits = handoff_reserve(<Core*>self.cores[worker], slot)
        if not fits:
            return self.fail(row, END_FAILED)
        self.slot[row], self.worker[row] = slot, <int32_t>worker
        self.tries[worker] = 0
        if self.timeline != NULL:
            timeline_arrival(self.timeline, worker, self.now)
        if self.busy[worker]:
            return True
        return self.reserved(worker, self.retry(worker))

    cdef void tell(self, int64_t worker) noexcept nogil:
        """A prefill worker's KV events, to the router."""
        cdef int32_t number = self.number[worker]
        if self.role[worker] != ROLE_PREFILL or self.routes[0] == NULL:
            return
        if self.kind == KIND_SGLANG:
            tell_sglang(self.routes[0], number, <SglangCore*>self.cores[worker])
        else:
            router_events(self.routes[0], number, &(<Core*>self.cores[worker]).pool)

    cdef bint expect_at(self, double at, double since, int64_t rank, int64_t what) noexcept nogil:
        """Note an event; of those at the same time the one goes first that is known for longer."""
        return heap_push(&self.events, at, order_of(since), rank << RANK_SHIFT | what)
