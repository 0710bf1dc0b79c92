"""How long blocks are where layers keep a state: a page, which holds a block's keys and values, must hold a state."""

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
    """The limits with blocks as long as it takes: a multiple of what they are, unless their length was asked for. All
    ranks have as many heads of each kind, and come to the same length.

    Raises InvalidArgument for what goes wrong, or has not been built, where a token changes a state."""
    if config.recurrent is None:
        return limits
    _check(settings)
    state = config.recurrent.of_rank(shard).state
    num_kv_heads = shard.heads(config.num_q_heads, config.num_kv_heads).num_kv
    position_bytes = num_kv_heads * config.head_dim * kv_dtype.itemsize  # of each of the two parts of a page
    least = -(-state.part_words * WORD_BYTES // position_bytes)
    if limits.block_size >= least:
        return limits
    if settings.block_size:
        raise InvalidArgument(
            f"block_size: a block of {limits.block_size} positions has no room for the state of this model's recurrent "
            f"layers, which takes that of {least}",
            field="block_size",
        )
    return replace(limits, block_size=-(-least // limits.block_size) * limits.block_size)


def records_chunks(config: DecoderConfig, place: LayerPlacement) -> bool:
    """Whether no layer asks on the host how long the rows of a step are, as the reference of recurrent layers does."""
    names = () if config.recurrent is None else ("short_convolution", "gated_delta_rule", "state_space_scan")
    return all(place.ops.sources[name] != TORCH_PACKAGE for name in names)


def _check(settings: WorkerSettings) -> None:
    if settings.batch_invariant and settings.device != "cpu":
        text = "recurrent layers take prompts chunk by chunk on a GPU, and where chunks begin depends on the batch"
        raise InvalidArgument(f"batch_invariant: {text}", field="batch_invariant")
    if settings.context_parallel_size > 1:
        text = f"{settings.context_parallel_size}: recurrent layers hand a state on from each token to the next"
        raise InvalidArgument(f"context_parallel_size: {text}", field="context_parallel_size")
