"""Encoders of sound by `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.audio.granite_speech import GraniteSpeechEncoder, read_granite_speech
from quire.services.worker.models.audio.qwen2_audio import Qwen2AudioEncoder
from quire.services.worker.models.audio.qwen3_asr import Qwen3ASREncoder, read_qwen3_asr
from quire.services.worker.models.audio.voxtral import VoxtralEncoder
from quire.services.worker.models.audio.whisper_encoder import read_whisper_encoder
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.models.vision.port import MediaEncoder

# Function of config.json, its audio section, the text model's hidden size and the placement.
MakeAudioEncoder = Callable[[ConfigFile, ConfigFile, int, "LayerPlacement"], "MediaEncoder"]


def _qwen2_audio(config: ConfigFile, audio: ConfigFile, text_size: int, place: LayerPlacement) -> MediaEncoder:
    return Qwen2AudioEncoder(read_whisper_encoder(audio), text_size, place)


def _voxtral(config: ConfigFile, audio: ConfigFile, text_size: int, place: LayerPlacement) -> MediaEncoder:
    return VoxtralEncoder(read_whisper_encoder(audio), text_size, config.text("projector_hidden_act", "gelu"), place)


def _granite_speech(config: ConfigFile, audio: ConfigFile, text_size: int, place: LayerPlacement) -> MediaEncoder:
    return GraniteSpeechEncoder(read_granite_speech(config), text_size, place)


def _qwen3_asr(config: ConfigFile, audio: ConfigFile, text_size: int, place: LayerPlacement) -> MediaEncoder:
    return Qwen3ASREncoder(read_qwen3_asr(audio), text_size, place)


AUDIO_ENCODERS: Mapping[str, MakeAudioEncoder] = {
    "granite_speech": _granite_speech,
    "qwen2_audio": _qwen2_audio,
    "qwen3_asr": _qwen3_asr,
    "voxtral": _voxtral,
}


def make_audio_encoder(config: Mapping[str, Any], text_size: int, place: LayerPlacement) -> MediaEncoder | None:
    """Returns the encoder of a model without weights; None for families that are not in AUDIO_ENCODERS. `config`: the
    whole config.json; `text_size`: width of the text model's embeddings. Raises InvalidArgument for configurations that
    are not supported."""
    file = ConfigFile(dict(config))
    make = AUDIO_ENCODERS.get(str(config.get("model_type", "")))
    audio = file.section("audio_config") or file.section("encoder_config")
    if make is None:
        return None
    if audio is None:
        raise InvalidArgument(
            "config.json: audio_config is missing; add it, or serve the text part alone with --language-model-only",
            field="model",
        )
    return make(file, audio, text_size, place)
