"""`mocker optimize`: flags or a YAML/TOML file -> `mocker.optimize`, `highest_rate` or `pareto_front` -> the answer.

Everything heavy is imported only when the search starts.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

from .flags import at_least, number_in
from .sweep import add_workload_flags, assignments, value_of, values_of, workload_of
from .terminal import EXIT_FAILED, EXIT_OK, guarded, print_text

__all__ = ["optimize_main"]

GOALS = ("cheapest", "rate", "pareto")
_BETWEEN = re.compile(r"^([-+.\deE]+)\.\.([-+.\deE]+?)(:log)?$")
_FIELDS = {
    "workload": (str, dict), "goal": (str,), "base": (dict,), "space": (dict,), "sla": (dict,), "cost": (str,),
    "latency": (str,), "trials": (int,), "seed": (int,), "seeds": (list,), "tolerance": (float,), "start": (float, int),
    "backend": (str,), "workers": (int,), "out": (str,)}


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Search configurations for a workload: the cheapest that keeps its bounds, the highest "
        "rate that each sustains, or the front of cost and latency.", epilog="docs/sweep.md has examples.")
    add_workload_flags(parser)
    group = parser.add_argument_group("search")
    group.add_argument("--spec", metavar="FILE", help="YAML or TOML file with the fields "
                       f"{', '.join(_FIELDS)}; flags win over it")
    group.add_argument("--goal", choices=GOALS, help="cheapest if not given")
    group.add_argument("--space", metavar="NAME=V1,V2", action="append", default=[],
                       help="choices, or all values from LOW..HIGH (LOW..HIGH:log); repeatable")
    group.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], dest="base",
                       help="what all configurations have in common; repeatable")
    group.add_argument("--sla", metavar="KEY=VALUE", action="append", default=[],
                       help="largest value of a report key, e.g. p99_ttft_ms=500, or KEY=>=VALUE; repeatable")
    group.add_argument("--cost", metavar="KEY", help="gpus (default) or a report key such as gpu_hours")
    group.add_argument("--latency", metavar="KEY", help="other axis of the front; p99_ttft_ms if not given")
    group.add_argument("--trials", type=at_least(1), metavar="N", help="most candidates; 100 if not given")
    group.add_argument("--seed", type=at_least(0), metavar="N", help="of the search")
    group.add_argument("--tolerance", type=number_in(0, above=True), metavar="X", help="of a rate; 0.01 if not given")
    group.add_argument("--no-early-stop", action="store_true", help="simulate hopeless candidates to the end")
    group = parser.add_argument_group("where it runs")
    group.add_argument("--backend", choices=("threads", "processes", "dask", "ray"), help="threads if not given")
    group.add_argument("--workers", type=at_least(1), metavar="N", help="as many as there are processors if not given")
    group.add_argument("--out", metavar="FILE", help="keep finished candidates in this file, and go on from it")
    group = parser.add_argument_group("results")
    group.add_argument("--csv", metavar="FILE", help="write all candidates as CSV")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")
    group.add_argument("--no-progress", action="store_true", help="no progress bar")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _axis(text: str) -> Any:
    """The choices, or the interval, that a flag gives."""
    found = _BETWEEN.match(text)
    if found is None:
        return values_of(text)
    return {"between": [value_of(found[1]), value_of(found[2])], "log": found[3] is not None}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Flags over the spec file."""
    from mocker.sweeps.spec import read_spec

    spec = {} if args.spec is None else read_spec(args.spec, _FIELDS)
    for name in ("space", "base", "sla"):
        read = _axis if name == "space" else value_of
        spec[name] = {**spec.get(name, {}), **{key: read(text) for key, text in assignments(
            f"--{'set' if name == 'base' else name}", getattr(args, name)).items()}}
    for name in ("goal", "cost", "latency", "trials", "seed", "tolerance", "backend", "workers", "out"):
        if getattr(args, name) is not None:
            spec[name] = getattr(args, name)
    spec["workload"] = workload_of(args, spec)
    return spec


def _search(spec: dict[str, Any], **options: Any) -> tuple[str, Any, int]:
    """(Text of the answer, table of all candidates, exit code)."""
    from mocker.search import highest_rate, optimize, pareto_front
    from mocker.sweeps import grid

    goal = spec.pop("goal", "cheapest")
    if goal not in GOALS:
        raise ValueError(f"goal must be one of {', '.join(GOALS)}, got {goal!r}")
    options |= spec
    workload, space, keys = options.pop("workload"), options.pop("space"), list(spec["sla"])
    unused = {"cheapest": ("latency", "tolerance", "start"), "pareto": ("tolerance", "start"),
              "rate": ("cost", "latency", "trials", "seed", "backend", "workers")}[goal]
    for name in unused:
        if name in options:
            raise ValueError(f"{name} means nothing for the goal {goal!r}; leave it out")
    if goal == "cheapest":
        best = optimize(workload, space, **options)
        lines = [best.table.text(["cost", "feasible", "stopped", *keys])]
        if best.config is None:
            lines.append(f"No configuration keeps the bounds{'' if best.proved else ' among those tried'}.")
            return "\n".join(lines), best.table, EXIT_FAILED
        lines.append(f"Cheapest ({'proved' if best.proved else 'of those tried'}): cost {best.cost:,.2f}, "
                     + ", ".join(f"{name}={value}" for name, value in best.config.items()))
        return "\n".join(lines), best.table, EXIT_OK
    if goal == "pareto":
        options["sla"] = options["sla"] or None
        front = pareto_front(workload, space, **options)
        latency = options.get("latency", "p99_ttft_ms")
        return front.front.text(["cost", latency, *(key for key in keys if key != latency)]), front.table, (
            EXIT_OK if len(front.front) else EXIT_FAILED)
    results = highest_rate(workload, list(grid(space)) if space else [{}], **options)
    lines = []
    for result in results:
        names = ", ".join(f"{name}={value}" for name, value in result.config.items())
        lines.append(f"{result.rate_rps:12,.3f} requests/s (speed-up {result.speedup:.4g}): {names or 'defaults'}")
    return "\n".join(lines), results[-1].table, EXIT_OK if any(r.speedup > 0 for r in results) else EXIT_FAILED


def optimize_main(argv: Sequence[str], prog: str) -> int:
    """Run ``mocker optimize``; returns the exit code (1 also if no configuration keeps the bounds)."""
    args = _parser(prog).parse_args(list(argv))

    def body() -> int:
        bar = not args.quiet and not args.no_progress and sys.stderr is not None and sys.stderr.isatty()
        text, table, status = _search(_settings(args), stop_early=not args.no_early_stop, progress=bar)
        if args.csv:
            table.write_csv(args.csv)
        if not args.quiet:
            print_text(text)
            sys.stdout.flush()
        return status

    return guarded(prog, body, debug=args.debug)
