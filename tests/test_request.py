"""`DirectRequest`: tokens, ranges, dictionaries, copies."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import pickle
import uuid
from array import array

import numpy as np
import pytest
from arguments import U32, U64, refused
from hypothesis import given
from hypothesis import strategies as st

from mocker.args import DirectRequest


def test_request_signature():
    expected = {
        "tokens": inspect.Parameter.empty,
        "max_output_tokens": inspect.Parameter.empty,
        "output_token_ids": None,
        "uuid": None,
        "dp_rank": 0,
        "arrival_timestamp_ms": None,
        "priority": 0,
        "strict_priority": 0,
        "policy_class": None,
    }
    assert [(n, p.default) for n, p in inspect.signature(DirectRequest).parameters.items()] == list(expected.items())


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 300],
        (1, 2, 300),
        array("I", [1, 2, 300]),
        array("q", [1, 2, 300]),
        memoryview(array("H", [1, 2, 300])),
        np.array([1, 2, 300]),
        np.array([1, 2, 300], np.uint64),
        np.array([1, 2, 300], ">u4"),
        np.array([1, 2, 300], object),
        np.array([1, 0, 2, 0, 300], np.int16)[::2],
        [np.int64(1), 2, np.uint8(3) * np.uint16(100)],
    ],
)
def test_request_tokens(tokens):
    got = DirectRequest(tokens, 3, tokens)
    for column in (got.tokens, got.output_token_ids):
        assert column.dtype == np.uint32
        assert column.tolist() == [1, 2, 300]


def test_request_more_sequences():
    assert DirectRequest(range(5), 1).tokens.tolist() == [0, 1, 2, 3, 4]
    assert DirectRequest(b"abc", 1).tokens.tolist() == [97, 98, 99]
    assert DirectRequest([0, U32], 1).tokens.tolist() == [0, U32]
    for empty in ([], (), np.array([]), array("d")):
        assert DirectRequest(empty, 1).tokens.shape == (0,)


def test_request_keeps_uint32_arrays():
    tokens = np.arange(100, dtype=np.uint32)
    assert DirectRequest(tokens, 1).tokens is tokens
    assert DirectRequest([1], 1, output_token_ids=tokens[::2]).output_token_ids.base is tokens


@pytest.mark.parametrize("bad", [-1, U32 + 1, 2**64, 2**100, True, 1.0, "1", None])
def test_request_token_position_is_named(bad):
    for tokens in ([5, 6, bad, -7], (5, 6, bad)):
        refused(lambda tokens=tokens: DirectRequest(tokens, 1), "DirectRequest: tokens[2]: ", "0..=2**32-1", bad)
        refused(lambda tokens=tokens: DirectRequest([1], 1, tokens), "output_token_ids[2]: ", bad)
    column = np.empty(3, object)
    column[:] = [1, 2, bad]
    refused(lambda: DirectRequest(column, 1), "tokens[2]: ", bad)


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64])
def test_request_array_position_is_named(kind):
    refused(lambda: DirectRequest(np.array([1, 2, 3, -4], kind), 1), "tokens[3]: ", "got -4")
    if kind is np.int64:
        for wide in (np.int64, np.uint64):
            refused(lambda wide=wide: DirectRequest(np.array([1, 2**32], wide), 1), "tokens[1]: ", 2**32)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        5,
        "abc",
        {1: 2},
        {1, 2},
        iter([1]),
        np.zeros((2, 2), np.uint32),
        np.array([1.0]),
        np.array([True]),
        np.uint32(3),
    ],
)
def test_request_tokens_not_a_sequence(bad):
    refused(lambda: DirectRequest(bad, 1), "tokens")


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_output_tokens", 0, U64),
        ("dp_rank", 0, U32),
        ("priority", -(2**31), 2**31 - 1),
        ("strict_priority", 0, U32),
    ],
)
def test_request_int_ranges(name, low, high):
    for good in (low, high, np.int64(5)):
        assert getattr(DirectRequest(**{"tokens": [1], "max_output_tokens": 1, name: good}), name) == good
    for bad in (low - 1, high + 1, True, 1.5, "1", None):
        refused(lambda bad=bad: DirectRequest(**{"tokens": [1], "max_output_tokens": 1, name: bad}), name)


def test_request_other_fields():
    assert DirectRequest([1], 1, arrival_timestamp_ms=3).arrival_timestamp_ms == 3.0
    assert DirectRequest([1], 1, arrival_timestamp_ms=-3.5).arrival_timestamp_ms == -3.5
    for bad in (math.nan, math.inf, True, "1"):
        refused(lambda bad=bad: DirectRequest([1], 1, arrival_timestamp_ms=bad), "arrival_timestamp_ms: ", "finite")
    assert DirectRequest([1], 1, policy_class="gold").policy_class == "gold"
    refused(lambda: DirectRequest([1], 1, policy_class=5), "policy_class: must be a string")
    with pytest.raises(AttributeError, match="read-only"):
        DirectRequest([1], 1).tokens = [2]


def test_request_uuid():
    number = uuid.UUID(int=77)
    for given_id in (number, 77, str(number), number.hex, np.int64(77)):
        assert DirectRequest([1], 1, uuid=given_id).uuid == number
    assert DirectRequest([1], 1).uuid is None
    assert DirectRequest([1], 1, uuid=2**128 - 1).uuid.int == 2**128 - 1
    for bad in (-1, 2**128, "x", 1.5, True, [1]):
        refused(lambda bad=bad: DirectRequest([1], 1, uuid=bad), "uuid: must be ")


def test_request_router_priorities():
    def ranks(priority: int, strict: int) -> tuple[float, int]:
        return DirectRequest([1], 1, priority=priority, strict_priority=strict).router_priorities()

    assert ranks(0, 0) == (0.0, 0)
    assert ranks(-7, 4) == (0.0, 4)
    assert ranks(9, 5) == (9.0, 5)
    assert type(ranks(9, 5)[0]) is float


def test_request_dict():
    old = {"tokens": [1, 2], "max_output_tokens": 3, "uuid": None, "dp_rank": 0, "arrival_timestamp_ms": None}
    made = DirectRequest.from_dict(old)
    assert made == DirectRequest([1, 2], 3)
    assert made.to_dict() == old
    assert list(made.to_dict()) == list(old)
    full = DirectRequest([1], 1, [9], 5, 1, 2.5, -7, 4, "gold")
    values = full.to_dict()
    assert values == {
        "tokens": [1],
        "max_output_tokens": 1,
        "output_token_ids": [9],
        "uuid": "00000000-0000-0000-0000-000000000005",
        "dp_rank": 1,
        "arrival_timestamp_ms": 2.5,
        "priority": -7,
        "strict_priority": 4,
        "policy_class": "gold",
    }
    assert DirectRequest.from_dict(json.loads(json.dumps(values))) == full
    refused(lambda: DirectRequest.from_dict({"tokens": [1]}), "DirectRequest: max_output_tokens: missing field")
    refused(lambda: DirectRequest.from_dict({**old, "dp_rank": -1}), "dp_rank: ", "got -1")
    with pytest.raises(TypeError, match="mapping"):
        DirectRequest.from_dict([1])


def test_request_unknown_key_is_ignored_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "mocker"):
        assert DirectRequest.from_dict({"tokens": [1], "max_output_tokens": 1, "extra": 5}) == DirectRequest([1], 1)
    assert "extra" in caplog.text


def test_request_equality_copy_repr():
    made = DirectRequest([1, 2], 3, [4], uuid=5, priority=1)
    assert made == DirectRequest((1, 2), 3, np.array([4]), uuid=5, priority=1)
    for other in (made.replace(tokens=[1, 3]), made.replace(output_token_ids=None), made.replace(priority=2), 5):
        assert made != other
        assert other != made
    for again in (made.copy(), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made
    words = "tokens=<2 tokens>, max_output_tokens=3, output_token_ids=<1 tokens>"
    assert repr(made) == f"DirectRequest({words}, uuid={uuid.UUID(int=5)!r}, priority=1)"


@given(st.lists(st.integers(0, U32), max_size=50), st.integers(0, U64), st.uuids() | st.none())
def test_request_round_trip(tokens, count, request_id):
    made = DirectRequest(tokens, count, uuid=request_id)
    assert made.tokens.tolist() == tokens
    assert DirectRequest.from_dict(json.loads(json.dumps(made.to_dict()))) == made
