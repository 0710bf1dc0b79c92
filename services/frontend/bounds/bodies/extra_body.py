"""`extra_body` in a body: OpenAI's clients merge what they are given under this name into the body. Clients of other
makers send it as it stands."""

from __future__ import annotations

from typing import Any

FIELD = "extra_body"


def merge_extra_body(sent: Any) -> Any:
    """Returns the body with the fields of its extra_body in their places, where they count before those outside. An
    extra_body that is no object stays, and is an unknown field."""
    if not isinstance(sent, dict) or not isinstance(inner := sent.get(FIELD), dict):
        return sent
    return {name: value for name, value in sent.items() if name != FIELD} | inner
