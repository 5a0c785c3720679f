"""Arguments: nested records, JSON, setters, copies, scheduler rules."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import pickle
from typing import Any

import pytest
from arguments import (
    BOOLS,
    CHOICES,
    DEFAULTS,
    FRACTIONS,
    INT_RANGES,
    NOT_NEGATIVE,
    NOT_NULL,
    PATHS,
    REFERENCE,
    SCHEDULER,
    SETTABLE,
    TEXTS,
    U32,
    U64,
    refused,
)
from hypothesis import given
from hypothesis import strategies as st

from mocker import args as args_module
from mocker.args import DirectRequest, MockEngineArgs, ReasoningConfig, SglangArgs, TrtllmArgs

# --- nested records


@pytest.mark.parametrize("name", ["page_size", "max_prefill_tokens", "chunked_prefill_size", "clip_max_new_tokens"])
def test_sglang_counts(name):
    for good in (1, U64, None):
        assert getattr(SglangArgs(**{name: good}), name) == good
    for bad in (0, -1, U64 + 1, True, 1.0, "1"):
        refused(lambda bad=bad: SglangArgs(**{name: bad}), f"Failed to validate SglangArgs: {name}: ", "1..=2**64-1")
        refused(lambda bad=bad: MockEngineArgs(sglang={name: bad}), f"MockEngineArgs: sglang.{name}: ", "1..=2**64-1")


def test_sglang_conservativeness():
    assert SglangArgs(schedule_conservativeness=1).schedule_conservativeness == 1.0
    assert SglangArgs(schedule_conservativeness=1.3).schedule_conservativeness == 1.3
    for bad in (-0.1, math.nan, math.inf, "1"):
        refused(lambda bad=bad: SglangArgs(schedule_conservativeness=bad), "schedule_conservativeness: ")


def test_sglang_policy(caplog):
    with caplog.at_level(logging.WARNING, "mocker"):
        for good in ("fifo", "fcfs", "lpm", None):
            assert SglangArgs(good).schedule_policy == good
        assert not caplog.records
        assert SglangArgs("LPM").schedule_policy == "LPM"
        assert "'LPM'" in caplog.text
    refused(lambda: SglangArgs(5), "schedule_policy: must be a string")


def test_trtllm_policy():
    assert TrtllmArgs().capacity_scheduler_policy is None
    assert TrtllmArgs("GUARANTEED_NO_EVICT").capacity_scheduler_policy == "guaranteed_no_evict"
    wanted = "supports only capacity_scheduler_policy='guaranteed_no_evict', got 'max_utilization'"
    refused(lambda: TrtllmArgs("max_utilization"), wanted)
    for engine in ("vllm", "sglang", "trtllm"):
        call = {"engine_type": engine, "trtllm": {"capacity_scheduler_policy": "max_utilization"}}
        refused(lambda call=call: MockEngineArgs.from_json(json.dumps(call)), wanted)


def test_reasoning():
    config = ReasoningConfig(1, U32, 0.3)
    assert (config.start_thinking_token_id, config.end_thinking_token_id, config.thinking_ratio) == (1, U32, 0.3)
    assert [config.num_thinking_tokens(n) for n in (0, 1, 2, 3, 4, 10, 100)] == [0, 0, 0, 0, 2, 3, 30]
    assert [config.num_response_tokens(n) for n in (0, 1, 2, 4, 10)] == [0, 1, 2, 2, 7]
    assert ReasoningConfig(1, 2, 1).num_thinking_tokens(7) == 7
    for bad in (-1, U32 + 1, True, 1.0, None):
        refused(lambda bad=bad: ReasoningConfig(bad, 2, 0.5), "start_thinking_token_id")
        refused(lambda bad=bad: ReasoningConfig(1, bad, 0.5), "end_thinking_token_id")
    for bad in (-0.1, 1.1, math.nan, "0", None):
        refused(lambda bad=bad: ReasoningConfig(1, 2, bad), "thinking_ratio")


@pytest.mark.parametrize("name", ["sglang", "trtllm", "reasoning"])
def test_nested_types(name):
    for bad in (5, "x", [1], True):
        refused(lambda bad=bad: MockEngineArgs(**{name: bad}), f"{name}: must be a ", "mapping")
    others = {"sglang": TrtllmArgs(), "trtllm": ReasoningConfig(1, 2, 0.5), "reasoning": SglangArgs()}
    refused(lambda: MockEngineArgs(**{name: others[name]}), f"{name}: must be a ")


def test_nested_from_mapping_and_object_are_equal():
    by_object = MockEngineArgs("sglang", sglang=SglangArgs("lpm", 16), reasoning=ReasoningConfig(1, 2, 0.5))
    reasoning = {"thinking_ratio": 0.5, "end_thinking_token_id": 2, "start_thinking_token_id": 1}
    by_mapping = MockEngineArgs("sglang", sglang={"page_size": 16, "schedule_policy": "lpm"}, reasoning=reasoning)
    assert by_object == by_mapping
    assert pickle.loads(pickle.dumps(by_mapping)) == by_object
    refused(
        lambda: MockEngineArgs(reasoning={"start_thinking_token_id": 1}),
        "reasoning.end_thinking_token_id: missing field",
    )


def test_nested_unknown_key_is_ignored_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "mocker"):
        assert MockEngineArgs.from_json('{"sglang": {"page_sze": 4}}').sglang == SglangArgs()
    assert "page_sze" in caplog.text


# --- JSON


def test_json_error_texts():
    def load(text: str) -> Any:
        return lambda: MockEngineArgs.from_json(text)

    start = "Failed to parse MockEngineArgs JSON: "
    refused(
        load('{"unknown": true}'),
        start,
        "unknown: unknown field `unknown`",
        "`engine_type`",
        "`bandwidth_g4_to_g2_gbps`",
    )
    refused(load('{"num_gpu_blok": 1}'), "unknown field `num_gpu_blok`", "did you mean `num_gpu_blocks`?")
    refused(load('{"perf_model": null}'), "unknown field `perf_model`")
    refused(load('{"block_size": 16} true'), start, "trailing characters at line 1 column 20")
    refused(load('{"block_size": 16,\n}'), start, "at line ")
    refused(load(""), start, "at line 1 column 1")
    refused(load("{"), start)
    refused(load("\ufeff{}"), start)
    refused(load('{"block_size": 2, "block_size": 4}'), start, "duplicate field `block_size`")
    refused(load('{"gpu_memory_utilization": "bad"}'), start, "gpu_memory_utilization: ", "'bad'")
    refused(load('{"num_gpu_blocks": 16.0}'), start, "num_gpu_blocks: ", "got 16.0")
    refused(load('{"num_gpu_blocks": 0}'), start + "Failed to validate MockEngineArgs: num_gpu_blocks: ", "got 0")
    refused(load('{"num_gpu_blocks": true}'), "num_gpu_blocks: ", "got True")
    refused(load('{"num_gpu_blocks": ' + "9" * 10000 + "}"), "num_gpu_blocks: ")
    refused(load('{"num_gpu_blocks": ' + "9" * 300 + "}"), "num_gpu_blocks: ")
    refused(load('{"speedup_ratio": NaN}'), "speedup_ratio: ", "got nan")
    refused(load('{"speedup_ratio": 1e400}'), "speedup_ratio: ", "got inf")
    refused(load('{"speedup_ratio": -1}'), "speedup_ratio: ", "got -1")
    refused(load('{"engine_type": "\\ud800"}'), "engine_type")
    refused(load('{"sglang": {"page_size": "a"}}'), "sglang.page_size: ", "'a'")
    refused(load('{"reasoning": {"start_thinking_token_id": 1}}'), "reasoning.end_thinking_token_id: missing field")
    refused(load('{"sglang": ["fifo"]}'), "sglang: must be a SglangArgs")
    refused(load('{"has_perf_model": ' + "[" * 100000 + "]" * 100000 + "}"), start)
    for text in ("null", "[]", "5", '"x"', "true"):
        refused(load(text), start, "expected a JSON object")
    for bad in (None, 5, b"{}", {}):
        with pytest.raises(TypeError, match="from_json"):
            MockEngineArgs.from_json(bad)


def test_json_accepts():
    assert MockEngineArgs.from_json(" {}\r\n\t") == MockEngineArgs()
    assert MockEngineArgs.from_json('{"speedup_ratio": 2}').speedup_ratio == 2.0
    assert MockEngineArgs.from_json('{"has_perf_model": {"a": [1]}}') == MockEngineArgs()
    assert MockEngineArgs.from_json('{"has_perf_model": null}') == MockEngineArgs()
    got = MockEngineArgs.from_json('{"engine_type": "Vllm", "worker_type": "Aggregated", "preemption_mode": "Lifo"}')
    assert got == MockEngineArgs()
    assert json.loads(got.to_json())["engine_type"] == "vllm"
    dtypes = {name: "fp8" for name in TEXTS if name.endswith("dtype")}
    assert MockEngineArgs.from_json(json.dumps(dtypes)) == MockEngineArgs(**dtypes)


def test_json_legacy_worker_flags():
    def worker(**flags: Any) -> str:
        return MockEngineArgs.from_json(json.dumps(flags)).worker_type

    assert worker(is_prefill=True) == "prefill"
    assert worker(is_decode=True, is_prefill=False) == "decode"
    assert worker(is_decode=False) == "aggregated"
    assert worker(is_prefill=True, is_decode=True, worker_type="decode") == "decode"
    assert worker(is_prefill=None, worker_type="Prefill") == "prefill"
    refused(lambda: worker(is_prefill=True, is_decode=True), "is_prefill and is_decode cannot both be true")
    refused(lambda: worker(is_prefill=None), "is_prefill must not be null")
    refused(lambda: worker(is_decode=None), "is_decode must not be null")
    refused(lambda: worker(is_decode=5, worker_type="decode"), "is_decode: ", "got 5")


def test_json_file(tmp_path):
    path = tmp_path / "args.json"
    path.write_text('{"engine_type": "sglang", "sglang": {"page_size": 32}}')
    assert MockEngineArgs.from_json_file(path).block_size == 32


def test_json_keeps_decode_worker_and_null_limits():
    got = MockEngineArgs(worker_type="decode", max_num_seqs=None, max_num_batched_tokens=None)
    values = json.loads(got.to_json())
    assert list(values) == list(REFERENCE)
    assert values["max_num_seqs"] is None
    values["has_perf_model"] = True
    assert MockEngineArgs.from_json(json.dumps(values)) == got


def one_field() -> st.SearchStrategy[tuple[str, Any]]:
    floats = st.floats(0, 1e300) | st.integers(0, 10)
    by_name: dict[str, st.SearchStrategy[Any]] = {
        **{n: st.integers(*limits) for n, limits in INT_RANGES.items() if n != "num_g3_blocks"},
        **{n: st.floats(0, 1) for n in FRACTIONS},
        **{n: floats for n in NOT_NEGATIVE if n != "decode_speedup_ratio"},
        **{n: st.booleans() for n in BOOLS if n != "enable_g4_storage"},
        **{n: st.sampled_from(choice[0]).map(str.title) for n, choice in CHOICES.items()},
        **{n: st.text() for n in [*TEXTS, *PATHS]},
    }
    by_name["block_size"] = st.sampled_from([0, 2, 8, 64])
    by_name["sglang"] = st.builds(dict, max_prefill_tokens=st.none() | st.integers(1, U64))
    by_name["trtllm"] = st.just(TrtllmArgs("guaranteed_no_evict"))
    by_name["reasoning"] = st.builds(ReasoningConfig, st.integers(0, U32), st.integers(0, U32), st.floats(0, 1))
    for name in SCHEDULER:  # they need one another: a test of their own
        by_name.pop(name, None)
    nullable = set(by_name) - NOT_NULL
    return st.sampled_from(sorted(by_name)).flatmap(
        lambda n: st.tuples(st.just(n), st.none() | by_name[n] if n in nullable else by_name[n])
    )


@given(st.lists(one_field(), max_size=12))
def test_json_round_trip(pairs):
    made = MockEngineArgs(**dict(pairs))
    again = MockEngineArgs.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()
    assert pickle.loads(pickle.dumps(made)) == made
    plain = {n: v.to_dict() if hasattr(v, "to_dict") else v for n, v in dict(pairs).items()}
    assert MockEngineArgs.from_json(json.dumps(plain)) == made


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from([*DEFAULTS, "is_prefill", "has_perf_model"]) | st.text(max_size=5), junk, max_size=4
    )
)
def test_junk_is_refused_or_sound(values):
    logging.getLogger("mocker").setLevel(logging.CRITICAL)
    try:
        made = MockEngineArgs.from_json(json.dumps(values))
    except ValueError as error:
        assert str(error).startswith("Failed to parse MockEngineArgs JSON: ")
    else:
        assert MockEngineArgs.from_json(made.to_json()) == made
    finally:
        logging.getLogger("mocker").setLevel(logging.NOTSET)


# --- setters


def test_read_only_fields():
    got = MockEngineArgs()
    for name in set(DEFAULTS) - SETTABLE:
        with pytest.raises(AttributeError, match=f"{name} .* is read-only"):
            setattr(got, name, getattr(got, name))
    with pytest.raises(AttributeError):
        got.perf_model_path = "x"
    with pytest.raises(AttributeError):
        got.no_such_field = 1
    with pytest.raises(AttributeError, match="read-only"):
        SglangArgs().page_size = 1
    assert got == MockEngineArgs()


@pytest.mark.parametrize("name", sorted(SETTABLE - {"aic_nextn_accept_rates"}))
def test_setters(name):
    good = {"worker_type": "DECODE", "enable_prefix_caching": False, "aic_nextn": 2}
    good.update(dict.fromkeys(FRACTIONS, 0.5) | dict.fromkeys(TEXTS, "x"))
    value = good.get(name, 7)
    got = MockEngineArgs()
    setattr(got, name, value)
    assert got == MockEngineArgs(**{name: value})
    assert getattr(got, name) == ("decode" if name == "worker_type" else value)
    before = got.to_json()
    refused(lambda: setattr(got, name, -1.5), f"Failed to validate MockEngineArgs: {name}: ", "-1.5")
    assert got.to_json() == before


def test_setters_keep_draft_rates_whole():
    got = MockEngineArgs()
    refused(lambda: setattr(got, "aic_nextn_accept_rates", "0.5"), "requires aic_nextn")
    got.aic_nextn = 2
    assert got.aic_nextn_accept_rates == "0.85,0.3"
    got.aic_nextn_accept_rates = ".5,1"
    assert got.aic_nextn_accept_rates == "0.5,1"
    got.aic_nextn = 3
    assert got.aic_nextn_accept_rates == "0.5,1,0"
    refused(lambda: setattr(got, "aic_nextn_accept_rates", "7"), "[0] must be finite")
    refused(lambda: setattr(got, "aic_nextn", 6), "1..=5", "got 6")
    assert (got.aic_nextn, got.aic_nextn_accept_rates) == (3, "0.5,1,0")
    got.aic_nextn_accept_rates = None
    assert got.aic_nextn_accept_rates == "0.85,0.3,0"
    got.aic_nextn = None
    assert got == MockEngineArgs()
    slow = MockEngineArgs(decode_speedup_ratio=2.0)
    refused(lambda: setattr(slow, "aic_nextn", 1), "decode_speedup_ratio=1.0")
    assert slow == MockEngineArgs(decode_speedup_ratio=2.0)


def test_setter_checks_rules_between_fields():
    got = MockEngineArgs()
    refused(lambda: setattr(got, "num_gpu_blocks", 2**60), "num_gpu_blocks * block_size")
    assert got.num_gpu_blocks == 16384


# --- copies


def test_copies_are_independent():
    first = MockEngineArgs(aic_nextn=2, num_gpu_blocks=5, sglang=SglangArgs("lpm"))
    for second in (
        first.copy(),
        copy.copy(first),
        copy.deepcopy(first),
        pickle.loads(pickle.dumps(first)),
        first.replace(),
    ):
        assert type(second) is MockEngineArgs
        assert second == first
        assert second is not first
        second.num_gpu_blocks = 9
        assert (second.num_gpu_blocks, first.num_gpu_blocks) == (9, 5)
        assert second != first


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_protocols(protocol):
    for thing in (
        MockEngineArgs("sglang", block_size=8, reasoning=ReasoningConfig(1, 2, 0.5)),
        SglangArgs("lpm", 4),
        DirectRequest([1, 2], 3, uuid=5),
    ):
        assert pickle.loads(pickle.dumps(thing, protocol)) == thing


def test_with_overrides():
    base = MockEngineArgs(aic_nextn=1, worker_type="decode", bootstrap_port=1, max_num_seqs=None)
    assert base.with_overrides() == base
    assert base.with_overrides(None, None, None, None, None, None) == base
    changed = base.with_overrides(5, 6, 7, 8, 9, aic_nextn=3, worker_type="Prefill", enable_prefix_caching=False)
    assert (changed.bootstrap_port, changed.zmq_kv_events_port, changed.zmq_replay_port) == (5, 6, 7)
    assert (changed.kv_bytes_per_token, changed.num_gpu_blocks, changed.aic_nextn) == (8, 9, 3)
    assert changed.aic_nextn_accept_rates == "0.85,0,0"
    assert changed.worker_type == "prefill"
    assert changed.enable_prefix_caching is False
    assert changed.max_num_seqs is None
    assert base.bootstrap_port == 1
    refused(
        lambda: base.with_overrides(num_gpu_blocks=0), "Failed to validate MockEngineArgs: num_gpu_blocks: ", "got 0"
    )
    names = list(inspect.signature(MockEngineArgs.with_overrides).parameters)[1:]
    assert set(names) == SETTABLE | {"bootstrap_port", "zmq_kv_events_port", "zmq_replay_port", "kv_bytes_per_token"}
    assert len(names) == 26


def test_replace():
    base = MockEngineArgs(aic_nextn=2)
    changed = base.replace(max_num_seqs=None, speedup_ratio=2, preemption_mode="FIFO", aic_nextn=None)
    assert changed == MockEngineArgs(max_num_seqs=None, speedup_ratio=2.0, preemption_mode="fifo")
    assert base.replace(engine_type="trtllm", block_size=0).block_size == 32
    refused(lambda: base.replace(block_size=3), "block_size", "got 3")
    refused(lambda: base.replace(aic_nextn=None, aic_nextn_accept_rates="1"), "requires aic_nextn")
    with pytest.raises(TypeError, match="did you mean `dp_size`"):
        base.replace(dp_sizes=2)
    assert SglangArgs("lpm").replace(page_size=4) == SglangArgs("lpm", 4)


def test_equality_hash_repr():
    assert MockEngineArgs() == MockEngineArgs(block_size=64, num_gpu_blocks=16384)
    assert MockEngineArgs() != MockEngineArgs(block_size=32)
    assert MockEngineArgs() != 5
    assert SglangArgs() != TrtllmArgs()
    for thing in (MockEngineArgs(), DirectRequest([1], 1), SglangArgs()):
        with pytest.raises(TypeError, match="unhashable"):
            hash(thing)
    made = MockEngineArgs("sglang", max_num_seqs=None, sglang=SglangArgs(page_size=4))
    text = repr(made)
    assert text == (
        "MockEngineArgs(engine_type='sglang', num_gpu_blocks=16384, block_size=4, max_num_seqs=None, "
        "sglang=SglangArgs(page_size=4))"
    )
    assert eval(text, vars(args_module)) == made


# --- scheduler rules


def scheduled(rules: str = "vllm-0.33", **values: Any) -> MockEngineArgs:
    return MockEngineArgs(scheduler_rules=rules, **values)


def test_watermark():
    for good in (0, 0.0, 0.5, math.nextafter(1, 0)):
        assert scheduled(watermark=good).watermark == good
    for bad in (1, 1.0, 2, -5e-324, math.nan, math.inf, True, "0.5"):
        refused(lambda bad=bad: scheduled(watermark=bad), "watermark: must be a finite number in [0, 1), got ")


def test_rule_names_are_those_of_the_presets():
    from mocker.rules import PRESETS

    assert list(PRESETS) == list(args_module.SCHEDULER_RULES) == CHOICES["scheduler_rules"][0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm_scheduling_policy", "priority"),
        ("long_prefill_token_threshold", 1),
        ("max_model_len", 100),
        ("watermark", 0.01),
        ("reserve_full_isl", False),
    ],
)
def test_options_need_vllm_rules(name, value):
    for rules in CHOICES["scheduler_rules"][0][1:]:
        made = scheduled(rules, **{name: value})
        assert getattr(made, name) == value
        values = json.loads(made.to_json())
        assert {n: v for n, v in values.items() if n in SCHEDULER} == {"scheduler_rules": rules, name: value}
        assert MockEngineArgs.from_json(made.to_json()) == made
    refused(
        lambda: MockEngineArgs(**{name: value}),
        f"{name}: {name} requires scheduler_rules to be 'vllm-0.33' or 'vllm-0.33-async'",
        f"got {name}={value!r} without it",
    )
    assert getattr(scheduled(**{name: DEFAULTS[name]}), name) == DEFAULTS[name]
    assert MockEngineArgs(**{name: DEFAULTS[name]}) == MockEngineArgs()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"engine_type": "sglang"}, ["scheduler_rules: ", "engine_type='vllm', got engine_type='sglang'"]),
        ({"engine_type": "trtllm"}, ["scheduler_rules: ", "engine_type='vllm', got engine_type='trtllm'"]),
        ({"aic_nextn": 2}, ["aic_nextn: ", "speculative decoding", "got aic_nextn=2"]),
        ({"worker_type": "prefill"}, ["worker_type: ", "hand-off", "'aggregated'"]),
        ({"worker_type": "decode"}, ["worker_type: ", "hand-off", "'aggregated'"]),
        ({"num_g2_blocks": 5}, ["num_g2_blocks: ", "storage tiers", "got num_g2_blocks=5"]),
        ({"preemption_mode": "fifo"}, ["preemption_mode: ", "no counterpart in vLLM"]),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ["max_num_seqs: max_num_seqs 9 exceeds", "tokens 8"]),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 513},
            ["max_num_batched_tokens: ", "512 is smaller than max_model_len 513"],
        ),
        ({"long_prefill_token_threshold": 9, "max_model_len": 8}, ["long_prefill_token_threshold: ", "9 exceeds"]),
    ],
)
def test_vllm_rules_refuse(values, words):
    for rules in CHOICES["scheduler_rules"][0][1:]:
        refused(lambda rules=rules: scheduled(rules, **values), "Failed to validate MockEngineArgs: ", *words)
    if not {"max_model_len"} & set(values):
        assert MockEngineArgs(**values) is not None  # the reference's rules take it


def test_vllm_rules_accept():
    assert scheduled(max_num_seqs=8, max_num_batched_tokens=8).max_num_seqs == 8
    assert scheduled(max_num_seqs=None, max_num_batched_tokens=8).max_num_seqs is None
    assert scheduled(max_num_batched_tokens=None, max_num_seqs=10**6).max_num_seqs == 10**6
    assert scheduled(enable_chunked_prefill=False).max_model_len is None
    assert scheduled(max_model_len=8, long_prefill_token_threshold=8).long_prefill_token_threshold == 8
    assert repr(scheduled(watermark=0.5)).endswith("scheduler_rules='vllm-0.33', watermark=0.5)")


def test_setters_and_copies_check_scheduler_rules():
    got = scheduled("vllm-0.33-async", watermark=0.25)
    for name, value in (("worker_type", "decode"), ("aic_nextn", 1)):
        refused(lambda name=name, value=value: setattr(got, name, value), name)
    refused(lambda: got.replace(scheduler_rules="dynamo-mocker-1.3.0"), "watermark requires scheduler_rules")
    assert got.replace(scheduler_rules="dynamo-mocker-1.3.0", watermark=0.0) == MockEngineArgs()
    assert got == scheduled("vllm-0.33-async", watermark=0.25)
    assert pickle.loads(pickle.dumps(got)) == got


@given(
    st.fixed_dictionaries(
        {"scheduler_rules": st.sampled_from(["vllm-0.33", "VLLM-0.33-async"])},
        optional={
            "vllm_scheduling_policy": st.sampled_from(["fcfs", "priority"]),
            "long_prefill_token_threshold": st.integers(0, 100),
            "max_model_len": st.none() | st.integers(100, U64),
            "watermark": st.floats(0, 1, exclude_max=True),
            "reserve_full_isl": st.booleans(),
            "enable_prefix_caching": st.booleans(),
            "max_num_seqs": st.none() | st.integers(1, 8192),
        },
    )
)
def test_scheduler_json_round_trip(values):
    made = MockEngineArgs(**values)
    again = MockEngineArgs.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()
    assert pickle.loads(pickle.dumps(made)) == made
