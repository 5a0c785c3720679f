"""Fuzzer of the trace formats against the reference: random small traces of each format, replayed by both.

usage: python tests/fuzz_formats.py ORACLE COUNT [FIRST_SEED [FORMAT]]

ORACLE reads one JSON object a line (trace files, format, engine arguments, workers …) and prints report and per-request
rows. `FORMATS` below has a generator per format: ``rows, options = generate(rng)``.
"""
from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_replays import compare, disaggregate  # noqa: E402
from record_replays import engines  # noqa: E402

from mocker import simulate  # noqa: E402


def ids(rng: random.Random, paths: list[list[int]]) -> list[int]:
    """Hash ids that often begin as earlier ones do."""
    base = list(rng.choice(paths)) if paths and rng.random() < 0.7 else []
    path = base[:rng.randrange(0, len(base) + 1)] + [rng.randrange(9) for _ in range(rng.randrange(0, 5))]
    paths.append(path or [rng.randrange(9)])
    return paths[-1]


def common(rng: random.Random, row: dict, planned: bool) -> dict:
    """Members that every Mooncake row may have."""
    if planned and rng.random() < 0.6:
        row["output_token_ids"] = [rng.randrange(9) for _ in range(row["output_length"])]
    if rng.random() < 0.2:
        row["priority"] = rng.randrange(-3, 4)
    if rng.random() < 0.2:
        row["strict_priority"] = rng.randrange(3)
    return row


def length(rng: random.Random, path: list[int], block: int) -> int:
    return rng.randrange((len(path) - 1) * block + 1, len(path) * block + 1)


def mooncake(rng: random.Random, block: int) -> tuple[list[dict], dict]:
    """Sessions with think times and gaps, outputs that may be given, priorities."""
    rows, paths, at, planned = [], [], 0.0, rng.random() < 0.5
    last: dict[str, float] = {}
    for _ in range(rng.randrange(1, 40)):
        path = ids(rng, paths)
        row = common(rng, {"timestamp": at, "input_length": length(rng, path, block),
                           "output_length": rng.choice([1, 2, 9, 20, 40]), "hash_ids": path}, planned)
        if rng.random() < 0.7:
            row["session_id"] = f"s{rng.randrange(6)}"
            if row["session_id"] in last and rng.random() < 0.5:
                row["delay_ms"] = rng.choice([0.0, 5.0, 80.5])
            last[row["session_id"]] = at
        rows.append(row)
        at += rng.choice([0.0, 0.0, 0.25, 5.0, 60.0, 700.0])
    return rows, {}


def mooncake_delta(rng: random.Random, block: int) -> tuple[list[dict], dict]:
    """The same, turns being what they add."""
    rows, _ = mooncake(rng, block)
    return rows[:18], {"trace_format": "mooncake-delta"}


