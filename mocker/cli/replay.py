"""`mocker replay`: flags -> `mocker.simulate` -> a table, JSON, per-request files.

Everything heavy is imported only when a replay starts.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mocker.extras import import_ahead
from mocker.report import format_report_table, write_report_json

from .flags import reading_options, text_or_file
from .replay_args import aic_perf_config, engine_args, planner, read_engine_values, router_config, with_model
from .replay_flags import build_parser, check_files, check_rules
from .terminal import (
    EXIT_CLOSED_PIPE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    complain,
    describe,
    drop_stdout,
    print_text,
    progress_bar,
    report_skipped,
)
from .unsupported import refuse_unsupported

if TYPE_CHECKING:
    from mocker.simulation import Simulation
    from mocker.timeline import Recording

__all__ = ["REFERENCE_PROG", "replay_main"]

REFERENCE_PROG = "python -m mocker.replay"
"""Name of the command that has the reference's defaults."""


def _parse(argv: Sequence[str], prog: str) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = build_parser(prog, reference=prog == REFERENCE_PROG)
    args = parser.parse_intermixed_args(argv)
    check_rules(parser, args)
    if args.router_policy_config is None and args.router_mode == "kv_router":
        args.router_policy_config = os.environ.get("DYN_ROUTER_POLICY_CONFIG")
    args.engine_values = read_engine_values(parser, args)
    refuse_unsupported(parser, args)
    check_files(parser, args)
    args.command = shlex.join([*prog.split(), *argv])
    return parser, args


def _recording(args: argparse.Namespace) -> Recording | None:
    """What the asked for files need of the replay; None if nothing."""
    if args.report_html is None and args.timeseries is None and args.trace_out is None:
        return None
    from mocker.timeline import Recording

    return Recording(interval_ms=None if args.timeseries is None else args.timeseries_interval_ms,
                     passes=0 if args.trace_out is None else args.trace_passes, window_ms=args.trace_window)


def _simulate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Simulation:
    options: dict[str, Any] = {
        "extra_engine_args": engine_args(parser, args, "--extra-engine-args"),
        "prefill_engine_args": engine_args(parser, args, "--prefill-engine-args"),
        "decode_engine_args": engine_args(parser, args, "--decode-engine-args"),
        "router_config": router_config(parser, args),
        "aic_perf_config": aic_perf_config(parser, args),
        "planner": planner(parser, args),
    }
    args.assumptions = with_model(args, options)
    from mocker.formats.stream import TraceStream
    from mocker.replay import SyntheticSpec, simulate
    from mocker.synth import Recipe

    workload: str | list[str] | TraceStream | SyntheticSpec | Recipe
    reading = reading_options(args)
    options |= {"trace_block_size": args.trace_block_size, "trace_format": args.trace_format,
                "on_short_hash_ids": args.on_short_hash_ids}
    if args.recipe is not None:
        workload = Recipe.parse(text_or_file(args.recipe))
    elif args.stream:
        workload = TraceStream(args.trace_files[0], args.trace_format, args.trace_block_size, args.on_short_hash_ids,
                               on_error=reading.pop("on_error", "raise"))
        options |= {"trace_block_size": None, "trace_format": "auto", "on_short_hash_ids": "error"}
    elif args.trace_files:
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
    if reading:
        options["trace_options"] = reading
    seconds = args.max_sim_time_seconds
    if any(str(file).endswith(".parquet") for file in (args.timeseries, args.per_request)):
        import_ahead("pyarrow.parquet", "parquet", "a .parquet file")      # longer than a short replay takes
    with progress_bar(enabled=not args.no_progress and not args.quiet) as progress:
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
            router_lower_tiers=args.router_lower_tiers,
            arrival_speedup_ratio=args.arrival_speedup_ratio,
            trace_shared_prefix_ratio=args.trace_shared_prefix_ratio,
            trace_num_prefix_groups=args.trace_num_prefix_groups,
            max_sim_time_ms=None if seconds is None else seconds * 1000.0,
            model_name=args.model_name,
            sla_ttft_ms=args.sla_ttft_ms,
            sla_itl_ms=args.sla_itl_ms,
            sla_e2e_ms=args.sla_e2e_ms,
            compat=args.compat,
            progress=progress,
            threads=args.threads,
            recording=_recording(args),
            exact_gaps=args.exact_gaps,
            stream_to=args.stream_to,
        )


def _write_results(args: argparse.Namespace, simulation: Simulation, saved: list[tuple[str, Path]]) -> None:
    """Write the files that the flags ask for, and note each in `saved` when it is complete."""
    saved.append(("full report", write_report_json(simulation.report, args.report_json)))
    if args.report_jsonl is not None:
        saved.append(("per-request records", simulation.write_report_jsonl(args.report_jsonl)))
    if args.stream_to is not None:
        saved.append(("requests as they ended", Path(args.stream_to)))
    if args.per_request is not None:
        name = args.per_request
        table = not name.endswith((".jsonl", ".jsonl.gz"))
        write = (simulation.write_parquet if name.endswith(".parquet") else simulation.write_csv if table
                 else simulation.write_jsonl)
        saved.append(("per-request table" if table else "per-request records", write(name)))
    if args.timeseries is not None:
        saved.append(("time series", simulation.write_timeseries(args.timeseries)))
    if args.trace_out is not None:
        saved.append(("pass trace", simulation.write_pass_trace(args.trace_out)))
    if args.report_html is not None:
        saved.append(("HTML report", simulation.write_html(args.report_html, command=args.command)))


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
            complain(parser.prog, describe(error) + hint, debug=args.debug)
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
            complain(parser.prog, f"the results could not be written: {describe(error)}", debug=args.debug)
        if "skipped_rows" in simulation.meta:
            report_skipped(simulation.meta["skipped_rows"])
        if not args.quiet:
            from mocker.reports.summary import summary_lines

            for line in args.assumptions:
                print_text(line)
            print_text("\n".join([format_report_table(simulation.report), *summary_lines(simulation)]))
            for what, path in saved:
                print_text(f"Saved {what} to: {path}")
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
        drop_stdout()
        return EXIT_CLOSED_PIPE
