"""Assembles the HTTP application: routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.services.frontend.access.access import Access
from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.calls.calls import Calls
from quire.services.frontend.console import routes as console
from quire.services.frontend.http.dialects import Dialects
from quire.services.frontend.http.document import examples
from quire.services.frontend.http.document.openapi import install_openapi
from quire.services.frontend.http.fields.validation_errors import as_invalid_argument
from quire.services.frontend.http.headers import CALL, Headers
from quire.services.frontend.http.middleware.admission_middleware import AdmissionMiddleware
from quire.services.frontend.http.middleware.call_scope import CallScope
from quire.services.frontend.http.middleware.cors import Cors
from quire.services.frontend.http.middleware.decoded_body import BodyDecoders, DecodedBodies
from quire.services.frontend.http.middleware.guards import BodyLimit, KeyGuard, OperatorGuard, PageGuard
from quire.services.frontend.http.middleware.load_header import Load, LoadHeader
from quire.services.frontend.http.middleware.options import OptionsHandler
from quire.services.frontend.http.middleware.page_rules import PageRules
from quire.services.frontend.http.middleware.path_normalizer import PathNormalizer, with_normalized_path
from quire.services.frontend.http.middleware.web_sockets import WebSockets, takes_web_socket
from quire.services.frontend.http.path_suggestions import remedy, suggest_path
from quire.services.frontend.http.router import Router, is_served, methods, paths
from quire.services.frontend.http.server.protocol import AdmissionHooks
from quire.services.frontend.http.server.server import HttpApplication
from quire.services.frontend.offline import routes as offline
from quire.services.frontend.offline.internal_client import CallerFromScope
from quire.services.frontend.openai_edge.routes.transcription_routes import TRANSCRIPTIONS, TRANSLATIONS
from quire.services.frontend.transcription.form import MAX_FORM_BYTES
from quire.shared.errors import Internal, QuireError
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.version import VERSION


def build(
    routers: Iterable[Router],
    dialects: Dialects,
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
    sockets: Mapping[str, ASGIApp] | None = None,
) -> HttpApplication:
    """Builds the application. `operator`: raises QuireError unless the headers carry the operators' key. `model`:
    model name for the examples in the OpenAPI document. `web`: wraps the application with the edge for gRPC-Web and
    Connect. `sockets`: applications for WebSocket connections, by path."""
    app = FastAPI(
        title="Quire",
        version=VERSION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        servers=[{"url": root_path}] if root_path else None,
    )
    _install_errors(app, dialects)
    for router in routers:
        app.router.routes.extend(router.routes)
    install_openapi(app, dialects)
    refusal = dialects.refusal
    admission_middleware = AdmissionMiddleware(app, admission, calls, metrics, dialects)
    operated = OperatorGuard(admission_middleware, operator, refusal)
    of_paths = {offline.FILES: max_file_bytes, **dict.fromkeys((TRANSCRIPTIONS, TRANSLATIONS), MAX_FORM_BYTES)}
    bounded = BodyLimit(DecodedBodies(operated, decoders, max_request_bytes, of_paths), max_request_bytes, of_paths)
    inner = CallScope(CallerFromScope(bounded), calls, metrics, dialects)
    examples.add(app, model, dialects)
    guarded: ASGIApp = LoadHeader(bounded, load)
    if not access.allows_anonymous:
        guarded = KeyGuard(guarded, access, (*console.OPEN, *open_paths), refusal)
    guarded = OptionsHandler(guarded, lambda scope: methods(app.routes, scope), dialects.status)
    guarded = PageGuard(guarded, rules, refusal)
    guarded = web(CallScope(guarded, calls, metrics, dialects, sse_keepalive_s))
    if rules.origins:
        guarded = Cors(guarded, rules)
    return HttpApplication(
        PathNormalizer(WebSockets(guarded, sockets or {}), root_path),
        AdmissionHooks(
            with_normalized_path(admission_middleware.refuse, root_path),
            admission_middleware.is_full,
            takes_web_socket(sockets or {}, root_path),
        ),
        inner,
    )


def _path_hint(request: Request) -> str:
    """Returns the end of an error text that has a remedy or suggests a served path; empty if none is similar."""
    if known := remedy(request.url.path):
        return f"; {known}"
    routes = request.app.routes
    meant = suggest_path(request.url.path, paths(routes), lambda path: is_served(routes, path))
    return f"; did you mean {meant}?" if meant else ""


def _install_errors(app: FastAPI, dialects: Dialects) -> None:
    """Installs handlers that format every error as the clients of its path expect."""

    async def on_quire_error(request: Request, error: Exception) -> Response:
        """Answers a QuireError in the format and with the field names of the path's dialect, and notes it in the
        call."""
        assert isinstance(error, QuireError)
        request.scope[CALL].error = error
        path = request.url.path
        return dialects.refusal(path, dialects.in_client_terms(path, error))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        """Answers a body or query that pydantic refuses, in the format of the path's dialect, and notes the error in
        the call."""
        assert isinstance(error, RequestValidationError)
        request.scope[CALL].error = invalid = as_invalid_argument(error)
        return dialects.refusal(request.url.path, invalid)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        """Answers an unknown path, with a similar path as a hint, or a method that the path does not have, with
        Allow."""
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:  # a route lists only the methods of its own entry
            headers["Allow"] = ", ".join(methods(request.app.routes, request.scope))
        detail = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == HTTPStatus.NOT_FOUND:
            detail += _path_hint(request)
        answer = dialects.status(request.url.path, error.status_code, detail)
        answer.headers.update(headers)
        return answer

    async def on_fault(request: Request, _: Exception) -> Response:
        """Answers an internal error; the exception propagates and is logged with its call."""
        return dialects.refusal(request.url.path, Internal("internal error"))

    app.add_exception_handler(QuireError, on_quire_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_fault)
