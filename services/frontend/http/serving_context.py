"""The parts of a frontend that routes of all dialects are built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.services.frontend.bounds.prompts import PromptLimit
from quire.services.frontend.generation.catalogue import Catalogue
from quire.services.frontend.generation.generator import Generator
from quire.services.frontend.http.body import BodyReader
from quire.services.frontend.input_processor.pooling.pooling_traits import PoolingTextFormat
from quire.services.frontend.input_processor.processor import InputProcessor
from quire.services.frontend.streams.streams import Streams
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.services.frontend.transcription.transcription import Transcription
from quire.shared.settings.request_limits import RequestLimits


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from the model's folder that some dialects report."""

    family: str  # model_type
    digest: str  # of config.json


@dataclass(frozen=True, slots=True)
class ServingContext:
    """Collaborators and limits of a frontend, as its dialects' routes get them."""

    generator: Generator
    processor: InputProcessor
    tokenizer: Tokenizer
    catalogue: Catalogue
    bounds: BodyReader
    limits: RequestLimits
    texts: PoolingTextFormat  # preparation of texts for pooling
    facts: ModelFacts
    streams: Streams
    transcription: Transcription | None  # None: the model does not transcribe
    response_store_bytes: int
    prompt_limit: Callable[[], PromptLimit]  # limit of one prompt, as known now
    is_serving: Callable[[], bool]
    is_alive: Callable[[], bool]
