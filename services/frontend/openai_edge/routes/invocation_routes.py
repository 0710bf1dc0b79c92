"""Route of POST /invocations, the one path on which SageMaker calls a container; the body determines the call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from quire.services.frontend.http.body import BodyReader
from quire.services.frontend.http.router import Router
from quire.services.frontend.openai_edge.body.bodies import (
    Body,
    ChatBody,
    ClassifyBody,
    CompletionBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
)
from quire.services.frontend.openai_edge.routes.generation_routes import CHAT, COMPLETIONS, GenerationRoutes
from quire.services.frontend.openai_edge.routes.pooling_routes import (
    CLASSIFY,
    EMBEDDINGS,
    RERANK,
    SCORE,
    PoolingRoutes,
)
from quire.shared.errors import Unimplemented

Call = Callable[[Any, Request], Awaitable[Response]]
Kind = tuple[str, type[Body], Call]  # the call's own path, body and handler

INVOCATIONS = "/invocations"
BODIES = (ChatBody, CompletionBody, EmbeddingBody, ClassifyBody, ScoreBody, RerankBody)
SCHEMAS = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in BODIES]
ANY_OF = {"requestBody": {"content": {"application/json": {"schema": {"anyOf": SCHEMAS}}}}}


class InvocationRoutes:
    """Route that identifies a call by a field that only it has; without any, it is a completion."""

    def __init__(self, generation: GenerationRoutes, pooling: PoolingRoutes, bounds: BodyReader) -> None:
        """Maps the field that tells a kind of request apart to its path, body and handler, and registers the route."""
        score: Kind = (SCORE[0], ScoreBody, pooling.score)
        classify: Kind = (CLASSIFY, ClassifyBody, pooling.classify)
        embed: Kind = (EMBEDDINGS, EmbeddingBody, pooling.embed)
        self._completion: Kind = (COMPLETIONS, CompletionBody, generation.complete)
        self._kinds: dict[str, Kind] = {
            "messages": (CHAT, ChatBody, generation.chat),
            "prompt": self._completion,
            "input": classify if pooling.classifies else embed,
            "query": (RERANK[0], RerankBody, pooling.rerank),
            "queries": score,
            "text_1": score,
            "data_1": score,
        }
        self.router = Router(tags=["generation"], route_class=bounds.route())
        self.router.add_api_route(
            INVOCATIONS, self.invoke, methods=["POST"], response_class=Response, openapi_extra=ANY_OF
        )

    async def invoke(self, body: dict[str, Any], http: Request) -> Response:
        """Handles a chat completion, a completion, vectors, classes, scores or ranks, with errors worded as in that
        call."""
        if "requestType" in body:
            raise Unimplemented(
                "requestType is not supported: this server has no sessions; leave it out", field="requestType"
            )
        path, kind, call = next((kind for name, kind in self._kinds.items() if name in body), self._completion)
        http.scope["path"] = path
        try:
            read = kind.model_validate(body)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        return await call(read, http)
