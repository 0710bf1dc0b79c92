"""A dialect: one API that HTTP clients speak, as a value. The table of all is composition/dialects.py."""

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
"""From the served model's name to bodies by path."""


def no_examples(_model: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns no bodies."""
    return {}


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How the clients of an API read errors."""

    of_error: Callable[[QuireError], Response]
    of_status: Callable[[int, str], Response]
    schema: Schema  # of the body of both, for the OpenAPI document


@dataclass(frozen=True, slots=True)
class InferencePath:
    """A path whose POST calls are work: they take a place, and are refused from their headers where there is none."""

    path: str  # as its route has it
    answer: Schema | None = None  # in one piece; None: FastAPI finds it out
    streamed_as: str = EVENTS  # the media type of an answer that is not in one piece
    field_names: Mapping[str, str] = field(default_factory=dict)  # name in a Request -> name in the body


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: its routes, and what the server does for them outside of the routes."""

    name: str
    routers: Callable[[ServingContext], Iterable[Router]]
    errors: ErrorFormat
    inference_paths: tuple[InferencePath, ...]
    prefixes: tuple[str, ...] = ()  # beginnings of paths whose other errors are worded like this as well
    paths: tuple[str, ...] = ()  # single ones of them that lie under a prefix of another dialect
    examples: Examples = no_examples
