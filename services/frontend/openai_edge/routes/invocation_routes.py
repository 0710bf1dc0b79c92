"""POST /invocations: the one path that SageMaker calls a container by. The body says which call it is."""

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
Kind = tuple[str, type[Body], Call]  # its own path, its body, and who answers it

INVOCATIONS = "/invocations"
BODIES = (ChatBody, CompletionBody, EmbeddingBody, ClassifyBody, ScoreBody, RerankBody)
SCHEMAS = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in BODIES]
ANY_OF = {"requestBody": {"content": {"application/json": {"schema": {"anyOf": SCHEMAS}}}}}


class InvocationRoutes:
    """Finds the call by the field that only it has; what has none of them is a completion."""

    def __init__(self, generation: GenerationRoutes, pooling: PoolingRoutes, bounds: BodyReader) -> None:
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
        """A chat completion, a completion, vectors, classes, scores or ranks. From here on it is that call, and errors
        are worded as there."""
        if "requestType" in body:
            raise Unimplemented("requestType is not offered: there are no sessions", field="requestType")
        path, kind, call = next((kind for name, kind in self._kinds.items() if name in body), self._completion)
        http.scope["path"] = path
        try:
            read = kind.model_validate(body)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        return await call(read, http)
