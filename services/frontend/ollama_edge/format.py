"""Formats answers of /api/chat and /api/generate: lines of JSON, or one object."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.responses import Response

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.http import text_errors
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts, chat_logprobs
from quire.services.frontend.output_processor.answer_parser import CallDelta, Part
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.request.conversation import call_arguments
from quire.services.frontend.request.outcome import Finish
from quire.shared.errors import QuireError
from quire.shared.pb.common.v1 import finish_pb2

Json = dict[str, Any]

LINES = "application/x-ndjson"


def created_at() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class _PendingParts:
    """Collects text, reasoning, and complete tool calls, since Ollama sends a call's arguments as one object."""

    def __init__(self) -> None:
        self._open_call: tuple[str, list[str]] | None = None  # name and argument pieces of the incomplete call
        self.text, self.thinking = "", ""
        self.calls: list[Json] = []

    def add(self, part: Part) -> None:
        """Adds a part; the arguments of a tool call are collected until end_call() or the next call's first part."""
        match part:
            case Content(text):
                self.text += text
            case Reasoning(text):
                self.thinking += text
            case CallDelta():
                if part.id:
                    self.end_call()
                    self._open_call = (part.name, [])
                assert self._open_call is not None
                self._open_call[1].append(part.arguments)

    def end_call(self) -> None:
        """Completes the open tool call, if any, with its arguments as an object."""
        if self._open_call is not None:
            name, pieces = self._open_call
            self.calls.append({"function": {"name": name, "arguments": call_arguments("".join(pieces))}})
            self._open_call = None

    def take(self) -> tuple[str, str, list[Json]]:
        """Returns and clears the text, reasoning and complete tool calls; an open call stays."""
        parts = self.text, self.thinking, self.calls
        self.text, self.thinking, self.calls = "", "", []
        return parts


class LineFormat(ABC):
    """Formats an answer as lines of JSON; the last one has the token counts and durations."""

    def __init__(self, model: str, texts: TokenTexts) -> None:
        self._model = model
        self._texts = texts
        self._pending = _PendingParts()
        self._finish: Finish | None = None

    @abstractmethod
    def content_fields(self, text: str, thinking: str, calls: list[Json]) -> Json:
        """Returns the fields with the content."""

    def events(self, deltas: list[SampleDelta], generation: Generation) -> bytes:
        return b"".join([self._line(delta) for delta in deltas])

    def _line(self, delta: SampleDelta) -> bytes:
        """Returns the line for a delta; empty while there is nothing to show, such as within a tool call."""
        self._read(delta)
        text, thinking, calls = self._pending.take()
        if not (text or thinking or calls or delta.logprobs):
            return b""
        return (
            orjson.dumps(self._frame(self.content_fields(text, thinking, calls), done=False) | self._logprobs(delta))
            + b"\n"
        )

    def _read(self, delta: SampleDelta) -> None:
        """Adds the delta's parts to the pending ones; at the sample's end, notes the finish and completes the open tool
        call."""
        for part in [Content(delta.text)] if delta.parts is None else delta.parts:
            self._pending.add(part)
        if delta.finish is not None:
            self._finish = delta.finish
            self._pending.end_call()

    def last_events(self, generation: Generation) -> bytes:
        return orjson.dumps(self._frame(self.content_fields("", "", []), done=True) | self._ending(generation)) + b"\n"

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> Json:
        """Returns the answer in one piece with counts and durations; Ollama's requests have one sample."""
        (delta,) = deltas
        self._read(delta)
        content = self.content_fields(*self._pending.take())
        return self._frame(content, done=True) | self._ending(generation) | self._logprobs(delta)

    def keep_alive(self) -> bytes:
        """Returns a line without text: clients parse every line as JSON."""
        return orjson.dumps(self._frame(self.content_fields("", "", []), done=False)) + b"\n"

    def empty_answer(self) -> Json:
        """Returns the answer to a call without a prompt."""
        return self._frame(self.content_fields("", "", []), done=True)

    def _frame(self, content: Json, *, done: bool) -> Json:
        return {"model": self._model, "created_at": created_at(), **content, "done": done}

    def _logprobs(self, delta: SampleDelta) -> Json:
        return {"logprobs": chat_logprobs(delta.logprobs, self._texts)["content"]} if delta.logprobs else {}

    def _ending(self, generation: Generation) -> Json:
        """Returns the final fields; durations in nanoseconds. load_duration is 0, since the model is always loaded."""
        assert self._finish is not None
        usage, times = generation.sample_usage(0), generation.sample_times(0)
        first_s, queue_s = times.first_token_s or 0.0, times.queue_s or 0.0
        is_truncated = self._finish.reason == finish_pb2.FINISH_REASON_LENGTH
        return {
            "done_reason": "length" if is_truncated else "stop",
            "total_duration": _ns(asyncio.get_running_loop().time() - generation.request.arrival_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(max(0.0, first_s - queue_s)),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(times.generation_s or 0.0),
        }

    def error_events(self, error: QuireError) -> bytes:
        return orjson.dumps(text_errors.as_object(error)) + b"\n"

    def refusal(self, error: QuireError) -> Response:
        return text_errors.as_response(error)


class OllamaChatFormat(LineFormat):
    """Format of POST /api/chat."""

    def content_fields(self, text: str, thinking: str, calls: list[Json]) -> Json:
        """Returns the assistant's message; `thinking` and `tool_calls` only if not empty."""
        message: Json = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class OllamaGenerateFormat(LineFormat):
    """Format of POST /api/generate."""

    def content_fields(self, text: str, thinking: str, calls: list[Json]) -> Json:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
