"""Reading trace files: columns, both readers, and every error with its line and field."""
from __future__ import annotations

import copy
import gzip
import hashlib
import json
import math
import pickle
import random
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from mocker.formats import load
from mocker.trace import TraceError, sample_trace_path

GOOD = '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1, 2]}'
SCRATCH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


def write(tmp_path, *rows, newline="\n", end="\n", name="t.jsonl"):
    path = tmp_path / name
    text = newline.join(r if isinstance(r, str) else json.dumps(r) for r in rows) + end
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


def both(path, **options):
    """Load with both readers, which must agree to the bit, and return the trace."""
    options.setdefault("block_size", 4)
    fast, slow = load(path, **options), load(path, _slow=True, **options)
    assert fast == slow
    assert fast.arrival_ms.tobytes() == slow.arrival_ms.tobytes()
    assert fast.delay_ms.tobytes() == slow.delay_ms.tobytes()
    assert fast.line.tolist() == slow.line.tolist()
    assert fast.clamped.tolist() == slow.clamped.tolist()
    return fast


def fails(path, line, field, *parts, **options):
    """Check that both readers refuse the file with this line and field, in the attributes and in the message."""
    options.setdefault("block_size", 4)
    messages = []
    for slow in (False, True):
        with pytest.raises(TraceError) as caught:
            load(path, _slow=slow, **options)
        error = caught.value
        assert (error.path, error.line, error.field) == (str(path), line, field)
        place = str(path) + (f":{line}" if line is not None else "") + (f": {field}" if field else "")
        assert str(error).startswith(place + ": ")
        assert error.__suppress_context__ or error.__context__ is None
        messages.append(str(error))
    assert messages[0] == messages[1]
    for part in parts:
        assert part in messages[0]
    return messages[0]


def row(**changes):
    """The good row with some members changed; Ellipsis removes one."""
    members = json.loads(GOOD)
    members.update(changes)
    return json.dumps({k: v for k, v in members.items() if v is not ...})


# What is read

def test_shipped_trace_is_the_release():
    content = gzip.decompress(sample_trace_path().read_bytes())
    assert len(content) == 3029533
    assert hashlib.sha256(content).hexdigest() == "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"


def test_shipped_trace_equals_a_plain_json_reading():
    rows = [json.loads(text) for text in gzip.decompress(sample_trace_path().read_bytes()).splitlines()]
    trace = both(sample_trace_path(), block_size=512)
    assert trace.n == len(trace) == 12031
    assert trace.arrival_ms.tolist() == [r["timestamp"] for r in rows]
    assert trace.input_length.tolist() == [r["input_length"] for r in rows]
    assert trace.output_length.tolist() == [r["output_length"] for r in rows]
    assert trace.hash_ids.tolist() == [h for r in rows for h in r["hash_ids"]]
    assert np.diff(trace.hash_offsets).tolist() == [len(r["hash_ids"]) for r in rows]
    assert trace.line.tolist() == list(range(1, 12032))
    assert trace.is_single_turn and trace.session.tolist() == list(range(12031))
    assert trace.session_ids is trace.request_ids is trace.policy_class is trace.output_token_ids is None
    assert trace.block_size == 512 and not len(trace.clamped) and trace.path == str(sample_trace_path())


def test_types_shapes_and_read_only(tmp_path):
    trace = both(write(tmp_path, GOOD, row(output_token_ids=[7, 2**32 - 1])))
    kinds = {
        "arrival_ms": "float64", "input_length": "int64", "output_length": "int64", "hash_offsets": "int64",
        "hash_ids": "uint64", "line": "int64", "session": "int32", "turn": "int32", "delay_ms": "float64",
        "priority": "int32", "strict_priority": "uint32", "clamped": "int64", "output_token_offsets": "int64",
        "output_token_ids": "uint32",
    }
    for name, kind in kinds.items():
        column = getattr(trace, name)
        assert column.dtype == kind and column.ndim == 1, name
        with pytest.raises(ValueError, match="read-only"):
            column[:0] = 0
    assert trace.output_token_offsets.tolist() == [0, 0, 2] and trace.output_token_ids.tolist() == [7, 2**32 - 1]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n  \t\n", "\n   "])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("packed", [False, True])
