"""Copies of a warm simulation, relative to a copy of as many bytes in the same run; and what stepping costs.

    python benches/bench_live.py

A copy of resident arrays is `bytes` to `bytearray`, which is one pass over the memory into fresh pages, as an array's
`copy()` is.
"""
import time

import mocker


def best(function, repeats=7):
    """Least time of a few calls, s."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        kept = function()
        times.append(time.perf_counter() - began)
        del kept
    return min(times)


def main():
    trace = mocker.Trace.load(mocker.sample_trace_path())
    for title, arguments in [
            ("round robin", {}), ("KV router", {"router_mode": "kv_router"}),
            ("SGLang", {"extra_engine_args": mocker.MockEngineArgs(engine_type="sglang")}),
            ("SGLang, KV router", {"extra_engine_args": mocker.MockEngineArgs(engine_type="sglang"),
                                   "router_mode": "kv_router"}),
            ("KV tiers", {"extra_engine_args": mocker.MockEngineArgs(
                num_gpu_blocks=2048, block_size=64, num_g2_blocks=8192, num_g3_blocks=32768,
                kv_bytes_per_token=131072)})]:
        sim = mocker.open_simulation(trace, num_workers=4, **arguments)
        sim.run_completions(4000)
        state = sim.snapshot()
        data = state._data
        copy = best(lambda data=data: bytearray(data), 15)
        restore = best(lambda sim=sim, state=state: sim.restore(state)) / copy
        print(f"{title:<18} {state.nbytes / 1e6:6.2f} MB  copy {copy * 1e3:7.2f} ms  snapshot "
              f"{best(sim.snapshot) / copy:5.2f}  restore {restore:5.2f}  fork {best(sim.fork) / copy:5.2f}")
    whole = best(lambda: mocker.simulate(trace, num_workers=4), 3)
    pieces = best(lambda: mocker.open_simulation(trace, num_workers=4).run().result(), 3)
    print(f"open_simulation(...).run().result() / simulate(...): {pieces / whole:.2f}")


if __name__ == "__main__":
    main()
