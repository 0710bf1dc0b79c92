"""Dialect of OpenAI's API with vLLM's additions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.http.dialect import Dialect, InferencePath
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.openai_edge import schemas
from quire.services.frontend.openai_edge.errors import ERRORS
from quire.services.frontend.openai_edge.responses.routes import PREFIX as RESPONSES
from quire.services.frontend.openai_edge.responses.routes import ResponseRoutes
from quire.services.frontend.openai_edge.resumable import ResumableHttp
from quire.services.frontend.openai_edge.routes.generation_routes import CHAT, COMPLETIONS, GenerationRoutes
from quire.services.frontend.openai_edge.routes.invocation_routes import INVOCATIONS, InvocationRoutes
from quire.services.frontend.openai_edge.routes.model_routes import ModelRoutes
from quire.services.frontend.openai_edge.routes.pooling_routes import (
    CLASSIFY,
    EMBEDDINGS,
    POOLING,
    RERANK,
    SCORE,
    PoolingRoutes,
)
from quire.services.frontend.openai_edge.routes.token_routes import TokenRoutes
from quire.services.frontend.openai_edge.routes.transcription_routes import (
    REALTIME,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    TranscriptionRoutes,
)

SOUND_PATHS = (TRANSCRIPTIONS, TRANSLATIONS, REALTIME)
# Names of a Request's fields in the bodies.
CHAT_FIELDS = {"prompt": "messages"}
INPUT_FIELDS = {"prompt": "input"}
FILE_FIELDS = {"prompt": "file", "messages": "file", "max_tokens": "max_completion_tokens"}
DOCUMENT_FIELDS = {"prompt": "documents"}
RESPONSE_FIELDS = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "structured_output": "text.format",
}
INVOKED = {
    "anyOf": [schemas.CHAT, schemas.COMPLETION, schemas.VECTORS, schemas.CLASSES, schemas.SCORES, schemas.RANKED]
}


def _routers(context: ServingContext) -> Sequence[Router]:
    """Creates the route objects over one serving context and returns their routers in the order of matching."""
    resumable = ResumableHttp(context.streams)
    generation, pooling = GenerationRoutes(context, resumable), PoolingRoutes(context)
    routes = (
        generation,
        resumable,
        ResponseRoutes(context, resumable),
        pooling,
        InvocationRoutes(generation, pooling, context.bounds),
        TokenRoutes(context),
        ModelRoutes(context.catalogue, SOUND_PATHS if context.transcription is not None else ()),
    )
    return [*(one.router for one in routes), *_transcription(context)]


def _transcription(context: ServingContext) -> Sequence[Router]:
    """Returns the router of transcriptions, if the model transcribes."""
    if context.transcription is None:
        return ()
    return (TranscriptionRoutes(context.transcription, context.catalogue).router,)


def _examples(model: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns an example body per path for the API's documentation, with the name of the served model."""
    question, beginning = "What is 23 + 45?", "Once upon a time"
    messages = [{"role": "user", "content": question}]
    chat = {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0}
    return {
        COMPLETIONS: {"model": model, "prompt": beginning, "max_tokens": 20, "temperature": 0},
        CHAT: chat,
        f"{CHAT}/batch": {**chat, "messages": [messages, messages]},
        RESPONSES: {"model": model, "input": question, "max_output_tokens": 40, "temperature": 0},
        f"{RESPONSES}/input_tokens": {"model": model, "input": question},
        INVOCATIONS: chat,
        "/tokenize": {"model": model, "prompt": beginning},
        "/detokenize": {"model": model, "tokens": [1, 2, 3]},
        **_pooling_examples(model),
    }


def _pooling_examples(model: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns an example body per path that pools texts; aliases of a path share one body."""
    fruit = ["an apple", "a lighthouse"]
    texts = {"model": model, "input": fruit}
    score = {"model": model, "text_1": "something to eat", "text_2": fruit}
    rerank = {"model": model, "query": "something to eat", "documents": fruit}
    return {
        **dict.fromkeys((EMBEDDINGS, POOLING, CLASSIFY), texts),
        **dict.fromkeys(SCORE, score),
        **dict.fromkeys(RERANK, rerank),
    }


OPENAI = Dialect(
    name="openai",
    routers=_routers,
    errors=ERRORS,
    inference_paths=(
        InferencePath(COMPLETIONS, schemas.COMPLETION),
        InferencePath(CHAT, schemas.CHAT, field_names=CHAT_FIELDS),
        InferencePath(f"{CHAT}/batch", schemas.CHAT, field_names=CHAT_FIELDS),
        InferencePath(RESPONSES, schemas.RESPONSE, field_names=RESPONSE_FIELDS),
        InferencePath(f"{RESPONSES}/input_tokens", field_names=RESPONSE_FIELDS),
        InferencePath(EMBEDDINGS, schemas.VECTORS, field_names=INPUT_FIELDS),
        InferencePath(POOLING, schemas.POOLED, field_names=INPUT_FIELDS),
        InferencePath(CLASSIFY, schemas.CLASSES, field_names=INPUT_FIELDS),
        *(InferencePath(path, schemas.SCORES, field_names=DOCUMENT_FIELDS) for path in SCORE),
        *(InferencePath(path, schemas.RANKED, field_names=DOCUMENT_FIELDS) for path in RERANK),
        InferencePath(INVOCATIONS, INVOKED),
        *(InferencePath(path, field_names=FILE_FIELDS, is_file=True) for path in (TRANSCRIPTIONS, TRANSLATIONS)),
    ),
    examples=_examples,
)
