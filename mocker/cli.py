"""The command line: flags -> `mocker.simulate` -> a table, JSON, per-request files.

Exit codes: 0 done, 1 the replay or the writing of its results failed, 2 a bad flag, argument or trace, 130 interrupted,
141 the reader of the output went away. Everything heavy is imported only when a replay starts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mocker._version import __version__
from mocker.report import format_report_table, write_report_json

if TYPE_CHECKING:
    from mocker.simulation import Simulation

__all__ = ["UNSUPPORTED", "Unsupported", "main", "replay_main"]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141

TRACE_FORMATS = ("mooncake", "mooncake-delta", "agentic_mooncake", "applied_compute_agentic", "dynamo")
PER_REQUEST_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")

_AIC_FLAGS = (
    ("--aic-backend", str, "engine whose kernels are modelled, e.g. vllm"),
    ("--aic-system", str, "GPU system, e.g. h200_sxm"),
    ("--aic-backend-version", str, "version of the engine"),
    ("--aic-tp-size", int, "tensor-parallel size"),
    ("--aic-model-path", str, "model name or folder"),
    ("--aic-moe-tp-size", int, "tensor-parallel size of the experts"),
    ("--aic-moe-ep-size", int, "expert-parallel size"),
    ("--aic-attention-dp-size", int, "data-parallel size of the attention"),
    ("--aic-gemm-dtype", str, "quantisation of dense layers; 'auto': the model's"),
    ("--aic-moe-dtype", str, "quantisation of the experts; 'auto': the model's"),
    ("--aic-fmha-dtype", str, "quantisation of the attention; 'auto': the model's"),
    ("--aic-kv-cache-dtype", str, "quantisation of the KV cache; 'auto': the model's"),
    ("--aic-comm-dtype", str, "quantisation of collectives; 'auto': the model's"),
    ("--aic-nextn", int, "number of draft tokens"),
    ("--aic-nextn-accept-rates", str, "acceptance rate of each draft token, comma-separated"),
)


# -- what does not work yet -------------------------------------------------------------------------------------------


class Unsupported(NamedTuple):
    """A use of the flags whose feature does not exist yet."""

    what: str
    used: Callable[[argparse.Namespace], object]
    remedy: str


def _has(flag: str, value: str) -> Callable[[argparse.Namespace], object]:
    return lambda args: getattr(args, _dest(flag)) == value


def _given(flag: str) -> Callable[[argparse.Namespace], object]:
    return lambda args: getattr(args, _dest(flag)) not in ((None, "auto") if flag.endswith("-dtype") else (None,))


def _engine_has(name: str) -> Callable[[argparse.Namespace], object]:
    return lambda args: any(values.get(name) is not None for values in args.engine_values.values())


ROUTER_MODES = (
    "round_robin", "kv_router", "random", "least_requests", "least_tokens", "power_of_two", "prefix_affinity",
)
"""Routing policies by name, see `mocker.router`."""

SCHEDULER_RULES = ("dynamo-mocker-1.3.0", "vllm-0.33", "vllm-0.33-async")
"""Whose scheduler decides, by name, see `mocker.rules`."""

UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported("--planner-config", _given("--planner-config"), "leave it out: the number of workers stays fixed"),
    Unsupported("--replay-mode online", _has("--replay-mode", "online"), "use --replay-mode offline"),
    Unsupported("--trace-format mooncake-delta", _has("--trace-format", "mooncake-delta"), "use a mooncake trace"),
    Unsupported("--trace-format agentic_mooncake", _has("--trace-format", "agentic_mooncake"), "use a mooncake trace"),
    Unsupported(
        "--trace-format applied_compute_agentic",
        _has("--trace-format", "applied_compute_agentic"),
        "use a mooncake trace",
    ),
    Unsupported("--trace-format dynamo", _has("--trace-format", "dynamo"), "use a mooncake trace"),
    *(Unsupported(flag, _given(flag), "leave it out: it serves the KV router only") for flag, _, _ in _AIC_FLAGS),
    Unsupported("engine argument aic_backend", _engine_has("aic_backend"), "leave it out and set num_gpu_blocks"),
)
"""Everything that the flags can ask for and that does not exist yet. Who adds a feature deletes its line here."""


def _refuse_unsupported(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for entry in UNSUPPORTED:
        if entry.used(args):
            parser.error(f"{entry.what} is not supported yet; {entry.remedy}")


# -- flags ------------------------------------------------------------------------------------------------------------


def _at_least(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return value

    return integer


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            lower = f"above {low:g}" if above else f"at least {low:g}"
            allowed = lower if high == math.inf else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"must be finite and {allowed}, got {text}")
        return value

    return number


def _build_replay_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} FILE [options]\n       {prog} --input-tokens N --output-tokens N --request-count N [options]",
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
        add(group, flag, text, type=_at_least(low), default=default, metavar="N")

    def number(group: Any, flag: str, check: Callable[[str], float], text: str, default: float | None = None) -> None:
        unit = "MS" if flag.endswith("-ms") else "S" if flag.endswith("-seconds") else "X"
        add(group, flag, text, type=check, default=default, metavar=unit)

    def choice(group: Any, flag: str, values: Sequence[str], text: str, default: str | None = None) -> None:
        add(group, flag, text, choices=values, default=default)

    def switch(group: Any, flag: str, text: str) -> None:
        group.add_argument(flag, action="store_true", help=text)

    parser.add_argument("trace_files", nargs="*", metavar="FILE", help="trace to replay")

    group = parser.add_argument_group("trace")
    formats = ", ".join(name for name in TRACE_FORMATS if f"--trace-format {name}" not in not_yet)
    choice(group, "--trace-format", (*TRACE_FORMATS, "auto"), f"format; supported so far: {formats}, auto", "mooncake")
    count(group, "--trace-block-size", 1, "tokens that one hash id stands for; 512 if not given")
    only = "(applied_compute_agentic only)"
    number(group, "--trace-shared-prefix-ratio", _number(0, 1), f"share of the first prompt that is common {only}", 0.0)
    count(group, "--trace-num-prefix-groups", 0, f"number of groups of sessions with a common prefix {only}", 0)
    short = "hash ids that do not cover the input length: refuse the trace, or shorten the prompt and count it"
    choice(group, "--on-short-hash-ids", ("error", "clamp"), short, "error")

    group = parser.add_argument_group("synthetic workload")
    count(group, "--input-tokens", 1, "prompt length")
    count(group, "--output-tokens", 1, "output length")
    count(group, "--request-count", 1, "number of requests, or of sessions with --turns-per-session")
    number(group, "--arrival-interval-ms", _number(0), "time between arrivals", 1.0)
    count(group, "--turns-per-session", 1, "requests of each session", 1)
    number(group, "--shared-prefix-ratio", _number(0, 1), "share of the prompt that is common", 0.0)
    count(group, "--num-prefix-groups", 0, "number of groups with a common prefix; 0: nothing is common", 0)
    number(group, "--inter-turn-delay-ms", _number(0), "time from the end of a turn to the next", 0.0)

    group = parser.add_argument_group("load")
    number(group, "--arrival-speedup-ratio", _number(0, above=True), "divide arrival and think times by X", 1.0)
    count(group, "--replay-concurrency", 1, "ignore arrival times and keep N requests in flight")
    number(group, "--max-sim-time-seconds", _number(0), "stop when the simulated clock passes S (trace files only)")

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
    choice(group, "--replay-mode", ("offline", "online"), "in simulated or in real time", "offline")
    choice(group, "--compat", ("reference",), "bring back the reference's numbers where this simulator mends them")

    group = parser.add_argument_group("routing")
    choice(group, "--router-mode", ROUTER_MODES, "how a request finds its worker", "round_robin")
    choice(group, "--router-tie-break", ("random", "lowest"), "which of equally good workers is taken", "random")
    count(group, "--router-seed", 0, "seed of the router's random draws", 0)
    text(group, "--router-config", "JSON", "settings of the KV router: a JSON object, or @FILE")
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
    number(group, "--sla-ttft-ms", _number(0), "longest time to first token that counts as goodput")
    number(group, "--sla-itl-ms", _number(0), "longest mean inter-token latency that counts as goodput")
    number(group, "--sla-e2e-ms", _number(0), "longest request latency that counts as goodput")
    switch(group, "--quiet", "print nothing but errors")
    switch(group, "--no-progress", "no progress bar")
    switch(group, "--debug", "show the traceback of an error")

    group = parser.add_argument_group("planner")
    text(group, "--planner-config", "CONFIG", "planner settings: a YAML or JSON file, or JSON")
    count(group, "--benchmark-granularity", 1, "points of the benchmark that a planner starts from", 8)

    group = parser.add_argument_group("performance model of the prefill load (KV router)")
    for flag, kind, meaning in _AIC_FLAGS:
        add(group, flag, meaning, type=kind, metavar="N" if kind is int else "X")
    return parser


def _check_rules(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse combinations of flags that make no sense together."""
    from_file = bool(args.trace_files)
    sizes = {flag: getattr(args, _dest(flag)) for flag in ("--input-tokens", "--output-tokens", "--request-count")}
    shapes = {
        "--turns-per-session": args.turns_per_session != 1,
        "--shared-prefix-ratio": args.shared_prefix_ratio != 0,
        "--num-prefix-groups": args.num_prefix_groups != 0,
        "--inter-turn-delay-ms": args.inter_turn_delay_ms != 0,
    }
    given = [flag for flag, value in sizes.items() if value is not None]
    given += [flag for flag, value in shapes.items() if value]
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
    if args.planner_config is not None:
        if args.replay_mode != "offline":
            parser.error("--planner-config needs --replay-mode offline")
        if from_file and args.trace_format != "mooncake":
            parser.error("--planner-config needs --trace-format mooncake")
    if args.prefill_engine_args is not None or args.decode_engine_args is not None:
        if args.engine:
            remedy = "put it into --prefill-engine-args and --decode-engine-args"
            parser.error(f"--engine is for aggregated workers; {remedy}")
        if args.scheduler_rules is not None:
            remedy = "drop it, or --prefill-engine-args and --decode-engine-args"
            parser.error(f"--scheduler-rules is for aggregated workers; {remedy}")


