"""Records replays of each trace format by the reference, and traces that it makes of others, for the tests.

usage: python tests/record_formats.py ORACLE

Writes tests/golden/formats.json.gz: per replay the files' text, the configuration, report and per-request rows; per
transformation or synthetic specification the sessions that come out.
"""
from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz_formats import FORMATS, random_replay, write

TARGET = Path(__file__).parent / "golden" / "formats.json.gz"
EDITS = [
    [{"op": "normalize"}], [{"op": "speed", "x": 3.0}], [{"op": "rescale_start", "n": 1000}],
    [{"op": "rescale_ready", "n": 5000}], [{"op": "expand", "n": 3}], [{"op": "duplicate", "n": 3}],
    [{"op": "round_robin", "n": 3}], [{"op": "random", "n": 3, "seed": 7}],
    [{"op": "random", "n": 1000, "seed": 2**63}],
]
SPECS = [
    {"block_size": 16, "num_sessions": 40, "turns_per_session": 3, "input_mean": 100, "input_stddev": 40.0,
     "output_mean": 30, "output_stddev": 20.0, "shared_prefix_ratio": 0.3, "num_prefix_groups": 5,
     "arrivals": "poisson", "qps": 7.5, "delays": "exponential", "delay_ms": 250.0, "seed": 42},
    {"block_size": 8, "num_sessions": 60, "turns_per_session": 1, "input_mean": 33, "input_stddev": 0.0,
     "output_mean": 5, "output_stddev": 2.5, "shared_prefix_ratio": 1.0, "num_prefix_groups": 0,
     "arrivals": "gamma", "qps": 100.0, "smoothness": 0.4, "delays": "none", "seed": 2**64 - 1},
    {"block_size": 512, "num_sessions": 50, "turns_per_session": 2, "input_mean": 3000, "input_stddev": 2000.0,
     "output_mean": 1, "output_stddev": 0.0, "shared_prefix_ratio": 0.5, "num_prefix_groups": 3,
     "arrivals": "gamma", "qps": 0.3, "smoothness": 2.5, "delays": "constant", "delay_ms": 12.5, "seed": 0},
    {"block_size": 4, "num_sessions": 10, "turns_per_session": 2, "input_mean": 3, "input_stddev": 1.0,
     "output_mean": 2, "output_stddev": 9.0, "shared_prefix_ratio": 0.0, "num_prefix_groups": 2,
     "arrivals": "constant", "qps": 3.0, "delays": "exponential", "delay_ms": 0.0, "seed": 1},
]


def ask(oracle: str, question: dict) -> dict | list:
    done = subprocess.run([oracle], input=json.dumps(question) + "\n", capture_output=True, text=True, timeout=20)
    return json.loads(next(line for line in done.stdout.splitlines() if line[0] in "{["))


def main() -> None:
    oracle = sys.argv[1]
    replays, edits = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in FORMATS:
            for seed in range(6):
                rng = random.Random(f"golden/{kind}/{seed}")
                rows, config = random_replay(rng, kind)
                files = write(rng, folder, rows, config)
                answer = ask(oracle, config | {"trace_file": files[0], "trace_files": files})
                if "report" in answer:
                    texts = [gzip.decompress(Path(f).read_bytes()).decode() if f.endswith(".gz")
                             else Path(f).read_text() for f in files]
                    replays.append({"files": texts, "config": config, "report": answer["report"],
                                    "per_request": answer["per_request"]})
        rows, _ = FORMATS["mooncake"](random.Random("golden/edits"), 4)
        for row in rows:
            row["timestamp"] += 100.0
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "edit.jsonl").write_text(text)
        for ops in EDITS:
            want = ask(oracle, {"trace_file": str(folder / "edit.jsonl"), "trace_block_size": 4, "dump": ops})
            edits.append({"ops": ops, "traces": want})
    specs = [{"spec": spec, "trace": ask(oracle, {"synthetic": spec})} for spec in SPECS]
    packed = gzip.compress(json.dumps({"replays": replays, "edit_file": text, "edits": edits,
                                       "specs": specs}).encode(), 9, mtime=0)
    TARGET.write_bytes(packed)


if __name__ == "__main__":
    main()
