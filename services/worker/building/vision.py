"""Opens a model's encoder of pictures or sound: layers, weights, and the cache of what it computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from quire.services.worker.kv_transfer.layout import layout_of
from quire.services.worker.layers.placement import memory_of
from quire.services.worker.layers.sharding import WHOLE, Shard
from quire.services.worker.media.encoder_cache import EncoderCache
from quire.services.worker.media.item_shares import ItemShares
from quire.services.worker.media.waiting import MOST_PIXELS
from quire.services.worker.models.audio.registry import make_audio_encoder
from quire.services.worker.models.vision.port import MediaInput
from quire.services.worker.models.vision.registry import make_encoder, pictures_see_ahead
from quire.services.worker.replica.media_encoding import MediaEncoding, NoMediaEncoding, RowType
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.media.audio.processor import AudioProcessor
from quire.shared.media.model_processors import MediaProcessors
from quire.shared.media.processor import WholeItemProcessor, WholePromptProcessor
from quire.shared.models.page_retrieval import unwrapped

if TYPE_CHECKING:
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.limits.worker_limits import WorkerLimits
    from quire.services.worker.models.causal_lm import CausalLM
    from quire.services.worker.models.config.decoder_config import DecoderConfig
    from quire.services.worker.models.loading.loader import Loader
    from quire.services.worker.models.vision.port import MediaEncoder
    from quire.shared.media.processor import MediaProcessor, TileLayout
    from quire.shared.settings import WorkerSettings

log = logger("worker.build")

STEPS_KEPT = 4  # rows of the default cache, in token budgets
LARGEST_SIDE = 4096  # of the picture whose layout is taken for the largest
LONGEST_S = 30  # of the clip whose layout is; encoders compute longer ones in pieces
EXCLUSIVE = ("pipeline_parallel_size", "context_parallel_size")  # options that have no place for rows of pictures


class RowShape(NamedTuple):
    """Rows that a text model takes from the encoder."""

    size: int  # elements of a row
    scale: float = 1.0  # factor of the rows

    @classmethod
    def of_decoder(cls, family: type[CausalLM], config: DecoderConfig) -> RowShape:
        """Returns the rows that take the place of a decoder's token embeddings."""
        return cls(config.hidden_size, config.scales.embedding if family.scales_media else 1.0)


