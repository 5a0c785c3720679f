# cython: language_level=3
"""The block pools below the GPU: which blocks a tier holds, who keeps them, and which one makes room next.

Answers to the pools of kvbm-logical with their lineage order: of the evictable blocks without an evictable descendant
the one that became evictable first goes first. A slot is free, in flight (taken, nothing registered yet), pinned or
inactive.

What makes it small: blocks come, are kept and go in stretches, so they are kept in runs of one segment's consecutive
blocks with the same pins and consecutive ticks. Unlike on the GPU, a block's predecessor need not be there. A block
that was inserted is `linked`: it counts for its predecessor, whether that is there or not, until it is neither
evictable nor has linked successors itself. The successor in the same segment is the next run, if that begins where this
one ends; successors in other segments are counted at the end of a run. An absent block with such a count is a ghost.
A run's number stays with its last block, since that is what other segments and the eviction order refer to.

Costs: a look-up O(runs of the segment before the block), most often none; adding, pinning, unpinning and evicting a
stretch O(runs touched * log runs).
"""
from libc.stdlib cimport free
from libc.string cimport memset

from mocker._common cimport ERR_MEMORY, NIL, grown, grown_both, int32_t, int64_t
from mocker._offload_blocks cimport Parent, catalog_number, span_block, span_of, span_part
from mocker._offload_policy cimport (
    policy_alike, policy_bias, policy_enter, policy_free, policy_gone, policy_most, policy_queue, policy_spares,
    policy_use)


# ---- runs -------------------------------------------------------------------------------------------------------

cdef inline int32_t span_low(Span* s) noexcept nogil:
    return s.at if s.step > 0 else s.at - s.count + 1


cdef int32_t run_more(Tier* t) noexcept nogil:
    """A run that was never used."""
    if not grown_both(<void**>&t.runs, sizeof(Run), <void**>&t.heap_at, sizeof(int32_t), &t.runs_cap, t.runs_used + 1):
        t.error = ERR_MEMORY
        return 0                   # the caller writes into a run that exists; the error ends the run of the engine
    t.runs_used += 1
    return <int32_t>t.runs_used - 1


cdef inline int32_t run_new(Tier* t, Span* s, int32_t pins) noexcept nogil:
    """A run of a span's blocks, in no list yet; ticks are not set."""
    cdef int32_t run = t.free_run
    cdef Run* r
    if run != NIL:
        t.free_run = t.runs[run].down
    else:
        run = run_more(t)
    r = &t.runs[run]
    r.seg, r.start, r.pins = s.seg, span_low(s), pins
    r.end = r.start + s.count
    r.up = r.down = r.parent = t.heap_at[run] = NIL
    r.kids = r.linked = r.uses = r.queue = 0
    r.step, r.tick = -1, 0
    return run


cdef inline int32_t run_from(Tier* t, int32_t seg, int32_t at, int32_t* up) noexcept nogil:
    """The run of a segment that has its block `at`, or the first one after it; NIL if there is neither.

    `up` is the run before.
    """
    cdef int32_t run = t.first[seg] if 0 <= seg < t.first_cap else NIL
    up[0] = NIL
    while run != NIL and t.runs[run].end <= at:
        up[0] = run
        run = t.runs[run].down
    return run


cdef void first_set(Tier* t, int32_t seg, int32_t run) noexcept nogil:
    cdef int64_t cap = t.first_cap
    cdef void* moved
    if seg < 0:                                # the catalog was short of memory
        t.error = ERR_MEMORY
        return
    if seg >= cap:
        moved = grown(t.first, &t.first_cap, seg + 1, sizeof(int32_t))
        if moved == NULL:
            t.error = ERR_MEMORY
            return
        t.first = <int32_t*>moved
        memset(t.first + cap, 0xFF, <size_t>(t.first_cap - cap) * sizeof(int32_t))     # NIL
    t.first[seg] = run


cdef inline void run_enter(Tier* t, int32_t run, int32_t up, int32_t down) noexcept nogil:
    """Put a run between two of its segment."""
    cdef Run* r = &t.runs[run]
    r.up, r.down = up, down
    if down != NIL:
        t.runs[down].up = run
    if up != NIL:
        t.runs[up].down = run
    elif 0 <= r.seg < t.first_cap:
        t.first[r.seg] = run
    else:
        first_set(t, r.seg, run)


