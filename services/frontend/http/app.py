"""The routes put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from services.frontend.access.access import Access
from services.frontend.admission import Admission
from services.frontend.anthropic_edge import errors as anthropic_errors
from services.frontend.anthropic_edge import routes as anthropic_routes
from services.frontend.calls import Calls
from services.frontend.http.call_scope import CallScope
from services.frontend.http.documented import document
from services.frontend.http.door import Door
from services.frontend.http.headers import REQUEST_ID
from services.frontend.http.load_header import Load, LoadHeader
from services.frontend.http.middleware import BodyLimit, KeyGuard
from services.frontend.http.own_paths import OwnPaths, as_own
from services.frontend.http.protocol import Refuse
from services.frontend.openai_edge import errors
from shared.errors import Internal, QuireError
from shared.metrics.frontend import FrontendMetrics
from shared.version import VERSION


class Face(NamedTuple):
    """What a server serves, and what it asks before."""

    app: ASGIApp
    refuse: Refuse


def build(
    routers: Iterable[APIRouter],
    *,
    access: Access,
    open_paths: Iterable[str],
    cors_origins: Sequence[str],
    root_path: str,
    max_request_bytes: int,
    admission: Admission,
    calls: Calls,
    metrics: FrontendMetrics,
    load: Load,
) -> Face:
    app = FastAPI(
        title="Quire",
        version=VERSION,
        strict_content_type=False,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    app.add_exception_handler(Exception, _on_fault)
    for router in routers:
        app.include_router(router)
    document(app, anthropic_routes.PREFIX)
    door = Door(app, admission, calls, metrics, refusal)
    guarded: ASGIApp = LoadHeader(BodyLimit(door, max_request_bytes), load)
    if not access.is_open:
        guarded = KeyGuard(guarded, access, open_paths, refusal)
    guarded = CallScope(guarded, calls, metrics, refusal)
    if cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, "retry-after"),
        )
    return Face(OwnPaths(guarded, root_path), as_own(door.refuse, root_path))


def refusal(path: str, error: QuireError) -> Response:
    """As the clients of `path` read it."""
    if path.startswith(anthropic_routes.PREFIX):
        return anthropic_errors.as_response(error)
    return errors.as_response(error)


async def _on_fault(request: Request, _: Exception) -> Response:
    """Which goes on to whoever logs it with its call."""
    return refusal(request.url.path, Internal("internal error"))
