# cython: language_level=3
"""Passes of a worker with tiers in which running requests only decode, many at a time.

`core_forward` stops where a request needs a block. Under offload that is one more pass at least, since who needs a
block waits for a copy, and where a prompt's blocks wait for theirs everybody else decodes on. Here passes go on through
all of that: only who opens a block, or was refused one in the pass before, has anything to do in a pass; the others are
brought up to date when it is over. Whoever runs behind a request that waits for a copy is not scheduled, as in a pass.

It leaves to `core_pass` whatever else may happen: prompts, admissions, endings, preemptions, the end of a promotion.
Where it sees that only after the tiers have been looked at, that pass does not look again (`Offload.looked`).

Costs: O(running requests) to begin and to end, and for a pass in which somebody opens a block or is refused one, beside
the pool's operations; O(1) for all passes between.
"""
from libc.math cimport INFINITY
from libc.stdint cimport INT64_MAX
from libc.string cimport memcpy

from mocker._calendar cimport usual
from mocker._collect cimport gaps_add
from mocker._common cimport ERR_MEMORY, NIL, POLICY_TRTLLM, WORKER_PREFILL, grown, int32_t, int64_t
from mocker._core cimport STOP_WAIT, Core, Request
from mocker._kv cimport pool_reserve
from mocker._offload cimport Going, Offload, clock_set, granted, must_wait, offload_due, offload_stirs, soon
from mocker._offload_pass cimport tiers_begin, tiers_deny
from mocker._requests cimport waiting_next
from mocker._timing cimport timing_step_ms, timing_varies
from mocker._tokens cimport collect_token, promote

cdef enum:
    PLACE_BITS = 20                # of a place in the order of admission
    PLACES = 0xFFFFF
    FEW = 3                        # requests that are looked for one by one
    CROWD = 32                     # running requests that are not looked through in vain time and again,
    PAUSE = 7                      # but only after so many passes, while that brings less than two

cdef int64_t EXPONENT = 0x7FF << 52        # bits of a double

cdef enum Hold:                    # why nobody is admitted
    HOLD_NONE = 0                  # somebody may be
    HOLD_EMPTY = 1                 # nobody waits
    HOLD_SEQS = 2                  # as many run as may
    HOLD_ROOM = 3                  # the head of the queue does not fit
    HOLD_LEASE = 4                 # it waits for a copy


cdef struct Stretch:
    int64_t passes                 # taken so far
    int64_t places                 # running requests that are scheduled: all, or those before one that must wait
    int64_t moving                 # of them that may make a token; they are the first ones
    int64_t ready                  # batch of a pass: those, and others that wait for a block
    int64_t total                  # known tokens of the batch
    int64_t next                   # number of the pass in which the next block is wanted
    int64_t who                    # the first who wants one then: place in the order of admission
    int64_t after                  # pass and place of who comes after that one, in one number; 0: not known
    int64_t refused                # requests that were refused a block in the last pass, and the last of them
    int64_t denied
    int64_t stop                   # number of the first pass in which somebody could end
    int64_t waiting                # requests that wait for copies: who comes after the first of them is not scheduled
    double first                   # how long the first pass took, ms


cdef Hold held(Core* c) noexcept nogil:
    """Why the next pass would admit nobody, before time passes below."""
    cdef int32_t slot
    if c.n_waiting == 0:
        return HOLD_EMPTY
    if c.n_running >= c.max_seqs:
        return HOLD_SEQS
    if c.n_pending > 0 or c.admission.score.ask != NULL or c.policy == POLICY_TRTLLM:
        return HOLD_NONE
    slot = waiting_next(c)
    if slot == NIL:
        return HOLD_NONE
    if must_wait(c, slot):
        return HOLD_LEASE
    return HOLD_ROOM if c.reason == STOP_WAIT and not c.preempted else HOLD_NONE


cdef bint still_held(Core* c, Hold why) noexcept nogil:
    """Whether that is so now that blocks have come or gone: fewer held ones are what the head may be waiting for."""
    if why == HOLD_ROOM:
        return c.pool.active >= c.seen_used
    return why != HOLD_LEASE or must_wait(c, waiting_next(c))