cdef void run_leave(Tier* t, int32_t run) noexcept nogil:
    """Take a run out of its segment's list and forget it."""
    cdef Run* r = &t.runs[run]
    if r.down != NIL:
        t.runs[r.down].up = r.up
    if r.up != NIL:
        t.runs[r.up].down = r.down
    elif r.seg >= 0:
        t.first[r.seg] = r.down
    r.down = t.free_run
    t.free_run = run


cdef int32_t run_split(Tier* t, int32_t run, int32_t at) noexcept nogil:
    """Cut a run before block `at`; returns the new run, which is the upper part."""
    cdef Run* r = &t.runs[run]
    cdef Run* h
    cdef Span s = span_of(0, r.seg, r.start, at - r.start, 1)
    cdef int32_t high = run_new(t, &s, r.pins)
    r = &t.runs[run]
    h = &t.runs[high]
    h.tick, h.step, h.linked, h.parent, h.uses, h.queue = r.tick, r.step, r.linked, r.parent, r.uses, r.queue
    r.tick += r.step * (at - r.start)
    r.start, r.parent = at, NIL
    run_enter(t, high, r.up, run)
    return high


cdef inline bint follows(Tier* t, int32_t up, int32_t run) noexcept nogil:
    """Whether a run begins where the one before it in its segment ends."""
    return up != NIL and run != NIL and t.runs[up].end == t.runs[run].start


cdef bint run_join(Tier* t, int32_t up, int32_t run) noexcept nogil:
    """Make one run of two evictable ones of which the second follows the first, if they are alike; the second stays."""
    cdef Run* u = &t.runs[up]
    cdef Run* r = &t.runs[run]
    cdef int64_t step
    if not follows(t, up, run) or u.pins != 0 or r.pins != 0 or u.kids > 0 or u.uses != r.uses or u.queue != r.queue:
        return False
    step = r.tick - u.tick - u.step * (u.end - 1 - u.start)
    if ((step != 1 and step != -1) or (u.end - u.start > 1 and u.step != step)
            or (r.end - r.start > 1 and r.step != step)):
        return False
    r.start, r.tick, r.step, r.parent = u.start, u.tick, <int8_t>step, u.parent
    run_leave(t, up)
    return True


cdef inline int32_t run_within(Tier* t, int32_t run, Span* s) noexcept nogil:
    """Cut a run so that one of its parts has just what it shares with a span; returns that part."""
    cdef int32_t low = span_low(s), high = low + s.count
    if t.runs[run].start < low:
        run_split(t, run, low)
    if t.runs[run].end > high:
        run = run_split(t, run, high)
    return run


# ---- who is evicted next ----------------------------------------------------------------------------------------

cdef inline int64_t last_tick(Tier* t, int32_t run) noexcept nogil:
    cdef Run* r = &t.runs[run]
    return r.tick + r.step * (r.end - 1 - r.start)


cdef inline int64_t leaf_key(Tier* t, int32_t run) noexcept nogil:
    return last_tick(t, run) + (0 if t.policy == EVICT_LRU else policy_bias(t, run))


cdef void sift_up(Tier* t, Heap* h, int64_t i) noexcept nogil:
    cdef Leaf leaf = h.items[i]
    cdef int64_t up
    while i > 0:
        up = (i - 1) >> 1
        if h.items[up].key < leaf.key:
            break
        h.items[i] = h.items[up]
        t.heap_at[h.items[i].run] = <int32_t>i
        i = up
    h.items[i] = leaf
    t.heap_at[leaf.run] = <int32_t>i


cdef void sift_down(Tier* t, Heap* h, int64_t i) noexcept nogil:
    cdef Leaf leaf = h.items[i]
    cdef int64_t down = 2 * i + 1
    while down < h.used:
        if down + 1 < h.used and h.items[down + 1].key < h.items[down].key:
            down += 1
        if h.items[down].key > leaf.key:
            break
        h.items[i] = h.items[down]
        t.heap_at[h.items[i].run] = <int32_t>i
        i = down
        down = 2 * i + 1
    h.items[i] = leaf
    t.heap_at[leaf.run] = <int32_t>i


