# cython: language_level=3
"""The router in front of the workers: who has which blocks, who is how busy, who gets the next request.

Answers to dynamo-kv-router 1.3.0 `scheduling/{selector,policy_queue,policy_config}.rs`, `sequences/*` and
`indexer/radix_tree.rs` as `replay/offline/components/router.rs` of dynamo-mocker drives them. Here are what the
cluster calls and the Python side; below them lie the index (`_router_index`), the books (`_router_loads`), the choice
(`_router_choice`) and the queues (`_router_queue`).

Costs: event O(pieces * workers with that segment); arrival O(path elements that somebody covers * their holders +
workers to compare); completion O(path elements); drain O(1) while nobody waits.
Memory: resident (segment, worker) pairs, requests queued or in flight, workers; nothing grows with a trace's length.
"""
from libc.math cimport NAN, isnan
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from math import frexp

import numpy as np

from mocker._common cimport NIL, grown, int32_t, int64_t, uint32_t, uint64_t
from mocker._hooks cimport Hook, ScoreHook, hook_of
from mocker._kv cimport Path, Pool
from mocker._offload_engine cimport OffloadWorld
from mocker._router_choice cimport (
    fill_costs, load_changed, reorder, router_add_worker, router_remove_worker, select)
from mocker._router_index cimport (
    blocks_add, blocks_remove, index_events, index_forget, router_cleared, router_removed, router_stored, table_find,
    walk, warm_up)
from mocker._router_loads cimport (
    nanos_of, prefill_add, prefill_remove, prefill_tokens, router_free, router_init, ticket_drop, ticket_new)
from mocker._router_queue cimport all_busy, enqueue, heap_take, next_ticket
from mocker._router_tiers cimport (
    TIER_EXTERNAL, TIER_HOST, cached_tokens, lower_best, lower_block, lower_cleared, lower_new, lower_recall,
    lower_walk)
from mocker._spec cimport rng_seed

cdef enum:
    NO_BUDGET = 10000000               # tokens a pass where a worker has no limit
    TREE_FROM = 33                     # workers; with fewer, comparing all is faster than keeping a tree


# ---- events -----------------------------------------------------------------------------------------------------

cdef void router_events(Router* r, int32_t worker, Pool* pool) noexcept nogil:
    """Apply a pool's event log and empty it."""
    index_events(r, worker, pool)


# ---- requests ---------------------------------------------------------------------------------------------------

cdef int64_t best_cached(Router* r, int64_t isl) noexcept nogil:
    """Prompt tokens that the eligible worker with the longest cached prefix has."""
    cdef int32_t i
    cdef int64_t best = 0
    if r.lower != NULL:
        best = lower_best(r)
        return best if best < isl else isl
    for i in range(r.n_warm):
        if r.overlap[r.warm[i]] > best and r.loads[r.warm[i]].eligible:
            best = r.overlap[r.warm[i]]
    best *= r.block_size
    return best if best < isl else isl


cdef void admit(Router* r, int32_t ticket, const uint64_t* keys, const int32_t* ends, int32_t n,
                double now) noexcept nogil:
    """Choose a worker for a ticket whose walk is done, and book the request there; its worker stays NIL on error."""
    cdef Ticket* t = &r.tickets[ticket]
    cdef int64_t blocks = 0, cached
    cdef int32_t w
    cdef Load* load
    if r.track_blocks:
        blocks = (ends[n - 1] if n > 0 else 0) if r.share_blocks else t.isl // r.block_size
    w = select(r, t.row, t.isl, blocks, keys, ends, n, now)
    if w == NIL:
        return
    t.worker = w
    load = &r.loads[w]
    load.requests += 1
    load.tokens += t.isl
    r.in_flight += 1
    r.last_overlap = r.overlap[w]
    if r.track_blocks:
        if r.share_blocks:
            blocks_add(r, t, keys, ends, n)
        else:
            t.alone = blocks
            load.blocks += blocks
    if r.track_prefill:
        cached = cached_tokens(r, w)
        if cached < t.isl:
            prefill_add(r, ticket, t.isl - cached, cached, nanos_of(now) if r.estimate != NULL else 0)
    load_changed(r, w)


