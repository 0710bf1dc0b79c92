"""Encoder of Whisper as an encoder-decoder model: its hidden states are what the decoder attends to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.models.audio.whisper_encoder import STRIDE, WhisperEncoder, WhisperEncoderConfig
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput

TOWER = "model.encoder"
MAX_CLIPS = 8  # computed at once, so that the memory of activations is bounded


class WhisperSound:
    """MediaEncoder of clips of the model's length."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: WhisperEncoderConfig, place: LayerPlacement) -> None:
        self._tower = WhisperEncoder(TOWER, config, place)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tower.destinations()

    def finish(self) -> None:
        self._tower.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of clips, [max_positions, hidden_size] each. Raises InvalidArgument for features that are
        not one clip of the model's size."""
        import torch

        config = self._tower.config
        wanted = [1, config.bins, STRIDE * config.max_positions]
        for item in items:
            if list(item.pixels.shape) != wanted:
                text = (
                    f"media: features {list(item.pixels.shape)}, and the encoder needs {wanted}; pad or cut the sound"
                )
                raise InvalidArgument(text, field="media")
        clips = torch.cat([item.pixels for item in items]).split(MAX_CLIPS)
        return [rows for batch in clips for rows in self._tower(batch, config.max_positions).unbind(0)]