cdef bint heap_append(Tier* t, Heap* h, int32_t run, int64_t key) noexcept nogil:
    """Put a run behind all others, whose keys are less."""
    cdef void* moved = grown(h.items, &h.cap, h.used + 1, sizeof(Leaf))
    if moved == NULL:
        t.error = ERR_MEMORY
        return False
    h.items = <Leaf*>moved
    h.items[h.used].run, h.items[h.used].key = run, key
    t.heap_at[run] = <int32_t>h.used
    h.used += 1
    return True


cdef void heap_put(Tier* t, int32_t run) noexcept nogil:
    cdef Heap* h = &t.heaps[t.runs[run].queue]
    if heap_append(t, h, run, leaf_key(t, run)):
        sift_up(t, h, h.used - 1)


cdef void heap_take(Tier* t, int32_t run) noexcept nogil:
    cdef int32_t i = t.heap_at[run]
    cdef Heap* h = &t.heaps[t.runs[run].queue]
    if i < 0:
        return
    t.heap_at[run] = NIL
    h.used -= 1
    if i < h.used:
        h.items[i] = h.items[h.used]
        t.heap_at[h.items[i].run] = i
        sift_up(t, h, i)
        sift_down(t, h, t.heap_at[h.items[i].run])


cdef void heap_renew(Tier* t, int32_t run) noexcept nogil:
    """The policy thinks otherwise of a run."""
    if t.heap_at[run] >= 0:
        heap_take(t, run)
        heap_put(t, run)


cdef inline void heap_replace(Tier* t, Heap* h, int32_t run) noexcept nogil:
    """Put a run in the place of the first one."""
    cdef int64_t key = leaf_key(t, run)
    h.items[0].run, h.items[0].key = run, key
    t.heap_at[run] = 0
    if (h.used > 1 and h.items[1].key < key) or (h.used > 2 and h.items[2].key < key):
        sift_down(t, h, 0)


cdef inline bint held(Tier* t, int32_t run) noexcept nogil:
    """Whether something is linked to a run's last block."""
    return t.runs[run].kids > 0 or (follows(t, run, t.runs[run].down) and t.runs[t.runs[run].down].linked)


cdef int32_t unlink(Tier* t, int32_t run) noexcept nogil:
    """A run counts for its predecessor no more; returns that one, NIL if it is not there."""
    cdef Run* r = &t.runs[run]
    cdef int32_t before = NIL
    if not r.linked:
        return NIL
    r.linked = 0
    if r.start > 0:
        return r.up if follows(t, r.up, run) else NIL
    before = r.parent
    r.parent = NIL
    if before != NIL:
        t.runs[before].kids -= 1
    return before


cdef void bare(Tier* t, int32_t run) noexcept nogil:
    """A run may have lost its last link: it is evictable, or counts no more itself; ghosts without links go."""
    while run != NIL:
        if t.runs[run].pins < 0:
            if t.runs[run].kids == 0:
                run_leave(t, run)
            return
        if held(t, run):
            return
        if t.runs[run].pins == 0:
            if t.heap_at[run] == NIL:
                heap_put(t, run)
            return
        run = unlink(t, run)


cdef int32_t run_ending(Tier* t, int32_t seg, int32_t at) noexcept nogil:
    """A run whose last block is block `at` of a segment, a ghost's if it is not there."""
    cdef int32_t run, up, down = run_from(t, seg, at, &up)
    cdef Span s = span_of(0, seg, at, 1, 1)
    if down != NIL and t.runs[down].start <= at:
        return down if t.runs[down].end == at + 1 else run_split(t, down, at + 1)
    run = run_new(t, &s, NIL)
    run_enter(t, run, up, down)
    return run


cdef void follow(Tier* t, int32_t run) noexcept nogil:
    """A run that is the first one of its segment counts for what the segment follows."""
    cdef Parent* parent = &t.catalog.parents[t.runs[run].seg]
    cdef int32_t before
    if parent.seg == NIL:
        return
    before = run_ending(t, parent.seg, parent.at)
    t.runs[before].kids += 1
    t.runs[run].parent = before
    if t.heap_at[before] >= 0:
        heap_take(t, before)


cdef void insert(Tier* t, int32_t run) noexcept nogil:
    """A run's blocks have lost their pins, or have just come; ticks are set. They may be evicted, as the newest."""
    cdef int32_t after
    cdef Run* r = &t.runs[run]
    t.inactive += r.end - r.start
    if r.queue == 0:
        t.small += r.end - r.start
    if not r.linked:
        r.linked = 1
        if r.start == 0:
            follow(t, run)
        elif follows(t, r.up, run):
            heap_take(t, r.up)
    after = t.runs[run].down
    if not held(t, run):
        heap_put(t, run)
    elif run_join(t, run, after):
        run = after
    run_join(t, t.runs[run].up, run)