cdef inline void find_next(Offload* o, Stretch* s) noexcept nogil:
    """Who wants a block next, of several at once the first, and who after that one."""
    cdef int64_t i, key, other, best = INT64_MAX, after = INT64_MAX
    for i in range(s.places):
        key = (o.places[i].wants << PLACE_BITS) | i
        other = key if key > best else best
        best = key if key < best else best
        after = other if other < after else after
    s.next, s.who, s.after = best >> PLACE_BITS, best & PLACES, after


cdef inline void find_after(Offload* o, Stretch* s) noexcept nogil:
    """`find_next` when only who was the next one wants another pass than before."""
    cdef int64_t wants = o.places[s.who].wants
    if ((wants << PLACE_BITS) | s.who) < s.after:
        s.next = wants
    else:
        find_next(o, s)


cdef bint survey(Core* c, Stretch* s) noexcept nogil:
    """Find out who does what in the next pass; false if that is more than to decode, or to wait."""
    cdef Offload* o = <Offload*>c.tiers
    cdef int64_t i, steps, last, key, best = INT64_MAX
    cdef Request* r
    cdef void* moved = grown(o.places, &o.places_cap, c.n_running, sizeof(Going))
    if moved == NULL:
        o.error = ERR_MEMORY
        return False
    o.places = <Going*>moved
    s.total, s.refused, s.waiting, s.stop = 0, 0, 0, INT64_MAX
    s.places = c.n_running
    for i in range(c.n_running):
        r = &c.req[c.running[i]]
        last = r.limit - r.gen - 1             # tokens before its last one
        if usual(c, r):
            if last < 0:
                return False
            steps = (-r.len) & c.mask          # tokens before the one that needs a block
            if r.last_ms != c.last_emit:
                steps = 0                      # its gap is longer than that of the others
        elif must_wait(c, c.running[i]):
            s.places = i
            break
        elif r.computed < r.len or r.gen == 0 or last < 0 or r.len & c.mask or r.alloc < r.len:
            return False
        else:
            steps = 0                          # it was refused a block, and nothing more
        o.places[i].base, o.places[i].wants = s.passes, s.passes + steps
        key = ((s.passes + steps) << PLACE_BITS) | i
        best = key if key < best else best
        s.stop = min(s.stop, s.passes + last)
        s.total += r.len
    s.moving = s.ready = s.places
    s.next, s.who, s.after = best >> PLACE_BITS, best & PLACES, 0
    if s.places == c.n_running:
        return s.moving > 0
    o.places[s.places].wants = s.places        # who is waited for, and who asks for a token all the same
    s.waiting = 1
    for i in range(s.places, c.n_running):     # they are not scheduled
        r = &c.req[c.running[i]]
        if r.computed < r.len:
            continue
        if r.gen >= r.limit or r.len & c.mask or not must_wait(c, c.running[i]):
            return False
        s.ready += 1
        s.total += r.len
        if i > s.places:
            o.places[s.places + s.waiting].wants = i
            s.waiting += 1
    return s.moving > 0


cdef bint stalled(Core* c, Stretch* s) noexcept nogil:
    """Whether all that waited for copies still do."""
    cdef Offload* o = <Offload*>c.tiers
    cdef int64_t i
    for i in range(s.places, s.places + s.waiting):
        if not must_wait(c, c.running[o.places[i].wants]):
            return False
    return True


cdef void settle(Core* c, Stretch* s) noexcept nogil:
    """Bring everybody up to date."""
    cdef Offload* o = <Offload*>c.tiers
    cdef int64_t i
    for i in range(s.places):
        settle_one(c, s, &c.req[c.running[i]], &o.places[i])


cdef inline void settle_one(Core* c, Stretch* s, Request* r, Going* at) noexcept nogil:
    cdef int64_t n = s.passes - at.base
    if n == 0:
        return
    if r.gen == 1:
        c.rows.second_gap[r.id] = s.first
    r.len += n
    r.gen += n
    r.computed = r.alloc = r.len - 1
    r.last_ms = c.last_emit
    at.base = s.passes


