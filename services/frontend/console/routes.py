"""Routes of the console's files, the cluster status it polls, and /docs without external resources."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi.openapi.docs import get_swagger_ui_html
from google.protobuf.json_format import MessageToDict
from starlette.responses import FileResponse, HTMLResponse, Response

from quire.services.frontend.http.router import Router
from quire.shared.errors import NotFound
from quire.shared.pb.admin.v1 import admin_pb2 as pb

STATIC = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {f"/console/{path.name}": path for path in STATIC.iterdir() if path.name != "index.html"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css")
# Paths without API key: the files are public, and the data they show is requested with the visitor's key.
OPEN = ("/", *FILES, *(f"/console/{name}" for name in SWAGGER))
CACHE_S = 0.5  # a cluster status is shared by callers within this time
PRIVATE = ("pid", "address", "oldest_calls")  # fields for operators only

StatusSource = Callable[[], Awaitable[Sequence[pb.ServiceStatus]]]


class ConsoleRoutes:
    """Routes of the console, of the cluster status, and of /docs."""

    def __init__(self, read_status: StatusSource, root: str) -> None:
        """Builds the routes. `read_status`: returns the status of every service; `root`: path prefix as browsers see
        it."""
        self._read_status = read_status
        self._root = root
        self._lock = asyncio.Lock()
        self._read_s = -CACHE_S
        self._services: list[dict[str, Any]] = []
        self._swagger = _swagger()
        self.router = Router(include_in_schema=False)
        for method in ("GET", "HEAD"):
            self.router.add_api_route("/", self.page, methods=[method])
        for path, file in FILES.items():
            self.router.add_api_route(path, _file(file), methods=["GET"])
        self.router.add_api_route("/cluster", self.cluster, methods=["GET"])
        self.router.add_api_route("/docs", self.docs, methods=["GET"])
        for name in SWAGGER:
            if self._swagger is not None:
                for folder in ("/docs", "/console"):
                    self.router.add_api_route(f"{folder}/{name}", _file(self._swagger / name), methods=["GET"])

    async def page(self) -> Response:
        return _answer(STATIC / "index.html")

    async def cluster(self) -> dict[str, Any]:
        """Returns the status of every service as JSON, at most CACHE_S old, without the fields for operators
        (PRIVATE)."""
        async with self._lock:
            if asyncio.get_running_loop().time() - self._read_s > CACHE_S:
                self._services = [_as_dict(service) for service in await self._read_status()]
                self._read_s = asyncio.get_running_loop().time()
        return {"services": self._services}

    async def docs(self) -> HTMLResponse:
        """Returns a page to read the OpenAPI document and try its calls. Raises NotFound if the package with its
        scripts is not installed."""
        if self._swagger is None:
            raise NotFound("/docs requires the package fastapi-offline; read /openapi.json instead")
        page = get_swagger_ui_html(
            openapi_url=f"{self._root}/openapi.json",
            title="Quire",
            swagger_js_url=f"{self._root}/docs/{SWAGGER[0]}",
            swagger_css_url=f"{self._root}/docs/{SWAGGER[1]}",
            swagger_favicon_url=f"{self._root}/console/icon.svg",
        )
        page.headers.update({**HEADERS, "content-security-policy": _policy_of(bytes(page.body))})
        return page


def _policy_of(page: bytes) -> str:
    """Returns the console's content security policy, extended by the hashes of the page's inline scripts."""
    digests = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in INLINE_SCRIPT.findall(page)]
    allowed = "".join(f" 'sha256-{one}'" for one in digests)
    return POLICY.replace("script-src 'self'", f"script-src 'self'{allowed}")


def _as_dict(service: pb.ServiceStatus) -> dict[str, Any]:
    """Returns a copy of the status as a dictionary with proto field names, without the fields in PRIVATE."""
    shown = pb.ServiceStatus()
    shown.CopyFrom(service)
    for name in PRIVATE:
        shown.ClearField(name)
    return MessageToDict(shown, preserving_proto_field_name=True)


def _file(path: Path) -> Callable[[], Awaitable[Response]]:
    """Returns a handler that answers with this file."""

    async def read() -> Response:
        return _answer(path)

    return read


def _answer(path: Path) -> Response:
    return FileResponse(path, media_type=TYPES[path.suffix], headers=HEADERS)


def _swagger() -> Path | None:
    """Returns the folder of swagger-ui's files, or None if the package is not installed."""
    found = importlib.util.find_spec("fastapi_offline")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "static"
    return folder if all((folder / name).is_file() for name in SWAGGER) else None
