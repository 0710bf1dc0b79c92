"""POST /generate."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from services.frontend.generation.generator import Generator
from services.frontend.http import headers
from services.frontend.http.answer import Answer
from services.frontend.http.body import BodyBounds
from services.frontend.http.router import Router
from services.frontend.openai_edge.answers.logprobs import TokenTexts
from services.frontend.sglang_edge.bodies import SglangGenerateBody
from services.frontend.sglang_edge.format import SglangGenerateFormat
from services.frontend.sglang_edge.requests import generate_request, is_several
from services.frontend.tokenizer.tokenizer import Tokenizer


class SglangRoutes:
    """Bodies to requests, requests to answers."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer, bounds: BodyBounds) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self.router = Router(tags=["sglang"], route_class=bounds.route())
        self.router.add_api_route("/generate", self.generate, methods=["POST"], response_class=Response)

    async def generate(self, body: SglangGenerateBody, http: Request) -> Response:
        """Continues one prompt or several."""
        request = generate_request(body, headers.read(http), self._tokenizer.defaults)
        answer_format = SglangGenerateFormat(
            TokenTexts(self._tokenizer, as_ids=False),
            several=is_several(body),
            with_texts=body.return_text_in_logprobs,
        )
        return Answer(self._generator, request, answer_format, stream=body.stream)
