"""Trace columns: building, deriving, comparing, saving."""
from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mocker.trace import Trace, TraceError, sample_trace_path


@pytest.fixture(scope="module")
def shipped():
    return Trace.load(sample_trace_path())


def make(**changes):
    """Five rows in three sessions, every column in use."""
    columns = {
        "block_size": 4,
        "arrival_ms": [10.0, 20.5, np.nan, 30.25, 31],
        "input_length": [3, 4, 5, 8, 12],
        "output_length": [1, 2, 0, 3, 4],
        "hash_offsets": [0, 1, 2, 4, 6, 9],
        "hash_ids": [0, 1, 2**64 - 1, 3, 4, 5, 6, 2**63, 8],
        "line": [1, 2, 4, 5, 9],
        "session": [0, 1, 0, 2, 1],
        "delay_ms": [0, 0, 1.5, 0, 0.1],
        "priority": [0, -3, 0, 2**31 - 1, 1],
        "strict_priority": [0, 0, 2**32 - 1, 0, 7],
        "session_ids": ["a", "é\n\"", "c"],
        "request_ids": [None, "r1", "", "r3", "r4"],
        "policy_class": ["p", None, None, None, "q"],
        "output_token_offsets": [0, 0, 2, 2, 5, 5],
        "output_token_ids": [1, 2, 3, 2**32 - 1, 5],
        "path": "made",
        "clamped": [1, 4],
    }
    columns.update(changes)
    return Trace.from_columns(**columns)


def arrays(trace):
    return {f.name: v for f in dataclasses.fields(trace) if isinstance(v := getattr(trace, f.name), np.ndarray)}


def check(trace):
    """The trace obeys the rules of from_columns, and every column is read-only."""
    again = Trace.from_columns(**{f.name: getattr(trace, f.name) for f in dataclasses.fields(trace)})
    assert again == trace
    for name, value in arrays(trace).items():
        assert not value.flags.writeable, name
        assert value.dtype == arrays(again)[name].dtype, name
    return trace


# Building

def test_defaults():
    trace = Trace.from_columns(input_length=[1, 512], output_length=[0, 1], hash_offsets=[0, 1, 2], hash_ids=[7, 8])
    assert trace.block_size == 512 and trace.n == len(trace) == 2
    assert np.isnan(trace.arrival_ms).all()
    assert trace.line.tolist() == [1, 2] and trace.session.tolist() == [0, 1]
    assert trace.turn.tolist() == trace.priority.tolist() == trace.strict_priority.tolist() == [0, 0]
    assert trace.session_ids is trace.request_ids is trace.policy_class is None
    assert trace.is_single_turn and trace.n_sessions == 2 and trace.path == ""


def test_columns_and_turns():
    trace = check(make())
    assert trace.turn.tolist() == [0, 0, 1, 0, 1]
    assert trace.hash_ids.tolist() == [0, 1, 2**64 - 1, 3, 4, 5, 6, 2**63, 8]
    assert trace.n_sessions == 3 and not trace.is_single_turn


def test_caller_arrays_stay_the_callers():
    mine = np.array([1, 2], np.int64)
    trace = Trace.from_columns(input_length=mine, output_length=mine, hash_offsets=[0, 1, 2], hash_ids=[1, 2])
    mine[0] = 9
    assert mine.flags.writeable and trace.input_length.tolist() == [1, 2]
    frozen = trace.input_length
    again = Trace.from_columns(input_length=frozen, output_length=mine, hash_offsets=[0, 1, 2], hash_ids=[1, 2])
    assert again.input_length is frozen


