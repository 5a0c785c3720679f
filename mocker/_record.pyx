# cython: language_level=3
"""What happens over simulated time: sums per worker and time bin, and a log of passes. Off by default.

The cluster reports every pass, every fast-forwarded stretch of like passes and every idle time as one span. Counts
of a span are spread evenly over it, so a stretch gives the sums that its passes would give one by one. When the run
outgrows the bins, neighbours are merged and the bins are twice as wide; when the log is full, every second of its
windows goes. So memory is bounded by the number of workers, whatever the length of the run.

Costs: O(bins that the span covers) a span, a few tens of nanoseconds if it is one.
"""
from libc.math cimport INFINITY, floor
from libc.stdlib cimport calloc, free
from libc.string cimport memset

import numpy as np

from mocker._common cimport ERR_MEMORY, grown, int8_t, int64_t
from mocker._pages cimport large_pages

CELL_FIELDS = ("running", "waiting", "used", "cached", "host", "passes", "batch_tokens", "prompt_tokens",
               "output_tokens", "preemptions", "busy")
PASS_FIELDS = ("start_ms", "end_ms", "running", "waiting", "used", "cached", "host", "passes", "batch_tokens",
               "prompt_tokens", "output_tokens", "preemptions", "prefills", "admitted", "completed")

cdef enum:
    FIELDS = 11                    # doubles of a Cell
    LEVELS = 5                     # of them levels, which come first
    COUNTS = 5                     # and counts, which follow; a Span has both in this order
    PASS_DOUBLES = 15              # doubles of a Span
    LONG = 1024                    # entries of a log that is going to be long
    WHOLE = 1 << 20                # entries of a log that is then made at once


cdef Track* new_track(Timeline* t, int64_t worker) noexcept nogil:
    cdef Track* x
    cdef void* moved
    while t.workers <= worker:
        moved = grown(t.tracks, &t.tracks_cap, t.workers + 1, sizeof(Track))
        if moved == NULL:
            t.error = ERR_MEMORY
            return NULL
        t.tracks = <Track*>moved
        x = &t.tracks[t.workers]
        memset(x, 0, sizeof(Track))
        x.low = x.unit = 1.0
        x.cells = <Cell*>calloc(t.bins, sizeof(Cell))
        if x.cells == NULL:
            t.error = ERR_MEMORY
            return NULL
        t.workers += 1
    return &t.tracks[worker]


