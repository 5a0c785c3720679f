"""`mocker sweep`: flags or a YAML/TOML file -> `mocker.sweep` -> a table.

Everything heavy is imported only when the sweep starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

from .flags import at_least, number_in
from .terminal import EXIT_FAILED, EXIT_OK, complain, guarded, print_text

__all__ = ["add_workload_flags", "assignments", "sweep_main", "value_of", "values_of", "workload_of"]

SHOWN = ("completed_requests", "mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms", "output_throughput_tok_s",
         "prefix_cache_reused_ratio")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Simulate a workload on many configurations and tabulate the reports.",
        epilog="Names are keywords of mocker.simulate (num_workers, router_mode), engine arguments (block_size, "
               "sglang.page_size), those of one pool (prefill.num_gpu_blocks) and router settings "
               "(router.router_temperature). docs/sweep.md has examples.")
    add_workload_flags(parser)
    group = parser.add_argument_group("configurations")
    group.add_argument("--spec", metavar="FILE", help="YAML or TOML file with workload, base, grid, configs, keys, "
                       "backend, workers, out; flags win over it")
    group.add_argument("--grid", metavar="NAME=V1,V2", action="append", default=[],
                       help="values to try, in all combinations; repeatable")
    group.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], dest="base",
                       help="what all configurations have in common; repeatable")
    group = parser.add_argument_group("where it runs")
    group.add_argument("--backend", choices=("threads", "processes", "dask", "ray"), help="threads if not given")
    group.add_argument("--workers", type=at_least(1), metavar="N", help="as many as there are processors if not given")
    group.add_argument("--out", metavar="FILE", help="keep finished rows in this file, and go on from it")
    group.add_argument("--retry-errors", action="store_true", help="compute rows of --out again that failed")
    group = parser.add_argument_group("results")
    group.add_argument("--keys", metavar="K1,K2", help="report keys of the table")
    group.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    group.add_argument("--parquet", metavar="FILE", help="write the table as Parquet")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")
    group.add_argument("--no-progress", action="store_true", help="no progress bar")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is served."""
    parser.add_argument("trace", nargs="?", metavar="FILE", help="trace")
    group = parser.add_argument_group("synthetic workload")
    for flag in ("--input-tokens", "--output-tokens", "--request-count"):
        group.add_argument(flag, type=at_least(1), metavar="N")
    group.add_argument("--arrival-interval-ms", type=number_in(0), metavar="MS")


def workload_of(args: argparse.Namespace, spec: dict[str, Any]) -> Any:
    """The workload that flags or a spec file name.

    Raises
    ------
    ValueError
        None, or two.
    """
    names = ("input_tokens", "output_tokens", "request_count", "arrival_interval_ms")
    synthetic = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if synthetic and args.trace:
        raise ValueError("a trace file and a synthetic workload exclude each other")
    if synthetic and not set(names[:3]) <= set(synthetic):
        raise ValueError("a synthetic workload needs --input-tokens, --output-tokens and --request-count")
    workload = args.trace or synthetic or spec.get("workload")
    if not workload:
        raise ValueError("no workload: name a trace file or give --input-tokens, --output-tokens and --request-count")
    return workload


def assignments(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE texts as a mapping.

    Raises
    ------
    ValueError
        One is no assignment.
    """
    out = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{flag} {text}: expected NAME=VALUE")
        out[name.strip()] = value
    return out


def value_of(text: str) -> Any:
    """A JSON value, or the text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def values_of(text: str) -> list[Any]:
    """The values of ``1,2,x``, or of a JSON list."""
    whole = value_of(text)
    if isinstance(whole, list):
        return whole
    return [value_of(part) for part in text.split(",")]


def _configs(args: argparse.Namespace, spec: dict[str, Any]) -> Any:
    """The grid and the single configurations, or only one of them."""
    grid = dict(spec.get("grid", {}))
    grid.update((name, values_of(text)) for name, text in assignments("--grid", args.grid).items())
    single = spec.get("configs", [])
    if single and grid:
        from mocker.sweeps import grid as combinations

        return list(itertools.chain(combinations(grid), single))
    if not single and not grid:
        raise ValueError("no configurations: give --grid NAME=V1,V2 or a --spec file")
    return single or grid


def sweep_main(argv: Sequence[str], prog: str) -> int:
    """Run ``mocker sweep``; returns the exit code (1 also if every configuration failed)."""
    parser = _parser(prog)
    args = parser.parse_args(list(argv))

    def body() -> int:
        from mocker.sweeps import sweep
        from mocker.sweeps.spec import SWEEP_FIELDS, read_spec

        spec = {} if args.spec is None else read_spec(args.spec, SWEEP_FIELDS)
        base = dict(spec.get("base", {}))
        base.update((name, value_of(text)) for name, text in assignments("--set", args.base).items())
        keys = args.keys.split(",") if args.keys else spec.get("keys")
        bar = not args.quiet and not args.no_progress and sys.stderr is not None and sys.stderr.isatty()
        table = sweep(workload_of(args, spec), _configs(args, spec), base=base, keys=keys,
                      backend=args.backend or spec.get("backend", "threads"),
                      workers=args.workers or spec.get("workers"), out=args.out or spec.get("out"),
                      retry_errors=args.retry_errors or spec.get("retry_errors", False), progress=bar)
        if args.csv:
            table.write_csv(args.csv)
        if args.parquet:
            table.write_parquet(args.parquet)
        if not args.quiet:
            print_text(table.text(keys or SHOWN))
            sys.stdout.flush()
        if len(table) and len(table.errors) == len(table):
            complain(prog, f"every configuration failed; the first: {table.errors[0]}", debug=False)
            return EXIT_FAILED
        return EXIT_OK

    return guarded(prog, body, debug=args.debug)
