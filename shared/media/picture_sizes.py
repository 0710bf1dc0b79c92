"""Size, normalization and resampling of a model's pictures, read from preprocessor_config.json as transformers does;
without torch and Pillow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.shared.errors import InvalidArgument
from quire.shared.media.processor import Normalization

Triple = tuple[float, float, float]

FILES = ("preprocessor_config.json", "processor_config.json")
RESAMPLINGS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # numbers of Pillow
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MOST_ASPECT = 200  # of a picture's longer side to its shorter one, as transformers has it for Qwen


class Resize(NamedTuple):
    """Plan for one picture: scaled to `height` x `width`, then cut to the box, both in pixels."""

    height: int
    width: int
    top: int
    left: int
    crop_height: int
    crop_width: int


@dataclass(frozen=True, slots=True)
class FixedSize:
    """One size for all pictures: scaled by the shorter side and cut from the middle, or stretched to it."""

    height: int
    width: int
    shortest_edge: int = 0  # pixels of the shorter side before the cut; 0: stretched to height x width
    resampling: str = "bicubic"

    def resize(self, height: int, width: int) -> Resize:
        """Plans for a picture of `height` x `width` pixels. Raises InvalidArgument if it is too elongated to be
        scaled by its shorter side."""
        if not self.shortest_edge:
            return Resize(self.height, self.width, 0, 0, self.height, self.width)
        short, long = sorted((height, width))
        longest = int(self.shortest_edge * long / short)
        if longest > MOST_ASPECT * self.shortest_edge:
            raise InvalidArgument(
                f"absolute aspect ratio must be smaller than {MOST_ASPECT}, got {long / short:.0f}; crop the picture",
                field="messages",
            )
        scaled = (longest, self.shortest_edge) if width < height else (self.shortest_edge, longest)
        top, left = (scaled[0] - self.height) // 2, (scaled[1] - self.width) // 2
        return Resize(*scaled, top, left, self.height, self.width)


@dataclass(frozen=True, slots=True)
class PictureProcessor:
    """Processing of a model's pictures: 8-bit pixels of one size by the frontend, normalized by the worker."""

    size: FixedSize
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    factor: float = 1 / 255  # of 8-bit values, before mean and standard deviation


def read_processor(folder: Path) -> PictureProcessor:
    """Reads the processing of pictures from a model's folder. Raises InvalidArgument if the folder has none of FILES,
    or for a processing that is not supported."""
    values, name = read_values(folder)
    normalization = read_normalization(values, name)
    return PictureProcessor(_fixed_size(values, name), *normalization)


def read_tower_pictures(folder: Path, side: int) -> PictureProcessor:
    """Reads the processing of pictures for a tower that takes `side` x `side` pixels. Raises InvalidArgument as
    read_processor(), and for pictures of another size."""
    pictures = read_processor(folder)
    if (pictures.size.height, pictures.size.width) != (side, side):
        raise InvalidArgument(
            f"preprocessor_config.json: pictures have {pictures.size.height} x {pictures.size.width} pixels, and "
            f"vision_config.image_size is {side}. They must be equal.",
            field="model",
        )
    return pictures


def read_values(folder: Path) -> tuple[dict[str, Any], str]:
    """Reads the settings of a model's picture processor; returns them and the name of their file, for errors. Raises
    InvalidArgument if the folder has none of FILES, or if the settings turn off resizing, rescaling or
    normalization."""
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        values = json.loads(path.read_text())
        values = values.get("image_processor", values)
        for key in ("do_resize", "do_rescale", "do_normalize"):
            if values.get(key) is False:
                raise InvalidArgument(f"{name}: {key} is false, which is not supported; it must be true", field="model")
        return values, name
    raise InvalidArgument(f"model: {folder} has no {FILES[0]}, which says how pictures are resized", field="model")


def read_normalization(
    values: dict[str, Any], name: str, mean: Triple = CLIP_MEAN, std: Triple = CLIP_STD
) -> Normalization:
    """Returns the normalization in the settings of the file `name`; `mean` and `std` apply where they are missing.
    Raises InvalidArgument for anything but three numbers."""
    factor = float(values.get("rescale_factor") or 1 / 255)
    return Normalization(_triple(values, "image_mean", mean, name), _triple(values, "image_std", std, name), factor)


def _fixed_size(values: dict[str, Any], name: str) -> FixedSize:
    """Returns the size of all pictures: by the shorter side with a crop, or height and width. Raises InvalidArgument
    for values that do not give a single size."""
    size, crop = values.get("size") or {}, values.get("crop_size") or {}
    if isinstance(size, int):
        size = {"shortest_edge": size}
    if isinstance(crop, int):
        crop = {"height": crop, "width": crop}
    resampling = read_resampling(values, name)
    if "shortest_edge" in size and values.get("do_center_crop", True) and crop:
        return FixedSize(int(crop["height"]), int(crop["width"]), int(size["shortest_edge"]), resampling)
    if {"height", "width"} <= size.keys():
        return FixedSize(int(size["height"]), int(size["width"]), 0, resampling)
    raise InvalidArgument(
        f"{name}: size is {size!r} and crop_size {crop!r}, which do not determine one size: height and width, or "
        "shortest_edge and a crop_size, are needed",
        field="model",
    )


def read_resampling(values: dict[str, Any], name: str, default: int = 3) -> str:
    """Returns the name of the filter that resizes pictures; `default`, a number of Pillow, applies where it is
    missing. Raises InvalidArgument for filters that are not supported."""
    found = values.get("resample", default)
    if found not in RESAMPLINGS:
        raise InvalidArgument(f"{name}: resample is {found!r}; supported: {RESAMPLINGS}", field="model")
    return RESAMPLINGS[found]


def _triple(values: dict[str, Any], key: str, default: Triple, name: str) -> Triple:
    """Returns three numbers, one per colour channel, or `default` if the key is missing. Raises InvalidArgument for
    anything else."""
    found = values.get(key) or default
    if (
        not isinstance(found, (list, tuple))
        or len(found) != 3
        or not all(isinstance(one, (int, float)) for one in found)
    ):
        raise InvalidArgument(f"{name}: {key} is {found!r}: three numbers are needed", field="model")
    return float(found[0]), float(found[1]), float(found[2])
