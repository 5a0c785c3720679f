"""Types of flag values, JSON objects given inline or as @FILE, and the flags that several commands have."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .terminal import describe

AIC_FLAGS = (
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
"""Flags of the performance model of the prefill load: name, type, meaning."""

def at_least(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return value

    return integer


def number_in(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
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


def json_object(parser: argparse.ArgumentParser, flag: str, text: str) -> dict[str, Any]:
    """Return the JSON object that a flag gives inline or as @FILE."""
    if text.startswith("@"):
        source = f"{flag} {text}"
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"{source} cannot be read: {describe(error)}")
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


def dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def add_reading_flags(group: Any) -> None:
    """The flags that say how a trace file is read, where they go beyond format and block size."""
    group.add_argument("--on-error", choices=("raise", "skip"), default="raise",
                       help="a row that cannot be read: stop, or leave it out, list it and go on (default: raise)")
    group.add_argument("--trace-option", metavar="NAME=VALUE", action="append", default=[],
                       help="an option of the format, see docs/formats.md; repeatable")
    group.add_argument("--trace-cache", metavar="DIR",
                       help="keep binary copies of the files that are read here, and map them the next time")


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `Trace.load` from these flags.

    Raises
    ------
    ValueError
        A --trace-option that is no assignment.
    """
    options: dict[str, Any] = {}
    if args.on_error != "raise":
        options["on_error"] = args.on_error
    if args.trace_cache is not None:
        options["cache"] = args.trace_cache
    for text in args.trace_option:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise ValueError(f"--trace-option {text}: expected NAME=VALUE")
        if name in options or name in ("path", "format", "block_size", "on_short_hash_ids", "on_error", "cache"):
            raise ValueError(f"--trace-option {text}: {name} is given twice, or has a flag of its own")
        options[name] = value
    return options


def text_or_file(text: str) -> str:
    """A text, or for @FILE what the file holds."""
    if not text.startswith("@"):
        return text
    with open(text[1:], encoding="utf-8") as file:
        return file.read()
