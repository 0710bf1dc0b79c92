"""Parameters of queries. A misspelled one would otherwise be a silent default."""

from __future__ import annotations

from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams
from starlette.routing import BaseRoute
from starlette.types import Scope

from quire.shared.errors import InvalidArgument

IGNORED = frozenset({"api-version"})  # Azure's clients send it with every call
LONGEST_SHOWN = 64  # characters of a wrong name


def refuse_unknown(route: BaseRoute, scope: Scope) -> None:
    """Raises InvalidArgument for the first one that the route does not have. A method that it does not have goes by."""
    assert isinstance(route, APIRoute)
    if scope["method"] not in (route.methods or ()):
        return
    known = [field.alias for field in route.dependant.query_params]
    for name in QueryParams(scope["query_string"]):
        if name not in known and name not in IGNORED:
            shown, there = name[:LONGEST_SHOWN], ", ".join(known) or "none"
            raise InvalidArgument(f"{shown!r} is no query parameter here; there are: {there}", field=shown)
