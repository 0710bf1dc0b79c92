"""The open inference protocol over HTTP, as a Dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.http.body import BYTES
from quire.services.frontend.http.dialect import EVENTS, Dialect, InferencePath
from quire.services.frontend.http.document.schemas import ANYTHING, COUNT, TEXT, list_of, object_of
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.http.text_errors import ERRORS
from quire.services.frontend.kserve_edge.routes import ONE, ONES_VERSION, PREFIX, ROOT, OpenInferenceRoutes

TENSORS = object_of(
    model_name=TEXT,
    model_version=TEXT,
    outputs=list_of(object_of(name=TEXT, datatype=TEXT, shape=list_of(COUNT), data=list_of(ANYTHING))),
)
GENERATED = object_of(model_name=TEXT, model_version=TEXT, text_output={"anyOf": [TEXT, list_of(TEXT)]})
# Last part of a path -> (schema of the answer in one piece, media type of the other form).
VERBS = {"infer": (TENSORS, BYTES), "generate": (GENERATED, EVENTS), "generate_stream": (GENERATED, EVENTS)}
MODELS = tuple(PREFIX.rstrip("/") + model for model in (ONE, ONES_VERSION))


def _routers(context: ServingContext) -> Sequence[Router]:
    return [OpenInferenceRoutes(context).router]


def _examples(_model: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns example bodies for all paths; the model is part of the path."""
    beginning = "Once upon a time"
    text = {"text_input": beginning, "parameters": {"max_tokens": 20, "temperature": 0}}
    infer = {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [beginning]}],
        "parameters": {"max_tokens": 20},
    }
    bodies: dict[str, Mapping[str, Any]] = {"infer": infer, "generate": text, "generate_stream": text}
    models = [model.replace(":path", "") for model in MODELS]  # as the document writes them
    return {f"{model}/{verb}": body for model in models for verb, body in bodies.items()}


OPEN_INFERENCE = Dialect(
    name="open inference",
    routers=_routers,
    errors=ERRORS,
    prefixes=(ROOT,),
    inference_paths=tuple(
        InferencePath(f"{model}/{verb}", *shown) for model in MODELS for verb, shown in VERBS.items()
    ),
    examples=_examples,
)
