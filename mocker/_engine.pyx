# cython: language_level=3
"""One engine core behind a Python seam: scalars and lists in, tuples out; one call a pass.

Everything that a pass does is in `_vllm`; here are construction, submission of real tokens, the conversion of what
a pass produced, read-only views, and the checks that tests run after every pass.
"""
from libc.math cimport isnan
from libc.stdlib cimport malloc
from libc.string cimport memcpy

from mocker._calendar cimport calendar_settle
from mocker._common cimport (
    END_CAPACITY, ERR_HOOK, ERR_MEMORY, ERR_OK, ERR_TIME, NIL, POLICY_TRTLLM, ST_FREE, ST_HELD, ST_PARKED, ST_PENDING,
    ST_PREEMPTED, ST_RESERVED, ST_RUNNING, ST_WAITING, grown, int32_t, int64_t, uint32_t, uint64_t)
from mocker._core cimport Core, Request
from mocker._handoff cimport (
    handoff_activate_at, handoff_hasten, handoff_release_source, handoff_reserve, handoff_retry, handoff_withdraw)
from mocker._hash cimport hash_blocks
from mocker._hooks cimport ScoreHook, admission_use, hook_of, wish_note
from mocker._kv cimport Event, Piece, Run, path_reserve, pool_find, pool_init
from mocker._kv_ranked cimport pool_rank
from mocker._models cimport CompiledModel, raise_time
from mocker._offload cimport Offload, offload_error
from mocker._ranks cimport ranks_reserve
from mocker._requests cimport core_drop, core_enqueue, core_free, core_init, core_new
from mocker._spec cimport accept_below, rng_seed
from mocker._timing cimport timing_init, timing_use
from mocker._vllm cimport cached_prompt, core_metrics, core_pass

STATUS_NAMES = {ST_WAITING: "waiting", ST_RUNNING: "running", ST_PREEMPTED: "preempted", ST_HELD: "held",
                ST_PENDING: "pending", ST_RESERVED: "reserved", ST_PARKED: "parked"}
TERMINAL_NAMES = (None, "completed", "rejected", "capacity", "over_budget")


cdef int raise_score(tuple hooks) except -1:
    """Raise what is wrong with the scores of an engine."""
    for hook in hooks:
        if hook is not None:
            (<ScoreHook>hook).raise_failure()
    return 0


