"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from quire.services.frontend.request.outcome import TokenLogprobs
from quire.services.frontend.tokenizer.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's value for a token that could not be sampled, since JSON has no infinity


def as_json(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class TokenTexts:
    """Texts of tokens: literal, or token_id:N where clients ask for it."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, without_special: bool = False) -> None:
        """Selects the form; `without_special`: the text that the tokens belong to omits special tokens."""
        self._tokenizer = tokenizer
        self._omitted = tokenizer.special_ids if without_special else frozenset()
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """Returns a token's text; tokens with partial characters are written as their bytes, as OpenAI does, to keep
        them distinct."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def prompt(self, token_ids: Sequence[int]) -> str:
        """Returns the prompt's text, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def raw(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def num_characters(self, token_id: int) -> int:
        """Returns the number of characters of the text that begin in this token: all bytes but UTF-8's continuation
        bytes."""
        if token_id in self._omitted:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.raw(token_id))


def completion_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts, offset: int) -> tuple[dict[str, Any], int]:
    """Returns `logprobs` of a completion, and the offset after these tokens.

    `offset`: characters of the sample before these tokens.
    """
    offsets = list(accumulate((texts.num_characters(entry.token_id) for entry in entries), initial=offset))
    logprobs = {
        "tokens": [texts.text(entry.token_id) for entry in entries],
        "token_logprobs": [as_json(entry.logprob) for entry in entries],
        "top_logprobs": [_with_sampled(entry, texts) for entry in entries],
        "text_offset": offsets[:-1],
    }
    return logprobs, offsets[-1]


def _with_sampled(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, float]:
    """Returns the candidates and the sampled token, so that there may be one more than requested."""
    top = {texts.text(token_id): as_json(logprob) for token_id, logprob in entry.top}
    return {texts.text(entry.token_id): as_json(entry.logprob)} | top


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts, *, with_sampled: bool = False) -> dict[str, Any]:
    """Returns `logprobs` of a chat choice.

    `with_sampled`: top_logprobs begins with the sampled token if it is not a candidate, as with logprob_token_ids.
    """
    return {"content": [_chat_entry(entry, texts, with_sampled) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprobs, texts: TokenTexts, with_sampled: bool) -> dict[str, Any]:
    """Returns one token's entry with its top candidates; `with_sampled` puts the sampled token first if it is not
    among them."""
    sampled = _candidate(entry.token_id, entry.logprob, texts)
    top = [_candidate(token_id, logprob, texts) for token_id, logprob in entry.top]
    if with_sampled and entry.token_id not in dict(entry.top):
        top.insert(0, sampled)
    return {**sampled, "top_logprobs": top}


def _candidate(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": as_json(logprob), "bytes": list(texts.raw(token_id))}
