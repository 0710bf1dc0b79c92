"""OpenAI's stream format: each event is a chunk, and a final event marks the end."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.openai_edge import errors
from quire.services.frontend.openai_edge.answers.format import BodyFormat
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.shared.errors import QuireError

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


class ErrorEvents:
    """Error events and error responses in OpenAI's format."""

    def error_events(self, error: QuireError) -> bytes:
        return event(errors.as_object(error)) + DONE

    def refusal(self, error: QuireError) -> Response:
        return errors.as_response(error)


class ChunkEventFormat(ErrorEvents):
    """Stream format that writes the chunks of a body format as events."""

    def __init__(self, format: BodyFormat) -> None:
        self._format = format
        self.whole = format.whole

    def events(self, deltas: list[SampleDelta], generation: Generation) -> bytes:
        return b"".join([event(c) for delta in deltas for c in self._format.chunks(delta, generation)])

    def last_events(self, generation: Generation) -> bytes:
        last = self._format.last_chunk(generation)
        return (b"" if last is None else event(last)) + DONE
