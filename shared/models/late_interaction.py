"""Late-interaction models, which compare texts token by token (ColBERT, arXiv 2004.12832): preparation of queries and
documents.

Every token has a vector; a document's score is the sum over the query's tokens of the best match among its own
tokens. Read from folders in the authors' format (artifact.metadata) and in PyLate's
(config_sentence_transformers.json).
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.models.page_retrieval import PageTexts

MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """How such a model reads queries and documents."""

    query_token: str  # inserted after the first token of each query; empty: none
    document_token: str
    query_length: int  # maximum number of tokens, special tokens included
    document_length: int
    expands: bool  # shorter queries are padded with mask tokens, which have vectors, too
    attends_to_mask_tokens: bool  # whether other tokens attend to them
    skipped: tuple[str, ...]  # tokens without vectors in documents
    pages: PageTexts | None = None  # set if documents are pictures of pages; queries have these texts around them


def from_colbert_metadata(values: dict[str, Any]) -> LateInteraction:
    """Returns the settings in artifact.metadata of a ColBERT folder, with ColBERT's defaults for missing ones.
    Raises InvalidArgument for another similarity than cosine, or lengths out of range."""
    if values.get("similarity", "cosine") != "cosine":
        raise _refusal("similarity", values["similarity"], "only cosine is supported")
    return LateInteraction(
        str(values.get("query_token_id", "[unused0]")),
        str(values.get("doc_token_id", "[unused1]")),
        _length("query_maxlen", values.get("query_maxlen", 32)),
        _length("doc_maxlen", values.get("doc_maxlen", 220)),
        True,
        bool(values.get("attend_to_mask_tokens", False)),
        tuple(string.punctuation) if values.get("mask_punctuation", True) else (),
    )


def from_pylate_config(values: dict[str, Any]) -> LateInteraction:
    """Returns the settings in config_sentence_transformers.json of a PyLate folder, with PyLate's defaults for
    missing ones. Raises InvalidArgument for malformed values."""
    skipped = values.get("skiplist_words")
    if skipped is not None and not (isinstance(skipped, list) and all(isinstance(word, str) for word in skipped)):
        raise _refusal("skiplist_words", skipped, "a list of words is needed")
    expands = values.get("do_query_expansion")
    return LateInteraction(
        str(values.get("query_prefix") or ""),
        str(values.get("document_prefix") or ""),
        _length("query_length", values.get("query_length") or 32),
        _length("document_length", values.get("document_length") or 180),
        True if expands is None else bool(expands),
        bool(values.get("attend_to_expansion_tokens", False)),
        tuple(string.punctuation) if skipped is None else tuple(skipped),
    )


def of_pages(texts: PageTexts) -> LateInteraction:
    """Returns the settings of a retrieval model of pages: nothing is cut off, padded or left out."""
    return LateInteraction("", "", MOST_TOKENS, MOST_TOKENS, False, False, (), texts)


def _length(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 4 <= value <= MOST_TOKENS:
        raise _refusal(name, value, f"an integer in [4, {MOST_TOKENS}] is needed")
    return value


def _refusal(name: str, value: Any, reason: str) -> InvalidArgument:
    return InvalidArgument(f"model: {name} is {value!r:.64} (late interaction): {reason}", field="model")