def test_line_ends_blank_lines_bom_gzip(tmp_path, newline, end, bom, packed):
    path = write(tmp_path, "", GOOD, " \t ", "\x0b\x0c", "  " + row(timestamp=7) + " \t", newline=newline, end=end)
    path.write_bytes(bom + path.read_bytes())
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    trace = both(path)
    assert trace.arrival_ms.tolist() == [0, 7]
    assert trace.line.tolist() == [2, 5]


def test_gzip_of_many_members_and_padding(tmp_path):
    path = tmp_path / "no_suffix"
    parts = [gzip.compress((row(timestamp=i) + "\n").encode()) for i in range(2000)]
    path.write_bytes(b"".join(parts[:3]) + gzip.compress(b"") + b"".join(parts[3:]) + b"\0" * 600_000)
    assert both(path).arrival_ms.tolist() == list(range(2000))


def test_aliases_nulls_unknown_keys(tmp_path):
    path = write(
        tmp_path,
        '{"created_time":1.5,"input_tokens":4,"output_tokens":0,"hash_ids":[9]}',
        '{"timestamp":null,"input_length":null,"output_length":1,"hash_ids":[1,2],"session_id":null,"delay":null}',
        '{"output_length":1,"hash_ids":[3], "a":"x", "b":-1.25, "c":true, "d":false, "e":null, "f":0, "a":"again"}',
        '{"output_length":1,"hash_ids":[3], "deep":{"hash_ids":[1],"x":[{}]}, "text":"\\u00e9 \\"}"}',
        '{"output_length":1,"hash_ids":[3], "text":"é", "big":1e300, "timestamps":"no", "delays":"no"}',
        ' { "output_length" : 1 , "hash_ids" : [ 4 ,5\t, 6,7 ] , "timestamp" : -3 } ',
    )
    trace = both(path)
    assert np.array_equal(trace.arrival_ms, [1.5] + [np.nan] * 4 + [-3], equal_nan=True)
    assert trace.input_length.tolist() == [4, 8, 4, 4, 4, 16]
    assert trace.output_length.tolist() == [0, 1, 1, 1, 1, 1]
    assert trace.hash_ids.tolist() == [9, 1, 2, 3, 3, 3, 4, 5, 6, 7]
    assert trace.session_ids is None


NUMBERS = [
    "0", "-0", "-0.0", "0.1", "27482", "1e3", "1E-2", "1.5e+2", "9007199254740992", "9007199254740993",
    "9007199254740991.5", "123456789012345678", "1844674407370955161600", "0.30000000000000004", "1234.5678901234567",
    "-12.375", "1000000000000000", "1e15", "1000000000000000.125", "4503599627370497.5", "0.00000000000000000000001",
    "2.2250738585072014e-308", "5e-324", "1.7976931348623157e308", "179769313486231570000000000000000000000.5",
    "0." + "0" * 70 + "1", "1" * 70, "1" * 300 + ".25", "-18446744073709551616", "10000000000000000000.0",
    "8.41", "1700000000123.456", "1700000000.1234567",
]


@pytest.mark.parametrize("text", NUMBERS)
def test_time_stamps_are_the_nearest_double(tmp_path, text):
    trace = both(write(tmp_path, GOOD.replace('"timestamp": 0', f'"timestamp": {text}')))
    if text == "-0":
        assert trace.arrival_ms[0] == 0
    else:
        assert trace.arrival_ms.tobytes() == np.array([float(text)]).tobytes()


def test_many_time_stamps_are_the_nearest_double(tmp_path):
    rng = random.Random(5)
    texts = []
    for _ in range(4000):
        digits = rng.choice([1, 5, 15, 16, 17, 19, 25])
        text = str(rng.randrange(10**digits))
        places = rng.randrange(0, 25)
        if places:
            text = text.rjust(places + 1, "0")
            text = text[:-places] + "." + text[-places:]
        texts.append(rng.choice(["", "-"]) + text)
    trace = both(write(tmp_path, *(GOOD.replace('"timestamp": 0', f'"timestamp": {t}') for t in texts)))
    for text, value in zip(texts, trace.arrival_ms.tolist(), strict=True):
        assert value == float(text)
        exact = Fraction(text)
        assert all(abs(Fraction(value) - exact) <= abs(Fraction(math.nextafter(value, to)) - exact)
                   for to in (-math.inf, math.inf))


