"""Formats of the field: small files after their published descriptions, and hostile ones."""
from __future__ import annotations

import io
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mocker import Trace, TraceError, formats, simulate

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-09 23:00:00.017335-01:00,2399,6
2024-05-12 00:00:00+00:00,76,15
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,"API log"
"""
BURSTGPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,2,ChatGPT,472,18,490,Conversation log
7,b,2,ChatGPT,10,3,13,Conversation log
45,a,1,ChatGPT,700,9,709,Conversation log
"""
CSV = """\ufeffRequest ID;x,arrival_time,prompt_tokens,completion_tokens\r\nr1,0.5,100,7\r\n\r\nr2,2.25,50,0\r\n"""
QWEN = "".join(json.dumps(row) + "\n" for row in (
    {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132,
     "type": "text", "turn": 1, "hash_ids": [1089, 1090, 6326]},
    {"chat_id": 7, "parent_chat_id": 1000, "timestamp": 61.5, "input_length": 16, "output_length": 1, "type": "file",
     "turn": 4, "hash_ids": [1089]},
    {"chat_id": 160, "parent_chat_id": 159, "timestamp": 70.0, "input_length": 40, "output_length": 80,
     "type": "text", "turn": 2, "hash_ids": [1089, 1090, 6327]},
))
SHAREGPT = json.dumps([
    {"id": "QWJhYvA_0", "conversations": [
        {"from": "human", "value": "h" * 400}, {"from": "gpt", "value": "g" * 41},
        {"from": "human", "value": "i" * 8}, {"from": "gpt", "value": "x"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "kept"}, {"from": "human", "value": "h" * 400},
                                  {"from": "gpt", "value": "g" * 40}, {"from": "gpt", "value": "more"}]},
], indent=1)
OPENAI = json.dumps({"messages": [
    {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]},
    {"role": "assistant", "content": "answer"}]}) + "\n"
AIPERF_SINGLE = '{"text": "What is machine learning?", "output_length": 50, "timestamp": 10}\n' \
                '{"texts": ["What is ", "machine?"], "output_length": 5, "timestamp": 20}\n'
AIPERF_MULTI = json.dumps({"session_id": "chat_1", "turns": [
    {"role": "system", "text": "a" * 256}, {"text": "b" * 256, "output_length": 64, "timestamp": 5},
    {"text": "c" * 4, "output_length": 10, "delay": 250}]}) + "\n"
AIPERF_TRACE = '{"timestamp": 0, "input_length": 100, "output_length": 20}\n' \
               '{"timestamp": 5, "messages": [{"role": "user", "content": "hello"}], "output_length": 3, ' \
               '"session_id": "s"}\n' \
               '{"delay": 7, "text_input": "again, hello", "output_length": 3, "session_id": "s"}\n'
INPUTS_JSON = json.dumps({"data": [{"session_id": "session-001", "payloads": [
    {"messages": [{"role": "user", "content": "Hello"}], "model": "m", "max_tokens": 24},
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"},
                  {"role": "user", "content": "How are you?"}], "max_completion_tokens": 8}]}]}, indent=2)
VLLM = '{"prompt": "What is the capital of India?", "output_tokens": 10}\n' \
       '{"prompt": "Iceland?", "output_tokens": 1500}\n'
VLLM_TIMED = '{"timestamp": 10.0, "input_length": 5, "output_length": 2, "hash_ids": [7, 8, 9]}\n' \
             '{"timestamp": 12.5, "input_length": 5, "output_length": 3, "hash_ids": [7, 8, 10]}\n'

TEXTS = {
    "azure": AZURE_2023, "burstgpt": BURSTGPT, "csv": CSV, "qwen": QWEN, "sharegpt": SHAREGPT, "aiperf": AIPERF_MULTI,
    "vllm": VLLM,
}


def load(tmp_path, content: str | bytes, **options: object) -> Trace:
    path = tmp_path / "t"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Trace.load(path, **options)


