"""Groups of engine arguments: reasoning, SGLang's and TensorRT-LLM's own, acceptance rates, what rules do not model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from .fields import (
    BOOL,
    COUNT,
    DECIMAL,
    FRACTION,
    NOT_FINITE,
    NOT_NEGATIVE,
    TEXT,
    U32,
    BadValue,
    Choice,
    Field,
    Record,
    log,
    show,
)

DEFAULT_ACCEPT_RATES = (0.85, 0.3, 0.0, 0.0, 0.0)


class ReasoningConfig(Record):
    """Thinking tokens at the front of each answer.

    Parameters
    ----------
    start_thinking_token_id, end_thinking_token_id : int
        The tokens that open and close the thinking part.
    thinking_ratio : float
        The thinking part's share of the answer, in [0, 1].
    """

    __slots__ = ()

    start_thinking_token_id = Field[int](U32, "Token that opens the thinking part.")
    end_thinking_token_id = Field[int](U32, "Token that closes the thinking part.")
    thinking_ratio = Field[float](FRACTION, "Share of the answer that is thinking.")

    def __init__(self, start_thinking_token_id: int, end_thinking_token_id: int, thinking_ratio: float) -> None:
        self._init(locals())

    def num_thinking_tokens(self, max_output_tokens: int) -> int:
        """Count the thinking tokens, both marks included, of an answer of the given length."""
        if max_output_tokens < 2:
            return 0
        tokens = math.floor(float(max_output_tokens) * self.thinking_ratio)
        return 0 if tokens == 0 else min(max(tokens, 2), max_output_tokens)

    def num_response_tokens(self, max_output_tokens: int) -> int:
        """Count the tokens after the thinking part of an answer of the given length."""
        return max(max_output_tokens - self.num_thinking_tokens(max_output_tokens), 0)


class SglangArgs(Record):
    """Settings that only the SGLang engine reads; None means the engine's default.

    Parameters
    ----------
    schedule_policy : str, optional
        "fifo" (also "fcfs") or "lpm", in lower case; the engine takes any other text as "fifo" and a warning is logged.
    page_size : int, optional
        Tokens in one page of the radix cache (default 1); fills ``block_size``.
    max_prefill_tokens : int, optional
        Prompt tokens in one batch (default 16384).
    chunked_prefill_size : int, optional
        Prompt tokens in one chunk (default 8192), a multiple of the block size.
    clip_max_new_tokens : int, optional
        Output tokens that admission reserves at most (default 4096).
    schedule_conservativeness : float, optional
        Share of the expected output that admission reserves, finite and not negative (default 1.0).
    conserve_slots : bool
        Keep exact books under retraction, where the reference loses slots and frees some twice (default False).
    """

    __slots__ = ()

    schedule_policy = Field[str | None](TEXT, "Order of the waiting queue: fifo, fcfs or lpm.", nullable=True)
    page_size = Field[int | None](COUNT, "Tokens in one page of the radix cache.", nullable=True)
    max_prefill_tokens = Field[int | None](COUNT, "Prompt tokens in one batch.", nullable=True)
    chunked_prefill_size = Field[int | None](COUNT, "Prompt tokens in one chunk.", nullable=True)
    clip_max_new_tokens = Field[int | None](COUNT, "Output tokens that admission reserves at most.", nullable=True)
    schedule_conservativeness = Field[float | None](
        NOT_NEGATIVE, "Share of the expected output that admission reserves.", nullable=True
    )
    conserve_slots = Field[bool](BOOL, "Exact books under retraction, unlike the reference.")

    def __init__(
        self,
        schedule_policy: str | None = None,
        page_size: int | None = None,
        max_prefill_tokens: int | None = None,
        chunked_prefill_size: int | None = None,
        clip_max_new_tokens: int | None = None,
        schedule_conservativeness: float | None = None,
        conserve_slots: bool = False,
    ) -> None:
        self._init(locals())

    @classmethod
    def _finish(cls, values: dict[str, Any], names: list[str]) -> list[tuple[str, str]]:
        policy = values["schedule_policy"]
        if policy not in (None, "fifo", "fcfs", "lpm"):
            log.warning("sglang.schedule_policy %s is none of 'fifo', 'fcfs', 'lpm': 'fifo' is used", show(policy))
        return []


class TrtllmArgs(Record):
    """Settings that only the TensorRT-LLM engine reads.

    Parameters
    ----------
    capacity_scheduler_policy : str, optional
        Only "guaranteed_no_evict" (the default) is simulated.
    """

    __slots__ = ()

    capacity_scheduler_policy = Field[str | None](
        Choice(
            "guaranteed_no_evict",
            wrong="engine_type=trtllm supports only capacity_scheduler_policy='guaranteed_no_evict', got '{value}'",
        ),
        "Admission policy of the capacity scheduler.",
        nullable=True,
    )

    def __init__(self, capacity_scheduler_policy: str | None = None) -> None:
        self._init(locals())


def parse_accept_rates(nextn: int, text: str | None) -> list[float]:
    """Read comma-separated rates, padded with 0 or cut to ``nextn``; raises ``BadValue``."""
    text = "" if text is None else text.strip()
    rates: list[float] = []
    for index, item in enumerate(text.split(",") if text else ()):
        word = item.strip()
        if not (DECIMAL.fullmatch(word) or NOT_FINITE.fullmatch(word)):
            shown = json.dumps(item if len(item) <= 80 else item[:77] + "...", ensure_ascii=False)
            raise BadValue(
                (
                    "aic_nextn_accept_rates",
                    f"invalid aic_nextn_accept_rates value {shown}: not a decimal number; "
                    "give numbers in [0, 1] with commas between them, such as '0.85,0.3'",
                )
            )
        rate = float(word)
        if not 0.0 <= rate <= 1.0:
            raise BadValue(
                (
                    "aic_nextn_accept_rates",
                    f"aic_nextn_accept_rates[{index}] must be finite and in [0, 1], got {rate}",
                )
            )
        rates.append(rate)
    if not text:
        rates = list(DEFAULT_ACCEPT_RATES)
    return rates[:nextn] + [0.0] * (nextn - len(rates))


def format_accept_rates(rates: Sequence[float]) -> str:
    """Write rates in canonical form: shortest digits, no exponent, no ``.0``."""
    words = (format(Decimal(repr(rate)), "f") for rate in rates)
    return ",".join(word[:-2] if word.endswith(".0") else word for word in words)


SCORES = ("victim_score", "admission_score", "eviction_score")
"""Fields with functions of the user's, see :mod:`mocker.hooks`."""

