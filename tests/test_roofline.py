"""The roofline: weights and KV state of every kind of model, limits where one resource decides, bad configurations."""
from __future__ import annotations

import json
import pickle

import pytest

from mocker import MockEngineArgs, SyntheticSpec, simulate
from mocker.profiles import model_profile
from mocker.roofline import GPUS, Gpu, RooflineTiming, read_config

DENSE = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
SPARSE = {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
          "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
          "num_experts_per_tok": 8, "vocab_size": 151936}
LATENT = {"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
          "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
          "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280, "q_lora_rank": 1536,
          "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
          "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
SLIDING = DENSE | {"sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"] * 16}


@pytest.mark.parametrize(("config", "gigabytes", "kv_bytes"), [
    (DENSE, 16.06, 4096),                      # Llama 3.1 8B: 8.03e9 parameters, 128 KiB a token in 32 layers
    (SPARSE, 61.0, 2048),                      # Qwen3 30B-A3B: 30.5e9
    (LATENT, 672.8, 1152),                     # DeepSeek V3: 671e9, most in one byte
    (DENSE | {"quantization_config": {"quant_method": "awq", "bits": 4}}, 5.81, 4096),
    ({"text_config": SPARSE, "torch_dtype": "bfloat16"}, 61.0, 2048),
])
def test_sizes(config, gigabytes, kv_bytes):
    shape = read_config(config)
    assert shape.weight_bytes() / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert shape.kv_bytes() == kv_bytes


def test_who_decides():
    """Small batches wait for the weights, large ones for arithmetic, long contexts for the KV state."""
    gpu = GPUS["h100_sxm"]
    model = RooflineTiming(DENSE, gpu)
    read = 1e3 * (model.model.weight_bytes() - 4096 * 128256 * 2) / (gpu.bandwidth_gbs * 1e9 * 0.8)
    assert read < model.decode_ms(1, 0, 1) < 1.2 * read
    compute = 1e3 * 2 * 6.98e9 * 2048 / (gpu.tflops * 1e12 * 0.7)
    assert compute < model.prefill_ms(1, 2048) < 1.3 * compute
    longer = model.decode_ms(32, 0, 32768) - model.decode_ms(32, 0, 16384)
    assert longer == pytest.approx(1e3 * 32 * 16384 * 4096 * 32 / (gpu.bandwidth_gbs * 1e9 * 0.8), rel=1e-6)
    slid = RooflineTiming(SLIDING, gpu)
    assert slid.decode_ms(32, 0, 32768) - slid.decode_ms(32, 0, 16384) == pytest.approx(longer / 2, rel=1e-6)
    assert RooflineTiming(DENSE, gpu, kv="fp8").decode_ms(32, 0, 32768) < model.decode_ms(32, 0, 32768)
    fast = Gpu(80, 2 * gpu.bandwidth_gbs, 2 * gpu.tflops, 0, 0, 450)
    assert 0.5 <= RooflineTiming(DENSE, fast).decode_ms(64, 0, 4096) / model.decode_ms(64, 0, 4096) < 0.65
    shared = RooflineTiming(DENSE, gpu, 4)
    assert model.decode_ms(64, 0, 4096) / 4 < shared.decode_ms(64, 0, 4096) < model.decode_ms(64, 0, 4096) / 2
    sparse = RooflineTiming(SPARSE, gpu)
    assert sparse.decode_ms(1, 0, 100) < 0.35 * sparse.decode_ms(64, 0, 100)       # more experts are read
    latent = RooflineTiming(LATENT, "h200_sxm", 8)
    assert latent.decode_ms(64, 0, 8192) > latent.decode_ms(64, 0, 4096) > 1.0


def test_blocks_and_replay(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    profile = model_profile(MockEngineArgs(), str(tmp_path), "l40s", 1, "roofline")
    free = 48e9 * 0.9 - 4e9 - profile.args.timing_model.model.weight_bytes()
    assert profile.args.num_gpu_blocks == int(free / (4096 * 32 * 64))
    assert "roofline" in profile.assumptions[1]
    spec = SyntheticSpec(500, 40, 20, arrival_interval_ms=5.0)
    one, two = (simulate(spec, extra_engine_args=args)
                for args in (profile.args, pickle.loads(pickle.dumps(profile.args))))
    assert one.per_request["last_token_ms"].tolist() == two.per_request["last_token_ms"].tolist()
    with pytest.raises(ValueError, match=r"16 GB of weights leaves no KV memory on 1 GPUs of 24 GB; use more"):
        RooflineTiming(DENSE, "l4").kv_blocks(64, 0.8)


@pytest.mark.parametrize(("change", "message"), [
    ({"hidden_size": None}, "hidden_size or n_embd or d_model is missing"),
    ({"num_hidden_layers": "32"}, "num_hidden_layers must be a whole number, got '32'"),
    ({"num_attention_heads": 0}, "must be above 0"),
    ({"vocab_size": -1}, "vocab_size must be a whole number"),
    ({"num_experts": 8}, "num_experts_per_tok"),
    ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern: layers with a state space"),
])
def test_bad_configurations(change, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DENSE | change))
    with pytest.raises(ValueError, match=message) as caught:
        read_config(tmp_path)
    assert "config.json" in str(caught.value)


def test_bad_arguments(tmp_path):
    for given, message in [(("h1000",), "GPU 'h1000' is unknown; known: a100_pcie"), (("l4", 0), "tp must be")]:
        with pytest.raises(ValueError, match=message):
            RooflineTiming(DENSE, *given)
    with pytest.raises(ValueError, match="kv must be one of"):
        RooflineTiming(DENSE, "l4", kv="fp7")
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match=r"config.json: not a JSON file"):
        read_config(tmp_path)
    with pytest.raises(ValueError, match="there is no configuration of the model 'nobody/nothing'"):
        model_profile(MockEngineArgs(), "nobody/nothing", "l4", 1, "roofline")