def test_azure(tmp_path):
    trace = load(tmp_path, AZURE_2023)
    assert trace.arrival_ms.tolist() == [0.0, 52.0, 2000.0]
    assert trace.input_length.tolist() == [4808, 3180, 110] and trace.output_length.tolist() == [10, 8, 27]
    assert len(np.unique(trace.hash_ids)) == len(trace.hash_ids) == 10 + 7 + 1 and trace.line.tolist() == [2, 3, 4]
    later = load(tmp_path, AZURE_2024, block_size=64)
    assert later.arrival_ms.tolist() == [0.0, 7.405, 2 * 86400e3 - 9.93] and later.block_size == 64
    assert load(tmp_path, AZURE_2024, _slow=True, block_size=64) == later
    assert simulate(trace).report["completed_requests"] == 3


def test_burstgpt(tmp_path):
    trace = load(tmp_path, BURSTGPT)
    assert trace.arrival_ms.tolist() == [5000.0, 45500.0, 118000.0] and trace.output_length.tolist() == [18, 0, 276]
    assert load(tmp_path, BURSTGPT, _slow=True) == trace
    talk = load(tmp_path, BURSTGPT_SESSIONS)
    assert talk.session_ids == ("a", "b") and talk.turn.tolist() == [0, 0, 1] and talk.delay_ms[2] == 40000.0


def test_csv_with_named_columns(tmp_path):
    trace = load(tmp_path, CSV, time_unit="s")
    assert trace.arrival_ms.tolist() == [500.0, 2250.0] and trace.input_length.tolist() == [100, 50]
    assert trace.line.tolist() == [2, 4]
    full = 'when,n_in,n_out,who,ids,id\n1,17,2,a,"3 4",x\n5,20,1,a,[3; 5],\n'
    full_trace = load(tmp_path, full, format="csv", block_size=10, columns="timestamp=when,input_length=n_in,"
                      "output_length=n_out,session_id=who,hash_ids=ids")
    assert full_trace.hash_ids.tolist() == [3, 4, 3, 5] and full_trace.session_ids == ("a",)
    assert full_trace.request_ids == ("x", None) and full_trace.delay_ms.tolist() == [0, 4]
    with pytest.raises(TraceError, match="t:1: input_length: could be column 'input_tokens' or 'prompt_tokens'; say"):
        load(tmp_path, "input_tokens,prompt_tokens,output_tokens\n1,2,3\n")
    with pytest.raises(TraceError, match="t:1: timestamp: there is no column 'when'; the columns are 'input_tokens'"):
        load(tmp_path, "input_tokens,output_tokens\n1,2\n", columns={"timestamp": "when"})


def test_scanner_and_csv_module_agree(tmp_path):
    rng = random.Random(5)
    cells = ["0", "7", "12", "1e3", "4.0", "4.5", "-3", "", "x", " 8", "007", "999999999999999999", "1" * 19, "nan",
             "0.125", "-0.5", "1234567890.123456", ".5", "5.", '"6"', "6\r"]
    for _ in range(300):
        rows = [",".join(rng.choice(cells) for _ in range(3)) for _ in range(rng.randint(1, 4))]
        text = "timestamp,input_tokens,output_tokens\n" + "\n".join(rows) + rng.choice(["", "\n"])
        results = []
        for slow in (False, True):
            try:
                trace = load(tmp_path, text, _slow=slow)
                results.append((trace.arrival_ms.tolist(), trace.input_length.tolist(), trace.output_length.tolist()))
            except TraceError as error:
                results.append(str(error))
        assert repr(results[0]) == repr(results[1])


def test_qwen(tmp_path):
    trace = load(tmp_path, QWEN)
    assert trace.block_size == 16 and trace.arrival_ms.tolist() == [61114.0, 61500.0, 70000.0]
    assert trace.session_ids == ("159", "7") and trace.turn.tolist() == [0, 0, 1]
    assert trace.request_ids == ("159", "7", "160") and trace.delay_ms[2] == pytest.approx(8886)
    assert trace.hash_ids.tolist() == [1089, 1090, 6326, 1089, 1089, 1090, 6327]
    bare = load(tmp_path, QWEN.replace(', "hash_ids": [1089, 1090, 6326]', ""))
    assert bare.hash_ids.tolist() == [6328, 6329, 6330, 1089, 1089, 1090, 6327]
    with pytest.raises(TraceError, match="t:4: chat_id: 159 is that of an earlier row too"):
        load(tmp_path, QWEN + QWEN)


