"""Route of POST /generate."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from quire.services.frontend.http import headers
from quire.services.frontend.http.responses import GenerationResponse
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts
from quire.services.frontend.sglang_edge.bodies import SglangGenerateBody
from quire.services.frontend.sglang_edge.format import SglangGenerateFormat
from quire.services.frontend.sglang_edge.requests import generate_request, has_several_answers

GENERATE = "/generate"


class SglangRoutes:
    """Route that turns bodies into requests, and requests into answers."""

    def __init__(self, context: ServingContext) -> None:
        self._generator = context.generator
        self._tokenizer = context.tokenizer
        self.router = Router(tags=["sglang"], route_class=context.bounds.route())
        self.router.add_api_route(GENERATE, self.generate, methods=["POST"], response_class=Response)

    async def generate(self, body: SglangGenerateBody, http: Request) -> Response:
        """Generates text for one prompt or several; the answer is a list if the body asks for several."""
        request = generate_request(body, headers.read(http), self._tokenizer.defaults)
        answer_format = SglangGenerateFormat(
            TokenTexts(self._tokenizer, as_ids=False),
            several=has_several_answers(body),
            with_texts=body.return_text_in_logprobs,
        )
        return GenerationResponse(self._generator, request, answer_format, stream=body.stream)
