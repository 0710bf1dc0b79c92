"""Dialect of Cohere's Embed API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.cohere_edge.routes import CohereRoutes
from quire.services.frontend.http.dialect import Dialect, InferencePath
from quire.services.frontend.http.document.schemas import COUNT, TEXT, list_of, object_of
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.openai_edge.errors import ERRORS  # clients of Cohere and Jina read them

EMBEDDED = object_of(
    id=TEXT,
    response_type=TEXT,
    embeddings={"type": ["object", "array"]},
    texts=list_of(TEXT),
    meta=object_of(billed_units=object_of(input_tokens=COUNT)),
)
FIELD_NAMES = {"prompt": "texts", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}
PATHS = ("/v1/embed", "/v2/embed")


def _routers(context: ServingContext) -> Sequence[Router]:
    return [CohereRoutes(context).router]


def _examples(model: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the same example body for all of Cohere's paths, with the name of the served model."""
    body = {
        "model": model,
        "texts": ["an apple", "a lighthouse"],
        "input_type": "search_document",
        "embedding_types": ["float"],
    }
    return dict.fromkeys(PATHS, body)


COHERE = Dialect(
    name="cohere",
    routers=_routers,
    errors=ERRORS,
    paths=("/v2/chat",),  # not served
    inference_paths=tuple(InferencePath(path, EMBEDDED, field_names=FIELD_NAMES) for path in PATHS),
    examples=_examples,
)
