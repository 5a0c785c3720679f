# cython: language_level=3
"""State of vLLM and TRT-LLM cores, with and without scheduler rules: every array that `core_free`, `pool_free` and
`rules_free` free. O(what the core holds)."""
from libc.string cimport memcpy, memset

from mocker._calendar cimport calendar_settle
from mocker._carry cimport CARRY_SHORT, COPY, LIST, LOAD, Carrier, carry, carry_array, pass_bytes
from mocker._collect cimport Gaps, Rows
from mocker._common cimport NIL, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from mocker._core cimport Admission, Calendar, Core, Request, Signal, Work
from mocker._hooks cimport AdmissionHook, Hook, Wish
from mocker._kv cimport ELEMENT, Event, Path, Piece, Pool, RoomMaker, Run, path_point
from mocker._kv_ranked cimport pool_rank
from mocker._offload_blocks cimport Catalog, Spans
from mocker._ranks cimport Freed, Rank, Ranks
from mocker._rules cimport Batched, Copy, Extra, Hold, Piece2, VllmRulesCore
from mocker._rules_copies cimport copies_rank
from mocker._timing cimport Model, Timing


cdef void path_carry(Carrier* io, Path* path, int32_t tokens_per_block) noexcept nogil:
    """The arrays of a path whose structure is carried already."""
    cdef int64_t n = path.n, cap = path.cap
    cdef int32_t* ends = path.ends             # of one just copied the source's
    cdef int32_t* first = path.first
    if io.mode == LOAD and n > cap:
        io.error = io.error or CARRY_SHORT
    carry_array(io, <void**>&path.keys, n, cap * ELEMENT // <int64_t>sizeof(uint64_t), sizeof(uint64_t))
    if path.keys == NULL:
        path.ends = path.first = NULL
    elif io.mode == COPY:
        path_point(path)
        memcpy(path.ends, ends, n * sizeof(int32_t))
        memcpy(path.first, first, n * sizeof(int32_t))
    elif io.mode != LIST:
        if io.mode == LOAD:
            path_point(path)
        pass_bytes(io, path.ends, n * sizeof(int32_t))
        pass_bytes(io, path.first, n * sizeof(int32_t))
    carry_array(io, <void**>&path.local, n, cap, sizeof(uint64_t))
    carry_array(io, <void**>&path.tokens, n, cap, sizeof(uint32_t) * tokens_per_block)


cdef void timing_carry(Carrier* io, Timing* t) noexcept nogil:
    carry_array(io, <void**>&t.decode_by_active, t.memo, t.memo, sizeof(double))
    if t.decode_by_active == NULL:
        t.memo = 0


cdef void ranks_carry(Carrier* io, Ranks* r) noexcept nogil:
    carry_array(io, <void**>&r.of, r.cap, r.cap, sizeof(Rank))
    carry_array(io, <void**>&r.heap, r.heap_used, r.heap_cap, sizeof(int32_t))
    carry_array(io, <void**>&r.freed, 0, r.freed_cap, sizeof(Freed))


cdef void pool_carry(Carrier* io, Pool* p) noexcept nogil:
    cdef int64_t places = <int64_t>p.table_mask + 1
    carry_array(io, <void**>&p.runs, p.runs_used, p.runs_cap, sizeof(Run))
    carry_array(io, <void**>&p.table_keys, places, places, sizeof(uint64_t))
    carry_array(io, <void**>&p.table_runs, places, places, sizeof(int32_t))
    carry_array(io, <void**>&p.scratch, 0, p.scratch_cap, sizeof(int32_t))
    carry_array(io, <void**>&p.events, p.events_used, p.events_cap, sizeof(Event))
    carry_array(io, <void**>&p.pieces, p.pieces_used, p.pieces_cap, sizeof(Piece))
    carry_array(io, <void**>&p.event_tokens, p.event_tokens_used, p.event_tokens_cap, sizeof(uint32_t))
    carry_array(io, <void**>&p.evicted, p.evicted_used, p.evicted_cap, sizeof(Piece))
    ranks_carry(io, &p.ranks)


cdef void wishes_carry(Carrier* io, AdmissionHook* h, AdmissionHook* before) noexcept nogil:
    """What is kept for a score that is carried already; its functions are those from before."""
    h.score, h.cached, h.engine = before.score, before.cached, before.engine
    h.timed, h.looks = before.timed, before.looks
    carry_array(io, <void**>&h.wishes, h.cap, h.cap, sizeof(Wish))


cdef void core_carry(Carrier* io, Core* c) noexcept nogil:
    """A core; a loaded one keeps its collector, functions and tiers, and its old arrays have to be freed before."""
    cdef int64_t i
    cdef Request* r
    cdef Rows* rows = c.rows
    cdef Gaps* gaps = c.gaps
    cdef Model* model = c.timing.model
    cdef Hook victim = c.victim, eviction = c.pool.ranks.score
    cdef AdmissionHook admission = c.admission
    cdef void* tiers = c.tiers
    cdef RoomMaker make_room = c.pool.make_room
    cdef Catalog* catalog = c.pool.catalog
    cdef Spans* fresh = c.pool.fresh
    cdef int64_t least
    if io.mode != LOAD and io.mode != COPY:
        calendar_settle(c, False, NIL)         # so that it is empty, and need not be carried
    carry(io, c, sizeof(Core))
    if io.mode == LOAD or io.mode == COPY:
        least = c.calendar.least
        memset(&c.calendar, 0, sizeof(Calendar))
        c.calendar.least = least
    c.rows, c.gaps, c.timing.model, c.victim = rows, gaps, model, victim
    c.tiers = c.pool.tiers = tiers
    c.pool.make_room, c.pool.catalog, c.pool.fresh = make_room, catalog, fresh
    pool_rank(&c.pool, eviction, &c.last_start)
    wishes_carry(io, &c.admission, &admission)
    carry_array(io, <void**>&c.req, c.req_used, c.req_cap, sizeof(Request))
    if c.req == NULL:
        c.req_used = 0
    for i in range(0 if io.mode == LIST else c.req_used):          # arrays are not listed
        r = &c.req[i]
        path_carry(io, &r.path, c.tokens_per_block)
        carry_array(io, <void**>&r.tail, r.tail_used, c.block_size, sizeof(uint32_t))
        carry_array(io, <void**>&r.plan, r.plan_used, r.plan_cap, sizeof(uint32_t))
    carry_array(io, <void**>&c.running, c.n_running, c.running_cap, sizeof(int32_t))
    carry_array(io, <void**>&c.waiting, c.waiting_cap, c.waiting_cap, sizeof(int32_t))
    carry_array(io, <void**>&c.ready, c.ready_cap, c.ready_cap, sizeof(int32_t))
    carry_array(io, <void**>&c.works, c.works_used, c.works_cap, sizeof(Work))
    carry_array(io, <void**>&c.ended, c.ended_used, c.ended_cap, sizeof(int64_t))
    carry_array(io, <void**>&c.gone_late, c.gone_late_used, c.gone_late_cap, sizeof(int64_t))
    carry_array(io, <void**>&c.pending, c.n_pending, c.pending_cap, sizeof(int32_t))
    carry_array(io, <void**>&c.held, c.held_used, c.held_cap, sizeof(int64_t))
    carry_array(io, <void**>&c.admissions, c.admissions_used, c.admissions_cap, sizeof(Admission))
    carry_array(io, <void**>&c.signals, c.signals_used, c.signals_cap, sizeof(Signal))
    carry_array(io, <void**>&c.late, c.late_used, c.late_cap, sizeof(Signal))
    pool_carry(io, &c.pool)
    timing_carry(io, &c.timing)


cdef void rules_carry(Carrier* io, VllmRulesCore* x) noexcept nogil:
    """What the rules keep beside a core that is carried already."""
    cdef Core* c = x.c
    cdef Extra* e
    cdef int64_t i, places
    carry(io, x, sizeof(VllmRulesCore))
    x.c = c
    copies_rank(x)
    places = <int64_t>x.table_mask + 1
    carry_array(io, <void**>&x.copies, x.copies_used, x.copies_cap, sizeof(Copy))
    carry_array(io, <void**>&x.table_keys, places, places, sizeof(uint64_t))
    carry_array(io, <void**>&x.table_heads, places, places, sizeof(int32_t))
    carry_array(io, <void**>&x.table_twice, places, places, sizeof(uint8_t))
    carry_array(io, <void**>&x.found, x.found_used, x.found_cap, sizeof(Piece2))
    carry_array(io, <void**>&x.scratch, 0, x.scratch_cap, sizeof(int32_t))
    carry_array(io, <void**>&x.extra, x.extra_cap, x.extra_cap, sizeof(Extra))
    if x.extra == NULL:
        x.extra_cap = 0
    for i in range(x.extra_cap):
        e = &x.extra[i]
        carry_array(io, <void**>&e.holds, e.n, e.cap, sizeof(Hold))
    carry_array(io, <void**>&x.batch, x.batch_used, x.batch_cap, sizeof(Batched))
    carry_array(io, <void**>&x.victims, x.victims_used, x.victims_cap, sizeof(int64_t))
    carry_array(io, <void**>&x.flight, x.flight_used, x.flight_cap, sizeof(Batched))
