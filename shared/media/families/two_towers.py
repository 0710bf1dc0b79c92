"""CLIP and SigLIP: pictures of one size, whose prompt is one token that stands for the picture's vector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.llava import LlavaProcessor
from quire.shared.media.picture_sizes import read_tower_pictures
from quire.shared.media.special_tokens import read_settings, token_id

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def make_two_towers(folder: Path, config: Mapping[str, Any]) -> LlavaProcessor:
    """Returns the processor of a model. The tokenizer's end token stands for a picture, since the model has no token
    for it. Raises InvalidArgument if the files do not fit together."""
    pictures = read_tower_pictures(folder, int(config["vision_config"].get("image_size", 224)))
    end = read_settings(folder).get("eos_token") or "<|endoftext|>"
    placeholder = token_id(folder, str(end["content"] if isinstance(end, dict) else end), -1)
    if placeholder < 0:
        raise InvalidArgument(f"model: the tokenizer's files do not list its eos_token, {end!r}", field="model")
    return LlavaProcessor(pictures, placeholder, 1)
