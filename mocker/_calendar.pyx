# cython: language_level=3
"""A calendar for large batches: a pass touches only the requests that have something to do in it.

A running request that decodes inside its last block does the same in every pass: one token, at the end of the pass. It
sleeps until the pass that opens its next block or makes its last token. What it would have counted meanwhile follows
from a tick that all who sleep share: its known and generated tokens are kept less the tick, its last token came at the
core's `last_emit`, and the sum of lengths that timing models ask for is a running one. Whoever is due wakes before a
pass begins and is handled with the others awake in running order, so the pool sees the same operations in the same
order. Everybody is woken (`calendar_settle`) where that is not all: a preemption, a budget that does not go round, a
request in the middle of the batch that still computes its prompt, somebody who looks.

Costs: a pass is O(requests due in it); opening and settling O(running requests).
"""
from libc.stdint cimport INT32_MAX
from libc.stdlib cimport calloc, free, malloc, qsort

from mocker._common cimport ERR_MEMORY, NIL, ST_RUNNING, grown, int32_t, int64_t, uint64_t
from mocker._core cimport Calendar, Core, Request
from mocker._offload cimport Offload, must_wait

cdef enum:
    DAYS_LEAST = 64
    DAYS_MOST = 1024               # longer blocks: whoever sleeps through a whole round wakes, and sleeps again
    FEW = 24                       # entries that are sorted by insertion
    PAUSE = 16                     # passes without a calendar after one that it could not take,
    HALF_PAUSE = 64                # when at its opening too few could sleep,
    LONG_PAUSE = 16384             # after a while in which most were awake in most passes
    WHILE = 32
    ABOVE_TIERS = 3                # times as many as elsewhere: skipped passes serve smaller batches as well


cdef inline int lowest_bit(uint64_t bits) noexcept nogil:
    """Place of the lowest bit that is set; there is one."""
    cdef int at = 0
    while not bits & 0xFF:
        bits >>= 8
        at += 8
    while not bits & 1:
        bits >>= 1
        at += 1
    return at


cdef void calendar_free(Core* c) noexcept nogil:
    free(c.calendar.first)
    free(c.calendar.last)
    free(c.calendar.marks)
    free(c.calendar.awake)


cdef bint prepared(Core* c) noexcept nogil:
    """The arrays of an empty calendar, made when they are first needed; false if memory is short."""
    cdef Calendar* k = &c.calendar
    cdef int64_t i
    cdef void* moved
    if k.first == NULL:
        k.days = min(max(c.block_size, <int64_t>DAYS_LEAST), <int64_t>DAYS_MOST)
        k.first = <int32_t*>malloc(k.days * sizeof(int32_t))
        k.last = <int32_t*>malloc(k.days * sizeof(int32_t))
        k.marks = <uint64_t*>calloc(k.days >> 6, sizeof(uint64_t))
        if k.first == NULL or k.last == NULL or k.marks == NULL:
            c.error = ERR_MEMORY
            return False
        for i in range(k.days):
            k.first[i] = NIL
    moved = grown(k.awake, &k.awake_cap, c.n_running, sizeof(int64_t))
    if moved == NULL:
        c.error = ERR_MEMORY
        return False
    k.awake = <int64_t*>moved
    return True


# ---- sleep ------------------------------------------------------------------------------------------------------

cdef inline bint to_bed(Core* c, int32_t slot) noexcept nogil:
    """Let a request that made its token in the newest pass sleep until it is due; false if that is the next pass."""
    cdef Calendar* k = &c.calendar
    cdef Request* r = &c.req[slot]
    cdef int64_t steps = (-r.len) & c.mask     # tokens before the one that needs a block, as in `core_forward`
    cdef int64_t day
    if steps > r.limit - r.gen - 1:
        steps = r.limit - r.gen - 1
    if steps <= 0 or r.gen < 2 or r.last_ms != c.last_emit or not usual(c, r):
        return False
    if steps >= k.days:
        steps = k.days - 1
    day = (k.tick + steps) & (k.days - 1)
    r.len -= k.tick
    r.gen -= k.tick
    k.base += r.len
    k.asleep += 1
    r.due_next = NIL
    if k.first[day] == NIL:
        k.first[day] = slot
        k.marks[day >> 6] |= <uint64_t>1 << (day & 63)
    else:
        c.req[k.last[day]].due_next = slot
    k.last[day] = slot
    return True


