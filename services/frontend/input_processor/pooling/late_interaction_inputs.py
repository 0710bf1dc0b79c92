"""Queries and documents as a model reads them that compares texts token by token."""

from __future__ import annotations

from collections.abc import Sequence

from quire.services.frontend.tokenizer.encoder import Tokenized
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument
from quire.shared.models.late_interaction import LateInteraction

QUERY, DOCUMENT = "query", "document"  # names of prompts
MASK = ("[MASK]", "<mask>")


class LateInteractionInputs:
    """Of one model and its tokenizer."""

    def __init__(self, late: LateInteraction, tokenizer: Tokenizer) -> None:
        """Raises InvalidArgument for a tokenizer without the tokens that are needed."""
        self._late = late
        self._before, self._behind = tokenizer.frame
        self._query_mark = _mark(tokenizer, late.query_token)
        self._document_mark = _mark(tokenizer, late.document_token)
        ids = [tokenizer.token_id(word) for word in late.skipped]
        self._skipped = frozenset(token_id for token_id in ids if token_id is not None)
        masks = [token_id for name in MASK if (token_id := tokenizer.token_id(name)) is not None]
        if late.expands and not masks:
            text = "model: its queries are filled up with mask tokens, and its tokenizer has none"
            raise InvalidArgument(text, field="model")
        self._mask = masks[0] if late.expands else 0

    def max_text_tokens(self, *, is_query: bool) -> int:
        """Tokens of a text, without what is put around and into it."""
        most = self._late.query_length if is_query else self._late.document_length
        mark = self._query_mark if is_query else self._document_mark
        return most - len(self._before) - len(self._behind) - len(mark)

    def read(self, text: Sequence[int], *, is_query: bool) -> Tokenized:
        """`text`: its tokens, of which those beyond room() are cut off."""
        kept = text[: self.max_text_tokens(is_query=is_query)]
        mark = self._query_mark if is_query else self._document_mark
        ids = [*self._before, *mark, *kept, *self._behind]
        if not is_query:
            shown = tuple(place for place, token in enumerate(ids) if token not in self._skipped)
            return Tokenized(ids, pooled_tokens=() if len(shown) == len(ids) else shown)
        num_fillers = self._late.query_length - len(ids) if self._late.expands else 0
        num_seen = 0 if self._late.attends_to_mask_tokens or not num_fillers else len(ids)
        return Tokenized([*ids, *[self._mask] * num_fillers], num_seen=num_seen)


def _mark(tokenizer: Tokenizer, name: str) -> list[int]:
    """Spaces around a name are none of the token's where the vocabulary has it without."""
    if not name:
        return []
    found = next((i for text in (name, name.strip()) if (i := tokenizer.token_id(text)) is not None), None)
    if found is None:
        raise InvalidArgument(f"model: its tokenizer has no token {name!r:.64}", field="model")
    return [found]