cdef void cover(Timeline* t, double end) noexcept nogil:
    """Make the bins reach `end`: merge neighbours until they do."""
    cdef int64_t w, i, k
    cdef double* cells
    while end > t.width * <double>t.bins and end < INFINITY:
        for w in range(t.workers):
            cells = <double*>t.tracks[w].cells
            for i in range(t.bins // 2):
                for k in range(FIELDS):
                    cells[i * FIELDS + k] = cells[2 * i * FIELDS + k] + cells[(2 * i + 1) * FIELDS + k]
            memset(&cells[t.bins // 2 * FIELDS], 0, t.bins // 2 * sizeof(Cell))
            t.tracks[w].low, t.tracks[w].high = 1.0, 0.0
        halve(t.queued, t.bins)
        halve(t.disk, t.bins)
        halve(t.remote, t.bins)
        t.width *= 2.0


cdef void halve(double* sums, int64_t bins) noexcept nogil:
    cdef int64_t i
    if sums == NULL:
        return
    for i in range(bins // 2):
        sums[i] = sums[2 * i] + sums[2 * i + 1]
    memset(&sums[bins // 2], 0, bins // 2 * sizeof(double))


cdef inline int64_t bin_of(Timeline* t, double at) noexcept nogil:
    cdef int64_t i = <int64_t>(at / t.width)
    return i if i < t.bins else t.bins - 1


cdef void cell_share(Cell* c, Span* s, double ms, double share) noexcept nogil:
    """Add `ms` of a span, which are `share` of it."""
    cdef Span part = s[0]
    cdef double* of = &part.running
    cdef int k
    for k in range(LEVELS, LEVELS + COUNTS):
        of[k] *= share
    cell_add(c, &part, ms)


cdef void spread(Timeline* t, Track* x, Span* s) noexcept nogil:
    """Add a span to the bins that it covers."""
    cdef int64_t i, last
    cdef double at = s.start, to, length = s.end - s.start
    if s.start >= x.low and s.end <= x.high:
        cell_add(x.cell, s, length)
        return
    if not (length < INFINITY):
        return
    cover(t, s.end)
    i = bin_of(t, s.start)
    last = bin_of(t, s.end)
    x.cell, x.low, x.high = &x.cells[last], <double>last * t.width, <double>(last + 1) * t.width
    if i == last:
        cell_add(&x.cells[i], s, length)
        return
    while i <= last:
        to = <double>(i + 1) * t.width
        if to > s.end or i == last:
            to = s.end
        if to > at:
            cell_share(&x.cells[i], s, to - at, (to - at) / length)
            at = to
        i += 1


cdef void timeline_idle(Timeline* t, Track* x, double until) noexcept nogil:
    """Nothing ran since the last span: what waited and was held then still did."""
    cdef Span s
    if not (until > x.end):
        return
    memset(&s, 0, sizeof(Span))
    s.start, s.end, s.waiting, s.host = x.end, until, <double>x.waiting, x.host
    s.used, s.cached = <double>x.used / x.unit, <double>x.cached / x.unit
    spread(t, x, &s)
    x.end = until


cdef void add_elsewhere(Timeline* t, Track* x, Span* s) noexcept nogil:
    """Add a pass, or a stretch of like passes, wherever it is; then set what the worker holds until the next."""
    if s.start > x.end:
        timeline_idle(t, x, s.start)
    spread(t, x, s)
    if s.end > x.end and s.end < INFINITY:
        x.end = s.end


cdef void timeline_arrival(Timeline* t, int64_t worker, double at) noexcept nogil:
    """A request joins a worker's queue while a pass runs: it waits for the rest of what is recorded."""
    cdef Track* x = timeline_track(t, worker)
    cdef Span s
    if x == NULL or not (at < x.end):
        return
    memset(&s, 0, sizeof(Span))
    s.start, s.end, s.waiting = at, x.end, 1.0
    spread(t, x, &s)


cdef void timeline_queue(Timeline* t, double start, double end, int64_t queued) noexcept nogil:
    """Requests in the router's queues from `start` to `end`."""
    if not (end < INFINITY):
        return
    t.queue_end = end
    if queued > 0:
        cover(t, end)
        level(t, t.queued, start, end, <double>queued)


cdef void timeline_below(Timeline* t, int tier, double now, double blocks) noexcept nogil:
    """From `now` on the disk tier (0) or the remote store (1) of all workers has so many blocks."""
    cdef double since = t.below_since[tier]
    if now > since and now < INFINITY:
        if t.below[tier] > 0.0:
            cover(t, now)
            level(t, t.remote if tier else t.disk, since, now, t.below[tier])
        t.below_since[tier] = now
    t.below[tier] = blocks


cdef void level(Timeline* t, double* sums, double start, double end, double value) noexcept nogil:
    """Add what holds from `start` to `end`, which is covered."""
    cdef int64_t i
    cdef double to
    i = bin_of(t, start)
    while start < end and i < t.bins:
        to = <double>(i + 1) * t.width
        if to > end or i == t.bins - 1:
            to = end
        if to > start:
            sums[i] += (to - start) * value
            start = to
        i += 1


# ---- the pass log -----------------------------------------------------------------------------------------------

cdef bint log_window(Timeline* t, double start) noexcept nogil:
    """Whether passes that begin in the window of `start` are logged.

    Remembered, with all windows up to the next logged one: most passes begin there, and workers take turns at any edge.
    """
    cdef double n = floor(start / t.window), first = n, last = n + 1.0, beyond
    t.seen_kept = True
    if t.stride > 1:
        beyond = <double>(<int64_t>n % t.stride)
        t.seen_kept = beyond == 0.0
        if not t.seen_kept:
            first, last = n - beyond + 1.0, n - beyond + <double>t.stride
    t.seen_from, t.seen_until = first * t.window, last * t.window
    if not (t.seen_from <= start < t.seen_until):              # rounding, or infinity: this time only
        t.seen_until = t.seen_from
    return t.seen_kept


cdef void thin(Timeline* t) noexcept nogil:
    """Drop every second window, until half of the log is free."""
    cdef int64_t i, n
    while t.log_used > t.log_limit // 2:
        if t.stride < <int64_t>1 << 40:
            t.stride *= 2
        else:                                  # all of them in one window
            t.window /= 2.0
        t.seen_until = t.seen_from
        n = 0
        for i in range(t.log_used):
            if kept(t, t.log[i].span.start):
                t.log[n] = t.log[i]
                n += 1
        t.log_used = n


cdef void log_add(Timeline* t, int64_t worker, Span* s) noexcept nogil:
    cdef int64_t cap, need
    cdef void* moved
    if t.log_used == t.log_limit:
        thin(t)
        if not timeline_logs(t, s.start, s.end):
            return
    if t.log_used == t.log_cap:
        cap, need = t.log_cap, t.log_used + 1
        if cap >= LONG and t.log_limit <= WHOLE:
            need = t.log_limit                 # memory only once it is used
        moved = grown(t.log, &cap, need, sizeof(Logged))
        if moved == NULL:
            t.error = ERR_MEMORY
            return
        t.log, t.log_cap = <Logged*>moved, cap
        if cap >= LONG:
            large_pages(moved, cap * sizeof(Logged))
    t.log[t.log_used].worker = worker
    t.log[t.log_used].span = s[0]
    t.log_used += 1


cdef class Recorder:
    """Owns a recording; hand it to `Cluster.record` before the replay.

    Parameters
    ----------
    interval_ms : float
        Width of a bin at first.
    bins : int
        Bins at most, an even number.
    passes : int
        Entries of the pass log at most; 0: no log.
    start_ms, end_ms : float
        Passes wholly outside are not logged.
    window_ms : float
        A full log keeps the passes that begin in every second window of this width, then in every fourth, and so on.
    """

    def __cinit__(self, double interval_ms, int64_t bins, int64_t passes=0, double start_ms=0.0,
                  double end_ms=INFINITY, double window_ms=1000.0):
        if not (0.0 < interval_ms < INFINITY) or not (0.0 < window_ms < INFINITY):
            raise ValueError(f"interval and window must be positive and finite, got {interval_ms} and {window_ms} ms")
        if bins < 2 or bins % 2 or passes < 0:
            raise ValueError(f"bins must be even and positive, passes not negative; got {bins} and {passes}")
        self.t.width = interval_ms
        self.t.bins, self.t.log_limit, self.t.stride, self.t.window = bins, passes, 1, window_ms
        self.t.log_from, self.t.log_until = start_ms, end_ms
        if passes == 0:                        # nothing is logged in a window that is all of time
            self.t.seen_from, self.t.seen_until = -INFINITY, INFINITY
        self.t.queued = <double*>calloc(bins, sizeof(double))
        if self.t.queued == NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef int64_t w
        for w in range(self.t.workers):
            free(self.t.tracks[w].cells)
        free(self.t.tracks)
        free(self.t.queued)
        free(self.t.disk)
        free(self.t.remote)
        free(self.t.log)

    def look_below(self, bint disk, bint remote):
        """There is a disk tier, a remote store, that all workers share."""
        if disk:
            self.t.disk = <double*>calloc(self.t.bins, sizeof(double))
        if remote:
            self.t.remote = <double*>calloc(self.t.bins, sizeof(double))
        if (disk and self.t.disk == NULL) or (remote and self.t.remote == NULL):
            raise MemoryError

    def raise_error(self):
        """Raise MemoryError if the recording is not complete."""
        if self.t.error:
            raise MemoryError("the recording of the replay needs more memory than there is")

    @property
    def width_ms(self):
        """Width of a bin now, ms: the interval times a power of two."""
        return self.t.width

    @property
    def sampling(self):
        """(width of a window of the pass log in ms, every how many-th is kept)"""
        return self.t.window, self.t.stride

    def finish(self, int64_t workers, double end_ms):
        """Let `workers` workers rest until `end_ms`, or longer if something was recorded later; returns that time."""
        cdef int64_t w
        for w in range(workers):
            if timeline_track(&self.t, w) == NULL:
                self.raise_error()
            if self.t.tracks[w].end > end_ms:
                end_ms = self.t.tracks[w].end
        for w in range(workers):
            timeline_idle(&self.t, &self.t.tracks[w], end_ms)
        for tier in range(2):
            timeline_below(&self.t, tier, end_ms, self.t.below[tier])
        cover(&self.t, end_ms)
        return end_ms

    def sums(self, int64_t bins):
        """Sums per worker and bin, of the first `bins` bins: those that the run has come to.

        Returns
        -------
        cells : ndarray of float64, shape (len(CELL_FIELDS), workers, bins)
            Times of `CELL_FIELDS`: requests x ms, blocks x ms, ms, counts.
        queued : ndarray of float64, shape (bins,)
            Requests in the router's queues x ms.
        """
        cdef int64_t w, i, k
        bins = min(bins, self.t.bins)
        cells = np.empty((FIELDS, self.t.workers, bins))
        queued = np.empty(bins)
        cdef double[:, :, ::1] out = cells
        cdef double[::1] q = queued
        cdef double* source
        for w in range(self.t.workers):
            source = <double*>self.t.tracks[w].cells
            for i in range(bins):
                for k in range(FIELDS):
                    out[k, w, i] = source[i * FIELDS + k]
        for i in range(bins):
            q[i] = self.t.queued[i]
        return cells, queued

    def below(self):
        """Blocks x ms in the tiers that all workers share.

        Returns
        -------
        dict of ndarray of float64, shape (bins,)
            "disk" and "remote", as far as there are such.
        """
        cdef int64_t i
        cdef double[::1] out
        cdef double* source
        tiers = {}
        for name in ("disk", "remote"):
            source = self.t.remote if name == "remote" else self.t.disk
            if source == NULL:
                continue
            out = tiers[name] = np.empty(self.t.bins)
            for i in range(self.t.bins):
                out[i] = source[i]
        return tiers

    def passes(self):
        """The pass log, by worker and time.

        Returns
        -------
        dict of ndarray of float64, shape (k,)
            `worker` (int64) and `PASS_FIELDS`: levels and counts of `passes` passes in a row that are alike.
        """
        cdef int64_t i, k, w, n = self.t.log_used
        cdef double* source
        worker, values = np.empty(n, np.int64), np.empty((PASS_DOUBLES, n))
        cdef int64_t[::1] of = worker
        cdef double[:, ::1] out = values
        cdef int64_t[::1] place = np.zeros(self.t.workers + 1, np.int64)
        cdef bint ordered = True
        for i in range(n):                     # a worker's own entries are in order of time
            place[self.t.log[i].worker + 1] += 1
        for w in range(self.t.workers):
            place[w + 1] += place[w]
        for i in range(n):
            w = self.t.log[i].worker
            source = &self.t.log[i].span.start
            of[place[w]] = w
            for k in range(PASS_DOUBLES):
                out[k, place[w]] = source[k]
            place[w] += 1
        for i in range(1, n):
            ordered = ordered and (of[i] != of[i - 1] or out[0, i] >= out[0, i - 1])
        if not ordered:
            order = np.lexsort((values[0], worker))
            values = values[:, order]
        return {"worker": worker, **dict(zip(PASS_FIELDS, values, strict=True))}


def find_passes(const double[:] start, const double[:] end, const int64_t[::1] bounds, const int64_t[:] worker,
                const double[:] at, bint starts):
    """Entries of a pass log that times of workers fall into.

    Parameters
    ----------
    start, end : array of float64, shape (k,)
        The entries, by worker and time, ms.
    bounds : array of int64, shape (workers + 1,)
        Where those of each worker begin.
    worker : array of int64, shape (n,)
        -1: none.
    at : array of float64, shape (n,)
        Times, ms; NaN: never. In order they are found fastest.
    starts : bool
        An entry that begins at a time counts, rather than one that ends then.

    Returns
    -------
    ndarray of int64, shape (n,)
        -1 where there is none.
    """
    cdef int64_t i, w, low, high, middle, n = at.shape[0]
    found = np.full(n, -1, np.int64)
    cdef int64_t[::1] out = found
    cdef int64_t[::1] place = np.array(bounds)   # of each worker, behind the newest that began in time
    with nogil:
        for i in range(n):
            w = worker[i]
            if w < 0 or at[i] != at[i]:
                continue
            low = place[w]
            if not ((low == bounds[w] or begun(start[low - 1], at[i], starts))
                    and (low == bounds[w + 1] or not begun(start[low], at[i], starts))):
                low, high = bounds[w], bounds[w + 1]
                while low < high:
                    middle = (low + high) // 2
                    if begun(start[middle], at[i], starts):
                        low = middle + 1
                    else:
                        high = middle
                place[w] = low
            if low > bounds[w] and at[i] <= end[low - 1] + 1e-9:
                out[i] = low - 1
    return found


cdef inline bint begun(double start, double at, bint starts) noexcept nogil:
    return start <= at if starts else start < at


def count_requests(double[:, :, ::1] out, double width, const int64_t[::1] first, const int64_t[::1] last,
                   const double[:] arrival, const double[:] admitted, const double[:] ended, completed,
                   prompt, reused):
    """Add requests to the bins of their times and workers.

    Parameters
    ----------
    out : array of float64, shape (5, workers, bins)
        Arrivals, first admissions, completions, prompt tokens admitted and reused. The last bin takes what is later.
    width : float
        Width of a bin, ms.
    first, last : array of int64, shape (n,)
        Workers that admitted and that completed each request; -1: none.
    arrival, admitted, ended : array of float64, shape (n,)
        Times, ms; NaN: never.
    completed : array of bool, shape (n,)
    prompt, reused : array of int, shape (n,)
        Tokens of the prompt, and of them those found in the cache (-1: unknown).
    """
    cdef int64_t i, n = first.shape[0], bins = out.shape[2]
    cdef const int8_t[:] done = completed.view(np.int8)
    cdef const int64_t[:] tokens = prompt.astype(np.int64, copy=False), found = reused.astype(np.int64, copy=False)
    with nogil:
        for i in range(n):
            if first[i] >= 0 and arrival[i] >= 0.0:
                out[0, first[i], place_of(arrival[i], width, bins)] += 1.0
            if first[i] >= 0 and admitted[i] >= 0.0:
                out[1, first[i], place_of(admitted[i], width, bins)] += 1.0
                out[3, first[i], place_of(admitted[i], width, bins)] += <double>tokens[i]
                out[4, first[i], place_of(admitted[i], width, bins)] += <double>max(found[i], 0)
            if last[i] >= 0 and done[i] and ended[i] >= 0.0:
                out[2, last[i], place_of(ended[i], width, bins)] += 1.0


cdef inline int64_t place_of(double at, double width, int64_t bins) noexcept nogil:
    at /= width
    return <int64_t>at if at < <double>bins else bins - 1
