"""Requests that join a replay under way: what they are made of, and which blocks they share with others."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..trace import Trace

KEYS = ("input_length", "output_length", "hash_ids", "timestamp", "priority", "strict_priority")
LOW = 0xFFFFFFFF                   # of a hash id, the bits that reach the tokens


@dataclass(frozen=True)
class Injected:
    """A request that a replay was given on its way; `at_ms` None in a closed loop."""

    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    at_ms: float | None
    priority: int = 0
    strict_priority: int = 0

    def tokens(self, row: int, block: int) -> NDArray[np.uint32]:
        """Its prompt in tokens; without hash ids those of nobody else."""
        if self.hash_ids:
            ids = (np.array(self.hash_ids, np.uint64) & np.uint64(LOW)).astype(np.uint32)
            return np.ascontiguousarray(np.repeat(ids, block)[:self.input_length])
        return np.random.default_rng([row, 0x1A7E]).integers(2**31, 2**32, self.input_length, np.uint32)


def checked(request: Mapping[str, Any], block: int, now: float, closed: bool) -> Injected:
    """A request from the fields of a trace row; times in ms of the simulation.

    Raises
    ------
    ValueError
        A field is unknown, missing or out of range.
    """
    unknown = sorted(set(request) - set(KEYS))
    if unknown:
        raise ValueError(f"an injected request has no field {unknown[0]!r}; it may have {', '.join(KEYS)}")
    sizes = []
    for name, low in (("input_length", 1), ("output_length", 0), ("priority", None), ("strict_priority", 0)):
        value = request.get(name, 0 if "priority" in name else None)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ValueError(f"{name} of an injected request must be an integer, got {value!r}")
        if (low is not None and value < low) or not -2**31 <= value < 2**31:
            raise ValueError(f"{name} of an injected request is out of range: {value}")
        sizes.append(int(value))
    ids = tuple(int(i) for i in request.get("hash_ids") or ())
    if ids and len(ids) * block < sizes[0]:
        raise ValueError(f"{len(ids)} hash_ids of {block} tokens do not cover input_length {sizes[0]}")
    at = request.get("timestamp")
    if closed:
        if at is not None:
            raise ValueError("a closed loop has no arrival times; leave timestamp out")
        return Injected(sizes[0], sizes[1], ids, None, sizes[2], sizes[3])
    at = now if at is None else float(at)
    if not (math.isfinite(at) and at >= now):
        raise ValueError(f"timestamp of an injected request must be finite and not before {now} ms, got {at}")
    return Injected(sizes[0], sizes[1], ids, at, sizes[2], sizes[3])


@dataclass
class Prefixes:
    """Which row has most blocks of a beginning of hash ids: a tree of ids, O(ids) to make, O(ids) to ask."""

    id_tokens: int                 # tokens a hash id
    block: int                     # tokens a block
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    best: list[tuple[int, int]] = field(default_factory=lambda: [(0, -1)])      # by node: blocks, row

    @classmethod
    def of_trace(cls, trace: Trace, block: int) -> Prefixes:
        """Those of all rows of a trace."""
        made = cls(trace.block_size, block)
        ids, offsets = trace.hash_ids.tolist(), trace.hash_offsets.tolist()
        for row, length in enumerate(trace.input_length.tolist()):
            made.add(row, ids[offsets[row]:offsets[row + 1]], length)
        return made

    def copy(self) -> Prefixes:
        """Another one that grows on its own."""
        return Prefixes(self.id_tokens, self.block, dict(self.nodes), list(self.best))

    def add(self, row: int, ids: Iterable[int], length: int) -> None:
        """Note a row."""
        at, tokens = 0, 0
        for each in ids:
            if tokens >= length:
                break
            tokens += self.id_tokens
            at = self.nodes.setdefault((at, each & LOW), len(self.best))
            if at == len(self.best):
                self.best.append((0, -1))
            blocks = min(tokens, length) // self.block
            if blocks > self.best[at][0]:
                self.best[at] = blocks, row

    def find(self, ids: Iterable[int], length: int) -> tuple[int, int]:
        """Most full blocks of a prompt that one row has too, and that row (or -1)."""
        at, tokens, most = 0, 0, (0, -1)
        for each in ids:
            node = self.nodes.get((at, each & LOW))
            if node is None:
                break
            at = node
            tokens += self.id_tokens
            blocks = min(self.best[at][0], min(tokens, length) // self.block)
            if blocks > most[0]:
                most = blocks, self.best[at][1]
        return most
