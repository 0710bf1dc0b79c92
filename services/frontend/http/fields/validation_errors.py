"""Converts pydantic's errors to this server's: the field as it was sent, the problem, and the value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from quire.services.frontend.bounds.bodies.extra_body import merge_extra_body
from quire.shared.errors import InvalidArgument

LONGEST_SHOWN = 64  # characters of an invalid value in the error


def as_invalid_argument(error: RequestValidationError) -> InvalidArgument:
    """Returns the first of pydantic's errors, with the field as it was sent and the value if it is short."""
    found = error.errors()[0]
    if found["type"] == "json_invalid":
        return InvalidArgument(f"the body is not JSON: {found['ctx']['error']} at character {found['loc'][-1]}")
    field = ".".join(_sent(found["loc"], merge_extra_body(error.body), is_missing=found["type"] == "missing"))
    if not field and found["type"] == "missing":
        return InvalidArgument("the body is empty; it must be a JSON object")
    return InvalidArgument(f"{field or 'the body'}: {found['msg']}{_shown_value(found)}", field=field)


def _sent(loc: Sequence[int | str], body: Any, *, is_missing: bool) -> Iterator[str]:
    """Yields the parts of a location that exist in the body, and the name of a missing field. Pydantic's locations also
    contain the types it tried (`stop.str`)."""
    place, *parts = loc
    if place != "body":  # of the path or the query
        yield from map(str, loc)
        return
    within = body
    for number, part in enumerate(parts, 1):
        is_present = part in within if isinstance(within, dict) else isinstance(within, list) and isinstance(part, int)
        if is_present:
            within = within[part]
        if is_present or (is_missing and number == len(parts)):
            yield str(part)


def _shown_value(found: Mapping[str, Any]) -> str:
    """Returns the value for the error text, if it is short; empty for missing and superfluous fields."""
    value = found.get("input")
    is_plain = isinstance(value, str | int | float | bool) and found["type"] not in ("missing", "extra_forbidden")
    return f" ({value!r})" if is_plain and len(repr(value)) <= LONGEST_SHOWN else ""
