"""Encoder of Qwen2-Audio (arXiv 2407.10759): Whisper's, pairs of positions averaged, and a linear projector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.models.audio.whisper_encoder import WhisperEncoder, WhisperEncoderConfig
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput

TOWER, PROJECTOR = "audio_tower", "multi_modal_projector.linear"
POOLED = 2  # positions of a row


class Qwen2AudioEncoder:
    """MediaEncoder of the family."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: WhisperEncoderConfig, text_size: int, place: LayerPlacement) -> None:
        self._tower = WhisperEncoder(TOWER, config, place)
        self._projector = Linear([Projection(PROJECTOR, text_size)], config.hidden_size, True, place)

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
        """Computes the rows of clips of equal shape, [positions // 2, text_size] each. Raises InvalidArgument for
        features that are not one clip, or for positions that they do not have."""
        import torch

        positions = [_positions(item, self._tower.config) for item in items]
        rows = []
        for count in dict.fromkeys(positions):
            chosen = [item.pixels for item, own in zip(items, positions, strict=True) if own == count]
            rows.append(iter(self(torch.cat(chosen), count).unbind(0)))
        by_count = dict(zip(dict.fromkeys(positions), rows, strict=True))
        return [next(by_count[count]) for count in positions]

    def __call__(self, features: Tensor, num_positions: int) -> Tensor:
        """Computes rows: features [num_clips, bins, frames] -> [num_clips, num_positions // 2, text_size]."""
        hidden = self._tower.without_norm(features, num_positions)
        pairs = hidden[:, : num_positions // POOLED * POOLED].unflatten(1, (-1, POOLED)).mean(2)
        normed = self._tower.normed(pairs)
        return self._projector(normed.flatten(0, 1)).view(*normed.shape[:2], -1)


def _positions(item: MediaInput, config: WhisperEncoderConfig) -> int:
    """Returns the number of positions of a clip that are sound. Raises InvalidArgument."""
    shape, count = list(item.pixels.shape), item.layout[0] if item.layout else 0
    frames = shape[-1]
    fits = shape[:2] == [1, config.bins] and POOLED <= count <= min((frames + 1) // 2, config.max_positions)
    if not fits:
        text = f"media: features {shape} with {count} positions, and the encoder needs [1, {config.bins}, frames]"
        raise InvalidArgument(text, field="media")
    return count