cdef int32_t router_arrival(Router* r, int64_t row, Path* path, int64_t isl, int64_t priority, uint32_t strict,
                            int32_t policy, double now) noexcept nogil:
    """A request arrives: the worker that it goes to, or a RouteCode.

    `path`: its full prompt blocks (NULL: none); `policy`: `PolicyProfile.code`; `now`: ms. The row must not be in
    flight or queued. After a worker: `last_overlap` is its cached blocks.
    """
    cdef int32_t n = path.n if path != NULL else 0, c = policy, i, ticket, w
    cdef int64_t cached = 0
    cdef QueueClass* q
    if not walk(r, path.keys if n > 0 else NULL, path.ends if n > 0 else NULL, n, r.reads,
                r.track_blocks and r.share_blocks):
        return ROUTED_ERROR
    if r.lower != NULL:
        lower_walk(r, path.keys if n > 0 else NULL, path.ends if n > 0 else NULL, n)
    if policy < 0:
        cached = best_cached(r, isl)
        i = 0
        while i + 1 < r.n_buckets and r.bucket_starts[i + 1] <= isl - cached:
            i += 1
        c = r.bucket_classes[(-1 - policy) * r.n_buckets + i]
    q = &r.classes[c]
    if r.n_eligible == 0 or ((q.busy_tokens != NIL or not isnan(q.busy_fraction)) and (
            q.used > 0 or all_busy(r, q, nanos_of(now) if r.estimate != NULL else 0))):
        return enqueue(r, row, path, n, isl, best_cached(r, isl), priority, strict, c, now)
    ticket = ticket_new(r, row, isl, n)
    if ticket == NIL:
        r.error = ROUTER_MEMORY
        return ROUTED_ERROR
    admit(r, ticket, path.keys if n > 0 else NULL, path.ends if n > 0 else NULL, n, now)
    w = r.tickets[ticket].worker
    if w == NIL:
        ticket_drop(r, ticket)
        return ROUTED_ERROR
    return w


cdef bint router_prefill_completed(Router* r, int64_t row, double now) noexcept nogil:
    """A request made its first token; False if it is not in flight."""
    cdef int32_t ticket = table_find(&r.rows, <uint64_t>row)
    if ticket == NIL or r.tickets[ticket].worker == NIL:
        return False
    prefill_remove(r, ticket, nanos_of(now) if r.estimate != NULL else 0)
    load_changed(r, r.tickets[ticket].worker)
    return True


cdef bint router_completed(Router* r, int64_t row, double now) noexcept nogil:
    """A request has left its worker, however; False if it was not in flight."""
    cdef int32_t ticket = table_find(&r.rows, <uint64_t>row)
    cdef Ticket* t
    if ticket == NIL or r.tickets[ticket].worker == NIL:
        return False
    t = &r.tickets[ticket]
    prefill_remove(r, ticket, nanos_of(now) if r.estimate != NULL else 0)
    blocks_remove(r, t)
    load_changed(r, t.worker)
    r.loads[t.worker].requests -= 1
    r.loads[t.worker].tokens -= t.isl
    r.in_flight -= 1
    ticket_drop(r, ticket)
    return True


cdef bint router_cancel(Router* r, int64_t row) noexcept nogil:
    """Take a request out of the queue; False if it is not there. O(queued)."""
    cdef int32_t ticket = table_find(&r.rows, <uint64_t>row)
    cdef QueueClass* q
    cdef int64_t i
    if ticket == NIL or r.tickets[ticket].worker != NIL:
        return False
    q = &r.classes[r.tickets[ticket].queue]
    for i in range(q.used):
        if q.heap[i] == ticket:
            heap_take(r, q, i)
            break
    if q.used == 0:
        q.credit = 0
    r.tickets[ticket].n = 0
    ticket_drop(r, ticket)
    return True


