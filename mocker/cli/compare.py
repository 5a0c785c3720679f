"""`mocker compare`: reports side by side, as a text table, JSON or an HTML page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from .flags import number_in
from .terminal import EXIT_FAILED, EXIT_OK, guarded, print_text

__all__ = ["compare_main"]


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Say what differs between reports, by how much, and whether that is better or worse.",
        epilog="A report is a file of --report-json, or a page of --report-html, which also has the curves.")
    parser.add_argument("reports", nargs="+", metavar="REPORT", help="report (.json or .html); the first is the base")
    parser.add_argument("--all", action="store_true", help="also list what is the same")
    parser.add_argument("--host", action="store_true", help="also compare wall time and simulation speed")
    parser.add_argument("--tolerance", type=number_in(0), default=0.0, metavar="PERCENT",
                        help="differences up to so much count as the same (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument("--report-html", metavar="FILE", help="write one page with all runs")
    parser.add_argument("--fail-if-worse", action="store_true", help="exit with code 1 if any metric is worse")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def compare_main(argv: Sequence[str], prog: str) -> int:
    """Run ``mocker compare``; returns the exit code."""
    parser = _parser(prog)
    args = parser.parse_args(argv)
    return guarded(prog, lambda: _compare(parser, args), debug=args.debug)


def _compare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from mocker.reports.compare import compare_reports, format_differences
    from mocker.reports.run import read_run

    runs = [run for path in args.reports for run in read_run(path)]
    if len(runs) < 2:
        parser.error("nothing to compare with: name two reports or more")
    names: dict[str, int] = {}
    for run in runs:
        seen = names[run["name"]] = names.get(run["name"], 0) + 1
        if seen > 1:
            run["name"] += f" ({seen})"
    base = runs[0]
    tolerance = max(args.tolerance / 100.0, 1e-9)
    tables = [(run["name"], compare_reports(base["report"], run["report"], tolerance=tolerance, host=args.host))
              for run in runs[1:]]
    if args.json:
        kept = {name: [row.to_dict() for row in rows if args.all or row.verdict != "same"] for name, rows in tables}
        print_text(json.dumps({"base": base["name"], "differences": kept}, indent=2))
    else:
        print_text("\n\n".join(format_differences(rows, base["name"], name, everything=args.all)
                               for name, rows in tables))
    if args.report_html is not None:
        from mocker.reports.html import write_page

        write_page(args.report_html, runs)
        if not args.json:
            print_text(f"Saved page to: {args.report_html}")
    worse = any(row.verdict == "worse" for _, rows in tables for row in rows)
    return EXIT_FAILED if args.fail_if_worse and worse else EXIT_OK
