"""Ready-made engines: a model and GPUs by name -> engine arguments, and in words what was assumed.

Measured kernels (`mocker.aic`) where the installed package has them, else the roofline (`mocker.roofline`).
"""
from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .args import MockEngineArgs

__all__ = ["Profile", "model_profile"]

SOURCES = ("auto", "measured", "interpolated", "roofline")


@dataclass(frozen=True)
class Profile:
    """Engine arguments, and lines that say what they assume."""

    args: MockEngineArgs
    assumptions: tuple[str, ...]


def model_profile(args: MockEngineArgs, model: str, system: str, tp: int = 1, source: str = "auto",
                  mixed: bool = False) -> Profile:
    """Complete engine arguments for a model on GPUs: timing and KV blocks.

    Parameters
    ----------
    args : MockEngineArgs
        Everything else; blocks that are given stay. Its `engine_type` says whose kernels, and its `aic_*` fields how
        experts and attention are spread, quantisation and version.
    model : str
        A name on Hugging Face, or a folder with a `config.json`, or such a file.
    system : str
        GPU system: `mocker systems` lists them.
    tp : int
        GPUs that share each layer.
    source : {"auto", "measured", "interpolated", "roofline"}
        Where times come from; "auto": measured ones where there are, else the roofline; "interpolated": measured at
        the points of a lattice.
    mixed : bool
        Passes of prompts beside decoding requests take the package's time of mixed steps; needs measured times.

    Raises
    ------
    ValueError
        The model or system is unknown (the message has the nearest names), or does not fit the memory.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    if mixed and source == "roofline":
        raise ValueError("mixed steps need measured times, not a roofline")
    why = ""
    if source != "roofline":
        try:
            return _measured(args, model, system, tp, source == "interpolated", mixed)
        except ValueError as error:
            if source != "auto" or mixed:
                raise
            why = str(error)
    try:
        return _roofline(args, model, system, tp, why)
    except (ValueError, OSError) as error:
        if why:
            raise ValueError(f"{why}; and the roofline cannot stand in: {error}") from None
        raise


def _limits(args: MockEngineArgs) -> str:
    def shown(value: int | None) -> str:
        return "no limit" if value is None else f"{value:,}"

    return (f"limits of a pass: {shown(args.max_num_seqs)} requests, {shown(args.max_num_batched_tokens)} tokens; "
            f"chunked prefill {'on' if args.enable_chunked_prefill else 'off'}, prefix caching "
            f"{'on' if args.enable_prefix_caching else 'off'}")


def _blocks(args: MockEngineArgs, given: bool, how: str) -> str:
    tokens = args.num_gpu_blocks * args.block_size
    return (f"KV memory: {args.num_gpu_blocks:,} blocks of {args.block_size} tokens = {tokens:,} tokens, "
            f"{'as given' if given else how}")


def _measured(args: MockEngineArgs, model: str, system: str, tp: int, interpolate: bool,
              mixed: bool) -> Profile:
    from .aic import MEMORY_SHARE, AicPerfConfig, aic_timing, estimate_kv
    from .timing import with_blocks

    given = not args.blocks_by_default()
    backend = args.aic_backend or args.engine_type
    args = args.replace(aic_backend=backend, aic_system=system, aic_model_path=model, aic_tp_size=tp)
    config = AicPerfConfig.of(args).resolved()
    timing = aic_timing(config, interpolate, mixed)
    timing.prefill_ms(1, 512, 512)             # says now if there are no data
    timing.decode_ms(1, 0, 512)
    spread = f"tensor parallel {tp}"
    if config.ranks > 1:
        spread += f", attention data parallel {config.ranks}"
    if config.aic_moe_tp_size is not None:
        spread += f", experts split by tensor {config.aic_moe_tp_size} and by expert {config.aic_moe_ep_size}"
    how = ""
    if not given:
        kv = estimate_kv(args)
        kind, name, usual = MEMORY_SHARE[backend]
        share = getattr(args, name)
        how = (f"estimated: {kv.capacity_bytes / 2**30:.0f} GiB a GPU, {name} {usual if share is None else share:g}, "
               f"weights {kv.weight_bytes / 2**30:.1f} GiB, activations and others {kv.other_bytes / 2**30:.1f} GiB, "
               f"{kv.bytes_per_token / 1024:.0f} KiB a token")
    named = [f"{x} {getattr(config, f'aic_{x}_dtype')}" for x in ("gemm", "moe", "fmha", "kv_cache", "comm")
             if getattr(config, f"aic_{x}_dtype")]
    types = ", ".join(named) or "as in the model's configuration"
    args = with_blocks(args)
    gpus = args.aic_gpus_per_worker()
    if interpolate or mixed:
        args = args.replace(timing_model=timing, aic_backend=None)
    between = (", interpolated" if interpolate else "") + (", mixed steps" if mixed else "")
    return Profile(args, (
        f"{model} on {system}, {spread}: {gpus} GPUs a worker",
        f"times: measured kernels of {backend} {config.aic_backend_version} (aiconfigurator-core){between}; data types "
        f"{types}",
        _blocks(args, given, how), _limits(args)))


def _roofline(args: MockEngineArgs, model: str, system: str, tp: int, why: str) -> Profile:
    from .aic import model_config_file
    from .roofline import RooflineTiming

    timing = RooflineTiming(model_config_file(model), system, tp)
    given = not args.blocks_by_default()
    blocks = args.num_gpu_blocks
    share = 0.9 if args.gpu_memory_utilization is None else args.gpu_memory_utilization
    if not given:
        blocks = timing.kv_blocks(args.block_size, share)
    args = args.replace(num_gpu_blocks=blocks, timing_model=timing, aic_tp_size=tp, aic_backend=None)
    weights = timing.model.weight_bytes() / tp / 2**30
    lines = [f"{model} on {system}, tensor parallel {tp}: {tp} GPUs a worker",
             "times: roofline of the model's config.json and the GPU's peak numbers, not measured",
             _blocks(args, given, f"estimated: {timing.gpu.memory_gb:g} GB a GPU, {share:.0%} of it, weights "
                                  f"{weights:.1f} GiB, 4 GB for the rest"), _limits(args)]
    if why:
        hint = "" if find_spec("aiconfigurator_core") else " (pip install 'mocker-llm[aic]')"
        lines.insert(2, f"why not measured: {why}{hint}")
    return Profile(args, tuple(lines))
