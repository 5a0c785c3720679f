"""Roofline timing: a model's `config.json` and a GPU's peak numbers, for what nobody has measured.

Every operation of a pass takes the longer of its arithmetic at a share of the peak and its memory traffic at a share
of the bandwidth, plus a constant; operations follow each other. The formulas, where the constants come from and how
far the result is from measured data are in ``docs/timing.md``.
"""
from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .timing import FunctionTiming

__all__ = ["GPUS", "Gpu", "ModelShape", "RooflineTiming", "read_config"]

# bytes a number, scales of blocks of 16 (fp4) and 128 (int4) included
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int8": 1.0, "fp4": 0.5625, "int4": 0.53125}
DTYPES = {"float32": "fp32", "float16": "bf16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Gpu:
    """Peaks of one GPU, dense, from its vendor's data sheet.

    Parameters
    ----------
    memory_gb : float
        GB (1e9 bytes).
    bandwidth_gbs : float
        GB/s of its memory.
    tflops : float
        Tflop/s with 16-bit numbers.
    fp8_tflops, fp4_tflops : float
        The same with 8 and 4 bits; 0: no such units, 16-bit ones are used.
    link_gbs : float
        GB/s to the other GPUs of the node, one direction.
    """

    memory_gb: float
    bandwidth_gbs: float
    tflops: float
    fp8_tflops: float
    fp4_tflops: float
    link_gbs: float

    def flops(self, kind: str) -> float:
        """Flop/s with operands of a kind."""
        if kind == "fp4" and self.fp4_tflops:
            return self.fp4_tflops * 1e12
        if kind in ("fp8", "fp8_block", "int8") and self.fp8_tflops:
            return self.fp8_tflops * 1e12
        return self.tflops * 1e12


GPUS: Mapping[str, Gpu] = {
    "a10g": Gpu(24, 600, 70, 0, 0, 32),
    "a100_pcie": Gpu(80, 1935, 312, 0, 0, 32),
    "a100_sxm": Gpu(80, 2039, 312, 0, 0, 300),
    "a30": Gpu(24, 933, 165, 0, 0, 32),
    "b200_sxm": Gpu(180, 7700, 2250, 4500, 9000, 900),
    "b300_sxm": Gpu(270, 7700, 2250, 4500, 13500, 900),
    "gb200": Gpu(186, 8000, 2500, 5000, 10000, 900),
    "gb300": Gpu(279, 8000, 2500, 5000, 15000, 900),
    "h100_pcie": Gpu(80, 2000, 756, 1513, 0, 64),
    "h100_sxm": Gpu(80, 3350, 989, 1979, 0, 450),
    "h20": Gpu(96, 4000, 148, 296, 0, 450),
    "h200_sxm": Gpu(141, 4800, 989, 1979, 0, 450),
    "l4": Gpu(24, 300, 121, 242, 0, 32),
    "l40s": Gpu(48, 864, 362, 733, 0, 32),
    "mi300x": Gpu(192, 5300, 1307, 2615, 0, 448),
    "rtx_pro_6000_server": Gpu(96, 1597, 503, 1007, 2015, 64),
}
"""Peaks by system name."""


@dataclass(frozen=True)
class Layers:
    """A number of equal layers."""

    count: int
    window: int = 0                # tokens that the attention sees; 0: all
    experts: int = 0               # 0: a dense feed-forward part
    feed: int = 0                  # its width, or that of one expert
    top: int = 0                   # experts of a token
    shared: int = 0                # width of what every token uses beside the experts


@dataclass(frozen=True)
class ModelShape:
    """What of a model takes time and memory."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    layers: tuple[Layers, ...]
    weights: str = "bf16"          # kind of the weights of linear layers
    experts: str = ""              # of the experts, if another
    kv: str = "bf16"               # of the KV state
    query_rank: int = 0            # multi-head latent attention: 0 without
    kv_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    gated: bool = True             # three matrices in a feed-forward part, else two

    @property
    def latent(self) -> bool:
        """Multi-head latent attention."""
        return self.kv_rank > 0

    def kv_bytes(self) -> float:
        """Bytes of one token's KV state in one layer, on all GPUs."""
        if self.latent:
            return (self.kv_rank + self.rope_dim) * BYTES[self.kv]
        return 2 * self.kv_heads * self.head_dim * BYTES[self.kv]

    def attention_weights(self) -> float:
        """Numbers in the attention's matrices of one layer."""
        if self.latent:
            wide = self.heads * (self.nope_dim + self.rope_dim)
            query = self.hidden * self.query_rank + self.query_rank * wide if self.query_rank else self.hidden * wide
            return (query + self.hidden * (self.kv_rank + self.rope_dim)
                    + self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
                    + self.heads * self.value_dim * self.hidden)
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        per, expert = BYTES[self.weights], BYTES[self.experts or self.weights]
        mats = 3 if self.gated else 2
        total = self.vocabulary * self.hidden * (1 if self.tied else 2) * BYTES["bf16"]
        for part in self.layers:
            one = self.attention_weights() * per
            if part.experts:
                one += mats * self.hidden * (part.experts * part.feed * expert + part.shared * per)
            else:
                one += mats * self.hidden * part.feed * per
            total += part.count * one
        return total


def _integer(config: Mapping[str, Any], names: tuple[str, ...], where: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
            raise ValueError(f"{where}: {name} must be a whole number, got {value!r}")
        return value
    if default is None:
        raise ValueError(f"{where}: {' or '.join(names)} is missing")
    return default


def _kinds(config: Mapping[str, Any]) -> tuple[str, str]:
    """Kinds of the dense weights and of the experts."""
    plain = DTYPES.get(str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"), "bf16")
    quant = config.get("quantization_config") or config.get("quantization") or {}
    text = json.dumps(quant).lower() if quant else ""
    if not text:
        return plain, plain
    if "mxfp4" in text:
        return plain, "fp4"
    if "fp8" in text and quant.get("weight_block_size"):
        return "fp8_block", "fp8_block"
    for mark, kind in (("nvfp4", "fp4"), ("fp4", "fp4"), ("fp8", "fp8"), ("float8", "fp8")):
        if mark in text:
            return kind, kind
    bits = quant.get("bits") or quant.get("num_bits") or (4 if "awq" in text or "gptq" in text or "int4" in text else 8)
    kind = "int4" if bits == 4 else "int8" if bits == 8 else plain
    return kind, kind


def read_config(source: str | os.PathLike[str] | Mapping[str, Any], name: str | None = None) -> ModelShape:
    """The shape of a model from its Hugging Face configuration.

    Parameters
    ----------
    source : path or mapping
        A `config.json`, its folder, or what it holds.
    name : str, optional
        What errors call it.

    Raises
    ------
    ValueError
        The file is no such configuration; the message names the field.
    OSError
        It cannot be read.
    """
    where = name or "config.json"
    if isinstance(source, Mapping):
        config: Any = source
    else:
        path = os.fspath(source)
        path = os.path.join(path, "config.json") if os.path.isdir(path) else path
        where = name or path
        try:
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}: not a JSON file: {error}") from None
    if not isinstance(config, Mapping):
        raise ValueError(f"{where}: not a JSON object")
    text = config.get("text_config")
    if isinstance(text, Mapping):
        outer = {key: config[key] for key in ("quantization_config", "torch_dtype", "dtype") if key in config}
        config = {**outer, **text}
    count = _integer(config, ("num_hidden_layers", "n_layer"), where)
    hidden = _integer(config, ("hidden_size", "n_embd", "d_model"), where)
    heads = _integer(config, ("num_attention_heads", "n_head"), where)
    if not (count and hidden and heads):
        raise ValueError(f"{where}: layers, width and heads must be above 0")
    dense, expert = _kinds(config)
    return ModelShape(
        name=where, hidden=hidden, heads=heads,
        kv_heads=_integer(config, ("num_key_value_heads",), where, heads),
        head_dim=_integer(config, ("head_dim",), where, hidden // heads),
        vocabulary=_integer(config, ("vocab_size",), where), tied=bool(config.get("tie_word_embeddings", False)),
        layers=_layers(config, count, hidden, where), weights=dense, experts=expert,
        query_rank=_integer(config, ("q_lora_rank",), where, 0), kv_rank=_integer(config, ("kv_lora_rank",), where, 0),
        rope_dim=_integer(config, ("qk_rope_head_dim",), where, 0),
        nope_dim=_integer(config, ("qk_nope_head_dim",), where, 0),
        value_dim=_integer(config, ("v_head_dim",), where, 0),
        gated=str(config.get("hidden_act", "silu")) not in ("gelu_new", "relu", "relu2"))


def _layers(config: Mapping[str, Any], count: int, hidden: int, where: str) -> tuple[Layers, ...]:
    """Groups of equal layers: by window, and by dense or sparse."""
    window = _integer(config, ("sliding_window",), where, 0) if config.get("use_sliding_window", True) else 0
    for field in ("hybrid_override_pattern", "block_configs", "layers_block_type"):
        if config.get(field):
            raise ValueError(f"{where}: {field}: layers with a state space or of unequal shapes are not modelled")
    window = window or _integer(config, ("index_topk",), where, 0)     # sparse attention reads so many tokens
    kinds = config.get("layer_types")
    pattern = _integer(config, ("sliding_window_pattern",), where, 0)
    experts = _integer(config, ("num_experts", "n_routed_experts", "num_local_experts"), where, 0)
    dense_feed = _integer(config, ("intermediate_size", "n_inner"), where, 4 * hidden)
    feed = _integer(config, ("moe_intermediate_size",), where, dense_feed)
    shared = _integer(config, ("shared_expert_intermediate_size",), where, 0)
    shared = shared or feed * _integer(config, ("n_shared_experts",), where, 0)
    first, step = _integer(config, ("first_k_dense_replace",), where, 0), _integer(config, ("decoder_sparse_step",),
                                                                                   where, 1)
    plain = config.get("mlp_only_layers") or ()
    groups: dict[Layers, int] = {}
    for i in range(count):
        if isinstance(kinds, list) and len(kinds) == count:
            kind = str(kinds[i])
            seen = 1 if "linear" in kind else window if "sliding" in kind or "chunked" in kind else 0
        elif pattern:
            seen = 0 if (i + 1) % pattern == 0 else window
        else:
            seen = window
        if experts and i >= first and i not in plain and (i + 1) % max(step, 1) == 0:
            top = _integer(config, ("num_experts_per_tok", "moe_topk", "num_experts_per_token"), where)
            one = Layers(1, seen, experts, feed, top, shared)
        else:
            one = Layers(1, seen, 0, dense_feed)
        groups[one] = groups.get(one, 0) + 1
    return tuple(replace(one, count=n) for one, n in groups.items())


@dataclass(frozen=True)
class Constants:
    """What a roofline does not know: shares of the peaks that kernels reach, and times that do not scale."""

    compute: float = 0.70          # of the peak arithmetic, large matrix products
    attention: float = 0.50        # of the 16-bit peak, prompt attention
    bandwidth: float = 0.80        # of the memory bandwidth
    link: float = 0.60             # of the link bandwidth
    packed: float = 0.55           # of both, 4-bit weights that are unpacked to 16 bits
    kernel_s: float = 2.5e-6       # start of a kernel
    scaled_s: float = 35e-6        # scaling activations block by block before a product
    hop_s: float = 4.0e-6          # start of a collective, and again for each doubling of its GPUs


class RooflineTiming(FunctionTiming):
    """Timing of a model on GPUs by their peaks.

    Parameters
    ----------
    model : ModelShape, path or mapping
        See `read_config`.
    gpu : str or Gpu
        A name in `GPUS`, or peaks of your own.
    tp : int
        GPUs that share each layer.
    kv : str, optional
        Kind of the KV state: "bf16" or "fp8".
    constants : Constants

    Raises
    ------
    ValueError
        The GPU is unknown, or the configuration is no such.
    """

    def __init__(self, model: ModelShape | str | os.PathLike[str] | Mapping[str, Any], gpu: str | Gpu, tp: int = 1, *,
                 kv: str | None = None, constants: Constants | None = None) -> None:
        self.model = model if isinstance(model, ModelShape) else read_config(model)
        if kv is not None:
            if kv not in BYTES:
                raise ValueError(f"kv must be one of {', '.join(BYTES)}, got {kv!r}")
            self.model = replace(self.model, kv=kv)
        if isinstance(gpu, str) and gpu not in GPUS:
            raise ValueError(f"GPU {gpu!r} is unknown; known: {', '.join(sorted(GPUS))}")
        if isinstance(tp, bool) or not isinstance(tp, int) or not 1 <= tp <= 1024:
            raise ValueError(f"tp must be an integer from 1 to 1024, got {tp!r}")
        self.gpu = GPUS[gpu] if isinstance(gpu, str) else gpu
        self.tp, self.constants = tp, constants or Constants()
        self._linear = lru_cache(maxsize=1 << 16)(self._linear_s)
        super().__init__(self._prefill, self._decode, uses_kv_tokens=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _roofline, (self.model, self.gpu, self.tp, self.constants)

    def __repr__(self) -> str:
        return f"RooflineTiming({self.model.name!r}, {self.gpu}, tp={self.tp})"

    # -- operations, seconds ------------------------------------------------------------------------------------------

    def _product(self, rows: float, numbers: float, traffic: float, kind: str) -> float:
        """A matrix product: `numbers` weights on this GPU, `traffic` bytes of them read."""
        c = self.constants
        arithmetic = 2.0 * rows * numbers / (self.gpu.flops(kind) * c.compute)
        memory = traffic / (self.gpu.bandwidth_gbs * 1e9 * c.bandwidth)
        seconds = max(arithmetic, memory) + c.kernel_s
        if kind in ("fp4", "int4") and self.gpu.flops(kind) == self.gpu.flops("bf16"):
            return seconds / c.packed
        return seconds + (c.scaled_s if kind in ("fp8_block", "fp4") else 0.0)

    def _exchange(self, rows: float) -> float:
        """A sum of activations over the GPUs."""
        if self.tp == 1:
            return 0.0
        c = self.constants
        moved = 2.0 * (self.tp - 1) / self.tp * rows * self.model.hidden * 2.0
        return moved / (self.gpu.link_gbs * 1e9 * c.link) + c.hop_s * (1 + (self.tp - 1).bit_length())

    def _linear_s(self, rows: int, heads_rows: int) -> float:
        """All but attention of `rows` tokens, of which `heads_rows` give logits."""
        m, c, tp = self.model, self.constants, self.tp
        per, expert = BYTES[m.weights], BYTES[m.experts or m.weights]
        mats = 3 if m.gated else 2
        bandwidth = self.gpu.bandwidth_gbs * 1e9 * c.bandwidth
        total = 0.0
        for part in m.layers:
            weights = m.attention_weights() / tp
            one = self._product(rows, weights, weights * per, m.weights) + c.kernel_s      # before and after attention
            one += 12.0 * rows * m.hidden * 2.0 / bandwidth + 2 * c.kernel_s               # norms, residuals
            one += 2 * self._exchange(rows)
            if part.experts:
                touched = part.experts * (1.0 - (1.0 - part.top / part.experts) ** rows)
                numbers = mats * m.hidden * part.feed / tp
                one += self._product(rows, numbers * part.top, numbers * touched * expert, m.experts or m.weights)
                one += 2 * c.kernel_s + 4.0 * rows * part.top * m.hidden * 2.0 / bandwidth  # gate, spread and gather
                if part.shared:
                    numbers = mats * m.hidden * part.shared / tp
                    one += self._product(rows, numbers, numbers * per, m.weights)
            else:
                numbers = mats * m.hidden * part.feed / tp
                one += self._product(rows, numbers, numbers * per, m.weights) + c.kernel_s
            total += part.count * one
        numbers = m.vocabulary * m.hidden / tp
        return total + self._product(heads_rows, numbers, numbers * 2.0, "bf16")

    def _kv_share(self) -> float:
        """Part of the KV state that one GPU holds and reads."""
        return 1.0 if self.model.latent else max(1.0 / self.tp, 1.0 / self.model.kv_heads)

    def _attention_width(self, absorbed: bool) -> float:
        """Numbers multiplied for a pair of tokens in one layer on one GPU, both products."""
        m = self.model
        if not m.latent:
            return 2.0 * m.heads * m.head_dim / self.tp
        per_head = 2 * m.kv_rank + m.rope_dim if absorbed else m.nope_dim + m.rope_dim + m.value_dim
        return m.heads * float(per_head) / self.tp

    def _decode(self, batch: int, _: int, context: int) -> float:
        m, c = self.model, self.constants
        share, width = m.kv_bytes() * self._kv_share(), self._attention_width(True)
        seconds = self._linear(batch, batch)
        for part in m.layers:
            seen = min(context, part.window) if part.window else context
            memory = batch * seen * share / (self.gpu.bandwidth_gbs * 1e9 * c.bandwidth)
            arithmetic = 2.0 * batch * seen * width / (self.gpu.flops("bf16") * c.attention)
            seconds += part.count * (max(memory, arithmetic) + c.kernel_s)
        return seconds * 1e3

    def _prefill(self, batch: int, tokens: int, prefix: int) -> float:
        m, c = self.model, self.constants
        share, width = m.kv_bytes() * self._kv_share(), self._attention_width(False)
        seconds = self._linear(batch * tokens, batch)
        for part in m.layers:
            pairs = tokens * (prefix + 0.5 * (tokens + 1))
            if part.window:
                pairs = min(pairs, float(tokens) * part.window)
            memory = batch * (tokens + prefix) * share / (self.gpu.bandwidth_gbs * 1e9 * c.bandwidth)
            arithmetic = 2.0 * batch * pairs * width / (self.gpu.flops("bf16") * c.attention)
            seconds += part.count * (max(memory, arithmetic) + c.kernel_s)
        return seconds * 1e3

    # -- memory -------------------------------------------------------------------------------------------------------

    def kv_blocks(self, block_size: int, share: float = 0.9, other_gb: float = 4.0) -> int:
        """KV blocks that fit beside the weights.

        Parameters
        ----------
        block_size : int
            Tokens a block.
        share : float
            Of the GPU's memory that the engine may use.
        other_gb : float
            GB for activations, graphs and communication.

        Raises
        ------
        ValueError
            No block fits.
        """
        free = self.gpu.memory_gb * 1e9 * share - other_gb * 1e9 - self.model.weight_bytes() / self.tp
        layers = sum(part.count for part in self.model.layers)
        blocks = int(free / (self.model.kv_bytes() * self._kv_share() * layers * block_size))
        if blocks < 1:
            raise ValueError(f"{self.model.name} with {self.model.weight_bytes() / 1e9:.0f} GB of weights leaves no "
                             f"KV memory on {self.tp} GPUs of {self.gpu.memory_gb:g} GB; use more of them")
        return blocks


def _roofline(model: ModelShape, gpu: Gpu, tp: int, constants: Constants) -> RooflineTiming:
    return RooflineTiming(model, gpu, tp, constants=constants)
