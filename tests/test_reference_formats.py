"""The reference's trace formats: replays equal to its own, traces made of others, and what a hostile file gets."""
from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fuzz_formats import compare, run

from mocker import SyntheticTraceSpec, Trace, TraceError, simulate
from mocker.formats import FORMATS, load

GOLDEN = json.loads(gzip.decompress((Path(__file__).parent / "golden" / "formats.json.gz").read_bytes()))


def named(entry):
    return entry["config"].get("trace_format", "mooncake")


@pytest.mark.parametrize("entry", GOLDEN["replays"], ids=named)
def test_replay_is_the_references(entry, tmp_path):
    files = []
    for i, text in enumerate(entry["files"]):
        files.append(tmp_path / f"part{i}.jsonl")
        files[-1].write_bytes(gzip.compress(text.encode()) if i % 2 else text.encode())
    for fast in (True, False):
        assert compare(run(files, entry["config"], fast_forward=fast), entry) is None


def sessions(trace):
    """A trace as the reference's driver prints it."""
    names = trace.session_ids
    out = {}
    for row in np.lexsort((trace.turn, trace.session)).tolist():
        start = trace.arrival_ms[row]
        session = out.setdefault(int(trace.session[row]), {
            "id": None if names is None else names[trace.session[row]],
            "start": None if np.isnan(start) else start, "turns": []})
        session["turns"].append({
            "input": int(trace.input_length[row]), "output": int(trace.output_length[row]),
            "ids": trace.hash_ids[trace.hash_offsets[row]:trace.hash_offsets[row + 1]].tolist(),
            "delay": trace.delay_ms[row]})
    return list(out.values())


@pytest.mark.parametrize("entry", GOLDEN["edits"], ids=lambda e: e["ops"][0]["op"])
def test_traces_made_of_others(entry, tmp_path):
    (tmp_path / "t.jsonl").write_text(GOLDEN["edit_file"])
    trace = Trace.load(tmp_path / "t.jsonl", "mooncake", 4)
    op = entry["ops"][0]
    made = {"normalize": lambda: trace.normalize_session_starts(), "speed": lambda: trace.speed_up_timing(op["x"]),
            "rescale_start": lambda: trace.rescale_session_start_span(op["n"]),
            "rescale_ready": lambda: trace.rescale_ready_span(op["n"]),
            "expand": lambda: trace.expand_hash_prefix_depth(op["n"]),
            "duplicate": lambda: trace.duplicate_hash_space(op["n"]),
            "round_robin": lambda: trace.partition_by_session(op["n"]),
            "random": lambda: trace.partition_by_session(op["n"], op["seed"])}[op["op"]]()
    made = made if isinstance(made, list) else [made]
    assert [sessions(part) for part in made] == [part["sessions"] for part in entry["traces"]]


@pytest.mark.parametrize("entry", GOLDEN["specs"])
def test_synthetic_specification_is_the_references(entry):
    spec = dict(entry["spec"])
    spec |= {"input_tokens": spec.pop("input_mean"), "output_tokens": spec.pop("output_mean")}
    assert sessions(SyntheticTraceSpec(**spec).to_trace()) == entry["trace"]["sessions"]


def test_transformations_refuse_what_does_not_fit():
    trace = Trace.from_columns(input_length=[1], output_length=[1], hash_offsets=[0, 1], hash_ids=[2**63])
    for call in (lambda: trace.expand_hash_prefix_depth(2), lambda: trace.duplicate_hash_space(3),
                 lambda: trace.duplicate_hash_space(0), lambda: trace.partition_by_session(1.5),
                 lambda: trace.rescale_ready_span(-1)):
        with pytest.raises(ValueError, match="64 bits|must be an integer"):
            call()
    with pytest.raises(ValueError, match="qps must be a finite positive"):
        SyntheticTraceSpec(4, 2, 1, 8, 8, qps=float("nan"))
    with pytest.raises(ValueError, match="seed must be an integer"):
        SyntheticTraceSpec(4, 2, 1, 8, 8, seed=-1)


# One good file of each format; {} marks where hostile values go

GOOD = {
    "mooncake": '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1, 2]}',
    "agentic_mooncake": '{"request_id": "a", "timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": '
                        '[1, 2], "wait_for": [], "delay": 1, "tool_wait_ms": 2}',
    "applied_compute_agentic": '{"num_turns": 1, "input_prompt_length": 9, "assistant_response_length": [3], '
                               '"tool_call_output_length": [4], "tool_call_latency": [0.5], '
                               '"final_assistant_response_length": 2}',
    "dynamo": '{"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1100, '
              '"agent_context": {"session_id": "s"}, "request": {"request_id": "q", "request_received_ms": 1000, '
              '"output_tokens": 4, "total_time_ms": 5, "replay": {"trace_block_size": 4, "input_length": 5, '
              '"input_sequence_hashes": [11, 22]}}}',
}
GOOD["mooncake-delta"] = GOOD["mooncake"]
VALUES = ["null", "true", '"x"', "-1", "1e400", "NaN", "1.5", "18446744073709551616", "[]", "{}", "[null]", "[-1]",
          '["x"]', "9" * 5000, "[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000,
          '"' + "y" * 100_000 + '"', '"\\ud800"', '"\\u0000"']


