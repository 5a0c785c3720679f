# cython: language_level=3
"""A replay that is run in pieces: up to a moment or a number of endings, with requests put in and taken out between.

The loop is the cluster's own. Between two pieces no worker is ahead of `Cluster.horizon`, so that what is changed at
the horizon or later meets every worker where it would be.
"""
from libc.math cimport INFINITY, isnan
from libc.stdint cimport INT64_MAX

import numpy as np

from mocker._cluster cimport Cluster
from mocker._collect cimport Collector, Gaps
from mocker._common cimport END_CANCELED, END_NONE, NIL, int32_t, int64_t
from mocker._core cimport Core, Request
from mocker._disagg cimport DisaggCluster
from mocker._heap cimport Heap, heap_push
from mocker._radix cimport radix_match_pages
from mocker._sglang cimport SglangCore, SglRequest
from mocker._workers cimport KIND_SGLANG

WORKER = np.dtype([
    ("role", np.int8), ("life", np.int8), ("busy", np.int8), ("running", np.int64), ("waiting", np.int64),
    ("used_blocks", np.int64), ("cached_blocks", np.int64), ("capacity_blocks", np.int64), ("passes", np.int64),
    ("preemptions", np.int64), ("pass_end_ms", np.float64)])
"""State of a worker: role 0 prefill, 1 decode or both; life 0 starting, 1 active, 2 draining, 3 gone; busy: in a pass,
which ends at `pass_end_ms`; requests running and waiting; KV blocks (SGLang: pages) that requests hold, cached ones
without a holder, all; passes and preemptions since the start."""


WAITING = np.dtype([("row", np.int64), ("prompt_tokens", np.int64), ("cached_tokens", np.int64),
                    ("generated", np.int64), ("limit", np.int64)])
"""A waiting request: its row, prompt tokens and those cached at its worker, tokens made before it was preempted, tokens
to make."""


cdef packed struct WorkerState:
    signed char role
    signed char life
    signed char busy
    int64_t running
    int64_t waiting
    int64_t used
    int64_t cached
    int64_t capacity
    int64_t passes
    int64_t preemptions
    double pass_end


# ---- running ----------------------------------------------------------------------------------------------------

def keep_whole(Cluster c):
    """Do not fold the gap logs into summaries on the way, since these are not carried."""
    c.collector.gaps.fold_at = INT64_MAX
    if isinstance(c, DisaggCluster):
        (<DisaggCluster>c).prefill_collector.gaps.fold_at = INT64_MAX


def gaps_above(Cluster c, double bound):
    """Gaps over a bound so far in all logs, and the sum of all: ``(count, sum in ms)``."""
    cdef int64_t w, i, above = 0
    cdef double total = 0.0
    cdef Gaps* own
    more, whole = c.collector.gaps_above(bound)
    if c.apart_gaps == NULL:
        return more, whole
    with nogil:
        for w in range(c.n_lanes):
            own = &c.apart_gaps[w]
            for i in range(own.used):
                if own.values[i] > bound:
                    above += own.weights[i]
                total += own.values[i] * <double>own.weights[i]
    return more + above, whole + total


def advance(Cluster c, double horizon, int64_t more, int64_t passes, bint fast):
    """Go on until nothing more happens up to `horizon` (ms), or `more` requests have gone (negative: any number).

    Parameters
    ----------
    passes : int
        Come back after about so many, to look at signals.
    fast : bool
        Fast-forward, up to the horizon. Without a horizon nothing may be changed afterwards but at the end.

    Returns
    -------
    bool
        False if it came back because of `passes`.
    """
    cdef bint ok
    cdef int had = c.fast
    cdef int64_t w
    if c.finished:
        return True
    c.horizon, c.enough = horizon, INT64_MAX if more < 0 else c.ended + more
    c.fast = had if fast else 0
    try:
        with nogil:
            ok = c.coupled(passes)
    finally:
        c.fast, c.horizon = had, INFINITY
        for w in range(c.workers):
            c.fold(w)
    c.raise_errors()
    if not ok:
        raise MemoryError
    return c.finished or c.ended >= c.enough or next_moment(c) > horizon


