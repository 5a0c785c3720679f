"""Prompts that grow while a replay runs: each turn of a session adds to all that was said in it before.

Answers to `PromptMode::DeltaCumulative` of the reference's `loadgen/driver.rs`. What an answer really was is known only
when its request has ended - an engine may refuse it or cut it short - so that a prompt is put together when its turn is
ready. Answers that the trace does not give are drawn, so that the next prompt shares their blocks.

Nobody else can draw the same: where all answers are drawn, a session's blocks have a segment of its own behind its
first prompt (`paths`), and only lengths are counted here (`counter`). Should a session go on before anything was
answered, its prompt is one that others can have: then the replay begins anew. Otherwise tokens are put together:
O(prompt) a request, and the memory of every session's last prompt.
"""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ._paths import PathTable
from ._spec import SeededRng
from .trace import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._collect import Collector

ANSWER_SEED = 0xD37A0A7E5EED
_NONE = np.empty(0, np.uint32)


class Conversations:
    """Tokens of the turns of a trace that accumulates; `workload.TokenSource` once `prepare` was called for a row.

    Parameters
    ----------
    trace : Trace
    own_tokens : callable
        ``own_tokens(row) -> (tokens that the turn adds, planned answer)``.
    """

    def __init__(self, trace: Trace,
                 own_tokens: Callable[[int], tuple[NDArray[np.uint32], NDArray[np.uint32]]]) -> None:
        self.session = trace.session
        self.own_tokens = own_tokens
        self.given = None if trace.output_token_offsets is None else trace.output_token_offsets.tolist()
        self.given_tokens = trace.output_token_ids
        self.prompt = trace.input_length.copy()
        self.previous = np.full(trace.n, -1, np.int64)
        rows = np.lexsort((trace.turn, trace.session))
        later = trace.turn[rows[1:]] > 0
        self.previous[rows[1:][later]] = rows[:-1][later]
        starts = np.flatnonzero(np.append(True, ~later)[:trace.n])
        self.first = np.empty(trace.n, np.int32)
        self.first[rows] = np.repeat(rows[starts], np.diff(np.append(starts, trace.n)))
        self.adds, self.answer_lengths, self.rows = trace.input_length, trace.output_length, rows
        self.said: dict[int, NDArray[np.uint32]] = {}
        self.collector: Collector | None = None
        self.with_tokens = True
        self.mute = False              # a session went on before anything was answered, in the replay before this one

    @functools.cached_property
    def answers(self) -> dict[int, NDArray[np.uint32]]:
        """Answers that are drawn, by row."""
        given = 0 if self.given is None else np.diff(self.given)
        missing = np.where(given == 0, self.answer_lengths, 0)[self.rows]
        drawn = SeededRng(ANSWER_SEED).words(int(missing.sum()))
        return {row: drawn[end - count:end] for row, count, end in zip(
            self.rows.tolist(), missing.tolist(), np.cumsum(missing).tolist(), strict=True) if count}

    @property
    def unique(self) -> bool:
        """Whether nobody else can have what a session said: no answer is given, and, as far as is known, none empty.

        An engine makes a token where none is wanted.
        """
        return not self.mute and self.given is None and bool((self.answer_lengths > 0).all())

    def forget(self) -> None:
        """Be as before a replay, which begins anew."""
        self.prompt[:], self.collector = self.adds, None

    def paths(self, trace: Trace, block_size: int) -> PathTable:
        """Block identities where all answers are drawn."""
        lengths = np.where(self.previous < 0, self.adds, 0)
        table = PathTable.from_hash_ids(trace.hash_offsets, trace.hash_ids, lengths, trace.block_size, block_size)
        return table.talking(self.first, (lengths[self.first] // block_size).astype(np.int32))

    def copied(self, prompt: NDArray[np.int64], said: dict[int, NDArray[np.uint32]]) -> Conversations:
        """The same trace in a copy of a replay, from what sessions have said so far.

        Parameters
        ----------
        prompt : ndarray of int64
            Length of each row's prompt as far as it is known; written by `prepare`.
        said : dict
            A session's newest prompt, as the attribute of this name; copied, its arrays are not.
        """
        made = copy.copy(self)
        made.prompt, made.said, made.collector = prompt, dict(said), None
        return made

    def plan(self, row: int) -> NDArray[np.uint32]:
        """The answer that a turn would get."""
        drawn = self.answers.get(row)
        if drawn is not None:
            return drawn
        if self.given is None or self.given_tokens is None:
            return _NONE
        return self.given_tokens[self.given[row]:self.given[row + 1]]

    def prepare(self, row: int) -> int:
        """A turn is ready: put its prompt together; returns its length."""
        session, before, parts = int(self.session[row]), int(self.previous[row]), []
        if before >= 0 and self.collector is not None:
            answered = int(self.collector.columns["output_tokens"][before])
            parts = [self.said[session], self.plan(before)[:answered]]
        parts.append(self.own_tokens(row)[0])
        self.said[session] = np.ascontiguousarray(np.concatenate(parts), np.uint32)
        self.prompt[row] = len(self.said[session])
        return len(self.said[session])

    def counter(self) -> Callable[[int], None]:
        """`prepare` where only lengths matter; raises MemoryError, which ends the replay, if a session is `mute`."""
        assert self.collector is not None
        prompt, made = self.prompt.data, self.collector.columns["output_tokens"].data
        previous, adds, answers = self.previous.tolist(), self.adds.tolist(), self.answer_lengths.tolist()

        said = bytearray(len(previous))

        def count(row: int) -> None:
            before = previous[row]
            if before < 0:
                prompt[row] = adds[row]
                return
            said[row] = said[before] or made[before] > 0
            if not said[row]:
                self.mute = True
                raise MemoryError("a session goes on before anything was answered")
            prompt[row] = prompt[before] + min(made[before], answers[before]) + adds[row]

        return count

    def __call__(self, row: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Prompt and planned answer of a turn that was prepared."""
        return self.said[int(self.session[row])], self.plan(row)