def agentic_mooncake(rng: random.Random, block: int) -> tuple[list[dict], dict]:
    """Requests that wait for up to three others, also for later rows."""
    rows, paths, at, planned = [], [], 0.0, rng.random() < 0.4
    n = rng.randrange(1, 30)
    order = list(range(n))
    rng.shuffle(order)
    for k in range(n):
        path = ids(rng, paths)
        row = common(rng, {"request_id": f"r{k}", "input_length": length(rng, path, block),
                           "output_length": rng.choice([1, 2, 9, 20]), "hash_ids": path}, planned)
        earlier = [i for i in range(n) if order[i] < order[k]]
        if earlier and rng.random() < 0.6:
            row["wait_for"] = [f"r{rng.choice(earlier)}" for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.4:
            row["delay"] = rng.choice([0.0, 2.5, 100.0])
        if rng.random() < 0.4:
            row["tool_wait_ms"] = rng.choice([0.0, 0.5, 250.0])
        if rng.random() < 0.7:
            row["timestamp"] = 10.0 + at
        if rng.random() < 0.5:
            row |= {"session_id": f"s{rng.randrange(3)}", "prefix_reset": False, "branches": []}
        rows.append(row)
        at += rng.choice([0.0, 0.25, 5.0, 60.0])
    return rows, {"trace_format": "agentic_mooncake"}


def applied_compute_agentic(rng: random.Random, block: int) -> tuple[list[dict], dict]:
    """Sessions by lengths."""
    rows = []
    for _ in range(rng.randrange(1, 9)):
        turns = rng.randrange(0, 4)
        rows.append({"num_turns": turns, "input_prompt_length": rng.randrange(1, 5 * block),
                     "assistant_response_length": [rng.randrange(1, 12) for _ in range(turns)],
                     "tool_call_output_length": [rng.randrange(0, 2 * block) for _ in range(turns)],
                     "tool_call_latency": [rng.choice([0, 0.25, 0.001, 1.5]) for _ in range(turns)],
                     "final_assistant_response_length": rng.randrange(1, 12)})
    return rows, {"trace_format": "applied_compute_agentic", "replay_concurrency": rng.choice([1, 2, 3, 100]),
                  "trace_shared_prefix_ratio": rng.choice([0.0, 0.3, 0.5, 1.0]),
                  "trace_num_prefix_groups": rng.choice([0, 1, 3])}


def dynamo(rng: random.Random, block: int) -> tuple[list[dict], dict]:
    """Captures of independent requests, or of agents with children and tools."""
    agents = rng.random() < 0.6
    rows, paths, at = [], [], 1_700_000_000_000
    sessions: dict[str, list[dict]] = {}
    for k in range(rng.randrange(1, 30)):
        path = [1000 + i for i in ids(rng, paths)]
        lasted = rng.choice([None, 0.0, 10.4, 250.5, 3000.0])
        request = {"request_id": f"q{rng.randrange(1000)}-{k}", "output_tokens": rng.choice([1, 2, 9, 20]),
                   "request_received_ms": at,
                   "replay": {"trace_block_size": block, "input_length": length(rng, path, block),
                              "input_sequence_hashes": path}}
        if lasted is not None:
            request["total_time_ms"] = lasted
        row = {"schema": "dynamo.request.trace.v1", "event_type": "request_end",
               "event_time_unix_ms": at + rng.choice([0, 5, 300]), "request": request}
        if agents:
            session = f"a{rng.randrange(4)}"
            context = {"session_id": session}
            if session != "a0":
                context["parent_session_id"] = f"a{int(session[1]) // 2}"
            row["agent_context"] = context
            sessions.setdefault(session, []).append(request)
            if rng.random() < 0.4:
                begin = at - rng.randrange(0, 400)
                tool = {"tool_call_id": f"t{k}", "tool_class": "search", "started_at_unix_ms": begin,
                        "ended_at_unix_ms": begin + rng.randrange(0, 400)}
                if rng.random() < 0.5:
                    tool["claude"] = {"source_request_id": rng.choice(sessions[session])["request_id"],
                                      "execution_mode": rng.choice(["blocking", "background"])}
                    if rng.random() < 0.5:
                        tool["claude"]["consumer_request_id"] = request["request_id"]
                rows.append({"schema": "dynamo.request.trace.v1", "event_type": rng.choice(["tool_end", "tool_error"]),
                             "event_time_unix_ms": begin + 500, "agent_context": {"session_id": session},
                             "tool": tool})
        rows.append(row)
        at += rng.choice([0, 0, 1, 40, 300, 2000])
    rng.shuffle(rows)
    return [{"event": row, "timestamp": 1} if rng.random() < 0.5 else row for row in rows], {"trace_format": "dynamo"}


FORMATS = {f.__name__: f for f in (mooncake, mooncake_delta, agentic_mooncake, applied_compute_agentic, dynamo)}


def random_replay(rng: random.Random, name: str | None = None) -> tuple[list[dict], dict]:
    """Rows of a file and a configuration."""
    block = rng.choice([2, 4, 8])
    trace_block = rng.choice([block, 2 * block, 3 * block, 7])
    rows, config = FORMATS[name or rng.choice(list(FORMATS))](rng, trace_block)
    kind = config.get("trace_format", "mooncake")
    fitting = rng.choice([40, 60, 150, 600])
    args = {
        "block_size": block, "num_gpu_blocks": fitting, "max_num_seqs": rng.choice([1, 2, 3, 8, 256]),
        "max_num_batched_tokens": rng.choice([block, 2 * block + 1, 33, 128, 8192]),
        "enable_prefix_caching": rng.random() < 0.85,
        "engine_type": rng.choice(["vllm", "vllm", "vllm", "trtllm", "sglang"]),
    }
    if args["engine_type"] == "sglang":
        args["num_gpu_blocks"] += 20
        args["sglang"] = {"schedule_policy": rng.choice(["fifo", "lpm"]), "chunked_prefill_size": block * rng.choice(
            [1, 4, 100])}
    if args["engine_type"] != "sglang" and rng.random() < 0.2:
        args["aic_nextn"] = rng.randrange(1, 4)
    config |= {"engine_args": args, "num_workers": rng.choice([1, 1, 2, 3, 5]), "trace_block_size": trace_block}
    if rng.random() < 0.5:
        config |= {"num_workers": rng.choice([2, 3, 4]), "router_mode": "kv_router"}
        if rng.random() < 0.5:
            config["router_config"] = {"router_queue_threshold": rng.choice([None, 0.0, 0.01, 0.5]),
                                       "router_queue_policy": rng.choice(["fcfs", "lcfs", "wspt"])}
    plain = kind == "mooncake" or (kind == "dynamo" and not any(
        "agent_context" in row.get("event", row) for row in rows))
    if plain and args["engine_type"] != "trtllm" and rng.random() < 0.5:
        disaggregate(rng, config)
    if kind != "applied_compute_agentic":
        if (plain or kind == "mooncake-delta") and rng.random() < 0.35:
            config["replay_concurrency"] = rng.choice([1, 2, 3, 8, 100])
        elif rng.random() < 0.4:
            config["arrival_speedup_ratio"] = rng.choice([0.5, 2.0, 4.0])
    if kind in ("mooncake", "mooncake-delta", "applied_compute_agentic") and rng.random() < 0.2:
        config["max_sim_time_ms"] = rng.choice([0.0, 20.0, 333.5])
    return rows, config


def write(rng: random.Random, folder: Path, rows: list[dict], config: dict) -> list[str]:
    """Files of a trace: a capture may be cut into several, some packed."""
    lines = [json.dumps(row) + "\n" for row in rows]
    if config.get("trace_format") != "dynamo":
        (folder / "trace.jsonl").write_text("".join(lines))
        return [str(folder / "trace.jsonl")]
    names = []
    while lines or not names:
        part, lines = lines[:10], lines[10:]
        text = "".join(part).encode()
        names.append(str(folder / f"part{len(names)}.jsonl"))
        if rng.random() < 0.5:
            names[-1] += ".gz"
            text = gzip.compress(text[:len(text) // 2]) + gzip.compress(text[len(text) // 2:])
        Path(names[-1]).write_bytes(text)
    return names


def run(files: list[str], config: dict, **more):
    """The same replay here."""
    options = engines(config)
    if options.get("trace_format") == "dynamo":
        options.pop("trace_block_size")
    options.setdefault("trace_format", "mooncake")
    return simulate(files, compat="reference", router_tie_break="lowest", **options, **more)


def main() -> None:
    oracle, count = sys.argv[1], int(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    bad, checked = 0, dict.fromkeys(FORMATS, 0)
    with tempfile.TemporaryDirectory() as name:
        for seed in range(first, first + count):
            rng = random.Random(f"format/{seed}")
            kind = sys.argv[4] if len(sys.argv) > 4 else rng.choice(list(FORMATS))
            rows, config = random_replay(rng, kind)
            files = write(rng, Path(name), rows, config)
            try:
                done = subprocess.run([oracle], input=json.dumps(config | {"trace_file": files[0],
                                                                           "trace_files": files}) + "\n",
                                      capture_output=True, text=True, timeout=10)
            except subprocess.TimeoutExpired:
                continue           # the reference spins
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            want = json.loads(lines[0]) if lines else {}
            if "report" not in want:
                try:
                    run(files, config)
                except ValueError:
                    continue       # refused by both
                print(f"seed {seed}: reference says {str(want)[:200]} {done.stderr[-200:]}")
                continue
            whole = {name: value for name, value in config.items() if name != "max_sim_time_ms"}
            try:
                if set(run(files, whole).per_request["terminal_status"]) & {"capacity", "over_budget"}:
                    continue       # the reference keeps such a request waiting until the cap
                found = None
                for fast in (True, False):
                    found = found or compare(run(files, config, fast_forward=fast), want)
            except Exception as error:
                found = repr(error)
            checked[kind] += 1
            if found:
                bad += 1
                print(f"seed {seed} {kind}: {found}", flush=True)
    print(f"{checked} replays compared, {bad} differ")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