cdef double next_moment(Cluster c) noexcept nogil:
    cdef double at = c.upcoming()
    return c.tick_at if c.tick_at < at else at


def upcoming(Cluster c):
    """When something happens next, ms; 0 before the start; infinity: a dead end, or the end."""
    return next_moment(c) if c.started else 0.0


def settle(Cluster c, double now):
    """Let the cluster react to a change made at `now`, where nothing else happens earlier."""
    cdef int64_t w, done = 0
    cdef bint ok = True
    cdef int had = c.fast
    if not c.started:
        return
    if now > c.now and c.watch is not None:
        c.clock_to(now)
    elif now > c.now:
        c.now = now
    c.finished = c.finished and c.stalled
    c.fast = 0                                 # nobody may get ahead of what else is changed now
    with nogil:
        ok = c.settle(&done)
    c.fast = had
    for w in range(c.workers):
        c.fold(w)
    c.raise_errors()
    if not ok:
        raise MemoryError


def scale(Cluster c, int role, int64_t target, double now):
    """Bring the active and starting workers of a role to a number, as a planner does; `settle` comes after it."""
    if now > c.now:
        c.clock_to(now)
    c.scale(role, target)
    if not c.vacated(role):
        raise MemoryError
    c.free_departed()


# ---- state ------------------------------------------------------------------------------------------------------

def look(Cluster c, WorkerState[::1] out):
    """Write the state of every worker into an array of `WORKER`."""
    cdef int64_t w
    cdef Core* k
    cdef SglangCore* g
    cdef WorkerState* s
    for w in range(min(c.workers, <int64_t>out.shape[0])):
        s = &out[w]
        s.role, s.life, s.busy = c.role[w], c.life[w], c.busy[w]
        s.pass_end = c.views[w].end_ms
        if c.cores[w] == NULL:
            s.running = s.waiting = s.used = s.cached = 0
            continue
        if c.kind == KIND_SGLANG:
            g = <SglangCore*>c.cores[w]
            s.running, s.waiting = g.n_running, g.n_waiting + g.n_prebuilt + g.n_pending + g.n_reserved
            s.capacity, s.cached = g.total // g.page, g.tree.evictable // g.page
            s.used = s.capacity - (g.tree.available + g.tree.evictable) // g.page
            s.passes, s.preemptions = g.passes, g.preemptions
            continue
        k = <Core*>c.cores[w]
        s.running, s.waiting = k.n_running, k.n_waiting + k.n_pending + k.n_reserved
        s.used, s.cached, s.capacity = k.pool.active, k.pool.inactive, k.pool.capacity
        s.passes, s.preemptions = k.passes, k.preemptions


def waiting(Cluster c, int64_t worker):
    """Requests that wait at a worker, in the order of its queue, as an array of `WAITING`."""
    cdef Core* k
    cdef Request* r
    cdef SglangCore* g
    cdef SglRequest* q
    cdef int64_t i
    cdef int32_t slot
    rows = []
    if c.cores[worker] == NULL:
        return np.zeros(0, WAITING)
    if c.kind == KIND_SGLANG:
        g = <SglangCore*>c.cores[worker]
        for i in range(g.n_waiting):
            q = &g.req[g.waiting[(g.waiting_head + i) & (g.waiting_cap - 1)]]
            rows.append((q.id, q.prompt, radix_match_pages(&g.tree, &q.path, q.full) * g.page, q.gen, q.limit))
        return np.array(rows, WAITING)
    k = <Core*>c.cores[worker]
    for i in range(k.waiting_places):
        slot = k.waiting[(k.waiting_head + i) & (k.waiting_cap - 1)]
        if slot >= 0:
            r = &k.req[slot]
            rows.append((r.id, r.prompt, k.admission.cached(k.admission.engine, r), r.gen, r.limit))
    return np.array(rows, WAITING)


