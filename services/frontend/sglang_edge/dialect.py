"""Dialect of SGLang's /generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.http.dialect import Dialect, InferencePath
from quire.services.frontend.http.document.schemas import COUNT, TEXT, list_of, object_of
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.openai_edge.errors import ERRORS
from quire.services.frontend.sglang_edge.routes import GENERATE, SglangRoutes

GENERATED = object_of(
    text=TEXT, output_ids=list_of(COUNT), meta_info=object_of(id=TEXT, prompt_tokens=COUNT, completion_tokens=COUNT)
)
FIELD_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


def _routers(context: ServingContext) -> Sequence[Router]:
    return [SglangRoutes(context).router]


def _examples(_model: str) -> Mapping[str, Mapping[str, Any]]:
    return {GENERATE: {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 20, "temperature": 0}}}


SGLANG = Dialect(
    name="sglang",
    routers=_routers,
    errors=ERRORS,
    inference_paths=(InferencePath(GENERATE, {"anyOf": [GENERATED, list_of(GENERATED)]}, field_names=FIELD_NAMES),),
    examples=_examples,
)
