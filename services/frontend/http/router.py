"""Routes of an API, each built when it is first asked for: what FastAPI finds out about all of them takes longer than
anything else at a frontend's start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from fastapi import APIRouter
from starlette.routing import BaseRoute, Match, compile_path
from starlette.types import Receive, Scope, Send

from quire.services.frontend.http.fields import query


class Router:
    """Its routes are served as they are. A body is JSON whatever its content type says. (What an app sets for its
    routes reaches only those that FastAPI's include_router makes a second time.)"""

    def __init__(self, prefix: str = "", *, own_query: bool = False, **settings: Any) -> None:
        """`own_query`: parameters of a query that a route does not have are refused. `settings`: of APIRouter."""
        self.routes: list[LazyRoute] = []
        self._prefix = prefix
        self._own_query = own_query
        self._settings = settings

    def add_api_route(self, path: str, endpoint: Callable[..., Any], *, methods: list[str], **settings: Any) -> None:
        """`settings`: of APIRouter.add_api_route."""
        path = self._prefix + path

        def build() -> BaseRoute:
            self._fastapi.add_api_route(path, endpoint, methods=methods, **settings)
            return self._fastapi.routes[-1]

        self.routes.append(LazyRoute(path, build, own_query=self._own_query))

    @cached_property
    def _fastapi(self) -> APIRouter:
        return APIRouter(strict_content_type=False, **self._settings)

    def add(self, other: Router) -> None:
        """All routes of another one, behind those that are here."""
        self.routes.extend(other.routes)


class LazyRoute(BaseRoute):
    """Knows its path; the rest is built when a call comes that has it, or for the OpenAPI document."""

    def __init__(self, path: str, build: Callable[[], BaseRoute], *, own_query: bool = False) -> None:
        self._pattern, self.path_format, _ = compile_path(path)
        self._build = build
        self._own_query = own_query

    @cached_property
    def built(self) -> BaseRoute:
        return self._build()

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Nobody has cut a path in front off for the app: own_paths.py has."""
        if not self.matches_path(scope["path"]):
            return Match.NONE, {}
        return self.built.matches(_read(scope))

    def matches_path(self, path: str) -> bool:
        return self._pattern.match(path) is not None

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._own_query and scope["query_string"]:
            query.refuse_unknown(self.built, scope)
        await self.built.handle(_read(scope), receive, send)


def _read(scope: Scope) -> Scope:
    """Returns a HEAD call as GET (RFC 9110, 9.3.2); the server sends the headers of its answer alone."""
    return {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope


def methods(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """That a call's path is served by, whichever it came with; where several paths of routes fit it, the first's."""
    there = [built(route) for route in routes if route.matches(scope)[0] is not Match.NONE]
    same = (route for route in there if getattr(route, "path", None) == getattr(there[0], "path", None))
    found = {method for route in same for method in getattr(route, "methods", None) or ()}
    return sorted(found | {"HEAD"} if "GET" in found else found)


def paths(routes: Iterable[BaseRoute]) -> list[str]:
    """Returns the path of each route, with names in braces where a call's has values."""
    return [route.path_format for route in routes if isinstance(route, LazyRoute)]


def is_served(routes: Iterable[BaseRoute], path: str) -> bool:
    return any(isinstance(route, LazyRoute) and route.matches_path(path) for route in routes)


def built(route: BaseRoute) -> BaseRoute:
    """What FastAPI knows by its own class."""
    return route.built if isinstance(route, LazyRoute) else route