cdef inline double binade_end(double at) noexcept nogil:
    """The power of two above a positive number."""
    cdef int64_t bits
    memcpy(&bits, &at, sizeof(bits))
    bits = (bits & EXPONENT) + (EXPONENT & -EXPONENT)
    memcpy(&at, &bits, sizeof(bits))
    return at


cdef int64_t alike(double at, double gap, double until, double last_start, int64_t most) noexcept nogil:
    """How many passes of `gap` ms follow each other from `at` on: all begin in time, and before the binade ends."""
    cdef double edge = min(until, binade_end(at) - 2.0 * gap)
    cdef double many
    cdef int64_t n
    if last_start < edge:
        edge = last_start                      # one that begins just then is left for the next look
    many = (edge - at) / gap + 1.0
    n = most if many > <double>most else <int64_t>many
    while n > 1 and not (at + <double>(n - 1) * gap < edge):
        n -= 1
    return n if n > 1 else 1


cdef bint all_inside(Core* c, Stretch* s, double* now, double until, double last_start, int64_t most) noexcept nogil:
    """Up to `most` passes before the next one in which a block is wanted, as far as they begin in time.

    False if the next pass would take for ever, or no time. The clock's sums are those of pass by pass: between two
    powers of two its values are whole multiples of one unit, so where two passes in a row add as much, all do, and
    products are exact.
    """
    cdef int64_t n = min(s.next, s.stop, s.passes + most) - s.passes, k = 0, weight = s.moving, many
    cdef double step, at = now[0], start = at, end, gap
    cdef bint varies = timing_varies(&c.timing)
    step = timing_step_ms(&c.timing, s.ready, c.pool.active, s.total)
    while k < n and at < until and at <= last_start:
        end = at + step
        gap = end - at
        if not (gap > 0.0 and end < INFINITY):
            n = 0
            break
        many = 1
        if not varies and (end + step) - end == gap and end + step < binade_end(at):
            many = alike(at, gap, until, last_start, n - k)
        gaps_add(c.gaps, gap, many * weight)
        if k == 0 and s.passes == 0:
            s.first = gap
        start = at + <double>(many - 1) * gap
        at = start + gap
        k += many
        if varies and k < n:
            step = timing_step_ms(&c.timing, s.ready, c.pool.active, s.total + k * weight)
    if k > 0:
        c.last_start, c.last_emit, now[0] = start, at, at
        s.passes += k
        s.total += k * weight
    return n > 0


cdef inline bint opened(Core* c, Request* r, int32_t slot) noexcept nogil:
    """Whether a request gets the block of its next token."""
    if r.partial:
        promote(c, r)
    if not pool_reserve(&c.pool, 1):
        return False
    granted(c, slot)
    r.partial = 1
    r.alloc = r.len + 1
    return True


cdef inline bint served(Core* c, Stretch* s, int64_t i, double at, int64_t* together) noexcept nogil:
    """The token of a request that opens a block, or whose last one is older than the others'; false: refused."""
    cdef Going* place = &(<Offload*>c.tiers).places[i]
    cdef int32_t slot = c.running[i]
    cdef Request* r = &c.req[slot]
    together[0] -= 1                           # among the others it was taken for one of them
    settle_one(c, s, r, place)
    place.base = place.wants = s.passes + 1
    if not (r.len & c.mask or opened(c, r, slot)):
        r.computed = r.alloc = r.len           # it was scheduled
        tiers_deny(c, slot)
        c.pool.blocked = NIL
        s.denied = i
        return False
    collect_token(c, r, at, together)
    r.len += 1
    r.gen += 1
    r.computed = r.len - 1
    r.alloc = max(r.alloc, r.computed)
    place.wants += (-r.len) & c.mask
    return True