# ---- the tier ---------------------------------------------------------------------------------------------------

cdef void tier_init(Tier* t, int64_t capacity, Catalog* catalog, bint log) noexcept nogil:
    """An empty tier in zeroed memory."""
    t.capacity = t.free = capacity
    t.catalog = catalog
    t.log = log
    t.free_run = NIL
    t.next_tick = 1


cdef void tier_free(Tier* t) noexcept nogil:
    free(t.runs)
    free(t.heap_at)
    free(t.first)
    free(t.heaps[0].items)
    free(t.heaps[1].items)
    policy_free(t)
    free(t.changes)


cdef inline void note(Tier* t, Span* s, bint came) noexcept nogil:
    if t.log:
        note_all(t, s, came)


cdef void note_all(Tier* t, Span* s, bint came) noexcept nogil:
    cdef void* moved
    cdef int32_t i
    cdef Block b
    moved = grown(t.changes, &t.changes_cap, t.changes_used + s.count, sizeof(Block))
    if moved == NULL:
        t.error = ERR_MEMORY
        return
    t.changes = <Block*>moved
    for i in range(s.count):
        b = span_block(s, i)
        if not came:
            b.at = ~b.at
        t.changes[t.changes_used] = b
        t.changes_used += 1


cdef int32_t tier_look(Tier* t, Span* s, bint* there) noexcept nogil:
    """Blocks from the first one of a span on that are all there, or all not."""
    cdef int32_t up, run = run_from(t, s.seg, s.at, &up), n
    cdef Run* r
    there[0] = run != NIL and t.runs[run].start <= s.at and t.runs[run].pins >= 0
    if there[0]:
        r = &t.runs[run]
        n = r.end - s.at if s.step > 0 else s.at - r.start + 1
    elif s.step > 0:
        n = s.count
        while run != NIL and t.runs[run].pins < 0:
            run = t.runs[run].down
        if run != NIL:
            n = t.runs[run].start - s.at
    else:
        while up != NIL and t.runs[up].pins < 0:
            up = t.runs[up].up
        n = s.at - t.runs[up].end + 1 if up != NIL else s.count
    return n if n < s.count else s.count


cdef bint tier_has(Tier* t, Block b) noexcept nogil:
    cdef int32_t up, run = run_from(t, catalog_number(t.catalog, b.key), b.at, &up)
    return run != NIL and t.runs[run].start <= b.at and t.runs[run].pins >= 0


cdef int64_t tier_idle(Tier* t, Span* s) noexcept nogil:
    """Blocks of a span, which are all there, that nothing keeps."""
    cdef int32_t low = span_low(s), high = low + s.count, up, run = run_from(t, s.seg, low, &up)
    cdef int64_t n = 0
    while run != NIL and t.runs[run].start < high:
        if t.runs[run].pins == 0:
            n += min(t.runs[run].end, high) - max(t.runs[run].start, low)
        run = t.runs[run].down
    return n


cdef int64_t tier_room(Tier* t) noexcept nogil:
    """Slots that may still be promised."""
    return t.free + t.inactive - t.reserved


cdef bint tier_take(Tier* t, int64_t count) noexcept nogil:
    """Take slots, by eviction if need be; all or nothing."""
    cdef int64_t rest = count - min(count, t.free)
    if rest > t.inactive:
        return False
    t.free -= count - rest
    if rest > 0:
        t.evictions += rest
        t.inactive -= rest
        make_room(t, rest)
    t.peak = max(t.peak, t.capacity - t.free)
    return True


cdef inline int64_t in_turn(Heap* h, Run* r, int64_t n) noexcept nogil:
    """Of the next `n` blocks of the first run so many go until another run's turn comes."""
    if n > 1 and r.step < 0:
        if h.used > 1:
            n = min(n, h.items[1].key - h.items[0].key)
        if h.used > 2:
            n = min(n, h.items[2].key - h.items[0].key)
    return n


