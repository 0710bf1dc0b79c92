"""Routes of POST /v2/embed and /v1/embed."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from fastapi import Request
from starlette.responses import Response

from quire.services.frontend.cohere_edge.bodies import CohereEmbedBody
from quire.services.frontend.cohere_edge.format import FIRST, CohereEmbedFormat
from quire.services.frontend.cohere_edge.prompts import embed_prompts
from quire.services.frontend.http import headers
from quire.services.frontend.http.responses import GenerationResponse
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.request import Pooling, Sampling
from quire.services.frontend.request.request import Request as GeneratorRequest

# Names that folders give to the prompts of these types, the likeliest first.
PROMPTS: Mapping[str, Sequence[str]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}


class CohereRoutes:
    """Routes that turn texts and pictures into vectors."""

    def __init__(self, context: ServingContext) -> None:
        self._generator = context.generator
        self._catalogue = context.catalogue
        self._texts = context.texts
        self._unknown = context.bounds.unknown_fields
        self.router = Router(tags=["cohere"], route_class=context.bounds.route())
        self.router.add_api_route("/v2/embed", self.embed, methods=["POST"], response_class=Response)
        self.router.add_api_route("/v1/embed", self.embed_v1, methods=["POST"], response_class=Response)

    async def embed(self, body: CohereEmbedBody, http: Request) -> Response:
        """Returns a vector for each input, in Cohere's format."""
        return self._answer("2", body, http)

    async def embed_v1(self, body: CohereEmbedBody, http: Request) -> Response:
        """Returns a vector for each input, in version 1 of Cohere's format."""
        return self._answer(FIRST, body, http)

    def _answer(self, version: str, body: CohereEmbedBody, http: Request) -> Response:
        """Returns the response to a body for API version `version`. The input type selects the model's prompt, if it
        has one of that name; raises on unknown fields as configured."""
        body.refuse_unknown(self._unknown)
        kind = body.input_type or ""
        prompt_name = self._texts.first_known_prompt(PROMPTS.get(kind, (kind,)))
        request = embed_request(body, prompt_name, headers.read(http))
        model = self._catalogue.served_name(body.model)
        answer_format = CohereEmbedFormat(version, model, body.texts or (), body.embedding_types or ())
        return GenerationResponse(self._generator, request, answer_format, stream=False)


def embed_request(body: CohereEmbedBody, prompt_name: str, call: CallHeaders) -> GeneratorRequest:
    """Converts a body to a pooling request with one prompt per input; without max_tokens texts are truncated to the
    model's length, unless truncate is NONE."""
    return GeneratorRequest(
        request_id=call.request_id or uuid.uuid4().hex,
        model=body.model,
        prompts=embed_prompts(body),
        sampling=Sampling(detokenize=False),
        pooling=Pooling(dimensions=body.output_dimension, prompt_name=prompt_name),
        arrival_s=call.arrival_s,
        deadline_s=call.deadline_s,
        priority=body.priority or 0,
        tenant=call.tenant,
        truncate_prompt_tokens=None if body.truncate == "NONE" else body.max_tokens or -1,
        truncation_side="left" if body.truncate == "START" else "right",
        final_only=True,
    )
