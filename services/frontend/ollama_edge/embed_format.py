"""Formats answers of /api/embed and /api/embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.http import text_errors
from quire.services.frontend.openai_edge.answers.pooling_formats import VectorFormat
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.shared.errors import QuireError


class EmbedFormat(VectorFormat):
    """Formats the answers of /api/embed, one vector per input, and of /api/embeddings."""

    def __init__(self, model: str, *, only_one: bool = False) -> None:
        """Prepares the format. `only_one`: the form of /api/embeddings."""
        super().__init__(model, as_base64=False)
        self._only_one = only_one

    def data(self, vectors: Sequence[bytes]) -> list[Any]:
        return [self.written(vector) for vector in vectors]

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        """Returns the vectors with the token count and the duration in nanoseconds; for /api/embeddings the single
        vector alone."""
        embeddings = self.data(generation.vectors)
        if self._only_one:
            return {"embedding": embeddings[0]}
        spent_s = asyncio.get_running_loop().time() - generation.request.arrival_s
        return {
            "model": self._model,
            "embeddings": embeddings,
            "total_duration": int(spent_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": generation.usage.prompt_tokens,
        }

    def refusal(self, error: QuireError) -> Response:
        return text_errors.as_response(error)
