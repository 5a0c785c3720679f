"""Block-wise view of one request, and the signals between it and a `KvManager`.

Answers to dynamo-mocker 1.3.0 `common/sequence.rs` and the value types of `common/protocols.rs`, and to
`PositionalLineageHash` of dynamo-tokens 1.3.0. The replay engine never builds these objects; they are for embedders
that drive a `KvManager` request by request.
"""
from __future__ import annotations

import random
import struct
import uuid as _uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import total_ordering
from typing import TypeAlias

from mocker._hash import compute_block_hash_for_seq, compute_seq_hashes, xxh3_64

SALT = 1337
_MASK64 = (1 << 64) - 1
_LAYOUTS = ((8, 54), (16, 46), (24, 38))  # by mode: bits of the position, bits of the parent's hash


def _check_u64(name: str, value: int) -> int:
    if not 0 <= value <= _MASK64:
        raise ValueError(f"{name} must be in 0..2**64, got {value}")
    return value


def _chain(parent: int, local: int) -> int:
    """Sequence hash of a block with local hash `local` behind a block with sequence hash `parent`."""
    return xxh3_64(struct.pack("<QQ", parent, local), SALT)


def _mode(position: int) -> int:
    return 0 if position < 1 << 8 else 1 if position < 1 << 16 else 2


@total_ordering
@dataclass(frozen=True, slots=True)
class PositionalLineageHash:
    """128-bit identity of a block content: position, own sequence hash, and what fits of the parent's.

    From the top bit: mode (2), position (8, 16 or 24 by mode), own sequence hash (64), low bits of the parent's
    sequence hash (54, 46 or 38). The mode is the smallest that holds the position. Values order by position, then
    sequence hash, then the whole number.

    Parameters
    ----------
    value : int
        The packed number; `new`, `root` and `extend` make it.

    Raises
    ------
    ValueError
        If `value` does not fit 128 bits or has mode 3.
    """

    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.value < 3 << 126:
            raise ValueError(f"a positional lineage hash has 128 bits and mode 0, 1 or 2, got {self.value:#x}")

    @classmethod
    def new(cls, seq_hash: int, parent: int | None, position: int) -> PositionalLineageHash:
        """Pack a sequence hash, the parent's sequence hash (None for none) and a position.

        Raises
        ------
        ValueError
            If a hash is no unsigned 64-bit number, or `position` is not in 0..2**24.
        """
        if not 0 <= position < 1 << 24:
            raise ValueError(f"position must be in 0..2**24, got {position}")
        _check_u64("seq_hash", seq_hash)
        mode = _mode(position)
        bits = _LAYOUTS[mode][1]
        low = _check_u64("parent", parent or 0) & ((1 << bits) - 1)
        return cls(mode << 126 | position << (64 + bits) | seq_hash << bits | low)

    @classmethod
    def root(cls, block_hash: int) -> PositionalLineageHash:
        """Identity of a first block, whose sequence hash is its local hash."""
        return cls.new(block_hash, None, 0)

    def extend(self, block_hash: int) -> PositionalLineageHash:
        """Identity of the next block, from its local hash."""
        parent = self.current_sequence_hash
        return self.new(_chain(parent, _check_u64("block_hash", block_hash)), parent, self.position + 1)

    @property
    def mode(self) -> int:
        """Layout: 0, 1 or 2."""
        return self.value >> 126

    @property
    def position(self) -> int:
        """Index of the block in its sequence."""
        position_bits, bits = _LAYOUTS[self.mode]
        return self.value >> (64 + bits) & ((1 << position_bits) - 1)

    @property
    def current_sequence_hash(self) -> int:
        """The block's own sequence hash, whole."""
        return self.value >> _LAYOUTS[self.mode][1] & _MASK64

    @property
    def parent_hash_fragment(self) -> int:
        """The low bits of the parent's sequence hash that this identity stores; 0 without a parent."""
        return self.value & ((1 << _LAYOUTS[self.mode][1]) - 1)

    def parent_fragment_for_child_position(self, position: int) -> int:
        """Low bits of the own sequence hash that a child at `position` stores."""
        return self.current_sequence_hash & ((1 << _LAYOUTS[_mode(position)][1]) - 1)

    def as_u128(self) -> int:
        """Return the packed number."""
        return self.value

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, PositionalLineageHash):
            return NotImplemented
        return self._key() < other._key()

    def _key(self) -> tuple[int, int, int]:
        return self.position, self.current_sequence_hash, self.value


