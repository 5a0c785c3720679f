"""A step's time in parts, from a compiled engine of `aiconfigurator-core`: the source of a `LatticeModel`.

Which operations see what is found out by asking for each of them at a few shapes; that the parts make up the whole is
then checked against whole steps. Where they do not, all operations count as ones that see the lengths.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

__all__ = ["EngineParts"]

# Requests and tokens of each. The first four prefills are one number of tokens, the last two one number of requests.
PREFILLS = ((1, 512, 0), (2, 256, 0), (4, 128, 1000), (1, 512, 9000), (4, 1024, 300))
DECODES = ((3, 2), (3, 700), (3, 5001), (3, 60_001))
CLOSE = 1e-9


class EngineParts:
    """Times of steps and of their parts, ms.

    Parameters
    ----------
    opened : callable
        Gives the package's `EngineHandle`; called when it is first needed.
    drafts : int
        Draft tokens of a speculative step.
    failed : callable
        Makes the exception to raise of one of the package.
    """

    def __init__(self, opened: Callable[[], Any], drafts: int, failed: Callable[[Exception], ValueError]) -> None:
        self.opened, self.failed, self.width = opened, failed, drafts + 1

    @cached_property
    def engine(self) -> Any:
        """The package's engine."""
        return self.opened()

    def open(self) -> None:
        """Open the engine now, to know whether there are data."""
        assert self.engine is not None

    def split(self) -> None:
        """Sort the operations, for the functions of parts: indices by what they see, and the form of the prompts'."""
        self.rest, self.lengths = self._decode_parts()
        self.by_tokens, self.by_requests, self.by_prompt = self._prefill_parts()
        self.square = self._is_square()

    def decode(self, batch: int, context: int) -> float:
        """A whole step for requests of `context` tokens."""
        engine = self.engine
        try:
            return float(engine.predict_decode_latency(batch, context, 2))
        except Exception as error:  # the package raises many kinds
            raise self.failed(error) from error

    def prefill(self, batch: int, tokens: int, prefix: int) -> float:
        """A whole step of prompts with `tokens` new tokens each after `prefix` cached ones."""
        engine = self.engine
        try:
            return float(engine.predict_prefill_latency(batch, tokens + prefix, prefix))
        except Exception as error:
            raise self.failed(error) from error

    def mixed(self, batch: int, tokens: int, prefix: int, decodes: int, context: int) -> float:
        """A whole step of prompts and `decodes` requests of `context` tokens.

        The package's three passes: all tokens through what is not attention, attention of the prompts, attention of the
        others. It takes one length for both, so the last comes from a call of its own.
        """
        engine = self.engine
        try:
            prompts = engine.mixed_step_breakdown(batch * (tokens + prefix), decodes, tokens + prefix, 1, prefix)
            others = engine.mixed_step_breakdown(0, decodes, context, 1)
        except Exception as error:
            raise self.failed(error) from error
        return float(prompts[1] + prompts[2] + others[3])

    def mixed_width(self) -> int:
        """Tokens of a decoding request in a mixed step; 0 if the package does not take our attention for its own."""
        prompts = self.engine.evaluate_context_ops(self.by_prompt, batch_size=1, s=64)
        others = self.engine.evaluate_generation_ops(self.lengths, batch_size=1, s=64)
        names = {op[0] for op in prompts}, {op[0] for op in others}
        return self.width if names == ({"context_attention"}, {"generation_attention"}) else 0

    def decode_rest(self, batch: int) -> float:
        """Operations that do not see the lengths."""
        return self._generation(self.rest, max(batch, 1), 2)

    def decode_attention(self, batch: int, context: int) -> float:
        """Operations that do."""
        return self._generation(self.lengths, max(batch, 1), context + 1)

    def prefill_rest(self, tokens: int) -> float:
        """Operations that see no more than the tokens of the pass."""
        return self._context(self.by_tokens, 1, max(tokens, 1), 0)

    def prefill_logits(self, batch: int) -> float:
        """Operations that see no more than the number of requests."""
        return self._context(self.by_requests, max(batch, 1), 1, 0)

    def prefill_attention(self, batch: int, tokens: int, prefix: int) -> float:
        """All other operations."""
        return self._context(self.by_prompt, max(batch, 1), max(tokens, 1), prefix)

    def _generation(self, which: Sequence[int], batch: int, length: int) -> float:
        if not which:
            return 0.0
        try:
            return _sum(self.engine.evaluate_generation_ops(which, batch_size=batch * self.width, s=length))
        except Exception as error:
            raise LookupError(str(error)) from error

    def _context(self, which: Sequence[int], batch: int, tokens: int, prefix: int) -> float:
        if not which:
            return 0.0
        try:
            return _sum(self.engine.evaluate_context_ops(which, batch_size=batch, s=tokens, prefix=prefix))
        except Exception as error:
            raise LookupError(str(error)) from error

    def _count(self, evaluate: Callable[..., Any]) -> int:
        """Operations of a list: the package says so only by refusing the next one."""
        high = 1
        while _there(evaluate, high):
            high *= 2
        low = high // 2
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if _there(evaluate, middle) else (low, middle)
        return low

    def _decode_parts(self) -> tuple[list[int], list[int]]:
        everything = list(range(self._count(self.engine.evaluate_generation_ops)))
        try:
            seen = [[self._generation([i], batch, length) for batch, length in DECODES] for i in everything]
            rest = [i for i, values in enumerate(seen) if len(set(values)) == 1]
            lengths = [i for i in everything if i not in rest]
            if all(_near(self._generation(rest, b, s) + self._generation(lengths, b, s), self.decode(b, s - 1))
                   for b, s in ((5, 900), (17, 3001))):
                return rest, lengths
        except (LookupError, ValueError):
            pass
        return [], everything

    def _prefill_parts(self) -> tuple[list[int], list[int], list[int]]:
        everything = list(range(self._count(self.engine.evaluate_context_ops)))
        try:
            seen = [[self._context([i], *shape) for shape in PREFILLS] for i in everything]
            tokens = [i for i, v in enumerate(seen) if v[0] == v[1] == v[2] == v[3]]
            requests = [i for i, v in enumerate(seen) if i not in tokens and v[0] == v[3] and v[2] == v[4]]
            prompt = [i for i in everything if i not in tokens and i not in requests]
            if all(_near(self._context(tokens, 1, b * n, 0) + self._context(requests, b, 1, 0)
                         + self._context(prompt, b, n, p), self.prefill(b, n, p))
                   for b, n, p in ((1, 700, 64), (3, 451, 5000))):
                return tokens, requests, prompt
        except (LookupError, ValueError):
            pass
        return [], [], everything

    def _is_square(self) -> bool:
        """Whether time is linear in the square that is left to compute, at one length of the whole."""
        try:
            for batch, length in ((1, 4096), (2, 9000)):
                whole, half, end = (self._context(self.by_prompt, batch, length - prefix, prefix)
                                    for prefix in (0, length // 2, length - 1))
                left, least = 0.75, 1 - ((length - 1) / length) ** 2
                if not _near(half, end + (whole - end) * ((left - least) / (1 - least))):
                    return False
        except LookupError:
            return False
        return True


def _sum(values: Sequence[tuple[Any, ...]]) -> float:
    total = 0.0
    for value in values:
        total += value[1]
    return total


def _there(evaluate: Callable[..., Any], index: int) -> bool:
    try:
        evaluate([index], batch_size=1, s=64)
    except ValueError as error:
        return "out of range" not in str(error)
    return True


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= CLOSE * abs(other)
