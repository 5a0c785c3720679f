# Data dictionary of the recorder: what each worker did over simulated time, in bins of bounded number.
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
    double waiting                 # since then
    double used
    double cached
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
    int error                      # ErrorCode


cdef double timeline_edge(Timeline* t, double now) noexcept nogil
cdef void add_elsewhere(Timeline* t, int64_t worker, Track* x, Span* s) noexcept nogil
cdef void timeline_idle(Timeline* t, Track* x, double until) noexcept nogil
cdef void timeline_arrival(Timeline* t, int64_t worker, double at) noexcept nogil
cdef void timeline_queue(Timeline* t, double start, double end, int64_t queued) noexcept nogil
cdef void timeline_below(Timeline* t, int tier, double now, double blocks) noexcept nogil
cdef Track* new_track(Timeline* t, int64_t worker) noexcept nogil


cdef inline Track* timeline_track(Timeline* t, int64_t worker) noexcept nogil:
    """A worker's track, made when it is first asked for; NULL if memory is short."""
    return &t.tracks[worker] if worker < t.workers else new_track(t, worker)


cdef inline void cell_add(Cell* c, Span* s, double ms) noexcept nogil:
    """Add a whole span, `ms` long."""
    c.running += s.running * ms
    c.waiting += s.waiting * ms
    c.used += s.used * ms
    c.cached += s.cached * ms
    c.host += s.host * ms
    c.passes += s.passes
    c.batch_tokens += s.batch_tokens
    c.prompt_tokens += s.prompt_tokens
    c.output_tokens += s.output_tokens
    c.preemptions += s.preemptions
    if s.passes > 0.0:
        c.busy += ms


cdef inline void timeline_add(Timeline* t, int64_t worker, Track* x, Span* s) noexcept nogil:
    """A pass, or a stretch of like passes, of a worker; then set what it holds until the next."""
    if s.start == x.end and s.start >= x.low and s.end <= x.high and t.log_limit == 0:
        cell_add(x.cell, s, s.end - s.start)           # nearly all of them
        x.end = s.end
        return
    add_elsewhere(t, worker, x, s)


cdef class Recorder:
    cdef Timeline t
