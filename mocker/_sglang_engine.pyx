# cython: language_level=3
"""One SGLang engine core behind a Python seam: scalars and lists in, tuples out; one call a pass.

Everything that a pass does is in `_sglang`; here are construction, submission of real tokens, the hand-off commands,
the conversion of what a pass produced, read-only views, and the checks that tests run after every pass.
"""
from libc.math cimport isnan
from libc.stdlib cimport malloc
from libc.string cimport memcpy

from mocker._collect cimport Collector
from mocker._common cimport ERR_HOOK, ERR_MEMORY, ERR_OK, ERR_TIME, NIL, grown, int32_t, int64_t, uint32_t, uint64_t
from mocker._engine cimport raise_score
from mocker._hash cimport hash_blocks
from mocker._hooks cimport admission_use, hook_of, wish_note
from mocker._kv cimport Event, Piece, path_reserve
from mocker._models cimport CompiledModel, raise_time, refuse_mixed
from mocker._paths cimport PathTable
from mocker._radix cimport Node, Radix, map_find, radix_foreign
from mocker._radix_ranked cimport radix_rank
from mocker._sglang cimport (
    SGL_FREE, SGL_HELD, SGL_PENDING, SGL_PREBUILT, SGL_RESERVED, SGL_RETRACTED, SGL_RUNNING, SGL_WAITING, SglangCore,
    SglRequest, sgl_activate, sgl_active_blocks, sgl_drop, sgl_enqueue, sgl_enqueue_source, sgl_forward, sgl_free,
    sgl_init, sgl_metrics, sgl_new, sgl_pass, sgl_release_source, sgl_reserve, sgl_retry)
from mocker._spec cimport accept_below, rng_seed
from mocker._timing cimport timing_init, timing_use

cdef enum:
    MEMO_TOKENS = 1 << 16          # pools up to this size get a memo of decode times, one place a token

STATUS_NAMES = {
    SGL_WAITING: "waiting", SGL_RUNNING: "running", SGL_RETRACTED: "preempted", SGL_PREBUILT: "prebuilt",
    SGL_HELD: "held", SGL_PENDING: "pending", SGL_RESERVED: "reserved"}