def _check_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse files that cannot be read or written before a long replay, not after it."""
    owners = {}
    for name in args.trace_files:
        if os.path.isdir(name):
            parser.error(f"trace file {name} is a folder; name the file in it")
        if not os.path.exists(name):
            parser.error(f"trace file {name} does not exist")
        owners[os.path.realpath(name)] = "the trace"
    for flag in ("--report-json", "--report-jsonl", "--per-request"):
        name = getattr(args, _dest(flag))
        if name is None and flag != "--report-json":
            continue
        path = Path(os.path.realpath(name or "."))
        if path.is_dir() and flag != "--report-json":
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
    if args.per_request is not None:
        if not args.per_request.endswith(PER_REQUEST_SUFFIXES):
            parser.error(f"--per-request {args.per_request}: the name must end in {', '.join(PER_REQUEST_SUFFIXES)}")
        if args.per_request.endswith(".parquet") and importlib.util.find_spec("pyarrow") is None:
            parser.error("--per-request with .parquet needs pyarrow: pip install 'mocker-llm[parquet]'; or use .jsonl")


# -- arguments of the simulation --------------------------------------------------------------------------------------


def _json_object(parser: argparse.ArgumentParser, flag: str, text: str) -> dict[str, Any]:
    """Return the JSON object that a flag gives inline or as @FILE."""
    if text.startswith("@"):
        source = f"{flag} {text}"
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"{source} cannot be read: {_describe(error)}")
    else:
        source = flag
    try:
        values = json.loads(text)
    except ValueError as error:
        hint = f"; write @{text} to read a file" if os.path.isfile(text) else ""
        parser.error(f"{source} is not valid JSON: {error}{hint}")
    if not isinstance(values, dict):
        parser.error(f'{source} must be a JSON object such as {{"block_size": 64}}, got {json.dumps(values)}')
    return values


def _add_shorthand(parser: argparse.ArgumentParser, values: dict[str, Any], assignment: str) -> None:
    """Put one NAME=VALUE of --engine into the engine arguments; a dot in the name leads into an inner object."""
    name, equals, text = assignment.partition("=")
    *outer, last = name.strip().split(".")
    if not equals or not last or not all(outer):
        parser.error(f"--engine {assignment}: expected NAME=VALUE, e.g. --engine block_size=64")
    for step in outer:
        inner = values.get(step)
        values[step] = dict(inner) if isinstance(inner, dict) else {}
        values = values[step]
    try:
        values[last] = json.loads(text)
    except ValueError:
        values[last] = text


def _read_engine_values(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the engine arguments by the flag that they came with; absent if there are none."""
    engine_values = {}
    for flag in ("--extra-engine-args", "--prefill-engine-args", "--decode-engine-args"):
        text = getattr(args, _dest(flag))
        if text is not None:
            engine_values[flag] = _json_object(parser, flag, text)
    if args.engine:
        values = engine_values.setdefault("--extra-engine-args", {})
        for assignment in args.engine:
            _add_shorthand(parser, values, assignment)
    if args.scheduler_rules is not None:
        engine_values.setdefault("--extra-engine-args", {})["scheduler_rules"] = args.scheduler_rules
    for flag, values in engine_values.items():
        if values.get("worker_type") is not None and ("is_prefill" in values or "is_decode" in values):
            parser.error(f"{flag}: worker_type excludes is_prefill and is_decode; keep worker_type")
        if flag != "--extra-engine-args" and not {"worker_type", "is_prefill", "is_decode"} & values.keys():
            values["worker_type"] = "prefill" if flag == "--prefill-engine-args" else "decode"
        profile = values.get("planner_profile_data", "")
        if profile is None:
            del values["planner_profile_data"]
        elif isinstance(profile, str) and profile and not profile.endswith(".npz"):
            parser.error(f"{flag}: planner_profile_data must be an .npz file, got {profile}")
    return engine_values