def counts(Cluster c):
    """(workers, rows, rows in flight, requests that a router or nobody keeps back)."""
    return c.workers, c.n, c.in_flight, c.queued() + c.n_held


def tokens_wanted(Cluster c):
    """Whether the engines take real tokens."""
    return c.paths is None


def path_of(Cluster c, int64_t row, int64_t blocks):
    """Segments and ends of a row's first blocks, as two lists."""
    return c.paths.path(row, blocks)


def new_segment(Cluster c):
    """A segment that no row has yet, for the next row."""
    return c.paths.segments + c.paths.later


# ---- more requests ----------------------------------------------------------------------------------------------

cdef object longer(object array, int64_t n, int64_t cap, object fill):
    """A copy of the first `n` items with room for `cap`."""
    made = np.full(cap, fill, np.asarray(array).dtype)
    made[:n] = np.asarray(array)[:n]
    return made


cdef int grow_collector(Collector k, int64_t n, int64_t cap) except -1:
    fills = {"terminal": 0, "output_tokens": 0, "reused_input_tokens": 0, "first_reused_input_tokens": 0}
    k.point({name: longer(column, n, cap, fills.get(name, np.nan)) for name, column in k.columns.items()}, cap)
    return 0


cdef int grow(Cluster c) except -1:
    """Room for more rows in every column; the old ones stay as they were."""
    cdef int64_t n = c.n, cap = max(2 * n, 64)
    cdef DisaggCluster d
    grow_collector(c.collector, n, cap)
    c.arrival, c.prompt = longer(c.arrival, n, cap, np.nan), longer(c.prompt, n, cap, 0)
    c.limit = longer(c.limit, n, cap, 0)
    c.worker_of, c.arrival_of = longer(c.worker_of, n, cap, NIL), longer(c.arrival_of, n, cap, np.nan)
    c.worker, c.arrived = c.worker_of, c.arrival_of
    if c.ranked:
        c.priority, c.strict = longer(c.priority, n, cap, 0), longer(c.strict, n, cap, 0)
        c.policy = longer(c.policy, n, cap, 0)
    c.next_offsets = longer(c.next_offsets, n + 1, cap + 1, c.next_rows.shape[0])
    c.ends_due, c.rank, c.delay = longer(c.ends_due, n, cap, 0), longer(c.rank, n, cap, 0), longer(c.delay, n, cap, 0.0)
    if c.impatient:
        c.patience = longer(c.patience, n, cap, np.nan)
    if c.offload is not None:
        c.offload.collect(cap)
    if c.planner is not None:
        c.held = longer(np.roll(np.asarray(c.held)[:n], -c.held_first), n, cap, 0)
        c.held_first = 0
    if not isinstance(c, DisaggCluster):
        return 0
    d = c
    grow_collector(d.prefill_collector, n, cap)
    d.marks, d.missing = longer(d.marks, n, cap, 0), longer(d.missing, n, cap, 0)
    d.source_slot, d.slot = longer(d.source_slot, n, cap, NIL), longer(d.slot, n, cap, NIL)
    d.details = {name: longer(column, n, cap, NIL if column.dtype.kind == "i" else np.nan)
                 for name, column in d.details.items()}
    bind_details(d)
    return 0


cdef int bind_details(DisaggCluster d) except -1:
    k = d.details
    d.source, d.held_ms, d.reserved_ms = (
        k["prefill_worker_idx"], k["source_held_ms"], k["destination_reserved_ms"])
    d.activated_ms, d.released_ms = k["destination_activated_ms"], k["source_released_ms"]
    d.prefill_overlap, d.decode_overlap = k["prefill_route_overlap_tokens"], k["decode_route_overlap_tokens"]
    return 0


