"""The routes put together."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from services.frontend.openai_edge import errors
from services.frontend.openai_edge.middleware import ApiKey, BodyLimit, Counts
from shared.metrics.frontend import FrontendMetrics
from shared.version import VERSION


def build(routers: Iterable[APIRouter], *, api_key: str, max_request_bytes: int, metrics: FrontendMetrics) -> ASGIApp:
    app = FastAPI(title="Quire", version=VERSION)
    errors.install(app)
    for router in routers:
        app.include_router(router)
    guarded: ASGIApp = BodyLimit(app, max_request_bytes)
    if api_key:
        guarded = ApiKey(guarded, api_key)
    return Counts(guarded, metrics)
