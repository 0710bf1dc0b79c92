"""The vision part of Phi-4-multimodal (arXiv 2503.01743): a SigLIP tower on tiles with padding, averaged squares of
patches, learned separators, and a projector of two linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Projection
from quire.services.worker.models.vision.normalization import normalize
from quire.services.worker.models.vision.tiles import MAX_TILES
from quire.services.worker.models.vision.vit import ViT, ViTConfig
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

PREFIX = "model.embed_tokens_extend.image_embed"
PHI4_VISION = "phi4_multimodal_vision"
POOLED = 2  # patches on a side of the squares that are averaged


@dataclass(frozen=True, slots=True)
class Phi4VisionConfig:
    """Configuration of tower and projector, read from config.json."""

    tower: ViTConfig
    text_size: int  # width of the text model's embeddings


def read_phi4_multimodal(config: ConfigFile, vision: ConfigFile, text_size: int) -> Phi4VisionConfig:
    """Reads the vision section of config.json. Raises InvalidArgument for other towers, and for tiles with an odd
    number of patches on a side."""
    kind, depth = vision.text("model_type", PHI4_VISION), vision.integer("num_hidden_layers", 27)
    if kind != PHI4_VISION:
        text = f"config.json: vision_config.model_type is {kind!r}; {PHI4_VISION} is supported"
        raise InvalidArgument(text, field="model")
    layer = vision.integer("feature_layer", -2)
    if not -depth - 1 <= layer <= depth:
        raise refusal("vision_config.feature_layer", layer, f"{-depth - 1} to {depth} is needed for {depth} layers")
    tower = ViTConfig(
        hidden_size=vision.integer("hidden_size", 1152),
        intermediate_size=vision.integer("intermediate_size", 4304),
        num_layers=layer % (depth + 1),
        num_heads=vision.integer("num_attention_heads", 16),
        patch_size=vision.integer("patch_size", 14),
        image_size=vision.integer("image_size", 448),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        has_class_token=False,
        has_patch_bias=True,
        has_bucketed_positions=True,
    )
    if tower.patches_per_side % POOLED:
        text = f"an even number of patches on a side is needed, of {tower.patch_size} pixels each"
        raise refusal("vision_config.image_size", tower.image_size, text)
    return Phi4VisionConfig(tower, text_size)


class Phi4Vision:
    """Vision tower and projector that turn a picture's tiles into rows of text embeddings."""

    passed_over: ClassVar[tuple[str, ...]] = (
        f"{PREFIX}.img_processor.post_layernorm.",
        f"{PREFIX}.img_processor.head.",
    )

    def __init__(self, config: Phi4VisionConfig, place: LayerPlacement, normalization: Normalization) -> None:
        size = config.tower.hidden_size
        up = Projection(f"{PREFIX}.img_projection_up", config.text_size)
        down = Projection(f"{PREFIX}.img_projection_down", config.text_size)
        self.config = config
        self._normalization, self._dtype = normalization, place.dtype
        self._tower = ViT(f"{PREFIX}.img_processor", config.tower, place)
        self._before_whole: Tensor = place.empty(size)  # between the tiles and the whole picture
        self._row_end: Tensor = place.empty(size)  # after each row of patches
        self._projector = PlainMLP(up, down, size, True, place, activation="gelu")

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tower.destinations()
        yield f"{PREFIX}.global_img_feature_extensor", self._before_whole.view(1, 1, -1)
        yield f"{PREFIX}.sub_img_feature_extensor", self._row_end.view(1, 1, 1, -1)
        yield from self._projector.destinations()

    def finish(self) -> None:
        self._tower.finish()
        self._projector.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of each picture, [num_embeddings, text_size]. The layout of an item is that of
        PaddedLayout (shared/media/families/phi4_multimodal.py)."""
        import torch

        tiles = torch.cat([self._with_whole(item) for item in items])
        side = self.config.tower.patches_per_side
        shown = [each for item in items for each in ((side, side), *shown_of_tiles(item.layout, side))]
        batches = range(0, len(shown), MAX_TILES)
        features = torch.cat([self._pooled(tiles[at : at + MAX_TILES], shown[at : at + MAX_TILES]) for at in batches])
        apart = features.split([item.pixels.size(0) + 1 for item in items])
        packed = [self._pack(each, item.layout) for each, item in zip(apart, items, strict=True)]
        return list(self._projector(torch.cat(packed)).split([len(each) for each in packed]))

    def _with_whole(self, item: MediaInput) -> Tensor:
        """Returns the whole picture, scaled down from the tiles in float32, and the tiles, [1 + num_tiles, 3, side,
        side]."""
        import torch
        from torch.nn import functional

        rows, columns = item.layout[:2]
        tiles = normalize(item.pixels, self._normalization, torch.float32)
        side = tiles.size(-1)
        grid = (
            tiles.view(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4).reshape(1, 3, rows * side, columns * side)
        )
        whole = functional.interpolate(grid, (side, side), mode="bicubic", align_corners=False)
        return torch.cat((whole, tiles)).to(self._dtype)

    def _pooled(self, tiles: Tensor, shown: Sequence[tuple[int, int]]) -> Tensor:
        """Returns the averages of squares of patches, [num_tiles, side / 2, side / 2, hidden_size]. `shown`: rows and
        columns of each tile's patches that show the picture."""
        side = self.config.tower.patches_per_side
        x = self._tower(tiles, shown)
        return x.view(len(x), side // POOLED, POOLED, side // POOLED, POOLED, -1).mean((2, 4))

    def _pack(self, features: Tensor, layout: tuple[int, ...]) -> Tensor:
        """Returns the features of one picture, [num_embeddings, hidden_size]: those of the tiles' grid that show it, a
        separator, and those of the whole picture; every row of either grid ends with a separator of its own.

        `features`: [1 + num_tiles, side, side, hidden_size], the whole picture first; `layout`: the numbers of
        PaddedLayout.
        """
        import torch

        rows, columns, shown_rows, shown_columns = layout
        side, size = features.size(1), features.size(-1)
        grid = features[1:].view(rows, columns, side, side, size).transpose(1, 2).reshape(rows * side, -1, size)
        grid = grid[: -(-shown_rows // POOLED), : -(-shown_columns // POOLED)]
        return torch.cat((self._with_row_ends(grid), self._before_whole[None], self._with_row_ends(features[0])))

    def _with_row_ends(self, grid: Tensor) -> Tensor:
        """Flattens a grid of features row after row, each row followed by the separator: [rows, columns, hidden_size]
        -> [rows * (columns + 1), hidden_size]."""
        import torch

        return torch.cat((grid, self._row_end.expand(grid.size(0), 1, -1)), dim=1).flatten(0, 1)


def shown_of_tiles(layout: tuple[int, ...], side: int) -> list[tuple[int, int]]:
    """Returns for each tile, row after row of tiles, how many rows and columns of its patches show the picture.
    `layout`: the numbers of PaddedLayout; `side`: patches on a tile's side."""
    rows, columns, shown_rows, shown_columns = layout
    return [
        (min(max(shown_rows - row * side, 0), side), min(max(shown_columns - column * side, 0), side))
        for row in range(rows)
        for column in range(columns)
    ]