cdef int64_t router_drain(Router* r, double now) noexcept nogil:
    """Dispatch queued requests while their class's workers are not all busy; how many went, listed in `placed`."""
    cdef int32_t ticket, i, n
    cdef Ticket* t
    cdef void* moved
    cdef int64_t nanos = nanos_of(now) if r.queued > 0 and r.estimate != NULL else 0
    r.placed_used = 0
    while r.queued > 0:
        moved = grown(r.placed, &r.placed_cap, r.placed_used + 1, sizeof(Placement))
        if moved == NULL:
            r.error = ROUTER_MEMORY
            break
        r.placed = <Placement*>moved
        ticket = next_ticket(r, nanos)
        if ticket == NIL:
            break
        t = &r.tickets[ticket]
        n = t.n
        if not walk(r, t.keys, t.depths, n, False, r.track_blocks and r.share_blocks):
            break
        for i in range(t.overlaps_used):
            warm_up(r, t.overlaps[2 * i])
            r.overlap[t.overlaps[2 * i]] = t.overlaps[2 * i + 1]
        if r.lower != NULL:
            lower_recall(r, t)
        t.n = 0
        admit_queued(r, ticket, n, now)
        t = &r.tickets[ticket]
        if t.worker == NIL:
            ticket_drop(r, ticket)
            break
        free(t.keys)
        free(t.overlaps)
        free(t.lower)
        t.keys, t.overlaps, t.lower = NULL, NULL, NULL
        r.placed[r.placed_used].row, r.placed[r.placed_used].worker = t.row, t.worker
        r.placed[r.placed_used].overlap, r.placed[r.placed_used].isl = r.last_overlap, t.isl
        r.placed_used += 1
    return r.placed_used


cdef void admit_queued(Router* r, int32_t ticket, int32_t n, double now) noexcept nogil:
    """Admit a ticket whose path is its own: `depths` turns from ends into lengths only after each was read."""
    admit(r, ticket, r.tickets[ticket].keys, r.tickets[ticket].depths, n, now)


cdef void router_finalize_worker(Router* r, int32_t worker) noexcept nogil:
    """Forget a removed worker: its requests, if any are left, and its blocks. O(segments + tickets)."""
    cdef int64_t i
    if worker < 0 or worker >= r.workers:
        return
    for i in range(r.tickets_used):
        if r.tickets[i].worker == worker:
            router_completed(r, r.tickets[i].row, 0.0)
    index_forget(r, worker)


# ---- Python side ------------------------------------------------------------------------------------------------

KINDS = {
    "kv": ROUTE_KV, "round_robin": ROUTE_ROUND_ROBIN, "least_requests": ROUTE_LEAST_REQUESTS,
    "least_tokens": ROUTE_LEAST_TOKENS, "two_choices": ROUTE_TWO_CHOICES, "prefix": ROUTE_PREFIX,
    "random": ROUTE_RANDOM, "function": ROUTE_CALL,
}
QUEUES = {"fcfs": QUEUE_FCFS, "lcfs": QUEUE_LCFS, "wspt": QUEUE_WSPT}
LIMITS = ("requests", "raw_isl_tokens", "cached_tokens")


class QueueRejection(RuntimeError):
    """A request that found its queue full.

    Attributes
    ----------
    policy_class : str
        The queue's name.
    limit_kind : str
        What there is too much of: "requests", "raw_isl_tokens" or "cached_tokens".
    current, limit : int
        What the queue held, and what it may hold.
    """

    def __init__(self, policy_class, limit_kind, current, limit):
        super().__init__(f"router policy class {policy_class!r} queue {limit_kind} limit reached "
                         f"(current={current}, limit={limit})")
        self.policy_class, self.limit_kind, self.current, self.limit = policy_class, limit_kind, current, limit


cdef int32_t call_function(void* context, const Ask* ask) noexcept with gil:
    cdef RouterCore core = <RouterCore>context
    cdef int32_t i
    cdef const Load* load
    try:
        views = []
        for i in range(ask.n):
            load = &ask.loads[ask.workers[i]]
            views.append((ask.workers[i], load.requests, load.tokens, ask.overlap[ask.workers[i]]))
        return core.function(ask.row, ask.isl, ask.now, views)
    except BaseException as error:
        core.failure = error
        return NIL


cdef int32_t lowest_score(void* context, const Ask* ask) noexcept nogil:
    """The eligible worker with the lowest score, of equal ones the first; NIL if a score is not a number."""
    cdef Hook* hook = <Hook*>context
    cdef int64_t[5] facts
    cdef int32_t i, worker, best = NIL
    cdef double score, least = 0.0
    facts[1] = ask.isl
    for i in range(ask.n):
        worker = ask.workers[i]
        facts[0], facts[2] = worker, ask.overlap[worker]
        facts[3], facts[4] = ask.loads[worker].requests, ask.loads[worker].tokens
        score = hook.ask(hook.context, facts)
        if isnan(score):
            return NIL
        if best == NIL or score < least:
            best, least = worker, score
    return best


