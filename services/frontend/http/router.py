"""Lazily built API routes: FastAPI's analysis of all routes would dominate the frontend's start time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from fastapi import APIRouter
from starlette.routing import BaseRoute, Match, compile_path
from starlette.types import Receive, Scope, Send

from quire.services.frontend.http.fields import query


class Router:
    """Collects routes. Bodies are parsed as JSON whatever their content type. (Options of the app do not reach these
    routes, since FastAPI's include_router is not used.)."""

    def __init__(self, prefix: str = "", *, own_query: bool = False, **settings: Any) -> None:
        """Starts without routes. `own_query`: refuse unknown query parameters. `settings`: passed to APIRouter."""
        self.routes: list[LazyRoute] = []
        self._prefix = prefix
        self._own_query = own_query
        self._settings = settings

    def add_api_route(self, path: str, endpoint: Callable[..., Any], *, methods: list[str], **settings: Any) -> None:
        """Adds a route that FastAPI builds only when it is first needed. `settings`: passed to
        APIRouter.add_api_route."""
        path = self._prefix + path

        def build() -> BaseRoute:
            self._fastapi.add_api_route(path, endpoint, methods=methods, **settings)
            return self._fastapi.routes[-1]

        self.routes.append(LazyRoute(path, build, own_query=self._own_query))

    @cached_property
    def _fastapi(self) -> APIRouter:
        return APIRouter(strict_content_type=False, **self._settings)

    def add(self, other: Router) -> None:
        """Appends all routes of another router."""
        self.routes.extend(other.routes)


class LazyRoute(BaseRoute):
    """A route that is built when a call first matches its path, or for the OpenAPI document."""

    def __init__(self, path: str, build: Callable[[], BaseRoute], *, own_query: bool = False) -> None:
        self._pattern, self.path_format, _ = compile_path(path)
        self._build = build
        self._own_query = own_query

    @cached_property
    def built(self) -> BaseRoute:
        return self._build()

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Matches the full path; the prefix of a proxy is already removed by path_normalizer.py."""
        if not self.matches_path(scope["path"]):
            return Match.NONE, {}
        return self.built.matches(_head_as_get(scope))

    def matches_path(self, path: str) -> bool:
        return self._pattern.match(path) is not None

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Builds the route, refuses unknown query parameters if configured, and handles the call; HEAD as GET."""
        if self._own_query and scope["query_string"]:
            query.refuse_unknown(self.built, scope)
        await self.built.handle(_head_as_get(scope), receive, send)


def _head_as_get(scope: Scope) -> Scope:
    """Returns the scope of a HEAD call as GET (RFC 9110 9.3.2); the server sends only the headers of the answer."""
    return {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope


def methods(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """Returns the methods that the call's path supports; if several templates match, those of the first."""
    matching = [built(route) for route in routes if route.matches(scope)[0] is not Match.NONE]
    same = (route for route in matching if getattr(route, "path", None) == getattr(matching[0], "path", None))
    found = {method for route in same for method in getattr(route, "methods", None) or ()}
    return sorted(found | {"HEAD"} if "GET" in found else found)


def paths(routes: Iterable[BaseRoute]) -> list[str]:
    """Returns the template of each route, with parameter names in braces."""
    return [route.path_format for route in routes if isinstance(route, LazyRoute)]


def is_served(routes: Iterable[BaseRoute], path: str) -> bool:
    return any(isinstance(route, LazyRoute) and route.matches_path(path) for route in routes)


def built(route: BaseRoute) -> BaseRoute:
    """Returns the route as an instance of FastAPI's own class."""
    return route.built if isinstance(route, LazyRoute) else route
