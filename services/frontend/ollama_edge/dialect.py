"""Ollama's API, as a Dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.http.dialect import Dialect, InferencePath
from quire.services.frontend.http.document.schemas import BOOLEAN, COUNT, NUMBER, TEXT, list_of, object_of
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.http.text_errors import ERRORS
from quire.services.frontend.ollama_edge.bodies import OPTION_NAMES
from quire.services.frontend.ollama_edge.format import LINES
from quire.services.frontend.ollama_edge.routes import PREFIX, OllamaRoutes

CHAT = object_of(model=TEXT, created_at=TEXT, done=BOOLEAN, message=object_of(role=TEXT, content=TEXT))
GENERATED = object_of(model=TEXT, created_at=TEXT, done=BOOLEAN, response=TEXT)
EMBEDDED = object_of(model=TEXT, embeddings=list_of(list_of(NUMBER)), prompt_eval_count=COUNT)
FIELD_NAMES = {**OPTION_NAMES, "max_tokens": "num_predict", "structured_output": "format"}


def _routers(context: ServingContext) -> Sequence[Router]:
    return [OllamaRoutes(context).router]


def _examples(model: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns an example body per path, for the OpenAPI document."""
    question, texts = "What is 23 + 45?", ["an apple", "a lighthouse"]
    return {
        f"{PREFIX}chat": {"model": model, "messages": [{"role": "user", "content": question}], "stream": False},
        f"{PREFIX}generate": {"model": model, "prompt": question, "stream": False},
        f"{PREFIX}embed": {"model": model, "input": texts},
        f"{PREFIX}embeddings": {"model": model, "prompt": texts[0]},
        f"{PREFIX}show": {"model": model},
    }


OLLAMA = Dialect(
    name="ollama",
    routers=_routers,
    errors=ERRORS,
    prefixes=(PREFIX,),
    inference_paths=(
        InferencePath(f"{PREFIX}chat", CHAT, LINES, {**FIELD_NAMES, "prompt": "messages"}),
        InferencePath(f"{PREFIX}generate", GENERATED, LINES, FIELD_NAMES),
        InferencePath(f"{PREFIX}embed", EMBEDDED, field_names={"prompt": "input"}),
        InferencePath(f"{PREFIX}embeddings", object_of(embedding=list_of(NUMBER))),
    ),
    examples=_examples,
)