cdef inline void rouse(Core* c, Request* r) noexcept nogil:
    """Count what a request did in its sleep: as between two passes."""
    cdef Calendar* k = &c.calendar
    k.base -= r.len
    k.asleep -= 1
    r.len += k.tick
    r.gen += k.tick
    r.computed = r.len - 1
    if r.alloc < r.computed:
        r.alloc = r.computed
    r.last_ms = c.last_emit


cdef int by_place(const void* one, const void* other) noexcept nogil:
    cdef int64_t a = (<const int64_t*>one)[0], b = (<const int64_t*>other)[0]
    return (a > b) - (a < b)


cdef inline void in_order(int64_t* entries, int64_t sorted_, int64_t n) noexcept nogil:
    """Sort by place in the batch; the first `sorted_` are in order already."""
    cdef int64_t i, at, one
    if n - sorted_ > FEW:
        i = max(sorted_, <int64_t>1)
        while i < n and entries[i - 1] < entries[i]:
            i += 1
        if i < n:
            qsort(entries, n, sizeof(int64_t), by_place)
        return
    for i in range(sorted_, n):
        one = entries[i]
        at = i
        while at > 0 and entries[at - 1] > one:
            entries[at] = entries[at - 1]
            at -= 1
        entries[at] = one


cdef inline bint stops_others(Core* c, int32_t slot) noexcept nogil:
    """Whether those behind a request that is awake may not be scheduled: the budget is its, or it waits for a copy."""
    cdef Request* r = &c.req[slot]
    if r.computed < r.len:
        return not usual(c, r)
    return c.tiers != NULL and must_wait(c, slot)          # it was refused a block, and wants nothing else


cdef bint calendar_wake(Core* c) noexcept nogil:
    """Before a pass: wake who is due. False if the pass is not for a calendar; then everybody is awake."""
    cdef Calendar* k = &c.calendar
    cdef int64_t day = k.tick & (k.days - 1), n = k.n_awake, i
    cdef int32_t slot = k.first[day]
    cdef Request* r
    if slot != NIL:
        while slot != NIL:
            r = &c.req[slot]
            rouse(c, r)
            k.awake[n] = <int64_t>r.place << 32 | slot
            n += 1
            slot = r.due_next
        k.first[day] = NIL
        k.marks[day >> 6] &= ~(<uint64_t>1 << (day & 63))
        in_order(k.awake, k.n_awake, n)
        k.n_awake = n
    if c.n_running > c.max_tokens:
        calendar_settle(c, False, NIL)
        return False
    if k.odd > 0:                              # they come behind all who sleep, or the budget may not reach these
        for i in range(n):
            slot = <int32_t>k.awake[i]
            if c.running[c.n_running - n + i] != slot and stops_others(c, slot):
                calendar_settle(c, False, NIL)
                return False
    return True


cdef void calendar_admit(Core* c, int32_t slot) noexcept nogil:
    """A request has joined the batch, at its end."""
    cdef Calendar* k = &c.calendar
    cdef void* moved = grown(k.awake, &k.awake_cap, c.n_running, sizeof(int64_t))
    if moved == NULL:
        c.error = ERR_MEMORY
        return
    k.awake = <int64_t*>moved
    c.req[slot].place = k.next_place
    k.next_place += 1
    k.awake[k.n_awake] = <int64_t>c.req[slot].place << 32 | slot
    k.n_awake += 1


cdef bint calendar_room(Core* c) noexcept nogil:
    """Whether the pool has a block for everybody ready who needs one, so that nobody is preempted for it."""
    cdef int64_t i, room = c.pool.capacity - c.pool.active
    if c.n_ready <= room:
        return True
    for i in range(c.n_ready):
        room -= not c.req[c.ready[i]].len & c.mask
    return room >= 0


cdef int64_t calendar_rest(Core* c) noexcept nogil:
    """Passes before the first in which somebody is due."""
    cdef Calendar* k = &c.calendar
    cdef int64_t day = k.tick & (k.days - 1), words = k.days >> 6, at, i
    cdef uint64_t bits
    if k.n_awake > 0 or k.asleep == 0:
        return 0
    at = day >> 6
    bits = k.marks[at] >> (day & 63)
    if bits:
        return lowest_bit(bits)
    i = 64 - (day & 63)
    while True:
        at = (at + 1) & (words - 1)
        if k.marks[at]:
            return i + lowest_bit(k.marks[at])
        i += 64


