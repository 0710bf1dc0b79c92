"""What a model asks of attention."""

from __future__ import annotations

from services.worker.attention.port import AttentionSpec
from services.worker.layers.placement import Placement
from services.worker.models.decoder_config import DecoderConfig


def attention_spec(config: DecoderConfig, block_size: int, place: Placement) -> AttentionSpec:
    return AttentionSpec(
        device=place.device.type,
        dtype=str(place.dtype).removeprefix("torch."),
        head_dim=config.head_dim,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        block_size=block_size,
        has_window=any(config.sliding_windows),
    )
