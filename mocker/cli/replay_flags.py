"""The flags of `mocker replay`, and which of them make no sense together."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mocker.formats import FORMATS

from .flags import AIC_FLAGS, add_reading_flags, at_least, dest, number_in
from .unsupported import UNSUPPORTED

PER_REQUEST_SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet")
TRACE_OUT_SUFFIXES = (".json", ".json.gz")
TIMESERIES_SUFFIXES = (".csv", ".csv.gz", ".parquet")
STREAM_SUFFIXES = (".jsonl", ".parquet")

ROUTER_MODES = (
    "round_robin", "kv_router", "random", "least_requests", "least_tokens", "power_of_two", "prefix_affinity",
)
"""Routing policies by name, see `mocker.router`."""

SCHEDULER_RULES = ("dynamo-mocker-1.3.0", "vllm-0.33", "vllm-0.33-async")
"""Whose scheduler decides, by name, see `mocker.rules`."""


def build_parser(prog: str, reference: bool = False) -> argparse.ArgumentParser:
    """The parser; with `reference`, defaults are those of the reference's command."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} FILE [options]\n       {prog} --input-tokens N --output-tokens N --request-count N [options]\n"
              f"       {prog} --recipe TEXT [options]",
        description="Simulate serving a trace, or a synthetic workload, and report latencies and throughput.",
    )
    not_yet = {entry.what for entry in UNSUPPORTED}

    def add(group: Any, flag: str, text: str, **options: Any) -> None:
        if options.get("default") not in (None, []):
            text += " (default: %(default)s)"
        group.add_argument(flag, help=f"{text} (not supported yet)" if flag in not_yet else text, **options)

    def text(group: Any, flag: str, metavar: str, text: str) -> None:
        add(group, flag, text, metavar=metavar)

    def count(group: Any, flag: str, low: int, text: str, default: int | None = None) -> None:
        add(group, flag, text, type=at_least(low), default=default, metavar="N")

    def number(group: Any, flag: str, check: Callable[[str], float], text: str, default: float | None = None) -> None:
        unit = "MS" if flag.endswith("-ms") else "S" if flag.endswith("-seconds") else "X"
        add(group, flag, text, type=check, default=default, metavar=unit)

    def choice(group: Any, flag: str, values: Sequence[str], text: str, default: str | None = None) -> None:
        add(group, flag, text, choices=values, default=default)

    def switch(group: Any, flag: str, text: str) -> None:
        group.add_argument(flag, action="store_true", help=text)

    parser.add_argument("trace_files", nargs="*", metavar="FILE", help="trace to replay")

    group = parser.add_argument_group("trace")
    known = "format, see docs/formats.md; auto: by looking at the start of the file"
    choice(group, "--trace-format", ("auto", *FORMATS), known, "mooncake" if reference else "auto")
    count(group, "--trace-block-size", 1, "tokens that one hash id stands for; 512 if not given")
    only = "(applied_compute_agentic only)"
    share = f"share of the first prompt that is common {only}"
    number(group, "--trace-shared-prefix-ratio", number_in(0, 1), share, 0.0)
    count(group, "--trace-num-prefix-groups", 0, f"number of groups of sessions with a common prefix {only}", 0)
    short = "hash ids that do not cover the input length: refuse the trace, or shorten the prompt and count it"
    choice(group, "--on-short-hash-ids", ("error", "clamp"), short, "error")
    add_reading_flags(group)
    switch(group, "--stream", "read the trace while it is replayed, in memory that does not grow with it; for single "
                              "requests in order of time, see docs/scale.md")

    group = parser.add_argument_group("synthetic workload")
    text(group, "--recipe", "TEXT", "KEY=VALUE; … or JSON, or @FILE with it, see docs/traces.md; stands alone")
    count(group, "--input-tokens", 1, "prompt length")
    count(group, "--output-tokens", 1, "output length")
    count(group, "--request-count", 1, "number of requests, or of sessions with --turns-per-session")
    number(group, "--arrival-interval-ms", number_in(0), "time between arrivals", 1.0)
    count(group, "--turns-per-session", 1, "requests of each session", 1)
    number(group, "--shared-prefix-ratio", number_in(0, 1), "share of the prompt that is common", 0.0)
    count(group, "--num-prefix-groups", 0, "number of groups with a common prefix; 0: nothing is common", 0)
    number(group, "--inter-turn-delay-ms", number_in(0), "time from the end of a turn to the next", 0.0)

    group = parser.add_argument_group("load")
    number(group, "--arrival-speedup-ratio", number_in(0, above=True), "divide arrival and think times by X", 1.0)
    count(group, "--replay-concurrency", 1, "ignore arrival times and keep N requests in flight")
    number(group, "--max-sim-time-seconds", number_in(0), "stop when the simulated clock passes S (trace files only)")

    group = parser.add_argument_group("engines and workers")
    text(group, "--extra-engine-args", "JSON", "engine arguments: a JSON object, or @FILE to read it from a file")
    single = "one engine argument, e.g. block_size=64 or sglang.page_size=16; repeatable; wins over --extra-engine-args"
    add(group, "--engine", single, action="append", default=[], metavar="NAME=VALUE")
    whose = "scheduler of the vllm engine; the same as --engine scheduler_rules=NAME, over which it wins"
    choice(group, "--scheduler-rules", SCHEDULER_RULES, whose)
    count(group, "--num-workers", 1, "number of workers", 1)
    text(group, "--prefill-engine-args", "JSON", "engine arguments of prefill workers")
    text(group, "--decode-engine-args", "JSON", "engine arguments of decode workers")
    count(group, "--num-prefill-workers", 1, "number of prefill workers", 1)
    count(group, "--num-decode-workers", 1, "number of decode workers", 1)
    count(group, "--threads", 1, "threads for workers that are chosen in turn; results are the same", 1)
    choice(group, "--replay-mode", ("offline", "online"), "in simulated or in real time", "offline")
    choice(group, "--compat", ("reference",), "bring back the reference's numbers where this simulator mends them")

    group = parser.add_argument_group("model and GPUs (instead of the timing polynomial)")
    text(group, "--model", "NAME", "a name of `mocker models`, a config.json, or the folder of one")
    text(group, "--system", "NAME", "GPU system, see `mocker systems`")
    count(group, "--tp", 1, "GPUs that share each layer", 1)
    times = "measured kernels, the same interpolated, a roofline of the peaks, or the first where there are data"
    choice(group, "--times", ("auto", "measured", "interpolated", "roofline"), times, "auto")
    switch(group, "--mixed-steps", "take the measured time of passes that compute prompts beside decoding requests")

    group = parser.add_argument_group("routing")
    choice(group, "--router-mode", ROUTER_MODES, "how a request finds its worker", "round_robin")
    choice(group, "--router-tie-break", ("random", "lowest"), "which of equally good workers is taken", "random")
    count(group, "--router-seed", 0, "seed of the router's random draws", 0)
    text(group, "--router-config", "JSON", "settings of the KV router: a JSON object, or @FILE")
    switch(group, "--router-lower-tiers", "let the KV router credit blocks in the tiers of KV offload too")
    policies = "YAML file of queue policies; with kv_router $DYN_ROUTER_POLICY_CONFIG if not given"
    text(group, "--router-policy-config", "FILE", policies)
    text(group, "--model-name", "NAME", "model whose profile to take from the queue policies")

    group = parser.add_argument_group("results")
    text(
        group,
        "--report-json",
        "PATH",
        "report file, or a folder for one named by the time; the current folder if not given",
    )
    text(
        group,
        "--report-jsonl",
        "FILE",
        "one JSON object for each request that ended (trace files only; .gz compresses)",
    )
    text(group, "--per-request", "FILE", f"all requests in trace order ({', '.join(PER_REQUEST_SUFFIXES)})")
    streamed = f"requests as they end, then not kept in memory ({', '.join(STREAM_SUFFIXES)}: a folder)"
    text(group, "--stream-to", "FILE", streamed)
    bounded = "token gaps to keep for exact percentiles, and with --stream-to latencies; beyond it a sketch"
    count(group, "--exact-gaps", 1, bounded)
    text(group, "--report-html", "FILE", "one page with tables and charts, to open without network")
    text(group, "--timeseries", "FILE", f"what each worker does over time ({', '.join(TIMESERIES_SUFFIXES)})")
    interval = "time that a row of --timeseries stands for, at first; if not given as much as a plot needs"
    number(group, "--timeseries-interval-ms", number_in(0, above=True), interval)
    text(group, "--trace-out", "FILE", f"passes to look at in Perfetto ({', '.join(TRACE_OUT_SUFFIXES)})")
    count(group, "--trace-passes", 1, "slices of --trace-out at most; of a longer run evenly spaced windows", 10_000)
    text(group, "--trace-window", "S:S", "simulated seconds that --trace-out shows; all if not given")
    number(group, "--sla-ttft-ms", number_in(0), "longest time to first token that counts as goodput")
    number(group, "--sla-itl-ms", number_in(0), "longest mean inter-token latency that counts as goodput")
    number(group, "--sla-e2e-ms", number_in(0), "longest request latency that counts as goodput")
    switch(group, "--quiet", "print nothing but errors")
    switch(group, "--no-progress", "no progress bar")
    switch(group, "--debug", "show the traceback of an error")

    group = parser.add_argument_group("planner")
    text(group, "--planner", "FILE:NAME", "Python file and the planner in it that sets the number of workers")
    text(group, "--planner-config", "CONFIG", "planner settings: a YAML or JSON file, or JSON")
    count(group, "--benchmark-granularity", 1, "points of the benchmark that a planner starts from", 8)

    group = parser.add_argument_group("performance model of the prefill load (KV router)")
    for flag, kind, meaning in AIC_FLAGS:
        add(group, flag, meaning, type=kind, metavar="N" if kind is int else "X")
    return parser