def test_order_of_time_stamps_is_free(tmp_path):
    trace = both(write(tmp_path, row(timestamp=1e15), row(timestamp=5), row(timestamp=5), row(timestamp=0.25)))
    assert trace.arrival_ms.tolist() == [1e15, 5, 5, 0.25]


@pytest.mark.parametrize("value", [0, 9, 10, 10**17, 10**18 - 1, 10**18, 10**19 - 1, 10**19, 2**63, 2**64 - 1])
def test_hash_ids_up_to_u64(tmp_path, value):
    assert both(write(tmp_path, row(hash_ids=[value, 1]))).hash_ids.tolist() == [value, 1]


def test_large_lengths(tmp_path):
    assert both(write(tmp_path, row(output_length=2**63 - 1))).output_length[0] == 2**63 - 1
    assert both(write(tmp_path, row(output_length=10**18 - 1))).output_length[0] == 10**18 - 1
    trace = both(write(tmp_path, row(input_length=2**64 - 1)), on_short_hash_ids="clamp")
    assert trace.input_length.tolist() == [8] and trace.clamped.tolist() == [0]


def test_more_ids_than_the_first_guess(tmp_path):
    rows = [{"output_length": 1, "hash_ids": [i % 10] * (i % 700 + 1)} for i in range(1500)]
    path = tmp_path / "dense.jsonl"
    path.write_text("\n".join(json.dumps(r, separators=(",", ":")) for r in rows))
    trace = both(path)
    assert trace.hash_ids.tolist() == [h for r in rows for h in r["hash_ids"]]
    assert trace.input_length.tolist() == [4 * len(r["hash_ids"]) for r in rows]


