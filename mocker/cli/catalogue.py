"""`mocker systems` and `mocker models`: what GPUs and models `mocker replay --model` knows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from .terminal import EXIT_OK, guarded, print_text

__all__ = ["models_main", "systems_main"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(str(row[i])) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in (head, *rows))


def _measured() -> Any:
    """Systems of the installed data package; None without it."""
    from mocker.aic import aic_systems

    try:
        return aic_systems()
    except ValueError:
        return None


def systems_main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run ``mocker systems``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog or "mocker systems", description="GPU systems: peaks, and engines with measured kernels.")
    parser.parse_args(list(sys.argv[1:] if argv is None else argv))

    def body() -> int:
        from mocker.aic import INSTALL
        from mocker.roofline import GPUS

        measured = _measured()
        rows = []
        for name in sorted({*GPUS, *(measured or {})}):
            gpu = GPUS.get(name)
            peaks = ["?"] * 3 if gpu is None else [f"{gpu.memory_gb:g}", f"{gpu.bandwidth_gbs:g}", f"{gpu.tflops:g}"]
            engines = "; ".join(f"{engine} {', '.join(versions)}"
                                for engine, versions in (measured or {}).get(name, {}).items())
            rows.append((name, *peaks, engines or "-"))
        print_text(_table(("system", "GB", "GB/s", "Tflop/s (16 bit)", "measured kernels of"), rows))
        if measured is None:
            print_text(f"Measured kernels need the package aiconfigurator-core: {INSTALL}")
        return EXIT_OK

    return guarded(parser.prog, body)


def models_main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run ``mocker models``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog or "mocker models",
        description="Models known by name; any other can be given by its config.json or the folder of it.")
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="only names that contain it")
    parser.add_argument("--system", metavar="NAME", help="only models with measured kernels there, and whose")
    args = parser.parse_args(list(sys.argv[1:] if argv is None else argv))

    def body() -> int:
        from mocker.aic import aic_models, aic_support

        names = [name for name in aic_models() if args.word.lower() in name.lower()]
        if args.system is None:
            print_text("\n".join(names) or f"no model name contains {args.word!r}")
            return EXIT_OK
        support = aic_support(args.system)
        rows = [(name, ", ".join(support[name])) for name in names if name in support]
        print_text(_table(("model", f"measured on {args.system}"), rows))
        return EXIT_OK

    return guarded(parser.prog, body)
