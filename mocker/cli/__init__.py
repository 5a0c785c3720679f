"""The command `mocker`: one module for each subcommand, what they share in `terminal` and `flags`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from mocker._version import __version__

from .calibrate import calibrate_main
from .catalogue import models_main, systems_main
from .compare import compare_main
from .optimize import optimize_main
from .replay import replay_main
from .replay_flags import SCHEDULER_RULES
from .sweep import sweep_main
from .terminal import EXIT_OK
from .trace import trace_main
from .unsupported import UNSUPPORTED

__all__ = ["SCHEDULER_RULES", "UNSUPPORTED", "main", "replay_main"]

_COMMANDS: dict[str, tuple[Callable[[Sequence[str], str], int], str]] = {
    "replay": (replay_main, "simulate serving a trace or a synthetic workload, and report"),
    "compare": (compare_main, "say what differs between reports, by how much, and whether that is better"),
    "trace": (trace_main, "look at traces, check them, change them, make new ones"),
    "sweep": (sweep_main, "simulate a workload on many configurations, and tabulate"),
    "optimize": (optimize_main, "search configurations: cheapest within bounds, highest rate, cost against latency"),
    "calibrate": (calibrate_main, "fit a timing model to logs of an engine"),
    "systems": (systems_main, "list GPU systems: peaks, engines with measured kernels"),
    "models": (models_main, "list models known by name"),
}

_EXAMPLES = """\
  mocker replay trace.jsonl --num-workers 4 --report-html run.html
  mocker replay trace.jsonl --num-workers 4 --router-mode kv_router --report-html routed.html
  mocker compare run.html routed.html
  mocker sweep trace.jsonl --grid num_workers=2,4,8"""


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
        epilog=f"commands:\n{commands}\n\nexamples:\n{_EXAMPLES}\n\n{prog} COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mocker {__version__}")
    parser.add_argument("command", nargs="?", choices=tuple(_COMMANDS), metavar="COMMAND", help=argparse.SUPPRESS)
    parser.parse_args(arguments)
    parser.print_help()
    return EXIT_OK
