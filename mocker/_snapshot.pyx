# cython: language_level=3
"""The whole state of a replay under way as bytes, and clusters made of such bytes.

`save` writes what every structure's `*_carry` function names; `load` makes a cluster like a given one, of empty
engines and routers, and reads the bytes into it; `copy` goes the short way. Columns that nobody changes are shared.
O(what is resident, and the rows of the workload).
"""
from libc.math cimport NAN
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from functools import cache

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize

import numpy as np

from mocker._carry cimport CARRY_MEMORY, COPY, COUNT, LIST, LOAD, SAVE, Carrier, carry, carry_array
from mocker._carry_engines cimport core_carry, rules_carry
from mocker._carry_offload cimport world_carry
from mocker._carry_record cimport timeline_carry, timeline_free
from mocker._carry_router cimport router_carry
from mocker._carry_sglang cimport sgl_carry
from mocker._cluster cimport Cluster
from mocker._collect cimport Collector, Gaps
from mocker._common cimport NIL, int32_t, int64_t
from mocker._core cimport Core, Request
from mocker._disagg cimport DisaggCluster
from mocker._engine cimport EngineCore
from mocker._heap cimport Heap, Pending
from mocker._offload cimport Lease, Offload, World
from mocker._offload_engine cimport OffloadWorld
from mocker._record cimport Recorder, Timeline
from mocker._requests cimport core_free
from mocker._router cimport Router, RouterCore
from mocker._router_loads cimport router_free
from mocker._router_tiers cimport lower_new
from mocker._rules cimport VllmRulesCore, rules_free
from mocker._rules_engine cimport RulesEngine
from mocker._sglang cimport SglangCore, SglRequest, sgl_free
from mocker._sglang_engine cimport SglangEngine
from mocker._steps cimport Steps
from mocker._watch cimport Note, Seen, Watch
from mocker._workers cimport KIND_RULES, KIND_SGLANG, ROLE_PREFILL, Team, View

LAYOUT = (sizeof(Core), sizeof(Request), sizeof(SglangCore), sizeof(SglRequest), sizeof(VllmRulesCore), sizeof(Router),
          sizeof(View), sizeof(Team), sizeof(Timeline), sizeof(World), sizeof(Offload), sizeof(Lease), sizeof(void*))
"""Sizes of structures: bytes can be loaded where these are the same."""


# ---- the parts --------------------------------------------------------------------------------------------------

cdef void heap_carry(Carrier* io, Heap* h) noexcept nogil:
    carry(io, h, sizeof(Heap))
    carry_array(io, <void**>&h.items, h.used, h.cap, sizeof(Pending))


cdef void gaps_carry(Carrier* io, Gaps* g) noexcept nogil:
    carry(io, g, sizeof(Gaps))
    carry_array(io, <void**>&g.values, g.used, g.cap, sizeof(double))
    carry_array(io, <void**>&g.weights, g.used, g.cap, sizeof(int64_t))
    if io.mode == LOAD or io.mode == COPY:
        g.summary = NULL                       # made anew from the log, which is whole


cdef void collector_carry(Carrier* io, Collector k, int64_t n) noexcept nogil:
    carry(io, k.rows.first_admit, n * <int64_t>sizeof(double))
    carry(io, k.rows.first_token, n * <int64_t>sizeof(double))
    carry(io, k.rows.second_gap, n * <int64_t>sizeof(double))
    carry(io, k.rows.last_token, n * <int64_t>sizeof(double))
    carry(io, k.rows.tokens, n * <int64_t>sizeof(int64_t))
    carry(io, k.rows.reused, n * <int64_t>sizeof(int64_t))
    carry(io, k.rows.first_reused, n * <int64_t>sizeof(int64_t))
    carry(io, k.rows.terminal, n)
    gaps_carry(io, &k.gaps)


cdef void watch_carry(Carrier* io, Seen* s) noexcept nogil:
    cdef int role
    carry(io, s, sizeof(Seen))
    for role in range(2):
        carry_array(io, <void**>&s.notes[role], s.used[role], s.cap[role], sizeof(Note))


cdef void steps_carry(Carrier* io, Steps* q) noexcept nogil:
    carry(io, q, sizeof(Steps))
    carry_array(io, <void**>&q.items, q.used, q.cap, sizeof(int64_t))


