"""The block pool: free, inactive (cached, evictable) and active blocks, and the events about cached ones."""

from .sequence import Block, Full, Partial, Sequence


class Node:
    """A place in the lineage graph: an inactive block, or a ghost that stands for one that is not there."""

    def __init__(self) -> None:
        self.block: Full | None = None  # None: ghost
        self.tick = -1
        self.parent: tuple[int, int] | None = None
        self.children: set[tuple[int, int]] = set()


class Lineage:
    """Inactive blocks as a graph of parents and children. Only a block without a child in the graph is evictable.

    Every insertion takes the next tick; of the evictable blocks the one with the smallest tick goes first. A block
    whose last child left becomes evictable with the tick it already had. Nodes are keyed by (position, hash).
    """

    def __init__(self) -> None:
        self.nodes: dict[tuple[int, int], Node] = {}
        self.next_tick = 0
        self.count = 0  # inactive blocks, ghosts not among them

    def __len__(self) -> int:
        return self.count

    def __contains__(self, block: Full) -> bool:
        node = self.nodes.get((block.position, block.seq_hash))
        return node is not None and node.block is not None

    def insert(self, block: Full, tick: int | None = None) -> None:
        """With its old tick, if one is given."""
        key = (block.position, block.seq_hash)
        node = self.nodes.setdefault(key, Node())
        assert node.block is None, "a block is inactive once"
        node.block = block
        self.count += 1
        node.tick = self.next_tick if tick is None else tick
        self.next_tick += 1
        if block.position > 0 and node.parent is None:
            node.parent = (block.position - 1, block.parent_hash or 0)
            self.nodes.setdefault(node.parent, Node()).children.add(key)

    def remove(self, block: Full) -> None:
        """The block becomes a ghost; ghosts without children disappear, and so on upwards."""
        key = (block.position, block.seq_hash)
        self.nodes[key].block = None
        self.count -= 1
        while self.nodes[key].block is None and not self.nodes[key].children:
            parent = self.nodes.pop(key).parent
            if parent is None:
                return
            self.nodes[parent].children.discard(key)
            key = parent

    def leaves(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.block is not None and not node.children]

    def evict(self) -> Full:
        victim = min(self.leaves(), key=lambda node: node.tick).block
        self.remove(victim)
        return victim


