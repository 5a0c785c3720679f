"""KvManager: scripts with known outcomes, and refusals."""
import gc

import pytest

from mocker._manager import DecodeBlockReservation, DestinationReservation, KvManager
from mocker.sequence import ActiveSequence, MoveBlock, PositionalLineageHash, PrefillCost, UniqueBlock

BACKENDS = ("lineage", "lru", "multi_lru")
full, partial = UniqueBlock.FullBlock, UniqueBlock.PartialBlock


def plh(value, parent=None, position=0):
    return PositionalLineageHash.new(value, parent, position)


def use(manager, hashes, plhs=None, **options):
    plhs = [plh(h + 100) for h in hashes] if plhs is None else plhs
    return manager.process(MoveBlock.Use([full(h) for h in hashes], options.pop("block_hashes", []), plhs, **options))


def use_partial(manager, block):
    return manager.process(MoveBlock.Use([block], [], []))


def deref(manager, *hashes):
    return manager.process(MoveBlock.Deref([full(h) for h in hashes]))


def process_all(manager, signals):
    assert all(manager.process(signal) for signal in signals)


def changes(manager):
    """Drained events as ("stored", parent, hashes) and ("removed", hashes)."""
    out = []
    for event in manager.drain_events():
        data = event["event"]["data"]
        if "stored" in data:
            out.append(("stored", data["stored"]["parent_hash"], [b["block_hash"] for b in data["stored"]["blocks"]]))
        else:
            out.append(("removed", data["removed"]["block_hashes"]))
    return out


def counts(manager):
    return manager.num_active_blocks(), manager.num_active_block_refs(), manager.num_inactive_blocks()


def sequence(tokens, max_output=16, block_size=4, **options):
    return ActiveSequence(tokens, max_output, block_size, **options)


def hashes_of(seq):
    return [b.hash for b in seq.unique_blocks if b.is_full]


# ---- Use and Deref

def test_use_holds_a_block_once_a_signal():
    manager = KvManager(10, 16)
    assert use(manager, [1]) == 1
    assert counts(manager) == (1, 1, 0)
    assert use(manager, [1]) == 1
    assert counts(manager) == (1, 2, 0)
    assert manager.get_active_perc() == 0.1
    assert (manager.max_capacity, manager.block_size, manager.dp_rank, manager.worker_id) == (10, 16, 0, 0)


def test_last_deref_leaves_an_inactive_block_for_any_sequence_hash_with_its_identity():
    manager = KvManager(10, 16, capture_events=True)
    use(manager, [1], [plh(100)])
    use(manager, [1], [plh(100)])
    deref(manager, 1)
    assert counts(manager) == (1, 1, 0)
    deref(manager, 1)
    assert counts(manager) == (0, 0, 1)
    assert changes(manager) == [("stored", None, [1])]
    assert use(manager, [2], [plh(100)]) == 1
    assert counts(manager) == (1, 1, 0)
    assert use(manager, [3], [plh(100)]) == 1  # held under another sequence hash: the same physical block
    assert counts(manager) == (1, 2, 0)
    assert changes(manager) == []
    deref(manager, 2)
    assert counts(manager) == (1, 1, 0)


def test_shared_prefix_is_held_twice():
    manager = KvManager(10, 16)
    use(manager, [0, 1, 2])
    use(manager, [0, 1, 3])
    assert counts(manager) == (4, 6, 0)
    assert sorted(manager.holders.tolist()) == [0] * 6 + [1, 1, 2, 2]
    with pytest.raises(ValueError, match="read-only"):
        manager.holders[0] = 1


@pytest.mark.parametrize("fill, more", [([0, 1, 2, 3], 4), (list(range(10)), 10)])
def test_exhaustion_returns_none_and_leaves_holds_alone(fill, more):
    manager = KvManager(len(fill), 16, capture_events=True)
    assert use(manager, fill) == len(fill)
    manager.drain_events()
    before = counts(manager)
    assert use(manager, [more]) is None
    assert use(manager, [0, more]) is None
    assert use_partial(manager, partial()) is None
    assert counts(manager) == before
    assert changes(manager) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_inactive_blocks_make_room(backend):
    manager = KvManager(4, 16, eviction_backend=backend)
    assert manager.eviction_backend == backend
    for h in range(4):
        assert use(manager, [h]) == 1
    for h in range(4):
        deref(manager, h)
    for h in range(10, 14):
        assert use(manager, [h]) == 1
    assert counts(manager) == (4, 4, 0)


