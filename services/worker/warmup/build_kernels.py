"""Compilation of kernels concurrent with loading a model, at its first start on a machine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.services.worker.device.device import Device, choose_dtype, choose_kv_dtype
from quire.services.worker.layers.sharding import WHOLE, Shard
from quire.services.worker.limits import worker_limits
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.attention_spec import block_size_for
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.registry import find_encoder, read_model_config
from quire.services.worker.models.vision.registry import pictures_see_ahead
from quire.services.worker.spec_decode import config as speculative_config
from quire.services.worker.warmup import compile_process
from quire.services.worker.warmup.compile_process import CompileProcess, needs_compilation, num_cores
from quire.shared.logs import logger
from quire.shared.models.model_identity import read_config
from quire.shared.settings import WorkerSettings

if TYPE_CHECKING:
    from quire.kernels.triton.precompile.precompile import Missing
    from quire.kernels.triton.precompile.shapes import ExpertsShape, LatentShape, ModelShape, PackedShape
    from quire.services.worker.layers.attention.latent_attention import LatentConfig
    from quire.services.worker.layers.quantization.port import CheckpointQuantization
    from quire.services.worker.models.config.experts_config import ExpertsConfig

log = logger("worker.kernels")


class KernelCompilation:
    """Compilation in a separate process, started at construction if kernels are missing; nothing to compile on the
    CPU."""

    def __init__(
        self, settings: WorkerSettings, process: CompileProcess | None = None, module: str = compile_process.MODULE
    ) -> None:
        """Starts a compile process if kernels are missing and none is running. `process`: one that is running already;
        `module`: what it runs. Raises QuireError for invalid settings or models."""
        self._started = time.perf_counter()
        self._process = process
        if process is None and missing(settings) is not None:
            self._process = CompileProcess(settings, module)

    def wait(self) -> None:
        """Waits until the kernels are compiled, at most two minutes, and logs how long; a failure is only a warning."""
        if self._process is None:
            return
        if self._process.wait():
            log.info("kernels compiled", waited_s=round(time.perf_counter() - self._started, 2))
        else:
            log.warning("not all kernels are compiled; the first steps that need them will be slow")


def missing(settings: WorkerSettings) -> Missing | None:
    """Returns the kernels to compile, or None if none is missing or they are not compiled ahead (CPU, quantization,
    encoders, no Triton). Raises QuireError for invalid settings or models."""
    if not needs_compilation(settings):
        return None
    try:
        from quire.kernels.triton.precompile import precompile
    except ImportError:  # reported by the kernel selection
        return None
    values = read_config(Path(settings.model))
    if find_encoder(values) is not None:
        return None  # an encoder's few kernels are compiled on first use
    config = read_model_config(values, settings.model_impl)
    block_size = block_size_for(settings, config, has_trees=_has_trees(settings, config))
    wanted = worker_limits.from_settings(settings, config.max_positions, block_size)
    return precompile.missing(
        model_shape(settings, config, wanted), num_cores(settings), precompile.device_capability()
    )


def _has_trees(settings: WorkerSettings, config: DecoderConfig) -> bool:
    """Returns whether the settings' speculative decoding verifies token trees."""
    drafting = speculative_config.parse_for(config, settings.speculative_config)
    return speculative_config.tree_of(drafting) is not None


def model_shape(settings: WorkerSettings, config: DecoderConfig, wanted: WorkerLimits) -> ModelShape:
    """Returns the shapes to compile for: those of one rank's part of the model. Raises QuireError for settings that do
    not fit the model. `wanted`: limits before memory is measured."""
    from quire.kernels.triton.precompile import shapes
    from quire.kernels.triton.single_row.row_attention import row_attention_takes
    from quire.kernels.triton.single_row.row_linear import row_linear_takes

    cuda = Device("cuda", "")
    dtype = choose_dtype(settings.dtype, config.dtype, cuda)
    kv_dtype = choose_kv_dtype(settings.kv_cache_dtype, dtype, cuda)
    size = settings.tensor_parallel_size
    spare = settings.num_redundant_experts // size
    shard = Shard(size=size, whole_experts=settings.expert_parallel, spare_experts=spare)
    heads = shard.heads(config.num_q_heads, config.num_kv_heads)
    intermediate_size = len(shard.part(config.intermediate_size, "intermediate_size"))
    sizes = (config.hidden_size, heads.num_q * config.head_dim, intermediate_size)
    experts = None if config.experts is None else experts_shape(config.experts, shard)
    latent = None if config.latent is None else latent_shape(config.latent)
    chained = shard.is_whole or settings.use_custom_all_reduce
    chained = chained and config.latent is None
    fused = chained and row_attention_takes(config.head_dim) and all(map(row_linear_takes, sizes))
    return shapes.ModelShape(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        num_q_heads=heads.num_q,
        num_kv_heads=heads.num_kv,
        head_dim=config.head_dim,
        vocab_size=shard.room(config.vocab_size),
        qk_norm=config.attention.qk_norm,
        block_size=wanted.block_size,
        max_num_seqs=wanted.max_num_seqs,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        batch_invariant=settings.batch_invariant,
        single_row=fused and (experts is None or experts.single_row),
        experts=experts,
        latent=latent,
        attention_sinks=config.attention.has_sinks,
        softcap=config.attention.softcap,
        chunked_windows=config.attention.chunked_windows,
        is_whole=shard.is_whole,
        packed=packed_shape(config.quantization, sizes),
        has_trees=_has_trees(settings, config),
        sees_ahead=pictures_see_ahead(settings),
        num_adapters=max(len(settings.lora), settings.max_loras if settings.lora_folders else 0),
    )


def packed_shape(quantization: CheckpointQuantization | None, rows: Iterable[int]) -> PackedShape | None:
    """Returns the shape of packed weights, or None if the checkpoint has none or they are dequantized at load. `rows`:
    row lengths of the weights."""
    from quire.kernels.triton.precompile import shapes
    from quire.kernels.triton.quantization.packed_weight import SPANS

    if quantization is None or quantization.packed is None:
        return None
    group_size, zero = quantization.packed
    smallest = SPANS[-1]
    if group_size & (group_size - 1) or 0 < group_size < smallest or any(size % smallest for size in rows):
        return None  # widened as they are loaded
    return shapes.PackedShape(group_size, zero)


def latent_shape(config: LatentConfig) -> LatentShape:
    from quire.kernels.triton.precompile import shapes

    return shapes.LatentShape(config.kv_rank, config.rope_dim, config.nope_dim)


def experts_shape(config: ExpertsConfig, shard: Shard = WHOLE) -> ExpertsShape:
    """Returns the shape of one rank's part of the experts, including its spare ones."""
    from quire.kernels.triton.precompile import shapes
    from quire.services.worker.models.single_row import experts_reject_reason

    here, features = shard.experts(config.num_experts, config.intermediate_size)
    return shapes.ExpertsShape(
        num_experts=len(here) + shard.spare_experts,
        intermediate_size=len(features),
        routing=config.routing,
        gate=config.activation,
        biased=config.biased,
        score_correction_bias=config.score_correction_bias,
        shared_is_there=config.shared_intermediate_size > 0,
        shared_is_gated=config.shared_is_gated,
        single_row=experts_reject_reason(config, shard) is None,
    )