@dataclass(frozen=True, slots=True)
class UniqueBlock:
    """A logical block: complete and known by its sequence hash, or still filling and known by an id.

    Make one with `FullBlock` or `PartialBlock`; exactly one of the fields is set.
    """

    hash: int | None = None
    uuid: _uuid.UUID | None = None

    def __post_init__(self) -> None:
        if (self.hash is None) == (self.uuid is None):
            raise ValueError("a block has either a hash or a uuid")
        if self.hash is not None:
            _check_u64("hash", self.hash)

    @classmethod
    def FullBlock(cls, hash: int) -> UniqueBlock:
        """Return the complete block with this sequence hash."""
        return cls(hash=hash)

    @classmethod
    def PartialBlock(cls, uuid: _uuid.UUID | None = None) -> UniqueBlock:
        """Return the incomplete block with this id; a new random id if None."""
        return cls(uuid=_uuid.uuid4() if uuid is None else uuid)

    @property
    def is_full(self) -> bool:
        """Whether the block is complete."""
        return self.hash is not None


class MoveBlock:
    """The three signals that a `KvManager` processes: `Use`, `Deref`, `Promote`."""

    @dataclass(frozen=True, slots=True)
    class Use:
        """Hold these blocks; all of them, or none if the pool cannot.

        Parameters
        ----------
        blocks : sequence of UniqueBlock
            Consecutive blocks of a sequence.
        block_hashes : sequence of int
            Local hash of each full block, for events; or empty.
        plhs : sequence of PositionalLineageHash
            Identity of each full block.
        token_ids : sequence of sequence of int, optional
            Tokens of each full block.
        parent : UniqueBlock, optional
            The full block in front of the first one.
        """

        blocks: Sequence[UniqueBlock]
        block_hashes: Sequence[int]
        plhs: Sequence[PositionalLineageHash]
        token_ids: Sequence[Sequence[int]] | None = None
        parent: UniqueBlock | None = None

    @dataclass(frozen=True, slots=True)
    class Deref:
        """Give up one hold on each of these blocks."""

        blocks: Sequence[UniqueBlock]

    @dataclass(frozen=True, slots=True)
    class Promote:
        """Turn the held partial block `uuid` into a full one.

        Parameters
        ----------
        uuid : uuid.UUID
            The partial block.
        seq_hash : int
            Sequence hash of the full block.
        parent_hash : int or None
            Sequence hash of the block in front; None for a first block.
        block_hash : int or None
            Local hash, for events; None if prefix caching is off.
        plh : PositionalLineageHash
            Identity of the full block.
        token_ids : sequence of int, optional
            Its tokens.
        """

        uuid: _uuid.UUID
        seq_hash: int
        parent_hash: int | None
        block_hash: int | None
        plh: PositionalLineageHash
        token_ids: Sequence[int] | None = None


Move: TypeAlias = MoveBlock.Use | MoveBlock.Deref | MoveBlock.Promote


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """What a prompt would cost now.

    Parameters
    ----------
    new_blocks : int
        Blocks of the sequence outside its cached prefix.
    new_tokens : int
        Prompt tokens to compute.
    cached_tokens : int
        Prompt tokens in the cached prefix, in use or idle.
    active_cached_tokens : int
        Prompt tokens in cached prefix blocks that are in use, which take no room from the pool.
    """

    new_blocks: int
    new_tokens: int
    cached_tokens: int
    active_cached_tokens: int