@dataclass(frozen=True, slots=True)
class Vision:
    """Encoder of a model with its cache."""

    encoder: MediaEncoder
    new: Callable[[], MediaEncoder | None]  # builds another one without weights
    cache: EncoderCache
    largest: TileLayout | None  # layout of a large picture; None: its family's processor has none
    row_type: RowType
    scale: float  # factor of the rows
    sees_ahead: bool  # tokens of a picture see each other in both directions
    sees_items: bool  # so do all tokens of an item
    modalities: tuple[str, ...]

    def warm_up(self, device: torch.device) -> int:
        """Encodes as many large pictures as one call may have, so that the memory for it is known and kernels are
        compiled. Returns the bytes of the rows that the cache may keep; rows may be wider than embeddings."""
        if self.largest is None:
            return self.cache.capacity * self.row_type.num_bytes
        dtype = torch.float32 if self.largest.is_sound else torch.uint8
        pixels = torch.zeros(self.largest.shape, dtype=dtype, device=device)
        count = max(1, MOST_PIXELS // math.prod(self.largest.shape[:3]))
        rows = self.encoder.encode([MediaInput(pixels, self.largest.numbers)] * count)[0]
        return self.cache.capacity * rows.size(1) * rows.element_size()


def read_processor(settings: WorkerSettings) -> MediaProcessor | AudioProcessor | None:
    """Returns the processor of the media that the worker encodes; None for text models, families without an encoder,
    folders without the processor's files, with language_model_only, and with an option of EXCLUSIVE (logged)."""
    if settings.language_model_only:
        return None
    processor = MediaProcessors.read(Path(settings.model)).of_encoder
    if processor is None:
        return None
    excluding = {name: getattr(settings, name) for name in EXCLUSIVE if getattr(settings, name) > 1}
    if excluding:
        log.info("media are refused: these options exclude them", **excluding)
        return None
    return processor


def with_room_for_pictures(settings: WorkerSettings, limits: WorkerLimits) -> WorkerLimits:
    """Returns the limits with a step that has room for the largest picture beside a token of each sequence, if pictures
    are computed in one step."""
    processor = read_processor(settings)
    if not isinstance(processor, WholeItemProcessor):
        return limits
    least = processor.max_item_tokens + limits.max_num_seqs
    if limits.max_num_batched_tokens >= least:
        return limits
    log.info("max_num_batched_tokens raised to hold a picture", asked=limits.max_num_batched_tokens, raised=least)
    return replace(limits, max_num_batched_tokens=least)


def cache_capacity(
    settings: WorkerSettings, processor: MediaProcessor | AudioProcessor, max_num_batched_tokens: int
) -> int:
    """Returns the number of rows that the encoder cache keeps. Raises InvalidArgument if encoder_cache_size is less
    than the rows of one item."""
    least = processor.max_embeddings
    if not settings.encoder_cache_size:
        return max(STEPS_KEPT * max_num_batched_tokens, MediaProcessors.read(Path(settings.model)).max_embeddings)
    if settings.encoder_cache_size < least:
        text = (
            f"encoder_cache_size: {settings.encoder_cache_size} rows, and an item of this model may have {least}; "
            "raise it, or leave it out"
        )
        raise InvalidArgument(text, field="encoder_cache_size")
    return settings.encoder_cache_size


def open_vision(
    settings: WorkerSettings,
    place: LayerPlacement,
    loader: Loader,
    shape: RowShape,
    max_num_batched_tokens: int,
) -> Vision | None:
    """Builds the encoder and loads its weights; None if the worker encodes no media. `shape`: rows that the text model,
    which need not be loaded, takes."""
    processor = read_processor(settings)
    if processor is None:
        return None

    def new() -> MediaEncoder | None:
        """Builds the encoder without weights."""
        return new_encoder(settings, place, shape.size, processor)

    encoder = new()
    if encoder is None:
        return None
    loader.load(encoder, Path(settings.model), lambda _: True)
    cache = EncoderCache(cache_capacity(settings, processor, max_num_batched_tokens))
    modalities = MediaProcessors.read(Path(settings.model)).modalities
    log.info("encoder of media loaded", modalities=modalities, rows=cache.capacity)
    row_type, sees_ahead = RowType(place.dtype, shape.size), pictures_see_ahead(settings)
    sees_items = isinstance(processor, WholePromptProcessor)
    return Vision(encoder, new, cache, _largest(processor), row_type, shape.scale, sees_ahead, sees_items, modalities)


def new_encoder(
    settings: WorkerSettings, place: LayerPlacement, hidden_size: int, processor: MediaProcessor | AudioProcessor
) -> MediaEncoder | None:
    """Returns the encoder without weights, for text embeddings of `hidden_size`; None for families without one."""
    values = unwrapped(json.loads((Path(settings.model) / "config.json").read_text()))
    if isinstance(processor, AudioProcessor):
        return make_audio_encoder(values, hidden_size, on_one_rank(place))
    return make_encoder(values, hidden_size, on_one_rank(place), processor.normalization)


@dataclass(frozen=True, slots=True)
class VisionSize:
    """Memory that a model's encoder needs on each rank."""

    num_parameters: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0


def vision_size(
    settings: WorkerSettings, place: LayerPlacement, hidden_size: int, max_num_batched_tokens: int
) -> VisionSize:
    """Returns the memory of the encoder, all 0 without one. `place`: on the device "meta"."""
    processor = read_processor(settings)
    encoder = None if processor is None else new_encoder(settings, place, hidden_size, processor)
    if processor is None or encoder is None:
        return VisionSize()
    rows = cache_capacity(settings, processor, max_num_batched_tokens)
    return size_of(encoder, rows * hidden_size * place.dtype.itemsize)


def size_of(encoder: MediaEncoder, cache_bytes: int) -> VisionSize:
    """Returns the memory of an encoder, whose cache has `cache_bytes`."""
    tensors = [memory_of(destination) for _, destination in encoder.destinations()]
    return VisionSize(sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors), cache_bytes)


def rows_layout(settings: WorkerSettings, vision: Vision, samples: bytes) -> bytes:
    """Returns the digest of what rows depend on; empty if the weights cannot be identified. `samples`: those of the
    weights in the model's folder."""
    is_dummy = settings.load_format == "dummy"
    if not (samples or is_dummy):
        return b""
    dtype, seed = str(vision.row_type.dtype), settings.seed if is_dummy else None
    return layout_of(Path(settings.model), samples, content="rows of media", dtype=dtype, dummy=seed)


def media_encoding(
    vision: Vision | None, device: torch.device, layout: bytes = b"", shard: Shard = WHOLE
) -> NoMediaEncoding:
    """Returns the replica's component that encodes media. `layout`: digest of what rows depend on; `shard`: this rank,
    among those that share the items."""
    if vision is None:
        return NoMediaEncoding()
    return MediaEncoding(
        vision.encoder,
        vision.cache,
        device,
        vision.modalities,
        row_type=vision.row_type,
        scale=vision.scale,
        whole_items=vision.sees_ahead,
        layout=layout,
        shares=ItemShares(shard),
    )


def on_one_rank(place: LayerPlacement) -> LayerPlacement:
    """Returns the placement of the encoder: every rank has all of it, not quantized and without adapters. On the CPU it
    is batch-invariant with any layers, since each item is encoded alone (MediaOrders), and equal shapes give equal
    bits."""
    invariant = place.batch_invariant and place.device.type != "cpu"
    return replace(place, shard=WHOLE, adapters=None, quantization="none", checkpoint=None, batch_invariant=invariant)


def _largest(processor: MediaProcessor | AudioProcessor) -> TileLayout | None:
    """Returns the layout of a large picture or a long clip; None if the processor refuses it."""
    if isinstance(processor, AudioProcessor):
        return processor.sound_layout(min(processor.max_samples, LONGEST_S * processor.rate), {})
    try:
        return processor.layout(LARGEST_SIDE, LARGEST_SIDE, {})
    except InvalidArgument:
        return None
