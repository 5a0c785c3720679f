"""Arrival, admission, token and end times of every request, and the report made of them."""

import math
import uuid as uuid_module
from dataclasses import dataclass, field


@dataclass
class Stats:
    arrival_ms: float
    input_length: int
    output_length: int
    first_admit_ms: float | None = None
    first_reused: int = 0
    reused: int = 0  # the most over all admissions
    tokens_ms: list[float] = field(default_factory=list)
    terminal: str | None = None

    def ttft(self) -> float | None:
        return max(self.tokens_ms[0] - self.arrival_ms, 0.0) if self.tokens_ms else None

    def e2e(self) -> float | None:
        return max(self.tokens_ms[-1] - self.arrival_ms, 0.0) if self.tokens_ms else None

    def ttst(self) -> float | None:
        return max(self.tokens_ms[1] - self.tokens_ms[0], 0.0) if len(self.tokens_ms) > 1 else None

    def tpot(self) -> float | None:
        gaps = len(self.tokens_ms) - 1
        return max(self.tokens_ms[-1] - self.tokens_ms[0], 0.0) / gaps if gaps > 0 else None

    def itls(self) -> list[float]:
        return [max(b - a, 0.0) for a, b in zip(self.tokens_ms, self.tokens_ms[1:], strict=False)]


class Collector:
    def __init__(self) -> None:
        self.requests: dict[int, Stats] = {}

    def on_arrival(self, uuid: int, at_ms: float, input_length: int, output_length: int) -> None:
        self.requests[uuid] = Stats(at_ms, input_length, output_length)

    def on_pass(self, step: dict, terminals: dict[int, str]) -> None:
        """Admissions count from the start of the pass, tokens from its end."""
        for uuid, reused in step["admissions"]:
            stats = self.requests[uuid]
            if stats.first_admit_ms is None:
                stats.first_admit_ms = step["start_ms"]
                stats.first_reused = reused
            stats.reused = max(stats.reused, reused)
        for uuid, token, *_ in step["output"]:
            if token is not None:
                self.requests[uuid].tokens_ms.append(step["end_ms"])
        for uuid, status in terminals.items():
            if self.requests[uuid].terminal is None:
                self.requests[uuid].terminal = status

    def report(self) -> dict:
        """Only requests that were admitted and got a token count; `output_length` is what was asked for."""
        done = [s for s in self.requests.values() if s.first_admit_ms is not None and s.tokens_ms]
        inputs = sum(s.input_length for s in done)
        outputs = sum(s.output_length for s in done)
        duration_ms = max([0.0] + [s.tokens_ms[-1] for s in done])
        duration_s = max(duration_ms / 1000.0, 1e-9)
        itls = [gap for s in done for gap in s.itls()]
        report = {
            "num_requests": len(self.requests),
            "completed_requests": len(done),
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "duration_ms": duration_ms,
            "wall_time_ms": 0.0,
            "request_throughput_rps": len(done) / duration_s,
            "input_throughput_tok_s": inputs / duration_s,
            "output_throughput_tok_s": outputs / duration_s,
            "total_throughput_tok_s": (inputs + outputs) / duration_s,
            "prefill_worker_seconds": 0.0,
            "decode_worker_seconds": 0.0,
            "prefill_gpus_per_worker": 0,
            "decode_gpus_per_worker": 0,
            "gpu_hours": 0.0,
            "processed_tokens": inputs + outputs,
            "processed_tokens_per_s": 0.0,
            "processed_output_tokens_per_s": 0.0,
            "prefix_cache_reused_ratio": sum(s.reused for s in done) / inputs if inputs else 0.0,
            "first_admission_prefix_cache_reused_ratio": sum(s.first_reused for s in done) / inputs if inputs else 0.0,
        }
        _distribution(report, "ttft", "_ms", [s.ttft() for s in done])
        _distribution(report, "ttst", "_ms", [s.ttst() for s in done if s.ttst() is not None])
        _distribution(report, "tpot", "_ms", [s.tpot() for s in done if s.tpot() is not None])
        _distribution(report, "itl", "_ms", itls)
        _distribution(report, "e2e_latency", "_ms", [s.e2e() for s in done])
        _distribution(report, "output_token_throughput_per_user", "", [1000.0 / gap for gap in itls if gap > 0.0])
        return report

    def per_request(self) -> list[dict]:
        """One row for each request that ended, by arrival and then by id."""
        rows = []
        for uuid, s in sorted(self.requests.items(), key=lambda item: (item[1].arrival_ms, item[0])):
            if s.terminal is None:
                continue
            row = dict.fromkeys(ROW)
            row["uuid"] = str(uuid_module.UUID(int=uuid))
            row["arrival_time_ms"] = s.arrival_ms
            row["first_admit_ms"] = s.first_admit_ms
            row["first_token_ms"] = s.tokens_ms[0] if s.tokens_ms else None
            row["last_token_ms"] = s.tokens_ms[-1] if s.tokens_ms else None
            row["ttft_ms"] = s.ttft()
            row["ttst_ms"] = s.ttst()
            row["e2e_latency_ms"] = s.e2e()
            row["itl_ms"] = s.tpot()
            row["input_length"] = s.input_length
            row["output_length"] = s.output_length
            row["reused_input_tokens"] = s.reused
            row["terminal_status"] = s.terminal
            rows.append(row)
        return rows


ROW = [
    "session_id",
    "turn_index",
    "uuid",
    "arrival_time_ms",
    "first_admit_ms",
    "first_token_ms",
    "last_token_ms",
    "ttft_ms",
    "ttst_ms",
    "e2e_latency_ms",
    "itl_ms",
    "input_length",
    "output_length",
    "reused_input_tokens",
    "prefill_worker_idx",
    "decode_worker_idx",
    "prefill_admit_ms",
    "source_held_ms",
    "destination_reserved_ms",
    "destination_activated_ms",
    "decode_admit_ms",
    "source_released_ms",
    "decode_reused_input_tokens",
    "prefill_route_overlap_tokens",
    "decode_route_overlap_tokens",
    "terminal_status",
]


def _rank(count: int, percent: float) -> int:
    """Nearest rank; a half goes up."""
    exact = (count - 1) * percent / 100.0
    below = math.floor(exact)
    return min(below + 1 if exact - below >= 0.5 else below, count - 1)


def _distribution(report: dict, name: str, unit: str, values: list[float]) -> None:
    values = sorted(values)
    mean = sum(values) / len(values) if values else 0.0
    spread = sum((value - mean) ** 2 for value in values) / len(values) if values else 0.0
    report[f"mean_{name}{unit}"] = mean
    report[f"min_{name}{unit}"] = values[0] if values else 0.0
    report[f"max_{name}{unit}"] = values[-1] if values else 0.0
    report[f"median_{name}{unit}"] = values[_rank(len(values), 50.0)] if values else 0.0
    for percent in (75, 90, 95, 99):
        report[f"p{percent}_{name}{unit}"] = values[_rank(len(values), float(percent))] if values else 0.0
    report[f"std_{name}{unit}"] = math.sqrt(spread)