class ActiveSequence:
    """Tokens of one request and the blocks that they fill.

    Parameters
    ----------
    tokens : iterable of int
        Prompt, each id 0 <= t < 2**32.
    max_output_tokens : int
        Output tokens at which the request is complete.
    block_size : int
        Tokens a block, at least 2.
    enable_prefix_caching : bool
        If False, blocks get random identities that no other sequence shares.
    emit_token_ids : bool
        Put token ids into the signals (with prefix caching only).
    planned_output_ids : sequence of int, optional
        Output tokens in order; past their end, and without them, tokens are random.
    seed : int, optional
        Makes random tokens and identities repeatable. Two sequences of one pool must not share it without prefix
        caching: their identities would be equal. Ids of partial blocks are always fresh.

    Raises
    ------
    ValueError
        If `block_size` < 2, or `max_output_tokens` < 0, or a token is out of range.

    Notes
    -----
    A block filled to the brim stays partial until the next token comes, and is promoted then; a sequence that ends on
    a block boundary never registers its last block. Signals say what to do; the sequence believes that it was done
    only for `commit_allocation`.
    """

    __slots__ = (
        "_block_hashes", "_block_size", "_emit_token_ids", "_enable_prefix_caching", "_generated", "_max_output_tokens",
        "_num_allocated", "_num_input", "_planned", "_plhs", "_rng", "_seed", "_tokens", "_unique_blocks")

    def __init__(self, tokens: Iterable[int], max_output_tokens: int, block_size: int = 64,
                 enable_prefix_caching: bool = True, emit_token_ids: bool = False,
                 planned_output_ids: Sequence[int] | None = None, seed: int | None = None) -> None:
        if block_size < 2:
            raise ValueError(f"block_size must be at least 2, got {block_size}")
        if max_output_tokens < 0:
            raise ValueError(f"max_output_tokens must be at least 0, got {max_output_tokens}")
        self._tokens = [int(t) for t in tokens]
        self._planned = None if planned_output_ids is None else [int(t) for t in planned_output_ids]
        for token in self._planned or ():
            _check_token(token)
        self._block_size = block_size
        self._max_output_tokens = max_output_tokens
        self._num_input = len(self._tokens)
        self._num_allocated = self._generated = 0
        self._enable_prefix_caching = enable_prefix_caching
        self._emit_token_ids = emit_token_ids and enable_prefix_caching
        self._seed = seed
        self._rng: random.Random | None = None

        local, sequence = compute_seq_hashes(self._tokens, block_size)
        if not enable_prefix_caching:
            local, sequence = [], [self._random_bits(64) for _ in sequence]
        self._block_hashes = local
        self._unique_blocks = [UniqueBlock(hash=h) for h in sequence]
        self._plhs: list[PositionalLineageHash] = []
        for position, own in enumerate(sequence):
            self._plhs.append(self._identity(own, sequence[position - 1] if position else None, position))
        if self.extra_tokens:
            self._unique_blocks.append(UniqueBlock.PartialBlock())

    @classmethod
    def new_with_signal(cls, tokens: Iterable[int], max_output_tokens: int, block_size: int = 64,
                        enable_prefix_caching: bool = True) -> tuple[ActiveSequence, MoveBlock.Use | None]:
        """Return a sequence whose prompt blocks count as allocated, and the signal that allocates them."""
        sequence = cls(tokens, max_output_tokens, block_size, enable_prefix_caching)
        return sequence, sequence.take_creation_signal()

    def _random_bits(self, bits: int) -> int:
        if self._rng is None:  # a generator costs 2.5 KB; most sequences never draw
            self._rng = random.Random(self._seed)
        return self._rng.getrandbits(bits)

    def _identity(self, seq_hash: int, parent: int | None, position: int) -> PositionalLineageHash:
        if self._enable_prefix_caching:
            return PositionalLineageHash.new(seq_hash, parent, position)
        return PositionalLineageHash.new(self._random_bits(64), None, position)  # random and parentless: never shared

    # ---- state

    @property
    def unique_blocks(self) -> list[UniqueBlock]:
        """Blocks in order; only the last one may be partial."""
        return list(self._unique_blocks)

    @property
    def block_hashes(self) -> list[int]:
        """Local hash of each full block; empty without prefix caching."""
        return list(self._block_hashes)

    @property
    def positional_lineage_hashes(self) -> list[PositionalLineageHash]:
        """Identity of each full block."""
        return list(self._plhs)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    @property
    def max_output_tokens(self) -> int:
        """Output tokens at which the request is complete."""
        return self._max_output_tokens

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far."""
        return self._generated

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens."""
        return self._num_input

    @property
    def num_allocated_tokens(self) -> int:
        """Tokens whose blocks were committed as allocated; may lag inside a block."""
        return self._num_allocated

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether blocks have content identities."""
        return self._enable_prefix_caching

    @property
    def emit_token_ids(self) -> bool:
        """Whether signals carry token ids."""
        return self._emit_token_ids

    @property
    def planned_output_ids(self) -> list[int] | None:
        """Output tokens given beforehand."""
        return None if self._planned is None else list(self._planned)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output tokens so far."""
        return list(self._tokens)

    @property
    def extra_tokens(self) -> int:
        """Tokens behind the last block boundary."""
        return len(self._tokens) % self._block_size

    @property
    def current_known_blocks(self) -> int:
        """Blocks of prompt and output so far, the partial one included."""
        return -(-len(self._tokens) // self._block_size)

    @property
    def to_completion_blocks(self) -> int:
        """Blocks of the prompt and the whole output, with no discount for reuse."""
        return -(-(self._num_input + self._max_output_tokens) // self._block_size)

    @property
    def is_empty(self) -> bool:
        """Whether there is no token."""
        return not self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def block_token_ids(self) -> list[list[int]]:
        """Tokens of each complete block, whether promoted yet or not."""
        size = self._block_size
        return [self._tokens[i:i + size] for i in range(0, len(self._tokens) - size + 1, size)]

    # ---- allocation of known blocks

    def prepare_allocation(self, cumulative_tokens: int) -> MoveBlock.Use | None:
        """Return the signal that allocates the blocks up to `cumulative_tokens`, or None if there is nothing to do.

        Changes nothing; call `commit_allocation` once the signal has succeeded.
        """
        first = min(-(-self._num_allocated // self._block_size), len(self._unique_blocks))
        end = min(-(-cumulative_tokens // self._block_size), len(self._unique_blocks))
        if end <= first:
            return None
        hashes = self._block_hashes[first:end]
        token_ids = None
        if self._emit_token_ids and hashes:
            token_ids = [self._tokens[i * self._block_size:(i + 1) * self._block_size]
                         for i in range(first, first + len(hashes))]
        parent = self._unique_blocks[first - 1] if first else None
        return MoveBlock.Use(self._unique_blocks[first:end], hashes, self._plhs[first:end], token_ids, parent)

    def commit_allocation(self, cumulative_tokens: int) -> None:
        """Note that the blocks up to `cumulative_tokens` are allocated."""
        self._num_allocated = cumulative_tokens

    def allocate_blocks_for_chunk(self, cumulative_tokens: int) -> MoveBlock.Use | None:
        """Prepare and commit at once, where failure is impossible."""
        signal = self.prepare_allocation(cumulative_tokens)
        self.commit_allocation(cumulative_tokens)
        return signal

    def take_creation_signal(self) -> MoveBlock.Use | None:
        """Prepare and commit all known blocks."""
        return self.allocate_blocks_for_chunk(len(self))

    # ---- tokens

    def push(self, token: int) -> list[Move] | None:
        """Append an output token.

        Returns
        -------
        list or None
            None, unless the token opens a block: then the promotion of the block before (if that was partial) and the
            use of the new partial block, to be processed in this order.

        Raises
        ------
        ValueError
            If `token` is not in 0..2**32.
        """
        self._tokens.append(_check_token(token))
        self._generated += 1
        if self.extra_tokens != 1:
            return None
        signals: list[Move] = []
        if self._unique_blocks and self._unique_blocks[-1].uuid is not None:
            signals.append(self._promote(self._unique_blocks[-1].uuid))
        partial = UniqueBlock.PartialBlock()
        self._unique_blocks.append(partial)
        signals.append(MoveBlock.Use([partial], [], []))
        return signals

    def _promote(self, partial: _uuid.UUID) -> MoveBlock.Promote:
        """Make the last block full; its last token is the one before the newest."""
        size = self._block_size
        tokens = self._tokens[-size - 1:-1]
        parent = self._unique_blocks[-2].hash if len(self._unique_blocks) > 1 else None
        local = None
        if self._enable_prefix_caching:
            local = compute_block_hash_for_seq(tokens, size)[0]
            self._block_hashes.append(local)
            own = local if parent is None else _chain(parent, local)
        else:
            own = self._random_bits(64)
        self._plhs.append(self._identity(own, parent, len(self._plhs)))
        self._unique_blocks[-1] = UniqueBlock(hash=own)
        return MoveBlock.Promote(partial, own, parent, local, self._plhs[-1], tokens if self._emit_token_ids else None)

    def generate_token(self) -> tuple[int, list[Move]]:
        """Append the next output token, planned or random.

        Returns
        -------
        token : int
        signals : list
            Those of `push`; for the last token, then also one `Deref` a block, from the last block to the first.

        Raises
        ------
        ValueError
            If the output is complete.
        """
        if self._generated >= self._max_output_tokens:
            raise ValueError(f"all {self._max_output_tokens} output tokens are generated")
        if self._planned is not None and self._generated < len(self._planned):
            token = self._planned[self._generated]
        else:
            token = self._random_bits(32)
        signals = self.push(token) or []
        if self._generated == self._max_output_tokens:
            signals.extend(self._free_signal(len(self)))
        return token, signals

    def generate(self) -> list[Move]:
        """Append the next output token and return the signals of `generate_token`."""
        return self.generate_token()[1]

    def pop(self) -> None:
        """Undo the last `push`, whose use of a new block failed; the promotion of the block before it stays.

        Raises
        ------
        ValueError
            If there is no output token, or the last token lies in a promoted block, which cannot be undone.
        """
        if not self._generated:
            raise ValueError("no output token to undo")
        if self._unique_blocks[-1].is_full:
            raise ValueError("the last token belongs to a promoted block")
        self._tokens.pop()
        self._generated -= 1
        if self.extra_tokens == 0:
            self._unique_blocks.pop()

    # ---- release

    def _free_signal(self, tokens: int) -> list[MoveBlock.Deref]:
        blocks = min(-(-tokens // self._block_size), len(self._unique_blocks))
        return [MoveBlock.Deref([block]) for block in reversed(self._unique_blocks[:blocks])]

    def free_signal(self) -> list[MoveBlock.Deref]:
        """Return one `Deref` for each allocated block, from the last to the first."""
        return self._free_signal(self._num_allocated)

    def reset_with_signal(self) -> list[MoveBlock.Deref]:
        """Return `free_signal` and count nothing as allocated: a preemption. Generated tokens stay."""
        signals = self.free_signal()
        self._num_allocated = 0
        return signals


def _check_token(token: int) -> int:
    if not 0 <= token <= 0xFFFFFFFF:
        raise ValueError(f"token must be in 0..2**32, got {token}")
    return token