cdef void clock_carry(Carrier* io, Cluster c) noexcept nogil:
    """Clock, sessions and events."""
    carry(io, &c.now, sizeof(double))
    carry(io, &c.clamped, sizeof(int64_t))
    carry(io, &c.ended, sizeof(int64_t))
    carry(io, &c.fast, sizeof(bint))
    carry(io, &c.finished, sizeof(bint))
    carry(io, &c.stalled, sizeof(bint))
    carry(io, &c.starts, sizeof(int64_t))
    carry(io, &c.sequence, sizeof(int64_t))
    carry(io, &c.rows_left, sizeof(int64_t))
    carry(io, &c.active_sessions, sizeof(int64_t))
    carry(io, &c.next_session, sizeof(int64_t))
    carry(io, &c.in_flight, sizeof(int64_t))
    carry(io, &c.started, sizeof(bint))
    carry(io, &c.held_first, sizeof(int64_t))
    carry(io, &c.n_held, sizeof(int64_t))
    carry(io, &c.tick_at, sizeof(double))
    carry(io, &c.idle_ticks, sizeof(int64_t))
    carry(io, &c.ticks, sizeof(int64_t))
    heap_carry(io, &c.events)
    heap_carry(io, &c.ready)
    heap_carry(io, &c.cancels)
    if c.n > 0:
        carry(io, &c.worker[0], c.n * <int64_t>sizeof(int32_t))
        carry(io, &c.arrived[0], c.n * <int64_t>sizeof(double))
        carry(io, &c.ends_due[0], c.n * <int64_t>sizeof(int64_t))
        if c.watch is not None:
            carry(io, &c.held[0], c.n * <int64_t>sizeof(int64_t))


cdef void workers_carry(Carrier* io, Cluster c) noexcept nogil:
    cdef int64_t w
    cdef Team* t
    cdef int role
    carry(io, c.views, c.workers * <int64_t>sizeof(View))
    carry(io, c.busy, c.workers)
    carry(io, c.role, c.workers)
    carry(io, c.life, c.workers)
    carry(io, c.number, c.workers * <int64_t>sizeof(int32_t))
    for role in range(2):
        t = &c.teams[role]
        carry(io, t, sizeof(Team))
        carry_array(io, <void**>&t.members, t.used, t.cap, sizeof(int64_t))
        carry_array(io, <void**>&t.active, t.n_active, t.active_cap, sizeof(int64_t))
    for w in range(c.workers):
        if c.cores[w] == NULL:
            continue
        if c.kind == KIND_SGLANG:
            sgl_carry(io, <SglangCore*>c.cores[w])
            continue
        core_carry(io, <Core*>c.cores[w])
        if c.kind == KIND_RULES:
            rules_carry(io, c.rules[w])
    if c.apart_gaps != NULL:
        for w in range(c.n_lanes):
            gaps_carry(io, &c.apart_gaps[w])


cdef void handoffs_carry(Carrier* io, DisaggCluster d) noexcept nogil:
    cdef int64_t n = d.n, w
    collector_carry(io, d.prefill_collector, n)
    carry(io, &d.open, sizeof(int64_t))
    carry(io, &d.ranked_at, sizeof(double))
    if n > 0:
        carry(io, &d.marks[0], n * <int64_t>sizeof(int32_t))
        carry(io, &d.source_slot[0], n * <int64_t>sizeof(int32_t))
        carry(io, &d.slot[0], n * <int64_t>sizeof(int32_t))
        carry(io, &d.source[0], n * <int64_t>sizeof(int32_t))
        carry(io, &d.missing[0], n * <int64_t>sizeof(int64_t))
        carry(io, &d.held_ms[0], n * <int64_t>sizeof(double))
        carry(io, &d.reserved_ms[0], n * <int64_t>sizeof(double))
        carry(io, &d.activated_ms[0], n * <int64_t>sizeof(double))
        carry(io, &d.released_ms[0], n * <int64_t>sizeof(double))
        carry(io, &d.prefill_overlap[0], n * <int64_t>sizeof(int64_t))
        carry(io, &d.decode_overlap[0], n * <int64_t>sizeof(int64_t))
    carry(io, d.tries, d.workers * <int64_t>sizeof(int64_t))
    for w in range(d.workers):
        steps_carry(io, &d.deferred[w])
    steps_carry(io, &d.pending)
    steps_carry(io, &d.waits[0])
    steps_carry(io, &d.waits[1])


