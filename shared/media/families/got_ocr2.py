"""GOT-OCR 2.0 (arXiv 2409.01704): pictures of one size, whose patches are joined four by four in two steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.shared.media.families.internvl import check_tile_side, square_side
from quire.shared.media.families.llava import LlavaProcessor
from quire.shared.media.picture_sizes import read_processor

IMAGE_TOKEN = 151_859  # transformers' defaults, as the sizes below
IMAGE_SIZE, PATCH_SIZE = 1024, 16
JOINED = 4  # patches on a side of a square that has one row of embeddings


def make_got_ocr2(folder: Path, config: Mapping[str, Any]) -> LlavaProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    pictures, vision = read_processor(folder), config["vision_config"]
    side = square_side(vision, "image_size", IMAGE_SIZE)
    check_tile_side(pictures.size.height, pictures.size.width, side)
    rows = side // square_side(vision, "patch_size", PATCH_SIZE) // JOINED
    placeholder = config.get("image_token_index", config.get("image_token_id", IMAGE_TOKEN))
    return LlavaProcessor(pictures, placeholder, rows * rows)
