"""Idefics 3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299): a SigLIP tower with positions by bucket, joined patches,
and one linear layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.models.vision.tiles import encode_tiles, join_neighbours
from quire.services.worker.models.vision.vit import ViT, ViTConfig
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

TOWER, CONNECTOR = "vision_model", "connector"
TOWERS = ("idefics3_vision", "smolvlm_vision", "idefics3")  # the last in files of the first version of Idefics 3


@dataclass(frozen=True, slots=True)
class Idefics3VisionConfig:
    """Configuration of the tower and the connector, read from config.json."""

    tower: ViTConfig
    text_size: int  # width of the text model's embeddings
    joined: int  # patches on a side of the square that becomes one row


def read_idefics3(config: ConfigFile, vision: ConfigFile, text_size: int) -> Idefics3VisionConfig:
    """Reads config.json and its vision section.

    `text_size`: width of the text model's embeddings. Raises InvalidArgument for other towers than TOWERS and for a
    scale_factor that does not divide the patches on a side.
    """
    kind = vision.text("model_type", TOWERS[0])
    if kind not in TOWERS:
        text = f"config.json: vision_config.model_type is {kind!r}; {' and '.join(TOWERS[:2])} are supported"
        raise InvalidArgument(text, field="model")
    tower = ViTConfig(
        hidden_size=vision.integer("hidden_size", 1152),
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_layers=vision.integer("num_hidden_layers", 12),
        num_heads=vision.integer("num_attention_heads", 16),
        patch_size=vision.integer("patch_size", 32),
        image_size=vision.integer("image_size", 224),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        has_class_token=False,
        has_patch_bias=True,
        has_last_norm=True,
        has_bucketed_positions=True,
    )
    joined = config.integer("scale_factor", 2)
    if joined < 1 or tower.patches_per_side % joined:
        raise refusal("scale_factor", joined, f"it must divide the {tower.patches_per_side} patches on a side")
    return Idefics3VisionConfig(tower, text_size, joined)


class Idefics3Vision:
    """Vision tower and connector that turn tiles into rows of text embeddings."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Idefics3VisionConfig, place: LayerPlacement, normalization: Normalization) -> None:
        self.config = config
        self._normalization, self._dtype = normalization, place.dtype
        self._tower = ViT(TOWER, config.tower, place)
        projection = Projection(f"{CONNECTOR}.modality_projection.proj", config.text_size)
        self._connector = Linear([projection], config.tower.hidden_size * config.joined**2, False, place)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tower.destinations()
        yield from self._connector.destinations()

    def finish(self) -> None:
        self._tower.finish()
        self._connector.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of each picture, [num_embeddings, text_size]: those of its tiles, in order."""
        return [rows.flatten(0, 1) for rows in encode_tiles(items, self, self._normalization, self._dtype)]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Computes the rows of tiles: normalized pixels [num_tiles, 3, side, side] -> [num_tiles, rows of a tile,
        text_size]."""
        joined = join_neighbours(self._tower(pixels), self.config.joined)
        return self._connector(joined.flatten(0, 1)).view(*joined.shape[:2], -1)
