"""Response format of /v1/messages: blocks of thinking, text and tool use, in the order of the model's output."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
from starlette.responses import Response

from quire.services.frontend.anthropic_edge import errors
from quire.services.frontend.calls.measurements import Usage
from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.output_processor.answer_parser import CallDelta, Part
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.request.conversation import call_arguments
from quire.services.frontend.request.outcome import Finish
from quire.services.frontend.request.request import Request
from quire.shared.errors import QuireError
from quire.shared.pb.common.v1 import finish_pb2

Json = dict[str, Any]

PING = {"type": "ping"}
# Usage fields of features that this server lacks: cache writes, regions and service tiers.
FIXED_USAGE_FIELDS: Json = {
    "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
    "inference_geo": None,
    "service_tier": "standard",
}


def event(body: Json) -> bytes:
    return f"event: {body['type']}\ndata: ".encode() + orjson.dumps(body) + b"\n\n"


def ping() -> bytes:
    """Returns the event that keeps an idle stream alive."""
    return event(PING)


def parts_of(delta: SampleDelta) -> list[Part]:
    if delta.parts is not None:
        return delta.parts
    return [Content(delta.text)] if delta.text else []


def usage_object(usage: Usage) -> Json:
    """Returns the usage; Anthropic counts cached input tokens separately from the other input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
    }


def message_usage(usage: Usage) -> Json:
    """Returns the usage of a message with the fixed fields."""
    return {**usage_object(usage), **FIXED_USAGE_FIELDS}


def ending(finish: Finish, *, has_calls: bool) -> Json:
    """Returns stop_reason and stop_sequence: max_tokens, stop_sequence, tool_use if the answer has calls, otherwise
    end_turn."""
    if finish.reason == finish_pb2.FINISH_REASON_LENGTH:
        return _stopped("max_tokens")
    if finish.stop_string is not None:
        return _stopped("stop_sequence", finish.stop_string)
    return _stopped("tool_use" if has_calls else "end_turn")


def _stopped(reason: str | None, sequence: str | None = None) -> Json:
    """Returns the stop fields. Details belong to refusals, and containers to tools that a server runs."""
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}


class _Block:
    """Content block that is being written."""

    def __init__(self, index: int, part: Part) -> None:
        self.index = index
        self._part = part
        self._texts: list[str] = []

    def takes(self, part: Part) -> bool:
        """Returns whether the part continues this block; each tool call is a separate block."""
        if isinstance(part, CallDelta) and isinstance(self._part, CallDelta):
            return part.number == self._part.number
        return type(part) is type(self._part)

    def start(self) -> Json:
        return self._event("content_block_start", content_block=self._block("", {}, ""))

    def add(self, part: Part) -> Json | None:
        """Appends a part and returns its delta event; None if it has no text."""
        text = part.arguments if isinstance(part, CallDelta) else part.text
        self._texts.append(text)
        return self._delta(text) if text else None

    def stop(self) -> list[Json]:
        """Returns the events that end the block; a block of thinking gets its signature first."""
        signed = [self._event("content_block_delta", delta={"type": "signature_delta", "signature": self._signature})]
        return [*(signed if isinstance(self._part, Reasoning) else ()), self._event("content_block_stop")]

    def whole(self) -> Json:
        text = "".join(self._texts)
        return self._block(text, call_arguments(text) if isinstance(self._part, CallDelta) else {}, self._signature)

    def _block(self, text: str, arguments: Json, signature: str) -> Json:
        """Returns the content block of the part's kind (tool_use, thinking or text); fields of other kinds are
        ignored."""
        match self._part:
            case CallDelta():
                called = {"id": self._part.id, "name": self._part.name, "input": arguments}
                return {"type": "tool_use", **called, "caller": {"type": "direct"}}
            case Reasoning():
                return {"type": "thinking", "thinking": text, "signature": signature}
            case _:
                return {"type": "text", "text": text, "citations": None}

    def _delta(self, text: str) -> Json:
        """Returns the content_block_delta event for the part's kind with a piece of its text or JSON arguments."""
        match self._part:
            case CallDelta():
                delta = {"type": "input_json_delta", "partial_json": text}
            case Reasoning():
                delta = {"type": "thinking_delta", "thinking": text}
            case _:
                delta = {"type": "text_delta", "text": text}
        return self._event("content_block_delta", delta=delta)

    @property
    def _signature(self) -> str:
        """Signature that clients send back with the thoughts; it is not checked here."""
        return hashlib.sha256("".join(self._texts).encode()).hexdigest()

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "index": self.index, **fields}


