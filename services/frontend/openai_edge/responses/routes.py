"""Routes of POST /v1/responses, its token count, and the stored responses under /v1/responses/{id}."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import orjson
from fastapi import Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from quire.services.frontend.http import headers
from quire.services.frontend.http.responses import GenerationResponse
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.http.stream_responses import StreamStartedResponse
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts
from quire.services.frontend.openai_edge.responses.body import ResponsesBody
from quire.services.frontend.openai_edge.responses.format import (
    CANCELLED,
    IN_PROGRESS,
    QUEUED,
    ResponseIdentity,
    ResponsesFormat,
    failure_fields,
)
from quire.services.frontend.openai_edge.responses.format import PREFIX as ID
from quire.services.frontend.openai_edge.responses.json_numbers import json_safe
from quire.services.frontend.openai_edge.responses.messages import Item, as_items
from quire.services.frontend.openai_edge.responses.requests import responses_request
from quire.services.frontend.openai_edge.responses.store import ResponseStore, StoredResponse
from quire.services.frontend.openai_edge.resumable import FormattedRequest, ResumableHttp
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.request import Request as GeneratorRequest
from quire.services.frontend.streams.stream import Stream
from quire.shared.errors import InvalidArgument, NotFound, Unimplemented

PREFIX = "/v1/responses"
COMPACT = f"{PREFIX}/compact"


class BackgroundBody(BaseModel):
    """Stored request of a background response: the body, and the conversation before it, which other frontends lack."""

    body: ResponsesBody
    before: list[dict[str, Any]]


class ResponseRoutes:
    """Routes for creating, reading, cancelling and deleting responses."""

    def __init__(self, context: ServingContext, resumable: ResumableHttp) -> None:
        self._generator = context.generator
        self._processor = context.processor
        self._tokenizer = context.tokenizer
        self._catalogue = context.catalogue
        self._store = ResponseStore(context.response_store_bytes)
        self._resumable = resumable
        self._unknown = context.bounds.unknown_fields
        resumable.register(PREFIX, self._rebuild)
        self.router = Router(tags=["responses"], own_query=True)
        new = Router(tags=["responses"], own_query=True, route_class=context.bounds.route())
        new.add_api_route(PREFIX, self.create, methods=["POST"], response_class=Response)
        self.router.add(new)
        counted = Router(tags=["responses"], own_query=True, route_class=context.bounds.route(at_once=False))
        counted.add_api_route(f"{PREFIX}/input_tokens", self.count, methods=["POST"])
        self.router.add(counted)
        self.router.add_api_route(COMPACT, self.compact, methods=["POST"], include_in_schema=False)
        one = f"{PREFIX}/{{response_id}}"
        self.router.add_api_route(one, self.get, methods=["GET"])
        self.router.add_api_route(one, self.delete, methods=["DELETE"])
        self.router.add_api_route(f"{one}/input_items", self.input_items, methods=["GET"])
        self.router.add_api_route(f"{one}/cancel", self.cancel, methods=["POST"])

    async def create(self, body: ResponsesBody, http: Request) -> Response:
        """Answers a conversation as JSON or a stream, or starts a response in the background. A previous response's
        conversation precedes the input; raises NotFound if it is not stored."""
        body.refuse_unknown(self._unknown)
        inputs = as_items(body.input)
        before = await self._before(body, http)
        sent = replace(headers.read(http), tenant=_tenant(body, http))
        if body.background:
            return self._begin(BackgroundBody(body=body, before=[*map(dict, before)]), sent)
        request = responses_request(body, [*before, *inputs], sent, self._tokenizer)
        answer = self._format(body, before, request, sent.tenant, ResponseIdentity())
        return GenerationResponse(self._generator, request, answer, stream=bool(body.stream))

    def _begin(self, kept: BackgroundBody, sent: CallHeaders) -> Response:
        """Starts a background response as a resumable stream, which runs without a reader. Answers with its events,
        or at once with the queued response."""
        if kept.body.stream:
            return self._resumable.answer(PREFIX, kept, sent, self._rebuild)
        begin, formatted = self._resumable.prepare_stream(PREFIX, kept, sent, self._rebuild, runs_unread=True)
        assert isinstance(formatted.format, ResponsesFormat)
        return StreamStartedResponse(
            begin, formatted.format.unstarted(QUEUED), formatted.format, formatted.request.structured_output_field
        )

    def _rebuild(self, written: bytes, sent: CallHeaders, created_unix_s: int) -> FormattedRequest:
        """Rebuilds request and format of a background response from its stored body, with the same ids and creation
        time."""
        kept = BackgroundBody.model_validate_json(written)
        request = responses_request(kept.body, [*kept.before, *as_items(kept.body.input)], sent, self._tokenizer)
        identity = ResponseIdentity(request.request_id, created_unix_s)
        return FormattedRequest(request, self._format(kept.body, kept.before, request, sent.tenant, identity))

    def _format(
        self,
        body: ResponsesBody,
        before: Sequence[Item],
        request: GeneratorRequest,
        tenant: str,
        identity: ResponseIdentity,
    ) -> ResponsesFormat:
        """Builds the response format; `before` are the items of the previous responses, which are stored with the
        conversation but are not part of this response's input."""
        inputs = json_safe(as_items(body.input))
        return ResponsesFormat(
            body,
            request.sampling,
            self._catalogue.served_name(request.model),
            inputs=inputs,
            conversation=[*before, *inputs],
            texts=TokenTexts(self._tokenizer, as_ids=False),
            store=self._store,
            tenant=tenant,
            identity=identity,
        )

    async def count(self, body: ResponsesBody, http: Request) -> dict[str, Any]:
        """Counts the prompt tokens of the same call without /input_tokens, after templating; nothing is generated."""
        body.refuse_unknown(self._unknown)
        entry = self._catalogue.entry(body.model)
        conversation = [*await self._before(body, http), *as_items(body.input)]
        (prompt,) = responses_request(body, conversation, headers.read(http), self._tokenizer).prompts
        token_ids = await self._processor.tokenize(prompt, entry.max_model_len)
        return {"object": "response.input_tokens", "input_tokens": len(token_ids)}

    async def compact(self) -> Response:
        """Raises NotFound, so that clients that probe for server-side compaction summarize by themselves."""
        raise NotFound(f"POST {COMPACT} is not supported by this server; send a shorter input instead")

    async def _before(self, body: ResponsesBody, http: Request) -> Sequence[Item]:
        """Returns the conversation that the body continues."""
        if body.previous_response_id is None:
            return ()
        return (await self._find(body.previous_response_id, _tenant(body, http), "previous_response_id")).conversation

    async def _stored(self, response_id: str, tenant: str) -> StoredResponse | None:
        """Returns the stored response; a background one only until a frontend deletes it."""
        stored = self._store.find(response_id, tenant)
        if stored is None or not stored.body["background"]:
            return stored
        is_deleted = await self._resumable.is_deleted(response_id.removeprefix(ID), tenant)
        if is_deleted or not self._resumable.may_be_copied(stored.body["created_at"]):
            self._store.discard(response_id, tenant)
            return None
        return stored

    async def _find(self, response_id: str, tenant: str, field: str = "") -> StoredResponse:
        """Returns the response stored here, or one rebuilt from the events of an ended background stream. Raises
        NotFound, which names `field`, if the tenant has neither."""
        if await self._stored(response_id, tenant) is None:
            stream = await self._kept(response_id, tenant)
            if stream is not None and stream.has_ended:
                response, kept = self._response_of(stream), BackgroundBody.model_validate_json(stream.request.body)
                inputs = json_safe(as_items(kept.body.input))
                return StoredResponse(tenant, response, inputs, [*kept.before, *inputs, *response["output"]])
        return self._store.get(response_id, tenant, field)

    async def get(
        self,
        response_id: str,
        http: Request,
        stream: bool = False,
        starting_after: int = Query(-1, ge=-1),
        include_obfuscation: bool | None = Query(None, description="accepted for OpenAI's clients, without effect"),
    ) -> Response:
        """Returns a response, or resumes the event stream of a background one after an event."""
        stored = await self._stored(response_id, headers.tenant(http))
        if stream and stored is not None and not stored.body["background"]:
            raise Unimplemented(
                "stream: a response that is not in the background is returned in one piece", field="stream"
            )
        request_id = response_id.removeprefix(ID)
        if stream:
            return self._resumable.resumed(request_id, http, starting_after + 1, PREFIX)
        if stored is not None:
            return Response(orjson.dumps(stored.body), media_type="application/json")
        return Response(orjson.dumps(await self._in_background(response_id, http)), media_type="application/json")

    async def _in_background(self, response_id: str, http: Request) -> dict[str, Any]:
        """Returns the present state of a background response from its stream, else the stored one; raises NotFound
        if the tenant has neither."""
        stream = await self._kept(response_id, headers.tenant(http))
        return self._store.get(response_id, headers.tenant(http)).body if stream is None else self._response_of(stream)

    async def _kept(self, response_id: str, tenant: str) -> Stream | None:
        """Returns the stream of a background response with all its events; None if there is none."""
        try:
            stream = await self._resumable.newest(response_id.removeprefix(ID), tenant)
        except (NotFound, Unimplemented):
            return None
        return stream if stream.kind == PREFIX else None

    def _response_of(self, stream: Stream) -> dict[str, Any]:
        """Returns the response of a stream from its last event, or else from its first: those between contain none."""
        first, newest = stream.first_message, stream.last_message
        if newest is not None and "response" in (ended := _fields(newest)):
            response: dict[str, Any] = ended["response"]
        else:
            response = self._queued(stream) if first is None else _fields(first)["response"]
        return response if stream.error is None else {**response, **failure_fields(stream.error)}

    def _queued(self, stream: Stream) -> dict[str, Any]:
        """Returns the response before any event; afterwards, polling need not parse the request, which may be long."""
        kept = stream.request
        sent = CallHeaders(kept.request_id, kept.tenant, None, 0)
        answer = self._rebuild(kept.body, sent, kept.created_unix_s).format
        assert isinstance(answer, ResponsesFormat)
        return answer.unstarted(QUEUED)

    async def delete(self, response_id: str, http: Request) -> dict[str, Any]:
        """Deletes a stored response, and the stream of a background one; raises NotFound if neither exists for the
        tenant."""
        tenant = headers.tenant(http)
        stored = await self._stored(response_id, tenant)
        stream = await self._kept(response_id, tenant) if stored is None or stored.body["background"] else None
        if stream is not None:
            await self._resumable.delete(stream)
        if stored is not None or stream is None:
            self._store.delete(response_id, tenant)
        return {"id": response_id, "object": "response", "deleted": True}

    async def input_items(
        self,
        response_id: str,
        http: Request,
        order: Literal["asc", "desc"] = "asc",
        limit: int | None = Query(None, ge=1, description="default: all of them"),
    ) -> dict[str, Any]:
        """GET /v1/responses/{id}/input_items: the first `limit` input items of a stored response. Raises NotFound
        for a response of another tenant; there is no paging cursor."""
        items = list((await self._find(response_id, headers.tenant(http))).inputs)
        if order == "desc":
            items.reverse()
        shown = items[:limit]
        more = len(shown) < len(items)
        return {"object": "list", "data": shown, "first_id": None, "last_id": None, "has_more": more}

    async def cancel(self, response_id: str, http: Request) -> dict[str, Any]:
        """Cancels a background response; any other ends when its client closes the connection."""
        stored = await self._stored(response_id, headers.tenant(http))
        if stored is not None and stored.body["background"]:
            return stored.body
        if stored is not None:
            text = "Only responses in the background can be cancelled; for others, close the connection."
            raise InvalidArgument(text, field="response_id")
        response = await self._in_background(response_id, http)
        if response["status"] in (QUEUED, IN_PROGRESS):
            await self._resumable.cancel(response_id.removeprefix(ID), http)
            response["status"] = CANCELLED
        return response


def _fields(event: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = orjson.loads(event.partition(b"\ndata: ")[2])
    return fields


def _tenant(body: ResponsesBody, http: Request) -> str:
    """Returns the tenant of a new response; the body's tenant counts only without API keys."""
    return headers.tenant(http) if http.scope[headers.CALL].caller is not None else body.tenant or headers.tenant(http)
