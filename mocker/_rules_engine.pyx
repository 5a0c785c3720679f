# cython: language_level=3
"""The compiled core with switches for Python callers.

Everything that a pass does is in `_rules`; submission, views and the conversion of events are `_engine`'s.
"""
from libc.math cimport isfinite, isnan
from libc.string cimport memcpy

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize

from mocker._common cimport ERR_OK, NIL, ST_FREE, int32_t, int64_t, uint32_t
from mocker._core cimport Admission, Core, Signal
from mocker._engine cimport EngineCore
from mocker._models cimport refuse_mixed
from mocker._rules cimport (
    RULE_LATE, RULE_SLOT_AT_USE, Batched, Copy, Extra, VllmRulesCore, rules_drop, rules_enqueue, rules_free, rules_init,
    rules_pass, rules_room, rules_under_way)
from mocker._rules_copies cimport copies_rank
from mocker._rules_schedule cimport cached_known
from mocker._vllm cimport core_metrics

cdef enum:
    SLOT_MASK = 0x7FFFFFFF         # the slot in the id of an owned request
    GENERATION_SHIFT = 32


cdef class PassRecord:
    """What one pass did; `owner` is what `RulesEngine.submit_owned` was given for a request."""

    @property
    def counts(self):
        """After the pass: (active blocks, usable blocks, running, waiting, preemptions since the start)."""
        return self.active, self.blocks, self.running, self.waiting, self.preemptions

    @property
    def forward_pass_metrics(self):
        """As `EngineCore.forward_pass_metrics`."""
        cdef int i
        return (tuple([(self.fpm[i].count, self.fpm[i].total, self.fpm[i].variance) for i in range(4)]),
                self.prefill_tokens, self.prefix_tokens)

    def admissions(self):
        """[(owner, cached tokens)] in order."""
        cdef Admission* data = <Admission*>PyBytes_AS_STRING(self.admission_data)
        cdef int64_t i, n = len(self.admission_data) // <int64_t>sizeof(Admission)
        return [(self.owners[data[i].id & SLOT_MASK], data[i].reused) for i in range(n)]

    def signals(self):
        """[(owner, token or None, terminal code, hand-off ms or None)] in order."""
        cdef Signal* data = <Signal*>PyBytes_AS_STRING(self.signal_data)
        cdef int64_t i, n = len(self.signal_data) // <int64_t>sizeof(Signal)
        return [(self.owners[data[i].id & SLOT_MASK], data[i].token if data[i].token >= 0 else None, data[i].terminal,
                 None if isnan(data[i].handoff_ms) else data[i].handoff_ms) for i in range(n)]

    def scheduled(self):
        """[(owner, tokens)] in batch order."""
        cdef Batched* data = <Batched*>PyBytes_AS_STRING(self.batch_data)
        cdef int64_t i, n = len(self.batch_data) // <int64_t>sizeof(Batched)
        return [(self.owners[data[i].slot], data[i].tokens) for i in range(n) if data[i].tokens != NIL]

    def preempted(self):
        """[owner] in order."""
        cdef int64_t* data = <int64_t*>PyBytes_AS_STRING(self.victim_data)
        cdef int64_t i, n = len(self.victim_data) // <int64_t>sizeof(int64_t)
        return [self.owners[data[i] & SLOT_MASK] for i in range(n)]


