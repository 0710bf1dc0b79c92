"""LLaVA 1.5 (arXiv 2310.03744): hidden states of a CLIP or SigLIP tower, and a projector of two linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Projection
from quire.services.worker.models.vision.normalization import normalize
from quire.services.worker.models.vision.vit import ViT, ViTConfig, read_vit
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"


@dataclass(frozen=True, slots=True)
class LlavaVisionConfig:
    """Configuration of the tower and the projector, read from config.json."""

    tower: ViTConfig
    text_size: int  # width of the text model's embeddings
    projector_activation: str
    projector_bias: bool

    @property
    def num_embeddings(self) -> int:
        """Rows of text embeddings that one picture takes: one for each patch."""
        return self.tower.num_patches


def read_llava(config: ConfigFile, vision: ConfigFile, text_size: int) -> LlavaVisionConfig:
    """Reads config.json and its vision section.

    `text_size`: width of the text model's embeddings. Raises InvalidArgument for several feature layers and for a
    selection of features that does not fit the tower.
    """
    layer = config.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        raise InvalidArgument(f"config.json: vision_feature_layer is {layer!r}; one layer is supported", field="model")
    tower, strategy = read_vit(vision, layer=layer), config.text("vision_feature_select_strategy", "default")
    needed = "default" if tower.has_class_token else "full"
    if strategy != needed:
        text = f"config.json: vision_feature_select_strategy is {strategy!r}; this tower needs {needed!r}"
        raise InvalidArgument(text, field="model")
    return LlavaVisionConfig(
        tower,
        text_size,
        config.text("projector_hidden_act", "gelu"),
        config.flag("multimodal_projector_bias", True),
    )


class LlavaVision:
    """Vision tower and projector that turn pictures into rows of text embeddings."""

    passed_over: ClassVar[tuple[str, ...]] = (f"{TOWER}.post_layernorm.", f"{TOWER}.head.")

    def __init__(self, config: LlavaVisionConfig, place: LayerPlacement, normalization: Normalization) -> None:
        self.config = config
        self._normalization, self._dtype = normalization, place.dtype
        self._tower = ViT(TOWER, config.tower, place)
        first = Projection(f"{PROJECTOR}.linear_1", config.text_size)
        second = Projection(f"{PROJECTOR}.linear_2", config.text_size)
        self._projector = PlainMLP(
            first,
            second,
            config.tower.hidden_size,
            config.projector_bias,
            place,
            activation=config.projector_activation,
        )

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
        """Computes the rows of pictures, [num_embeddings, text_size] each. Raises InvalidArgument for one that is not a
        tile of the tower's size."""
        import torch

        side = self.config.tower.image_size
        for item in items:
            if item.pixels.shape[:3] != (1, side, side):
                text = f"media: pixels {list(item.pixels.shape)}, and the tower needs [1, {side}, {side}, 3]"
                raise InvalidArgument(text, field="media")
        pixels = torch.cat([item.pixels for item in items])
        return list(self(normalize(pixels, self._normalization, self._dtype)).unbind(0))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Computes the embeddings: normalized pixels [num_pictures, 3, side, side] -> [num_pictures, num_embeddings,
        text_size]."""
        features = self._tower(pixels)
        return self._projector(features.flatten(0, 1)).view(*features.shape[:2], -1)
