"""What functions of your own cost: replays of the conversation trace relative to a built-in choice, in turns.

    python benches/hook_cost.py

Scores that say what the built-in choice says, so that the same replay is computed; where there is a queue, admissions
are the dearest.
"""
import time

import numba

import mocker
from mocker.hooks import AdmissionScore, RoutingScore
from mocker.timing import FormulaTiming, FunctionTiming

FIVE = "float64(int64, int64, int64, int64, int64)"
NINE = "float64(int64, int64, int64, int64, int64, int64, int64, int64, int64)"


def requests(worker, prompt, cached, requests, tokens):
    return float(requests)


def alike(a, b, c, d, e):
    return 0.0


def in_order(request, us, prompt, cached, generated, limit, priority, running, free):
    return 0.0


def prefill(batch, tokens, prefix):
    return 16.5 + 0.0152 * (batch * tokens)


def decode(batch, kv_tokens, context):
    return 6.5 + 0.05 * batch + 2e-5 * (batch * context)


def main():
    trace = mocker.Trace.load(mocker.sample_trace_path())
    args = mocker.MockEngineArgs(num_gpu_blocks=4096, block_size=64)
    one = numba.cfunc(FIVE)(requests)
    formula = FormulaTiming((16.5, 0.0152, 0.0, 0.0), (6.5, 0.05, 0.0, 0.0, 2e-5))
    clock = numba.cfunc("float64(int64, int64, int64)")
    times_of = FunctionTiming(clock(prefill), clock(decode))
    groups = [{
        "time by length": {"extra_engine_args": mocker.MockEngineArgs(timing_model=formula)},
        "  as a cfunc": {"extra_engine_args": mocker.MockEngineArgs(timing_model=times_of)},
    }, {
        "least requests": {"router_mode": mocker.router.LeastLoaded("requests")},
        "  as a cfunc": {"router_mode": RoutingScore(one)},
        "  without cached blocks": {"router_mode": RoutingScore(one, uses_cached=False)},
        "  as a Python function": {"router_mode": RoutingScore(requests)},
    }]
    for title, name, function, signature in [
            ("newest first", "victim_score", alike, FIVE),
            ("first come, first served", "admission_score", in_order, NINE),
            ("oldest blocks first", "eviction_score", alike, FIVE)]:
        groups.append({
            title: {"extra_engine_args": args},
            "  as a cfunc": {"extra_engine_args": args.replace(**{name: numba.cfunc(signature)(function)})},
            "  as a Python function": {"extra_engine_args": args.replace(**{name: function})},
        })
    groups[-2]["  without time and cache"] = {"extra_engine_args": args.replace(admission_score=AdmissionScore(
        numba.cfunc(NINE)(in_order), uses_time=False, uses_cached=False))}
    for cases in groups:
        times = dict.fromkeys(cases, float("inf"))
        for _ in range(5):
            for name, arguments in cases.items():
                began = time.perf_counter()
                mocker.simulate(trace, num_workers=4, **arguments)
                times[name] = min(times[name], time.perf_counter() - began)
        plain = next(iter(times.values()))
        for name, seconds in times.items():
            print(f"{name:<26} {seconds / plain:5.2f}")


if __name__ == "__main__":
    main()
