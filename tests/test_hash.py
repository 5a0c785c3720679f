"""Block hashes: XXH3-64 against the xxhash package, and the two hashes of a block against known values."""
import random
import struct

import numpy as np
import pytest
import xxhash

from mocker import _hash


def test_every_length_and_many_seeds_equal_xxhash():
    rng = random.Random(0)
    data = rng.randbytes(2001)
    for n in range(2001):
        for seed in (0, 1337, rng.getrandbits(64)):
            assert _hash.xxh3_64(data[:n], seed) == xxhash.xxh3_64_intdigest(data[:n], seed), (n, seed)


@pytest.mark.parametrize("n", [4096, 4097, 65_535, 1 << 20])
@pytest.mark.parametrize("seed", [0, 1, 1337, 2**63, 2**64 - 1])
def test_long_inputs_equal_xxhash(n, seed):
    data = random.Random(n).randbytes(n)
    assert _hash.xxh3_64(data, seed) == xxhash.xxh3_64_intdigest(data, seed)


def test_any_alignment_gives_the_same_hash():
    data = random.Random(1).randbytes(600)
    for shift in range(8):
        moved = memoryview(bytes(shift) + data)[shift:]
        assert _hash.xxh3_64(moved) == _hash.xxh3_64(data)


def test_bytes_like_inputs():
    array = np.arange(10, dtype=np.uint32)
    want = xxhash.xxh3_64_intdigest(array.tobytes())
    assert _hash.xxh3_64(array) == _hash.xxh3_64(bytearray(array.tobytes())) == _hash.xxh3_64(array.tobytes()) == want
    assert _hash.xxh3_64(b"") == _hash.xxh3_64(np.empty(0)) == xxhash.xxh3_64_intdigest(b"")
    with pytest.raises(TypeError):
        _hash.xxh3_64("text")
    for seed in (-1, 2**64):
        with pytest.raises(OverflowError):
            _hash.xxh3_64(b"", seed)


def test_known_block_hashes_of_the_reference():
    local, sequence = _hash.compute_seq_hashes(range(8), 4)
    assert local == [0x7EE2CBEDC694AB46, 0xA8416CFD935BDB13]
    assert sequence == [0x7EE2CBEDC694AB46, 0x83FB702F20E2AD65]
    assert _hash.compute_block_hash_for_seq([7] * 64, 64) == [0xF8758D1DB17D52EF]


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 64, 100])
def test_blocks_and_chains_follow_their_definition(block_size):
    rng = random.Random(block_size)
    tokens = [rng.getrandbits(32) for _ in range(5 * block_size + block_size // 2)]
    local, sequence = _hash.compute_seq_hashes(tokens, block_size)
    assert len(local) == len(sequence) == len(tokens) // block_size
    parent = None
    for i, (own, chained) in enumerate(zip(local, sequence, strict=True)):
        block = tokens[i * block_size:(i + 1) * block_size]
        assert own == xxhash.xxh3_64_intdigest(struct.pack(f"<{block_size}I", *block), 1337)
        parent = own if parent is None else xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, own), 1337)
        assert chained == parent
    assert _hash.compute_block_hash_for_seq(tokens, block_size) == local


def test_partial_block_has_no_hash_and_empty_input_no_blocks():
    assert _hash.compute_block_hash_for_seq([1, 2, 3], 4) == []
    assert _hash.compute_seq_hashes([], 4) == ([], [])


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint16, ">u4"])
def test_arrays_of_any_integer_type(dtype):
    tokens = np.arange(32)
    want = _hash.compute_seq_hashes(tokens.tolist(), 8)
    assert _hash.compute_seq_hashes(tokens.astype(dtype), 8) == want
    assert _hash.compute_seq_hashes(np.repeat(tokens, 2).astype(dtype)[::2], 8) == want
    readonly = tokens.astype(dtype)
    readonly.flags.writeable = False
    assert _hash.compute_seq_hashes(readonly, 8) == want


@pytest.mark.parametrize("tokens, error", [
    ([-1, 2], ValueError), ([2**32], ValueError), (np.array([-1]), ValueError), ([[1, 2]], ValueError),
    ([0.5, 1.0], TypeError), (["a"], TypeError),
])
def test_tokens_outside_u32_are_refused(tokens, error):
    with pytest.raises(error):
        _hash.compute_block_hash_for_seq(tokens, 1)


@pytest.mark.parametrize("block_size", [0, -4])
def test_block_size_must_be_positive(block_size):
    with pytest.raises(ValueError, match="block_size"):
        _hash.compute_seq_hashes([1, 2], block_size)
