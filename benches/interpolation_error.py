"""How near `AicTiming(config, interpolate=True)` is to direct calls of the package: a Markdown table.

usage: python benches/interpolation_error.py [POINTS]

At random questions (default 2000 of each kind), batch and lengths spread evenly over their logarithms: 1 to 256
requests of 256 to 65,536 tokens; 1 to 8 prompts of 64 to 8,192 new tokens, half of them after up to 65,536 cached ones.
"""
from __future__ import annotations

import sys

import numpy as np

from mocker.aic import AicPerfConfig, AicTiming

PAIRS = (("vllm", "h200_sxm", "Qwen/Qwen3-32B", 2), ("vllm", "a100_sxm", "meta-llama/Meta-Llama-3.1-8B", 1),
         ("vllm", "l40s", "Qwen/Qwen3-8B", 1), ("sglang", "b200_sxm", "Qwen/Qwen3-30B-A3B", 1),
         ("trtllm", "h100_sxm", "meta-llama/Meta-Llama-3.1-70B", 4), ("vllm", "h200_sxm", "openai/gpt-oss-120b", 1),
         ("vllm", "b200_sxm", "Qwen/Qwen3.5-27B", 1), ("vllm", "b200_sxm", "deepseek-ai/DeepSeek-R1", 8),
         ("sglang", "b200_sxm", "deepseek-ai/DeepSeek-V3.2", 8), ("vllm", "b200_sxm", "zai-org/GLM-5-FP8", 8))


def shown(near: list[float], wanted: list[float]) -> str:
    errors = 100 * np.abs(np.array(near) / np.array(wanted) - 1)
    return f"{errors.mean():.3f} / {np.percentile(errors, 99):.2f} / {errors.max():.1f}"


def main() -> None:
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print("| model | engine, system | GPUs | decode | prefill |\n|---|---|---|---|---|")
    for backend, system, model, tp in PAIRS:
        rng = np.random.default_rng(11)

        def spread(low: int, high: int, rng: np.random.Generator = rng) -> list[int]:
            return np.exp(rng.uniform(np.log(low), np.log(high + 1), points)).astype(int).tolist()

        decodes = list(zip(spread(1, 256), spread(256, 65536), strict=True))
        cached = (np.array(spread(1, 65536)) * rng.integers(0, 2, points)).tolist()
        prompts = list(zip(spread(1, 8), spread(64, 8192), cached, strict=True))
        config = AicPerfConfig(backend, system, model, tp)
        exact, near = AicTiming(config), AicTiming(config, interpolate=True)
        decode = shown([near.decode_ms(b, 0, c) for b, c in decodes], [exact.decode_ms(b, 0, c) for b, c in decodes])
        prefill = shown([near.prefill_ms(*p) for p in prompts], [exact.prefill_ms(*p) for p in prompts])
        print(f"| {model} | {backend}, {system} | {tp} | {decode} | {prefill} |", flush=True)


if __name__ == "__main__":
    main()
