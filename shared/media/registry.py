"""Processors of pictures and sound by `model_type` of config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.shared.media.audio.processor import AudioProcessor
from quire.shared.media.families.gemma3 import make_gemma3
from quire.shared.media.families.idefics3 import make_idefics3
from quire.shared.media.families.internvl import make_internvl
from quire.shared.media.families.lighton_ocr import make_lighton_ocr
from quire.shared.media.families.llama4 import make_llama4
from quire.shared.media.families.llava import make_llava
from quire.shared.media.families.llava_next import make_llava_next, make_llava_onevision
from quire.shared.media.families.phi4_multimodal import make_phi4_multimodal
from quire.shared.media.families.pixtral import make_pixtral
from quire.shared.media.families.qwen2_audio import make_qwen2_audio
from quire.shared.media.families.qwen_vl import make_qwen_vl
from quire.shared.media.families.voxtral import make_voxtral
from quire.shared.media.families.whisper import make_whisper
from quire.shared.media.picture_sizes import FILES
from quire.shared.media.processor import MediaProcessor


def _make_of_tower(folder: Path, config: Mapping[str, Any]) -> MediaProcessor:
    """Returns the processor of a `llava` model, which depends on its vision tower."""
    make = make_pixtral if config["vision_config"].get("model_type") == "pixtral" else make_llava
    return make(folder, config)


# model_type -> function of the model's folder and config.json
PROCESSORS: dict[str, Callable[[Path, Mapping[str, Any]], MediaProcessor]] = {
    "gemma3": make_gemma3,
    "idefics3": make_idefics3,
    "internvl": make_internvl,
    "lighton_ocr": make_lighton_ocr,
    "llama4": make_llama4,
    "llava": _make_of_tower,
    "llava_next": make_llava_next,
    "llava_onevision": make_llava_onevision,
    "mistral3": make_pixtral,
    "phi4_multimodal": make_phi4_multimodal,
    "smolvlm": make_idefics3,
    "qwen2_5_vl": make_qwen_vl,
    "qwen2_vl": make_qwen_vl,
    "qwen3_vl": make_qwen_vl,
    "qwen3_vl_moe": make_qwen_vl,
}

# model_type -> function of the model's folder and config.json, for the families that take sound
AUDIO_PROCESSORS: dict[str, Callable[[Path, Mapping[str, Any]], AudioProcessor]] = {
    "qwen2_audio": make_qwen2_audio,
    "voxtral": make_voxtral,
}
# The same for encoder-decoder models, whose encoder is described at the top of config.json
ENCODER_DECODERS: dict[str, Callable[[Path, Mapping[str, Any]], AudioProcessor]] = {"whisper": make_whisper}


def read_media_processor(folder: Path) -> MediaProcessor | None:
    """Returns the processor of a model's pictures; None if the model takes none, if its family is not in PROCESSORS,
    or if the folder has no file that says how pictures are processed. Raises InvalidArgument if its files do not fit
    together."""
    path = folder / "config.json"
    if not path.is_file() or not any((folder / name).is_file() for name in FILES):  # GGUF, or a text model's files
        return None
    config = json.loads(path.read_text())
    make = PROCESSORS.get(config.get("model_type", ""))
    return make(folder, config) if make is not None and config.get("vision_config") else None


def read_audio_processor(folder: Path) -> AudioProcessor | None:
    """Returns the processor of a model's sound; None if the model takes none, if its family is not in AUDIO_PROCESSORS
    or ENCODER_DECODERS, or if the folder has no file that says how sound is processed. Raises InvalidArgument if its
    files do not fit together."""
    path = folder / "config.json"
    if not path.is_file() or not any((folder / name).is_file() for name in FILES):
        return None
    config = json.loads(path.read_text())
    kind = config.get("model_type", "")
    if kind in ENCODER_DECODERS:
        return ENCODER_DECODERS[kind](folder, config)
    make = AUDIO_PROCESSORS.get(kind)
    return make(folder, config) if make is not None and config.get("audio_config") else None


def read_processor_of_media(folder: Path) -> MediaProcessor | AudioProcessor | None:
    """Returns the processor of a model's pictures, or of its sound; None if it takes neither."""
    return read_media_processor(folder) or read_audio_processor(folder)
