"""ActiveSequence: signals at block boundaries, allocation, undo, release; and the packed block identity."""
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mocker._hash import compute_seq_hashes
from mocker.sequence import ActiveSequence, MoveBlock, PositionalLineageHash, UniqueBlock


def sequence_of(n, max_output=100, block_size=16, **options):
    return ActiveSequence(range(n), max_output, block_size, **options)


def with_signal(n, max_output=100, block_size=16):
    return ActiveSequence.new_with_signal(range(n), max_output, block_size)


def is_partial_use(signal):
    return isinstance(signal, MoveBlock.Use) and len(signal.blocks) == 1 and not signal.blocks[0].is_full \
        and not signal.block_hashes and not signal.plhs and signal.parent is None


def check_hashes(seq):
    """Full blocks carry the hashes of their tokens; local hashes and identities go with them one to one."""
    full = [b.hash for b in seq.unique_blocks if b.is_full]
    local, chained = compute_seq_hashes(seq.tokens, seq.block_size)
    assert seq.block_hashes == local[:len(full)]
    assert full == chained[:len(full)]
    assert seq.positional_lineage_hashes == [
        PositionalLineageHash.new(h, full[i - 1] if i else None, i) for i, h in enumerate(full)]


def test_creation_of_a_short_prompt_uses_one_partial_block():
    seq, signal = with_signal(15)
    assert (seq.num_input_tokens, len(seq), seq.extra_tokens, seq.is_empty) == (15, 15, 15, False)
    assert seq.num_allocated_tokens == 15
    assert is_partial_use(signal)


def test_only_the_token_behind_a_full_block_signals():
    seq, _ = with_signal(15)
    partial = seq.unique_blocks[0].uuid
    assert seq.push(15) is None
    assert seq.unique_blocks[0].uuid == partial  # filled to the brim, still partial
    promote, use = seq.push(16)
    assert (promote.uuid, promote.parent_hash) == (partial, None)
    assert promote.block_hash == promote.seq_hash == compute_seq_hashes(range(16), 16)[0][0]
    assert promote.plh == PositionalLineageHash.root(promote.block_hash)
    assert promote.token_ids is None
    assert is_partial_use(use)
    assert seq.unique_blocks == [UniqueBlock.FullBlock(promote.seq_hash), use.blocks[0]]
    assert seq.extra_tokens == 1


def test_equal_tokens_give_equal_full_blocks_by_any_route_and_own_partial_ids():
    grown, _ = with_signal(15)
    grown.push(15)
    grown.push(16)
    prompt, _ = with_signal(16)
    assert is_partial_use(prompt.push(16)[0])  # an aligned prompt has nothing to promote
    prompt.pop()
    prompt.push(16)
    assert grown.unique_blocks[0] == prompt.unique_blocks[0]
    assert grown.unique_blocks[1] != prompt.unique_blocks[1]


def test_promotion_names_the_full_block_before_it():
    grown, _ = with_signal(15)
    for token in (15, 16, 17):
        grown.push(token)
    grown.pop()
    grown.pop()
    grown.push(16)
    prompt, _ = with_signal(16)
    for token in range(16, 48):
        prompt.push(token)
        if token > 16:
            grown.push(token)
    assert grown.unique_blocks[:2] == prompt.unique_blocks[:2]
    promote, use = grown.push(48)
    assert promote.parent_hash == grown.unique_blocks[1].hash
    assert is_partial_use(use)
    check_hashes(grown)


def test_reset_frees_what_is_allocated_and_keeps_generated_tokens():
    seq, _ = with_signal(15)
    seq.push(15)
    seq.push(16)
    seq.commit_allocation(len(seq))
    blocks = seq.unique_blocks
    assert seq.reset_with_signal() == [MoveBlock.Deref([blocks[1]]), MoveBlock.Deref([blocks[0]])]
    assert (seq.num_allocated_tokens, seq.generated_tokens, len(seq)) == (0, 2, 17)
    assert seq.reset_with_signal() == []


def test_signals_over_a_whole_generation():
    seq, signal = with_signal(14, max_output=5)
    assert is_partial_use(signal)
    signals = [seq.generate() for _ in range(5)]
    assert [len(s) for s in signals] == [0, 0, 2, 0, 2]
    assert isinstance(signals[2][0], MoveBlock.Promote)
    assert is_partial_use(signals[2][1])
    blocks = seq.unique_blocks
    assert signals[4] == [MoveBlock.Deref([blocks[1]]), MoveBlock.Deref([blocks[0]])]
    with pytest.raises(ValueError, match="all 5 output tokens"):
        seq.generate()


def test_last_token_on_a_boundary_still_promotes_and_uses():
    seq, _ = with_signal(16, max_output=1)
    signals = seq.generate()
    assert is_partial_use(signals[0])
    assert [s.blocks[0].is_full for s in signals[1:]] == [False, True]