def test_sharegpt(tmp_path):
    trace = load(tmp_path, SHAREGPT)
    assert trace.session_ids == ("QWJhYvA_0", "b")
    assert trace.input_length.tolist() == [100, 100 + 11 + 2, 101] and trace.output_length.tolist() == [11, 1, 10]
    assert trace.block_size == 64 and trace.line.tolist() == [2, 2, 23]
    first, second, third = (trace.hash_ids[a:b].tolist() for a, b in
                            zip(trace.hash_offsets[:-1], trace.hash_offsets[1:], strict=True))
    assert first == second and len(first) == 2 and first[0] != third[0]
    short = load(tmp_path, SHAREGPT, chars_per_token="8", max_turns=1)
    assert short.input_length.tolist() == [50, 51] and short.n == 2
    words = load(tmp_path, SHAREGPT, tokenizer=lambda text: list(text.encode()), block_size=16)
    assert words.input_length.tolist() == [400, 449, 404] and words.output_length.tolist() == [41, 1, 40]
    talk = load(tmp_path, OPENAI * 2)
    assert talk.input_length.tolist() == [2, 2] and talk.hash_ids[0] == talk.hash_ids[1]
    assert talk.session_ids == ("conversation_1", "conversation_2")
    twice = load(tmp_path, SHAREGPT[:-1] + "," + SHAREGPT[1:])
    assert twice.session_ids == ("QWJhYvA_0", "b", "QWJhYvA_0#2", "b#2")


def test_tokenizers_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, message in (("words", "must be MODULE:FUNCTION"), ("json:nothing", "cannot be loaded"),
                          ("no_such_package_x:f", "needs the package no_such_package_x")):
        with pytest.raises((ValueError, ImportError), match=message):
            load(tmp_path, OPENAI, tokenizer=name)
    assert load(tmp_path, OPENAI, tokenizer="test_foreign_formats:letters").output_length.tolist() == [6]
    with pytest.raises(ValueError, match="exclude each other"):
        load(tmp_path, OPENAI, tokenizer="test_foreign_formats:letters", chars_per_token=3)
    with pytest.raises(ValueError, match="must return integers"):
        load(tmp_path, OPENAI, tokenizer=lambda text: 5)
    with pytest.raises(ValueError, match="chars_per_token must be a positive number"):
        load(tmp_path, OPENAI, chars_per_token="0")


def letters(text: str) -> list[int]:
    """A tokenizer for the test above."""
    return [ord(letter) for letter in text]


def test_aiperf(tmp_path):
    single = load(tmp_path, AIPERF_SINGLE)
    assert single.input_length.tolist() == [7, 4] and single.arrival_ms.tolist() == [10, 20]
    multi = load(tmp_path, AIPERF_MULTI)
    assert multi.input_length.tolist() == [128, 128 + 64 + 1] and multi.session_ids == ("chat_1",)
    assert multi.delay_ms.tolist() == [0, 250] and multi.arrival_ms[0] == 5
    assert multi.hash_ids[:2].tolist() == multi.hash_ids[2:4].tolist()
    trace = load(tmp_path, AIPERF_TRACE, format="aiperf")
    assert trace.input_length.tolist() == [100, 2, 3] and trace.turn.tolist() == [0, 0, 1] and trace.delay_ms[2] == 7
    inputs = load(tmp_path, INPUTS_JSON)
    assert inputs.session_ids == ("session-001",) and inputs.output_length.tolist() == [24, 8]
    assert inputs.input_length.tolist() == [2, 2 + 3 + 3] and inputs.line.tolist() == [3, 3]
    with pytest.raises(TraceError, match="t:1: output_length: is missing; give the option output_tokens=N"):
        load(tmp_path, '{"text": "hello"}')
    assert load(tmp_path, '{"text": "hello"}', output_tokens="9").output_length.tolist() == [9]