cdef int64_t call_estimator(void* context, int64_t fresh, int64_t cached) noexcept with gil:
    cdef RouterCore core = <RouterCore>context
    try:
        seconds = core.estimator(fresh, cached)
        return NIL if seconds is None else nanos_of(float(seconds) * 1000.0)
    except BaseException as error:
        core.failure = error
        return NIL


cdef class RouterCore:
    """A router and its memory.

    Parameters
    ----------
    kind : str
        A key of `KINDS`.
    config : KvRouterConfig
        Read by the kind "kv".
    block_size : int
        Tokens a block.
    workers : int
        Workers 0, 1, … that may be chosen at once; their order is their number.
    max_batched_tokens : int or None
        Token budget of a worker's pass, for the busy rule.
    random_ties : bool
        Choose among workers of equal cost at random, not the lowest.
    seed : int
        Of everything random.
    model_name : str or None
        Picks a model's queues in the policy file.
    skip_own : bool
        Ignore blocks whose key has its top bit set: generated ones of a trace replay.
    prefix_blocks, prefix_bound
        Of the kind "prefix": blocks that are hashed; times the mean load that a worker may have (0: no bound).
    function : callable or None
        Of the kind "function": ``function(row, isl, now, workers) -> worker`` with a list of
        ``(worker, requests, tokens, cached blocks)``.
    estimator : callable or None
        ``estimator(fresh tokens, cached tokens) -> seconds or None`` of a prefill; active prefill tokens then melt.
    tree_from : int
        Workers from which on the cheapest is found by a tree, not by comparing all; the choice is the same.
    lower_tiers : bool
        Of the kind "kv": blocks below the GPU count too, at the weights of the configuration.
    profile : PolicyProfile or None
        Queues, if they are known already.
    """

    def __cinit__(self, str kind, config, int64_t block_size, int32_t workers, max_batched_tokens=None,
                  bint random_ties=False, uint64_t seed=0, model_name=None, bint skip_own=False,
                  int32_t prefix_blocks=1, double prefix_bound=0.0, function=None, estimator=None,
                  int32_t tree_from=TREE_FROM, bint lower_tiers=False, profile=None):
        cdef Router* r = &self.r
        cdef int32_t i
        cdef QueueClass* q
        if not router_init(r):
            raise MemoryError
        if kind not in KINDS:
            raise ValueError(f"router kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if (kind == "function") != (function is not None):
            raise ValueError("the router kind 'function' and no other takes a function")
        r.kind, r.block_size = KINDS[kind], block_size
        r.reads = r.kind == ROUTE_KV or r.kind == ROUTE_CALL
        r.budget = NO_BUDGET if max_batched_tokens is None else clipped(max_batched_tokens)
        r.credit, r.credit_decay = config.overlap_score_credit, config.overlap_score_credit_decay
        r.prefill_scale, r.temperature = config.prefill_load_scale, config.router_temperature
        r.track_blocks = r.kind == ROUTE_KV and config.router_track_active_blocks
        r.share_blocks = config.router_assume_kv_reuse
        r.track_prefill = r.kind == ROUTE_KV and config.router_track_prefill_tokens
        r.random_ties, r.skip_own = random_ties, skip_own
        r.prefix_blocks, r.prefix_bound = prefix_blocks, prefix_bound
        self.function, self.estimator = function, estimator
        if function is not None:
            r.choose, r.choose_context = call_function, <void*>self
        if estimator is not None:
            r.estimate, r.estimate_context = call_estimator, <void*>self
        r.tree_from = tree_from
        r.tree_exact = r.kind == ROUTE_KV and r.temperature == 0.0 and r.estimate == NULL and not lower_tiers and (
            not r.track_prefill or (r.credit_decay == 0.0 and block_size & (block_size - 1) == 0
                                    and (r.prefill_scale == 0.0 or (frexp(r.prefill_scale)[0] == 0.5
                                                                    and 2.0**-10 <= r.prefill_scale <= 2.0**10))))
        if lower_tiers:
            if r.kind != ROUTE_KV:
                raise ValueError("only the router kind 'kv' credits blocks below the GPU")
            r.lower = lower_new(config.host_cache_hit_weight, config.disk_cache_hit_weight)
            if r.lower == NULL:
                raise MemoryError
        rng_seed(&r.rng, seed)
        self.profile = config.policy_profile(model_name) if profile is None else profile
        classes = self.profile.classes
        r.classes = <QueueClass*>calloc(len(classes), sizeof(QueueClass))
        if r.classes == NULL:
            raise MemoryError
        r.n_classes = <int32_t>len(classes)
        for i in range(r.n_classes):
            q, given = &r.classes[i], classes[i]
            q.policy, q.quantum = QUEUES[given.queue_policy], clipped(given.quantum)
            q.busy_tokens = NIL if r.kind != ROUTE_KV else clipped(given.busy_tokens)
            q.busy_fraction = NAN if r.kind != ROUTE_KV or given.busy_fraction is None else given.busy_fraction
            q.max_requests, q.max_isl = clipped(given.max_requests), clipped(given.max_isl_tokens)
            q.max_cached = clipped(given.max_cached_tokens)
        r.n_buckets = <int32_t>len(self.profile.buckets)
        if r.n_buckets > 0:
            r.bucket_starts = <int64_t*>malloc(r.n_buckets * sizeof(int64_t))
            r.bucket_classes = <int32_t*>malloc(len(self.profile.table) * sizeof(int32_t))
            if r.bucket_starts == NULL or r.bucket_classes == NULL:
                raise MemoryError
            for i in range(r.n_buckets):
                r.bucket_starts[i] = clipped(self.profile.buckets[i])
            for i in range(<int32_t>len(self.profile.table)):
                r.bucket_classes[i] = self.profile.table[i]
        for i in range(workers):
            if not router_add_worker(r, i, i):
                raise MemoryError

    def __dealloc__(self):
        router_free(&self.r)

    def use_score(self, ScoreHook hook, bint cached):
        """Let a router of the kind "function" choose the lowest score of (worker, prompt, cached blocks, requests,
        their prompt tokens); without `cached` it does not keep track of cached blocks, and says 0."""
        self.r.reads = cached
        self.hook, self.score = hook, hook_of(hook)
        self.r.choose, self.r.choose_context = lowest_score, &self.score

    def raise_error(self):
        """Turn an error of the router or of a user's function into an exception."""
        failure, self.failure = self.failure, None
        if self.r.error == ROUTER_CHOICE and self.hook is not None:
            self.r.error = ROUTER_OK
            (<ScoreHook>self.hook).raise_failure()
        if failure is not None:
            self.r.error = ROUTER_OK
            raise failure
        if self.r.error == ROUTER_MEMORY:
            raise MemoryError
        if self.r.error == ROUTER_CHOICE:
            self.r.error = ROUTER_OK
            raise ValueError("the routing function must return a worker that may be chosen")

    def raise_rejection(self):
        """Raise `QueueRejection` for the request that was refused last."""
        raise QueueRejection(self.profile.classes[self.r.full_class].name, LIMITS[self.r.full_kind],
                             self.r.full_current, self.r.full_limit)

    # -- workers and their blocks -----------------------------------------------------------------------------------

    def add_worker(self, int32_t worker, order=None):
        """Let a worker be chosen; False if it may already. `order` decides ties (its number if None)."""
        cdef bint added
        if worker < 0:
            raise ValueError(f"worker must be at least 0, got {worker}")
        added = router_add_worker(&self.r, worker, worker if order is None else order)
        self.raise_error()
        return added

    def sort_workers(self, list workers):
        """Let ties be decided by the order of this list of all workers."""
        cdef int32_t n = 0, worker, i
        for i, worker in enumerate(workers):
            check_worker(self, worker)
            self.r.loads[worker].order = i
            if self.r.loads[worker].eligible and n < self.r.n_eligible:
                self.r.eligible[n] = worker
                n += 1
        reorder(&self.r)

    def eligible(self, int32_t worker):
        """Whether a worker may be chosen."""
        return 0 <= worker < self.r.workers and self.r.loads[worker].eligible != 0

    def remove_worker(self, int32_t worker):
        """Do not choose a worker any more; False if it might not before."""
        return router_remove_worker(&self.r, worker)

    def finalize_worker(self, int32_t worker):
        """Forget a worker's requests and blocks."""
        router_finalize_worker(&self.r, worker)

    def stored(self, int32_t worker, uint64_t key, int32_t end):
        """Let a worker have a segment's blocks up to `end` (exclusive)."""
        check_worker(self, worker)
        router_stored(&self.r, worker, key, end)
        self.raise_error()

    def removed(self, int32_t worker, uint64_t key, int32_t start):
        """Take a segment's blocks from `start` on away from a worker."""
        check_worker(self, worker)
        router_removed(&self.r, worker, key, start)

    def cleared(self, int32_t worker):
        """Take all blocks away from a worker."""
        check_worker(self, worker)
        router_cleared(&self.r, worker)

    @property
    def lower_tiers(self):
        """Whether blocks below the GPU count."""
        return self.r.lower != NULL

    def use_world(self, OffloadWorld world):
        """Let the disk and the remote store of a replay count, which all workers share."""
        if self.r.lower == NULL:
            raise ValueError("this router counts only blocks on the GPU")
        self.world = world
        self.r.lower.world = &world.w

    def lower_block(self, int32_t worker, int tier, uint64_t key, bint stored, int32_t at=0):
        """Let a tier below a worker's GPU (1: host, 2: disk, 3: external) have a block of a segment, or not."""
        check_worker(self, worker)
        if self.r.lower == NULL or not TIER_HOST <= tier <= TIER_EXTERNAL:
            raise ValueError(f"this router has no tier {tier}")
        lower_block(&self.r, worker, tier, key, at, stored)
        self.raise_error()

    def lower_cleared(self, int32_t worker, int tier):
        """Take all blocks away from a tier below a worker's GPU."""
        check_worker(self, worker)
        if self.r.lower == NULL or not TIER_HOST <= tier <= TIER_EXTERNAL:
            raise ValueError(f"this router has no tier {tier}")
        lower_cleared(&self.r, worker, tier)

    # -- requests ---------------------------------------------------------------------------------------------------

    def arrival(self, int64_t row, const uint64_t[::1] keys, const int32_t[::1] ends, int64_t isl,
                int64_t priority=0, uint32_t strict=0, int32_t policy=0, double now=0.0):
        """Hand in a request.

        Returns
        -------
        tuple of int or None
            Its worker and the cached blocks there; None if it was queued.

        Raises
        ------
        QueueRejection
            If its queue is full.
        """
        cdef Path path = path_of(keys, ends)
        cdef int32_t worker
        if isl < 1:
            raise ValueError(f"a prompt must have at least 1 token, got {isl}")
        if row < 0 or table_find(&self.r.rows, <uint64_t>row) != NIL:
            raise ValueError(f"request {row} is negative, queued or in flight already")
        with nogil:
            worker = router_arrival(&self.r, row, &path, isl, priority, strict, policy, now)
        if worker == ROUTED_LATER:
            return None
        if worker == ROUTED_NEVER:
            self.raise_rejection()
        if self.failure is not None and worker >= 0:   # the estimator raised: the request is not taken
            router_completed(&self.r, row, now)
        self.raise_error()
        return worker, self.r.last_overlap

    def prefill_completed(self, int64_t row, double now=0.0):
        """Tell that a request made its first token; False if it is not in flight."""
        return router_prefill_completed(&self.r, row, now)

    def completed(self, int64_t row, double now=0.0):
        """Tell that a request has left its worker; False if it was not in flight."""
        return router_completed(&self.r, row, now)

    def cancel(self, int64_t row):
        """Take a request out of the queue; False if it is not there."""
        return router_cancel(&self.r, row)

    def knows(self, int64_t row):
        """Whether a request is queued or in flight."""
        return table_find(&self.r.rows, <uint64_t>row) != NIL

    def drain(self, double now=0.0):
        """Dispatch what may go; a list of (row, worker, cached blocks)."""
        cdef int64_t i, n
        with nogil:
            n = router_drain(&self.r, now)
        self.raise_error()
        return [(self.r.placed[i].row, self.r.placed[i].worker, self.r.placed[i].overlap) for i in range(n)]

    # -- what it knows ----------------------------------------------------------------------------------------------

    def parts(self, const uint64_t[::1] keys, const int32_t[::1] ends, int64_t isl, double now=0.0):
        """Parts of the cost of every eligible worker for a request; changes nothing.

        Returns
        -------
        dict of int to tuple
            ``worker: (cached blocks, active prefill tokens, active blocks, new blocks, cost, blocks in the host that
            follow the cached ones, blocks on the disk and beyond that follow these)``.
        """
        cdef Path path = path_of(keys, ends)
        cdef int32_t i, w
        cdef int64_t blocks = 0, nanos = nanos_of(now)
        if isl < 1:
            raise ValueError(f"a prompt must have at least 1 token, got {isl}")
        if not walk(&self.r, path.keys, path.ends, path.n, True, self.r.track_blocks and self.r.share_blocks):
            raise MemoryError
        if self.r.track_blocks:
            blocks = ((path.ends[path.n - 1] if path.n > 0 else 0) if self.r.share_blocks
                      else isl // self.r.block_size)
        if self.r.lower != NULL:
            lower_walk(&self.r, path.keys, path.ends, path.n)
        fill_costs(&self.r, isl, blocks, nanos)
        out = {}
        for i in range(self.r.n_eligible):
            w = self.r.eligible[i]
            out[w] = (self.r.overlap[w], prefill_tokens(&self.r, &self.r.loads[w], nanos), self.r.loads[w].blocks,
                      blocks - self.r.shared[w], self.r.cost[i],
                      self.r.lower.host[w] if self.r.lower != NULL else 0,
                      self.r.lower.disk[w] if self.r.lower != NULL else 0)
        return out

    def overlaps(self, const uint64_t[::1] keys, const int32_t[::1] ends):
        """Cached blocks of a path on every worker, eligible or not, as an int32 array."""
        cdef Path path = path_of(keys, ends)
        cdef int64_t i
        if not walk(&self.r, path.keys, path.ends, path.n, True, False):
            raise MemoryError
        out = np.zeros(self.r.workers, np.int32)
        for i in range(self.r.workers):
            out[i] = self.r.overlap[i]
        return out

    def loads(self, double now=0.0):
        """Load of every worker, eligible or not.

        Returns
        -------
        list of tuple
            ``(eligible, requests, prompt tokens, active prefill tokens, active blocks, cached blocks)``.
        """
        cdef int64_t i
        cdef Load* load
        out = []
        for i in range(self.r.workers):
            load = &self.r.loads[i]
            out.append((load.eligible != 0, load.requests, load.tokens, prefill_tokens(&self.r, load, nanos_of(now)),
                        load.blocks, load.resident))
        return out

    @property
    def queued(self):
        """Number of requests that wait."""
        return self.r.queued

    @property
    def in_flight(self):
        """Number of requests that have a worker."""
        return self.r.in_flight

    @property
    def last_cost(self):
        """Cost of the last choice; NaN if it was drawn, or the kind has no cost."""
        return self.r.last_cost if self.r.kind == ROUTE_KV else NAN

    @property
    def sizes(self):
        """Segments known, places for segments, places of the key table, places for requests."""
        return self.r.table.used, self.r.segments_used, <int64_t>self.r.table.mask + 1, self.r.tickets_used


cdef int64_t clipped(value) except? -2:
    """A count of a policy file as a C integer; NIL for None."""
    return NIL if value is None else min(value, 1 << 62)


cdef int check_worker(RouterCore core, int32_t worker) except -1:
    if not 0 <= worker < core.r.workers:
        raise ValueError(f"worker {worker} does not exist")
    return 0


cdef Path path_of(const uint64_t[::1] keys, const int32_t[::1] ends) except *:
    """A path that borrows its arrays."""
    cdef Path path
    if keys.shape[0] != ends.shape[0]:
        raise ValueError("keys and ends must have the same length")
    memset(&path, 0, sizeof(Path))
    path.n = <int32_t>keys.shape[0]
    if path.n > 0:
        path.keys, path.ends = <uint64_t*>&keys[0], <int32_t*>&ends[0]
    return path
