"""How far the roofline model is from measured kernels, for every model and system that both know.

usage: python benches/roofline_error.py [MODEL ...]

Needs the extra `aic`. For each pair the smallest tensor-parallel size of 1, 2, 4, 8 whose weights fit; vLLM kernels.
Prints a table of median relative errors in percent, decode / prefill, over batches of 1, 8 and 64 at lengths of 512,
4096 and 32768, and prompts of 512, 2048 and 8192 tokens after 0 and 8192 cached ones; "-": no measured data.
"""
from __future__ import annotations

import statistics
import sys

from mocker.aic import AicPerfConfig, AicTiming, aic_models, aic_systems, model_config_file
from mocker.roofline import GPUS, RooflineTiming, read_config


def errors(roofline: RooflineTiming, measured: AicTiming) -> tuple[list[float], list[float]]:
    decode = [roofline.decode_ms(b, 0, c) / measured.decode_ms(b, 0, c) - 1.0
              for b in (1, 8, 64) for c in (512, 4096, 32768)]
    prefill = [roofline.prefill_ms(1, n, p) / measured.prefill_ms(1, n, p) - 1.0
               for n in (512, 2048, 8192) for p in (0, 8192)]
    return decode, prefill


def pair(model: str, system: str) -> tuple[list[float], list[float]] | None:
    """Errors of one pair, or None where there are no data."""
    shape = read_config(model_config_file(model), model)
    for tp in (1, 2, 4, 8):
        if shape.weight_bytes() / tp < 0.8e9 * GPUS[system].memory_gb or tp == 8:
            try:
                measured = AicTiming(AicPerfConfig("vllm", system, model, tp))
                kv = "fp8" if "fp8" in str(measured.config.aic_kv_cache_dtype) else None
                return errors(RooflineTiming(shape, system, tp, kv=kv), measured)
            except Exception:  # the package has no data for this shape, or says so in one of many ways
                continue
    return None


def main() -> None:
    systems = [name for name, backends in aic_systems().items() if name in GPUS and "vllm" in backends]
    everything: dict[str, list[float]] = {"decode": [], "prefill": []}
    print(f"| model | {' | '.join(systems)} |\n|{'---|' * (len(systems) + 1)}")
    for model in sys.argv[1:] or aic_models():
        cells = []
        for system in systems:
            try:
                found = pair(model, system)
            except (ValueError, OSError):
                found = None
            if found is None:
                cells.append("-")
                continue
            medians = [100 * statistics.median(map(abs, part)) for part in found]
            everything["decode"] += found[0]
            everything["prefill"] += found[1]
            cells.append(" / ".join(f"{x:.0f}" for x in medians))
        if set(cells) != {"-"}:
            print(f"| {model} | {' | '.join(cells)} |", flush=True)
    for name, values in everything.items():
        if values:
            spread = sorted(map(abs, values))
            print(f"{name}: {len(values)} points, median error {100 * statistics.median(spread):.0f} %, 90 % of them "
                  f"below {100 * spread[int(0.9 * len(spread))]:.0f} %, median bias "
                  f"{100 * statistics.median(values):+.0f} %")


if __name__ == "__main__":
    main()
