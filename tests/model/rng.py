"""The seeded generator of speculative decoding: rand 0.9's StdRng, that is ChaCha with 12 rounds."""

import struct

M32 = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF


def _rotl(x: int, n: int) -> int:
    return ((x << n) | (x >> (32 - n))) & M32


def _quarter(s: list[int], a: int, b: int, c: int, d: int) -> None:
    s[a] = (s[a] + s[b]) & M32
    s[d] = _rotl(s[d] ^ s[a], 16)
    s[c] = (s[c] + s[d]) & M32
    s[b] = _rotl(s[b] ^ s[c], 12)
    s[a] = (s[a] + s[b]) & M32
    s[d] = _rotl(s[d] ^ s[a], 8)
    s[c] = (s[c] + s[d]) & M32
    s[b] = _rotl(s[b] ^ s[c], 7)


def chacha_block(key: tuple[int, ...], counter: int, rounds: int = 12) -> list[int]:
    """Sixteen 32-bit words; the block counter has 64 bits, the stream number is 0."""
    constants = struct.unpack("<4I", b"expand 32-byte k")
    start = [*constants, *key, counter & M32, counter >> 32 & M32, 0, 0]
    s = list(start)
    for _ in range(rounds // 2):
        for column in range(4):
            _quarter(s, column, 4 + column, 8 + column, 12 + column)
        for column in range(4):
            _quarter(s, column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4)
    return [(x + y) & M32 for x, y in zip(s, start, strict=True)]


def key_from_seed(seed: int) -> tuple[int, ...]:
    """A 64-bit seed is stretched to the 256-bit key by eight outputs of a PCG32 (state advanced before each)."""
    state = seed & M64
    key = []
    for _ in range(8):
        state = (state * 6364136223846793005 + 11634580027462260723) & M64
        xorshifted = ((state >> 18 ^ state) >> 27) & M32
        rotation = state >> 59
        key.append((xorshifted >> rotation | xorshifted << (32 - rotation)) & M32)
    return tuple(key)


class StdRng:
    """`StdRng::seed_from_u64(seed)` with the one kind of draw that the sampler needs."""

    def __init__(self, seed: int) -> None:
        self.key = key_from_seed(seed)
        self.counter = 0
        self.words: list[int] = []  # what is left of the current block, next word last

    def next_u32(self) -> int:
        if not self.words:
            self.words = chacha_block(self.key, self.counter)[::-1]
            self.counter += 1
        return self.words.pop()

    def next_u64(self) -> int:
        low = self.next_u32()
        return self.next_u32() << 32 | low

    def random_bool(self, p: float) -> bool:
        """Probability 1 consumes nothing; every other one (0 too) consumes one 64-bit word."""
        if p == 1.0:
            return True
        return self.next_u64() < int(p * 2.0**64)


DEFAULT_ACCEPT_RATES = [0.85, 0.3, 0.0, 0.0, 0.0]


def accept_rates(nextn: int, text: str | None) -> list[float]:
    """Rates as comma-separated text; too few are filled up with 0, too many cut to `nextn`."""
    rates = [float(part) for part in text.split(",")] if text and text.strip() else DEFAULT_ACCEPT_RATES
    return (rates + [0.0] * nextn)[:nextn]


class BurstSampler:
    """How many tokens one speculative step yields: one, plus one for every draft token accepted in a row."""

    def __init__(self, rates: list[float], seed: int) -> None:
        self.rates = rates
        self.rng = StdRng(seed)

    def sample(self, remaining: int) -> int:
        if remaining == 0:
            return 0
        tokens = 1
        for rate in self.rates:  # draws go on beyond `remaining`
            if not self.rng.random_bool(rate):
                break
            tokens += 1
        return min(tokens, remaining)
