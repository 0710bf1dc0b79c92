"""How well documents answer queries: which prompts that takes, and what their vectors say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.frontend.request import PairPrompt, Pooling, Prompt, TextPrompt
from shared.columns import F32, f32
from shared.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Scoring:
    """Of one request: a classifier with one class reads each pair; any other model reads each text once, and the cosine
    of two vectors counts."""

    queries: Sequence[str]
    documents: Sequence[str]
    in_pairs: bool

    @classmethod
    def of(cls, queries: Sequence[str], documents: Sequence[str], classes: Sequence[str]) -> Scoring:
        """`queries`: one, or one for each document. Raises InvalidArgument."""
        if not documents:
            raise InvalidArgument("documents must hold at least one text", field="documents")
        if len(queries) not in (1, len(documents)):
            text = f"queries must be one, or as many as documents, {len(documents)}; got {len(queries)}."
            raise InvalidArgument(text, field="queries")
        if len(classes) > 1:
            raise InvalidArgument(f"model: it tells {len(classes)} classes apart and scores no pairs", field="model")
        return cls(queries, documents, in_pairs=len(classes) == 1)

    @property
    def prompts(self) -> list[Prompt]:
        if self.in_pairs:
            queries = [*self.queries] * (len(self.documents) if len(self.queries) == 1 else 1)
            return [PairPrompt(query, document) for query, document in zip(queries, self.documents, strict=True)]
        return [TextPrompt(text) for text in (*self.queries, *self.documents)]

    @property
    def pooling(self) -> Pooling:
        return Pooling(classify=self.in_pairs)

    def scores(self, columns: Sequence[bytes]) -> list[float]:
        """`columns`: the vector of each prompt. One score a document."""
        vectors = np.stack([f32(column) for column in columns])
        if self.in_pairs:
            return [*map(float, sigmoid(vectors[:, 0]))]
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