def test_slow_rows_keep_order_and_lines(tmp_path):
    rows = []
    for i in range(300):
        members = {"timestamp": i, "input_length": i % 9 + 1, "output_length": i, "hash_ids": list(range(i, i + 3))}
        if i % 3 == 0:
            members["priority"] = i - 100
        if i % 7 == 0:
            members["extra"] = {"nested": []}
        if i % 11 == 0:
            members["request_id"] = f"r\n{i}" if i % 2 else f"r{i}"
        rows.append(json.dumps(members) + ("\n" if i % 5 == 0 else ""))
    trace = both(write(tmp_path, *rows))
    assert trace.arrival_ms.tolist() == list(range(300)) == trace.output_length.tolist()
    assert trace.hash_ids.reshape(300, 3).tolist() == [[i, i + 1, i + 2] for i in range(300)]
    assert trace.line.tolist() == [1 + i + (i + 4) // 5 for i in range(300)]
    assert trace.priority.tolist() == [0 if i % 3 else i - 100 for i in range(300)]
    assert trace.request_ids == tuple(None if i % 11 else f"r\n{i}" if i % 2 else f"r{i}" for i in range(300))


def test_every_field(tmp_path):
    trace = both(write(
        tmp_path,
        row(priority=-(2**31), strict_priority=2**32 - 1, policy_class="batch", request_id="a",
            output_token_ids=[1, 0]),
        row(priority=2**31 - 1, output_length=0, output_token_ids=[], request_id="é"),
        row(policy_class="ü", request_id=""),
        GOOD,
    ))
    assert trace.priority.tolist() == [-(2**31), 2**31 - 1, 0, 0]
    assert trace.strict_priority.tolist() == [2**32 - 1, 0, 0, 0]
    assert trace.policy_class == ("batch", None, "ü", None)
    assert trace.request_ids == ("a", "é", "", None)
    assert trace.output_token_offsets.tolist() == [0, 2, 2, 2, 2] and trace.output_token_ids.tolist() == [1, 0]


def test_only_empty_plans_are_no_plans(tmp_path):
    trace = both(write(tmp_path, row(output_length=0, output_token_ids=[])))
    assert trace.output_token_ids is None and trace.output_token_offsets is None


def test_plans_of_both_readers_in_order(tmp_path):
    rng = random.Random(2)
    rows, plans = [], []
    for i in range(400):                # of every number of digits
        plan = [rng.choice([rng.randrange(10**rng.randrange(1, 10)), rng.randrange(2**32), 10**rng.randrange(10) - 1])
                for _ in range(rng.randrange(60))]
        rows.append({"output_length": len(plan), "hash_ids": [i]})
        if i % 3:
            rows[-1]["output_token_ids"] = plan
        if i % 5 == 0:
            rows[-1]["nested"] = []
        plans.append(plan if i % 3 else [])
    trace = both(write(tmp_path, *rows))
    assert trace.output_token_ids.tolist() == sum(plans, [])
    assert np.diff(trace.output_token_offsets).tolist() == [len(p) for p in plans]
    assert trace.hash_ids.tolist() == list(range(400))


def number_list(rng):
    """The text of a long list, of numbers with more or fewer digits, often spoilt somewhere."""
    most, gap = rng.choice([1, 2, 5, 7, 8, 9]), rng.choice(["", " ", " ", "\t"])
    numbers = [str(rng.randrange(10**rng.randrange(1, most + 1))) for _ in range(rng.randrange(1, 90))]
    text = list("[" + ("," + gap).join(numbers) + "]")
    for _ in range(rng.choice([0, 0, 1, 2])):
        at = rng.randrange(1, len(text))
        junk = rng.choice([" ", "  ", "\t", ",", "0", "00", "12345678", "-", ".5", "e1", "/", ":", "]", "\x01", "é"])
        text[at:at + rng.randrange(2)] = junk
    return "".join(text)


def test_long_lists_of_numbers(tmp_path):
    """Numbers that are read many at a time: the same ones, and the same rows are refused, as by a JSON reader."""
    rng, rows, ids, tokens, bad = random.Random(3), [], [], [], []
    for i in range(4000):
        numbers = number_list(rng)
        try:
            wanted = json.loads(numbers)
        except json.JSONDecodeError:
            wanted = None
        good = bool(wanted) and all(type(n) is int and 0 <= n < 2**(64 if i % 2 else 32) for n in wanted)
        if i % 2:
            rows.append(f'{{"output_length": 1, "hash_ids": {numbers}}}')
        else:
            rows.append(f'{{"output_length": {len(wanted or [0])}, "hash_ids": [1], "output_token_ids": {numbers}}}')
        if good:
            ids += wanted if i % 2 else [1]
            tokens += [] if i % 2 else wanted
        else:
            bad.append(i + 1)
    assert 300 < len(bad) < 3000
    trace = both(write(tmp_path, *rows), on_error="skip")
    assert trace.hash_ids.tolist() == ids and trace.output_token_ids.tolist() == tokens
    assert [error.line for error in trace.skipped] == bad


@pytest.mark.parametrize("value", [
    "-0", "-1", "2147483647", "-2147483648", "-2147483647", "00", "2147483648", "-", "--1", "4294967295", "4294967296",
    "18446744073709551617", "1.0", "1e0", "null", "-2147483649",
])
@pytest.mark.parametrize("key, low, high", [("priority", -(2**31), 2**31 - 1), ("strict_priority", 0, 2**32 - 1)])
def test_priorities(tmp_path, key, low, high, value):
    path = write(tmp_path, GOOD, f'{GOOD[:-1]}, "{key}": {value}}}')
    if value in ("00", "-", "--1"):
        fails(path, 2, "row", "is not JSON")
    elif value in ("1.0", "1e0"):
        fails(path, 2, key, "must be an integer")
    elif value == "null" or low <= int(value) <= high:
        assert getattr(both(path), key).tolist() == [0, 0 if value == "null" else int(value)]
    else:
        fails(path, 2, key, "must be from", value)


def test_clamp(tmp_path):
    path = write(tmp_path, row(input_length=8), row(input_length=9), GOOD, row(input_length=10**6, priority=1))
    trace = both(path, on_short_hash_ids="clamp")
    assert trace.input_length.tolist() == [8, 8, 5, 8]
    assert trace.clamped.tolist() == [1, 3]


# Sessions

def test_sessions_and_think_times(tmp_path):
    trace = both(write(
        tmp_path,
        row(session_id="b", timestamp=10),
        row(session_id="a", timestamp=20.5),
        row(session_id="b", timestamp=35.25),           # inferred
        row(session_id="a", timestamp=21, delay=7.5),   # explicit wins, and the time stamp still counts
        row(session_id="a", timestamp=30),
        row(session_id="b", timestamp=..., delay_ms=3),
        row(session_id="b", timestamp=...),             # nothing known: 0
        row(session_id="b", timestamp=36),              # the latest time stamp, not the previous row's
        row(session_id="c", timestamp=..., delay=0),
        row(session_id="c", timestamp=..., delay=0.125),
        row(session_id="c", timestamp=4, delay=1),
        row(session_id="c", timestamp=4),
    ))
    assert trace.session.tolist() == [0, 1, 0, 1, 1, 0, 0, 0, 2, 2, 2, 2]
    assert trace.turn.tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 0, 1, 2, 3]
    assert trace.delay_ms.tolist() == [0, 0, 25.25, 7.5, 9, 3, 0, 0.75, 0, 0.125, 1, 0]
    assert trace.session_ids == ("b", "a", "c")
    assert not trace.is_single_turn and trace.n_sessions == 3


