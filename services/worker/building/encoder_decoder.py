"""Opens the encoder of an encoder-decoder model: layers, weights, and the cache of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from quire.services.worker.building.vision import STEPS_KEPT, Vision, VisionSize, on_one_rank, size_of, vision_size
from quire.services.worker.media.encoder_cache import EncoderCache
from quire.services.worker.replica.media_encoding import RowType
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.limits.worker_limits import WorkerLimits
    from quire.services.worker.models.causal_lm import CausalLM
    from quire.services.worker.models.config.decoder_config import DecoderConfig
    from quire.services.worker.models.loading.loader import Loader
    from quire.services.worker.models.vision.port import MediaEncoder
    from quire.shared.settings import WorkerSettings

log = logger("worker.build")

CLIPS_KEPT = 16  # of the default cache, at least


@runtime_checkable
class EncoderDecoderModel(Protocol):
    """Model whose decoder attends to the output of an encoder."""

    encoded: ClassVar[tuple[str, ...]]  # modalities of the encoder's items

    @property
    def config(self) -> DecoderConfig: ...

    def new_encoder(self, place: LayerPlacement) -> MediaEncoder:
        """Returns the encoder without weights."""

    def store_cross(self, rows: Tensor, tokens: Tensor, caches: list[LayerCache]) -> None:
        """Writes keys and values of `rows` to the places `tokens` of all layers (model_runner.EncoderDecoder)."""


def open_encoder(
    settings: WorkerSettings, place: LayerPlacement, loader: Loader, model: EncoderDecoderModel, limits: WorkerLimits
) -> Vision:
    """Builds the encoder and loads its weights. Raises InvalidArgument if encoder_cache_size is less than one item."""
    capacity = _capacity(settings, limits)

    def new() -> MediaEncoder:
        """Builds the encoder without weights."""
        return model.new_encoder(on_one_rank(place))

    encoder = new()
    loader.load(encoder, Path(settings.model), lambda _: True)
    log.info("encoder loaded", rows=capacity)
    row_type = RowType(place.dtype, model.config.hidden_size)
    return Vision(
        encoder,
        new,
        EncoderCache(capacity),
        None,
        row_type,
        1.0,
        sees_ahead=False,
        sees_items=False,
        modalities=model.encoded,
    )


def encoder_size(settings: WorkerSettings, place: LayerPlacement, model: CausalLM, limits: WorkerLimits) -> VisionSize:
    """Returns the memory of a model's encoder of media or of an encoder-decoder model, all 0 without one. `place`: on
    the device "meta"."""
    if not isinstance(model, EncoderDecoderModel):
        return vision_size(settings, place, model.config.hidden_size, limits.max_num_batched_tokens)
    cache_bytes = _capacity(settings, limits) * model.config.hidden_size * place.dtype.itemsize
    return size_of(model.new_encoder(on_one_rank(place)), cache_bytes)


def _capacity(settings: WorkerSettings, limits: WorkerLimits) -> int:
    """Returns the number of rows that the encoder cache keeps. Raises InvalidArgument if encoder_cache_size is less
    than the rows of one item."""
    least = limits.layout.cross_length
    capacity = settings.encoder_cache_size or max(STEPS_KEPT * limits.max_num_batched_tokens, CLIPS_KEPT * least)
    if capacity < least:
        text = f"encoder_cache_size: {capacity} rows, and an item of this model has {least}; raise it, or leave it out"
        raise InvalidArgument(text, field="encoder_cache_size")
    return capacity
