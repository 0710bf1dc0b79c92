"""The parts of a frontend that the routes of every dialect are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.services.frontend.bounds.prompt_limit import PromptLimit
from quire.services.frontend.generation.catalogue import Catalogue
from quire.services.frontend.generation.generator import Generator
from quire.services.frontend.http.body import BodyReader
from quire.services.frontend.input_processor.pooling.pooling_traits import PoolingTextFormat
from quire.services.frontend.input_processor.processor import InputProcessor
from quire.services.frontend.streams.streams import Streams
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.settings.request_limits import RequestLimits


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that its folder states."""

    family: str  # model_type
    digest: str  # of its config.json


@dataclass(frozen=True, slots=True)
class ServingContext:
    """One frontend, as far as routes see it."""

    generator: Generator
    processor: InputProcessor
    tokenizer: Tokenizer
    catalogue: Catalogue
    bounds: BodyReader  # of JSON bodies
    limits: RequestLimits
    texts: PoolingTextFormat  # how texts are read that are pooled
    facts: ModelFacts
    streams: Streams
    response_store_bytes: int
    prompt_limit: Callable[[], PromptLimit]  # for one prompt, by what is known now
    is_serving: Callable[[], bool]
    is_alive: Callable[[], bool]
