# cython: language_level=3
"""Open loop of single requests in turn, a worker at a time: request k goes to worker k mod W whatever happens.

Answers to `replay/offline/{single,agg}.rs` for round robin. A lane is one worker from its first arrival to its end,
with fast-forward. O(passes in which something happens); it stops after a given number of passes, so that a caller can
show progress and be interrupted. With gap logs of their own several threads can run different lanes.
"""
from libc.math cimport INFINITY
from libc.stdint cimport INT64_MAX
from libc.stdlib cimport calloc, free

import numpy as np

from mocker._calendar cimport calendar_settle
from mocker._collect cimport Gaps, gaps_join
from mocker._common cimport ERR_MEMORY, NIL, ST_FREE, int64_t, uint64_t
from mocker._core cimport Core, Request
from mocker._paths cimport PathTable
from mocker._router cimport Router, Ticket
from mocker._sglang cimport SglangCore, SglRequest
from mocker._workers cimport FAST_CLOCK, KIND_CORE, KIND_SGLANG, LIFE_GONE, ROLE_PREFILL, View, Workers


cdef class Lanes(Workers):
    """Workers that can be run one at a time; arguments as of `Workers`."""

    def __cinit__(self, *_arguments):
        cdef int64_t i
        self.lanes = <Lane*>calloc(self.workers, sizeof(Lane))
        if self.lanes == NULL:
            raise MemoryError
        self.n_lanes = self.workers
        self.ring = -1
        for i in range(self.workers):
            self.lanes[i].next = i

    def __dealloc__(self):
        self.free_gaps()
        free(self.lanes)

    def set_order(self):
        """Open loop of single requests: take rows by arrival time (stable)."""
        cdef int64_t[::1] order = np.empty(self.n, np.int64)
        cdef int64_t i
        for i in range(self.n):
            order[i] = i
            if i > 0 and not self.arrival[i] >= self.arrival[i - 1]:
                order = np.argsort(self.arrival, kind="stable")
                break
        self.order = order

    # -- requests that come while it runs -----------------------------------------------------------------------------

    def open_feed(self, PathTable paths):
        """Have no requests yet; `feed` brings them. `paths` has their block identities."""
        self.n, self.more, self.paths = 0, True, paths

    def use_rows(self, const double[::1] arrival, const int64_t[::1] prompt, const int64_t[::1] limit, worker_of,
                 arrival_of, dict columns):
        """Go on with other, longer columns, which have what the old ones had."""
        self.arrival, self.prompt, self.limit = arrival, prompt, limit
        self.worker_of, self.arrival_of = worker_of, arrival_of
        self.worker, self.arrived = worker_of, arrival_of
        self.collector.point(columns, prompt.shape[0])

    def feed(self, const int64_t[::1] rows, bint more):
        """The next requests in order of arrival.

        Parameters
        ----------
        rows : array of int64
            Their rows in the columns.
        more : bool
            Whether others will follow.
        """
        cdef int64_t k, w, first = self.n, room = self.ring + 1
        cdef int64_t[::1] order
        if rows.shape[0] == 0:
            self.more = more
            return
        for w in range(self.n_lanes):
            if not self.lanes[w].done:
                first = min(first, self.lanes[w].next)
        if self.n + rows.shape[0] - first > room:
            room = 1024
            while room < self.n + rows.shape[0] - first:
                room *= 2
            order = np.empty(room, np.int64)
            for k in range(first, self.n):
                order[k & (room - 1)] = self.order[k & self.ring]
            self.order, self.ring = order, room - 1
        order = np.asarray(self.order)
        for k in range(rows.shape[0]):
            order[(self.n + k) & self.ring] = rows[k]
        self.n += rows.shape[0]
        self.more = more

    @property
    def starved(self):
        """Whether a worker cannot go on before it knows the next requests."""
        cdef int64_t w
        for w in range(self.n_lanes):
            if self.lanes[w].waits:
                return True
        return False

    def known_segments(self):
        """Segments that pools, requests and the router know: array of uint64; None if engines keep them elsewhere."""
        cdef int64_t w, i, k, n = 0
        cdef Core* c
        cdef uint64_t[::1] found
        cdef Router* r = self.route
        cdef Ticket* t
        if self.kind != KIND_CORE or self.offload is not None:
            return None
        for w in range(self.n_lanes):
            c = <Core*>self.cores[w]
            n += c.pool.table_used
            for i in range(c.req_used):
                n += c.req[i].path.n
        if r != NULL:
            n += r.table.used
            for i in range(r.tickets_used):
                n += r.tickets[i].n
        keys = np.empty(n, np.uint64)
        found, n = keys, 0
        if r != NULL:
            for i in range(<int64_t>r.table.mask + 1):
                if r.table.values[i] != NIL:
                    found[n] = r.table.keys[i]
                    n += 1
            for i in range(r.tickets_used):
                t = &r.tickets[i]
                for k in range(t.n if t.keys != NULL and t.worker == NIL else 0):
                    found[n] = t.keys[k]
                    n += 1
        for w in range(self.n_lanes):
            c = <Core*>self.cores[w]
            for i in range(<int64_t>c.pool.table_mask + 1):
                if c.pool.table_runs[i] != NIL:
                    found[n] = c.pool.table_keys[i]
                    n += 1
            for i in range(c.req_used):
                if c.req[i].status != ST_FREE:
                    for k in range(c.req[i].path.n):
                        found[n] = c.req[i].path.keys[k]
                        n += 1
        return np.unique(keys[:n])

    def last_timestamp(self):
        """Newest time that the cluster processed, ms."""
        cdef double last = self.now
        cdef int64_t w
        for w in range(self.n_lanes):
            if self.lanes[w].last > last:
                last = self.lanes[w].last
        return last

    def run_lane(self, int64_t worker, int64_t passes, int64_t arrivals):
        """Go on with one worker of an open-loop replay for about `passes` passes.

        True when it is done, or has got its requests among the first `arrivals` of all, if these are not all.
        """
        with nogil:
            self.lane(worker, passes, arrivals)
        self.fold(worker)
        self.raise_errors()
        if self.lanes[worker].stalled:
            self.stalled = True
        return self.lanes[worker].done or (
            arrivals <= self.lanes[worker].next < self.n and not self.lanes[worker].waits)

    @property
    def over(self):
        """Whether all workers are done."""
        cdef int64_t w
        for w in range(self.n_lanes):
            if not self.lanes[w].done:
                return False
        return True

    # -- gap logs ---------------------------------------------------------------------------------------------------

    def split_gaps(self, bint carried=False):
        """Give each worker a gap log of its own: their order is then the same whoever is ahead of whom.

        `carried`: they may be copied or stored, so they get no more memory than they need.
        """
        cdef int64_t w
        self.apart_gaps = <Gaps*>calloc(self.n_lanes, sizeof(Gaps))
        if self.apart_gaps == NULL:
            raise MemoryError
        for w in range(self.n_lanes):
            self.apart_gaps[w].fold_at = INT64_MAX         # folded in when they are joined
            self.apart_gaps[w].share = 0 if carried else self.n_lanes
            self.log_gaps(w, &self.apart_gaps[w])

    def join_gaps(self):
        """Put the workers' gap logs, if there are any, into the collector's, one after the other."""
        cdef int64_t w
        cdef Gaps* to = &self.collector.gaps
        if self.apart_gaps == NULL:
            return
        for w in range(self.n_lanes):
            with nogil:
                gaps_join(to, &self.apart_gaps[w])
            self.log_gaps(w, to)
        self.free_gaps()
        if to.error:
            raise MemoryError

    cdef void free_gaps(self) noexcept nogil:
        cdef int64_t w
        if self.apart_gaps != NULL:
            for w in range(self.n_lanes):
                free(self.apart_gaps[w].values)
                free(self.apart_gaps[w].weights)
        free(self.apart_gaps)
        self.apart_gaps = NULL

    cdef void log_gaps(self, int64_t worker, Gaps* gaps) noexcept nogil:
        if self.role[worker] == ROLE_PREFILL:  # it has a collector of its own
            return
        if self.kind == KIND_SGLANG:
            (<SglangCore*>self.cores[worker]).gaps = gaps
        else:
            (<Core*>self.cores[worker]).gaps = gaps

    # -- a lane -----------------------------------------------------------------------------------------------------

    cdef void lane(self, int64_t worker, int64_t passes, int64_t arrivals) noexcept nogil:
        cdef View* c = &self.views[worker]
        cdef Lane* lane = &self.lanes[worker]
        cdef double until, now = lane.now
        cdef int64_t stop = c.passes + passes
        while c.passes < stop and (lane.next < arrivals or lane.next >= self.n or lane.waits):
            if not self.deliver(worker, now if now <= self.cap or self.single else self.cap):
                c.error = ERR_MEMORY
            lane.waits = self.more and lane.next >= self.n         # who comes next decides what happens next
            if c.error or lane.waits:
                break
            if c.count == 0 and lane.next < self.n and now <= self.cap:
                now = self.arrival[self.order[lane.next & self.ring]]
                if now > self.cap and not self.single:
                    lane.done = True
                    break
                lane.last = now
                continue
            if c.count == 0 or now > self.cap:
                lane.done = True
                break
            self.run_pass(worker, now)
            c.gone += c.ended_used
            lane.last = now
            if self.brought(c):
                c.idle = 0
            elif self.stuck(worker, now):
                if lane.next >= self.n:
                    lane.done = lane.stalled = True
                    break
                c.end_ms = self.arrival[self.order[lane.next & self.ring]]
            now = c.end_ms
            if now > self.cap and not self.single:
                self.uncount(c)
                continue
            lane.last = now
            if c.steady and self.fast & FAST_CLOCK:
                until = INFINITY
                if (c.n_waiting == 0 or self.overtaking) and lane.next < self.n:
                    until = self.arrival[self.order[lane.next & self.ring]]
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
            row = self.order[lane.next & self.ring]
            if self.arrival[row] > at:
                break
            self.arrived[row] = self.arrival[row]
            if not self.submit(row, worker):
                return False
            if self.arrival[row] > lane.last:
                lane.last = self.arrival[row]
            lane.next += self.workers
        return True

    # -- at the end ---------------------------------------------------------------------------------------------------

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
            if self.life[w] == LIFE_GONE:
                continue
            if self.kind == KIND_SGLANG:
                g = <SglangCore*>self.cores[w]
                for i in range(g.req_used):
                    q = &g.req[i]
                    if q.status != 0:
                        out.append((q.id, w, 1, q.len, q.computed, q.retractions))
                continue
            c = <Core*>self.cores[w]
            calendar_settle(c, False, NIL)
            for i in range(c.req_used):
                r = &c.req[i]
                if r.status != 0:
                    out.append((r.id, w, r.status, r.len, r.computed, r.preemptions))
        return out
