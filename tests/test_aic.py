"""Measured GPU data: the package's own answers, blocks from the GPUs' memory, unknown names, and the roofline."""
from __future__ import annotations

import json
import pickle
import sys

import numpy as np
import pytest

import mocker
from mocker import MockEngineArgs, simulate
from mocker._models import MemoModel
from mocker.timing import FormulaTiming, FunctionTiming, TimingModel, with_blocks

if sys.version_info < (3, 11):
    pytest.skip("aiconfigurator-core needs Python 3.11", allow_module_level=True)
sdk = pytest.importorskip("aiconfigurator_core.sdk.engine", reason="the extra aic is not installed")

from mocker.aic import (  # noqa: E402
    AicPerfConfig,
    AicTiming,
    aic_models,
    aic_support,
    aic_systems,
    aic_timing,
    estimate_kv,
    model_config_file,
)
from mocker.profiles import model_profile  # noqa: E402

SPEC = mocker.SyntheticSpec(700, 50, 30, arrival_interval_ms=40.0)
QWEN = {"aic_backend": "vllm", "aic_system": "h200_sxm", "aic_model_path": "Qwen/Qwen3-32B", "aic_tp_size": 2}
EXPERTS = {"aic_backend": "vllm", "aic_system": "h200_sxm", "aic_model_path": "deepseek-ai/DeepSeek-V3",
           "aic_tp_size": 2, "aic_attention_dp_size": 4, "aic_moe_ep_size": 8, "aic_moe_tp_size": 1,
           "aic_kv_cache_dtype": "bfloat16", "aic_nextn": 2}


@pytest.fixture(scope="module")
def engines():
    """The package's own engines, made without ours."""
    return {
        "qwen": sdk.EngineHandle.compile("Qwen/Qwen3-32B", "h200_sxm", "vllm", tp_size=2),
        "experts": sdk.EngineHandle.compile(
            "deepseek-ai/DeepSeek-V3", "h200_sxm", "vllm", tp_size=2, attention_dp_size=4, moe_ep_size=8,
            moe_tp_size=1, kvcache_quant_mode="bfloat16", nextn=2)}


@pytest.mark.parametrize(("name", "values", "engine"), [
    ("qwen", QWEN, {}), ("qwen", QWEN, {"engine_type": "sglang"}), ("experts", EXPERTS, {})])