def test_rows_without_name_among_named_ones(tmp_path):
    trace = both(write(
        tmp_path, GOOD, row(session_id="x"), "", row(session_id="request_5"), row(timestamp=2), row(session_id="é"),
    ))
    assert trace.session_ids == ("request_1", "x", "request_5", "é")
    assert trace.session.tolist() == [0, 1, 2, 2, 3]    # line 5 is called request_5, as in the reference
    assert trace.delay_ms.tolist() == [0, 0, 0, 2, 0]


def test_zero_delay_without_session(tmp_path):
    trace = both(write(tmp_path, row(delay=0), row(delay=-0.0), GOOD))
    assert trace.delay_ms.tolist() == [0, 0, 0] and trace.session_ids is None


# Errors

BAD_ROWS = {
    "missing hash_ids": (row(hash_ids=...), "hash_ids", "is missing"),
    "null hash_ids": (row(hash_ids=None), "hash_ids", "is missing"),
    "missing output_length": (row(output_length=...), "output_length", "is missing"),
    "alias of input": (row(input_tokens=5), "input_length", "given twice", "'input_tokens'"),
    "alias of output": (row(output_tokens=2), "output_length", "given twice"),
    "alias of timestamp": (row(created_time=None), "timestamp", "given twice"),
    "alias of delay": (row(delay=0, delay_ms=0), "delay", "given twice"),
    "key twice": (GOOD[:-1] + ', "hash_ids": [1]}', "hash_ids", "given twice"),
    "fractional length": (row(input_length=5.5), "input_length", "must be an integer", "5.5"),
    "whole float": (row(output_length=2.0), "output_length", "must be an integer", "2.0"),
    "string length": (row(output_length="2"), "output_length", "must be an integer", "'2'"),
    "list length": (row(output_length=[2]), "output_length", "must be an integer", "a list"),
    "object length": (row(output_length={}), "output_length", "must be an integer", "an object"),
    "boolean length": (row(input_length=True), "input_length", "must be an integer", "true"),
    "negative input": (row(input_length=-1), "input_length", "must be from 0", "-1"),
    "negative output": (row(output_length=-1), "output_length", "must be from 0", "-1"),
    "output over int64": (row(output_length=2**63), "output_length", "must be from 0"),
    "output over u64": (row(output_length=2**64), "output_length", "must be from 0"),
    "input over u64": (row(input_length=2**64), "input_length", "must be from 0", str(2**64)),
    "input over int64": (row(input_length=2**64 - 1), "input_length", "is more than any hash ids cover"),
    "input over capacity": (row(input_length=9), "input_length", "9 is more than the 8 tokens", "on_short_hash_ids"),
    "input zero": (row(input_length=0), "input_length", "is 0"),
    "empty ids": (row(hash_ids=[]), "hash_ids", "is empty"),
    "empty ids, no length": (row(hash_ids=[], input_length=...), "hash_ids", "is empty"),
    "ids no list": (row(hash_ids=3), "hash_ids", "must be a list", "3"),
    "ids an object": (row(hash_ids={"a": 1}), "hash_ids", "must be a list", "an object"),
    "id negative": (row(hash_ids=[1, 2, -3]), "hash_ids", "element 2", "-3"),
    "id fractional": (row(hash_ids=[1, 1.0]), "hash_ids", "element 1", "1.0"),
    "id boolean": (row(hash_ids=[False]), "hash_ids", "element 0", "false"),
    "id null": (row(hash_ids=[1, None]), "hash_ids", "element 1", "null"),
    "id nested": (row(hash_ids=[[1]]), "hash_ids", "element 0", "a list"),
    "id over u64": (row(hash_ids=[0, 2**64]), "hash_ids", "element 1", str(2**64)),
    "id NaN": (row(hash_ids=[math.nan]), "hash_ids", "element 0", "NaN"),
    "timestamp NaN": (row(timestamp=math.nan), "timestamp", "must be a number", "NaN"),
    "timestamp Infinity": (row(timestamp=math.inf), "timestamp", "must be a number", "Infinity"),
    "timestamp -Infinity": (row(timestamp=-math.inf), "timestamp", "must be a number", "-Infinity"),
    "timestamp overflows": (GOOD.replace("0,", "1e400,", 1), "timestamp", "must be a finite number"),
    "timestamp of 401 digits": (GOOD.replace("0,", "1" * 401 + ",", 1), "timestamp", "must be a finite number"),
    "timestamp of 401 digits and point": (GOOD.replace("0,", "1" * 401 + ".5,", 1), "timestamp", "must be a finite"),
    "timestamp string": (row(timestamp="0"), "timestamp", "must be a number", "'0'"),
    "timestamp boolean": (row(timestamp=False), "timestamp", "must be a number", "false"),
    "delay NaN": (row(delay=math.nan), "delay", "must be a number", "NaN"),
    "delay on first turn": (row(delay=1.5), "delay", "1.5", "first turn"),
    "named delay on first turn": (row(session_id="new", delay_ms=2), "delay", "first turn", "'new'"),
    "NaN in an unread key": (row(other=math.nan), "row", "NaN"),
    "Infinity nested in an unread key": (row(other={"x": [-math.inf]}), "row", "-Infinity"),
    "session number": (row(session_id=3), "session_id", "must be a string", "3"),
    "request list": (row(request_id=[]), "request_id", "must be a string"),
    "policy boolean": (row(policy_class=True), "policy_class", "must be a string", "true"),
    "lone surrogate": (row(session_id="\ud800"), "session_id", "Unicode"),
    "priority too large": (row(priority=2**31), "priority", "must be from"),
    "priority too small": (row(priority=-(2**31) - 1), "priority", "must be from"),
    "priority fractional": (row(priority=0.5), "priority", "must be an integer"),
    "strict priority negative": (row(strict_priority=-1), "strict_priority", "must be from"),
    "strict priority too large": (row(strict_priority=2**32), "strict_priority", "must be from"),
    "plan too short": (row(output_token_ids=[1]), "output_token_ids", "holds 1 tokens", "output_length is 2"),
    "plan too long": (row(output_token_ids=[1, 2, 3]), "output_token_ids", "holds 3 tokens"),
    "empty plan": (row(output_token_ids=[]), "output_token_ids", "holds 0 tokens"),
    "token too large": (row(output_token_ids=[1, 2**32]), "output_token_ids", "element 1", str(2**32)),
    "token with a leading zero": (GOOD[:-1] + ', "output_token_ids": [1, 07]}', "row", "is not JSON"),
    "token with a fraction": (row(output_token_ids=[1, 1.5]), "output_token_ids", "element 1"),
    "token with no comma": (GOOD[:-1] + ', "output_token_ids": [1 2222222]}', "row", "is not JSON"),
    "token negative": (row(output_token_ids=[-1, 0]), "output_token_ids", "element 0"),
    "plan no list": (row(output_token_ids="ab"), "output_token_ids", "must be a list"),
    "no JSON": ("hello", "row", "is not JSON"),
    "single quotes": (GOOD.replace('"', "'"), "row", "is not JSON"),
    "two objects": (GOOD + GOOD, "row", "is not JSON"),
    "trailing comma": (GOOD[:-1] + ",}", "row", "is not JSON"),
    "trailing comma in list": (GOOD.replace("2]", "2,]"), "row", "is not JSON"),
    "leading zero": (GOOD.replace("5,", "05,"), "row", "is not JSON"),
    "leading zero in list": (GOOD.replace("2]", "02]"), "row", "is not JSON"),
    "plus sign": (GOOD.replace("5,", "+5,"), "row", "is not JSON"),
    "open fraction": (GOOD.replace("0,", "0.,", 1), "row", "is not JSON"),
    "no whole part": (GOOD.replace("0,", ".5,", 1), "row", "is not JSON"),
    "bare minus": (GOOD.replace("0,", "-,", 1), "row", "is not JSON"),
    "bad literal": (GOOD[:-1] + ', "x": nulL}', "row", "is not JSON"),
    "no colon": (GOOD.replace(": 5", " 5"), "row", "is not JSON"),
    "no comma": (GOOD.replace("5,", "5"), "row", "is not JSON"),
    "control character": (GOOD[:-1] + ', "x": "\x01"}', "row", "is not JSON"),
    "bad escape": (GOOD[:-1] + ', "x": "\\q"}', "row", "is not JSON"),
    "NUL byte": (GOOD + "\0", "row", "is not JSON"),
    "mark inside": ("\ufeff" + GOOD, "row", "is not JSON"),
    "comment": (GOOD + " // x", "row", "is not JSON"),
    "cut in a list": (GOOD[:-3], "row", "ends too early"),
    "cut in a key": (GOOD[:20], "row", "ends too early"),
    "cut after the list": (GOOD[:-1], "row", "ends too early"),
    "only a brace": ("{", "row", "ends too early"),
    "array": ("[1, 2]", "row", "a list", "not a JSON object"),
    "number": ("7", "row", "the number 7"),
    "null": ("null", "row", "null"),
    "string": ('"x"', "row", "the string 'x'"),
    "NaN": ("NaN", "row", "NaN"),
    "empty object": ("{}", "hash_ids", "is missing"),
    "too deep": ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "row", "nested too deeply"),
    "too many digits": (GOOD.replace("5,", "5" * 5000 + ",", 1), "row", "too many digits"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("end", ["\n", ""])
def test_bad_row(tmp_path, name, end):
    bad, field, *parts = BAD_ROWS[name]
    fails(write(tmp_path, GOOD, "", GOOD, bad, end=end), 4, field, *parts)
    fails(write(tmp_path, GOOD, "", GOOD, bad, GOOD, end=end), 4, field, *parts, format="mooncake")


def test_invalid_utf8(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(f'{GOOD}\n{GOOD[:-1]}, "x": "'.encode() + b'\xff"}\n')
    fails(path, 2, "row", "not UTF-8", f"byte {len(GOOD) + 8}")
    path.write_bytes(GOOD.encode("utf-16"))
    fails(path, 1, "row", "not UTF-8")


@pytest.mark.parametrize("later, field, parts", [
    ({"timestamp": 4}, "timestamp", ("4.0", "'s'", "sort the turns")),
    ({"delay": -1}, "delay", ("-1.0", "at least 0")),
    ({"delay": -0.5, "timestamp": 9}, "delay", ("-0.5",)),
    ({"delay": 1e308 * 10}, "delay", ("Infinity",)),
    ({"timestamp": -1.7e308}, "timestamp", ("before",)),
])
def test_bad_think_time(tmp_path, later, field, parts):
    later.setdefault("timestamp", 6)
    path = write(tmp_path, row(session_id="s", timestamp=5), GOOD, row(session_id="s", **later))
    fails(path, 3, field, *parts)


def test_gap_too_large(tmp_path):
    path = write(tmp_path, row(session_id="s", timestamp=-1.7e308), row(session_id="s", timestamp=1.7e308))
    fails(path, 2, "timestamp", "too far after")


def test_no_earlier_time_stamp(tmp_path):
    rows = [row(session_id="s", timestamp=...), row(session_id="s", timestamp=..., delay=2), row(session_id="s")]
    fails(write(tmp_path, *rows), 3, "timestamp", "'s'", "no earlier row")


def test_the_first_error_is_named(tmp_path):
    empty, cut, over = row(hash_ids=[]), GOOD[:-5], row(input_length=100)
    fails(write(tmp_path, GOOD, empty, cut), 2, "hash_ids")
    fails(write(tmp_path, GOOD, cut, empty), 2, "row")
    fails(write(tmp_path, row(priority=1), over, "x", cut), 2, "input_length")
    fails(write(tmp_path, row(session_id="s", delay=1), over), 1, "delay")
    fails(write(tmp_path, over, row(session_id="s", delay=1)), 1, "input_length")
    fails(write(tmp_path, row(session_id="s", timestamp=9), row(session_id="s"), cut), 2, "timestamp")


@pytest.mark.parametrize("content", [b"", b"\n", b"\n \r\n\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", gzip.compress(b"")])
def test_no_requests(tmp_path, content):
    path = tmp_path / "empty"
    path.write_bytes(content)
    fails(path, None, None, "did not contain any requests")


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        load(tmp_path / "absent.jsonl")
    fails(tmp_path, None, None, "is a directory")


@pytest.mark.parametrize("size", [0, -1, 2**31, 1.5, True, "4"])
def test_block_size(tmp_path, size):
    with pytest.raises(TraceError, match="block_size: must be an integer greater than 0") as caught:
        load(write(tmp_path, GOOD), block_size=size)
    assert caught.value.field == "block_size"


def test_unknown_options(tmp_path):
    path = write(tmp_path, GOOD)
    with pytest.raises(ValueError, match="format 'moonpie' does not exist; there are 'auto', .*'mooncake'"):
        load(path, format="moonpie")
    with pytest.raises(ValueError, match="on_short_hash_ids must be 'error' or 'clamp', is 'cut'"):
        load(path, on_short_hash_ids="cut")


def test_workflow_in_a_later_row(tmp_path):
    path = write(tmp_path, GOOD, row(request_id="r", wait_for=["q"]))
    fails(path, 2, "wait_for", "agentic_mooncake")
    assert both(path, format="mooncake").n == 2     # as the reference does: unknown keys are ignored


def test_truncated_and_damaged_gzip(tmp_path):
    path = tmp_path / "t.gz"
    rng = random.Random(1)
    text = "".join(row(timestamp=i, hash_ids=[rng.randrange(10**6) for _ in range(20)]) + "\n" for i in range(400))
    packed = gzip.compress(text.encode(), mtime=0)
    for cut in (len(packed) - 1, len(packed) - 9, len(packed) // 2, 11, 5, 2):
        path.write_bytes(packed[:cut])
        with pytest.raises(TraceError, match="ends too early") as caught:
            load(path)
        assert caught.value.field == "row" and 1 <= caught.value.line <= 401
    path.write_bytes(packed[:-1])
    fails(path, 401, "row", "ends too early")
    path.write_bytes(packed[:-8] + bytes(4) + packed[-4:])
    fails(path, None, None, "damaged")
    path.write_bytes(packed + b"garbage")
    fails(path, None, None, "damaged")
    path.write_bytes(packed + packed[:20])
    fails(path, 401, "row", "ends too early")


def test_error_travels(tmp_path):
    with pytest.raises(TraceError) as caught:
        load(write(tmp_path, "x"))
    for twin in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert str(twin) == str(caught.value) and (twin.path, twin.line, twin.field) == (str(tmp_path / "t.jsonl"), 1,
                                                                                         "row")


def test_long_values_are_cut_in_messages(tmp_path):
    assert len(fails(write(tmp_path, row(output_length="y" * 10_000)), 1, "output_length")) < 300 + len(str(tmp_path))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a FIFO")
def test_a_pipe(tmp_path):
    import os
    import threading

    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(GOOD + "\n",))
    writer.start()
    assert load(path).n == 1
    writer.join()
