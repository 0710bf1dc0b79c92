"""The routes put together."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp

from services.frontend.anthropic_edge import errors as anthropic_errors
from services.frontend.anthropic_edge import routes as anthropic_routes
from services.frontend.http.middleware import ApiKey, BodyLimit, Counts
from services.frontend.openai_edge import errors
from shared.metrics.frontend import FrontendMetrics
from shared.version import VERSION


def build(routers: Iterable[APIRouter], *, api_key: str, max_request_bytes: int, metrics: FrontendMetrics) -> ASGIApp:
    app = FastAPI(title="Quire", version=VERSION)
    errors.install(app)
    for router in routers:
        app.include_router(router)
    guarded: ASGIApp = BodyLimit(app, max_request_bytes)
    if api_key:
        guarded = ApiKey(guarded, api_key, _unauthorized)
    return Counts(guarded, metrics)


def _unauthorized(path: str) -> Response:
    if path.startswith(anthropic_routes.PREFIX):
        return anthropic_errors.plain_response(401, "invalid x-api-key")
    return errors.plain_response(401, "Unauthorized", "AuthenticationError")
