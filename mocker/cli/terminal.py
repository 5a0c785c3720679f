"""What every command shares: exit codes, messages, the progress bar, a closed pipe.

Exit codes: 0 done, 1 the run or the writing of its results failed, 2 a bad flag, argument or file, 130 interrupted,
141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141


# -- messages ------------------------------------------------------------------------------------------------------


def print_text(text: str) -> None:
    """Print on stdout, with a plain box where the terminal's encoding has no line-drawing characters."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate({**dict.fromkeys(map(ord, "┏┳┓┡╇┩└┴┘"), "+"), ord("━"): "-", ord("┃"): "|",
                               **dict(zip(map(ord, "▁▂▃▄▅▆▇█▏▕▲▼–"), "..::-=+#||^v-", strict=True))})
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    sys.stdout.write(text + "\n")


def describe(error: BaseException) -> str:
    """Return what went wrong as a text for a person."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    text = str(error)
    if isinstance(error, ValueError | ImportError) and text:
        return text
    name = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    return f"{name}: {text}" if text else name


def report_skipped(errors: Sequence[str], shown: int = 10) -> None:
    """Tell on stderr which rows of a trace were left out."""
    for error in errors[:shown]:
        sys.stderr.write(f"skipped: {error}\n")
    more = f", {len(errors) - shown:,} of them not shown" if len(errors) > shown else ""
    sys.stderr.write(f"skipped {len(errors):,} rows{more}\n")


def complain(prog: str, message: str, *, debug: bool) -> None:
    if debug and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    sys.stderr.write(f"{prog}: error: {message}\n")


def fail_usage(parser: argparse.ArgumentParser, args: argparse.Namespace, message: str) -> NoReturn:
    """Exit with code 2 and without the usage: for a flag whose value, not its use, is wrong."""
    complain(parser.prog, message, debug=args.debug)
    raise SystemExit(EXIT_USAGE)


def drop_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's own flush at exit does not complain about a closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def guarded(prog: str, body: Callable[[], int], *, debug: bool = False) -> int:
    """Run the body of a command and turn what it raises into a message and an exit code.

    Bad input (ValueError, OSError) gives 2, anything else 1. A command that wrote results before says so itself.
    """
    try:
        return body()
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_stdout()
        return EXIT_CLOSED_PIPE
    except Exception as error:
        usage = isinstance(error, ValueError | OSError)
        complain(prog, describe(error) + ("" if usage or debug else " (--debug shows where)"), debug=debug)
        return EXIT_USAGE if usage else EXIT_FAILED


# -- progress ---------------------------------------------------------------------------------------------------------

PROGRESS_DELAY_S = 1.0
"""A replay that is over before this shows no progress bar."""


@contextlib.contextmanager
def progress_bar(*, enabled: bool) -> Iterator[Callable[[int, int, float], None] | None]:
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
