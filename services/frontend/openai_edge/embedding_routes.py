"""POST /v1/embeddings."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.frontend.catalogue import Catalogue
from services.frontend.generator import Generator
from services.frontend.http import headers
from services.frontend.http.answer import Answer
from services.frontend.http.body import BodyBounds
from services.frontend.http.headers import CallHeaders
from services.frontend.openai_edge.bodies import EmbeddingBody
from services.frontend.openai_edge.embedding_format import EmbeddingFormat
from services.frontend.openai_edge.prompts import completion_prompts
from services.frontend.request import Pooling, Sampling
from services.frontend.request import Request as Asked

EMBEDDINGS = "/v1/embeddings"


class EmbeddingRoutes:
    """Inputs to vectors."""

    def __init__(self, generator: Generator, catalogue: Catalogue, bounds: BodyBounds) -> None:
        self._generator = generator
        self._catalogue = catalogue
        self.router = APIRouter(tags=["embeddings"], route_class=bounds.route())
        self.router.add_api_route(EMBEDDINGS, self.embed, methods=["POST"], response_class=Response)

    async def embed(self, body: EmbeddingBody, http: Request) -> Response:
        """A vector for each input: text or token ids."""
        body.refuse_unknown()
        answer_format = EmbeddingFormat(self._catalogue.name, as_base64=body.encoding_format == "base64")
        return Answer(self._generator, _request(body, headers.read(http)), answer_format, stream=False)


def _request(body: EmbeddingBody, call: CallHeaders) -> Asked:
    return Asked(
        request_id=body.request_id or call.request_id or uuid.uuid4().hex,
        model=body.model,
        prompts=completion_prompts(body.input, add_special_tokens=body.add_special_tokens),
        sampling=Sampling(detokenize=False),
        pooling=Pooling(body.pooler or "", body.normalize is not False, body.dimensions),
        arrival_s=call.arrival_s,
        deadline_s=call.deadline_s,
        priority=body.priority or 0,
        tenant=body.tenant or call.tenant,
        cache_salt=body.cache_salt or "",
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        final_only=True,
    )
