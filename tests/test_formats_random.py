"""Reading trace files: random and damaged ones, by both readers and beside a plain JSON reading."""
from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats import GOOD, SCRATCH, both, fails, row, write

from mocker.formats import load
from mocker.trace import Trace, TraceError

SPACE = st.sampled_from(["", " ", "  ", "\t", " \r"])
FINITE = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70) | st.floats(0, 1e7).map(
    lambda x: round(x, 3))
UNKNOWN = st.dictionaries(
    st.text(max_size=4).map(lambda k: "x" + k),
    st.none() | st.booleans() | st.text(max_size=5) | st.integers() | FINITE | st.lists(st.integers(), max_size=2),
    max_size=2,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


@st.composite
def trace_rows(draw):
    """Members of a valid single-turn row with block size 4, and their text."""
    ids = draw(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 30), min_size=1, max_size=5))
    output = draw(st.integers(0, 4) | st.integers(0, 2**63 - 1))
    members = {"hash_ids": ids, draw(st.sampled_from(["output_length", "output_tokens"])): output}
    if draw(st.booleans()):
        members[draw(st.sampled_from(["input_length", "input_tokens"]))] = draw(st.integers(1, 4 * len(ids)))
    if draw(st.booleans()):
        members[draw(st.sampled_from(["timestamp", "created_time"]))] = draw(FINITE)
    if draw(st.integers(0, 3)) == 0:
        members["priority"] = draw(st.integers(-(2**31), 2**31 - 1))
    if draw(st.integers(0, 3)) == 0:
        members["strict_priority"] = draw(st.integers(0, 2**32 - 1))
    if draw(st.integers(0, 3)) == 0:
        members["policy_class"] = draw(NAMES)
    if draw(st.integers(0, 2)) == 0:
        members["request_id"] = draw(NAMES)
    if output < 5 and draw(st.integers(0, 3)) == 0:
        members["output_token_ids"] = draw(st.lists(st.integers(0, 2**32 - 1), min_size=output, max_size=output))
    members.update(draw(UNKNOWN))
    items = draw(st.permutations(list(members.items())))
    plain = draw(st.booleans())
    a, b, c = draw(SPACE), draw(SPACE), draw(SPACE)
    text = a + "{" + b + f"{c},{a}".join(
        json.dumps(k) + b + ":" + c + json.dumps(v, ensure_ascii=plain, separators=("," + c, ":")) for k, v in items
    ) + c + "}" + b
    return members, text


@SCRATCH
@given(rows=st.lists(trace_rows(), min_size=1, max_size=8), blanks=st.integers(0, 2), last=st.booleans())
def test_random_rows_equal_a_plain_json_reading(tmp_path, rows, blanks, last):
    path = write(tmp_path, *("\n" * blanks + text for _, text in rows), end="\n" if last else "")
    trace = both(path, format="mooncake")

    def column(*names, default):
        return [next((m[k] for k in names if k in m), default) for m, _ in rows]

    arrivals = np.array([float(v) for v in column("timestamp", "created_time", default=math.nan)])
    assert np.array_equal(trace.arrival_ms, arrivals, equal_nan=True)
    assert trace.output_length.tolist() == column("output_length", "output_tokens", default=None)
    ids = [m["hash_ids"] for m, _ in rows]
    assert trace.hash_ids.tolist() == sum(ids, [])
    assert np.diff(trace.hash_offsets).tolist() == [len(i) for i in ids]
    lengths = column("input_length", "input_tokens", default=None)
    assert trace.input_length.tolist() == [4 * len(i) if n is None else n for n, i in zip(lengths, ids, strict=True)]
    assert trace.priority.tolist() == column("priority", default=0)
    assert trace.strict_priority.tolist() == column("strict_priority", default=0)
    assert (trace.policy_class or (None,) * trace.n) == tuple(column("policy_class", default=None))
    assert (trace.request_ids or (None,) * trace.n) == tuple(column("request_id", default=None))
    plans = column("output_token_ids", default=[])
    if any(plans):
        assert trace.output_token_ids.tolist() == sum(plans, [])
        assert np.diff(trace.output_token_offsets).tolist() == [len(p) for p in plans]
    else:
        assert trace.output_token_ids is None
    assert trace.line.tolist() == [1 + i + blanks * (i + 1) for i in range(len(rows))]
    trace.save(tmp_path / "again.jsonl")
    assert both(tmp_path / "again.jsonl", format="mooncake") == trace


