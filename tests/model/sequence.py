"""One request's tokens and the blocks they fill."""

import itertools
import random
import struct
from typing import NamedTuple

import xxhash

SEED = 1337
_unique = itertools.count(1)  # stands for random ids and random hashes: only equality matters


class Full(NamedTuple):
    """A complete block with an identity that others may share."""

    position: int
    seq_hash: int
    parent_hash: int | None  # what its lineage link says; None at position 0 and with prefix caching off
    local_hash: int | None  # None with prefix caching off


class Partial(NamedTuple):
    """A block that its owner still fills (or filled to the brim without having gone on to the next one)."""

    uid: int


Block = Full | Partial


class Promote(NamedTuple):
    """The partial block became the full one."""

    partial: Partial
    full: Full
    parent_hash: int | None


class UseNew(NamedTuple):
    """One fresh partial block is wanted."""

    partial: Partial


def tokens_hash(tokens: list[int]) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(tokens)}I", *tokens), SEED)


def chain_hash(parent: int, local: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, local), SEED)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Sequence:
    """Prompt and generated tokens, the blocks over them, and how many tokens have blocks allocated.

    With prefix caching off every full block gets an identity of its own, drawn once for this sequence, so that a
    preempted request can find its own blocks again and nobody else's.
    """

    def __init__(
        self, prompt: list[int], max_output: int, planned: list[int] | None, block_size: int, caching: bool
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.max_output = max_output
        self.planned = planned
        self.block_size = block_size
        self.caching = caching
        self.generated = 0
        self.allocated = 0  # tokens; refreshed when blocks are taken, so it may lag behind len inside a block
        self.blocks: list[Block] = []
        for start in range(0, len(prompt) - block_size + 1, block_size):
            self.blocks.append(self._full_block(start))
        if len(prompt) % block_size != 0:
            self.blocks.append(Partial(next(_unique)))

    def __len__(self) -> int:
        return len(self.tokens)

    def _full_block(self, start: int) -> Full:
        """The block over tokens[start : start + block_size]; all blocks before it must be full already."""
        position = start // self.block_size
        if not self.caching:
            return Full(position, next(_unique), None, None)
        local = tokens_hash(self.tokens[start : start + self.block_size])
        if position == 0:
            return Full(0, local, None, local)
        parent = self.blocks[position - 1].seq_hash
        return Full(position, chain_hash(parent, local), parent, local)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks under the first `tokens` tokens, no more than there are."""
        return min(ceil_div(tokens, self.block_size), len(self.blocks))

    def known_blocks(self) -> int:
        return ceil_div(len(self), self.block_size)

    def to_completion_blocks(self) -> int:
        return ceil_div(self.prompt_len + self.max_output, self.block_size)

    def next_token(self) -> int:
        if self.planned is not None and self.generated < len(self.planned):
            return self.planned[self.generated]
        return random.randrange(1 << 32)

    def push(self, token: int) -> list[Promote | UseNew]:
        """Append a generated token.

        Only the first token of a new block asks something of the pool: the block before it, if still partial, is
        promoted now and not when it was filled; then a new partial block is wanted.
        """
        self.tokens.append(token)
        self.generated += 1
        if len(self) % self.block_size != 1:
            return []
        signals: list[Promote | UseNew] = []
        if self.blocks and isinstance(self.blocks[-1], Partial):
            partial = self.blocks.pop()
            full = self._full_block(len(self.blocks) * self.block_size)
            parent_hash = self.blocks[-1].seq_hash if self.blocks else None
            self.blocks.append(full)
            signals.append(Promote(partial, full, parent_hash))
        self.blocks.append(Partial(next(_unique)))
        signals.append(UseNew(self.blocks[-1]))
        return signals

    def pop(self) -> None:
        """Undo a push whose new block could not be had. A block that it promoted stays full."""
        self.tokens.pop()
        self.generated -= 1
        if len(self) % self.block_size == 0:
            self.blocks.pop()

    def held(self, tokens: int) -> list[Block]:
        """The blocks under the first `tokens` tokens in the order in which they are given back: last to first."""
        return self.blocks[: self.blocks_for(tokens)][::-1]
