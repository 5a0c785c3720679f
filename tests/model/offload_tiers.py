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
            block = self.inactive.evict()
            del self.blocks[block.seq_hash]
            self.log.append(("removed", block))
        self.peak = max(self.peak, self.capacity - self.free)
        return True

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

    def unpin(self, blocks: list[Full]) -> None:
        for block in blocks:
            self.pins[block.seq_hash] -= 1
            if self.pins[block.seq_hash] == 0:
                del self.pins[block.seq_hash]
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