cdef void below_carry(Carrier* io, OffloadWorld below, double[::1] parked, int64_t[:, ::1] blocks,
                      int64_t n) noexcept nogil:
    """The tiers below the workers, whose cores are carried already, and what each row had from them."""
    world_carry(io, &below.w)
    if n > 0:
        carry(io, &parked[0], n * <int64_t>sizeof(double))
        carry(io, &blocks[0, 0], 3 * n * <int64_t>sizeof(int64_t))


cdef int everything(Carrier* io, Cluster c) except -1:
    cdef Router* routers[2]
    cdef double[::1] parked = None if c.offload is None else c.offload.parked_ms
    cdef int64_t[:, ::1] blocks = None if c.offload is None else c.offload.blocks
    cdef int64_t places[2]
    cdef int i
    cdef DisaggCluster d = c if isinstance(c, DisaggCluster) else None
    routers[0], routers[1] = c.routes[0], c.routes[1]
    places[0] = places[1] = 0
    for i, router in enumerate(routers_of(c)):
        if router is not None:
            places[i] = len((<RouterCore>router).profile.table)
    with nogil:
        clock_carry(io, c)
        collector_carry(io, c.collector, c.n)
        workers_carry(io, c)
        if c.offload is not None:
            below_carry(io, c.offload, parked, blocks, c.n)
        if c.watch is not None:
            watch_carry(io, &c.watch.s)
        if c.timeline != NULL:
            timeline_carry(io, c.timeline)
        for i in range(2):
            if routers[i] != NULL:
                router_carry(io, routers[i], places[i])
        if d is not None:
            handoffs_carry(io, d)
    return 0


cdef tuple routers_of(Cluster c):
    """Routers by role."""
    if isinstance(c, DisaggCluster):
        return (<DisaggCluster>c).prefill_router, (<DisaggCluster>c).decode_router
    return None, c.router


# ---- saving -----------------------------------------------------------------------------------------------------

def save(Cluster c):
    """All state of a replay.

    Returns
    -------
    data : bytes
    head : dict
        What `load` has to know before it reads them.
    """
    cdef Carrier io = Carrier(COUNT, NULL, 0, 0, NULL, 0, 0, 0, 0)
    cdef bytes data
    head = head_of(c)
    everything(&io, c)
    data = PyBytes_FromStringAndSize(NULL, io.used)
    io = Carrier(SAVE, PyBytes_AS_STRING(data), 0, io.used, NULL, 0, 0, 0, 0)
    everything(&io, c)
    return data, head


def head_of(Cluster c):
    """What `load` and `copy` have to know of a replay."""
    return {"layout": LAYOUT, "rows": c.n, "roles": c.roles,
            "gone": [engine is None for engine in c.engines], "departed": dict(c.departed), "leavers": list(c.leavers),
            "apart": c.apart_gaps != NULL, "columns": columns_of(c), "seats": seats_of(c),
            "paths": c.paths.copy(c.n) if c.paths is not None and c.paths.later else None}


cdef object seats_of(Cluster c):
    """Workers with tiers below them, in the order of their tiers (NIL: it is gone), and which ones write through."""
    if c.offload is None:
        return None
    worker_of = {id(engine): w for w, engine in enumerate(c.engines) if engine is not None}
    return [(worker_of.get(id(engine), NIL), through) for engine, through in c.offload.seats()]


cdef dict columns_of(Cluster c):
    """What is known of each row from the start: views of columns that only get longer."""
    cdef int64_t n = c.n
    columns = {"arrival": c.arrival, "prompt": c.prompt, "limit": c.limit, "rank": c.rank, "delay": c.delay}
    if c.impatient:
        columns["patience"] = c.patience
    if c.ranked:
        columns.update(priority=c.priority, strict=c.strict, policy=c.policy)
    columns = {name: np.asarray(column)[:n] for name, column in columns.items()}
    if c.grow is not None:
        columns["prompt"], columns["limit"] = columns["prompt"].copy(), columns["limit"].copy()
    columns.update(next_offsets=np.asarray(c.next_offsets)[:n + 1], next_rows=np.asarray(c.next_rows),
                   roots=np.asarray(c.roots))
    return columns


