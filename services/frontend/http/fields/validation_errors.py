"""Errors of pydantic in this server's words: the field as it was sent, what is wrong with it, and the value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from quire.services.frontend.bounds.bodies.extra_body import merge_extra_body
from quire.shared.errors import InvalidArgument

LONGEST_SHOWN = 64  # characters of a wrong value


def as_invalid_argument(error: RequestValidationError) -> InvalidArgument:
    """The first of pydantic's errors: the field as it was sent, what is wrong with it, and the value if it is short."""
    found = error.errors()[0]
    if found["type"] == "json_invalid":
        return InvalidArgument(f"the body is not JSON: {found['ctx']['error']} at character {found['loc'][-1]}")
    field = ".".join(_sent(found["loc"], merge_extra_body(error.body), is_missing=found["type"] == "missing"))
    if not field and found["type"] == "missing":
        return InvalidArgument("the body is empty; it has to be a JSON object")
    return InvalidArgument(f"{field or 'the body'}: {found['msg']}{_given(found)}", field=field)


def _sent(loc: Sequence[int | str], body: Any, *, is_missing: bool) -> Iterator[str]:
    """The parts of a place that stand in the body, and of a missing field its name. Pydantic also names the kinds of
    value among which it looked for the right one (`stop.str`)."""
    place, *parts = loc
    if place != "body":  # of the path or the query
        yield from map(str, loc)
        return
    within = body
    for number, part in enumerate(parts, 1):
        is_there = part in within if isinstance(within, dict) else isinstance(within, list) and isinstance(part, int)
        if is_there:
            within = within[part]
        if is_there or (is_missing and number == len(parts)):
            yield str(part)


def _given(found: Mapping[str, Any]) -> str:
    """Of a value that fits in a line; of what is missing or superfluous the name says all."""
    value = found.get("input")
    is_plain = isinstance(value, str | int | float | bool) and found["type"] not in ("missing", "extra_forbidden")
    return f" ({value!r})" if is_plain and len(repr(value)) <= LONGEST_SHOWN else ""