def _engine_args(parser: argparse.ArgumentParser, args: argparse.Namespace, flag: str) -> Any:
    values = args.engine_values.get(flag)
    if values is None:
        return None
    from mocker.args import MockEngineArgs

    try:
        return MockEngineArgs.from_json(json.dumps(values))
    except ValueError as error:
        source = "--extra-engine-args/--engine" if args.engine else flag
        if args.scheduler_rules is not None:
            source += "/--scheduler-rules"
        _fail_usage(parser, args, f"{source}: {error}")


def _router_config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    if args.router_config is None and args.router_policy_config is None:
        return None
    values = {} if args.router_config is None else _json_object(parser, "--router-config", args.router_config)
    if args.router_policy_config is not None:
        values["router_policy_config"] = args.router_policy_config
    return importlib.import_module("mocker.router_config").KvRouterConfig.from_json(json.dumps(values))


def _aic_perf_config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    values = {_dest(flag): getattr(args, _dest(flag)) if _given(flag)(args) else None for flag, _, _ in _AIC_FLAGS}
    if all(value is None for value in values.values()):
        return None
    missing = [flag for flag in ("--aic-backend", "--aic-system", "--aic-model-path") if values[_dest(flag)] is None]
    if missing:
        parser.error(f"the AIC performance model also needs {', '.join(missing)}")
    values["aic_tp_size"] = values["aic_tp_size"] or 1
    return importlib.import_module("mocker.args").AicPerfConfig(**values)


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _parse(argv: Sequence[str], prog: str) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = _build_replay_parser(prog)
    args = parser.parse_intermixed_args(argv)
    _check_rules(parser, args)
    if args.router_policy_config is None and args.router_mode == "kv_router":
        args.router_policy_config = os.environ.get("DYN_ROUTER_POLICY_CONFIG")
    args.engine_values = _read_engine_values(parser, args)
    _refuse_unsupported(parser, args)
    _check_files(parser, args)
    return parser, args


