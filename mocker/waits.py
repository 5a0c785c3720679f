"""Who waits for whom: the turns of a session for each other, and requests for requests that they name."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Links(NamedTuple):
    """The same seen from those who are waited for.

    Attributes
    ----------
    roots : int64[sessions]
        The row that begins each session.
    offsets : int64[n + 1]
        The end of row i brings `rows[offsets[i]:offsets[i + 1]]` nearer.
    rows : int64[links]
    waits : int64[n]
        How many ends a row waits for.
    rank : int32[n]
        Who goes first of those that are ready at the same time.
    """

    roots: Ints
    offsets: Ints
    rows: Ints
    waits: Ints
    rank: NDArray[np.int32]


def links(n: int, session: NDArray[np.int32] | None, turn: NDArray[np.int32] | None, wait_offsets: Ints | None,
          wait_rows: Ints | None) -> Links:
    """The links of `n` rows (columns as of `Trace`; None: every row a session of its own, or nobody waits)."""
    every = np.arange(n, dtype=np.int64)
    roots, rank = every, every.astype(np.int32)
    before = after = np.empty(0, np.int64)
    if session is not None and turn is not None:
        rows = np.lexsort((turn, session)).astype(np.int64)
        same = session[rows[1:]] == session[rows[:-1]]
        before, after = rows[:-1][same], rows[1:][same]
        roots, rank = rows[turn[rows] == 0], session
    if wait_offsets is not None and wait_rows is not None:
        before = np.concatenate((before, wait_rows))
        after = np.concatenate((after, np.repeat(every, np.diff(wait_offsets))))
    offsets = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(before, minlength=n), out=offsets[1:])
    return Links(roots, offsets, after[np.argsort(before, kind="stable")],
                 np.bincount(after, minlength=n).astype(np.int64), rank)


def in_a_circle(links: Links) -> int | None:
    """A row that waits for itself in the end, or None."""
    waits = links.waits.tolist()
    offsets, rows = links.offsets.tolist(), links.rows.tolist()
    ready = [row for row, count in enumerate(waits) if not count]
    ended = 0
    while ready:
        row = ready.pop()
        ended += 1
        for other in rows[offsets[row]:offsets[row + 1]]:
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
    if ended == len(waits):
        return None
    before: list[int] = [-1] * len(waits)      # of those left, each waits for another that is left: go back
    for row, count in enumerate(waits):
        if count:
            for other in rows[offsets[row]:offsets[row + 1]]:
                before[other] = row
    row = next(i for i, count in enumerate(waits) if count)
    seen: set[int] = set()
    while row not in seen:
        seen.add(row)
        row = before[row]
    return row
