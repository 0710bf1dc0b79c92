"""Limit of an answer's tokens, under the names of OpenAI's APIs."""

from __future__ import annotations

from quire.shared.errors import InvalidArgument


def token_limit(**given: int | None) -> int | None:
    """Returns the last of `given` that is not None; raises InvalidArgument for a negative value, which clients of
    servers where -1 means no limit send."""
    name, value = next(((name, given[name]) for name in reversed(given) if given[name] is not None), ("", None))
    if value is not None and value < 0:
        text = f"{name} must be at least 1, got {value}; leave it out for as many as fit in the context."
        raise InvalidArgument(text, field=name)
    return value