cdef bint some_open(Core* c, Stretch* s, double* now) noexcept nogil:
    """A pass in which requests open blocks, and some may be refused theirs; false if it has to be a whole pass."""
    cdef Offload* o = <Offload*>c.tiers
    cdef int64_t i, n = 0, left = FEW, together = s.moving, refused = 0, last = s.denied, room
    cdef double at, due
    room = c.pool.capacity - c.pool.active
    if room < s.moving:
        for i in range(s.places):
            n += o.places[i].wants == s.passes
        if n > room:
            return False                       # there is no block for somebody
    if s.refused > 0:
        if must_wait(c, c.running[last]):
            return False
        for i in range(s.places if s.refused > 1 else 0):
            if o.places[i].wants == s.passes and must_wait(c, c.running[i]):
                return False
    at = now[0] + timing_step_ms(&c.timing, s.ready, c.pool.active, s.total)
    if not (now[0] < at < INFINITY):
        return False
    while s.next == s.passes and left > 0:
        if not served(c, s, s.who, at, &together):
            refused += 1
        find_after(o, s)
        left -= 1
    if s.next == s.passes:                     # there are many
        for i in range(s.places):
            if o.places[i].wants == s.passes and not served(c, s, i, at, &together):
                refused += 1
        find_next(o, s)
    s.refused = refused
    c.last_start = now[0]
    s.passes += 1
    if refused == s.moving:                    # nothing was made: on to what comes next from below
        due = offload_due(o)
        if due < INFINITY and due > now[0]:
            now[0] = due
        return True
    if s.passes == 1:
        s.first = at - c.last_emit
    if together > 0:
        gaps_add(c.gaps, at - c.last_emit, together)
    c.last_emit = now[0] = at
    s.total += s.moving - refused
    return True


cdef double tiers_forward(Core* c, double now, double until, double last_start) noexcept nogil:
    """Fast-forward of a worker with tiers, as `core_forward`: the start of the next pass, which is a whole one."""
    cdef Offload* o = <Offload*>c.tiers
    cdef Stretch s
    cdef Hold why
    cdef double due, rest
    cdef int64_t most, waiting = c.n_waiting
    cdef bint known = False, looked = False, fresh
    if (c.n_running == 0 or c.n_running > c.max_tokens or c.n_running >> PLACE_BITS > 0 or c.nextn or c.real_tokens
            or c.worker_type == WORKER_PREFILL or c.rows == NULL or c.record or c.metrics):
        return now
    if o.pause > 0 and c.n_running > CROWD:
        o.pause -= 1
        return now
    why = held(c)
    if why == HOLD_NONE:
        return now
    s.passes = s.places = s.waiting = 0
    while now < until and now <= last_start:
        due = offload_due(o)
        if not looked and (offload_stirs(o) or (due < INFINITY and (not o.alone or now >= soon(due)))):
            tiers_begin(c, now)
            looked = True
            if c.n_waiting != waiting or not still_held(c, why):
                break
            if known and s.waiting > 0 and not stalled(c, &s):
                settle(c, &s)
                known = False
            due = offload_due(o)
        fresh = not known
        if fresh:
            known = survey(c, &s)
            if not known:
                s.places = 0
                break
        if s.passes >= s.stop:
            break
        if s.passes == s.next:
            if not looked:
                if o.alone:                    # nothing ends, but the clock is asked
                    clock_set(o, now)
                else:
                    tiers_begin(c, now)
                looked = True
            if not some_open(c, &s, &now):
                if fresh:
                    break
                settle(c, &s)                  # a copy has not ended: who waits for it stalls others
                known = False
                continue
            if c.error or c.pool.error or o.error:
                break
        else:
            most, rest = INT64_MAX - s.passes, until
            if due < INFINITY and o.alone and now < soon(due):
                rest = min(until, soon(due))
            elif due < INFINITY or offload_stirs(o):
                most = 1
            if not all_inside(c, &s, &now, rest, last_start, most):
                break
        looked = False
    settle(c, &s)
    o.looked = looked
    c.pass_no += s.passes
    c.passes += s.passes
    o.pause = PAUSE if s.passes < 2 else 0
    return now