# ---- after a pass -----------------------------------------------------------------------------------------------

cdef void calendar_compact(Core* c) noexcept nogil:
    """Take those who ended out of the batch: only the awake can have."""
    cdef Calendar* k = &c.calendar
    cdef int64_t i, at = 0, n = 0
    cdef int32_t slot
    for i in range(k.n_awake):
        slot = <int32_t>k.awake[i]
        if c.req[slot].status == ST_RUNNING:
            continue
        while c.running[at] != slot:
            c.running[n] = c.running[at]
            n += 1
            at += 1
        at += 1
    while at < c.n_running:
        c.running[n] = c.running[at]
        n += 1
        at += 1
    c.n_running = n


cdef void calendar_turn(Core* c) noexcept nogil:
    """A pass has given everybody asleep a token: on to the next, and to bed who can."""
    cdef Calendar* k = &c.calendar
    cdef int64_t i, n = 0
    cdef int32_t slot
    k.tick += 1
    k.turns += 1
    k.busy += k.n_awake
    k.odd = 0
    for i in range(k.n_awake):
        slot = <int32_t>k.awake[i]
        if c.req[slot].status != ST_RUNNING or to_bed(c, slot):
            continue
        k.odd += not usual(c, &c.req[slot])
        k.awake[n] = k.awake[i]
        n += 1
    k.n_awake = n
    if 2 * c.n_running < k.least or k.next_place > INT32_MAX // 2:
        calendar_settle(c, False, NIL)
    elif k.turns >= WHILE:
        if 2 * k.busy > k.turns * c.n_running:
            calendar_settle(c, False, NIL)
            k.not_before = c.pass_no + LONG_PAUSE
        k.turns = k.busy = 0


cdef void calendar_open(Core* c) noexcept nogil:
    """After a pass of a large batch: begin a calendar, if the engine is one that can have it."""
    cdef Calendar* k = &c.calendar
    cdef int64_t i
    cdef int32_t slot
    if (c.pass_no < k.not_before or c.rows == NULL or c.real_tokens or c.record or c.metrics or c.nextn
            or c.n_running > c.max_tokens or not prepared(c)):
        return
    if c.tiers != NULL and (<Offload*>c.tiers).strides and c.n_running < ABOVE_TIERS * k.least:
        return
    k.is_open = True
    k.tick = k.base = k.asleep = k.n_awake = k.odd = 0
    for i in range(c.n_running):
        slot = c.running[i]
        c.req[slot].place = <int32_t>i
        if not to_bed(c, slot):
            k.odd += not usual(c, &c.req[slot])
            k.awake[k.n_awake] = i << 32 | slot
            k.n_awake += 1
    k.next_place = <int32_t>c.n_running
    if 2 * k.asleep < c.n_running:
        calendar_settle(c, False, NIL)
        k.not_before = c.pass_no + HALF_PAUSE


cdef void calendar_settle(Core* c, bint scheduled, int32_t slot) noexcept nogil:
    """Wake everybody and close the calendar; `scheduled`: the pass under way has put those who sleep into its batch.

    The place of `slot` in the batch, if it is there, is left in `at`.
    """
    cdef Calendar* k = &c.calendar
    cdef int64_t i, day
    cdef int32_t one
    cdef Request* r
    if not k.is_open:
        return
    for i in range(k.days >> 6):
        while k.marks[i]:
            day = (i << 6) + lowest_bit(k.marks[i])
            k.marks[i] &= k.marks[i] - 1
            one = k.first[day]
            k.first[day] = NIL
            while one != NIL:
                r = &c.req[one]
                rouse(c, r)
                if scheduled:
                    r.computed = r.len
                    if r.alloc < r.len:
                        r.alloc = r.len
                    r.pass_no = -c.pass_no
                one = r.due_next
    k.at = NIL
    for i in range(c.n_running if slot != NIL else 0):
        if c.running[i] == slot:
            k.at = i
    k.is_open = False
    k.n_awake = 0
    k.not_before = c.pass_no + PAUSE
