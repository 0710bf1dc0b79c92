"""POST /v1/responses, how many tokens one would have, and what is stored of them under /v1/responses/{id}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.frontend.catalogue import Catalogue
from services.frontend.generator import Generator
from services.frontend.http import headers
from services.frontend.http.answer import Answer
from services.frontend.http.body import BodyBounds
from services.frontend.input_processor.processor import InputProcessor
from services.frontend.openai_edge.logprobs import TokenTexts
from services.frontend.openai_edge.responses.body import ResponsesBody
from services.frontend.openai_edge.responses.format import ResponseFormat
from services.frontend.openai_edge.responses.requests import responses_request
from services.frontend.openai_edge.responses.store import ResponseStore
from services.frontend.openai_edge.responses.turns import Item, as_items
from services.frontend.tokenizer.tokenizer import Tokenizer
from shared.errors import InvalidArgument, Unimplemented

PREFIX = "/v1/responses"


class ResponseRoutes:
    """Bodies to requests, requests to answers, ids to what is stored."""

    def __init__(
        self,
        generator: Generator,
        processor: InputProcessor,
        tokenizer: Tokenizer,
        catalogue: Catalogue,
        bounds: BodyBounds,
        *,
        store: ResponseStore,
    ) -> None:
        self._generator = generator
        self._processor = processor
        self._tokenizer = tokenizer
        self._catalogue = catalogue
        self._store = store
        self.router = APIRouter(tags=["responses"])
        new = APIRouter(route_class=bounds.route())
        new.add_api_route(PREFIX, self.create, methods=["POST"], response_class=Response)
        self.router.include_router(new)
        counted = APIRouter(route_class=bounds.route(at_once=False))
        counted.add_api_route(f"{PREFIX}/input_tokens", self.count, methods=["POST"])
        self.router.include_router(counted)
        one = f"{PREFIX}/{{response_id}}"
        self.router.add_api_route(one, self.get, methods=["GET"])
        self.router.add_api_route(one, self.delete, methods=["DELETE"])
        self.router.add_api_route(f"{one}/input_items", self.input_items, methods=["GET"])
        self.router.add_api_route(f"{one}/cancel", self.cancel, methods=["POST"])

    async def create(self, body: ResponsesBody, http: Request) -> Response:
        """Goes on with a conversation."""
        body.refuse_unknown()
        inputs = as_items(body.input)
        before = self._before(body, http)
        conversation = [*before, *inputs]
        request = responses_request(body, conversation, headers.read(http), self._tokenizer)
        answer = ResponseFormat(
            body,
            request.sampling,
            self._catalogue.called(request.model),
            inputs=inputs,
            conversation=conversation,
            texts=TokenTexts(self._tokenizer, as_ids=False),
            store=self._store,
            tenant=_tenant(body, http),
        )
        return Answer(self._generator, request, answer, stream=bool(body.stream))

    async def count(self, body: ResponsesBody, http: Request) -> dict[str, Any]:
        """How many tokens the same call without /input_tokens would read."""
        body.refuse_unknown()
        entry = self._catalogue.entry(body.model)
        conversation = [*self._before(body, http), *as_items(body.input)]
        (prompt,) = responses_request(body, conversation, headers.read(http), self._tokenizer).prompts
        token_ids = await self._processor.tokenize(prompt, entry.max_model_len)
        return {"object": "response.input_tokens", "input_tokens": len(token_ids)}

    def _before(self, body: ResponsesBody, http: Request) -> Sequence[Item]:
        """The conversation that this goes on."""
        if body.previous_response_id is None:
            return ()
        return self._store.get(body.previous_response_id, _tenant(body, http), "previous_response_id").conversation

    async def get(self, response_id: str, http: Request, stream: bool = False) -> dict[str, Any]:
        if stream:
            raise Unimplemented("stream: a stored response comes in one piece", field="stream")
        return self._store.get(response_id, headers.tenant(http)).body

    async def delete(self, response_id: str, http: Request) -> dict[str, Any]:
        self._store.delete(response_id, headers.tenant(http))
        return {"id": response_id, "object": "response", "deleted": True}

    async def input_items(self, response_id: str, http: Request) -> dict[str, Any]:
        items = list(self._store.get(response_id, headers.tenant(http)).inputs)
        return {"object": "list", "data": items, "first_id": None, "last_id": None, "has_more": False}

    async def cancel(self, response_id: str, http: Request) -> dict[str, Any]:
        """What is stored has ended; what runs ends when its client closes the connection."""
        self._store.get(response_id, headers.tenant(http))
        text = "Only responses in the background can be cancelled, and this server makes none; close the connection."
        raise InvalidArgument(text, field="response_id")


def _tenant(body: ResponsesBody, http: Request) -> str:
    """Whose response it will be: what the body says counts where there are no keys only."""
    return headers.tenant(http) if http.scope[headers.CALL].caller is not None else body.tenant or headers.tenant(http)
