"""Arguments: signature, defaults, ranges, rules between fields, derived values, error texts."""

from __future__ import annotations

import inspect
import json
import math
import pathlib
import random
from decimal import Decimal
from fractions import Fraction

import numpy as np
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
    SETTABLE,
    TEXTS,
    U64,
    build,
    refused,
)
from hypothesis import given
from hypothesis import strategies as st

from mocker.args import FIELDS, MockEngineArgs, SglangArgs

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
