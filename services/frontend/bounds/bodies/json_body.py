"""A JSON body: measured before it is parsed, and counted before anybody looks at its fields."""

from __future__ import annotations

import json
from typing import Any

from quire.services.frontend.bounds import counts, surrogates
from quire.services.frontend.bounds.bodies.extra_body import merge_extra_body
from quire.services.frontend.bounds.prompt_limit import PromptLimit
from quire.shared.errors import InvalidArgument
from quire.shared.settings.request_limits import RequestLimits

GOES_ON = ("prompt", "input_ids")  # what a model continues, as tokens


def parse(body: bytes) -> Any:
    """JSONDecodeError if it is no JSON; InvalidArgument for what nobody has words for."""
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # half a character, a number of thousands of digits
        reason = str(error).partition(";")[0]
        raise InvalidArgument(f"the body is not JSON: {reason}") from None


def check(document: Any, body: bytes, limits: RequestLimits) -> None:
    """`document`: what `body` was parsed as; None for what is no JSON. Raises InvalidArgument."""
    counts.check_body(document, len(body), limits)
    surrogates.check(body, document)


def check_prompt(document: Any, prompt_limit: PromptLimit) -> None:
    """Of a request: what would be refused in any case once its fields have been read. Raises InvalidArgument."""
    document = merge_extra_body(document)
    if not isinstance(document, dict):
        return
    cut = document.get("truncate_prompt_tokens") is not None
    for name, value in document.items():
        if name in ("prompt", "text") or (name == "input" and not cut):
            for prompt in value if isinstance(value, list) else [value]:
                prompt_limit.check_characters(len(prompt) if isinstance(prompt, str) else 0, is_text=True)
        if name in ("messages", "input") and isinstance(value, list):
            prompt_limit.check_characters(sum(map(_characters, value)), is_text=False)
        if name in GOES_ON and isinstance(value, list) and not cut:
            for ids in value if value and isinstance(value[0], list) else [value]:
                if isinstance(ids, list) and ids and isinstance(ids[0], int):
                    prompt_limit.check_tokens(len(ids))


def _characters(message: Any) -> int:
    """Of its text, at least so many."""
    if not isinstance(message, dict):
        return 0
    content = message.get("content")
    if isinstance(content, list):
        return sum(_length(part.get("text")) for part in content if isinstance(part, dict))
    return _length(content)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0