def test_partial_blocks_have_one_holder_and_go_back_to_the_pool():
    manager = KvManager(2, 16)
    block = partial()
    assert use_partial(manager, block) == 1
    assert use_partial(manager, block) == 1  # held already: nothing to do
    assert counts(manager) == (1, 1, 0)
    assert manager.process(MoveBlock.Deref([block])) == 1
    assert counts(manager) == (0, 0, 0)


def test_reactivation_publishes_nothing():
    manager = KvManager(4, 16, capture_events=True)
    use(manager, [1])
    deref(manager, 1)
    use(manager, [1])
    assert changes(manager) == [("stored", None, [1])]


def test_empty_signals_do_nothing():
    manager = KvManager(1, 16, capture_events=True)
    assert use(manager, []) == 0
    assert deref(manager) == 1
    assert counts(manager) == (0, 0, 0)
    assert manager.drain_events() == []


# ---- events

TREE = {0: None, 1: 0, 2: 1, 3: 2, 4: 3, 5: 1, 6: 5, 7: 2, 8: 7, 9: 8, 10: None, 11: 10, 12: 11, 13: None}


def tree_plh(block):
    depth = -1
    at = block
    while at is not None:
        at, depth = TREE[at], depth + 1
    return plh(block, TREE[block], depth)


def test_life_of_a_pool_with_branches():
    manager = KvManager(10, 16, capture_events=True)

    def use_blocks(*blocks):
        assert use(manager, blocks, [tree_plh(b) for b in blocks]) == len(blocks)
        return changes(manager)

    assert use_blocks(0, 1, 2, 3, 4) == [("stored", None, [0, 1, 2, 3, 4])]
    assert use_blocks(0, 1, 5, 6) == [("stored", 1, [5, 6])]
    assert counts(manager) == (7, 9, 0)
    deref(manager, 4, 3, 2, 1, 0)
    assert counts(manager) == (4, 4, 3)
    deref(manager, 6, 5, 1, 0)
    assert counts(manager) == (0, 0, 7)
    assert changes(manager) == []
    assert use_blocks(0, 1, 2, 7, 8, 9) == [("stored", 2, [7, 8, 9])]
    assert counts(manager) == (6, 6, 4)
    assert use_blocks(10, 11, 12) == [("stored", None, [10, 11, 12]), ("removed", [4, 3, 6])]
    assert counts(manager) == (9, 9, 1)
    assert use_blocks(13) == [("stored", None, [13]), ("removed", [5])]
    assert counts(manager) == (10, 10, 0)


def test_events_have_the_reference_form():
    manager = KvManager(2, 4, capture_events=True, worker_id=3, dp_rank=1)
    use(manager, [7, 8], [plh(7), plh(8, 7, 1)], block_hashes=[70, 80])
    deref(manager, 8, 7)
    use(manager, [9], [plh(9)])
    header = {"storage_tier": "device", "worker_id": 3}
    stored = {"parent_hash": None, "start_position": None, "blocks": [
        {"block_hash": 7, "mm_extra_info": None, "tokens_hash": 70},
        {"block_hash": 8, "mm_extra_info": None, "tokens_hash": 80}]}
    unnamed = {"parent_hash": None, "start_position": None, "blocks": [
        {"block_hash": 9, "mm_extra_info": None, "tokens_hash": 0}]}
    assert manager.drain_events() == [
        {"event": {"data": {"stored": stored}, "dp_rank": 1, "event_id": 0}, **header},
        {"event": {"data": {"stored": unnamed}, "dp_rank": 1, "event_id": 1}, **header},
        {"event": {"data": {"removed": {"block_hashes": [8]}}, "dp_rank": 1, "event_id": 2}, **header}]
    assert manager.drain_events() == []
    silent = KvManager(2, 4)
    use(silent, [7])
    assert silent.drain_events() == []