def check_rules(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse combinations of flags that make no sense together."""
    from_file = bool(args.trace_files)
    if (args.model is None) != (args.system is None):
        parser.error("--model and --system go together: one is missing")
    if args.model is None and (args.tp != 1 or args.times != "auto" or args.mixed_steps):
        parser.error("--tp, --times and --mixed-steps need --model and --system")
    if args.stream:
        if not from_file or args.trace_files == ["-"]:
            parser.error("--stream needs a trace file")
        for flag, value in (("--per-request", args.per_request), ("--report-jsonl", args.report_jsonl),
                            ("--trace-cache", args.trace_cache), ("--trace-option", args.trace_option)):
            if value:
                parser.error(f"{flag} needs the whole trace in memory; drop it or --stream")
    sizes = {flag: getattr(args, dest(flag)) for flag in ("--input-tokens", "--output-tokens", "--request-count")}
    shapes = {
        "--turns-per-session": args.turns_per_session != 1,
        "--shared-prefix-ratio": args.shared_prefix_ratio != 0,
        "--num-prefix-groups": args.num_prefix_groups != 0,
        "--inter-turn-delay-ms": args.inter_turn_delay_ms != 0,
    }
    given = [flag for flag, value in sizes.items() if value is not None]
    given += [flag for flag, value in shapes.items() if value]
    if args.recipe is not None:
        if given or from_file:
            parser.error(f"--recipe stands alone; drop {', '.join(given) or 'the trace file'}")
        return
    missing = [flag for flag, value in sizes.items() if value is None]

    if from_file and given:
        parser.error(f"a trace file and a synthetic workload exclude each other; drop the file or {', '.join(given)}")
    if not from_file and not given:
        parser.error("nothing to replay: name a trace file or give --input-tokens, --output-tokens and --request-count")
    if not from_file and missing:
        parser.error(f"a synthetic workload also needs {', '.join(missing)}")
    if not from_file and args.trace_format == "dynamo":
        parser.error("--trace-format dynamo needs a trace file")
    if len(args.trace_files) > 1 and args.trace_format not in ("dynamo", "auto"):
        parser.error(f"--trace-format {args.trace_format} takes one trace file, got {len(args.trace_files)}")
    if from_file and args.trace_format == "applied_compute_agentic" and args.replay_concurrency is None:
        parser.error("--trace-format applied_compute_agentic needs --replay-concurrency: it has no arrival times")
    for flag, value in (
        ("--report-jsonl", args.report_jsonl),
        ("--max-sim-time-seconds", args.max_sim_time_seconds),
    ):
        if value is not None and args.planner_config is not None:
            parser.error(f"{flag} cannot be combined with --planner-config")
        if value is not None and not from_file:
            remedy = "; use --per-request" if flag == "--report-jsonl" else ""
            parser.error(f"{flag} needs a trace file{remedy}")
    if args.report_jsonl is not None and args.replay_mode != "offline":
        parser.error("--report-jsonl needs --replay-mode offline")
    if args.stream_to is not None:
        columns = ("--report-jsonl", "--per-request", "--report-html", "--timeseries", "--trace-out")
        clash = [flag for flag in columns if getattr(args, dest(flag)) is not None]
        if clash:
            parser.error(f"--stream-to keeps no columns of requests; drop {', '.join(clash)}")
    if args.planner_config is not None:
        if args.replay_mode != "offline":
            parser.error("--planner-config needs --replay-mode offline")
        if from_file and args.trace_format not in ("mooncake", "auto"):
            parser.error("--planner-config needs --trace-format mooncake")
    if args.prefill_engine_args is not None or args.decode_engine_args is not None:
        if args.engine:
            remedy = "put it into --prefill-engine-args and --decode-engine-args"
            parser.error(f"--engine is for aggregated workers; {remedy}")
        if args.scheduler_rules is not None:
            remedy = "drop it, or --prefill-engine-args and --decode-engine-args"
            parser.error(f"--scheduler-rules is for aggregated workers; {remedy}")


def check_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse files that cannot be read or written before a long replay, not after it."""
    owners = {}
    for name in args.trace_files:
        if os.path.isdir(name):
            parser.error(f"trace file {name} is a folder; name the file in it")
        if name == "-":
            continue
        if not os.path.exists(name):
            parser.error(f"trace file {name} does not exist")
        owners[os.path.realpath(name)] = "the trace"
    for flag in ("--report-json", "--report-jsonl", "--per-request", "--report-html", "--timeseries", "--trace-out",
                 "--stream-to"):
        name = getattr(args, dest(flag))
        if name is None and flag != "--report-json":
            continue
        path = Path(os.path.realpath(name or "."))
        if path.is_dir() and flag != "--report-json" and not (flag == "--stream-to" and name.endswith(".parquet")):
            parser.error(f"{flag} {name} is a folder; name a file")
        if path.exists() and not path.is_file() and not path.is_dir():
            continue  # a pipe or a device
        owner = owners.setdefault(str(path), flag)
        if owner != flag:
            parser.error(f"{flag} {name} is the file of {owner}; give another name")
        folder = path if path.is_dir() else next(parent for parent in path.parents if parent.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            reason = "no permission for that folder" if folder.is_dir() else "not a folder"
            parser.error(f"{flag}{f' {name}' if name else ''} cannot be written: {folder}: {reason}")
    for flag, suffixes in (("--per-request", PER_REQUEST_SUFFIXES), ("--timeseries", TIMESERIES_SUFFIXES),
                           ("--trace-out", TRACE_OUT_SUFFIXES), ("--stream-to", STREAM_SUFFIXES)):
        name = getattr(args, dest(flag))
        if name is None:
            continue
        if not name.endswith(suffixes):
            parser.error(f"{flag} {name}: the name must end in {', '.join(suffixes)}")
        if name.endswith(".parquet") and importlib.util.find_spec("pyarrow") is None:
            parser.error(f"{flag} with .parquet needs pyarrow: pip install 'mocker-llm[parquet]'; or use "
                         f"{suffixes[0]}")
    if args.report_html is not None and importlib.util.find_spec("plotly") is None:
        parser.error("--report-html needs plotly: pip install 'mocker-llm[html]'")
    args.trace_window = None if args.trace_window is None else _window(parser, args.trace_window)


def _window(parser: argparse.ArgumentParser, text: str) -> tuple[float, float]:
    """START:END in simulated seconds, as ms."""
    try:
        start, end = (float(part) * 1000.0 for part in text.split(":"))
    except ValueError:
        parser.error(f"--trace-window {text}: expected START:END in seconds, e.g. 60:120")
    if not 0 <= start < end:
        parser.error(f"--trace-window {text}: the end must come after the start, and neither before 0")
    return start, end
