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

COLUMNS = ("arrival_time_ms", "input_length", "output_length", "first_admit_ms", "first_token_ms", "last_token_ms",
           "ttst_ms", "reused_input_tokens", "decode_worker_idx", "terminal_status")
CASES = ("conv_rr4", "conv_single_small_pool", "conv_concurrency64", "conv_no_prefix_cache", "conv_trtllm",
         "conv_mtp2", "conv_sla", "conv_max_sim_time", "syn_rr8_fast", "conv_kv4", "syn_kv8_block16",
         "syn_kv_temperature0_overlap2", "conv_sglang", "conv_sglang_lpm_kv")


def digest(columns: dict) -> tuple[int, str]:
    """Number of rows and digest; `columns` maps names to equally long lists, absent ones count as all null."""
    count = len(columns["arrival_time_ms"])
    lines = sorted(json.dumps([columns[c][i] if c in columns else None for c in COLUMNS]) for i in range(count))
    return count, hashlib.sha256("\n".join(lines).encode()).hexdigest()


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