cdef class SglangEngine:
    """A simulated SGLang engine rank.

    Parameters
    ----------
    page, total : int
        Tokens a page, tokens in the pool (a multiple of the page).
    max_seqs, max_prefill, chunk, clip : int
        Running requests; prompt tokens a pass; prompt tokens of one request a pass; output tokens that admission
        reserves at most. A very large number means no limit.
    lpm, conserve : bool
        Order the queue by cached prefix; keep exact books under retraction.
    conservativeness : float
        Share of the outstanding output that admission reserves, scaled by 0.7.
    worker_type : int
        0 aggregated, 1 prefill, 2 decode.
    speedup, decode_speedup : float
        Divide predicted times.
    kv_bytes, kv_bandwidth : float
        Bytes a token and GB/s of a prefill worker's hand-off; NaN for none.
    rates : sequence of float
        Conditional acceptance of each speculative token; empty: no speculation.
    seed : int
        Seed of the speculative draws.
    real_tokens : bool
        Pages are identified by the hashes of real tokens (`submit`), not by the segments of a trace.
    record : bool
        Keep admissions, signals and forward-pass metrics of each pass for `run_pass`.
    capture : bool
        Log KV events.
    timing : CompiledModel, optional
        Asked how long passes take, in place of the polynomial.
    hooks : tuple of ScoreHook or None
        Scores of who is retracted, who is admitted and what is evicted, see `mocker.hooks`.
    """

    def __cinit__(self, *, int64_t page, int64_t total, int64_t max_seqs, int64_t max_prefill, int64_t chunk,
                  int64_t clip, bint lpm, bint conserve, double conservativeness, int worker_type, double speedup,
                  double decode_speedup, double kv_bytes, double kv_bandwidth, rates, uint64_t seed, bint real_tokens,
                  bint record, bint capture, int64_t worker_id,
                  CompiledModel timing=None, hooks=(None, None, None)):
        cdef SglangCore* c = &self.c
        cdef int i
        c.page, c.total, c.max_seqs, c.max_prefill, c.chunk, c.clip = page, total, max_seqs, max_prefill, chunk, clip
        c.lpm, c.conserve, c.worker_type = lpm, conserve, worker_type
        c.init_ratio = 0.7 * conservativeness
        c.min_ratio = c.init_ratio * 0.14
        c.ratio_step = (c.init_ratio - c.min_ratio) / 600.0
        c.kv_bytes, c.kv_bandwidth = kv_bytes, kv_bandwidth
        c.nextn = len(rates)
        for i in range(c.nextn):
            c.accepted[i] = accept_below(rates[i])
        rng_seed(&c.rng, seed)
        c.real_tokens, c.record, c.metrics, c.capture = real_tokens, record, record, capture
        if sgl_init(c) != ERR_OK:
            raise MemoryError
        timing_init(&c.timing, total, 1, speedup, decode_speedup)
        if total > MEMO_TOKENS:
            c.timing.memo_most = 0
        self.worker_id, self.timing, self.hooks = worker_id, timing, hooks
        c.victim = hook_of(hooks[0])
        admission_use(&c.admission, hooks[1])
        if radix_rank(&c.tree, hook_of(hooks[2]), &c.last_start) != ERR_OK:
            raise MemoryError
        if timing is not None:
            refuse_mixed(timing, "SGLang's engine")
            timing_use(&c.timing, &timing.model)

    def __dealloc__(self):
        sgl_free(&self.c)

    cdef int raise_error(self) except -1:
        cdef int error = self.c.error or self.c.tree.error
        if error == ERR_MEMORY:
            raise MemoryError("the engine ran out of memory")
        if error == ERR_TIME:
            raise_time(self.timing)
        if error == ERR_HOOK:
            raise_score(self.hooks)
        return 0

    cdef int32_t load(self, int64_t handle, const uint32_t[::1] tokens, int64_t limit, const uint32_t[::1] plan,
                      uint64_t high, uint64_t low) except -1:
        """A slot for a request of real tokens, not queued yet."""
        cdef SglangCore* c = &self.c
        cdef int64_t prompt = tokens.shape[0], i
        cdef const uint32_t* data = &tokens[0] if prompt else NULL
        cdef int32_t slot = sgl_new(c, handle, prompt, limit)
        cdef SglRequest* r
        cdef void* moved
        if slot < 0 or (c.admission.score.ask != NULL and not wish_note(&c.admission, slot, c.end_ms, 0)):
            raise MemoryError
        r = &c.req[slot]
        r.uuid[0], r.uuid[1] = high, low
        if r.tail == NULL:
            r.tail = <uint32_t*>malloc(c.page * sizeof(uint32_t))
            if r.tail == NULL:
                raise MemoryError
        r.tail_used = prompt - r.full * c.page
        if r.tail_used:
            memcpy(r.tail, data + (prompt - r.tail_used), r.tail_used * sizeof(uint32_t))
        if r.full:
            if path_reserve(&r.path, r.full, True, 0) != ERR_OK:
                raise MemoryError
            with nogil:
                hash_blocks(data, r.full, <size_t>c.page, False, 0, r.path.local, r.path.keys)
                for i in range(r.full):
                    r.path.ends[i] = <int32_t>i + 1
            r.path.n = r.full
        if plan is not None and plan.shape[0]:
            moved = grown(r.plan, &r.plan_cap, plan.shape[0], sizeof(uint32_t))
            if moved == NULL:
                raise MemoryError
            r.plan = <uint32_t*>moved
            r.plan_used = plan.shape[0]
            memcpy(r.plan, &plan[0], r.plan_used * sizeof(uint32_t))
        return slot

    def submit(self, int64_t handle, const uint32_t[::1] tokens, int64_t limit, const uint32_t[::1] plan,
               uint64_t high, uint64_t low, int64_t handoff=NIL):
        """Queue a request of real tokens.

        Parameters
        ----------
        handle : int
            What the passes call it.
        tokens : array of uint32, shape (prompt,)
        limit : int
            Tokens to generate.
        plan : array of uint32 or None
            The tokens it will generate; those that are missing follow from the UUID.
        high, low : int
            Halves of its UUID.
        handoff : int
            Number of the hand-off whose source it is, or -1.

        Returns
        -------
        int
            Its slot, valid until it is gone.
        """
        cdef int32_t slot = self.load(handle, tokens, limit, plan, high, low)
        if handoff == NIL:
            sgl_enqueue(&self.c, slot)
        else:
            sgl_enqueue_source(&self.c, slot, handoff)
        self.raise_error()
        return slot

    def prefer(self, int32_t slot, int64_t priority):
        """Tell the score of waiting requests, if there is one, a request's priority."""
        if self.c.admission.score.ask != NULL:
            self.c.admission.wishes[slot].priority = priority

    def submit_row(self, PathTable paths, int64_t row, int64_t prompt, int64_t limit):
        """Queue a request of a trace, whose pages are segments; its handle is its row. Returns its slot."""
        cdef SglangCore* c = &self.c
        cdef int32_t slot = sgl_new(c, row, prompt, limit)
        if slot < 0 or (c.admission.score.ask != NULL and not wish_note(&c.admission, slot, c.end_ms, 0)):
            raise MemoryError
        if paths.fill(&c.req[slot].path, row, c.req[slot].full) != ERR_OK:
            raise MemoryError
        c.req[slot].own_key = c.next_own_key
        c.next_own_key += 1
        sgl_enqueue(c, slot)
        return slot

    def collect(self, Collector collector):
        """Write into the collector's rows, by handle, from now on."""
        self.collector = collector
        self.c.rows, self.c.gaps = &collector.rows, &collector.gaps

    def reserve(self, int64_t handle, const uint32_t[::1] tokens, int64_t limit, const uint32_t[::1] plan,
                uint64_t high, uint64_t low, int64_t handoff):
        """Queue a destination for its reservation (parameters as for `submit`); -1 if it exceeds the whole pool."""
        cdef int32_t slot = self.load(handle, tokens, limit, plan, high, low)
        if not sgl_reserve(&self.c, slot, handoff):
            return NIL
        self.raise_error()
        return slot

    def retry(self):
        """Try to reserve for the first pending destination: (handle, tokens to transfer), or None."""
        cdef int32_t slot = sgl_retry(&self.c)
        self.raise_error()
        if slot == NIL:
            return None
        return self.c.req[slot].id, self.c.req[slot].transferable

    def activate(self, int32_t slot):
        """The prompt of a reserved destination has arrived."""
        sgl_activate(&self.c, slot)
        self.raise_error()

    def release(self, int32_t slot):
        """Release a held source, or forget that a source is to be held."""
        sgl_release_source(&self.c, slot)
        self.raise_error()

    def drop(self, int32_t slot):
        """Cancel a request, wherever it is, and free what it holds."""
        sgl_drop(&self.c, slot)
        self.raise_error()

    def run_pass(self, double now):
        """Run one pass at `now` (ms).

        Returns
        -------
        tuple
            end_ms; requests gone; admissions [(handle, cached tokens)]; signals [(handle, token or -1, terminal
            code, hand-off ms or None)]; tokens made; requests that made them.
        """
        cdef SglangCore* c = &self.c
        cdef int64_t i
        with nogil:
            sgl_pass(c, now)
        self.raise_error()
        cdef list admissions = [(c.admissions[i].id, c.admissions[i].reused) for i in range(c.admissions_used)]
        cdef list signals = []
        for i in range(c.signals_used):
            signals.append((c.signals[i].id, c.signals[i].token, c.signals[i].terminal,
                            None if isnan(c.signals[i].handoff_ms) else c.signals[i].handoff_ms))
        return c.end_ms, c.completed, admissions, signals, c.made, c.made_by

    def forward(self, double now, double until, double last_start):
        """Fast-forward passes that only decode (trace segments only); returns the new now, ms."""
        with nogil:
            now = sgl_forward(&self.c, now, until, last_start)
        self.raise_error()
        return now

    def held_sources(self):
        """Handles of the sources that completed in the pass just run and are held."""
        return [self.c.held[i] for i in range(self.c.held_used)]

    def forward_pass_metrics(self):
        """Metrics of the pass just run: ((count, sum, variance) of prefill prompts, decode lengths, queued prefill,
        queued decode), prefill tokens computed, their prefix tokens."""
        cdef SglangCore* c = &self.c
        sgl_metrics(c)
        return (tuple([(c.fpm[i].count, c.fpm[i].total, c.fpm[i].variance) for i in range(4)]),
                c.fpm_prefill_tokens, c.fpm_prefix_tokens)

    def cache_hits(self):
        """Cached tokens of the admissions of the pass just run, and cached tokens plus chunks."""
        return self.c.hit_tokens, self.c.hit_total

    def take_events(self):
        """Take the logged KV events of real-token pages, in the reference's JSON form."""
        cdef SglangCore* c = &self.c
        cdef int64_t i, k
        cdef Event* e
        cdef Piece* piece
        cdef list out = [], blocks
        for i in range(c.events_used):
            e = &c.events[i]
            blocks = []
            for k in range(e.first, e.first + e.pieces):
                piece = &c.pieces[k]
                if e.stored:
                    blocks.append({"block_hash": piece.key, "tokens_hash": piece.local, "mm_extra_info": None})
                else:
                    blocks.append(piece.key)
            if e.stored:
                data = {"stored": {"parent_hash": e.parent_key if e.has_parent else None, "start_position": None,
                                   "blocks": blocks}}
            else:
                data = {"removed": {"block_hashes": blocks}}
            out.append({"worker_id": self.worker_id, "storage_tier": "device",
                        "event": {"event_id": self.next_event, "data": data, "dp_rank": 0}})
            self.next_event += 1
        c.events_used = c.pieces_used = 0
        return out

    def take_segment_events(self):
        """Take the logged KV events as segments.

        Returns
        -------
        list of tuple
            (stored, parent (key, offset) or None, [(key, first page of the segment, pages)]).
        """
        cdef SglangCore* c = &self.c
        cdef int64_t i, k
        cdef Event* e
        out = []
        for i in range(c.events_used):
            e = &c.events[i]
            out.append((bool(e.stored), (e.parent_key, e.parent_offset) if e.has_parent else None,
                        [(c.pieces[k].key, c.pieces[k].start, c.pieces[k].count)
                         for k in range(e.first, e.first + e.pieces)]))
        self.next_event += c.events_used
        c.events_used = c.pieces_used = 0
        return out

    # -- read-only state --------------------------------------------------------------------------------------------

    @property
    def counts(self):
        """A dict of counts: blocks, tokens, requests and what retraction did to the books."""
        cdef SglangCore* c = &self.c
        return {
            "active_blocks": sgl_active_blocks(c), "total_blocks": (c.total + c.page - 1) // c.page,
            "available_tokens": c.tree.available, "evictable_tokens": c.tree.evictable,
            "protected_tokens": c.tree.protected, "running": c.n_running, "prebuilt": c.n_prebuilt,
            "waiting": c.n_waiting, "pending": c.n_pending, "reserved": c.n_reserved, "held": c.n_held,
            "count": c.count, "alive": c.alive, "preemptions": c.preemptions, "passes": c.passes,
            "evicted_tokens": c.tree.evictions, "leaked_tokens": c.leaked, "double_freed_tokens": c.freed_twice,
            "new_token_ratio": c.ratio, "capacity_generation": c.generation, "nodes": c.tree.count,
        }

    @property
    def count(self):
        """Requests that wait or run."""
        return self.c.count

    @property
    def waiting_count(self):
        """Requests in the queue."""
        return self.c.n_waiting

    def request(self, int32_t slot):
        """One request as a dict: handle, status, len, prompt, generated, limit, computed, allocated, preemptions."""
        cdef SglRequest* r = &self.c.req[slot]
        return {"handle": r.id, "status": STATUS_NAMES[r.status], "len": r.len, "prompt": r.prompt, "generated": r.gen,
                "limit": r.limit, "computed": r.computed, "allocated": r.alloc, "preemptions": r.retractions,
                "cached": r.cached * self.c.page}

    def queue(self, bint running):
        """Handles of the running requests in order, or of the waiting ones (activated destinations first)."""
        cdef SglangCore* c = &self.c
        cdef int64_t i
        if running:
            return [c.req[c.running[i]].id for i in range(c.n_running)]
        return ([c.req[c.prebuilt[i]].id for i in range(c.n_prebuilt)]
                + [c.req[c.waiting[(c.waiting_head + i) & (c.waiting_cap - 1)]].id for i in range(c.n_waiting)])

    def check(self):
        """Verify the books of tree and pool against the requests; AssertionError names what is wrong. O(everything)."""
        cdef SglangCore* c = &self.c
        cdef Radix* t = &c.tree
        cdef Node* x
        cdef SglRequest* r
        cdef int64_t i, k, evictable = 0, protected = 0, private = 0, tokens, alive = 0, count = 0
        cdef int32_t node
        locks, children, slots = {}, {}, []
        for i in range(c.req_used):
            r = &c.req[i]
            if r.status == SGL_FREE:
                continue
            alive += 1
            count += r.status in (SGL_WAITING, SGL_RETRACTED, SGL_PREBUILT, SGL_RUNNING)
            if not (r.cached * c.page <= r.computed <= r.len and r.gen <= r.limit and r.len == r.prompt + r.gen):
                raise AssertionError(f"request {r.id}: cached {r.cached} pages, computed {r.computed}, known {r.len}, "
                                     f"generated {r.gen} of {r.limit}")
            if r.full != r.len // c.page or (r.full > 0 and r.path.ends[r.path.n - 1] != r.full):
                raise AssertionError(f"request {r.id}: {r.full} full pages of {r.len} tokens, path of {r.path.n}")
            if r.prompt > 0 and (r.node != NIL) != (r.computed > 0 or r.status == SGL_RESERVED):
                raise AssertionError(f"request {r.id}: computed {r.computed}, node {r.node}")
            if r.node == NIL:
                continue
            tokens = r.alloc if r.status == SGL_RESERVED else r.computed
            if not (r.alloc >= tokens and r.alloc - tokens < c.page and r.alloc % c.page == 0):
                raise AssertionError(f"request {r.id}: {r.alloc} tokens reserved for {tokens}")
            if not t.nodes[r.node].alive or t.nodes[r.node].end * c.page not in (r.cached * c.page, r.prefix):
                raise AssertionError(f"request {r.id}: its node ends at page {t.nodes[r.node].end}")
            private += tokens - t.nodes[r.node].end * c.page + radix_foreign(t, r.node, r.prefix, r.owner)
            if t.told:
                slots.extend([r.slots[k] for k in range(t.nodes[r.node].end * c.page, tokens)])
            node = r.node
            while node != 0:
                locks[node] = locks.get(node, 0) + 1
                node = t.nodes[node].parent
        if alive != c.alive or count != c.count:
            raise AssertionError(f"{alive} requests in slots, {c.alive} counted; {count} can move, {c.count} counted")
        known = extra = rest = 0
        for i in range(c.n_running):
            r = &c.req[c.running[i]]
            known, extra, rest = known + r.len, extra + r.alloc - r.computed, rest + r.limit - r.gen
        if (known, extra, rest) != (c.known, c.extra, c.rest):
            raise AssertionError(f"those who run know {known} tokens, {c.known} counted; {extra} reserved, {c.extra} "
                                 f"counted; {rest} to generate, {c.rest} counted")
        if c.n_running + c.n_waiting + c.n_prebuilt != c.count:
            raise AssertionError(f"{c.n_running} run, {c.n_waiting} wait, {c.n_prebuilt} are prebuilt of {c.count}")
        nodes = 0
        for i in range(1, t.nodes_used):
            x = &t.nodes[i]
            if not x.alive:
                continue
            nodes += 1
            children[x.parent] = children.get(x.parent, 0) + 1
            if x.lock != locks.get(i, 0):
                raise AssertionError(f"node {i}: {x.lock} locks, {locks.get(i, 0)} requests")
            if x.start != t.nodes[x.parent].end or x.end <= x.start or x.ends[x.n - 1] != x.end:
                raise AssertionError(f"node {i}: pages {x.start} to {x.end} under page {t.nodes[x.parent].end}")
            if map_find(&t.table, x.keys[0], x.start) != i:
                raise AssertionError(f"node {i} is not found by its first page")
            if t.ranks.score.ask != NULL and x.lock == 0 and x.children == 0 and t.ranks.of[i].place == NIL:
                raise AssertionError(f"node {i} could be evicted, and is not in the heap")
            if x.lock > 0:
                protected += (x.end - x.start) * c.page
            else:
                evictable += (x.end - x.start) * c.page
            if t.told:
                slots.extend([x.slots[k] for k in range((x.end - x.start) * c.page)])
        for i in range(t.nodes_used):
            if t.nodes[i].alive and t.nodes[i].children != children.get(i, 0):
                raise AssertionError(f"node {i}: {t.nodes[i].children} children, {children.get(i, 0)} found")
        for i in range(1, t.ranks.heap_used):
            if t.ranks.of[t.ranks.heap[i]].key < t.ranks.of[t.ranks.heap[(i - 1) // 2]].key:
                raise AssertionError(f"place {i} of the heap is out of order")
        if nodes != t.count or t.table.used != nodes:
            raise AssertionError(f"{nodes} nodes, {t.count} counted, {t.table.used} in the table")
        if evictable != t.evictable or protected != t.protected:
            raise AssertionError(f"{t.evictable} evictable and {t.protected} protected tokens counted; found "
                                 f"{evictable} and {protected}")
        if c.freed_twice == 0:
            if t.available + evictable + protected + private + c.leaked != c.total:
                raise AssertionError(f"{t.available} free, {evictable + protected} cached, {private} private and "
                                     f"{c.leaked} lost tokens are not {c.total}")
            if t.told:
                slots.extend([t.stack[k] for k in range(t.available)])
                if len(set(slots)) != len(slots):
                    raise AssertionError("a slot has two owners")
        if c.conserve and (c.leaked or c.freed_twice):
            raise AssertionError(f"conserving, but {c.leaked} tokens are lost and {c.freed_twice} freed twice")
