"""JSON bodies: parsing, and checks of the parsed document before its fields are validated."""

from __future__ import annotations

import json
from typing import Any

from quire.services.frontend.bounds import counts, surrogates
from quire.services.frontend.bounds.bodies.extra_body import merge_extra_body
from quire.services.frontend.bounds.prompts import PromptLimit
from quire.shared.errors import InvalidArgument
from quire.shared.settings.request_limits import RequestLimits

TOKEN_PROMPT_FIELDS = ("prompt", "input_ids")  # may hold token ids to continue


def parse(body: bytes) -> Any:
    """Parses a body. Raises JSONDecodeError for invalid JSON, InvalidArgument for what that error cannot describe."""
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a lone surrogate, a number with thousands of digits
        reason = str(error).partition(";")[0]
        raise InvalidArgument(f"the body is not JSON: {reason}") from None


def check(document: Any, body: bytes, limits: RequestLimits) -> None:
    """Checks counts of entries and lengths of texts. `document`: the parsed `body`, or None if it is not JSON. Raises
    InvalidArgument that names the field."""
    counts.check_body(document, len(body), limits)
    surrogates.check(body, document)


def check_prompt(document: Any, prompt_limit: PromptLimit) -> None:
    """Raises InvalidArgument for a prompt with more characters or token ids than `prompt_limit` allows, before it is
    tokenized. `document`: the parsed body of a call."""
    document = merge_extra_body(document)
    if not isinstance(document, dict):
        return
    is_truncated = document.get("truncate_prompt_tokens") is not None
    for name, value in document.items():
        if name in ("prompt", "text") or (name == "input" and not is_truncated):
            for prompt in value if isinstance(value, list) else [value]:
                prompt_limit.check_characters(len(prompt) if isinstance(prompt, str) else 0, is_text=True)
        if name in ("messages", "input") and isinstance(value, list):
            prompt_limit.check_characters(sum(map(_characters, value)), is_text=False)
        if name in TOKEN_PROMPT_FIELDS and isinstance(value, list) and not is_truncated:
            for ids in value if value and isinstance(value[0], list) else [value]:
                if isinstance(ids, list) and ids and isinstance(ids[0], int):
                    prompt_limit.check_tokens(len(ids))


def _characters(message: Any) -> int:
    """Returns a lower bound on the characters of a message's text, its content parts included; 0 for anything but an
    object."""
    if not isinstance(message, dict):
        return 0
    content = message.get("content")
    if isinstance(content, list):
        return sum(_length(part.get("text")) for part in content if isinstance(part, dict))
    return _length(content)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0
