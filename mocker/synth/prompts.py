"""Prompts as hash ids: shared-prefix trees and the growing histories of sessions.

A session is one stream of tokens: a path through the prefix tree, then what each turn adds, its new tokens and the
answer. The prompt of a turn is the stream up to and including its new tokens. The k-th block of a stream has one id
for all turns, also where a turn ends inside the block, so that two prompts share exactly what their streams share.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .distributions import zipf_ranks

__all__ = ["PrefixTree"]

Ints = NDArray[np.int64]

MAX_NODES = 2**40               # nodes of a tree, drawn or not


@dataclass(frozen=True)
class PrefixTree:
    """A tree of prefixes that prompts share; each session takes one path from the top to the bottom.

    Parameters
    ----------
    levels : tuple of (branches, tokens)
        For each level, from the top, the number of children of each node above and the tokens of a child. `((1, 1024),
        (20, 512))` is a common system prompt of 1024 tokens, followed by one of 20 prompts of 512 tokens.
    skew : float
        How popular the children of a node are: the k-th has a probability proportional to 1 / k**skew; 0 for equal.
    share : float
        Share of the sessions that have a prefix at all, 0 … 1.
    """

    levels: tuple[tuple[int, int], ...]
    skew: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError("prefix: needs at least one level, written as BRANCHESxTOKENS")
        nodes = 1
        for branches, tokens in self.levels:
            if not (isinstance(branches, int) and isinstance(tokens, int) and branches >= 1 and 1 <= tokens <= 2**31):
                raise ValueError(f"prefix: a level needs branches and tokens of at least 1, got {branches}x{tokens}")
            nodes *= branches
            if branches > 1 << 22 or nodes > MAX_NODES:
                raise ValueError("prefix: the tree has too many nodes; use fewer branches")
        if not 0 <= self.skew <= 100:
            raise ValueError(f"prefix: skew must be between 0 and 100, got {self.skew}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"prefix: share must be between 0 and 1, got {self.share}")

    @staticmethod
    def parse(text: str) -> PrefixTree:
        """Read `BRANCHESxTOKENS/BRANCHESxTOKENS…[,skew=S][,share=P]`.

        Raises
        ------
        ValueError
            The text has another form.
        """
        levels, *options = text.replace(" ", "").split(",")
        values: dict[str, float] = {}
        try:
            pairs = tuple((int(a), int(b)) for a, _, b in (level.partition("x") for level in levels.split("/")))
            for option in options:
                key, _, value = option.partition("=")
                if key not in ("skew", "share") or key in values:
                    raise ValueError
                values[key] = float(value)
        except ValueError:
            raise ValueError(
                f"prefix {text!r} must look like 1x1024/20x512,skew=1,share=0.8: branches x tokens for each level, "
                "then skew and share, if wanted"
            ) from None
        return PrefixTree(pairs, **values)

    def blocks(self, block_size: int) -> list[int]:
        """Blocks of a node at each level: its tokens in whole blocks, rounded to the nearest, at least one."""
        return [max(1, (tokens + block_size // 2) // block_size) for _, tokens in self.levels]

    def draw(self, rng: np.random.Generator, sessions: int, block_size: int) -> tuple[Ints, NDArray[np.uint64], int]:
        """Draw a path for each session.

        Returns
        -------
        length : int64[sessions]
            Blocks of the prefix, 0 for none.
        ids : uint64[sessions, depth]
            Ids of the blocks of the whole path.
        used : int
            Ids below this are taken.
        """
        node = np.zeros(sessions, np.int64)
        columns: list[NDArray[np.uint64]] = []
        used = 0
        for (branches, _), blocks in zip(self.levels, self.blocks(block_size), strict=True):
            node = node * branches + zipf_ranks(rng, sessions, branches, self.skew)
            drawn, index = np.unique(node, return_inverse=True)
            first = used + index.reshape(sessions) * blocks
            columns.append((first[:, None] + np.arange(blocks)).astype(np.uint64))
            used += len(drawn) * blocks
        ids = np.concatenate(columns, axis=1)
        length = np.where(rng.random(sessions) < self.share, ids.shape[1], 0)
        return length, ids, used


def lay_out(
    turns: Ints, new: Ints, answer: Ints, prefix_blocks: Ints, prefix_ids: NDArray[np.uint64], used: int,
    block_size: int, keep_history: bool,
) -> tuple[Ints, Ints, NDArray[np.uint64], Ints]:
    """Make prompts of streams.

    Parameters
    ----------
    turns : int64[sessions]
        Turns of each session.
    new, answer : int64[rows]
        Tokens that each turn adds to the prompt, and tokens of its answer; rows of a session lie together.
    prefix_blocks : int64[sessions]
    prefix_ids : uint64[sessions, depth]
    used : int
        Ids from here on are free.
    block_size : int
    keep_history : bool
        Whether later turns repeat what was said before; else each is prefix and new tokens only.

    Returns
    -------
    input_length : int64[rows]
    hash_offsets : int64[rows + 1]
    hash_ids : uint64[]
    stream : int64[rows]
        Id of block 0 of each row's stream, had the stream no prefix: block k >= prefix has the id stream + k.
    """
    session = np.repeat(np.arange(len(turns)), turns)
    first = np.concatenate(([0], np.cumsum(turns)))[:-1]
    prefix = prefix_blocks[session] * block_size
    if keep_history:
        said = np.cumsum(new + answer)
        before = said - (new + answer)
        length = prefix + before - before[first][session] + new
        last = first + turns - 1
        end = length[last] + answer[last]
    else:
        length = prefix + new
        end = length + answer
    blocks = -(-length // block_size)
    offsets = np.concatenate(([0], np.cumsum(blocks)))
    if offsets[-1] > 2**32:
        raise ValueError(f"the prompts have {offsets[-1]} blocks; use a larger block size, or shorter or fewer prompts")
    own = -(-end // block_size) - (prefix_blocks if keep_history else prefix_blocks[session])
    start = used + np.concatenate(([0], np.cumsum(own)))[:-1]
    stream = (start - prefix_blocks)[session] if keep_history else start - prefix_blocks[session]
    total = int(offsets[-1])
    ids = np.ones(total, np.int64)
    # One running sum writes stream, stream + 1, … for each row.
    ids[offsets[:-1]] = stream
    ids[offsets[1:-1]] -= stream[:-1] + blocks[:-1] - 1
    np.cumsum(ids, out=ids)
    hash_ids = ids.astype(np.uint64)
    depth = prefix_ids.shape[1]
    if depth:
        having = np.flatnonzero(prefix_blocks[session] > 0)
        at = (offsets[having][:, None] + np.arange(depth)).ravel()
        hash_ids[at] = prefix_ids[session[having]].ravel()
    return length, offsets, hash_ids, stream