cdef inline void cut(Heap* h, Run* r, int64_t n) noexcept nogil:
    """Blocks go from the end of the first run, which stays the first one: keys differ, and `in_turn` saw to it."""
    r.end -= <int32_t>n
    h.items[0].key -= n * r.step


cdef inline void gone(Tier* t, Heap* h, int32_t run) noexcept nogil:
    """The first run has no blocks any more."""
    cdef int32_t before = unlink(t, run)
    run_leave(t, run)
    if (before != NIL and t.runs[before].pins == 0 and not held(t, before)
            and t.runs[before].queue == t.runs[run].queue):
        heap_replace(t, h, before)             # which may well be the next one
        return
    heap_take(t, run)
    bare(t, before)


cdef void make_room(Tier* t, int64_t rest) noexcept nogil:
    """Evict so many blocks; there are as many."""
    cdef Heap* h = &t.heaps[0]
    cdef int64_t n
    cdef int32_t run
    cdef Run* r
    cdef Span part
    cdef bint queues = t.policy == EVICT_S3FIFO
    if not queues:
        t.small -= rest
    while rest > 0:
        if queues:
            h = &t.heaps[policy_queue(t)]
            if policy_spares(t, h.items[0].run):
                continue
        run = h.items[0].run
        r = &t.runs[run]
        n = in_turn(h, r, min(rest, r.end - r.start))
        if queues and n > 1:
            n = policy_most(t, n)
        if queues or t.log:
            part = span_of(t.catalog.items[r.seg].key, r.seg, r.end - 1, <int32_t>n, -1)
            note(t, &part, False)
            if queues and r.queue == 0:
                t.small -= n
                policy_gone(t, &part)
        rest -= n
        if n < r.end - r.start:
            cut(h, r, n)
        else:
            gone(t, h, run)


cdef int32_t arrive(Tier* t, Span* s, int32_t pins, bint* fresh) noexcept nogil:
    """The run of a span's first blocks, cut to fit: theirs if they are there, else a new one with `pins`."""
    cdef int32_t up, run = run_from(t, s.seg, s.at, &up), n
    cdef Span part
    cdef Span few
    if t.policy == EVICT_S3FIFO:
        few = span_part(s, 0, policy_alike(t, s))
        s = &few
    fresh[0] = run == NIL or t.runs[run].start > s.at or t.runs[run].pins < 0
    if not fresh[0]:
        return run_within(t, run, s)
    if run != NIL and t.runs[run].start <= s.at:         # a ghost comes to life
        t.runs[run].pins = pins
        if t.policy == EVICT_S3FIFO:
            part = span_part(s, 0, 1)
            policy_enter(t, run, &part)
        return run
    n = s.count
    if s.step > 0 and run != NIL:
        n = min(n, t.runs[run].start - s.at)
    elif s.step < 0 and up != NIL:
        n = min(n, s.at - t.runs[up].end + 1)
    part = span_part(s, 0, n)
    n = run_new(t, &part, pins)
    run_enter(t, n, up, run)
    if t.policy == EVICT_S3FIFO:
        policy_enter(t, n, &part)
    return n


cdef inline void advance(Span* s, int32_t n) noexcept nogil:
    s.at += s.step * n
    s.count -= n


cdef void set_ticks(Tier* t, int32_t run, int32_t step) noexcept nogil:
    """Number a run's blocks as the newest ones, in the order of a span."""
    cdef Run* r = &t.runs[run]
    cdef int32_t n = r.end - r.start
    r.step = <int8_t>step
    r.tick = t.next_tick if step > 0 else t.next_tick + n - 1
    t.next_tick += n


cdef void tier_register(Tier* t, Span* s) noexcept nogil:
    """Blocks arrived in taken slots; they come with a pin. Slots of those that were there already are free again."""
    cdef Span left = s[0], part
    cdef int32_t run, n
    cdef bint fresh
    while left.count > 0:
        run = arrive(t, &left, 1, &fresh)
        n = t.runs[run].end - t.runs[run].start
        part = span_part(&left, 0, n)
        advance(&left, n)
        if fresh:
            t.pinned += n
            note(t, &part, True)
        else:
            t.free += n
            tier_pin(t, &part)


