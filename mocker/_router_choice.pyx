# cython: language_level=3
"""The router's choice: what a request costs on each worker, every kind of choosing, and who may be chosen.

Answers to `scheduling/selector.rs` of dynamo-kv-router 1.3.0 (`DefaultWorkerSelector`, `softmax_sample_with_sample`)
for the kind "kv". The cost is summed in the reference's order, since rounding decides ties.

Costs: a choice O(workers to compare). These are the workers that have a block of the request, and log(workers) more
while the cost of a cold worker is exact (see `tree_exact`), else all. A worker's new load costs log(workers) while
there is a tree, a worker that comes or goes O(workers).
"""
from libc.math cimport INFINITY, NAN, ceil, exp
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from mocker._common cimport NIL, grown, int32_t, int64_t, uint64_t
from mocker._router cimport (
    ROUTE_KV, ROUTE_LEAST_REQUESTS, ROUTE_LEAST_TOKENS, ROUTE_PREFIX, ROUTE_RANDOM, ROUTE_ROUND_ROBIN,
    ROUTE_TWO_CHOICES, ROUTER_CHOICE, ROUTER_MEMORY, Ask, Load, Node, Router)
from mocker._router_loads cimport nanos_of, prefill_tokens
from mocker._router_tiers cimport lower_cached, lower_room
from mocker._spec cimport rng_u64


# ---- costs ------------------------------------------------------------------------------------------------------

cdef inline uint64_t below(Router* r, uint64_t n) noexcept nogil:
    """A uniform number under `n` (n < 2**32)."""
    return ((rng_u64(&r.rng) >> 32) * n) >> 32


