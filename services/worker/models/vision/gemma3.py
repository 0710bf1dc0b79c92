"""Gemma 3 (arXiv 2503.19786, section 2.2): a SigLIP tower whose patches are averaged in squares, and one projection."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.models.vision.normalization import normalize
from quire.services.worker.models.vision.vit import SIGLIP, ViT, ViTConfig, read_vit
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"


@dataclass(frozen=True, slots=True)
class Gemma3VisionConfig:
    """Configuration of the tower and the projector, read from config.json."""

    tower: ViTConfig
    text_size: int  # width of the text model's embeddings
    pool: int  # patches on a side of the squares that are averaged
    num_embeddings: int  # rows of one tile


def read_gemma3(config: ConfigFile, vision: ConfigFile, text_size: int) -> Gemma3VisionConfig:
    """Reads config.json and its vision section.

    `text_size`: width of the text model's embeddings. Raises InvalidArgument for other towers than SigLIP and for a
    number of soft tokens that does not divide the patches into squares.
    """
    kind = vision.text("model_type", SIGLIP)
    if kind != SIGLIP:
        raise InvalidArgument(
            f"config.json: vision_config.model_type is {kind!r}; {SIGLIP} is supported", field="model"
        )
    tower = read_vit(ConfigFile({**vision.values, "model_type": kind}), layer=-1)
    side, count = tower.image_size // tower.patch_size, config.integer("mm_tokens_per_image", 256)
    rows = math.isqrt(max(count, 0))
    if not rows or rows * rows != count or side % rows:
        raise InvalidArgument(
            f"config.json: mm_tokens_per_image is {count}: a square of a divisor of {side} patches on a side is needed",
            field="model",
        )
    return Gemma3VisionConfig(tower, text_size, side // rows, count)


class Gemma3Vision:
    """SigLIP tower and projector that turn pictures, and their crops (pan and scan), into rows of text embeddings."""

    passed_over: ClassVar[tuple[str, ...]] = (f"{TOWER}.head.",)

    def __init__(self, config: Gemma3VisionConfig, place: LayerPlacement, normalization: Normalization) -> None:
        size, eps = config.tower.hidden_size, config.tower.norm_eps
        self.config = config
        self._normalization, self._dtype = normalization, place.dtype
        self._tower = ViT(TOWER, config.tower, place)
        self._last_norm = LayerNorm(f"{TOWER}.post_layernorm", size, eps, place)
        self._soft_norm = RMSNorm(f"{PROJECTOR}.mm_soft_emb_norm", size, eps, place, offset=1.0)
        self._projection: Tensor = place.empty(size, config.text_size)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tower.destinations()
        yield from self._last_norm.destinations()
        yield from self._soft_norm.destinations()
        yield f"{PROJECTOR}.mm_input_projection_weight", self._projection

    def finish(self) -> None:
        for part in (self._tower, self._last_norm, self._soft_norm):
            part.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of each picture, [num_tiles * num_embeddings, text_size], tile after tile. Every tile has
        the tower's size."""
        import torch

        pixels = torch.cat([item.pixels for item in items])
        rows = self(normalize(pixels, self._normalization, self._dtype))
        return [part.flatten(0, 1) for part in rows.split([item.pixels.size(0) for item in items])]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Computes the embeddings: normalized pixels [num_tiles, 3, side, side] -> [num_tiles, num_embeddings,
        text_size]."""
        from torch.nn import functional

        features, tower = self._last_norm(self._tower(pixels)), self.config.tower
        side = tower.image_size // tower.patch_size
        squares = features.transpose(1, 2).reshape(-1, tower.hidden_size, side, side)
        pooled = functional.avg_pool2d(squares, self.config.pool).flatten(2).transpose(1, 2)
        rows = self._soft_norm(pooled.reshape(-1, tower.hidden_size).contiguous()) @ self._projection
        return rows.view(pixels.size(0), self.config.num_embeddings, -1)
