"""A dialect: one HTTP API as a value. The table of all dialects is composition/dialects.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from quire.services.frontend.http.document.schemas import Schema
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.shared.errors import QuireError

EVENTS = "text/event-stream"

Examples = Callable[[str], Mapping[str, Mapping[str, Any]]]
"""Function from the served model's name to example bodies, by path."""


def no_examples(_model: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns no example bodies; the default of Dialect.examples."""
    return {}


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """Formats errors and plain HTTP statuses for the clients of one API."""

    of_error: Callable[[QuireError], Response]
    of_status: Callable[[int, str], Response]
    schema: Schema  # of both bodies, for the OpenAPI document


@dataclass(frozen=True, slots=True)
class InferencePath:
    """A path whose POST calls are subject to admission, and refused by their headers when the frontend is full."""

    path: str  # route template
    answer: Schema | None = None  # schema of the answer in one piece; None: derived by FastAPI
    streamed_as: str = EVENTS  # media type of a streamed answer
    field_names: Mapping[str, str] = field(default_factory=dict)  # name in a Request -> name in the body
    is_file: bool = False  # the body is a file, which the route reads once there is memory for it


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: its routes, error format, and what the server needs to know of its paths."""

    name: str
    routers: Callable[[ServingContext], Iterable[Router]]
    errors: ErrorFormat
    inference_paths: tuple[InferencePath, ...]
    prefixes: tuple[str, ...] = ()  # path prefixes whose errors use this format as well
    paths: tuple[str, ...] = ()  # single paths under a prefix of another dialect
    examples: Examples = no_examples
