"""Assembly of the pipeline for media from the settings and the model's folder."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

from quire.services.frontend.media import identity
from quire.services.frontend.media.encoder_prompts import EncoderPrompts
from quire.services.frontend.media.pipeline import MediaLimits, MediaModel, MediaPipeline
from quire.services.frontend.media.policy import MediaPolicy
from quire.services.frontend.media.store import MediaStore
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.media.model_processors import MediaProcessors
from quire.shared.models.text_encoders import text_encoder_of
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


def read_processors(settings: FrontendSettings) -> MediaProcessors:
    """Reads the processors from the model's folder; none if the model takes text only, or is to."""
    return MediaProcessors() if settings.language_model_only else MediaProcessors.read(Path(settings.model))


def prompt_media(
    settings: FrontendSettings, processors: MediaProcessors, tokenizer: Tokenizer
) -> MediaPipeline | EncoderPrompts | None:
    """Returns what prepares the media of a model, or the prompts of its encoder; None if it takes text only.
    `tokenizer`: has the tokens of `placeholder_ids` of the processors."""
    folder = Path(settings.model)
    store = MediaStore(int(settings.mm_processor_cache_gb * GIB), int(settings.max_media_gb * GIB))
    if not processors.modalities:
        info = text_encoder_of(folder)
        return None if info is None else EncoderPrompts(info, identity.model_digest(folder), store)
    return MediaPipeline(
        MediaModel(processors, ExpansionTokenizer(tokenizer), tokenizer.placeholders, identity.model_digest(folder)),
        _policy(settings),
        MediaLimits(by_modality=settings.limit_mm_per_prompt),
        store=store,
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
