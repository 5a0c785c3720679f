"""The seeded generator against an independent ChaCha in Python, and the rules of the burst sampler."""
import itertools
import random

import pytest

from mocker._spec import SpeculativeDecodeSampler, StdRng, plain_words

MASK = 0xFFFFFFFF


def chacha_block(key, counter, rounds):
    """The 16 output words of one ChaCha block with a 64-bit counter and a zero nonce (written from RFC 8439)."""
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *key, counter & MASK, counter >> 32, 0, 0]
    x = list(start)
    columns = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    diagonals = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    for a, b, c, d in (columns + diagonals) * (rounds // 2):
        for add, to, turn in ((b, a, 16), (d, c, 12), (b, a, 8), (d, c, 7)):
            x[to] = (x[to] + x[add]) & MASK
            other = d if to == a else b
            mixed = x[other] ^ x[to]
            x[other] = ((mixed << turn) | (mixed >> (32 - turn))) & MASK
    return [(p + q) & MASK for p, q in zip(x, start, strict=True)]


def words(seed):
    """The word stream of rand 0.9's StdRng.seed_from_u64(seed)."""
    key = []
    for _ in range(8):
        seed = (seed * 6364136223846793005 + 11634580027462260723) % 2**64
        mixed, turn = (((seed >> 18) ^ seed) >> 27) & MASK, seed >> 59
        key.append(((mixed >> turn) | (mixed << (32 - turn))) & MASK if turn else mixed)
    for counter in itertools.count():
        yield from chacha_block(key, counter, 12)


def test_python_chacha_gives_the_published_vectors():
    # All-zero 256-bit key and nonce, first block: draft-strombergson-chacha-test-vectors, TC1.
    starts = {8: "3e00ef2f895f40d67f5bb8e81f09a5a1", 12: "9bf49a6a0755f953811fce125f2683d5",
              20: "76b8e0ada0f13d90405d6ae55386bd28"}
    for rounds, start in starts.items():
        out = b"".join(w.to_bytes(4, "little") for w in chacha_block([0] * 8, 0, rounds))
        assert out[:16].hex() == start


@pytest.mark.parametrize("seed", [0, 1, 42, 43, 2**32, 2**63 + 12345, 2**64 - 1])
def test_words_come_in_stream_order(seed):
    rng, want = StdRng(seed), words(seed)
    stream = [rng.next_u32() for _ in range(300)]
    assert stream == list(itertools.islice(want, 300))
    assert plain_words(seed).tolist() == stream[:128]


def test_u64_is_two_words_even_across_block_and_buffer_ends():
    # 16 words a cipher block, 64 words a buffer of the reference, 128 here: odd offsets make a u64 straddle all ends.
    for offset in (0, 1, 15, 63, 127):
        rng, want = StdRng(7), words(7)
        for _ in range(offset):
            assert rng.next_u32() == next(want)
        for _ in range(100):
            low = next(want)
            assert rng.next_u64() == low | next(want) << 32


def test_random_bool_compares_a_u64_with_the_truncated_rate():
    want = words(5)
    rng = StdRng(5)
    for rate in (0.0, 1e-300, 0.1, 0.5, 0.85, 1 - 2**-53):
        for _ in range(20):
            low = next(want)
            assert rng.random_bool(rate) == ((low | next(want) << 32) < int(rate * 2**64))


def test_rate_one_takes_nothing_and_rate_zero_takes_a_draw():
    sure, never, plain = StdRng(9), StdRng(9), StdRng(9)
    assert all(sure.random_bool(1.0) for _ in range(10))
    assert not never.random_bool(0.0)
    first, second = plain.next_u64(), plain.next_u64()
    assert sure.next_u64() == first
    assert never.next_u64() == second


@pytest.mark.parametrize("rates, remaining, tokens", [
    ([0.0, 1.0], 10, 1), ([1.0, 1.0], 10, 3), ([1.0, 0.0, 1.0], 10, 2), ([1.0, 1.0], 2, 2), ([1.0, 1.0], 0, 0),
    ([], 5, 1),
])
def test_certain_rates(rates, remaining, tokens):
    sampler = SpeculativeDecodeSampler(rates, 42)
    assert [sampler.sample_output_tokens(remaining) for _ in range(20)] == [tokens] * 20


def test_equal_seeds_give_equal_streams_and_others_do_not():
    def stream(seed):
        sampler = SpeculativeDecodeSampler([0.8, 0.6, 0.4], seed)
        return [sampler.sample_output_tokens(10) for _ in range(100)]
    assert stream(42) == stream(42) != stream(43)


def test_draws_do_not_depend_on_what_remains():
    free, tight = (SpeculativeDecodeSampler([0.7, 0.5, 0.2], 1) for _ in range(2))
    for i in range(300):
        left = i % 4
        got = tight.sample_output_tokens(left)
        if left:  # nothing left: no draw, so the free one must not draw either
            assert got == min(free.sample_output_tokens(10), left)
        else:
            assert got == 0


@pytest.mark.parametrize("seed", range(20))
def test_bursts_are_draws_one_by_one(seed):
    choose = random.Random(seed)
    rates = [choose.choice([0.0, 0.3, 0.9, 1.0]) for _ in range(choose.randrange(9))]
    sampler, rng = SpeculativeDecodeSampler(rates, seed), StdRng(seed)
    for _ in range(400):
        refused = next((i for i, rate in enumerate(rates) if not rng.random_bool(rate)), len(rates))
        assert sampler.sample_output_tokens(100) == 1 + refused


def test_mean_burst_is_the_expected_one():
    sampler = SpeculativeDecodeSampler([0.7, 0.5, 0.2], 42)
    mean = sum(sampler.sample_output_tokens(10) for _ in range(200_000)) / 200_000
    assert mean == pytest.approx(1 + 0.7 + 0.35 + 0.07, abs=0.01)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf")])
def test_rates_outside_the_unit_interval_are_refused(rate):
    with pytest.raises(ValueError, match="acceptance rate"):
        SpeculativeDecodeSampler([0.5, rate], 1)
    with pytest.raises(ValueError, match="acceptance rate"):
        StdRng(1).random_bool(rate)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="at most"):
        SpeculativeDecodeSampler([0.5] * 17, 1)
    with pytest.raises(ValueError, match="remaining"):
        SpeculativeDecodeSampler([0.5], 1).sample_output_tokens(-1)
    for seed in (-1, 2**64):
        with pytest.raises(OverflowError):
            SpeculativeDecodeSampler([0.5], seed)
        with pytest.raises(OverflowError):
            StdRng(seed)
