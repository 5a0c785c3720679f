"""Fuzzer and recorder of replays with timing profiles against the reference.

usage: python tests/fuzz_timing.py ORACLE COUNT [FIRST_SEED] [--record]

ORACLE is that of `fuzz_replays.py`. Each seed is a random replay of `fuzz_replays.py` with a random profile: grids of
2 to 7 points an axis, even or not, with points that replays hit, so that they ask on, between and outside the points.
From seed 10000 on it is a callback of (batch, tokens, prefix) and (batch, context) in place of the profile, as for
measured GPU data, with attention data parallelism, and routers expect prefill times; ORACLE then has to read the
callback's six coefficients as `aic_formula` of engine arguments, and `load_formula` with the first three.
`--record` also writes the seeds that agree to tests/golden/timing.json: digests of what the reference did.
"""
from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_replays import against, random_replay  # noqa: E402
from record_replays import COLUMNS, HANDOFF_COLUMNS, digest, engines  # noqa: E402

from mocker.timing import FormulaTiming, FunctionTiming, GridTiming, TimingModel  # noqa: E402

CALLBACKS = 10000
GOLDEN = Path(__file__).parent / "golden" / "timing.json"


def random_axis(rng: random.Random, low: float, high: float) -> list[float]:
    """Strictly rising points, of which some are whole numbers and steps are even half of the time."""
    count = rng.randrange(2, 8)
    if rng.random() < 0.5:
        first, step = rng.choice([low, low + 1.0]), rng.choice([1.0, 7.0, (high - low) / count])
        return [first + i * step for i in range(count)]
    points = {rng.choice([float(round(x)), x]) for x in (rng.uniform(low, high) for _ in range(count))}
    return sorted(points | {low, high})


def random_profile(rng: random.Random) -> GridTiming:
    """A profile whose times rise, fall or jump; extrapolation may well be negative."""
    isl = random_axis(rng, 0.0, rng.choice([20.0, 400.0, 20000.0]))
    kv = random_axis(rng, 0.0, rng.choice([64.0, 900.0, 100000.0]))
    context = random_axis(rng, 0.0, rng.choice([10.0, 300.0]))
    scale = rng.choice([0.01, 1.0, 30.0])
    return GridTiming(isl, [rng.uniform(0.0, 40.0) for _ in isl], kv, context,
                      [[rng.uniform(0.0, 4.0) * scale for _ in context] for _ in kv])


def case(seed: int, folder: Path) -> tuple[dict, dict]:
    """The configuration for the reference and the keywords of `simulate`; writes trace and profile."""
    rng = random.Random(f"timing/{seed}")
    rows, config = random_replay(rng)
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    callbacks = {}
    for name in ("engine_args", "prefill_engine_args", "decode_engine_args"):
        if name in config:
            if seed >= CALLBACKS:
                ranks = rng.choice([1, 2, 4, 7])
                config[name] |= {"aic_formula": random_formula(rng), "aic_attention_dp_size": ranks}
                callbacks[name] = callback(config[name]["aic_formula"], rng.choice([FormulaTiming, FunctionTiming]))
                callbacks[name].core.ranks = ranks
            else:
                profile = folder / f"{name}.npz"
                random_profile(rng).save(profile)
                config[name]["planner_profile_data"] = str(profile)
            config[name]["speedup_ratio"] = rng.choice([1.0, 1.0, 3.7, 0.3])
            if "aic_nextn" not in config[name]:
                config[name]["decode_speedup_ratio"] = rng.choice([1.0, 1.0, 1.3])
    routed = seed >= CALLBACKS and config.get("router_mode") == "kv_router"
    if routed and config.get("router_config", {}).get("router_track_prefill_tokens", True) and rng.random() < 0.8:
        config["router_config"] = config.get("router_config", {}) | {"router_prefill_load_model": "aic"}
        config["load_formula"] = random_formula(rng)[:3]
    plain = {key: value for key, value in config.items() if key != "load_formula"}
    for name in callbacks:
        plain[name] = {key: value for key, value in plain[name].items() if key != "aic_formula"}
    options = engines(plain)
    for name, model in callbacks.items():
        keyword = "extra_engine_args" if name == "engine_args" else name
        options[keyword] = options[keyword].replace(timing_model=model)
    if "load_formula" in config:
        options["aic_perf_config"] = callback([*config["load_formula"], 1.0, 0.0, 0.0], FunctionTiming)
    return config, options


def random_formula(rng: random.Random) -> list[float]:
    scale = rng.choice([0.01, 1.0, 5.0])
    return [rng.uniform(0.0, 20.0) * scale, rng.uniform(0.0, 0.2) * scale, rng.uniform(0.0, 1e-3) * scale,
            rng.uniform(0.0, 8.0), rng.uniform(0.0, 0.5), rng.uniform(0.0, 0.01)]


def callback(f: list[float], kind: type) -> TimingModel:
    """The same as a formula and as Python functions."""
    if kind is FormulaTiming:
        return FormulaTiming((f[0], f[1], 0.0, f[2]), (f[3], f[4], 0.0, 0.0, f[5]))
    return FunctionTiming(lambda b, n, p: f[0] + f[1] * (b * n) + f[2] * ((b * n) * (p + 0.5 * n)),
                          lambda b, _, c: f[3] + f[4] * b + f[5] * (b * c), uses_kv_tokens=False)


def rows_digest(result) -> tuple[int, str]:
    """As `record_replays.digest`, of the requests that ended."""
    ended = result.per_request["terminal_status"] != "incomplete"
    columns = {}
    for name in COLUMNS + HANDOFF_COLUMNS:
        if name in result.per_request:
            values = result.per_request[name][ended].tolist()
            columns[name] = [None if v is None or v != v or (v == -1 and name.endswith(("_idx", "_tokens"))) else v
                             for v in values]
    return digest(columns)


def main() -> None:
    arguments = [word for word in sys.argv[1:] if word != "--record"]
    oracle, count = arguments[0], int(arguments[1])
    first = int(arguments[2]) if len(arguments) > 2 else 0
    bad = checked = 0
    kept = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(first, first + count):
            config, options = case(seed, folder)
            both = against(oracle, config, options, folder / "trace.jsonl", seed)
            if both is None:
                continue
            result, found = both
            checked += 1
            kept[seed] = rows_digest(result)
            if found:
                bad += 1
                print(f"seed {seed}: {found}", flush=True)
    print(f"{checked} replays compared, {bad} differ")
    if "--record" in sys.argv and not bad:
        before = json.loads(GOLDEN.read_text())["seeds"] if GOLDEN.exists() else {}
        GOLDEN.write_text(json.dumps({"seeds": before | {str(s): d for s, d in kept.items()}}, indent=0) + "\n")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