def test_hits_cut_stored_runs_and_become_their_parent():
    manager = KvManager(10, 4, capture_events=True)
    use(manager, [2])
    use(manager, [4])
    manager.drain_events()
    use(manager, [0, 1, 2, 3, 4, 5, 6], parent=full(99))
    assert changes(manager) == [("stored", 99, [0, 1]), ("stored", 2, [3]), ("stored", 4, [5, 6])]


def test_chunks_of_a_prompt_are_chained():
    manager = KvManager(256, 64, capture_events=True)
    seq = sequence(range(512), block_size=64)
    for tokens in (256, 512):
        assert manager.process(seq.prepare_allocation(tokens)) == 4
        seq.commit_allocation(tokens)
    h = hashes_of(seq)
    assert changes(manager) == [("stored", None, h[:4]), ("stored", h[3], h[4:])]


def test_new_suffix_is_one_run_behind_the_last_reused_block():
    manager = KvManager(16, 4, capture_events=True)
    first, second = sequence(range(8)), sequence(range(20))
    process_all(manager, [first.take_creation_signal(), *first.free_signal()])
    manager.drain_events()
    process_all(manager, [second.take_creation_signal()])
    h = hashes_of(second)
    assert changes(manager) == [("stored", h[1], h[2:])]


def test_one_new_block_removes_one_of_two():
    manager = KvManager(2, 4, capture_events=True)
    use(manager, [1, 2])
    deref(manager, 2, 1)
    manager.drain_events()
    use(manager, [3])
    assert changes(manager) == [("stored", None, [3]), ("removed", [2])]


# ---- Promote

def promote(manager, block, seq_hash, identity, parent=None, block_hash=0):
    return manager.process(MoveBlock.Promote(block.uuid, seq_hash, parent, block_hash, identity))


def test_promote_turns_a_partial_block_into_a_full_one():
    manager = KvManager(10, 16, capture_events=True)
    block = partial()
    use_partial(manager, block)
    assert promote(manager, block, 42, plh(500), parent=41, block_hash=7) == 1
    assert counts(manager) == (1, 1, 0)
    assert manager.drain_events()[0]["event"]["data"]["stored"] == {
        "parent_hash": 41, "start_position": None,
        "blocks": [{"block_hash": 42, "mm_extra_info": None, "tokens_hash": 7}]}
    deref(manager, 42)
    assert counts(manager) == (0, 0, 1)


def test_promote_into_an_active_block_frees_the_candidate():
    manager = KvManager(10, 16, capture_events=True)
    block = partial()
    use(manager, [42], [plh(500)])
    use_partial(manager, block)
    manager.drain_events()
    promote(manager, block, 42, plh(500))
    assert counts(manager) == (1, 2, 0)
    assert changes(manager) == []


def test_promote_into_an_inactive_block_keeps_the_active_count():
    manager = KvManager(10, 16, capture_events=True)
    block = partial()
    use(manager, [42], [plh(500)])
    deref(manager, 42)
    use_partial(manager, block)
    manager.drain_events()
    assert counts(manager) == (1, 1, 1)
    promote(manager, block, 42, plh(500))
    assert counts(manager) == (1, 1, 0)
    assert changes(manager) == []


def test_requests_with_equal_prompts_and_planned_outputs_share_generated_blocks():
    manager = KvManager(16, 4, capture_events=True)
    twins = [sequence(range(3), 3, planned_output_ids=[9, 8, 7]) for _ in range(2)]
    process_all(manager, [seq.take_creation_signal() for seq in twins])
    for _ in range(2):
        for seq in twins:
            process_all(manager, seq.generate())
    assert counts(manager) == (3, 4, 0)  # one shared full block, two partial ones
    assert changes(manager) == [("stored", None, hashes_of(twins[0]))]


# ---- refusals

