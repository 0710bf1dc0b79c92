"""The field `extra_body`: OpenAI's clients merge its content into the body; clients of other vendors send it
unmerged."""

from __future__ import annotations

from typing import Any

FIELD = "extra_body"


def merge_extra_body(sent: Any) -> Any:
    """Returns the body with the fields of its extra_body merged in; they override fields of the same name. An
    extra_body that is not an object stays and is treated as an unknown field."""
    if not isinstance(sent, dict) or not isinstance(inner := sent.get(FIELD), dict):
        return sent
    return {name: value for name, value in sent.items() if name != FIELD} | inner
