"""Cuts of pictures into tiles of one size. Requires Pillow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import numpy.typing as npt


def scaled(picture: Image.Image, height: int, width: int, resampling: str) -> Image.Image:
    """Returns a picture scaled to `height` x `width` pixels. `resampling`: a value of picture_sizes.RESAMPLINGS."""
    return picture.resize((width, height), Image.Resampling[resampling.upper()])


def on_canvas(
    picture: Image.Image, height: int, width: int, top: int, left: int, *, colour: tuple[int, int, int] = (0, 0, 0)
) -> Image.Image:
    """Returns a picture of one colour, `height` x `width` pixels, with the upper left corner of
    `picture` at row `top` and column `left`."""
    canvas = Image.new("RGB", (width, height), colour)
    canvas.paste(picture, (left, top))
    return canvas


def cut(picture: Image.Image, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Cuts an RGB picture into tiles of `height` x `width` pixels, row after row: [num_tiles, height, width, 3]. The
    picture's sides must be multiples of them."""
    pixels = np.asarray(picture, dtype=np.uint8)
    rows, columns = picture.height // height, picture.width // width
    return pixels.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)


def cut_with_whole(picture: Image.Image, rows: int, columns: int, side: int, resampling: str) -> npt.NDArray[np.uint8]:
    """Scales a picture to a grid of square tiles and cuts it, row after row; if there are several, the whole picture
    in the size of a tile is the last one. Returns [num_tiles, side, side, 3]."""
    tiles = cut(scaled(picture, rows * side, columns * side, resampling), side, side)
    if len(tiles) == 1:
        return tiles
    whole = np.asarray(scaled(picture, side, side, resampling), dtype=np.uint8)
    return np.concatenate((tiles, whole[None]))
