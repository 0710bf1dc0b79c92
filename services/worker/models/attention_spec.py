"""What a rank's part of a model asks of attention."""

from __future__ import annotations

import torch

from quire.services.worker.attention.port import AttentionSpec
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.models.config.decoder_config import DecoderConfig


def attention_spec(
    config: DecoderConfig,
    block_size: int,
    place: LayerPlacement,
    kv_dtype: torch.dtype | None = None,
    *,
    has_trees: bool = False,
) -> AttentionSpec:
    """`kv_dtype`: None: the model's."""
    heads, latent = place.shard.heads(config.num_q_heads, config.num_kv_heads), config.latent
    return AttentionSpec(
        device=place.device.type,
        dtype=_name(place.dtype),
        kv_dtype=_name(kv_dtype or place.dtype),
        head_dim=config.head_dim if latent is None else latent.cached_dim,
        num_q_heads=heads.num_q,
        num_kv_heads=heads.num_kv,
        block_size=block_size,
        has_sinks=config.attention.has_sinks,
        has_softcap=config.attention.softcap > 0,
        has_window=any(config.sliding_windows),
        has_chunked_windows=config.attention.chunked_windows,
        capability=torch.cuda.get_device_capability() if place.device.type == "cuda" else (0, 0),
        latent_rank=0 if latent is None else latent.kv_rank,
        batch_invariant=place.batch_invariant,
        has_trees=has_trees,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
