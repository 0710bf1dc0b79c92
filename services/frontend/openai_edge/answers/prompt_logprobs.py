"""Log-probabilities of a prompt, as vLLM lists them or as OpenAI's completions echo them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts, as_json, completion_logprobs
from quire.services.frontend.request.outcome import TokenLogprobs


def prompt_logprobs(entries: Sequence[TokenLogprobs], start: int, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Returns the list by position from `start` on; position 0 has none."""
    listed: list[dict[str, Any] | None] = [None] if start == 0 else []
    return listed + [_position(entry, texts) for entry in entries]


def _position(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    """Returns the candidates by token id; the prompt's token is always among them, the others are ranked in order."""
    candidates = {
        str(token_id): _candidate(token_id, logprob, rank, texts)
        for rank, (token_id, logprob) in enumerate(entry.top, start=1)
    }
    return {str(entry.token_id): _candidate(entry.token_id, entry.logprob, entry.rank, texts)} | {
        token_id: candidate for token_id, candidate in candidates.items() if token_id != str(entry.token_id)
    }


def _candidate(token_id: int, logprob: float, rank: int, texts: TokenTexts) -> dict[str, Any]:
    return {"logprob": as_json(logprob), "rank": rank, "decoded_token": texts.text(token_id)}


def echoed_logprobs(
    first_token: int, entries: Sequence[TokenLogprobs], texts: TokenTexts
) -> tuple[dict[str, Any], int]:
    """Returns the log-probabilities of the prompt to put before the output's, and the offset after the prompt in
    characters."""
    opening = {
        "tokens": [texts.text(first_token)],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    rest, offset = completion_logprobs(entries, texts, texts.num_characters(first_token))
    return joined(opening, rest), offset


def joined(before: dict[str, Any] | None, after: dict[str, Any]) -> dict[str, Any]:
    return {name: before[name] + after[name] for name in after} if before else after