def test_refused_signals_change_nothing():
    manager = KvManager(6, 4, capture_events=True)
    block, other = partial(), partial()
    use(manager, [1, 2], [plh(1), plh(2, 1, 1)])
    use(manager, [3], [plh(3)])
    deref(manager, 3)
    use_partial(manager, block)
    manager.drain_events()
    before = counts(manager), manager.holders.tolist()
    three, new = plh(3), plh(4)
    refused = [
        (ValueError, "plhs", MoveBlock.Use([full(3), full(4)], [], [three])),
        (ValueError, "plhs", MoveBlock.Use([other], [], [three])),
        (ValueError, "block hashes", MoveBlock.Use([full(3), full(4)], [1], [three, new])),
        (ValueError, "token id lists", MoveBlock.Use([full(3), full(4)], [], [three, new], [[1]])),
        (ValueError, "parent", MoveBlock.Use([full(3)], [], [three], None, block)),
        (ValueError, "occurs twice", MoveBlock.Use([full(3), full(4), full(4)], [], [three, new, new])),
        (ValueError, "occurs twice", MoveBlock.Use([full(3), other, other], [], [three])),
        (KeyError, "held 0 times", MoveBlock.Deref([full(1), full(3)])),
        (KeyError, "held 1 times, not 2", MoveBlock.Deref([full(2), full(1), full(2)])),
        (KeyError, "held 0 times", MoveBlock.Deref([block, other])),
        (KeyError, "no partial block", MoveBlock.Promote(other.uuid, 5, None, None, plh(5))),
        (TypeError, "MoveBlock", full(1)),
    ]
    for error, text, signal in refused:
        with pytest.raises(error, match=text):
            manager.process(signal)
        assert (counts(manager), manager.holders.tolist()) == before
        assert manager.drain_events() == []


@pytest.mark.parametrize("arguments", [
    {"max_capacity": 0}, {"block_size": 0}, {"block_size": 3}, {"block_size": 2048}, {"eviction_backend": "random"},
])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments)).removeprefix("eviction_")):
        KvManager(**{"max_capacity": 4, "block_size": 4, **arguments})


# ---- reservations

def test_failed_decode_reservation_evicts_nothing():
    manager = KvManager(2, 16, capture_events=True)
    use(manager, [1])
    use(manager, [2])
    deref(manager, 1)
    deref(manager, 2)
    manager.drain_events()
    assert manager.reserve_decode_blocks(3) is None
    assert counts(manager) == (0, 0, 2)
    assert changes(manager) == []
    with pytest.raises(ValueError, match="count"):
        manager.reserve_decode_blocks(-1)


def test_decode_reservation_serves_uses_and_returns_the_rest():
    manager = KvManager(4, 16, capture_events=True)
    use(manager, [1, 2])
    deref(manager, 2, 1)
    manager.drain_events()
    reservation = manager.reserve_decode_blocks(3)
    assert len(reservation) == 3
    assert counts(manager) == (3, 0, 1)
    assert changes(manager) == [("removed", [2])]  # at once
    block = partial()
    assert manager.process_decode_signal(MoveBlock.Use([block], [], []), reservation) == 1
    assert len(reservation) == 2
    assert manager.process_decode_signal(MoveBlock.Promote(block.uuid, 5, None, None, plh(5)), reservation) == 1
    with pytest.raises(ValueError, match="only 2 are reserved"):
        manager.process_decode_signal(MoveBlock.Use([partial(), partial(), partial()], [], []), reservation)
    assert counts(manager) == (3, 1, 1)
    for _ in range(2):
        reservation.release()
    assert counts(manager) == (1, 1, 1)
    with pytest.raises(ValueError, match="not one of this manager"):
        KvManager(4, 16).process_decode_signal(MoveBlock.Deref([]), reservation)


def test_dropped_reservations_give_their_slots_back():
    manager = KvManager(4, 4)
    with manager.reserve_decode_blocks(2):
        assert manager.num_active_blocks() == 2
    manager.reserve_decode_blocks(2)
    manager.reserve_destination(sequence(range(8)))
    gc.collect()
    assert counts(manager) == (0, 0, 0)
    for kind in (DecodeBlockReservation, DestinationReservation):
        with pytest.raises(TypeError):
            kind()


