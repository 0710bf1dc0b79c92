"""Block size of models with recurrent layers: a page, which holds a block's keys and values, has to hold a state."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.kernels.state_pages import WORD_BYTES
from quire.services.worker.building.checks.batch_invariance import TORCH_PACKAGE
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.shared.errors import InvalidArgument
from quire.shared.settings import WorkerSettings


def fit(
    limits: WorkerLimits,
    config: DecoderConfig,
    kv_dtype: torch.dtype,
    settings: WorkerSettings,
    *,
    shard: Shard,
) -> WorkerLimits:
    """Returns limits whose blocks are large enough for a state, multiplying block_size unless it was set explicitly.

    All ranks have equally many heads of each kind and get the same size. Raises InvalidArgument for settings that do
    not work with recurrent states.
    """
    if config.recurrent is None:
        return limits
    _check(settings)
    state = config.recurrent.of_rank(shard).state
    num_kv_heads = shard.heads(config.num_q_heads, config.num_kv_heads).num_kv
    position_bytes = num_kv_heads * config.head_dim * kv_dtype.itemsize  # of keys, as of values
    least = -(-state.part_words * WORD_BYTES // position_bytes)
    if limits.block_size >= least:
        return limits
    if settings.block_size:
        raise InvalidArgument(
            f"block_size: a block of {limits.block_size} positions is too small for the state of this model's "
            "recurrent "
            f"layers; give at least {least}",
            field="block_size",
        )
    return replace(limits, block_size=-(-least // limits.block_size) * limits.block_size)


def records_chunks(config: DecoderConfig, place: LayerPlacement) -> bool:
    """Returns whether steps with chunks can be recorded as CUDA graphs: no recurrent op is the reference's, which reads
    row lengths on the host."""
    names = () if config.recurrent is None else ("short_convolution", "gated_delta_rule", "state_space_scan")
    return all(place.ops.sources[name] != TORCH_PACKAGE for name in names)


def _check(settings: WorkerSettings) -> None:
    """Raises InvalidArgument for batch_invariant on a GPU and for context parallelism, which recurrent states
    exclude."""
    if settings.batch_invariant and settings.device != "cpu":
        text = "recurrent layers compute prompts in chunks on a GPU, whose boundaries depend on the batch"
        raise InvalidArgument(f"batch_invariant: {text}", field="batch_invariant")
    if settings.context_parallel_size > 1:
        text = (
            f"{settings.context_parallel_size}: recurrent layers pass a state from token to token, so a prompt "
            "cannot be split; use 1"
        )
        raise InvalidArgument(f"context_parallel_size: {text}", field="context_parallel_size")
