"""Records what the reference's engine model answers, with every step time that it used on the way.

usage: PYTHONPATH=. PYTHON tests/record_engine_perf.py     (PYTHON with ai-dynamo-runtime==1.3.0.post1 and numpy)

Writes tests/golden/engine_perf.json.gz. The step times come from the reference's regression on random steps; whoever
replays them needs neither it nor the package behind it.
"""
from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

GOLDEN = Path(__file__).parent / "golden" / "engine_perf.json.gz"


def metrics(rng: random.Random, kind: str) -> dict:
    """One rank's forward-pass metrics, with a plausible wall time."""
    work = dict.fromkeys(("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens", "num_decode_requests",
                          "sum_decode_kv_tokens"), 0)
    if kind == "prefill" or (kind == "aggregated" and rng.random() < 0.7):
        work |= {"num_prefill_requests": rng.randrange(1, 5), "sum_prefill_tokens": rng.randrange(1, 8192)}
    if kind != "prefill":
        count = rng.randrange(1, 200)
        work |= {"num_decode_requests": count, "sum_decode_kv_tokens": count * rng.randrange(10, 4000)}
    ms = (8.0 + 0.02 * work["sum_prefill_tokens"] + 0.05 * work["num_decode_requests"]
          + 2e-5 * work["sum_decode_kv_tokens"]) * rng.uniform(0.95, 1.05)
    queued = {"num_prefill_requests": rng.randrange(4), "sum_prefill_tokens": rng.choice([0, 100, 9000, 8192, 30000]),
              "num_decode_requests": 0, "sum_decode_kv_tokens": 0, "var_prefill_length": 0.0,
              "var_decode_kv_tokens": 0.0}
    return {"version": 1, "worker_id": "w", "dp_rank": 0, "counter_id": 1, "wall_time": ms / 1000.0,
            "scheduled_requests": work | {"var_prefill_length": 0.0, "var_decode_kv_tokens": 0.0},
            "queued_requests": queued}


def cases() -> Iterator[tuple[int, dict]]:
    """Seed and case: worker type, limits, observed steps, questions."""
    for seed in range(24):
        rng = random.Random(f"engine_perf/{seed}")
        kind = ("prefill", "decode", "aggregated", "aggregated")[seed % 4]
        yield seed, {
            "worker_type": kind, "target": rng.choice(["throughput", "latency"]),
            "limits": {"max_num_batched_tokens": rng.choice([512, 2048, 8192]),
                       "max_num_seqs": rng.choice([4, 12, 300]), "max_kv_tokens": rng.choice([5000, 100_000])},
            "observed": [[metrics(rng, kind)] for _ in range(rng.choice([0, 30, 80, 80]))],
            "steps": [[metrics(rng, kind)] for _ in range(3)],
            "requests": [{"isl": rng.choice([1, 300, 3000, 20000]), "osl": rng.choice([1, 50, 800]),
                          "ttft_sla_ms": rng.choice([None, 100.0, 1e5]), "itl_sla_ms": rng.choice([None, 12.0, 1e4]),
                          "e2e_latency_sla_ms": rng.choice([None, 3000.0]),
                          "kv_hit_rate": rng.choice([None, 0.5, 2.0])} for _ in range(3)]}


def spaces(one: dict) -> SimpleNamespace:
    return SimpleNamespace(**{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in one.items()})


class Recorded:
    """The inner model: asks the reference's, and remembers."""

    def __init__(self, model) -> None:
        self.model, self.asked = model, {}

    def estimate_forward_pass_time_ms(self, text: str) -> float | None:
        seconds = self.model.estimate_forward_pass_time([spaces(one) for one in json.loads(text)])
        self.asked[key(text)] = None if seconds is None else seconds * 1000.0
        return self.asked[key(text)]

    def tune_with_fpms(self, text: str) -> None:
        """The reference's has been."""


def key(text: str) -> str:
    work = [one["scheduled_requests"] for one in json.loads(text)]
    return ",".join(str(w[name]) for w in work for name in (
        "num_prefill_requests", "sum_prefill_tokens", "num_decode_requests", "sum_decode_kv_tokens"))


def main() -> None:
    from dynamo import _core

    from mocker.engine_perf import EngineCapacityRequest, EnginePerfLimits, EnginePerfModel

    out = {}
    for seed, one in cases():
        limits = one["limits"]
        theirs = _core.RustEnginePerfModel.from_regression(worker_type=one["worker_type"],
                                                           limits=_core.EnginePerfLimits(**limits))
        if one["observed"]:
            theirs.tune_with_fpms([[spaces(x) for x in step] for step in one["observed"]])
        inner = Recorded(theirs)
        ours = EnginePerfModel(inner, one["worker_type"], EnginePerfLimits(**limits), 1, 64)
        ours.tune_with_fpms(one["observed"])
        answers: list = []
        for step in one["steps"]:
            given = [spaces(x) for x in step]
            answers.append([theirs.estimate_forward_pass_time(given), theirs.get_queued_prefill_time(given),
                            theirs.get_scheduled_decode_itl(given)])
            ours.estimate_forward_pass_time(step), ours.get_queued_prefill_time(step)
            ours.get_scheduled_decode_itl(step)
        for request in one["requests"]:
            target = getattr(_core.OptimizationTarget, one["target"].capitalize())
            best = theirs.find_engine_capacity_rps(_core.EngineCapacityRequest(**request, optimization_target=target))
            answers.append(None if best is None else
                           [best.rps, best.ttft_ms, best.itl_ms, best.e2e_latency_ms, best.eligible])
            ours.find_engine_capacity_rps(EngineCapacityRequest(**request, optimization_target=one["target"]))
        out[str(seed)] = {"asked": inner.asked, "answers": answers}
    with gzip.GzipFile(GOLDEN, "wb", mtime=0) as file:
        file.write(json.dumps(out, separators=(",", ":")).encode())


if __name__ == "__main__":
    main()
