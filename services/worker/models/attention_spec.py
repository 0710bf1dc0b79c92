"""Attention requirements of a rank's part of a model, and the block size that suits its backend."""

from __future__ import annotations

from importlib import metadata

import torch

from quire.services.worker.attention.backends import AUTO, BLOCK_SIZES
from quire.services.worker.attention.flash_attn import HEAD_DIMS, PACKAGE
from quire.services.worker.attention.port import AttentionSpec
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.shared.settings import WorkerSettings


def attention_spec(
    config: DecoderConfig,
    block_size: int,
    place: LayerPlacement,
    kv_dtype: torch.dtype | None = None,
    *,
    has_trees: bool = False,
    sees_ahead: bool = False,
) -> AttentionSpec:
    """Returns what one rank's part of a model requires of its attention backend: sizes per rank, dtypes, device and
    variants.

    `kv_dtype`: dtype of the KV cache; None: the model's. `has_trees`: draft trees are verified; `sees_ahead`: tokens of
    a picture see each other (AttentionSpec).
    """
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
        sees_ahead=sees_ahead,
    )


def block_size_for(settings: WorkerSettings, config: DecoderConfig, *, has_trees: bool = False) -> int:
    """Returns the block size in tokens that suits the attention backend, for block_size=0; 0: the device's default.

    Called before any device is opened, so "auto" is a guess from settings and configuration. `has_trees`: see
    AttentionSpec.
    """
    name = settings.attention_backend
    if name == AUTO and not has_trees and _flash_attn_may_compute_prompts(settings, config):
        name = "flash_attn"
    return BLOCK_SIZES.get(name, 0)


def _flash_attn_may_compute_prompts(settings: WorkerSettings, config: DecoderConfig) -> bool:
    """Returns whether "auto" is likely to choose flash-attn 4 for prompts: CUDA, a model that it supports, and an
    installed package."""
    if settings.device != "cuda" or settings.batch_invariant or settings.kv_cache_dtype != "auto":
        return False
    plain = config.latent is None and config.recurrent is None and not config.attention.softcap
    if not plain or config.attention.has_sinks or config.attention.chunked_windows or config.head_dim not in HEAD_DIMS:
        return False
    return any(True for _ in metadata.distributions(name=PACKAGE))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
