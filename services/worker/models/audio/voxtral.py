"""Encoder of Voxtral (arXiv 2507.13264): Whisper's, neighbouring positions joined, and a projector of two layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Projection
from quire.services.worker.models.audio.whisper_encoder import WhisperEncoder, WhisperEncoderConfig
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput

TOWER, PROJECTOR = "audio_tower", "multi_modal_projector"
MAX_PIECES = 8  # computed at once, so that the memory of activations is bounded


class VoxtralEncoder:
    """MediaEncoder of the family."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: WhisperEncoderConfig, text_size: int, activation: str, place: LayerPlacement) -> None:
        """Builds the encoder without weights. `activation`: of the projector, whose input joins as many positions as
        make up intermediate_size."""
        self._tower = WhisperEncoder(TOWER, config, place)
        first, second = (Projection(f"{PROJECTOR}.{name}", text_size) for name in ("linear_1", "linear_2"))
        self._projector = PlainMLP(first, second, config.intermediate_size, False, place, activation=activation)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tower.destinations()
        yield from self._projector.destinations()

    def finish(self) -> None:
        self._tower.finish()
        self._projector.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of clips, those of their pieces one after the other, [rows, text_size] each. Raises
        InvalidArgument for features of another size than the encoder's."""
        import torch

        config = self._tower.config
        bins, frames = config.bins, 2 * config.max_positions
        for item in items:
            if item.pixels.shape[1:] != (bins, frames):
                text = f"media: features {list(item.pixels.shape)}, and the encoder needs [pieces, {bins}, {frames}]"
                raise InvalidArgument(text, field="media")
        pieces = torch.cat([item.pixels for item in items]).split(MAX_PIECES)
        rows = torch.cat([self(batch) for batch in pieces])
        return [part.flatten(0, 1) for part in rows.split([item.pixels.size(0) for item in items])]

    def __call__(self, features: Tensor) -> Tensor:
        """Computes rows: features [num_pieces, bins, frames] -> [num_pieces, rows of a piece, text_size]."""
        config = self._tower.config
        hidden = self._tower(features, config.max_positions)
        rows = self._projector(hidden.reshape(-1, config.intermediate_size))
        return rows.view(features.size(0), -1, rows.size(-1))
