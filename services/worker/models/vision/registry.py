"""Encoders of pictures by `model_type` of config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.vision.gemma3 import Gemma3Vision, read_gemma3
from quire.services.worker.models.vision.llava import LlavaVision, read_llava
from quire.services.worker.models.vision.pixtral import MODEL_TYPE as PIXTRAL
from quire.services.worker.models.vision.pixtral import PixtralVision, read_pixtral
from quire.shared.errors import InvalidArgument
from quire.shared.media.registry import read_media_processor

if TYPE_CHECKING:
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.models.vision.port import MediaEncoder
    from quire.shared.media.processor import Normalization
    from quire.shared.settings import WorkerSettings

# Function of config.json, its vision section, the text model's hidden size, the placement and the normalization.
MakeEncoder = Callable[[ConfigFile, ConfigFile, int, "LayerPlacement", "Normalization"], "MediaEncoder"]


def _llava(
    config: ConfigFile, vision: ConfigFile, text_size: int, place: LayerPlacement, normalization: Normalization
) -> MediaEncoder:
    if vision.get("model_type") == PIXTRAL:
        return _pixtral(config, vision, text_size, place, normalization)
    return LlavaVision(read_llava(config, vision, text_size), place, normalization)


def _pixtral(
    config: ConfigFile, vision: ConfigFile, text_size: int, place: LayerPlacement, normalization: Normalization
) -> MediaEncoder:
    return PixtralVision(read_pixtral(config, vision, text_size), place, normalization)


def _gemma3(
    config: ConfigFile, vision: ConfigFile, text_size: int, place: LayerPlacement, normalization: Normalization
) -> MediaEncoder:
    return Gemma3Vision(read_gemma3(config, vision, text_size), place, normalization)


ENCODERS: Mapping[str, MakeEncoder] = {
    "gemma3": _gemma3,
    "llava": _llava,
    "mistral3": _pixtral,
}
# Families whose text model lets the tokens of a picture see each other in both directions.
SEE_AHEAD = frozenset({"gemma3"})


def pictures_see_ahead(settings: WorkerSettings) -> bool:
    """Returns whether the worker encodes pictures whose tokens see each other in both directions."""
    folder = Path(settings.model)
    if settings.language_model_only or read_media_processor(folder) is None:
        return False
    return json.loads((folder / "config.json").read_text())["model_type"] in SEE_AHEAD


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
