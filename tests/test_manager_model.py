"""KvManager beside a model of it in dictionaries, under random use."""
import itertools
import uuid
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_manager import BACKENDS, changes, counts, deref, full, partial, plh

from mocker._evict import EvictionOrder
from mocker._manager import KvManager
from mocker.sequence import MoveBlock


class Model:
    """The manager in dictionaries: contents are (hash, parent hash, position), one hash a content."""

    def __init__(self, capacity, backend):
        self.free, self.backend = capacity, backend
        self.held, self.partial, self.inactive = Counter(), set(), {}  # inactive: content -> tick and level
        self.graph = {}     # (position, hash) -> [content or None for a ghost, parent key or None, child keys]
        self.ticks = itertools.count()
        self.sketch = EvictionOrder(capacity, "multi_lru")  # only for its estimates
        self.events = []

    def touch(self, content):
        if self.backend == "multi_lru":
            self.sketch.touch(plh(*content).as_u128())

    def insert(self, content):
        n = self.sketch.frequency(plh(*content).as_u128())
        self.inactive[content] = ((n >= 3) + (n >= 8) + (n >= 15), next(self.ticks))
        own, parent, position = content
        node = self.graph.setdefault((position, own), [None, None, set()])
        node[0] = content
        if position and node[1] is None:
            node[1] = (position - 1, parent or 0)
            self.graph.setdefault(node[1], [None, None, set()])[2].add((position, own))

    def remove(self, content):
        del self.inactive[content]
        key = (content[2], content[0])
        self.graph[key][0] = None
        while key and self.graph[key][0] is None and not self.graph[key][2]:
            _, parent, _ = self.graph.pop(key)
            if parent:
                self.graph[parent][2].discard(key)
            key = parent

    def victim(self):
        if self.backend != "lineage":
            return min(self.inactive, key=lambda c: self.inactive[c])
        leaves = [c for c in self.inactive if not self.graph[c[2], c[0]][2]]
        return min(leaves, key=lambda c: self.inactive[c][1])

    def hold(self, content, looked_up):
        if content in self.inactive:
            self.remove(content)
        self.held[content] += 1
        if looked_up:
            self.touch(content)

    def let_go(self, content):
        self.held[content] -= 1
        if not self.held[content]:
            del self.held[content]
            self.insert(content)

    def take(self, n):
        removed = []
        for _ in range(n):
            if self.free:
                self.free -= 1
            else:
                removed.append(self.victim())
                self.remove(removed[-1])
        return removed

    def use(self, contents, partials):
        hits = [c for c in contents if c in self.held or c in self.inactive]
        for content in hits:
            self.hold(content, content not in self.held)
        fresh = [c for c in contents if c not in hits]
        new_partials = [p for p in partials if p not in self.partial]
        if len(fresh) + len(new_partials) > self.free + len(self.inactive):
            for content in hits:
                self.let_go(content)
            return None
        removed = self.take(len(fresh) + len(new_partials))
        self.partial.update(new_partials)
        parent, run = None, []
        for content in [*contents, None]:
            if content in fresh:
                run.append(content[0])
                self.hold(content, True)
                continue
            if run:
                self.events.append(("stored", parent, run))
                run = []
            if content:
                parent = content[0]
        if removed:
            self.events.append(("removed", [c[0] for c in removed]))
        return len(contents) + len(partials)

    def promote(self, block, content):
        self.partial.remove(block)
        if content in self.held or content in self.inactive:
            self.hold(content, content not in self.held)
            self.free += 1
        else:
            self.hold(content, True)
            self.events.append(("stored", content[1], [content[0]]))


def contents_of(parents):
    """A forest of contents: parents[i] < i is the parent of i, i itself for a root."""
    contents = []
    for i, parent in enumerate(parents):
        own = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
        contents.append((own, None, 0) if parent == i else (own, contents[parent][0], contents[parent][2] + 1))
    return contents


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 12), n=st.integers(1, 12))
def test_manager_follows_the_model(backend, data, capacity, n):
    contents = contents_of([data.draw(st.integers(0, i)) for i in range(n)])
    manager = KvManager(capacity, 4, eviction_backend=backend, capture_events=True)
    model = Model(capacity, backend)
    uuids = [uuid.UUID(int=i) for i in range(3)]
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(("use", "use", "use", "deref", "deref", "promote", "partial", "reserve")))
        model.events.clear()
        if step == "use":
            chosen = data.draw(st.lists(st.sampled_from(contents), min_size=1, max_size=6, unique=True))
            partials = data.draw(st.lists(st.sampled_from(uuids), max_size=2, unique=True))
            signal = MoveBlock.Use([full(c[0]) for c in chosen] + [partial(u) for u in partials], [],
                                   [plh(*c) for c in chosen])
            assert manager.process(signal) == model.use(chosen, partials)
        elif step == "deref" and model.held:
            chosen = data.draw(st.lists(st.sampled_from(sorted(model.held)), min_size=1, unique=True))
            assert deref(manager, *(c[0] for c in chosen)) == 1
            for content in chosen:
                model.let_go(content)
        elif step == "promote" and model.partial:
            block = data.draw(st.sampled_from(sorted(model.partial)))
            content = data.draw(st.sampled_from(contents))
            manager.process(MoveBlock.Promote(block, content[0], content[1], None, plh(*content)))
            model.promote(block, content)
        elif step == "partial" and model.partial:
            block = data.draw(st.sampled_from(sorted(model.partial)))
            manager.process(MoveBlock.Deref([partial(block)]))
            model.partial.remove(block)
            model.free += 1
        elif step == "reserve":
            count = data.draw(st.integers(0, 3))
            reservation = manager.reserve_decode_blocks(count)
            assert (reservation is None) == (count > model.free + len(model.inactive))
            if reservation is not None:
                removed = model.take(count)
                if removed:
                    model.events.append(("removed", [c[0] for c in removed]))
                assert manager.num_active_blocks() == len(model.held) + len(model.partial) + count
                reservation.release()
                model.free += count
        assert changes(manager) == model.events
        active = len(model.held) + len(model.partial)
        assert counts(manager) == (active, model.held.total() + len(model.partial), len(model.inactive))
        assert model.free + active + len(model.inactive) == capacity
        assert sorted(filter(None, manager.holders.tolist())) == sorted(model.held.values())
