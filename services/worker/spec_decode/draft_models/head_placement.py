"""Chooses the device placement and attention backend of a drafting head with one decoder layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.services.worker.attention.backends import choose_attention
from quire.services.worker.attention.port import AttentionBackend
from quire.services.worker.kv.kv_memory import BlockShape, block_shape
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.models.attention_spec import attention_spec
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.drafter import DraftTarget


@dataclass(frozen=True)
class HeadPlacement:
    """Placement of a head's weights, its attention backend, and the shape of its KV blocks."""

    place: LayerPlacement
    backend: AttentionBackend
    shape: BlockShape


def place_head(decoder: DecoderConfig, settings: SpeculativeConfig, target: DraftTarget) -> HeadPlacement:
    """Chooses placement, attention backend and KV block shape for a head with the configuration `decoder`: on the
    target's device, with the quantization of the head's own checkpoint."""
    place = replace(target.place, checkpoint=decoder.quantization)
    spec = attention_spec(decoder, target.limits.block_size, place, has_trees=settings.tree is not None)
    backend = choose_attention(target.attention_backend, spec)
    return HeadPlacement(place, backend, block_shape(spec, 1, place.dtype))