SCHEDULER_FIELDS = (
    "scheduler_rules",
    "vllm_scheduling_policy",
    "long_prefill_token_threshold",
    "max_model_len",
    "watermark",
    "reserve_full_isl",
)


OFFLOAD_FIELDS = (
    "latency_g1_to_g2_ms",
    "latency_g2_to_g1_ms",
    "latency_g2_to_g3_ms",
    "latency_g3_to_g2_ms",
    "latency_g2_to_g4_ms",
    "latency_g4_to_g2_ms",
)
"""Settings of the storage tiers that the reference does not have."""


def score_conflicts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Find scores of the user's that nobody would ask; arguments and result as of `scheduler_conflicts`."""
    problems = []
    if values["victim_score"] is not None and values["engine_type"] == "trtllm":
        rule = "victim_score says who is preempted, and engine_type='trtllm' preempts nobody"
        problems.append(("victim_score", f"{rule}; leave it out"))
    return problems


def scheduler_conflicts(
    values: Mapping[str, Any], *, vllm: bool = True, preset: bool = True
) -> list[tuple[str, str]]:
    """Find what scheduler rules do not model, and with what vLLM would not start.

    Parameters
    ----------
    values : mapping
        A value for every field of :class:`MockEngineArgs`.
    vllm : bool
        The rules are not those of the reference.
    preset : bool
        The rules are vLLM's own.

    Returns
    -------
    list of (str, str)
        Fields, and what is wrong with them.
    """
    problems = []
    engine, budget, longest = values["engine_type"], values["max_num_batched_tokens"], values["max_model_len"]
    if engine != "vllm":
        problems.append(("scheduler_rules", f"scheduler rules are for engine_type='vllm', got engine_type='{engine}'"))
    if values["aic_nextn"] is not None:
        rule = "scheduler rules do not model speculative decoding"
        problems.append(("aic_nextn", f"{rule}, got aic_nextn={values['aic_nextn']}; leave it out"))
    if vllm and values["worker_type"] != "aggregated":
        rule = "scheduler rules do not model hand-off between prefill and decode workers"
        problems.append(("worker_type", f"{rule}, got worker_type='{values['worker_type']}'; use 'aggregated'"))
    if vllm and values["num_g2_blocks"] is not None:
        rule = "scheduler rules do not model storage tiers"
        problems.append(("num_g2_blocks", f"{rule}, got num_g2_blocks={values['num_g2_blocks']}; leave it out"))
    if values["preemption_mode"] == "fifo" and (preset or values["vllm_scheduling_policy"] == "priority"):
        problems.append(("preemption_mode", "preemption_mode 'fifo' has no counterpart in vLLM; use 'lifo'"))
    threshold = values["long_prefill_token_threshold"]
    if longest is not None and threshold > longest:
        text = f"long_prefill_token_threshold {threshold} exceeds max_model_len {longest}; vLLM does not start so"
        problems.append(("long_prefill_token_threshold", text))
    if vllm and budget is not None:
        seqs = values["max_num_seqs"]
        if seqs is not None and seqs > budget:
            text = f"max_num_seqs {seqs} exceeds max_num_batched_tokens {budget}; vLLM does not start so"
            problems.append(("max_num_seqs", text))
        if not values["enable_chunked_prefill"] and longest is not None and longest > budget:
            text = f"max_num_batched_tokens {budget} is smaller than max_model_len {longest}"
            problems.append(
                ("max_num_batched_tokens", f"{text} with enable_chunked_prefill off; vLLM does not start so")
            )
    return problems
