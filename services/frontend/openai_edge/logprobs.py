"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.frontend.delta import TokenLogprobs
from services.frontend.tokenizer.tokenizer import Tokenizer


class TokenTexts:
    """How tokens are written: as their text, or as token_id:N where clients asked for it."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def raw(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


def completion_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts, offset: int) -> dict[str, Any]:
    """`offset`: characters of the sample's tokens before these."""
    tokens = [texts.text(entry.token_id) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_with_sampled(entry, texts) for entry in entries],
        "text_offset": offsets,
    }


def _with_sampled(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, float]:
    """The sampled token is always among them, so there may be one more than was asked for."""
    top = {texts.text(token_id): logprob for token_id, logprob in entry.top}
    return {texts.text(entry.token_id): entry.logprob} | top


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    return {"content": [_chat_entry(entry, texts) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    top = [_candidate(token_id, logprob, texts) for token_id, logprob in entry.top]
    return {**_candidate(entry.token_id, entry.logprob, texts), "top_logprobs": top}


def _candidate(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": logprob, "bytes": texts.raw(token_id)}
