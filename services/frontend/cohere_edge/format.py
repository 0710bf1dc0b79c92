"""Response format of Cohere's embeddings: vectors by the names of their encodings."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.openai_edge.answers.pooling_formats import PooledFormat
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.shared.columns import f32

FLOAT = "float"
FIRST = "1"  # version of the API
SIGNED = 128  # Cohere's signed bytes are less by this than the unsigned ones


def _numbers(vector: bytes) -> orjson.Fragment:
    """Returns the numbers as 32-bit floats in their shortest form."""
    return orjson.Fragment(orjson.dumps(f32(vector), option=orjson.OPT_SERIALIZE_NUMPY))


def _sign_bits(vector: bytes) -> list[int]:
    """Packs eight elements per byte, the first in the highest bit: 1 if above 0. The last byte is padded with 0."""
    return [int(byte) for byte in np.packbits(f32(vector) > 0)]


WRITERS: Mapping[str, Callable[[bytes], Any]] = {
    FLOAT: _numbers,
    "base64": lambda vector: base64.b64encode(vector).decode(),
    "ubinary": _sign_bits,
    "binary": lambda vector: [byte - SIGNED for byte in _sign_bits(vector)],
}


class CohereEmbedFormat(PooledFormat):
    """Response format of POST /v2/embed and /v1/embed."""

    prefix = "embd"

    def __init__(self, version: str, model: str, texts: Sequence[str], kinds: Sequence[str]) -> None:
        """Creates the format of one answer for API `version`. `kinds` are keys of WRITERS; without any, floats are
        returned, which version 1 does not put under their name."""
        super().__init__(model)
        self._version, self._texts, self._kinds = version, texts, kinds or (FLOAT,)
        self._by_kind = bool(kinds) or version != FIRST

    def data(self, vectors: Sequence[bytes]) -> list[Any]:
        return [*map(WRITERS[FLOAT], vectors)]

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        """Returns the unary answer. Without requested embedding types, embeddings are one list of float vectors
        instead of an object by type."""
        vectors, num_media = generation.vectors, _num_embeddings(generation)
        by_kind = {kind: [*map(WRITERS[kind], vectors)] for kind in self._kinds}
        return {
            "id": f"{self.prefix}-{generation.request.request_id}",
            "response_type": "embeddings_by_type" if self._by_kind else "embeddings_floats",
            "embeddings": by_kind if self._by_kind else self.data(vectors),
            "texts": self._texts,
            "meta": {
                "api_version": {"version": self._version},
                "billed_units": {
                    "input_tokens": generation.usage.prompt_tokens - num_media,
                    "image_tokens": num_media,
                },
            },
        }


def _num_embeddings(generation: Generation) -> int:
    """Returns the number of prompt tokens that are embeddings of pictures."""
    items = (item for prompt in generation.prepared for item in prompt.prompt_request.media)
    return sum(item.num_embeddings for item in items)