def test_sequence_that_ends_on_a_full_block_leaves_it_partial():
    seq, _ = with_signal(14, max_output=2)
    assert seq.generate() == []
    assert [s.blocks[0].is_full for s in seq.generate()] == [False]


def test_prepare_allocation_slices_full_and_partial_blocks():
    seq = sequence_of(10, 4, 4)
    for tokens, blocks, hashes in ((4, 1, 1), (5, 2, 2), (8, 2, 2), (10, 3, 2), (99, 3, 2)):
        signal = seq.prepare_allocation(tokens)
        assert list(signal.blocks) == seq.unique_blocks[:blocks]
        assert list(signal.block_hashes) == seq.block_hashes[:hashes]
        assert list(signal.plhs) == seq.positional_lineage_hashes[:hashes]
        assert signal.parent is None
    assert seq.prepare_allocation(0) is None


def test_prepare_allocation_repeats_until_committed_and_goes_on_from_there():
    seq = sequence_of(10, 4, 4)
    assert seq.prepare_allocation(4) == seq.prepare_allocation(4)
    seq.commit_allocation(4)
    assert seq.prepare_allocation(4) is None
    signal = seq.prepare_allocation(8)
    assert list(signal.blocks) == seq.unique_blocks[1:2]
    assert list(signal.block_hashes) == seq.block_hashes[1:2]
    assert signal.parent == seq.unique_blocks[0]
    assert seq.allocate_blocks_for_chunk(8) == signal
    assert list(seq.take_creation_signal().blocks) == seq.unique_blocks[2:]
    assert seq.take_creation_signal() is None


def test_cached_hashes_follow_promotion_and_undo():
    seq, _ = with_signal(15, max_output=4)
    check_hashes(seq)
    for token in (15, 16):
        seq.push(token)
        check_hashes(seq)
    seq.pop()
    check_hashes(seq)
    assert len(seq) == 16
    assert seq.unique_blocks[-1].is_full


def test_retry_after_undo_repeats_the_planned_token_and_does_not_promote_again():
    seq = sequence_of(15, 3, planned_output_ids=[7, 8])
    seq.generate()
    token, signals = seq.generate_token()
    assert (token, len(signals)) == (8, 2)
    seq.pop()
    token, signals = seq.generate_token()
    assert token == 8
    assert len(signals) == 1
    assert is_partial_use(signals[0])
    assert seq.tokens[15:] == [7, 8]
    assert 0 <= seq.generate_token()[0] < 2**32  # the plan has ended: random


@pytest.mark.parametrize("n, pushes", [(4, 0), (7, 2)])
def test_undo_refuses_what_is_no_fresh_token(n, pushes):
    seq = sequence_of(n, 9, 4)
    for token in range(pushes):
        seq.push(token)
    for _ in range(pushes - 1):  # back to the boundary, behind which lies a promoted block
        seq.pop()
    before = seq.tokens, seq.unique_blocks, seq.generated_tokens
    with pytest.raises(ValueError, match="no output token|promoted block"):
        seq.pop()
    assert (seq.tokens, seq.unique_blocks, seq.generated_tokens) == before


def test_token_ids_travel_with_full_blocks_only_if_asked_and_cached():
    seq = sequence_of(10, 9, 4, emit_token_ids=True)
    assert seq.prepare_allocation(10).token_ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert seq.block_token_ids() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    seq.push(10)
    seq.push(11)
    assert seq.push(12)[0].token_ids == [8, 9, 10, 11]
    assert sequence_of(2, 9, 4, emit_token_ids=True).prepare_allocation(2).token_ids is None
    uncached = sequence_of(10, 9, 4, emit_token_ids=True, enable_prefix_caching=False)
    assert not uncached.emit_token_ids
    assert uncached.prepare_allocation(10).token_ids is None


def test_without_caching_every_sequence_has_its_own_identities():
    one, two = (sequence_of(10, 9, 4, enable_prefix_caching=False) for _ in range(2))
    assert one.block_hashes == []
    assert not {b.hash for b in one.unique_blocks if b.is_full} & {b.hash for b in two.unique_blocks if b.is_full}
    plhs = one.positional_lineage_hashes
    assert not set(plhs) & set(two.positional_lineage_hashes)
    assert [p.position for p in plhs] == [0, 1]
    assert all(p.parent_hash_fragment == 0 for p in plhs)
    one.push(10)
    one.push(11)
    promote = one.push(12)[0]
    assert promote.block_hash is None
    assert promote.parent_hash == one.unique_blocks[1].hash
    assert (promote.plh.position, promote.plh.parent_hash_fragment) == (2, 0)


