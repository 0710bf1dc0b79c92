"""How well documents answer queries: which prompts that takes, and what their vectors say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.frontend.input_processor.late_texts import LateTexts
from services.frontend.input_processor.pooling import ALL
from services.frontend.request.request import LatePrompt, PairPrompt, Pooling, Prompt, TextPrompt
from shared.columns import F32, f32
from shared.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Scoring:
    """Of one request: a classifier with one class reads each pair; any other model reads each text once, and the cosine
    of two vectors counts, or of vectors of single tokens the best match of each of the query's (MaxSim)."""

    queries: Sequence[str]
    documents: Sequence[str]
    in_pairs: bool
    as_they_are: bool = False  # a classifier's scores, and not their sigmoid
    late_size: int = 0  # of single tokens' vectors; 0: a text has one
    _settled: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        queries: Sequence[str],
        documents: Sequence[str],
        classes: Sequence[str],
        *,
        as_they_are: bool = False,
        late: LateTexts | None = None,
    ) -> Scoring:
        """`queries`: one, or one for each document. `as_they_are`: what a classifier's scores are taken as. `late`: of
        a model that compares token by token. Raises InvalidArgument."""
        if not documents:
            raise InvalidArgument("documents must hold at least one text", field="documents")
        if len(queries) not in (1, len(documents)):
            text = f"queries must be one, or as many as documents, {len(documents)}; got {len(queries)}."
            raise InvalidArgument(text, field="queries")
        if len(classes) > 1:
            raise InvalidArgument(f"model: it tells {len(classes)} classes apart and scores no pairs", field="model")
        return cls(queries, documents, len(classes) == 1, as_they_are, late.size if late and not classes else 0)

    @property
    def prompts(self) -> list[Prompt]:
        if self.in_pairs:
            queries = [*self.queries] * (len(self.documents) if len(self.queries) == 1 else 1)
            return [PairPrompt(query, document) for query, document in zip(queries, self.documents, strict=True)]
        if self.late_size:
            read: list[Prompt] = [LatePrompt(text, is_query=True) for text in self.queries]
            return read + [LatePrompt(text) for text in self.documents]
        return [TextPrompt(text) for text in (*self.queries, *self.documents)]

    @property
    def pooling(self) -> Pooling:
        return Pooling(ALL if self.late_size else "", classify=self.in_pairs, normalize=True)

    async def settle(self, columns: Sequence[bytes]) -> None:
        """Before scores(): what is more than an event loop should do is done beside it."""
        if self.late_size and not self._settled:
            self._settled.extend(await asyncio.to_thread(self._best_matches, columns))

    def _best_matches(self, columns: Sequence[bytes]) -> list[float]:
        """The sum over a query's tokens of the best match in the document."""
        vectors = [f32(column).reshape(-1, self.late_size) for column in columns]
        queries, documents = vectors[: len(self.queries)], vectors[len(self.queries) :]
        each = [*queries] * (len(documents) if len(queries) == 1 else 1)
        return [float((query @ one.T).max(axis=1).sum()) for query, one in zip(each, documents, strict=True)]

    def scores(self, columns: Sequence[bytes]) -> list[float]:
        """`columns`: the vector of each prompt, or the vectors of its tokens one behind the other. One score a
        document."""
        if self.late_size:
            return self._settled or self._best_matches(columns)
        vectors = np.stack([f32(column) for column in columns])
        if self.in_pairs:
            return [*map(float, vectors[:, 0] if self.as_they_are else sigmoid(vectors[:, 0]))]
        queries, documents = vectors[: len(self.queries)], vectors[len(self.queries) :]
        return [*map(float, (queries * documents).sum(axis=1))]

    def ranked(self, columns: Sequence[bytes], top_n: int) -> list[tuple[int, float]]:
        """Documents and their scores, the best first, of equal ones the earlier; `top_n`: 0: all."""
        order = sorted(enumerate(self.scores(columns)), key=lambda found: -found[1])
        return order[:top_n] if top_n else order


def probabilities(column: bytes) -> F32:
    """Of each class, by a classifier's scores: softmax, and of a single class the sigmoid."""
    scores = f32(column)
    if len(scores) == 1:
        return sigmoid(scores)
    powers: F32 = np.exp(scores - scores.max())
    powers /= powers.sum()
    return powers


def sigmoid(x: F32) -> F32:
    """Without an overflow where x is far from 0."""
    found: F32 = np.exp(-np.logaddexp(np.float32(0), -x))
    return found
