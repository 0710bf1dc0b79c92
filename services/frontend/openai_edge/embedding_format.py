"""Answers of /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import orjson
from starlette.responses import Response

from services.frontend.delta import Delta
from services.frontend.generation import Generation
from services.frontend.openai_edge.errors import as_response
from shared.columns import f32
from shared.errors import QuireError


class EmbeddingFormat:
    """One vector for each input, in their order. Always in one piece."""

    def __init__(self, model: str, *, as_base64: bool) -> None:
        """`as_base64`: little-endian float32 in base64, in place of a list of numbers."""
        self._model = model
        self._as_base64 = as_base64

    def whole(self, deltas: list[Delta], generation: Generation) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(vector)}
            for index, vector in enumerate(generation.vectors)
        ]
        usage = generation.usage
        return {
            "object": "list",
            "data": data,
            "model": self._model,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "total_tokens": usage.prompt_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
        }

    def _written(self, vector: bytes) -> str | orjson.Fragment:
        """Numbers of 32 bits are written as such: no longer than they have to be."""
        if self._as_base64:
            return base64.b64encode(vector).decode()
        return orjson.Fragment(orjson.dumps(f32(vector), option=orjson.OPT_SERIALIZE_NUMPY))

    def refusal(self, error: QuireError) -> Response:
        return as_response(error)

    def events(self, deltas: list[Delta], generation: Generation) -> bytes:
        raise AssertionError("vectors are not streamed")

    def last_events(self, generation: Generation) -> bytes:
        raise AssertionError("vectors are not streamed")

    def error_events(self, error: QuireError) -> bytes:
        raise AssertionError("vectors are not streamed")