cdef class RulesEngine(EngineCore):
    """An `EngineCore` (same arguments) that schedules by switches; call `configure` before anything else."""

    def configure(self, *, int rules, bint by_priority, bint gate, int64_t threshold, int64_t watermark,
                  bint skip_own=False, bint strict=False):
        """Set the rules and vLLM's options.

        Parameters
        ----------
        rules : int
            Set of RuleBit.
        by_priority : bool
            Order the queue and choose victims by priority, then arrival.
        gate : bool
            Admit a prompt only if the whole known sequence fits.
        threshold : int
            Most tokens of one request in a pass while there are others; 0: no cap.
        watermark : int
            Blocks that an admission leaves free while somebody runs.
        skip_own : bool
            Leave KV events of generated blocks out where these have no tokens that a prompt could have.
        strict : bool
            Register every block at once and plan every decode step, for tests of the shortcuts.
        """
        if self.configured:
            raise RuntimeError("the engine is configured already")
        self.owners = []
        if rules & RULE_LATE and not rules & RULE_SLOT_AT_USE:
            raise ValueError("rule late needs slot_at_use")
        if self.c.nextn or self.c.policy:
            raise ValueError("speculative decoding and TRT-LLM have no scheduler rules")
        refuse_mixed(self.timing, "vLLM's scheduler rules")
        if rules_init(&self.x, &self.c, rules) != ERR_OK:
            raise MemoryError
        copies_rank(&self.x)
        self.x.by_priority, self.x.gate, self.x.threshold = by_priority, gate, threshold
        self.x.watermark, self.x.skip_own, self.x.strict = watermark, skip_own, strict
        self.c.admission.cached, self.c.admission.engine = cached_known, &self.x
        self.configured = True

    def __dealloc__(self):
        if self.configured:
            rules_free(&self.x)

    def submit(self, int64_t handle, const uint32_t[::1] tokens, int64_t limit, const uint32_t[::1] plan,
               int64_t place):
        """As `EngineCore.submit`."""
        return self.queue_at(EngineCore.submit(self, handle, tokens, limit, plan, NIL), place, 0)

    def submit_owned(self, owner, const uint32_t[::1] tokens, int64_t limit, const uint32_t[::1] plan, int64_t place,
                     int64_t priority):
        """Queue a request of real tokens for `run_owned`, with its priority (smaller goes first).

        Returns
        -------
        tuple of int
            Its id and its slot.
        """
        cdef int32_t slot = EngineCore.submit(self, 0, tokens, limit, plan, NIL)
        cdef int64_t id
        self.queue_at(slot, place, priority)
        self.generation += 1
        id = (self.generation << GENERATION_SHIFT) | slot
        self.c.req[slot].id = id
        self.prefer(slot, priority)
        if slot == len(self.owners):
            self.owners.append(owner)
        else:
            self.owners[slot] = owner
        return id, slot

    cdef int32_t queue_at(self, int32_t slot, int64_t place, int64_t priority) except -1:
        """Queue by the rules what `EngineCore.submit` has put at the back."""
        cdef Core* c = &self.c
        c.waiting_places -= 1
        c.n_waiting -= 1
        c.count -= 1
        if not rules_room(&self.x):
            raise MemoryError
        rules_enqueue(&self.x, slot, place, priority)
        self.raise_error()
        return slot

    def drop(self, int32_t slot):
        """Cancel a request and free what it holds; returns the place to submit the same id to again, or -1."""
        return rules_drop(&self.x, slot)

    def mark_source(self, int32_t slot):
        """Not here: raises ValueError."""
        raise ValueError("scheduler rules do not model hand-off between workers")

    def reserve(self, int64_t handle, const uint32_t[::1] tokens, int64_t limit, const uint32_t[::1] plan):
        """Not here: raises ValueError."""
        raise ValueError("scheduler rules do not model hand-off between workers")

    def run_pass(self, double now):
        """Run one pass at `now` (ms); returns what `EngineCore.run_pass` does.

        With asynchronous scheduling the tokens are those of the pass before; they were made when it ended.
        """
        cdef Core* c = &self.c
        cdef int64_t i
        with nogil:
            rules_pass(&self.x, now)
        if c.error or c.pool.error:
            self.raise_error()
        cdef list admissions = [(c.admissions[i].id, c.admissions[i].reused) for i in range(c.admissions_used)]
        cdef list signals = []
        for i in range(c.signals_used):
            signals.append((c.signals[i].id, c.signals[i].token, c.signals[i].terminal,
                            None if isnan(c.signals[i].handoff_ms) else c.signals[i].handoff_ms))
        return c.end_ms, c.completed, admissions, signals, c.made, c.made_by

    def run_owned(self, double now):
        """Run one pass at `now` (ms) over requests that `submit_owned` queued; returns its PassRecord.

        Raises
        ------
        ValueError
            `now` is not finite.
        """
        cdef Core* c = &self.c
        cdef VllmRulesCore* x = &self.x
        cdef PassRecord p = PassRecord.__new__(PassRecord)
        cdef bint late = (x.rules & RULE_LATE) != 0
        cdef int64_t i
        if not isfinite(now):
            raise ValueError(f"now_ms must be finite, got {now}")
        with nogil:
            rules_pass(x, now)
            core_metrics(c)
        if c.error or c.pool.error:
            self.raise_error()
        p.start_ms, p.end_ms, p.tokens_ms = now, c.end_ms, c.last_emit
        p.completed, p.made, p.made_by = c.completed, c.made, c.made_by
        p.kv_events = self.take_events() if c.pool.events_used else []
        p.active, p.blocks, p.running, p.waiting = c.pool.active, c.pool.capacity, c.n_running, c.n_waiting
        p.preemptions = c.preemptions
        memcpy(&p.fpm[0], &c.fpm[0], sizeof(c.fpm))
        p.prefill_tokens, p.prefix_tokens = c.fpm_prefill_tokens, c.fpm_prefix_tokens
        p.owners = self.owners[:]
        p.admission_data = PyBytes_FromStringAndSize(<char*>c.admissions, c.admissions_used * sizeof(Admission))
        p.signal_data = PyBytes_FromStringAndSize(<char*>c.signals, c.signals_used * sizeof(Signal))
        if late:
            p.batch_data = PyBytes_FromStringAndSize(<char*>x.flight, x.flight_used * sizeof(Batched))
        else:
            p.batch_data = PyBytes_FromStringAndSize(<char*>x.batch, x.batch_used * sizeof(Batched))
        p.victim_data = PyBytes_FromStringAndSize(<char*>x.victims, x.victims_used * sizeof(int64_t))
        p.ended = []
        if c.ended_used:
            for i in range(c.signals_used):
                if c.signals[i].terminal:
                    p.ended.append((c.signals[i].id, self.owners[c.signals[i].id & SLOT_MASK], c.signals[i].terminal))
        return p

    @property
    def under_way(self):
        """Asynchronous scheduling: requests in the batch whose outcome is not seen yet."""
        return rules_under_way(&self.x)

    def request(self, int32_t slot):
        """One request as `EngineCore.request` shows it."""
        out = EngineCore.request(self, slot)
        out["allocated"] = (self.x.extra[slot].done + self.x.extra[slot].blank) * self.c.block_size
        return out

    def check(self):
        """Verify the books of the pool against the requests; raises AssertionError naming what is wrong."""
        cdef Core* c = &self.c
        cdef VllmRulesCore* x = &self.x
        cdef Copy* k
        cdef Extra* e
        cdef int64_t slot, active = 0, inactive = 0, blank = 0, alive = 0
        cdef int32_t at, n, i, low, prev
        holders = {}
        for slot in range(c.req_used):
            e = &x.extra[slot]
            if c.req[slot].status == ST_FREE:
                if e.n or e.blank:
                    raise AssertionError(f"slot {slot} is unused and holds {e.done} + {e.blank} blocks")
                continue
            alive += 1
            blank += e.blank
            low = 0
            for i in range(e.n):
                n = e.holds[i].end - low
                low = e.holds[i].end
                at = e.holds[i].first
                while n > 0:
                    if at == NIL:
                        raise AssertionError(f"request {c.req[slot].id}: hold {i} is longer than its copies")
                    holders[at] = holders.get(at, 0) + 1
                    n -= x.copies[at].end - x.copies[at].start
                    at = x.copies[at].deeper
                if n < 0:
                    raise AssertionError(f"request {c.req[slot].id}: hold {i} ends inside a copy")
        if alive != c.count:
            raise AssertionError(f"{alive} requests in slots, {c.count} counted")
        for slot in range(<int64_t>(x.table_mask + 1)):
            at, prev, low = x.table_heads[slot], NIL, 0
            while at != NIL:
                k = &x.copies[at]
                if k.start < low or k.end <= k.start or k.left != prev or k.key != x.table_keys[slot]:
                    raise AssertionError(f"segment {k.key}: its list is not in order")
                if k.ref != holders.pop(at, 0):
                    raise AssertionError(f"segment {k.key}: {k.ref} references do not match its holders")
                if k.ref > 0:
                    active += k.end - k.start
                else:
                    inactive += k.end - k.start
                low, prev, at = k.start, at, k.right
        if holders:
            raise AssertionError("a request holds a copy that is in no list")
        if active + blank != c.pool.active or inactive != c.pool.inactive:
            raise AssertionError(f"pool counts {c.pool.active} active, {c.pool.inactive} inactive; found "
                                 f"{active} + {blank} and {inactive}")
        if not 0 <= c.pool.active + c.pool.inactive <= c.pool.capacity:
            raise AssertionError(f"{c.pool.active} active and {c.pool.inactive} inactive of {c.pool.capacity} blocks")
        for slot in range(c.pool.ranks.heap_used):
            at = c.pool.ranks.heap[slot]
            if c.pool.ranks.of[at].place != slot:
                raise AssertionError(f"segment {x.copies[at].key}: misplaced in the order of eviction")
            if x.copies[at].ref == 0:
                inactive -= x.copies[at].end - x.copies[at].start
        at, prev = x.oldest, NIL
        while at != NIL:
            k = &x.copies[at]
            if k.ref != 0 or k.prev != prev:
                raise AssertionError(f"segment {k.key}: held or misplaced in the eviction queue")
            inactive -= k.end - k.start
            prev, at = at, k.next
        if inactive != 0 or x.newest != prev:
            raise AssertionError(f"the eviction queue misses {inactive} blocks")
