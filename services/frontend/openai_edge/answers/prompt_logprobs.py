"""Log-probabilities of a prompt: as vLLM lists them, or as OpenAI's completions echo them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts, as_json, completion_logprobs
from quire.services.frontend.request.outcome import TokenLogprobs


def prompt_logprobs(entries: Sequence[TokenLogprobs], start: int, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """By position from `start` on; nothing precedes position 0."""
    listed: list[dict[str, Any] | None] = [None] if start == 0 else []
    return listed + [_position(entry, texts) for entry in entries]


def _position(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    """By token id; the prompt's own token is always there, the others are ranked as they come."""
    found = {
        str(token_id): _candidate(token_id, logprob, rank, texts)
        for rank, (token_id, logprob) in enumerate(entry.top, start=1)
    }
    return {str(entry.token_id): _candidate(entry.token_id, entry.logprob, entry.rank, texts)} | {
        token_id: candidate for token_id, candidate in found.items() if token_id != str(entry.token_id)
    }


def _candidate(token_id: int, logprob: float, rank: int, texts: TokenTexts) -> dict[str, Any]:
    return {"logprob": as_json(logprob), "rank": rank, "decoded_token": texts.text(token_id)}


def echoed_logprobs(
    first_token: int, entries: Sequence[TokenLogprobs], texts: TokenTexts
) -> tuple[dict[str, Any], int]:
    """In front of the output's; the second value is where that begins, in characters."""
    opening = {
        "tokens": [texts.text(first_token)],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    rest, offset = completion_logprobs(entries, texts, texts.num_characters(first_token))
    return joined(opening, rest), offset


def joined(before: dict[str, Any] | None, behind: dict[str, Any]) -> dict[str, Any]:
    return {name: before[name] + behind[name] for name in behind} if before else behind