cdef inline double cost_with(Router* r, int64_t tokens, int64_t blocks, int64_t overlap, int64_t cached, double host,
                             double disk, int64_t isl, int64_t floor_tokens) noexcept nogil:
    """Cost of one worker; the order of the operations decides ties.

    Rule: `DefaultWorkerSelector::worker_logit`. `tokens`: active prefill tokens; `blocks`: active blocks with the
    request's own; `cached`: prompt tokens that need not be computed; `host`, `disk`: what blocks below the GPU take
    off; `floor_tokens`: fewest active prefill tokens of any eligible worker.
    """
    cdef double size = <double>r.block_size, credit = r.credit, left, excess
    cdef int64_t raw = 0
    if r.track_prefill:
        raw = tokens + (isl - cached if isl > cached else 0) + cached
        if r.credit_decay > 0.0:
            excess = <double>(tokens - floor_tokens) / size
            excess /= <double>((isl + r.block_size - 1) // r.block_size)
            credit = r.credit * (1.0 / (1.0 + r.credit_decay * excess))
    left = <double>raw / size - (credit * <double>overlap + host + disk)
    return r.prefill_scale * (left if left > 0.0 else 0.0) + <double>blocks


cdef inline double cost_of(Router* r, int64_t tokens, int64_t blocks, int64_t overlap, int64_t isl,
                           int64_t floor_tokens) noexcept nogil:
    """Cost of one worker where only blocks on the GPU count."""
    return cost_with(r, tokens, blocks, overlap, overlap * r.block_size, 0.0, 0.0, isl, floor_tokens)


cdef void fill_costs(Router* r, int64_t isl, int64_t blocks, int64_t now) noexcept nogil:
    """Cost of every eligible worker for a request of `blocks` prompt blocks (0 if they are not tracked)."""
    cdef int32_t i, w
    cdef int64_t tokens, lowest = 0
    if r.track_prefill and r.credit_decay > 0.0:
        for i in range(r.n_eligible):
            tokens = prefill_tokens(r, &r.loads[r.eligible[i]], now)
            if i == 0 or tokens < lowest:
                lowest = tokens
    if r.lower != NULL:
        for i in range(r.n_eligible):
            w = r.eligible[i]
            tokens = prefill_tokens(r, &r.loads[w], now)
            r.cost[i] = cost_with(r, tokens, r.loads[w].blocks + (blocks - r.shared[w]), r.overlap[w],
                                  lower_cached(r, w), r.lower.host_weight * <double>r.lower.host[w],
                                  r.lower.disk_weight * <double>r.lower.disk[w], isl, lowest)
        return
    for i in range(r.n_eligible):
        w = r.eligible[i]
        tokens = prefill_tokens(r, &r.loads[w], now)
        r.cost[i] = cost_of(r, tokens, r.loads[w].blocks + (blocks - r.shared[w]), r.overlap[w], isl, lowest)


cdef int32_t cheapest(Router* r) noexcept nogil:
    """Position of the lowest cost; among equals the first, or a random one."""
    cdef int32_t i, best = 0
    cdef uint64_t ties = 1
    for i in range(1, r.n_eligible):
        if r.cost[i] < r.cost[best]:
            best = i
            ties = 1
        elif r.cost[i] == r.cost[best]:
            ties += 1
    if ties == 1 or not r.random_ties:
        return best
    ties = below(r, ties)
    i = best
    while True:
        if r.cost[i] == r.cost[best]:
            if ties == 0:
                return i
            ties -= 1
        i += 1


# ---- tree of base costs -----------------------------------------------------------------------------------------

cdef inline void tree_join(Router* r, int32_t node) noexcept nogil:
    cdef Node* left = &r.tree[2 * node]
    cdef Node* right = left + 1
    r.tree[node] = left[0] if left.key <= right.key else right[0]
    if left.key == right.key:
        r.tree[node].count += right.count


cdef inline double base_cost(Router* r, int32_t worker) noexcept nogil:
    """What a worker's load adds to the cost of any request that has no block there."""
    return r.prefill_scale * (<double>r.loads[worker].prefill / <double>r.block_size) + <double>r.loads[worker].blocks


cdef void tree_build(Router* r) noexcept nogil:
    """The tree of base costs, for many workers and costs that allow it; else none."""
    cdef int32_t i, leaves = 1
    free(r.tree)
    r.tree = NULL
    if not r.tree_exact or r.n_eligible < r.tree_from or r.n_eligible == 0:
        return
    while leaves < r.n_eligible:
        leaves *= 2
    r.tree = <Node*>malloc(2 * <size_t>leaves * sizeof(Node))
    if r.tree == NULL:                                 # all workers are compared, then
        return
    r.leaves = leaves
    for i in range(leaves):
        r.tree[leaves + i].key = base_cost(r, r.eligible[i]) if i < r.n_eligible else INFINITY
        r.tree[leaves + i].count = i < r.n_eligible
    for i in range(leaves - 1, 0, -1):
        tree_join(r, i)


cdef void load_changed(Router* r, int32_t worker) noexcept nogil:
    """Carry a worker's new load into the tree."""
    cdef int32_t node
    if r.tree == NULL or r.position[worker] == NIL:
        return
    node = r.leaves + r.position[worker]
    r.tree[node].key = base_cost(r, worker)
    while node > 1:
        node >>= 1
        tree_join(r, node)


cdef int32_t tree_nth(Router* r, int64_t n) noexcept nogil:
    """Position of the n-th worker of lowest base cost."""
    cdef int32_t node = 1
    while node < r.leaves:
        node *= 2
        if r.tree[node].key == r.tree[1].key:
            if n < r.tree[node].count:
                continue
            n -= r.tree[node].count
        node += 1
    return node - r.leaves


cdef int64_t tree_rank(Router* r, int32_t position) noexcept nogil:
    """Workers of lowest base cost before a position."""
    cdef int32_t node = r.leaves + position
    cdef int64_t n = 0
    while node > 1:
        if node & 1 and r.tree[node - 1].key == r.tree[1].key:
            n += r.tree[node - 1].count
        node >>= 1
    return n


cdef int32_t cheapest_by_tree(Router* r, int64_t isl, int64_t blocks) noexcept nogil:
    """What `fill_costs` and `cheapest` give, from the warm workers and the tree.

    A warm worker costs at most what it would cost cold, so the tree need not leave it out: if it is among the lowest
    there, its own cost is lower still or the same.
    """
    cdef int32_t i, k, w, n = 0, at = tree_nth(r, 0)
    cdef double cold, lowest
    cdef Load* load = &r.loads[r.eligible[at]]
    cdef uint64_t cold_ties, draw
    cold = lowest = cost_of(r, load.prefill, load.blocks + blocks, 0, isl, 0)
    for i in range(r.n_warm):
        w = r.warm[i]
        if r.position[w] != NIL:
            load = &r.loads[w]
            r.cost[i] = cost_of(r, load.prefill, load.blocks + (blocks - r.shared[w]), r.overlap[w], isl, 0)
            if r.cost[i] < lowest:
                lowest = r.cost[i]
    cold_ties = r.tree[1].count if cold == lowest else 0
    for i in range(r.n_warm):                          # warm ones that the tree does not give, in order
        w = r.position[r.warm[i]]
        if w == NIL or r.cost[i] != lowest or (cold_ties > 0 and r.tree[r.leaves + w].key == r.tree[1].key):
            continue
        k = n
        while k > 0 and r.scratch[k - 1] > w:
            r.scratch[k] = r.scratch[k - 1]
            k -= 1
        r.scratch[k] = w
        n += 1
    r.last_cost = lowest
    draw = below(r, cold_ties + n) if r.random_ties and cold_ties + n > 1 else 0
    for i in range(n):
        cold_ties = tree_rank(r, r.scratch[i]) if cold == lowest else 0
        if cold_ties + i == draw:
            return r.scratch[i]
        if cold_ties + i > draw:
            return tree_nth(r, draw - i)
    return tree_nth(r, draw - n)


# ---- choice -----------------------------------------------------------------------------------------------------

cdef int32_t sampled(Router* r) noexcept nogil:
    """Position drawn with weights exp(-(cost - lowest) / ((highest - lowest) * temperature)).

    Rule: `softmax_sample_with_sample`, over workers in order.
    """
    cdef int32_t i, n = r.n_eligible
    cdef double low = r.cost[0], high = r.cost[0], scale, shift, total = 0.0, sum = 0.0
    cdef double draw = <double>(rng_u64(&r.rng) >> 11) * (1.0 / 9007199254740992.0)
    for i in range(1, n):
        if r.cost[i] < low:
            low = r.cost[i]
        if r.cost[i] > high:
            high = r.cost[i]
    scale = -1.0 / ((high - low) * r.temperature) if low != high else 0.0
    shift = low * scale
    for i in range(n):
        r.cost[i] = exp(r.cost[i] * scale - shift) if low != high else 1.0 / <double>n
        total += r.cost[i]
    for i in range(n):
        sum += r.cost[i] / total
        if draw <= sum:
            return i
    return n - 1


cdef inline uint64_t mixed(uint64_t x) noexcept nogil:
    """A well-spread 64-bit function of x (the finaliser of splitmix64)."""
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)