# ---- loading ----------------------------------------------------------------------------------------------------

cdef object empty_engine(object like, int kind):
    """An engine of the same class and timing model, to be loaded."""
    common = {"max_seqs": 1, "worker_type": 0, "speedup": 1.0, "decode_speedup": 1.0, "kv_bytes": NAN,
              "kv_bandwidth": NAN, "rates": (), "seed": 0, "real_tokens": False, "record": False, "capture": False,
              "worker_id": like.worker_id, "timing": like.timing, "hooks": like.hooks}
    if kind == KIND_SGLANG:
        return SglangEngine(page=1, total=1, max_prefill=1, chunk=1, clip=1, lpm=False, conserve=False,
                            conservativeness=1.0, **common)
    common.update(block_size=1, num_blocks=1, max_tokens=1, caching=False, chunked=False, fifo=False, trtllm=False,
                  token_seed=0, event_tokens=False)
    if kind != KIND_RULES:
        return EngineCore(**common)
    ruled = RulesEngine(**common)
    ruled.configure(rules=0, by_priority=False, gate=False, threshold=0, watermark=0)
    return ruled


@cache
def plain_config():
    """Settings for a router that is to be loaded."""
    from mocker.router_config import KvRouterConfig
    return KvRouterConfig()


cdef RouterCore empty_router(RouterCore like, OffloadWorld below):
    cdef RouterCore made
    if like is None:
        return None
    made = RouterCore("round_robin", plain_config(), 1, 0, profile=like.profile)
    made.function, made.estimator = like.function, like.estimator
    router_free(&made.r)
    memset(&made.r, 0, sizeof(Router))
    made.r.choose, made.r.estimate = like.r.choose, like.r.estimate
    made.hook, made.score = like.hook, like.score
    made.r.choose_context = <void*>made if like.hook is None else <void*>&made.score
    made.r.estimate_context = <void*>made
    if like.r.lower != NULL:
        made.r.lower = lower_new(0.0, 0.0)
        if made.r.lower == NULL:
            raise MemoryError
        if like.world is not None:
            made.use_world(below)
    return made


cdef OffloadWorld empty_world(Cluster like, dict head, list engines, object template):
    """Tiers to be loaded, below the engines; those of workers that are gone are kept with an engine that is unused."""
    if head["seats"] is None:
        return None
    return like.offload.empty([(empty_engine(template, like.kind) if worker == NIL else engines[worker], through)
                               for worker, through in head["seats"]], head["rows"])


cdef object twin(Cluster like, dict head, tokens):
    """A cluster of empty parts with the columns of another."""
    cdef int64_t n = head["rows"], w
    cdef Cluster c
    cdef DisaggCluster d, other
    templates = {}
    for engine, role in zip(like.engines, like.roles):
        if engine is not None:
            templates.setdefault(role, engine)
    some = next(iter(templates.values()))
    engines = [empty_engine(templates.get(role, some), like.kind) for role in head["roles"]]
    collector, below = Collector(n, False), empty_world(like, head, engines, some)
    k = head["columns"]
    if like.grow is not None:                  # written when prompts become known
        k = {**k, "prompt": k["prompt"].copy(), "limit": k["limit"].copy()}
    arguments = (engines, collector, k["arrival"], k["prompt"], k["limit"],
                 like.paths if head["paths"] is None else head["paths"], tokens)
    if isinstance(like, DisaggCluster):
        other = like
        d = DisaggCluster(*arguments, None, like.cap, like.single, like.fast)
        d.split(decode_workers=len(engines), prefill_collector=Collector(n, False),
                prefill_router=empty_router(other.prefill_router, below),
                decode_router=empty_router(other.decode_router, below),
                kv_bytes=other.kv_bytes, bandwidth=other.bandwidth, full_prompt=other.full_prompt)
        c = d
    else:
        c = Cluster(*arguments, empty_router(like.router, below), like.cap, like.single, like.fast)
    if below is not None:
        c.set_offload(below)
    if like.ranked:
        c.set_ranks(k["priority"], k["strict"], k["policy"])
    c.roots, c.next_offsets, c.next_rows, c.rank, c.delay = (
        k["roots"], k["next_offsets"], k["next_rows"], k["rank"], k["delay"])
    c.ends_due, c.linked, c.limit_active, c.lag = np.empty(n, np.int64), like.linked, like.limit_active, like.lag
    if like.impatient:
        c.set_cancellations(k["patience"])
    if like.watch is not None:
        c.planner, c.recruit, c.first_tick, c.watch = like.planner, like.recruit, like.first_tick, Watch(False)
        c.startup_ms = like.startup_ms
        c.held = np.empty(n, np.int64)
    if like.recorder is not None:
        c.record(Recorder(1.0, 2))
    c.grow = like.grow
    c.departed, c.leavers = dict(head["departed"]), list(head["leavers"])
    for w in range(c.workers):
        if head["gone"][w]:
            c.engines[w], c.cores[w], c.rules[w] = None, NULL, NULL
    if head["apart"]:
        c.apart_gaps = <Gaps*>calloc(c.n_lanes, sizeof(Gaps))
        if c.apart_gaps == NULL:
            raise MemoryError
    return c


