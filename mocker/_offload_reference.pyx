# cython: language_level=3
"""The order in which the reference starts the batches of one burst, for `compat="reference"`.

There each batch passes two queues of 8 places and a task of its own, on a runtime with one thread. The collector puts
batches into the first queue, the waiter makes a task for each, that puts its batch into the second one, and the
executor takes them from there and makes a task for each that may start. What a task wakes up runs next, and pushes
what was to run next to the end of the runtime's queue; of such in a row three run, and the third one's go to the end.
So the order is decided by numbers alone, and this goes through it. Costs: O(batches).
"""
from libc.stdlib cimport calloc, free

from mocker._common cimport int64_t
from mocker._offload cimport Batch, Lane

cdef enum:
    PLACES = 8                     # of each queue
    IN_A_ROW = 3                   # tasks that run because another one has woken them up
    FILTER = -1                    # tasks; batch b has the tasks FIRST + 2 * b and FIRST + 2 * b + 1
    COLLECTOR = 1
    WAITER = 2
    EXECUTOR = 3
    FIRST = 4


cdef struct Runtime:
    int64_t next                   # task that was woken up last, 0: none
    bint pushes                    # what is woken up goes to the end
    int64_t* queue                 # [head, tail)
    int64_t head
    int64_t tail
    # the pipeline
    int64_t n                      # batches
    int64_t room                   # that may start
    int64_t collected              # batches in the first queue, or past it
    int64_t taken                  # of them past it
    int64_t free1                  # places that nobody has been given
    bint stuck                     # the collector waits for a place
    bint given                     # it has been given one
    bint listens                   # the waiter waits for a batch
    int64_t* sent                  # [n_sent] batches in the second queue, or past it
    int64_t n_sent
    int64_t n_got                  # of them past it
    int64_t free2
    int64_t* stuck2                # [first_stuck, n_stuck) batches whose tasks wait for a place
    int64_t first_stuck
    int64_t n_stuck
    bint idle                      # the executor waits for a batch; if it is not woken up it has one that may not start
    int64_t* order                 # [n_started] batches that have started
    int64_t n_started


cdef void wake(Runtime* r, int64_t task) noexcept nogil:
    if r.pushes:
        r.queue[r.tail] = task
        r.tail += 1
        return
    if r.next != 0:
        r.queue[r.tail] = r.next
        r.tail += 1
    r.next = task


cdef void collect(Runtime* r) noexcept nogil:
    while r.collected < r.n:
        if not r.given:
            if r.free1 == 0:
                r.stuck = True
                return
            r.free1 -= 1
        r.given = False
        r.collected += 1
        if r.listens:
            r.listens = False
            wake(r, WAITER)


cdef void hand_on(Runtime* r) noexcept nogil:
    while r.taken < r.collected:
        if r.stuck:
            r.stuck, r.given = False, True
            wake(r, COLLECTOR)
        else:
            r.free1 += 1
        wake(r, FIRST + 2 * r.taken)
        r.taken += 1
    r.listens = True


cdef void send(Runtime* r, int64_t batch, bint given) noexcept nogil:
    if not given:
        if r.free2 == 0:
            r.stuck2[r.n_stuck] = batch
            r.n_stuck += 1
            return
        r.free2 -= 1
    r.sent[r.n_sent] = batch
    r.n_sent += 1
    if r.idle:
        r.idle = False
        wake(r, EXECUTOR)


cdef void execute(Runtime* r) noexcept nogil:
    cdef int64_t batch
    while r.n_got < r.n_sent:
        batch = r.sent[r.n_got]
        r.n_got += 1
        if r.first_stuck < r.n_stuck:          # its task runs once more, with a place
            wake(r, FIRST + 2 * r.stuck2[r.first_stuck])
            r.first_stuck += 1
        else:
            r.free2 += 1
        if r.room == 0:
            r.n_got -= 1                       # it is the next one
            return
        r.room -= 1
        wake(r, FIRST + 2 * batch + 1)
    r.idle = True


cdef void run(Runtime* r, int64_t task, bint* polled) noexcept nogil:
    cdef int64_t batch = (task - FIRST) // 2
    if task == FILTER:
        wake(r, COLLECTOR)
    elif task == COLLECTOR:
        collect(r)
    elif task == WAITER:
        hand_on(r)
    elif task == EXECUTOR:
        execute(r)
    elif (task - FIRST) % 2 == 0:
        send(r, batch, polled[batch])
        polled[batch] = True
    else:
        r.order[r.n_started] = batch
        r.n_started += 1


cdef void run_all(Runtime* r, bint* polled) noexcept nogil:
    cdef int64_t task, row
    while r.head < r.tail:
        task = r.queue[r.head]
        r.head += 1
        run(r, task, polled)
        row = 0
        while r.next != 0:
            task, r.next = r.next, 0
            row += 1
            r.pushes = row >= IN_A_ROW
            run(r, task, polled)
        r.pushes = False


cdef bint lane_reorder(Lane* lane, int64_t before) noexcept nogil:
    """Put the batches of the newest burst in the reference's order; `before` waited already. False: memory is short."""
    cdef int64_t n = lane.used - lane.head - before, i, k = 0
    cdef Runtime r
    cdef Batch* own = lane.queue + (lane.used - n)
    cdef Batch* copies
    cdef bint* polled
    if n < 2:
        return True
    r.next = r.head = r.collected = r.taken = r.n_sent = r.n_got = r.first_stuck = r.n_stuck = r.n_started = 0
    r.pushes = r.stuck = r.given = False
    r.listens = True
    r.free1 = PLACES
    r.n, r.room, r.idle = n, lane.limit - lane.active, before == 0
    r.free2 = PLACES if before == 0 else n     # the executor takes no more: who comes first waits first
    r.queue = <int64_t*>calloc(7 * n + 8, sizeof(int64_t))
    r.sent = <int64_t*>calloc(n, sizeof(int64_t))
    r.stuck2 = <int64_t*>calloc(n, sizeof(int64_t))
    r.order = <int64_t*>calloc(n, sizeof(int64_t))
    polled = <bint*>calloc(n, sizeof(bint))
    copies = <Batch*>calloc(n, sizeof(Batch))
    if (r.queue != NULL and r.sent != NULL and r.stuck2 != NULL and r.order != NULL and polled != NULL
            and copies != NULL):
        r.queue[0], r.tail = FILTER, 1
        run_all(&r, polled)
        for i in range(n):
            copies[i] = own[i]
        for i in range(r.n_started):
            own[k] = copies[r.order[i]]
            k += 1
        for i in range(r.n_got, r.n_sent):
            own[k] = copies[r.sent[i]]
            k += 1
        for i in range(r.first_stuck, r.n_stuck):
            own[k] = copies[r.stuck2[i]]
            k += 1
    free(r.queue)
    free(r.sent)
    free(r.stuck2)
    free(r.order)
    free(polled)
    free(copies)
    return k == n