cdef bint added(Tier* t, Span* s) noexcept nogil:
    """`tier_add` by age alone of blocks none of which is there, but for a ghost of the last; false: another case."""
    cdef int32_t up, down = run_from(t, s.seg, s.at, &up), n = s.count, low = span_low(s), run
    cdef Run* r
    cdef bint below = False
    cdef Heap* h = &t.heaps[0]
    if up != NIL and t.runs[up].end > low:
        return False
    if down != NIL:
        r = &t.runs[down]
        if r.start < low + n:
            if r.pins >= 0 or s.step > 0 or r.end != low + n:
                return False
            r.start, r.pins, r.linked = low, 0, 1      # a ghost comes to life, with the blocks before
            r.tick = t.next_tick + n - 1
            run_counts(t, down, up, n)
            return True
        below = r.start == low + n and r.linked
        if (below and r.tick == t.next_tick - 1 and r.pins == 0 and (r.step < 0 or r.end - r.start == 1)
                and (s.step < 0 or n == 1)):   # it grows upwards
            r.start, r.step = low, -1
            r.tick += n
            run = down
            run_counts(t, run, up, n)
            return True
    run = run_new(t, s, 0)
    r = &t.runs[run]
    r.linked, r.step = 1, <int8_t>s.step
    r.tick = t.next_tick if s.step > 0 else t.next_tick + n - 1
    run_enter(t, run, up, down)
    if not below:                              # ticks in the heap are older
        heap_append(t, h, run, t.next_tick if s.step < 0 else t.next_tick + n - 1)
    run_counts(t, run, up, n)
    if (n == 1 or s.step > 0) and follows(t, up, run):
        run_join(t, up, run)
    return True


cdef inline void run_counts(Tier* t, int32_t run, int32_t up, int32_t n) noexcept nogil:
    """The first `n` blocks of a run have just come to count for the block before."""
    t.next_tick += n
    t.inactive += n
    t.small += n
    if t.runs[run].start == 0:
        follow(t, run)
    elif follows(t, up, run) and t.heap_at[up] >= 0:
        heap_take(t, up)


cdef void tier_add(Tier* t, Span* s) noexcept nogil:
    """`tier_register` and `tier_unpin` in one."""
    cdef Span left = s[0], part
    cdef int32_t run, n
    cdef bint fresh
    if t.policy == EVICT_LRU and added(t, s):
        note(t, s, True)
        return
    while left.count > 0:
        run = arrive(t, &left, 0, &fresh)
        n = t.runs[run].end - t.runs[run].start
        part = span_part(&left, 0, n)
        advance(&left, n)
        if fresh:
            note(t, &part, True)
        else:
            t.free += n
            if t.runs[run].pins > 0:
                continue
            heap_take(t, run)                  # they are the newest again
            t.inactive -= n
            if t.runs[run].queue == 0:
                t.small -= n
        if fresh or t.policy != EVICT_S3FIFO:  # else it keeps its place
            set_ticks(t, run, s.step)
        insert(t, run)


cdef void tier_pin(Tier* t, Span* s) noexcept nogil:
    """Keep blocks, which are all there."""
    cdef int32_t low = span_low(s), high = low + s.count, n, up, run = run_from(t, s.seg, low, &up)
    while low < high:
        run = run_within(t, run, s)
        n = t.runs[run].end - t.runs[run].start
        low = t.runs[run].end
        t.runs[run].pins += 1
        if t.runs[run].pins == 1:
            t.pinned += n
            t.inactive -= n
            if t.runs[run].queue == 0:
                t.small -= n
            heap_take(t, run)
            bare(t, run)
        run = t.runs[run].down


cdef void tier_unpin(Tier* t, Span* s) noexcept nogil:
    unpin(t, s, False)


cdef void tier_return(Tier* t, Span* s) noexcept nogil:
    """`tier_unpin` after blocks have come up."""
    unpin(t, s, t.policy != EVICT_LRU)


cdef void unpin(Tier* t, Span* s, bint used) noexcept nogil:
    cdef Span left = s[0]
    cdef int32_t run, up, n
    while left.count > 0:
        run = run_within(t, run_from(t, left.seg, left.at, &up), &left)
        n = t.runs[run].end - t.runs[run].start
        advance(&left, n)
        if used:
            policy_use(t, run)
        t.runs[run].pins -= 1
        if t.runs[run].pins == 0:
            t.pinned -= n
            if t.policy != EVICT_S3FIFO or t.runs[run].tick <= 0:
                set_ticks(t, run, s.step)      # else it keeps its place
            insert(t, run)
