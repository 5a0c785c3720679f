"""Arguments and requests: defaults, ranges, rules between fields, JSON, setters, copies, error texts."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import pathlib
import pickle
import random
import uuid
from array import array
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mocker import args as args_module
from mocker.args import FIELDS, DirectRequest, MockEngineArgs, ReasoningConfig, SglangArgs, TrtllmArgs

U16, U32, U64 = 2**16 - 1, 2**32 - 1, 2**64 - 1

REFERENCE: dict[str, Any] = {
    "engine_type": "vllm",
    "num_gpu_blocks": None,
    "block_size": 0,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "speedup_ratio": 1.0,
    "decode_speedup_ratio": 1.0,
    "dp_size": 1,
    "startup_time": None,
    "worker_type": "aggregated",
    "planner_profile_data": None,
    "aic_backend": None,
    "aic_system": None,
    "aic_backend_version": None,
    "aic_tp_size": None,
    "aic_model_path": None,
    "aic_moe_tp_size": None,
    "aic_moe_ep_size": None,
    "aic_attention_dp_size": None,
    "aic_nextn": None,
    "aic_nextn_accept_rates": None,
    "aic_mtp_seed": 42,
    "aic_gemm_dtype": None,
    "aic_moe_dtype": None,
    "aic_fmha_dtype": None,
    "aic_kv_cache_dtype": None,
    "aic_comm_dtype": None,
    "gpu_memory_utilization": None,
    "mem_fraction_static": None,
    "free_gpu_memory_fraction": None,
    "enable_local_indexer": False,
    "bootstrap_port": None,
    "handoff_session_timeout_ms": 300000,
    "kv_bytes_per_token": None,
    "kv_transfer_bandwidth": None,
    "kv_transfer_timing_mode": "full_prompt",
    "reasoning": None,
    "response_replay_trace_path": None,
    "zmq_kv_events_port": None,
    "zmq_replay_port": None,
    "preemption_mode": "lifo",
    "router_queue_policy": None,
    "sglang": None,
    "trtllm": None,
    "num_g2_blocks": None,
    "num_g3_blocks": None,
    "offload_batch_size": None,
    "bandwidth_g1_to_g2_gbps": None,
    "bandwidth_g2_to_g1_gbps": None,
    "bandwidth_g2_to_g3_gbps": None,
    "bandwidth_g3_to_g2_gbps": None,
    "enable_g4_storage": False,
    "bandwidth_g2_to_g4_gbps": None,
    "bandwidth_g4_to_g2_gbps": None,
}
LATENCIES = {f"latency_{link}_ms": 0.0 for link in (
    "g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2")}
SCHEDULER: dict[str, Any] = {  # what the reference does not have
    "offload_eviction_policy": "lru",
    "offload_min_seen": 1,
    "offload_write_mode": "write_back",
    "scheduler_rules": "dynamo-mocker-1.3.0",
    "vllm_scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "max_model_len": None,
    "watermark": 0.0,
    "reserve_full_isl": True,
    "timing_model": None,
    "victim_score": None,
    "admission_score": None,
    "eviction_score": None,
}
DEFAULTS = REFERENCE | LATENCIES | SCHEDULER

# field -> (least, greatest) value; what stands beside a field is what it needs to be valid
INT_RANGES = {
    "num_gpu_blocks": (1, 2**57 - 1),  # times 64 tokens in a block stays below 2**63
    "max_num_seqs": (1, U64),
    "max_num_batched_tokens": (1, U64),
    "dp_size": (1, U32),
    "aic_tp_size": (0, U64),
    "aic_moe_tp_size": (0, U64),
    "aic_moe_ep_size": (0, U64),
    "aic_attention_dp_size": (0, U64),
    "aic_nextn": (1, 5),
    "aic_mtp_seed": (0, U64),
    "bootstrap_port": (0, U16),
    "zmq_kv_events_port": (0, U16),
    "zmq_replay_port": (0, U16),
    "handoff_session_timeout_ms": (1, U64),
    "kv_bytes_per_token": (0, U64),
    "num_g2_blocks": (0, U64),
    "num_g3_blocks": (0, U64),
    "offload_batch_size": (0, U64),
    "long_prefill_token_threshold": (0, U64),
    "max_model_len": (2, U64),
    "offload_min_seen": (1, 16),
}
FRACTIONS = ["gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction"]
NOT_NEGATIVE = [
    "speedup_ratio",
    "decode_speedup_ratio",
    "startup_time",
    "kv_transfer_bandwidth",
    "bandwidth_g1_to_g2_gbps",
    "bandwidth_g2_to_g1_gbps",
    "bandwidth_g2_to_g3_gbps",
    "bandwidth_g3_to_g2_gbps",
    "bandwidth_g2_to_g4_gbps",
    "bandwidth_g4_to_g2_gbps",
    *LATENCIES,
]
BOOLS = [
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enable_local_indexer",
    "enable_g4_storage",
    "reserve_full_isl",
]
CHOICES = {
    "engine_type": (["vllm", "sglang", "trtllm"], "Invalid engine_type '{}'. Must be 'vllm', 'sglang', or 'trtllm'."),
    "worker_type": (
        ["aggregated", "prefill", "decode"],
        "Invalid worker_type '{}'. Must be 'aggregated', 'prefill', or 'decode'.",
    ),
    "kv_transfer_timing_mode": (
        ["full_prompt", "destination_missing"],
        "Invalid kv_transfer_timing_mode '{}'. Must be 'full_prompt' or 'destination_missing'.",
    ),
    "preemption_mode": (["lifo", "fifo"], "Invalid preemption_mode: '{}'. Must be 'lifo' or 'fifo'."),
    "router_queue_policy": (["fcfs", "lcfs", "wspt"], "unknown queue policy: '{}', expected 'fcfs', 'lcfs', or 'wspt'"),
    "offload_eviction_policy": (
        ["lru", "lfu", "s3fifo", "belady"],
        "Invalid offload_eviction_policy '{}'. Must be 'lru', 'lfu', 's3fifo', or 'belady'.",
    ),
    "offload_write_mode": (
        ["write_back", "write_through"],
        "Invalid offload_write_mode '{}'. Must be 'write_back' or 'write_through'.",
    ),
    "scheduler_rules": (
        ["dynamo-mocker-1.3.0", "vllm-0.33", "vllm-0.33-async"],
        "Invalid scheduler_rules '{}'. Must be 'dynamo-mocker-1.3.0', 'vllm-0.33', or 'vllm-0.33-async'.",
    ),
    "vllm_scheduling_policy": (
        ["fcfs", "priority"],
        "Invalid vllm_scheduling_policy '{}'. Must be 'fcfs' or 'priority'.",
    ),
}
TEXTS = [
    "aic_backend",
    "aic_system",
    "aic_backend_version",
    "aic_model_path",
    "aic_gemm_dtype",
    "aic_moe_dtype",
    "aic_fmha_dtype",
    "aic_kv_cache_dtype",
    "aic_comm_dtype",
]
PATHS = ["planner_profile_data", "response_replay_trace_path"]
SETTABLE = {
    "num_gpu_blocks",
    "enable_prefix_caching",
    "worker_type",
    "aic_mtp_seed",
    "aic_nextn",
    "aic_nextn_accept_rates",
    "aic_tp_size",
    "aic_moe_tp_size",
    "aic_moe_ep_size",
    "aic_attention_dp_size",
    *TEXTS,
    *FRACTIONS,
}
NOT_NULL = {n for n, v in DEFAULTS.items() if v is not None} - {"max_num_seqs", "max_num_batched_tokens"}
NEEDS: dict[str, dict[str, Any]] = {
    "num_g3_blocks": {"num_g2_blocks": 1},
    "enable_g4_storage": {"num_g2_blocks": 1},
    **{name: {"scheduler_rules": "vllm-0.33"} for name in SCHEDULER},
    "offload_eviction_policy": {"num_g2_blocks": 1},
    "offload_min_seen": {"num_g2_blocks": 1},
    "offload_write_mode": {"num_g2_blocks": 1},
}


def refused(call: Any, *words: object) -> str:
    """Expect ``ValueError`` with all the words in its text."""
    with pytest.raises(ValueError) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert str(word) in text
    return text


def build(name: str, value: Any) -> MockEngineArgs:
    return MockEngineArgs(**{**NEEDS.get(name, {}), name: value})


# --- signature and defaults


def test_signature_names_order_defaults():
    parameters = inspect.signature(MockEngineArgs).parameters
    assert [(n, p.default) for n, p in parameters.items()] == list(DEFAULTS.items())
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_fields_table_covers_the_signature():
    assert list(FIELDS) == list(DEFAULTS)
    for name, field in FIELDS.items():
        assert field.name == name
        assert field.default == DEFAULTS[name]
        assert field.settable == (name in SETTABLE)
        assert field.doc
        assert field.expects
        assert getattr(MockEngineArgs, name) is field
    with pytest.raises(TypeError):
        FIELDS["x"] = FIELDS["dp_size"]


def test_every_field_belongs_to_a_tested_kind():
    tested = [*INT_RANGES, *FRACTIONS, *NOT_NEGATIVE, *BOOLS, *CHOICES, *TEXTS, *PATHS]
    others = ["admission_score", "aic_nextn_accept_rates", "block_size", "eviction_score", "reasoning", "sglang",
              "timing_model", "trtllm", "victim_score", "watermark"]
    assert sorted([*tested, *others]) == sorted(DEFAULTS)


def test_defaults_are_completed():
    got = MockEngineArgs()
    expected = {**DEFAULTS, "num_gpu_blocks": 16384, "block_size": 64}
    assert {name: getattr(got, name) for name in DEFAULTS} == expected
    assert got.perf_model_path is None


def test_positional():
    got = MockEngineArgs("trtllm", 100, 16, None, 512, False)
    assert (got.engine_type, got.num_gpu_blocks, got.block_size) == ("trtllm", 100, 16)
    assert (got.max_num_seqs, got.max_num_batched_tokens, got.enable_prefix_caching) == (None, 512, False)


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="nonsense"):
        MockEngineArgs(nonsense=1)


# --- ranges


@pytest.mark.parametrize(("name", "limits"), INT_RANGES.items())
def test_int_ranges(name, limits):
    low, high = limits
    off_at_0 = name in ("num_g2_blocks", "num_g3_blocks", "offload_batch_size")
    assert getattr(build(name, low), name) == (None if off_at_0 else low)
    assert getattr(build(name, high), name) == high
    for bad in (low - 1, high + 1, -1, U64 + 1, 2**128, -(2**70)):
        refused(
            lambda bad=bad: build(name, bad),
            f"Failed to validate MockEngineArgs: {name}: ",
            bad,
            "..=" if bad < 0 else "",
        )


@pytest.mark.parametrize("name", [*INT_RANGES, "block_size"])
@pytest.mark.parametrize("bad", [True, False, 16.0, "16", [16], {}, 1j, np.bool_(True), np.float64(4), object()])
def test_int_types(name, bad):
    text = refused(lambda: build(name, bad), f"{name}: must be an integer in ", "..=")
    if isinstance(bad, bool | float | str):
        assert repr(bad) in text or str(bad) in text


@pytest.mark.parametrize("good", [np.int32(4), np.uint64(4), np.array(4)])
def test_numpy_integers_are_integers(good):
    got = MockEngineArgs(num_gpu_blocks=good, block_size=good)
    assert type(got.num_gpu_blocks) is int
    assert (got.num_gpu_blocks, got.block_size) == (4, 4)


def test_int_too_long_to_print():
    refused(lambda: MockEngineArgs(num_gpu_blocks=10**5000), "num_gpu_blocks", "16610 bits")
    refused(lambda: MockEngineArgs(num_gpu_blocks=-(10**5000)), "num_gpu_blocks", "16610 bits")


@pytest.mark.parametrize("name", FRACTIONS)
def test_fractions(name):
    for good in (0, 0.0, 0.5, 1, 1.0, 5e-324):
        got = getattr(build(name, good), name)
        assert got == good
        assert type(got) is float
    for bad in (math.nextafter(1, 2), -5e-324, 2, -1, math.nan, math.inf, -math.inf, 10**400):
        refused(lambda bad=bad: build(name, bad), f"Failed to validate MockEngineArgs: {name}: ", "in [0, 1]", "got ")


@pytest.mark.parametrize("name", NOT_NEGATIVE)
def test_not_negative(name):
    for good in (0, 0.0, 1e-300, 1, 64.5, 1e308):
        if name != "decode_speedup_ratio" or good:
            assert getattr(build(name, good), name) == good
    for bad in (-5e-324, -1, math.nan, math.inf, -math.inf, 10**400):
        refused(lambda bad=bad: build(name, bad), f"Failed to validate MockEngineArgs: {name}: ", "in [0, inf)", "got ")


@pytest.mark.parametrize("name", [*FRACTIONS, *NOT_NEGATIVE])
@pytest.mark.parametrize("bad", [True, "0.5", [0.5], 1j, np.bool_(True), np.array([0.5]), Decimal("NaN"), object()])
def test_float_types(name, bad):
    refused(lambda: build(name, bad), f"{name}: must be a finite number in [0, ")


@pytest.mark.parametrize("half", [np.float32(0.5), np.float64(0.5), Decimal("0.5"), Fraction(1, 2)])
def test_other_numbers_become_floats(half):
    got = MockEngineArgs(speedup_ratio=half).speedup_ratio
    assert type(got) is float
    assert got == 0.5


@pytest.mark.parametrize("name", BOOLS)
def test_bools(name):
    for good in (True, False, np.bool_(True)):
        got = getattr(build(name, good), name)
        assert got is bool(good)
    for bad in (0, 1, "true", 1.0):
        refused(lambda bad=bad: build(name, bad), f"{name}: must be True or False, got {bad!r}")


@pytest.mark.parametrize(("name", "choice"), CHOICES.items())
def test_choices(name, choice):
    names, wrong = choice
    for good in names:
        for spelling in (good, good.upper(), good.title()):
            assert getattr(build(name, spelling), name) == good
    for bad in ("", "x", names[0] + " ", "y" * 1000):
        refused(lambda bad=bad: build(name, bad), f"{name}: ", wrong.format(bad if len(bad) < 80 else bad[:77] + "..."))
    for bad in (1, True, b"vllm", [names[0]]):
        refused(lambda bad=bad: build(name, bad), f"{name}: must be one of '{names[0]}'", "got ")


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name):
    for good in ("", "x", "ünï", None):
        assert getattr(build(name, good), name) == good
    for bad in (1, True, b"x", pathlib.PurePath("x")):
        refused(lambda bad=bad: build(name, bad), f"{name}: must be a string")
    refused(lambda: build(name, "\ud800"), f"{name}: must be a string", "surrogate")


@pytest.mark.parametrize("name", PATHS)
def test_paths(name, tmp_path):
    assert getattr(build(name, tmp_path / "x"), name) == str(tmp_path / "x")
    assert getattr(build(name, "rel/x"), name) == "rel/x"
    for bad in (1, True, b"x"):
        refused(lambda bad=bad: build(name, bad), f"{name}: must be a path")


def test_profile_path_is_only_stored():
    got = MockEngineArgs(planner_profile_data=pathlib.PurePosixPath("no/such.npz"))
    assert got.planner_profile_data == got.perf_model_path == "no/such.npz"


def test_all_bad_fields_are_named_at_once():
    text = refused(lambda: MockEngineArgs(num_gpu_blocks=0, dp_size=-3, speedup_ratio=math.nan))
    lines = text.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("Failed to validate MockEngineArgs: num_gpu_blocks: ")
    assert lines[1].startswith("speedup_ratio: ")
    assert lines[1].endswith("got nan")
    assert lines[2].startswith("dp_size: ")
    assert lines[2].endswith("got -3")


def test_hostile_repr_does_not_escape():
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    refused(lambda: MockEngineArgs(dp_size=Hostile()), "dp_size", "Hostile")
    assert len(refused(lambda: MockEngineArgs(dp_size="x" * 10**6), "dp_size")) < 300


# --- None


@pytest.mark.parametrize("name", DEFAULTS)
def test_null(name):
    text = json.dumps({name: None})
    if name in NOT_NULL:
        refused(lambda: MockEngineArgs(**{name: None}), f"{name} must not be null")
        refused(lambda: MockEngineArgs.from_json(text), f"{name} must not be null")
    else:
        expected = 16384 if name == "num_gpu_blocks" else None
        assert getattr(MockEngineArgs(**{name: None}), name) == expected
        assert getattr(MockEngineArgs.from_json(text), name) == expected


# --- block size


@pytest.mark.parametrize(("engine", "default"), [("vllm", 64), ("trtllm", 32), ("sglang", 1)])
def test_block_size_default(engine, default):
    assert MockEngineArgs(engine).block_size == default
    assert MockEngineArgs(engine, block_size=0).block_size == default
    assert MockEngineArgs(engine, sglang=SglangArgs(page_size=16)).block_size == (16 if engine == "sglang" else default)


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_block_size_power_of_two(engine):
    for good in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        assert MockEngineArgs(engine, block_size=good).block_size == good
    for bad in (1, 3, 6, 100, 1000, 1023, 1025, 2048, 2**40):
        refused(
            lambda bad=bad: MockEngineArgs(engine, block_size=bad),
            "Failed to validate MockEngineArgs: block_size: ",
            "power of two in 2..=1024",
            engine,
            f"got {bad}",
        )


def test_block_size_sglang_is_any_count():
    for good in (1, 3, 1000, 1024, 4096):
        assert MockEngineArgs("sglang", block_size=good).block_size == good


def test_sglang_page_size_must_match():
    assert MockEngineArgs("sglang", block_size=8, sglang=SglangArgs(page_size=8)).block_size == 8
    refused(
        lambda: MockEngineArgs("sglang", block_size=8, sglang=SglangArgs(page_size=4)),
        "block_size and sglang.page_size to match",
        "block_size=8",
        "page_size=4",
    )
    assert MockEngineArgs("vllm", block_size=8, sglang=SglangArgs(page_size=4)).block_size == 8


def test_sglang_chunk_must_be_whole_blocks():
    def make(chunk: int, engine: str = "sglang") -> MockEngineArgs:
        return MockEngineArgs(engine, block_size=4, sglang=SglangArgs(chunked_prefill_size=chunk))

    assert make(8).sglang.chunked_prefill_size == 8
    refused(
        lambda: make(6),
        "chunked_prefill_size to be divisible by block_size",
        "chunked_prefill_size=6",
        "block_size=4",
    )
    assert make(6, "vllm").block_size == 4


def test_pool_tokens_fit_in_63_bits():
    assert MockEngineArgs("sglang", 2**63 - 1).num_gpu_blocks == 2**63 - 1
    refused(lambda: MockEngineArgs("sglang", 2**63), "num_gpu_blocks * block_size", 2**63)
    refused(lambda: MockEngineArgs("vllm", 2**57), "num_gpu_blocks * block_size", 2**57)


def test_rules_between_fields_need_no_defaults():
    """Telling the rules which fields were given leaves out nothing that they would say of all."""
    rng = random.Random(3)
    values = {name: [least, min(least + 3, most)] for name, (least, most) in INT_RANGES.items()}
    values |= {name: names for name, (names, _) in CHOICES.items()}
    values |= dict.fromkeys(BOOLS, [True, False]) | dict.fromkeys(NOT_NEGATIVE, [0.0, 1.0, 2.0])
    values |= {"block_size": [0, 3, 64], "num_gpu_blocks": [None, 5, 2**63], "watermark": [0.1],
               "aic_nextn_accept_rates": ["0.5"], "victim_score": [print], "sglang": [None, SglangArgs(page_size=16)]}
    found = set()
    for _ in range(3000):
        chosen = {name: rng.choice(values[name]) for name in rng.sample(list(values), rng.randrange(6))}
        told, untold = DEFAULTS | chosen, DEFAULTS | chosen
        problems = MockEngineArgs._finish(told, list(chosen))
        assert problems == MockEngineArgs._finish(untold, list(untold))
        assert told == untold
        found |= {name for name, _ in problems}
    assert {"num_g3_blocks", "offload_min_seen", "watermark", "aic_nextn", "aic_nextn_accept_rates", "block_size",
            "num_gpu_blocks", "victim_score"} <= found


# --- storage tiers


def test_zero_turns_tiers_off():
    got = MockEngineArgs(num_g2_blocks=0, num_g3_blocks=0, offload_batch_size=0)
    assert got.num_g2_blocks is got.num_g3_blocks is got.offload_batch_size is None
    assert not got.enable_g4_storage


@pytest.mark.parametrize("g2", [None, 0])
@pytest.mark.parametrize(("name", "value"), [("num_g3_blocks", 10), ("enable_g4_storage", True)])
def test_lower_tiers_require_g2(name, value, g2):
    refused(
        lambda: MockEngineArgs(num_g2_blocks=g2, **{name: value}), f"{name} requires num_g2_blocks", f"{name}={value}"
    )
    got = MockEngineArgs(num_g2_blocks=10, **{name: value})
    assert getattr(got, name) == value
    assert got.kv_bytes_per_token is None


# --- speculative decode


@pytest.mark.parametrize(
    ("nextn", "given_rates", "rates"),
    [
        (3, None, "0.85,0.3,0"),
        (1, "", "0.85"),
        (5, "  ", "0.85,0.3,0,0,0"),
        (3, "1,0.5", "1,0.5,0"),
        (2, "1,0.5,0.25", "1,0.5"),
        (2, " .5 , 1. ", "0.5,1"),
        (2, "+1,1e-7", "1,0.0000001"),
        (2, "-0,-0.0", "-0,-0"),
        (2, "1e-400,0.30000000000000004", "0,0.30000000000000004"),
        (1, "1E0", "1"),
    ],
)
def test_accept_rates_are_canonical(nextn, given_rates, rates):
    got = MockEngineArgs(aic_nextn=nextn, aic_nextn_accept_rates=given_rates)
    assert got.aic_nextn_accept_rates == rates
    assert got.accept_rates() == [float(rate) for rate in rates.split(",")]
    assert got.undiscounted_aic_accept_rates() == ",".join("0" * nextn)
    assert got.aic_mtp_seed == 42


@pytest.mark.parametrize("bad", ["nan", "inf", "-Infinity", "-0.1", "1.1", "0.5,2", "1e400", "0.1,0.2,0.3,7"])
def test_accept_rates_out_of_range(bad):
    index = bad.count(",")
    refused(
        lambda: MockEngineArgs(aic_nextn=1, aic_nextn_accept_rates=bad),
        f"aic_nextn_accept_rates[{index}] must be finite and in [0, 1], got ",
    )


@pytest.mark.parametrize("bad", ["bad", "0.5,", ",", "1_0", "0x1", "0.5;0.3", "١", "0.5 0.3", "e5", "."])
def test_accept_rates_not_numbers(bad):
    refused(lambda: MockEngineArgs(aic_nextn=1, aic_nextn_accept_rates=bad), 'invalid aic_nextn_accept_rates value "')


def test_accept_rates_need_drafts():
    for rates in ("0.5", ""):
        refused(
            lambda rates=rates: MockEngineArgs(aic_nextn_accept_rates=rates),
            "aic_nextn_accept_rates requires aic_nextn",
        )
    assert MockEngineArgs().accept_rates() is None
    assert MockEngineArgs().undiscounted_aic_accept_rates() is None


@pytest.mark.parametrize("ratio", [2.0, 0.0, 0.999])
def test_drafts_exclude_decode_speedup(ratio):
    refused(
        lambda: MockEngineArgs(aic_nextn=1, decode_speedup_ratio=ratio),
        "aic_nextn requires decode_speedup_ratio=1.0",
        f"got decode_speedup_ratio={ratio}",
    )


@given(st.integers(1, 5), st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_accept_rates_survive_exactly(nextn, rates):
    got = MockEngineArgs(aic_nextn=nextn, aic_nextn_accept_rates=",".join(map(repr, rates)))
    assert got.accept_rates() == (rates + [0.0] * nextn)[:nextn]
    assert "e" not in got.aic_nextn_accept_rates
    again = MockEngineArgs(aic_nextn=nextn, aic_nextn_accept_rates=got.aic_nextn_accept_rates)
    assert again == got


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


# --- derived values


def test_derived_values():
    got = MockEngineArgs()
    assert got.aic_gpus_per_worker() == 1
    assert MockEngineArgs(aic_tp_size=4, aic_attention_dp_size=2).aic_gpus_per_worker() == 8
    assert MockEngineArgs(aic_tp_size=0).aic_gpus_per_worker() == 0
    assert got.effective_handoff_capacity() == 256
    assert MockEngineArgs(max_num_seqs=None, num_gpu_blocks=7).effective_handoff_capacity() == 7
    assert [MockEngineArgs(worker_type=w).needs_kv_publisher() for w in CHOICES["worker_type"][0]] == [
        True,
        True,
        False,
    ]
    assert not MockEngineArgs(enable_prefix_caching=False).needs_kv_publisher()
    assert [MockEngineArgs(e).scheduling_policy() for e in CHOICES["engine_type"][0]] == [
        "vllm",
        "vllm",
        "trtllm_guaranteed_no_evict",
    ]
    flags = [
        (a.is_prefill(), a.is_decode()) for w in CHOICES["worker_type"][0] for a in [MockEngineArgs(worker_type=w)]
    ]
    assert flags == [(False, False), (True, False), (False, True)]


# --- requests


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
