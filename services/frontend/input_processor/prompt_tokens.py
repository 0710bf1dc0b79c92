"""Tokenization of prompts within the limit of the model's context."""

from __future__ import annotations

from quire.services.frontend.bounds import prompts
from quire.services.frontend.bounds.prompt_limit import PromptLimit
from quire.services.frontend.request.request import ChatPrompt, PairPrompt, Prompt, TextPrompt, TokenPrompt
from quire.services.frontend.tokenizer.encoder import Tokenized
from quire.services.frontend.tokenizer.tokenizer import Tokenizer


class PromptTokens:
    """Reader of prompts of every kind with the model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def read(self, prompt: Prompt, max_model_len: int, stop_after: int | None = None) -> Tokenized:
        """Tokenizes a prompt; token prompts are neither checked nor copied.

        `stop_after`: the ids of a long text may be cut off once there are more than this.
        """
        self.check_characters(prompt, max_model_len)
        match prompt:
            case TokenPrompt(token_ids, media):
                return Tokenized(token_ids, media=range(len(media)))
            case PairPrompt(first, second):
                return await self._tokenizer.encode_pair(first, second, stop_after)
            case TextPrompt(text, framed):
                ids = await self._tokenizer.encode_prompt(text, add_special_tokens=framed, stop_after=stop_after)
                return Tokenized(ids, media=range(len(prompt.media)))
            case ChatPrompt():
                return await self._tokenizer.tokenize_chat(prompt, stop_after)

    def check_characters(self, prompt: Prompt, max_model_len: int) -> None:
        """Raises InvalidArgument for a text that cannot fit; `max_model_len`: 0 while no worker has reported it."""
        if not isinstance(prompt, TokenPrompt):
            prompts.check_characters(prompt, PromptLimit(max_model_len, self._tokenizer.longest_token))