def _simulate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Simulation:
    options: dict[str, Any] = {
        "extra_engine_args": _engine_args(parser, args, "--extra-engine-args"),
        "prefill_engine_args": _engine_args(parser, args, "--prefill-engine-args"),
        "decode_engine_args": _engine_args(parser, args, "--decode-engine-args"),
        "router_config": _router_config(parser, args),
        "aic_perf_config": _aic_perf_config(parser, args),
    }
    from mocker.replay import SyntheticSpec, simulate

    workload: str | list[str] | SyntheticSpec
    if args.trace_files:
        workload = args.trace_files[0] if len(args.trace_files) == 1 else args.trace_files
    else:
        workload = SyntheticSpec(
            input_tokens=args.input_tokens,
            output_tokens=args.output_tokens,
            request_count=args.request_count,
            arrival_interval_ms=args.arrival_interval_ms,
            turns_per_session=args.turns_per_session,
            shared_prefix_ratio=args.shared_prefix_ratio,
            num_prefix_groups=args.num_prefix_groups,
            inter_turn_delay_ms=args.inter_turn_delay_ms,
        )
    seconds = args.max_sim_time_seconds
    with _progress(enabled=not args.no_progress and not args.quiet) as progress:
        return simulate(
            workload,
            **options,
            num_workers=args.num_workers,
            num_prefill_workers=args.num_prefill_workers,
            num_decode_workers=args.num_decode_workers,
            replay_concurrency=args.replay_concurrency,
            replay_mode=args.replay_mode,
            router_mode=args.router_mode,
            router_tie_break=args.router_tie_break,
            router_seed=args.router_seed,
            arrival_speedup_ratio=args.arrival_speedup_ratio,
            trace_block_size=args.trace_block_size,
            trace_format=args.trace_format,
            trace_shared_prefix_ratio=args.trace_shared_prefix_ratio,
            trace_num_prefix_groups=args.trace_num_prefix_groups,
            max_sim_time_ms=None if seconds is None else seconds * 1000.0,
            model_name=args.model_name,
            sla_ttft_ms=args.sla_ttft_ms,
            sla_itl_ms=args.sla_itl_ms,
            sla_e2e_ms=args.sla_e2e_ms,
            on_short_hash_ids=args.on_short_hash_ids,
            compat=args.compat,
            progress=progress,
        )


