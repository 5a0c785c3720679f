"""Texts to tokens, and conversations to prompts as hash ids.

Lengths come from a tokenizer that the user names, or from a stated rule: a token for every `chars_per_token`
characters. A block of a prompt gets its id from its content, so prompts that begin alike share their first blocks,
whichever conversation they belong to. All turns of a conversation are cut from one stream of tokens: the k-th block
has one id for all of them.
"""
from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from .source import Source

__all__ = ["OPTIONS", "Blocks", "integer_option", "number_option", "tokens_of"]

CHARS_PER_TOKEN = 4.0
OPTIONS = frozenset({"tokenizer", "chars_per_token", "output_tokens", "max_turns"})
"""Options of formats that hold texts: see docs/formats.md."""



def tokens_of(source: Source) -> tuple[Callable[[str], Sequence[Any]], str]:
    """A function from a text to its tokens (any values that can be compared), and what rule it follows.

    Raises
    ------
    ValueError
        Options that contradict each other, or a tokenizer that is none.
    ImportError
        The tokenizer's package is missing.
    """
    tokenizer, chars = source.options.get("tokenizer"), source.options.get("chars_per_token")
    if tokenizer is not None and chars is not None:
        raise ValueError("tokenizer and chars_per_token exclude each other")
    if tokenizer is None:
        return _by_characters(CHARS_PER_TOKEN if chars is None else number_option("chars_per_token", chars))
    if isinstance(tokenizer, str):
        tokenizer = _named(tokenizer)
    encode = getattr(tokenizer, "encode", tokenizer)
    if not callable(encode):
        raise ValueError(f"tokenizer must be a function from text to tokens, or have .encode, is {tokenizer!r}")

    def tokens(text: str) -> Sequence[Any]:
        found = encode(text)
        found = getattr(found, "ids", found)        # the tokenizers package returns an object
        try:
            return [int(token) for token in found]
        except TypeError:
            raise ValueError(f"the tokenizer must return integers for a text, it returned {type(found).__name__}") \
                from None

    return tokens, "tokenizer"


def number_option(name: str, value: Any) -> float:
    """An option as a positive number.

    Raises
    ------
    ValueError
        It is none.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a positive number, is {value!r}")
    return number


def integer_option(source: Source, name: str) -> int | None:
    """An option as an integer of at least 1, None if it is not given.

    Raises
    ------
    ValueError
        It is none.
    """
    value = source.options.get(name)
    if value is None:
        return None
    number = number_option(name, value)
    if number != int(number):
        raise ValueError(f"{name} must be an integer, is {value!r}")
    return int(number)


def _by_characters(chars: float) -> tuple[Callable[[str], Sequence[str]], str]:
    """Pieces of `chars` characters, the last one perhaps shorter; a fraction is spread evenly."""
    def tokens(text: str) -> Sequence[str]:
        count = math.ceil(len(text) / chars)
        ends = [min(math.floor((k + 1) * chars), len(text)) for k in range(count)]
        if not ends:
            return []
        ends[-1] = len(text)
        return [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    return tokens, f"{chars:g} characters a token"


def _named(name: str) -> Any:
    """A tokenizer by `MODULE:NAME`, `tiktoken:ENCODING`, or the path of a tokenizer.json."""
    module, colon, attribute = name.rpartition(":")
    if name.endswith(".json"):
        package = "tokenizers"
    elif module == "tiktoken" or (
            colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        package = module
    else:
        raise ValueError(f"tokenizer {name!r} must be MODULE:FUNCTION, tiktoken:ENCODING or a tokenizer.json file")
    try:
        found: Any = importlib.import_module(package)
        if package == "tokenizers":
            return found.Tokenizer.from_file(name)
        return found.get_encoding(attribute).encode_ordinary if package == "tiktoken" else getattr(found, attribute)
    except ImportError as error:
        raise ImportError(
            f"tokenizer {name!r} needs the package {package}, which cannot be imported: {error}") from error
    except Exception as error:      # whatever foreign code raises for a bad name or file
        raise ValueError(f"tokenizer {name!r} cannot be loaded: {error}") from error


class Blocks:
    """Ids of blocks by their content."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ids: dict[bytes, int] = {}

    def ids(self, stream: Sequence[Any]) -> list[int]:
        """Ids of the blocks of a stream of tokens, the last one perhaps not full."""
        result = []
        for start in range(0, len(stream), self.block_size):
            block = stream[start:start + self.block_size]
            content = repr(block).encode("utf-8", "surrogatepass")
            # The content itself would keep all texts in memory.
            key = hashlib.blake2b(content, digest_size=16).digest()
            result.append(self._ids.setdefault(key, len(self._ids)))
        return result
