"""Encoders of pictures by `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.vision.llava import LlavaVision, read_llava
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.models.vision.port import MediaEncoder
    from quire.shared.media.processor import Normalization

# Function of config.json, its vision section, the text model's hidden size, the placement and the normalization.
MakeEncoder = Callable[[ConfigFile, ConfigFile, int, "LayerPlacement", "Normalization"], "MediaEncoder"]


def _llava(
    config: ConfigFile, vision: ConfigFile, text_size: int, place: LayerPlacement, normalization: Normalization
) -> MediaEncoder:
    return LlavaVision(read_llava(config, vision, text_size), place, normalization)


ENCODERS: Mapping[str, MakeEncoder] = {
    "llava": _llava,
}


def make_encoder(
    config: Mapping[str, Any], text_size: int, place: LayerPlacement, normalization: Normalization
) -> MediaEncoder | None:
    """Returns the encoder of a model without weights; None for families that are not in ENCODERS. `config`: the whole
    config.json; `text_size`: width of the text model's embeddings. Raises InvalidArgument for configurations that are
    not supported."""
    file = ConfigFile(dict(config))
    make = ENCODERS.get(str(config.get("model_type", "")))
    if make is None:
        return None
    vision = file.section("vision_config")
    if vision is None:
        raise InvalidArgument("config.json: vision_config is missing", field="model")
    return make(file, vision, text_size, place, normalization)