def fields(members, path=()):
    """Paths to all members of an object."""
    for key, value in members.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from fields(value, (*path, key))


@pytest.mark.parametrize("name", GOOD)
def test_hostile_values_get_an_error_with_line_and_field(name, tmp_path):
    """Whatever a field holds: a trace, or an error that says where. No other exception, and none without the line."""
    path = tmp_path / "t.jsonl"
    good = GOOD[name]
    other = good.replace('"a"', '"b"').replace('"q"', '"p"')
    refused = 0
    for where in fields(json.loads(good)):
        for value in VALUES:
            row = json.loads(good)
            part = row
            for key in where[:-1]:
                part = part[key]
            part[where[-1]] = "HERE"
            path.write_text(f"{other}\n\n{json.dumps(row).replace(chr(34) + 'HERE' + chr(34), value)}\n")
            try:
                load(path, format=name, block_size=4)
            except TraceError as error:
                refused += 1
                assert error.path == str(path) and error.line == 3 and error.field, (where, value[:50], str(error))
                assert len(str(error)) < 500 + len(str(path))
    assert refused > 5 * len(list(fields(json.loads(good)))), refused


@pytest.mark.parametrize("name", GOOD)
def test_damaged_files(name, tmp_path):
    """Cut anywhere, bytes changed at random, other encodings, very long lines."""
    path = tmp_path / "t.jsonl"
    good = GOOD[name].encode()
    rng = random.Random(name)
    texts = [good[:cut] for cut in range(1, len(good), 7)]
    for _ in range(150):
        damaged = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        texts.append(bytes(damaged))
    texts += [good.decode().encode("utf-16"), b"\xff" + good, b"[1]", b"1", b'"x"', b"\0" * 100,
              good[:-1] + b', "k": "' + b"z" * 3_000_000 + b'"}x', b"{" * 200_000]
    for text in texts:
        path.write_bytes(text)
        try:
            trace = load(path, format=name, block_size=4)
        except TraceError as error:
            assert error.path == str(path), text[:80]
            assert error.line is None or 1 <= error.line <= 1 + text.count(b"\n"), text[:80]
        else:
            assert len(trace)
    for cut in (3, 20):
        path.write_bytes(gzip.compress(good)[:-cut])
        with pytest.raises(TraceError, match="ends too early"):
            load(path, format=name, block_size=4)
    path.write_bytes(b"\n \n")
    with pytest.raises(TraceError, match="did not contain any requests|no request_end records"):
        load(path, format=name, block_size=4)


@pytest.mark.parametrize("name", GOOD)
def test_found_by_looking(name, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + GOOD[name] + "\n")
    block = None if name == "dynamo" else 4
    assert load(path, block_size=block) == load(path, block_size=block, format="mooncake" if name == "mooncake-delta"
                                                else name)


def agents(**changes):
    return json.dumps({**json.loads(GOOD["agentic_mooncake"]), **changes})


@pytest.mark.parametrize(("rows", "line", "field", "text"), [
    ([agents(), agents()], 2, "request_id", "also the name of the row in line 1"),
    ([agents(request_id=" ")], 1, "request_id", "missing or blank"),
    ([agents(wait_for=["z"])], 1, "wait_for", "'z', which no row is called"),
    ([agents(wait_for=["a"])], 1, "wait_for", "its own row"),
    ([agents(wait_for=["b"]), agents(request_id="b", wait_for=["a"])], 1, "wait_for", "wait for itself"),
    ([agents(delay=-5)], 1, "delay", "is -3.0 ms together with tool_wait_ms"),
    ([agents(timestamp=-1)], 1, "timestamp", "at least 0"),
    ([agents(input_length=9)], 1, "input_length", "more than the 8 tokens"),
    ([agents(wait_for="a")], 1, "wait_for", "must be a list of strings"),
    ([agents(wait_for=[1])], 1, "wait_for[0]", "must be a string"),
    ([agents(output_token_ids=[1])], 1, "output_token_ids", "holds 1 tokens, but output_length is 2"),
])
def test_rules_of_workflows(rows, line, field, text, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(rows))
    with pytest.raises(TraceError, match=text) as caught:
        load(path, format="agentic_mooncake", block_size=4)
    assert (caught.value.line, caught.value.field) == (line, field)


def capture(request=None, replay=None, **changes):
    row = json.loads(GOOD["dynamo"])
    row["request"] |= request or {}
    row["request"]["replay"] |= replay or {}
    return {**row, **changes}


def tool(**claude):
    return {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": 1200,
            "agent_context": {"session_id": "s"},
            "tool": {"tool_call_id": "t", "tool_class": "c", "started_at_unix_ms": 1010,
                     "claude": {"source_request_id": "q", "execution_mode": "blocking", **claude}}}


