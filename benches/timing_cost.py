"""What a timing model costs: replays of the shipped trace with each kind, in turns, against the polynomial.

usage: python benches/timing_cost.py [ROUNDS]

Best CPU time of ROUNDS (default 7). Passes differ in number where times differ, so that the models here are the
polynomial itself, its parts as a grid, and one that depends on the lengths of the requests; and, with the extra `aic`,
measured kernels.
"""
from __future__ import annotations

import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numba
import numpy as np

from mocker import MockEngineArgs, Trace, sample_trace_path, simulate
from mocker.aic import AicPerfConfig, AicTiming, _engine
from mocker.timing import FormulaTiming, FunctionTiming, GridTiming

POOL = 16384 * 64


def prefill(batch, tokens, prefix):
    t = 1.0 * batch * tokens
    return 4.209989e-07 * (t * t) + 1.518344e-02 * t + 1.650142e01


def decode(batch, kv_tokens, context):
    share = kv_tokens / POOL
    return -25.74 * (share * share) + 54.01 * share + 5.74


def decode_context(batch, kv_tokens, context):
    return 6.5 + 0.05 * batch + 2e-5 * (batch * context)


def models() -> dict:
    cfunc = numba.cfunc("float64(int64, int64, int64)")
    isl, kv = np.linspace(1, 150_000, 1000), np.linspace(0, POOL, 100)
    grid = GridTiming(isl, prefill(1, isl, 0), kv, [0.0, 150_000.0], np.stack([decode(1, kv, 0)] * 2, 1))
    formula = FormulaTiming((1.650142e01, 1.518344e-02, 4.209989e-07, 0.0), (6.5, 0.05, 0.0, 0.0, 2e-5))
    measured = {}
    if find_spec("aiconfigurator_core") is not None:
        config = AicPerfConfig("vllm", "h200_sxm", "Qwen/Qwen3-32B", 2)
        measured = {"measured, Qwen3-32B on 2 H200": AicTiming(config)}
        _engine.cache_clear()              # the package remembers some answers itself: to each its own engine
        measured["measured, interpolated"] = AicTiming(config, interpolate=True)
    return {
        "polynomial": None,
        "polynomial as cfuncs, uses_context=False": FunctionTiming(cfunc(prefill), cfunc(decode), uses_context=False),
        "polynomial as cfuncs": FunctionTiming(cfunc(prefill), cfunc(decode)),
        "polynomial in Python, uses_context=False": FunctionTiming(prefill, decode, uses_context=False),
        "polynomial in Python": FunctionTiming(prefill, decode),
        "polynomial as a grid": grid,
        "by length, formula": formula,
        "by length, cfuncs": FunctionTiming(cfunc(prefill), cfunc(decode_context)),
        "by length, Python, uses_kv_tokens=False": FunctionTiming(prefill, decode_context, uses_kv_tokens=False),
        "by length, vectorized, uses_kv_tokens=False": FunctionTiming(
            lambda b, t, p: prefill(b, t.astype(float), p), decode_context, vectorized=True, uses_kv_tokens=False),
        **measured,
    }


def again(model: AicTiming) -> AicTiming:
    """The model as a later process finds it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_memo(Path(folder) / "memo.npz")
        later = AicTiming(model.config, model.interpolate)
        later.load_memo(Path(folder) / "memo.npz")
    return later


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    trace = Trace.load(sample_trace_path())
    first: dict[str, float] = {}
    best: dict[str, float] = {}
    cases = models()
    for turn in range(rounds + 1):
        names = list(cases)
        for name in names:
            model = cases[name]
            args = MockEngineArgs(timing_model=model)
            began = time.process_time()
            simulate(trace, extra_engine_args=args, num_workers=4)
            took = time.process_time() - began
            if turn == 0 and isinstance(model, AicTiming) and "disk" not in name:
                names.append(f"{name}, remembered on disk")
                cases[names[-1]] = again(model)
            if turn == 0:
                first[name] = took
            else:
                best[name] = min(best.get(name, took), took)
    print("| model | first replay | further replays |\n|---|---|---|")
    for name in cases:
        print(f"| {name} | {first[name] / best['polynomial']:.1f} | {best[name] / best['polynomial']:.2f} |")


if __name__ == "__main__":
    main()