class MessageFormat:
    """Response format of /v1/messages."""

    def __init__(self, request: Request, model: str) -> None:
        self._fields: Json = {
            "id": f"msg_{request.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._block: _Block | None = None
        self._num_blocks = 0
        self._is_open = False
        self._has_calls = False
        self._finish: Finish | None = None

    def events(self, deltas: list[SampleDelta], generation: Generation) -> bytes:
        return b"".join(event(body) for body in self._events(deltas, generation))

    def _events(self, deltas: list[SampleDelta], generation: Generation) -> Iterator[Json]:
        """Yields the deltas' events; before the first ones message_start and ping. Keeps the last finish."""
        if not self._is_open:
            self._is_open = True
            yield {"type": "message_start", "message": self._opening(generation)}
            yield PING
        for delta in deltas:
            for part in parts_of(delta):
                yield from self._add(part)
            self._finish = delta.finish or self._finish

    def _opening(self, generation: Generation) -> Json:
        usage = message_usage(generation.usage._replace(completion_tokens=0, reasoning_tokens=0))
        return {**self._fields, "content": [], **_stopped(None), "usage": usage}

    def _add(self, part: Part) -> Iterator[Json]:
        """Yields the events of one part. A part that the open block does not take ends it and starts the next one."""
        self._has_calls = self._has_calls or isinstance(part, CallDelta)
        if self._block is None or not self._block.takes(part):
            yield from self._end_block()
            self._block = _Block(self._num_blocks, part)
            self._num_blocks += 1
            yield self._block.start()
        if (delta := self._block.add(part)) is not None:
            yield delta

    def _end_block(self) -> list[Json]:
        """Closes the open block and returns its last events; empty if none is open."""
        block, self._block = self._block, None
        return [] if block is None else block.stop()

    def last_events(self, generation: Generation) -> bytes:
        """Returns the final events as SSE bytes: the end of the open block, message_delta with stop reason and
        usage, message_stop."""
        assert self._finish is not None
        end = ending(self._finish, has_calls=self._has_calls)
        last = {"type": "message_delta", "delta": end, "usage": usage_object(generation.usage)}
        return b"".join(event(body) for body in (*self._end_block(), last, {"type": "message_stop"}))

    def error_events(self, error: QuireError) -> bytes:
        return event(errors.as_object(error))

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> Json:
        """Returns the unary answer from the one complete delta: content blocks, stop reason and usage."""
        (delta,) = deltas
        assert delta.finish is not None
        blocks = list(_blocks(parts_of(delta)))
        has_calls = any(block["type"] == "tool_use" for block in blocks)
        end = ending(delta.finish, has_calls=has_calls)
        return {**self._fields, "content": blocks, **end, "usage": message_usage(generation.usage)}

    def refusal(self, error: QuireError) -> Response:
        return errors.as_response(error)


def _blocks(parts: Iterable[Part]) -> Iterator[Json]:
    """Groups consecutive parts of the same kind or call to complete content blocks."""
    block: _Block | None = None
    for part in parts:
        if block is None or not block.takes(part):
            if block is not None:
                yield block.whole()
            block = _Block(0, part)
        block.add(part)
    if block is not None:
        yield block.whole()
