"""LLaVA-NeXT and LLaVA-OneVision (arXiv 2408.03326): rows of the whole picture, then those of its tiles. The tiles'
patches form one grid; its padding is cut off, and each of its rows ends with a learned newline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.vision.llava import LlavaVision, LlavaVisionConfig, read_llava
from quire.services.worker.models.vision.tiles import encode_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

NEWLINE = "image_newline"
ONEVISION_DEFAULTS = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}


def read_llava_onevision(config: ConfigFile, vision: ConfigFile, text_size: int) -> LlavaVisionConfig:
    """Reads config.json as read_llava(), with the defaults of LLaVA-OneVision."""
    return read_llava(ConfigFile({**ONEVISION_DEFAULTS, **config.values}), vision, text_size)


class LlavaNextVision:
    """Vision tower, projector and newline that turn the tiles of a picture, or the frames of a video, into rows of text
    embeddings."""

    passed_over: ClassVar[tuple[str, ...]] = LlavaVision.passed_over

    def __init__(self, config: LlavaVisionConfig, place: LayerPlacement, normalization: Normalization) -> None:
        self.config = config
        self._normalization, self._dtype = normalization, place.dtype
        self._tiles = LlavaVision(config, place, normalization)
        self._newline: Tensor = place.empty(config.text_size)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return self._tiles.alternatives

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tiles.destinations()
        yield NEWLINE, self._newline

    def finish(self) -> None:
        self._tiles.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of each picture, [num_embeddings, text_size]. The layout of an item is that of
        AnyResLayout (shared/media/families/llava_next.py), or the number of frames of a video."""
        encoded = encode_tiles(items, self._tiles, self._normalization, self._dtype)
        return [
            self._pack_frames(rows) if len(item.layout) == 1 else self._pack(rows, item.layout)
            for item, rows in zip(items, encoded, strict=True)
        ]

    def _pack_frames(self, frames: Tensor) -> Tensor:
        """Returns the rows of one video: those of each frame, two by two averaged, then a newline.

        frames: [num_frames, patches of a frame, text_size]
        """
        import torch
        from torch.nn import functional

        side, joined = self.config.tower.patches_per_side, -(-self.config.tower.patches_per_side // 2)
        pixels = frames.transpose(1, 2).unflatten(2, (side, side))
        rows = functional.interpolate(pixels, (joined, joined), mode="bilinear").flatten(2).transpose(1, 2)
        return torch.cat((rows.flatten(0, 1), self._newline[None]))

    def _pack(self, tiles: Tensor, layout: tuple[int, ...]) -> Tensor:
        """Returns the rows of one picture: the first tile's, which shows it as a whole, then those of the grid that the
        others form. `layout`: the numbers of AnyResLayout.

        tiles: [1 + grid_rows * grid_columns, patches of a tile, text_size]
        """
        import torch
        from torch.nn import functional

        grid_rows, grid_columns, top, left, height, width = layout
        side, size = self.config.tower.patches_per_side, tiles.size(-1)
        grid = tiles[1:].view(grid_rows, grid_columns, side, side, size).transpose(1, 2)
        grid = grid.reshape(grid_rows * side, grid_columns * side, size)
        grid = grid[top : grid.size(0) - top, left : grid.size(1) - left]
        if grid.shape[:2] != (height, width):
            pixels = grid.permute(2, 0, 1)[None]
            grid = functional.interpolate(pixels, (height, width), mode="bilinear")[0].permute(1, 2, 0)
        ended = torch.cat((grid, self._newline.expand(height, 1, size)), dim=1)
        return torch.cat((tiles[0], ended.flatten(0, 1)))
