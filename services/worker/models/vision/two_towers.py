"""Picture towers of models that compare texts with pictures: CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343).
A picture becomes one row, its vector in the space that both share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.vision.tiles import encode_tiles
from quire.services.worker.models.vision.vit import ViT, ViTConfig, read_vit

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

TOWER = "vision_model"


class PictureTower(ABC):
    """Tower of pictures of one size, and the pooling of its patches into a vector; a subclass has the pooling."""

    passed_over: ClassVar[tuple[str, ...]] = ()
    alternatives: ClassVar[Mapping[str, Alternative]] = {}

    def __init__(self, config: ViTConfig, place: LayerPlacement, normalization: Normalization) -> None:
        self._normalization, self._dtype = normalization, place.dtype
        self._tower = ViT(TOWER, config, place)

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the row of each picture, [1, vector size]."""
        return [rows.flatten(0, 1) for rows in encode_tiles(items, self._vectors, self._normalization, self._dtype)]

    @abstractmethod
    def _vectors(self, pixels: Tensor) -> Tensor:
        """Computes the vectors: normalized pixels [num_pictures, 3, side, side] -> [num_pictures, 1, vector size]."""


def read_clip(config: ConfigFile, vision: ConfigFile, text_size: int) -> tuple[ViTConfig, int]:
    """Reads the tower and the size of vectors, `text_size`."""
    return replace(read_vit(vision, layer=-1), has_last_norm=True), text_size


class ClipPictures(PictureTower):
    """CLIP's picture tower: the projected state of the class token."""

    def __init__(self, config: tuple[ViTConfig, int], place: LayerPlacement, normalization: Normalization) -> None:
        tower, size = config
        super().__init__(tower, place, normalization)
        self._projection = Linear([Projection("visual_projection", size)], tower.hidden_size, False, place)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tower.destinations()
        yield from self._projection.destinations()

    def finish(self) -> None:
        self._tower.finish()
        self._projection.finish()

    def _vectors(self, pixels: Tensor) -> Tensor:
        return self._projection(self._tower.tokens(pixels)[:, 0].contiguous()).unsqueeze(1)


def read_siglip(config: ConfigFile, vision: ConfigFile, text_size: int) -> ViTConfig:
    """Reads the tower. Raises InvalidArgument for one without a pooling head, and for vectors of another size than
    texts have, `text_size`."""
    if not vision.flag("vision_use_head", True):
        raise refusal("vision_config.vision_use_head", False, "a tower without its pooling head has no vectors")
    tower = replace(read_vit(vision, layer=-1), has_last_norm=True)
    if tower.hidden_size != text_size:
        raise refusal("vision_config.hidden_size", tower.hidden_size, f"vectors of texts have {text_size} elements")
    return tower


class SiglipPictures(PictureTower):
    """SigLIP's picture tower: patches are pooled by attention of a learned query."""

    def __init__(self, config: ViTConfig, place: LayerPlacement, normalization: Normalization) -> None:
        super().__init__(config, place, normalization)
        self._pooling = AttentionPooling(f"{TOWER}.head", config, place)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tower.destinations()
        yield from self._pooling.destinations()

    def finish(self) -> None:
        self._tower.finish()
        self._pooling.finish()

    def _vectors(self, pixels: Tensor) -> Tensor:
        return self._pooling(self._tower(pixels)).unsqueeze(1)


class AttentionPooling:
    """Pooling by attention of one learned query over all patches, then a residual feed-forward layer."""

    def __init__(self, name: str, config: ViTConfig, place: LayerPlacement) -> None:
        size = config.hidden_size
        self._name, self._heads = name, config.num_heads
        self._query: Tensor = place.empty(size)
        # Of queries, keys and values, in this order.
        self._weight: Tensor = place.empty(3 * size, size)
        self._bias: Tensor = place.empty(3 * size)
        self._output = Linear([Projection(f"{name}.attention.out_proj", size)], size, True, place)
        self._norm = LayerNorm(f"{name}.layernorm", size, config.norm_eps, place)
        up, down = Projection(f"{name}.mlp.fc1", config.intermediate_size), Projection(f"{name}.mlp.fc2", size)
        self._mlp = PlainMLP(up, down, size, True, place, activation=config.activation)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.probe", self._query.view(1, 1, -1)
        yield f"{self._name}.attention.in_proj_weight", self._weight
        yield f"{self._name}.attention.in_proj_bias", self._bias
        for part in (self._output, self._norm, self._mlp):
            yield from part.destinations()

    def finish(self) -> None:
        for part in (self._output, self._norm, self._mlp):
            part.finish()

    def __call__(self, x: Tensor) -> Tensor:
        """Pools patches: [num_pictures, num_patches, hidden_size] -> [num_pictures, hidden_size]."""
        from torch.nn import functional

        size = x.size(2)
        query = functional.linear(self._query, self._weight[:size], self._bias[:size])
        keys_values = functional.linear(x, self._weight[size:], self._bias[size:])
        q = query.view(1, self._heads, 1, -1).expand(x.size(0), -1, -1, -1)
        k, v = (part.unflatten(2, (self._heads, -1)).transpose(1, 2) for part in keys_values.chunk(2, dim=2))
        pooled = self._output(functional.scaled_dot_product_attention(q, k, v).flatten(1))
        return pooled + self._mlp(self._norm(pooled))
