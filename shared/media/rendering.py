"""Resizing and cropping of decoded pictures for the processors of model families. Requires Pillow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from quire.shared.media.picture_sizes import FixedSize
from quire.shared.media.tiling import scaled


def fixed_size(picture: Image.Image, size: FixedSize) -> npt.NDArray[np.uint8]:
    """Returns an RGB picture scaled and cropped to a model's fixed size, [height, width, 3]."""
    plan = size.resize(picture.height, picture.width)
    whole = scaled(picture, plan.height, plan.width, size.resampling)
    cut = whole.crop((plan.left, plan.top, plan.left + plan.crop_width, plan.top + plan.crop_height))
    return np.asarray(cut, dtype=np.uint8)


def resized(picture: Image.Image, height: int, width: int, resampling: str) -> npt.NDArray[np.uint8]:
    """Returns an RGB picture scaled to `height` x `width` pixels, [height, width, 3]. `resampling`: a value of
    picture_sizes.RESAMPLINGS."""
    return np.asarray(scaled(picture, height, width, resampling), dtype=np.uint8)
