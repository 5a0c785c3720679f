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
