"""LLaVA 1.5: pictures of one size, and one token for each patch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.picture_sizes import PictureProcessor, read_tower_pictures
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout, no_options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image


class LlavaProcessor:
    """Resizes every picture to the tower's input size."""

    def __init__(self, pictures: PictureProcessor, placeholder: int, num_embeddings: int) -> None:
        """Makes the processor of a model. `num_embeddings`: patches of one picture."""
        self._pictures = pictures
        self.placeholder = placeholder
        self.normalization = Normalization(pictures.mean, pictures.std, pictures.factor)
        self.max_embeddings = num_embeddings

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Returns the one layout. Raises InvalidArgument for options and for pictures that are too elongated."""
        no_options(options)
        plan = self._pictures.size.resize(height, width)
        return TileLayout(1, plan.crop_height, plan.crop_width)

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the picture scaled and cropped, [1, height, width, 3]."""
        from quire.shared.media.rendering import fixed_size

        return fixed_size(picture, self._pictures.size)[None]

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the placeholder, once for each patch."""
        return PlaceholderExpansion((self.placeholder,) * self.max_embeddings, ((0, self.max_embeddings),))


def make_llava(folder: Path, config: Mapping[str, Any]) -> LlavaProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    return LlavaProcessor(*read_fixed_pictures(folder, config))


def read_fixed_pictures(folder: Path, config: Mapping[str, Any]) -> tuple[PictureProcessor, int, int]:
    """Reads the processing of pictures of the tower's size, the placeholder, and the number of patches of a picture.
    Raises InvalidArgument if the files do not fit together."""
    vision = config["vision_config"]
    side = int(vision.get("image_size", 224))
    pictures = read_tower_pictures(folder, side)
    default = 32 if vision.get("model_type") == "clip_vision_model" else 16
    patches = (side // int(vision.get("patch_size", default))) ** 2
    placeholder = config.get("image_token_index", config.get("image_token_id"))
    if not isinstance(placeholder, int):
        raise InvalidArgument(f"config.json: image_token_index is {placeholder!r}, not a token id", field="model")
    return pictures, placeholder, patches