@pytest.mark.parametrize(("rows", "field", "text"), [
    ([capture(), capture()], "request.request_id", "is also the request of .*t.jsonl:1"),
    ([capture(), capture({"request_id": "p"}, {"trace_block_size": 3})], "request.replay.trace_block_size",
     "is 3, but"),
    ([capture(), capture({"request_id": "p"}, agent_context=None)], "agent_context", "missing in others"),
    ([capture(), capture(replay={"input_sequence_hashes": [1]})], "request.replay.input_sequence_hashes",
     "holds 1 hashes, but 5 tokens in blocks of 4 make 2"),
    ([capture(), capture(schema="v2")], "schema", "only 'dynamo.request.trace.v1'"),
    ([capture(), capture(event_type="other")], "event_type", "is 'other'"),
    ([capture(), tool(source_request_id="z")], "tool.claude.source_request_id", "no request is called"),
    ([capture(), tool(execution_mode="later")], "tool.claude.execution_mode", "'later'"),
    ([capture(), capture({"request_id": "p"}, agent_context={"session_id": "s", "parent_session_id": "s"})],
     "wait_for", "wait for itself"),
])
def test_rules_of_captures(rows, field, text, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(TraceError, match=text) as caught:
        load(path, format="dynamo")
    assert caught.value.field == field
    assert caught.value.line == 2 or field == "wait_for"


def test_block_size_of_a_capture(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD["dynamo"])
    assert load(path).block_size == 4
    with pytest.raises(TraceError, match="is 4, but trace_block_size 512 was asked for"):
        load(path, block_size=512)


def test_options_and_files_of_a_format(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD["applied_compute_agentic"])
    with pytest.raises(ValueError, match="between 0.0 and 1.0"):
        load(path, shared_prefix_ratio=1.5)
    with pytest.raises(ValueError, match="exactly one trace file, got 2"):
        load([path, path])
    with pytest.raises(TraceError, match="fixed concurrency"):
        simulate(path)
    assert simulate(path, replay_concurrency=1).report["completed_requests"] == 2
    path.write_text(GOOD["mooncake"])
    with pytest.raises(ValueError, match="shared_prefix_ratio means nothing to format 'mooncake'"):
        simulate(path, trace_block_size=4, trace_shared_prefix_ratio=0.5)
    path.write_text(GOOD["agentic_mooncake"])
    with pytest.raises(ValueError, match="leave replay_concurrency out"):
        simulate(path, trace_block_size=4, replay_concurrency=2)
    path.write_text('{"num_turns": 0, "input_prompt_length": 1000000000000, "assistant_response_length": [], '
                    '"tool_call_output_length": [], "tool_call_latency": [], "final_assistant_response_length": 2}')
    with pytest.raises(TraceError, match="hash ids, more than"):
        load(path, block_size=4)


@pytest.mark.parametrize("name", ["agentic_mooncake", "mooncake-delta"])
def test_written_and_read_again(name, tmp_path):
    entries = [entry for entry in GOLDEN["replays"] if named(entry) == name]
    for entry in entries:
        path, twin = tmp_path / "t.jsonl", tmp_path / "twin.jsonl.gz"
        path.write_text(entry["files"][0])
        trace = load(path, format=name, block_size=entry["config"]["trace_block_size"])
        trace.save(twin)
        assert load(twin, format=name, block_size=trace.block_size) == trace
        half = trace.select(np.arange(len(trace)) % 2 == 0)
        both = Trace.concat(half, trace)
        both.save(twin)
        again = load(twin, format=name, block_size=trace.block_size)
        assert again == (both if both.request_ids is None else replace(both, request_ids=again.request_ids))


def test_parts_of_a_workflow(tmp_path):
    trace = Trace.from_columns(
        input_length=[1, 1, 1], output_length=[1, 1, 1], hash_offsets=[0, 1, 2, 3], hash_ids=[1, 2, 3],
        arrival_ms=[0.0, np.nan, 7.0], delay_ms=[0.0, 5.0, 9.0], wait_offsets=[0, 0, 1, 3], wait_rows=[0, 0, 1])
    part = trace.select([False, True, True])
    assert part.wait_offsets.tolist() == [0, 0, 1] and part.wait_rows.tolist() == [0]
    assert part.delay_ms.tolist() == [0.0, 9.0]
    both = Trace.concat(part, trace)
    assert both.wait_rows.tolist() == [0, 2, 2, 3] and both.wait_offsets.tolist() == [0, 0, 1, 1, 2, 4]
    for waits, text in (([0, 1, 2], "wait for itself"), ([0, 0, 3], "below 3")):
        with pytest.raises(ValueError, match=text):
            Trace.from_columns(input_length=[1] * 3, output_length=[1] * 3, hash_offsets=[0, 1, 2, 3],
                               hash_ids=[1] * 3, wait_offsets=[0, 1, 2, 3], wait_rows=waits)
    result = simulate(trace, replay_concurrency=None).per_request
    ends = result["last_token_ms"]
    assert result["arrival_time_ms"].tolist() == [0.0, ends[0] + 5.0, ends[1] + 9.0]


def test_formats_have_names_of_their_own():
    assert {"mooncake", "mooncake-delta", "agentic_mooncake", "applied_compute_agentic", "dynamo"} <= set(FORMATS)
