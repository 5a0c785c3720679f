"""What a prefix cache could save on a trace, whatever the engine: hits of an unlimited cache, and by cache size."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import _reuse
from .._paths import PathTable
from ..trace import Trace
from .times import arrival_order

__all__ = ["Reuse", "prefix_reuse"]


@dataclass(frozen=True)
class Reuse:
    """Reuse of full prompt blocks by later prompts, in the order of arrival.

    Attributes
    ----------
    block_size : int
        Tokens of a block.
    prompt_tokens, blocks : int
        Tokens of all prompts, and full blocks of all prompts.
    distinct_blocks : int
        Different blocks; a cache of so many never evicts.
    hits : int64[n]
        Blocks of each row that an earlier request has used.
    distances : int64[distinct_blocks + 1]
        Block uses by reuse distance: how many different blocks were used since the last use.
    """

    block_size: int
    prompt_tokens: int
    blocks: int
    distinct_blocks: int
    hits: NDArray[np.int64]
    distances: NDArray[np.int64]

    @property
    def hit_ratio(self) -> float:
        """Share of all prompt tokens that an unlimited cache saves."""
        return int(self.hits.sum()) * self.block_size / self.prompt_tokens if self.prompt_tokens else 0.0

    def hit_ratios(self, capacities: NDArray[np.int64]) -> NDArray[np.float64]:
        """Share of all prompt tokens that a cache of each size (blocks) saves, with least-recently-used eviction."""
        total = np.concatenate(([0], np.cumsum(self.distances)))
        found = total[np.clip(capacities, 0, len(total) - 1)]
        return np.asarray(found * (self.block_size / max(self.prompt_tokens, 1)), np.float64)

    def curve(self, points: int = 24) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Cache sizes (blocks), on a logarithmic scale up to the largest that matters, and their `hit_ratios`."""
        used = np.flatnonzero(self.distances)
        top = int(used[-1]) + 1 if len(used) else 1
        sizes = np.unique(np.rint(np.geomspace(1, top, points)).astype(np.int64))
        return sizes, self.hit_ratios(sizes)

    def capacity_for(self, share: float) -> int:
        """Smallest cache (blocks) that reaches a share of the hits of an unlimited one."""
        total = np.cumsum(self.distances)
        return int(np.searchsorted(total, share * total[-1])) + 1 if total[-1] else 0


def prefix_reuse(trace: Trace, block_size: int | None = None) -> Reuse:
    """Look every full prompt block up in all earlier prompts.

    Only prompts are looked at: answers that a later prompt repeats count where the trace gives them hash ids in that
    prompt. A row with no time is placed where its session would send it if answers took no time.

    Parameters
    ----------
    trace : Trace
    block_size : int, optional
        Tokens of a block of the cache; that of the trace if left out.

    Raises
    ------
    ValueError
        The block size is below 1; or the turns of the trace only add to their prompts, which nobody knows before the
        answers.
    """
    if trace.accumulate:
        raise ValueError("the prompts of this trace depend on the answers (its turns add to them), so their reuse is "
                         "not known before a replay")
    size = trace.block_size if block_size is None else int(block_size)
    if size < 1:
        raise ValueError(f"block_size must be at least 1, is {size}")
    table = PathTable.from_hash_ids(
        trace.hash_offsets, trace.hash_ids, trace.input_length, trace.block_size, size).arrays
    full = trace.input_length // size
    order = arrival_order(trace)
    leaf, above, pieces = _reuse.split_segments(table["segment"], table["parent"], table["blocks"], full)
    ordered, distances = _reuse.reuse_distances(np.ascontiguousarray(leaf[order]), above, pieces)
    hits = np.empty_like(ordered)
    hits[order] = ordered
    return Reuse(
        block_size=size, prompt_tokens=int(trace.input_length.sum()), blocks=int(full.sum()),
        distinct_blocks=int(pieces.sum()), hits=hits, distances=distances)