cdef int clear(Cluster c) except -1:
    """Free what the empty parts own and the bytes will replace."""
    cdef int64_t w
    for w in range(2):
        free(c.teams[w].members)
        free(c.teams[w].active)
        c.teams[w].members = c.teams[w].active = NULL
    if c.timeline != NULL:
        timeline_free(c.timeline)
    for w in range(c.workers):
        if c.cores[w] == NULL:
            continue
        if c.kind == KIND_SGLANG:
            sgl_free(<SglangCore*>c.cores[w])
            continue
        core_free(<Core*>c.cores[w])
        if c.kind == KIND_RULES:
            rules_free(c.rules[w])
    return 0


cdef int connect(Cluster c) except -1:
    """Point the loaded parts at each other."""
    cdef int64_t w
    cdef Core* k
    cdef SglangCore* g
    cdef Collector to
    cdef bint apart
    for w in range(c.workers):
        if c.cores[w] == NULL:
            c.views[w].ended, c.views[w].ended_used = NULL, 0
            continue
        to = c.collector
        apart = c.apart_gaps != NULL and c.role[w] != ROLE_PREFILL
        if c.role[w] == ROLE_PREFILL and isinstance(c, DisaggCluster):
            to = (<DisaggCluster>c).prefill_collector
        if c.kind == KIND_SGLANG:
            (<SglangEngine>c.engines[w]).collect(to)
            g = <SglangCore*>c.cores[w]
            c.views[w].ended = g.notes
            if apart:
                g.gaps = &c.apart_gaps[w]
            continue
        k = <Core*>c.cores[w]
        k.rows, k.gaps = &to.rows, &c.apart_gaps[w] if apart else &to.gaps
        c.views[w].ended = k.ended
    return 0


def lengths(Cluster c):
    """Prompt lengths and limits by row, which are written when prompts become known."""
    return np.asarray(c.prompt), np.asarray(c.limit)


def load(Cluster like, bytes data, dict head, tokens):
    """A cluster in the state that `save` wrote down.

    Parameters
    ----------
    like : Cluster
        The one that was saved, or one made of the same arguments.
    data : bytes
    head : dict
        As `save` returned them.
    tokens : callable or None
        Tokens by row, see `Workers`.

    Raises
    ------
    ValueError
        The bytes do not fit.
    """
    cdef Carrier io = Carrier(LOAD, PyBytes_AS_STRING(data), 0, len(data), NULL, 0, 0, 0, 0)
    cdef Cluster c
    if tuple(head["layout"]) != LAYOUT:
        raise ValueError("this snapshot was made by another version of mocker, or on another kind of machine")
    c = twin(like, head, tokens)
    clear(c)
    everything(&io, c)
    connect(c)
    if io.error == CARRY_MEMORY:
        raise MemoryError
    if io.error or io.used != io.size:
        raise ValueError("this snapshot is damaged")
    return c


def copy(Cluster source, tokens):
    """A cluster in the state of another, as `load` of what `save` gives, without the bytes between them."""
    cdef Carrier io = Carrier(LIST, NULL, 0, 0, NULL, 0, 0, 0, 0)
    cdef Cluster c = twin(source, head_of(source), tokens)
    try:
        everything(&io, source)
        io.mode = COPY
        clear(c)
        everything(&io, c)
    finally:
        free(io.places)
    connect(c)
    if io.error:
        raise MemoryError
    return c
