"""Dialect of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.anthropic_edge.errors import ERRORS
from quire.services.frontend.anthropic_edge.routes import PREFIX, MessageRoutes
from quire.services.frontend.http.dialect import Dialect, InferencePath
from quire.services.frontend.http.document.schemas import COUNT, OPTIONAL_TEXT, TEXT, list_of, object_of
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext

MESSAGE = object_of(
    id=TEXT,
    type={"const": "message"},
    role=TEXT,
    model=TEXT,
    content=list_of(object_of(type=TEXT)),
    stop_reason=OPTIONAL_TEXT,
    usage=object_of(input_tokens=COUNT, output_tokens=COUNT),
)


def _routers(context: ServingContext) -> Sequence[Router]:
    return [MessageRoutes(context).router]


def _examples(model: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns an example body per path for the API's documentation, with the name of the served model."""
    messages = [{"role": "user", "content": "What is 23 + 45?"}]
    return {
        PREFIX: {"model": model, "messages": messages, "max_tokens": 40},
        f"{PREFIX}/count_tokens": {"model": model, "messages": messages},
    }


ANTHROPIC = Dialect(
    name="anthropic",
    routers=_routers,
    errors=ERRORS,
    prefixes=(PREFIX,),
    inference_paths=(
        InferencePath(
            PREFIX,
            MESSAGE,
            field_names={
                "prompt": "messages",
                "stop": "stop_sequences",
                "structured_output": "output_config.format",
            },
        ),
        InferencePath(f"{PREFIX}/count_tokens", field_names={"prompt": "messages"}),
    ),
    examples=_examples,
)
