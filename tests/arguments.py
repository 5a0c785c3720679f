"""What the tests of arguments share: each field with its default and kind, and how a call is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mocker.args import MockEngineArgs

U16, U32, U64 = 2**16 - 1, 2**32 - 1, 2**64 - 1

REFERENCE: dict[str, Any] = {
    "engine_type": "vllm",
    "num_gpu_blocks": None,
    "block_size": 0,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "speedup_ratio": 1.0,
    "decode_speedup_ratio": 1.0,
    "dp_size": 1,
    "startup_time": None,
    "worker_type": "aggregated",
    "planner_profile_data": None,
    "aic_backend": None,
    "aic_system": None,
    "aic_backend_version": None,
    "aic_tp_size": None,
    "aic_model_path": None,
    "aic_moe_tp_size": None,
    "aic_moe_ep_size": None,
    "aic_attention_dp_size": None,
    "aic_nextn": None,
    "aic_nextn_accept_rates": None,
    "aic_mtp_seed": 42,
    "aic_gemm_dtype": None,
    "aic_moe_dtype": None,
    "aic_fmha_dtype": None,
    "aic_kv_cache_dtype": None,
    "aic_comm_dtype": None,
    "gpu_memory_utilization": None,
    "mem_fraction_static": None,
    "free_gpu_memory_fraction": None,
    "enable_local_indexer": False,
    "bootstrap_port": None,
    "handoff_session_timeout_ms": 300000,
    "kv_bytes_per_token": None,
    "kv_transfer_bandwidth": None,
    "kv_transfer_timing_mode": "full_prompt",
    "reasoning": None,
    "response_replay_trace_path": None,
    "zmq_kv_events_port": None,
    "zmq_replay_port": None,
    "preemption_mode": "lifo",
    "router_queue_policy": None,
    "sglang": None,
    "trtllm": None,
    "num_g2_blocks": None,
    "num_g3_blocks": None,
    "offload_batch_size": None,
    "bandwidth_g1_to_g2_gbps": None,
    "bandwidth_g2_to_g1_gbps": None,
    "bandwidth_g2_to_g3_gbps": None,
    "bandwidth_g3_to_g2_gbps": None,
    "enable_g4_storage": False,
    "bandwidth_g2_to_g4_gbps": None,
    "bandwidth_g4_to_g2_gbps": None,
}
LATENCIES = {f"latency_{link}_ms": 0.0 for link in (
    "g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2")}
SCHEDULER: dict[str, Any] = {  # what the reference does not have
    "offload_eviction_policy": "lru",
    "offload_min_seen": 1,
    "offload_write_mode": "write_back",
    "scheduler_rules": "dynamo-mocker-1.3.0",
    "vllm_scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "max_model_len": None,
    "watermark": 0.0,
    "reserve_full_isl": True,
    "timing_model": None,
    "victim_score": None,
    "admission_score": None,
    "eviction_score": None,
}
DEFAULTS = REFERENCE | LATENCIES | SCHEDULER

# field -> (least, greatest) value; what stands beside a field is what it needs to be valid
INT_RANGES = {
    "num_gpu_blocks": (1, 2**57 - 1),  # times 64 tokens in a block stays below 2**63
    "max_num_seqs": (1, U64),
    "max_num_batched_tokens": (1, U64),
    "dp_size": (1, U32),
    "aic_tp_size": (0, U64),
    "aic_moe_tp_size": (0, U64),
    "aic_moe_ep_size": (0, U64),
    "aic_attention_dp_size": (0, U64),
    "aic_nextn": (1, 5),
    "aic_mtp_seed": (0, U64),
    "bootstrap_port": (0, U16),
    "zmq_kv_events_port": (0, U16),
    "zmq_replay_port": (0, U16),
    "handoff_session_timeout_ms": (1, U64),
    "kv_bytes_per_token": (0, U64),
    "num_g2_blocks": (0, U64),
    "num_g3_blocks": (0, U64),
    "offload_batch_size": (0, U64),
    "long_prefill_token_threshold": (0, U64),
    "max_model_len": (2, U64),
    "offload_min_seen": (1, 16),
}
FRACTIONS = ["gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction"]
NOT_NEGATIVE = [
    "speedup_ratio",
    "decode_speedup_ratio",
    "startup_time",
    "kv_transfer_bandwidth",
    "bandwidth_g1_to_g2_gbps",
    "bandwidth_g2_to_g1_gbps",
    "bandwidth_g2_to_g3_gbps",
    "bandwidth_g3_to_g2_gbps",
    "bandwidth_g2_to_g4_gbps",
    "bandwidth_g4_to_g2_gbps",
    *LATENCIES,
]
BOOLS = [
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enable_local_indexer",
    "enable_g4_storage",
    "reserve_full_isl",
]
CHOICES = {
    "engine_type": (["vllm", "sglang", "trtllm"], "Invalid engine_type '{}'. Must be 'vllm', 'sglang', or 'trtllm'."),
    "worker_type": (
        ["aggregated", "prefill", "decode"],
        "Invalid worker_type '{}'. Must be 'aggregated', 'prefill', or 'decode'.",
    ),
    "kv_transfer_timing_mode": (
        ["full_prompt", "destination_missing"],
        "Invalid kv_transfer_timing_mode '{}'. Must be 'full_prompt' or 'destination_missing'.",
    ),
    "preemption_mode": (["lifo", "fifo"], "Invalid preemption_mode: '{}'. Must be 'lifo' or 'fifo'."),
    "router_queue_policy": (["fcfs", "lcfs", "wspt"], "unknown queue policy: '{}', expected 'fcfs', 'lcfs', or 'wspt'"),
    "offload_eviction_policy": (
        ["lru", "lfu", "s3fifo", "belady"],
        "Invalid offload_eviction_policy '{}'. Must be 'lru', 'lfu', 's3fifo', or 'belady'.",
    ),
    "offload_write_mode": (
        ["write_back", "write_through"],
        "Invalid offload_write_mode '{}'. Must be 'write_back' or 'write_through'.",
    ),
    "scheduler_rules": (
        ["dynamo-mocker-1.3.0", "vllm-0.33", "vllm-0.33-async"],
        "Invalid scheduler_rules '{}'. Must be 'dynamo-mocker-1.3.0', 'vllm-0.33', or 'vllm-0.33-async'.",
    ),
    "vllm_scheduling_policy": (
        ["fcfs", "priority"],
        "Invalid vllm_scheduling_policy '{}'. Must be 'fcfs' or 'priority'.",
    ),
}
TEXTS = [
    "aic_backend",
    "aic_system",
    "aic_backend_version",
    "aic_model_path",
    "aic_gemm_dtype",
    "aic_moe_dtype",
    "aic_fmha_dtype",
    "aic_kv_cache_dtype",
    "aic_comm_dtype",
]
PATHS = ["planner_profile_data", "response_replay_trace_path"]
SETTABLE = {
    "num_gpu_blocks",
    "enable_prefix_caching",
    "worker_type",
    "aic_mtp_seed",
    "aic_nextn",
    "aic_nextn_accept_rates",
    "aic_tp_size",
    "aic_moe_tp_size",
    "aic_moe_ep_size",
    "aic_attention_dp_size",
    *TEXTS,
    *FRACTIONS,
}
NOT_NULL = {n for n, v in DEFAULTS.items() if v is not None} - {"max_num_seqs", "max_num_batched_tokens"}
NEEDS: dict[str, dict[str, Any]] = {
    "num_g3_blocks": {"num_g2_blocks": 1},
    "enable_g4_storage": {"num_g2_blocks": 1},
    **{name: {"scheduler_rules": "vllm-0.33"} for name in SCHEDULER},
    "offload_eviction_policy": {"num_g2_blocks": 1},
    "offload_min_seen": {"num_g2_blocks": 1},
    "offload_write_mode": {"num_g2_blocks": 1},
}


def refused(call: Any, *words: object) -> str:
    """Expect ``ValueError`` with all the words in its text."""
    with pytest.raises(ValueError) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert str(word) in text
    return text


def build(name: str, value: Any) -> MockEngineArgs:
    return MockEngineArgs(**{**NEEDS.get(name, {}), name: value})
