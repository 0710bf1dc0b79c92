"""Inputs for retrieval models of pages: queries are texts, documents are pictures of pages or texts."""

from __future__ import annotations

from collections.abc import Sequence

from quire.services.frontend.input_processor.pooling.media_prompts import only_picture, text_of
from quire.services.frontend.request.request import ChatPrompt, LateInteractionPrompt, Prompt, TextPrompt, TokenPrompt
from quire.services.frontend.tokenizer.encoder import Tokenized
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument
from quire.shared.models.page_retrieval import PageTexts


class PageInputs:
    """Input format of one retrieval model of pages and its tokenizer."""

    def __init__(self, texts: PageTexts, tokenizer: Tokenizer, max_tokens: int) -> None:
        """Tokenizes the texts around queries and pages. `max_tokens`: most tokens of a text."""
        self._texts, self._max_tokens = texts, max_tokens
        self._before = tokenizer.encode_plainly(texts.lead)
        self._after = tokenizer.encode_plainly(texts.query_suffix)
        self._page = tokenizer.encode_plainly(texts.page)

    def prompt(self, prompt: Prompt, *, is_document: bool) -> Prompt:
        """Returns the prompt that is read in place of a client's: that of the page for one with a picture; texts are
        queries unless `is_document`. Raises InvalidArgument for a picture beside text or other pictures."""
        if isinstance(prompt, LateInteractionPrompt) and prompt.is_query and prompt.media:
            raise InvalidArgument("queries: they are texts for this model; send pictures as documents", field="queries")
        if isinstance(prompt, (TextPrompt, ChatPrompt)) and prompt.media:
            return TokenPrompt(self._page, [only_picture(prompt)])
        if isinstance(prompt, ChatPrompt) or (
            isinstance(prompt, TextPrompt) and not isinstance(prompt, LateInteractionPrompt)
        ):
            return LateInteractionPrompt(text_of(prompt), is_query=not is_document)
        return prompt

    def text(self, text: str, *, is_query: bool) -> str:
        """Returns the text to tokenize for a query or a document."""
        return self._texts.query_prefix + text if is_query else text

    def max_text_tokens(self, *, is_query: bool) -> int:
        """Returns the maximum number of tokens of a text, without the tokens around it."""
        return self._max_tokens

    def build(self, text: Sequence[int], *, is_query: bool) -> Tokenized:
        """Builds the input from a text's tokens, all of which are kept."""
        return Tokenized([*self._before, *text, *self._after] if is_query else [*self._before, *text])
