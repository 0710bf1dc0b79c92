"""Response formats of calls that pool texts; their answers are never streamed."""

from __future__ import annotations

import base64
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.input_processor.pooling.media_prompts import text_of
from quire.services.frontend.input_processor.pooling.scoring import Scoring, probabilities
from quire.services.frontend.openai_edge.errors import as_response
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.shared.columns import f32
from quire.shared.errors import QuireError


class PooledFormat(ABC):
    """Base of formats with one entry per prompt."""

    prefix = "pool"  # of the answer's id

    def __init__(self, model: str) -> None:
        self._model = model

    @abstractmethod
    def data(self, vectors: Sequence[bytes]) -> list[dict[str, Any]]:
        """Returns the entries of the answer from one f32 column per prompt."""

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        """Returns the unary answer with one entry of `data` per vector; the deltas are not used."""
        usage = generation.usage
        return {
            "id": f"{self.prefix}-{generation.request.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            "data": self.data(generation.vectors),
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "total_tokens": usage.prompt_tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
        }

    def refusal(self, error: QuireError) -> Response:
        return as_response(error)

    def events(self, deltas: list[SampleDelta], generation: Generation) -> bytes:
        raise AssertionError("vectors are not streamed")

    def last_events(self, generation: Generation) -> bytes:
        raise AssertionError("vectors are not streamed")

    def error_events(self, error: QuireError) -> bytes:
        raise AssertionError("vectors are not streamed")


class VectorFormat(PooledFormat):
    """Format with one vector per input, in order."""

    def __init__(self, model: str, *, as_base64: bool) -> None:
        """Selects the encoding; `as_base64`: little-endian float32 in base64, instead of a list of numbers."""
        super().__init__(model)
        self._as_base64 = as_base64

    def written(self, vector: bytes) -> str | orjson.Fragment:
        """Returns a vector; numbers are written as 32-bit floats in their shortest form."""
        if self._as_base64:
            return base64.b64encode(vector).decode()
        return orjson.Fragment(orjson.dumps(f32(vector), option=orjson.OPT_SERIALIZE_NUMPY))


class EmbeddingFormat(VectorFormat):
    """Response format of POST /v1/embeddings."""

    prefix = "embd"

    def data(self, vectors: Sequence[bytes]) -> list[dict[str, Any]]:
        """Returns one entry per vector, as a list of floats or in base64, as `written` decides."""
        return [
            {"object": "embedding", "index": index, "embedding": self.written(vector)}
            for index, vector in enumerate(vectors)
        ]


class PoolingFormat(VectorFormat):
    """Response format of POST /pooling."""

    def data(self, vectors: Sequence[bytes]) -> list[dict[str, Any]]:
        return [
            {"object": "pooling", "index": index, "data": self.written(vector)} for index, vector in enumerate(vectors)
        ]

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        """Returns the answer; for token vectors each entry is a list of vectors, or their concatenation in base64."""
        answer = super().whole(deltas, generation)
        counts = generation.num_vectors
        if counts is not None and not self._as_base64:
            for entry, column, count in zip(answer["data"], generation.vectors, counts, strict=True):
                rows = orjson.dumps(f32(column).reshape(count, -1), option=orjson.OPT_SERIALIZE_NUMPY)
                entry["data"] = orjson.Fragment(rows)
        return answer


class ClassifyFormat(PooledFormat):
    """Response format of POST /classify."""

    prefix = "classify"

    def __init__(self, model: str, classes: Sequence[str]) -> None:
        super().__init__(model)
        self._classes = classes

    def data(self, vectors: Sequence[bytes]) -> list[dict[str, Any]]:
        """Returns each input's most probable label with the probabilities of all classes."""
        probabilities_by_input = [probabilities(vector) for vector in vectors]
        return [
            {
                "index": index,
                "label": self._classes[int(np.argmax(probs))],
                "probs": [*map(float, probs)],
                "num_classes": len(self._classes),
            }
            for index, probs in enumerate(probabilities_by_input)
        ]


class ScoreFormat(PooledFormat):
    """Response format of POST /score."""

    prefix = "score"

    def __init__(self, model: str, scoring: Scoring) -> None:
        super().__init__(model)
        self._scoring = scoring

    def data(self, vectors: Sequence[bytes]) -> list[dict[str, Any]]:
        scores = self._scoring.scores(vectors)
        return [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]


class RerankFormat(PooledFormat):
    """Response format of POST /rerank."""

    prefix = "rerank"

    def __init__(self, model: str, scoring: Scoring, top_n: int, *, shows_documents: bool) -> None:
        super().__init__(model)
        self._scoring, self._top_n, self._shows_documents = scoring, top_n, shows_documents

    def data(self, vectors: Sequence[bytes]) -> list[dict[str, Any]]:
        """Returns the top_n documents by descending score, with the index of each in the request and its text, without
        pictures, if requested."""
        documents = [one if isinstance(one, str) else text_of(one) for one in self._scoring.documents]
        return [
            {
                "index": index,
                "relevance_score": score,
                **({"document": {"text": documents[index]}} if self._shows_documents else {}),
            }
            for index, score in self._scoring.rank(vectors, self._top_n)
        ]

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        """Returns the answer in the form of Jina and Cohere."""
        answer = super().whole(deltas, generation)
        usage = {name: answer["usage"][name] for name in ("prompt_tokens", "total_tokens")}
        return {"id": answer["id"], "model": answer["model"], "usage": usage, "results": answer["data"]}