cdef class EngineCore:
    """A simulated vLLM or TRT-LLM engine rank.

    Parameters
    ----------
    block_size, num_blocks : int
        Tokens a block (a power of two), blocks in the pool.
    max_seqs, max_tokens : int
        Running requests, and tokens a pass; a very large number means no limit.
    caching, chunked, fifo, trtllm : bool
        Prefix caching, chunked prefill, preempt the oldest, GUARANTEED_NO_EVICT.
    worker_type : int
        0 aggregated, 1 prefill, 2 decode.
    speedup, decode_speedup : float
        Divide predicted times.
    kv_bytes, kv_bandwidth : float
        Bytes a token and GB/s of a prefill worker's hand-off; NaN for none.
    rates : sequence of float
        Conditional acceptance of each speculative token; empty: no speculation.
    seed, token_seed : int
        Seeds of the speculative draws and of generated tokens that no plan gives.
    real_tokens : bool
        Blocks are identified by the hashes of real tokens (`submit`), not by the segments of a trace.
    record : bool
        Keep admissions, signals and forward-pass metrics of each pass for `run_pass`.
    capture, event_tokens : bool
        Log KV events; with the tokens of stored blocks.
    timing : CompiledModel, optional
        Asked how long passes take, in place of the polynomial.
    hooks : tuple of ScoreHook or None
        Scores of who is preempted, who is admitted and what is evicted, see `mocker.hooks`.
    """

    def __cinit__(self, *, int64_t block_size, int64_t num_blocks, int64_t max_seqs, int64_t max_tokens, bint caching,
                  bint chunked, bint fifo, bint trtllm, int worker_type, double speedup, double decode_speedup,
                  double kv_bytes, double kv_bandwidth, rates, uint64_t seed, uint64_t token_seed, bint real_tokens,
                  bint record, bint capture, bint event_tokens, int64_t worker_id,
                  CompiledModel timing=None, hooks=(None, None, None)):
        cdef Core* c = &self.c
        cdef int i
        c.block_size, c.mask, c.shift = block_size, block_size - 1, block_size.bit_length() - 1
        c.max_seqs, c.max_tokens, c.caching, c.chunked, c.fifo = max_seqs, max_tokens, caching, chunked, fifo
        c.end_over_budget = worker_type == 0 or not record     # an embedder of a pool's worker can cancel it
        c.policy, c.worker_type = POLICY_TRTLLM if trtllm else 0, worker_type
        c.kv_bytes, c.kv_bandwidth = kv_bytes, kv_bandwidth
        c.nextn = len(rates)
        for i in range(c.nextn):
            c.accepted[i] = accept_below(rates[i])
        rng_seed(&c.rng, seed)
        rng_seed(&c.token_rng, token_seed)
        c.real_tokens, c.record, c.metrics = real_tokens, record, record
        c.tokens_per_block = <int32_t>block_size if event_tokens and caching else 0
        if (core_init(c) != ERR_OK
                or pool_init(&c.pool, num_blocks, caching, capture, <int32_t>block_size) != ERR_OK
                or (hooks[2] is not None and ranks_reserve(&c.pool.ranks, num_blocks + 1) != ERR_OK)):
            raise MemoryError
        timing_init(&c.timing, num_blocks, block_size, speedup, decode_speedup)
        pool_rank(&c.pool, hook_of(hooks[2]), &c.last_start)
        self.worker_id, self.timing, self.hooks = worker_id, timing, hooks
        c.victim = hook_of(hooks[0])
        admission_use(&c.admission, hooks[1])
        c.admission.cached, c.admission.engine = cached_prompt, c
        if timing is not None:
            timing_use(&c.timing, &timing.model)

    def __dealloc__(self):
        core_free(&self.c)

    cdef int raise_error(self) except -1:
        cdef int error = self.c.error or self.c.pool.error
        if self.c.tiers != NULL:
            error = error or offload_error(<Offload*>self.c.tiers)
        if error == ERR_MEMORY:
            raise MemoryError("the engine ran out of memory")
        if error == ERR_TIME:
            raise_time(self.timing)
        if error == ERR_HOOK:
            raise_score(self.hooks)
        return 0

    def submit(self, int64_t handle, const uint32_t[::1] tokens, int64_t limit, const uint32_t[::1] plan,
               int64_t place):
        """Queue a request of real tokens.

        Parameters
        ----------
        handle : int
            What the passes call it.
        tokens : array of uint32, shape (prompt,)
        limit : int
            Tokens to generate.
        plan : array of uint32 or None
            The tokens it will generate; the engine draws those that are missing.
        place : int
            -1, or the place that `drop` returned for this id.

        Returns
        -------
        int
            Its slot, valid until it ends.
        """
        cdef int32_t slot = self.load(handle, tokens, limit, plan)
        core_enqueue(&self.c, slot, place)
        self.raise_error()
        return slot

    cdef int32_t load(self, int64_t handle, const uint32_t[::1] tokens, int64_t limit,
                      const uint32_t[::1] plan) except -1:
        """A slot for a request of real tokens, not queued yet."""
        cdef Core* c = &self.c
        cdef int64_t prompt = tokens.shape[0], i
        cdef const uint32_t* data = &tokens[0] if prompt else NULL
        cdef int32_t slot = core_new(c, handle, prompt, limit)
        cdef Request* r
        cdef void* moved
        if slot < 0 or (c.admission.score.ask != NULL and not wish_note(&c.admission, slot, c.end_ms, 0)):
            raise MemoryError
        r = &c.req[slot]
        if r.tail == NULL:
            r.tail = <uint32_t*>malloc(c.block_size * sizeof(uint32_t))
            if r.tail == NULL:
                raise MemoryError
        r.tail_used = <int32_t>(prompt & c.mask)
        if r.tail_used:
            memcpy(r.tail, data + (prompt - r.tail_used), r.tail_used * sizeof(uint32_t))
        if c.caching and r.full:
            if path_reserve(&r.path, r.full, True, c.tokens_per_block) != ERR_OK:
                raise MemoryError
            with nogil:
                hash_blocks(data, r.full, <size_t>c.block_size, False, 0, r.path.local, r.path.keys)
                for i in range(r.full):
                    r.path.ends[i] = <int32_t>i + 1
            r.path.n = r.full
            if c.tokens_per_block:
                memcpy(r.path.tokens, data, (prompt - r.tail_used) * sizeof(uint32_t))
        if plan is not None and plan.shape[0]:
            moved = grown(r.plan, &r.plan_cap, plan.shape[0], sizeof(uint32_t))
            if moved == NULL:
                raise MemoryError
            r.plan = <uint32_t*>moved
            r.plan_used = plan.shape[0]
            memcpy(r.plan, &plan[0], r.plan_used * sizeof(uint32_t))
        return slot

    def prefer(self, int32_t slot, int64_t priority):
        """Tell the score of waiting requests, if there is one, a request's priority."""
        if self.c.admission.score.ask != NULL:
            self.c.admission.wishes[slot].priority = priority

    def mark_source(self, int32_t slot):
        """Hold the blocks of a queued request when it is done, until `release`."""
        self.c.req[slot].source = 1

    def release(self, int32_t slot):
        """Free a held source, or forget that a request is to be held."""
        handoff_release_source(&self.c, slot)

    def reserve(self, int64_t handle, const uint32_t[::1] tokens, int64_t limit, const uint32_t[::1] plan):
        """Queue a destination for its reservation (parameters as for `submit`); -1 if it exceeds the whole pool."""
        cdef int32_t slot = self.load(handle, tokens, limit, plan)
        if not handoff_reserve(&self.c, slot):
            slot = NIL
        self.raise_error()
        return slot

    def retry(self):
        """Try to reserve for the first pending destination: (handle, tokens to transfer), or None."""
        cdef Core* c = &self.c
        cdef int32_t slot = handoff_retry(c)
        cdef Request* r
        self.raise_error()
        if slot == NIL:
            return None
        r = &c.req[slot]
        return r.id, (r.full + r.partial - r.pinned) * c.block_size

    def hasten(self, int32_t slot, int64_t at):
        """Move the newest pending destination to position `at` of the queue of those."""
        handoff_hasten(&self.c, slot, at)

    def activate(self, int32_t slot, int64_t place=NIL):
        """The prompt of a reserved destination has arrived; `place` as for `submit`."""
        handoff_activate_at(&self.c, slot, place)
        self.raise_error()

    def withdraw(self, int32_t slot):
        """Cancel a pending or reserved destination; False if it is neither."""
        return handoff_withdraw(&self.c, slot)

    def held_sources(self):
        """Handles of the sources that the last pass left held, in order."""
        return [self.c.held[i] for i in range(self.c.held_used)]

    def status(self, int32_t slot):
        """Status code of a slot (`STATUS_NAMES`)."""
        return self.c.req[slot].status

    def drop(self, int32_t slot):
        """Cancel a request and free what it holds; returns the place to submit the same id to again, or -1."""
        return core_drop(&self.c, slot)

    def run_pass(self, double now):
        """Run one pass at `now` (ms).

        Returns
        -------
        tuple
            end_ms; requests gone; admissions [(handle, cached prompt tokens)]; signals [(handle, token or -1,
            terminal code, hand-off ms or None)]; tokens made; requests that made them.
        """
        cdef Core* c = &self.c
        cdef int64_t i
        with nogil:
            core_pass(c, now)
        if c.error or c.pool.error:
            self.raise_error()
        cdef list admissions = [(c.admissions[i].id, c.admissions[i].reused) for i in range(c.admissions_used)]
        cdef list signals = []
        for i in range(c.signals_used):
            signals.append((c.signals[i].id, c.signals[i].token, c.signals[i].terminal,
                            None if isnan(c.signals[i].handoff_ms) else c.signals[i].handoff_ms))
        return c.end_ms, c.completed, admissions, signals, c.made, c.made_by

    def schedule(self, int64_t before):
        """Whom the pass just run scheduled and preempted; `before`: preemptions in `counts` when it began.

        Returns
        -------
        tuple
            Batch [(handle, tokens)] in order, without those preempted while it was put together; victims [handle] in
            order, those that ended because they outgrew the pool last.
        """
        cdef Core* c = &self.c
        cdef int64_t i, n = c.preemptions - before
        cdef int32_t slot
        cdef list batch = [(c.works[i].id, c.works[i].total) for i in range(c.works_used) if not c.works[i].undone]
        cdef list ended = [c.signals[i].id for i in range(c.signals_used) if c.signals[i].terminal == END_CAPACITY]
        cdef list victims = []
        n -= len(ended)                        # only a victim ends so; the others were queued first, one by one
        i = 0
        while len(victims) < n:
            slot = c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]
            if slot >= 0:
                victims.append(c.req[slot].id)
            i += 1
        victims.reverse()
        return batch, victims + ended

    def forward_pass_metrics(self):
        """Metrics of the pass just run: ((count, sum, variance) of prefill prompts, decode lengths, queued prefill,
        queued decode), prefill tokens computed, their prefix tokens."""
        cdef Core* c = &self.c
        core_metrics(c)
        return (tuple([(c.fpm[i].count, c.fpm[i].total, c.fpm[i].variance) for i in range(4)]),
                c.fpm_prefill_tokens, c.fpm_prefix_tokens)

    def take_events(self):
        """Take the logged KV events of real-token blocks, in the reference's JSON form."""
        cdef Core* c = &self.c
        cdef int64_t i, k, j
        cdef Event* e
        cdef Piece* piece
        cdef list out = [], blocks
        for i in range(c.pool.events_used):
            e = &c.pool.events[i]
            blocks = []
            for k in range(e.first, e.first + e.pieces):
                piece = &c.pool.pieces[k]
                if not e.stored:
                    blocks.append(piece.key)
                    continue
                block = {"block_hash": piece.key, "tokens_hash": piece.local, "mm_extra_info": None}
                if piece.tokens >= 0:
                    block["token_ids"] = [c.pool.event_tokens[piece.tokens + j] for j in range(c.block_size)]
                blocks.append(block)
            if e.stored:
                data = {"stored": {"parent_hash": e.parent_key if e.has_parent else None, "start_position": None,
                                   "blocks": blocks}}
            else:
                data = {"removed": {"block_hashes": blocks}}
            out.append({"worker_id": self.worker_id, "storage_tier": "host_pinned" if e.tier else "device",
                        "event": {"event_id": self.next_event, "data": data, "dp_rank": 0}})
            self.next_event += 1
        c.pool.events_used = c.pool.pieces_used = c.pool.event_tokens_used = 0
        return out

    # -- read-only state --------------------------------------------------------------------------------------------

    @property
    def counts(self):
        """(active, inactive, all blocks; running, waiting requests; preemptions; requests alive; passes; evictions)

        Destinations that wait for a reservation or for activation count as waiting.
        """
        cdef Core* c = &self.c
        return (c.pool.active, c.pool.inactive, c.pool.capacity, c.n_running,
                c.n_waiting + c.n_pending + c.n_reserved, c.preemptions, c.count,
                c.passes, c.pool.evictions)

    def request(self, int32_t slot):
        """One request as a dict: handle, status, len, prompt, generated, limit, computed, allocated, preemptions."""
        cdef Request* r = &self.c.req[slot]
        calendar_settle(&self.c, False, NIL)
        return {"handle": r.id, "status": STATUS_NAMES[r.status], "len": r.len, "prompt": r.prompt, "generated": r.gen,
                "limit": r.limit, "computed": r.computed, "allocated": r.alloc, "preemptions": r.preemptions,
                "full_blocks": r.full, "partial": bool(r.partial)}

    def queue(self, bint running):
        """Handles of the running requests in admission order, or of the waiting ones in queue order."""
        cdef Core* c = &self.c
        cdef int64_t i
        cdef int32_t slot
        if running:
            return [c.req[c.running[i]].id for i in range(c.n_running)]
        out = []
        for i in range(c.waiting_places):
            slot = c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]
            if slot >= 0:
                out.append(c.req[slot].id)
        return out

    def check(self):
        """Verify the pool's books against the requests; raises AssertionError naming what is wrong. O(everything)."""
        cdef Core* c = &self.c
        cdef Request* r
        cdef Run* run
        cdef int64_t slot, blocks, active = 0, inactive = 0, partial = 0, held = 0, pinned = 0
        cdef int32_t i, at, cover, low, prev
        holders = {}
        alive = 0
        calendar_settle(c, False, NIL)
        if self.tiers is not None:
            partial, pinned = self.tiers.books()[:2]
            self.tiers.check()
        for slot in range(c.req_used):
            r = &c.req[slot]
            if r.status == ST_FREE:
                continue
            if r.status == ST_PENDING:
                continue
            if r.status == ST_PARKED:
                alive += 1
                continue
            if r.status == ST_RESERVED:
                partial += r.full + r.partial - r.pinned
                pinned += r.pinned
                continue
            alive += r.status != ST_HELD
            if not 0 <= r.computed <= r.len or not 0 <= r.alloc <= r.len or r.gen > r.limit:
                raise AssertionError(f"request {r.id}: computed {r.computed}, allocated {r.alloc}, known {r.len}, "
                                     f"generated {r.gen} of {r.limit}")
            if r.status != ST_RUNNING and r.alloc and not r.destination and r.status != ST_HELD:
                raise AssertionError(f"request {r.id} waits and holds {r.alloc} tokens")
            blocks = ((r.len if r.status == ST_HELD else r.alloc) + c.mask) >> c.shift
            if blocks > r.full:
                partial += 1
                blocks = r.full
            held += blocks
            if not c.caching or blocks == 0:
                continue
            low = 0
            for i in range(r.path.n):
                cover = (r.path.ends[i] if r.path.ends[i] < blocks else <int32_t>blocks) - low
                if cover <= 0:
                    break
                if pool_find(&c.pool, r.path.keys[i]) != r.path.first[i]:
                    raise AssertionError(f"request {r.id}: element {i} does not begin where its segment does")
                at = r.path.first[i]
                while at != NIL and c.pool.runs[at].start < cover:
                    holders[at] = holders.get(at, 0) + 1
                    if c.pool.runs[at].end > cover:
                        raise AssertionError(f"request {r.id}: its hold ends inside a run of segment {r.path.keys[i]}")
                    at = c.pool.runs[at].down
                low = r.path.ends[i]
        if alive != c.count:
            raise AssertionError(f"{alive} requests in slots, {c.count} counted")
        if not c.caching:
            if c.pool.active != held + partial or c.pool.active > c.pool.capacity:
                raise AssertionError(f"{c.pool.active} blocks active, requests hold {held} + {partial}")
            return
        for slot in range(<int64_t>(c.pool.table_mask + 1)):
            at = c.pool.table_runs[slot]
            low = 0
            prev = NIL
            while at != NIL:
                run = &c.pool.runs[at]
                if run.start != low or run.end <= run.start or run.up != prev:
                    raise AssertionError(f"segment {run.key}: runs are not one stretch")
                pinned -= run.pins * (run.end - run.start)
                if run.ref - run.pins != holders.get(at, 0):
                    raise AssertionError(f"segment {run.key}: {run.ref} references, {holders.get(at, 0)} holders")
                if run.ref > 0:
                    active += run.end - run.start
                else:
                    inactive += run.end - run.start
                low, prev, at = run.end, at, run.down
        if pinned != 0:
            raise AssertionError(f"{pinned} more blocks pinned than runs know of")
        if active + partial != c.pool.active or inactive != c.pool.inactive:
            raise AssertionError(f"pool counts {c.pool.active} active, {c.pool.inactive} inactive; found "
                                 f"{active} + {partial} and {inactive}")
        if not 0 <= c.pool.active + c.pool.inactive <= c.pool.capacity:
            raise AssertionError(f"{c.pool.active} active and {c.pool.inactive} inactive of {c.pool.capacity} blocks")
        for slot in range(c.pool.ranks.heap_used):
            at = c.pool.ranks.heap[slot]
            if c.pool.ranks.of[at].place != slot:
                raise AssertionError(f"segment {c.pool.runs[at].key}: misplaced in the order of eviction")
            if c.pool.runs[at].ref == 0:
                inactive -= c.pool.runs[at].end - c.pool.runs[at].start
        at, prev = c.pool.oldest, NIL
        while at != NIL:
            run = &c.pool.runs[at]
            if run.ref != 0 or run.prev != prev:
                raise AssertionError(f"segment {run.key}: held or misplaced in the eviction queue")
            inactive -= run.end - run.start
            prev, at = at, run.next
        if inactive != 0 or c.pool.newest != prev:
            raise AssertionError(f"the eviction queue misses {inactive} blocks")
