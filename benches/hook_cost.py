"""What functions of your own cost: replays of the conversation trace relative to a built-in choice, in turns.

    python benches/hook_cost.py
"""
import time

import numba

import mocker
from mocker.hooks import RoutingScore
from mocker.timing import FormulaTiming, FunctionTiming

SIGNATURE = "float64(int64, int64, int64, int64, int64)"


def requests(worker, prompt, cached, requests, tokens):
    return float(requests)


def newest(prompt, generated, limit, preemptions, blocks):
    return 0.0


def prefill(batch, tokens, prefix):
    return 16.5 + 0.0152 * (batch * tokens)


def decode(batch, kv_tokens, context):
    return 6.5 + 0.05 * batch + 2e-5 * (batch * context)


def main():
    trace = mocker.Trace.load(mocker.sample_trace_path())
    compiled = numba.cfunc(SIGNATURE)
    tight = {"num_gpu_blocks": 4096, "block_size": 64}
    formula = FormulaTiming((16.5, 0.0152, 0.0, 0.0), (6.5, 0.05, 0.0, 0.0, 2e-5))
    clock = numba.cfunc("float64(int64, int64, int64)")
    times_of = FunctionTiming(clock(prefill), clock(decode))
    cases = {
        "time by length": {"extra_engine_args": mocker.MockEngineArgs(timing_model=formula)},
        "as a cfunc  ": {"extra_engine_args": mocker.MockEngineArgs(timing_model=times_of)},
        "least requests": {"router_mode": mocker.router.LeastLoaded("requests")},
        "as a cfunc": {"router_mode": RoutingScore(compiled(requests))},
        "as a Python function": {"router_mode": RoutingScore(requests)},
        "newest first": {"extra_engine_args": mocker.MockEngineArgs(**tight)},
        "as a cfunc ": {"extra_engine_args": mocker.MockEngineArgs(**tight, victim_score=compiled(newest))},
        "as a Python function ": {"extra_engine_args": mocker.MockEngineArgs(**tight, victim_score=newest)},
    }
    times = dict.fromkeys(cases, float("inf"))
    for _ in range(5):
        for name, arguments in cases.items():
            began = time.perf_counter()
            mocker.simulate(trace, num_workers=4, **arguments)
            times[name] = min(times[name], time.perf_counter() - began)
    plain = 1.0
    for name, seconds in times.items():
        if "as a" not in name:
            plain = seconds
        print(f"{name:<24} {seconds / plain:5.2f}")


if __name__ == "__main__":
    main()
