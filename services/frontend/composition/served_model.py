"""The model's local configuration and tokenizer; needs no other service."""

from __future__ import annotations

from pathlib import Path

from quire.services.frontend.composition.media import media_pipeline, read_processors
from quire.services.frontend.input_processor.pooling.pooling_traits import PoolingTraits
from quire.services.frontend.input_processor.processor import InputProcessor
from quire.services.frontend.media.pipeline import NoMedia
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.models import model_identity
from quire.shared.settings.frontend import FrontendSettings


class ServedModel:
    """Owns the tokenizer's threads and the processes that compile grammars."""

    def __init__(self, settings: FrontendSettings) -> None:
        folder = Path(settings.model)
        self.identity = model_identity.identity(folder, settings.served_model_name)
        self.config = model_identity.read_config(folder)
        self.context: int = self.config.get("max_position_embeddings", self.identity.vocab_size)
        processors = read_processors(settings)
        self.tokenizer = Tokenizer(
            folder,
            settings.tokenizer_threads,
            settings.chat_template,
            settings.control_tokens,
            placeholder_ids=processors.placeholder_ids,
        )
        self.media = media_pipeline(settings, processors, self.tokenizer)
        self.pooling_traits = PoolingTraits.of(folder, self.config, self.identity.name, self.tokenizer)
        self.processor = InputProcessor(
            self.tokenizer,
            self.identity.vocab_size,
            settings.max_prompts_per_request,
            settings.request_limits,
            model_identity.class_names(self.config),
            pooling_traits=self.pooling_traits,
            media=self.media or NoMedia(),
        )

    def warm_up(self) -> None:
        """Starts the processes that the first long conversation and the first media item need."""
        self.tokenizer.chat_renderer.start()
        if self.media is not None:
            self.media.warm_up()

    async def close(self) -> None:
        self.processor.close()
        if self.media is not None:
            await self.media.close()
        self.tokenizer.close()
