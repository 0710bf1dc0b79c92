"""Opens a model's encoder of pictures: layers, weights, and the cache of what it computes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.services.worker.media.encoder_cache import EncoderCache
from quire.services.worker.models.vision.port import MediaInput
from quire.services.worker.models.vision.registry import make_encoder
from quire.services.worker.replica.media_encoding import MediaEncoding, NoMediaEncoding
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.media.registry import read_media_processor

if TYPE_CHECKING:
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.models.causal_lm import CausalLM
    from quire.services.worker.models.loading.loader import Loader
    from quire.services.worker.models.vision.port import MediaEncoder
    from quire.shared.media.processor import MediaProcessor, TileLayout
    from quire.shared.settings import WorkerSettings

log = logger("worker.build")

STEPS_KEPT = 4  # rows of the default cache, in token budgets
LARGEST_SIDE = 4096  # of the picture whose layout is taken for the largest
PICTURES = ("image",)


@dataclass(frozen=True, slots=True)
class Vision:
    """Encoder of a model with its cache."""

    encoder: MediaEncoder
    cache: EncoderCache
    largest: TileLayout | None  # layout of a large picture; None: its family's processor has none
    row_bytes: int
    scale: float  # factor of the rows

    @property
    def reserved_bytes(self) -> int:
        """Memory of the rows that the cache may keep."""
        return self.cache.capacity * self.row_bytes

    def warm_up(self, device: torch.device) -> None:
        """Encodes one large picture, so that the memory for it is known and kernels are compiled."""
        if self.largest is None:
            return
        tiles, height, width, numbers = self.largest
        pixels = torch.zeros((tiles, height, width, 3), dtype=torch.uint8, device=device)
        self.encoder.encode([MediaInput(pixels, numbers)])


def read_processor(settings: WorkerSettings) -> MediaProcessor | None:
    """Returns the processor of the pictures that the worker encodes; None for text models, families without an encoder,
    folders without the processor's files, and with language_model_only."""
    folder = Path(settings.model)
    if settings.language_model_only:
        return None
    return read_media_processor(folder)


def cache_capacity(settings: WorkerSettings, processor: MediaProcessor, max_num_batched_tokens: int) -> int:
    """Returns the number of rows that the encoder cache keeps. Raises InvalidArgument if encoder_cache_size is less
    than the rows of one item."""
    least = processor.max_embeddings
    if not settings.encoder_cache_size:
        return max(STEPS_KEPT * max_num_batched_tokens, least)
    if settings.encoder_cache_size < least:
        text = f"encoder_cache_size: {settings.encoder_cache_size} rows, and a picture of this model may have {least}"
        raise InvalidArgument(text, field="encoder_cache_size")
    return settings.encoder_cache_size


def open_vision(
    settings: WorkerSettings, place: LayerPlacement, loader: Loader, model: CausalLM, max_num_batched_tokens: int
) -> Vision | None:
    """Builds the encoder and loads its weights; None if the worker encodes no pictures. Raises InvalidArgument for
    settings that exclude an encoder."""
    folder, hidden_size = Path(settings.model), model.config.hidden_size
    processor = read_processor(settings)
    if processor is None:
        return None
    values = json.loads((folder / "config.json").read_text())
    encoder = make_encoder(values, hidden_size, _whole(place), processor.normalization)
    if encoder is None:
        return None
    _check_supported(settings)
    loader.load(encoder, folder, lambda _: True)
    cache = EncoderCache(cache_capacity(settings, processor, max_num_batched_tokens))
    log.info("encoder of pictures loaded", model_type=values["model_type"], rows=cache.capacity)
    scale = model.config.scales.embedding if model.scales_media else 1.0
    return Vision(encoder, cache, _largest(processor), hidden_size * place.dtype.itemsize, scale)


def media_encoding(vision: Vision | None, device: torch.device) -> NoMediaEncoding:
    """Returns the replica's component that encodes media."""
    if vision is None:
        return NoMediaEncoding()
    return MediaEncoding(vision.encoder, vision.cache, device, PICTURES, scale=vision.scale)


def _whole(place: LayerPlacement) -> LayerPlacement:
    """Returns the placement of the encoder: every rank has all of it, not quantized and without adapters."""
    from quire.services.worker.layers.sharding import WHOLE

    return replace(place, shard=WHOLE, adapters=None, quantization="none", checkpoint=None)


def _check_supported(settings: WorkerSettings) -> None:
    """Raises InvalidArgument for parallelism that has no place for rows of pictures."""
    for name in ("pipeline_parallel_size", "context_parallel_size"):
        if getattr(settings, name) > 1:
            text = f"{name}: {getattr(settings, name)} is not supported for models that take pictures"
            raise InvalidArgument(f"{text}; set --language-model-only to serve text alone", field=name)


def _largest(processor: MediaProcessor) -> TileLayout | None:
    """Returns the layout of a large picture; None if the processor refuses it."""
    try:
        return processor.layout(LARGEST_SIDE, LARGEST_SIDE, {})
    except InvalidArgument:
        return None
