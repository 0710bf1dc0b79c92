"""Query parameters: unknown ones are refused, since a misspelt name would otherwise silently use the default."""

from __future__ import annotations

from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams
from starlette.routing import BaseRoute
from starlette.types import Scope

from quire.shared.errors import InvalidArgument

IGNORED = frozenset({"api-version"})  # sent by Azure's clients with every call
LONGEST_SHOWN = 64  # characters of an unknown name in the error


def refuse_unknown(route: BaseRoute, scope: Scope) -> None:
    """Raises InvalidArgument for the first parameter that the route does not have. Does nothing for an unsupported
    method."""
    assert isinstance(route, APIRoute)
    if scope["method"] not in (route.methods or ()):
        return
    known = [field.alias for field in route.dependant.query_params]
    for name in QueryParams(scope["query_string"]):
        if name not in known and name not in IGNORED:
            shown, available = name[:LONGEST_SHOWN], ", ".join(known) or "none"
            raise InvalidArgument(f"unknown query parameter {shown!r}; available: {available}", field=shown)
