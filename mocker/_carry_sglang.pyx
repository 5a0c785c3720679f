# cython: language_level=3
"""State of SGLang cores: every array that `sgl_free`, `radix_free` and `map_free` free. O(what the core holds)."""
from mocker._carry cimport LIST, Carrier, carry, carry_array
from mocker._carry_engines cimport path_carry, ranks_carry, timing_carry, wishes_carry
from mocker._collect cimport Gaps, Rows
from mocker._common cimport int32_t, int64_t, uint32_t, uint64_t
from mocker._core cimport Admission, Signal
from mocker._hooks cimport AdmissionHook, Hook
from mocker._kv cimport Event, Piece
from mocker._radix cimport Cut, Leaf, Map, Node, Radix
from mocker._sglang cimport STRETCH, Chunk, SglangCore, SglRequest, Stretch
from mocker._timing cimport Model


cdef void map_carry(Carrier* io, Map* m) noexcept nogil:
    cdef int64_t places = <int64_t>m.mask + 1
    carry_array(io, <void**>&m.keys, places, places, sizeof(uint64_t))
    carry_array(io, <void**>&m.subs, places, places, sizeof(int32_t))
    carry_array(io, <void**>&m.values, places, places, sizeof(int32_t))


cdef void radix_carry(Carrier* io, Radix* t) noexcept nogil:
    cdef int64_t i
    cdef Node* x
    carry_array(io, <void**>&t.nodes, t.nodes_used, t.nodes_cap, sizeof(Node))
    if t.nodes == NULL:
        t.nodes_used = 0
    for i in range(0 if io.mode == LIST else t.nodes_used):        # arrays are not listed
        x = &t.nodes[i]
        carry_array(io, <void**>&x.keys, x.n, x.cap, sizeof(uint64_t))
        carry_array(io, <void**>&x.ends, x.n, x.cap, sizeof(int32_t))
        carry_array(io, <void**>&x.slots, x.slots_cap, x.slots_cap, sizeof(int32_t))
    carry_array(io, <void**>&t.stack, t.available, t.stack_cap, sizeof(int32_t))
    carry_array(io, <void**>&t.heap, t.heap_used, t.heap_cap, sizeof(Leaf))
    carry_array(io, <void**>&t.gone, t.gone_used, t.gone_cap, sizeof(int32_t))
    carry_array(io, <void**>&t.cuts, t.cuts_used, t.cuts_cap, sizeof(Cut))
    ranks_carry(io, &t.ranks)
    map_carry(io, &t.table)


cdef void sgl_carry(Carrier* io, SglangCore* c) noexcept nogil:
    """A core; a loaded one keeps its collector and its functions, and its old arrays have to be freed before."""
    cdef int64_t i
    cdef SglRequest* r
    cdef Rows* rows = c.rows
    cdef Gaps* gaps = c.gaps
    cdef Model* model = c.timing.model
    cdef Hook victim = c.victim, eviction = c.tree.ranks.score
    cdef AdmissionHook admission = c.admission
    carry(io, c, sizeof(SglangCore))
    c.rows, c.gaps, c.timing.model, c.victim = rows, gaps, model, victim
    c.tree.ranks.score, c.tree.ranks.now = eviction, &c.last_start
    wishes_carry(io, &c.admission, &admission)
    carry_array(io, <void**>&c.req, c.req_used, c.req_cap, sizeof(SglRequest))
    if c.req == NULL:
        c.req_used = 0
    for i in range(0 if io.mode == LIST else c.req_used):
        r = &c.req[i]
        path_carry(io, &r.path, 0)
        carry_array(io, <void**>&r.tail, r.tail_used, c.page, sizeof(uint32_t))
        carry_array(io, <void**>&r.plan, r.plan_used, r.plan_cap, sizeof(uint32_t))
        carry_array(io, <void**>&r.slots, r.slots_cap, r.slots_cap, sizeof(int32_t))
    carry_array(io, <void**>&c.running, c.n_running, c.running_cap, sizeof(int32_t))
    carry_array(io, <void**>&c.waiting, c.waiting_cap, c.waiting_cap, sizeof(int32_t))
    carry_array(io, <void**>&c.prebuilt, c.n_prebuilt, c.prebuilt_cap, sizeof(int32_t))
    carry_array(io, <void**>&c.pending, c.n_entries, c.pending_cap, sizeof(int64_t))
    map_carry(io, &c.pending_slots)
    carry_array(io, <void**>&c.scratch, 0, c.scratch_cap, sizeof(int32_t))
    carry_array(io, <void**>&c.bursts, 0, c.bursts_cap, sizeof(int64_t))
    carry_array(io, <void**>&c.ends, 0, STRETCH + 1, sizeof(double))
    carry_array(io, <void**>&c.ended, c.ended_used, c.ended_cap, sizeof(int64_t))
    carry_array(io, <void**>&c.notes, c.notes_used, c.notes_cap, sizeof(int64_t))
    carry_array(io, <void**>&c.held, c.held_used, c.held_cap, sizeof(int64_t))
    carry_array(io, <void**>&c.chunks, c.chunks_used, c.chunks_cap, sizeof(Chunk))
    carry_array(io, <void**>&c.lengths, c.lengths_used, c.lengths_cap, sizeof(int64_t))
    carry_array(io, <void**>&c.admissions, c.admissions_used, c.admissions_cap, sizeof(Admission))
    carry_array(io, <void**>&c.signals, c.signals_used, c.signals_cap, sizeof(Signal))
    carry_array(io, <void**>&c.events, c.events_used, c.events_cap, sizeof(Event))
    carry_array(io, <void**>&c.pieces, c.pieces_used, c.pieces_cap, sizeof(Piece))
    map_carry(io, &c.segments)
    carry_array(io, <void**>&c.stretches, c.stretches_used, c.stretches_cap, sizeof(Stretch))
    carry_array(io, <void**>&c.slot_keys, c.total + 1, c.total + 1, sizeof(uint64_t))
    carry_array(io, <void**>&c.slot_offsets, c.total + 1, c.total + 1, sizeof(int32_t))
    map_carry(io, &c.advertised)
    radix_carry(io, &c.tree)
    radix_carry(io, &c.fresh)
    timing_carry(io, &c.timing)
