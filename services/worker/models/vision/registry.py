"""Encoders of pictures by `model_type` of config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.vision.gemma3 import Gemma3Vision, read_gemma3
from quire.services.worker.models.vision.idefics3 import Idefics3Vision, read_idefics3
from quire.services.worker.models.vision.internvl import InternVLVision, read_internvl
from quire.services.worker.models.vision.llama4 import Llama4Vision, read_llama4
from quire.services.worker.models.vision.llava import LlavaVision, read_llava
from quire.services.worker.models.vision.llava_next import LlavaNextVision, read_llava_onevision
from quire.services.worker.models.vision.phi4_multimodal import Phi4Vision, read_phi4_multimodal
from quire.services.worker.models.vision.pixtral import MODEL_TYPE as PIXTRAL
from quire.services.worker.models.vision.pixtral import PixtralVision, read_pixtral
from quire.services.worker.models.vision.qwen_vl import QwenVision, read_qwen_vit
from quire.services.worker.models.vision.transformers_vision import make_transformers_vision
from quire.services.worker.models.vision.two_towers import ClipPictures, SiglipPictures, read_clip, read_siglip
from quire.shared.errors import InvalidArgument
from quire.shared.media.registry import read_media_processor
from quire.shared.models.page_retrieval import unwrapped

if TYPE_CHECKING:
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.models.vision.port import MediaEncoder
    from quire.shared.media.processor import Normalization
    from quire.shared.settings import WorkerSettings

# Function of config.json, its vision section, the text model's hidden size, the placement and the normalization.
MakeEncoder = Callable[[ConfigFile, ConfigFile, int, "LayerPlacement", "Normalization"], "MediaEncoder"]


def _maker(
    read: Callable[[ConfigFile, ConfigFile, int], Any],
    encoder: Callable[[Any, LayerPlacement, Normalization], MediaEncoder],
) -> MakeEncoder:
    """Returns the function that makes `encoder` of the configuration that `read` returns."""

    def make(
        config: ConfigFile, vision: ConfigFile, text_size: int, place: LayerPlacement, normalization: Normalization
    ) -> MediaEncoder:
        return encoder(read(config, vision, text_size), place, normalization)

    return make


_pixtral = _maker(read_pixtral, PixtralVision)


def _llava(
    config: ConfigFile, vision: ConfigFile, text_size: int, place: LayerPlacement, normalization: Normalization
) -> MediaEncoder:
    """Makes the encoder of a `llava` model: Pixtral's if its tower is one, else that of LLaVA 1.5."""
    if vision.get("model_type") == PIXTRAL:
        return _pixtral(config, vision, text_size, place, normalization)
    return LlavaVision(read_llava(config, vision, text_size), place, normalization)


def _qwen_vl(
    config: ConfigFile, vision: ConfigFile, text_size: int, place: LayerPlacement, normalization: Normalization
) -> MediaEncoder:
    """Makes the encoder of a Qwen-VL model, whose configuration depends on its model_type."""
    return QwenVision(read_qwen_vit(config.text("model_type"), vision, text_size), place, normalization)


ENCODERS: Mapping[str, MakeEncoder] = {
    "clip": _maker(read_clip, ClipPictures),
    "cohere2_vision": make_transformers_vision,
    "gemma3": _maker(read_gemma3, Gemma3Vision),
    "got_ocr2": make_transformers_vision,
    "idefics3": _maker(read_idefics3, Idefics3Vision),
    "internvl": _maker(read_internvl, InternVLVision),
    "lighton_ocr": _pixtral,
    "llama4": _maker(read_llama4, Llama4Vision),
    "llava": _llava,
    "llava_next": _maker(read_llava, LlavaNextVision),
    "llava_onevision": _maker(read_llava_onevision, LlavaNextVision),
    "mistral3": _pixtral,
    "paligemma": make_transformers_vision,
    "phi4_multimodal": _maker(read_phi4_multimodal, Phi4Vision),
    "siglip": _maker(read_siglip, SiglipPictures),
    "smolvlm": _maker(read_idefics3, Idefics3Vision),
    "vipllava": make_transformers_vision,
    "qwen2_5_vl": _qwen_vl,
    "qwen2_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
    "qwen3_vl_moe": _qwen_vl,
}
# Families whose text model lets the tokens of a picture see each other in both directions.
SEE_AHEAD = frozenset({"gemma3", "paligemma"})


def pictures_see_ahead(settings: WorkerSettings) -> bool:
    """Returns whether the worker encodes pictures whose tokens see each other in both directions."""
    folder = Path(settings.model)
    if settings.language_model_only or read_media_processor(folder) is None:
        return False
    return unwrapped(json.loads((folder / "config.json").read_text()))["model_type"] in SEE_AHEAD


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
        raise InvalidArgument(
            "config.json: vision_config is missing; add it, or serve the text part alone with --language-model-only",
            field="model",
        )
    return make(file, vision, text_size, place, normalization)
