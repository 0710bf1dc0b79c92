"""The routes put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.services.frontend.access.access import Access
from quire.services.frontend.anthropic_edge import errors as anthropic_errors
from quire.services.frontend.anthropic_edge import routes as anthropic_routes
from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.calls.calls import Calls
from quire.services.frontend.console import routes as console
from quire.services.frontend.http.document import examples
from quire.services.frontend.http.document.documented import ANTHROPIC_ERROR, OLLAMA_ERROR, OPENAI_ERROR, document
from quire.services.frontend.http.headers import Headers
from quire.services.frontend.http.middleware.call_scope import CallScope
from quire.services.frontend.http.middleware.cors import Cors
from quire.services.frontend.http.middleware.decoded_body import BodyDecoders, DecodedBodies
from quire.services.frontend.http.middleware.door import HttpDoor
from quire.services.frontend.http.middleware.guards import BodyLimit, KeyGuard, OperatorGuard, PageGuard
from quire.services.frontend.http.middleware.load_header import Load, LoadHeader
from quire.services.frontend.http.middleware.options import EveryPath
from quire.services.frontend.http.middleware.own_paths import OwnPaths, as_own
from quire.services.frontend.http.middleware.page_rules import PageRules
from quire.services.frontend.http.router import Router, methods
from quire.services.frontend.http.server.protocol import Entrance
from quire.services.frontend.http.server.server import Face
from quire.services.frontend.kserve_edge import routes as kserve_routes
from quire.services.frontend.offline import routes as offline
from quire.services.frontend.offline.inner_calls import AsCaller
from quire.services.frontend.ollama_edge import errors as ollama_errors
from quire.services.frontend.ollama_edge import routes as ollama_routes
from quire.services.frontend.openai_edge import errors
from quire.shared.errors import Internal, QuireError
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.version import VERSION


class ApiWords(NamedTuple):
    """How an API words what went wrong."""

    of_error: Callable[[QuireError], Response]
    of_status: Callable[[int, str], Response]


OLLAMA = ApiWords(ollama_errors.as_response, ollama_errors.plain_response)

# By the beginning of their paths: APIs with words of their own.
WORDINGS: Mapping[str, ApiWords] = {
    anthropic_routes.PREFIX: ApiWords(anthropic_errors.as_response, anthropic_errors.plain_response),
    ollama_routes.PREFIX: OLLAMA,
    kserve_routes.ROOT: OLLAMA,  # whose errors look the same
}
ERROR_SHAPES = {
    anthropic_routes.PREFIX: ANTHROPIC_ERROR,
    ollama_routes.PREFIX: OLLAMA_ERROR,
    kserve_routes.ROOT: OLLAMA_ERROR,
}
OTHERS_WORDS = ("/v2/rerank", "/v2/embed", "/v2/chat")  # of Cohere and Jina, whose clients read OpenAI's errors


def build(
    routers: Iterable[Router],
    *,
    access: Access,
    operator: Callable[[Headers], None],
    open_paths: Iterable[str],
    rules: PageRules,
    root_path: str,
    max_request_bytes: int,
    max_file_bytes: int,
    decoders: BodyDecoders,
    admission: CallAdmission,
    calls: Calls,
    metrics: FrontendMetrics,
    load: Load,
    sse_keepalive_s: float,
    model: str = "",
    web: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> Face:
    """`operator` raises QuireError unless operators' key is among the headers; `model`: its name, for examples in the
    document; `web`: what takes the calls of browsers' gRPC before the rest."""
    app = FastAPI(
        title="Quire",
        version=VERSION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        servers=[{"url": root_path}] if root_path else None,
    )
    errors.install(app)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_fault)
    for router in routers:
        app.router.routes.extend(router.routes)
    document(app, lambda path: ERROR_SHAPES.get(_dialect_of(path), OPENAI_ERROR))
    door = HttpDoor(app, admission, calls, metrics, refusal)
    operated = OperatorGuard(door, operator, refusal)
    of_paths = {offline.FILES: max_file_bytes}
    bounded = BodyLimit(DecodedBodies(operated, decoders, max_request_bytes, of_paths), max_request_bytes, of_paths)
    inner = CallScope(AsCaller(bounded), calls, metrics, refusal)
    examples.add(app, model)
    guarded: ASGIApp = LoadHeader(bounded, load)
    if not access.is_open:
        guarded = KeyGuard(guarded, access, (*console.OPEN, *open_paths), refusal)
    guarded = EveryPath(guarded, lambda scope: methods(app.routes, scope), _status_refusal)
    guarded = PageGuard(guarded, rules, refusal)
    guarded = web(CallScope(guarded, calls, metrics, refusal, sse_keepalive_s))
    if rules.origins:
        guarded = Cors(guarded, rules)
    return Face(OwnPaths(guarded, root_path), Entrance(as_own(door.refuse, root_path), door.is_shut), inner)


def refusal(path: str, error: QuireError) -> Response:
    """As the clients of `path` read it."""
    words = _words_of(path)
    return words.of_error(error) if words else errors.as_response(error)


def _status_refusal(path: str, status: HTTPStatus, detail: str) -> Response:
    words = _words_of(path)
    return words.of_status(status, detail) if words else errors.plain_response(status, detail)


def _words_of(path: str) -> ApiWords | None:
    return WORDINGS.get(_dialect_of(path))


def _dialect_of(path: str) -> str:
    """The beginning of a path that says whose words its clients read; empty: OpenAI's."""
    if path in OTHERS_WORDS:
        return ""
    return next((prefix for prefix in WORDINGS if path.startswith(prefix)), "")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What no route has answered: a path or a method that is not there."""
    words = _words_of(request.url.path)
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:  # a route knows its own alone
        allowed = ", ".join(methods(request.app.routes, request.scope))
        error = HTTPException(error.status_code, error.detail, {**(error.headers or {}), "Allow": allowed})
    if words is None:
        return await errors.on_http_exception(request, error)
    answer = words.of_status(error.status_code, errors.of_route(request, error))
    answer.headers.update(error.headers or {})
    return answer


async def _on_fault(request: Request, _: Exception) -> Response:
    """Which goes on to whoever logs it with its call."""
    return refusal(request.url.path, Internal("internal error"))