def outcome(path, slow, **options):
    """The trace or the error message of one reader."""
    try:
        return load(path, block_size=4, _slow=slow, **options)
    except TraceError as error:
        return str(error)


@SCRATCH
@given(data=st.data())
def test_random_sessions_follow_the_rules(tmp_path, data):
    """Against the rules of the reference written out row by row."""
    rows = data.draw(st.lists(st.fixed_dictionaries({"output_length": st.just(1), "hash_ids": st.just([1])}, optional={
        "session_id": st.sampled_from(["a", "b", "request_2", "c\n"]),
        "timestamp": st.integers(0, 9) | st.sampled_from([0.5, 2.25, 9.75]),
        "delay": st.sampled_from([0, 0.0, 1, 2.5]) | st.integers(-1, 3),
    }), min_size=1, max_size=9))
    sessions, latest, expected, error = {}, {}, [], None
    for line, members in enumerate(rows, 1):
        name = members.get("session_id", f"request_{line}")
        delay, stamp = members.get("delay"), members.get("timestamp")
        turn = sessions.setdefault(name, [len(sessions), 0])
        field = "delay"
        if turn[1] == 0:
            think, bad = 0, bool(delay)
        elif delay is not None:
            think, bad = delay, delay < 0
        elif stamp is not None:
            field = "timestamp"
            bad = name not in latest or stamp < latest[name]
            think = 0 if bad else stamp - latest[name]
        else:
            think, bad = 0, False
        if bad:
            error = (line, field)
            break
        expected.append((turn[0], turn[1], think))
        turn[1] += 1
        if stamp is not None:
            latest[name] = stamp
    path = write(tmp_path, *rows)
    if error is not None:
        fails(path, *error)
        return
    trace = both(path)
    assert list(zip(trace.session.tolist(), trace.turn.tolist(), trace.delay_ms.tolist(), strict=True)) == expected
    named = any("session_id" in r for r in rows)
    assert trace.session_ids == (tuple(sessions) if named else None)
    trace.save(tmp_path / "again.jsonl")
    assert both(tmp_path / "again.jsonl") == trace


SEEDS = [
    GOOD,
    row(session_id="s", request_id="r", delay=0, x="y"),
    row(timestamp=1.25, output_token_ids=[1, 2], priority=3, policy_class="é"),
    row(timestamp=12.5, output_token_ids=[1, 2], priority=-3, strict_priority=4, policy_class="p"),
    '{"hash_ids":[12345678901234567890,1],"output_tokens":1,"created_time":12345.678901234567890}',
]
PIECES = [
    b"", b"\n", b"\r", b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"-", b".", b"e", b"0", b"9" * 25, b"\xff",
    b"\0", b" ", b"NaN", b"null", b"true", b"\xef\xbb\xbf", b'"hash_ids"', b'"delay":1,', b'"session_id":"s",',
    b'"priority":-1,', b'"output_token_ids":[1,2],', b'"policy_class":"p",',
]


@settings(SCRATCH, max_examples=400)
@given(rng=st.randoms(use_true_random=False), rows=st.lists(st.sampled_from(SEEDS), max_size=4), packed=st.booleans(),
       clamp=st.booleans())
def test_damaged_bytes_never_crash_and_readers_agree(tmp_path, rng, rows, packed, clamp):
    data = bytearray("\n".join(rows).encode())
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.randrange(0, 4)] = rng.choice(PIECES) or bytes([rng.randrange(256)])
    if rng.random() < 0.2:
        del data[rng.randrange(len(data) + 1) :]
    path = tmp_path / "fuzz"
    if packed:
        data = bytearray(gzip.compress(bytes(data), mtime=0))
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    options = {"on_short_hash_ids": "clamp" if clamp else "error"}
    fast, slow = outcome(path, False, **options), outcome(path, True, **options)
    assert fast == slow
    if isinstance(fast, Trace):
        assert np.array_equal(fast.arrival_ms, slow.arrival_ms, equal_nan=True)
        assert fast.n and fast.input_length.min() >= 1
        fast.save(tmp_path / "again")
        assert load(tmp_path / "again", block_size=4) == fast


@pytest.mark.parametrize("text", SEEDS)
def test_every_prefix_and_every_lost_byte(tmp_path, text):
    path = tmp_path / "t"
    data = text.encode()
    for i in range(len(data)):
        for broken in (data[:i], data[:i] + b"\n", data[:i] + data[i + 1 :] + b"\n"):
            path.write_bytes(broken)
            assert outcome(path, False) == outcome(path, True)
