"""Block pools of the tiers below the GPU, and the leases' numbered places."""

from .kv import Lineage
from .sequence import Full


class Tier:
    """`capacity` blocks; the evictable ones leave as in the GPU pool: childless ones first, oldest insertion first.

    A slot is free, in flight (taken, not registered yet), pinned or inactive. `reserved` slots are promised: nothing
    more may be promised than is available, and a promise lasts until its owner has booked the transfer.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self.reserved = 0
        self.inactive = Lineage()
        self.pins: dict[int, int] = {}
        self.blocks: dict[int, Full] = {}
        self.log: list[tuple[str, Full]] = []  # created and removed blocks since the owner last looked
        self.peak = 0

    @property
    def available(self) -> int:
        return self.free + len(self.inactive)

    def __contains__(self, block: Full) -> bool:
        return block.seq_hash in self.blocks

    def promise(self, count: int) -> bool:
        if self.reserved + count > self.available:
            return False
        self.reserved += count
        return True

    def take(self, count: int) -> bool:
        """Take slots for blocks to come, by eviction if need be; all or nothing."""
        if count > self.available:
            return False
        from_free = min(count, self.free)
        self.free -= from_free
        for _ in range(count - from_free):
            block = self.evict()
            del self.blocks[block.seq_hash]
            self.log.append(("removed", block))
        self.peak = max(self.peak, self.capacity - self.free)
        return True

    def evict(self) -> Full:
        return self.inactive.evict()

    def register(self, block: Full) -> None:
        """A block arrived in a taken slot; it comes pinned. Is it there already, the slot is free again."""
        if self.pin(block):
            self.free += 1
            return
        self.blocks[block.seq_hash] = block
        self.pins[block.seq_hash] = 1
        self.log.append(("created", block))

    def pin(self, block: Full) -> bool:
        if block.seq_hash in self.pins:
            self.pins[block.seq_hash] += 1
        elif block in self.inactive:
            self.inactive.remove(block)
            self.pins[block.seq_hash] = 1
        else:
            return False
        return True

    def unpin(self, blocks: list[Full], used: bool = False) -> None:
        """`used`: they have come up to the GPU."""
        for block in blocks:
            if used:
                self.use(block)
            self.pins[block.seq_hash] -= 1
            if self.pins[block.seq_hash] == 0:
                del self.pins[block.seq_hash]
                self.insert(block)

    def use(self, block: Full) -> None:
        pass

    def insert(self, block: Full) -> None:
        self.inactive.insert(block)

    def match(self, blocks: list[Full]) -> list[Full]:
        """Pin the longest prefix that is here."""
        matched = []
        for block in blocks:
            if not self.pin(block):
                break
            matched.append(block)
        return matched

    def prefix(self, blocks: list[Full]) -> int:
        """Length of the longest prefix that is here. A look only."""
        for count, block in enumerate(blocks):
            if block not in self:
                return count
        return len(blocks)


class LfuTier(Tier):
    """Of the blocks without evictable successors the one with the fewest uses goes, then the oldest."""

    MOST = 255

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.uses: dict[int, int] = {}

    def register(self, block: Full) -> None:
        if block not in self:
            self.uses[block.seq_hash] = 0
        super().register(block)

    def use(self, block: Full) -> None:
        self.uses[block.seq_hash] = min(self.uses[block.seq_hash] + 1, self.MOST)

    def evict(self) -> Full:
        victim = min(self.inactive.leaves(), key=lambda node: (self.uses[node.block.seq_hash], node.tick)).block
        self.inactive.remove(victim)
        return victim


class S3FifoTier(LfuTier):
    """A small queue, while it has a tenth of the slots or nobody else can go, and a main one; both by coming.

    Whose turn it is and has been used goes to the end of the main queue instead, with one use less there. Blocks that
    left from the small queue and come back before as many more have left as there are slots, enter the main queue.
    """

    MOST = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.main: set[int] = set()
        self.ticks: dict[int, int] = {}
        self.left: list[int] = []  # from the small queue

    def register(self, block: Full) -> None:
        if block not in self:
            self.ticks.pop(block.seq_hash, None)
            self.main.discard(block.seq_hash)
            if block.seq_hash in self.left:
                ago = self.left[::-1].index(block.seq_hash)
                if ago < self.capacity:
                    self.main.add(block.seq_hash)
                    self.left = [0 if other == block.seq_hash else other for other in self.left]
        super().register(block)

    def insert(self, block: Full) -> None:
        """In its old place, if it had one."""
        self.ticks.setdefault(block.seq_hash, self.inactive.next_tick)
        self.inactive.insert(block, self.ticks[block.seq_hash])

    def evict(self) -> Full:
        while True:
            leaves = self.inactive.leaves()
            small = [node for node in leaves if node.block.seq_hash not in self.main]
            main = [node for node in leaves if node.block.seq_hash in self.main]
            inside = sum(1 for node in self.inactive.nodes.values()
                         if node.block is not None and node.block.seq_hash not in self.main)
            queue = main if not small or (main and 10 * inside < self.capacity) else small
            node = min(queue, key=lambda node: node.tick)
            name = node.block.seq_hash
            if self.uses[name] == 0:
                break
            self.uses[name] = self.uses[name] - 1 if queue is main else 0
            self.main.add(name)
            node.tick = self.ticks[name] = self.inactive.next_tick
            self.inactive.next_tick += 1
        if queue is small:
            self.left.append(name)
        self.inactive.remove(node.block)
        return self.blocks[name]


TIERS = {"lru": Tier, "lfu": LfuTier, "s3fifo": S3FifoTier}


class Places:
    """Things in numbered places; a new one takes the place that was given up last, and the order is that of places."""

    def __init__(self) -> None:
        self.items: list = []
        self.given_up: list[int] = []

    def __iter__(self):
        return iter([item for item in self.items if item is not None])

    def __contains__(self, item: object) -> bool:
        return any(item is other for other in self.items)

    def add(self, item: object) -> None:
        if self.given_up:
            self.items[self.given_up.pop()] = item
        else:
            self.items.append(item)

    def remove(self, item: object) -> None:
        place = next(i for i, other in enumerate(self.items) if other is item)
        self.items[place] = None
        self.given_up.append(place)