def test_transfer_footprint_is_what_the_cache_misses():
    manager = KvManager(16, 4)
    cold, prefix = sequence(range(10)), sequence(range(4))
    with manager.reserve_destination(cold) as reservation:
        assert reservation.transferable_prompt_tokens == 12
    process_all(manager, [prefix.take_creation_signal()])
    with manager.reserve_destination(cold) as reservation:
        assert (len(reservation), reservation.transferable_prompt_tokens) == (2, 8)
        assert counts(manager) == (3, 1, 0)
    with manager.reserve_destination(prefix) as reservation:
        assert reservation.transferable_prompt_tokens == 0  # allocated: nothing in the layout
    with manager.reserve_destination(sequence(range(4))) as reservation:
        assert reservation.transferable_prompt_tokens == 0
    assert counts(manager) == (1, 1, 0)


def test_activation_registers_and_publishes_the_reserved_blocks():
    manager = KvManager(8, 4, capture_events=True)
    prefix, seq = sequence(range(4)), sequence(range(10))
    process_all(manager, [prefix.take_creation_signal()])
    manager.drain_events()
    reservation = manager.reserve_destination(seq)
    assert changes(manager) == []
    assert manager.get_prefill_cost(seq).active_cached_tokens == 4
    manager.activate_destination(reservation)
    h = hashes_of(seq)
    assert changes(manager) == [("stored", h[0], [h[1]])]
    assert counts(manager) == (3, 4, 0)
    with pytest.raises(ValueError, match="destination"):
        manager.activate_destination(reservation)
    seq.commit_allocation(10)
    process_all(manager, seq.free_signal())
    assert counts(manager) == (1, 1, 1)
    reservation.release()
    assert counts(manager) == (1, 1, 1)


def test_activation_adopts_a_block_that_came_meanwhile():
    manager = KvManager(2, 4, capture_events=True)
    seq = sequence([1, 2, 3, 4])
    reservation = manager.reserve_destination(seq)
    process_all(manager, [seq.prepare_allocation(4)])
    assert manager.num_active_blocks() == 2
    manager.drain_events()
    manager.activate_destination(reservation)
    assert counts(manager) == (1, 2, 0)
    assert changes(manager) == []


def test_activation_around_a_block_that_came_meanwhile_stores_twice():
    manager = KvManager(8, 4, capture_events=True)
    seq = sequence(range(12))
    h, identities = hashes_of(seq), seq.positional_lineage_hashes
    reservation = manager.reserve_destination(seq)
    use(manager, [h[1]], [identities[1]])
    manager.drain_events()
    manager.activate_destination(reservation)
    assert changes(manager) == [("stored", None, [h[0]]), ("stored", h[1], [h[2]])]
    assert counts(manager) == (3, 4, 0)


def test_activation_of_an_inconsistent_layout_is_refused_whole():
    manager = KvManager(8, 4, capture_events=True)
    prefix, seq = sequence(range(4)), sequence(range(10))
    process_all(manager, [prefix.take_creation_signal()])
    manager.drain_events()
    reservation = manager.reserve_destination(seq)
    good, before = reservation.layout, counts(manager)
    swapped = [good.blocks[1], good.blocks[0], good.blocks[2]]
    for blocks, hashes, identities, ids in (
            (good.blocks, good.block_hashes, good.plhs[:1], None),
            (good.blocks[:2], good.block_hashes, good.plhs, None),
            (good.blocks, good.block_hashes[:1], good.plhs, None), (swapped, good.block_hashes, good.plhs, None),
            (good.blocks, good.block_hashes, good.plhs, [[1]])):
        reservation.layout = MoveBlock.Use(blocks, hashes, identities, ids)
        with pytest.raises(ValueError):
            manager.activate_destination(reservation)
        assert counts(manager) == before
        assert manager.drain_events() == []
    reservation.layout = good
    manager.activate_destination(reservation)
    assert counts(manager) == (3, 4, 0)


