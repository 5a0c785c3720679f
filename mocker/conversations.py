"""Prompts that grow while a replay runs: each turn of a session adds to all that was said in it before.

Answers to `PromptMode::DeltaCumulative` of the reference's `loadgen/driver.rs`. What an answer really was is known only
when its request has ended - an engine may refuse it or cut it short - so that a prompt is put together when its turn is
ready. Answers that the trace does not give are drawn, so that the next prompt shares their blocks. Cost: O(prompt)
a request, and the memory of every session's last prompt.
"""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

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
        given = np.zeros(trace.n, np.int64) if trace.output_token_offsets is None else np.diff(
            trace.output_token_offsets)
        missing = np.where(given == 0, trace.output_length, 0)[rows]
        drawn = SeededRng(ANSWER_SEED).words(int(missing.sum()))
        ends = np.cumsum(missing)
        self.answers: dict[int, NDArray[np.uint32]] = {
            row: drawn[end - count:end] for row, count, end in zip(rows.tolist(), missing.tolist(), ends.tolist(),
                                                                  strict=True) if count}
        self.said: dict[int, NDArray[np.uint32]] = {}
        self.collector: Collector | None = None

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

    def __call__(self, row: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Prompt and planned answer of a turn that was prepared."""
        return self.said[int(self.session[row])], self.plan(row)
