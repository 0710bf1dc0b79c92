"""Processors of pictures, videos and sound by `model_type` of config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.audio.processor import AudioProcessor
from quire.shared.media.families.cohere2_vision import make_cohere2_vision
from quire.shared.media.families.frame_videos import make_internvl_video, make_onevision_video, make_smolvlm_video
from quire.shared.media.families.gemma3 import make_gemma3
from quire.shared.media.families.got_ocr2 import make_got_ocr2
from quire.shared.media.families.granite_speech import make_granite_speech
from quire.shared.media.families.idefics3 import make_idefics3
from quire.shared.media.families.internvl import make_internvl
from quire.shared.media.families.lighton_ocr import make_lighton_ocr
from quire.shared.media.families.llama4 import make_llama4
from quire.shared.media.families.llava import make_llava
from quire.shared.media.families.llava_next import make_llava_next, make_llava_onevision
from quire.shared.media.families.paligemma import make_paligemma
from quire.shared.media.families.phi4_multimodal import make_phi4_multimodal
from quire.shared.media.families.pixtral import make_pixtral
from quire.shared.media.families.qwen2_audio import make_qwen2_audio
from quire.shared.media.families.qwen3_asr import make_qwen3_asr
from quire.shared.media.families.qwen_video import make_qwen_video
from quire.shared.media.families.qwen_vl import make_qwen_vl
from quire.shared.media.families.two_towers import make_two_towers
from quire.shared.media.families.voxtral import make_voxtral
from quire.shared.media.families.whisper import make_whisper
from quire.shared.media.picture_sizes import FILES
from quire.shared.media.processor import MediaProcessor
from quire.shared.media.video import VideoProcessor
from quire.shared.models.page_retrieval import page_model, unwrapped


def _make_of_tower(folder: Path, config: Mapping[str, Any]) -> MediaProcessor:
    """Returns the processor of a `llava` model, which depends on its vision tower."""
    make = make_pixtral if config["vision_config"].get("model_type") == "pixtral" else make_llava
    return make(folder, config)


# model_type -> function of the model's folder and config.json
PROCESSORS: dict[str, Callable[[Path, Mapping[str, Any]], MediaProcessor]] = {
    "clip": make_two_towers,
    "cohere2_vision": make_cohere2_vision,
    "gemma3": make_gemma3,
    "got_ocr2": make_got_ocr2,
    "idefics3": make_idefics3,
    "internvl": make_internvl,
    "lighton_ocr": make_lighton_ocr,
    "llama4": make_llama4,
    "llava": _make_of_tower,
    "llava_next": make_llava_next,
    "llava_onevision": make_llava_onevision,
    "mistral3": make_pixtral,
    "paligemma": make_paligemma,
    "phi4_multimodal": make_phi4_multimodal,
    "siglip": make_two_towers,
    "smolvlm": make_idefics3,
    "vipllava": make_llava,
    "qwen2_5_vl": make_qwen_vl,
    "qwen2_vl": make_qwen_vl,
    "qwen3_vl": make_qwen_vl,
    "qwen3_vl_moe": make_qwen_vl,
}

# model_type -> function of the model's folder and config.json, for the families that take videos; it returns None if
# the folder's tokenizer has no token for them
VIDEO_PROCESSORS: dict[str, Callable[[Path, Mapping[str, Any]], VideoProcessor | None]] = {
    "internvl": make_internvl_video,
    "llava_onevision": make_onevision_video,
    "qwen2_5_vl": make_qwen_video,
    "qwen2_vl": make_qwen_video,
    "qwen3_vl": make_qwen_video,
    "qwen3_vl_moe": make_qwen_video,
    "smolvlm": make_smolvlm_video,
}

# The same for the families that take sound.
AUDIO_PROCESSORS: dict[str, Callable[[Path, Mapping[str, Any]], AudioProcessor]] = {
    "granite_speech": make_granite_speech,
    "qwen2_audio": make_qwen2_audio,
    "qwen3_asr": make_qwen3_asr,
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
    config = unwrapped(json.loads(path.read_text()))
    make = PROCESSORS.get(config.get("model_type", ""))
    return make(folder, config) if make is not None and config.get("vision_config") else None


def read_video_processor(folder: Path) -> VideoProcessor | None:
    """Returns the processor of a model's videos; None if the model takes no pictures, if its family is not in
    VIDEO_PROCESSORS, or if its tokenizer or its vocabulary has no token for them. Raises InvalidArgument if its files
    do not fit together."""
    pictures = read_media_processor(folder)
    if pictures is None:
        return None
    config = json.loads((folder / "config.json").read_text())
    make = None if page_model(config) else VIDEO_PROCESSORS.get(config["model_type"])
    videos = None if make is None else make(folder, config)
    num_tokens = (config.get("text_config") or config).get("vocab_size")
    if videos is not None and isinstance(num_tokens, int) and videos.placeholder >= num_tokens:
        return None
    if videos is not None and videos.normalization != pictures.normalization:
        raise InvalidArgument(
            f"model: videos are normalized with {videos.normalization} and pictures with {pictures.normalization}; the "
            "files of both must have the same image_mean and image_std",
            field="model",
        )
    return videos


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
    return (
        make(folder, config)
        if make is not None and (config.get("audio_config") or config.get("encoder_config"))
        else None
    )
