# cython: language_level=3
"""What the recorder wants to know of an engine after a pass, after fast-forwarded passes, and between passes.

A core keeps three numbers of the moment when its batch was put together (`seen_*`), since completions have changed
them by the time anybody looks. SGLang's pool is counted in pages here.
"""
from mocker._common cimport int64_t
from mocker._core cimport Core
from mocker._offload cimport Offload
from mocker._record cimport (
    Span, Timeline, Track, add_elsewhere, log_add, timeline_idle, timeline_into, timeline_logs, timeline_plain,
    timeline_track)
from mocker._sglang cimport SglangCore


cdef inline double in_host(Core* c) noexcept nogil:
    """Blocks in the host tier below; 0 without."""
    cdef Offload* o = <Offload*>c.tiers
    return <double>(o.g2.capacity - o.g2.free) if o != NULL else 0.0


cdef inline void hold(Track* x, bint sglang, void* core) noexcept nogil:
    """What a worker holds until its next pass."""
    cdef Core* c
    cdef SglangCore* g
    if sglang:
        g = <SglangCore*>core
        x.unit, x.waiting = <double>g.page, g.n_waiting + g.n_pending
        x.used, x.cached = g.total - g.tree.available - g.tree.evictable, g.tree.evictable
        return
    c = <Core*>core
    x.waiting, x.used, x.cached = c.n_waiting + c.n_pending, c.pool.active, c.pool.inactive
    if c.tiers != NULL:
        x.host = in_host(c)


cdef inline void span_of_pass(Span* s, Track* x, bint sglang, void* core, double start) noexcept nogil:
    cdef Core* c
    cdef SglangCore* g
    s.start, s.passes, s.host = start, 1.0, 0.0
    if sglang:
        g = <SglangCore*>core
        s.end, s.running, s.waiting = g.end_ms, <double>g.seen_running, <double>(g.seen_waiting + g.n_pending)
        s.used, s.cached = <double>g.seen_used / <double>g.page, <double>g.tree.evictable / <double>g.page
        s.prompt_tokens, s.output_tokens = <double>(g.batch_isl - g.batch_prefix), <double>g.made
        s.batch_tokens, s.prefills = s.prompt_tokens + <double>g.made_by, <double>g.batch
        s.admitted, s.completed = <double>g.admitted, <double>g.completed
        s.preemptions = <double>(g.preemptions - x.preemptions)
        return
    c = <Core*>core
    s.end, s.running, s.waiting = c.end_ms, <double>c.seen_running, <double>(c.seen_waiting + c.n_pending)
    s.used, s.cached = <double>c.seen_used, <double>c.pool.inactive
    s.prompt_tokens, s.output_tokens = <double>(c.batch_isl - c.batch_prefix), <double>c.made
    s.batch_tokens, s.prefills = <double>(c.max_tokens - c.budget), <double>c.batch
    s.admitted, s.completed = <double>c.admitted, <double>c.completed
    s.preemptions = <double>(c.preemptions - x.preemptions)
    s.host = in_host(c)


cdef void add_pass(Timeline* t, int64_t worker, bint sglang, void* core, double start) noexcept nogil:
    """A pass wherever it is, into the log too."""
    cdef Track* x = timeline_track(t, worker)
    cdef Span s
    if x == NULL:
        return
    span_of_pass(&s, x, sglang, core, start)
    add_elsewhere(t, x, &s)
    if timeline_logs(t, s.start, s.end):
        log_add(t, worker, &s)
    x.preemptions = (<SglangCore*>core).preemptions if sglang else (<Core*>core).preemptions
    hold(x, sglang, core)


cdef inline void pass_of(Timeline* t, int64_t worker, bint sglang, void* core, double start) noexcept nogil:
    """A pass; inlined for each kind of engine, with nothing of the rare case, so that its span lives in registers."""
    cdef double end = (<SglangCore*>core).end_ms if sglang else (<Core*>core).end_ms
    cdef Track* x
    cdef Span s
    if timeline_plain(t, worker, start, end):
        x = &t.tracks[worker]
        span_of_pass(&s, x, sglang, core, start)
        timeline_into(x, &s)
        x.preemptions = (<SglangCore*>core).preemptions if sglang else (<Core*>core).preemptions
        hold(x, sglang, core)
    else:
        add_pass(t, worker, sglang, core, start)


cdef void record_pass(Timeline* t, int64_t worker, void* core, double start) noexcept nogil:
    """The pass just run, which began at `start`."""
    pass_of(t, worker, False, core, start)


cdef void record_sgl_pass(Timeline* t, int64_t worker, void* core, double start) noexcept nogil:
    pass_of(t, worker, True, core, start)


cdef inline void span_of_stretch(Span* s, bint sglang, void* core, double start, double end,
                                 int64_t passes) noexcept nogil:
    cdef Core* c
    cdef SglangCore* g
    s.start, s.end, s.passes = start, end, <double>passes
    s.prompt_tokens = s.preemptions = s.prefills = s.admitted = s.completed = s.host = 0.0
    if sglang:
        g = <SglangCore*>core
        s.running, s.waiting = <double>g.n_running, <double>(g.n_waiting + g.n_pending)
        s.used = (<double>(g.total - g.tree.available - g.tree.evictable)
                  - (s.passes + 1.0) * s.running / 2.0) / <double>g.page
        s.cached = <double>g.tree.evictable / <double>g.page
    else:
        c = <Core*>core
        s.running, s.waiting = <double>c.n_running, <double>(c.n_waiting + c.n_pending)
        s.used, s.cached, s.host = <double>c.pool.active, <double>c.pool.inactive, in_host(c)
    s.batch_tokens = s.output_tokens = s.running * s.passes


cdef void add_stretch(Timeline* t, int64_t worker, bint sglang, void* core, double start, double end,
                      int64_t passes) noexcept nogil:
    """A stretch wherever it is, into the log too."""
    cdef Track* x = timeline_track(t, worker)
    cdef Span s
    if x == NULL:
        return
    span_of_stretch(&s, sglang, core, start, end, passes)
    add_elsewhere(t, x, &s)
    if timeline_logs(t, start, end):
        log_add(t, worker, &s)
    hold(x, sglang, core)


cdef inline void stretch_of(Timeline* t, int64_t worker, bint sglang, void* core, double start, double end,
                            int64_t passes) noexcept nogil:
    cdef Span s
    if timeline_plain(t, worker, start, end):
        span_of_stretch(&s, sglang, core, start, end, passes)
        timeline_into(&t.tracks[worker], &s)
        hold(&t.tracks[worker], sglang, core)
    else:
        add_stretch(t, worker, sglang, core, start, end, passes)


cdef void record_stretch(Timeline* t, int64_t worker, void* core, double start, double end,
                         int64_t passes) noexcept nogil:
    """`passes` passes from `start` to `end` in which everybody only decoded."""
    stretch_of(t, worker, False, core, start, end, passes)


cdef void record_sgl_stretch(Timeline* t, int64_t worker, void* core, double start, double end,
                             int64_t passes) noexcept nogil:
    stretch_of(t, worker, True, core, start, end, passes)


cdef void record_rest(Timeline* t, int64_t worker, bint sglang, void* core, double now) noexcept nogil:
    """The worker holds more or less from `now` on, between two passes."""
    cdef Track* x = timeline_track(t, worker)
    if x == NULL:
        return
    timeline_idle(t, x, now)
    hold(x, sglang, core)