class PrefillCost:
    """Length of the cached prefix in tokens: all of it, and the part of it that is active anyway."""

    def __init__(self, cached_tokens: int, active_cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens
        self.active_cached_tokens = active_cached_tokens


class KvPool:
    """`capacity` blocks. One physical block per identity, at any time."""

    def __init__(self, capacity: int, block_size: int, caching: bool, worker_id: int) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.caching = caching
        self.worker_id = worker_id
        self.free = capacity
        self.inactive = Lineage()
        self.references: dict[int, int] = {}  # active full blocks: hash -> number of owners
        self.pins: dict[int, int] = {}  # full blocks that are kept, for a transfer, beside their owners
        self.partials: set[Partial] = set()  # active partial blocks, one owner each
        self.full_by_hash: dict[int, Full] = {}  # active or inactive
        self.events: list[dict] = []
        self.next_event_id = 0

    @property
    def active(self) -> int:
        """Everything that is neither free nor evictable, slots reserved for decoding included."""
        return self.capacity - self.free - len(self.inactive)

    # ---- events

    def _publish(self, data: dict) -> None:
        if not self.caching:
            return
        event = {"event_id": self.next_event_id, "data": data, "dp_rank": 0}
        self.next_event_id += 1
        self.events.append({"worker_id": self.worker_id, "storage_tier": "device", "event": event})

    def _stored(self, run: list[Full], parent_hash: int | None) -> None:
        if run:
            blocks = [{"block_hash": b.seq_hash, "tokens_hash": b.local_hash or 0, "mm_extra_info": None} for b in run]
            self._publish({"stored": {"parent_hash": parent_hash, "start_position": None, "blocks": blocks}})

    def _removed(self, evicted: list[Full]) -> None:
        if evicted:
            self._publish({"removed": {"block_hashes": [b.seq_hash for b in evicted]}})

    def drain_events(self) -> list[dict]:
        events, self.events = self.events, []
        return events

    # ---- slots

    def _take_slots(self, count: int) -> list[Full] | None:
        """Take slots, free ones first, then by eviction; all or nothing. The evicted blocks, or None."""
        if count > self.free + len(self.inactive):
            return None
        from_free = min(count, self.free)
        self.free -= from_free
        evicted = [self.inactive.evict() for _ in range(count - from_free)]
        for block in evicted:
            del self.full_by_hash[block.seq_hash]
        return evicted

    def _room(self, count: int, resurrected: list[Full]) -> list[Full] | None:
        """Slots for fresh blocks; if there are none, the blocks picked up meanwhile go back."""
        evicted = self._take_slots(count)
        if evicted is None:
            for block in resurrected:
                self.inactive.insert(block)
        return evicted

    def _reference(self, block: Full) -> None:
        self.references[block.seq_hash] = self.references.get(block.seq_hash, 0) + 1
        self.full_by_hash[block.seq_hash] = block

    # ---- operations

    def use(self, blocks: list[Block], parent: Block | None = None) -> bool:
        """Take all of `blocks`, or none. `parent` is the block before the first.

        First every block is looked up, from left to right and not only up to the first miss; an inactive one is
        taken out of the inactive ones at once. Then slots for the fresh ones are taken. If there are too few, the
        blocks taken out go back in the same order, first to last, each with a new tick.
        """
        resurrected: list[Full] = []
        fresh: list[Block] = []
        for block in blocks:
            if isinstance(block, Partial):
                fresh.append(block)
            elif block.seq_hash in self.references or block.seq_hash in self.pins:
                continue
            elif block in self.inactive:
                self.inactive.remove(block)
                resurrected.append(block)
            else:
                fresh.append(block)

        evicted = self._room(len(fresh), resurrected)
        if evicted is None:
            return False

        # A run of fresh full blocks is one event; a hit closes the run. All of them come before the removals.
        new = set(fresh)
        run: list[Full] = []
        previous = parent.seq_hash if parent is not None else None
        run_parent = previous
        for block in blocks:
            if isinstance(block, Partial):
                self.partials.add(block)
                continue
            if block in new:
                if not run:
                    run_parent = previous
                run.append(block)
            else:
                self._stored(run, run_parent)
                run = []
            self._reference(block)
            previous = block.seq_hash
        self._stored(run, run_parent)
        self._removed(evicted)
        return True

    def reserve(self, count: int) -> bool:
        """Slots for a speculative step; what must be evicted for them is evicted and reported now."""
        evicted = self._take_slots(count)
        if evicted is None:
            return False
        self._removed(evicted)
        return True

    def use_reserved(self, block: Partial) -> None:
        self.partials.add(block)

    def release_reserved(self, count: int) -> None:
        self.free += count

    def promote(self, partial: Partial, block: Full, parent_hash: int | None) -> None:
        """A filled block gets its identity. If the identity exists already, that block is used, this one is freed."""
        self.partials.remove(partial)
        if block.seq_hash in self.references or block.seq_hash in self.pins:
            self.free += 1
        elif block in self.inactive:
            self.inactive.remove(block)
            self.free += 1
        else:
            self._stored([block], parent_hash)
        self._reference(block)

    def release(self, block: Block) -> None:
        """One owner lets go. The last owner of a full block leaves it inactive, with the next tick. No event."""
        if isinstance(block, Partial):
            self.partials.remove(block)
            self.free += 1
            return
        self.references[block.seq_hash] -= 1
        if self.references[block.seq_hash] == 0:
            del self.references[block.seq_hash]
            if block.seq_hash not in self.pins:
                self.inactive.insert(self.full_by_hash[block.seq_hash])

    def prefill_cost(self, sequence: Sequence) -> PrefillCost:
        """Longest cached prefix, capped by the prompt. A look only: no tick changes."""
        overlap = active_overlap = 0
        if self.caching:
            for block in sequence.blocks:
                if isinstance(block, Partial):
                    break
                if block.seq_hash in self.references:
                    active_overlap += 1
                elif block not in self.inactive and block.seq_hash not in self.pins:
                    break
                overlap += 1
        return PrefillCost(
            min(overlap * self.block_size, sequence.prompt_len),
            min(active_overlap * self.block_size, sequence.prompt_len),
        )
