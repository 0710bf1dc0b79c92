"""Response format of /v1/responses, as one object or as typed events."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from quire.services.frontend.calls.measurements import Usage
from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.openai_edge import errors
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts, chat_logprobs
from quire.services.frontend.openai_edge.responses.body import ResponsesBody
from quire.services.frontend.openai_edge.responses.items import Event, Json, OutputItem, new_item
from quire.services.frontend.openai_edge.responses.json_numbers import json_safe
from quire.services.frontend.openai_edge.responses.messages import Item
from quire.services.frontend.openai_edge.responses.store import ResponseStore, StoredResponse
from quire.services.frontend.openai_edge.responses.tools import added_tools, echoed_tools, tools_by_prompt_name
from quire.services.frontend.output_processor.answer_parser import Part
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.parsing.events import Content
from quire.services.frontend.request.outcome import Finish
from quire.services.frontend.request.request import Sampling
from quire.shared.errors import QuireError, transport
from quire.shared.pb.common.v1.finish_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH, FinishReason

PREFIX = "resp_"
COMPLETED, INCOMPLETE, IN_PROGRESS, CANCELLED = "completed", "incomplete", "in_progress", "cancelled"
QUEUED, FAILED = "queued", "failed"
STATUSES: dict[FinishReason, str] = {FINISH_REASON_LENGTH: INCOMPLETE, FINISH_REASON_CANCELLED: CANCELLED}
CUT_REASONS = frozenset(STATUSES)
PENALTIES = ("presence_penalty", "frequency_penalty")
SERVICE_TIER = "default"  # the only tier, whichever was requested
ECHOED = ("prompt_cache_key", "safety_identifier")  # fields without influence on the text


class ResponseIdentity:
    """Ids of a response and its items. For background responses, another frontend derives the same ids."""

    def __init__(self, request_id: str = "", created_unix_s: int | None = None) -> None:
        """Creates an identity. `request_id` is that of a background response, whose ids must be the same when it is
        rebuilt; otherwise ids are random."""
        self._request_id = request_id
        self._num_items = 0
        self.response_id = f"{PREFIX}{request_id or uuid.uuid4().hex}"
        self.created_unix_s = int(time.time()) if created_unix_s is None else created_unix_s
        self.is_background = bool(request_id)

    def new_item_id(self, prefix: str) -> str:
        """Returns the next item's id with the prefix: derived from the request id and a counter for background
        responses, otherwise random."""
        self._num_items += 1
        named = hashlib.sha256(f"{self._num_items} {self._request_id}".encode()).hexdigest()[:32]
        return f"{prefix}_{named if self._request_id else uuid.uuid4().hex}"


def usage_object(usage: Usage) -> Json:
    """Returns the Responses API's `usage` in tokens; writes to the cache are not counted and always 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def failure_fields(error: QuireError) -> Json:
    """Returns the fields of a failed response."""
    code = "rate_limit_exceeded" if transport(error).http_status == 429 else "server_error"
    return {"status": FAILED, "error": {"code": code, "message": error.message}}