cdef int32_t by_prefix(Router* r, const uint64_t* keys, const int32_t* ends, int32_t n, int64_t row) noexcept nogil:
    """Position of the highest hash of (first blocks, worker) among workers under the load bound."""
    cdef int32_t i, best = NIL, begin = 0
    cdef int64_t most = -1
    cdef uint64_t prefix = mixed(<uint64_t>row + <uint64_t>0x9E3779B97F4A7C15), hash, highest = 0
    for i in range(n):                                 # the block that ends the prefix names it
        if ends[i] >= r.prefix_blocks or i == n - 1:
            prefix = mixed(keys[i] + <uint64_t>0x9E3779B97F4A7C15 * <uint64_t>(
                (ends[i] if ends[i] < r.prefix_blocks else r.prefix_blocks) - begin))
            break
        begin = ends[i]
    if r.prefix_bound > 0.0:
        most = <int64_t>ceil(r.prefix_bound * <double>(r.in_flight + 1) / <double>r.n_eligible)
    for i in range(r.n_eligible):
        if most >= 0 and r.loads[r.eligible[i]].requests >= most:
            continue
        hash = mixed(prefix ^ mixed(<uint64_t>r.eligible[i] + 1))
        if best == NIL or hash > highest:
            best, highest = i, hash
    return best if best != NIL else 0