def test_vllm(tmp_path):
    trace = load(tmp_path, VLLM)
    assert trace.input_length.tolist() == [8, 2] and trace.output_length.tolist() == [10, 1500]
    assert np.isnan(trace.arrival_ms).all()
    timed = load(tmp_path, VLLM_TIMED, format="vllm-timed", block_size=2)
    assert timed.arrival_ms.tolist() == [10_000, 12_500]
    assert load(tmp_path, VLLM_TIMED, format="timed_trace", block_size=2, time_unit="ms").arrival_ms[0] == 10


def parquet(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def stream(table: pa.Table) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


@pytest.mark.parametrize("pack", [parquet, stream])
def test_parquet_and_arrow(tmp_path, pack):
    table = pa.table({
        "arrived_at": pa.array([0.5, 1.0]), "num_prefill_tokens": pa.array([10, 20], pa.int32()),
        "num_decode_tokens": pa.array([3.0, 0.0]), "note": ["a", None]})
    trace = load(tmp_path, pack(table))
    assert trace.arrival_ms.tolist() == [500, 1000] and trace.output_length.tolist() == [3, 0]
    times = pa.table({"timestamp": pa.array([1_000_000, 1_002_500], pa.timestamp("us", "UTC")),
                      "prompt_tokens": [5, 9], "completion_tokens": [1, 1], "session_id": pa.array([4, 4])})
    assert load(tmp_path, pack(times)).arrival_ms.tolist() == [0, 2.5]
    assert load(tmp_path, pack(times)).session_ids == ("4",)
    for change, message in (
        ({"input_length": pa.array([5, None])}, "t:2: input_length: is missing"),
        ({"output_length": pa.array([1, None])}, "t:2: output_length: is missing"),
        ({"output_length": pa.array([1, -4])}, "t:2: output_length: must be from 0"),
        ({"output_length": pa.array([1, 1.5])}, "t:2: output_length: must be an integer, is 1.5"),
        ({"output_length": pa.array(["1", "2"])}, "t: output_length: is a column of string, not of integers"),
        ({"timestamp": pa.array([0.0, float("nan")])}, "t:2: timestamp: must be a finite number, is nan"),
        ({"hash_ids": pa.array([[1], [-2]])}, "t:2: hash_ids: must hold integers from 0"),
        ({"hash_ids": pa.array([[1], [None]])}, "t:2: hash_ids: holds a null"),
        ({"hash_ids": pa.array([[1], []])}, "t:2: hash_ids: is empty"),
        ({"hash_ids": pa.array([1, 2])}, "t: hash_ids: is a column of int64, not of lists"),
        ({"output_token_ids": pa.array([[1], [1, 2]])}, "t:2: output_token_ids: holds 2 tokens, but"),
    ):
        columns = {"input_length": pa.array([5, 9]), "output_length": pa.array([1, 1]), **change}
        with pytest.raises(TraceError, match=message):
            load(tmp_path, pack(pa.table(columns)))
        if "t:2" in message and "null" not in message:
            left = load(tmp_path, pack(pa.table(columns)), on_error="skip")
            assert left.n == 1 and [e.line for e in left.skipped] == [2]


HOSTILE = {
    "azure": [
        ("2023-11-16 18:17:04.0319600,3180", "t:3: row: has 2 cells, the header 3; the row is cut off"),
        ("yesterday,5,5", "t:3: timestamp: must be a time like"),
        ("2023-02-30 00:00:00,5,5", "t:3: timestamp: must be a time like"),
        ("1850-01-01 00:00:00,5,5", "t:3: timestamp: must lie between"),
        ("2023-11-16 18:17:04,-5,5", "t:3: input_length: must be from 0"),
        ("2023-11-16 18:17:04,0,5", "t:3: input_length: is 0; a prompt needs"),
        ("2023-11-16 18:17:04,nan,5", "t:3: input_length: must be a finite number, is 'nan'"),
        ("2023-11-16 18:17:04,five,5", "t:3: input_length: must be a number, is 'five'"),
        ("2023-11-16 18:17:04,5.5,5", "t:3: input_length: must be an integer"),
        ("2023-11-16 18:17:04,99999999999999,5", "t:3: input_length: .* is more than"),
        ("2023-11-16 18:17:04,1e300,5", "t:3: input_length: must be from 0"),
        ("2023-11-16 18:17:04,,5", "t:3: input_length: is empty"),
        ('2023-11-16 18:17:04,"5\n5",5', "t:3: row: is not a CSV row"),
        ("2023-11-16 18:17:04,5,\udcff", "t:3: row: byte 23 is not UTF-8"),
        ("2023-11-16 18:17:04,5," + "9" * 1_000_000, "t:3: row: is not a CSV row"),
        ("2023-11-16 18:17:04,5,5\0", "t:3: (row|output_length): "),
    ],
    "qwen": [
        ('{"chat_id": 1', "t:2: row: ends too early"),
        ("[" * 10_000, "t:2: row: is nested too deeply"),
        ('{"a": ' * 10_000, "t:2: row: is nested too deeply"),
        ("17", "t:2: row: is the number 17, not a JSON object"),
        ('{"chat_id": 1, "timestamp": 1, "input_length": 5}', "t:2: output_length: is missing"),
        ('{"chat_id": [], "timestamp": 1, "input_length": 5, "output_length": 1}', "t:2: chat_id: must be an"),
        ('{"chat_id": 1, "timestamp": NaN, "input_length": 5, "output_length": 1}', "t:2: timestamp: must be a n"),
        ('{"chat_id": 1, "timestamp": 1e999, "input_length": 5, "output_length": 1}', "t:2: timestamp: must be a fi"),
        ('{"chat_id": 1, "timestamp": 1, "input_length": -5, "output_length": 1}', "t:2: input_length: must be from 0"),
        ('{"chat_id": 1, "timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1.5]}', "t:2: hash_ids: "),
        ('{"chat_id": 1, "timestamp": 1, "input_length": 500, "output_length": 1, "hash_ids": [1]}',
         "t:2: input_length: 500 is more than the 16 tokens"),
        ('{"chat_id": 1, "chat_id": 2}', "t:2: chat_id: is given twice"),
        ('{"x": "\udcff"}', "t:2: row: byte 8 is not UTF-8"),
        ('{"chat_id": ' + "9" * 10_000 + "}", "t:2: row: holds a number with too many digits"),
    ],
    "aiperf": [
        ('{"turns": []}', "t:2: turns: is empty"),
        ('{"turns": 5}', "t:2: turns: must be a list, is the number 5"),
        ('{"turns": [5]}', r"t:2: turns\[0\]: must be an object"),
        ('{"turns": [{"image": "x.png"}]}', r"t:2: turns\[0\]: must have one of text"),
        ('{"text": 5, "output_length": 1}', "t:2: text: must be a string"),
        ('{"text": "a", "prompt": "b", "output_length": 1}', "t:2: row: has text and prompt; a row has one prompt"),
        ('{"image": "x"}', "t:2: row: has no prompt"),
        ('{"text": "", "output_length": 1}', "t:2: row: has a prompt without any text"),
        ('{"text": "a", "output_length": -1}', "t:2: output_length: must be from 0"),
        ('{"text": "a", "output_length": 1, "timestamp": "noon"}', "t:2: timestamp: must be a number of ms"),
        ('{"text": "a", "output_length": 1, "delay": 5}', "t:2: delay: means nothing in a row without session_id"),
        ('{"messages": [{"content": "a"}], "output_length": 1}', r"t:2: messages\[0\]: has no role"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "output_length": 1}', "is not a text"),
        ('{"turns": [{"text": "a", "output_length": 1000000000}, {"text": "b", "output_length": 1}]}', "later prompts"),
        ('{"input_length": 5000000000, "output_length": 1}', "t:2: input_length: must be from 1"),
        ('{"text": "\\ud800", "output_length": 1}', "t:2: text: is not valid Unicode"),
        ("[" * 10_000, "t:2: row: is nested too deeply"),
    ],
    "sharegpt": [
        (',{"conversations": [}]', "t:2: row: is not JSON"),
        (',{"conversations": [{"from": "human", "va', "t:2: row: ends too early"),
        (",5]", "t:2: row: is the number 5, not a JSON object"),
        (',{"conversations": []}]', "t:2: conversations: holds no answer that follows"),
        (',{"conversations": {}}]', "t:2: conversations: must be a list"),
        (',{"conversations": [{"from": 5, "value": ""}]}]', r"t:2: conversations\[0\]: has no role"),
        (",", "t:2: row: (ends too early|is not JSON)"), (" {}]", "t:2: row: is followed by neither"),
        (",]", "t:2: row: is missing"),
        (',{"a": ' + "[" * 10_000, "t:2: row: is nested too deeply"),
        (',{"conversations": "\udcff"}]', "t:2: row: byte [0-9]+ of the file is not UTF-8"),
        (',{"conversations": [{"from": "human", "value": NaN}]}]', "t:2: (row|conversations)"),
    ],
}
STARTS = {
    "azure": AZURE_2023.splitlines(keepends=True)[:2], "qwen": [QWEN.splitlines(keepends=True)[0]],
    "aiperf": [AIPERF_SINGLE.splitlines(keepends=True)[0]],
    "sharegpt": ['[{"conversations": [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "d"}]}\n'],
}


@pytest.mark.parametrize(("name", "row", "message"), [(n, *case) for n, cases in HOSTILE.items() for case in cases],
                         ids=lambda value: value[:40] if isinstance(value, str) else None)
def test_hostile_rows_are_refused_with_their_place(tmp_path, name, row, message):
    content = ("".join(STARTS[name]) + row).encode(errors="surrogateescape")
    with pytest.raises(TraceError, match=message) as caught:
        load(tmp_path, content, format=name)
    assert len(str(caught.value)) < 800
    if name == "sharegpt":
        return                      # what is no JSON cannot be left out of an array
    left = load(tmp_path, content, format=name, on_error="skip")
    assert left.n == 1 and len(left.skipped) >= 1 and str(left.skipped[0]) == str(caught.value)


def test_every_format_is_found_by_looking_and_survives_damage(tmp_path):
    assert formats.FORMATS.keys() >= {*TEXTS, "columns", "parquet", "arrow", "mooncake", "vllm-timed"}
    rng = random.Random(3)
    for name, text in TEXTS.items():
        options = {"time_unit": "s"} if name == "csv" else {}
        whole = load(tmp_path, text, **options)
        assert whole == load(tmp_path, text, format=name, **options)
        content = text.encode()
        for _ in range(150):
            bad = bytearray(content)
            if rng.random() < 0.3:
                del bad[rng.randrange(len(bad)):]
            for _ in range(rng.randint(0, 3)):
                if bad:
                    bad[rng.randrange(len(bad))] = rng.choice(b'0129",:{}[]\n\xff\0 ae.-')
            for on_error in ("raise", "skip"):
                try:
                    trace = load(tmp_path, bytes(bad), format=name, on_error=on_error, **options)
                except TraceError as error:
                    assert str(error).startswith(str(tmp_path))
                else:
                    assert Trace.from_columns(**vars(trace)) == trace
    for junk in (b"", b"\n\n", b"\0" * 100, b"\xff\xfeT\0I\0", b"PAR1" + b"x" * 50, b"ARROW1\0\0" + b"y" * 60,
                 b"\xff\xff\xff\xff" * 8, b"TIMESTAMP,ContextTokens,GeneratedTokens", b"a,b\n1,2\n", b"[]", b"[" * 9999,
                 b"x" * 3_000_000):
        for form in ("auto", *formats.FORMATS):
            with pytest.raises(TraceError, match=str(tmp_path)):
                load(tmp_path, junk, format=form)