@pytest.mark.parametrize("changes, message", [
    ({"block_size": 0}, "block_size must be"),
    ({"block_size": True}, "block_size must be"),
    ({"block_size": 2.0}, "block_size must be"),
    ({"input_length": [3, 4, 5, 9, 12]}, "input_length of row 3 is more"),
    ({"input_length": [3, 0, 5, 8, 12]}, "input_length of row 1 is below 1"),
    ({"input_length": [3, 4]}, "output_length must have shape"),
    ({"input_length": [[3, 4, 5, 8, 12]]}, "input_length must have shape"),
    ({"input_length": [3, 4, 5, 8, 1.5]}, "input_length must hold int64, holds float64"),
    ({"input_length": [3, 4, 5, 8, 2**63]}, "input_length must be from"),
    ({"input_length": np.array([True] * 5)}, "input_length must hold int64, holds bool"),
    ({"output_length": [1, 2, -1, 3, 4]}, "output_length of row 2 is negative"),
    ({"hash_ids": [0, 1, -1, 3, 4, 5, 6, 7, 8]}, "hash_ids must be from 0"),
    ({"hash_ids": np.array([-1] * 9)}, "hash_ids must be from 0"),
    ({"hash_ids": ["a"] * 9}, "hash_ids must hold uint64"),
    ({"hash_offsets": [0, 1, 2, 4, 6, 8]}, "hash_offsets must rise from 0 to 9"),
    ({"hash_offsets": [1, 1, 2, 4, 6, 9]}, "hash_offsets must rise"),
    ({"hash_offsets": [0, 1, 2, 7, 6, 9]}, "hash_offsets must rise"),
    ({"hash_offsets": [0, 1, 2, 2, 6, 9]}, "hash_offsets of row 2 gives the row no hash ids"),
    ({"hash_offsets": [0, 9]}, "hash_offsets must have shape"),
    ({"arrival_ms": [1, 2, 3, 4, math.inf]}, "arrival_ms of row 4 is infinite"),
    ({"session": [1, 0, 0, 2, 1]}, "session of row 0 is not numbered"),
    ({"session": [0, 2, 0, 3, 2]}, "session of row 1 is not numbered"),
    ({"turn": [0, 0, 1, 1, 1]}, "turn of row 3"),
    ({"delay_ms": [0, 0, -1, 0, 0]}, "delay_ms of row 2"),
    ({"delay_ms": [0, 0, math.nan, 0, 0]}, "delay_ms of row 2"),
    ({"delay_ms": [0, 1, 0, 0, 0]}, "delay_ms of row 1 is not 0 in a first turn"),
    ({"priority": [0, 0, 0, 0, 2**31]}, "priority must be from"),
    ({"strict_priority": [0, 0, 0, 0, -1]}, "strict_priority must be from"),
    ({"session_ids": ["a", "b"]}, "session_ids has 2 names for 3 sessions"),
    ({"session_ids": ["a", "b", "a"]}, "session_ids names two sessions alike"),
    ({"session_ids": ["a", "b", None]}, r"session_ids\[2\] must be a string"),
    ({"request_ids": ["a", "b", 3, None, None]}, r"request_ids\[2\] must be a string"),
    ({"request_ids": ["a"]}, "request_ids has 1 entries for 5 rows"),
    ({"policy_class": ["\ud800"] + [None] * 4}, r"policy_class\[0\] is not valid Unicode"),
    ({"output_token_offsets": None}, "go together"),
    ({"output_token_offsets": [0, 0, 3, 3, 5, 5]}, "output_token_offsets of row 1 does not plan"),
    ({"output_token_ids": [1, 2, 3, 4, 2**32]}, "output_token_ids must be from"),
    ({"clamped": [4, 1]}, "clamped must be ascending"),
    ({"clamped": [5]}, "clamped must be ascending"),
])
def test_bad_columns(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_immutable():
    trace = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace.block_size = 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(trace)
    for value in arrays(trace).values():
        with pytest.raises(ValueError, match="read-only"):
            value[:] = 0


# Comparing and moving

def test_equality():
    assert make() == make()
    assert make() == make(path="other", line=[1, 2, 3, 4, 5], clamped=[])
    assert make() != 3
    for changes in (
        {"block_size": 5}, {"arrival_ms": [10.0, 20.5, 1, 30.25, 31]}, {"input_length": [3, 4, 5, 8, 11]},
        {"output_length": [2, 2, 0, 3, 4]}, {"hash_ids": range(9)}, {"session_ids": None}, {"request_ids": None},
        {"policy_class": None}, {"output_token_ids": None, "output_token_offsets": None}, {"priority": None},
        {"strict_priority": None}, {"delay_ms": None}, {"session": None, "session_ids": None, "delay_ms": None},
    ):
        assert make(**changes) != make(), changes


@pytest.mark.parametrize("twin", [
    lambda t: pickle.loads(pickle.dumps(t)), lambda t: pickle.loads(pickle.dumps(t, 5)), copy.copy, copy.deepcopy,
])
def test_copies(twin):
    trace = make()
    again = check(twin(trace))
    assert again == trace
    assert (again.path, again.line.tolist(), again.clamped.tolist()) == ("made", [1, 2, 4, 5, 9], [1, 4])


def test_repr_and_nbytes(shipped):
    text = repr(shipped)
    assert "12,031 requests" in text and "4,122,048 output tokens" in text and "block size 512" in text
    assert "sessions" not in text and "3 sessions" in repr(make())
    assert shipped.nbytes == sum(v.nbytes for v in arrays(shipped).values()) > 8 * len(shipped.hash_ids)


def test_shared_by_threads(shipped):
    results = []
    threads = [threading.Thread(target=lambda: results.append(Trace.load(sample_trace_path()) == shipped.head(99999)))
               for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [True] * 4


# Deriving

def test_head(shipped):
    part = check(shipped.head(10))
    assert part.n == 10 and part.hash_offsets[-1] == shipped.hash_offsets[10]
    assert part.hash_ids.tolist() == shipped.hash_ids[: shipped.hash_offsets[10]].tolist()
    assert shipped.head(10**9) == shipped
    assert check(shipped.head(0)).n == 0
    with pytest.raises(ValueError, match="must not be negative"):
        shipped.head(-1)


def test_select():
    trace = make()
    part = check(trace.select([False, False, True, True, True]))
    assert part.session.tolist() == [0, 1, 2] and part.session_ids == ("a", "c", "é\n\"")
    assert part.turn.tolist() == [0, 0, 0] and part.delay_ms.tolist() == [0, 0, 0]
    assert part.hash_ids.tolist() == trace.hash_ids[2:].tolist() and part.hash_offsets.tolist() == [0, 2, 4, 7]
    assert part.output_token_ids.tolist() == [3, 2**32 - 1, 5] and part.output_token_offsets.tolist() == [0, 0, 3, 3]
    assert part.request_ids == ("", "r3", "r4") and part.policy_class == (None, None, "q")
    assert part.line.tolist() == [4, 5, 9] and part.clamped.tolist() == [2] and part.path == "made"
    plain = check(trace.select(np.array([True, False, True, False, False])))
    assert plain.output_token_ids is None and plain.output_token_offsets is None
    assert plain.delay_ms.tolist() == [0, 1.5] and plain.turn.tolist() == [0, 1]
    assert check(trace.select([False] * 5)).n == 0
    assert trace.select([True] * 5) == trace


@pytest.mark.parametrize("mask", [[True], [0, 1, 2, 3, 4], [1, 0, 1, 0, 1], np.ones((5, 1), bool), 3, None])
def test_bad_mask(mask):
    with pytest.raises(ValueError, match=r"mask must be bool\[5\]"):
        make().select(mask)


@given(st.lists(st.booleans(), min_size=5, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_select_twice_is_select_both(a, b):
    trace = make()
    once = trace.select([x and y for x, y in zip(a, b, strict=True)])
    twice = trace.select(a).select([y for x, y in zip(a, b, strict=True) if x])
    assert check(once).session_ids == twice.session_ids
    assert once.hash_ids.tolist() == twice.hash_ids.tolist()
    assert once.turn.tolist() == twice.turn.tolist() and once.line.tolist() == twice.line.tolist()


def test_concat():
    a, b = make(), make(session_ids=["x", "c", "c#2"], output_token_offsets=None, output_token_ids=None, path="b",
                        policy_class=None)
    joined = check(Trace.concat(a, b, a.head(1)))
    assert joined.n == 11
    assert joined.session.tolist() == [0, 1, 0, 2, 1, 3, 4, 3, 5, 4, 6]
    assert joined.session_ids == ("a", "é\n\"", "c", "x", "c#2", "c#2#2", "a#3")
    assert joined.hash_ids.tolist() == a.hash_ids.tolist() * 2 + [0]
    assert joined.output_token_offsets.tolist() == [0, 0, 2, 2, 5, 5, 5, 5, 5, 5, 5, 5]
    assert joined.policy_class == ("p", None, None, None, "q") + (None,) * 5 + ("p",)
    assert joined.clamped.tolist() == [1, 4, 6, 9] and joined.path == "made, b"
    assert Trace.concat(a) == a


def test_concat_without_names():
    plain = make(session=None, session_ids=None, delay_ms=None)
    assert check(Trace.concat(plain, plain)).session_ids is None
    assert Trace.concat(plain, plain).session.tolist() == list(range(10))
    assert check(Trace.concat(plain, make())).session_ids[:6] == (
        "request_1", "request_2", "request_4", "request_5", "request_9", "a")
    unnamed = make(session_ids=None)
    assert check(Trace.concat(make(), unnamed)).session_ids[3:] == ("session_0", "session_1", "session_2")
    with pytest.raises(ValueError, match="different block sizes"):
        Trace.concat(plain, make(block_size=5))
    with pytest.raises(ValueError, match="at least one"):
        Trace.concat()


def test_halves_of_a_single_turn_trace(shipped):
    first = np.arange(shipped.n) < 5000
    assert Trace.concat(shipped.select(first), shipped.select(~first)) == shipped


# Time

def test_normalize():
    trace = check(make(arrival_ms=[10.1, 7.3, 1.0, np.nan, 9]).normalize_session_starts())
    assert np.array_equal(trace.arrival_ms, [10.1 - 7.3, 0, 1.0 - 7.3, np.nan, 9 - 7.3], equal_nan=True)
    assert trace.delay_ms.tolist() == [0, 0, 1.5, 0, 0.1]
    bare = make(arrival_ms=None)
    assert bare.normalize_session_starts() == bare
    assert make(arrival_ms=[-5, 0, 0, -3, 0]).normalize_session_starts().arrival_ms.tolist() == [0, 5, 5, 2, 5]


def test_normalize_orders_zeros_as_the_reference():
    trace = make(arrival_ms=[0.0, -0.0, 0, 4, 0]).normalize_session_starts()
    assert not np.signbit(trace.arrival_ms).any()


def test_speed_up():
    trace = make().speed_up_timing(3.0)
    check(trace)
    assert np.array_equal(trace.arrival_ms, np.array([10.0, 20.5, np.nan, 30.25, 31]) / 3.0, equal_nan=True)
    assert trace.delay_ms.tolist() == [0, 0, 1.5 / 3, 0, 0.1 / 3]
    for ratio in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="ratio must be a finite positive number"):
            make().speed_up_timing(ratio)


def test_times_out_of_range():
    trace = make(arrival_ms=[1e308] * 5).speed_up_timing(1e-10)
    assert np.isinf(trace.arrival_ms).all()
    with pytest.raises(TraceError, match="made:1: timestamp: is inf"):
        trace.validate(allow_missing_timestamps=True)


def test_infinite_times_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="infinite"):
        make(arrival_ms=[1e308] * 5).speed_up_timing(1e-10).save(tmp_path / "t")


def test_validate(shipped):
    shipped.validate(allow_missing_timestamps=False)
    make().validate(allow_missing_timestamps=False)     # a later turn needs no time stamp
    missing = make(arrival_ms=[1, 2, 3, np.nan, 5])
    missing.validate(allow_missing_timestamps=True)
    with pytest.raises(TraceError, match="made:5: timestamp: is missing") as caught:
        missing.validate(allow_missing_timestamps=False)
    assert (caught.value.path, caught.value.line, caught.value.field) == ("made", 5, "timestamp")
    negative = make(arrival_ms=[1, -2, -3, 4, 5])
    for allow in (False, True):
        with pytest.raises(TraceError, match=r"made:2: timestamp: is -2.0 ms.*normalize_session_starts"):
            negative.validate(allow_missing_timestamps=allow)
        negative.normalize_session_starts().validate(allow_missing_timestamps=allow)
        with pytest.raises(TraceError, match="did not contain any requests"):
            shipped.head(0).validate(allow_missing_timestamps=allow)
    with pytest.raises(TraceError, match="^<trace>: did not"):
        make(path="").head(0).validate(True)


# Saving

@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_save_and_load(tmp_path, shipped, name):
    path = tmp_path / name
    for trace in (make(), shipped, make().speed_up_timing(3.0), make(arrival_ms=[-0.0, 1e15, 2**53, 0.1, 1e300])):
        trace.save(path)
        again = Trace.load(path, block_size=trace.block_size)
        assert check(again) == trace
        assert again.arrival_ms.tobytes() == trace.arrival_ms.tobytes()
        first = path.read_bytes()
        again.save(str(path))
        assert path.read_bytes() == first
        assert (first[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_saved_rows_are_plain_json(tmp_path):
    make().save(tmp_path / "t")
    rows = [json.loads(text) for text in (tmp_path / "t").read_text(encoding="utf-8").splitlines()]
    assert rows[0] == {"session_id": "a", "timestamp": 10, "input_length": 3, "output_length": 1, "hash_ids": [0],
                       "policy_class": "p"}
    assert rows[4] == {"request_id": "r4", "session_id": "é\n\"", "timestamp": 31, "delay": 0.1, "input_length": 12,
                       "output_length": 4, "priority": 1, "strict_priority": 7, "policy_class": "q",
                       "hash_ids": [6, 2**63, 8]}


def test_save_like_the_release(tmp_path, shipped):
    shipped.head(2).save(tmp_path / "t")
    text = (tmp_path / "t").read_text().splitlines()[0]
    assert text.startswith('{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ')


def test_unnamed_sessions_get_names(tmp_path):
    make(session_ids=None).save(tmp_path / "t")
    again = Trace.load(tmp_path / "t", block_size=4)
    assert again == make(session_ids=["session_0", "session_1", "session_2"])


def test_save_empty(tmp_path, shipped):
    shipped.head(0).save(tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == b""
