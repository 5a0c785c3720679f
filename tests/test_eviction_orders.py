"""Eviction orders alone: lineage, LRU, multi-LRU with its sketch."""

import pytest
from test_manager import BACKENDS, changes, counts, deref, plh, use

from mocker._evict import EvictionOrder
from mocker._manager import KvManager


def order_of(entries, backend="lineage", capacity=None):
    order = EvictionOrder(capacity or max(1, len(entries)), backend)
    for slot, identity in enumerate(entries):
        order.insert(slot, identity.as_u128())
    return order


def drain(order):
    return list(iter(order.pop, None))


def no_nodes_left(order):
    return len(order) == 0 and (order.slabs["nodes"]["slot"] == -2).all() and (order.slabs["index"] == -1).all()


def test_lineage_evicts_leaves_and_lets_a_bared_parent_keep_its_tick():
    a, b, x, y = plh(1), plh(2, 1, 1), plh(3), plh(4, 3, 1)
    assert drain(order_of([a])) == [0]
    assert drain(order_of([a, b])) == [1, 0]
    assert drain(order_of([b, a])) == [0, 1]
    assert drain(order_of([a, b, x, y])) == [1, 0, 3, 2]


def test_lineage_parent_waits_behind_a_ghost_that_was_its_child():
    # 1-2-3 inserted root first, then 2 is used: what is left of it still links 3 to 1.
    order = order_of([plh(1), plh(2, 1, 1), plh(3, 2, 2), plh(9)])
    order.remove(1)
    assert drain(order) == [2, 0, 3]
    assert no_nodes_left(order)


def test_lineage_ghost_made_for_an_absent_parent_is_not_linked_upwards():
    # 2 was never there: nothing says that 1 is an ancestor of 3.
    assert drain(order_of([plh(1), plh(3, 2, 2)])) == [0, 1]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [101, 1000])
def test_lineage_deep_chain_leaves_nothing_behind(n, reverse):
    chain = [plh(i + 1, i or None, i) for i in range(n)]
    order = order_of(chain[::-1] if reverse else chain)
    assert drain(order) == (list(range(n)) if reverse else list(range(n))[::-1])
    assert no_nodes_left(order)
    lone = order_of(chain[-1:])
    assert (lone.slabs["nodes"]["slot"] == -1).sum() == 1  # the ghost of its parent
    lone.remove(0)
    assert no_nodes_left(lone)


def test_lineage_links_across_the_layouts_of_identities():
    for start in (253, 65_533):
        hashes = [(2**64 - 1) // 7 * (i + 1) for i in range(6)]
        chain = [plh(h, hashes[i - 1] if i else 5, start + i) for i, h in enumerate(hashes)]
        assert drain(order_of(chain)) == [5, 4, 3, 2, 1, 0]


def test_reinserted_slot_is_the_newest():
    for backend in BACKENDS:
        order = order_of([plh(i) for i in range(3)], backend)
        order.remove(0)
        assert 0 not in order
        assert len(order) == 2
        order.insert(0, plh(0).as_u128())
        assert drain(order) == [1, 2, 0]


def test_lineage_recycles_nodes():
    order = EvictionOrder(4)
    for i in range(1000):
        order.insert(i % 4, plh(i, i + 1, 1).as_u128())
        order.insert((i + 1) % 4, plh(i + 7, i, 2).as_u128())
        assert drain(order) == [(i + 1) % 4, i % 4]
    assert no_nodes_left(order)


def test_lineage_takes_two_contents_with_one_key():
    one, two = plh(5, 1, 1), plh(5 + 2**60, 2, 1)  # equal position, equal hash as far as children store it
    child = plh(6, 5, 2)
    order = order_of([one, two, child])
    assert drain(order) == [1, 2, 0]
    assert no_nodes_left(order)
    manager = KvManager(4, 4)
    use(manager, [5], [one])
    deref(manager, 5)
    use(manager, [6], [two])  # not the same content
    assert counts(manager) == (1, 1, 1)
    deref(manager, 6)
    assert counts(manager) == (0, 0, 2)
    assert use(manager, [7, 8, 9, 10]) == 4


def test_lru_is_insertion_order():
    assert drain(order_of([plh(1), plh(2, 1, 1), plh(3)], "lru")) == [0, 1, 2]


def test_multi_lru_evicts_cold_levels_first():
    order = EvictionOrder(100, "multi_lru")
    accesses = [15, 14, 8, 7, 3, 2, 0, 40]
    for slot, count in enumerate(accesses):
        for _ in range(count):
            order.touch(plh(slot).as_u128())
        assert order.frequency(plh(slot).as_u128()) == min(count, 15)
    for slot in range(len(accesses)):
        order.insert(slot, plh(slot).as_u128())
    assert drain(order) == [5, 6, 3, 4, 1, 2, 0, 7]


def test_sketch_halves_after_ten_accesses_a_slot():
    order = EvictionOrder(2, "multi_lru")
    key = plh(1).as_u128()
    for _ in range(15):
        order.touch(key)
    assert order.frequency(key) == 15
    for other in range(2, 8):  # 20 increments of size in all; the table has one word of sixteen counters
        if order.frequency(key) < 15:
            break
        order.touch(plh(other).as_u128())
    assert order.frequency(key) == 7


def test_level_is_the_one_at_insertion():
    order = EvictionOrder(40, "multi_lru")
    order.insert(0, plh(0).as_u128())
    for _ in range(5):
        order.touch(plh(0).as_u128())
    order.insert(1, plh(1).as_u128())
    assert drain(order) == [0, 1]


def test_multi_lru_gives_the_recorded_order():
    # Recorded from kvbm-logical 1.3.0: the same accesses through its block manager with the multi-LRU backend.
    manager = KvManager(8, 4, eviction_backend="multi_lru", capture_events=True)
    state, removed = 1, []
    for _ in range(120):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        block = (state >> 33) % 24 & (state >> 40) % 24
        use(manager, [block], [plh(block * 0x9E3779B97F4A7C15 % 2**64)])
        deref(manager, block)
        removed += [h for change in changes(manager) if change[0] == "removed" for h in change[1]]
    assert removed == RECORDED


RECORDED = [
    14, 4, 3, 20, 6, 17, 10, 23, 16, 1, 6, 8, 5, 1, 3, 18, 1, 17, 3, 9, 3, 10,
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_refuses_what_makes_no_sense(backend):
    order = EvictionOrder(2, backend)
    assert order.pop() is None
    order.insert(0, 1)
    for call in (lambda: order.insert(0, 2), lambda: order.insert(2, 2), lambda: order.insert(-1, 2),
                 lambda: order.remove(1), lambda: order.remove(2), lambda: order.insert(1, 3 << 126)):
        with pytest.raises(ValueError):
            call()
    for value in (-1, 1 << 128):
        with pytest.raises((ValueError, OverflowError)):
            order.insert(1, value)
    assert len(order) == 1
    for capacity, name in ((0, "lru"), (1, "fifo"), (2**29 + 1, "lru")):
        with pytest.raises(ValueError):
            EvictionOrder(capacity, name)
