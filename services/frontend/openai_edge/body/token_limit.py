"""How many tokens an answer may have, under the names that OpenAI's APIs have for it."""

from __future__ import annotations

from quire.shared.errors import InvalidArgument


def token_limit(**given: int | None) -> int | None:
    """Returns the last of `given` that is not None. Raises InvalidArgument for less than no token: clients of servers
    where -1 stands for no limit send that."""
    name, value = next(((name, given[name]) for name in reversed(given) if given[name] is not None), ("", None))
    if value is not None and value < 0:
        text = f"{name} must be at least 1, got {value}; leave it out for as many as fit in the context."
        raise InvalidArgument(text, field=name)
    return value