# -- progress ---------------------------------------------------------------------------------------------------------

PROGRESS_DELAY_S = 1.0
"""A replay that is over before this shows no progress bar."""


@contextlib.contextmanager
def _progress(*, enabled: bool) -> Iterator[Callable[[int, int, float], None] | None]:
    """Yield a callback ``(requests done, requests in all, simulated ms)``, or None if nobody would see the bar."""
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    start = time.monotonic()
    bar: Any = None

    def show(done: int, total: int, sim_ms: float) -> None:
        nonlocal bar
        first = bar is None
        if first:
            if time.monotonic() - start < PROGRESS_DELAY_S:
                return
            tqdm = importlib.import_module("tqdm").tqdm
            # initial: the rate is that of the time since now; miniters: the time alone decides when to draw.
            bar = tqdm(
                total=total,
                initial=done,
                unit=" requests",
                file=sys.stderr,
                dynamic_ncols=True,
                leave=False,
                miniters=0,
                delay=1e-9,  # draw nothing before the text below is there
            )
        bar.total = total
        bar.set_postfix_str(f"{sim_ms / 1000.0:,.1f} s simulated", refresh=first)
        bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


# -- results and errors -----------------------------------------------------------------------------------------------


def _write_results(args: argparse.Namespace, simulation: Simulation, saved: list[tuple[str, Path]]) -> None:
    """Write the files that the flags ask for, and note each in `saved` when it is complete."""
    saved.append(("full report", write_report_json(simulation.report, args.report_json)))
    if args.report_jsonl is not None:
        saved.append(("per-request records", simulation.write_report_jsonl(args.report_jsonl)))
    if args.per_request is not None:
        parquet = args.per_request.endswith(".parquet")
        write = simulation.write_parquet if parquet else simulation.write_jsonl
        saved.append(("per-request table" if parquet else "per-request records", write(args.per_request)))


