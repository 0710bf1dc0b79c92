"""Inputs for late-interaction models: queries and documents, which compare texts token by token."""

from __future__ import annotations

from collections.abc import Sequence

from quire.services.frontend.request.request import Prompt
from quire.services.frontend.tokenizer.encoder import Tokenized
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument
from quire.shared.models.late_interaction import LateInteraction

QUERY, DOCUMENT = "query", "document"  # names of prompts
MASK = ("[MASK]", "<mask>")


class LateInteractionInputs:
    """Input format of one late-interaction model and its tokenizer."""

    def __init__(self, late: LateInteraction, tokenizer: Tokenizer) -> None:
        """Looks up the special tokens; raises InvalidArgument for a tokenizer that lacks them."""
        self._late = late
        self._before, self._after = tokenizer.frame
        self._query_tokens = _special_token(tokenizer, late.query_token)
        self._document_tokens = _special_token(tokenizer, late.document_token)
        ids = [tokenizer.token_id(word) for word in late.skipped]
        self._skipped = frozenset(token_id for token_id in ids if token_id is not None)
        masks = [token_id for name in MASK if (token_id := tokenizer.token_id(name)) is not None]
        if late.expands and not masks:
            text = "model: queries are padded with mask tokens, but the tokenizer has no mask token"
            raise InvalidArgument(text, field="model")
        self._mask = masks[0] if late.expands else 0

    def prompt(self, prompt: Prompt, *, is_document: bool) -> Prompt:
        """Returns the prompt unchanged."""
        return prompt

    def text(self, text: str, *, is_query: bool) -> str:
        """Returns the text unchanged; markers are inserted as tokens."""
        return text

    def max_text_tokens(self, *, is_query: bool) -> int:
        """Returns the maximum number of tokens of a text, without the special tokens around it."""
        most = self._late.query_length if is_query else self._late.document_length
        special_tokens = self._query_tokens if is_query else self._document_tokens
        return most - len(self._before) - len(self._after) - len(special_tokens)

    def build(self, text: Sequence[int], *, is_query: bool) -> Tokenized:
        """Builds the input from a text's tokens, of which those beyond max_text_tokens() are cut off."""
        kept = text[: self.max_text_tokens(is_query=is_query)]
        special_tokens = self._query_tokens if is_query else self._document_tokens
        ids = [*self._before, *special_tokens, *kept, *self._after]
        if not is_query:
            shown = tuple(place for place, token in enumerate(ids) if token not in self._skipped)
            return Tokenized(ids, pooled_tokens=() if len(shown) == len(ids) else shown)
        num_fillers = self._late.query_length - len(ids) if self._late.expands else 0
        num_seen = 0 if self._late.attends_to_mask_tokens or not num_fillers else len(ids)
        return Tokenized([*ids, *[self._mask] * num_fillers], num_seen=num_seen)


def _special_token(tokenizer: Tokenizer, name: str) -> list[int]:
    """Returns the token's id as a list, also found under its name without surrounding spaces; empty for an empty
    name. Raises InvalidArgument if the vocabulary lacks it."""
    if not name:
        return []
    token_id = next((i for text in (name, name.strip()) if (i := tokenizer.token_id(text)) is not None), None)
    if token_id is None:
        raise InvalidArgument(f"model: the tokenizer lacks the token {name!r:.64}", field="model")
    return [token_id]
