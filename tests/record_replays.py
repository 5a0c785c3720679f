"""Turns recorded replays of the reference into what is committed: report, row count and a digest of the rows.

usage: python tests/record_replays.py FOLDER   (of NAME.json.gz files with config, report and per_request)

Writes tests/golden/replays.json. The digest is over the per-request rows as JSON lines in sorted order.
"""
from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path

from mocker import KvRouterConfig, MockEngineArgs

COLUMNS = ("arrival_time_ms", "input_length", "output_length", "first_admit_ms", "first_token_ms", "last_token_ms",
           "ttst_ms", "reused_input_tokens", "decode_worker_idx", "terminal_status")
HANDOFF_COLUMNS = (
    "prefill_worker_idx", "prefill_admit_ms", "source_held_ms", "destination_reserved_ms", "destination_activated_ms",
    "decode_admit_ms", "source_released_ms", "decode_reused_input_tokens", "prefill_route_overlap_tokens",
    "decode_route_overlap_tokens")
CASES = ("conv_rr4", "conv_single_small_pool", "conv_concurrency64", "conv_no_prefix_cache", "conv_trtllm",
         "conv_mtp2", "conv_sla", "conv_max_sim_time", "syn_rr8_fast", "conv_kv4", "syn_kv8_block16",
         "syn_kv_temperature0_overlap2", "conv_sglang", "conv_sglang_lpm_kv",
         "conv_disagg_rr", "conv_disagg_kv", "syn_disagg_sglang")


def digest(columns: dict) -> tuple[int, str]:
    """Number of rows and digest; `columns` maps names to equally long lists, absent ones count as all null."""
    count = len(columns["arrival_time_ms"])
    names = COLUMNS + HANDOFF_COLUMNS if "source_held_ms" in columns else COLUMNS
    lines = sorted(json.dumps([columns[c][i] if c in columns else None for c in names]) for i in range(count))
    return count, hashlib.sha256("\n".join(lines).encode()).hexdigest()


def engines(options: dict) -> dict:
    """The keywords of `simulate` from a configuration of the reference's driver."""
    options = dict(options)
    if "engine_args" in options:
        options["extra_engine_args"] = options.pop("engine_args")
    for name in ("extra_engine_args", "prefill_engine_args", "decode_engine_args"):
        if name in options:
            options[name] = MockEngineArgs.from_json(json.dumps(options[name]))
    if "router_config" in options:
        options["router_config"] = KvRouterConfig.from_json(json.dumps(options["router_config"]))
    return options


def main() -> None:
    out = {}
    for name in CASES:
        with gzip.open(Path(sys.argv[1]) / f"{name}.json.gz", "rt") as file:
            recorded = json.load(file)
        rows, sha256 = digest(recorded["per_request"])
        out[name] = {"config": recorded["config"], "report": recorded["report"], "rows": rows, "sha256": sha256}
    target = Path(__file__).parent / "golden" / "replays.json"
    target.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