cdef int32_t select(Router* r, int64_t row, int64_t isl, int64_t blocks, const uint64_t* keys, const int32_t* ends,
                    int32_t n, double now) noexcept nogil:
    """The worker for a request; NIL if a user's function names none. There is an eligible worker."""
    cdef int32_t i, at = 0, other, choice
    cdef Ask ask
    if r.kind == ROUTE_KV and r.tree != NULL and 4 * r.n_warm <= r.n_eligible:
        at = cheapest_by_tree(r, isl, blocks)
    elif r.kind == ROUTE_KV:
        fill_costs(r, isl, blocks, nanos_of(now) if r.estimate != NULL else 0)
        if r.temperature == 0.0:
            at = cheapest(r)
            r.last_cost = r.cost[at]
        else:
            at = sampled(r)
            r.last_cost = NAN
    elif r.kind == ROUTE_ROUND_ROBIN:
        at = <int32_t>(r.turn % r.n_eligible)
        r.turn = at + 1
    elif r.kind == ROUTE_LEAST_REQUESTS or r.kind == ROUTE_LEAST_TOKENS:
        for i in range(r.n_eligible):
            r.cost[i] = <double>(r.loads[r.eligible[i]].requests if r.kind == ROUTE_LEAST_REQUESTS
                                 else r.loads[r.eligible[i]].tokens)
        at = cheapest(r)
    elif r.kind == ROUTE_TWO_CHOICES:
        at = <int32_t>below(r, r.n_eligible)
        if r.n_eligible > 1:
            other = <int32_t>below(r, r.n_eligible - 1)
            if other >= at:
                other += 1
            if r.loads[r.eligible[other]].requests < r.loads[r.eligible[at]].requests:
                at = other
    elif r.kind == ROUTE_PREFIX:
        at = by_prefix(r, keys, ends, n, row)
    elif r.kind == ROUTE_RANDOM:
        at = <int32_t>below(r, r.n_eligible)
    else:
        ask.row, ask.isl, ask.now, ask.n = row, isl, now, r.n_eligible
        ask.workers, ask.overlap, ask.loads = r.eligible, r.overlap, r.loads
        choice = r.choose(r.choose_context, &ask)
        if choice < 0 or choice >= r.workers or not r.loads[choice].eligible:
            r.error = ROUTER_CHOICE
            return NIL
        return choice
    return r.eligible[at]


# ---- workers ----------------------------------------------------------------------------------------------------

cdef void reorder(Router* r) noexcept nogil:
    """The list of eligible workers has changed."""
    cdef int32_t i
    for i in range(r.n_eligible):
        r.position[r.eligible[i]] = i
    tree_build(r)


cdef bint router_add_worker(Router* r, int32_t worker, int64_t order) noexcept nogil:
    """A worker may be chosen from now on; False if it may already, or memory is short.

    What is known of it from before, as long as it was not finalised, still holds.
    """
    cdef int64_t need = worker + 1, cap
    cdef int32_t i
    cdef Load* load
    cdef void* moved
    if need > r.workers_cap:
        cap = r.workers_cap
        moved = grown(r.loads, &cap, need, sizeof(Load))
        if moved != NULL:
            r.loads = <Load*>moved
            moved = realloc(r.eligible, cap * sizeof(int32_t))
        if moved != NULL:
            r.eligible = <int32_t*>moved
            moved = realloc(r.overlap, cap * sizeof(int32_t))
        if moved != NULL:
            r.overlap = <int32_t*>moved
            moved = realloc(r.shared, cap * sizeof(int32_t))
        if moved != NULL:
            r.shared = <int32_t*>moved
            moved = realloc(r.warm, cap * sizeof(int32_t))
        if moved != NULL:
            r.warm = <int32_t*>moved
            moved = realloc(r.position, cap * sizeof(int32_t))
        if moved != NULL:
            r.position = <int32_t*>moved
            moved = realloc(r.scratch, cap * sizeof(int32_t))
        if moved != NULL:
            r.scratch = <int32_t*>moved
            moved = realloc(r.cost, cap * sizeof(double))
        if moved == NULL:
            r.error = ROUTER_MEMORY
            return False
        r.cost = <double*>moved
        if r.lower != NULL and not lower_room(r.lower, cap):
            r.error = ROUTER_MEMORY
            return False
        r.workers_cap = cap
    while r.workers < need:
        load = &r.loads[r.workers]
        memset(load, 0, sizeof(Load))
        load.first = load.last = NIL
        r.overlap[r.workers] = r.shared[r.workers] = 0
        r.position[r.workers] = NIL
        r.workers += 1
    load = &r.loads[worker]
    if load.eligible:
        return False
    load.eligible, load.order = 1, order
    i = r.n_eligible
    while i > 0 and r.loads[r.eligible[i - 1]].order > order:
        r.eligible[i] = r.eligible[i - 1]
        i -= 1
    r.eligible[i] = worker
    r.n_eligible += 1
    reorder(r)
    return True


cdef bint router_remove_worker(Router* r, int32_t worker) noexcept nogil:
    """A worker may not be chosen any more; its requests and blocks stay known. False if it might not before."""
    cdef int32_t i, at = 0
    if worker < 0 or worker >= r.workers or not r.loads[worker].eligible:
        return False
    r.loads[worker].eligible = 0
    for i in range(r.n_eligible):
        if r.eligible[i] != worker:
            r.eligible[at] = r.eligible[i]
            at += 1
    r.n_eligible = at
    r.position[worker] = NIL
    reorder(r)
    return True