def append(Cluster c, double at, int64_t prompt, int64_t limit, keys, ends, *, int64_t priority=0, int64_t strict=0,
           int32_t policy=0):
    """A new request, a session of its own, that arrives at `at` (closed loop: when its turn comes).

    Parameters
    ----------
    prompt, limit : int
        Prompt tokens, tokens to generate.
    keys, ends : list of int
        Its prompt's full blocks: segment of each stretch, and the block index one past its end. Ignored with real
        tokens.

    Returns
    -------
    int
        Its row.
    """
    cdef int64_t row = c.n
    cdef double[::1] arrival
    cdef int64_t[::1] numbers
    cdef int32_t[::1] small
    if c.worker.shape[0] == row:
        grow(c)
        if c.paths is not None:
            c.paths = c.paths.copy(row)        # it may be shared
    if c.paths is not None:
        c.paths.append(keys, ends)
    arrival = np.asarray(c.arrival)
    arrival[row] = at
    numbers = np.asarray(c.prompt)
    numbers[row] = prompt
    numbers = np.asarray(c.limit)
    numbers[row] = limit
    small = np.asarray(c.rank)
    small[row] = <int32_t>row
    if c.ranked:
        numbers = np.asarray(c.priority)
        numbers[row] = priority
        numbers = np.asarray(c.strict)
        numbers[row] = strict
        small = np.asarray(c.policy)
        small[row] = policy
    if c.held_first > 0:                       # the ring is about to get longer
        c.held = np.roll(np.asarray(c.held)[:row], -c.held_first)
        c.held = longer(c.held, row, c.worker.shape[0], 0)
        c.held_first = 0
    c.n = row + 1
    c.rows_left += 1
    if c.limit_active > 0:
        c.roots = np.append(np.asarray(c.roots), np.int64(row))
        if c.started and not c.activate(c.now):
            raise MemoryError
    elif not heap_push(&c.ready, at, row, row):
        raise MemoryError
    if not c.stalled and c.now <= c.cap:
        c.finished = False
    return row


# ---- requests that come while it runs, in rows that are used again -------------------------------------------------

def use_links(Cluster c, const int64_t[::1] next_offsets, const int32_t[::1] rank, const double[::1] delay, ends_due):
    """Go on with other, longer columns of single requests, as `Lanes.use_rows`."""
    c.next_offsets, c.rank, c.delay, c.ends_due = next_offsets, rank, delay, ends_due


def feed(Cluster c, const int64_t[::1] rows):
    """Requests that arrive next, all of them after the horizon up to which the replay has gone."""
    cdef int64_t i
    for i in range(rows.shape[0]):
        if not heap_push(&c.ready, c.arrival[rows[i]], c.rank[rows[i]], rows[i]):
            raise MemoryError
    c.rows_left += rows.shape[0]
    if not c.stalled and c.now <= c.cap:
        c.finished = False


# ---- fewer requests ---------------------------------------------------------------------------------------------

cdef bint heap_take(Heap* h, int64_t row) noexcept nogil:
    """Take the entry of a row out; false if it is not there."""
    cdef Heap old = h[0]
    cdef int64_t i
    cdef bint found = False
    h.used = 0
    for i in range(old.used):                  # an entry moves to a place that was read before
        if old.items[i].second == row:
            found = True
        else:
            heap_push(h, old.items[i].at, old.items[i].first, old.items[i].second)
    return found


def cancel(Cluster c, int64_t row, double now):
    """Let a client give up a request; `settle` comes after it.

    Returns
    -------
    bool
        False if it has ended already, if only in the pass under way.

    Raises
    ------
    ValueError
        It waits for other requests, so that nobody knows it.
    """
    if c.collector.rows.terminal[row] != END_NONE:
        return False
    if isnan(c.arrived[row]):
        if not heap_take(&c.ready, row):
            raise ValueError(f"request {row} cannot be cancelled before those that it waits for have ended")
        c.in_flight += 1
        c.collector.rows.terminal[row] = END_CANCELED
        c.ended += 1
        if not c.turn_ended(row, now):
            raise MemoryError
    elif not heap_push(&c.cancels, now, c.rank[row], row):
        raise MemoryError
    return True
