"""Assembly of the pipeline for pictures and sound from the settings and the model's folder."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from quire.services.frontend.media import identity
from quire.services.frontend.media.pipeline import MediaLimits, MediaModel, MediaPipeline
from quire.services.frontend.media.policy import MediaPolicy
from quire.services.frontend.media.store import MediaStore
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.media.audio.processor import AttendedProcessor, AudioProcessor
from quire.shared.media.modalities import AUDIO, IMAGE
from quire.shared.media.processor import MediaProcessor
from quire.shared.media.registry import read_audio_processor, read_media_processor
from quire.shared.settings.frontend import FrontendSettings

GIB = 1 << 30
MOST_PROCESSES = 4


class ExpansionTokenizer:
    """PromptTokenizer over the model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`, special tokens in it recognized, none added."""
        return self._tokenizer.encode_plainly(text)


@dataclass(frozen=True, slots=True)
class MediaProcessors:
    """Processors of the media that a model takes; at least one."""

    pictures: MediaProcessor | None
    audio: AudioProcessor | None

    @classmethod
    def of(cls, settings: FrontendSettings) -> MediaProcessors | None:
        """Reads the processors in the model's folder; None if the model takes text only, or is to take text only."""
        if settings.language_model_only:
            return None
        folder = Path(settings.model)
        pictures, audio = read_media_processor(folder), read_audio_processor(folder)
        return None if pictures is None and audio is None else cls(pictures, audio)

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """Tokens that stand for media in prompts, by modality; none for a clip that a decoder attends to."""
        processors = {IMAGE: self.pictures, AUDIO: None if isinstance(self.audio, AttendedProcessor) else self.audio}
        return {name: one.placeholder for name, one in processors.items() if one is not None}

    def pipeline(self, settings: FrontendSettings, tokenizer: Tokenizer) -> MediaPipeline:
        """Returns the pipeline for the media of a model. `tokenizer`: has the tokens of `placeholder_ids`."""
        folder = Path(settings.model)
        digest = identity.model_digest(folder)
        return MediaPipeline(
            MediaModel(self.pictures, ExpansionTokenizer(tokenizer), tokenizer.placeholders, digest, self.audio),
            _policy(settings),
            MediaLimits(by_modality=settings.limit_mm_per_prompt),
            store=MediaStore(int(settings.mm_processor_cache_gb * GIB), int(settings.max_media_gb * GIB)),
            folder=folder,
            num_processes=settings.media_processes or _default_processes(),
        )


def _policy(settings: FrontendSettings) -> MediaPolicy:
    """Returns the sources of media that the settings allow."""
    folder = settings.allowed_local_media_path
    return MediaPolicy(
        frozenset(domain.lower() for domain in settings.allowed_media_domains),
        tuple(ipaddress.ip_network(network) for network in settings.allowed_media_networks),
        Path(folder) if folder else None,
    )


def _default_processes() -> int:
    return min(MOST_PROCESSES, max(1, len(os.sched_getaffinity(0)) // 2))