def test_replay_is_that_of_direct_calls(name, values, engine, engines):
    direct = engines[name]
    ranks = values.get("aic_attention_dp_size", 1)

    def busiest(batch):
        return -(-batch // ranks)

    own = FunctionTiming(lambda b, n, p: direct.predict_prefill_latency(busiest(b), n + p, p),
                         lambda b, _, c: direct.predict_decode_latency(busiest(b), c, 2), uses_kv_tokens=False)
    measured = simulate(SPEC, extra_engine_args=MockEngineArgs(num_gpu_blocks=9000, **values, **engine))
    plain = {key: value for key, value in values.items() if key == "aic_nextn"}
    wanted = simulate(SPEC, extra_engine_args=MockEngineArgs(num_gpu_blocks=9000, timing_model=own, **plain, **engine))
    for column in wanted.per_request:
        np.testing.assert_array_equal(measured.per_request[column], wanted.per_request[column], err_msg=column)
    assert measured.report["decode_gpus_per_worker"] == values["aic_tp_size"] * ranks


def test_remembered_answers_are_the_package_s(engines, tmp_path):
    config = AicPerfConfig(**QWEN)
    model = AicTiming(config)
    simulate(SPEC, extra_engine_args=MockEngineArgs(num_gpu_blocks=9000, timing_model=model))
    (keys, times), (more_keys, more_times) = (table.export() for table in model.core.tables)
    assert len(times) + len(more_times) == model.core.calls > 30
    assert times.tolist() == [engines["qwen"].predict_prefill_latency(b, n + p, p) for b, p, n in keys.tolist()]
    assert more_times.tolist() == [engines["qwen"].predict_decode_latency(b, c, 2) for b, _, c in more_keys.tolist()]
    model.save_memo(tmp_path / "memo.npz")
    again = AicTiming(config)
    again.load_memo(tmp_path / "memo.npz")
    simulate(SPEC, extra_engine_args=MockEngineArgs(num_gpu_blocks=9000, timing_model=again))
    assert again.core.calls == 0
    with pytest.raises(ValueError, match=r"memo.npz: not a memo of this timing model: it is of .*tp_size=2.*delete it"):
        AicTiming(AicPerfConfig(**QWEN | {"aic_tp_size": 4})).load_memo(tmp_path / "memo.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"bad.npz: not a memo"):
        again.load_memo(tmp_path / "bad.npz")
    assert pickle.loads(pickle.dumps(model)).decode_ms(8, 0, 999) == model.decode_ms(8, 0, 999)


def test_interpolated_within_its_error(engines, tmp_path):
    near = AicTiming(AicPerfConfig(**QWEN), interpolate=True)
    direct, rng = engines["qwen"], np.random.default_rng(7)
    decodes = np.stack([rng.integers(1, 200, 600), np.exp(rng.uniform(3, 11, 600)).astype(int)], 1).tolist()
    wanted = np.array([direct.predict_decode_latency(b, c, 2) for b, c in decodes])
    errors = np.array([near.decode_ms(b, 0, c) for b, c in decodes]) / wanted - 1.0
    assert 0 < np.abs(errors).max() < 0.02 and np.abs(errors).mean() < 0.001
    prompts = np.stack([rng.integers(1, 6, 300), rng.integers(1, 8192, 300), rng.integers(0, 30_000, 300)], 1).tolist()
    wanted = np.array([direct.predict_prefill_latency(b, n + p, p) for b, n, p in prompts])
    errors = np.array([near.prefill_ms(*prompt) for prompt in prompts]) / wanted - 1.0
    assert 0 < np.abs(errors).max() < 0.01 and np.abs(errors).mean() < 0.0005
    for batch, length in ((1, 512), (48, 4096), (64, 1 << 15)):     # points of the lattice: nothing is interpolated
        assert near.decode_ms(batch, 0, length) == pytest.approx(direct.predict_decode_latency(batch, length, 2), 1e-12)
        assert near.prefill_ms(batch, length, 0) == pytest.approx(direct.predict_prefill_latency(batch, length), 1e-12)
    assert near.core.calls < 4500
    near.save_memo(tmp_path / "memo.npz")
    again = AicTiming(AicPerfConfig(**QWEN), interpolate=True)
    again.load_memo(tmp_path / "memo.npz")
    assert [again.decode_ms(b, 0, c) for b, c in decodes] == [near.decode_ms(b, 0, c) for b, c in decodes]
    assert again.core.calls == 0
    with pytest.raises(ValueError, match="not a memo of this timing model"):
        AicTiming(AicPerfConfig(**QWEN)).load_memo(tmp_path / "memo.npz")


def test_interpolated_prompts_of_either_form(engines):
    """Sparse attention is not linear in the square of the length; drafts widen the batch."""
    for config, engine in ((AicPerfConfig(**EXPERTS), engines["experts"]),
                           (AicPerfConfig("sglang", "b200_sxm", "deepseek-ai/DeepSeek-V3.2", 8), None)):
        near = AicTiming(config, interpolate=True)
        engine = engine or AicTiming(config).core
        rng = np.random.default_rng(3)
        for batch, tokens, prefix in rng.integers((1, 300, 0), (4, 5000, 30_000), (60, 3)).tolist():
            wanted = (engine.predict_prefill_latency(batch, tokens + prefix, prefix) if config.ranks > 1
                      else engine.prefill_ms(batch, tokens, prefix))
            assert near.core.prefill_ms(batch * config.ranks, tokens, prefix) == pytest.approx(wanted, 0.05)
        for batch, context in rng.integers((1, 300), (60, 30_000), (60, 2)).tolist():
            wanted = (engine.predict_decode_latency(batch, context, 2) if config.ranks > 1
                      else engine.decode_ms(batch, 0, context))
            assert near.core.decode_ms(batch * config.ranks, 0, context) == pytest.approx(wanted, 0.1)
    assert near.core.tables["prefill_attention"].shape[2] > 2


def test_mixed_steps_are_the_package_s(engines):
    from mocker.aic_parts import EngineParts

    direct = engines["qwen"]
    parts = EngineParts(lambda: direct, 0, lambda error: ValueError(str(error)))
    near = AicTiming(AicPerfConfig(**QWEN), interpolate=True, mixed=True)
    assert near.core.mixes and not AicTiming(AicPerfConfig(**QWEN)).core.mixes
    for b, n, p, g, c in np.random.default_rng(5).integers((1, 10, 0, 1, 100), (4, 3000, 5000, 60, 9000),
                                                           (60, 5)).tolist():
        same = parts.mixed(b, n, p, g, n + p)                   # one length for both, as the package's own sum has
        assert same == pytest.approx(direct.mixed_step_latency(b * (n + p), g, n + p, 1, p), 1e-12)
        other = parts.mixed(b, n, p, g, c)                      # another one changes no more than attention of decode
        assert other - same == pytest.approx(
            direct.predict_decode_latency(g, c, 2) - direct.predict_decode_latency(g, n + p, 2), 1e-6, 1e-9)
        assert near.core.mixed_ms(b, n, p, g, c) == pytest.approx(other, 0.01)
    assert pickle.loads(pickle.dumps(near)).core.mixes
    for change in ({"engine_type": "sglang"}, {"scheduler_rules": "vllm-0.33-async"}):
        with pytest.raises(ValueError, match="cannot use times of mixed steps; take a timing model without mixed=True"):
            simulate(SPEC, extra_engine_args=MockEngineArgs(timing_model=near, **change))
    with pytest.raises(ValueError, match="mixed steps need measured times"):
        model_profile(MockEngineArgs(), "Qwen/Qwen3-32B", "h200_sxm", 2, "roofline", True)
    profile = model_profile(MockEngineArgs(), "Qwen/Qwen3-32B", "h200_sxm", 2, "interpolated", True)
    assert "interpolated, mixed steps; data types" in profile.assumptions[1]
    assert simulate(SPEC, extra_engine_args=profile.args).report["completed_requests"] == 30


@pytest.mark.parametrize("chunked", [True, False])
def test_a_mixed_pass_takes_its_time(chunked):
    """Beside prompts, requests that have a token already; the first token of a prompt comes with it."""
    asked = []

    def mixed(*question):
        asked.append(question)
        return 100.0 + question[3]

    class Both(TimingModel):
        core = MemoModel(lambda b, n, p: 30.0, lambda b, k, c: 7.0, True, True, 0, mixed)

    engine = mocker.create_engine_core(MockEngineArgs(
        num_gpu_blocks=100, block_size=16, enable_prefix_caching=False, enable_chunked_prefill=chunked,
        max_num_batched_tokens=64, timing_model=Both()))
    engine.receive(mocker.DirectRequest(list(range(40)), 6))
    ends, now = [], 0.0
    for step in range(4):
        if step == 1:
            engine.receive(mocker.DirectRequest(list(range(100, 150)), 3))
            engine.receive(mocker.DirectRequest(list(range(200, 230)), 3))
        end = engine.execute_pass(now).end_ms
        ends.append(end - now)
        now = end
    assert ends[0] == 30.0                                      # a prompt alone
    assert asked[0][:4] == ((2, 31, 0, 1) if chunked else (1, 50, 0, 1)) and asked[0][4] == 41
    assert ends[1] == 101.0
    assert asked[1][3] == 2 and ends[2] == 102.0                # the rest of the prompts
    assert len(asked) == 2 and ends[3] == 7.0


class Planes:
    """A source without a package: what is linear in each number, and no data beyond a length."""

    def decode_rest(self, batch):
        return 3.0 * batch

    def decode_attention(self, batch, context):
        if context > 4096:
            raise LookupError("no data")
        return 0.25 * batch * context

    def decode(self, batch, context):
        if context > 9000:
            raise RuntimeError("nothing at all")
        return 7.0

    def prefill_rest(self, tokens):
        return 1.0 + 2.0 * tokens

    def prefill_logits(self, batch):
        return 0.0

    def prefill_attention(self, batch, tokens, prefix):
        return 1e-3 * batch * tokens * (prefix + 1)

    def prefill(self, batch, tokens, prefix):
        raise AssertionError("the lattice has it")

    def mixed(self, batch, tokens, prefix, decodes, context):
        return 11.0


def test_lattice_is_exact_on_planes():
    from mocker._lattice import LatticeModel, axis_cells

    assert LatticeModel(Planes(), False, True).mixed_ms(3, 20, 5, 4, 100) == 11.0
    model = LatticeModel(Planes(), False, True, 2)
    assert model.mixed_ms(3, 20, 5, 4, 100) == pytest.approx(1 + 2 * (60 + 4 * 2) + 1e-3 * 60 * 6 + 0.25 * 400, 1e-12)
    assert model.mixed_ms(3, 20, 5, 4, 5000) == 11.0               # no data there
    model = LatticeModel(Planes(), False)
    for b, n, p in np.random.default_rng(1).integers((1, 1, 0), (300, 4096, 10_000), (2000, 3)).tolist():
        assert model.decode_ms(b, 0, n) == pytest.approx(max(3.0 * b + 0.25 * b * n, 1.0), 1e-12)
        assert model.prefill_ms(b, n, p) == pytest.approx(1 + 2 * b * n + 1e-3 * b * n * (p + 1), 1e-12)
    assert model.decode_ms(5, 0, 5000) == 7.0                       # the question itself, where a point has no data
    with pytest.raises(RuntimeError, match="nothing at all"):
        model.decode_ms(5, 0, 9001)
    assert model.decode_ms(5, 0, 5000) == 7.0
    values = np.concatenate([np.arange(1, 3000), np.random.default_rng(2).integers(1, 1 << 29, 500)])
    for axis in ("even", "length", "row"):
        for value, (_, low, step, here, beyond) in zip(values.tolist(), axis_cells(axis, values), strict=True):
            assert here == low and (low == value or (low < value < low + step and beyond == low + step)), (axis, value)


def test_memo_of_the_user(monkeypatch, tmp_path, caplog):
    from mocker import aic_memo

    monkeypatch.setenv("MOCKER_AIC_MEMO", str(tmp_path / "memos"))
    assert aic_memo.memo_folder() == str(tmp_path / "memos")
    model, again = AicTiming(AicPerfConfig(**QWEN)), AicTiming(AicPerfConfig(**QWEN))
    written = []                                                    # what is called at the end of the process
    monkeypatch.setattr(aic_memo.atexit, "register", written.append)
    assert not aic_memo.keep(model, "about")
    wanted = model.decode_ms(3, 0, 777)
    written[0]()
    assert aic_memo.keep(again, "about")
    assert (again.decode_ms(3, 0, 777), again.core.calls) == (wanted, 0)
    again.decode_ms(4, 0, 777)
    model.decode_ms(5, 0, 777)
    for end in written:                                             # both write: nothing is lost
        end()
    path, = (tmp_path / "memos").iterdir()
    third = AicTiming(AicPerfConfig(**QWEN))
    aic_memo.read(path, "about", third.core)
    assert len(third.core.tables[1]) == 3
    path.write_bytes(b"PK")
    aic_memo.keep(third, "about")
    assert "asked again" in caplog.text and not path.exists()
    first = aic_timing(AicPerfConfig(**QWEN, aic_nextn=4))
    wanted = first.prefill_ms(1, 100, 7)
    written[-1]()
    monkeypatch.setattr("mocker.aic._timings", {})
    monkeypatch.setattr("mocker.aic._engine", lambda config: pytest.fail("a later process opens the package"))
    assert aic_timing(AicPerfConfig(**QWEN, aic_nextn=4)).prefill_ms(1, 100, 7) == wanted
    monkeypatch.setenv("MOCKER_AIC_MEMO", "off")
    assert aic_memo.memo_folder() is None
    monkeypatch.delenv("MOCKER_AIC_MEMO")
    assert aic_memo.memo_folder().endswith("aic")


def test_blocks_from_memory():
    from aiconfigurator_core.sdk.memory import estimate_num_gpu_blocks

    args = MockEngineArgs(**QWEN)
    version = aic_systems()["h200_sxm"]["vllm"][0]
    kv = estimate_kv(args)
    taken = kv.kv_bytes + kv.weight_bytes + kv.other_bytes
    assert taken == pytest.approx(0.9 * kv.capacity_bytes, 0.02) and kv.weight_bytes > 3e10
    blocks = estimate_num_gpu_blocks(
        "Qwen/Qwen3-32B", "h200_sxm", "vllm", version, scheduler_block_size=64, max_num_tokens=8192, max_batch_size=1,
        memory_fraction_kind="of_total", memory_fraction_value=0.9, tp_size=2)
    assert args.num_gpu_blocks == 16384            # as the reference shows it
    assert mocker.create_engine_core(args).args.num_gpu_blocks == with_blocks(args).num_gpu_blocks == blocks
    assert with_blocks(args.replace(gpu_memory_utilization=0.5)).num_gpu_blocks < blocks
    assert with_blocks(MockEngineArgs.from_json(args.to_json())).num_gpu_blocks == blocks
    assert with_blocks(args.replace(num_gpu_blocks=100)).num_gpu_blocks == 100
    assert json.loads(MockEngineArgs().to_json())["num_gpu_blocks"] == 16384
    experts = MockEngineArgs(engine_type="sglang", block_size=16, **EXPERTS)
    assert with_blocks(experts).num_gpu_blocks == estimate_kv(experts).tokens // 16 * 4
    with pytest.raises(ValueError, match=r"Qwen3-32B.*cannot be estimated|leaves no memory"):
        simulate(SPEC, extra_engine_args=args.replace(aic_tp_size=1, gpu_memory_utilization=0.2))


@pytest.mark.parametrize(("change", "message"), [
    ({"aic_system": "h200"}, "aic_system 'h200' is unknown; nearest: h200_sxm"),
    ({"aic_system": "l4"}, "aic_system 'l4' is unknown; nearest: l40s"),
    ({"aic_model_path": "qwen3-32"}, "aic_model_path 'qwen3-32' is unknown; nearest: Qwen/Qwen3-32B,"),
    ({"aic_model_path": "llama 70b"}, "nearest: meta-llama/Meta-Llama-3.1-70B"),
    ({"aic_model_path": None}, "aic_model_path is needed with aic_backend"),
    ({"aic_backend": "tgi"}, "aic_backend must be one of vllm, sglang, trtllm, got 'tgi'"),
    ({"aic_backend": "sglang", "aic_system": "b60"}, "no data of sglang on b60; there is vllm"),
    ({"aic_backend_version": "0.19.0"}, r"'0.19.0' of vllm on h200_sxm is unknown; versions: 0"),
    ({"aic_gemm_dtype": "fp7"}, "aic_gemm_dtype 'fp7' is not supported; supported: bfloat16"),
    ({"aic_tp_size": 5000}, "aic_tp_size must be an integer from 1 to 4096"),
    ({"aic_model_path": "deepseek-ai/DeepSeek-V3", "aic_moe_tp_size": 3}, r"3 \* aic_moe_ep_size 1 must equal"),
])
def test_unknown_names(change, message):
    args = MockEngineArgs(num_gpu_blocks=100, **QWEN | change)
    with pytest.raises(ValueError, match=message):
        simulate(SPEC, extra_engine_args=args)


def test_package_missing(monkeypatch):
    monkeypatch.setattr("mocker.aic.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package aiconfigurator-core: pip install 'mocker-llm\[aic\]'"):
        aic_systems()


def test_router_expects_prefill_times():
    spec = mocker.SyntheticSpec(3000, 20, 40, arrival_interval_ms=7.0)
    router = mocker.KvRouterConfig(router_prefill_load_model="aic", router_queue_threshold=0.5)
    args = MockEngineArgs(num_gpu_blocks=9000, **QWEN)
    options = {"extra_engine_args": args, "num_workers": 3, "router_mode": "kv_router", "router_tie_break": "lowest"}
    config = AicPerfConfig(**QWEN)
    by_config = simulate(spec, router_config=router, aic_perf_config=config, **options)
    by_model = simulate(spec, router_config=router, aic_perf_config=aic_timing(config), **options)
    assert by_config.per_request["decode_worker_idx"].tolist() == by_model.per_request["decode_worker_idx"].tolist()
    slow = FormulaTiming((1e6, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0, 0.0))
    other = simulate(spec, router_config=router, aic_perf_config=slow, **options)
    assert other.per_request["first_token_ms"].tolist() != by_config.per_request["first_token_ms"].tolist()
    for change, message in [
            ({"aic_perf_config": None, "router_config": router}, "requires aic_perf_config"),
            ({"router_config": mocker.KvRouterConfig()}, "requires a router_config with"),
            ({"router_config": None}, "requires a router_config with"),
            ({"router_config": router, "router_mode": "round_robin"}, "requires router_mode='kv_router'")]:
        with pytest.raises(ValueError, match=message):
            simulate(spec, **{"aic_perf_config": config} | options | change)
    with pytest.raises(TypeError, match="must be AicPerfConfig or a timing model"):
        simulate(spec, router_config=router, aic_perf_config=3, **options)


def test_profiles_say_what_they_assume(capsys, tmp_path):
    profile = model_profile(MockEngineArgs(), "Qwen/Qwen3-32B", "h200_sxm", 2)
    assert profile.args == with_blocks(MockEngineArgs(**QWEN))
    text = "\n".join(profile.assumptions)
    for word in ("Qwen/Qwen3-32B on h200_sxm, tensor parallel 2: 2 GPUs", "measured kernels of vllm", "weights 30.",
                 f"{profile.args.num_gpu_blocks:,} blocks of 64 tokens", "256 requests, 8,192 tokens"):
        assert word in text
    unmeasured = model_profile(MockEngineArgs(), "Qwen/Qwen3-32B", "mi300x", 2)
    assert "roofline" in unmeasured.assumptions[1] and "'mi300x' is unknown" in unmeasured.assumptions[2]
    with pytest.raises(ValueError, match=r"'Qwen3-33B' is unknown; nearest: Qwen/Qwen3-32B.*roofline cannot stand in"):
        model_profile(MockEngineArgs(), "Qwen3-33B", "h200_sxm")
    flags = ["--input-tokens", "200", "--output-tokens", "5", "--request-count", "4", "--no-progress",
             "--report-json", str(tmp_path / "r.json")]
    from mocker.cli import main

    assert main(["replay", *flags, "--model", "Qwen/Qwen3-32B", "--system", "h200_sxm", "--tp", "2"]) == 0
    assert "measured kernels of vllm" in capsys.readouterr().out
    assert main(["replay", *flags, "--model", "Qwen/Qwen3-32B", "--system", "h200"]) == 2
    assert "nearest: h200_sxm" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["replay", *flags, "--model", "Qwen/Qwen3-32B"])
    capsys.readouterr()
    assert main(["systems"]) == main(["models", "qwen3-3", "--system", "h200_sxm"]) == 0
    out = capsys.readouterr().out
    assert "h200_sxm" in out and "mi300x" in out and "Qwen/Qwen3-32B " in out
    assert "vllm" in aic_support("h200_sxm")["Qwen/Qwen3-32B"]


def test_roofline_near_the_measured_kernels():
    """The bounds are those of the table in docs/timing.md, rounded up."""
    from mocker.roofline import RooflineTiming, read_config

    for model, tp, bound in (("Qwen/Qwen3-32B", 2, 0.25), ("Qwen/Qwen3-235B-A22B", 8, 0.25),
                             ("deepseek-ai/DeepSeek-V3", 8, 0.6)):
        shape = read_config(model_config_file(model), model)
        near, exact = RooflineTiming(shape, "h200_sxm", tp), AicTiming(AicPerfConfig("vllm", "h200_sxm", model, tp))
        for b, c in ((1, 512), (8, 4096), (64, 4096)):
            assert abs(near.decode_ms(b, 0, c) / exact.decode_ms(b, 0, c) - 1) < bound, (model, b, c)
        for n, p in ((512, 0), (4096, 4096), (8192, 0)):
            assert abs(near.prefill_ms(1, n, p) / exact.prefill_ms(1, n, p) - 1) < bound, (model, n, p)
    assert len(aic_models()) > 50
