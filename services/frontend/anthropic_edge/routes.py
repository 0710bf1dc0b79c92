"""Routes of POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from quire.services.frontend.anthropic_edge import errors
from quire.services.frontend.anthropic_edge.bodies import CountBody, MessagesBody
from quire.services.frontend.anthropic_edge.format import MessageFormat, ping
from quire.services.frontend.anthropic_edge.requests import count_prompt, messages_request
from quire.services.frontend.http import headers
from quire.services.frontend.http.dialect_route import dialect_route
from quire.services.frontend.http.responses import GenerationResponse
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext

PREFIX = "/v1/messages"


class MessageRoutes:
    """Routes that turn bodies into requests, and requests into answers."""

    def __init__(self, context: ServingContext) -> None:
        self._generator = context.generator
        self._processor = context.processor
        self._tokenizer = context.tokenizer
        self._catalogue = context.catalogue
        self._unknown = context.bounds.unknown_fields
        route = dialect_route(context.bounds, errors.ERRORS)
        self.router = Router(tags=["messages"], route_class=route)
        self.router.add_api_route(PREFIX, self.create, methods=["POST"], response_class=Response)
        self.router.add_api_route(f"{PREFIX}/count_tokens", self.count, methods=["POST"])

    async def create(self, body: MessagesBody, http: Request) -> Response:
        """Answers a conversation with one message, as JSON or as Anthropic's events, with ping events while a stream
        is idle."""
        body.refuse_unknown(self._unknown)
        request = messages_request(body, headers.read(http), self._tokenizer)
        return GenerationResponse(
            self._generator,
            request,
            MessageFormat(request, self._catalogue.served_name(request.model)),
            stream=body.stream,
            keep_alive=ping,
        )

    async def count(self, body: CountBody) -> dict[str, int]:
        """Counts the tokens of the conversation."""
        body.refuse_unknown(self._unknown)
        entry = self._catalogue.entry(body.model)
        return {"input_tokens": len(await self._processor.tokenize(count_prompt(body), entry.max_model_len))}
