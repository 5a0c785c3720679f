"""What the flags can ask for and what does not exist yet, in one table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from .flags import dest


class Unsupported(NamedTuple):
    """A use of the flags whose feature does not exist yet."""

    what: str
    used: Callable[[argparse.Namespace], object]
    remedy: str


def has(flag: str, value: str) -> Callable[[argparse.Namespace], object]:
    return lambda args: getattr(args, dest(flag)) == value


def given(flag: str) -> Callable[[argparse.Namespace], object]:
    return lambda args: getattr(args, dest(flag)) not in ((None, "auto") if flag.endswith("-dtype") else (None,))


UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported("--planner-config", given("--planner-config"), "use --planner with a planner of your own"),
    Unsupported("--replay-mode online", has("--replay-mode", "online"), "use --replay-mode offline"),
)
"""Everything that the flags can ask for and that does not exist yet. Who adds a feature deletes its line here."""


def refuse_unsupported(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for entry in UNSUPPORTED:
        if entry.used(args):
            parser.error(f"{entry.what} is not supported yet; {entry.remedy}")
