"""`mocker trace`: look at trace files, check them, change them, make new ones.

Everything heavy is imported only when a command starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .flags import add_reading_flags, at_least, number_in, reading_options, text_or_file
from .terminal import EXIT_FAILED, EXIT_OK, guarded, print_text, report_skipped

if TYPE_CHECKING:
    from mocker.trace import Trace

__all__ = ["trace_main"]


def _load(args: argparse.Namespace, name: str, **changes: Any) -> Trace:
    """Read a file as the flags say, and tell on stderr what was left out of it."""
    from mocker.trace import Trace

    given = {"format": args.trace_format, "block_size": args.trace_block_size,
             "on_short_hash_ids": args.on_short_hash_ids, **reading_options(args), **changes}
    trace = Trace.load(name, **given)
    if trace.skipped and args.on_error == "skip":
        report_skipped([str(error) for error in trace.skipped])
    return trace


def _write(args: argparse.Namespace, trace: Trace) -> int:
    from mocker.formats import DEFAULT_BLOCK_SIZE
    from mocker.formats.write import write

    write(trace, args.out)
    if args.out != "-":
        hint = ""
        if ".jsonl" in args.out and trace.block_size != DEFAULT_BLOCK_SIZE:
            hint = f": read it with --trace-block-size {trace.block_size}, JSONL does not say it"
        sys.stderr.write(f"{args.out}: {trace.n:,} requests, block size {trace.block_size}{hint}\n")
    return EXIT_OK


# -- the subcommands ----------------------------------------------------------------------------------------------


def _info(args: argparse.Namespace) -> int:
    from mocker import doctor

    found = []
    for name in args.files:
        trace = _load(args, name)
        stats = doctor.statistics(trace, reuse=not args.no_reuse, block_size=args.block_size, bin_ms=args.bin_ms)
        found.append((name, stats))
        if args.plot:
            doctor.plot(trace, stats, args.plot)
    if args.json:
        print_text(json.dumps({name: stats.to_dict() for name, stats in found}, indent=2, allow_nan=False))
    else:
        print_text("\n\n".join(doctor.stats_text(stats, name) for name, stats in found))
    return EXIT_OK


def _check(args: argparse.Namespace) -> int:
    from mocker import doctor

    pool = None if args.num_gpu_blocks is None else args.num_gpu_blocks * args.block_size
    results: dict[str, Any] = {}
    failed = False
    texts = []
    for name in args.files:
        trace = _load(args, name, on_error="skip", on_short_hash_ids="clamp")
        findings = doctor.check(trace, pool_tokens=pool, max_model_len=args.max_model_len, gap_ms=args.gap_ms)
        failed |= any(finding.severity == "error" or args.strict for finding in findings)
        results[name] = {"rows": trace.n, "findings": [finding.to_dict() for finding in findings],
                         "skipped": [str(error) for error in trace.skipped]}
        texts.append(doctor.findings_text(findings, name, trace.n))
    print_text(json.dumps(results, indent=2) if args.json else "\n".join(texts))
    return EXIT_FAILED if failed else EXIT_OK


def _convert(args: argparse.Namespace) -> int:
    from mocker import trace_tools

    trace = _load(args, args.files[0])
    if args.sort:
        trace = trace_tools.sort_by_time(trace)
    if args.renumber:
        trace = trace_tools.renumber(trace)
    return _write(args, trace)


def _head(args: argparse.Namespace) -> int:
    return _write(args, _load(args, args.files[0]).head(args.rows))


def _merge(args: argparse.Namespace) -> int:
    from mocker import trace_tools
    from mocker.trace import Trace

    traces = [_load(args, name) for name in args.files]
    if not args.shared_hash_ids:
        traces = trace_tools.apart(traces)
    return _write(args, trace_tools.sort_by_time(Trace.concat(*traces)))


def _scale(args: argparse.Namespace) -> int:
    from mocker import synth, trace_tools

    trace = _load(args, args.files[0])
    if args.arrivals is not None:
        think = None if args.think is None else synth.parse_distribution(args.think, "think")
        trace = trace_tools.with_arrivals(trace, synth.parse_arrivals(args.arrivals), think, args.seed)
    elif args.think is not None:
        raise ValueError("--think needs --arrivals")
    if args.speed is not None:
        trace = trace.speed_up_timing(args.speed)
    if args.rate is not None:
        trace = trace_tools.scale_rate(trace, args.rate)
    if args.start is not None:
        trace = trace_tools.with_start(trace, args.start)
    return _write(args, trace)


def _generate(args: argparse.Namespace) -> int:
    from mocker.synth import Recipe

    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(Recipe)
              if getattr(args, field.name, None) is not None}
    if args.recipe is not None:
        if values:
            raise ValueError(f"--recipe stands alone; leave out --{next(iter(values)).replace('_', '-')}")
        return _write(args, Recipe.parse(text_or_file(args.recipe)).trace())
    return _write(args, Recipe.from_dict(values).trace())


# -- flags --------------------------------------------------------------------------------------------------------


def _parser(prog: str) -> argparse.ArgumentParser:
    from mocker.formats import FORMATS

    parser = argparse.ArgumentParser(
        prog=prog, description="Look at trace files, check them, change them, make new ones.",
        epilog="docs/traces.md has examples, docs/formats.md the formats.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, files: int | str | None = 1) -> Any:
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.set_defaults(run=run)
        if files is not None:
            sub.add_argument("files", nargs=files, metavar="FILE", help="trace; - for standard input")
            group = sub.add_argument_group("reading")
            group.add_argument("--trace-format", choices=("auto", *FORMATS), default="auto",
                               help="format (default: found by looking)")
            group.add_argument("--trace-block-size", type=at_least(1), metavar="N",
                               help="tokens that one hash id stands for; that of the format if not given")
            group.add_argument("--on-short-hash-ids", choices=("error", "clamp"), default="error",
                               help="hash ids that do not cover the input length: refuse, or shorten the prompt")
            add_reading_flags(group)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return sub

    def output(sub: Any) -> None:
        sub.add_argument("-o", "--out", metavar="FILE", default="-",
                         help="where to write, by its ending: .jsonl, .jsonl.gz, .jsonl.zst, .mtrace (binary, "
                              "memory-mapped), .parquet, .arrow; JSONL on standard output if not given")

    sub = command("info", _info, "describe a trace: lengths, arrivals over time, what a prefix cache could save", "+")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--plot", metavar="FILE.html", help="draw it into a page (needs plotly)")
    sub.add_argument("--no-reuse", action="store_true", help="leave out the prefix reuse")
    sub.add_argument("--block-size", type=at_least(1), metavar="N", help="tokens of a block of the cache")
    sub.add_argument("--bin-ms", type=number_in(0, above=True), metavar="MS", help="width of a bin of the arrival rate")

    sub = command("check", _check, "look for what is wrong in a trace; exit code 1 if there are errors", "+")
    sub.add_argument("--num-gpu-blocks", type=at_least(1), metavar="N", help="blocks of the KV pool of a worker")
    sub.add_argument("--block-size", type=at_least(1), default=64, metavar="N",
                     help="tokens of a block of the pool (default: 64)")
    sub.add_argument("--max-model-len", type=at_least(1), metavar="N", help="tokens of a prompt and its answer")
    sub.add_argument("--gap-ms", type=number_in(0, above=True), metavar="MS", help="gaps longer than this are reported")
    sub.add_argument("--strict", action="store_true", help="exit code 1 for warnings too")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("convert", _convert, "write a trace in another format")
    output(sub)
    sub.add_argument("--sort", action="store_true", help="rows by time")
    sub.add_argument("--renumber", action="store_true", help="hash ids 0, 1, 2, … in order of first use")

    sub = command("head", _head, "write the first rows of a trace")
    output(sub)
    sub.add_argument("-n", "--rows", type=at_least(0), default=10, metavar="N", help="how many (default: 10)")

    sub = command("merge", _merge, "write several traces as one, rows by time", "+")
    output(sub)
    sub.add_argument("--shared-hash-ids", action="store_true",
                     help="equal hash ids of different files are equal blocks; else none are")

    sub = command("scale", _scale, "write a trace with other times")
    output(sub)
    sub.add_argument("--speed", type=number_in(0, above=True), metavar="X", help="divide all times by X")
    sub.add_argument("--rate", type=number_in(0, above=True), metavar="R", help="sessions a second, on average")
    sub.add_argument("--start", type=float, metavar="MS", help="time of the first arrival")
    sub.add_argument("--arrivals", metavar="PROCESS", help="new arrivals, e.g. poisson:10; see docs/traces.md")
    sub.add_argument("--think", metavar="DISTRIBUTION", help="new think times with them, s")
    sub.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="seed of the new times (default: 0)")

    sub = command("generate", _generate, "write a synthetic trace", files=None)
    output(sub)
    sub.add_argument("--recipe", metavar="TEXT", help="all of what follows as KEY=VALUE; …, or JSON, or @FILE")
    sub.add_argument("--count", type=at_least(1), metavar="N", help="requests, or sessions")
    for name, metavar, text in (
        ("arrivals", "PROCESS", "constant:RATE, poisson:RATE, gamma:RATE,cv=, weibull:RATE,shape=, onoff:…, ramp:…, "
                                "diurnal:… (default: poisson:1)"),
        ("input", "DISTRIBUTION", "new prompt tokens: N, uniform:, normal:, lognormal:, exponential:, zipf:, "
                                  "empirical:FILE (default: 512)"),
        ("output", "DISTRIBUTION", "answer tokens (default: 128)"),
        ("prefix", "TREE", "shared prefixes, BRANCHESxTOKENS/…[,skew=][,share=]"),
        ("turns", "DISTRIBUTION", "turns of a session (default: 1)"),
        ("think", "DISTRIBUTION", "think time between turns, s (default: 0)"),
        ("history", "yes|no", "later prompts repeat the session so far (default: yes)"),
        ("answers", "yes|no", "plan the answers' tokens, so that later turns find them cached (default: no)"),
    ):
        sub.add_argument(f"--{name}", metavar=metavar, help=text)
    sub.add_argument("--block-size", type=at_least(1), metavar="N", help="tokens per hash id (default: 64)")
    sub.add_argument("--seed", type=at_least(0), metavar="N", help="seed of everything (default: 0)")
    return parser


def trace_main(argv: Sequence[str], prog: str) -> int:
    """Run ``mocker trace``; see `mocker.cli.main`."""
    args = _parser(prog).parse_args(argv)
    return guarded(f"{prog} {args.command}", lambda: int(args.run(args)), debug=args.debug)
