"""The reference's runtime as far as it decides in which order the batches of a burst start: one thread, and coroutines.

Tasks are generators. One that is woken up runs next, and whoever was to run next goes to the end of the queue; after
three of them in a row, to the end. Queues between tasks have places, given away in the order in which tasks wait.
"""

from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

PLACES, IN_A_ROW = 8, 3


class Runtime:
    def __init__(self) -> None:
        self.next: Iterator[None] | None = None
        self.queue: deque[Iterator[None]] = deque()
        self.to_the_end = False

    def wake(self, task: Iterator[None]) -> None:
        if self.to_the_end:
            self.queue.append(task)
            return
        if self.next is not None:
            self.queue.append(self.next)
        self.next = task

    def spawn(self, function: Callable, *arguments) -> Iterator[None]:
        """A task whose function is told itself, to be woken up."""
        me = SimpleNamespace()
        me.task = function(me, *arguments)
        self.wake(me.task)
        return me.task

    def run(self) -> None:
        while self.next is not None or self.queue:
            row = 0
            if self.next is None:
                next(self.queue.popleft(), None)
            while self.next is not None:
                task, self.next = self.next, None
                row += 1
                self.to_the_end = row >= IN_A_ROW
                next(task, None)
            self.to_the_end = False


class Permits:
    def __init__(self, runtime: Runtime, count: int) -> None:
        self.runtime, self.count, self.waiting = runtime, count, deque()

    def acquire(self, me) -> Iterator[None]:
        if self.count > 0:
            self.count -= 1
            return
        place = SimpleNamespace(task=me.task, granted=False)
        self.waiting.append(place)
        while not place.granted:
            yield

    def release(self) -> None:
        if not self.waiting:
            self.count += 1
            return
        place = self.waiting.popleft()
        place.granted = True
        self.runtime.wake(place.task)


class Queue:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.permits = runtime, Permits(runtime, PLACES)
        self.items, self.reader = deque(), None

    def send(self, me, item: int) -> Iterator[None]:
        yield from self.permits.acquire(me)
        self.items.append(item)
        if self.reader is not None:
            reader, self.reader = self.reader, None
            self.runtime.wake(reader)

    def receive(self, me) -> Iterator[None]:
        while not self.items:
            self.reader = me.task
            yield
        item = self.items.popleft()
        self.permits.release()
        return item


def start_order(batches: int, room: int, waiting: int) -> list[int]:
    """Numbers of a burst's batches as they start, if `room` more may, and `waiting` earlier ones do not yet."""
    runtime = Runtime()
    first, second, slots, started = Queue(runtime), Queue(runtime), Permits(runtime, room), []

    def collector(me, count: int):
        for batch in range(count):
            yield from first.send(me, batch)

    def waiter(me):
        while True:
            runtime.spawn(second.send, (yield from first.receive(me)))

    def transfer(me, batch: int):
        started.append(batch)
        yield

    def executor(me):
        while True:
            batch = yield from second.receive(me)
            yield from slots.acquire(me)
            runtime.spawn(transfer, batch)

    def filter_blocks(me):
        runtime.spawn(collector, batches)
        yield

    runtime.spawn(waiter)
    runtime.spawn(executor)
    runtime.run()
    for _ in range(waiting):  # earlier ones: the first is the executor's, it waits for a slot
        runtime.spawn(second.send, -1)
        runtime.run()
    me = SimpleNamespace()
    me.task = filter_blocks(me)
    runtime.queue.append(me.task)
    runtime.run()
    while len(started) < batches + waiting:
        slots.release()
        runtime.run()
    return [batch for batch in started if batch >= 0]
