"""A trace: the requests of a workload, as columns.

A row is one request. Requests that belong to one conversation are the turns of a session: the first turn arrives at its
time stamp, each later one a think time after the previous turn has completed. A prompt is a list of hash ids, each
standing for `block_size` tokens; two prompts share a prefix where their lists do.
"""
from __future__ import annotations

import gzip
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import trace_edit
from .trace_edit import some, turns_of
from .trace_write import write_rows
from .waits import in_a_circle, links

__all__ = ["MAX_BLOCK_SIZE", "Trace", "TraceError", "sample_trace_path"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_BLOCK_SIZE = 2**31 - 1      # so that a capacity, ids times block size, fits an int64
_INFORMATIVE = {"path", "line", "clamped", "skipped"}      # where a trace came from, not what it says


class TraceError(ValueError):
    """A trace, or the file it should come from, breaks a rule.

    Parameters
    ----------
    problem : str
        What is wrong; what to do about it.
    path : str
        File, empty for a trace that was not read from one.
    line : int, optional
        1-based line in the file.
    field : str, optional
        Key of the row; "row" for the row as a whole, None for the file as a whole.
    """

    def __init__(self, problem: str, path: str = "", line: int | None = None, field: str | None = None) -> None:
        where = (path or "<trace>") + ("" if line is None else f":{line}")
        super().__init__(f"{where}: {field}: {problem}" if field else f"{where}: {problem}")
        self.problem = problem
        self.path = path
        self.line = line
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return TraceError, (self.problem, self.path, self.line, self.field)


def sample_trace_path() -> Path:
    """Path of the shipped trace, the conversation trace of the Mooncake release (gzip, 12,031 requests)."""
    return Path(str(resources.files("mocker"))) / "data" / "mooncake_conversation.jsonl.gz"


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Immutable requests in file order; may be used by many threads at once.

    Use `load` or `from_columns`, which check what they take; the constructor does not.

    Attributes
    ----------
    block_size : int
        Tokens per hash id.
    arrival_ms : float64[n]
        Time stamp in ms, NaN = missing. Only those of first turns drive a replay.
    input_length, output_length : int64[n]
        Tokens of the prompt (at least 1) and of the answer (0 = only prefill).
    hash_offsets : int64[n + 1]
        The ids of row i are `hash_ids[hash_offsets[i]:hash_offsets[i + 1]]`.
    hash_ids : uint64[total]
    line : int64[n]
        1-based line in the file (1, 2, … for rows that come from no file).
    session : int32[n]
        Index of the session, in order of first appearance.
    turn : int32[n]
        0-based turn in the session.
    delay_ms : float64[n]
        Think time in ms after the previous turn has completed, or after all that the row waits for have; 0 for a row
        that waits for none.
    priority : int32[n]
    strict_priority : uint32[n]
    session_ids : tuple of str, or None
        Name of each session, by index; None when no row named one. In a file where only some rows do, the others are
        sessions of one turn called "request_<line>".
    request_ids : tuple of (str or None), or None
        One per row.
    policy_class : tuple of (str or None), or None
        One per row.
    output_token_offsets : int64[n + 1], or None
    output_token_ids : uint32[], or None
        Planned answers; a row has `output_length` of them or none.
    path : str
        Where the trace was read from, or "".
    clamped : int64[k]
        Rows whose input length was cut to what their hash ids cover.
    accumulate : bool
        Hash ids and input length of a turn are what it adds: its prompt is all that its session has said so far, the
        answers included, and then these.
    wait_offsets : int64[n + 1], or None
    wait_rows : int64[], or None
        Row i is ready `delay_ms[i]` after the rows `wait_rows[wait_offsets[i]:wait_offsets[i + 1]]` have ended, at its
        time stamp (0 if it has none) if there are none. None where no row can wait for others but its session's.
    cancel_after_ms : float64[n], or None
        When the client gives up, in ms from the arrival; NaN: never.
    skipped : tuple of TraceError
        Why rows of the file are not in the trace (`load` with ``on_error="skip"``), in file order.
    """

    block_size: int
    arrival_ms: Floats
    input_length: Ints
    output_length: Ints
    hash_offsets: Ints
    hash_ids: NDArray[np.uint64]
    line: Ints
    session: NDArray[np.int32]
    turn: NDArray[np.int32]
    delay_ms: Floats
    priority: NDArray[np.int32]
    strict_priority: NDArray[np.uint32]
    session_ids: tuple[str, ...] | None
    request_ids: tuple[str | None, ...] | None
    policy_class: tuple[str | None, ...] | None
    output_token_offsets: Ints | None
    output_token_ids: NDArray[np.uint32] | None
    path: str
    clamped: Ints
    accumulate: bool = False
    wait_offsets: Ints | None = None
    wait_rows: Ints | None = None
    cancel_after_ms: Floats | None = None
    skipped: tuple[TraceError, ...] = ()

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    # Making one

    @staticmethod
    def load(
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        format: str = "auto",
        block_size: int | None = None,
        on_short_hash_ids: str = "error",
        **options: Any,
    ) -> Trace:
        """Read a trace file, plain or gzip.

        Parameters
        ----------
        path : path-like or sequence of path-like
            A file, or several for formats that allow it.
        format : str
            A name in `mocker.formats.FORMATS`, or "auto" to look at the first row.
        block_size : int, optional
            Tokens per hash id; 512 for a format that does not say it itself.
        on_short_hash_ids : {"error", "clamp"}
            What to do with an input length that the hash ids do not cover; "clamp" cuts it as the reference does and
            lists the row in `clamped`.
        **options
            Options of the format, see `mocker.formats.Format.options`.

        Raises
        ------
        TraceError
            Names file, line and field.
        ValueError
            An unknown format, option or `on_short_hash_ids`.
        OSError
            The file cannot be opened.
        """
        from .formats import load

        return load(path, format=format, block_size=block_size, on_short_hash_ids=on_short_hash_ids, **options)

    @staticmethod
    def from_columns(
        *,
        input_length: ArrayLike,
        output_length: ArrayLike,
        hash_offsets: ArrayLike,
        hash_ids: ArrayLike,
        block_size: int = 512,
        arrival_ms: ArrayLike | None = None,
        line: ArrayLike | None = None,
        session: ArrayLike | None = None,
        turn: ArrayLike | None = None,
        delay_ms: ArrayLike | None = None,
        priority: ArrayLike | None = None,
        strict_priority: ArrayLike | None = None,
        session_ids: Sequence[str] | None = None,
        request_ids: Sequence[str | None] | None = None,
        policy_class: Sequence[str | None] | None = None,
        output_token_offsets: ArrayLike | None = None,
        output_token_ids: ArrayLike | None = None,
        path: str = "",
        clamped: ArrayLike | None = None,
        accumulate: bool = False,
        wait_offsets: ArrayLike | None = None,
        wait_rows: ArrayLike | None = None,
        cancel_after_ms: ArrayLike | None = None,
        skipped: Sequence[TraceError] = (),
    ) -> Trace:
        """Make a trace of columns, as described at the class; a column left out has its neutral value.

        Without `session` each row is a session of its own. Arrays that the caller could still change are copied.

        Raises
        ------
        ValueError
            A column has the wrong shape or type, or a value that no trace file could hold; the message names column
            and row.
        """
        if isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer)) \
                or not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"block_size must be an integer from 1 to {MAX_BLOCK_SIZE}, is {block_size!r}")
        inputs = _column("input_length", input_length, np.int64)
        n = len(inputs)
        outputs = _column("output_length", output_length, np.int64, n)
        ids = _column("hash_ids", hash_ids, np.uint64)
        offsets = _offsets("hash_offsets", hash_offsets, n, len(ids))
        capacity = np.diff(offsets) * int(block_size)
        _refuse("hash_offsets", capacity == 0, "gives the row no hash ids")
        _refuse("input_length", inputs < 1, "is below 1")
        _refuse("input_length", inputs > capacity, "is more than the row's hash ids cover")
        _refuse("output_length", outputs < 0, "is negative")

        arrivals = np.full(n, np.nan) if arrival_ms is None else _column("arrival_ms", arrival_ms, np.float64, n)
        _refuse("arrival_ms", np.isinf(arrivals), "is infinite")
        sessions = np.arange(n, dtype=np.int32) if session is None else _column("session", session, np.int32, n)
        _, first, counted = np.unique(sessions, return_index=True, return_inverse=True)
        named = np.empty(len(first), np.int64)
        named[np.argsort(first, kind="stable")] = np.arange(len(first))
        _refuse("session", named[counted.reshape(n)] != sessions, "is not numbered by first appearance from 0")
        turns = turns_of(sessions)
        if turn is not None:
            given = _column("turn", turn, np.int32, n)
            _refuse("turn", given != turns, "is not the count of earlier rows in the session")
        delays = np.zeros(n) if delay_ms is None else _column("delay_ms", delay_ms, np.float64, n)
        _refuse("delay_ms", ~(np.isfinite(delays) & (delays >= 0)), "is not a finite number of at least 0")
        waits_at, waits = _waits(n, sessions, turns, wait_offsets, wait_rows)
        first_turn = (turns == 0) if waits_at is None else (turns == 0) & (np.diff(waits_at) == 0)
        _refuse("delay_ms", first_turn & (delays != 0), "is not 0 in a first turn")
        cancels = None if cancel_after_ms is None else _column("cancel_after_ms", cancel_after_ms, np.float64, n)
        if cancels is not None:
            _refuse("cancel_after_ms", np.isinf(cancels) | (cancels < 0), "is not a finite number of at least 0")
            if np.isnan(cancels).all():
                cancels = None

        if session_ids is not None:
            if len(session_ids) != len(first):
                raise ValueError(f"session_ids has {len(session_ids)} names for {len(first)} sessions")
            _refuse_strings("session_ids", session_ids, optional=False)
            if waits is None and len(set(session_ids)) != len(session_ids):
                raise ValueError("session_ids names two sessions alike")
        for name, strings in (("request_ids", request_ids), ("policy_class", policy_class)):
            if strings is not None:
                if len(strings) != n:
                    raise ValueError(f"{name} has {len(strings)} entries for {n} rows")
                _refuse_strings(name, strings, optional=True)

        if (output_token_offsets is None) != (output_token_ids is None):
            raise ValueError("output_token_offsets and output_token_ids go together")
        tokens = token_offsets = None
        if output_token_offsets is not None and output_token_ids is not None:
            tokens = _column("output_token_ids", output_token_ids, np.uint32)
            token_offsets = _offsets("output_token_offsets", output_token_offsets, n, len(tokens))
            planned = np.diff(token_offsets)
            _refuse("output_token_offsets", (planned != 0) & (planned != outputs), "does not plan output_length tokens")
            if not len(tokens):
                tokens = token_offsets = None
        cut = np.empty(0, np.int64) if clamped is None else _column("clamped", clamped, np.int64)
        if len(cut) and not (cut.min() >= 0 and cut.max() < n and (np.diff(cut) > 0).all()):
            raise ValueError(f"clamped must be ascending row indices below {n}")
        return Trace(
            block_size=int(block_size),
            arrival_ms=arrivals,
            input_length=inputs,
            output_length=outputs,
            hash_offsets=offsets,
            hash_ids=ids,
            line=np.arange(1, n + 1, dtype=np.int64) if line is None else _column("line", line, np.int64, n),
            session=sessions,
            turn=turns,
            delay_ms=delays,
            priority=np.zeros(n, np.int32) if priority is None else _column("priority", priority, np.int32, n),
            strict_priority=np.zeros(n, np.uint32) if strict_priority is None
            else _column("strict_priority", strict_priority, np.uint32, n),
            session_ids=None if session_ids is None else tuple(session_ids),
            request_ids=some(request_ids),
            policy_class=some(policy_class),
            output_token_offsets=token_offsets,
            output_token_ids=tokens,
            path=path,
            clamped=cut,
            accumulate=bool(accumulate),
            wait_offsets=waits_at,
            wait_rows=waits,
            cancel_after_ms=cancels,
            skipped=tuple(skipped),
        )

    # Looking at it

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self.input_length)

    def __len__(self) -> int:
        return self.n

    @property
    def n_sessions(self) -> int:
        """Number of sessions."""
        return int(np.count_nonzero(self.turn == 0))

    @property
    def is_single_turn(self) -> bool:
        """Whether every session has one turn."""
        return not self.turn.any()

    @property
    def nbytes(self) -> int:
        """Bytes of the columns; strings are not counted."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def __repr__(self) -> str:
        sessions = "" if self.is_single_turn else f", {self.n_sessions:,} sessions"
        source = f", from {self.path!r}" if self.path else ""
        return (
            f"<Trace: {self.n:,} requests{sessions}, {int(self.input_length.sum()):,} input and "
            f"{int(self.output_length.sum()):,} output tokens, block size {self.block_size}{source}>"
        )

    def __eq__(self, other: object) -> bool:
        """Whether both describe the same requests; `path`, `line`, `clamped` and `skipped` do not count."""
        if not isinstance(other, Trace):
            return NotImplemented
        return all(
            _same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name not in _INFORMATIVE
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Trace, tuple(getattr(self, f.name) for f in fields(self))

    def validate(self, allow_missing_timestamps: bool) -> None:
        """Check that the trace can be replayed.

        Parameters
        ----------
        allow_missing_timestamps : bool
            False for a replay that follows the time stamps, True for one that ignores them (closed loop).

        Raises
        ------
        TraceError
            No request at all; or a first turn without time stamp, or with one below 0 (normalise first).
        """
        if not self.n:
            raise TraceError("did not contain any requests; a replay needs at least one", self.path)
        start = self.arrival_ms[self.turn == 0]
        optional = allow_missing_timestamps or self.wait_rows is not None      # who waits needs none
        bad = (np.isinf(start) | (start < 0)) if optional else ~(np.isfinite(start) & (start >= 0))
        if bad.any():
            value = start[bad.argmax()]
            row = int(np.flatnonzero(self.turn == 0)[bad.argmax()])
            what = "is missing; give the first turn of each session one, or replay with a fixed concurrency"
            if not math.isnan(value):
                what = f"is {value} ms, which is not a time from 0 on; use normalize_session_starts()"
            raise TraceError(what, self.path, int(self.line[row]), "timestamp")

    # Making others of it

    def normalize_session_starts(self) -> Trace:
        """Shift the time stamps so that the earliest first turn arrives at 0.

        Time stamps of later turns move along; think times stay. A trace without time stamps stays as it is.
        """
        return trace_edit.normalize_session_starts(self)

    def speed_up_timing(self, ratio: float) -> Trace:
        """Divide time stamps and think times by a ratio.

        Raises
        ------
        ValueError
            The ratio is not finite and above 0.
        """
        return trace_edit.speed_up_timing(self, ratio)

    def rescale_session_start_span(self, duration_ms: int) -> Trace:
        """Stretch or shrink the time stamps so that first turns arrive from 0 to `duration_ms`; think times stay.

        First turns that all arrive at the same time arrive at 0.
        """
        return trace_edit.rescale_session_start_span(self, duration_ms)

    def rescale_ready_span(self, duration_ms: int) -> Trace:
        """Scale time stamps and think times alike so that the last turn could be ready `duration_ms` after the first.

        A turn could be ready when its session has arrived and all think times before it have passed, as if answers
        took no time. A span below 1 ms counts as 1 ms.
        """
        return trace_edit.rescale_ready_span(self, duration_ms)

    def expand_hash_prefix_depth(self, factor: int) -> Trace:
        """Every hash id becomes `factor` ids of its own: prompts that are `factor` times as long, equally shared.

        Raises
        ------
        ValueError
            `factor` is not an integer from 1 on, or takes an id or a length beyond 64 bits.
        """
        return trace_edit.expand_hash_prefix_depth(self, factor)

    def duplicate_hash_space(self, copies: int) -> Trace:
        """The trace `copies` times at the same times, each copy with prompts that no other copy shares.

        Sessions (and request ids) of copy k are called after the original with ":copy_k" at the end.

        Raises
        ------
        ValueError
            `copies` is not an integer from 1 on, or takes a hash id beyond 64 bits.
        """
        return trace_edit.duplicate_hash_space(self, copies)

    def partition_by_session(self, parts: int, seed: int | None = None) -> list[Trace]:
        """Deal the sessions out to traces.

        Parameters
        ----------
        parts : int
            How many.
        seed : int, optional
            Draw the part of each session with this seed, as the reference does; None: each part in turn.

        Returns
        -------
        list of Trace
            Some may be empty.

        Raises
        ------
        ValueError
            `parts` is not an integer from 1 on, or requests of this trace wait for each other.
        """
        return trace_edit.partition_by_session(self, parts, seed)

    def head(self, n: int) -> Trace:
        """The first `n` rows (all, if there are fewer).

        Raises
        ------
        ValueError
            `n` is negative.
        """
        if n < 0:
            raise ValueError(f"n must not be negative, is {n}")
        return self.select(np.arange(self.n) < n)

    def select(self, mask: ArrayLike) -> Trace:
        """The rows that a mask names.

        What is left of a session is a session; where its first turns are dropped, the first turn that is left arrives
        at its own time stamp and loses its think time. The same holds for a request when all that it waited for are
        dropped.

        Parameters
        ----------
        mask : bool[n]

        Raises
        ------
        ValueError
            The mask is not one truth value per row.
        """
        return trace_edit.select(self, mask)

    @staticmethod
    def concat(*traces: Trace) -> Trace:
        """The rows of several traces, one after the other.

        Sessions of different traces stay apart: a name that an earlier trace uses too gets "#2", "#3", … appended,
        after the place of its trace among the arguments.
        Hash ids stay as they are, so equal ids are equal prompt blocks across the traces.

        Raises
        ------
        ValueError
            No trace, or different block sizes, or turns that mean different things (`accumulate`).
        """
        return trace_edit.concat(traces)

    # Writing it

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as Mooncake JSONL (agentic if requests wait for each other), with gzip for a name in ".gz".

        Loading the file with the same block size gives an equal trace, with three exceptions: sessions of several turns
        without names are called "session_<index>" in the file; where requests wait for each other, those without names
        are called "request_<row>" and a name used again gets "#2", "#3", … appended; and that turns add to their
        prompts must be said when loading (format "mooncake-delta").
        Equal traces give equal bytes.

        Raises
        ------
        OSError
            The file cannot be written.
        ValueError
            A time is infinite (after scaling it too far), which JSON cannot hold.
        """
        if np.isinf(self.arrival_ms).any() or np.isinf(self.delay_ms).any():
            raise ValueError("an infinite time stamp or think time cannot be written as JSON")
        with open(path, "wb") as file:
            if os.fspath(path).endswith(".gz"):
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                    write_rows(self, packed)
            else:
                write_rows(self, file)

def _same(a: Any, b: Any) -> bool:
    """Equality of two columns, NaN equal to itself."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return type(a) is type(b) and bool(a == b)


def _column(name: str, values: ArrayLike, dtype: type[Any], n: int | None = None) -> NDArray[Any]:
    """A one-dimensional array of the type, values unchanged, that nobody else can write to."""
    want = np.dtype(dtype)
    if isinstance(values, (list, tuple)) and want.kind in "iu" and all(type(v) is int for v in values):
        # NumPy would take a list with small and very large integers for floats.
        low, high = np.iinfo(want).min, np.iinfo(want).max
        if any(not low <= v <= high for v in values):
            raise ValueError(f"{name} must be from {low} to {high}, holds {min(values)} to {max(values)}")
        values = np.array(values, want)
        values.setflags(write=False)
    given = np.asarray(values)
    if given.ndim != 1 or (n is not None and len(given) != n):
        raise ValueError(f"{name} must have shape [{'any' if n is None else n}], has {list(given.shape)}")
    if given.dtype == want and given.flags.c_contiguous and given.dtype.isnative:
        return given.copy() if given.flags.writeable else given
    if len(given) and given.dtype.kind not in ("iuf" if want.kind == "f" else "iu"):
        raise ValueError(f"{name} must hold {want}, holds {given.dtype}")
    if want.kind != "f" and len(given):
        info = np.iinfo(want)
        low, high = int(given.min()), int(given.max())
        if low < info.min or high > info.max:
            raise ValueError(f"{name} must be from {info.min} to {info.max}, holds {low} to {high}")
    return np.ascontiguousarray(given.astype(want))


def _offsets(name: str, values: ArrayLike, n: int, total: int) -> Ints:
    """int64[n + 1] that rises from 0 to `total`."""
    offsets = _column(name, values, np.int64, n + 1)
    if offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
        raise ValueError(f"{name} must rise from 0 to {total}, the number of values that it divides")
    return offsets


def _waits(n: int, session: NDArray[np.int32], turn: NDArray[np.int32], offsets: ArrayLike | None,
           rows: ArrayLike | None) -> tuple[Ints | None, Ints | None]:
    """The columns of who waits for whom, checked."""
    if (offsets is None) != (rows is None):
        raise ValueError("wait_offsets and wait_rows go together")
    if offsets is None or rows is None:
        return None, None
    others = _column("wait_rows", rows, np.int64)
    if len(others) and not 0 <= others.min() <= others.max() < n:
        raise ValueError(f"wait_rows must be row indices below {n}, holds {others.min()} to {others.max()}")
    at = _offsets("wait_offsets", offsets, n, len(others))
    lost = in_a_circle(links(n, session, turn, at, others))
    if lost is not None:
        raise ValueError(f"wait_rows lets row {lost} wait for itself in the end")
    return at, others


def _refuse(name: str, bad: NDArray[np.bool_], what: str) -> None:
    """Raise for the first row that is bad."""
    if bad.any():
        raise ValueError(f"{name} of row {int(bad.argmax())} {what}")


def _refuse_strings(name: str, strings: Sequence[str | None], optional: bool) -> None:
    """Raise for the first entry that is no string, or one that no file can hold."""
    for i, s in enumerate(strings):
        if s is None and optional:
            continue
        try:
            if not isinstance(s, str):
                raise ValueError(f"{name}[{i}] must be a string, is {s!r}")
            s.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}[{i}] is not valid Unicode: {s!r}") from None
