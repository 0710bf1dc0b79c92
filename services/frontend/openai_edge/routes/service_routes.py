"""Routes for operators and load balancers: /health, /ready, /live, /ping, /version, /load, /metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.http.router import Router
from quire.shared.errors import Unavailable
from quire.shared.version import VERSION


class ServiceRoutes:
    """Service routes outside of /v1, which need no API key."""

    def __init__(
        self,
        serving: Callable[[], bool],
        alive: Callable[[], bool],
        admission: CallAdmission,
        page: Callable[[], bytes],
    ) -> None:
        """Registers the routes. `serving` and `alive` decide the health checks; `page` renders the content of
        /metrics."""
        self._serving = serving
        self._alive = alive
        self._admission = admission
        self._page = page
        self.router = Router(tags=["service"])
        self.router.add_api_route("/health", self.health, methods=["GET"], response_class=Response)
        self.router.add_api_route("/ready", self.health, methods=["GET"], response_class=Response)
        self.router.add_api_route("/live", self.live, methods=["GET"], response_class=Response)
        for path, probe in (("/health", self.health), ("/ready", self.health), ("/live", self.live)):
            self.router.add_api_route(path, probe, methods=["HEAD"], response_class=Response, include_in_schema=False)
        for method in ("GET", "HEAD", "POST"):
            self.router.add_api_route(
                "/ping", self.health, methods=[method], response_class=Response, include_in_schema=False
            )
        self.router.add_api_route("/version", self.version, methods=["GET"])
        self.router.add_api_route("/load", self.load, methods=["GET"])
        self.router.add_api_route("/metrics", self.metrics, methods=["GET"], response_class=Response)

    async def health(self) -> Response:
        """Returns 200 while a scheduler session is open and this frontend is not draining, like grpc.health.v1."""
        if not self._serving():
            raise Unavailable(
                "no scheduler session is open, no worker has registered yet, or this frontend is draining"
            )
        return Response()

    async def live(self) -> Response:
        """Returns 200 unless a restart would help, which it does not for an absent scheduler or a drain."""
        if not self._alive():
            raise Unavailable("the sessions with schedulers make no progress")
        return Response()

    async def version(self) -> dict[str, Any]:
        return {"version": VERSION}

    async def load(self) -> dict[str, Any]:
        return {"server_load": self._admission.num_samples}

    async def metrics(self) -> Response:
        return Response(self._page(), media_type=CONTENT_TYPE_LATEST)
