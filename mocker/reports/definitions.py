"""Every metric of a report: its name, unit, exact definition, and which direction is better.

The HTML page, the comparison and the documentation all take them from here. "Served" requests were admitted and made
a first token; times are simulated.
"""
from __future__ import annotations

from typing import NamedTuple

__all__ = ["DISTRIBUTIONS", "OFFLOAD", "OUTCOMES", "STATISTICS", "TIERS", "TIME_PER_TOKEN", "TOTALS", "Metric",
           "describe"]


class Metric(NamedTuple):
    """One metric; `better` is 1 if more is better, -1 if less is, 0 if neither."""

    title: str
    unit: str
    definition: str
    better: int = 0


TOTALS: dict[str, Metric] = {
    "num_requests": Metric("Requests", "", "requests that arrived before the replay ended"),
    "completed_requests": Metric("Completed", "", "requests that made all their tokens", 1),
    "total_input_tokens": Metric("Input tokens", "tokens", "prompt tokens of the served requests"),
    "total_output_tokens": Metric("Output tokens", "tokens", "tokens that the served requests really made"),
    "duration_ms": Metric("Duration", "ms", "from time 0 to the last token of any served request", -1),
    "wall_time_ms": Metric("Wall time", "ms", "time that the replay took on the host, without loading and reporting"),
    "request_throughput_rps": Metric("Request throughput", "req/s", "completed requests / duration", 1),
    "input_throughput_tok_s": Metric("Input throughput", "tok/s", "input tokens / duration", 1),
    "output_throughput_tok_s": Metric("Output throughput", "tok/s", "output tokens / duration", 1),
    "total_throughput_tok_s": Metric("Total throughput", "tok/s", "(input + output tokens) / duration", 1),
    "prefill_worker_seconds": Metric("Prefill worker time", "s", "time that prefill workers were provisioned, summed",
                                     -1),
    "decode_worker_seconds": Metric("Worker time", "s", "time that aggregated or decode workers were provisioned, "
                                    "summed", -1),
    "prefill_gpus_per_worker": Metric("GPUs a prefill worker", "", "from the engine arguments"),
    "decode_gpus_per_worker": Metric("GPUs a worker", "", "from the engine arguments"),
    "gpu_hours": Metric("GPU hours", "h", "worker time x GPUs a worker, summed over the pools", -1),
    "goodput_completed_requests": Metric("Good requests", "", "completed requests within every SLA bound that is set",
                                         1),
    "goodput_request_throughput_rps": Metric("Request goodput", "req/s", "good requests / duration", 1),
    "goodput_output_throughput_tok_s": Metric("Output goodput", "tok/s", "output tokens of good requests / duration",
                                              1),
    "processed_tokens": Metric("Processed tokens", "tokens", "input + output tokens"),
    "processed_tokens_per_s": Metric("Simulation speed", "tok/s", "processed tokens / wall time"),
    "processed_output_tokens_per_s": Metric("Simulation speed, output", "tok/s", "output tokens / wall time"),
    "prefix_cache_reused_ratio": Metric("Cache-hit ratio", "", "prompt tokens found in the cache (the most over a "
                                        "request's admissions) / prompt tokens, of served requests", 1),
    "first_admission_prefix_cache_reused_ratio": Metric("Cache-hit ratio, first admission", "", "the same, of each "
                                                        "request's first admission only", 1),
}
"""Metrics that are one number, by key of the report."""

DISTRIBUTIONS: dict[str, Metric] = {
    "ttft_ms": Metric("TTFT", "ms", "time to first token: end of the pass that made it - arrival, of each served "
                      "request", -1),
    "ttst_ms": Metric("TTST", "ms", "time to second token: from the first token to the second, of each request with "
                      "two tokens", -1),
    "tpot_ms": Metric("TPOT, per request", "ms", "(last token - first token) / (output tokens - 1), one value a "
                      "request with two tokens or more; every request counts the same", -1),
    "itl_ms": Metric("ITL, pooled", "ms", "time between two tokens of one request that follow each other, one value a "
                     "gap; a long output counts more than a short one", -1),
    "e2e_latency_ms": Metric("End-to-end latency", "ms", "last token - arrival, of each completed request", -1),
    "output_token_throughput_per_user": Metric("Output speed per user", "tok/s", "1000 / gap, over the gaps of ITL "
                                               "that are above 0", 1),
}
"""Metrics that are distributions, by the end of their keys."""

STATISTICS = ("mean", "std", "min", "median", "p75", "p90", "p95", "p99", "max")
"""Statistics of a distribution; percentile p is the value at rank round((n - 1) * p / 100), halves up, from 0."""

TIERS = {"g2": "host (G2)", "g3": "disk (G3)", "g4": "remote (G4)"}
"""Storage tiers by their key in `report["offload"]`."""

OFFLOAD: dict[str, Metric] = {
    "promotions": Metric("Promotions", "", "times that a request waited for blocks from below, and got them"),
    "staged_promotions": Metric("Staged", "", "of these, through the host from the disk or the remote store"),
    "early_blocks": Metric("Early blocks", "", "blocks copied to the host before their eviction (write-through)"),
    "blocked_allocations": Metric("Blocked allocations", "", "times that room for a request was still being copied "
                                  "down", -1),
    "parked_ms": Metric("Parked", "ms", "time that requests waited for their promotions, summed", -1),
}
"""Metrics of KV offload as a whole, by key of `report["offload"]`."""

OUTCOMES: dict[str, str] = {
    "completed": "made all its tokens",
    "rejected": "larger than the KV pool, or refused by the router",
    "capacity": "stopped early: prompt and output outgrew the KV pool",
    "over_budget": "prompt larger than the batch budget, and chunked prefill is off",
    "failed": "its hand-off between the pools could not be made",
    "canceled": "given up by its client",
    "incomplete": "not finished when the replay ended",
}
"""How a request can end."""

TIME_PER_TOKEN = (
    ("TPOT, per request", "(last - first token) / (tokens - 1), averaged over requests",
     "`mean_tpot_ms`: TPOT of vLLM's benchmark; what GenAI-Perf and AIPerf call inter-token latency"),
    ("ITL, pooled", "all gaps between consecutive tokens, averaged over gaps",
     "`mean_itl_ms`: ITL of vLLM's and SGLang's benchmarks"),
    ("TPOT, pooled", "sum of (last - first token) / sum of (tokens - 1), over all requests",
     "the mean of pooled ITL by another way; a token-weighted mean of per-request TPOT"),
    ("ITL, per request", "each request's mean gap, averaged over requests",
     "the same numbers as TPOT, per request"),
    ("End to end per token", "(last token - arrival) / tokens, averaged over requests",
     "normalized latency; includes the wait for the first token"),
)
"""Names that tools give to the time between tokens: (name, definition, who uses it)."""


def describe(key: str) -> Metric | None:
    """The metric behind a key of a report; for a statistic of a distribution, with its name in the title."""
    if key in TOTALS:
        return TOTALS[key]
    statistic, _, name = key.partition("_")
    metric = DISTRIBUTIONS.get(name)
    if metric is not None and statistic in STATISTICS:
        return metric._replace(title=f"{metric.title} {statistic}", better=0 if statistic == "std" else metric.better)
    if key.removesuffix("_requests") in OUTCOMES:
        return Metric(key.removesuffix("_requests").replace("_", " ").capitalize(), "",
                      OUTCOMES[key.removesuffix("_requests")], -1)
    return None
