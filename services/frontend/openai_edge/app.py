"""The routes put together."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from services.frontend.openai_edge import errors
from services.frontend.openai_edge.middleware import ApiKey, Counts
from shared.metrics.frontend import FrontendMetrics
from shared.version import VERSION


def build(routers: Iterable[APIRouter], api_key: str, metrics: FrontendMetrics) -> ASGIApp:
    app = FastAPI(title="Quire", version=VERSION)
    errors.install(app)
    for router in routers:
        app.include_router(router)
    guarded: ASGIApp = ApiKey(app, api_key) if api_key else app
    return Counts(guarded, metrics)