def test_prefix_held_only_by_a_reservation_is_cached_but_not_active():
    manager = KvManager(8, 4)
    first, seq = sequence(range(8)), sequence(range(10))
    process_all(manager, [first.take_creation_signal(), *first.free_signal()])
    with manager.reserve_destination(seq):
        assert counts(manager) == (3, 0, 0)
        assert manager.get_prefill_cost(seq) == PrefillCost(1, 2, 8, 0)


# ---- cost

def test_cost_without_overlap():
    seq = sequence(range(35), block_size=16)
    assert KvManager(10, 16).get_prefill_cost(seq) == PrefillCost(3, 35, 0, 0)


def test_cost_tells_active_from_inactive_blocks():
    manager = KvManager(10, 4)
    seq = sequence(range(8), 4)
    h, identities = hashes_of(seq), seq.positional_lineage_hashes
    use(manager, h[:1], identities[:1])
    assert manager.get_prefill_cost(seq) == PrefillCost(1, 4, 4, 4)
    deref(manager, h[0])
    assert manager.get_prefill_cost(seq) == PrefillCost(1, 4, 4, 0)
    use(manager, h[1:], identities[1:])
    assert manager.get_prefill_cost(seq) == PrefillCost(0, 0, 8, 4)


def test_cost_stops_at_the_first_miss_and_at_the_prompt():
    manager = KvManager(10, 4)
    seq = sequence(range(6), planned_output_ids=range(10, 26))
    process_all(manager, [seq.take_creation_signal()])
    for _ in range(3):
        process_all(manager, seq.generate())
    assert manager.get_prefill_cost(seq) == PrefillCost(1, 0, 6, 6)  # the generated part of block 1 does not count
    other = sequence([*range(90, 94), *range(4, 8)])
    assert manager.get_prefill_cost(other) == PrefillCost(2, 8, 0, 0)


def test_cost_is_full_without_caching():
    manager = KvManager(10, 4)
    seq = sequence(range(8), enable_prefix_caching=False)
    process_all(manager, [seq.take_creation_signal()])
    assert manager.get_prefill_cost(seq) == PrefillCost(2, 8, 0, 0)


# ---- preemption

def test_second_preemption_frees_exactly_what_was_allocated_again():
    manager = KvManager(16, 4)
    seq = sequence(range(6))
    process_all(manager, [seq.take_creation_signal()])
    for _ in range(3):
        process_all(manager, seq.generate())
        seq.commit_allocation(len(seq))
    assert manager.num_active_blocks() == 3
    process_all(manager, seq.reset_with_signal())
    assert manager.num_active_blocks() == 0
    assert manager.process(seq.prepare_allocation(6)) == 2
    seq.commit_allocation(6)
    assert manager.num_active_blocks() == 2
    process_all(manager, seq.reset_with_signal())
    assert manager.num_active_blocks() == 0


def test_preempted_request_without_caching_finds_its_own_blocks():
    manager = KvManager(8, 4, capture_events=True)
    seq = sequence(range(16), enable_prefix_caching=False)
    process_all(manager, [seq.take_creation_signal(), *seq.reset_with_signal()])
    assert counts(manager) == (0, 0, 4)
    process_all(manager, [seq.take_creation_signal()])
    assert counts(manager) == (4, 4, 0)
    assert changes(manager) == [("stored", None, hashes_of(seq))]


def test_failed_use_makes_the_found_blocks_newest_root_first():
    def evictions(fail):
        manager = KvManager(4, 4, capture_events=True)
        a, b, x = plh(1), plh(2, 1, 1), plh(3)
        use(manager, [1, 2], [a, b])
        use(manager, [3], [x])
        use(manager, [4], [plh(4)])
        deref(manager, 2, 1)
        deref(manager, 3)
        if fail:
            assert use(manager, [1, 2, 5, 6], [a, b, plh(5), plh(6)]) is None
            assert counts(manager) == (1, 1, 3)
        manager.drain_events()
        use(manager, [7, 8, 9])
        return changes(manager)[-1]
    assert evictions(False) == ("removed", [2, 1, 3])
    # Block 1 got the smaller tick of the two, but its child keeps it back.
    assert evictions(True) == ("removed", [3, 2, 1])
