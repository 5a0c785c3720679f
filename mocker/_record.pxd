# Data dictionary of the recorder: what each worker did over simulated time, in bins of bounded number.
from libc.math cimport floor

from mocker._common cimport int64_t


cdef struct Cell:                  # one worker in one bin: sums over the part of each pass that lies in it
    double running                 # requests in the batch x ms
    double waiting                 # requests in the worker's queue x ms
    double used                    # blocks that requests hold x ms
    double cached                  # blocks cached without a holder x ms
    double host                    # blocks in the host tier below x ms
    double passes
    double batch_tokens            # scheduled
    double prompt_tokens           # computed
    double output_tokens           # made
    double preemptions
    double busy                    # ms inside passes


cdef struct Span:                  # passes in a row that are alike, or an idle time (passes = 0)
    double start                   # ms
    double end                     # ms
    double running                 # requests in the batch
    double waiting                 # requests behind it when it was put together
    double used                    # blocks held while it ran
    double cached
    double host                    # as the pass ended
    double passes
    double batch_tokens            # all passes together, as all that follow
    double prompt_tokens
    double output_tokens
    double preemptions
    double prefills                # prompts computed, or parts of one
    double admitted
    double completed


cdef struct Track:                 # one worker
    Cell* cells                    # [bins]
    Cell* cell                     # the bin of the newest span, which reaches from
    double low                     # ms
    double high                    # to here; low > high: look it up
    double end                     # ms, recorded so far
    int64_t waiting                # since then
    int64_t used                   # blocks, or tokens of an engine whose
    int64_t cached
    double unit                    # tokens a block this is
    double host
    int64_t preemptions            # at the end of the last pass


cdef struct Logged:                # an entry of the pass log
    int64_t worker
    Span span


cdef struct Timeline:
    double width                   # ms a bin
    int64_t bins                   # places
    Track* tracks                  # [workers]
    int64_t workers
    int64_t tracks_cap
    double* queued                 # [bins] requests in the router's queues x ms
    double queue_end               # ms, newest time that `queued` covers
    double* disk                   # [bins] blocks in the disk tier of all workers x ms; NULL: there is none
    double* remote                 # the same of the remote store
    double below[2]                # blocks in them
    double below_since[2]          # ms
    Logged* log                    # [log_used]
    int64_t log_used
    int64_t log_cap                # allocated
    int64_t log_limit              # entries at most; 0: no log
    double log_from                # ms, passes outside are not logged
    double log_until
    double window                  # ms; logged are passes that begin in every `stride`-th window
    int64_t stride
    double seen_from               # ms, the window that was last asked about
    double seen_until
    bint seen_kept                 # whether it is logged
    int error                      # ErrorCode


cdef void add_elsewhere(Timeline* t, Track* x, Span* s) noexcept nogil
cdef bint log_window(Timeline* t, double start) noexcept nogil
cdef void log_add(Timeline* t, int64_t worker, Span* s) noexcept nogil
cdef void timeline_idle(Timeline* t, Track* x, double until) noexcept nogil
cdef void timeline_arrival(Timeline* t, int64_t worker, double at) noexcept nogil
cdef void timeline_queue(Timeline* t, double start, double end, int64_t queued) noexcept nogil
cdef void timeline_below(Timeline* t, int tier, double now, double blocks) noexcept nogil
cdef Track* new_track(Timeline* t, int64_t worker) noexcept nogil


cdef inline double timeline_edge(Timeline* t, int64_t worker, double now) noexcept nogil:
    """Where the bin of `now` ends, ms."""
    if worker < t.workers and t.tracks[worker].low <= now < t.tracks[worker].high:
        return t.tracks[worker].high
    return (floor(now / t.width) + 1.0) * t.width


cdef inline Track* timeline_track(Timeline* t, int64_t worker) noexcept nogil:
    """A worker's track, made when it is first asked for; NULL if memory is short."""
    return &t.tracks[worker] if worker < t.workers else new_track(t, worker)


cdef inline void cell_add(Cell* c, Span* s, double ms) noexcept nogil:
    """Add a whole span, `ms` long."""
    c.running += s.running * ms
    c.waiting += s.waiting * ms
    c.used += s.used * ms
    c.cached += s.cached * ms
    c.passes += s.passes
    c.batch_tokens += s.batch_tokens
    c.output_tokens += s.output_tokens
    if s.prompt_tokens != 0.0:
        c.prompt_tokens += s.prompt_tokens
    if s.host != 0.0:
        c.host += s.host * ms
    if s.preemptions != 0.0:
        c.preemptions += s.preemptions
    if s.passes > 0.0:
        c.busy += ms


cdef inline bint timeline_plain(Timeline* t, int64_t worker, double start, double end) noexcept nogil:
    """Whether a span follows the worker's one before in the same bin, as nearly all of them, and is not logged."""
    return (worker < t.workers and start == t.tracks[worker].end and start >= t.tracks[worker].low
            and end <= t.tracks[worker].high and not t.seen_kept and t.seen_from <= start < t.seen_until)


cdef inline void timeline_into(Track* x, Span* s) noexcept nogil:
    """Add such a span of a worker; then set what it holds until the next. All others: `add_elsewhere`."""
    cell_add(x.cell, s, s.end - s.start)
    x.end = s.end


cdef inline bint kept(Timeline* t, double start) noexcept nogil:
    """Whether passes that begin then are logged."""
    return t.seen_kept if t.seen_from <= start < t.seen_until else log_window(t, start)


cdef inline bint timeline_logs(Timeline* t, double start, double end) noexcept nogil:
    """Whether a span is for the log."""
    return t.log_limit > 0 and start < t.log_until and end > t.log_from and kept(t, start)


cdef class Recorder:
    cdef Timeline t