def test_seed_repeats_random_tokens():
    def tokens(seed):
        seq = sequence_of(3, 20, 4, seed=seed)
        return [seq.generate_token()[0] for _ in range(20)]
    assert tokens(1) == tokens(1) != tokens(2)
    assert tokens(None) != tokens(None)


def test_footprints():
    seq = sequence_of(10, 7, 4)
    assert (seq.current_known_blocks, seq.to_completion_blocks, seq.max_output_tokens) == (3, 5, 7)
    empty = sequence_of(0, 3, 4)
    assert empty.is_empty
    assert (empty.current_known_blocks, empty.to_completion_blocks) == (0, 1)
    assert empty.take_creation_signal() is None
    assert is_partial_use(empty.push(1)[0])


@pytest.mark.parametrize("arguments", [
    {"block_size": 1}, {"block_size": 0}, {"max_output_tokens": -1}, {"tokens": [-1]}, {"tokens": [2**32]},
    {"planned_output_ids": [2**32]},
])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError):
        ActiveSequence(**{"tokens": [1], "max_output_tokens": 1, **arguments})
    with pytest.raises(ValueError, match="token"):
        sequence_of(1).push(2**32)


@given(st.integers(0, 20), st.integers(2, 5), st.integers(1, 30), st.randoms(use_true_random=False))
def test_any_generation_keeps_blocks_and_hashes_together(prompt, block_size, output, rng):
    seq = sequence_of(prompt, output, block_size, seed=rng.getrandbits(32))
    held = []
    signal = seq.take_creation_signal()
    held.extend(signal.blocks if signal else ())
    while seq.generated_tokens < output:
        for signal in seq.generate():
            if isinstance(signal, MoveBlock.Use):
                held.extend(signal.blocks)
            elif isinstance(signal, MoveBlock.Promote):
                held[held.index(UniqueBlock.PartialBlock(signal.uuid))] = UniqueBlock.FullBlock(signal.seq_hash)
            else:
                assert held.pop() == signal.blocks[0]  # released from the last block to the first
        if seq.generated_tokens < output:
            if rng.random() < 0.2 and seq.extra_tokens == 1:
                if is_partial_use(MoveBlock.Use(held[-1:], [], [])):
                    held.pop()
                seq.pop()
            assert held == seq.unique_blocks
        check_hashes(seq)
    assert held == []


# ---- identities

@pytest.mark.parametrize("position, mode, bits", [
    (0, 0, 54), (255, 0, 54), (256, 1, 46), (65_535, 1, 46), (65_536, 2, 38), (2**24 - 1, 2, 38),
])
def test_identity_layout(position, mode, bits):
    own, parent = 0xFEDCBA9876543210, 0xFFEEDDCCBBAA9988
    plh = PositionalLineageHash.new(own, parent, position)
    assert plh.as_u128() == mode << 126 | position << (64 + bits) | own << bits | parent % 2**bits
    assert (plh.mode, plh.position, plh.current_sequence_hash) == (mode, position, own)
    assert plh.parent_hash_fragment == parent % 2**bits


def test_identity_of_a_root_and_its_chain():
    tokens = list(range(1200))
    local, chained = compute_seq_hashes(tokens, 4)
    plh = PositionalLineageHash.root(local[0])
    assert plh == PositionalLineageHash.new(local[0], None, 0)
    assert plh.parent_hash_fragment == 0
    for i in range(1, len(local)):
        child = plh.extend(local[i])
        assert child == PositionalLineageHash.new(chained[i], chained[i - 1], i)
        assert child.parent_hash_fragment == plh.parent_fragment_for_child_position(i)
        plh = child


def test_identities_order_by_position_then_hash():
    rng = random.Random(0)
    plhs = [PositionalLineageHash.new(rng.choice((1, 2**63)), rng.choice((None, 5, 6)), p) for p in (0, 1, 300, 70_000)
            for _ in range(6)]
    assert sorted(plhs) == sorted(plhs, key=lambda p: (p.position, p.current_sequence_hash, p.as_u128()))


@pytest.mark.parametrize("arguments", [(-1, None, 0), (2**64, None, 0), (1, 2**64, 1), (1, None, -1), (1, None, 2**24)])
def test_identity_refuses_what_does_not_fit(arguments):
    with pytest.raises(ValueError):
        PositionalLineageHash.new(*arguments)
    for value in (-1, 3 << 126, 1 << 128):
        with pytest.raises(ValueError, match="128 bits"):
            PositionalLineageHash(value)


def test_blocks_are_values_and_default_partial_ids_are_distinct():
    assert UniqueBlock.FullBlock(3) == UniqueBlock.FullBlock(3) != UniqueBlock.FullBlock(4)
    assert len({UniqueBlock.PartialBlock() for _ in range(10)}) == 10
    for fields in ({}, {"hash": 2**64}, {"hash": -1}):
        with pytest.raises(ValueError):
            UniqueBlock(**fields)
