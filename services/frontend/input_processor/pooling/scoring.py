"""Scoring of documents for queries: its prompts, and the scores from their vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.services.frontend.input_processor.pooling.media_prompts import text_of
from quire.services.frontend.input_processor.pooling.pooling import ALL
from quire.services.frontend.request.request import (
    ChatPrompt,
    LateInteractionPrompt,
    PairPrompt,
    Pooling,
    Prompt,
    TextPrompt,
)
from quire.shared.columns import F32, f32
from quire.shared.errors import Internal, InvalidArgument

ScoredInput = str | ChatPrompt  # a text, or texts and pictures as a message of the user


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scoring of one request.

    A classifier with one class reads each pair; any other model reads each text once, and the score is the cosine of
    two vectors. A late-interaction model is scored by the worker, which returns the score itself.
    """

    queries: Sequence[ScoredInput]
    documents: Sequence[ScoredInput]
    is_cross_encoder: bool
    raw_scores: bool = False  # a classifier's raw scores, without the sigmoid
    late_interaction: bool = False  # the worker compares the texts and returns the score

    @classmethod
    def of(
        cls,
        queries: Sequence[ScoredInput],
        documents: Sequence[ScoredInput],
        classes: Sequence[str],
        *,
        raw_scores: bool = False,
        late_interaction: bool = False,
    ) -> Scoring:
        """Creates a scoring; raises InvalidArgument.

        `queries`: one, or one per document. `raw_scores`: whether a classifier's scores are used without a sigmoid.
        `late_interaction`: how the model compares texts, unless it is a classifier.
        """
        if not documents:
            raise InvalidArgument("documents must contain at least one text", field="documents")
        if len(queries) not in (1, len(documents)):
            text = f"queries must contain one text, or as many as documents ({len(documents)}), got {len(queries)}."
            raise InvalidArgument(text, field="queries")
        if len(classes) > 1:
            raise InvalidArgument(f"model: it has {len(classes)} classes and cannot score pairs", field="model")
        return cls(queries, documents, len(classes) == 1, raw_scores, late_interaction and not classes)

    @property
    def prompts(self) -> list[Prompt]:
        """Returns the prompts in the order in which their vectors are scored: for bi-encoders all queries and then
        all documents; otherwise one prompt per (query, document) pair, where a single query is repeated for all
        documents."""
        if not (self.is_cross_encoder or self.late_interaction):
            return [TextPrompt(one) if isinstance(one, str) else one for one in (*self.queries, *self.documents)]
        queries = [*self.queries] * (len(self.documents) if len(self.queries) == 1 else 1)
        pairs = list(zip(queries, self.documents, strict=True))
        if self.is_cross_encoder:
            return [
                PairPrompt(_text(query, "queries"), _text(document, f"documents.{index}"))
                for index, (query, document) in enumerate(pairs)
            ]
        return [_late_document(document, _text(query, "queries")) for query, document in pairs]

    @property
    def pooling(self) -> Pooling:
        return Pooling(ALL if self.late_interaction else "", classify=self.is_cross_encoder, normalize=True)

    def scores(self, columns: Sequence[bytes]) -> list[float]:
        """Returns one score per document.

        `columns`: the vector of each prompt, or its score where the worker compared it.
        """
        vectors = np.stack([f32(column) for column in columns])
        if self.late_interaction:
            if vectors.shape[1] != 1:
                raise Internal(f"the worker returned {vectors.shape[1]} numbers instead of one score for a document")
            return [*map(float, vectors[:, 0])]
        if self.is_cross_encoder:
            return [*map(float, vectors[:, 0] if self.raw_scores else sigmoid(vectors[:, 0]))]
        queries, documents = vectors[: len(self.queries)], vectors[len(self.queries) :]
        return [*map(float, (queries * documents).sum(axis=1))]

    def rank(self, columns: Sequence[bytes], top_n: int) -> list[tuple[int, float]]:
        """Returns (document index, score), the best first and of equal ones the earlier, at most `top_n` (0: all)."""
        order = sorted(enumerate(self.scores(columns)), key=lambda indexed: -indexed[1])
        return order[:top_n] if top_n else order


def _text(one: ScoredInput, field: str) -> str:
    """Returns the text of a query or document. Raises InvalidArgument for one with pictures."""
    if isinstance(one, ChatPrompt) and one.media:
        raise InvalidArgument(f"{field}: this model compares texts here; send no pictures", field=field)
    return one if isinstance(one, str) else text_of(one)


def _late_document(document: ScoredInput, query: str) -> LateInteractionPrompt:
    if isinstance(document, str):
        return LateInteractionPrompt(document, query=query)
    return LateInteractionPrompt(text_of(document), media=document.media, query=query)


def probabilities(column: bytes) -> F32:
    """Returns the probability of each class from a classifier's scores: softmax, or sigmoid for a single class."""
    scores = f32(column)
    if len(scores) == 1:
        return sigmoid(scores)
    powers: F32 = np.exp(scores - scores.max())
    powers /= powers.sum()
    return powers


def sigmoid(x: F32) -> F32:
    """Computes the sigmoid without overflow for x far from 0."""
    result: F32 = np.exp(-np.logaddexp(np.float32(0), -x))
    return result