def _print(text: str) -> None:
    """Print on stdout, with a plain box where the terminal's encoding has no line-drawing characters."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate({**dict.fromkeys(map(ord, "┏┳┓┡╇┩└┴┘"), "+"), ord("━"): "-", ord("┃"): "|"})
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    sys.stdout.write(text + "\n")


def _describe(error: BaseException) -> str:
    """Return what went wrong as a text for a person."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    text = str(error)
    if isinstance(error, ValueError | ImportError) and text:
        return text
    name = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    return f"{name}: {text}" if text else name


def _complain(prog: str, message: str, *, debug: bool) -> None:
    if debug and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    sys.stderr.write(f"{prog}: error: {message}\n")


def _fail_usage(parser: argparse.ArgumentParser, args: argparse.Namespace, message: str) -> NoReturn:
    """Exit with code 2 and without the usage: for a flag whose value, not its use, is wrong."""
    _complain(parser.prog, message, debug=args.debug)
    raise SystemExit(EXIT_USAGE)


def _drop_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's own flush at exit does not complain about a closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def replay_main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run ``mocker replay``, which is also ``python -m mocker.replay``.

    Parameters
    ----------
    argv
        The flags; None for those of the process.
    prog
        The name of the program in messages.

    Returns
    -------
    int
        The exit code: 0, 1, 2, 130 or 141 (see the module).

    Raises
    ------
    SystemExit
        With code 2 for wrong flags, with code 0 after ``--help``, as argparse does.
    """
    parser, args = _parse(list(sys.argv[1:] if argv is None else argv), prog or "mocker replay")
    saved: list[tuple[str, Path]] = []
    running = True
    try:
        try:
            simulation = _simulate(parser, args)
        except BrokenPipeError:
            raise
        except Exception as error:
            usage = isinstance(error, ValueError | OSError)  # a TraceError is a ValueError
            hint = "" if usage or args.debug else " (--debug shows where)"
            _complain(parser.prog, _describe(error) + hint, debug=args.debug)
            return EXIT_USAGE if usage else EXIT_FAILED
        running = False
        status = EXIT_OK
        try:
            _write_results(args, simulation, saved)
        except BrokenPipeError:
            raise
        except Exception as error:
            status = EXIT_FAILED
            # The numbers are there: print them below all the same.
            _complain(parser.prog, f"the results could not be written: {_describe(error)}", debug=args.debug)
        if not args.quiet:
            _print(format_report_table(simulation.report))
            for what, path in saved:
                _print(f"Saved {what} to: {path}")
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        if running:
            lost = "the replay was not finished; its partial results are lost and nothing was written"
        else:
            lost = f"written: {', '.join(str(path) for _, path in saved) or 'nothing'}; other results are lost"
        sys.stderr.write(f"{parser.prog}: interrupted: {lost}\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_CLOSED_PIPE


# -- the command ------------------------------------------------------------------------------------------------------

_COMMANDS: dict[str, tuple[Callable[[Sequence[str], str], int], str]] = {
    "replay": (replay_main, "simulate serving a trace or a synthetic workload, and report"),
}


def main(argv: Sequence[str] | None = None, prog: str = "mocker") -> int:
    """Run the command ``mocker``.

    Parameters
    ----------
    argv
        The arguments; None for those of the process.
    prog
        The name of the program in messages.

    Returns
    -------
    int
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        run, _ = _COMMANDS[arguments[0]]
        return run(arguments[1:], f"{prog} {arguments[0]}")
    commands = "\n".join(f"  {name:<10}{text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [-h] [--version] COMMAND ...",
        description="Simulates LLM serving engines without a GPU.",
        epilog=f"commands:\n{commands}\n\n{prog} COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mocker {__version__}")
    parser.add_argument("command", nargs="?", choices=tuple(_COMMANDS), metavar="COMMAND", help=argparse.SUPPRESS)
    parser.parse_args(arguments)
    parser.print_help()
    return EXIT_OK
