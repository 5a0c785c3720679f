"""Engine arguments: names, defaults, validation and JSON of `MockEngineArgs`.

What a value may be is in `fields`, groups of arguments are in `engine_options`, requests in `request`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .engine_options import (
    OFFLOAD_FIELDS,
    SCHEDULER_FIELDS,
    SCORES,
    ReasoningConfig,
    SglangArgs,
    TrtllmArgs,
    format_accept_rates,
    parse_accept_rates,
    scheduler_conflicts,
    score_conflicts,
)
from .fields import (
    BOOL,
    COUNT,
    FILE_PATH,
    FRACTION,
    NOT_NEGATIVE,
    PORT,
    SIZE,
    SIZE_OR_OFF,
    TEXT,
    U32_MAX,
    U64_MAX,
    BadValue,
    Blocks,
    Choice,
    DefaultCount,
    Field,
    Float,
    Int,
    Nested,
    Record,
    ScoreValue,
    SettableField,
    TimingValue,
    one_of,
    read_json,
    show,
)
from .request import DirectRequest

__all__ = [
    "FIELDS",
    "DirectRequest",
    "Field",
    "MockEngineArgs",
    "ReasoningConfig",
    "Record",
    "SglangArgs",
    "TrtllmArgs",
]

DEFAULT_NUM_GPU_BLOCKS = 16384
DEFAULT_BLOCK_SIZE: Mapping[str, int] = MappingProxyType({"vllm": 64, "sglang": 1, "trtllm": 32})
MAX_POOL_TOKENS = 2**63 - 1
EVICTION_POLICIES = ("lru", "lfu", "s3fifo", "belady")            # of host memory: `_offload_policy.pyx`
WRITE_MODES = ("write_back", "write_through")
HOST_FIELDS = ("offload_eviction_policy", "offload_min_seen", "offload_write_mode")      # beyond the reference's tiers
DEFAULT_SCHEDULER_RULES = "dynamo-mocker-1.3.0"
SCHEDULER_RULES = (DEFAULT_SCHEDULER_RULES, "vllm-0.33", "vllm-0.33-async")  # what each switches: `mocker.rules`
_RULED = frozenset((                   # fields with rules beyond that of the pool's size; their defaults keep them
    "num_g2_blocks", "num_g3_blocks", "offload_batch_size", "enable_g4_storage", *HOST_FIELDS, "aic_nextn",
    "aic_nextn_accept_rates", *SCHEDULER_FIELDS, *SCORES))


class MockEngineArgs(Record, quick=True):
    """The settings of one simulated engine.

    Every parameter is also an attribute; those with a setter say so. Values are checked and completed on the way in:
    ``block_size`` and ``num_gpu_blocks`` are never 0 or None afterwards, names are in lower case, a 0 that turns a
    storage tier off is None, and ``aic_nextn_accept_rates`` has exactly ``aic_nextn`` numbers.

    Parameters
    ----------
    engine_type : {"vllm", "sglang", "trtllm"}
        The engine that is simulated.
    num_gpu_blocks : int, optional
        Blocks in the KV pool. Default 16384; with ``aic_backend`` an engine gets as many as fit its GPUs' memory.
    block_size : int
        Tokens in one block; 0 picks 64 (vllm), 32 (trtllm), or the page size or 1 (sglang). A power of two in
        2..=1024 for vllm and trtllm.
    max_num_seqs, max_num_batched_tokens : int, optional
        Limits of one pass: running requests and tokens. None: unlimited.
    enable_prefix_caching, enable_chunked_prefill : bool
        Reuse of cached prompt blocks; splitting of long prompts over passes.
    speedup_ratio, decode_speedup_ratio : float
        Predicted times are divided by the first, decode times by both. 0: not scaled.
    dp_size : int
        Data-parallel ranks of a worker.
    startup_time : float, optional
        Seconds until a new worker is ready.
    worker_type : {"aggregated", "prefill", "decode"}
        What the worker does. Settable.
    planner_profile_data : str or os.PathLike, optional
        Profile (NPZ, JSON, or a folder of profiler results) that the timing model is made from, when an engine is;
        see :mod:`mocker.timing`.
    aic_backend, aic_system, aic_backend_version, aic_tp_size, aic_model_path, aic_moe_tp_size, aic_moe_ep_size, \
    aic_attention_dp_size, aic_gemm_dtype, aic_moe_dtype, aic_fmha_dtype, aic_kv_cache_dtype, aic_comm_dtype : optional
        What a performance database is asked for, when an engine is made; see :mod:`mocker.aic`. Settable.
    aic_nextn : int, optional
        Draft tokens of a speculative decode step, 1..=5. Settable.
    aic_nextn_accept_rates : str, optional
        Acceptance rate of each draft token, given that those before it were accepted: "0.85,0.3". Settable.
    aic_mtp_seed : int
        Seed of the draft sampler. Settable.
    gpu_memory_utilization, mem_fraction_static, free_gpu_memory_fraction : float, optional
        Memory fractions in [0, 1]. Settable.
    enable_local_indexer : bool
        A worker-local index of cached blocks.
    bootstrap_port, zmq_kv_events_port, zmq_replay_port : int, optional
        Ports of a live worker.
    handoff_session_timeout_ms : int
        Limit of a live prefill/decode handoff.
    kv_bytes_per_token : int, optional
        Bytes of one token's KV state.
    kv_transfer_bandwidth : float, optional
        GB/s between a prefill and a decode worker. 0 or None: no delay.
    kv_transfer_timing_mode : {"full_prompt", "destination_missing"}
        Which part of the prompt a transfer is charged for.
    reasoning : ReasoningConfig, optional
        Thinking tokens.
    response_replay_trace_path : str or os.PathLike, optional
        Trace with the output tokens to replay.
    preemption_mode : {"lifo", "fifo"}
        Whether the newest or the oldest running request is preempted.
    router_queue_policy : {"fcfs", "lcfs", "wspt"}, optional
        Takes the place of the router's own queue policy.
    sglang : SglangArgs, optional
        Settings of the SGLang engine.
    trtllm : TrtllmArgs, optional
        Settings of the TensorRT-LLM engine.
    num_g2_blocks, num_g3_blocks : int, optional
        Blocks in host memory and on disk; 0 or None turns the tier off.
    offload_batch_size : int, optional
        Blocks offloaded together; 0 or None: the default.
    bandwidth_g1_to_g2_gbps, bandwidth_g2_to_g1_gbps, bandwidth_g2_to_g3_gbps, bandwidth_g3_to_g2_gbps, \
    bandwidth_g2_to_g4_gbps, bandwidth_g4_to_g2_gbps : float, optional
        GB/s between the storage tiers.
    enable_g4_storage : bool
        An object store behind host memory.
    latency_g1_to_g2_ms, latency_g2_to_g1_ms, latency_g2_to_g3_ms, latency_g3_to_g2_ms, latency_g2_to_g4_ms, \
    latency_g4_to_g2_ms : float
        What each transfer between the storage tiers takes beside the time of its bytes, ms.
    offload_eviction_policy : {"lru", "lfu", "s3fifo", "belady"}
        Which blocks make room in host memory: as in the reference, the least used, S3-FIFO's, or those whose next
        request in the trace is farthest (an upper bound, in replays only).
    offload_min_seen : int
        A block is copied to host memory from the so-manieth time on that the GPU evicts it.
    offload_write_mode : {"write_back", "write_through"}
        Blocks are copied to host memory when the GPU evicts them, as in the reference, or as soon as they have been
        computed, so that their eviction need not wait.
    scheduler_rules : {"dynamo-mocker-1.3.0", "vllm-0.33", "vllm-0.33-async"}
        Whose scheduler decides: the reference's, that of vLLM 0.33, or vLLM's asynchronous one; see
        :mod:`mocker.rules`. The last two are for aggregated "vllm" workers without drafts and storage tiers, and
        only with them the following may differ from their defaults, which are vLLM's.
    vllm_scheduling_policy : {"fcfs", "priority"}
        vLLM's ``scheduling_policy`` (here the name of a method): order of the waiting requests, and who is preempted.
    long_prefill_token_threshold : int
        Most tokens of one request in a pass while there is another; 0: no cap.
    max_model_len : int, optional
        Tokens of prompt and output together.
    watermark : float
        Part of the pool, in [0, 1), that an admission leaves free while somebody runs.
    reserve_full_isl : bool
        Admit a request only if its whole known sequence fits, not only its first chunk.
    timing_model : mocker.timing.TimingModel or path, optional
        How long passes take, in place of the polynomial; see :mod:`mocker.timing`.
    victim_score, admission_score, eviction_score : function, or VictimScore, AdmissionScore, EvictionScore, optional
        Who is preempted, which waiting request is admitted next, which cached blocks are evicted; see
        :mod:`mocker.hooks`.

    Raises
    ------
    ValueError
        For a value that is not allowed: the message names each bad field, its value and what is allowed.
    """

    __slots__ = ()

    engine_type = Field[str](
        Choice(
            "vllm", "sglang", "trtllm", wrong="Invalid engine_type '{value}'. Must be 'vllm', 'sglang', or 'trtllm'."
        ),
        "Engine that is simulated.",
    )
    num_gpu_blocks = SettableField[int](Blocks(1, U64_MAX), "Blocks in the KV pool.", nullable=True)
    block_size = Field[int](Int(0, U64_MAX, " (0 picks the engine's default)"), "Tokens in one block.")
    max_num_seqs = Field[int | None](COUNT, "Running requests in one pass; None is unlimited.", nullable=True)
    max_num_batched_tokens = Field[int | None](COUNT, "Tokens in one pass; None is unlimited.", nullable=True)
    enable_prefix_caching = SettableField[bool](BOOL, "Cached prompt blocks are used again.")
    enable_chunked_prefill = Field[bool](BOOL, "A long prompt may be split over several passes.")
    speedup_ratio = Field[float](NOT_NEGATIVE, "Divides all predicted times; 0 leaves them.")
    decode_speedup_ratio = Field[float](NOT_NEGATIVE, "Divides decode times further.")
    dp_size = Field[int](Int(1, U32_MAX), "Data-parallel ranks of a worker.")
    startup_time = Field[float | None](NOT_NEGATIVE, "Seconds until a new worker is ready.", nullable=True)
    worker_type = SettableField[str](
        Choice(
            "aggregated",
            "prefill",
            "decode",
            wrong="Invalid worker_type '{value}'. Must be 'aggregated', 'prefill', or 'decode'.",
        ),
        "What the worker does.",
    )
    planner_profile_data = Field[str | None](FILE_PATH, "Profile that the timing model is made from.", nullable=True)
    aic_backend = SettableField[str | None](TEXT, "Engine name in the performance database.", nullable=True)
    aic_system = SettableField[str | None](TEXT, "GPU system name.", nullable=True)
    aic_backend_version = SettableField[str | None](TEXT, "Engine version.", nullable=True)
    aic_tp_size = SettableField[int | None](SIZE, "Tensor-parallel size.", nullable=True)
    aic_model_path = SettableField[str | None](TEXT, "Model name.", nullable=True)
    aic_moe_tp_size = SettableField[int | None](SIZE, "Tensor-parallel size of the experts.", nullable=True)
    aic_moe_ep_size = SettableField[int | None](SIZE, "Expert-parallel size.", nullable=True)
    aic_attention_dp_size = SettableField[int | None](SIZE, "Data-parallel size of attention.", nullable=True)
    aic_nextn = SettableField[int | None](Int(1, 5), "Draft tokens of a speculative decode step.", nullable=True)
    aic_nextn_accept_rates = SettableField[str | None](TEXT, "Acceptance rate of each draft token.", nullable=True)
    aic_mtp_seed = SettableField[int](SIZE, "Seed of the draft sampler.")
    aic_gemm_dtype = SettableField[str | None](TEXT, "Data type of matrix products.", nullable=True)
    aic_moe_dtype = SettableField[str | None](TEXT, "Data type of the experts.", nullable=True)
    aic_fmha_dtype = SettableField[str | None](TEXT, "Data type of attention.", nullable=True)
    aic_kv_cache_dtype = SettableField[str | None](TEXT, "Data type of the KV cache.", nullable=True)
    aic_comm_dtype = SettableField[str | None](TEXT, "Data type of communication.", nullable=True)
    gpu_memory_utilization = SettableField[float | None](FRACTION, "Share of GPU memory (vllm).", nullable=True)
    mem_fraction_static = SettableField[float | None](FRACTION, "Static share of memory (sglang).", nullable=True)
    free_gpu_memory_fraction = SettableField[float | None](FRACTION, "Share of free memory (trtllm).", nullable=True)
    enable_local_indexer = Field[bool](BOOL, "The worker keeps an index of its cached blocks.")
    bootstrap_port = Field[int | None](PORT, "Port where prefill and decode workers meet.", nullable=True)
    handoff_session_timeout_ms = Field[int](COUNT, "Limit of a live handoff.")
    kv_bytes_per_token = Field[int | None](SIZE, "Bytes of one token's KV state.", nullable=True)
    kv_transfer_bandwidth = Field[float | None](NOT_NEGATIVE, "GB/s of a KV transfer; 0 is no delay.", nullable=True)
    kv_transfer_timing_mode = Field[str](
        Choice(
            "full_prompt",
            "destination_missing",
            wrong="Invalid kv_transfer_timing_mode '{value}'. Must be 'full_prompt' or 'destination_missing'.",
        ),
        "Part of the prompt that a transfer is charged for.",
    )
    reasoning = Field[ReasoningConfig | None](Nested(ReasoningConfig), "Thinking tokens.", nullable=True)
    response_replay_trace_path = Field[str | None](FILE_PATH, "Trace with the output tokens to replay.", nullable=True)
    zmq_kv_events_port = Field[int | None](PORT, "Port that KV events are published on.", nullable=True)
    zmq_replay_port = Field[int | None](PORT, "Port that replays published KV events.", nullable=True)
    preemption_mode = Field[str](
        Choice("lifo", "fifo", wrong="Invalid preemption_mode: '{value}'. Must be 'lifo' or 'fifo'."),
        "Whether the newest or the oldest running request is preempted.",
    )
    router_queue_policy = Field[str | None](
        Choice(
            "fcfs",
            "lcfs",
            "wspt",
            wrong="Invalid router_queue_policy: unknown queue policy: '{value}', expected 'fcfs', 'lcfs', or 'wspt'",
        ),
        "Takes the place of the router's own queue policy.",
        nullable=True,
    )
    sglang = Field[SglangArgs | None](Nested(SglangArgs), "Settings of the SGLang engine.", nullable=True)
    trtllm = Field[TrtllmArgs | None](Nested(TrtllmArgs), "Settings of the TensorRT-LLM engine.", nullable=True)
    num_g2_blocks = Field[int | None](SIZE_OR_OFF, "Blocks in host memory.", nullable=True)
    num_g3_blocks = Field[int | None](SIZE_OR_OFF, "Blocks on disk.", nullable=True)
    offload_batch_size = Field[int | None](SIZE_OR_OFF, "Blocks offloaded together.", nullable=True)
    bandwidth_g1_to_g2_gbps = Field[float | None](NOT_NEGATIVE, "GB/s from GPU to host.", nullable=True)
    bandwidth_g2_to_g1_gbps = Field[float | None](NOT_NEGATIVE, "GB/s from host to GPU.", nullable=True)
    bandwidth_g2_to_g3_gbps = Field[float | None](NOT_NEGATIVE, "GB/s from host to disk.", nullable=True)
    bandwidth_g3_to_g2_gbps = Field[float | None](NOT_NEGATIVE, "GB/s from disk to host.", nullable=True)
    enable_g4_storage = Field[bool](BOOL, "An object store behind host memory.")
    bandwidth_g2_to_g4_gbps = Field[float | None](NOT_NEGATIVE, "GB/s from host to the object store.", nullable=True)
    bandwidth_g4_to_g2_gbps = Field[float | None](NOT_NEGATIVE, "GB/s from the object store to host.", nullable=True)
    latency_g1_to_g2_ms = Field[float](NOT_NEGATIVE, "ms of each transfer from GPU to host.")
    latency_g2_to_g1_ms = Field[float](NOT_NEGATIVE, "ms of each transfer from host to GPU.")
    latency_g2_to_g3_ms = Field[float](NOT_NEGATIVE, "ms of each transfer from host to disk.")
    latency_g3_to_g2_ms = Field[float](NOT_NEGATIVE, "ms of each transfer from disk to host.")
    latency_g2_to_g4_ms = Field[float](NOT_NEGATIVE, "ms of each transfer from host to the object store.")
    latency_g4_to_g2_ms = Field[float](NOT_NEGATIVE, "ms of each transfer from the object store to host.")
    offload_eviction_policy = Field[str](
        Choice(*EVICTION_POLICIES,
               wrong=f"Invalid offload_eviction_policy '{{value}}'. Must be {one_of(EVICTION_POLICIES)}."),
        "Which blocks make room in host memory.",
    )
    offload_min_seen = Field[int](Int(1, 16), "Evictions from the GPU until a block is copied to host memory.")
    offload_write_mode = Field[str](
        Choice(*WRITE_MODES, wrong=f"Invalid offload_write_mode '{{value}}'. Must be {one_of(WRITE_MODES)}."),
        "When blocks are copied to host memory.",
    )
    scheduler_rules = Field[str](
        Choice(*SCHEDULER_RULES, wrong=f"Invalid scheduler_rules '{{value}}'. Must be {one_of(SCHEDULER_RULES)}."),
        "Whose scheduler decides.",
    )
    vllm_scheduling_policy = Field[str](
        Choice("fcfs", "priority", wrong="Invalid vllm_scheduling_policy '{value}'. Must be 'fcfs' or 'priority'."),
        "Order of vLLM's waiting requests, and who is preempted.",
    )
    long_prefill_token_threshold = Field[int](SIZE, "Most tokens of one request in a pass with others; 0: no cap.")
    max_model_len = Field[int | None](Int(2, U64_MAX), "Tokens of prompt and output together.", nullable=True)
    watermark = Field[float](Float(0.0, 1.0, below=True), "Part of the pool that an admission leaves free.")
    reserve_full_isl = Field[bool](BOOL, "A request is admitted only if its whole known sequence fits.")
    timing_model = Field[Any](TimingValue(), "How long passes take, in place of the polynomial.", nullable=True)
    victim_score = Field[Any](ScoreValue("VictimScore", "five"), "Who is preempted.", nullable=True)
    admission_score = Field[Any](ScoreValue("AdmissionScore", "nine"), "Who is admitted next.", nullable=True)
    eviction_score = Field[Any](ScoreValue("EvictionScore", "five"), "What is evicted.", nullable=True)

    def __init__(
        self,
        engine_type: str = "vllm",
        num_gpu_blocks: int | None = None,
        block_size: int = 0,
        max_num_seqs: int | None = 256,
        max_num_batched_tokens: int | None = 8192,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        speedup_ratio: float = 1.0,
        decode_speedup_ratio: float = 1.0,
        dp_size: int = 1,
        startup_time: float | None = None,
        worker_type: str = "aggregated",
        planner_profile_data: str | os.PathLike[str] | None = None,
        aic_backend: str | None = None,
        aic_system: str | None = None,
        aic_backend_version: str | None = None,
        aic_tp_size: int | None = None,
        aic_model_path: str | None = None,
        aic_moe_tp_size: int | None = None,
        aic_moe_ep_size: int | None = None,
        aic_attention_dp_size: int | None = None,
        aic_nextn: int | None = None,
        aic_nextn_accept_rates: str | None = None,
        aic_mtp_seed: int = 42,
        aic_gemm_dtype: str | None = None,
        aic_moe_dtype: str | None = None,
        aic_fmha_dtype: str | None = None,
        aic_kv_cache_dtype: str | None = None,
        aic_comm_dtype: str | None = None,
        gpu_memory_utilization: float | None = None,
        mem_fraction_static: float | None = None,
        free_gpu_memory_fraction: float | None = None,
        enable_local_indexer: bool = False,
        bootstrap_port: int | None = None,
        handoff_session_timeout_ms: int = 300000,
        kv_bytes_per_token: int | None = None,
        kv_transfer_bandwidth: float | None = None,
        kv_transfer_timing_mode: str = "full_prompt",
        reasoning: ReasoningConfig | Mapping[str, Any] | None = None,
        response_replay_trace_path: str | os.PathLike[str] | None = None,
        zmq_kv_events_port: int | None = None,
        zmq_replay_port: int | None = None,
        preemption_mode: str = "lifo",
        router_queue_policy: str | None = None,
        sglang: SglangArgs | Mapping[str, Any] | None = None,
        trtllm: TrtllmArgs | Mapping[str, Any] | None = None,
        num_g2_blocks: int | None = None,
        num_g3_blocks: int | None = None,
        offload_batch_size: int | None = None,
        bandwidth_g1_to_g2_gbps: float | None = None,
        bandwidth_g2_to_g1_gbps: float | None = None,
        bandwidth_g2_to_g3_gbps: float | None = None,
        bandwidth_g3_to_g2_gbps: float | None = None,
        enable_g4_storage: bool = False,
        bandwidth_g2_to_g4_gbps: float | None = None,
        bandwidth_g4_to_g2_gbps: float | None = None,
        latency_g1_to_g2_ms: float = 0.0,
        latency_g2_to_g1_ms: float = 0.0,
        latency_g2_to_g3_ms: float = 0.0,
        latency_g3_to_g2_ms: float = 0.0,
        latency_g2_to_g4_ms: float = 0.0,
        latency_g4_to_g2_ms: float = 0.0,
        offload_eviction_policy: str = "lru",
        offload_min_seen: int = 1,
        offload_write_mode: str = "write_back",
        scheduler_rules: str = DEFAULT_SCHEDULER_RULES,
        vllm_scheduling_policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        max_model_len: int | None = None,
        watermark: float = 0.0,
        reserve_full_isl: bool = True,
        timing_model: Any = None,
        victim_score: Any = None,
        admission_score: Any = None,
        eviction_score: Any = None,
    ) -> None:
        self._init(locals())

    # --- checks across fields

    @classmethod
    def _finish(cls, values: dict[str, Any], names: list[str]) -> list[tuple[str, str]]:
        if values["num_gpu_blocks"] is None:
            values["num_gpu_blocks"] = DefaultCount(DEFAULT_NUM_GPU_BLOCKS)
        if _RULED.isdisjoint(names):
            return cls._finish_block_size(values)
        for name in ("num_g2_blocks", "num_g3_blocks", "offload_batch_size"):
            if values[name] == 0:
                values[name] = None
        problems = cls._finish_block_size(values)
        if values["num_g2_blocks"] is None:
            for name in ("num_g3_blocks", "enable_g4_storage"):
                if values[name]:
                    rule = f"{name} requires num_g2_blocks >= 1 (the tier is reached through host memory)"
                    problems.append((name, f"{rule}, got {name}={values[name]} without it"))
            for name in HOST_FIELDS:
                if values[name] != cls._defaults[name]:
                    rule = f"{name} requires num_g2_blocks >= 1 (it is a rule of host memory)"
                    problems.append((name, f"{rule}, got {name}={show(values[name])} without it"))
        problems += score_conflicts(values)
        return problems + cls._finish_accept_rates(values) + cls._finish_scheduler(values)

    @classmethod
    def _finish_scheduler(cls, values: dict[str, Any]) -> list[tuple[str, str]]:
        if values["scheduler_rules"] != DEFAULT_SCHEDULER_RULES:
            return scheduler_conflicts(values)
        return [
            (name, f"{name} requires scheduler_rules to be {one_of(SCHEDULER_RULES[1:])}, got "
                   f"{name}={show(values[name])} without it")
            for name in SCHEDULER_FIELDS[1:]
            if values[name] != cls._defaults[name]
        ]

    @classmethod
    def _finish_block_size(cls, values: dict[str, Any]) -> list[tuple[str, str]]:
        engine, size = values["engine_type"], values["block_size"]
        is_sglang = engine == "sglang"
        page = chunk = None
        if is_sglang and values["sglang"] is not None:
            page, chunk = values["sglang"].page_size, values["sglang"].chunked_prefill_size
        if size == 0:
            size = values["block_size"] = page or DEFAULT_BLOCK_SIZE[engine]
        problems = []
        if not is_sglang and not (2 <= size <= 1024 and size & (size - 1) == 0):
            allowed = "must be 0 (the engine's default) or a power of two in 2..=1024"
            problems.append(("block_size", f"{allowed} for engine_type={engine}, got {size}"))
        if page is not None and page != size:
            rule = "engine_type=sglang requires block_size and sglang.page_size to match when both are set"
            problems.append(
                ("block_size", f"{rule}, got block_size={size} and sglang.page_size={page}; give one of them")
            )
        if chunk is not None and chunk % size:
            rule = "engine_type=sglang requires sglang.chunked_prefill_size to be divisible by block_size"
            problems.append(
                ("sglang.chunked_prefill_size", f"{rule}, got chunked_prefill_size={chunk} and block_size={size}")
            )
        if not problems and values["num_gpu_blocks"] * size > MAX_POOL_TOKENS:
            rule = "num_gpu_blocks * block_size must be at most 2**63-1 tokens"
            problems.append(
                ("num_gpu_blocks", f"{rule}, got num_gpu_blocks={values['num_gpu_blocks']} and block_size={size}")
            )
        return problems

    @classmethod
    def _finish_accept_rates(cls, values: dict[str, Any]) -> list[tuple[str, str]]:
        nextn, rates = values["aic_nextn"], values["aic_nextn_accept_rates"]
        if nextn is None:
            if rates is None:
                return []
            text = f"aic_nextn_accept_rates requires aic_nextn, got {show(rates)}; set aic_nextn (1..=5) first"
            return [("aic_nextn_accept_rates", text)]
        decode_speedup = values["decode_speedup_ratio"]
        if decode_speedup != 1.0:
            rule = "aic_nextn requires decode_speedup_ratio=1.0 (accepted drafts are the speed-up already)"
            return [("aic_nextn", f"{rule}, got decode_speedup_ratio={decode_speedup} with aic_nextn={nextn}")]
        try:
            values["aic_nextn_accept_rates"] = format_accept_rates(parse_accept_rates(nextn, rates))
        except BadValue as bad:
            return list(bad.problems)
        return []

    def _changed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        if changes.get("aic_nextn", self) is None:  # without drafts their rates mean nothing
            changes = {"aic_nextn_accept_rates": None, **changes}
        return super()._changed(changes)

    # --- JSON

    @staticmethod
    def from_json(config_json: str) -> MockEngineArgs:
        """Read the arguments from a JSON object.

        A field that is left out takes its default. Null sets an optional field to None, keeps the default of
        ``num_gpu_blocks``, and is refused elsewhere. ``is_prefill`` and ``is_decode`` stand for ``worker_type`` where
        that is not given; ``has_perf_model`` is ignored.

        Parameters
        ----------
        config_json : str
            The text of one JSON object.

        Returns
        -------
        MockEngineArgs
            The checked arguments.

        Raises
        ------
        ValueError
            If the text is not JSON, or for an unknown field, a wrong type or a bad value.
        TypeError
            If ``config_json`` is not a string.
        """
        try:
            return MockEngineArgs._from_object(read_json(config_json))
        except BadValue as bad:
            error = MockEngineArgs._error(bad)
        except ValueError as other:
            error = other
        raise ValueError(f"Failed to parse MockEngineArgs JSON: {error}") from None

    @staticmethod
    def from_json_file(path: str | os.PathLike[str]) -> MockEngineArgs:
        """Read the arguments from a file with one JSON object; see :meth:`from_json`."""
        with open(path, encoding="utf-8") as file:
            return MockEngineArgs.from_json(file.read())

    @classmethod
    def _from_object(cls, given: Any) -> MockEngineArgs:
        if not isinstance(given, dict):
            raise ValueError(f"invalid type: expected a JSON object of engine arguments, got {show(given)}")
        given = dict(given)
        given.pop("has_perf_model", None)
        legacy = {name: given.pop(name) for name in ("is_prefill", "is_decode") if name in given}
        for name, value in legacy.items():
            if value is None and "worker_type" not in given:
                raise BadValue((name, f"{name} must not be null; expected true or false"))
            if not isinstance(value, bool | None):
                raise BadValue((name, f"must be true or false, got {show(value)}"))
        if "worker_type" not in given:
            if legacy.get("is_prefill") and legacy.get("is_decode"):
                rule = "Invalid worker configuration: is_prefill and is_decode cannot both be true"
                raise BadValue(("", f"{rule}; give worker_type instead"))
            if legacy.get("is_prefill"):
                given["worker_type"] = "prefill"
            elif legacy.get("is_decode"):
                given["worker_type"] = "decode"
        return cls._build(cls._gather(given, ignore_unknown=False))

    def to_dict(self) -> dict[str, Any]:
        """Give the fields as plain values that ``json`` can write.

        ``scheduler_rules`` with what belongs to it, ``latency_…_ms``, the host's policies, ``timing_model`` and the
        scores are left out where they have their defaults, so that the form is the reference's. The last two are given
        by what they show: they are not read back.
        """
        values = super().to_dict()
        for name in (*SCHEDULER_FIELDS, *OFFLOAD_FIELDS, *HOST_FIELDS, "timing_model", *SCORES):
            if values[name] == self._defaults[name]:
                del values[name]
        if self.aic_backend is not None and self.blocks_by_default():
            values["num_gpu_blocks"] = None
        for name in ("timing_model", *SCORES):
            if name in values:
                values[name] = repr(values[name])
        return values

    def to_json(self) -> str:
        """Write :meth:`to_dict` as a JSON object that :meth:`from_json` reads back to equal arguments."""
        return json.dumps(self.to_dict(), allow_nan=False)

    # --- copies and derived values

    def with_overrides(
        self,
        bootstrap_port: int | None = None,
        zmq_kv_events_port: int | None = None,
        zmq_replay_port: int | None = None,
        kv_bytes_per_token: int | None = None,
        num_gpu_blocks: int | None = None,
        aic_backend: str | None = None,
        aic_system: str | None = None,
        aic_backend_version: str | None = None,
        aic_tp_size: int | None = None,
        aic_model_path: str | None = None,
        aic_moe_tp_size: int | None = None,
        aic_moe_ep_size: int | None = None,
        aic_attention_dp_size: int | None = None,
        aic_nextn: int | None = None,
        aic_nextn_accept_rates: str | None = None,
        aic_mtp_seed: int | None = None,
        aic_gemm_dtype: str | None = None,
        aic_moe_dtype: str | None = None,
        aic_fmha_dtype: str | None = None,
        aic_kv_cache_dtype: str | None = None,
        aic_comm_dtype: str | None = None,
        gpu_memory_utilization: float | None = None,
        mem_fraction_static: float | None = None,
        free_gpu_memory_fraction: float | None = None,
        enable_prefix_caching: bool | None = None,
        worker_type: str | None = None,
    ) -> MockEngineArgs:
        """Make a checked copy in which the fields that are not None here have these values.

        See :meth:`replace` for a change of any field, or to None.
        """
        changes = dict(locals())
        del changes["self"]
        return self.replace(**{name: value for name, value in changes.items() if value is not None})

    def blocks_by_default(self) -> bool:
        """Whether nobody said how many blocks there are."""
        return type(self.num_gpu_blocks) is DefaultCount

    @property
    def perf_model_path(self) -> str | None:
        """Path of the profile that the timing model is made from: ``planner_profile_data``."""
        return self.planner_profile_data

    def is_prefill(self) -> bool:
        """Whether the worker only prefills."""
        return self.worker_type == "prefill"

    def is_decode(self) -> bool:
        """Whether the worker only decodes."""
        return self.worker_type == "decode"

    def aic_gpus_per_worker(self) -> int:
        """Count the GPUs of one worker: tensor-parallel times attention data-parallel size."""
        tensor, data = self.aic_tp_size, self.aic_attention_dp_size
        return (1 if tensor is None else tensor) * (1 if data is None else data)

    def effective_handoff_capacity(self) -> int:
        """Count the handoffs that one worker may hold: the request limit, or the blocks if there is none."""
        return max(self.num_gpu_blocks if self.max_num_seqs is None else self.max_num_seqs, 1)

    def needs_kv_publisher(self) -> bool:
        """Whether KV events of this worker are of use to a router."""
        return self.enable_prefix_caching and not self.is_decode()

    def scheduling_policy(self) -> str:
        """Name the admission policy: "trtllm_guaranteed_no_evict" for trtllm, else "vllm"."""
        return "trtllm_guaranteed_no_evict" if self.engine_type == "trtllm" else "vllm"

    def accept_rates(self) -> list[float] | None:
        """Give the acceptance rate of each of the ``aic_nextn`` draft tokens, or None without drafts."""
        rates = self.aic_nextn_accept_rates
        return None if rates is None else [float(rate) for rate in rates.split(",")]

    def undiscounted_aic_accept_rates(self) -> str | None:
        """Give as many zero rates as there are draft tokens, as text, or None without drafts."""
        return None if self.aic_nextn is None else ",".join(["0"] * self.aic_nextn)


FIELDS: Mapping[str, Field[Any]] = MockEngineArgs._fields
"""The fields of :class:`MockEngineArgs` in order, for whoever builds flags or documentation from them."""