class ResponsesFormat:
    """Response format of /v1/responses, which puts finished responses into the store."""

    def __init__(
        self,
        body: ResponsesBody,
        sampling: Sampling,
        model: str,
        *,
        inputs: Sequence[Item],
        conversation: Sequence[Item],
        texts: TokenTexts,
        store: ResponseStore,
        tenant: str,
        identity: ResponseIdentity,
    ) -> None:
        """Creates the format of one answer. `inputs` are the items of this request, `conversation` these and all
        earlier ones; both are stored with the response for `tenant` in `store`."""
        self._tenant = tenant
        self._identity = identity
        self._fields = _echo(body, sampling, model, identity)
        self._tools = tools_by_prompt_name([*(body.tools or ()), *added_tools(conversation)])
        self._inputs = inputs
        self._conversation = conversation
        self._texts = texts
        self._store = store if body.store is not False else None
        self._items: list[Json] = []
        self._item: OutputItem | None = None
        self._finish: Finish | None = None
        self._num_events = 0

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> Json:
        """Builds the output items from the complete deltas and returns the response, which is stored if `store` is
        set."""
        for delta in deltas:
            for _ in self._read(delta):
                pass
        for _ in self._end_item():
            pass
        return self._end(generation)

    def events(self, deltas: list[SampleDelta], generation: Generation) -> bytes:
        """Returns the deltas' events as SSE bytes; before the first ones, response.created and response.in_progress."""
        events = [] if self._num_events else [self._lifecycle_event("created"), self._lifecycle_event("in_progress")]
        for delta in deltas:
            events += self._read(delta)
        return b"".join(map(self._event, events))

    def last_events(self, generation: Generation) -> bytes:
        """Closes the open item, stores the response if `store` is set, and returns the final events as SSE bytes. A
        cancelled response ends with response.incomplete."""
        events = list(self._end_item())
        response = self._end(generation)
        kind = INCOMPLETE if response["status"] == CANCELLED else response["status"]
        events.append((f"response.{kind}", {"response": response}))
        return b"".join(map(self._event, events))

    def error_events(self, error: QuireError) -> bytes:
        """Returns the events error and response.failed as SSE bytes, with the items that were finished before."""
        response = {**self._fields, **failure_fields(error), "output": self._items}
        events: list[Event] = [("error", {**response["error"], "param": error.field or None})]
        return b"".join(map(self._event, [*events, ("response.failed", {"response": response})]))

    def refusal(self, error: QuireError) -> Response:
        return errors.as_response(error)

    def _event(self, event: Event) -> bytes:
        """Encodes an event as SSE with the next sequence number, which it consumes."""
        kind, fields = event
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: ".encode() + orjson.dumps(body) + b"\n\n"

    def unstarted(self, status: str) -> Json:
        """Returns the response before any output."""
        return {**self._fields, "status": status, "output": []}

    def _lifecycle_event(self, kind: str) -> Event:
        return f"response.{kind}", {"response": self.unstarted(IN_PROGRESS)}

    def _read(self, delta: SampleDelta) -> Iterator[Event]:
        """Yields the events of a delta. A part that the open item does not take closes it and opens another;
        logprobs are attached to the first content part. Keeps the delta's finish."""
        logprobs = chat_logprobs(delta.logprobs, self._texts)["content"] if delta.logprobs else []
        for part in _parts(delta):
            if self._item is None or not self._item.takes(part):
                yield from self._end_item()
                yield from self._begin_item(part)
            assert self._item is not None
            for kind, fields in self._item.add(part, logprobs):
                yield self._item_event(kind, fields)
            logprobs = [] if isinstance(part, Content) else logprobs
        self._finish = delta.finish or self._finish

    def _begin_item(self, part: Part) -> Iterator[Event]:
        """Opens an item for the part and yields response.output_item.added and the item's opening events."""
        self._item = new_item(part, self._identity.new_item_id, self._tools)
        yield "response.output_item.added", {"output_index": len(self._items), "item": self._item.as_json(IN_PROGRESS)}
        for kind, fields in self._item.opening():
            yield self._item_event(kind, fields)

    def _item_event(self, kind: str, fields: Json) -> Event:
        assert self._item is not None
        return kind, {"item_id": self._item.id, "output_index": len(self._items), **fields}

    def _end_item(self) -> Iterator[Event]:
        """Yields the open item's closing events, if one is open, and moves it to the finished items. An item cut by
        a limit or a cancellation is incomplete."""
        if self._item is None:
            return
        for kind, fields in self._item.closing():
            yield self._item_event(kind, fields)
        is_cut = self._finish is not None and self._finish.reason in CUT_REASONS
        item = self._item.as_json(INCOMPLETE if is_cut else COMPLETED)
        yield "response.output_item.done", {"output_index": len(self._items), "item": item}
        self._items.append(item)
        self._item = None

    def _end(self, generation: Generation) -> Json:
        """Returns the complete response with status, output and usage; stores it with its conversation if `store` is
        set."""
        assert self._finish is not None
        is_cut = self._finish.reason == FINISH_REASON_LENGTH
        response = {
            **self._fields,
            "status": STATUSES.get(self._finish.reason, COMPLETED),
            "completed_at": int(time.time()) if self._finish.reason not in CUT_REASONS else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": usage_object(generation.usage),
        }
        if self._store is not None:
            self._store.put(StoredResponse(self._tenant, response, self._inputs, [*self._conversation, *self._items]))
        return response


def _parts(delta: SampleDelta) -> list[Part]:
    if delta.parts is not None:
        return delta.parts
    return [Content(delta.text)] if delta.text else []


def _echo(body: ResponsesBody, sampling: Sampling, model: str, identity: ResponseIdentity) -> Json:
    """Returns the request's fields that every response repeats, with defaults for those that were left out."""
    effort, summary = (body.reasoning.effort, body.reasoning.summary) if body.reasoning is not None else (None, None)
    echoed: dict[str, Any] = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        **{name: sampling.value(name) for name in PENALTIES},
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": summary},
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": echoed_tools(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.value("top_p"),
        "truncation": "disabled",
        **{name: _text(body, name) for name in ECHOED},
    }
    return {
        "id": identity.response_id,
        "object": "response",
        "created_at": identity.created_unix_s,
        "completed_at": None,
        "model": model,
        "service_tier": SERVICE_TIER,
        "background": identity.is_background,
        "error": None,
        "incomplete_details": None,
        "usage": None,
        **json_safe(echoed),
    }


def _text(body: ResponsesBody, name: str) -> str | None:
    """Returns a field that is otherwise ignored; None if it is not a text."""
    value = (body.model_extra or {}).get(name)
    return value if isinstance(value, str) else None
